"""Sweeps: the jobs of sweep.py, what each job runs, and the progress line of all of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from config import load_config
from hf.pretrained import pretrained_tables
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
STAMP = "evaluated.json"    # in a run's folder: the checkpoint and the arguments of eval/*.json


class Job(NamedTuple):
    """One run: what to train, in which folder, and how to evaluate it."""

    name: str
    config: str
    overrides: list[str]
    run_dir: Path
    eval_arguments: list[str]

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(f"{self.name}.log")


def make_jobs(configs: Sequence[str], overrides: Sequence[str], seeds: Sequence[int], runs: Path,
              eval_arguments: Sequence[str], grid: Sequence[str] = ()) -> list[Job]:
    """Every config with every combination of the grid's values and every seed.

    Raises one UserError that lists all problems of all configs.
    """
    jobs: dict[str, Job] = {}
    problems: list[str] = []
    each_seed: list[int | None] = [*seeds] or [None]
    for config, point, seed in itertools.product(configs, grid_points(grid), each_seed):
        parts = [Path(config).stem, *(in_name(override, point) for override in point)]
        name = "-".join(parts if seed is None else [*parts, f"seed{seed}"])
        own = [*overrides, *point, f"run.dir={json.dumps(str(runs / name))}"]
        own += [] if seed is None else [f"train.seed={seed}"]
        if name in jobs:
            problems.append(f"config {config}: {jobs[name].config} has the same name; rename one of them")
        jobs[name] = Job(name, config, own, runs / name, list(eval_arguments))
        try:
            load_config(config, own, pretrained_tables)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return list(jobs.values())


def grid_points(grid: Sequence[str]) -> list[list[str]]:
    """All combinations of `section.key=value,value` flags, each a list of overrides. Raises UserError."""
    axes = []
    for text in grid:
        key, _, values = text.partition("=")
        choices = re.split(r",(?![^\[]*\])", values)                     # not at the commas of a [list]
        if "." not in key or not all(choices) or len(set(choices)) < len(choices):
            raise UserError(f"--grid {text}: must read section.key=value,value with different values, such "
                            "as train.lr=1e-3,2e-3")
        axes.append([f"{key}={value}" for value in choices])
    keys = [text.partition("=")[0] for text in grid]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--grid {key}: given twice; give all its values in one flag")
    return [list(point) for point in itertools.product(*axes)]


def in_name(override: str, point: Sequence[str]) -> str:
    """An override as a part of a run's name: without its section, unless another key has the same name."""
    key, _, value = override.partition("=")
    short = key.rpartition(".")[2]
    is_unique = sum(other.partition("=")[0].endswith(f".{short}") for other in point) == 1
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"{short if is_unique else key}-{value}")


# -----------------------------------------------------------------------------------------------------------
# One run


def work(job: Job, show: Callable[[str], None] = lambda line: None) -> str:
    """Train, then evaluate unless that is done; return "" or what failed.

    An exception, such as a signal's, stops the running command, which saves first.
    """
    job.log.parent.mkdir(parents=True, exist_ok=True)
    code = call(["train.py", job.config, *job.overrides], job.log, show)
    if code:
        return f"train.py ended with {code}"
    if not is_evaluated(job):
        before = evaluations(job)
        # a method may fit only some of the configs; an evaluation with other arguments is outdated
        command = ["eval.py", str(job.run_dir), "--skip-unfit", "--replace", *job.eval_arguments]
        code = call(command, job.log, show)
        written = {name: digest for name, digest in evaluations(job).items() if before.get(name) != digest}
        if code or not written:
            return f"eval.py ended with {code}" if code else "eval.py wrote no eval/*.json"
        (job.run_dir / STAMP).write_text(json.dumps({**state(job), "written": written}))
    return ""


def skipped(job: Job) -> list[str]:
    """The lines in which the last evaluation names the methods that it skipped."""
    if not job.log.exists():
        return []
    last_call = job.log.read_text(errors="replace").rpartition("\n$ python eval.py ")[2]
    return [line for line in last_call.splitlines() if line.startswith("skipped --extend ")]


