"""Cost of each encoding: a training step's time and memory over RoPE's, in the same run, interleaved.

`python -m bench.each_encoding [--encodings rope,alibi,...] [--rounds N] [--out FILE.md]` takes one step of
each encoding in turn, round after round, so that a noisy machine disturbs all alike, at the quick config and
at longer T with the same number of tokens, and prints medians of the ratios within a round. Peak memory is
that of a fresh process which takes three steps of one encoding, less that of one which only makes the model.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.memory import peak_bytes
from config import Config, load_config
from model import GPT, autocast, pick_device, pick_dtype
from positions import ENCODINGS
from runtime.command import argument_parser, run_command
from runtime.errors import UserError
from runtime.optimizer import make_optimizer

ROOT = Path(__file__).resolve().parent.parent

SHAPES = ((128, 32), (256, 16), (1024, 4))      # (seq_len, batch_size), as many tokens each
VOCAB_SIZE = 257


def make_config(encoding: str, seq_len: int, batch_size: int) -> Config:
    """The quick config with this encoding and shape."""
    return load_config(ROOT / "configs" / "quick.toml",
                       [f"position.encoding={encoding}", f"model.vocab_size={VOCAB_SIZE}",
                        f"train.seq_len={seq_len}", f"train.batch_size={batch_size}"])


class Step:
    """A training step of one encoding on random tokens."""

    def __init__(self, config: Config) -> None:
        self.train = config.train
        self.device = pick_device(config.train)
        torch.manual_seed(0)
        self.model = GPT(config).to(self.device)
        self.optimizer = make_optimizer(self.model, config.train)
        shape = (config.train.batch_size, config.train.seq_len + 1)
        self.tokens = torch.randint(VOCAB_SIZE, shape, device=self.device)

    def seconds(self) -> float:
        """Take a step, return its wall time."""
        began = time.perf_counter()
        with autocast(self.train, self.device):
            loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def time_ratios(names: Sequence[str], shape: tuple[int, int], rounds: int) -> dict[str, tuple[float, float]]:
    """Encoding -> (median seconds, median of seconds over RoPE's in the same round)."""
    steps = {name: Step(make_config(name, *shape)) for name in dict.fromkeys(("rope", *names))}
    for step in steps.values():
        step.seconds()                                                  # warm-up
    table = [{name: step.seconds() for name, step in steps.items()} for _ in range(rounds)]
    return {name: (statistics.median(row[name] for row in table),
                   statistics.median(row[name] / row["rope"] for row in table)) for name in names}


def fresh_peak(name: str, shape: tuple[int, int], n_steps: int) -> int:
    """Peak memory of a fresh process that takes this many steps."""
    arguments = [sys.executable, __file__, "--peak", name, *map(str, shape), str(n_steps)]
    return int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def print_peak(name: str, seq_len: int, batch_size: int, n_steps: int) -> None:
    """Print the peak memory of this process (Linux) after n_steps; on CUDA that of the device."""
    step = Step(make_config(name, seq_len, batch_size))
    for _ in range(n_steps):
        step.seconds()
    print(torch.cuda.max_memory_allocated() if step.device.type == "cuda" else peak_bytes())


def report(names: Sequence[str], rounds: int) -> str:
    """The table as Markdown."""
    train = make_config("rope", *SHAPES[0]).train
    device = pick_device(train)
    head = [f"T {T}, batch {B}: step / RoPE's (ms) | memory / RoPE's (MB)" for T, B in SHAPES]
    lines = [f"{device}, {torch.get_num_threads()} threads, {pick_dtype(train, device)}, torch "
             f"{torch.__version__}, {rounds} rounds, eager", "", "| encoding | " + " | ".join(head) + " |",
             "|---|" + "---:|" * 2 * len(SHAPES)]
    columns: dict[str, list[str]] = {name: [] for name in names}
    for shape in SHAPES:
        times = time_ratios(names, shape, rounds)
        base = fresh_peak("rope", shape, 0)
        memory = {name: fresh_peak(name, shape, 3) - base for name in dict.fromkeys(("rope", *names))}
        for name in names:
            seconds, ratio = times[name]
            columns[name] += [f"{ratio:.2f} ({1e3 * seconds:.0f})",
                              f"{memory[name] / memory['rope']:.2f} ({memory[name] / 1e6:.0f})"]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in columns.items()]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--peak"]:
        print_peak(sys.argv[2], *map(int, sys.argv[3:6]))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--encodings", help="names with commas between (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each encoding (default %(default)s)")
    parser.add_argument("--out", type=Path, help="Markdown file to write besides the screen")
    args = parser.parse_args()
    names = args.encodings.split(",") if args.encodings else list(ENCODINGS)
    unknown = [name for name in names if name not in ENCODINGS]
    if unknown:
        raise UserError(f"--encodings {','.join(unknown)}: unknown; choose from {', '.join(ENCODINGS)}")
    text = report(names, args.rounds)
    print(text)
    if args.out:
        args.out.write_text(f"`python -m bench.each_encoding --rounds {args.rounds}`\n\n{text}\n")


if __name__ == "__main__":
    run_command(main)
