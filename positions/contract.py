"""What a position encoding is: three places at which it may act, and the options it declares.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, G = n_kv_head, D channels of a head.
Angles in radians.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, from which an encoding is made."""

    n_layer: int
    n_head: int  # heads of queries; those of keys may be fewer
    n_embd: int
    head_dim: int
    seq_len: int  # L, the training length in tokens


class At(NamedTuple):
    """Where a hook is called. Queries and keys differ in number when cached keys precede the queries."""

    q_pos: Tensor  # (1 or B, Tq) positions of the queries
    k_pos: Tensor  # (1 or B, Tk) positions of the keys
    layer: int  # 0 is the layer next to the embeddings
    tables: Any  # what the encoding's `tables` returned for this forward
    features: Tensor | None = None  # what its `features` returned for all keys, (B, H, Tk, F)

    def distance(self) -> Tensor:
        """Query position - key position, (1 or B, 1, Tq, Tk), ready to broadcast over heads.

        At least 0: keys ahead of the query are masked, and log(distance) must not make NaN of them.
        """
        return (self.q_pos[:, :, None] - self.k_pos[:, None, :]).clamp(min=0)[:, None]


class Options(BaseModel):
    """The keys of [position] that every encoding has; an encoding declares its own in a subclass."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    encoding: str = Field(description="which encoding; see the list below")
    layers: Literal["all", "first"] | list[int] = Field(
        "all", description="which layers it acts in: all, the first only, or a list of layer numbers from 0; "
                           "the others get no position information of their own")
    skip_every: int = Field(
        0, ge=0, description="k: every k-th layer goes without, from the k-th on (SmolLM3: 4); 0: none")
    temperature: Literal["none", "log_n", "ssmax"] = Field(
        "none", description="factor of the query at m, in all layers: log_n, max(1, ln(m + 1) / ln L), "
                            "by Su; ssmax, s ln(m + 1), s learned by head and layer (Nakanishi 2025)")

    def problems(self, n_embd: int, head_dim: int) -> dict[str, str]:
        """Key -> what is wrong with it for a stream and heads of this width; empty where all is well."""
        return {}


AnyOptions = Options    # within Encoding the name Options is the attribute


class Encoding(nn.Module):
    """Tells a decoder where its tokens stand. Override any of three hooks; each is the identity by default.

    Positions are integers given to every call, never implied by a tensor's length, so offsets, gaps and
    cached decoding need nothing extra. Keep derived tensors (frequencies, slopes, angles) out of the state
    dict: compute them in `tables`, in fp32, so that a checkpoint can be read back under other options.
    """

    Options: ClassVar[type[Options]] = Options
    is_relative: ClassVar[bool] = True  # do the logits depend on distances alone (tested)?
    n_axes: ClassVar[int] = 1  # above 1 it takes positions (1 or B, T, n_axes) too, a number for each axis
    max_length: int | None = None  # positions it is defined for are 0 ... max_length - 1; None: all
    can_fold: bool = False  # is `fold` the same as `scores`?
    by_distance: ClassVar[bool] = False  # does `scores` add what head, layer, distance decide alone (tested)?

    def __init__(self, shape: Shape, options: AnyOptions) -> None:
        """Make the parameters. One instance serves all layers; those of each layer are stacked on axis 0."""
        super().__init__()

    def warning(self) -> str | None:
        """What its options allow but hardly mean, in one line, if anything."""
        return None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings x (B, T, C) at positions (1 or B, T) -> the input of the first layer (B, T, C)."""
        return x

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Any:
        """What depends on positions alone, computed once a forward and handed to each layer as at.tables."""
        return None

    def features(self, x: Tensor, layer: int) -> Tensor | None:
        """What a token carries beside its key, from the layer's input x (B, T, C): (B, H, T, F), or None.

        It is cached with the key, and handed to `scores` as at.features.
        """
        return None

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """Queries (B, H, Tq, D) and keys (B, H, Tk, D) before the product. The cache holds unrotated keys.

        In grouped-query attention keys are still (B, G, Tk, D) here and in `fold`, so that each turns once.
        """
        return q, k

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        """Logits (B, H, Tq, Tk), fp32 and over sqrt(D), of a block of queries against all keys up to theirs.

        -inf stands where a query may not look, and must stay. q (B, H, Tq, D) and k (B, H, Tk, D) are as they
        were before `rotate`; heads that share a key each have a copy. Overriding this leaves the fused kernel
        for explicit softmax in query blocks, which hold a few numbers a logit at most.
        """
        return logits

    def fold(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """What `scores` adds, times sqrt(D), as products of more channels of q and k, after those there are.

        Up to a constant along each row of logits, which the softmax does not see, and for keys at positions
        up to the query's. An encoding that says `can_fold` keeps the fused kernel with it on long texts.
        """
        return q, k

    @classmethod
    def acts_in_layers(cls) -> bool:
        """Whether it is more than something added to the embeddings, so that `layers` means something."""
        return cls.rotate is not Encoding.rotate or cls.has_scores()

    @classmethod
    def has_scores(cls) -> bool:
        """Whether it changes the logits themselves."""
        return cls.scores is not Encoding.scores


class NoPE(Encoding):
    """No encoding: the causal mask alone tells the order. Kazemnejad et al. 2023, arXiv:2305.19466."""
