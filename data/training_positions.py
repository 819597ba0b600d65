"""The positions at which a batch is trained: a pure function of the seed and the step.

Legend: B batch, T time (train.seq_len), M = train.position_range.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from config import TrainConfig


def training_positions(t: TrainConfig, step: int) -> Tensor | None:
    """Positions (B, T) of the whole batch, increasing in each row; None: 0 ... T - 1. See train.positions.

    pose: 0 ... u - 1, then from u + s on, with u in 1 ... (T + 1) / 2 and s in 0 ... M - T, uniform for each
    row: short sequences see long distances. Zhu et al. 2023, arXiv:2309.10400, section 3.2, with two chunks.
    random: T of the integers 0 ... M - 1, drawn without replacement, for each row; Ruoss et al. 2023,
    arXiv:2305.16843, draw once for a whole batch.
    """
    if t.positions == "plain":
        return None
    rng, B, T, M = np.random.default_rng([t.seed, step]), t.batch_size, t.seq_len, t.position_range
    if t.positions == "pose":
        first = rng.integers(1, (T + 1) // 2 + 1, size=(B, 1))
        skip = rng.integers(M - T + 1, size=(B, 1))
        index = np.arange(T)
        return torch.from_numpy(index + (index >= first) * skip)
    rows = [rng.choice(M, T, replace=False, shuffle=False) for _ in range(B)]
    return torch.from_numpy(np.sort(rows, axis=1))
