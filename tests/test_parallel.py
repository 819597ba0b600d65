"""Several processes: they train as one does, stop together, and hand over to any number."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import ROOT, assert_equal_runs, lively, metrics, python, tensors

from base.errors import UserError
from config import Config, to_toml
from data.loader import Corpus
from data.tokenizer import ByteTokenizer
from runtime import parallel
from runtime.parallel import Process
from train import train, validate

STEPS = 40
AS_ON_A_GPU = """
import os, sys, time, train
from base import command, loss
os.fsync = lambda file: time.sleep(0.3)                     # rank 0 saves slowly
loss.MAX_LOGITS = 16 * 257                                  # the loss in chunks of 16 rows
sys.argv = [argument.replace("RANK", os.environ["RANK"]) for argument in sys.argv]
command.run_command(train.main)
"""


def start(config: Config, *overrides: str) -> list[subprocess.Popen]:
    """Two processes of train.py, as torchrun starts them, but as on a GPU."""
    path = Path(f"{config.run.dir}.toml")
    path.write_text(to_toml(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen([sys.executable, "-c", AS_ON_A_GPU, path, *overrides], text=True, cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]


def stop_in_the_middle(config: Config, number: int) -> tuple[list[int], list[str]]:
    """Signal the second process alone once the first has logged a step: exit codes and outputs of both.

    Neither ends before the first has saved: torchrun would kill it.
    """
    processes = start(config)
    before = []
    for line in processes[0].stdout:
        before.append(line)
        if line.startswith("step"):
            break
    processes[1].send_signal(number)
    second = processes[1].communicate(timeout=300)[0]
    assert [*Path(config.run.dir).glob("checkpoints/0*/state.json")]
    first = processes[0].communicate(timeout=300)[0]
    return [process.returncode for process in processes], ["".join(before) + first, second]


def assert_close_runs(a: Path, b: Path) -> None:
    """The same lines and weights to 1e-5: they differ by the order of additions alone."""
    left, right = metrics(a), metrics(b)
    assert [line["step"] for line in left] == [line["step"] for line in right] == list(range(1, STEPS + 1))
    for x, y in zip(left, right, strict=True):
        assert x.keys() == y.keys() and all(x[key] == pytest.approx(y[key], abs=1e-5) for key in x), (x, y)
    ours, theirs = (tensors(run_dir, STEPS) for run_dir in (a, b))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_processes_train_as_one_and_resume_exactly(tiny, tmp_path: Path) -> None:
    """DDP: two by torchrun equal one alone; two that are stopped and resumed equal two that are not.

    With an encoding that has weights for a layer in which it does not act.
    """
    def make(name: str) -> Config:
        return tiny("fire", "position.layers=first", "position.lr_scale=1", f"train.steps={STEPS}",
                    "train.accumulate=2", "train.batch_size=8", "train.positions=random",
                    "train.position_range=64", f"run.dir={tmp_path / name}", "run.save_every=100")

    (tmp_path / "straight.toml").write_text(to_toml(make("straight")))
    (tmp_path / "as_on_a_gpu.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{AS_ON_A_GPU}")
    launcher = python("-m", "torch.distributed.run", "--nproc_per_node=2", tmp_path / "as_on_a_gpu.py",
                      tmp_path / "straight.toml")
    assert launcher.returncode == 0, launcher.stderr
    assert "2 x cpu" in launcher.stdout
    assert launcher.stdout.count("\nfinished ") == 1                    # one process prints for all
    train(make("alone"), [])
    assert_close_runs(tmp_path / "straight", tmp_path / "alone")

    codes, out = stop_in_the_middle(make("stopped"), signal.SIGTERM)
    assert codes == [143, 143] and "stopped by SIGTERM, saved at step" in out[0] and not out[1]
    again = start(make("stopped"))
    assert "resuming" in again[0].communicate()[0] and again[1].wait() == again[0].returncode == 0
    assert_equal_runs(tmp_path / "straight", tmp_path / "stopped", STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [
    ("train.optimizer=muon",),
    # delta of pope is clamped, on shards too
    ("position.encoding=pope", "position.lr_scale=30", "model.tied=true", "train.accumulate=2")])
def test_a_sharded_run_goes_on_in_one_process(overrides: tuple[str, ...], tiny, tmp_path: Path) -> None:
    """FSDP2: stopped, and resumed alone, it is the run of one process: tied, by Muon, clamped."""
    def make(name: str) -> Config:
        return tiny("t5", f"train.steps={STEPS}", "train.parallel=fsdp", *overrides,
                    "model.n_hidden=37", f"run.dir={tmp_path / name}", "run.save_every=100")

    codes, out = stop_in_the_middle(make("sharded"), signal.SIGTERM)
    assert codes == [143, 143] and "2 x cpu" in out[0]
    assert train(make("sharded"), []) == 0
    train(make("alone"), [])
    if "train.optimizer=muon" not in overrides:
        assert_close_runs(tmp_path / "sharded", tmp_path / "alone")
    for x, y in zip(metrics(tmp_path / "sharded"), metrics(tmp_path / "alone"), strict=True):
        # Muon works in bfloat16, where another order of additions shows
        assert x["step"] == y["step"] and x["loss"] == pytest.approx(y["loss"], abs=2e-3), (x, y)


def test_float16_under_fsdp_is_refused_where_auto_means_it(tiny, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "pick_dtype", lambda name, device: torch.float16)         # as on a V100
    with pytest.raises(UserError, match="auto: is float16 here.*use bfloat16 or ddp"):
        parallel.start(tiny("rope", "train.parallel=fsdp", "train.dtype=auto").train)


def test_validation_sums_do_not_depend_on_the_number_of_processes(tiny, monkeypatch) -> None:
    """Bit for bit: each of 3 simulated ranks fills in its batches, and their sums are added in one order."""
    config = tiny("rope", "train.val_windows=10")                       # batches of 4, 4 and 2
    model, corpus = lively(config), Corpus(config.data.dir)
    cpu, tokenizer = torch.device("cpu"), ByteTokenizer()
    alone = validate(model, corpus, tokenizer, config, Process(cpu))
    for size in (2, 3, 4):
        shares: list[torch.Tensor] = []
        monkeypatch.setattr(parallel, "all_reduce", lambda _, sums, to=shares: to.append(sums) or sums + 1)
        for rank in range(size):
            validate(model, corpus, tokenizer, config, Process(cpu, rank, size))
        assert sum(shares)[:, 1].tolist() == [4 * 32, 4 * 32, 2 * 32]  # scored tokens of each batch
        monkeypatch.setattr(parallel, "all_reduce", lambda _, sums, total=sum(shares): total)
        assert validate(model, corpus, tokenizer, config, Process(cpu, 0, size)) == alone


@pytest.mark.slow
def test_processes_that_would_not_train_the_same_end_in_one_line(tiny, tmp_path: Path) -> None:
    both = start(tiny("rope"), "train.lr=RANK.5")
    results = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [2, 2], results
    assert all(error.startswith("error: ") and error.count("\n") == 1 for _, error in results), results
    assert "different config" in results[0][1] + results[1][1]
    assert not (tmp_path / "run" / "config.toml").exists()
