"""Attention: softmax(scores(q k^T / sqrt(D))) v on three paths, which give the same result up to rounding.

- `attend_fused`: PyTorch's fused kernel, where the logits are products of q and k. Some biases become such
  products (`fold`: ALiBi, forgetting). O(T) memory, except for the mask of packed documents.
- `attend_in_blocks`: an explicit softmax, block by block of queries, for everything else.
- `attend_flex`: FlexAttention on CUDA where `model.flex` asks for it, for windows, chunks, packed documents,
  a sink, biases by distance and scale-invariant attention. O(T) memory, but for the mask of blocks.

`choose_path` says which path a layer takes.

Legend: B batch, T time (Tq queries, Tk keys), H heads of queries, G of keys and values, D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from base.errors import UserError
from positions import At, Encoding
from positions.contract import for_each_head, starts_of
from positions.parts import ToeplitzBias, toeplitz_distances

FUSED, EXPLICIT, FLEX = "fused", "explicit softmax", "FlexAttention"

MOST_LOGITS = 2**22     # explicit logits held at a time on a CPU: 16 MB in fp32, about the size of the cache
MOST_LOGITS_GPU = 2**28     # on other devices: 1 GB; at usual lengths all at once, in few large kernels
FUSE_FROM = 1024        # below this many queries a CPU is faster in blocks: folded biases, bfloat16 training
MIN_QUERIES = 256       # smallest block of queries under a window, and after a cache
RECOMPUTE_FROM = 2048   # queries: from here on training does not keep explicit weights: O(T) memory

FLEX_DEVICES = {"cuda"}     # on a CPU the kernel has no backward pass, and uncompiled it holds T x T logits
FLEX_BLOCK = 128            # queries and keys of a block of its mask
FLEX_WIDTH = 16             # smallest number of channels of a head that it takes
# with the default of three stages, what score_mod reads does not fit into the shared memory of an H100
FLEX_OPTIONS = {"num_stages": 2}
compiled = cache(torch.compile)     # each function once

Locality = tuple[int | None, int | None]    # window and chunk of a layer


class Mask(NamedTuple):
    """Which keys a query sees: those up to its own index, within its window, its chunk and its document."""

    window: int | None = None  # number of keys that a query sees, its own included; None: no limit
    chunk: int | None = None  # size of the chunks, of a row or document, that see only themselves
    documents: Tensor | None = None  # the document of each packed token, (B, T)
    has_plain_positions: bool = False  # none were given: in a document they rise by 1; a cache may have gaps
    block_masks: dict[Locality, Any] = {}  # the same for FlexAttention; empty where it may not be used

    def segments(self) -> Tensor | None:
        """For each packed token (B, T) the number of its document or, with chunks, of its chunk.

        A token sees no other segment. Each document begins a new chunk.
        """
        if self.documents is None or self.chunk is None:
            return self.documents
        index = torch.arange(self.documents.shape[1], device=self.documents.device)
        is_first = (index - starts_of(self.documents)) % self.chunk == 0
        return is_first.cumsum(dim=1)


class ScoreInputs(NamedTuple):
    """An encoding that changes the logits, and what its `scores` get besides them."""

    encoding: Encoding
    q: Tensor  # not rotated, (B, H, Tq, D)
    k: Tensor  # not rotated, (B, G or H, Tk, D)
    at: At


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_inputs: ScoreInputs | None = None,
           dropout: float = 0.0, sink: Tensor | None = None) -> Tensor:
    """softmax(scores(q k^T / sqrt(D))) v, where most encodings' `scores` add a bias.

    Rotated q (B, H, Tq, D, or wider if the encoding adds channels), k (B, G or H, Tk, as wide) and v (B, G,
    Tk, D) -> (B, H, Tq, D). `sink` (H,) is the logit of one more key for each head, whose value is zero.
    """
    encoding = None if score_inputs is None else score_inputs.encoding
    path = choose_path(q.shape[2], v.shape[-1], q.dtype, q.device, mask, encoding, dropout, sink is not None)
    if path == FLEX:
        return attend_flex(q, k, v, mask, score_inputs, sink)
    if path == FUSED:
        return attend_fused(q, k, v, mask, score_inputs, dropout)
    return attend_in_blocks(q, k, v, mask, score_inputs, dropout, sink)


def choose_path(Tq: int, head_dim: int, dtype: torch.dtype, device: torch.device, mask: Mask,
                encoding: Encoding | None, dropout: float, has_sink: bool) -> str:
    """FLEX, FUSED or EXPLICIT, for Tq queries in this dtype; `encoding` is None if it has no `scores`."""
    locality = (mask.window, mask.chunk)
    if locality in mask.block_masks and head_dim >= FLEX_WIDTH and not dropout:
        is_plain_causal = locality == (None, None) and mask.documents is None and not has_sink
        if encoding is None:
            is_served = not is_plain_causal                             # the fused kernel is faster
        else:
            is_served = encoding.by_distance or encoding.scales_by_distance
        if is_served:
            return FLEX
    if has_sink:
        return EXPLICIT
    is_short = device.type == "cpu" and Tq < FUSE_FROM
    if encoding is not None:
        # given positions may fall where keys are seen: `scores` takes a negative distance for 0, `fold` does
        # not. Plain ones fall only between documents, which the mask hides
        is_folded = encoding.max_fold_queries > 0 and mask.has_plain_positions and not is_short
        return FUSED if is_folded else EXPLICIT
    # in short bfloat16 training on a CPU blocks are faster, although they round logits
    is_bf16_training = dtype == torch.bfloat16 and torch.is_grad_enabled()
    return EXPLICIT if is_short and is_bf16_training else FUSED


def may_use_flex(is_asked: bool, mask: Mask, device: torch.device) -> bool:
    """Whether FlexAttention may serve a pass without a cache; `is_asked` is model.flex."""
    return is_asked and mask.has_plain_positions and device.type in FLEX_DEVICES


def describe_paths(model: Any, mask: Mask, T: int, dtype: torch.dtype, device: torch.device) -> str:
    """The path of a model's layers in training, as text: "fused", or each with the layers that take it."""
    layers_of: dict[str, list[str]] = {}
    for layer, (block, encoding) in enumerate(zip(model.blocks, model.encodings, strict=True)):
        attention = block.attention
        layer_mask = mask._replace(window=attention.window, chunk=attention.chunk)
        if may_use_flex(model.flex, mask, device):
            layer_mask = layer_mask._replace(block_masks={(attention.window, attention.chunk): None})
        scoring = encoding if encoding.has_scores else None
        path = choose_path(T, attention.head_dim, dtype, device, layer_mask, scoring, attention.dropout,
                           attention.sink is not None)
        layers_of.setdefault(path, []).append(str(layer))
    if len(layers_of) == 1:
        return next(iter(layers_of))
    return ", ".join(f"{path} in layers {' '.join(layers)}" for path, layers in layers_of.items())


def attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_inputs: ScoreInputs | None = None,
                 dropout: float = 0.0) -> Tensor:
    """PyTorch's fused kernel, O(T) memory but for the mask of documents. Arguments, result as in `attend`."""
    H, Tq = q.shape[1:3]
    Tk = k.shape[2]
    k = for_each_head(k, H)
    v = for_each_head(v, H)

    # A bias becomes further channels of q and k. Where these hold sums over tokens (forgetting), long sums
    # lose digits: then each block of at most max_fold_queries has sums of its own.
    fold_by_block = None
    if score_inputs is not None and Tq <= score_inputs.encoding.max_fold_queries:
        q, k = score_inputs.encoding.fold(q, k, score_inputs.at)
    else:
        fold_by_block = score_inputs

    max_keys = min(mask.window or Tk, mask.chunk or Tk)                 # the most that a query sees
    # PyTorch's causal mask begins at the first key, so it is ours if Tq = Tk; one query, the last, needs none
    kernel_masks_itself = max_keys >= Tk and mask.documents is None and Tq in (1, Tk)
    if kernel_masks_itself and fold_by_block is None:
        if Tq == 1:     # a single query is the last: it sees all
            return fused_kernel(q, k, v, dropout)
        return fused_kernel(q, k, v, dropout, is_causal=True)

    # everything else has an explicit mask, in blocks of queries
    segments = mask.segments()

    def attend_queries(queries: slice, keys: slice) -> Tensor:
        q_block = q[:, :, queries]
        k_seen = k[:, :, keys]
        if fold_by_block is not None:
            at = fold_by_block.at.block(queries, keys)
            q_block, k_seen = fold_by_block.encoding.fold(q_block, k_seen, at)
        seen = visible_in(queries, keys, Tk - Tq, mask, segments, q.device)
        return fused_kernel(q_block, k_seen, v[:, :, keys], dropout, seen)

    n_queries = Tq
    if fold_by_block is not None:
        n_queries = fold_by_block.encoding.max_fold_queries
    elif max_keys < Tk:
        n_queries = max(max_keys, MIN_QUERIES)
    if Tq < Tk:     # after a cache: an explicit mask of at most most_logits elements, or MIN_QUERIES rows
        n_queries = min(n_queries, max(MIN_QUERIES, most_logits(q.device) // Tk))
    # recomputed: otherwise the wider q and k, and the mask, of each block would be kept for backward
    is_recomputed = fold_by_block is not None and Tq >= RECOMPUTE_FROM
    return in_query_blocks(attend_queries, Tq, Tk, n_queries, mask, is_recomputed, dropout)


def fused_kernel(q: Tensor, k: Tensor, v: Tensor, dropout: float, seen: Tensor | None = None,
                 is_causal: bool = False) -> Tensor:
    """PyTorch's kernel, for q and k that may be wider than v (B, H, Tk, D)."""
    D = v.shape[-1]
    if q.shape[-1] > D:
        # with unequal widths, and on a GPU with others than multiples of 8, PyTorch computes T x T logits
        width = 8 * math.ceil(q.shape[-1] / 8)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, seen, dropout_p=dropout, is_causal=is_causal, scale=D**-0.5)
    return y[..., :D]


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_inputs: ScoreInputs | None = None,
                     dropout: float = 0.0, sink: Tensor | None = None) -> Tensor:
    """Explicit softmax in blocks of queries, of at most `most_logits` logits, or of one query.

    Arguments and result as in `attend`.

    Training on long sequences does not keep the weights of the blocks, but computes them again in the
    backward pass, as fused kernels do: it takes O(T) memory, and their products and softmax twice.
    """
    B, H, Tq = q.shape[:3]
    Tk = k.shape[2]
    scale = v.shape[-1]**-0.5
    k = for_each_head(k, H)
    v = for_each_head(v, H)
    if score_inputs is not None:
        score_inputs = score_inputs._replace(k=for_each_head(score_inputs.k, H))
    # A bias or a sink needs logits in fp32. Without them the product has rounded the logits already, and a
    # softmax in its dtype, which sums in fp32, gives the same weights (to the bit if sqrt(D) is a power of
    # two) in half the time. Backward then keeps them once, not also in fp32.
    logits_dtype = q.dtype
    if score_inputs is not None or sink is not None:
        logits_dtype = torch.promote_types(q.dtype, torch.float32)
    segments = mask.segments()
    is_consecutive = mask.has_plain_positions and Tq == Tk              # no cache, which may have gaps

    def attend_queries(queries: slice, keys: slice) -> Tensor:
        seen = visible_in(queries, keys, Tk - Tq, mask, segments, q.device)
        mask_term = torch.where(seen, 0.0, -torch.inf).to(logits_dtype)
        logits = q[:, :, queries] @ k[:, :, keys].mT                    # (B, H, queries, keys)
        logits = torch.add(mask_term, logits, alpha=scale)          # mask_term + scale * logits, in one pass
        if score_inputs is not None:
            logits = add_scores(logits, score_inputs, queries, keys, is_consecutive)
        weights = logits.softmax(dim=-1)
        if sink is not None:    # the softmax with one more logit, whose weight is left out
            lse = logits.logsumexp(dim=-1, keepdim=True)                # (B, H, queries, 1)
            weights = weights * torch.sigmoid(lse - sink[:, None, None])
        weights = weights.to(v.dtype)
        if dropout:
            weights = F.dropout(weights, dropout)
        return weights @ v[:, :, keys]                                  # (B, H, queries, D)

    most = most_logits(q.device)
    if score_inputs is not None and q.device.type == "cpu":
        most //= 2                                                      # `scores` hold more numbers per logit
    n_queries = Tq
    if B * H * Tq * Tk > most:
        n_blocks = math.ceil(Tq / max(1, most // (B * H * Tk)))
        n_queries = math.ceil(Tq / n_blocks)                            # blocks of equal size
    # recomputed: otherwise all blocks' weights would be kept
    return in_query_blocks(attend_queries, Tq, Tk, n_queries, mask, Tq >= RECOMPUTE_FROM, dropout)


def add_scores(logits: Tensor, score_inputs: ScoreInputs, queries: slice, keys: slice,
               is_consecutive: bool) -> Tensor:
    """Logits (B, H, queries, keys) of a block after `scores`."""
    encoding, q, k, at = score_inputs
    at = at.block(queries, keys, is_consecutive)
    if encoding.by_distance and is_consecutive:
        of_distance = bias_at(encoding, toeplitz_distances(at), q, at)           # (H, P), each distance once
        return logits + ToeplitzBias.apply(of_distance, logits.shape[2])
    return encoding.scores(logits, q[:, :, queries], k[:, :, keys], at)


def bias_at(encoding: Encoding, distance: Tensor, q: Tensor, at: At, logit: float = 0.0) -> Tensor:
    """The bias of an encoding at each of P distances (P,), -> (H, P).

    It is what `scores` makes of logits that all equal `logit`. Of q (B, H, Tq, D) only H, D, dtype and device
    are used.
    """
    H, D, P = q.shape[1], q.shape[3], len(distance)
    dtype = torch.promote_types(q.dtype, torch.float32)
    # one query of zeros at position 0, and for each distance d a key of zeros at -d
    logits = torch.full((1, H, 1, P), logit, device=q.device, dtype=dtype)
    zero = q.new_zeros(())
    q, k = zero.expand(1, H, 1, D), zero.expand(1, H, P, D)
    q_pos = torch.zeros_like(distance[None, :1])
    # a temperature needs an n_before of this one query; which one is no matter, since q is 0
    at = at._replace(q_pos=q_pos, k_pos=-distance[None], n_before=torch.zeros_like(q_pos),
                     first_distance=None)
    scores = encoding.scores(logits, q, k, at)
    if scores.shape != logits.shape:
        raise UserError(f"{type(encoding).__name__}.scores: made logits {tuple(scores.shape)} of "
                        f"{tuple(logits.shape)}; a number for each head is strength[:, None, None]")
    return scores[0, :, 0]


def most_logits(device: torch.device) -> int:
    """How many explicit logits are held at a time."""
    return MOST_LOGITS if device.type == "cpu" else MOST_LOGITS_GPU


def in_query_blocks(attend_queries: Callable[[slice, slice], Tensor], Tq: int, Tk: int, n_queries: int,
                    mask: Mask, is_recomputed: bool, dropout: float) -> Tensor:
    """attend_queries of blocks of n_queries, each with the slice of keys that any query of it can see.

    The queries are the last Tq of the Tk tokens. If `is_recomputed`, training keeps nothing of the blocks for
    the backward pass.
    """
    if is_recomputed and torch.is_grad_enabled():
        attend_queries = partial(checkpoint, attend_queries, use_reentrant=False,
                                 preserve_rng_state=dropout > 0)
    window = mask.window or Tk
    chunk = mask.chunk or Tk
    blocks = []
    starts: Sequence[int] = [0]
    if n_queries < Tq:          # a range over a symbolic length makes torch.compile recompile for each length
        starts = range(0, Tq, n_queries)
    for start in starts:
        queries = slice(start, min(start + n_queries, Tq))
        first_index = Tk - Tq + start           # index of the block's first query among the Tk tokens
        if mask.documents is None:
            start_of_chunk = first_index // chunk * chunk
        else:                   # chunks begin with documents: at most chunk - 1 keys before the first query
            start_of_chunk = first_index + 1 - chunk
        keys = slice(max(0, first_index + 1 - window, start_of_chunk), Tk - Tq + queries.stop)
        blocks.append(attend_queries(queries, keys))
    return torch.cat(blocks, dim=2)


def visible(i: Tensor, j: Tensor, b: Tensor, mask: Mask, segments: Tensor | None) -> Tensor:
    """Whether query i of batch row b sees key j: indices that broadcast. `segments` is mask.segments()."""
    seen = j <= i
    if mask.window:
        seen = seen & (i - j < mask.window)
    if segments is not None:
        return seen & (segments[b, i] == segments[b, j])
    if mask.chunk:
        return seen & (i // mask.chunk == j // mask.chunk)
    return seen


def visible_in(queries: slice, keys: slice, offset: int, mask: Mask, segments: Tensor | None,
               device: torch.device) -> Tensor:
    """`visible` of a block, (queries, keys), or with documents (B, 1, queries, keys).

    Query 0 has the index `offset` among the keys.
    """
    i = torch.arange(offset + queries.start, offset + queries.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    n_batch = 1 if segments is None else len(segments)
    b = torch.arange(n_batch, device=device)[:, None, None, None]       # axes of heads, queries and keys
    return visible(i, j, b, mask, segments)


# ------------------------------------------------------------------------------------------------------------
# FlexAttention


def with_block_masks(mask: Mask, localities: set[Locality], T: int, device: torch.device) -> Mask:
    """A mask that lets layers of these localities use FlexAttention: which blocks of queries see which keys.

    Made once per forward pass, not once per layer. It holds (T / 128)^2 integers, not T^2.
    """
    n_pad = -T % FLEX_BLOCK
    create = flex_function("create_block_mask", device)
    block_masks = {}
    for window, chunk in localities:
        layer_mask = mask._replace(window=window, chunk=chunk)
        segments = layer_mask.segments()
        n_batch = None
        if segments is not None:
            n_batch = len(segments)
            segments = F.pad(segments, (0, n_pad), value=-1)            # padding is a segment of its own
        mask_mod = mask_function(layer_mask, segments)
        block_masks[window, chunk] = create(mask_mod, n_batch, None, T + n_pad, T + n_pad, device)
    return mask._replace(block_masks=block_masks)


def mask_function(mask: Mask, segments: Tensor | None) -> Callable[..., Tensor]:
    """`visible` as FlexAttention calls it: row, head, query and key."""
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return visible(i, j, b, mask, segments)

    return mask_mod


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_inputs: ScoreInputs | None = None,
                sink: Tensor | None = None) -> Tensor:
    """FlexAttention. Arguments and result as in `attend`.

    Lengths are padded to whole blocks, with keys that no token sees: at other lengths score_mod is reported
    to give NaN in the backward pass.
    """
    T, D = q.shape[2], v.shape[-1]
    n_pad = -T % FLEX_BLOCK
    v = for_each_head(v, k.shape[1])            # a rotation may have made keys for each head of queries
    q, k, v = (F.pad(x, (0, 0, 0, n_pad)) for x in (q, k, v))
    score_mod = None
    options = None
    if score_inputs is not None:
        score_mod = score_function(score_inputs, T + n_pad)
        options = FLEX_OPTIONS
    y, aux = flex_function("flex_attention", q.device)(
        q, k, v, score_mod=score_mod, block_mask=mask.block_masks[mask.window, mask.chunk], scale=D**-0.5,
        enable_gqa=q.shape[1] != k.shape[1], kernel_options=options,
        return_aux=flex_attention.AuxRequest(lse=True))
    if sink is not None:
        share = torch.sigmoid(aux.lse - sink[:, None])          # weight of all keys but the sink, (B, H, T)
        y = y * share[..., None].to(y.dtype)
    return y[:, :, :T]


def score_function(score_inputs: ScoreInputs, T: int) -> Callable[..., Tensor]:
    """`scores` as FlexAttention calls them: by distance, one number multiplies a logit and one is added."""
    encoding, q, _, at = score_inputs
    distance = torch.arange(T, device=q.device)
    term = bias_at(encoding, distance, q, at)                           # (H, T)
    factor = None
    if encoding.scales_by_distance:
        factor = bias_at(encoding, distance, q, at, logit=1.0) - term

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = (i - j).abs()                                               # keys ahead are masked
        if factor is not None:
            score = score * factor[h, d]
        return score + term[h, d]

    return score_mod


def flex_function(name: str, device: torch.device) -> Callable[..., Any]:
    """A function of PyTorch's flex_attention; on a GPU compiled: with the whole model, or else once here."""
    function = getattr(flex_attention, name)
    return function if device.type == "cpu" or torch.compiler.is_compiling() else compiled(function)
