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

from positions.invariance import scale_invariant


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, from which an encoding is made."""

    n_layer: int
    n_head: int  # heads of queries, H
    n_embd: int
    head_dim: int
    seq_len: int  # the training length in tokens, L
    local_layers: frozenset[int] = frozenset()  # those with a window or chunks, from 0


class At(NamedTuple):
    """Where a hook is called. During cached decoding there are more keys than queries."""

    q_pos: Tensor  # positions of the queries, (1 or B, Tq)
    k_pos: Tensor  # positions of the keys, (1 or B, Tk)
    layer: int  # 0 is the layer next to the embeddings
    tables: Any  # what `tables` returned for this forward
    features: Tensor | None = None  # what `mix` returned for all the keys, (B, H, Tk, F)
    temperature: Tensor | None = None  # (1 or B, 1 or H, Tq, 1), if the encoding is to apply it itself
    ahead: int | None = None  # if all positions are consecutive integers: query i - key j is ahead + i - j

    def distance(self) -> Tensor:
        """Query position - key position, (1 or B, 1, Tq, Tk), ready to broadcast over heads.

        Keys ahead of the query are masked; their distance is 0 here, so that log(distance) makes no NaN.
        """
        return (self.q_pos[:, :, None] - self.k_pos[:, None, :]).clamp(min=0)[:, None]

    def block(self, rows: slice, keys: slice | Tensor, is_consecutive: bool = False) -> At:
        """The same for a block of queries and the keys that they may see, with the tables as they are."""
        ahead = rows.start - keys.start if is_consecutive and isinstance(keys, slice) else None
        features = None if self.features is None else self.features[:, :, keys]
        temperature = None if self.temperature is None else self.temperature[:, :, rows]
        return self._replace(q_pos=self.q_pos[:, rows], k_pos=self.k_pos[:, keys], features=features,
                             temperature=temperature, ahead=ahead)


class Part(NamedTuple):
    """Pairs of query and key whose logits are the product of these factors over sqrt(D)."""

    q: Tensor  # (B, H, T, D or wider)
    k: Tensor  # (B, H or G, T, as wide)
    first: Tensor  # index of the first key that each query sees in this part, (T,)
    end: Tensor  # index after the last one, (T,): not above `first` where it sees none


class Options(BaseModel):
    """The encoding, its layers, and what acts under any encoding; each encoding adds its own keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    encoding: str = Field(description="which encoding; train.py --help lists them")
    layers: Literal["all", "first"] | list[int] = Field(
        "all", description="the layers in which it acts: all, the first only, or a list of layer numbers "
                           "from 0. The other layers have no encoding")
    skip_every: int = Field(
        0, ge=0, description="k: every k-th layer has no encoding, from the k-th on (SmolLM3: 4); 0: none")
    temperature: Literal["none", "log_n", "ssmax", "llama4", "ministral3"] = Field(
        "none", description="factor on the query at position m. log_n: max(1, ln(m + 1) / ln L) (Su); ssmax: "
                            "s ln(m + 1), with a learned s for each layer and head (Nakanishi 2025); llama4: "
                            "1 + 0.1 ln(1 + floor((m + 1) / L)); ministral3: the same with m / L")
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
                               "factor on train.lr; they have no weight decay. Each encoding has its default")

    def problems(self, n_embd: int, head_dim: int) -> dict[str, str]:
        """Key -> what is wrong with it for a model of this width with heads of this width."""
        return {}


