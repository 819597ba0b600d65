"""Functions with a backward pass of their own, since autograd's would keep more memory until then.

Legend: B batch, T time, H heads of queries, C = n_embd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RoundedSoftmax(torch.autograd.Function):
    """softmax(scale logits + unseen) over the keys, computed in fp32 or better and rounded to `dtype`.

    Logits (B, H, Tq, Tk) of any dtype; `unseen`, 0 or -inf, broadcasts to them, and None is 0. Autograd would
    keep the weights in fp32 for the softmax and in bfloat16 for their product with the values. Here the
    rounded ones serve both, a third of the memory. With fp32 weights the gradients are autograd's to the bit.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, unseen: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
        if unseen is not None:
            logits = torch.add(unseen, logits, alpha=scale)             # masked, scaled and fp32, in one pass
        weights = logits.softmax(dim=-1).to(dtype)
        ctx.save_for_backward(weights)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        slope = torch._softmax_backward_data(grad, weights, -1, weights.dtype)   # p (g - sum of g p), in fp32
        return slope * ctx.scale if ctx.scale != 1 else slope, None, None, None


class SiluTimes(torch.autograd.Function):
    """silu(gate) up, the hidden numbers of SwiGLU (Shazeer 2020, arXiv:2002.05202). Any shape, both alike.

    Autograd would keep silu(gate) too; the backward pass computes it again.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():     # for gradients of gradients, which the kernel does not have
            sigmoid = gate.sigmoid()
            return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * F.silu(gate)
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


class DividedByRms(torch.autograd.Function):
    """x / rms(x) weight, rms(x)^2 = mean(x^2) + eps, x (..., C). Zhang and Sennrich 2019, arXiv:1910.07467.

    The values are those of nn.RMSNorm to the bit. PyTorch has no kernel for it on a CPU: autograd would keep
    x / rms(x) too, and take twice the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps = eps
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():     # for gradients of gradients: `inverse` as a function of x
            inverse = (x.square().mean(dim=-1, keepdim=True) + ctx.eps).rsqrt()
            scaled = x * inverse
            mean = (grad * weight * scaled).mean(dim=-1, keepdim=True)
            return (grad * weight - scaled * mean) * inverse, (grad * scaled).flatten(0, -2).sum(dim=0), None
        product = (grad * x).flatten(0, -2)                             # (N, C)
        weight_grad = product.mT @ inverse.flatten()
        mean = (product @ weight).view_as(inverse) * inverse.square() / x.shape[-1]
        return torch.mul(grad, weight).addcmul_(x, mean, value=-1).mul_(inverse), weight_grad, None
