"""Cost of each encoding: time and memory of a training step relative to RoPE's, interleaved in one run.

`python -m bench.each_encoding [--encodings rope,alibi,...] [--device cpu|cuda] [--preset quick|gpt2-124m]
[--compile] [section.key=value ...]` takes one step of each encoding in turn, round after round, so that a
noisy machine disturbs all equally, and prints medians of the ratios within a round. quick: the quick config
at three lengths with the same number of tokens; gpt2-124m: its width at T 1024, with 4 layers and a small
vocabulary, since the parts that all encodings share would hide their differences. Each encoding has a
process of its own, some at a time, RoPE's always among them; peak memory is that of the process, minus that
of one that only makes the model. An encoding that cannot be measured has the reason in its row.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bench.measuring import (
    Step,
    add_device,
    check_device,
    check_names,
    fresh,
    machine,
    peak_bytes,
    preset_config,
    table,
    write,
)
from bench.training import contestants, take_turns
from model import GPT
from positions import ENCODINGS
from runtime.command import argument_parser, run_command
from runtime.device import pick_dtype, set_up_cpu
from runtime.errors import UserError

BASE = "rope"                           # what the others are divided by
AT_A_TIME = {"cpu": 6, "cuda": 10}      # processes beside that of BASE
# (seq_len, batch_size); those of one preset have as many tokens each
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "quick": ((128, 32), (256, 16), (1024, 4)),
    "gpt2-124m": ((1024, 16),),
}
OVERRIDES = {"quick": ["model.vocab_size=257"], "gpt2-124m": ["model.vocab_size=512", "model.n_layer=4"]}


def make_step(encoding: str, shape: tuple[int, int], preset: str, device: str, is_compiled: bool,
              overrides: Sequence[str]) -> Step:
    """Training steps of the preset with this encoding and shape."""
    config = preset_config(preset, *OVERRIDES[preset], f"position.encoding={encoding}",
                           f"train.seq_len={shape[0]}", f"train.batch_size={shape[1]}", "train.accumulate=1",
                           *overrides)
    set_up_cpu()
    torch.manual_seed(0)
    dtype = pick_dtype(config.train, torch.device(device))
    return Step(GPT(config), config, device, dtype, is_compiled)


def peak_without_a_step(shape: tuple[int, int], *how) -> int:
    """Peak memory of a process that makes RoPE's model and takes no step."""
    return peak_bytes(make_step(BASE, shape, *how).device.type)


class Cost(NamedTuple):
    """Median seconds of a step, the median of its ratio to RoPE's in the same round, and its bytes."""

    seconds: float
    ratio: float
    peak: int


def costs(names: Sequence[str], rounds: int, shape: tuple[int, int], how: tuple) -> dict[str, Cost | str]:
    """Encoding -> its cost, or why it has none; RoPE is always among them."""
    device, found = how[1], {}
    base = fresh(peak_without_a_step, shape, *how)
    others = [name for name in names if name != BASE]
    groups = [others[first:first + AT_A_TIME[device]] for first in range(0, len(others), AT_A_TIME[device])]
    for group in groups or [[]]:
        calls = {name: (make_step, name, shape, *how) for name in (BASE, *group)}
        with contestants(calls, device) as started:
            if started[0].problem:
                raise UserError(f"{BASE} {started[0].problem}: its last lines are above")
            rows = take_turns([each for each in started if not each.problem], rounds)
        for each in started:
            found[each.name] = each.problem or Cost(
                statistics.median(row[each.name] for row in rows),
                statistics.median(row[each.name] / row[BASE] for row in rows), each.peak - base)
    return found


def report(names: Sequence[str], rounds: int, shapes: Sequence[tuple[int, int]], preset: str, device: str,
           is_compiled: bool, overrides: Sequence[str]) -> str:
    """The table as Markdown."""
    columns: dict[str, list[str]] = {name: [] for name in names}
    for shape in shapes:
        found = costs(names, rounds, shape, (preset, device, is_compiled, overrides))
        base = found[BASE]
        assert isinstance(base, Cost)                                   # else `costs` has raised
        for name, cells in columns.items():
            cost = found[name]
            cells += [cost, ""] if isinstance(cost, str) else [
                f"{cost.ratio:.2f} ({1e3 * cost.seconds:.0f})",
                f"{cost.peak / base.peak:.2f} ({cost.peak / 1e6:.0f})"]
    dtype = pick_dtype(preset_config(preset).train, torch.device(device))
    head = [f"T {T}, batch {B}: step / RoPE's (ms) | memory / RoPE's (MB)" for T, B in shapes]
    head = [cell for pair in head for cell in pair.split(" | ")]
    return "\n".join([f"{machine(device)}, {preset}, {dtype}, {rounds} rounds, "
                      f"{'compiled' if is_compiled else 'eager'}", "",
                      *table(["encoding", *head], ([name, *cells] for name, cells in columns.items()))])


def shape_of(text: str) -> tuple[int, int]:
    """T and batch size from "256,16"."""
    T, batch_size = map(int, text.split(","))
    return T, batch_size


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change the preset")
    add_device(parser, tuple(SHAPES))
    parser.add_argument("--encodings", help="names with commas between (default: all)")
    parser.add_argument("--shape", help="T, batch size, such as 256,16 (default: those of the preset)")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each encoding (default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    args = parser.parse_intermixed_args()
    check_device(args.device)
    names = args.encodings.split(",") if args.encodings else list(ENCODINGS)
    check_names("--encodings", names, ENCODINGS)
    shapes = [shape_of(args.shape)] if args.shape else SHAPES[args.preset]
    text = report(names, args.rounds, shapes, args.preset, args.device, args.compile, args.overrides)
    write(args.out, text)


if __name__ == "__main__":
    run_command(main)
