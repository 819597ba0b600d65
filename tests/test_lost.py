"""Nothing is lost to everyday events: dropped terminals, full logs, power cuts, a second command."""

import ast
import errno
import fcntl
import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, python, slow_except, words
from test_reliability import raise_interrupt
from test_train import assert_equal_runs, metrics, stop_after

import eval as eval_command
import sample as sample_command
import train as train_module
from config import Config, config_and_overrides, config_from, to_toml
from data import remote
from data.prepare import prepare
from data.remote import open_url
from data.sources import Rows
from data.tokenizer import ByteTokenizer
from data.tokenizer_json import PretrainedTokenizer
from evaluation import protocols, results
from evaluation.protocols import Evaluation
from hf.architectures import ARCHITECTURES
from hf.export import export
from hf.pretrained import read_tables
from hf.tokenizer import tokenizer_json
from model import GPT
from runtime import checkpoint, parallel
from runtime.command import SIGNALS, argument_parser, run_command
from runtime.device import make_model
from runtime.errors import UserError
from runtime.folder import LOCK, RunFolder
from runtime.lock import lock
from runtime.optimizer import make_optimizer
from train import train


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of all signals back after a test that runs a command in this process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def code_of(main: Callable[[], Any]) -> Any:
    """The exit code of a command that runs in this process."""
    with pytest.raises(SystemExit) as caught:
        run_command(main)
    return caught.value.code


def started(config: Config, tmp_path: Path, *before: str, **options: Any) -> subprocess.Popen[str]:
    """`train.py` in a process of its own that has done its first steps; its output goes to tmp_path/out."""
    path = tmp_path / "started.toml"
    path.write_text(to_toml(config))
    command = [*before, sys.executable, str(ROOT / "train.py"), str(path)]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, **{"stdout": out, "stderr": subprocess.STDOUT, **options})
    log = Path(config.run.dir) / "metrics.jsonl"
    for _ in range(6000):
        if log.exists() and log.read_text().count("\n") > 2:
            return process
        assert process.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.05)
    raise AssertionError("no step in 300 s")


# -----------------------------------------------------------------------------------------------------------
# Signals


def test_the_signals_are_those_whose_codes_are_documented() -> None:
    documented = re.findall(r"(1\d\d) (SIG\w+|Ctrl-C)", train_module.__doc__ or "")
    names = {int(code) - 128: name.replace("Ctrl-C", "SIGINT") for code, name in documented}
    assert names == {int(number): number.name for number in SIGNALS} and len(names) == 7


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_that_asks_to_stop_saves_first(number: int, tiny, tmp_path: Path, monkeypatch,
                                                    handlers) -> None:
    forward = GPT.forward

    def signal_in_step_3(self: GPT, *arguments: Any, **options: Any) -> Any:
        if self.training and (tmp_path / "run" / "metrics.jsonl").exists() and \
                len(metrics(tmp_path / "run")) == 2:
            os.kill(os.getpid(), number)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(GPT, "forward", signal_in_step_3)
    config = tiny("rope", "run.save_every=100")
    assert code_of(lambda: train(config, [])) == 128 + number
    assert checkpoint.newest(tmp_path / "run").name == "00000003"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_the_shell_ignores_stays_ignored(number: int, handlers) -> None:
    signal.signal(number, signal.SIG_IGN)
    assert code_of(lambda: os.kill(os.getpid(), number)) == 0


@pytest.mark.parametrize("first", [signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("second", slow_except([signal.SIGTERM, signal.SIGINT], signal.SIGINT))
def test_a_second_signal_during_the_save_changes_nothing(first: int, second: int, tiny, tmp_path: Path,
                                                         monkeypatch, handlers) -> None:
    assert train(tiny("rope", "run.save_every=100", f"run.dir={tmp_path / 'straight'}"), []) == 0
    config, flush, batches = tiny("rope", "run.save_every=100"), checkpoint.flush, train_module.micro_batches

    def signal_in_step_6(*arguments: Any) -> Any:
        if arguments[3] == 5:
            os.kill(os.getpid(), first)
        return batches(*arguments)

    def flush_and_signal(path: Path) -> None:
        os.kill(os.getpid(), second)
        flush(path)

    def train_and_signal() -> int:
        code = train(config, [])
        os.kill(os.getpid(), second)            # after the save, on the way out
        return code

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "micro_batches", signal_in_step_6)
        patch.setattr(checkpoint, "flush", flush_and_signal)
        assert code_of(train_and_signal) == 128 + first
    assert checkpoint.newest(tmp_path / "run").name == "00000005"
    assert train(config, []) == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "straight", 12)


SIGNALLED_TWICE = """
import os, signal, sys
from runtime.command import run_command
class Signalling:
    def __getattr__(self, name): return getattr(sys.__stderr__, name)
    def write(self, text):
        os.kill(os.getpid(), signal.SIGTERM)
        return sys.__stderr__.write(text)
sys.stderr = Signalling()
run_command(lambda: os.kill(os.getpid(), signal.SIGUSR1))
"""


@pytest.mark.slow
def test_a_second_signal_while_the_first_is_reported_shows_no_traceback() -> None:
    done = python("-c", SIGNALLED_TWICE)
    assert done.returncode == -signal.SIGTERM and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_arrives_in_a_destructor_is_not_ignored(number: signal.Signals) -> None:
    """Python reports an exception of a destructor or of a weak reference's callback, and goes on."""
    done = python("-c", f"""
import os, time
from runtime.command import run_command
class Signalling:
    def __del__(self):
        os.kill(os.getpid(), {number.value})
        self.missing                # where the signal's exception is raised
def main():
    Signalling()
    time.sleep(60)
run_command(main)
""")
    assert (done.returncode, done.stderr) == (128 + number, f"stopped by {number.name}\n")


