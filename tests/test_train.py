"""Training: it learns, resumes bit for bit, stops on a signal, and says what is wrong."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, every_encoding_slowly, lively, slow_except, words
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import train as train_module
from config import Config, to_toml
from data.loader import Corpus
from data.prepare import prepare
from data.tokenizer import ByteTokenizer
from model import GPT
from runtime import checkpoint
from runtime.device import should_compile
from runtime.errors import UserError
from runtime.folder import RunFolder
from runtime.log import Log
from runtime.optimizer import make_optimizer
from runtime.parallel import Process
from runtime.progress import Run
from runtime.run import activation_bytes, warn_about_size
from train import learning_rate, train, training_loop

CPU = Process(torch.device("cpu"))


def metrics(run_dir: Path) -> list[dict]:
    """Lines of metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("wall_s", "tokens_per_s")} for line in lines]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def run_loop(config: Config) -> Run:
    """The training loop alone, from step 0, on a model whose logits are far from zero; no log is written."""
    model, state = lively(config), {"step": 0, "wall_s": 0.0, "metrics": {}, "n_bad": 0}
    log = Log(Path(config.run.dir), config, state, is_writer=False)
    corpus = Corpus(config.data.dir, config.data.cross_documents)
    n_bytes = torch.ones(config.model.vocab_size)
    run = Run(config, corpus, n_bytes, model, model, make_optimizer(model, config), CPU,
              RunFolder(Path(config.run.dir)), log, state,
              saved_at=0)
    training_loop(run, [])
    return run


def assert_equal_runs(a: Path, b: Path, step: int) -> None:
    assert metrics(a) == metrics(b)
    left, right = weights(a, step), weights(b, step)
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@every_encoding_slowly
def test_a_run_learns_and_leaves_what_is_documented(name: str, tiny, tmp_path: Path) -> None:
    assert train(tiny(name, "train.steps=60", "train.lr=1e-2", "run.save_every=30"), []) == 0
    lines, run_dir = metrics(tmp_path / "run"), tmp_path / "run"
    assert lines[-1]["val_loss"] < 2.9 < lines[0]["loss"]
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert lines[-1]["val_bpb"] == pytest.approx(lines[-1]["val_loss"] / math.log(2), rel=0.03)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {"steps", "tokens", "wall_s", "val_loss", "val_bpb", "tokens_per_s", "peak_memory", "parameters",
            "versions", "git_revision"} <= set(summary)
    assert (summary["tokens"], summary["val_loss"]) == (60 * 4 * 32, lines[-1]["val_loss"])
    model, config, tokenizer = checkpoint.load_run(run_dir)
    assert config == tiny(name, "train.steps=60", "train.lr=1e-2", "run.save_every=30")
    assert tokenizer.name == "byte"
    assert model.n_parameters() == summary["parameters"] and not model.training


def test_a_finished_run_says_so_and_a_changed_config_is_refused(tiny, tmp_path: Path, capsys) -> None:
    train(tiny(), [])
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert train(tiny(), []) == 0 and "is finished" in capsys.readouterr().out
    with pytest.raises(UserError) as caught:
        train(tiny("rope", "train.lr=0.5", "position.base=50"), [])
    assert len(caught.value.problems) == 2 and "train.lr: 0.001 -> 0.5" in str(caught.value)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_a_kill_between_the_last_save_and_the_summary_is_made_good(tiny, tmp_path: Path) -> None:
    train(tiny(), [])
    path = tmp_path / "run" / "summary.json"
    before = json.loads(path.read_text())
    path.unlink()
    assert train(tiny(), []) == 0
    after = json.loads(path.read_text())
    assert all(after[key] == before[key] for key in ("steps", "tokens", "loss", "val_loss", "val_bpb"))


def stop_after(n: int) -> list[int]:
    """A `stop` that holds SIGINT from the n-th look on."""
    class Stop(list):
        looks = 0

        def __bool__(self) -> bool:
            self.looks += 1
            if self.looks >= n and not len(self):
                self.append(signal.SIGINT)
            return len(self) > 0
    return Stop()


