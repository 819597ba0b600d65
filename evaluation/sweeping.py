"""Sweeps: the jobs of sweep.py, what each of them runs, here or submitted to a cluster."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from base.errors import UserError
from config import load_config, toml_value
from hf.pretrained import pretrained_tables
from runtime.run import is_by_other_code

ROOT = Path(__file__).resolve().parent.parent
DIVERGED = "training diverged"

Point = Sequence[str]                           # overrides: one value for each key of a grid
Points = Mapping[str, Sequence[Point]]          # of each config
RUNNING: set[subprocess.Popen] = set()          # the commands that this process runs now


class Job(NamedTuple):
    """One run: what to train, in which folder, and how to evaluate it."""

    name: str
    config: str
    point: Point
    overrides: list[str]                # the point's and all others
    run_dir: Path
    eval_arguments: list[str] | None    # None: this run is not evaluated


def make_jobs(points: Points, overrides: Sequence[str], seeds: Sequence[int], runs: Path,
              eval_arguments: list[str] | None) -> list[Job]:
    """Every config at each of its points with every seed. Raises one UserError with the problems of all."""
    jobs: dict[str, Job] = {}
    problems: list[str] = []
    each_seed: list[int | None] = [*seeds] or [None]
    for config in points:
        for point, seed in itertools.product(points[config], each_seed):
            # each override without its section, in characters that a folder's name may have
            parts = [Path(config).stem, *(text.replace("=", "-").partition(".")[2] for text in point)]
            job_overrides = [*overrides, *point]
            if seed is not None:
                parts.append(f"seed{seed}")
                job_overrides.append(f"train.seed={seed}")
            name = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))
            job_overrides.append(f"run.dir={toml_value(str(runs / name))}")
            if name in jobs:
                problem = f"config {config}: {jobs[name].config} has the same name; rename one of them"
                if jobs[name].config == config:
                    problem = f"run {name}: a seed, value or config is given twice; leave one out"
                problems.append(problem)
            jobs[name] = Job(name, config, point, job_overrides, runs / name, eval_arguments)
            try:
                load_config(config, job_overrides, pretrained_tables)
            except UserError as error:
                problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return list(jobs.values())


# -----------------------------------------------------------------------------------------------------------
# One run


def work(job: Job) -> str:
    """Train, then evaluate unless that was done with the same arguments; return "" or what failed."""
    log = job.run_dir.with_name(f"{job.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    problem = call(["train.py", job.config, *job.overrides], log)
    if problem or job.eval_arguments is None:
        return problem
    # this file has the arguments of the last evaluation, and a second line while it is not finished
    path = job.run_dir / "eval" / "arguments.txt"
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    done = shlex.join(job.eval_arguments)
    begun = f"{done}\nnot finished"
    if known == done:
        return ""
    # a method may fit only some of the configs
    command = ["eval.py", str(job.run_dir), "--skip-unfit", *job.eval_arguments]
    if known != begun:                  # an evaluation with other arguments is outdated
        command.append("--replace")
        path.parent.mkdir(exist_ok=True)
        path.write_text(begun, encoding="utf-8")
    problem = call(command, log)
    if not problem:
        path.write_text(done, encoding="utf-8")
    elif known == begun and problem.startswith("eval.py ended with 2:"):
        path.unlink()               # a mistake: what is there may be the problem, next time it is replaced
    return problem


def call(command: Sequence[str], log: Path) -> str:
    """Run a command of this repository, with its output in the log; return "" or what failed."""
    with log.open("a", encoding="utf-8") as file:
        print(f"\n$ python {shlex.join(command)}", file=file, flush=True)
        began = file.tell()
        child = subprocess.Popen([sys.executable, str(ROOT / command[0]), *command[1:]], stdout=file,
                                 stderr=subprocess.STDOUT)
    RUNNING.add(child)
    try:
        code = child.wait()
    except BaseException:               # in a submitted job, which is stopped by a signal
        child.terminate()
        child.wait()
        raise
    finally:
        RUNNING.remove(child)
    if code == 0:
        return ""
    if code == 3:
        return DIVERGED
    # its error; the last line may be of another process, which trains this run and writes into the same log
    written = log.read_bytes()[began:].decode("utf-8", errors="replace").strip().splitlines()
    errors = [line for line in written if line.startswith("error: ")]
    return f"{command[0]} ended with {code}: {(errors or written or ['no output'])[-1]}; see {log}"


# -----------------------------------------------------------------------------------------------------------
# All runs


def run_here(jobs: Sequence[Job], n_workers: int) -> dict[str, str]:
    """Run the jobs, some at a time, each with its share of the cores; name -> problem of each that failed.

    An exception, such as a signal's, stops the running commands, which save first.
    """
    if n_workers > 1:
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_cores // n_workers)))
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(n_workers) as pool:
        tasks = {pool.submit(work, job): job for job in jobs}
        try:
            for task in tqdm(as_completed(tasks), total=len(jobs), unit="run", disable=None):
                finish(tasks[task], task.result(), failed)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in list(RUNNING):
                child.terminate()       # Ctrl-C has reached it already; a second signal changes nothing
            print("stopped; the same command resumes from there")
            raise
    return failed


def run_submitted(jobs: Sequence[Job], folder: Path, parameters: dict[str, Any]) -> dict[str, str]:
    """Submit every run as a job at once, and wait for all; name -> problem of each that failed."""
    try:
        import submitit
        executor = submitit.AutoExecutor(folder=folder)
        executor.update_parameters(**parameters)
    except (ImportError, NameError, TypeError) as error:    # not installed, or a parameter that is not known
        raise UserError(f"--submitit, --slurm: {str(error).splitlines()[0]}") from error
    os.environ["PYTHONPATH"] = str(ROOT)        # where the jobs find this module
    failed: dict[str, str] = {}
    submitted = {executor.submit(work, job): job for job in jobs}
    for task, job in submitted.items():
        crash = task.exception()                # waits for the job
        finish(job, f"{type(crash).__name__}, see {folder}" if crash else task.result(), failed)
    return failed


def finish(job: Job, problem: str, failed: dict[str, str]) -> None:
    """Say how a run has ended."""
    done = "done"
    if not problem and is_by_other_code(job.run_dir):
        done = f"done by other code than today's; delete {job.run_dir} to train it again"
    tqdm.write(f"{job.name}: {problem or done}")
    sys.stdout.flush()
    if problem:
        failed[job.name] = problem


def report(jobs: Sequence[Job], out: Path) -> int:
    """Run compare.py over these runs, on the text that all were evaluated on last; return its exit code."""
    folders = [job.run_dir / "eval" for job in jobs]
    shared = set.intersection(*({path.name for path in folder.glob("*.json")} for folder in folders))
    newest = max((folders[0] / name for name in shared), key=lambda path: path.stat().st_mtime_ns)
    command = [sys.executable, str(ROOT / "compare.py"), *(str(job.run_dir) for job in jobs)]
    return subprocess.run([*command, "--data", newest.stem, "--out", str(out)]).returncode
