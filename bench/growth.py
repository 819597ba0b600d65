"""How a training step's time and memory grow: with the length T, and with the number of parameters.

`python -m bench.growth [--lengths T,T] [--sizes LxC,LxC] [--device cpu|cuda] [--out FILE.md]` takes steps of
nanorope and of the fastest peer, in the faster dtype here: 6 layers, 384 wide, at T = 256 ... 16384 with
4096 tokens per step (65,536 on a GPU), or T if that is more; and at T = 256 with 1 to 100 M parameters. By
length, nanorope is also measured with alibi (folded into the fused kernel) and t5 (in blocks). The fastest
peer is found at T = 1024. None is compiled, since each shape would have to be compiled again.

Every measurement comes from fresh processes (on a GPU from this one), one at a time, each contender in turn,
round after round: a step of 64 tokens to warm up, then steps for some seconds; the first of these counts only
if there is no other. If a round takes over a minute, there is no second round.
Time should grow as the FLOPs per token: 6 for each weight of a matrix and 6 n_layer C (T + 1) for causal
attention (model.py: flops_per_token). Memory is the peak of a process minus its memory before the model was
made. It should be 12 bytes per parameter (weight and two moments), plus an amount per token that grows as
n_layer C and does not depend on T: stored logits of T x T would show. A contender that runs out of memory or
time is not measured at the next point.
"""

from __future__ import annotations

import math
import re
import resource
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.measuring import Ended, add_device, check_device, fresh, machine, peak_bytes
from bench.training import contender_config, make_step
from model import GPT
from runtime.command import argument_parser, run_command
from runtime.device import dtype_name
from runtime.errors import UserError

STEP_TOKENS = {"cpu": 4096, "cuda": 65_536}     # tokens per step, or T if that is more
SIZE, LENGTH = (6, 384), 256        # n_layer and n_embd on the axis of lengths, T on the other
HEAD_WIDTH = 64
WARM_UP = 64                        # tokens
LONG = 60                           # seconds of a round after which no other follows
RACE = 1024                         # T at which the fastest peer is found
NANOROPE = "nanorope rope (eager)"
OTHERS = ("nanorope alibi (eager)", "nanorope t5 (eager)")
PEERS = ("transformers Llama (eager)", "transformers GPT-2 (eager)", "x-transformers rotary (eager)")
TIME, MEMORY = "microseconds per token", "MB per step"
BY_LENGTH, BY_SIZE = "T", "parameters"
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")


class Point(NamedTuple):
    """What is measured: a model, and a batch of sequences of T tokens."""

    n_layer: int
    n_embd: int
    T: int
    batch_size: int

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.T * self.batch_size

    def config(self, name: str) -> Any:
        """The config of a contender here."""
        return contender_config(name, "small", self.T, self.batch_size, f"model.n_layer={self.n_layer}",
                                f"model.n_embd={self.n_embd}", f"model.n_head={self.n_embd // HEAD_WIDTH}")

    def place(self, axis: str) -> int:
        """T, or nanorope's parameters."""
        return self.T if axis == BY_LENGTH else sizes(self)[0]

    def label(self, axis: str) -> str:
        """The same in words."""
        if axis == BY_LENGTH:
            return f"{self.T} (batch {self.batch_size})"
        return f"{self.place(axis) / 1e6:.1f} M ({self.n_layer} x {self.n_embd})"

    def expected(self, quantity: str, first: Point, value: float) -> float:
        """What the formula predicts here if `value` was measured at the first point."""
        (parameters, flops), (first_parameters, first_flops) = sizes(self), sizes(first)
        if quantity == TIME:
            return value * flops / first_flops
        growth = self.tokens * self.n_layer * self.n_embd / (first.tokens * first.n_layer * first.n_embd)
        return 12e-6 * parameters + (value - 12e-6 * first_parameters) * growth


class Measured(NamedTuple):
    """Seconds per step, and bytes of model, optimiser and step."""

    seconds: float
    peak: int

    def show(self, quantity: str, point: Point) -> float:
        """Microseconds per token, or MB."""
        return 1e6 * self.seconds / point.tokens if quantity == TIME else self.peak / 1e6


class Limits(NamedTuple):
    """How each measurement is made."""

    device: str
    rounds: int
    seconds: float      # of steps in each process
    patience: int       # seconds of all cores that a process may take


Row = dict[str, Measured | str]       # contender -> its measurement, or the reason for its absence


@cache
def sizes(point: Point) -> tuple[int, int]:
    """Parameters of nanorope's model, and FLOPs per token of a training step."""
    with torch.device("meta"):
        model = GPT(point.config(NANOROPE))
    return model.n_parameters(), model.flops_per_token(point.T)


# -----------------------------------------------------------------------------------------------------------
# Measuring


