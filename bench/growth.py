"""How a training step's time and memory grow: with the length T, and with the number of parameters.

`python -m bench.growth [--lengths T,T] [--sizes LxC,LxC] [--out FILE.md]` steps our decoder and the best
peer in bfloat16: 6 layers, 384 wide, at T = 256 ... 16384 with 4096 tokens a step, or T where that is more;
and at T = 256 with 1 to 100 M parameters. Of ours alibi (folded into the fused kernel) and t5 (in blocks) are
on the axis of lengths besides. The best peer is the one that is fastest at T = 1024. None is compiled, for
that would have to be done anew for each shape.

Every figure is that of fresh processes, one at a time, each contender in turn, round after round: a step of
64 tokens to warm up, then steps for some seconds, of which the first counts only where it is the only one.
Where a round takes over a minute, it is the only one.
Time should grow as FLOPs a token do, 6 for each weight of a matrix and 6 n_layer C (T + 1) of causal
attention (model.py: flops_per_token). Memory, the peak of a process less what it had before its model was
made, should be 12 bytes for each parameter (weight and two moments) and an amount for each token that grows
as n_layer C, whatever T: a T x T that is kept would show. Who runs out of memory, or of time, is not asked
for more.
"""

from __future__ import annotations

import math
import multiprocessing
import re
import resource
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import training
from bench.memory import peak_bytes
from bench.training import CONTENDERS, Contender, Step, ours
from config import load_config
from model import GPT
from runtime.command import argument_parser, run_command
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent

TOKENS = 4096                       # a step, or T where that is more
SIZE, LENGTH = (6, 384), 256        # n_layer and n_embd as T grows, and T as they do
HEAD_WIDTH = 64
WARM_UP = 64                        # tokens
LONG = 60                           # seconds for a round, after which there is no other
RACE = 1024                         # T at which the best peer is found
OURS, FOLDED, IN_BLOCKS = "nanorope rope (eager)", "nanorope alibi (eager)", "nanorope t5 (eager)"
PEERS = ("transformers Llama (eager)", "transformers GPT-2 (eager)", "x-transformers rotary (eager)")
CONTENDERS |= {FOLDED: Contender(lambda T: ours("alibi", T), is_compiled=False),
               IN_BLOCKS: Contender(lambda T: ours("t5", T), is_compiled=False)}
TIME, MEMORY = "microseconds a token", "MB a step"
BY_LENGTH, BY_SIZE = "T", "parameters"
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")


