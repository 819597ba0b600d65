"""Biases on the logits that depend on the distance between query and key, not on what stands there.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, D = C // H.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from positions.contract import At, Encoding

if TYPE_CHECKING:
    from config import Config


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
