"""Time to a loss: a plain config and its speedrun, both trained by train.py, in turn.

`python -m bench.speedrun [PAIR] [section.key=value ...] [--rounds N]` trains the two configs of a pair in
turn, each from scratch in a fresh process; the seed is the number of the round.

  tinyshakespeare  nanoGPT's own CPU example, which reaches 1.886 nats per character after its 2000 steps
  quick            the model of `make train`, trained by AdamW, and the config of `make train`, which reaches
                   1.345 nats per token (perplexity 3.84) in less time

It prints the wall time of the whole process, that of the training loop in it (summary.json's wall_s; both
include validation), and the loss at the end, on the whole validation split or, for quick, on 131,072 tokens
of it. The speedrun must end at or below the loss of the pair.
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

from runtime.command import argument_parser, run_command
from runtime.errors import UserError


class Pair(NamedTuple):
    """Two configs of the same corpus, the loss to reach in nats per token, and overrides of both."""

    baseline: str
    speedrun: str
    target: float
    overrides: tuple[str, ...] = ()


ROOT = Path(__file__).resolve().parent.parent
PAIRS = {
    "tinyshakespeare": Pair("tinyshakespeare-nanogpt", "tinyshakespeare-speedrun", 1.886),
    "quick": Pair("quick-adamw", "quick", 1.345,
                  ("train.val_windows=1024", "run.eval_every=1000")),       # validated once, at the end
}


def train(config: str, overrides: Sequence[str]) -> tuple[float, float, float]:
    """Train a config from scratch: seconds of the process and of the training loop, and the loss."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, ROOT / "train.py", ROOT / "configs" / f"{config}.toml",
                               *overrides, f"run.dir={folder}/run"], capture_output=True, text=True)
        wall_s = time.perf_counter() - began
        if done.returncode:
            raise UserError(*(line.removeprefix("error: ") for line in done.stderr.splitlines()[-3:]))
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
    return wall_s, summary["wall_s"], summary["val_loss"]


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("pair", nargs="?", choices=PAIRS, default="tinyshakespeare",
                        help="default %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change both configs")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each (default %(default)s)")
    args = parser.parse_intermixed_args()
    pair, ratios = PAIRS[args.pair], []
    print(f"| seed | {pair.baseline}, s (in the loop) | loss | {pair.speedrun}, s (in the loop) | loss "
          f"| <= {pair.target} | ratio of seconds |", "|---|" + "---:|" * 6, sep="\n", flush=True)
    for seed in range(args.rounds):
        (slow, slow_loop, high), (fast, fast_loop, low) = (
            train(config, [*pair.overrides, f"train.seed={seed}", *args.overrides]) for config in pair[:2])
        ratios.append(fast / slow)
        is_reached = "yes" if low <= pair.target else "**missed**"
        print(f"| {seed} | {slow:.1f} ({slow_loop:.1f}) | {high:.4f} | {fast:.1f} ({fast_loop:.1f}) "
              f"| {low:.4f} | {is_reached} | {ratios[-1]:.3f} |", flush=True)
    print(f"\nratio of seconds: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    run_command(main)