@pytest.mark.parametrize("overrides", [
    (), ("position.drop_at=0.4",),
    ("train.positions=rfs", "train.position_range=64", "train.accumulate=2", "position.encoding=rope"),
    pytest.param(("model.dropout=0.3", "train.accumulate=2"), marks=pytest.mark.slow),
    pytest.param(("train.dtype=bfloat16", "train.schedule=wsd"), marks=pytest.mark.slow),
    ("train.optimizer=muon", "train.lr=1e-2"),      # the next one crosses epochs
    pytest.param(("train.batch_size=64", "train.seq_len=128", "train.steps=9"), marks=pytest.mark.slow)])
def test_resume_is_bit_equal_to_an_uninterrupted_run(overrides: tuple[str, ...], tiny,
                                                     tmp_path: Path) -> None:
    straight = tiny("learned", *overrides, f"run.dir={tmp_path / 'straight'}")
    stopped = tiny("learned", *overrides, f"run.dir={tmp_path / 'stopped'}", "run.save_every=100")
    steps = straight.train.steps
    assert train(straight, []) == 0
    codes = [train(stopped, stop_after(n)) for n in (3, 2)]     # stopped twice, at other steps than it saves
    assert codes == [130, 130] and not (tmp_path / "stopped" / "summary.json").exists()
    assert train(stopped, []) == 0
    assert_equal_runs(tmp_path / "straight", tmp_path / "stopped", steps)


RARELY = [f"run.{key}_every=99" for key in ("log", "eval", "save")]


class ScalarReads(TorchDispatchMode):
    """Counts how often the value of a tensor is read: on a GPU, each time is a wait."""

    n = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.n += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), [("rope", "adamw"), ("sandwich", "adamw"), ("rope", "muon")])
def test_a_gpu_is_waited_for_at_log_lines_alone(name: str, optimizer: str, tiny, monkeypatch) -> None:
    """Also with parts, packed documents, skipped positions, clipping and dropout."""
    for is_ahead, waits_per_step in ((True, 0), (False, 1)):
        monkeypatch.setattr(train_module, "skips_on_device", lambda *_, is_ahead=is_ahead: is_ahead)
        waits = []
        for steps in (3, 8):
            config = tiny(name, f"train.optimizer={optimizer}", "train.accumulate=2", "train.positions=pose",
                          "train.position_range=99",
                          "data.cross_documents=mask", "model.dropout=0.1", f"train.steps={steps}", *RARELY)
            monkeypatch.setattr(checkpoint, "save", lambda *_, **__: None)
            with ScalarReads() as reads:
                run_loop(config)
            waits.append(reads.n)
        assert waits[1] - waits[0] == 5 * waits_per_step


@pytest.mark.parametrize("overrides", [
    pytest.param(("run.log_every=5",), marks=pytest.mark.slow),
    pytest.param(("run.log_every=1",), marks=pytest.mark.slow),
    ("run.log_every=7", "model.dropout=0.3", "train.accumulate=2")])
def test_a_run_that_reads_its_figures_late_is_the_same_run(overrides: tuple[str, ...], tiny, tmp_path: Path,
                                                           monkeypatch) -> None:
    """As on a GPU: the same lines, weights and moments, also when it is stopped and resumed."""
    overrides = (*overrides, "train.steps=24", "run.save_every=9")
    assert train(tiny("rope", *overrides, f"run.dir={tmp_path / 'straight'}"), []) == 0
    monkeypatch.setattr(train_module, "skips_on_device", lambda *_: True)
    n_unread, read_metrics = [], Run.read_metrics
    monkeypatch.setattr(Run, "read_metrics",
                        lambda run: n_unread.append(len(run.unread)) or read_metrics(run))
    assert train(tiny("rope", *overrides, f"run.dir={tmp_path / 'ahead'}"), []) == 0
    assert_equal_runs(tmp_path / "straight", tmp_path / "ahead", 24)
    assert (max(n_unread) > 1) == ("run.log_every=1" not in overrides)
    config = tiny("rope", *overrides)
    codes = [train(config, stop_after(n)) for n in (9, 2, 5)]
    assert codes == [130] * 3 and train(config, []) == 0
    assert_equal_runs(tmp_path / "straight", tmp_path / "run", 24)


