"""Attention: four ways to compute it, which all give the same result, and the choice between them.

- `attend_fused`: PyTorch's fused kernel, O(T) memory, for encodings without `scores` or with `fold`.
- `attend_in_blocks`: an explicit softmax, block by block of query rows, for all others.
- `attend_in_parts`: several of those, over keys of their own, in one softmax: methods of --extend.
- runtime/flex.py: FlexAttention on CUDA, where `model.flex` asks for it.

Legend: B batch, T time (Tq queries, Tk keys), H heads of queries, G of keys and values, D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from positions import At, Encoding
from positions.contract import Part, for_each_head
from runtime import flex
from runtime.gradients import RoundedSoftmax

MAX_BLOCK = 2**22       # explicit logits held at a time on a CPU: 16 MB in fp32, about the size of the cache
MAX_BLOCK_GPU = 2**28   # on other devices: 1 GB; at usual lengths all of them at once, in few large kernels
FUSE_FROM = 1024        # queries: with fewer, folded biases and bfloat16 training use blocks on a CPU
MIN_ROWS = 256          # smallest number of queries that share the keys of a window
RECOMPUTE_FROM = 2048   # queries: from here on training does not keep explicit weights: O(T) memory


class Mask(NamedTuple):
    """Which keys a query sees: those up to its own index, within its window, its chunk and its document."""

    is_causal: bool = True
    window: int | None = None  # number of keys that a query sees, its own included; None: no limit
    chunk: int | None = None  # size of the chunks, of a row or document, that see only themselves
    documents: Tensor | None = None  # the document of each packed token, (B, T)
    in_order: bool = False  # positions are known to grow with the index, which `fold` needs
    # (window, chunk) -> the same mask for FlexAttention, where it may be used
    flex: dict[tuple[int | None, int | None], Any] = {}

    def limit(self, Tk: int) -> int | None:
        """The most keys that a query sees by its window and its chunk, if that is fewer than Tk."""
        most = min(self.window or Tk, self.chunk or Tk)         # torch.compile takes no min of a generator
        return most if most < Tk else None


def attend(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, at: At, mask: Mask, dropout: float) -> Tensor:
    """softmax(encoding(q k^T / sqrt(D))) v. Unrotated q (B, H, Tq, D), k and v (B, G, Tk, D) -> as q."""
    limits = mask.window, mask.chunk
    if limits in mask.flex and mask.is_causal and not dropout:
        is_masked = any(limits) or mask.documents is not None
        if flex.serves(q, encoding, is_masked):
            return flex.attend_flex(q, k, v, encoding, at, mask.flex[limits])
    is_whole = mask.is_causal and mask.in_order and q.shape[2] == k.shape[2] and mask.documents is None
    if is_whole and mask.limit(k.shape[2]) is None and not dropout:
        parts = encoding.parts(q, k, at)
        if parts is not None:
            return attend_in_parts(parts, v, q.shape[-1])
    is_short = q.device.type == "cpu" and q.shape[2] < FUSE_FROM
    if encoding.changes_logits():
        can_fold = encoding.can_fold and not encoding.tau
        is_fused = can_fold and mask.is_causal and mask.in_order and not is_short
    else:   # except in short bfloat16 training on a CPU, where blocks are faster although they round logits
        is_fused = not (is_short and q.dtype == torch.bfloat16 and torch.is_grad_enabled())
    path = attend_fused if is_fused else attend_in_blocks
    return path(q, k, v, encoding, at, mask, dropout)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, at: At, mask: Mask,
                 dropout: float) -> Tensor:
    """PyTorch's fused kernel, O(T) memory. Arguments and result as in `attend`."""
    D, Tq, Tk = q.shape[-1], q.shape[2], k.shape[2]
    q, k = encoding.rotate(q, k, at)                                    # (B, H or G, T, D or wider)
    k, v = (for_each_head(x, q.shape[1]) for x in (k, v))
    limit, is_cut = mask.limit(Tk), encoding.folds_sums and Tq > MIN_ROWS
    if encoding.can_fold and not is_cut:
        q, k = encoding.fold(q, k, at)
    v = as_wide_as(q, v)
    kernel = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=D**-0.5)
    if limit is None and mask.documents is None and Tq in (1, Tk) and not is_cut:
        # a single query is the last: it sees all
        return kernel(q, k, v, is_causal=mask.is_causal and Tq > 1)[..., :D]

    def attend_rows(rows: slice, keys: slice) -> Tensor:
        q_rows, k_seen, v_seen = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        if is_cut:
            q_rows, k_seen = encoding.fold(q_rows, k_seen, at.block(rows, keys))
            v_seen = as_wide_as(q_rows, v_seen)
        return kernel(q_rows, k_seen, v_seen, visible(rows, keys, Tk - Tq, mask, q.device))[..., :D]

    n_rows = MIN_ROWS if is_cut else max(limit, MIN_ROWS) if limit else Tq
    if Tq < Tk:     # its mask is explicit: in blocks, it and the products cost no more than what is seen
        n_rows = min(n_rows, max(MIN_ROWS, (MAX_BLOCK if q.device.type == "cpu" else MAX_BLOCK_GPU) // Tk))
    # else each block's mask is kept
    return joined(attend_rows, row_blocks(Tq, Tk, n_rows, mask), is_cut and Tq >= RECOMPUTE_FROM, dropout)


def as_wide_as(q: Tensor, v: Tensor) -> Tensor:
    """Values with zeros appended: with unequal widths PyTorch falls back to a path with T x T logits."""
    return v if v.shape[-1] == q.shape[-1] else F.pad(v, (0, q.shape[-1] - v.shape[-1]))


def joined(attend_rows: Callable[[slice, slice], Tensor], blocks: Iterator[tuple[slice, slice]],
           is_recomputed: bool, dropout: float) -> Tensor:
    """attend_rows of all blocks; if `is_recomputed`, training keeps nothing of them for the backward pass."""
    if is_recomputed and torch.is_grad_enabled():
        attend_rows = partial(checkpoint, attend_rows, use_reentrant=False, preserve_rng_state=dropout > 0)
    return torch.cat([attend_rows(*block) for block in blocks], dim=2)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, at: At, mask: Mask,
                     dropout: float) -> Tensor:
    """Explicit softmax in blocks of query rows: T x T logits never exist at once. As in `attend`.

    Training on long sequences does not keep the weights of the blocks, but computes them again in the
    backward pass, as fused kernels do: it takes O(T) memory, and their products and softmax twice.
    """
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    n_each = 2 if encoding.changes_logits() else 1      # it holds more numbers per logit
    limit = MAX_BLOCK // n_each if q.device.type == "cpu" else MAX_BLOCK_GPU
    is_consecutive = mask.in_order and Tq == Tk                         # no cache, which may have gaps
    n_rows = math.ceil(Tq / math.ceil(Tq / max(1, limit // (B * H * Tk))))      # blocks of equal size
    q_rotated, k_rotated = encoding.rotate(q, k, at)                    # (B, H or G, T, D or wider)
    k_rotated, k, v = (for_each_head(x, H) for x in (k_rotated, k, v))

    def attend_rows(rows: slice, columns: slice) -> Tensor:
        seen = visible(rows, columns, Tk - Tq, mask, q.device)
        logits = q_rotated[:, :, rows] @ k_rotated[:, :, columns].mT    # (B, H, rows, columns)
        unseen = torch.zeros(1, device=q.device) if seen is None else torch.where(seen, 0.0, -torch.inf)
        if encoding.changes_logits():
            logits = torch.add(unseen, logits, alpha=D**-0.5)           # masked, scaled and fp32, in one pass
            place = at.block(rows, columns, is_consecutive)
            logits = encoding.final_logits(logits, q[:, :, rows], k[:, :, columns], place)
            weights = RoundedSoftmax.apply(logits, None, 1.0, v.dtype)
        else:
            weights = RoundedSoftmax.apply(logits, unseen, D**-0.5, v.dtype)
        if dropout:
            weights = F.dropout(weights, dropout)
        return weights @ v[:, :, columns]                               # (B, H, rows, D)

    # else all blocks' weights are kept
    return joined(attend_rows, row_blocks(Tq, Tk, n_rows, mask), Tq >= RECOMPUTE_FROM, dropout)


def attend_in_parts(parts: list[Part], v: Tensor, D: int) -> Tensor:
    """The softmax over the pairs of all parts, from that of each and its normaliser. v as in `attend`."""
    H, T = parts[0].q.shape[1:3]
    v, blocks = for_each_head(v, H), []
    parts = [part._replace(k=for_each_head(part.k, H)) for part in parts]
    for rows in (slice(start, min(start + MIN_ROWS, T)) for start in range(0, T, MIN_ROWS)):
        results = []
        for part in parts:
            first, end = part.first[rows, None], part.end[rows, None]   # (rows, 1)
            inner = int(first.max()), int(end.min())                    # keys that every row sees
            for keys in starmap(slice, pairwise(sorted({int(first.min()), *inner, int(end.max())}))):
                is_blind, seen = torch.zeros_like(first, dtype=torch.bool), None    # (rows, 1)
                if (keys.start, keys.stop) != inner:
                    n = torch.arange(keys.start, keys.stop, device=v.device)
                    seen = (n >= first) & (n < end)                     # (rows, keys)
                    is_blind = ~seen.any(1, keepdim=True)
                    if is_blind.all():
                        continue
                    seen |= is_blind                                    # a row without a key would make NaN
                y, normaliser = softmax_and_normaliser(part.q[:, :, rows], part.k[:, :, keys], v[:, :, keys],
                                                       seen, D**-0.5)
                results.append((y, normaliser.masked_fill(is_blind[:, 0], -torch.inf)))
        weights = torch.stack([normaliser for _, normaliser in results]).softmax(0)[..., None]
        merged = sum(weight * y for weight, (y, _) in zip(weights, results, strict=True))
        blocks.append(merged.to(v.dtype))
    return torch.cat(blocks, dim=2)


def softmax_and_normaliser(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None,
                           scale: float) -> tuple[Tensor, Tensor]:
    """Attention (B, H, rows, D) to keys that are `seen` (rows, keys), and log of the sum of exp(logits)."""
    D, unseen = v.shape[-1], None if seen is None else torch.where(seen, 0.0, -torch.inf)
    if q.device.type == "cpu" and not torch.is_grad_enabled():
        y, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, as_wide_as(q, v), scale=scale,
            attn_mask=None if unseen is None else unseen.to(q.dtype)[None, None])
        return y[..., :D], normaliser
    logits = torch.add(torch.zeros(1, device=q.device) if unseen is None else unseen, q @ k.mT, alpha=scale)
    return logits.softmax(-1).to(v.dtype) @ v, logits.logsumexp(-1)


def row_blocks(Tq: int, Tk: int, n_rows: int, mask: Mask) -> Iterator[tuple[slice, slice]]:
    """Blocks of n_rows queries: their rows, and the slice of keys that any of them can see.

    The queries are the last Tq of the Tk tokens.
    """
    offset, window, chunk = Tk - Tq, mask.window or Tk, mask.chunk or Tk
    for start in range(0, Tq, n_rows):
        rows, keys = slice(start, min(start + n_rows, Tq)), slice(0, Tk)
        if mask.is_causal:
            first = offset + start
            start_of_chunk = first // chunk * chunk if mask.documents is None else first + 1 - chunk
            keys = slice(max(0, first + 1 - window, start_of_chunk), offset + rows.stop)
        yield rows, keys


def visible(rows: slice, keys: slice, offset: int, mask: Mask, device: torch.device) -> Tensor | None:
    """Which of the keys each query of a block sees, boolean (..., rows, keys). None: every query sees all."""
    seen, window, documents = None, mask.window, mask.documents
    if mask.is_causal:
        i = torch.arange(offset + rows.start, offset + rows.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)
        seen = (j <= i) & (j > i - window) if window else j <= i        # (rows, keys)
        if mask.chunk and documents is not None:
            documents = flex.split_into_chunks(documents, mask.chunk)
        elif mask.chunk:
            seen = seen & (j // mask.chunk == i // mask.chunk)
    if documents is not None:
        same = documents[:, None, rows, None] == documents[:, None, None, keys]
        seen = same if seen is None else same & seen                    # (B, 1, rows, keys)
    return seen
