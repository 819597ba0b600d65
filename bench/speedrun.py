"""Time to a loss: a plain config and its speedrun, both trained by train.py, in turn.

`python -m bench.speedrun [PAIR] [--data DIR] [--rounds N] [--out FILE.md]` trains the two configs of a pair
in turn, each from scratch in a fresh process; the seed is the number of the round.

  tinyshakespeare  nanoGPT's own CPU example, which reaches 1.886 nats per character after its 2000 steps
  quick            the model of `make train`, trained by AdamW, and the config of `make train`, which reaches
                   1.345 nats per token (perplexity 3.84) in less time

It measures the wall time of the whole process, that of the training loop in it (summary.json's wall_s; both
include validation), and the loss at the end, on the whole validation split or, for quick, on 131,072 tokens
of it. The speedrun must end at or below the loss of the pair; otherwise the round is shown as missed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench.measuring import table, write
from config import Config, load_config
from runtime.command import argument_parser, run_command
from runtime.errors import UserError


class Pair(NamedTuple):
    """Two configs of the same corpus, the loss to reach in nats per token, and overrides of both."""

    baseline: Path
    speedrun: Path
    target: float
    overrides: tuple[str, ...] = ()


CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PAIRS = {
    "tinyshakespeare": Pair(CONFIGS / "tinyshakespeare-nanogpt.toml",
                            CONFIGS / "tinyshakespeare-speedrun.toml", 1.886),
    "quick": Pair(CONFIGS / "quick-adamw.toml", CONFIGS / "quick.toml", 1.345,
                  ("train.val_windows=1024", "run.eval_every=1000")),       # validated once, at the end
}


class Trained(NamedTuple):
    """A training in a fresh process: seconds of the process and of the training loop, and the loss."""

    wall_s: float
    loop_s: float
    val_loss: float


def train(path: Path, overrides: Sequence[str], seed: int) -> Trained:
    """Train a config from scratch. Raises UserError with the last lines of train.py if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, CONFIGS.parent / "train.py", path, f"train.seed={seed}",
                               f"run.dir={folder}/run", *overrides], capture_output=True, text=True)
        wall_s = time.perf_counter() - began
        if done.returncode:
            raise UserError(*(line.removeprefix("error: ") for line in done.stderr.splitlines()[-3:]))
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return Trained(wall_s, summary["wall_s"], summary["val_loss"])


def describe(name: str, config: Config) -> str:
    """The hyper-parameters of a config that matter for its time."""
    m, t = config.model, config.train
    return (f"- {name}: {m.n_layer} layers, {m.n_embd} wide, {config.position.encoding}, {m.mlp}, "
            f"{t.optimizer}, {t.dtype}, {t.steps} steps of {t.batch_size} x {t.seq_len} = "
            f"{t.steps * t.batch_size * t.seq_len:,} tokens")


def cells(seed: int, baseline: Trained, speedrun: Trained, target: float) -> tuple[str, ...]:
    """A round as a row of the table."""
    return (str(seed), f"{baseline.wall_s:.1f} ({baseline.loop_s:.1f})", f"{baseline.val_loss:.4f}",
            f"{speedrun.wall_s:.1f} ({speedrun.loop_s:.1f})", f"{speedrun.val_loss:.4f}",
            "yes" if speedrun.val_loss <= target else "**missed**",
            f"{speedrun.wall_s / baseline.wall_s:.3f} ({speedrun.loop_s / baseline.loop_s:.3f})")


def report(pair: Pair, data: str | None, n_rounds: int) -> str:
    """The table as Markdown; each round is printed on stderr as it ends."""
    head = [f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}; seconds of the process "
            "(in brackets those of the training loop), nats per validation token", "",
            *(describe(path.stem, load_config(path)) for path in pair[:2]), ""]
    overrides = [*pair.overrides, *([f"data.dir={data}"] if data else [])]
    rounds, rows = [], []
    for seed in range(n_rounds):
        rounds.append((train(pair.baseline, overrides, seed), train(pair.speedrun, overrides, seed)))
        rows.append(cells(seed, *rounds[-1], pair.target))
        print(*rows[-1], file=sys.stderr, flush=True)
    ratios = [speedrun.wall_s / baseline.wall_s for baseline, speedrun in rounds]
    n_reached = sum(speedrun.val_loss <= pair.target for _, speedrun in rounds)
    verdict = (f"The loss was reached in {n_reached} of {n_rounds} rounds; seconds over "
               f"{pair.baseline.stem}'s: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to "
               f"{max(ratios):.3f}.")
    columns = ("seed", f"{pair.baseline.stem}, s", "loss", f"{pair.speedrun.stem}, s", "loss",
               f"<= {pair.target}", "ratio of seconds")
    return "\n".join([*head, *table(columns, rows), "", verdict])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("pair", nargs="?", choices=PAIRS, default="tinyshakespeare",
                        help="which pair (default %(default)s)")
    parser.add_argument("--data", help="the corpus (default: that of the configs, data/tinyshakespeare, "
                                       "prepared from nanoGPT's input.txt, or data/stdlib)")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the result to this file")
    args = parser.parse_args()
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: must be at least 1")
    text = report(PAIRS[args.pair], args.data, args.rounds)
    write(args.out, text)


if __name__ == "__main__":
    run_command(main)
