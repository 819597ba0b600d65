"""Train, evaluate and compare configs: `python sweep.py CONFIG [CONFIG ...] [section.key=value ...]`.

Each config is trained once with every combination of --grid values and every seed of --seeds, in the folder
RUNS/CONFIG[-key-value][-seedS], and evaluated; at the end all runs are compared. The same command resumes an
interrupted sweep; an evaluation is repeated only if the arguments of --eval changed. A method of
--eval="--extend METHOD" that does not fit a config is skipped for its runs. A run that fails is listed at the
end, and the others continue. RUNS/NAME.log has the output.

With --choose val_loss, each combination of values is a trial. All trials are trained with the first seed, the
better half of each config's (rounded up, at least two) also with the second, if there is one. The trial with
the lowest mean validation loss at L = train.seq_len is chosen, and only it is trained with all seeds,
evaluated and compared. A trial that diverges loses. OUT/trials.csv has every trial; without --choose, the
same command evaluates and compares all of them. Every config must have the same number of trials. To give
each config values of its own, name a TOML file in --trials: grids as for --grid, with a blank between keys,
by the name of the config's file; `others` are the configs that it does not name. These are six trials each:

  others = ["train.lr=5e-4,1e-3,2e-3,4e-3,8e-3,16e-3"]
  t5 = ["train.lr=1e-3,2e-3,4e-3 position.lr_scale=20", "train.lr=2e-3 position.lr_scale=2,6,60"]

With --submitit FOLDER each run is a job: on Slurm where it is installed, otherwise a process on this machine.
Exit codes: 0 done, 1 a run failed, 2 a mistake in the call, 128 + n stopped by signal n after saving.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from evaluation import sweeping, trials
from evaluation.sweeping import Job, Point, Points, make_jobs
from runtime.command import argument_parser, run_command
from runtime.errors import UserError


def integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def pair(text: str) -> tuple[str, int | str]:
    key, value = text.split("=", 1)
    return key, int(value) if value.isdigit() else value


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="config files; overrides apply to all")
    parser.add_argument("--seeds", metavar="S,S", type=integers, default=[], help="train with each seed")
    grids = parser.add_mutually_exclusive_group()
    grids.add_argument("--grid", metavar="section.key=V,V", action="append", default=[],
                       help="train with each value: --grid train.lr=1e-3,2e-3; may be repeated")
    grids.add_argument("--trials", metavar="FILE", type=Path, help="the grids of each config, in TOML")
    parser.add_argument("--choose", choices=["val_loss"], help="train only the best trial with all seeds")
    parser.add_argument("--workers", metavar="N", type=int, default=1,
                        help="runs at a time, each with its share of the cores (default 1)")
    parser.add_argument("--runs", metavar="DIR", type=Path, default=Path("runs"), help="default %(default)s")
    parser.add_argument("--eval", metavar="ARGS", type=shlex.split, default=[],
                        help='for eval.py: --eval="--windows 64"')
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the report (default RUNS/report)")
    parser.add_argument("--submitit", metavar="FOLDER", type=Path, help="submit jobs; logs go to this folder")
    parser.add_argument("--slurm", nargs="+", type=pair, default=[], metavar="key=value",
                        help="submitit's parameters: timeout_min=240 slurm_partition=gpu gpus_per_node=1")
    args = parser.parse_intermixed_args()
    args.overrides = [text for text in args.configs if "=" in text]
    args.configs = [text for text in args.configs if "=" not in text]
    if not args.configs:
        raise UserError("no config given, only overrides; give files such as configs/quick.toml")
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: must be at least 1")
    args.out = args.out or args.runs / "report"
    return args


def run(args: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, str]:
    """Run these jobs; name -> problem of each that failed."""
    if args.submitit:
        return sweeping.run_submitted(jobs, args.submitit, dict(args.slurm))
    return sweeping.run_here(jobs, args.workers)


def choose(args: argparse.Namespace, points: Points) -> tuple[Points, list[str]]:
    """Train the trials; the chosen point of each config, and what failed."""
    unequal = trials.check_fair(points, args.overrides)
    found: dict[Point, trials.Trial] = {}
    failed: dict[str, str] = {}
    for seeds, key in ((args.seeds[:1], trials.FIRST), (args.seeds[1:2], trials.SECOND)):
        if key == trials.FIRST or seeds:
            jobs = make_jobs(points, args.overrides, seeds, args.runs, None)
            failed |= run(args, jobs)
            trials.read_losses(found, jobs, failed, key)
            halves, problems = trials.better_halves(list(found.values()))
            points = {config: [t.point for t in half] for config, half in halves.items()}
    chosen = {config: half[0] for config, half in halves.items()}
    print(trials.write_trials(args.out / "trials.csv", list(found.values()), chosen))
    if unequal:
        print("apart from [position] and the trials, the configs differ:", *unequal, sep="\n  ")
    for config, t in chosen.items():
        print(f"chosen for {config}: {t.values}, {trials.FIRST} {t.score:.4f}", flush=True)
    problems += [f"run {name}: {problem}" for name, problem in failed.items() if problem != sweeping.DIVERGED]
    return {config: [t.point] for config, t in chosen.items()}, problems


def main() -> int:
    args = parse_arguments()
    points: Points = (trials.read_points(args.trials, args.configs) if args.trials
                      else dict.fromkeys(args.configs, trials.grid_points(args.grid)))
    make_jobs(points, args.overrides, args.seeds, args.runs, args.eval)     # reports all problems
    problems: list[str] = []
    if args.choose:
        points, problems = choose(args, points)
    jobs = make_jobs(points, args.overrides, args.seeds, args.runs, args.eval)
    failed = run(args, jobs)
    problems += [f"run {name}: {problem}" for name, problem in failed.items()]
    good = [job for job in jobs if job.name not in failed]
    labels = [Path(job.config).stem for job in good] if args.choose else []
    code = sweeping.report(good, args.out, labels) if good else 1
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return code or (1 if problems else 0)


if __name__ == "__main__":
    run_command(main)
