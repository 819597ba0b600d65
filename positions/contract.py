"""What a position encoding is: the hooks that it may override, and the options that it declares.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, G = n_kv_head, D channels of a head.
Angles in radians.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, from which an encoding is made."""

    n_layer: int
    n_head: int  # heads of queries, H
    n_embd: int
    head_dim: int
    seq_len: int  # the training length in tokens, L
    local_layers: frozenset[int] = frozenset()  # those with a window or chunks, from 0
    window: int | None = None  # keys that a query sees in them; None: no limit
    chunk: int | None = None  # size of their chunks


class At(NamedTuple):
    """Positions, layer and shared tables of one attention call. A cache makes more keys than queries."""

    q_pos: Tensor  # positions of the queries, (1 or B, Tq)
    k_pos: Tensor  # positions of the keys, (1 or B, Tk)
    layer: int  # 0 is the layer next to the embeddings
    tables: Any  # what `tables` returned for this forward
    features: Any = None  # what `mix` returned for all the keys, (B, H, Tk, F), or None
    n_before: Tensor | None = None  # tokens before each query in its document, (1 or B, Tq)
    # set if positions are consecutive within each document: how far the first query is after the first key.
    # Query i and key j are then first_distance + i - j apart. None: compute distances from q_pos and k_pos
    first_distance: int | None = None

    def distance(self) -> Tensor:
        """Query position - key position, (1 or B, 1, Tq, Tk), ready to broadcast over heads.

        Keys ahead of the query are masked; their distance is 0 here, so that log(distance) makes no NaN.
        """
        return (self.q_pos[:, :, None] - self.k_pos[:, None, :]).clamp(min=0)[:, None]

    def block(self, queries: slice, keys: slice, is_consecutive: bool = False) -> At:
        """The same for a block of queries and the keys that they may see, with the tables as they are."""
        first_distance = queries.start - keys.start if is_consecutive else None
        features = None if self.features is None else self.features[:, :, keys]
        n_before = None if self.n_before is None else self.n_before[:, queries]
        return self._replace(q_pos=self.q_pos[:, queries], k_pos=self.k_pos[:, keys], features=features,
                             n_before=n_before, first_distance=first_distance)


class Options(BaseModel):
    """The encoding, its layers, and what acts under any encoding; each encoding adds its own keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    encoding: str = Field(description="which encoding; train.py --help lists them")
    layers: Literal["all", "first"] | list[int] = Field(
        "all", description="the layers in which it acts: all, the first only, or a list of layer numbers "
                           "from 0. The other layers have no encoding")
    skip_every: int = Field(
        0, ge=0, description="k: every k-th layer has no encoding, from the k-th on (SmolLM3: 4); 0: none")
    temperature: Literal["none", "log_n", "ssmax", "llama4", "affine"] = Field(
        "none", description="factor on the query of a document's token m, from 0, that sees n keys. log_n: "
                            "max(1, ln n / ln L) (Su); ssmax: s ln n, with a learned s for each layer and "
                            "head (Nakanishi 2025); llama4: 1 + 0.1 ln(1 + floor((m + 1) / L)); affine: s "
                            "ln n + b, learned for each layer and head, s = 0 and b = 1 at first (Mistral "
                            "Large 4)")
    temperature_layers: Literal["all", "encoded", "unencoded"] = Field(
        "all", description="layers in which a temperature, also one of --extend, acts: all, those with the "
                           "encoding, or those without (Llama 4; SWAN-GPT, 2025: log_n there alone)")
    scale_invariant: float = Field(
        0.0, ge=0, description="tau in tokens, 10 in the paper: scale-invariant attention, logit <- a logit "
                               "+ 1 - a^2, a = sqrt(2 ln(1 + distance / tau) + 1), in all layers (Anson "
                               "2025). Meant for p_rope and model.qk_norm. 0: off")
    drop_at: float = Field(
        1.0, ge=0, le=1, description="DroPE (Gelberg 2025): share of the steps after which the model goes on "
                                     "without the encoding, in training and afterwards; in the paper 0.875. "
                                     "1: never; 0: from the first step, which train.init_from may want")
    lr_scale: float = Field(
        1.0, gt=0, description="learning rate of the encoding's and the temperature's own parameters, as a "
                               "factor on train.lr; they have no weight decay. --help ENCODING shows its "
                               "default")

    head_multiple: ClassVar[int] = 1    # the channels of a head must be a multiple of it

    def is_encoded(self, layer: int) -> bool:
        """Whether the encoding acts in this layer, counted from 0."""
        if self.skip_every and (layer + 1) % self.skip_every == 0:
            return False
        if isinstance(self.layers, list):
            return layer in self.layers
        return self.layers == "all" or layer == 0

    def problems(self, config: Any) -> dict[str, str]:
        """Key -> what is wrong with it in this config.Config."""
        head_dim = config.model.head_width
        if head_dim % self.head_multiple == 0:
            return {}
        return {"encoding": f"needs a multiple of {self.head_multiple} channels of a head "
                            f"(model.head_dim, or n_embd / n_head), got {head_dim}"}


def for_each_head(x: Tensor, n_head: int) -> Tensor:
    """Keys or values (B, G, T, D) -> (B, H, T, D): query head h uses head h // (H / G).

    This copies: kernels that do not take fewer heads of keys fall back to holding T x T logits.
    """
    return x if x.shape[1] == n_head else x.repeat_interleave(n_head // x.shape[1], dim=1)


def starts_of(documents: Tensor) -> Tensor:
    """For each token of packed documents (B, T), the index of its document's first token, (B, T)."""
    # documents  7 7 7 9 9
    # is_first   1 0 0 1 0
    # starts     0 0 0 3 3
    is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    index = torch.arange(documents.shape[1], device=documents.device)
    return (index * is_first).cummax(dim=1).values


