"""docs/train.sbatch: bash reads it, it trains in two processes, saves at its signal, is queued again.

Slurm is played by scripts: srun starts the command once, scontrol notes what it is asked.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toys import ROOT

from config import to_toml

SCRIPT = ROOT / "docs" / "train.sbatch"


def test_bash_reads_it() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0


@pytest.mark.slow
def test_it_trains_saves_at_the_signal_and_is_queued_again(tiny, tmp_path: Path) -> None:
    slurm, run_dir = tmp_path / "bin", tmp_path / "run"
    slurm.mkdir()
    for name, text in (("srun", 'exec "$@"'),
                       ("scontrol", f'echo "$@" >> {tmp_path}/asked; [ "$1" = requeue ] || echo 127.0.0.1')):
        (slurm / name).write_text(f"#!/bin/bash\n{text}\n")
        (slurm / name).chmod(0o755)
    (tmp_path / "a.toml").write_text(to_toml(tiny("rope", "train.steps=100000", "run.save_every=100000")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2",
           "SLURM_JOB_ID": "7", "PATH": f"{slurm}:{os.environ['PATH']}", "PYTHON": sys.executable,
           "PORT": str(port)}
    started = subprocess.Popen(["bash", SCRIPT, tmp_path / "a.toml"], cwd=ROOT, env={**os.environ, **job},
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for _ in range(600):
        if (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").read_text().count("\n") > 1:
            break
        time.sleep(0.5)
    started.send_signal(signal.SIGTERM)
    output = started.communicate(timeout=300)[0]
    assert "2 x cpu" in output and "stopped by SIGTERM, saved at step" in output, output
    assert "requeue 7" in (tmp_path / "asked").read_text()
    assert len([*(run_dir / "checkpoints").iterdir()]) == 1
