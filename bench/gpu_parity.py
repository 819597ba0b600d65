"""Does this device compute what the formulas say? Loss and gradients against an explicit softmax in fp64.

`python -m bench.gpu_parity CASE [CASE ...] [--device cuda] [--compile]`, as bench/gpu.py calls it. A case is
an encoding, or one of CASES below. Each is computed on the CPU in fp64, by explicit softmax in blocks and
with all logits at once; then on the device as training does it, in fp32 and bf16, eager, and compiled too
with --compile. Prints a JSON object a line: case, way, both errors, and whether they are within TOLERANCES.

Weights are such that logits have a standard deviation of 2 before the encoding acts: at the model's own
initialisation all weights of attention are alike, and much could be wrong without being seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import model as decoder
from attention import attend_in_blocks
from config import load_config
from model import GPT
from positions import ENCODINGS
from runtime.command import argument_parser, run_command
from runtime.errors import UserError, one_line

ROOT = Path(__file__).resolve().parent.parent

# 64 channels a head, as GPT-2; T is no multiple of the 128 that kernels compute at a time
BATCH_SIZE, T, VOCAB_SIZE = 2, 200, 256
SHAPE = ["model.n_layer=2", "model.n_head=2", "model.n_embd=128", f"model.vocab_size={VOCAB_SIZE}",
         f"train.seq_len={T}"]
# encodings that model.flex serves (flex.py, where this checkout has it); it does nothing on a CPU
FLEXIBLE = [name for name, encoding in ENCODINGS.items() if getattr(encoding, "by_distance", False)]
CASES = {
    **{name: [f"position.encoding={name}"] for name in ENCODINGS},
    **{f"{name}, flex": [f"position.encoding={name}", "model.flex=true"] for name in FLEXIBLE},
    "rope, window 50": ["model.window=50"],
    "rope, 1 head of keys": ["model.n_kv_head=1"],
    "t5, window 50": ["position.encoding=t5", "model.window=50"],
    **({"rope, window 50, flex": ["model.window=50", "model.flex=true"]} if FLEXIBLE else {}),
    "alibi, 1 head of keys": ["position.encoding=alibi", "model.n_kv_head=1"],
}


class Tolerance(NamedTuple):
    """Largest |loss - exact| / exact, and of any parameter's gradient |g - exact| / |exact|, norms."""

    loss: float
    gradient: float


# measured on a CPU: fp32 at most 2e-7 and 7e-6, bf16 at most 4e-4 and 0.07 (cope; the others 0.04). TF32 is
# off by 3e-4 and more, and does not pass for fp32
TOLERANCES = {torch.float32: Tolerance(1e-5, 2e-4), torch.bfloat16: Tolerance(2e-3, 0.1)}
Gradients = dict[str, Tensor]


def make_model(case: str) -> GPT:
    """The model of a case, the same at each call."""
    config = load_config(ROOT / "configs" / "quick.toml", [*SHAPE, *CASES[case]])
    torch.manual_seed(0)
    model = GPT(config)
    generator = torch.Generator().manual_seed(1)
    own = set(model.encoding.parameters())
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p in own:
                p.add_(0.03 * noise)            # what begins with zeros must not stay there
            elif p.dim() > 1:
                p.copy_(1.4 / p.shape[1]**0.5 * noise)
    return model


def make_batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets (BATCH_SIZE, T)."""
    tokens = torch.randint(VOCAB_SIZE, (BATCH_SIZE, T + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(model: GPT) -> Gradients:
    """Those of all parameters that have one, on the CPU, fp64."""
    return {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}


def exact(case: str) -> tuple[float, Gradients]:
    """Loss and gradients in fp64 on the CPU; every encoding by explicit softmax, none by a kernel."""
    x, y = make_batch()
    model = make_model(case).double()
    with mock.patch.object(decoder, "attend", attend_in_blocks):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    return float(loss.detach()), gradients(model)


def computed(case: str, device: str, dtype: torch.dtype, is_compiled: bool) -> tuple[float, Gradients]:
    """Loss and gradients as training computes them."""
    x, y = (tokens.to(device) for tokens in make_batch())
    model = make_model(case).to(device)
    call: Any = torch.compile(model, dynamic=False) if is_compiled else model
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        loss = call(x, y)
    loss.backward()
    return float(loss.detach()), gradients(model)


def errors(found: tuple[float, Gradients], expected: tuple[float, Gradients]) -> tuple[float, float, str]:
    """Relative error of the loss, largest one of any parameter's gradient, and of which.

    A gradient that is next to nothing, such as that of a bias which the softmax does not see, is measured
    against 1e-3 of the norm of all. One that is missing is wrong by 1, one that is not finite by infinity.
    """
    total = sum(g.square().sum() for g in expected[1].values())**0.5
    of_each = {name: float((found[1].get(name, torch.zeros_like(g)) - g).norm() / (g.norm() + 1e-3 * total))
               for name, g in expected[1].items()}
    of_each = {name: error if error == error else float("inf") for name, error in of_each.items()}
    worst = max(of_each, key=lambda name: of_each[name])
    return abs(found[0] - expected[0]) / abs(expected[0]), of_each[worst], worst


def is_within(loss_error: float, gradient_error: float, tolerance: Tolerance) -> bool:
    """Whether both errors are numbers within their tolerance."""
    return loss_error <= tolerance.loss and gradient_error <= tolerance.gradient    # False for nan


def check(case: str, device: str, compiles: bool) -> Iterator[dict[str, Any]]:
    """A row for each way that the device computes this case."""
    expected = exact(case)
    ways = [(torch.float32, False), (torch.bfloat16, False)] + [(torch.bfloat16, True)] * compiles
    for dtype, is_compiled in ways:
        row = {"section": "parity", "case": case, "dtype": str(dtype).removeprefix("torch."),
               "way": "compiled" if is_compiled else "eager"}
        try:
            torch._dynamo.reset()
            loss_error, gradient_error, worst = errors(computed(case, device, dtype, is_compiled), expected)
        except Exception as error:  # whatever a kernel or compiler throws fails this case, and not the others
            yield row | {"ok": False, "problem": one_line(f"{type(error).__name__}: {error}")[:200]}
            continue
        yield row | {"ok": is_within(loss_error, gradient_error, TOLERANCES[dtype]), "loss": loss_error,
                     "gradient": gradient_error, "worst": worst}


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("cases", nargs="+", metavar="CASE", help=f"of: {'; '.join(CASES)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    parser.add_argument("--compile", action="store_true", help="check torch.compile too, in bf16")
    args = parser.parse_args()
    unknown = [case for case in args.cases if case not in CASES]
    if unknown:
        raise UserError(f"CASE {'; '.join(unknown)}: unknown; choose from {'; '.join(CASES)}")
    for case in args.cases:
        for row in check(case, args.device, args.compile):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run_command(main)