def for_each_head(x: Tensor, n_head: int) -> Tensor:
    """Keys or values (B, G, T, D) -> (B, H, T, D): query head h uses head h // (H / G).

    This copies: kernels that do not take fewer heads of keys fall back to holding T x T logits.
    """
    return x if x.shape[1] == n_head else x.repeat_interleave(n_head // x.shape[1], dim=1)


def slanted(products: Tensor) -> Tensor:
    """(..., n, n + m - 1) -> (..., n, m), a view: row i starts at column n - 1 - i.

    So a column for each distance becomes a column for each key, where positions are consecutive.
    """
    n, width = products.shape[-2:]
    if n == 1:
        return products
    moved = products.flatten(-2)[..., n - 1:-1].unflatten(-1, (n, width - 1))   # each row one column further
    return moved[..., :width + 1 - n]


def falling(at: At) -> Tensor:
    """The distances (Tq + Tk - 1,) whose products `slanted` takes, where positions are consecutive."""
    assert at.ahead is not None
    Tq, Tk = at.q_pos.shape[1], at.k_pos.shape[1]
    return at.ahead + Tq - 1 - torch.arange(Tq + Tk - 1, device=at.q_pos.device)


def odd_head(head_dim: int) -> dict[str, str]:
    """The `problems` of an encoding that pairs channels, if their number is odd."""
    return {"encoding": "needs an even number of channels of a head (head_dim, or n_embd / n_head), "
                        f"got {head_dim}"} if head_dim % 2 else {}


AnyOptions = Options    # inside Encoding the name Options means the attribute


class Encoding(nn.Module):
    """Tells a decoder where its tokens are. Override `embed`, `rotate` or `scores`; the defaults do nothing.

    Positions are passed to every call, never implied by a tensor's length, so offsets, gaps and cached
    decoding need no extra code. They are integers, or real numbers with train.positions = "rfs" if
    `takes_floats`. Keep derived tensors (frequencies, slopes, angles) out of the state dict: compute them in
    `tables`, so that a checkpoint can be loaded under other options. Cast positions to fp32, but no
    parameter, since the laws run in fp64. One instance serves all layers: parameters that differ among layers
    have an axis 0 of n_layer, indexed by at.layer. Parameters are per query head (H), not per key head (G,
    which may be fewer). A subclass of RoPE in positions/rotary.py gets every scaling method and every method
    of --extend. It overrides `frequencies` for other frequencies and `rotate` for another rotation, and its
    options subclass RotaryOptions.
    """

    Options: ClassVar[type[Options]] = Options
    is_relative: ClassVar[bool] = True  # do the logits depend on distances alone? (tested)
    n_axes: ClassVar[int] = 1  # above 1, positions may be (1 or B, T, n_axes) too, one number for each axis
    takes_floats: ClassVar[bool] = True  # is it defined at positions between the integers? (tested)
    max_length: int | None = None  # defined at positions 0 ... max_length - 1; None: no limit
    lr_scale: ClassVar[float] = 1.0  # default of position.lr_scale
    applies_temperature: bool = False  # does it multiply by at.temperature? Else q is, before the hooks
    widening: ClassVar[int] = 1  # how many times wider `rotate` returns q and k (tested)
    can_fold: bool = False  # does `fold` give the same result as `scores`?
    folds_sums: ClassVar[bool] = False  # does `fold` lose digits over many queries? Then it gets few of them
    tau: float = 0.0  # position.scale_invariant
    # FlexAttention may serve it: `scores` adds f(head, layer, distance), then applies at.temperature if any
    by_distance: ClassVar[bool] = False

    def __init__(self, shape: Shape, options: AnyOptions) -> None:
        """Make the parameters. `options`, an instance of the class's Options, is the config's [position]."""
        super().__init__()
        self.tau = options.scale_invariant

    def warning(self) -> str | None:
        """One line about options that are allowed but probably a mistake, if any."""
        return None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings x (B, T, C) at positions (1 or B, T) -> the input of the first layer (B, T, C)."""
        return x

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Any:
        """What all layers share, from positions and parameters. Computed once; layers get it as at.tables.

        It is not cut to the block of queries that `scores` gets. So make no (Tq, Tk) table here: take the
        distances of the block from at.distance().
        """
        return None

    def features(self, x: Tensor, layer: int) -> Tensor | None:
        """What a token carries besides its key, from the layer's input x (B, T, C): (B, H, T, F), or None.

        It is cached with the key; `rotate` and `scores` get those of all keys, after `mix`, as at.features.
        """
        return None

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        """What tokens take from earlier ones: features of all keys (B, H, Tk, F) -> at.features, as many.

        Convolutions and sums over time belong here, since `features` does not see cached tokens. documents
        (B, Tk) numbers packed documents, which must not see one another, if there are several.
        """
        return features

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """Queries (B, H, Tq, D) and keys (B, G, Tk, D) -> the factors of q k^T, both (..., D) or both wider.

        The cache holds unrotated keys. The product is divided by sqrt(D) of the input, even if the result is
        wider. k has G heads, so that each is rotated once, but under some methods of --extend it has H: read
        k.shape[1], and apply what differs among heads to q. at.features holds the features of all keys.
        """
        return q, k

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        """Change logits (B, H, Tq, Tk), fp32 and over sqrt(D), of a block of queries and the keys they see.

        Masked logits are -inf and must stay so. q (B, H, Tq, D) and k (B, H, Tk, D) are unrotated; heads that
        share a key each have a copy. With an encoding that overrides this, attention is an explicit softmax
        in blocks of queries, not the fused kernel.
        """
        return logits

    def fold(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """What `scores` adds, times sqrt(D), as a product of further channels appended to q and k.

        q (B, H, Tq, D) and k (B, H, Tk, D) are rotated. It may differ by a constant along each row of logits,
        which the softmax ignores, and it holds for keys at positions up to the query's. With `can_fold` the
        encoding runs in the fused kernel on long texts.
        """
        return q, k

    def final_logits(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        """`scores`, then scale-invariant attention if it is on. Attention calls this; do not override it."""
        if self.by_distance and at.ahead is not None and at.temperature is None:
            bias = self.bias_at(falling(at), q, at)                     # (H, P)
            logits = logits + slanted(bias[:, None].expand(-1, logits.shape[2], -1))
        else:
            logits = self.scores(logits, q, k, at)
        return scale_invariant(logits, at.distance(), self.tau) if self.tau else logits

    def bias_at(self, distance: Tensor, q: Tensor, at: At) -> Tensor:
        """With `by_distance`: what `scores` adds to logits of q (B, H, Tq, D) at distances (P,), (H, P)."""
        H, P, dtype = q.shape[1], len(distance), torch.promote_types(q.dtype, torch.float32)
        none, logits = q.new_zeros(()), torch.zeros(1, H, 1, P, device=q.device, dtype=dtype)
        at = at._replace(q_pos=torch.zeros_like(distance[None, :1]), k_pos=-distance[None], temperature=None)
        q, k = none.expand(1, H, 1, q.shape[3]), none.expand(1, H, P, q.shape[3])
        return self.scores(logits, q, k, at)[0, :, 0]

    def parts(self, q: Tensor, k: Tensor, at: At) -> list[Part] | None:
        """Factors that `final_logits` amounts to if every token sees itself and all before it, or None.

        No pair is in two of these parts, a pair in none is masked. It needs no logits of masked pairs.
        """
        return None

    def changes_logits(self) -> bool:
        """Whether `final_logits` does anything."""
        return self.has_scores() or self.tau > 0

    @classmethod
    def acts_in_layers(cls) -> bool:
        """Whether it acts in the layers, not only on the embeddings, so that `layers` has an effect."""
        return cls.rotate is not Encoding.rotate or cls.has_scores()

    @classmethod
    def has_scores(cls) -> bool:
        """Whether it overrides `scores`."""
        return cls.scores is not Encoding.scores


class NoPE(Encoding):
    """No encoding: the causal mask alone tells the order. Kazemnejad et al. 2023, arXiv:2305.19466."""
