"""Attention: softmax(q k^T / sqrt(D) + bias) v in three ways, which all give the same result.

- `attend_fused`: PyTorch's fused kernel, for encodings without `scores`, or whose scores fold into further
  channels of q and k (ALiBi, forgetting). O(T) memory, but for the mask of packed documents.
- `attend_in_blocks`: an explicit softmax, block by block of query rows, for all others.
- runtime/flex.py: FlexAttention on CUDA, where `model.flex` asks for it.

Legend: B batch, T time (Tq queries, Tk keys), H heads of queries, G of keys and values, D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from positions import At, Encoding
from positions.bias import ToeplitzBias, bias_at, toeplitz_distances
from positions.contract import for_each_head
from runtime import flex

MAX_BLOCK = 2**22       # explicit logits held at a time on a CPU: 16 MB in fp32, about the size of the cache
MAX_BLOCK_GPU = 2**28   # on other devices: 1 GB; at usual lengths all of them at once, in few large kernels
FUSE_FROM = 1024        # queries: with fewer, folded biases and bfloat16 training use blocks on a CPU
MIN_ROWS = 256          # smallest number of queries that share the keys of a window
RECOMPUTE_FROM = 2048   # queries: from here on training does not keep explicit weights: O(T) memory


class Mask(NamedTuple):
    """Which keys a query sees: those up to its own index, within its window, its chunk and its document."""

    window: int | None = None  # number of keys that a query sees, its own included; None: no limit
    chunk: int | None = None  # size of the chunks, of a row or document, that see only themselves
    documents: Tensor | None = None  # the document of each packed token, (B, T)
    in_order: bool = False  # positions are known to be 0, 1, 2 ... or those that follow the cache's
    # (window, chunk) -> the same mask for FlexAttention, where it may be used
    flex: dict[tuple[int | None, int | None], Any] = {}

    def limit(self, Tk: int) -> int | None:
        """The most keys that a query sees by its window and its chunk, if that is fewer than Tk."""
        most = min(self.window or Tk, self.chunk or Tk)         # torch.compile takes no min of a generator
        return most if most < Tk else None


class Bias(NamedTuple):
    """What changes the logits: an encoding with `scores`, and what these get."""

    encoding: Encoding
    q: Tensor  # not rotated, (B, H, Tq, D)
    k: Tensor  # not rotated, (B, G or H, Tk, D)
    at: At


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None = None,
           dropout: float = 0.0, sink: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v.

    Rotated q (B, H, Tq, D or wider), k (B, G, Tk, as wide) and v (B, G, Tk, D) -> (B, H, Tq, D). `sink`
    (1 or B, H, 1 or Tq, 1) is the logit of one more key, whose value is zero.
    """
    limits = mask.window, mask.chunk
    if limits in mask.flex and not dropout and sink is None:
        is_masked = any(limits) or mask.documents is not None
        if flex.serves(v, bias and bias.encoding, is_masked):
            return flex.attend_flex(q, k, v, bias, mask.flex[limits])
    is_short = q.device.type == "cpu" and q.shape[2] < FUSE_FROM
    if bias is not None:
        can_fold = getattr(bias.encoding, "can_fold", False)            # of ALiBi and Forgetting alone
        is_fused = can_fold and mask.in_order and not is_short and sink is None
    else:   # except in short bfloat16 training on a CPU, where blocks are faster although they round logits
        is_fused = not (is_short and q.dtype == torch.bfloat16 and torch.is_grad_enabled())
    path = attend_fused if is_fused else attend_in_blocks
    return path(q, k, v, mask, bias, dropout, sink)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None = None,
                 dropout: float = 0.0, sink: Tensor | None = None) -> Tensor:
    """PyTorch's fused kernel, O(T) memory. Arguments and result as in `attend`."""
    D, Tq, Tk = v.shape[-1], q.shape[2], k.shape[2]
    encoding: Any = None if bias is None else bias.encoding             # with `fold` and `folds_sums`
    if v.shape[1] < q.shape[1]:
        k, v = (for_each_head(x, q.shape[1]) for x in (k, v))
    is_cut = bias is not None and encoding.folds_sums and Tq > MIN_ROWS     # long sums lose digits
    if bias is not None and not is_cut:
        q, k = encoding.fold(q, k, bias.at)
    if sink is not None:
        q, k, with_sink = add_sink(q, k, sink * D**0.5)
    v, limit = as_wide_as(q, v), mask.limit(Tk)
    kernel = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=D**-0.5)
    if limit is None and mask.documents is None and Tq in (1, Tk) and not is_cut:
        if sink is not None:    # a first query too, so that the causal mask begins with it and the sink
            k, v = with_sink(k, v)
            q = q if Tq == 1 else F.pad(q, (0, 0, 1, 0))
        # a single query is the last: it sees all
        return kernel(q, k, v, is_causal=Tq > 1)[:, :, -Tq:, :D]

    def attend_rows(rows: slice, keys: slice) -> Tensor:
        q_rows, k_seen, v_seen = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        if bias is not None and is_cut:
            q_rows, k_seen = encoding.fold(q_rows, k_seen, bias.at.block(rows, keys))
            v_seen = as_wide_as(q_rows, v_seen)
        seen = visible(rows, keys, Tk - Tq, mask, q.device)
        if sink is not None:
            k_seen, v_seen = with_sink(k_seen, v_seen)
            seen = F.pad(seen, (1, 0), value=True)
        return kernel(q_rows, k_seen, v_seen, seen)[..., :D]

    n_rows = MIN_ROWS if is_cut else max(limit, MIN_ROWS) if limit else Tq
    if Tq < Tk:     # its mask is explicit: in blocks, it and the products cost no more than what is seen
        n_rows = min(n_rows, max(MIN_ROWS, (MAX_BLOCK if q.device.type == "cpu" else MAX_BLOCK_GPU) // Tk))
    # recomputed: otherwise each block's mask would be kept
    return by_rows(attend_rows, Tq, Tk, n_rows, mask, is_cut and Tq >= RECOMPUTE_FROM, dropout)


def add_sink(q: Tensor, k: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Callable[..., Any]]:
    """Add a channel to q and k; also returns what puts a key with 1 there, and zero value, before the others.

    The channel of q holds the sink, times sqrt(D), so this key has it as its logit. More zeros keep the width
    a multiple of 8, which kernels want.
    """
    B, H, _, width = q.shape
    n = 8 - width % 8
    q = torch.cat((q, F.pad(sink.to(q.dtype).expand(B, H, q.shape[2], 1), (0, n - 1))), dim=-1)
    key = F.pad(q.new_ones(B, H, 1, 1), (width, n - 1))

    def with_sink(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((key, k), dim=2), F.pad(v, (0, 0, 1, 0))

    return q, F.pad(k, (0, n)), with_sink


def as_wide_as(q: Tensor, v: Tensor) -> Tensor:
    """Values with zeros appended: with unequal widths PyTorch falls back to a path with T x T logits."""
    return v if v.shape[-1] == q.shape[-1] else F.pad(v, (0, q.shape[-1] - v.shape[-1]))


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None = None,
                     dropout: float = 0.0, sink: Tensor | None = None) -> Tensor:
    """Explicit softmax in blocks of query rows: T x T logits never exist at once.

    Arguments and result as in `attend`.

    Training on long sequences does not keep the weights of the blocks, but computes them again in the
    backward pass, as fused kernels do: it takes O(T) memory, and their products and softmax twice.
    """
    B, H, Tq = q.shape[:3]
    Tk, scale = k.shape[2], v.shape[-1]**-0.5
    n_each = 1 if bias is None else 2                                   # `scores` hold more numbers per logit
    limit = MAX_BLOCK // n_each if q.device.type == "cpu" else MAX_BLOCK_GPU
    n_rows = math.ceil(Tq / math.ceil(Tq / max(1, limit // (B * H * Tk))))      # blocks of equal size
    if v.shape[1] < H:
        k, v = (for_each_head(x, H) for x in (k, v))
    if bias is not None:
        bias = bias._replace(k=for_each_head(bias.k, H))

    def attend_rows(rows: slice, keys: slice) -> Tensor:
        unseen = torch.where(visible(rows, keys, Tk - Tq, mask, q.device), 0.0, -torch.inf)
        logits = q[:, :, rows] @ k[:, :, keys].mT                       # (B, H, rows, keys)
        logits = torch.add(unseen, logits, alpha=scale)                 # masked, scaled and fp32, in one pass
        if bias is not None:
            is_consecutive = mask.in_order and Tq == Tk                 # no cache, which may have gaps
            logits = scored(logits, bias, rows, keys, is_consecutive)
        weights = logits.softmax(dim=-1)
        if sink is not None:                    # the softmax with one more logit, whose weight is left out
            weights = weights * torch.sigmoid(logits.logsumexp(dim=-1, keepdim=True) - sink.expand(
                -1, -1, Tq, -1)[:, :, rows])
        weights = weights.to(v.dtype)
        if dropout:
            weights = F.dropout(weights, dropout)
        return weights @ v[:, :, keys]                                  # (B, H, rows, D)

    # recomputed: otherwise all blocks' weights would be kept
    return by_rows(attend_rows, Tq, Tk, n_rows, mask, Tq >= RECOMPUTE_FROM, dropout)


def scored(logits: Tensor, bias: Bias, rows: slice, keys: slice, is_consecutive: bool) -> Tensor:
    """Logits (B, H, rows, keys) of a block after `scores`."""
    encoding, at = bias.encoding, bias.at.block(rows, keys, is_consecutive)
    q, k = bias.q[:, :, rows], bias.k[:, :, keys]
    if encoding.by_distance and is_consecutive and at.temperature is None:
        of_distance = bias_at(encoding, toeplitz_distances(at), q, at)      # (H, P), each distance once
        return logits + ToeplitzBias.apply(of_distance, logits.shape[2])
    return encoding.scores(logits, q, k, at)


def by_rows(attend_rows: Callable[[slice, slice], Tensor], Tq: int, Tk: int, n_rows: int, mask: Mask,
            is_recomputed: bool, dropout: float) -> Tensor:
    """attend_rows of blocks of n_rows queries, each with the slice of keys that any of them can see.

    The queries are the last Tq of the Tk tokens. If `is_recomputed`, training keeps nothing of the blocks for
    the backward pass.
    """
    if is_recomputed and torch.is_grad_enabled():
        attend_rows = partial(checkpoint, attend_rows, use_reentrant=False, preserve_rng_state=dropout > 0)
    window, chunk, blocks = mask.window or Tk, mask.chunk or Tk, []
    for start in range(0, Tq, n_rows):
        rows, first = slice(start, min(start + n_rows, Tq)), Tk - Tq + start
        start_of_chunk = first // chunk * chunk if mask.documents is None else first + 1 - chunk
        keys = slice(max(0, first + 1 - window, start_of_chunk), Tk - Tq + rows.stop)
        blocks.append(attend_rows(rows, keys))
    return torch.cat(blocks, dim=2)


def visible(rows: slice, keys: slice, offset: int, mask: Mask, device: torch.device) -> Tensor:
    """Which of the keys each query of a block sees, (rows, keys), or with documents (B, 1, rows, keys)."""
    window, documents = mask.window, mask.documents
    i = torch.arange(offset + rows.start, offset + rows.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    seen = (j <= i) & (j > i - window) if window else j <= i
    if documents is None:
        return seen & (j // mask.chunk == i // mask.chunk) if mask.chunk else seen
    if mask.chunk:
        documents = flex.split_into_chunks(documents, mask.chunk)
    return seen & (documents[:, None, rows, None] == documents[:, None, None, keys])
