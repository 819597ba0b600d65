"""Train, evaluate and compare configs: `python sweep.py CONFIG [CONFIG ...] [section.key=value ...]`.

Each config is trained once, or once a seed with --seeds, in RUNS/<config's file name>[-seed<S>], and
evaluated; at the end all are compared. train.py goes on where it was interrupted, and an evaluation is not
repeated while checkpoint and arguments are the same, so the same command always does what is left. A run that
fails is named at the end and the others go on. What the commands print goes to RUNS/<name>.log.

With --submitit FOLDER each run is a job: on Slurm where there is one, else a process on this machine, all at
once and by submitit's ways without a GPU. For several GPUs of one machine see README.md.
Exit codes: 0 done, 1 a run failed, 2 a mistake in the call, 129, 130 or 143 stopped by a signal after saving.
"""

from __future__ import annotations

import hashlib
import json
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
STAMP = "evaluated.json"    # in a run's folder: of which checkpoint, with which arguments eval/*.json are


class Job(NamedTuple):
    """One run: what to train, where, and how to evaluate it."""

    name: str
    config: str
    overrides: list[str]
    run_dir: Path
    eval_arguments: list[str]

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(f"{self.name}.log")


def make_jobs(configs: Sequence[str], overrides: Sequence[str], seeds: Sequence[int], runs: Path,
              eval_arguments: Sequence[str]) -> list[Job]:
    """Every config with every seed. Raises one UserError with all that is wrong in any of them."""
    jobs: dict[str, Job] = {}
    problems: list[str] = []
    choices: list[int | None] = [*seeds] or [None]
    for config in configs:
        for seed in choices:
            name = Path(config).stem if seed is None else f"{Path(config).stem}-seed{seed}"
            own = [*overrides, f"run.dir={json.dumps(str(runs / name))}"]
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


# -----------------------------------------------------------------------------------------------------------
# One run


def work(job: Job, show: Callable[[str], None] = lambda line: None) -> str:
    """Train, then evaluate unless that is done; "" or what failed. An exception stops what runs, saved."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    code = call(["train.py", job.config, *job.overrides], job.log, show)
    if code:
        return f"train.py ended with {code}"
    if not is_evaluated(job):
        before = evaluations(job)
        code = call(["eval.py", str(job.run_dir), *job.eval_arguments], job.log, show)
        written = {name: digest for name, digest in evaluations(job).items() if before.get(name) != digest}
        if code or not written:
            return f"eval.py ended with {code}" if code else "eval.py wrote no eval/*.json"
        (job.run_dir / STAMP).write_text(json.dumps({**state(job), "written": written}))
    return ""


def call(command: Sequence[str], log: Path, show: Callable[[str], None]) -> int:
    """Run one of our scripts, its output to the log and the last line of that to show; its exit code."""
    with log.open("a") as file:
        file.write(f"\n$ python {shlex.join(command)}\n")
        file.flush()
        # in a session of its own: Ctrl-C reaches us alone, and we stop the child, once
        child = subprocess.Popen([sys.executable, str(ROOT / command[0]), *command[1:]], stdout=file,
                                 stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while True:
                try:
                    return child.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    show(last_line(log))
        except BaseException:   # a signal, or anything: the child must not outlive us unsaved
            child.terminate()
            child.wait()
            raise


def last_line(log: Path) -> str:
    """The last line of a log."""
    lines = log.read_text(errors="replace")[-2000:].replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def is_evaluated(job: Job) -> bool:
    """Whether the last evaluation was of the same checkpoint, with the same arguments, and is still there."""
    try:
        stamp = json.loads((job.run_dir / STAMP).read_text())
        return stamp.pop("written").items() <= evaluations(job).items() and stamp == state(job)
    except (FileNotFoundError, ValueError, KeyError):   # not yet, or cut short
        return False


def state(job: Job) -> dict[str, Any]:
    """What an evaluation depends on: the checkpoint, by its checksums, and the arguments."""
    newest = max((job.run_dir / "checkpoints").glob("[0-9]*/state.json"), default=None)
    return {"checkpoint": newest and json.loads(newest.read_text())["check"], "arguments": job.eval_arguments}


def evaluations(job: Job) -> dict[str, str]:
    """File name -> checksum of each eval/*.json."""
    return {path.stem: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (job.run_dir / "eval").glob("*.json")}


# -----------------------------------------------------------------------------------------------------------
# All runs


class Progress:
    """One line for the whole sweep: which runs, how many done, time left by those that have finished."""

    def __init__(self, n_jobs: int) -> None:
        self.n_jobs, self.seconds, self.done, self.failed = n_jobs, list[float](), 0, dict[str, str]()

    def finish(self, name: str, problem: str, seconds: float | None) -> None:
        """Count a run; seconds, if it was not done already, tell how long others may take."""
        self.done += 1
        self.seconds += [] if seconds is None else [seconds]
        if problem:
            self.failed[name] = problem
        self.show(name, f"FAILED: {problem}" if problem else "done", stays=True)

    def show(self, name: str, what: str, stays: bool = False) -> None:
        """Rewrite the line on a terminal; elsewhere only what stays."""
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
        progress.finish(job.name, problem, None if was_done else time.monotonic() - began)


def run_submitted(jobs: Sequence[Job], progress: Progress, folder: Path, parameters: dict[str, Any]) -> None:
    """Every run a job, all at once; stopping this process cancels them, and they save."""
    try:
        import submitit
    except ImportError as error:
        raise UserError("--submitit: submitit is not installed; pip install -e '.[cluster]'") from error
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
                progress.finish(running.pop(task).name, problem, None)
            time.sleep(1)
    finally:
        for task in running:
            task.cancel()


def report(jobs: Sequence[Job], out: Path) -> int:
    """compare.py over these runs; its exit code."""
    names = {name for job in jobs for name in json.loads((job.run_dir / STAMP).read_text())["written"]}
    command = ["compare.py", *(str(job.run_dir) for job in jobs), "--out", str(out)]
    command += ["--data", *names] if len(names) == 1 else []
    return subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:]]).returncode


def pairs(texts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """key=value, numbers as numbers."""
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals or "." in key:
            raise UserError(f"--slurm {text}: must read key=value, such as timeout_min=240; overrides of the "
                            "config go before --slurm")
        yield key, int(value) if value.isdigit() else value
