"""Kill a real training at random moments, again and again: `python -m pytest -m soak`; no make target does.

NANOROPE_SOAK is the number of kills (default 20: about three minutes for each config).
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_promises import SMALL, Case
from toys import ROOT, assert_equal_runs

KILLS = int(os.environ.get("NANOROPE_SOAK", "20"))
STEPS = 3000
# often SIGKILL, which leaves no time to save
NUMBERS = [*[signal.SIGKILL] * 4, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


def start(case: Case, name: str, *overrides: str) -> subprocess.Popen[str]:
    """train.py in a process of its own, with one thread, so that sums have one order."""
    command = [sys.executable, ROOT / "train.py", case.config, *SMALL, f"run.dir={case.folder / name}",
               f"train.steps={STEPS}", "run.save_every=7", "run.eval_every=50", *overrides]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(process: subprocess.Popen[str]) -> None:
    out = process.communicate()[0]
    assert process.returncode == 0, out


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [
    ("model.dropout=0.1", "train.accumulate=2"),
    ("train.optimizer=muon", "data.cross_documents=mask")], ids=["adamw", "muon"])
def test_a_run_killed_at_random_moments_ends_bit_equal(overrides: tuple[str, ...],
                                                       tmp_path: Path, corpus_dir: Path) -> None:
    case, draw, log = Case(tmp_path, corpus_dir), random.Random(0), tmp_path / "run" / "metrics.jsonl"
    finish(start(case, "straight", *overrides))
    for n in range(KILLS):
        process = start(case, "run", *overrides)
        before = log.read_bytes() if log.exists() else b""
        while draw.random() > 0.001 and process.poll() is None and \
                not (log.exists() and log.read_bytes() != before):      # now and then while it starts
            time.sleep(0.01)
        time.sleep(draw.random())
        number = draw.choice(NUMBERS)
        process.send_signal(number)
        out = process.communicate(timeout=300)[0]
        stopped = (0, -number, 128 + number)    # a signal may end Python before train.py has begun
        assert process.returncode in stopped and "Traceback" not in out, f"kill {n}: {number!r}\n{out}"
    finish(start(case, "run", *overrides))
    assert_equal_runs(tmp_path / "run", tmp_path / "straight", STEPS)