class Point(NamedTuple):
    """What is stepped: a model, and sequences of T tokens: TOKENS in all, or one sequence."""

    n_layer: int
    n_embd: int
    T: int

    @property
    def batch_size(self) -> int:
        """Sequences in a step."""
        return max(1, TOKENS // self.T)

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.T * self.batch_size

    def place(self, axis: str) -> int:
        """T, or our parameters."""
        return self.T if axis == BY_LENGTH else sizes(self)[0]

    def label(self, axis: str) -> str:
        """The same in words."""
        if axis == BY_LENGTH:
            return f"{self.T} (batch {self.batch_size})"
        return f"{self.place(axis) / 1e6:.1f} M ({self.n_layer} x {self.n_embd})"

    def expected(self, quantity: str, first: Point, value: float) -> float:
        """A quantity here, by formula, where another point has this value."""
        (parameters, flops), (first_parameters, first_flops) = sizes(self), sizes(first)
        if quantity == TIME:
            return value * flops / first_flops
        growth = self.tokens * self.n_layer * self.n_embd / (first.tokens * first.n_layer * first.n_embd)
        return 12e-6 * parameters + (value - 12e-6 * first_parameters) * growth


class Figure(NamedTuple):
    """What was found: seconds a step, and bytes of model, optimiser and step."""

    seconds: float
    peak: int

    def show(self, quantity: str, point: Point) -> float:
        """Microseconds a token, or MB."""
        return 1e6 * self.seconds / point.tokens if quantity == TIME else self.peak / 1e6


Row = dict[str, Figure | str]       # contender -> figure, or why there is none


@cache
def sizes(point: Point) -> tuple[int, int]:
    """Parameters of our model, and FLOPs a token of a training step."""
    with torch.device("meta"):
        model = GPT(load_config(ROOT / "configs" / "quick.toml", [
            f"model.vocab_size={training.VOCAB_SIZE}", f"model.n_layer={point.n_layer}",
            f"model.n_embd={point.n_embd}", f"model.n_head={point.n_embd // HEAD_WIDTH}"]))
    return model.n_parameters(), model.flops_per_token(point.T)


# -----------------------------------------------------------------------------------------------------------
# Measuring


def step_alone(to_parent: Connection, name: str, point: Point, seconds: float, patience: int) -> None:
    """In a process of its own, with limits on memory and CPU time: step for so long, send what is found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C is for the parent, which ends this one
    limit = free_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (patience * torch.get_num_threads(), resource.RLIM_INFINITY))
    training.N_LAYER, training.N_EMBD = point.n_layer, point.n_embd
    training.N_HEAD = point.n_embd // HEAD_WIDTH
    before = peak_bytes()
    try:
        step = Step(name, point.T, point.batch_size)
        x, y = step.x, step.y
        step.x, step.y = x[:1, :WARM_UP], y[:1, :WARM_UP]
        step.seconds()                                                  # threads, moments, first calls
        step.x, step.y = x, y
        times = [step.seconds()]
        while sum(times) < seconds:
            times.append(step.seconds())
    except (MemoryError, RuntimeError) as error:    # torch's allocator and oneDNN have words of their own
        if isinstance(error, RuntimeError) and not re.search("memory|could not create", str(error)):
            raise
        to_parent.send("out of memory")
        return
    to_parent.send(Figure(statistics.median(times[1:] or times), peak_bytes() - before))


def figure_of(name: str, point: Point, seconds: float, patience: int) -> Figure | str:
    """What a fresh process finds, or why nothing. It is forked: what is imported here is not again."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=step_alone, args=(sender, name, point, seconds, patience), daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        process.join()
        reasons = {-signal.SIGXCPU: f"over {patience} s", -signal.SIGKILL: "out of memory"}
        if process.exitcode not in reasons:
            raise RuntimeError(f"{name} at {point}: see above") from error
        return reasons[process.exitcode]
    finally:
        process.kill()
        process.join()


def free_bytes() -> int:
    """Nine tenths of what the machine can still give (Linux), so that no other process is killed for us."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(0.9 * 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))


def measure(names: Sequence[str], point: Point, rounds: int, seconds: float, patience: int) -> Row:
    """Each contender in turn, in each round: its median time, and its highest peak."""
    found: dict[str, list[Figure]] = {name: [] for name in names}
    failed: Row = {}
    began = time.perf_counter()
    for n in range(rounds):
        if n and time.perf_counter() - began > LONG:
            break
        for name in (name for name in names if name not in failed):
            figure = figure_of(name, point, seconds, patience)
            if isinstance(figure, str):
                failed[name] = figure
            else:
                found[name].append(figure)
    return failed | {name: Figure(statistics.median(f.seconds for f in figures), max(f.peak for f in figures))
                     for name, figures in found.items() if name not in failed}


def best_peer(point: Point, seconds: float, patience: int) -> str:
    """The fastest of PEERS."""
    figures = measure(PEERS, point, 2, seconds, patience).items()
    seconds_of = {name: figure.seconds for name, figure in figures if isinstance(figure, Figure)}
    return min(seconds_of, key=seconds_of.__getitem__)


# -----------------------------------------------------------------------------------------------------------
# Showing


class Axis:
    """Contenders along T or along parameters: what was found of them, and what is expected."""

    def __init__(self, x: str, points: list[Point], names: list[str]) -> None:
        self.x, self.points, self.names = x, points, names
        self.rows: dict[Point, Row] = {}

    def measure(self, rounds: int, seconds: float, patience: int) -> Iterator[Point]:
        """Fill the rows, one after another. Who fails at a point is not asked at the next."""
        failed: Row = {}
        for point in self.points:
            names = [name for name in self.names if name not in failed]
            self.rows[point] = failed | measure(names, point, rounds, seconds, patience)
            failed = {name: figure for name, figure in self.rows[point].items() if isinstance(figure, str)}
            yield point

    def columns(self, quantity: str) -> dict[str, dict[Point, float]]:
        """Contender -> point -> figure, as far as there is one; and "expected", from our first on."""
        shown: dict[str, dict[Point, float]] = {"expected": {}, **{name: {} for name in self.names}}
        for point, row in self.rows.items():
            for name, figure in row.items():
                if isinstance(figure, Figure):
                    shown[name][point] = figure.show(quantity, point)
        for first, value in list(shown[OURS].items())[:1]:
            shown["expected"] = {point: point.expected(quantity, first, value) for point in self.rows}
        return shown

    def table(self, quantity: str) -> Iterator[str]:
        """Markdown: a row for each point, in brackets over the column's first; then exponents."""
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
    """All tables, as far as they go."""
    lines = [head]
    for axis in axes:
        for quantity in (TIME, MEMORY) if axis.rows else ():
            lines += ["", f"**{quantity}, by {axis.x}**", "", *axis.table(quantity)]
    return "\n".join(lines) + "\n"


def plot(axes: Sequence[Axis], path: Path) -> None:
    """A panel for each table; dashed: expected of our first contender."""
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


def points_of(lengths: str, sizes: str) -> tuple[list[Point], list[Point]]:
    """Points along T, and along parameters."""
    try:
        by_length = [Point(*SIZE, int(T)) for T in lengths.split(",")]
        pairs = [size.split("x") for size in sizes.split(",")]
        by_size = [Point(int(n_layer), int(n_embd), LENGTH) for n_layer, n_embd in pairs]
    except ValueError as error:
        raise UserError(f"--lengths {lengths} --sizes {sizes}: must read 256,512 and 5x128,6x192") from error
    if any(point.n_embd % HEAD_WIDTH or min(point) < 1 for point in by_size) or min(by_length).T < WARM_UP:
        raise UserError(f"--lengths {lengths} --sizes {sizes}: lengths from {WARM_UP} on, one layer or more, "
                        f"and widths that are multiples of {HEAD_WIDTH}")
    return by_length, by_size


def import_peers() -> None:
    """Here, once, for every process that is forked from this one."""
    import transformers
    import x_transformers  # noqa: F401
    from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

    transformers.logging.set_verbosity_error()      # of ids that a vocabulary of bytes lacks


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192,16384", help="default %(default)s")
    parser.add_argument("--sizes", default="5x128,6x192,6x384,9x576,14x768",
                        help="layers x width (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of steps in each (default %(default)s)")
    parser.add_argument("--patience", type=int, default=120,
                        help="seconds of all cores that a process may take (default %(default)s)")
    parser.add_argument("--out", type=Path, help="Markdown to write, with a .png beside it, after each row")
    args = parser.parse_args()
    by_length, by_size = points_of(args.lengths, args.sizes)
    import_peers()
    how = (args.seconds, args.patience)
    peer = best_peer(Point(*SIZE, RACE), *how)
    axes = [Axis(BY_LENGTH, by_length, [OURS, FOLDED, IN_BLOCKS, peer]), Axis(BY_SIZE, by_size, [OURS, peer])]
    head = (f"`python -m bench.growth --lengths {args.lengths} --sizes {args.sizes} --rounds {args.rounds} "
            f"--seconds {args.seconds:g}`: CPU, {torch.get_num_threads()} threads, torch "
            f"{torch.__version__}, bfloat16, eager. The fastest peer at T {RACE}, of {', '.join(PEERS)}: "
            f"{peer}.")
    for axis in axes:
        for point in axis.measure(args.rounds, *how):
            print(f"{axis.x} {point.label(axis.x)}: " + ", ".join(
                f"{name} {figure if isinstance(figure, str) else f'{figure.seconds:.2f} s'}"
                for name, figure in axis.rows[point].items()), flush=True)
            if args.out:                # after each point, so that an interruption costs one
                args.out.write_text(text(axes, head))
                plot(axes, args.out.with_suffix(".png"))
    print(text(axes, head), end="")


if __name__ == "__main__":
    run_command(main)
