"""Query temperature: a factor on the query that grows with the number of keys it sees, under any encoding.

Softmax over more keys is flatter. A factor on the query at position m multiplies all its logits before any
bias. It depends on m alone, so cached decoding equals a full forward pass, but logits change if all positions
shift.

Legend: B batch, T time, H = n_head, L = train.seq_len.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from positions.contract import Shape


class Temperature(nn.Module):
    """No factor. Override `forward` to return one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n_layer = shape.n_layer

    def forward(self, q_pos: Tensor) -> list[Tensor] | list[None]:
        """Positions (1 or B, T) -> for each layer a factor on q, (1 or B, 1 or H, T, 1), or None."""
        return [None] * self.n_layer


class LogN(Temperature):
    """q *= max(1, ln(m + 1) / ln L): keeps attention sharp beyond L. J. Su, github.com/bojone/rerope.

    No parameters, and exactly 1 at m < L: it leaves a trained model unchanged there, so it can also be
    applied after training.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.seq_len = shape.seq_len

    def forward(self, q_pos: Tensor) -> list[Tensor] | list[None]:
        # ln n / ln L = 1 + ln(n / L) / ln L; the second form rounds to exactly 1 at n = L
        n_over_L = ((q_pos + 1) / self.seq_len).clamp(min=1)
        factor = 1 + n_over_L.log() / math.log(self.seq_len)            # (1 or B, T)
        return [factor[:, None, :, None]] * self.n_layer


class Constant(Temperature):
    """q *= factor, at every position."""

    def __init__(self, shape: Shape, factor: float) -> None:
        super().__init__(shape)
        self.factor = factor

    def forward(self, q_pos: Tensor) -> list[Tensor] | list[None]:
        factor = torch.full(q_pos.shape, self.factor, device=q_pos.device)      # (1 or B, T)
        return [factor[:, None, :, None]] * self.n_layer


class SSMax(Temperature):
    """softmax(s ln(n) z), n = m + 1 keys, s learned by head and layer. Nakanishi 2025, arXiv:2501.19399.

    The bias that the paper tries and rejects is omitted. s starts at 0.43, the value of the paper's figure 1.
    At position 0 the factor is ln 1 = 0, but that query sees a single key.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.s = nn.Parameter(torch.full((shape.n_layer, shape.n_head), 0.43))

    def forward(self, q_pos: Tensor) -> list[Tensor] | list[None]:
        log_n = (q_pos + 1).clamp(min=1).log()                          # (1 or B, T)
        return [s[:, None, None] * log_n[:, None, :, None] for s in self.s]


class Llama4(Temperature):
    """q *= 1 + 0.1 ln(1 + floor((m + 1) / L)): steps at multiples of L. Llama 4's code, 2025.

    There L is 8192, and it acts in the layers without an encoding alone. Below L it is 1.
    """

    first = 1

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.seq_len = shape.seq_len

    def forward(self, q_pos: Tensor) -> list[Tensor] | list[None]:
        steps = ((q_pos + self.first) / self.seq_len).floor().clamp(min=0)
        factor = 1 + 0.1 * steps.log1p()                                # (1 or B, T)
        return [factor[:, None, :, None]] * self.n_layer


class Ministral3(Llama4):
    """q *= 1 + 0.1 ln(1 + floor(m / L)): Llama 4's, a position later, in all layers. arXiv:2601.08584."""

    first = 0


TEMPERATURES: dict[str, type[Temperature]] = {
    "none": Temperature, "log_n": LogN, "ssmax": SSMax, "llama4": Llama4, "ministral3": Ministral3}
