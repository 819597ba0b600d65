"""Cross-entropy over a vocabulary: in one piece, or in chunks of rows if all logits would fill the memory.

Legend: N = B T rows, one target each, C = n_embd, V vocabulary. Loss in nats per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100          # a target that is not scored
MAX_LOGITS = 2**27      # in memory at a time: 0.5 GB in fp32


def cross_entropy(x: Tensor, head: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of targets (N,) under the logits x head^T, of x (N, C) and the matrix head (V, C).

    The mean over scored targets, NaN if there are none, or with reduction "sum" their sum. The product is in
    autocast's dtype, the rest in fp32 or fp64. What changes the logits, such as a soft cap, must be added
    here in three places, and to GPT.logits (model.py).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)                 # fp64 stays
    if len(x) * len(head) <= MAX_LOGITS:
        logits = F.linear(x, head).to(dtype)                            # (N, V)
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)
    n_rows = max(1, MAX_LOGITS // len(head))
    n_rows = n_rows // 256 * 256 or n_rows                              # whole tiles of a matrix product
    if torch.is_grad_enabled():
        total = ChunkedLoss.apply(x, head, targets, n_rows)
    else:
        losses = []
        for rows, wanted in zip(x.split(n_rows), targets.split(n_rows), strict=True):
            logits = F.linear(rows, head).to(dtype)                     # (rows, V)
            losses.append(F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum"))
        total = torch.stack(losses).sum()
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


class ChunkedLoss(torch.autograd.Function):
    """The sum of losses and its gradients chunk by chunk: logits exist only in their chunk, computed once.

    The gradient of a scored row's logits is softmax - one-hot. The forward pass computes it while the logits
    exist, and saves the gradients of x and head, which the backward pass only scales. As in Liger-Kernel, Hsu
    et al. 2024, arXiv:2410.10989.
    torch.nn.functional.linear_cross_entropy (torch 2.13) chunks too, but on a CPU it takes 2 to 5 times as
    long (N, C, V = 1024, 128, 16384) and ignores autocast.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, targets: Tensor, n_rows: int) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weights = (targets != IGNORED).to(dtype)                        # (N,): 1 if scored, else 0
        token = torch.arange(len(head), device=x.device, dtype=torch.int32)
        losses, x_grads, head_grad = [], [], torch.zeros_like(head)
        chunks = zip(x.split(n_rows), targets.split(n_rows), weights.split(n_rows), strict=True)
        for rows, wanted, weight in chunks:
            wanted = wanted.clamp(min=0)[:, None]                       # (rows, 1)
            weight = weight[:, None]                                    # (rows, 1)
            logits = F.linear(rows, head)                               # (rows, V)
            log_p = logits.to(dtype).log_softmax(dim=-1)
            losses.append(-(log_p.gather(-1, wanted) * weight).sum())
            # a comparison instead of a scatter: torch.compile fuses it with the rest into one kernel
            slope = log_p.exp_().add_(token == wanted.int(), alpha=-1).to(logits.dtype)
            x_grads.append(((slope @ head) * weight).to(x.dtype))
            head_grad += slope.T @ (rows * weight).to(x.dtype)
        ctx.save_for_backward(torch.cat(x_grads), head_grad)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x_grad, head_grad = ctx.saved_tensors
        return grad * x_grad, grad * head_grad, None, None
