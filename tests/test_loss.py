"""The loss in chunks is the loss at once, and the logits of the whole batch are nowhere held."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import lively, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import loss
from runtime.loss import chunk_rows, mean_loss

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
    assert chunk_rows(N, V) == n_rows
    expected = measured(lambda x, head, y: F.cross_entropy(x @ head.T, y), x, head, targets)
    torch.testing.assert_close(measured(mean_loss, x, head, targets), expected, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(mean_loss(x, head, targets), expected[0], atol=1e-12, rtol=1e-12)


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
    expected = measured(mean_loss, *inputs())
    x, head, targets = inputs(torch.float32)
    errors = []
    for limit in (loss.MAX_LOGITS, 8 * V):
        monkeypatch.setattr(loss, "MAX_LOGITS", limit)
        with torch.autocast("cpu", torch.bfloat16):
            found = measured(mean_loss, x, head, targets)
        assert {tensor.dtype for tensor in found} == {torch.float32}
        errors.append([(a - b).abs().mean() / b.abs().mean() for a, b in zip(found, expected, strict=True)])
    for at_once, chunks in zip(*errors, strict=True):
        assert chunks < 1.1 * at_once + 1e-6 and at_once < 0.01


def test_no_target_at_all_is_nan_both_ways(monkeypatch) -> None:
    x, head, _ = inputs()
    for limit in (loss.MAX_LOGITS, 8 * V):
        monkeypatch.setattr(loss, "MAX_LOGITS", limit)
        assert mean_loss(x, head, torch.full((N,), -100)).isnan()


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made under it holds."""

    n = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        out = function(*arguments, **(options or {}))
        self.n = max(self.n, *(x.numel() for x in (out if isinstance(out, tuple | list) else [out])
                               if isinstance(x, Tensor)), 0)
        return out


def test_no_tensor_has_the_logits_of_the_whole_batch(tiny, monkeypatch) -> None:
    """Forward and backward, and without gradients."""
    model, x, y = lively(tiny("rope", "model.vocab_size=5000")), tokens((4, 30)), tokens((4, 30), 1)
    at_once, chunk = 4 * 30 * 5000, 4 * 5000
    weights = max(p.numel() for p in model.parameters())                # and their gradients
    assert weights < at_once / 3
    for limit, expected in ((at_once, at_once), (chunk, weights)):
        monkeypatch.setattr(loss, "MAX_LOGITS", limit)
        with Largest() as largest:
            model(x, y).backward()
        assert largest.n == expected
    with Largest() as largest, torch.no_grad():
        model(x, y)
    assert largest.n == weights


def test_what_waits_for_the_backward_pass_is_of_the_size_of_x_and_head(monkeypatch) -> None:
    kept: list[int] = []
    for limit in (loss.MAX_LOGITS, 8 * V):
        monkeypatch.setattr(loss, "MAX_LOGITS", limit)
        kept.append(0)

        def count(x: Tensor) -> Tensor:
            kept[-1] += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            mean_loss(*inputs())
    at_once, chunks = kept
    assert chunks == (N + V) * C < N * V <= at_once


def test_small_vocabularies_and_batches_are_done_at_once() -> None:
    assert chunk_rows(256 * 16, 257) == 256 * 16 and chunk_rows(1, 10**9) == 1
    assert chunk_rows(16 * 1024, 50_257) == 2560                        # 7 chunks, whole tiles


@pytest.mark.slow
def test_compiled_chunks_keep_no_logits_for_the_backward_pass(monkeypatch) -> None:
    """One graph each way; what passes between them is of the size of x and head; the same values."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    largest = {}

    def noting(name: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
            made = [node for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
            largest[name] = max(node.meta["val"].numel() for node in made)
            return make_boxed_func(graph.forward)
        return compiler

    monkeypatch.setattr(loss, "MAX_LOGITS", 8 * V)
    x, head, targets = inputs()
    backend = aot_autograd(fw_compiler=noting("forward"), bw_compiler=noting("backward"),
                           partition_fn=min_cut_rematerialization_partition)     # inductor's
    compiled = torch.compile(mean_loss, backend=backend, fullgraph=True)
    torch.testing.assert_close(measured(compiled, x, head, targets), measured(mean_loss, x, head, targets))
    assert largest == {"forward": V * C, "backward": V * C}
    assert N * V > 2 * V * C > 8 * V
