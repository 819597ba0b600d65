"""Cost of each encoding: time and memory of a training step relative to RoPE's, interleaved in one run.

`python -m bench.each_encoding [--encodings rope,alibi,...] [--device cpu|cuda] [--preset quick|gpt2-124m]
[--compile] [section.key=value ...]` takes one step of each encoding in turn, round after round, so that a
noisy machine disturbs all equally, and prints medians of the ratios within a round. quick: the quick config
at three lengths with the same number of tokens; gpt2-124m: its width at T 1024, with 4 layers and a small
vocabulary, since the parts that all encodings share would hide their differences. Peak memory is that of a
fresh process that takes three steps of one encoding, minus that of one that only makes the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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
from model import GPT
from positions import ENCODINGS
from runtime.command import argument_parser, run_command
from runtime.device import pick_dtype

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
    torch.manual_seed(0)
    dtype = pick_dtype(config.train, torch.device(device))
    return Step(GPT(config), config, device, dtype, is_compiled)


def time_ratios(names: Sequence[str], rounds: int, shape: tuple[int, int],
                how: tuple) -> dict[str, tuple[float, float]]:
    """Encoding -> (median seconds, median of its seconds divided by RoPE's in the same round)."""
    steps = {name: make_step(name, shape, *how) for name in dict.fromkeys(("rope", *names))}
    torch._dynamo.config.recompile_limit = 2 * len(steps)   # else all after the eighth would run eagerly
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for step in steps.values():
        for _ in range(2):                                              # compiles and warms up
            step.seconds()
    rows = [{name: step.seconds() for name, step in steps.items()} for _ in range(rounds)]
    return {name: (statistics.median(row[name] for row in rows),
                   statistics.median(row[name] / row["rope"] for row in rows)) for name in names}


def peak_after(n_steps: int, name: str, shape: tuple[int, int], *how) -> int:
    """Peak memory of this process after some steps."""
    step = make_step(name, shape, *how)
    for _ in range(n_steps):
        step.seconds()
    return peak_bytes(step.device.type)


def report(names: Sequence[str], rounds: int, shapes: Sequence[tuple[int, int]], preset: str, device: str,
           is_compiled: bool, overrides: Sequence[str]) -> str:
    """The table as Markdown."""
    how = (preset, device, is_compiled, overrides)
    columns: dict[str, list[str]] = {name: [] for name in names}
    for shape in shapes:
        times = time_ratios(names, rounds, shape, how)
        torch._dynamo.reset()
        base = fresh(peak_after, 0, "rope", shape, *how)
        memory = {name: fresh(peak_after, 3, name, shape, *how) - base
                  for name in dict.fromkeys(("rope", *names))}
        for name in names:
            seconds, ratio = times[name]
            columns[name] += [f"{ratio:.2f} ({1e3 * seconds:.0f})",
                              f"{memory[name] / memory['rope']:.2f} ({memory[name] / 1e6:.0f})"]
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
