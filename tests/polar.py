"""An encoding from outside of the registry, as a fork would add it: it widens q and k, and has parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rope
from positions import At, Shape
from positions.rotary import RoPE, RotaryOptions


class Polar(RoPE):
    """Each channel is a magnitude softplus(x) at the angle of its position. After PoPE, arXiv:2509.10534.

    D channels become D pairs, so q and k are twice as wide. A learned phase is added to the angles of q, for
    each head of queries.
    """

    def __init__(self, shape: Shape, options: RotaryOptions) -> None:
        super().__init__(shape, options)
        self.rotary_dim = 2 * shape.head_dim
        self.phase = nn.Parameter(torch.zeros(shape.n_layer, shape.n_head, 1, shape.head_dim))

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        q, k = (torch.cat((F.softplus(x), torch.zeros_like(x)), dim=-1) for x in (q, k))    # (..., 2 D)
        q, k = super().rotate(q, k, at)
        phase = self.phase[at.layer]                                    # (H, 1, D)
        return rope.turn(q, phase.cos(), phase.sin(), self.layout), k
