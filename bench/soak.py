"""Break training again and again, and count what is lost: `python -m bench.soak [--only NAME,...]`.

Each case breaks real processes, after which the run must end bit-equal to an undisturbed one; or it runs the
tests of a fault and counts them. The results go into docs/reliability.md, and the exit code is 1 if anything
is lost. Linux only; the cases about disks mount a tmpfs, which needs root.

Faults come from outside: signals, kills, disks. Three cases need one at an exact moment; for these `driver`
runs train.py with a hook before each forward pass of GPT and one in os.fsync, and in no other function.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

import train
from model import GPT
from runtime import checkpoint
from runtime.command import SIGNALS, argument_parser, run_command
from runtime.errors import UserError
from runtime.run import git_revision

ROOT = Path(__file__).resolve().parent.parent

DOCUMENT = ROOT / "docs" / "reliability.md"
CONFIG = """
data.dir = "corpus"
position.encoding = "rope"
model = { n_layer = 1, n_head = 2, n_embd = 32, dropout = 0.1 }
[train]
steps = 60
batch_size = 4
accumulate = 2
seq_len = 32
warmup = 2
val_windows = 8
dtype = "float32"
device = "cpu"
compile = "off"
[run]
log_every = 1
eval_every = 10
save_every = 3
"""
SLOW = ["train.steps=6", "train.batch_size=40", "train.accumulate=40", "train.val_windows=40",
        "run.eval_every=2"]     # 40 forward passes per step, 40 per validation
PHASES = {"step 1": 1, "accumulation": 57, "evaluation": 20, "saving": 2}   # the call that gets the signal
DRIVER = ("-m", "bench.soak", "driver")
FUZZ_CASES = 2000


class Outcome(NamedTuple):
    """What a case found: how often it broke something, and what was lost."""

    tried: str
    lost: str = "nothing"


class Lost(Exception):
    """Something was lost that must not be lost."""


class Bench:
    """A folder with a corpus, a config and runs."""

    def __init__(self, folder: Path, n_kills: int, n_loads: int) -> None:
        self.folder, self.random = folder, random.Random(0)     # noqa: S311
        self.n_kills, self.n_loads = n_kills, n_loads
        source = folder / "source"
        source.mkdir()
        for i, path in enumerate(sorted(ROOT.glob("*.py"))):
            shutil.copy(path, source / f"{i}.txt")
        (folder / "soak.toml").write_text(CONFIG)
        self.call("data/prepare.py", "source", "--out", "corpus")

    def start(self, *command: str, environment: dict[str, str] | None = None,
              output: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start a command: a script of the repository, or `-m` and a module."""
        first = command[0] if command[0] == "-m" else str(ROOT / command[0])
        return subprocess.Popen([sys.executable, first, *command[1:]], cwd=self.folder, text=True,
                                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                                stdout=output, stderr=subprocess.PIPE)

    def call(self, *command: str, expected: Sequence[int] = (0,),
             environment: dict[str, str] | None = None, others_may_fail: bool = False) -> str:
        """The output of a command that must end as expected, and print no traceback except W&B's own."""
        process = self.start(*command, environment=environment)
        out, err = process.communicate(timeout=3600)
        check(process.returncode in expected and (others_may_fail or "Traceback" not in err),
              f"{command}: {process.returncode}: {err[-500:]}")
        check(process.returncode != 2 or err.count("\n") == 1, f"{command}: more than a line: {err[-500:]}")
        return out + err

    def straight(self, name: str, *overrides: str) -> Path:
        """An undisturbed run."""
        self.call("train.py", "soak.toml", *overrides, f"run.dir=runs/{name}")
        return self.folder / "runs" / name

    def tests(self, selection: str, *files: str, environment: dict[str, str] | None = None) -> int:
        """Run the tests of a fault; return how many passed. None may fail."""
        process = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-k", selection,
             *files], cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True)
        found = re.search(r"(\d+) passed", process.stdout)
        check(process.returncode == 0 and found is not None, process.stdout[-2000:])
        assert found
        return int(found[1])