@pytest.mark.slow
def test_what_is_no_signal_in_a_destructor_is_reported() -> None:
    done = python("-c", """
from runtime.command import run_command
class Failing:
    def __del__(self): self.missing
run_command(lambda: Failing() and None)
""")
    assert done.returncode == 0 and "has no attribute 'missing'" in done.stderr


# -----------------------------------------------------------------------------------------------------------
# Standard output


@pytest.mark.slow
@pytest.mark.parametrize("way", ["closed pipe", "closed before the start", "full disk", "lost terminal"])
def test_training_continues_without_its_output(way: str, tiny, tmp_path: Path) -> None:
    config = tiny("rope", "train.steps=40", "train.batch_size=16")
    options: dict[str, Any] = {}
    before: list[str] = []
    if way == "closed pipe":
        read, write = os.pipe()
        options = {"stdout": write, "stderr": write}
    elif way == "closed before the start":
        before = ["bash", "-c", '"$@" >&- 2>&-', "bash"]
    elif way == "full disk":
        options = {"stdout": os.open("/dev/full", os.O_WRONLY)}
    else:
        read, write = os.openpty()
        options = {"stdout": write, "stderr": write}
    process = started(config, tmp_path, *before, **options)
    if way in ("closed pipe", "lost terminal"):
        os.close(write)
        os.close(read)
    assert process.wait(timeout=300) == 0
    assert (tmp_path / "run" / "summary.json").exists() and len(metrics(tmp_path / "run")) == 40


def test_a_lost_output_loses_no_step(tiny, tmp_path: Path, monkeypatch, handlers) -> None:
    """The short case: a pipe that nobody reads, and a disk that is full."""
    read, write = os.pipe()
    os.close(read)
    for number, descriptor in enumerate((write, os.open("/dev/full", os.O_WRONLY))):
        config = tiny("rope", "train.steps=2", f"run.dir={tmp_path / str(number)}")
        with monkeypatch.context() as patch, os.fdopen(descriptor, "w") as lost:
            patch.setattr(sys, "stdout", lost)
            patch.setattr(sys, "stderr", lost)
            assert code_of(lambda config=config: train(config, [])) == 0
        assert len(metrics(tmp_path / str(number))) == 2


STALLED = """
import os, signal, sys, threading
from runtime.command import interrupt
from runtime.signals import deferred_signals
read, write = os.pipe()
os.dup2(write, 1)
signal.signal(signal.SIGTERM, interrupt)
signal.alarm(60)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
stop = []
with deferred_signals(stop):
    while not stop:
        os.write(1, b"x" * 999)
print(stop, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_reader_of_the_output_that_reads_no_more() -> None:
    done = python("-c", STALLED)
    assert (done.returncode, done.stderr) == (0, "[15]\n")


@pytest.mark.slow
def test_a_dropped_terminal_saves(tiny, tmp_path: Path) -> None:
    """SIGHUP arrives when nothing can be printed any more."""
    read, write = os.openpty()
    config = tiny("rope", "train.steps=100000", "run.save_every=100000")
    process = started(config, tmp_path, stdout=write, stderr=write, start_new_session=True)
    os.close(write)
    os.close(read)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=300) == 129 and checkpoint.newest(tmp_path / "run")


# -----------------------------------------------------------------------------------------------------------
# Power cuts


def test_a_power_cut_after_a_checkpoint_keeps_its_lines(tiny, tmp_path: Path, monkeypatch) -> None:
    """When a checkpoint gets its name, metrics.jsonl and every folder above it are on disk."""
    synced: dict[str, int] = {}
    fsync, rename, n_deleted = os.fsync, Path.rename, list[int]()

    def noted_fsync(descriptor: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size
        fsync(descriptor)

    def checked_rename(self: Path, target: Path) -> Path:
        if target.name.startswith(".tmp-"):     # deleted next: the newer one is on disk
            assert str(tmp_path / "run" / "checkpoints") in synced
            n_deleted.append(1)
        elif self.name.startswith(".tmp-"):
            assert synced[str(tmp_path / "run" / "metrics.jsonl")] == \
                (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0
            assert {str(tmp_path), str(tmp_path / "run"), str(self)} <= set(synced)
            synced.clear()
            synced[str(tmp_path)] = 0       # the entry of the run's folder, which is there once and for all
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", checked_rename)
    assert train(tiny("rope", "run.keep=1"), []) == 0 and len(n_deleted) == 2


def test_a_power_cut_after_a_preparation_keeps_every_file(tmp_path: Path, monkeypatch) -> None:
    """Whatever is in the folder of the corpus, its tokenizer included, is on disk."""
    synced, fsync = set[int](), os.fsync

    def noted_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    (tmp_path / "a.txt").write_bytes(words(0, 3000))
    prepare(str(tmp_path / "a.txt"), tmp_path / "learned", "bpe:270")
    prepare(str(tmp_path / "a.txt"), tmp_path / "copied", str(tmp_path / "learned"))
    for out in (tmp_path / "learned", tmp_path / "copied"):
        assert (out / "tokenizer.json").exists()
        assert {path.stat().st_ino for path in (tmp_path, out, *out.iterdir())} <= synced


@pytest.mark.parametrize("lost", ["all", "some", "none"])
def test_a_resume_says_that_lines_are_missing(lost: str, tiny, tmp_path: Path, capsys) -> None:
    config = tiny("rope", "run.log_every=2")
    assert train(config, stop_after(2 * 9 + 1)) == 130
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 4                                  # steps 2, 4, 6, 8
    path.write_text("".join(lines[{"all": 4, "some": 1, "none": 0}[lost]:]))
    capsys.readouterr()
    assert train(tiny("rope", "run.log_every=1"), []) == 0
    out = capsys.readouterr().out
    n_left = {"all": 0, "some": 3, "none": 4}[lost]
    assert (f"has only {n_left} of the 4 lines up to step 8" in out) == (lost != "none")
    assert [line["step"] for line in metrics(tmp_path / "run")][-4:] == [9, 10, 11, 12]


def test_lines_that_two_processes_once_wrote_twice_are_kept_once(tiny, tmp_path: Path) -> None:
    config = tiny()
    assert train(config, stop_after(2 * 9 + 1)) == 130
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(itertools.chain(*zip(lines, lines, strict=True))) + "".join(lines))
    assert train(config, []) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))


# -----------------------------------------------------------------------------------------------------------
# Two processes on one run


def test_a_second_process_is_refused_with_the_first_ones_pid(tiny, tmp_path: Path, capsys,
                                                             monkeypatch) -> None:
    """In any phase of the first one: before it has made the run, and in a step."""
    config, found = tiny(), []

    def second() -> None:
        with pytest.raises(UserError) as caught:
            train(config, [])
        found.append(str(caught.value))

    start, batches = checkpoint.load_newest, train_module.micro_batches
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "load_newest", lambda *arguments: (second(), start(*arguments))[1])
        patch.setattr(train_module, "micro_batches", lambda *a: (a[3] == 5 and second(), batches(*a))[1])
        assert train(config, []) == 0
    assert len(found) == 2 and len(set(found)) == 1
    assert f"is being trained by process {os.getpid()} on {socket.gethostname()}; wait" in found[0]
    assert train(config, []) == 0 and "is finished" in capsys.readouterr().out
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_second_process_that_srun_started_is_told_of_torchrun(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    first = RunFolder(tmp_path / "run")
    first.take()
    with pytest.raises(UserError, match="to train with several processes, start them by torchrun"):
        RunFolder(tmp_path / "run").take()
    first.close()


def test_a_refused_start_leaves_no_folder(tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        train(tiny("rope", "train.init_from=nowhere"), [])
    assert not (tmp_path / "run").exists()


def test_a_lock_ends_with_its_process(tiny, tmp_path: Path) -> None:
    """What SIGKILL leaves behind stops nobody, even before the run was made."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("process 1 on nowhere")
    assert train(tiny(), []) == 0


