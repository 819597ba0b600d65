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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from config import load_config
from hf.pretrained import pretrained_tables
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
DIVERGED = "training diverged"

Point = Sequence[str]                           # overrides: one value for each key of a grid
Points = Mapping[str, Sequence[Point]]          # of each config


class Job(NamedTuple):
    """One run: what to train, in which folder, and how to evaluate it."""

    name: str
    config: str
    point: Point
    overrides: list[str]            # the point's and all others
    run_dir: Path
    eval_arguments: list[str] | None    # None: this run is not evaluated
    is_trial: bool = False          # evaluated into trial.json instead of eval/

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(f"{self.name}.log")

    @property
    def stamp(self) -> Path:
        """The file that tells from which checkpoint and arguments the results come."""
        return self.run_dir / ("trial-evaluated.json" if self.is_trial else "evaluated.json")


def make_jobs(configs: Sequence[str], overrides: Sequence[str], seeds: Sequence[int], runs: Path,
              eval_arguments: Sequence[str] | None, points: Points | None = None,
              are_trials: bool = False) -> list[Job]:
    """Every config at each of its points (a config without points: once) with every seed.

    Raises one UserError that lists all problems of all configs.
    """
    jobs: dict[str, Job] = {}
    problems: list[str] = []
    first_with = dict[tuple[str, str], str]()   # config and all values -> name
    each_seed: list[int | None] = [*seeds] or [None]
    for config in configs:
        for point, seed in itertools.product((points or {}).get(config, [[]]), each_seed):
            parts = [Path(config).stem, *(in_name(override, point) for override in point)]
            name = "-".join(parts if seed is None else [*parts, f"seed{seed}"])
            own = [*overrides, *point, f"run.dir={json.dumps(str(runs / name))}"]
            own += [] if seed is None else [f"train.seed={seed}"]
            if name in jobs:
                problems.append(f"config {config}: {jobs[name].config} has the same name; rename one of them")
            jobs[name] = Job(name, config, point, own, runs / name,
                             None if eval_arguments is None else list(eval_arguments), are_trials)
            try:
                values = load_config(config, own, pretrained_tables).model_dump_json(exclude={"run"})
                other = first_with.setdefault((config, values), name)
                if other != name:               # such as 1e-3 and 0.001
                    problems.append(f"config {config}: {other} and {name} are the same training; give each "
                                    "value once")
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


def work(job: Job, show: Callable[[str], None] = lambda line: None) -> str:
    """Train, then evaluate unless that is done; return "" or what failed.

    An exception, such as a signal's, stops the running command, which saves first.
    """
    job.log.parent.mkdir(parents=True, exist_ok=True)
    code = call(["train.py", job.config, *job.overrides], job.log, show)
    if code:
        return DIVERGED if code == 3 else f"train.py ended with {code}"
    if job.eval_arguments is not None and not is_evaluated(job):
        before, depends_on = evaluations(job), state(job)
        # a method may fit only some of the configs; an evaluation with other arguments is outdated
        command = ["eval.py", str(job.run_dir), "--skip-unfit", "--replace", *job.eval_arguments]
        command += ["--json", str(job.run_dir / "trial.json")] if job.is_trial else []
        code = call(command, job.log, show)
        written = {name: digest for name, digest in evaluations(job).items() if before.get(name) != digest}
        if code or not written:
            return f"eval.py ended with {code}" if code else "eval.py wrote no eval/*.json"
        job.stamp.write_text(json.dumps({**depends_on, "written": written}), encoding="utf-8")
    return ""


def skipped(job: Job) -> list[str]:
    """The lines in which the last evaluation names the methods that it skipped."""
    if not job.log.exists():
        return []
    last_call = job.log.read_text(encoding="utf-8", errors="replace").rpartition("\n$ python eval.py ")[2]
    return [line for line in last_call.splitlines() if line.startswith("skipped --extend ")]


def call(command: Sequence[str], log: Path, show: Callable[[str], None]) -> int:
    """Run a command of this repository. Its output goes to the log, the log's last line to `show`."""
    show(last_line(log))    # raises if the sweep is stopping: a child that starts now would ignore SIGTERM
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n$ python {shlex.join(command)}\n")
        file.flush()
        # in a new session: Ctrl-C reaches only this process, which then stops the child once. If this
        # process is killed, the child finds out by NANOROPE_PARENT (runtime/command.py) and saves too.
        child = subprocess.Popen([sys.executable, str(ROOT / command[0]), *command[1:]], stdout=file,
                                 stderr=subprocess.STDOUT, start_new_session=True,
                                 env={**os.environ, "NANOROPE_PARENT": str(os.getpid())})
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
    lines = log.read_text(encoding="utf-8", errors="replace")[-2000:].replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def is_evaluated(job: Job) -> bool:
    """Whether the last evaluation had the same checkpoint and arguments, and its files are unchanged."""
    try:
        stamp = json.loads(job.stamp.read_text(encoding="utf-8"))
        return stamp.pop("written").items() <= evaluations(job).items() and stamp == state(job)
    except (FileNotFoundError, ValueError, KeyError):   # not yet, or interrupted while writing
        return False