def check(is_fine: bool, problem: str) -> None:
    """Raise Lost with the problem unless all is fine."""
    if not is_fine:
        raise Lost(problem)


def check_equal(broken: Path, alone: Path) -> None:
    """Check that two runs have the same files, and to the bit the same weights, moments and metrics."""
    lines = []
    for path in alone.rglob("*.safetensors"):
        other = broken / path.relative_to(alone)
        check(other.exists() and other.read_bytes() == path.read_bytes(), f"{other} differs from {path}")
    for run_dir in (broken, alone):
        parsed = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        lines.append([{k: v for k, v in line.items() if k not in ("wall_s", "tokens_per_s")}
                      for line in parsed])
    check(lines[0] == lines[1], f"{broken}/metrics.jsonl differs from {alone}")
    names = [{str(path.relative_to(run_dir)) for path in run_dir.rglob("*")} for run_dir in (broken, alone)]
    check(names[0] == names[1], f"{broken}: files {sorted(names[0] ^ names[1])}")


# -----------------------------------------------------------------------------------------------------------
# Kills


def sigkill(bench: Bench) -> Outcome:
    """SIGKILL at random moments, most of them in the training loop, which spends most of its time saving."""
    overrides = ["train.steps=2000", "run.eval_every=50", "run.save_every=2"]
    began = time.monotonic()
    alone = bench.straight("alone", *overrides)
    share = 0.7 * (time.monotonic() - began) / bench.n_kills            # of the loop, for each life
    run_dir, log = bench.folder / "runs" / "killed", bench.folder / "killed.log"
    n_saving, n_starting, last = 0, 0, 0
    for kill in range(bench.n_kills):
        if (run_dir / "summary.json").exists():                         # it has finished: start another one
            check_equal(run_dir, alone)
            shutil.rmtree(run_dir)
            last = 0
        with log.open("w") as file:
            process = bench.start("train.py", "soak.toml", *overrides, "run.dir=runs/killed",
                                  output=file.fileno())
            if kill % 10 == 9:
                time.sleep(bench.random.uniform(0, 4))                  # imports, start-up, the first steps
            else:
                wait_for(log, "\nstep ", process)
                time.sleep(bench.random.uniform(0, 2 * share))
            process.kill()
            process.communicate()
        resumed = re.search(r"resuming \S+ at step (\d+)", log.read_text())
        is_in_loop = "\nstep " in log.read_text()
        n_starting += not is_in_loop
        if is_in_loop or resumed:
            check(int(resumed[1] if resumed else 0) >= last - 2, f"went back from {last} by more than a save")
        steps = [int(step) for step in re.findall(r"^step (\d+)/", log.read_text(), re.MULTILINE)]
        last = steps[-1] if steps else int(resumed[1]) if resumed else last
        n_saving += is_in_loop and any((run_dir / "checkpoints").glob(".tmp-*"))  # older ones are gone
    bench.call("train.py", "soak.toml", *overrides, "run.dir=runs/killed")
    check_equal(run_dir, alone)
    return Outcome(f"{bench.n_kills} ({n_saving} of them inside a save, {n_starting} before the first step)",
                   "nothing saved; at most the 2 steps since")


def wait_for(log: Path, text: str, process: subprocess.Popen[str]) -> None:
    """Wait until a process has written this text."""
    while text not in log.read_text():
        check(process.poll() is None, f"ended with {process.returncode}: {log.read_text()[-500:]}")
        time.sleep(0.01)


# -----------------------------------------------------------------------------------------------------------
# Signals