@pytest.mark.parametrize("look", slow_except(range(6, 17), 12, 14))
def test_the_line_of_a_skipped_step_survives_a_stop(look: int, tiny, tmp_path: Path, monkeypatch) -> None:
    """Steps 3 and 4 are skipped while the figures are read late: both have a line, wherever the run stops."""
    steps, forward, rate = [0], GPT.forward, train_module.learning_rate
    monkeypatch.setattr(train_module, "skips_on_device", lambda *_: True)
    monkeypatch.setattr(train_module, "learning_rate", lambda n, t: steps.append(n + 1) or rate(n, t))
    monkeypatch.setattr(GPT, "forward", lambda self, x, *rest, **more: forward(self, x, *rest, **more) * (
        math.nan if self.training and steps[-1] in (3, 4) else 1))
    config = tiny("rope", *RARELY, "train.steps=8", "train.accumulate=2")
    assert train(config, stop_after(look)) == 130 and train(config, []) == 0
    assert [line["step"] for line in metrics(tmp_path / "run") if "n_bad" in line] == [3, 4]


def test_a_step_that_has_its_line_is_not_validated_again(tiny, tmp_path: Path, monkeypatch) -> None:
    """`run.eval_every` may change on a resume: then step 4, where the run stopped, would be due."""
    assert train(tiny("rope", "run.eval_every=100"), stop_after(9)) == 130
    step = metrics(tmp_path / "run")[-1]["step"]
    validated, validate = [], train_module.validate
    monkeypatch.setattr(train_module, "validate", lambda *a: validated.append(1) or validate(*a))
    assert train(tiny("rope", f"run.eval_every={step}"), []) == 0
    lines = [line["step"] for line in metrics(tmp_path / "run") if "val_loss" in line]
    assert lines == [n for n in range(2 * step, 13) if n % step == 0 or n == 12]
    assert len(validated) == len(lines)


def test_a_signal_stops_a_run_that_is_ahead_soon(tiny, tmp_path: Path, monkeypatch) -> None:
    """At the next step, not only at the next line, which may be far."""
    monkeypatch.setattr(train_module, "skips_on_device", lambda *_: True)
    assert train(tiny("rope", "train.steps=24", *RARELY), stop_after(6)) == 130
    assert checkpoint.newest(tmp_path / "run").name == "00000002"      # two looks a step


@pytest.mark.slow
def test_a_run_starts_from_another_at_a_longer_length_under_an_extension(tiny, tmp_path: Path) -> None:
    """Before its first update it is the trained model under that extension, and then it learns."""
    train(tiny("rope", "train.steps=60", "train.lr=1e-2", f"run.dir={tmp_path / 'short'}"), [])
    longer = tiny("rope", "train.seq_len=128", "train.steps=5", "train.lr=1e-5",
                  f"run.dir={tmp_path / 'long'}", f"train.init_from={tmp_path / 'short'}",
                  'position.scaling={method="ntk",factor=4.0,original_length=32}', "model.dropout=0.1")
    source, _, _ = checkpoint.load_run(tmp_path / "short")
    source.encoding.scaling = longer.position.scaling
    fresh = GPT(longer)
    checkpoint.start_from(tmp_path / "short", fresh, longer, ByteTokenizer())
    x = torch.randint(257, (1, 128))
    assert torch.equal(fresh.eval()(x), source(x))
    assert train(longer, []) == 0
    lines = metrics(tmp_path / "long")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and lines[0]["loss"] < 3
    longer_lr = tiny("rope", "train.seq_len=128", "train.steps=40", "train.lr=3e-3",
                     f"run.dir={tmp_path / 'longer'}", f"train.init_from={tmp_path / 'short'}",
                     'position.scaling={method="ntk",factor=4.0,original_length=32}')
    train(longer_lr, [])
    assert metrics(tmp_path / "longer")[-1]["val_loss"] < lines[0]["loss"]