def call(command: Sequence[str], log: Path, show: Callable[[str], None]) -> int:
    """Run a command of this repository. Its output goes to the log, the log's last line to `show`."""
    with log.open("a") as file:
        file.write(f"\n$ python {shlex.join(command)}\n")
        file.flush()
        # in a new session: Ctrl-C reaches only this process, which then stops the child once
        child = subprocess.Popen([sys.executable, str(ROOT / command[0]), *command[1:]], stdout=file,
                                 stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while True:
                try:
                    return child.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    show(last_line(log))
        except BaseException:   # the child must never continue without this process
            child.terminate()
            child.wait()
            raise


def last_line(log: Path) -> str:
    """The last line of a log."""
    if not log.is_file():           # a job that could not start
        return "no log"
    lines = log.read_text(errors="replace")[-2000:].replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def is_evaluated(job: Job) -> bool:
    """Whether the last evaluation had the same checkpoint and arguments, and its files are unchanged."""
    try:
        stamp = json.loads((job.run_dir / STAMP).read_text())
        return stamp.pop("written").items() <= evaluations(job).items() and stamp == state(job)
    except (FileNotFoundError, ValueError, KeyError):   # not yet, or interrupted while writing
        return False


def state(job: Job) -> dict[str, Any]:
    """What an evaluation depends on: the checkpoint (its checksum) and the arguments."""
    newest = max((job.run_dir / "checkpoints").glob("[0-9]*/state.json"), default=None)
    return {"checkpoint": newest and json.loads(newest.read_text())["check"], "arguments": job.eval_arguments}


def evaluations(job: Job) -> dict[str, str]:
    """File name -> checksum of each eval/*.json."""
    return {path.stem: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (job.run_dir / "eval").glob("*.json")}


# -----------------------------------------------------------------------------------------------------------
# All runs


class Progress:
    """One line for the whole sweep: the run, how many are done, the time left."""

    def __init__(self, n_jobs: int) -> None:
        self.n_jobs, self.seconds, self.done, self.failed = n_jobs, list[float](), 0, dict[str, str]()

    def finish(self, job: Job, problem: str, seconds: float | None) -> None:
        """Count a run; its seconds, None if it was already done, improve the estimate of the time left."""
        self.done += 1
        self.seconds += [] if seconds is None else [seconds]
        if problem:
            self.failed[job.name] = problem
        self.show(job.name, f"FAILED: {problem}" if problem else "done", stays=True)
        for line in skipped(job):
            print(f"{job.name}: {line}", flush=True)

    def show(self, name: str, what: str, stays: bool = False) -> None:
        """Rewrite the line on a terminal; otherwise print only lines that stay."""
        eta = ""
        if self.seconds and self.done < self.n_jobs:
            left = (self.n_jobs - self.done) * sum(self.seconds) / len(self.seconds)
            eta = f", ETA {left // 3600:.0f}h{left % 3600 // 60:02.0f}m"
        line = f"{self.done}/{self.n_jobs} done, {len(self.failed)} failed{eta} | {name} | {what}"
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end="\n" if stays else "", flush=True)
        elif stays:
            print(line, flush=True)


def run_here(jobs: Sequence[Job], progress: Progress) -> None:
    """One run after another."""
    for i, job in enumerate(jobs, start=1):
        label, began, was_done = f"run {i} of {len(jobs)}, {job.name}", time.monotonic(), is_evaluated(job)
        problem = work(job, partial(progress.show, label))
        progress.finish(job, problem, None if was_done else time.monotonic() - began)


def run_submitted(jobs: Sequence[Job], progress: Progress, folder: Path, parameters: dict[str, Any]) -> None:
    """Submit every run as a job at once. Stopping this process cancels the jobs; they save first."""
    try:
        import submitit
    except ImportError as error:
        raise UserError("--submitit: submitit is not installed; pip install -e '.[cluster]'") from error
    # jobs import this module from here, wherever they start
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    executor = submitit.AutoExecutor(folder=folder)
    try:
        executor.update_parameters(**parameters)
    except (NameError, TypeError) as error:
        raise UserError(f"--slurm {' '.join(parameters)}: {str(error).splitlines()[0]}") from error
    running = {executor.submit(work, job): job for job in jobs}
    try:
        while running:
            progress.show(f"{len(running)} jobs", "running")
            for task in [task for task in running if task.done()]:
                crash = task.exception()
                problem = f"{type(crash).__name__}, see {folder}" if crash else task.result()
                progress.finish(running.pop(task), problem, None)
            time.sleep(1)
    finally:
        for task in running:
            task.cancel()


def report(jobs: Sequence[Job], out: Path) -> int:
    """Run compare.py over these runs; return its exit code."""
    names = {name for job in jobs for name in json.loads((job.run_dir / STAMP).read_text())["written"]}
    command = ["compare.py", *(str(job.run_dir) for job in jobs), "--out", str(out)]
    command += ["--data", *names] if len(names) == 1 else []
    return subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:]]).returncode


def pairs(texts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Key and value of each --slurm parameter; digits become an integer."""
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals or "." in key:
            raise UserError(f"--slurm {text}: must read key=value, such as timeout_min=240; overrides of the "
                            "config go before --slurm")
        yield key, int(value) if value.isdigit() else value