def signals(bench: Bench) -> Outcome:
    """Each signal in each phase. From then on a forward pass takes a second: a step and a validation 40."""
    alone, longest, n_tried = bench.straight("slow", *SLOW), 0.0, 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for phase, at in PHASES.items():
            name = f"{number.name}-{phase.replace(' ', '-')}"
            command = ["soak.toml", *SLOW, f"run.dir=runs/{name}"]
            out = bench.call(*DRIVER, phase, str(int(number)), str(at), *command, expected=(128 + number,))
            ended = time.time()
            seconds = ended - float(re.findall(r"signalled at ([\d.]+)", out)[0])
            longest, n_tried = max(longest, seconds), n_tried + 1
            check(seconds < 40, f"{name}: took {seconds:.0f} s, as long as a step")
            check(f"stopped by {number.name}" in out, out[-500:])
            bench.call("train.py", *command)
            check_equal(bench.folder / "runs" / name, alone)
    return Outcome(f"{n_tried}, the slowest out after {longest:.0f} s")


def drive(phase: str, number: int, at: int) -> None:
    """Run train.py, which gets a signal at the at-th call in a phase, and is slow from there on.

    Signal 0 kills the children instead, and slows nothing down.
    """
    n_calls, fsync = 0, os.fsync

    def count(is_in_phase: bool) -> None:
        nonlocal n_calls
        n_calls += is_in_phase
        if is_in_phase and n_calls == at:
            print("signalled at", time.time(), flush=True)
            for pid in [os.getpid()] if number else children():
                os.kill(pid, number or signal.SIGKILL)
        if number and n_calls >= at:
            time.sleep(1)

    def before_forward(module: torch.nn.Module, arguments: object) -> None:
        if isinstance(module, GPT):
            count(phase != "saving" and (phase == "evaluation") != module.training)

    def slow_fsync(fd: int) -> None:
        if "/checkpoints/" in os.readlink(f"/proc/self/fd/{fd}"):
            count(phase == "saving")
        fsync(fd)

    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    os.fsync = slow_fsync   # type: ignore[assignment]
    run_command(train.main)


