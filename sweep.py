"""Train, evaluate and compare configs: `python sweep.py CONFIG [CONFIG ...] [section.key=value ...]`.

Each config is trained once with every combination of --grid values and every seed of --seeds, in the folder
RUNS/CONFIG[-key-value][-seedS], and evaluated; at the end all runs are compared. The same command resumes an
interrupted sweep; an evaluation is repeated only if the arguments of --eval changed. A method of
--eval="--extend METHOD" that does not fit a config is skipped for its runs. A run that fails is listed at the
end, and the others continue. RUNS/NAME.log has the output.

With --choose val_loss, each combination of values is a trial. Every trial is trained with every seed of
--seeds, and for each config the trial with the lowest mean validation loss at L = train.seq_len is chosen. A
trial that diverges loses. OUT/trials.csv has every run, OUT/chosen.toml the choices; nothing is evaluated.
The finals are a second command, with --trials OUT/chosen.toml and other seeds. Every config must have the
same number of trials. To give each config values of its own, name a TOML file in --trials: grids as for
--grid, with a blank between keys, by the name of the config's file; `others` are the configs that it does
not name. These are six trials each:

  others = ["train.lr=5e-4,1e-3,2e-3,4e-3,8e-3,16e-3"]
  t5 = ["train.lr=1e-3,2e-3,4e-3 position.lr_scale=20", "train.lr=2e-3 position.lr_scale=2,6,60"]

With --submitit FOLDER each run is a job: on Slurm where it is installed, otherwise a process on this machine.
Exit codes: 0 done, 1 a run failed, 2 a mistake in the call, 128 + n stopped by signal n after saving.
"""

from __future__ import annotations

if __name__ == "__main__":
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

import argparse
import shlex
import sys
from pathlib import Path

from base.command import argument_parser, integers, positive, run_command
from base.errors import UserError
from evaluation import sweeping, trials
from evaluation.sweeping import Points, make_jobs


def pair(text: str) -> tuple[str, int | str]:
    key, value = text.split("=", 1)
    return key, int(value) if value.isdigit() else value


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="config files; overrides apply to all")
    parser.add_argument("--seeds", metavar="S,S", type=integers, action="extend", default=[],
                        help="train with each seed")
    grids = parser.add_mutually_exclusive_group()
    grids.add_argument("--grid", metavar="section.key=V,V", action="append", default=[],
                       help="train with each value: --grid train.lr=1e-3,2e-3; may be repeated")
    grids.add_argument("--trials", metavar="FILE", type=Path, help="the grids of each config, in TOML")
    parser.add_argument("--choose", choices=["val_loss"], help="choose a trial for each config")
    parser.add_argument("--workers", metavar="N", type=positive, default=1,
                        help="runs at a time, each with its share of the cores (default 1)")
    parser.add_argument("--runs", metavar="DIR", type=Path, default=Path("runs"), help="default %(default)s")
    parser.add_argument("--eval", metavar="ARGS", type=shlex.split, default=[],
                        help='for eval.py: --eval="--windows 64"')
    parser.add_argument("--out", metavar="DIR", type=Path,
                        help="folder of the report, or of the choices (default RUNS/report)")
    parser.add_argument("--submitit", metavar="FOLDER", type=Path, help="submit jobs; logs go to this folder")
    parser.add_argument("--slurm", nargs="+", type=pair, default=[], metavar="key=value",
                        help="submitit's parameters: timeout_min=240 slurm_partition=gpu gpus_per_node=1")
    args = parser.parse_intermixed_args()
    args.overrides = [text for text in args.configs if "=" in text]
    args.configs = [text for text in args.configs if "=" not in text]
    if not args.configs:
        raise UserError("no config given, only overrides; give files such as configs/quick.toml")
    if any(text.startswith("run.dir=") for text in args.overrides):
        raise UserError("run.dir: is another for each run; give --runs DIR, the folder of all")
    if args.slurm and not args.submitit:
        raise UserError("--slurm: requires --submitit FOLDER")
    args.out = args.out or args.runs / "report"
    return args


def main() -> int:
    args = parse_arguments()
    points: Points = (trials.read_points(args.trials, args.configs) if args.trials
                      else dict.fromkeys(args.configs, trials.grid_points(args.grid)))
    jobs = make_jobs(points, args.overrides, args.seeds, args.runs, None if args.choose else args.eval)
    if args.choose:
        trials.check_fair(points)
    failed = (sweeping.run_submitted(jobs, args.submitit, dict(args.slurm)) if args.submitit
              else sweeping.run_here(jobs, args.workers))
    if args.choose:
        code, problems = 0, trials.choose(jobs, failed, args.out)
    else:
        good = [job for job in jobs if job.name not in failed]
        code = sweeping.report(good, args.out) if good else 1
        problems = [f"run {name}: {problem}" for name, problem in failed.items()]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return code or (1 if problems else 0)


if __name__ == "__main__":
    run_command(main)