@pytest.mark.parametrize(("name", "override", "expected"), [
    ("alibi", "train.steps=12", "position.encoding: rope -> alibi"),
    ("rope", "model.n_head=4", "model.n_head: 2 -> 4"),
    ("rope", "model.qk_norm=true", "model.qk_norm"),
    ("rope", "position.temperature=ssmax", "does not fit the model"),
    ("rope", "position.layout=interleaved", "position.layout: half -> interleaved")])
def test_another_model_is_no_start_and_leaves_no_folder(name: str, override: str, expected: str, tiny,
                                                        tmp_path: Path) -> None:
    train(tiny("rope", f"run.dir={tmp_path / 'short'}"), [])
    config = tiny(name, override, f"run.dir={tmp_path / 'new'}", f"train.init_from={tmp_path / 'short'}")
    with pytest.raises(UserError, match=expected):
        train(config, [])
    assert not (tmp_path / "new").exists()


def test_another_learning_rate_of_the_encoding_is_the_same_model(tiny, tmp_path: Path) -> None:
    train(tiny("t5", "train.steps=1", f"run.dir={tmp_path / 'short'}"), [])
    config = tiny("t5", "position.lr_scale=1.0")
    checkpoint.start_from(tmp_path / "short", GPT(config), config, ByteTokenizer())


def test_a_model_of_another_vocabulary_is_no_start(tiny, tmp_path: Path) -> None:
    train(tiny("rope", f"run.dir={tmp_path / 'short'}"), [])
    other = ByteTokenizer()
    other.sha256 = "0" * 64
    with pytest.raises(UserError, match="tokenizer: byte -> byte"):
        checkpoint.start_from(tmp_path / "short", GPT(tiny()), tiny(), other)


def test_the_start_says_what_differs_from_a_plain_run_and_warns(tiny, tmp_path: Path, capsys) -> None:
    train(tiny("rope", 'position.scaling={method="yarn",factor=2.0}', "model.window=9", "train.steps=1",
               "position.temperature=log_n"), [])
    lines = capsys.readouterr().out.splitlines()
    position = next(line for line in lines if line.startswith("position"))
    assert all(word in position for word in ("rope", "yarn", "temperature log_n", "window 9"))
    assert any(line.startswith("warning: position.scaling: yarn: beta_fast") for line in lines)
    train(tiny("alibi", "train.steps=1", f"run.dir={tmp_path / 'plain'}"), [])
    assert "position  alibi, trained at L = 32\n" in capsys.readouterr().out


def test_a_scaling_starts_from_the_length_before_it(tiny, tmp_path: Path) -> None:
    train(tiny("rope", f"run.dir={tmp_path / 'short'}"), [])
    longer = ("train.seq_len=64", f"train.init_from={tmp_path / 'short'}", f"run.dir={tmp_path / 'long'}")
    with pytest.raises(UserError, match="add original_length = 32"):
        train(tiny("rope", 'position.scaling={method="pi",factor=2.0}', *longer), [])
    assert not (tmp_path / "long").exists()
    scaling = 'position.scaling={method="pi",factor=2.0,original_length=32}'
    assert train(tiny("rope", scaling, *longer), []) == 0


def test_lines_after_the_checkpoint_are_not_repeated(tiny, tmp_path: Path) -> None:
    """A kill loses what came after the newest checkpoint; the lines of those steps are written anew, once."""
    config = tiny("rope", "run.keep=9")
    train(config, [])
    shutil.copytree(tmp_path / "run", tmp_path / "straight")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00000012")
    (tmp_path / "run" / "summary.json").unlink()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')                                  # cut in the middle of a write
    train(config, [])
    assert_equal_runs(tmp_path / "straight", tmp_path / "run", 12)


