"""Time to a loss: a plain config and its speedrun, both trained by train.py, in turn.

`python -m bench.speedrun PLAIN.toml SPEEDRUN.toml [section.key=value ...] [--rounds N]` trains the two in
turn, each from scratch in a fresh process; the seed is the number of the round. It prints the seconds of the
process, those of the training loop (wall_s of summary.json; both include validation), and the final loss.
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

from base.command import argument_parser, run_command
from base.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def train(config: str, overrides: Sequence[str]) -> tuple[float, float, float]:
    """Train a config from scratch: seconds of the process and of the training loop, and the loss."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [sys.executable, str(ROOT / "train.py"), config, *overrides, f"run.dir={folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True)
        wall_s = time.perf_counter() - began
        if done.returncode:
            raise UserError(*(line.removeprefix("error: ") for line in done.stderr.splitlines()[-3:]))
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
    return wall_s, summary["wall_s"], summary["val_loss"]


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("configs", nargs=2, metavar="CONFIG.toml", help="the plain one, then the speedrun")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change both configs")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each (default %(default)s)")
    args = parser.parse_intermixed_args()
    names, ratios = [Path(config).stem for config in args.configs], []
    head = "".join(f" {name}, s (in the loop) | loss |" for name in names)
    print(f"| seed |{head} ratio of seconds |", "|---|" + "---:|" * 5, sep="\n", flush=True)
    for seed in range(args.rounds):
        (slow, slow_loop, high), (fast, fast_loop, low) = (
            train(config, [f"train.seed={seed}", *args.overrides]) for config in args.configs)
        ratios.append(fast / slow)
        print(f"| {seed} | {slow:.1f} ({slow_loop:.1f}) | {high:.4f} | {fast:.1f} ({fast_loop:.1f}) "
              f"| {low:.4f} | {ratios[-1]:.3f} |", flush=True)
    print(f"\nratio of seconds: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    run_command(main)
