"""Train, evaluate and compare configs: `python sweep.py CONFIG [CONFIG ...] [section.key=value ...]`.

Each config is trained once with every combination of --grid values and every seed of --seeds, in the folder
RUNS/CONFIG[-key-value][-seedS], and evaluated; at the end all runs are compared. train.py resumes an
interrupted run, and an evaluation is repeated only if the checkpoint, the arguments or its files changed, so
the same command resumes the sweep. A method of --eval="--extend METHOD" that does not fit a config is skipped
for its runs. A run that fails is listed at the end, and the others continue. RUNS/NAME.log has the output.

With --submitit FOLDER each run is a job: on Slurm where it is installed, otherwise a process on this machine
(all at once, without a GPU). docs/comparing.md shows how to use several GPUs of one machine.
Exit codes: 0 done, 1 a run failed, 2 a mistake in the call, 129, 130 or 143 stopped by a signal after saving.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback

from evaluation.sweeping import Progress, last_line, make_jobs, pairs, report, run_here, run_submitted
from runtime.command import argument_parser, run_command
from runtime.errors import UserError


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="config files; overrides apply to all")
    parser.add_argument("--seeds", metavar="S,S", help="train every config with each seed")
    parser.add_argument("--grid", metavar="section.key=V,V", action="append", default=[],
                        help="train every config with each value: --grid train.lr=1e-3,2e-3; if repeated, "
                        "with every combination")
    parser.add_argument("--runs", metavar="DIR", type=Path, default=Path("runs"), help="default %(default)s")
    parser.add_argument("--eval", metavar="ARGS", default="", help='for eval.py: --eval="--windows 64"')
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the report (default RUNS/report)")
    parser.add_argument("--submitit", metavar="FOLDER", type=Path, help="submit jobs; logs go to this folder")
    parser.add_argument("--slurm", nargs="+", default=[], metavar="key=value",
                        help="submitit's parameters: timeout_min=240 slurm_partition=gpu gpus_per_node=1")
    args = parser.parse_intermixed_args()
    try:
        seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else []
    except ValueError as error:
        raise UserError(f"--seeds {args.seeds}: must be integers and commas, such as 0,1,2") from error
    configs = [text for text in args.configs if "=" not in text]
    if not configs:
        raise UserError("no config given, only overrides; give files such as configs/quick.toml")
    jobs = make_jobs(configs, [text for text in args.configs if "=" in text], seeds, args.runs,
                     shlex.split(args.eval), args.grid)

    def on_signal(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    progress = Progress(len(jobs))
    try:
        if args.submitit:
            run_submitted(jobs, progress, args.submitit, dict(pairs(args.slurm)))
        else:
            run_here(jobs, progress)
        good = [job for job in jobs if job.name not in progress.failed]
        code = report(good, args.out or args.runs / "report") if good else 1
    except KeyboardInterrupt as stop:
        print("\nstopped and saved; the same command resumes from there")
        return 128 + stop.args[0]
    for job in jobs:
        if job.name in progress.failed:
            print(f"error: run {job.name}: {progress.failed[job.name]}: {last_line(job.log)}; see {job.log}",
                  file=sys.stderr)
    return code or (1 if progress.failed else 0)


if __name__ == "__main__":
    run_command(main)
