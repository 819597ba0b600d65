"""Sweeps: the jobs of sweep.py, what each of them runs, here or submitted to a cluster."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from config import load_config
from hf.pretrained import pretrained_tables
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
DIVERGED = "training diverged"

Point = Sequence[str]                           # overrides: one value for each key of a grid
Points = Mapping[str, Sequence[Point]]          # of each config
Children = dict[subprocess.Popen, Path]         # the commands that run now, with their logs


class Job(NamedTuple):
    """One run: what to train, in which folder, and how to evaluate it."""

    name: str
    config: str
    point: Point
    overrides: list[str]                # the point's and all others
    run_dir: Path
    eval_arguments: list[str] | None    # None: this run is not evaluated

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(f"{self.name}.log")

    @property
    def stamp(self) -> Path:
        """The file that tells from which checkpoint and arguments the results come."""
        return self.run_dir / "evaluated.json"

    @property
    def results(self) -> list[Path]:
        """What eval.py has written."""
        return list((self.run_dir / "eval").glob("*.json"))


def make_jobs(points: Points, overrides: Sequence[str], seeds: Sequence[int], runs: Path,
              eval_arguments: list[str] | None) -> list[Job]:
    """Every config at each of its points with every seed. Raises one UserError with the problems of all."""
    jobs: dict[str, Job] = {}
    problems: list[str] = []
    each_seed: list[int | None] = [*seeds] or [None]
    for config in points:
        for point, seed in itertools.product(points[config], each_seed):
            parts = [Path(config).stem, *(in_name(override, point) for override in point)]
            name = "-".join(parts if seed is None else [*parts, f"seed{seed}"])
            own = [*overrides, *point, f"run.dir={json.dumps(str(runs / name))}"]
            own += [] if seed is None else [f"train.seed={seed}"]
            if name in jobs:
                problems.append(f"config {config}: {jobs[name].config} has the same name; rename one of them")
            jobs[name] = Job(name, config, point, own, runs / name, eval_arguments)
            try:
                load_config(config, own, pretrained_tables)
            except UserError as error:
                problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return list(jobs.values())


def in_name(override: str, point: Point) -> str:
    """An override as a part of a run's name: without its section, unless another key has the same name."""
    key, _, value = override.partition("=")
    short = key.rpartition(".")[2]
    is_unique = sum(other.partition("=")[0].endswith(f".{short}") for other in point) == 1
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"{short if is_unique else key}-{value}")


# -----------------------------------------------------------------------------------------------------------
# One run


def work(job: Job, children: Children | None = None) -> str:
    """Train, then evaluate unless that is done; return "" or what failed."""
    children = {} if children is None else children
    job.log.parent.mkdir(parents=True, exist_ok=True)
    code = call(["train.py", job.config, *job.overrides], job.log, children)
    if code:
        return DIVERGED if code == 3 else f"train.py ended with {code}"
    if job.eval_arguments is not None and evaluation(job) is None:
        began, depends_on = time.time_ns(), state(job)
        # a method may fit only some of the configs; an evaluation with other arguments is outdated
        code = call(["eval.py", str(job.run_dir), "--skip-unfit", "--replace", *job.eval_arguments], job.log,
                    children)
        if code:
            return f"eval.py ended with {code}"
        written = [path.stem for path in job.results if path.stat().st_mtime_ns > began]
        job.stamp.write_text(json.dumps({**depends_on, "written": written}), encoding="utf-8")
    return ""


def call(command: Sequence[str], log: Path, children: Children) -> int:
    """Run a command of this repository, with its output in the log; its exit code."""
    with log.open("a", encoding="utf-8") as file:
        print(f"\n$ python {shlex.join(command)}", file=file, flush=True)
        # in a new session: Ctrl-C reaches only this process, which then stops the child once
        child = subprocess.Popen([sys.executable, str(ROOT / command[0]), *command[1:]], stdout=file,
                                 stderr=subprocess.STDOUT, start_new_session=True)
    children[child] = log
    try:
        return child.wait()
    except BaseException:               # in a submitted job, which is stopped by a signal
        child.terminate()
        child.wait()
        raise
    finally:
        del children[child]


