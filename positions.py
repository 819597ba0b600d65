"""Position encodings: the contract, each encoding as a small class, and the registry that finds them by name.

To add one: subclass Encoding, override the hooks it needs, put it into ENCODINGS, and give it a config.
--help, the tests, eval.py and sample.py read the registry.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, D = C // H. Angles in radians.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

import rope

if TYPE_CHECKING:
    from config import Config


class At(NamedTuple):
    """Where a hook is called. Queries and keys differ in number when cached keys precede the queries."""

    q_pos: Tensor  # (1 or B, Tq) positions of the queries
    k_pos: Tensor  # (1 or B, Tk) positions of the keys
    layer: int  # 0 is the layer next to the embeddings
    tables: Any  # what the encoding's `tables` returned for this forward

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

    def problems(self, n_embd: int, n_head: int) -> dict[str, str]:
        """Key -> what is wrong with it for heads of this size; empty where all is well."""
        return {}


class Encoding(nn.Module):
    """Tells a decoder where its tokens stand. Override any of three hooks; each is the identity by default.

    Positions are integers given to every call, never implied by a tensor's length, so offsets, gaps and
    cached decoding need nothing extra. Keep derived tensors (frequencies, slopes, angles) out of the state
    dict: compute them in `tables`, in fp32, so that a checkpoint can be read back under other options.
    """

    Options: ClassVar[type[Options]] = Options
    is_relative: ClassVar[bool] = True  # do the logits depend on distances alone (tested)?
    max_length: int | None = None  # positions it is defined for are 0 ... max_length - 1; None: all

    def __init__(self, config: Config) -> None:
        """Make the parameters. One instance serves all layers; those of each layer are stacked on axis 0."""
        super().__init__()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings x (B, T, C) at positions (1 or B, T) -> the input of the first layer (B, T, C)."""
        return x

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Any:
        """What depends on positions alone, computed once a forward and handed to each layer as at.tables."""
        return None

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """Queries (B, H, Tq, D) and keys (B, H, Tk, D) before the product. The cache holds unrotated keys."""
        return q, k

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        """Logits (B, H, Tq, Tk), fp32 and over sqrt(D), of a block of queries against all keys up to theirs.

        -inf stands where a query may not look, and must stay. q (B, H, Tq, D) and k (B, H, Tk, D) are as they
        were before `rotate`. Overriding this leaves the fused kernel for explicit softmax in query blocks.
        """
        return logits

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


class Learned(Encoding):
    """One learned vector per position: x_t + E[t], E (train.seq_len, C). GPT-2; Vaswani et al. 2017, 3.5.

    The one encoding with a hard limit: no row exists for a position that was never trained.
    """

    is_relative = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.max_length = config.train.seq_len
        self.table = nn.Embedding(self.max_length, config.model.n_embd)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(positions)


class SinusoidalOptions(Options):
    base: float = Field(10_000.0, gt=1, description="wavelengths run from 2 pi to 2 pi * base positions")
    layout: Literal["interleaved", "half"] = Field(
        "interleaved", description="interleaved: sin, cos, sin, cos ... as in the paper; half: all sines, "
                                   "then all cosines, as in fairseq")

    def problems(self, n_embd: int, n_head: int) -> dict[str, str]:
        if n_embd % 2:
            return {"encoding": f"needs an even model.n_embd for its pairs of sin and cos, got {n_embd}"}
        return {}


class Sinusoidal(Encoding):
    """sqrt(C) * x_t + [sin(t f_i), cos(t f_i)], f_i = base^(-2i / C). Vaswani et al. 2017, arXiv:1706.03762.

    No parameters, defined at every t (section 3.5). The factor sqrt(C) on the embeddings is the paper's
    (section 3.4): without it, sinusoids of amplitude 1 drown embeddings that start small.
    """

    Options = SinusoidalOptions
    is_relative = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.base, self.layout = config.position.base, config.position.layout

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        C = x.shape[-1]
        angle = rope.angles(positions, rope.inv_freq(C, self.base, device=x.device))     # (1 or B, T, C/2)
        if self.layout == "half":
            wave = torch.cat((angle.sin(), angle.cos()), dim=-1)
        else:
            wave = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)
        return x * C**0.5 + wave.to(x.dtype)                            # (B, T, C)


class RoPEOptions(Options):
    base: float = Field(
        10_000.0, gt=1, description="slowest pair turns by 1 / base radians a position, nearly")
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of each head's channels that rotate: GPT-NeoX 0.25, "
                                     "ChatGLM2 0.5; the rest carry no position")
    layout: Literal["half", "interleaved"] = Field(
        "half", description="which channels form a pair. half: i and i + R/2 (Hugging Face); interleaved: "
                            "2i and 2i + 1 (the paper, Meta). R = fraction * head dimension")

    def rotary_dim(self, n_embd: int, n_head: int) -> int:
        """R, the number of channels of each head that rotate."""
        return round(self.fraction * (n_embd // n_head))

    def problems(self, n_embd: int, n_head: int) -> dict[str, str]:
        D = n_embd // n_head
        R = round(self.fraction * D, 6)
        if R % 2 or not R:
            return {"fraction": f"must rotate a whole, even number of the {D} channels of a head "
                                f"(n_embd / n_head), got {R:g}"}
        return {}


class RoPE(Encoding):
    """Turn q and k by position times f_i = base^(-2i / R): logits depend on distance. RoFormer, section 3.

    `layers = "first"` is told of ChatGLM, wrongly: ChatGLM-6B and its successors rotate in every layer (the
    angles are computed once and shared, which may be how the story began). It stays a worthwhile ablation.
    """

    Options = RoPEOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.base, self.layout = config.position.base, config.position.layout
        self.rotary_dim = config.position.rotary_dim(config.model.n_embd, config.model.n_head)

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        f = rope.inv_freq(self.rotary_dim, self.base, device=q_pos.device)
        q_angle, k_angle = (rope.angles(p[:, None], f) for p in (q_pos, k_pos))     # (1 or B, 1, T, R/2)
        return q_angle.cos(), q_angle.sin(), k_angle.cos(), k_angle.sin()

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        q_cos, q_sin, k_cos, k_sin = at.tables
        return rope.turn(q, q_cos, q_sin, self.layout), rope.turn(k, k_cos, k_sin, self.layout)


class ALiBi(Encoding):
    """Linear penalty: logits[h, i, j] -= slope[h] * (i - j). Press et al. 2022, arXiv:2108.12409, section 3.

    No parameters, any T; the penalty is not divided by sqrt(D). Slopes are the paper's, see `slopes`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.n_head = config.model.n_head

    @staticmethod
    def slopes(n_head: int) -> list[float]:
        """2^(-8 (h + 1) / H) for a power of two; else the power below's, then every other one of twice that.

        The second rule is the authors' code (and BLOOM's and MPT's), not the plain formula with H = 12, say.
        """
        P = 2 ** (n_head.bit_length() - 1)                              # largest power of two <= H
        slopes = [2 ** (-8 * (h + 1) / P) for h in range(P)]
        return slopes + [2 ** (-4 * (2 * h + 1) / P) for h in range(n_head - P)]

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return torch.tensor(self.slopes(self.n_head), device=q_pos.device)[:, None, None]      # (H, 1, 1)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        return logits - at.tables * at.distance()


ENCODINGS: dict[str, type[Encoding]] = {
    "none": NoPE,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "rope": RoPE,
    "alibi": ALiBi,
}