def test_a_lock_whose_file_is_deleted_is_taken_again(tmp_path: Path) -> None:
    """Before or after another process takes a new one: never do both train."""
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.take()
    (tmp_path / "run" / LOCK).unlink()
    assert first.find()
    with pytest.raises(UserError, match="is being trained by process"):
        second.take()
    (tmp_path / "run" / LOCK).unlink()
    second.take()
    with pytest.raises(UserError, match="is being trained by process"):
        first.find()
    assert second.find()
    first.close()
    assert second.find() and (tmp_path / "run" / LOCK).exists()
    second.close()
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_file_system_without_locks_gets_a_warning(tmp_path: Path, monkeypatch, capsys) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with lock(tmp_path / ".lock"):
        assert "has no locks" in capsys.readouterr().out


def test_a_lock_that_its_holder_removes_is_taken_anew(tmp_path: Path, monkeypatch) -> None:
    """Between opening and locking, the holder may remove the file: then the lock on it is worth nothing."""
    path, flock, n_calls = tmp_path / ".lock", fcntl.flock, []

    def removed_at_first(*arguments: Any) -> None:
        n_calls.append(1)
        if len(n_calls) == 1:
            path.unlink()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", removed_at_first)
    with lock(path):
        assert len(n_calls) == 2 and path.exists()
    assert not path.exists()


# -----------------------------------------------------------------------------------------------------------
# A folder that is renamed or deleted in mid-run


