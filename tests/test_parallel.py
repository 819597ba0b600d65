"""Several processes: they train as one does, stop together, and hand over to any number."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, lively, tokens
from test_train import assert_equal_runs, metrics, weights

import parallel
from command import UserError
from config import Config, to_toml
from data.loader import Corpus
from model import GPT
from parallel import World
from train import train, validate

STEPS = 40


def start(config: Config, path: Path) -> list[subprocess.Popen]:
    """Two processes of train.py, as torchrun starts them."""
    path.write_text(to_toml(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen([sys.executable, str(ROOT / "train.py"), str(path)], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]


def stop_in_the_middle(processes: list[subprocess.Popen], number: int) -> tuple[list[int], list[str]]:
    """Signal the second process alone once the first has told of a step: exit codes and outputs of both."""
    told = []
    for line in processes[0].stdout:
        told.append(line)
        if line.startswith("step"):
            break
    processes[1].send_signal(number)
    said = [process.communicate(timeout=60)[0] for process in processes]
    return [process.returncode for process in processes], ["".join(told) + said[0], said[1]]


def assert_close_runs(a: Path, b: Path) -> None:
    """The same lines and weights to 1e-5: they differ by the order of additions alone."""
    left, right = metrics(a), metrics(b)
    assert [line["step"] for line in left] == [line["step"] for line in right] == list(range(1, STEPS + 1))
    for x, y in zip(left, right, strict=True):
        assert x.keys() == y.keys() and all(x[key] == pytest.approx(y[key], abs=1e-5) for key in x), (x, y)
    ours, theirs = (weights(run_dir, STEPS) for run_dir in (a, b))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-3)


def test_processes_train_as_one_and_resume_exactly(tiny, tmp_path: Path) -> None:
    """Of DDP: two by torchrun as one alone; two that are stopped and started again as two that are not.

    With an encoding that has weights for a layer in which it does not act.
    """
    def make(name: str) -> Config:
        return tiny("fire", "position.layers=first", f"train.steps={STEPS}", "train.accumulate=2",
                    "train.batch_size=8", "train.pose_length=64", f"run.dir={tmp_path / name}",
                    "run.save_every=100")

    (tmp_path / "straight.toml").write_text(to_toml(make("straight")))
    launcher = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                               str(ROOT / "train.py"), str(tmp_path / "straight.toml")],
                              capture_output=True, text=True)
    assert launcher.returncode == 0, launcher.stderr
    assert "2 x cpu by ddp" in launcher.stdout
    assert launcher.stdout.count("\nfinished ") == 1                    # one process speaks for all
    train(make("alone"), [])
    assert_close_runs(tmp_path / "straight", tmp_path / "alone")

    codes, out = stop_in_the_middle(start(make("stopped"), tmp_path / "stopped.toml"), signal.SIGTERM)
    assert codes == [143, 143] and "stopped by SIGTERM, saved at step" in out[0] and not out[1]
    again = start(make("stopped"), tmp_path / "stopped.toml")
    assert "resuming" in again[0].communicate()[0] and again[1].wait() == again[0].returncode == 0
    assert_equal_runs(tmp_path / "straight", tmp_path / "stopped", STEPS)


def test_a_sharded_run_goes_on_in_one_process(tiny, tmp_path: Path) -> None:
    """FSDP2: stopped, and gone on with alone, it is the run of one process; an encoding with weights too."""
    def make(name: str) -> Config:
        return tiny("t5", f"train.steps={STEPS}", "train.accumulate=2", "train.parallel=fsdp",
                    f"run.dir={tmp_path / name}", "run.save_every=100")

    codes, out = stop_in_the_middle(start(make("sharded"), tmp_path / "sharded.toml"), signal.SIGTERM)
    assert codes == [143, 143] and "2 x cpu by fsdp" in out[0]
    assert train(make("sharded"), []) == 0
    train(make("alone"), [])
    assert_close_runs(tmp_path / "sharded", tmp_path / "alone")


def test_a_batch_that_does_not_divide_is_one_line(tiny, monkeypatch) -> None:
    for name, value in (("WORLD_SIZE", "3"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="batch_size 4: must be a multiple of 3 processes"):
        train(tiny(), [])


def test_validation_sums_do_not_depend_on_the_number_of_processes(tiny, monkeypatch) -> None:
    """Bit for bit: each of 3 simulated ranks fills in its batches, and their sums are added in one order."""
    config = tiny("rope", "train.val_windows=10")                       # batches of 4, 4 and 2
    model, corpus = lively(config), Corpus(config.data.dir)
    lengths = torch.ones(257, dtype=torch.int64)
    cpu = torch.device("cpu")
    alone = validate(model, corpus, lengths, config, World(cpu))
    monkeypatch.setattr(parallel, "agree", lambda _, loss, number: (loss, number))      # no signal came
    for size in (2, 3, 4):
        shares: list[torch.Tensor] = []
        monkeypatch.setattr(parallel, "add_up", lambda _, sums, to=shares: to.append(sums) or sums + 1)
        for rank in range(size):
            validate(model, corpus, lengths, config, World(cpu, rank, size))
        monkeypatch.setattr(parallel, "add_up", lambda _, sums, total=sum(shares): total)
        assert validate(model, corpus, lengths, config, World(cpu, 0, size)) == alone


def test_a_share_is_every_nth_row() -> None:
    batch = tokens((6, 3))
    shares = [World(torch.device("cpu"), rank, 2).share(batch) for rank in range(2)]
    assert torch.equal(torch.stack(shares, dim=1).flatten(0, 1), batch)


def test_only_the_last_part_of_an_accumulation_is_averaged(tiny) -> None:
    class Watched(torch.nn.Module):
        require_backward_grad_sync = True

    class Compiled(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

    inner = Watched()
    for wrapper in (inner, Compiled(inner)):
        for is_on in (False, True):
            parallel.sync_gradients(wrapper, is_on)
            assert inner.require_backward_grad_sync is is_on
    parallel.sync_gradients(GPT(tiny()), False)                         # alone: nothing to say