@pytest.mark.slow
def test_a_real_signal_saves_and_exits_130_and_the_same_command_goes_on(tiny, tmp_path: Path) -> None:
    path = tmp_path / "signal.toml"
    path.write_text(to_toml(tiny("rope", "train.steps=100000", "run.save_every=100000")))
    command = [sys.executable, str(ROOT / "train.py"), str(path)]
    for number, code in ((signal.SIGINT, 130), (signal.SIGUSR1, 138)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:
            if line.startswith("step"):
                break
        process.send_signal(number)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == code and "saved at step" in out
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert 1 <= len(saved) <= 2 and int(saved[-1].name) == metrics(tmp_path / "run")[-1]["step"] > 1
    assert "resuming" not in out
    assert len({line["step"] for line in metrics(tmp_path / "run")}) == int(saved[-1].name)


@pytest.mark.slow
def test_sigkill_leaves_only_whole_checkpoints_and_the_run_goes_on(tiny, tmp_path: Path) -> None:
    """Killed while it saves after every step: whatever is named like a checkpoint is one."""
    path = tmp_path / "kill.toml"
    path.write_text(to_toml(tiny("rope", "train.steps=100000", "run.save_every=1", "run.keep=50")))
    steps = [0]
    for n_lines in (3, 9):
        process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), str(path)],
                                   stdout=subprocess.PIPE, text=True)
        for _ in range(4 + n_lines):
            line = process.stdout.readline()
        process.kill()
        process.communicate()
        assert line.startswith("step")
        folders = sorted(p for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit())
        for folder in folders:
            assert checkpoint._verified_state(folder)["step"] == int(folder.name)
        steps.append(int(folders[-1].name))
    assert steps == sorted(set(steps))              # each start went on from where the last one was killed
    written = [line["step"] for line in metrics(tmp_path / "run")]
    assert written == sorted(set(written))


@pytest.mark.parametrize("damage", slow_except(
    ["empty", "cut", "flipped", "no state"], "flipped", "no state"))
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage: str, tiny, tmp_path: Path, capsys) -> None:
    config = tiny("rope", "run.keep=3")
    train(config, [])
    (tmp_path / "run" / "summary.json").unlink()
    shutil.copytree(tmp_path / "run", tmp_path / "straight")
    newest = tmp_path / "run" / "checkpoints" / "00000012"
    name = "state.json" if damage == "no state" else "model.safetensors"
    content = bytearray((newest / name).read_bytes())
    content[len(content) // 2] ^= 4
    written = {"empty": b"", "cut": content[:-1], "flipped": content, "no state": content}
    (newest / name).write_bytes(written[damage])
    capsys.readouterr()
    assert train(config, []) == 0
    out = capsys.readouterr().out
    assert f"{newest} is damaged" in out and "resuming" in out and "at step 8" in out
    assert_equal_runs(tmp_path / "straight", tmp_path / "run", 12)


def test_a_damaged_newer_checkpoint_does_not_crowd_out_the_sound_ones(tiny, tmp_path: Path) -> None:
    train(tiny("rope", "run.keep=9"), [])
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "checkpoints" / "00000012" / "model.safetensors").write_bytes(b"")
    config = tiny("rope", "run.keep=1", "run.save_every=3")
    assert train(config, stop_after(3)) == 130                          # from 8, stopped and saved at 9
    assert checkpoint.load_newest(tmp_path / "run", lively(config))["step"] == 9


def test_if_every_checkpoint_is_damaged_nothing_is_deleted(tiny, tmp_path: Path) -> None:
    train(tiny(), [])
    (tmp_path / "run" / "summary.json").unlink()
    files = list((tmp_path / "run" / "checkpoints").glob("*/model.safetensors"))
    for path in files:
        path.write_bytes(b"")
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        train(tiny(), [])
    assert len(files) == 2 and all(path.exists() for path in files)