def children() -> list[int]:
    """The processes that this one started (Linux)."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in lists for pid in path.read_text().split()]


def ctrl_c(bench: Bench) -> Outcome:
    """Ctrl-C at random moments of the other commands: no traceback, and nothing half written."""
    run = str(bench.straight("read"))
    bench.call("eval.py", run, "--lengths", "16,32")
    commands = [["eval.py", run, "--protocol", "sliding", "--stride", "1", "--lengths", "16,32"],
                ["sample.py", run, "--tokens", "100000"], ["compare.py", run, "--out", "report"],
                ["data/prepare.py", "stdlib", "--out", "out/stdlib"]]
    (bench.folder / "out").mkdir()
    n_tried = 0
    for command in commands * 5:
        process = bench.start(*command)
        time.sleep(bench.random.uniform(0.1, 5))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
        lines = [line for line in re.split(r"[\r\n]+", err) if line and not re.search(r"\|.*\[.*\]", line)]
        is_kept = any(".stdlib.partial is kept; the same command resumes" in line for line in lines)
        check("Traceback" not in err and len(lines) <= 1 + is_kept, f"{command}: {err[-500:]}")
        check(process.returncode in (0, 130, -signal.SIGINT), f"{command}: code {process.returncode}")
        left = {path.name for path in (bench.folder / "out").iterdir()} - {"stdlib"}
        check(left <= {".stdlib.partial"}, f"{command} left {left}")
        n_tried += process.returncode != 0
    if not (bench.folder / "out/stdlib").exists():
        bench.call(*commands[-1])
    left = {path.name for path in (bench.folder / "out").iterdir()}
    check(left == {"stdlib"}, f"prepare.py did not resume: {left}")
    return Outcome(str(n_tried))


def pair(bench: Bench, name: str, log: Path) -> list[subprocess.Popen[str]]:
    """Start two processes of one run, as torchrun does; both write to the log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        return [bench.start("train.py", "soak.toml", "train.steps=200", f"run.dir=runs/{name}",
                            environment={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            output=file.fileno()) for rank in range(2)]


def two_ranks(bench: Bench) -> Outcome:
    """One of two processes is signalled or killed; two resume bit-equal, and one process resumes too."""
    log, numbers = bench.folder / "pair.log", (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL)
    for process in pair(bench, "pair", log):
        check(process.wait(timeout=600) == 0, "two processes did not finish")
    for number, rank in itertools.product(numbers, range(2)):
        name = f"{number.name}-{rank}"
        both = pair(bench, name, log)
        wait_for(log, f"\nstep {bench.random.randrange(1, 100)}/", both[0])
        both[rank].send_signal(number)
        if number == signal.SIGKILL:
            both[1 - rank].kill()               # torchrun does so too, after SIGTERM
        codes = [process.wait(timeout=600) for process in both]
        expected = -number if number == signal.SIGKILL else 128 + number
        check(codes == [expected] * 2, f"{name}: codes {codes}")
        for process in pair(bench, name, log):
            check(process.wait(timeout=600) == 0, f"{name}: two processes did not resume")
        check("resuming" in log.read_text(), f"{name}: did not resume, but started anew")
        check_equal(bench.folder / "runs" / name, bench.folder / "runs" / "pair")
    both = pair(bench, "fewer", log)
    wait_for(log, "\nstep 20/", both[0])
    both[1].send_signal(signal.SIGTERM)
    check([process.wait(timeout=600) for process in both] == [143, 143], "fewer: two processes did not stop")
    out = bench.call("train.py", "soak.toml", "train.steps=200", "run.dir=runs/fewer")
    check("resuming" in out and "step 200/200" in out, "fewer: one process did not resume")
    return Outcome("9", "nothing; after a kill at most the 3 steps since the last save")


# -----------------------------------------------------------------------------------------------------------
# Disks


@contextmanager
def small_disk(folder: Path, n_bytes: int) -> Iterator[Callable[[str], None]]:
    """Mount a tmpfs of this size at folder; yield a function that remounts it with other options."""
    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)

    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "soak", str(folder)]).returncode:
        raise UserError("this case mounts a small tmpfs, which needs root; select other cases with --only")
    try:
        yield remount
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def full_disk(bench: Bench) -> Outcome:
    """A disk that fills up anywhere between the first file and the third checkpoint, then grows."""
    alone, n_tried = bench.straight("roomy"), 0
    for n_pages in bench.random.sample(range(1, 300), 12):
        with small_disk(bench.folder / "disk", n_pages * 4096) as remount:
            command = ["train.py", "soak.toml", "run.dir=disk/run"]
            out = bench.call(*command, expected=(0, 2))
            if "no space left on device; free some space" in out:
                n_tried += 1
                remount("size=64m")
                bench.call(*command)
            check_equal(bench.folder / "disk" / "run", alone)
    return Outcome(str(n_tried))


def read_only(bench: Bench) -> Outcome:
    """A disk that becomes read-only in mid-run, then writable."""
    alone, log = bench.straight("writable", "train.steps=300"), bench.folder / "read-only.log"
    for _ in range(5):
        with small_disk(bench.folder / "disk", 2**26), log.open("w") as file:
            command = ["train.py", "soak.toml", "train.steps=300", "run.dir=disk/run"]
            process = bench.start(*command, output=file.fileno())
            wait_for(log, "\nstep ", process)
            # a second mount over the first: the process has its lock open for writing, so that making the
            # first one read-only is refused
            disk = str(bench.folder / "disk")
            subprocess.run(["mount", "--bind", disk, disk], check=True)
            while subprocess.call(["mount", "-o", "remount,bind,ro", disk], stderr=subprocess.DEVNULL):
                time.sleep(0.003)                           # a file is being written at this moment
            _, err = process.communicate(timeout=600)
            check(process.returncode == 2 and "read-only file system; make it writable" in err, err)
            bench.call(*command, expected=(2,))
            subprocess.run(["umount", disk], check=True)
            bench.call(*command)
            check_equal(bench.folder / "disk" / "run", alone)
    return Outcome("5")


# -----------------------------------------------------------------------------------------------------------
# Readers


