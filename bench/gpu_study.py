"""As many encodings x seeds as fit: `python -m bench.gpu_study [--minutes M] [--smoke] [key=value ...]`.

bench/gpu_study.sh is the command to give: it sees to missing packages. Trains configs/gpu-study.toml with
every encoding at L = 512, evaluates each up to 64 L on the corpus' validation books, and compares what is
finished. All encodings come with seed 0 first, then all with seed 1, and so on; those that leave the logits
alone first, as they are the quickest. Several train at a time, since one alone leaves the GPU idle while it
starts, compiles and saves. When the time is over, what runs is stopped, saved, and the report is written.

The same command goes on where the last one ended: what is in RUNS is not done again. OUT gets the report and
study.tar.gz, the report and the finished runs without their weights: unpacked beside RUNS on another machine,
they count there too. --smoke does all of it at toy size, with a few encodings on the stdlib corpus, on a CPU.
Exit codes: 0 done, 1 a run failed or none is finished, 2 a mistake in the call, 128 + n stopped by signal n.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from config import load_config
from evaluation.sweeping import Job, is_evaluated, last_line, report, work
from positions import ENCODINGS
from runtime.command import argument_parser, run_command
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent

CONFIG = ROOT / "configs" / "gpu-study.toml"
EVAL = ["--windows", "16"]                          # lengths: the default, L/2 ... 64 L
REPORT_S = 60.0                                     # kept for stopping what runs, and for the report
SMOKE = ["data.dir=data/stdlib", "model.n_layer=1", "model.n_head=2", "model.n_embd=32", "train.steps=6",
         "train.batch_size=4", "train.seq_len=32", "train.warmup=2", "train.val_windows=4",
         "train.device=cpu", "train.compile=off"]
SMOKE_EVAL = ["--lengths", "16,32,2048", "--windows", "8", "--tokens", "2048"]
SMOKE_ENCODINGS = ("rope", "learned", "alibi", "t5")
KEPT = ("*.toml", "*.json", "*.jsonl", "eval/*", "checkpoints/*/state.json")    # of a run, in the archive


class TimeIsUp(Exception):
    """The study is over: what runs shall save and stop."""


class Study:
    """Jobs that are done side by side until a moment comes."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.seconds: list[float] = []              # that each finished job took
        self.failed: list[Job] = []

    def has_time(self) -> bool:
        """Whether a job begun now would end in time, as far as those before it tell."""
        left = self.end - time.monotonic()
        return left > (statistics.median(self.seconds) if self.seconds else 0)

    def watch(self, line: str) -> None:
        """Called each second while a job runs. Raises TimeIsUp."""
        if time.monotonic() > self.end:
            raise TimeIsUp

    def do(self, job: Job) -> None:
        """Train and evaluate, if there is time and it is not done; tell how that ended."""
        if is_evaluated(job):
            print(f"{job.name}: done before", flush=True)
            return
        if not self.has_time():
            return
        began = time.monotonic()
        try:
            problem = work(job, self.watch)
        except TimeIsUp:
            print(f"{job.name}: stopped, time is up; saved", flush=True)
            return
        if problem:
            self.failed.append(job)
            print(f"{job.name}: FAILED: {problem}: {last_line(job.log)}; see {job.log}", flush=True)
            return
        self.seconds.append(time.monotonic() - began)
        print(f"{job.name}: done in {self.seconds[-1]:.0f} s", flush=True)

    def do_all(self, jobs: Sequence[Job], n_workers: int) -> None:
        """All that fit, in this order, several at a time."""
        with ThreadPoolExecutor(n_workers) as pool:
            try:
                list(pool.map(self.do, jobs))
            except KeyboardInterrupt:
                self.end = 0.0                      # watch() stops what runs; the rest finds no time
                raise


def plan(names: Sequence[str], n_seeds: int, runs: Path, overrides: Sequence[str],
         eval_arguments: Sequence[str]) -> list[Job]:
    """A job for each encoding and seed, in the order in which they are worth most. Raises UserError."""
    jobs = []
    for seed in range(n_seeds):
        for name in sorted(names, key=lambda name: ENCODINGS[name].has_scores()):
            label = f"{name}-seed{seed}"
            own = [*overrides, f"position.encoding={name}", f"train.seed={seed}", f"run.dir={runs / label}"]
            load_config(CONFIG, own)
            jobs.append(Job(label, str(CONFIG), own, runs / label, list(eval_arguments)))
    return jobs


def archive(jobs: Sequence[Job], out: Path) -> None:
    """OUT/study.tar.gz: the report, and the finished runs: no weights, but what says that they are done."""
    runs = jobs[0].run_dir.parent
    with tarfile.open(out / "study.tar.gz", "w:gz") as tar:
        for file in sorted(path for path in out.glob("*") if path.suffix != ".gz"):
            tar.add(file, f"{runs.name}/report/{file.name}")
        for job in jobs:
            for file in sorted({file for pattern in KEPT for file in job.run_dir.glob(pattern)}):
                tar.add(file, f"{runs.name}/{file.relative_to(runs)}")


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for all runs")
    parser.add_argument("--smoke", action="store_true", help="toy size, on the CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default %(default)s)")
    parser.add_argument("--encodings", metavar="NAME,NAME", help="default: all, RoPE first")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="0 ... N - 1 (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=4, help="at a time (default %(default)s; on a CPU 1)")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="default runs/gpu-study")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default results/gpu/study")
    args = parser.parse_intermixed_args()
    if not args.smoke and not torch.cuda.is_available():
        raise UserError("no CUDA device here; --smoke does everything at toy size on the CPU")
    chosen = args.encodings.split(",") if args.encodings else SMOKE_ENCODINGS if args.smoke else (
        load_config(CONFIG).position.encoding, *ENCODINGS)
    unknown = [name for name in chosen if name not in ENCODINGS]
    if unknown or min(args.seeds, args.jobs) < 1:
        raise UserError(f"--encodings {','.join(unknown)} --seeds {args.seeds} --jobs {args.jobs}: encodings "
                        f"are {', '.join(ENCODINGS)}; the others must be at least 1")
    runs = (args.runs or ROOT / "runs" / ("gpu-study-smoke" if args.smoke else "gpu-study")).resolve()
    out = (args.out or (runs / "report" if args.smoke else ROOT / "results" / "gpu" / "study")).resolve()
    os.chdir(ROOT)                                  # where the configs' data.dir is
    overrides = [*(SMOKE if args.smoke else []), *args.overrides]
    jobs = plan(list(dict.fromkeys(chosen)), args.seeds, runs, overrides, SMOKE_EVAL if args.smoke else EVAL)
    corpus = ROOT / "data" / "stdlib"
    if args.smoke and not (corpus / "meta.json").exists():
        subprocess.run([sys.executable, ROOT / "data" / "prepare.py", "stdlib", "--out", corpus], check=True)
    study = Study(60 * args.minutes - (5 if args.smoke else REPORT_S))
    study.do_all(jobs, 1 if args.smoke else args.jobs)
    finished = [job for job in jobs if is_evaluated(job)]
    print(f"{len(finished)} of {len(jobs)} runs are finished; the same command goes on with the rest")
    if not finished:
        return 1
    code = report(finished, out)
    out.mkdir(parents=True, exist_ok=True)
    archive(finished, out)
    return code or (1 if study.failed else 0)


if __name__ == "__main__":
    run_command(main)