@pytest.mark.parametrize("is_half_done", [None, False, True])
def test_a_run_of_older_code_resumes(is_half_done: bool | None, tiny, tmp_path: Path) -> None:
    """Its state.json has no n_bad; or `is_half_done`, true if the step was saved before its validation."""
    config, run_dir = tiny("rope", "run.keep=3"), tmp_path / "run"
    train(config, [])
    shutil.copytree(run_dir, tmp_path / "straight")
    newest = 12 if is_half_done else 8
    for path in (run_dir / "checkpoints").glob("*/state.json"):
        state = json.loads(path.read_text())
        old = {key: state[key] for key in ("step", "wall_s", "metrics", "sha256")}
        if is_half_done is not None:
            old |= {"n_bad": 0, "is_half_done": is_half_done and state["step"] == newest}
        if is_half_done:
            old["metrics"] = {key: value for key, value in old["metrics"].items() if "val" not in key}
        path.write_text(json.dumps({**old, "check": checkpoint._check(old)}))
    if is_half_done:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run_dir / "metrics.jsonl").write_text("".join(lines[:-1]))
    else:
        shutil.rmtree(run_dir / "checkpoints" / "00000012")
    (run_dir / "summary.json").unlink()
    assert train(config, []) == 0
    assert_equal_runs(tmp_path / "straight", tmp_path / "run", 12)


def test_a_failed_save_leaves_the_older_checkpoints(tiny, tmp_path: Path, monkeypatch) -> None:
    config = tiny()
    train(config, [])
    model = lively(config)
    folder = tmp_path / "run" / "checkpoints"
    before = sorted(p.name for p in folder.iterdir())

    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "flush", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path / "run", model, make_optimizer(model, config), 99, {"wall_s": 0.0},
                        keep=1)
    assert sorted(p.name for p in folder.iterdir()) == before


def test_accumulation_changes_memory_not_the_gradient(tiny) -> None:
    results = []
    for parts in (1, 2, 4):
        # no clipping, which would hide a factor
        run = run_loop(tiny("rope", "train.steps=1", f"train.accumulate={parts}", "train.grad_clip=0.0"))
        gradient = torch.cat([p.grad.flatten() for p in run.model.parameters()])
        figures = [run.state["metrics"][key] for key in ("loss", "grad_norm")]
        results.append(torch.cat((gradient, torch.tensor(figures))))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-5, rtol=1e-4)


def test_gradients_are_clipped(tiny) -> None:
    for limit, bound in ((0.5, 0.5), (0.0, math.inf)):
        run = run_loop(tiny("rope", "train.steps=1", f"train.grad_clip={limit}"))
        norm = run.state["metrics"]["grad_norm"]
        after = torch.stack([p.grad.norm() for p in run.model.parameters()]).norm().item()
        assert norm > 0.5 and after == pytest.approx(min(norm, bound), rel=1e-3)


