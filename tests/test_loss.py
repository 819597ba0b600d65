"""The loss in chunks is the loss at once, and the logits of the whole batch are nowhere held."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_memory import Memory
from torch import Tensor
from toys import lively, tokens

from base import loss
from base.loss import cross_entropy

N, C, V = 70, 24, 501


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, head, and targets of which some are not scored."""
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, C, generator=generator).to(dtype).requires_grad_() for n in (N, V))
    targets = torch.randint(V, (N,), generator=generator)
    targets[::7] = -100
    return x, head, targets


def measured(function: Callable[..., Tensor], *arguments: Tensor) -> list[Tensor]:
    """Value and gradients of 3 times a loss, as under an accumulation."""
    value = function(*arguments)
    return [value.detach(), *torch.autograd.grad(3 * value, arguments[:2])]


@pytest.mark.parametrize("n_rows", [1, 8, 23, 69])
def test_chunks_give_the_loss_and_its_gradients(n_rows: int, monkeypatch) -> None:
    x, head, targets = inputs()
    monkeypatch.setattr(loss, "MAX_LOGITS", n_rows * V + V - 1)
    expected = measured(lambda x, head, y: F.cross_entropy(x @ head.T, y), x, head, targets)
    torch.testing.assert_close(measured(cross_entropy, x, head, targets), expected, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(x, head, targets), expected[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_model_trains_alike_in_chunks(tied: str, tiny, monkeypatch) -> None:
    """Of a tied matrix both gradients arrive, that of the embedding and that of the output."""
    model, x, y = lively(tiny("rope", f"model.tied={tied}")).double(), tokens((3, 20)), tokens((3, 20), 1)
    y[0, :5] = -100
    found = []
    for limit in (loss.MAX_LOGITS, 16 * 257):
        monkeypatch.setattr(loss, "MAX_LOGITS", limit)
        model.zero_grad()
        value = model(x, y) / 2
        value.backward()
        found.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*found, atol=1e-11, rtol=1e-10)


def test_bf16_chunks_are_as_exact_as_bf16_at_once(monkeypatch) -> None:
    expected = measured(cross_entropy, *inputs())
    x, head, targets = inputs(torch.float32)
    errors = []
    for limit in (loss.MAX_LOGITS, 8 * V):
        monkeypatch.setattr(loss, "MAX_LOGITS", limit)
        with torch.autocast("cpu", torch.bfloat16):
            found = measured(cross_entropy, x, head, targets)
        assert {tensor.dtype for tensor in found} == {torch.float32}
        errors.append([(a - b).abs().mean() / b.abs().mean() for a, b in zip(found, expected, strict=True)])
    for at_once, chunks in zip(*errors, strict=True):
        assert chunks < 1.1 * at_once + 1e-6 and at_once < 0.01


def test_no_tensor_has_the_logits_of_the_whole_batch(tiny, monkeypatch) -> None:
    """Forward and backward, and without gradients."""
    model, x, y = lively(tiny("rope", "model.vocab_size=5000")), tokens((4, 30)), tokens((4, 30), 1)
    at_once, chunk = 4 * 30 * 5000, 4 * 5000
    weights = max(p.numel() for p in model.parameters())                # and their gradients
    assert weights < at_once / 3
    for limit, expected in ((at_once, at_once), (chunk, weights)):
        monkeypatch.setattr(loss, "MAX_LOGITS", limit)
        with Memory() as memory:
            model(x, y).backward()
        assert memory.largest == 4 * expected
    with Memory() as memory, torch.no_grad():
        model(x, y)
    assert memory.largest <= 4 * weights
