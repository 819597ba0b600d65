"""Absolute encodings: a vector added to the token embedding, or to queries and keys, at each position.

Integer, IntegerNormalised and Binary are first attempts that lead to the sinusoids: see C. Fleetwood 2024
(huggingface.co/blog/designing-positional-encoding) and A. Kazemnejad 2019
(kazemnejad.com/blog/transformer_architecture_positional_encoding).

Legend: B batch, T time, C = n_embd, H = n_head, G = n_kv_head, D channels of a head.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

import rope
from positions.contract import At, Encoding, Options, Shape


class LearnedOptions(Options):
    def problems(self, config: Any) -> dict[str, str]:
        t = config.train
        if t.position_range > t.seq_len:
            return {"encoding": "learned has no position from train.seq_len on: train.position_range = "
                                f"{t.position_range} needs another encoding"}
        return {}


class Learned(Encoding):
    """One learned vector per position: x_t + E[t], E (train.seq_len, C). GPT-2; Vaswani et al. 2017, 3.5.

    It has a hard limit: there is no row for a position beyond the training length.
    """

    Options = LearnedOptions
    is_relative = False

    def __init__(self, shape: Shape, options: LearnedOptions) -> None:
        super().__init__(shape, options)
        self.max_length = shape.seq_len
        self.table = nn.Embedding(self.max_length, shape.n_embd)
        nn.init.normal_(self.table.weight, std=0.02)    # as for tokens; the default, 1, would drown them

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(positions)


class EvenWidthOptions(Options):
    def problems(self, config: Any) -> dict[str, str]:
        C = config.model.n_embd
        if C % 2:
            return {"encoding": f"needs an even model.n_embd for its pairs of sin and cos, got {C}"}
        return {}


class WaveOptions(Options):
    head_multiple = 2

    base: float = Field(10_000.0, gt=1, description="wavelengths run from 2 pi to 2 pi * base positions")
    layout: Literal["interleaved", "half"] = Field(
        "interleaved", description="interleaved: sin, cos, sin, cos ... as in the paper; half: all sines, "
                                   "then all cosines, as in fairseq")
    sine_alone: bool = Field(
        False, description="sin(t base^(-i / C)) in channel i of C: no matrix takes the code of t to that of "
                           "t + k, as with pairs of sine and cosine")


class SinusoidalOptions(EvenWidthOptions, WaveOptions):
    """The width of the model counts, not that of a head, so EvenWidthOptions comes first."""

    def problems(self, config: Any) -> dict[str, str]:
        if config.model.scaled_embedding:
            return {"encoding": "sinusoidal multiplies embeddings by sqrt(n_embd) itself; set "
                                "model.scaled_embedding=false"}
        return super().problems(config)


def wave(positions: Tensor, width: int, options: WaveOptions) -> Tensor:
    """[sin(t f_i), cos(t f_i)], f_i = base^(-2i / width): positions (1 or B, T) -> (1 or B, T, width)."""
    if options.sine_alone:
        return rope.angles(positions, rope.inv_freq(2 * width, options.base, device=positions.device)).sin()
    angle = rope.angles(positions, rope.inv_freq(width, options.base, device=positions.device))
    if options.layout == "half":
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


class Sinusoidal(Encoding):
    """sqrt(C) * x_t + [sin(t f_i), cos(t f_i)], f_i = base^(-2i / C). Vaswani et al. 2017, arXiv:1706.03762.

    No parameters, defined at every t (section 3.5). The factor sqrt(C) on the embeddings is the paper's
    (section 3.4). Without it, sinusoids of amplitude 1 drown embeddings that start small. position.drop_at
    drops the factor too, so the loss jumps.
    """

    Options = SinusoidalOptions
    is_relative = False

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        C = x.shape[-1]
        return x * C**0.5 + wave(positions, C, self.options).to(x.dtype)        # (B, T, C)


class SinusoidalQK(Encoding):
    """softmax((Q + P) (K + P)^T / sqrt(D)) V: sinusoids P of D channels on queries and keys, not on values.

    No parameters, defined at every position. The residual stream carries no position, so each layer gets it
    anew, and `layers` chooses which. Shortformer adds C channels to the inputs of W_q and W_k instead: Press
    et al. 2021, arXiv:2012.15832, section 4.
    """

    Options = WaveOptions
    is_relative = False

    def __init__(self, shape: Shape, options: WaveOptions) -> None:
        super().__init__(shape, options)
        self.head_dim = shape.head_dim

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        """P at the positions of queries and keys, (1 or B, 1, T, D)."""
        q, k = (wave(positions, self.head_dim, self.options)[:, None] for positions in (q_pos, k_pos))
        return q, k

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        of_q, of_k = at.tables
        return q + of_q.to(q.dtype), k + of_k.to(k.dtype)


class Integer(Encoding):
    """The raw position, added to every channel: x_t + t. A first attempt: Fleetwood 2024, Kazemnejad 2019.

    The simplest idea, and a bad one: t dwarfs embeddings of size 0.02, and at t = 2^20 fp32 rounds them away.
    """

    is_relative = False

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + positions[..., None]                                 # (B, T, C)


class IntegerNormalised(Encoding):
    """The position divided by L = train.seq_len, added to every channel: x_t + t / L. Kazemnejad 2019.

    L is the training length: with that of the text, each new token would change the encoding of earlier ones.
    """

    is_relative = False

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.seq_len = shape.seq_len

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + (positions / self.seq_len)[..., None].to(x.dtype)    # (B, T, C)


class Binary(Encoding):
    """The position's bits, added to the first channels: x_t[c] + bit c of t, lowest first. Fleetwood 2024.

    Sinusoids are its smooth form. It has 2^C positions if C < 63, else those of int64. Beyond L, bits that
    were always 0 in training become 1.
    """

    is_relative = False

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        C = shape.n_embd
        self.n_bits = min(C, 63)                                        # positions are int64
        self.max_length = 2**C if C < 63 else None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        place = torch.arange(self.n_bits, device=x.device)
        bits = (positions[..., None] >> place) & 1                      # (1 or B, T, n_bits)
        return x + F.pad(bits, (0, x.shape[-1] - self.n_bits))          # (B, T, C)