def test_only_matrices_decay_and_not_those_of_the_encoding(tiny) -> None:
    config = tiny("learned", "model.bias=true", "model.norm=layernorm")
    model = GPT(config)
    optimizer = make_optimizer(model, config)
    decayed = {p for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for name, p in model.named_parameters():
        assert (p in decayed) == (p.dim() == 2 and not name.startswith("encoding.")), name
    assert decayed and sum(len(g["params"]) for g in optimizer.param_groups) == len([*model.parameters()])


def test_learning_rates(tiny) -> None:
    t = tiny("rope", "train.steps=100", "train.warmup=10", "train.lr=1.0", "train.min_lr=0.1").train
    rates = [learning_rate(step, t) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[55] == pytest.approx(0.55)
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[99] < 0.101
    t = t.model_copy(update={"schedule": "wsd"})
    rates = [learning_rate(step, t) for step in range(100)]
    assert set(rates[10:81]) == {1.0} and rates[90] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.145)


def test_a_run_and_a_corpus_that_do_not_belong_together(tiny, tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_bytes(words(0, 4000))
    prepare(str(source), tmp_path / "corpus", "byte")
    config = tiny("rope", f"data.dir={tmp_path / 'corpus'}")
    train(config, stop_after(1))
    source.write_bytes(words(1, 4000))
    prepare(str(source), tmp_path / "corpus", "byte")
    with pytest.raises(UserError, match="another corpus"):
        train(config, [])
    with pytest.raises(UserError, match="vocab_size"):
        train(tiny("rope", "model.vocab_size=100", f"run.dir={tmp_path / 'other'}"), [])


def test_a_folder_that_is_no_run_is_never_written_into(tiny, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds no run"):
        train(tiny(), [])
    assert os.listdir(tmp_path / "run") == ["thesis.tex"]


@pytest.mark.slow
def test_wandb_without_a_key_goes_offline_and_training_goes_on(tiny, tmp_path: Path, monkeypatch,
                                                               capsys) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    assert train(tiny("rope", "run.wandb=true", "train.steps=2"), []) == 0
    out = capsys.readouterr().out
    assert out.count("warning: W&B: no API key") == 1 and len(metrics(tmp_path / "run")) == 2
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


def test_wandb_failing_in_mid_run_costs_one_warning(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    class Broken:
        def log(self, line: dict, step: int) -> None:
            if step == 2:
                raise ConnectionError("gone")

    monkeypatch.setattr("runtime.log.start_wandb", lambda *_: Broken())
    assert train(tiny("rope", "run.wandb=true", "train.steps=5"), []) == 0
    assert capsys.readouterr().out.count("warning: W&B failed") == 1 and len(metrics(tmp_path / "run")) == 5


def test_wandb_missing_altogether_costs_one_warning(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train(tiny("rope", "run.wandb=true", "train.steps=2"), []) == 0
    assert capsys.readouterr().out.count("warning: W&B is off") == 1


def test_compile_pays_only_on_long_cpu_runs(tiny, monkeypatch) -> None:
    def decision(config: Config, device: str) -> bool:
        return should_compile(GPT(config), config.train, torch.device(device))

    short, long = (tiny("rope", f"train.steps={n}", "train.compile=auto") for n in (10, 10**9))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    assert [decision(short, "cpu"), decision(long, "cpu"), decision(short, "cuda")] == [False, True, True]
    monkeypatch.setattr(shutil, "which", lambda name: None)             # no compiler on this machine
    assert decision(long, "cpu") is False
    assert decision(tiny("rope", "train.compile=on"), "cpu")
    assert not decision(tiny("rope", "train.compile=off"), "cuda")


def test_train_and_model_import_without_the_optional_packages() -> None:
    code = ("import sys\nfor name in ('wandb', 'datasets', 'matplotlib', 'tqdm', 'tiktoken', 'tokenizers'):\n"
            "    sys.modules[name] = None\nimport train, model\n")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("overrides", [(), ("model.mlp=gelu", "model.bias=true", "model.norm=layernorm"),
                                       ("model.n_head=4", "model.n_kv_head=1", "model.n_hidden=200")])
def test_the_memory_of_a_step_is_known_before_it_starts(overrides: tuple[str, ...], tiny) -> None:
    """Against the tensors that autograd keeps in 8 layers, each storage counted once."""
    config = tiny("rope", "model.n_layer=8", "model.n_embd=64", *overrides)
    model, kept = GPT(config), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    x = torch.zeros((2, 1024), dtype=torch.long)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor      # holds it: no address occurs twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.hidden(x)
    counted = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert hidden.requires_grad and 0.9 < activation_bytes(config.model, 2048) / counted < 1.1


def test_an_absurd_step_is_announced_with_what_to_set(tiny) -> None:
    small, huge = tiny(), tiny("rope", "train.batch_size=4096", "train.seq_len=65536")
    assert not list(warn_about_size(small, GPT(small), Process(torch.device("cpu"))))
    (line,) = warn_about_size(huge, GPT(huge), Process(torch.device("cpu")))
    assert line.startswith("warning: a step of 4096 x 65536 tokens needs about ")
    assert "set train.batch_size or train.seq_len lower, and train.accumulate" in line