def last_line(log: Path) -> str:
    """The last line of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace")[-2000:].replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def state(job: Job) -> dict[str, Any]:
    """What an evaluation depends on: the checkpoint, whose state.json has checksums, and the arguments."""
    newest = max((job.run_dir / "checkpoints").glob("[0-9]*/state.json"), default=None)
    digest = hashlib.sha256(newest.read_bytes()).hexdigest() if newest else None
    return {"checkpoint": digest, "arguments": job.eval_arguments}


def evaluation(job: Job) -> list[str] | None:
    """The names of the results, or None unless they exist for this checkpoint and these arguments."""
    try:
        found = json.loads(job.stamp.read_text(encoding="utf-8"))
        written = list(found.pop("written"))
    except (FileNotFoundError, ValueError, KeyError):   # not yet, or interrupted while writing
        return None
    is_there = set(written) <= {path.stem for path in job.results}
    return written if is_there and found == state(job) else None


# -----------------------------------------------------------------------------------------------------------
# All runs


def run_here(jobs: Sequence[Job], n_workers: int) -> dict[str, str]:
    """Run the jobs, some at a time, each with its share of the cores; name -> problem of each that failed.

    An exception, such as a signal's, stops the running commands, which save first.
    """
    if n_workers > 1:
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_cores // n_workers)))
    failed, children, stopped = dict[str, str](), Children(), set[subprocess.Popen]()
    with tqdm(total=len(jobs), unit="run", disable=None) as bar, ThreadPoolExecutor(n_workers) as pool:
        tasks = {pool.submit(work, job, children): job for job in jobs}
        running = set(tasks)
        try:
            while running:
                done, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                for task in done:
                    finish(tasks[task], task.result(), failed)
                    bar.update()
                bar.set_postfix_str(" | ".join(last_line(log) for log in list(children.values())))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(task.done() for task in tasks):   # a command that starts only now is stopped, too
                for child in children.keys() - stopped:
                    child.terminate()
                    stopped.add(child)
                time.sleep(0.1)
            print("stopped; the same command resumes from there")
            raise
    return failed


def run_submitted(jobs: Sequence[Job], folder: Path, parameters: dict[str, Any]) -> dict[str, str]:
    """Submit every run as a job at once. Stopping this process cancels the jobs; they save first."""
    try:
        import submitit
        executor = submitit.AutoExecutor(folder=folder)
        executor.update_parameters(**parameters)
    except (ImportError, NameError, TypeError) as error:    # not installed, or a parameter that is not known
        raise UserError(f"--submitit, --slurm: {str(error).splitlines()[0]}") from error
    os.environ["PYTHONPATH"] = str(ROOT)        # where the jobs find this module
    failed, submitted = dict[str, str](), {executor.submit(work, job): job for job in jobs}
    try:
        for task, job in submitted.items():
            crash = task.exception()            # waits for the job
            finish(job, f"{type(crash).__name__}, see {folder}" if crash else task.result(), failed)
    finally:
        for task in submitted:
            if not task.done():
                task.cancel()
    return failed


def finish(job: Job, problem: str, failed: dict[str, str]) -> None:
    """Say how a run has ended, with the methods that eval.py has skipped."""
    tqdm.write(f"{job.name}: {problem or 'done'}")
    output = job.log.read_text(encoding="utf-8", errors="replace") if job.log.exists() else ""
    for line in output.rpartition("\n$ python eval.py ")[2].splitlines():
        if line.startswith("skipped --extend "):
            tqdm.write(f"{job.name}: {line}")
    sys.stdout.flush()
    if problem:
        failed[job.name] = problem


def report(jobs: Sequence[Job], out: Path, labels: Sequence[str] = ()) -> int:
    """Run compare.py over these runs; return its exit code. Labels: none, or one for each run."""
    names = {name for job in jobs for name in evaluation(job) or ()}
    command = ["compare.py", *(str(job.run_dir) for job in jobs), "--out", str(out)]
    command += ["--data", *names] if len(names) == 1 else []
    command += [f"--label={label}" for label in labels]
    return subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:]]).returncode
