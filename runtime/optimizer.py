"""The optimiser: AdamW of all parameters, or Muon of the blocks' matrices and AdamW of the rest.

Both see whole matrices, however many processes share them out (parallel.py), and keep what they remember of a
parameter under its name, where checkpoint.py finds it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from config import TrainConfig
from model import GPT
from runtime import parallel

STACK = 2**24           # numbers that are orthogonalised at a time, at most, unless one matrix has more
# Of Newton and Schulz' iteration; Jordan 2024, https://kellerjordan.github.io/posts/muon
COEFFICIENTS, N_ITERATIONS = (3.4445, -4.7750, 2.0315), 5


class Muon(Optimizer):
    """Momentum made orthogonal: W -= lr 0.2 sqrt(max(rows, columns)) U V^T, where it is U S V^T.

    Jordan 2024, https://kellerjordan.github.io/posts/muon, with Nesterov's momentum, and the scale and decay
    of Liu et al. 2025, arXiv:2502.16982, section 2.2: the root mean square of a step is about 0.2 lr, as
    AdamW's is, so that one learning rate can serve both. It is torch.optim.Muon's "match_rms_adamw", but for
    what that lacks: matrices of one shape are done together, and those that FSDP2 shards are gathered.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move each matrix that has a gradient, those of one shape together."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, matrices in by_shape.items():
                n = max(1, STACK // shape.numel())
                for first in range(0, len(matrices), n):
                    self._move(matrices[first:first + n], group)

    def _move(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        lr, momentum, updates = group["lr"], group["momentum"], []
        for p in matrices:
            assert p.grad is not None
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            average = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
            updates.append(parallel.unshard(p.grad.lerp(average, momentum)))
        scale = 0.2 * math.sqrt(max(matrices[0].shape))
        for p, update in zip(matrices, orthogonal(torch.stack(updates)), strict=True):
            p.mul_(1 - lr * group["weight_decay"])
            p.add_(parallel.shard_like(update.to(p.dtype), p), alpha=-lr * scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """U V^T of each matrix U S V^T (N, rows, columns), roughly: singular values of 0.7 ... 1.2, in bfloat16.

    Those far below the others, by a factor of 1000 or more, remain small.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).bfloat16()
    for _ in range(N_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Together(Optimizer):
    """Optimisers of disjoint parameters as one: all their groups, one state, a step of each."""

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all parameters that have a gradient."""
        for part in self.parts:
            part.step()


def make_optimizer(model: GPT, t: TrainConfig) -> Optimizer:
    """As `train.optimizer` says. Weight decay on the matrices of linear layers and embeddings alone."""
    hidden = {m.weight for m in model.blocks.modules() if isinstance(m, nn.Linear) and t.optimizer == "muon"}
    matrices = {m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)} - hidden
    rest = set(model.parameters()) - hidden - matrices

    def group(members: Collection[Tensor], weight_decay: float) -> dict[str, Any]:
        return {"params": [p for p in model.parameters() if p in members], "weight_decay": weight_decay}

    adamw = AdamW([group(matrices, t.weight_decay), group(rest, 0.0)], lr=t.lr, betas=(t.beta1, t.beta2),
                  fused=True)
    if not hidden:
        return adamw
    return Together(Muon([group(hidden, t.weight_decay)], t.lr, t.weight_decay, t.beta1), adamw)


def kept(group: dict[str, Any]) -> tuple[str, ...]:
    """Names of what is kept, between steps, of each parameter of a group."""
    return ("momentum_buffer",) if "momentum" in group else ("step", "exp_avg", "exp_avg_sq")