def step_alone(name: str, point: Point, limits: Limits) -> Measured | str:
    """Take steps in this process, on a CPU with limits on its memory and time; return the measurement."""
    before = 0
    if limits.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        cpu_s = limits.patience * torch.get_num_threads()
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)                   # the fork has that of run_command
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_DATA, (most := free_bytes(), most))
        before = peak_bytes()
    try:
        step = make_step(name, point.config(name), limits.device)
        x, y = step.x, step.y
        step.x, step.y = x[:1, :WARM_UP], y[:1, :WARM_UP]
        step.seconds()                                                  # threads, moments, first calls
        step.x, step.y = x, y
        times = [step.seconds()]
        while sum(times) < limits.seconds:
            times.append(step.seconds())
    except (MemoryError, RuntimeError) as error:    # PyTorch's allocators and oneDNN word it differently
        if isinstance(error, RuntimeError) and not re.search("memory|could not create", str(error)):
            raise
        return "out of memory"
    return Measured(statistics.median(times[1:] or times), peak_bytes(limits.device) - before)


def free_bytes() -> int:
    """Nine tenths of the memory that is available (Linux), so that no other process is killed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(0.9 * 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))


def measured_by(name: str, point: Point, limits: Limits) -> Measured | str:
    """The measurement, or why it failed; on a CPU that of a fresh process."""
    if limits.device == "cuda":         # whose peak can be reset
        return step_alone(name, point, limits)
    try:                                # forked: peers are imported once
        return fresh(step_alone, name, point, limits, method="fork")
    except Ended as ended:
        reasons = {-signal.SIGXCPU: f"over {limits.patience} s", -signal.SIGKILL: "out of memory"}
        if ended.exit_code not in reasons:
            raise
        return reasons[ended.exit_code]


def measure(names: Sequence[str], point: Point, limits: Limits) -> Row:
    """Each contender in turn, in each round: its median time, and its highest peak."""
    found: dict[str, list[Measured]] = {name: [] for name in names}
    failed: Row = {}
    began = time.perf_counter()
    for n in range(limits.rounds):
        if n and time.perf_counter() - began > LONG:
            break
        for name in (name for name in names if name not in failed):
            figure = measured_by(name, point, limits)
            if isinstance(figure, str):
                failed[name] = figure
            else:
                found[name].append(figure)
    return failed | {name: Measured(statistics.median(m.seconds for m in rounds), max(m.peak for m in rounds))
                     for name, rounds in found.items() if name not in failed}


def fastest_peer(point: Point, limits: Limits) -> str:
    """The fastest of PEERS."""
    results = measure(PEERS, point, limits).items()
    seconds_of = {name: result.seconds for name, result in results if isinstance(result, Measured)}
    return min(seconds_of, key=seconds_of.__getitem__)


# -----------------------------------------------------------------------------------------------------------
# Showing


class Axis:
    """Contenders along T or along parameters: what was measured, and what the formula predicts."""

    def __init__(self, x: str, points: list[Point], names: list[str]) -> None:
        self.x, self.points, self.names = x, points, names
        self.rows: dict[Point, Row] = {}

    def measure(self, limits: Limits) -> Iterator[Point]:
        """Fill the rows, one after another."""
        failed: Row = {}
        for point in self.points:
            names = [name for name in self.names if name not in failed]
            self.rows[point] = failed | measure(names, point, limits)
            failed = {name: figure for name, figure in self.rows[point].items() if isinstance(figure, str)}
            yield point

    def columns(self, quantity: str) -> dict[str, dict[Point, float]]:
        """Contender -> point -> figure; "expected" starts from nanorope's first figure."""
        shown: dict[str, dict[Point, float]] = {"expected": {}, **{name: {} for name in self.names}}
        for point, row in self.rows.items():
            for name, figure in row.items():
                if isinstance(figure, Measured):
                    shown[name][point] = figure.show(quantity, point)
        for first, value in list(shown[NANOROPE].items())[:1]:
            shown["expected"] = {point: point.expected(quantity, first, value) for point in self.rows}
        return shown

    def table(self, quantity: str) -> Iterator[str]:
        """Markdown: a row for each point, in brackets its ratio to the column's first; then exponents."""
        columns, points = self.columns(quantity), list(self.rows)
        yield f"| {self.x} | " + " | ".join(columns) + " |"
        yield "|---|" + "---:|" * len(columns)
        for point in points:
            cells = [f"{values[point]:.4g} (x {values[point] / next(iter(values.values())):.2f})"
                     if point in values else str(self.rows[point].get(name, "-"))
                     for name, values in columns.items()]
            yield f"| {point.label(self.x)} | " + " | ".join(cells) + " |"
        for a, b in dict.fromkeys(((points[0], points[-1]), (points[-2], points[-1])) if points[1:] else ()):
            growth = math.log(b.place(self.x) / a.place(self.x))
            cells = [f"{math.log(values[b] / values[a]) / growth:.2f}" if a in values and b in values else "-"
                     for values in columns.values()]
            yield f"| exponent, {a.label(self.x)} to {b.label(self.x)} | " + " | ".join(cells) + " |"


