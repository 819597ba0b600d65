"""Backward passes of our own: the gradients are autograd's, and less is kept for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention import Mask, attend_in_blocks
from config import ModelConfig
from model import MLP, RMSNorm
from positions import At, NoPE, Shape
from positions.contract import Options
from rope import Turned, turn
from runtime.gradients import DividedByRms, RoundedSoftmax, SiluTimes

DTYPES = [torch.float32, torch.float64]


def masked(T: int) -> Tensor:
    return torch.where(torch.ones(T, T).tril().bool(), 0.0, -torch.inf)


def by_autograd(logits: Tensor, unseen: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    logits = logits if unseen is None else torch.add(unseen, logits, alpha=scale)
    return logits.softmax(dim=-1).to(dtype)


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradients of all inputs for a random gradient of the result."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def kept_bytes(function: Callable[[], Tensor]) -> int:
    """The memory of all tensors that the backward pass keeps, each storage counted once."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return sum(n for n, _ in kept.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_mask", "scale"), [(True, 0.3), (True, 1.0), (False, 1.0)])
def test_the_softmax_is_that_of_autograd_to_the_bit(dtype: torch.dtype, has_mask: bool, scale: float) -> None:
    logits = 3 * torch.randn(2, 3, 9, 9, dtype=dtype)
    unseen = masked(9).to(dtype) if has_mask else None
    ours = gradients(lambda x: RoundedSoftmax.apply(x, unseen, scale, dtype), logits)
    theirs = gradients(lambda x: by_autograd(x, unseen, scale, dtype), logits)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
def test_rounded_weights_give_gradients_as_exact_as_bfloat16_allows(logits_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, unseen = (3 * torch.randn(2, 3, 64, 64)).to(logits_dtype), masked(64)
    out, grad = gradients(lambda x: RoundedSoftmax.apply(x, unseen, 0.5, torch.bfloat16), logits)
    exact, exact_grad = gradients(lambda x: by_autograd(x, unseen, 0.5, torch.float64), logits.double())
    assert out.dtype == torch.bfloat16 and grad.dtype == logits_dtype
    assert (grad - exact_grad).norm() < 2**-8 * exact_grad.norm()
    assert ((out - exact).abs() <= 2**-8 * exact).all()         # rounded once


def test_gradients_of_gradients() -> None:
    logits, unseen = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True), masked(4)
    gate, up = torch.randn(2, 5, dtype=torch.float64, requires_grad=True), torch.randn(2, 5).double()
    up.requires_grad_()
    angle, weight = torch.randn(2, 2, dtype=torch.float64), up[0].detach().clone().requires_grad_()
    for function, inputs in ((lambda x: RoundedSoftmax.apply(x, unseen, 0.7, torch.float64), (logits,)),
                             (SiluTimes.apply, (gate, up)),
                             (lambda x, weight: DividedByRms.apply(x, weight, 1e-3), (gate, weight)),
                             (lambda x: Turned.apply(x, angle.cos(), angle.sin(), "half"), (gate,))):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)
        plain, kept = (torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=is_kept)
                       for is_kept in (False, True))
        for a, b in zip(plain, kept, strict=True):      # gradgradcheck trusts the second
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_silu_times_is_that_of_autograd(dtype: torch.dtype) -> None:
    gate, up = (3 * torch.randn(4, 7, dtype=torch.float64)).to(dtype), torch.randn(4, 7).to(dtype)
    for a, b in zip(gradients(SiluTimes.apply, gate, up), gradients(lambda g, u: F.silu(g) * u, gate, up),
                    strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_that_of_autograd(dtype: torch.dtype) -> None:
    x, weight = 3 * torch.randn(4, 7, 96, dtype=dtype), torch.randn(96, dtype=dtype)
    ours = gradients(lambda x, weight: DividedByRms.apply(x, weight, 1e-5), x, weight)
    theirs = gradients(lambda x, weight: F.rms_norm(x, (96,), weight, 1e-5), x, weight)
    assert torch.equal(ours[0], theirs[0])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("R", [16, 6])
def test_a_rotation_in_training_is_the_one_without_gradients(dtype: torch.dtype, layout: str, R: int) -> None:
    x, angle = torch.randn(2, 9, 3, 16, dtype=dtype).transpose(1, 2), torch.randn(9, R // 2, dtype=dtype)
    cos, sin = angle.cos(), angle.sin()
    ours = gradients(lambda x: turn(x, cos, sin, layout), x)
    leaf = cos.clone().requires_grad_()         # learned angles take the path of autograd
    theirs = gradients(lambda x: turn(x, leaf, sin, layout), x)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_what_the_backward_pass_keeps() -> None:
    """Attention: its inputs, two bytes a logit. SwiGLU: gate, up, the input of down. A norm: its input."""
    B, H, T, D = 2, 2, 128, 4
    q, k, v = (torch.randn(B, H, T, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    encoding = NoPE(Shape(1, H, H * D, D, T), Options(encoding="none"))
    at = At(torch.arange(T)[None], torch.arange(T)[None], 0, None)
    with torch.autocast("cpu", torch.bfloat16):
        n_bytes = kept_bytes(lambda: attend_in_blocks(q, k, v, encoding, at, Mask(in_order=True), 0.0))
    assert n_bytes < B * H * T * (2 * T + 16 * D)
    config = ModelConfig(n_layer=1, n_head=1, n_embd=64, n_hidden=256, vocab_size=2)
    mlp, x = MLP(config), torch.randn(512, 64)
    parameters = sum(p.numel() for p in mlp.parameters())
    assert kept_bytes(lambda: mlp(x)) <= 4 * (3 * 512 * 256 + 512 * 64 + parameters)
    norm, x = RMSNorm(64, eps=1e-5), torch.randn(512, 64, requires_grad=True)
    assert kept_bytes(lambda: norm(x)) <= 4 * (512 * 64 + 512 + 64)
    x, angle = x.view(8, 64, 64), torch.randn(64, 32)
    assert kept_bytes(lambda: turn(x, angle.cos(), angle.sin())) <= 4 * 2 * angle.numel()
