"""Is it right and is it fast on a GPU? `python -m bench.gpu [--smoke] [--minutes M] [--out FILE.md]`.

bench/gpu.sh is the command to give: it sees to missing packages. Within M minutes, on one CUDA GPU:

  parity      loss and gradients of every encoding against an explicit softmax in fp64 (gpu_parity.py); at the
              same time, in other processes, what is timed later is compiled, and compilers keep that on disk
  gpt2        tokens/s and MFU of GPT-2 124 M, against transformers' in the same run (gpu_speed.py)
  encodings   a training step of each at T 1024 over RoPE's
  evaluation  one text of 65,536 tokens

Every part is a process of its own with a time limit, so that one that hangs or crashes costs the others
nothing. FILE.md is written after each, and beside it FILE.jsonl, all rows, and FILE.log, what was printed.
--smoke does all of it at toy size on a CPU. Exit code 1 where a case of parity failed or was not reached.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.gpu_parity import CASES
from bench.gpu_speed import (
    CONTENDERS,
    EVALUATED,
    FULL,
    SMOKE,
    WAYS,
    Row,
    Size,
    changes_logits,
)
from bench.gpu_table import markdown
from runtime.command import argument_parser, run_command
from runtime.errors import UserError
from runtime.run import git_revision

ROOT = Path(__file__).resolve().parent.parent

# Seconds that later parts are sure of: what an earlier one may take is all that is left but these. Expected,
# not measured: parity and compiling 60 processes of 30 s, 8 at a time, 225 s; gpt2 60 s, a third of it timed;
# encodings 27 x 4 s; evaluation 20 s.
RESERVED = {"gpt2": 80.0, "encodings": 110.0, "evaluation": 45.0}
LONGEST_CHECK = 150.0       # of a process that checks or compiles
WORKERS = 8                 # such processes at a time: 16 cores, and memory for a step of each
RUNNING: set[subprocess.Popen[str]] = set()     # each in a session of its own, with its children


class Clock:
    """What is left of the time that everything may take."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self, reserved: float = 0.0) -> float:
        """Seconds, at least 0."""
        return max(0.0, self.end - time.monotonic() - reserved)


def reserved_after(section: str) -> float:
    """Seconds that the sections after this one are sure of."""
    names = list(RESERVED)
    return sum(RESERVED[name] for name in names[names.index(section) + 1 if section in names else 0:])


def rows_of(command: Sequence[str], limit: float, log: Path) -> Iterator[Row]:
    """Rows that one of our scripts prints, as they come; a last one with its "problem", if it had any.

    It is killed with its children when the limit, in seconds, is over.
    """
    about: Row = {"section": "problem", "command": list(command), "is_late": False}
    if limit < 1:
        yield about | {"is_late": True, "problem": "not begun, no time was left"}
        return
    with log.open("ab") as errors:
        child = subprocess.Popen([sys.executable, str(ROOT / "bench" / command[0]), *command[1:]],
                                 stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        cut = threading.Event()

        def stop() -> None:
            cut.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit, stop)
        timer.start()
        RUNNING.add(child)
        try:
            assert child.stdout
            # whole lines of ours: a library may print others, and what is killed may leave half of one
            yield from (json.loads(line) for line in child.stdout
                        if line.startswith('{"section"') and line.endswith("}\n"))
            child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:            # we were stopped, or closed: it must not outlive us
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            RUNNING.discard(child)
    if cut.is_set():
        yield about | {"is_late": True, "problem": f"cut short after {limit:.0f} s"}
    elif child.returncode:
        yield about | {"problem": f"ended with code {child.returncode}: {last_line(log)}"}


def kill_running() -> None:
    """End the processes that other threads wait for."""
    for child in list(RUNNING):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def last_line(path: Path) -> str:
    """The last line of a log: of several processes at once, most likely the one that just failed."""
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def checks(size: Size) -> list[list[str]]:
    """Commands that may run side by side, what matters most and what takes longest first."""
    if size is SMOKE:
        first, *others = CASES                  # one is compiled and warmed up, to see that this works
        return [[*warming_up("rope"), "--smoke"],
                ["gpu_parity.py", first, "--compile"], ["gpu_parity.py", *others]]
    return [["gpu_speed.py", "gpt2", *CONTENDERS, "--warm"],
            *(["gpu_parity.py", case, "--device", "cuda", "--compile"] for case in CASES),
            *(warming_up(name) for name in WAYS)]