class Encoding(nn.Module):
    """Tells a decoder where its tokens are. Override any of the hooks; the defaults do nothing.

    Positions are integers with any offset and gaps (fractions under leaky_rerope). Compute frequencies,
    slopes and angles in `tables`, not in __init__: then a checkpoint loads under other options. Compute them
    in fp32; leave parameters in their dtype, because the tests of the laws run in fp64. One instance serves
    all layers: a parameter that differs by layer has shape (n_layer, ...), indexed by at.layer; one that
    differs by head has H entries, not G. To change RoPE, see RoPE in positions/rotary.py.
    """

    Options: ClassVar[type[Options]] = Options      # declares the keys of [position] that it has
    is_relative: bool = True  # do logits stay if all positions shift by one number? (tested)
    max_length: int | None = None  # defined at positions 0 ... max_length - 1; None: no limit
    lr_scale: ClassVar[float] = 1.0  # default of position.lr_scale
    # least and largest value of parameters, None for no limit; `clamp` keeps them there
    bounds: ClassVar[dict[str, tuple[float | None, float | None]]] = {}
    turns_values: bool = False  # do `turn_values` and `turn_back` change anything?
    tempers_bias: bool = False      # scores = logits + bias, and a temperature multiplies the bias too

    # what attention may assume of `scores`, to take a faster path; f and g are any functions of the distance,
    # different in each head and layer. The defaults are always correct
    by_distance: bool = False           # scores = logits + f(distance)
    scales_by_distance: bool = False    # scores = g(distance) * logits + f(distance)
    max_fold_queries: int = 0           # above 0: `fold` gives the same bias, for up to that many queries

    def __init__(self, shape: Shape, options: Any) -> None:
        """Make the parameters. `options`, an instance of the class's Options, is the config's [position].

        Hooks may read self.options. The constructor reads no tensor's value, unless the tensor has
        device="cpu": --dry-run makes the rest without memory.
        """
        super().__init__()
        self.options = options
        self.has_scores = type(self).scores is not Encoding.scores      # does `scores` change the logits?

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings x (B, T, C) at positions (1 or B, T) -> the input of the first layer (B, T, C)."""
        return x

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Any:
        """What all layers share, from positions and parameters. Computed once; layers get it as at.tables.

        It is not cut to the block of queries that `scores` gets: make no (Tq, Tk) table, use at.distance().
        """
        return None

    def features(self, x: Tensor, layer: int) -> Tensor | None:
        """What a token carries besides its key, from attention's input x (B, T, C): (B, H, T, F), or None.

        It is cached with the key; `rotate` and `scores` get those of all keys, after `mix`, as at.features.
        The queries are the last of the keys: theirs are at.features[:, :, -Tq:].
        """
        return None

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        """Mix features causally over time: those of all keys (B, H, Tk, F) -> at.features, of these tokens.

        Convolutions and sums over time belong here, since `features` does not see cached tokens. documents
        (B, Tk) has the number of each token's document; documents must not mix. None: there is one.
        """
        return features

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """Queries (B, H, Tq, D) and keys (B, G, Tk, D) -> the factors of q k^T, both (..., D) or both wider.

        The product is divided by sqrt(D) of the input, even if the result is wider. k has G heads, but under
        some methods of --extend H: read k.shape[1]. Apply what differs among heads to q; if keys must differ
        too, return for_each_head(k, H), changed.
        """
        return q, k

    def turn_values(self, v: Tensor, at: At) -> Tensor:
        """Values (B, G, Tk, D) before attention. See turns_values."""
        return v

    def turn_back(self, y: Tensor, at: At) -> Tensor:
        """Results of attention (B, H, Tq, D) -> what the output matrix reads. See turns_values."""
        return y

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        """Logits of a block, q k^T / sqrt(D), (B, H, Tq, Tk), fp32 or fp64 -> the new ones.

        Under by_distance or scales_by_distance it is also called for distances alone: logits (1, H, 1, P),
        all 0 or all 1, q and k of zeros.
        Masked logits are -inf and must stay so. Keys ahead of the query are among them: at.distance() is 0
        there, and a formula of your own must not make NaN or +inf of a negative distance; clamp it. q (B, H,
        Tq, D), times the temperature if there is one, and k (B, H, Tk, D) are unrotated. Attention is then an
        explicit softmax in blocks of queries, unless `fold` or FlexAttention serves it. Under tempers_bias,
        and in the bias that DAPE adapts, logits may be a scalar 0, for the bias alone.
        """
        return logits

    def fold(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """The inputs with further channels, whose product is sqrt(D) times what `scores` adds.

        It may differ from it by a constant along each row, which vanishes in the softmax. Attention is then
        the fused kernel where that pays. See max_fold_queries.
        """
        return q, k

    @torch.no_grad()
    def clamp(self) -> None:
        """Put the parameters back into their `bounds`: at the start, and after each step of the optimizer.

        Not in a forward: FSDP2 gathers a copy of the parameters for it, whose changes are lost.
        """
        for module in self.modules():
            for name, (low, high) in getattr(module, "bounds", {}).items():
                getattr(module, name).clamp_(low, high)

    @classmethod
    def acts_in_layers(cls) -> bool:
        """Whether it acts in the layers, not only on the embeddings, so that `layers` has an effect."""
        hooks = ("rotate", "scores", "turn_values", "turn_back")
        return any(getattr(cls, hook) is not getattr(Encoding, hook) for hook in hooks)


class NoPE(Encoding):
    """No encoding: the causal mask alone tells the order. Kazemnejad et al. 2023, arXiv:2305.19466."""
