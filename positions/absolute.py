"""Absolute encodings: something added to the token embeddings at each position.

Legend: B batch, T time, C = n_embd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

import rope
from positions.contract import Encoding, Options

if TYPE_CHECKING:
    from config import Config


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
