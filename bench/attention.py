"""Attention alone, forward and backward: FlexAttention against what is used without it, by encoding and mask.

`python -m bench.attention [--device cuda] [--lengths T,T] [--compile]` measures one layer of GPT-2 124M's
shape, 12 heads of 64 channels in bfloat16 with 16,384 queries in all, in turn, round after round. It
decides where `model.flex` is worth switching on. FlexAttention itself runs on CUDA alone. MB is the peak, on
CUDA without the inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import Mask, attend
from bench.measuring import (
    add_device,
    check_device,
    machine,
    peak_bytes,
    preset_config,
    seconds_of,
    table,
    write,
)
from model import shape_of
from positions import ENCODINGS, At
from runtime import flex
from runtime.command import argument_parser, run_command

QUERIES = 16_384
N_DOCUMENTS = 4         # in a packed row
OPTIONS = ("default", "num_stages=2", "BLOCK_N=64")


class Case(NamedTuple):
    """An encoding, and what the mask has besides order."""

    encoding: str
    window: int | None = None
    is_packed: bool = False


CASES = {
    "rope": Case("rope"), "alibi": Case("alibi"), "t5": Case("t5"), "kerple_log": Case("kerple_log"),
    "bam": Case("bam"), "rope, window 256": Case("rope", 256), "rope, documents": Case("rope", None, True),
    "t5, window 256": Case("t5", 256), "t5, documents": Case("t5", None, True),
}


def make_pass(case: Case, T: int, device: torch.device, options: str | None,
              is_compiled: bool) -> Callable[[], None]:
    """A forward and backward pass; options of FlexAttention's kernel, "default", or None: without it."""
    config = preset_config("gpt2-124m", f"position.encoding={case.encoding}", f"train.seq_len={T}")
    shape = shape_of(config)
    encoding = ENCODINGS[case.encoding](shape, config.position).to(device)
    B = max(1, QUERIES // T)
    size = B, shape.n_head, T, shape.head_dim
    q, k, v, slope = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    documents = (torch.arange(T, device=device) * N_DOCUMENTS // T).expand(B, T) if case.is_packed else None
    limits = case.window, None
    chosen = [options.split("=")] if options and "=" in options else []

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(T, device=device)[None]
        masks: dict[Any, Any] = flex.block_masks({limits}, T, documents, device) if options else {}
        mask = Mask(window=case.window, documents=documents, in_order=True, flex=masks)
        at = At(position, position, 0, encoding.tables(position, position))
        return attend(q, k, v, encoding, at, mask, 0.0)

    call = torch.compile(run) if is_compiled else run

    def step() -> None:
        flex.OPTIONS = {name: int(value) for name, value in chosen}     # read while it is compiled
        with torch.autocast(device.type, torch.bfloat16):
            y = call(*inputs)
        y.backward(slope)

    return step


def measure(name: str, T: int, device: torch.device, rounds: int, is_compiled: bool) -> list[str]:
    """A row: milliseconds and MB without FlexAttention, then with it, by options of its kernel."""
    torch._dynamo.reset()
    flex.compiled.cache_clear()
    ways = [None, *OPTIONS] if device.type in flex.DEVICES else [None]
    steps, peaks, problems = {}, {}, {}
    for options in ways:
        try:
            steps[options] = step = make_pass(CASES[name], T, device, options, is_compiled)
            step()
            before = 0
            if device.type == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            step()
            peaks[options] = peak_bytes(device.type) - before
        except Exception as error:      # a kernel that does not fit: that is the result
            problems[options] = type(error).__name__
            steps.pop(options, None)
    rows = [{options: seconds_of(step, device) for options, step in steps.items()} for _ in range(rounds)]
    cells = [problems.get(options) or f"{1e3 * statistics.median(row[options] for row in rows):.2f} "
             f"({peaks[options] / 1e6:.0f})" for options in ways]
    return [f"{name}, T {T}", *cells]


def main() -> None:
    parser = argument_parser(__doc__)
    add_device(parser)
    parser.add_argument("--lengths", default="1024,4096", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="passes of each (default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    args = parser.parse_args()
    check_device(args.device)
    device = torch.device(args.device)
    row = partial(measure, device=device, rounds=args.rounds, is_compiled=args.compile)
    rows = [row(name, T) for T in map(int, args.lengths.split(",")) for name in CASES]
    head = ["ms (MB)", "without", *(f"FlexAttention, {options}" for options in OPTIONS)][:len(rows[0])]
    write(args.out, "\n".join([f"{machine(args.device)}, bfloat16, {args.rounds} rounds, "
                               f"{'compiled' if args.compile else 'eager'}", "", *table(head, rows)]))


if __name__ == "__main__":
    run_command(main)
