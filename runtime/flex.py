"""FlexAttention: windows, packed documents and biases by distance in one fused kernel, O(T) memory, on CUDA.

`model.flex = true` asks for it. Elsewhere, and for what it does not serve, attention.py goes its other ways.

Legend: B batch, T time, H heads of queries, G of keys and values, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from positions import At, Encoding

DEVICES = {"cuda"}      # a CPU has no backward of the kernel, and without compiling it holds T x T logits
MIN_WIDTH = 16          # channels of a head, of the kernel


def block_masks(windows: Iterable[int | None], T: int, documents: Tensor | None,
                device: torch.device) -> dict[int | None, Any]:
    """For each window, which keys are seen, by blocks of queries and keys. Once a forward, not a layer."""
    from torch.nn.attention.flex_attention import create_block_mask

    B = None if documents is None else len(documents)
    # compiled, it does not hold T x T either; within torch.compile it is
    is_alone = device.type == "cuda" and not torch.compiler.is_compiling()
    return {window: create_block_mask(seen(window or T, documents), B, None, T, T, device, _compile=is_alone)
            for window in set(windows)}


def seen(width: int, documents: Tensor | None) -> Callable[..., Tensor]:
    """Whether query i of row b sees key j: at its own index or at most width - 1 before, in its document."""
    def within_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < width)

    def within_both(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert documents is not None
        return (j <= i) & (i - j < width) & (documents[b, i] == documents[b, j])

    return within_window if documents is None else within_both


def serves(q: Tensor, encoding: Encoding, at: At, is_causal: bool, window: int | None,
           dropout: float) -> bool:
    """Whether it can, and has something to win: a bias, a window, or documents."""
    has_more = encoding.by_distance if encoding.has_scores() else bool(window) or at.documents is not None
    return at.block_mask is not None and has_more and is_causal and not dropout and q.shape[-1] >= MIN_WIDTH


def attend_flex(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, at: At) -> Tensor:
    """softmax(encoding(q k^T / sqrt(D))) v, of unrotated q (B, H, T, D), k and v (B, G, T, D): like q."""
    score_mod = None
    if encoding.has_scores():
        table = bias_by_distance(encoding, at, q)                       # (H, T)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + table[h, (i - j).abs()]                      # keys ahead are masked

    D, is_grouped = q.shape[-1], q.shape[1] != k.shape[1]
    q, k = encoding.rotate(q, k, at)
    return kernel(q.device)(q, k, v, score_mod=score_mod, block_mask=at.block_mask, scale=D**-0.5,
                            enable_gqa=is_grouped)


def bias_by_distance(encoding: Encoding, at: At, q: Tensor) -> Tensor:
    """What `scores` adds at distances 0 ... T - 1, (H, T): asked of the last query and all its keys."""
    _, H, T, D = q.shape
    zero = q.new_zeros(())
    position = torch.arange(T, device=q.device)[None]                   # (1, T)
    logits = torch.zeros(1, H, 1, T, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
    row = at._replace(q_pos=position[:, -1:], k_pos=position, documents=None)
    bias = encoding.scores(logits, zero.expand(1, H, 1, D), zero.expand(1, H, T, D), row)
    return bias[0, :, 0].flip(-1)


def kernel(device: torch.device) -> Any:
    """FlexAttention, compiled where it is to be fused: by torch.compile of the model, or else here, once."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device.type == "cpu" or torch.compiler.is_compiling() else compiled()


@cache
def compiled() -> Any:
    """The fused kernel for use outside of torch.compile."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