def moving_at(step: int, move: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    batches = train_module.micro_batches
    monkeypatch.setattr(train_module, "micro_batches", lambda *a: (a[3] == step and move(), batches(*a))[1])


def test_a_renamed_run_continues_in_its_new_place(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    assert train(tiny("rope", f"run.dir={tmp_path / 'straight'}"), []) == 0
    with monkeypatch.context() as patch:
        moving_at(6, lambda: (tmp_path / "run").rename(tmp_path / "moved"), patch)
        assert train(tiny(), []) == 0
    assert "was renamed; training continues in" in capsys.readouterr().out
    assert_equal_runs(tmp_path / "moved", tmp_path / "straight", 12)
    assert (tmp_path / "moved" / "summary.json").exists() and not (tmp_path / "run").exists()


def test_a_deleted_run_is_written_again(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    with monkeypatch.context() as patch:
        moving_at(6, lambda: shutil.rmtree(tmp_path / "run"), patch)
        assert train(tiny(), stop_after(2 * 7 + 1)) == 130
    assert checkpoint.newest(tmp_path / "run").name == "00000006"     # not a multiple of 4
    assert train(tiny(), []) == 0
    assert "has only" not in capsys.readouterr().out       # it has all lines since then
    assert checkpoint.load_run(tmp_path / "run")


# -----------------------------------------------------------------------------------------------------------
# Reading a run while it trains


def save_the_next(run_dir: Path) -> None:
    """What a process that trains with run.keep = 1 does: `save` the next checkpoint, then `prune`."""
    newest = checkpoint.newest(run_dir)
    state = json.loads((newest / "state.json").read_text())
    state["step"] += 1
    del state["check"]
    new = shutil.copytree(newest, newest.with_name(f".tmp-{state['step']:08d}"))
    (new / "state.json").write_text(json.dumps({**state, "check": checkpoint._check(state)}))
    new.rename(newest.with_name(f"{state['step']:08d}"))
    shutil.rmtree(newest.rename(newest.with_name(".tmp-old")))


class Meanwhile:
    """Inside, `act` happens just before the n-th question to the file system, or before each one."""

    QUESTIONS = {"stat", "lstat", "open", "scandir", "listdir", "readlink"}

    def __init__(self, act: Callable[[], None], at: int | None) -> None:
        self.act, self.at, self.n_asked = act, at, 0

    def __enter__(self) -> "Meanwhile":
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def note(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in self.QUESTIONS:
            self.n_asked += 1
            if self.at in (self.n_asked, None):
                sys.setprofile(None)
                self.act()
                sys.setprofile(self.note)


def refuses_another_config(run_dir: Path, config: Config) -> bool:
    other = config.model_copy(update={"train": config.train.model_copy(update={"seed": 5})})
    with pytest.raises(UserError, match="train.seed"):
        checkpoint.check_checkpoints(run_dir, other, {})
    return True


READERS: dict[str, Callable[[Path, Config, GPT], bool]] = {         # whether it found what is there
    "load": lambda run_dir, config, model: checkpoint.load_newest(run_dir, model) is not None,
    "load with moments": lambda run_dir, config, model: checkpoint.load_newest(
        run_dir, model, make_optimizer(model, config)) is not None,
    "name the newest": lambda run_dir, config, model: checkpoint.newest(run_dir) is not None,
    "look for links": lambda run_dir, config, model: checkpoint.check_links(run_dir) is None,
    "compare weights": lambda run_dir, config, model: not checkpoint.is_newest(run_dir, "0" * 64),
    "compare configs": lambda run_dir, config, model: refuses_another_config(run_dir, config)}


@pytest.mark.parametrize("reader", slow_except([*READERS], "load with moments", "compare configs"))
def test_a_checkpoint_may_be_replaced_at_any_moment_while_it_is_read(reader: str, tiny, tmp_path: Path,
                                                                     capsys) -> None:
    """At each question of each reader to the file system: it takes the newest there is, without a word."""
    config, run_dir = tiny("rope", "run.keep=1"), tmp_path / "run"
    assert train(config, []) == 0
    model = GPT(config)
    assert READERS[reader](run_dir, config, model)          # the first time it imports more
    capsys.readouterr()
    with Meanwhile(lambda: None, 0) as undisturbed:
        assert READERS[reader](run_dir, config, model)
    assert undisturbed.n_asked
    for at in range(1, undisturbed.n_asked + 1):
        with Meanwhile(lambda: save_the_next(run_dir), at):
            is_found = READERS[reader](run_dir, config, model)
        assert is_found and capsys.readouterr().out == "", at
        assert int(checkpoint.newest(run_dir).name) == 12 + at


def test_a_file_that_torch_cannot_open_since_it_was_deleted_while_it_is_read(tiny, tmp_path: Path,
                                                                             monkeypatch, capsys) -> None:
    """Between two calls inside load_file, where no test can come in; if the file is there, it is an error."""
    config, load_file = tiny("rope", "run.keep=1"), checkpoint.load_file
    assert train(config, []) == 0

    def fails_once(path: Path, acts: bool) -> Any:
        monkeypatch.setattr(checkpoint, "load_file", load_file)
        if acts:
            save_the_next(tmp_path / "run")
        raise RuntimeError(f"unable to open file <{path}> in read-only mode: No such file or directory (2)")

    monkeypatch.setattr(checkpoint, "load_file", lambda path: fails_once(path, True))
    assert checkpoint.load_newest(tmp_path / "run", GPT(config))["step"] == 13
    assert "damaged" not in capsys.readouterr().out
    monkeypatch.setattr(checkpoint, "load_file", lambda path: fails_once(path, False))
    with pytest.raises(RuntimeError, match="unable to open"):
        checkpoint.load_newest(tmp_path / "run", GPT(config))


def test_a_run_that_saves_faster_than_it_is_read_is_one_line(tiny, tmp_path: Path) -> None:
    config = tiny("rope", "run.keep=1")
    assert train(config, []) == 0
    model = GPT(config)
    with pytest.raises(UserError, match="20 checkpoints in turn were deleted.* a larger run.keep"), \
            Meanwhile(lambda: save_the_next(tmp_path / "run"), None):
        checkpoint.load_newest(tmp_path / "run", model)


def test_links_are_checked_while_checkpoints_vanish(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run" / "checkpoints" / "00000004").mkdir(parents=True)
    scandir = os.scandir

    def deleted_before_it_is_listed(path: Any) -> Any:
        if "00000004" in os.fspath(path) and os.path.isdir(path):
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deleted_before_it_is_listed)
    checkpoint.check_links(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints" / "00000004").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "corpus.json", "checkpoints/00000004/model.safetensors"])
def test_a_fifo_in_a_run_blocks_nobody(name: str, tiny, tmp_path: Path) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    (tmp_path / "run" / "config.toml").write_text(to_toml(tiny()))
    with pytest.raises(UserError, match="neither a file nor a folder"):
        checkpoint.load_run(tmp_path / "run")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        train(tiny(), [])


# -----------------------------------------------------------------------------------------------------------
# Downloads


def test_two_commands_share_one_download(tmp_path: Path, monkeypatch) -> None:
    """The others wait for the first, and then find the file; each would write under its own name."""
    text, url = b"the dog chased\n" * 10**5, "http://x.invalid/a.txt"
    n_opened, waiting, all_wait = [], [], threading.Event()

    class Response(io.BytesIO):
        headers = {"Content-Length": str(len(text))}

        def read(self, size: int = -1) -> bytes:
            assert all_wait.wait(60)
            return super().read(size)

    def note(line: str, **_: Any) -> None:
        waiting.append(line)
        if len(waiting) == 2:
            all_wait.set()

    monkeypatch.setattr(remote.urllib.request, "urlopen",
                        lambda *_, **__: n_opened.append(1) or Response(text))
    monkeypatch.setattr("runtime.lock.print", note, raising=False)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(open_url(url, tmp_path, Rows(), None)))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(n_opened) == 1 and len({source.revision for source in found}) == 1
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [text]
    assert all("waiting for" in line and "holds" in line for line in waiting)


@pytest.mark.parametrize("way", ["cut short", "interrupted", "full disk"])
def test_a_download_that_fails_leaves_nothing(way: str, tmp_path: Path, monkeypatch) -> None:
    class Response(io.BytesIO):
        headers = {"Content-Length": "99"}

        def read(self, size: int = -1) -> bytes:
            if way == "interrupted":
                raise KeyboardInterrupt
            if way == "full disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().read(size)

    monkeypatch.setattr(remote.urllib.request, "urlopen", lambda *_, **__: Response(b"half"))
    expected = {"cut short": UserError, "interrupted": KeyboardInterrupt, "full disk": OSError}[way]
    with pytest.raises(expected):
        open_url("http://x.invalid/a.txt", tmp_path, Rows(), None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_process_changed_is_not_used(tmp_path: Path, monkeypatch) -> None:
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (rename(self, to), to.write_bytes(bytes(10)))[0])
    with pytest.raises(ValueError, match="not what was received"):
        remote.store(io.BytesIO(b"0123456789"), tmp_path / "a.txt", 10)


@pytest.mark.parametrize("fault", ["expands", "full disk"])
def test_an_archive_cannot_fill_the_disk(fault: str, tmp_path: Path, monkeypatch) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", bytes(10**6))
    if fault == "expands":
        monkeypatch.setattr(remote, "EXPANDS_FREELY", 1000)
    else:
        monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10**6 - 1))
    with pytest.raises(UserError, match="claims to unpack to 1,000,000"):
        remote.unpacked(tmp_path / "a.zip", "a.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


# -----------------------------------------------------------------------------------------------------------
# Files that cannot be written or read


def test_an_evaluation_finds_out_at_once_that_it_cannot_write(tiny, tmp_path: Path, monkeypatch) -> None:
    assert train(tiny("rope", "train.steps=1"), []) == 0
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Evaluation, "run", lambda self: pytest.fail("it computed first"))
    for path, expected in ((tmp_path / "file" / "a.json", OSError), (tmp_path / "folder.json", UserError)):
        (tmp_path / "folder.json").mkdir(exist_ok=True)
        monkeypatch.setattr(sys, "argv", ["eval.py", str(tmp_path / "run"), "--lengths", "32", "--json",
                                          str(path), "--replace"])
        with pytest.raises(expected):
            eval_command.main()
    with lock(tmp_path / ".a.json.lock"), pytest.raises(UserError, match=f"written by process {os.getpid()}"):
        monkeypatch.setattr(sys, "argv", [*sys.argv[:5], str(tmp_path / "a.json")])
        eval_command.main()


def test_a_loss_beyond_what_a_float_can_exponentiate_is_written(tiny, tmp_path: Path, monkeypatch,
                                                                capsys) -> None:
    """And a NaN is an error, not a curve."""
    config = tiny("rope", "train.steps=1")
    assert train(config, []) == 0
    real, path = protocols.token_losses, tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["eval.py", str(tmp_path / "run"), "--lengths", "32,64", "--json",
                                      str(path)])
    monkeypatch.setattr(protocols, "token_losses", lambda *arguments: real(*arguments) * 500)
    eval_command.main()
    records = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))["records"]
    assert {record["ppl"] for record in records} == {None} and "inf" in capsys.readouterr().out
    assert path.with_suffix(".png").exists()
    monkeypatch.setattr(protocols, "token_losses", lambda *arguments: real(*arguments) * math.nan)
    sys.argv.append("--replace")                # else it keeps the figures that it has
    with pytest.raises(UserError, match="the loss is nan"):
        eval_command.main()


