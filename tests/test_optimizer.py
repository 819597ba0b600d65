"""Muon and AdamW: what moves which parameter, by how much, and that processes and stops change nothing."""

import math
from typing import get_args

import pytest
import torch
from toys import every_encoding

from config import TrainConfig
from model import GPT
from runtime.optimizer import Muon, make_optimizer, orthogonal


@every_encoding
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_is_in_one_group(name: str, optimizer: str, tiny) -> None:
    """Muon's are the matrices of the layers, and stacks of them; these and embeddings decay, nothing else."""
    config = tiny(name, f"train.optimizer={optimizer}", "model.bias=true", "model.norm=layernorm",
                  "train.beta1=0.7", "train.beta2=0.8", "train.weight_decay=0.3", "position.lr_scale=8",
                  "position.temperature=ssmax")
    model = GPT(config)
    model.blocks[0].experts = torch.nn.Parameter(torch.randn(2, 8, 12))     # of a fork
    groups = make_optimizer(model, config).param_groups
    scales = {p: group["lr_scale"] for group in groups for p in group["params"]}
    moved = [p for group in groups for p in group["params"]]
    assert len(moved) == len(set(moved)) and set(moved) == set(model.parameters())
    by_muon = {p for group in groups if "momentum" in group for p in group["params"]}
    decayed = {p for group in groups if group["weight_decay"] == 0.3 for p in group["params"]}
    assert {group.get("betas", group.get("momentum")) for group in groups} - {0.7} == {(0.7, 0.8)}
    for path, p in model.named_parameters():
        is_own = path.startswith(("encoding.", "temperature."))
        assert scales[p] == (8 if is_own else 1), path
        assert (p in by_muon) == (optimizer == "muon" and path.startswith("blocks.") and p.dim() > 1), path
        assert (p in decayed) == (p.dim() > 1 and not is_own), path


@pytest.mark.parametrize("name", get_args(TrainConfig.model_fields["optimizer"].annotation))
def test_a_step_that_is_not_finite_changes_neither_parameters_nor_state(name: str, tiny) -> None:
    """Neither moments nor counts of steps, and also before a first step has made them."""
    config = tiny("rope", f"train.optimizer={name}", "train.weight_decay=0.1")
    model = GPT(config)
    optimizer = make_optimizer(model, config)
    generator = torch.Generator().manual_seed(0)

    def step(is_finite: bool) -> list[torch.Tensor]:
        """Parameters and state after a step; of the state only what is not 0, as it is before any step."""
        optimizer.found_inf = torch.tensor(0.0 if is_finite else 1.0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            if not is_finite:
                p.grad.view(-1)[0] = math.nan
        optimizer.step()
        state = [x for p in model.parameters() for x in optimizer.state[p].values() if x.any()]
        return [x.detach().clone() for x in (*model.parameters(), *state)]

    before = [p.detach().clone() for p in model.parameters()]
    for is_finite in (False, True, False):
        after = step(is_finite)
        is_same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert is_same != is_finite
        before = after


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_computes_in_the_dtype_of_training(dtype: str, tiny) -> None:
    """Also in float32 on a machine where "auto" would be bfloat16, so that a recipe means the same there."""
    config = tiny("none", "train.optimizer=muon", f"train.dtype={dtype}", "train.weight_decay=0.0")
    model = GPT(config)
    p, optimizer = model.blocks[0].attention.q.weight, make_optimizer(model, config)
    torch.nn.init.zeros_(p)
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    step = -p.detach() / (0.2 * math.sqrt(max(p.shape)))
    for each in (torch.float32, torch.bfloat16):
        error = (step - orthogonal(p.grad[None], each)[0]).abs().max()
        assert (error < 1e-4) == (f"torch.{dtype}" == str(each)), (each, error)


def muon(matrices: list[torch.nn.Parameter], dtype: torch.dtype) -> Muon:
    """Muon, and AdamW for a parameter that has no gradient."""
    rest = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    return Muon(matrices, rest, lr=0.02, weight_decay=0.1, momentum=0.95, dtype=dtype)


def test_muon_takes_a_stack_for_its_matrices() -> None:
    """Experts (E, C, F) move as E matrices of their own do."""
    generator = torch.Generator().manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(3, 8, 20, generator=generator))
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    optimizers = [muon([stack], torch.float32), muon(alone, torch.float32)]
    for _ in range(3):
        stack.grad = torch.randn(stack.shape, generator=generator)
        for p, grad in zip(alone, stack.grad, strict=True):
            p.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack, torch.stack(alone))


def test_muon_is_that_of_torch() -> None:
    """To bfloat16's rounding, whatever shapes are stacked; a matrix without gradient stays."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 8), (16, 16), (8, 24), (16, 16), (5, 1), (16, 16)]
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = (muon(ours, torch.bfloat16),
                  torch.optim.Muon(theirs, 0.02, 0.1, adjust_lr_fn="match_rms_adamw"))
    for _ in range(5):
        for p, q in list(zip(ours, theirs, strict=True))[:-1]:
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q, shape in zip(ours, theirs, shapes, strict=True):
        torch.testing.assert_close(p, q, atol=5 * 0.02 * 0.2 * math.sqrt(max(shape)) * 0.02, rtol=0)
    assert torch.equal(ours[-1], theirs[-1]) and ours[-1] not in optimizers[0].state
