"""How attention is computed: the ways there are, one result, and which of them serves an encoding best.

Legend: B batch, T time (Tq queries, Tk keys), H heads of queries, G of keys and values, D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from positions import At, Encoding
from runtime import flex

# logits held at a time where they are explicit
MAX_BLOCK = 2**22       # on a CPU: 16 MB in fp32, near the cache
MAX_BLOCK_GPU = 2**28   # elsewhere: 1 GB; at usual lengths all at once, in few large kernels
FUSE_FROM = 1024        # queries; with fewer, blocks are faster on a CPU than the fused kernel
MIN_ROWS = 256          # queries that share a window's keys


def attend(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, at: At, is_causal: bool,
           window: int | None, dropout: float) -> Tensor:
    """softmax(encoding(q k^T / sqrt(D))) v, of unrotated q (B, H, Tq, D), k and v (B, G, Tk, D): like q."""
    if flex.serves(q, encoding, at, is_causal, window, dropout):
        return flex.attend_flex(q, k, v, encoding, at)
    is_short = q.device.type == "cpu" and q.shape[2] < FUSE_FROM
    if encoding.has_scores():
        is_fused = encoding.can_fold and is_causal and at.in_order and not is_short
    else:   # in bfloat16 the kernel's backward is slow; blocks round logits to it, which evaluation is spared
        is_fused = not (is_short and q.dtype == torch.bfloat16 and torch.is_grad_enabled())
    way = attend_fused if is_fused else attend_in_blocks
    return way(q, k, v, encoding, at, is_causal, window, dropout)


def for_each_head(x: Tensor, n_head: int) -> Tensor:
    """Keys or values (B, G, T, D) -> (B, H, T, D): head h of the queries has number h // (H / G).

    Copies, since not every kernel takes fewer heads of keys, and one that does not would hold T x T logits.
    """
    return x if x.shape[1] == n_head else x.repeat_interleave(n_head // x.shape[1], dim=1)


def row_blocks(Tq: int, Tk: int, n_rows: int, is_causal: bool, window: int | None,
               device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Blocks of n_rows queries: which, the keys they may see, and where (True) among these, (rows, keys).

    The queries are the last Tq of the Tk. Each sees the keys up to its own index, at most `window` of them
    counting its own; keys that no query of a block sees are not in it.
    """
    offset = Tk - Tq
    for start in range(0, Tq, n_rows):
        rows = slice(start, min(start + n_rows, Tq))
        if not is_causal:
            yield rows, slice(0, Tk), None
            continue
        keys = slice(max(0, offset + start + 1 - window) if window else 0, offset + rows.stop)
        i = torch.arange(offset + start, keys.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)
        yield rows, keys, (j <= i) & (j > i - window) if window else j <= i


def within_documents(mask: Tensor | None, documents: Tensor | None, rows: slice,
                     keys: slice) -> Tensor | None:
    """A block's mask, of which only keys in the query's own document are left. -> (B, 1, rows, keys)."""
    if documents is None:
        return mask
    same = documents[:, None, rows, None] == documents[:, None, None, keys]
    return same if mask is None else same & mask


def attend_fused(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, at: At, is_causal: bool,
                 window: int | None, dropout: float) -> Tensor:
    """The fused kernel, O(T) memory, for encodings that leave the logits alone or fold. -> (B, H, Tq, D)."""
    D, Tq, Tk = q.shape[-1], q.shape[2], k.shape[2]
    q, k = encoding.rotate(q, k, at)
    if encoding.can_fold:
        q, k = encoding.fold(q, k, at)                                  # (B, H, T, D + extra) each
        v = F.pad(v, (0, q.shape[-1] - D))                              # the kernel wants equal widths
    k, v = (for_each_head(x, q.shape[1]) for x in (k, v))
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=D**-0.5)
    if window is None or window >= Tk:
        if Tq in (1, Tk) and at.documents is None:                      # one query: the last, it sees all
            return attend(q, k, v, is_causal=is_causal and Tq > 1)[..., :D]
        window = None
    blocks = row_blocks(Tq, Tk, max(window, MIN_ROWS) if window else Tq, is_causal, window, q.device)
    return torch.cat([attend(q[:, :, rows], k[:, :, keys], v[:, :, keys],
                             within_documents(mask, at.documents, rows, keys))[..., :D]
                      for rows, keys, mask in blocks], dim=2)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, at: At, is_causal: bool,
                     window: int | None, dropout: float) -> Tensor:
    """Explicit softmax in blocks of query rows: T x T logits never exist at once. -> (B, H, Tq, D)."""
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    n_each = 2 if encoding.has_scores() else 1                          # such hold more numbers a logit
    limit = MAX_BLOCK // n_each if q.device.type == "cpu" else MAX_BLOCK_GPU
    n_blocks = math.ceil(Tq / max(1, limit // (B * H * Tk)))
    n_rows = math.ceil(Tq / n_blocks)                                   # blocks of one size
    q_turned, k_turned = encoding.rotate(q, k, at)
    k_turned, k, v = (for_each_head(x, H) for x in (k_turned, k, v))
    outputs = []
    for rows, keys, mask in row_blocks(Tq, Tk, n_rows, is_causal, window, q.device):
        logits = q_turned[:, :, rows] @ k_turned[:, :, keys].mT         # (B, H, rows, keys)
        mask = within_documents(mask, at.documents, rows, keys)
        unseen = torch.zeros(1, device=q.device) if mask is None else torch.where(mask, 0.0, -torch.inf)
        logits = torch.add(unseen, logits, alpha=D**-0.5)               # masked, scaled, fp32: in one pass
        features = at.features[:, :, keys] if at.features is not None else None
        block_at = at._replace(q_pos=at.q_pos[:, rows], k_pos=at.k_pos[:, keys], features=features)
        logits = encoding.scores(logits, q[:, :, rows], k[:, :, keys], block_at)
        weights = logits.softmax(dim=-1).to(v.dtype)
        if dropout:
            weights = F.dropout(weights, dropout)
        outputs.append(weights @ v[:, :, keys])                         # (B, H, rows, D)
    return torch.cat(outputs, dim=2)
