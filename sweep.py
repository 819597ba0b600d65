"""Train, evaluate and compare configs: `python sweep.py CONFIG [CONFIG ...] [section.key=value ...]`.

Each config is trained once with every combination of --grid values and every seed of --seeds, in the folder
RUNS/CONFIG[-key-value][-seedS], and evaluated; at the end all runs are compared. train.py resumes an
interrupted run, and an evaluation is repeated only if the checkpoint, the arguments or its files changed, so
the same command resumes the sweep. A method of --eval="--extend METHOD" that does not fit a config is skipped
for its runs. A run that fails is listed at the end, and the others continue. RUNS/NAME.log has the output.

With --choose val_loss, each combination of values is a trial. All trials are trained with the first seed; if
there are several seeds, the better half of each config's (rounded up, at least two) also with the second. For
each config the trial with the lowest validation loss at L = train.seq_len, the mean over these seeds, is
chosen, and only that one is trained with all seeds, evaluated and compared. A trial that diverges loses; of
equal ones the first wins. OUT/sensitivity.md has every trial with its loss on fixed targets at L and 8 L, and
how much the choice matters. Every config must have the same number of trials. To give each config values of
its own, name a TOML file in --trials. It has grids for each config, by the name of its file; `others` are the
configs that it does not name. A grid is written as for --grid, with a blank between keys. These are six
trials each:

  others = ["train.lr=5e-4,1e-3,2e-3,4e-3,8e-3,16e-3"]
  t5 = ["train.lr=1e-3,2e-3,4e-3 position.lr_scale=20", "train.lr=2e-3 position.lr_scale=2,6,60"]

--workers N trains N runs at a time, each with its share of the cores. With --submitit FOLDER each run is a
job: on Slurm where it is installed, otherwise a process on this machine (all at once, without a GPU).
docs/comparing.md shows how to use several GPUs of one machine.
Exit codes: 0 done, 1 a run failed, 2 a mistake in the call, 129, 130 or 143 stopped by a signal after saving.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback
    sys.path.insert(0, str(Path(__file__).resolve().parent))    # `python -P` leaves it out

from evaluation import trials
from evaluation.sweeping import (
    DIVERGED,
    Job,
    Points,
    Progress,
    last_line,
    make_jobs,
    pairs,
    report,
    run_here,
    run_submitted,
)
from runtime.command import SIGNALS, argument_parser, interrupt, run_command
from runtime.errors import UserError


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="config files; overrides apply to all")
    parser.add_argument("--seeds", metavar="S,S", default="", help="train every config with each seed")
    parser.add_argument("--grid", metavar="section.key=V,V", action="append", default=[],
                        help="train every config with each value: --grid train.lr=1e-3,2e-3; if repeated, "
                        "with every combination")
    parser.add_argument("--trials", metavar="FILE", type=Path, help="the grids of each config, in TOML")
    parser.add_argument("--choose", choices=["val_loss"],
                        help="train only the trial with the lowest validation loss with all seeds")
    parser.add_argument("--workers", metavar="N", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--runs", metavar="DIR", type=Path, default=Path("runs"), help="default %(default)s")
    parser.add_argument("--eval", metavar="ARGS", default="", help='for eval.py: --eval="--windows 64"')
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the report (default RUNS/report)")
    parser.add_argument("--submitit", metavar="FOLDER", type=Path, help="submit jobs; logs go to this folder")
    parser.add_argument("--slurm", nargs="+", default=[], metavar="key=value",
                        help="submitit's parameters: timeout_min=240 slurm_partition=gpu gpus_per_node=1")
    args = parser.parse_intermixed_args()
    args.overrides = [text for text in args.configs if "=" in text]
    args.configs = [text for text in args.configs if "=" not in text]
    try:
        args.seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else []
    except ValueError as error:
        raise UserError(f"--seeds {args.seeds}: must be integers and commas, such as 0,1,2") from error
    if not args.configs:
        raise UserError("no config given, only overrides; give files such as configs/quick.toml")
    if args.workers < 1 or args.workers > 1 and args.submitit:
        raise UserError(f"--workers {args.workers}: must be at least 1, and 1 with --submitit")
    if args.trials and args.grid:
        raise UserError("--grid: the grids are in the file of --trials; give one of both")
    args.eval, args.out = trials.split(args.eval, "--eval"), args.out or args.runs / "report"
    return args


def run(args: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, str]:
    """Run these jobs; name -> problem of each that failed."""
    progress = Progress(len(jobs), args.workers)
    if args.submitit:
        run_submitted(jobs, progress, args.submitit, dict(pairs(args.slurm)))
    else:
        run_here(jobs, progress)
    return progress.failed


def run_trials(args: argparse.Namespace, points: Points) -> tuple[Points, list[str]]:
    """Train the trials; the chosen point of each config, and what failed."""
    unequal = trials.check_fair(points, args.overrides)
    L = trials.load(args.configs[0], args.overrides).train.seq_len
    jobs = make_jobs(args.configs, args.overrides, args.seeds[:1], args.runs,
                     trials.trial_arguments(args.eval, L), points, are_trials=True)
    failed = run(args, jobs)
    found = trials.read_trials(jobs, failed, args.overrides)
    halves, problems = trials.better_halves(found)
    if args.seeds[1:]:
        again = {half[0].config: [t.point for t in half] for half in halves.values()}
        second = make_jobs(list(again), args.overrides, args.seeds[1:2], args.runs, None, again)
        failed |= run(args, second)
        found = trials.with_second_seed(found, trials.read_trials(second, failed, args.overrides))
        halves, problems = trials.better_halves(found)
        jobs += second
    chosen = {name: half[0] for name, half in halves.items()}
    trials.write_sensitivity(args.out, found, chosen, L, unequal)
    for t in chosen.values():
        print(f"chosen for {t.name}: {t.values}, {trials.VALIDATION} {t.score:.4f}")
    print(f"wrote {args.out}/sensitivity.md", flush=True)
    failed = {name: problem for name, problem in failed.items() if problem != DIVERGED}
    return {t.config: [t.point] for t in chosen.values()}, [*failures(jobs, failed), *problems]


def failures(jobs: Sequence[Job], failed: dict[str, str]) -> list[str]:
    """A line for each job that failed, with the last line of its log."""
    return [f"run {job.name}: {failed[job.name]}: {last_line(job.log)}; see {job.log}"
            for job in jobs if job.name in failed]


def sweep(args: argparse.Namespace, points: Points) -> int:
    """Run everything that is not done; the exit code."""
    problems: list[str] = []
    if args.choose:
        points, problems = run_trials(args, points)
    jobs = make_jobs(list(points), args.overrides, args.seeds, args.runs, args.eval, points)
    failed = run(args, jobs)
    problems += failures(jobs, failed)
    good = [job for job in jobs if job.name not in failed]
    labels = [Path(job.config).stem for job in good] if args.choose else []
    code = report(good, args.out, labels) if good else 1
    for problem in dict.fromkeys(problems):     # a run may have failed as a trial and then again
        print(f"error: {problem}", file=sys.stderr)
    return code or (1 if problems else 0)


def main() -> int:
    args = parse_arguments()
    points = (trials.read_points(args.trials, args.configs) if args.trials
              else dict.fromkeys(args.configs, trials.grid_points(args.grid)))
    make_jobs(args.configs, args.overrides, args.seeds, args.runs, args.eval, points)   # reports all problems

    def on_signal(number: int, frame: Any) -> None:
        for each in handled:                    # the running commands save; a second signal must not cut that
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    handled = [number for number in SIGNALS if signal.getsignal(number) is interrupt]   # nohup ignores one
    for number in handled:
        signal.signal(number, on_signal)
    try:
        return sweep(args, points)
    except KeyboardInterrupt as stop:
        print("\nstopped and saved; the same command resumes from there")
        return 128 + stop.args[0]


if __name__ == "__main__":
    run_command(main)
