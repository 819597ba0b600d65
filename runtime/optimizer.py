"""The optimizer: AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest.

The parameters of the position encoding and of the query temperature are a group with a rate of their own.
Both optimizers keep their state for each parameter in `optimizer.state`, where checkpoint.py finds it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from config import Config
from model import GPT
from runtime import parallel
from runtime.device import pick_dtype

STACK = 2**24           # most elements that are orthogonalised at a time, unless one matrix has more
# coefficients of the Newton-Schulz iteration; Jordan 2024, https://kellerjordan.github.io/posts/muon
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
N_ITERATIONS = 5


class Muon(Optimizer):
    """Orthogonalised momentum: W -= lr 0.2 sqrt(max(rows, columns)) U V^T, the momentum being U S V^T.

    Jordan 2024, https://kellerjordan.github.io/posts/muon, with Nesterov momentum, and the scale and decay of
    Liu et al. 2025, arXiv:2502.16982, section 2.2: the root mean square of a step is about 0.2 lr, like
    AdamW's, so that one learning rate can serve both. It computes what torch.optim.Muon does with
    "match_rms_adamw"; in addition it batches matrices of one shape, and gathers those that FSDP2 shards.
    A parameter with more than two dimensions, such as experts (E, C, F), is a stack of matrices.

    All other parameters of the model are updated by `adamw`.
    A non-zero device scalar `found_inf` makes the step a no-op, without a host sync, as in PyTorch's AdamW.
    """

    _step_supports_amp_scaling = True       # says that it reads found_inf
    found_inf: Tensor | None = None

    def __init__(self, matrices: list[Tensor], adamw: AdamW, **keys: Any) -> None:
        super().__init__([{"params": matrices, **keys}, *adamw.param_groups], {})
        self.adamw = adamw
        # both optimizers hold the same dicts, groups and state: an lr set here is AdamW's too
        adamw.state = self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient, matrices of one shape together."""
        self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.adamw.step()
        group = self.param_groups[0]
        by_shape = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                by_shape[p.shape].append(p)
        for shape, matrices in by_shape.items():
            n = max(1, STACK // shape.numel())
            for first in range(0, len(matrices), n):
                self._update(matrices[first:first + n], group)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        # Each operation takes all matrices at once. One by one they would be nine small kernels a matrix, and
        # a small model's step on a GPU waits for the launching of kernels.
        for p in matrices:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        # under FSDP2 these are DTensors: what is computed of them is sharded in the same way
        averages = [self.state[p]["momentum_buffer"] for p in matrices]
        grads: list[Any] = [p.grad for p in matrices]
        grad = torch.stack(grads)                                       # (N, ..., rows, columns)
        is_skipped = torch.zeros((), dtype=torch.bool, device=grad.device)
        if self.found_inf is not None:
            is_skipped = self.found_inf > 0

        # If the step is skipped, the average replaces the gradient, which may be NaN: a lerp between equal
        # numbers changes nothing.
        grad = torch.where(is_skipped, torch.stack(averages), grad)
        torch._foreach_lerp_(averages, grad.unbind(), 1 - group["momentum"])
        update = grad.lerp(torch.stack(averages), group["momentum"])    # Nesterov: the gradient counts again

        decay = torch.where(is_skipped, 1.0, 1 - group["lr"] * group["weight_decay"])
        rate = torch.where(is_skipped, 0.0, -group["lr"] * 0.2 * math.sqrt(max(matrices[0].shape[-2:])))
        whole = parallel.unshard(update)                                # U and V^T are of whole matrices
        directions = orthogonal(whole.flatten(0, -3), group["dtype"]).view_as(whole)
        steps = parallel.shard_like(directions.to(update.dtype) * rate, update)
        torch._foreach_mul_(matrices, decay)
        torch._foreach_add_(matrices, steps.unbind())


def orthogonal(stack: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate U V^T of each matrix U S V^T (N, rows, columns): S becomes 0.7 ... 1.2.

    In bfloat16 if that is the dtype, else in fp32. Singular values that are smaller than the others by a
    factor of 1000 or more remain small.
    """
    a, b, c = COEFFICIENTS
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    x = x.to(dtype if dtype == torch.bfloat16 else torch.float32)       # float16 would lose small values
    for _ in range(N_ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)       # b G + c G G
        x = torch.baddbmm(x, polynomial, x, beta=a)                         # a x + (b G + c G G) x
    return x.mT if is_tall else x


def make_optimizer(model: GPT, config: Config) -> Optimizer:
    """The optimizer named by `train.optimizer`. Matrices decay, but not those of the encoding.

    The parameters of the encoding and the temperature have the rate train.lr * position.lr_scale and do not
    decay: a bias on the logits has to reach sizes of 1 to 10 that a weight of std 0.02 never needs, and decay
    would pull a distance that is rarely seen towards "no preference".

    Of an optimizer that you add here the loop does not call step() if the step is not finite, and waits for
    the GPU to know. PyTorch's with fused=True, and Muon above, need no waiting: they read `found_inf`.
    Every group needs a key lr_scale; the first must have 1.0, because its rate is logged as that of the run.
    """
    t = config.train
    # the groups by the role of their parameters in the model. Before each step the loop sets the "lr" of a
    # group to its lr_scale times the learning rate
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"params": [], "weight_decay": t.weight_decay, "lr_scale": 1.0},            # of blocks
        "embedding and head": {"params": [], "weight_decay": t.weight_decay, "lr_scale": 1.0},
        "vectors": {"params": [], "weight_decay": 0.0, "lr_scale": 1.0},
        "position": {"params": [], "weight_decay": 0.0, "lr_scale": config.position.lr_scale},
    }
    for name, p in model.named_parameters():
        role = "embedding and head"
        if name.startswith(("encoding.", "temperature.")):
            role = "position"
        elif p.ndim < 2:
            role = "vectors"
        elif name.startswith("blocks."):
            role = "matrices"
        groups[role]["params"].append(p)

    betas = (t.beta1, t.beta2)
    if t.optimizer == "adamw":
        return AdamW(groups.values(), lr=t.lr, betas=betas, fused=True)
    assert t.optimizer == "muon", "a new optimizer needs a branch here"
    of_muon = groups.pop("matrices")
    matrices = of_muon.pop("params")
    others = AdamW(groups.values(), lr=t.lr, betas=betas, fused=True)
    dtype = pick_dtype(t.dtype, model.embedding.weight.device)
    return Muon(matrices, others, **of_muon, lr=t.lr, momentum=t.beta1, dtype=dtype)