def test_a_tilde_that_no_shell_expands_is_the_home(monkeypatch) -> None:
    parser = argument_parser("")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompt")
    monkeypatch.setenv("HOME", "/home/me")
    words = ["run.dir=~/runs/x", "data.dir=~root/x", "--out=~/y", "a=~", "--prompt=~/b"]
    args = parser.parse_intermixed_args(words)
    assert args.overrides == ["run.dir=/home/me/runs/x", f"data.dir={os.path.expanduser('~root/x')}", "a=~"]
    assert args.out == Path("/home/me/y")
    assert args.prompt == "~/b"                                         # text
    args = parser.parse_intermixed_args(["~/c.toml", "--out", "~/y", "--prompt", "~/b"])     # of a program
    assert (args.overrides, args.out, args.prompt) == (["/home/me/c.toml"], Path("/home/me/y"), "~/b")


def test_every_text_file_is_opened_with_its_encoding() -> None:
    """In a Latin-1 locale the default is another one, and a tokenizer written there cannot be read here."""
    rooms = ("runtime", "data", "hf", "evaluation", "positions")
    for path in [path for room in rooms for path in (ROOT / room).glob("*.py")] + [*ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            constants = [part.value for argument in node.args for part in ast.walk(argument)
                         if isinstance(part, ast.Constant)]
            is_binary = any(isinstance(value, str) and re.fullmatch(r"[rwxa+]*b\+?", value)
                            for value in constants)
            is_os = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in (
                "os", "archive")
            if name not in ("open", "read_text", "write_text") or is_binary or is_os:
                continue
            is_ours = isinstance(node.func, ast.Name) and name == "read_text"       # runtime/files.py
            assert is_ours or "encoding" in {keyword.arg for keyword in node.keywords}, \
                f"{path}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.slow
def test_a_latin_1_locale_changes_no_file_and_ends_no_command(tmp_path: Path) -> None:
    """Text beyond Latin-1 in the corpus, in its tokenizer, on the screen and in a file name."""
    if "de_DE.iso88591" not in subprocess.run(["locale", "-a"], capture_output=True, text=True).stdout:
        environment = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    else:
        environment = {"LC_ALL": "de_DE.iso88591", "PYTHONUTF8": "0"}
    (tmp_path / "日本.txt").write_text("日本語 äöü 🙂 dog\n" * 400, encoding="utf-8")
    for command in (["data/prepare.py", tmp_path / "日本.txt", "--tokenizer", "bpe:270"],
                    ["train.py", ROOT / "configs" / "quick.toml", "data.dir=data/日本", "train.steps=2",
                     "model.n_embd=48", "train.seq_len=16", "train.warmup=1", "run.dir=out"],
                    ["sample.py", "out", "--prompt", "日", "--tokens", "9"]):
        done = python(ROOT / str(command[0]), *command[1:], cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stderr


# -----------------------------------------------------------------------------------------------------------
# One line instead of a traceback, a hang or a full memory


@pytest.mark.parametrize(("override", "expected"), [
    ("model.n_layer=9007199254740992", "n_layer .*<= 10000"),
    ("model.n_embd=10000000", "n_embd .*<= 1000000"),
    ("train.batch_size=10000000", "batch_size .*<= 1000000"),
    ("model.vocab_size=9007199254740992", "vocab_size"), ("train.seq_len=9007199254740992", "seq_len")])
def test_sizes_that_are_a_typo_are_refused(override: str, expected: str, tiny) -> None:
    with pytest.raises(UserError, match=expected):
        tiny("rope", override)


@pytest.mark.parametrize("overrides", [
    ("rope", "model.n_embd=1000000", "model.n_hidden=100000000"),
    ("learned", "train.seq_len=100000000", "model.n_embd=4096"),
    ("rope", "model.vocab_size=100000000", "model.n_embd=10000")])
def test_a_model_beyond_the_memory_is_refused_before_it_is_made(overrides: tuple[str, ...], tiny) -> None:
    with pytest.raises(UserError, match="its weights take|too large to be counted"):
        make_model(tiny(*overrides))


def test_counting_a_model_changes_no_weight(tiny) -> None:
    config = tiny("t5")
    torch.manual_seed(3)
    plain = GPT(config).state_dict()
    torch.manual_seed(3)
    counted = make_model(config).state_dict()
    assert all(torch.equal(plain[name], counted[name]) for name in plain)


@pytest.mark.parametrize("name", slow_except([*ARCHITECTURES], "llama", "gpt2"))
def test_a_config_json_of_many_layers_or_odd_types_is_refused_at_once(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    good = {"model_type": name, **architecture.defaults, **architecture.constants, architecture.length: 32,
            **dict.fromkeys(architecture.fields.values(), 2), "attention_bias": False, "mlp_bias": False}
    layers = architecture.fields["n_layer"]
    odd = [True, None, "x", [], {}, [[]], {"a": 1}, 1e308, -1, 2.5, 2**70, 10**9, {"rope_type": []},
           {"rope_type": "yarn", "factor": []}, {"rope_type": "linear", "factor": 10**400}]
    for key in (*good, "rope_parameters", "rope_scaling", "layer_types", "no_rope_layers", "architectures"):
        for value in odd:
            (tmp_path / "config.json").write_text(json.dumps({**good, key: value}))
            try:
                tables = read_tables(tmp_path)
                config_from({**tables, "run": {"dir": "r"}, "data": {"dir": ""}}, "here")
            except UserError:
                continue
    for value in (10**8, 2**70):
        (tmp_path / "config.json").write_text(json.dumps({**good, layers: value}))
        with pytest.raises(UserError, match=f"{layers}: must be at most 10000"):
            read_tables(tmp_path)


@pytest.mark.parametrize(("part", "value"), [
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
                       "invert": False}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="})])
def test_a_panic_of_the_tokenizers_package_is_one_error(part: str, value: dict, tmp_path: Path) -> None:
    content = tokenizer_json(ByteTokenizer())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, part: value}))
    with pytest.raises(UserError, match="the tokenizers package fails on it"):
        PretrainedTokenizer(tmp_path / "tokenizer.json", 256).encode(b"a" * 5000 + b" b")


@pytest.mark.parametrize("arguments", [
    ("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "1e-300"), ("--temperature", "-1"),
    ("--seed", "-1"), ("--seed", str(2**64)), ("--top-k", "0"), ("--tokens", "0")])
def test_sample_checks_its_numbers(arguments: tuple[str, str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sample.py", "nowhere", *arguments])
    with pytest.raises(UserError, match="^--"):
        sample_command.main()


def test_a_model_of_nans_gives_no_sample(tiny) -> None:
    model = GPT(tiny()).eval()
    model.embedding.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="NaN or infinite"):
        next(sample_command.stream(model, torch.tensor([[1]]), 1))


@pytest.mark.parametrize("environment", [
    {}, {"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "1"}, {"RANK": "2", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "2"}])
def test_half_an_environment_of_torchrun_is_one_error(environment: dict, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOCAL_RANK": "0", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="^environment: "):
        parallel.torchrun_ranks()


@pytest.mark.parametrize("out", [".", "..", "/", "{cwd}"])
def test_a_folder_that_cannot_be_replaced_is_found_out_first(out: str, tiny, tmp_path: Path,
                                                             monkeypatch) -> None:
    config = tiny()
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("text " * 100)
    monkeypatch.chdir(tmp_path / "empty" / "inside")
    path = Path(out.format(cwd=Path.cwd()))
    with pytest.raises(UserError, match="current folder"):
        prepare(str(tmp_path / "a.txt"), path, "byte")
    with pytest.raises(UserError, match="current folder"):
        export(tmp_path, path, GPT(config), config, ByteTokenizer())
    assert list(tmp_path.rglob("*partial*")) == [] == list(Path.cwd().iterdir())


def test_file_names_that_are_not_utf_8(tmp_path: Path, capsys) -> None:
    """In a folder of texts they are fine; as an argument they are one error."""
    for number in range(30):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff%d.txt" % number)).write_text("text " * 50)
    prepare(str(tmp_path), tmp_path.parent / "prepared", "byte")
    parser = argument_parser("")
    parser.add_argument("path")
    with pytest.raises(UserError, match="is not UTF-8; rename"):
        parser.parse_args([os.fsdecode(b"\xff.txt")])


@pytest.mark.parametrize("words", list(itertools.permutations(["a/c.toml", "train.lr=1", "model.tied=true"])))
def test_config_and_overrides_stand_in_any_order(words: tuple[str, ...]) -> None:
    path, overrides = config_and_overrides(words[0], words[1:])
    assert path == "a/c.toml" and overrides == [word for word in words if word != "a/c.toml"]
    assert config_and_overrides("lr=1/c.toml", []) == ("lr=1/c.toml", [])
    with pytest.raises(UserError, match="CONFIG.toml: missing"):
        config_and_overrides("train.lr=1", [])


def test_a_resume_with_other_threads_warns(tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    config = tiny()
    assert train(config, stop_after(2 * 5 + 1)) == 130
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert train(config, []) == 0
    assert "threads, this process has 77; to resume to the last bit" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"WANDB_MODE": "offline", "WANDB_API_KEY": "0" * 40}])
def test_wandb_offline_looks_up_no_host(environment: dict[str, str], tiny, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\nsocket.getaddrinfo = lambda *a, **k: print('LOOKUP', a, flush=True) or []\n")
    path = tmp_path / "c.toml"
    path.write_text(to_toml(tiny("rope", "run.wandb=true", "train.steps=2")))
    done = python(ROOT / "train.py", path, PYTHONPATH=str(tmp_path), HOME=str(tmp_path), **environment)
    assert done.returncode == 0 and "LOOKUP" not in done.stdout, done.stdout + done.stderr
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


# -----------------------------------------------------------------------------------------------------------
# Further cases


def test_a_new_folder_in_the_place_of_a_renamed_run_is_left_alone(tiny, tmp_path: Path,
                                                                  monkeypatch) -> None:
    def move() -> None:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "mine.txt").write_text("mine")

    moving_at(6, move, monkeypatch)
    assert train(tiny(), []) == 0
    assert (tmp_path / "moved" / "summary.json").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("taken_by", "problem"), [
    ("process", "is being trained by process"), ("run", "was started with another config: train.seed"),
    ("file", "is not empty and holds no run")])
def test_what_took_the_place_of_a_deleted_run_is_left_alone(taken_by: str, problem: str, tiny, tmp_path: Path,
                                                            monkeypatch) -> None:
    """Somebody deletes a run that is still being trained, and starts another one in its place."""
    path = tmp_path / "run"
    with ExitStack() as stack, monkeypatch.context() as patch:
        def replace() -> None:
            shutil.rmtree(path)
            path.mkdir()
            if taken_by == "process":
                stack.enter_context(lock(path / ".lock"))
            elif taken_by == "run":
                (path / "config.toml").write_text(to_toml(tiny("rope", "train.seed=5")))
            else:
                (path / "mine.txt").write_text("mine")
            before.extend(sorted(path.iterdir()))

        before: list[Path] = []
        moving_at(6, replace, patch)
        with pytest.raises(UserError, match=problem):
            train(tiny(), [])
        assert before and sorted(path.iterdir()) == before


def test_a_run_that_is_moved_to_another_disk_and_linked_continues_there(tiny, tmp_path: Path,
                                                                       monkeypatch) -> None:
    """`mv` copies there and deletes here; then somebody makes a link in the old place."""
    assert train(tiny("rope", f"run.dir={tmp_path / 'straight'}"), []) == 0

    def move() -> None:
        shutil.copytree(tmp_path / "run", tmp_path / "disk")
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").symlink_to(tmp_path / "disk")

    with monkeypatch.context() as patch:
        moving_at(6, move, patch)
        assert train(tiny(), []) == 0
    assert_equal_runs(tmp_path / "disk", tmp_path / "straight", 12)


@pytest.mark.parametrize("what", ["metrics.jsonl", "checkpoints", "config.toml"])
def test_a_part_of_a_run_that_is_deleted_costs_itself_alone(what: str, tiny, tmp_path: Path,
                                                            monkeypatch) -> None:
    path = tmp_path / "run" / what

    def remove() -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    moving_at(6, remove, monkeypatch)
    assert train(tiny(), []) == 0
    assert checkpoint.newest(tmp_path / "run").name == "00000012"
    assert checkpoint.load_run(tmp_path / "run")[1].train.steps == 12


def test_two_names_of_one_run_share_its_lock(tiny, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    found = []

    def second() -> None:
        with pytest.raises(UserError, match="is being trained by"):
            train(tiny("rope", f"run.dir={tmp_path / 'link'}"), [])
        found.append(1)

    moving_at(6, second, monkeypatch)
    assert train(tiny(), []) == 0 and found


def test_a_child_of_a_killed_process_does_not_hold_its_lock(tmp_path: Path) -> None:
    """A lock is shared with forked children, which may live longer."""
    with lock(tmp_path / ".lock"):
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.2)
        held = [fd for fd in os.listdir(f"/proc/{child}/fd")
                if os.path.realpath(f"/proc/{child}/fd/{fd}") == str(tmp_path / ".lock")]
    try:
        assert held == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_limit_on_the_size_of_files_is_named(tiny, tmp_path: Path, capsys, handlers) -> None:
    """`ulimit -f`: the checkpoint does not fit, the run before it does."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limit[1]))
    try:
        assert code_of(lambda: train(tiny(), [])) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "file too large; raise the limit of the shell (ulimit -f)" in capsys.readouterr().err
    assert train(tiny(), []) == 0


def test_a_kill_while_an_evaluation_is_written_keeps_the_earlier_one(tiny, tmp_path: Path,
                                                                     monkeypatch) -> None:
    assert train(tiny("rope", "train.steps=1"), []) == 0
    path = tmp_path / "out.json"
    command = ["eval.py", str(tmp_path / "run"), "--longest", "64", "--json", str(path), "--protocol"]
    monkeypatch.setattr(sys, "argv", [*command, "fixed", "--lengths", "32"])
    eval_command.main()
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", [*command, "fixed,nonoverlap", "--lengths", "64"])
    for place in ("write_whole", "flush"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(results, place, raise_interrupt)
            eval_command.main()
        assert path.read_bytes() == before and len(results.read(path).records) == 1
    eval_command.main()
    assert len(results.read(path).records) == 3


def test_an_evaluation_whose_output_is_lost_is_written(tiny, tmp_path: Path, monkeypatch, handlers) -> None:
    assert train(tiny("rope", "train.steps=1"), []) == 0
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "argv", ["eval.py", str(tmp_path / "run"), "--lengths", "32", "--json",
                                      str(tmp_path / "out.json")])
    with monkeypatch.context() as patch, os.fdopen(write, "w") as lost:
        patch.setattr(sys, "stdout", lost)
        patch.setattr(sys, "stderr", lost)
        assert code_of(eval_command.main) == 0
    assert len(results.read(tmp_path / "out.json").records) > 2


@pytest.mark.slow
def test_a_storm_of_signals_ends_bit_equal(tiny, tmp_path: Path) -> None:
    """Every 3 ms another signal, from the first step until the process ends; five times in a row."""
    overrides = ("train.steps=400", "run.eval_every=50", "run.save_every=7", "model.dropout=0.1")
    assert train(tiny("rope", *overrides, f"run.dir={tmp_path / 'straight'}"), []) == 0
    config = tiny("rope", *overrides)
    for _ in range(5):
        process = started(config, tmp_path)
        for number in itertools.cycle(SIGNALS):
            if process.poll() is not None:
                break
            process.send_signal(number)
            time.sleep(0.003)
        out = (tmp_path / "out").read_text()
        # negative: killed while Python shuts down and has given the signals back, after the run was saved
        stopped = [code for number in SIGNALS for code in (128 + number, -number)]
        assert process.returncode in (0, *stopped), out
        assert "Traceback" not in out
        if process.returncode == 0:
            break
    assert train(config, []) == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "straight", 400)


@pytest.mark.slow
def test_a_preparation_whose_terminal_is_closed_resumes(tmp_path: Path, corpus_dir: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(30):
        (source / f"{number}.txt").write_bytes(words(number, 100_000))
    command = [sys.executable, str(ROOT / "data" / "prepare.py"), str(source), "--tokenizer", "bpe:300"]
    read, write = os.openpty()
    process = subprocess.Popen([*command, "--out", str(tmp_path / "once")], stdout=write, stderr=write)
    while not (tmp_path / ".once.partial").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.close(write)
    os.close(read)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=300) == 129 and not (tmp_path / "once").exists()
    for name in ("once", "twice"):
        assert subprocess.run([*command, "--out", str(tmp_path / name)]).returncode == 0
    assert (tmp_path / "once" / "train.bin").read_bytes() == (tmp_path / "twice" / "train.bin").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "once", "twice"}


# -----------------------------------------------------------------------------------------------------------
# Modules of the user


def test_every_folder_of_modules_is_a_package() -> None:
    """Python prefers a module anywhere on its path, such as a user's data.py, to a folder that is none."""
    folders = {path.parent for path in ROOT.glob("*/*.py") if path.parent.name[0] != "."} - {ROOT / "tests"}
    assert len(folders) > 5 and all((folder / "__init__.py").exists() for folder in folders)


COMMANDS = sorted(path.name for path in ROOT.glob("*.py") if "run_command(main" in path.read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("is_safe", ["", "1"])
@pytest.mark.parametrize("script", [*COMMANDS, "data/prepare.py"])
def test_modules_of_the_user_do_not_win(script: str, is_safe: str, tmp_path: Path) -> None:
    """From the current folder or PYTHONPATH; `python -P` leaves out the folder of the script."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("*/__init__.py")):
        name = path.stem if path.parent == ROOT else path.parent.name
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    done = python(ROOT / script, "--help", cwd=tmp_path, PYTHONPATH=str(tmp_path), PYTHONSAFEPATH=is_safe)
    assert done.returncode == 0 and "the wrong module" not in done.stderr, done.stderr