def side_by_side(commands: Sequence[Sequence[str]], clock: Clock, size: Size, log: Path) -> list[Row]:
    """Rows of all these commands, several at a time."""
    longest = float("inf") if size is SMOKE else LONGEST_CHECK

    def rows(command: Sequence[str]) -> list[Row]:
        return list(rows_of(command, min(longest, clock.left(sum(RESERVED.values()))), log))

    with ThreadPoolExecutor(1 if size is SMOKE else WORKERS) as pool:
        try:
            return [row for some in pool.map(rows, commands) for row in some]
        except BaseException:                   # a signal: the threads wait for what they have begun
            pool.shutdown(wait=False, cancel_futures=True)
            kill_running()
            raise


def not_checked(rows: Sequence[Row]) -> Iterator[Row]:
    """A failed row for each case of parity of which not all was computed."""
    for case in CASES:
        if "float32" not in {row["dtype"] for row in rows if row.get("case") == case}:
            yield {"section": "parity", "case": case, "dtype": "float32", "way": "eager", "ok": False,
                   "problem": "not reached"}


def order(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Encodings to time, first those that change the logits, which have a goal; and those not to compile."""
    names = sorted(WAYS, key=lambda name: not changes_logits(name))
    late = [row["command"] for row in rows if row["section"] == "problem" and row["is_late"]]
    return names, [name for name in names if warming_up(name) in late]


def warming_up(name: str) -> list[str]:
    """The command that compiles an encoding's step, so that it need not be compiled when it is timed."""
    return ["gpu_speed.py", "encodings", name, "--warm"]


def machine(size: Size, command: str) -> dict[str, Any]:
    """What the figures depend on."""
    def version_of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    about = {"command": command, "date": time.strftime("%Y-%m-%d"), "commit": git_revision() or "unknown",
             "CPU": f"{platform.machine()}, {os.cpu_count()} cores", "Python": platform.python_version(),
             **{name: version_of(name) for name in ("torch", "triton", "transformers")}}
    if size.device == "cuda":
        p = torch.cuda.get_device_properties(0)
        about |= {"GPU": f"{p.name}, {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} SMs",
                  "CUDA": str(torch.version.cuda)}
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            about["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return about


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--smoke", action="store_true", help="toy size, on the CPU")
    parser.add_argument("--minutes", type=float, help="for everything (default 9; with --smoke 60)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu" / "bench.md",
                        help="default results/gpu/bench.md; with --smoke runs/gpu-smoke/bench.md")
    args = parser.parse_args()
    minutes = args.minutes or (60 if args.smoke else 9)
    clock, size = Clock(60 * minutes), SMOKE if args.smoke else FULL
    out = args.out
    if args.smoke and out == parser.get_default("out"):
        out = ROOT / "runs" / "gpu-smoke" / "bench.md"      # toy figures must not be taken for results
    if size.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device here; --smoke does everything at toy size on the CPU")
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".log")
    log.write_text("")
    about = machine(size, f"bench/gpu.sh{' --smoke' * args.smoke} --minutes {minutes:g}")
    rows: list[Row] = []

    def write() -> None:
        out.with_suffix(".jsonl").write_text("\n".join(json.dumps(row) for row in [about, *rows]) + "\n")
        out.write_text(markdown(rows, about, size, args.smoke))

    rows += side_by_side(checks(size), clock, size, log)
    rows += not_checked(rows)
    write()
    names, eager = order(rows)
    if args.smoke:
        eager = names[2:]                       # tracing all of them would take a minute
    smoke = ["--smoke"] * args.smoke
    for command in (["gpt2"], ["encodings", *names, *(["--eager", ";".join(eager)] if eager else [])],
                    ["evaluation", *EVALUATED]):
        limit = clock.left(reserved_after(command[0]))
        for row in rows_of(["gpu_speed.py", *command, *smoke], limit, log):
            rows.append(row)
            write()
    print(out.read_text())
    failed = [row for row in rows if row["section"] == "parity" and not row["ok"]]
    for row in failed:
        print(f"FAIL parity of {row['case']}, {row['dtype']} {row['way']}: {row.get('problem', row)}")
    print(f"wrote {out}, .jsonl and .log")
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