def state(job: Job) -> dict[str, Any]:
    """What an evaluation depends on: the checkpoint (its checksum), the arguments, the files they name."""
    newest = max((job.run_dir / "checkpoints").glob("[0-9]*/state.json"), default=None)
    found: dict[str, Any] = {"checkpoint": None, "arguments": job.eval_arguments}
    if newest:
        with suppress(ValueError, KeyError, TypeError):     # damaged: eval.py takes the one before
            found["checkpoint"] = json.loads(newest.read_text(encoding="utf-8"))["check"]
    # --data FILE, --data=FILE, or a prepared corpus, whose meta.json has the checksums of its files
    named = [Path(text) for argument in job.eval_arguments or () for text in argument.split("=")]
    files = [file for path in named for file in (path, path / "meta.json") if file.is_file()]
    return found | ({"files": {str(file): sha256(file) for file in files}} if files else {})


def evaluations(job: Job) -> dict[str, str]:
    """File name -> checksum of each eval/*.json, or of trial.json."""
    folder, pattern = (job.run_dir, "trial.json") if job.is_trial else (job.run_dir / "eval", "*.json")
    return {path.stem: sha256(path) for path in folder.glob(pattern)}


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -----------------------------------------------------------------------------------------------------------
# All runs


class Progress:
    """One line for the whole sweep: the runs, how many are done, the time left."""

    def __init__(self, n_jobs: int, n_workers: int = 1) -> None:
        self.n_jobs, self.n_workers, self.done = n_jobs, n_workers, 0
        self.seconds, self.failed = list[float](), dict[str, str]()

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
            left = (self.n_jobs - self.done) * sum(self.seconds) / len(self.seconds) / self.n_workers
            eta = f", ETA {left // 3600:.0f}h{left % 3600 // 60:02.0f}m"
        line = f"{self.done}/{self.n_jobs} done, {len(self.failed)} failed{eta} | {name} | {what}"
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end="\n" if stays else "", flush=True)
        elif stays:
            print(line, flush=True)


def run_here(jobs: Sequence[Job], progress: Progress) -> None:
    """Up to progress.n_workers runs at a time, each with its share of the cores.

    An exception, such as a signal's, stops the running commands, which save first.
    """
    if progress.n_workers > 1:
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_cores // progress.n_workers)))
    lines, is_stopping = dict[str, str](), threading.Event()    # run -> the last line of its log

    def run(number: int, job: Job) -> tuple[str, float | None]:
        label, began = f"run {number} of {len(jobs)}, {job.name}", time.monotonic()
        was_done = is_evaluated(job)

        def show(line: str) -> None:
            if is_stopping.is_set():
                raise KeyboardInterrupt
            lines[label] = line

        try:
            return work(job, show), None if was_done else time.monotonic() - began
        except OSError as error:        # such as no space for the log: the other runs may continue
            return f"{error.filename or 'input/output'}: {error.strerror}", None
        finally:
            lines.pop(label, None)

    with ThreadPoolExecutor(progress.n_workers) as pool:
        try:
            running = {pool.submit(run, number, job): job for number, job in enumerate(jobs, start=1)}
            while running:
                done = wait(running, timeout=1, return_when=FIRST_COMPLETED).done   # a set, in no order
                for task in [task for task in running if task in done]:
                    progress.finish(running.pop(task), *task.result())
                progress.show(" + ".join(lines), " | ".join(lines.values()))
        except BaseException:
            is_stopping.set()
            pool.shutdown(cancel_futures=True)      # waits for the running ones
            raise


def run_submitted(jobs: Sequence[Job], progress: Progress, folder: Path, parameters: dict[str, Any]) -> None:
    """Submit every run as a job at once. Stopping this process cancels the jobs; they save first."""
    try:
        import submitit
    except ImportError as error:
        raise UserError("--submitit: submitit is not installed; pip install -e '.[cluster]'") from error
    # jobs import this module from here, wherever they start, also beside a data.py of the user
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ["PYTHONSAFEPATH"] = "1"
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


def report(jobs: Sequence[Job], out: Path, labels: Sequence[str] = ()) -> int:
    """Run compare.py over these runs; return its exit code. Labels: none, or one for each run."""
    names = {name for job in jobs for name in json.loads(job.stamp.read_text(encoding="utf-8"))["written"]}
    command = ["compare.py", *(str(job.run_dir) for job in jobs), "--out", str(out)]
    command += ["--data", *names] if len(names) == 1 else []
    command += [f"--label={label}" for label in labels]
    return subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:]]).returncode


def pairs(texts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Key and value of each --slurm parameter; digits become an integer."""
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals or "." in key:
            raise UserError(f"--slurm {text}: must read key=value, such as timeout_min=240; overrides of the "
                            "config go before --slurm")
        yield key, int(value) if value.isdigit() else value