def while_training(bench: Bench) -> Outcome:
    """Load a run, and ask which checkpoint is its newest, while it saves after each step and keeps one."""
    log, run_dir, said = bench.folder / "read.log", bench.folder / "runs" / "read", io.StringIO()
    with log.open("w") as file:
        process = bench.start("train.py", "soak.toml", f"run.dir={run_dir}", "train.steps=1000000",
                              "train.accumulate=1", "run.eval_every=1000000", "run.save_every=1",
                              "run.keep=1", output=file.fileno())
    try:
        wait_for(log, "\nstep 2/", process)
        first = checkpoint.newest(run_dir)
        for number in range(bench.n_loads):
            with redirect_stdout(said):
                checkpoint.load_run(run_dir)
            check(not checkpoint.is_newest(run_dir, "0" * 64), f"load {number}: other weights are the newest")
        last = checkpoint.newest(run_dir)
    except UserError as error:
        raise Lost(str(error)) from error
    finally:
        process.terminate()
        process.wait()
    check(said.getvalue() == "", said.getvalue()[-500:])
    assert first and last
    n_saves = int(last.name) - int(first.name)
    check(process.returncode == 143 and n_saves > bench.n_loads // 10, f"only {n_saves} saves meanwhile")
    return Outcome(f"{bench.n_loads} (during {n_saves:,} saves)")


# -----------------------------------------------------------------------------------------------------------
# W&B


def wandb(bench: Bench) -> Outcome:
    """No key; a key without a network; W&B's own process killed in mid-run. The key appears nowhere."""
    key = "0123456789abcdef" * 2 + "01234567"
    alone = bench.straight("unlogged")
    ways: list[tuple[dict[str, str], list[str]]] = [
        ({"HOME": str(bench.folder)}, ["train.py"]), ({"WANDB_API_KEY": key}, ["train.py"]),
        ({"WANDB_API_KEY": key, "WANDB_MODE": "offline"}, [*DRIVER, "training", "0", "60"])]
    for number, (environment, command) in enumerate(ways):
        run_dir = bench.folder / "runs" / f"logged-{number}"
        out = bench.call(*command, "soak.toml", "run.wandb=true", f"run.dir={run_dir}",
                         environment=environment, others_may_fail="driver" in command)
        check(key not in out, "the key is on the screen")
        files = [path for path in run_dir.rglob("*") if path.is_file()]
        check(not any(key.encode() in path.read_bytes() for path in files), "the key is in a file")
        shutil.rmtree(run_dir / "wandb")
        check_equal(run_dir, alone)
    n_tests = bench.tests("wandb", LOST, SECURITY)
    return Outcome(f"{len(ways) + n_tests}: no key, no network, its process killed, no look-up of a host")


# -----------------------------------------------------------------------------------------------------------
# Faults that tests inject


def tested(selection: str, *files: str) -> Callable[[Bench], Outcome]:
    """A case that runs the tests of a fault and counts them."""
    return lambda bench: Outcome(f"{bench.tests(selection, *files)}")


def fuzzing(bench: Bench) -> Outcome:
    """Random changes of every file that a command reads."""
    n_tests = bench.tests("any", "tests/test_fuzz.py", environment={"NANOROPE_FUZZ_CASES": str(FUZZ_CASES)})
    return Outcome(f"{n_tests} x {FUZZ_CASES:,}")


RELIABILITY, SECURITY, TRAIN, DATA, CONFIGS, LOST, SILENT, PARALLEL, SWEEP = (
    f"tests/test_{name}.py" for name in ("reliability", "security", "train", "data", "config", "lost",
                                         "silent_errors", "parallel", "sweep"))
TESTED = {          # case -> which tests it runs (pytest -k), and their files
    "resume": ("bit_equal or bit_for_bit or older_code", RELIABILITY, TRAIN),
    "damage": ("damaged", RELIABILITY, TRAIN),
    "leftovers": ("kill or older_checkpoints", RELIABILITY, TRAIN),
    "writes": ("disk or cannot", RELIABILITY),
    "numbers": ("finite or bad_steps or last_step", RELIABILITY),
    "corpus": ("corpus or corpora or damage_is_named", RELIABILITY, TRAIN, DATA),
    "config": ("field or rules or problems or missing or circle or memory", CONFIGS),
    "hostile": ("not wandb", SECURITY),
    "evaluations": ("evaluation and not overwritten and not prepared and not replace", SILENT),
    "own_config": ("hugging_face_folder_that", SILENT),
    "same_text": ("prepared_again", SILENT),
    "belongs": ("checkpoint and not evaluation or edited and not evaluation or corpus_json or summary or "
                "move or json_that or names_with or other_code or seed or replace", SILENT),
    "same_start": ("would_not_train or agree", PARALLEL),
    "overwritten": ("overwritten and not peoples or files_of or sampled or any_change or copied_file "
                    "or while_it_is", SILENT, DATA),
    "stop_signals": ("signal or dropped or whose_terminal or nohup", LOST, SWEEP),
    "lost_output": ("output", LOST),
    "power_cut": ("power or missing or kept_once", LOST),
    "two_processes": ("second_process or refused_start or a_lock or its_lock or without_locks or "
                      "finds_out", LOST),
    "moved": ("renamed or deleted_run or deleted_costs or linked or took_the_place", LOST),
    "readers": ("is_read or vanish or fifo", LOST),
    "downloads": ("download or another_process or archive", LOST),
    "unwritable": ("finds_out or exponentiate or tilde or latin or encoding or size_of_files or "
                   "earlier_one", LOST),
    "one_line": ("typo or model or config_json or panic or sample or torchrun or replaced or utf_8 "
                 "or order or threads", LOST),
    "modules": ("modules", LOST),
}
CASES: dict[str, Callable[[Bench], Outcome]] = {    # each has a row of this name in docs/reliability.md
    "sigkill": sigkill, "signals": signals, "two_ranks": two_ranks, "full_disk": full_disk,
    "read_only": read_only, "ctrl_c": ctrl_c, "wandb": wandb, "fuzzing": fuzzing,
    "while_training": while_training,
    **{name: tested(*selection) for name, selection in TESTED.items()}}


def update_document(name: str, outcome: Outcome, commit: str) -> None:
    """Write what was found into the last three cells of a case's row, with the date and the commit."""
    def new_row(row: re.Match[str]) -> str:
        return f"{row[1]} {outcome.tried} | {outcome.lost} | {date.today()}, {commit} |"

    text, n_found = re.subn(rf"^(\| `{name}` \|[^|]*\|[^|]*\|)[^|]*\|[^|]*\|[^|]*\|$", new_row,
                            DOCUMENT.read_text(), flags=re.MULTILINE)
    assert n_found == 1, f"{DOCUMENT} has no row {name}"
    DOCUMENT.write_text(text)


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--only", metavar="NAME,...", help=f"from {', '.join(CASES)} (default: all)")
    parser.add_argument("--kills", type=int, default=100, help="of sigkill (default %(default)s)")
    parser.add_argument("--loads", type=int, default=1000, help="of while_training (default %(default)s)")
    args = parser.parse_args()
    for number in SIGNALS:                  # nohup and & ignore some, which commands would inherit
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    names, n_lost = args.only.split(",") if args.only else list(CASES), 0
    if set(names) - set(CASES) or min(args.kills, args.loads) < 1:
        raise UserError(f"--only {args.only} --kills {args.kills} --loads {args.loads}: choose from "
                        f"{', '.join(CASES)}; 1 or more")
    revision = git_revision() or ""         # now: the first row that is written makes it dirty
    commit = revision[:7] + "-dirty" * revision.endswith("-dirty")
    for name in names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            try:
                outcome = CASES[name](Bench(Path(folder), args.kills, args.loads))
            except Lost as lost:
                outcome, n_lost = Outcome("failed", " ".join(str(lost).split())), n_lost + 1
        seconds = time.monotonic() - began
        print(f"{name}: tried {outcome.tried}; lost {outcome.lost}; {seconds:.0f} s", flush=True)
        update_document(name, outcome, commit)
    return 1 if n_lost else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["driver"]:
        phase, number, at = sys.argv[2:5]
        sys.argv[1:5] = []
        drive(phase, int(number), int(at))
    run_command(main)
