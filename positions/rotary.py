"""Rotary encodings: queries and keys turned by their positions, so that logits depend on the distance.

Legend: B batch, T time (Tq queries, Tk keys), H = n_head, D = C // H, R = rotated channels. Angles in
radians.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from torch import Tensor

import rope
from positions.contract import At, Encoding, Options

if TYPE_CHECKING:
    from config import Config


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