def text(axes: Sequence[Axis], head: str) -> str:
    """All tables, with the rows measured so far."""
    lines = [head]
    for axis in axes:
        for quantity in (TIME, MEMORY) if axis.rows else ():
            lines += ["", f"**{quantity}, by {axis.x}**", "", *axis.table(quantity)]
    return "\n".join(lines) + "\n"


def plot(axes: Sequence[Axis], path: Path) -> None:
    """A panel for each table; dashed: what the formula predicts for nanorope."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    styles: dict[str, dict[str, Any]] = {name: {"color": colour, "marker": "o"}
                                         for name, colour in zip(axes[0].names, COLOURS, strict=True)}
    styles["expected"] = {"color": "black", "linestyle": "--"}
    axes = [axis for axis in axes if axis.rows]
    figure, panels = plt.subplots(2, len(axes), figsize=(11, 8), layout="constrained", squeeze=False)
    for row, quantity in zip(panels, (TIME, MEMORY), strict=True):
        for panel, axis in zip(row, axes, strict=True):
            for name, values in axis.columns(quantity).items():
                panel.plot([point.place(axis.x) for point in values], list(values.values()), label=name,
                           **styles[name])
            panel.set(xscale="log", yscale="log", xlabel=axis.x, ylabel=quantity)
            panel.set_xticks([point.place(axis.x) for point in axis.rows],
                             [point.label(axis.x).partition(" (")[0] for point in axis.rows])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -----------------------------------------------------------------------------------------------------------
# Command


def points_of(lengths: str, sizes: str, step_tokens: int) -> tuple[list[Point], list[Point]]:
    """Points along T, and along parameters."""
    try:
        by_length = [(*SIZE, int(T)) for T in lengths.split(",")]
        pairs = [size.split("x") for size in sizes.split(",")]
        by_size = [(int(n_layer), int(n_embd), LENGTH) for n_layer, n_embd in pairs]
    except ValueError as error:
        raise UserError(f"--lengths {lengths} --sizes {sizes}: must read 256,512 and 5x128,6x192") from error
    if any(size[1] % HEAD_WIDTH or min(size) < 1 for size in by_size) or min(by_length)[2] < WARM_UP:
        raise UserError(f"--lengths {lengths} --sizes {sizes}: lengths from {WARM_UP} on, one layer or more, "
                        f"and widths that are multiples of {HEAD_WIDTH}")
    with_batch = [[Point(*size, max(1, step_tokens // size[2])) for size in axis]
                  for axis in (by_length, by_size)]
    return with_batch[0], with_batch[1]


def import_peers() -> None:
    """Import the peers once, for every process that is forked from this one."""
    import x_transformers  # noqa: F401
    from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401


def main() -> None:
    parser = argument_parser(__doc__)
    add_device(parser)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192,16384", help="default %(default)s")
    parser.add_argument("--sizes", default="5x128,6x192,6x384,9x576,14x768",
                        help="layers x width (default %(default)s)")
    parser.add_argument("--tokens", type=int, help="a step, or T if that is more (default 4096; GPU 65536)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of steps in each (default %(default)s)")
    parser.add_argument("--patience", type=int, default=120,
                        help="seconds of all cores that a process may take (default %(default)s)")
    args = parser.parse_args()
    check_device(args.device)
    step_tokens = args.tokens or STEP_TOKENS[args.device]
    by_length, by_size = points_of(args.lengths, args.sizes, step_tokens)
    import_peers()
    limits = Limits(args.device, args.rounds, args.seconds, args.patience)
    race_T = min(RACE, by_length[-1].T)
    race = Point(*SIZE, race_T, max(1, step_tokens // race_T))
    peer = fastest_peer(race, limits._replace(rounds=2))
    axes = [Axis(BY_LENGTH, by_length, [NANOROPE, *OTHERS, peer]), Axis(BY_SIZE, by_size, [NANOROPE, peer])]
    dtype = dtype_name(race.config(NANOROPE).train, torch.device(args.device))
    head = (f"`python -m bench.growth --lengths {args.lengths} --sizes {args.sizes} --rounds {args.rounds} "
            f"--seconds {args.seconds:g} --device {args.device}`: {machine(args.device)}, {dtype}, eager. "
            f"The fastest peer at T {race_T}, from {', '.join(PEERS)}: {peer}.")
    for axis in axes:
        for point in axis.measure(limits):
            print(f"{axis.x} {point.label(axis.x)}: " + ", ".join(
                f"{name} {figure if isinstance(figure, str) else f'{figure.seconds:.2f} s'}"
                for name, figure in axis.rows[point].items()), flush=True)
            if args.out:                # after each point, so that an interruption loses one at most
                args.out.write_text(text(axes, head))
                plot(axes, args.out.with_suffix(".png"))
    print(text(axes, head), end="")


if __name__ == "__main__":
    run_command(main)
