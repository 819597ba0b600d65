"""FlexAttention: windows, packed documents and what depends on distance in one fused kernel, O(T) memory.

For CUDA; set `model.flex = true` to use it. On other devices, and for encodings it does not serve,
attention.py takes another path.

Legend: B batch, T time, H heads of queries, G of keys and values, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from positions import Encoding
from positions.bias import bias_at
from positions.contract import for_each_head, starts_of
from positions.switches import ScaleInvariant, factor_and_bias

DEVICES = {"cuda"}      # on a CPU the kernel has no backward pass, and uncompiled it holds T x T logits
Limits = tuple[int | None, int | None]      # window and chunk of a layer
MIN_WIDTH = 16          # smallest number of channels of a head that the kernel takes
compiled = cache(torch.compile)     # each function once
# with the default of three stages, what score_mod reads does not fit into the shared memory of an H100
OPTIONS = {"num_stages": 2}


def block_masks(limits: set[Limits], T: int, documents: Tensor | None,
                device: torch.device) -> dict[Limits, Any]:
    """Limits -> which blocks of keys each block of queries sees. Made once per forward pass, not layer."""
    B = None if documents is None else len(documents)
    make = fused("create_block_mask", device)                           # which does not hold T x T either
    return {each: make(seen(*each, documents), B, None, T, T, device) for each in limits}


def seen(window: int | None, chunk: int | None, documents: Tensor | None) -> Callable[..., Tensor]:
    """The mask function: whether query i of row b sees key j by window, chunk and document."""
    if documents is not None and chunk:
        documents, chunk = split_into_chunks(documents, chunk), None

    def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = j <= i
        if window:
            mask = mask & (i - j < window)
        if chunk:
            mask = mask & (i // chunk == j // chunk)
        return mask if documents is None else mask & (documents[b, i] == documents[b, j])

    return is_seen


def split_into_chunks(documents: Tensor, chunk: int) -> Tensor:
    """The chunk of each token (B, T), of packed documents (B, T): each document's chunks begin with it."""
    index = torch.arange(documents.shape[1], device=documents.device)
    return ((index - starts_of(documents)) % chunk == 0).cumsum(dim=1)


def serves(v: Tensor, encoding: Encoding | None, is_masked: bool) -> bool:
    """Whether the kernel applies and is worth it: a bias by distance, or a mask that is not only causal."""
    if isinstance(encoding, ScaleInvariant):
        encoding, is_masked = encoding.inner if encoding.inner.has_scores() else None, True
    return v.shape[-1] >= MIN_WIDTH and (is_masked if encoding is None else encoding.by_distance)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, bias: Any, block_mask: Any) -> Tensor:
    """As `attend` in attention.py, whose Bias, or None, is the bias."""
    score_mod = None
    if bias is not None:
        encoding, at, T = bias.encoding, bias.at, q.shape[2]
        table = temperature = a = m = None
        if isinstance(encoding, ScaleInvariant):
            distance = torch.arange(T, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
            a, m = factor_and_bias(distance, encoding.tau)              # (T,) each
            encoding = encoding.inner
        if encoding.has_scores():
            table = bias_at(encoding, torch.arange(T, device=q.device), bias.q, at)     # (H, T)
            if at.temperature is not None:
                temperature = at.temperature[..., 0].expand(*q.shape[:2], -1)           # (B, H, T)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            d = (i - j).abs()                                           # keys ahead are masked
            score = score if table is None else score + table[h, d]
            score = score if temperature is None else score * temperature[b, h, i]
            return score if a is None or m is None else score * a[d] + m[d]

    v = for_each_head(v, k.shape[1])            # a rotation may have made keys for each head of queries
    return fused("flex_attention", q.device)(
        q, k, v, score_mod=score_mod, block_mask=block_mask, scale=v.shape[-1]**-0.5,
        enable_gqa=q.shape[1] != k.shape[1], kernel_options=None if bias is None else OPTIONS)


def fused(name: str, device: torch.device) -> Callable[..., Any]:
    """A function of PyTorch's flex_attention; on a GPU compiled: with the whole model, or else once here."""
    function = getattr(flex_attention, name)
    return function if device.type == "cpu" or torch.compiler.is_compiling() else compiled(function)
