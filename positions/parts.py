"""What several encodings are made of: biases by distance as matrices, an MLP for pairs, a short convolution.

Legend: B batch, T time (Tq queries, Tk keys), H = n_head, F features of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from positions.contract import At

MOST_HIDDEN = 2**20     # hidden numbers of a PairMLP held at a time on a CPU: 4 MB in fp32
MOST_HIDDEN_GPU = 2**26     # on other devices: 256 MB, in few large kernels


class ToeplitzBias(torch.autograd.Function):
    """The Toeplitz matrix of f: (..., n + m - 1) -> (..., n, m), whose row i is f from element n - 1 - i on.

    So a number for each distance becomes one for each query and key, where positions are consecutive. The
    gradient is a sum over diagonals, through strides alone: ptxas 12.8 miscompiles Inductor's kernel for the
    gradient of flattened and sliced rows, whose indices it divides by two widths (results/gpu).
    """

    @staticmethod
    def forward(ctx: Any, f: Tensor, n: int) -> Tensor:
        width = f.shape[-1]
        rows = f[..., None, :].expand(*f.shape[:-1], n, width)
        if n == 1:
            return rows
        # n = 3, f = f0 f1 f2 f3: written three times, cut to [2:-1] and read in rows of 3, it is
        #   f2 f3 f0
        #   f1 f2 f3
        #   f0 f1 f2    and the first m = 2 columns are the matrix
        flat = rows.flatten(-2)[..., n - 1:-1]
        moved = flat.unflatten(-1, (n, width - 1))
        return moved[..., :width + 1 - n]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        n, m = grad.shape[-2:]
        P = n + m - 1
        # row i, column c of `wide` is the gradient of f[c - i]: that of f[p] runs down a diagonal
        padded_width = m + 2 * n - 2
        wide = F.pad(grad, (n - 1, n - 1)).reshape(-1, n, padded_width)
        diagonals = wide.as_strided((len(wide), n, P), (n * padded_width, padded_width + 1, 1))
        sums = diagonals.sum(dim=1)
        return sums.view(*grad.shape[:-2], P), None


def toeplitz_distances(at: At) -> Tensor:
    """The distances (Tq + Tk - 1,) whose numbers `ToeplitzBias` takes, where positions are consecutive."""
    assert at.first_distance is not None
    Tq, Tk = at.q_pos.shape[1], at.k_pos.shape[1]
    return at.first_distance + Tq - 1 - torch.arange(Tq + Tk - 1, device=at.q_pos.device)


class PairMLP(nn.Sequential):
    """An MLP for each query and key, of all numbers (B, n, Tq, Tk) about the two -> (B, H, Tq, Tk).

    Its hidden numbers are computed again in the backward pass, and for a few queries at a time. When compiled
    all queries are taken at once: a loop would be unrolled.
    """

    def __init__(self, n: int, n_hidden: int, activation: nn.Module, n_head: int) -> None:
        super().__init__(nn.Linear(n, n_hidden), activation, nn.Linear(n_hidden, n_head))
        self.n_hidden = n_hidden

    def forward(self, x: Tensor) -> Tensor:
        B, _, Tq, Tk = x.shape
        most = MOST_HIDDEN if x.device.type == "cpu" else MOST_HIDDEN_GPU
        n_queries = max(1, most // (self.n_hidden * B * Tk))
        if torch.compiler.is_compiling():
            n_queries = Tq
        run: Callable[[Tensor], Tensor] = self.run_block
        if torch.is_grad_enabled():
            run = partial(checkpoint, self.run_block, use_reentrant=False, preserve_rng_state=False)
        blocks = [run(block) for block in x.split(n_queries, dim=2)]
        return torch.cat(blocks, dim=2)

    def run_block(self, x: Tensor) -> Tensor:
        """The MLP over dim 1 of a block of queries."""
        first, activation, last = self
        hidden = activation(self.linear(first, x.flatten(2)))           # (B, n_hidden, queries Tk)
        return self.linear(last, hidden).unflatten(2, x.shape[2:])

    @staticmethod
    def linear(layer: Any, x: Tensor) -> Tensor:
        """A linear layer over dim 1 of x (B, n, N), without moving that to the end."""
        weight = layer.weight.expand(len(x), -1, -1)
        bias = layer.bias[:, None].expand(len(x), -1, -1)
        return torch.baddbmm(bias, weight, x)


def short_convolution(x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    """Each channel of x (B, H, T, F) over the last n tokens of its document. weight is (H, F, n).

    The last weight is that of the token itself.
    """
    T = x.shape[2]
    n = weight.shape[-1]
    weight = weight[..., None, :, :]                                    # (H, 1, F, n)
    out = x * weight[..., -1]
    for back in range(1, min(n, T)):
        earlier = F.pad(x, (0, 0, back, -back))                         # the token `back` before, else 0
        if documents is not None:
            document_of_earlier = F.pad(documents, (back, -back), value=-1)
            is_same = document_of_earlier == documents                  # (B, T)
            earlier = earlier * is_same[:, None, :, None]
        out = out + earlier * weight[..., -1 - back]
    return out


def uniform(*shape: int, fan_in: int) -> nn.Parameter:
    """A parameter that is uniform in -fan_in^-0.5 ... fan_in^-0.5, as PyTorch's linear layers start."""
    x = 2 * torch.rand(shape) - 1
    return nn.Parameter(fan_in**-0.5 * x)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x, in fp32 or fp64, to the digits of a 16-bit dtype; keeps x's dtype, and has no gradient.

    It rounds the bits, because torch.compile removes a cast to the dtype and back.
    """
    bits = x.detach().contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    n = round(torch.finfo(dtype).eps / torch.finfo(x.dtype).eps)
    return ((bits + n // 2) & -n).view(x.dtype)
