"""Training: it learns, resumes bit for bit, skips bad steps, and says what is wrong."""

import importlib.util
import json
import math
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from toys import ROOT, assert_equal_runs, call, lively, metrics, slow_except, tensors

import train as train_module
from base.errors import UserError
from config import Config, TrainConfig
from data.loader import Corpus, Mixture
from data.tokenizer import ByteTokenizer
from model import GPT
from positions import ENCODINGS
from runtime import checkpoint
from runtime import run as run_module
from runtime.checkpoint import State
from runtime.device import should_compile
from runtime.log import read_log
from runtime.optimizer import make_optimizer
from runtime.parallel import Process
from runtime.run import TrainingRun, git_revision, make_run
from train import learning_rate, train, training_loop, validate

CPU = Process(torch.device("cpu"))


def run_loop(config: Config) -> TrainingRun:
    """The training loop alone, from step 0, on a model whose logits are far from zero; nothing is written."""
    model, corpus = lively(config), Corpus(config.data.dir, config.data.cross_documents)
    run = TrainingRun(
        config=config, corpus=corpus, model=model, wrapped_model=model,
        optimizer=make_optimizer(model, config), process=CPU,
        validate=lambda: validate(model, corpus, ByteTokenizer(), config, CPU), state=State(), signals=[],
        log=None, scaler=torch.amp.GradScaler("cpu", enabled=False))
    training_loop(run)
    return run


def stop_after(n: int) -> list[int]:
    """`signals` that hold SIGINT from the n-th look on: training looks after each step."""
    class Signals(list):
        looks = 0

        def __bool__(self) -> bool:
            self.looks += 1
            if self.looks >= n and not len(self):
                self.append(signal.SIGINT)
            return len(self) > 0
    return Signals()


@pytest.fixture
def spoil(monkeypatch):
    """spoil(3, 4): the loss of these steps, counted from 1, is NaN."""
    def at(*bad: int) -> None:
        steps, forward, rate = [0], GPT.forward, learning_rate
        monkeypatch.setattr(train_module, "learning_rate", lambda n, t: steps.append(n + 1) or rate(n, t))
        monkeypatch.setattr(GPT, "forward", lambda self, x, *rest, **more: forward(self, x, *rest, **more) * (
            math.nan if self.training and steps[-1] in bad else 1))
    return at


@pytest.mark.parametrize("name", slow_except([*ENCODINGS], "rope"))
def test_a_run_learns_and_leaves_what_is_documented(name: str, tiny, tmp_path: Path) -> None:
    config, run_dir = tiny(name, "train.steps=60", "train.lr=1e-2", "run.save_every=30"), tmp_path / "run"
    assert train(config, []) == 0
    lines = metrics(run_dir)
    assert lines[-1]["val_loss"] < 2.9 < lines[0]["loss"]
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert all((line["tokens"], line["lr"]) == (128 * n, learning_rate(n - 1, config.train))
               for n, line in enumerate(lines, 1))
    assert lines[-1]["val_bpb"] == pytest.approx(lines[-1]["val_loss"] / math.log(2), rel=0.03)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {"steps", "tokens", "wall_s", "val_loss", "val_bpb", "tokens_per_s", "parameters",
            "dtype", "versions", "git_revision"} <= set(summary)
    assert (summary["tokens"], summary["val_loss"]) == (60 * 4 * 32, lines[-1]["val_loss"])
    model, loaded, tokenizer = checkpoint.load_run(run_dir)
    assert (loaded, tokenizer.name) == (config, "byte")
    assert model.n_parameters() == summary["parameters"] and not model.training


def test_dropout_draws_by_seed_step_and_process() -> None:
    draws = set()
    for of in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        torch.manual_seed(train_module.dropout_seed(*of))
        draws.add(torch.rand(()).item())
    assert len(draws) == 4


@pytest.mark.parametrize("overrides", [
    ["data.bos=true"], ["data.cross_documents=mask"], ["data.cross_documents=never", "model.dropout=0.5"],
    ["data.bos=true", "data.mixture_only=2", "train.accumulate=2"]], ids=" ".join)
def test_each_step_gets_the_batch_the_rates_and_the_dropout_of_its_config(
        overrides: list[str], tiny, other_dir: Path, monkeypatch) -> None:
    is_mixture = "data.mixture_only=2" in overrides
    if is_mixture:
        overrides = [*overrides, f"data.mixture={{{json.dumps(str(other_dir))}=0.3}}"]
    config = tiny("t5", "train.steps=5", "train.warmup=3", "position.lr_scale=20", "train.seed=3", *overrides)
    d, t = config.data, config.train
    inputs, documents, rates, seeds, starts = ([] for _ in range(5))
    forward, seed, make = GPT.forward, torch.manual_seed, train_module.make_optimizer

    def spy(self: GPT, x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if self.training:
            inputs.append(x)
            documents.append(more["documents"])
        return forward(self, x, *rest, **more)

    def make_spied(model: GPT, config: Config) -> torch.optim.Optimizer:
        starts.append(model.embedding.weight.detach().clone())
        optimizer = make(model, config)
        optimizer.register_step_pre_hook(
            lambda optimizer, *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        scales.append([group["lr_scale"] for group in optimizer.param_groups])
        return optimizer

    scales: list[list[float]] = []
    monkeypatch.setattr(GPT, "forward", spy)
    monkeypatch.setattr(train_module, "make_optimizer", make_spied)
    monkeypatch.setattr(torch, "manual_seed", lambda number: seeds.append(number) or seed(number))
    assert train(config, []) == 0

    corpus = Corpus(d.dir, d.cross_documents, d.bos)
    if is_mixture:
        corpus = Mixture(d.dir, d.mixture, d.cross_documents, d.bos, d.mixture_only)
    batches = [corpus.batch(t, step, 0, 1) for step in range(5)]
    assert len({batch.inputs.numpy().tobytes() for batch in batches}) == 5
    assert torch.equal(torch.cat(inputs), torch.cat([batch.inputs for batch in batches]))
    if d.cross_documents == "mask":
        assert torch.equal(torch.cat(documents), torch.cat([batch.documents for batch in batches]))
    assert {20.0, 1.0} <= {*scales[0]}
    assert rates == [[learning_rate(step, t) * scale for scale in scales[0]] for step in range(5)]
    if config.model.dropout:
        assert seeds[1:] == [train_module.dropout_seed(3, step, 0) for step in range(5)]
    # the seed is that of the weights, too
    seed(3)
    assert torch.equal(starts[0], GPT(config).embedding.weight)


def test_a_finished_run_says_so_and_writes_nothing(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    train(tiny("rope", "run.log_every=4"), [])
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    out = capsys.readouterr().out           # each line of the log is shown
    shown = [int(line.split("/")[0][5:]) for line in out.splitlines() if line.startswith("step ")]
    assert shown == [line["step"] for line in metrics(tmp_path / "run")]
    assert out.count("  validation ") == 2 and "step 12/12  loss " in out and "  ETA 0m00s" in out
    assert train(tiny("rope", "run.log_every=4"), []) == 0 and "is finished: " in capsys.readouterr().out
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    monkeypatch.setattr(run_module, "git_revision", lambda: ("other code", b""))
    train(tiny("rope", "run.log_every=4"), [])
    assert "is finished, by other code than today's: " in capsys.readouterr().out


def test_a_run_of_older_code_resumes_where_a_line_was_cut(tiny, tmp_path: Path) -> None:
    """Its state.json has no more than this."""
    config, run_dir = tiny("rope", "run.keep=3"), tmp_path / "run"
    train(config, [])
    shutil.copytree(run_dir, tmp_path / "straight")
    shutil.rmtree(run_dir / "checkpoints" / "00000012")
    for path in (run_dir / "checkpoints").glob("*/state.json"):
        state = json.loads(path.read_text())
        old = {key: state[key] for key in ("step", "metrics", "sha256")} | {"wall_s": 1000.0}
        path.write_text(json.dumps({**old, "check": checkpoint.checksum(old)}))
    (run_dir / "summary.json").unlink()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    train(config, [])
    assert_equal_runs(tmp_path / "straight", run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["wall_s"] > 1000


@pytest.mark.slow
def test_damaged_lines_of_the_log_are_skipped_with_a_line_each(tiny, tmp_path: Path, capsys) -> None:
    config, run_dir = tiny(), tmp_path / "run"
    assert train(config, stop_after(5)) == 130
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('\n{\n[]\n{"loss": 1.0}\n')
    assert train(config, []) == 0
    assert capsys.readouterr().out.count("metrics.jsonl has a damaged line") == 4
    assert [entry["step"] for entry in metrics(run_dir)] == list(range(1, 13))


@pytest.mark.slow
def test_a_folder_deleted_while_it_is_trained_is_not_remade(tiny, tmp_path: Path, monkeypatch) -> None:
    """Also if something has made an empty one of that name since."""
    def delete(n: int, t: TrainConfig) -> float:
        if n == 5:
            shutil.rmtree(tmp_path / "run")
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "metrics.jsonl").touch()
        return learning_rate(n, t)

    monkeypatch.setattr(train_module, "learning_rate", delete)
    with pytest.raises(UserError, match="its folder was deleted while it was trained"):
        train(tiny("rope", "run.log_every=100", "run.eval_every=100"), [])
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_that_logs_seldom_is_the_same_run(tiny, tmp_path: Path, spoil) -> None:
    """The same lines, weights and moments, also when it is stopped, and with skipped steps."""
    spoil(3, 4)
    overrides = ("train.steps=20", "run.save_every=9", "model.dropout=0.3")
    assert train(tiny("rope", *overrides, f"run.dir={tmp_path / 'often'}"), []) == 0
    config = tiny("rope", *overrides, "run.log_every=7")
    assert [train(config, stop_after(n)) for n in (3, 5)] == [130, 130] and train(config, []) == 0
    expected, found = (tensors(tmp_path / name, 20) for name in ("often", "run"))
    assert expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in found)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "n_bad" in line] == [3, 4]
    assert all(line in metrics(tmp_path / "often") for line in lines)


def test_steps_that_are_read_at_once_have_one_speed(tiny, tmp_path: Path, spoil) -> None:
    spoil(3, 4)
    assert train(tiny("rope", "run.log_every=7", "train.steps=7"), []) == 0
    lines = read_log(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [3, 4, 6, 7]             # read at 4, which is saved
    assert lines[0]["tokens_per_s"] == lines[1]["tokens_per_s"] < 1e6


def test_a_further_metric_of_a_step_is_logged(tiny, tmp_path: Path, monkeypatch) -> None:
    """A scalar on the device that the loop of a fork adds, perhaps with its graph; read late, as on a GPU."""
    after_step = TrainingRun.after_step

    def with_balance(run: TrainingRun, metrics: dict[str, torch.Tensor]) -> None:
        after_step(run, {**metrics, "balance": run.model.embedding.weight.sum() * 0 + len(run.unread)})
        assert not any(x.requires_grad for _, metrics in run.unread for x in metrics.values())

    monkeypatch.setattr(TrainingRun, "after_step", with_balance)
    assert train(tiny("rope", "run.log_every=3", "run.save_every=12"), []) == 0
    lines = metrics(tmp_path / "run")
    assert [(line["step"], line["balance"]) for line in lines] == [(3, 2), (6, 2), (9, 2), (12, 2)]
    assert set(lines[0]) >= {"step", "tokens", "loss", "grad_norm", "balance", "lr"}


def test_the_code_of_a_run_is_named_and_its_changes_can_be_applied(tiny, corpus_dir: Path, tmp_path: Path,
                                                                   monkeypatch) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@x")
        return subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True,
                              text=True).stdout.strip()

    (tmp_path / "runtime").mkdir()
    (tmp_path / "model.py").write_text("a = 1\n")
    monkeypatch.setattr(run_module, "ROOT", tmp_path)
    git("init")
    git("add", ".")
    git("commit", "-m", "m")
    commit, found = git("rev-parse", "HEAD"), [git_revision()[0]]
    for name, text in (("model.py", "a = 2\n"), ("model.py", "a = 3\n"),
                       ("runtime/new.py", "b = 1\n")):
        (tmp_path / name).write_text(text)
        found.append(git_revision()[0])
    assert found[0] == commit and len(set(found)) == 4
    (tmp_path / "my_plot.py").write_text("c = 1\n")
    assert git_revision()[0] == found[-1]
    with monkeypatch.context() as patch:        # a script of that name runs
        patch.setitem(sys.modules, "my_plot", SimpleNamespace(__file__=str(tmp_path / "my_plot.py")))
        assert git_revision()[0] != found[-1]
    (tmp_path / "page.md").write_text("committed, but no code\n")
    git("add", "page.md")
    git("commit", "-m", "m", "page.md")
    assert git_revision()[0] == found[-1]
    assert all(len(one) == len(f"{commit}-dirty-") + 8 for one in found[1:])
    for key, value in (("color.ui", "always"), ("diff.external", "echo")):
        git("config", key, value)
    (tmp_path / "model.py").write_bytes(b"\0\1")
    for revision, diff in (git_revision(), (found[1], b"earlier")):                     # two starts of a run
        make_run(tmp_path, tiny("rope"), Corpus(corpus_dir), str(revision), diff)
    assert (tmp_path / f"code-{found[1][-8:]}.diff").read_text() == "earlier"
    git("checkout", "model.py")
    (tmp_path / "runtime" / "new.py").unlink()
    git("apply", *(path.name for path in tmp_path.glob("code-*.diff") if path.read_text() != "earlier"))
    assert (tmp_path / "model.py").read_bytes() == b"\0\1" and \
        (tmp_path / "runtime" / "new.py").read_text() == "b = 1\n"


@pytest.mark.slow
def test_a_run_starts_from_another_at_a_longer_length_under_an_extension(tiny, tmp_path: Path) -> None:
    """Before its first update it is the trained model under that extension, and then it learns."""
    train(tiny("rope", "train.steps=60", "train.lr=1e-2", f"run.dir={tmp_path / 'short'}"), [])
    longer = tiny("rope", "train.seq_len=128", "train.steps=40", "train.lr=3e-3",
                  f"run.dir={tmp_path / 'long'}", f"train.init_from={tmp_path / 'short'}",
                  'position.scaling={method="ntk",factor=4.0,original_length=32}', "model.dropout=0.1")
    source, _, _ = checkpoint.load_run(tmp_path / "short")
    source.encoding.scaling = longer.position.scaling
    fresh, x = GPT(longer), torch.randint(257, (1, 128))
    checkpoint.start_from(tmp_path / "short", fresh, longer, ByteTokenizer())
    assert torch.equal(fresh.eval()(x), source(x))
    assert train(longer, []) == 0
    lines = metrics(tmp_path / "long")
    assert lines[-1]["val_loss"] < lines[0]["loss"] < 3


def test_another_model_is_no_start(tiny, tmp_path: Path) -> None:
    source = tmp_path / "short"
    train(tiny("rope", "train.steps=1", f"run.dir={source}"), [])
    for name, override, expected in (
            ("alibi", "train.steps=12", "position.encoding: rope -> alibi"),
            ("rope", "model.n_head=4", "model.n_head: 2 -> 4"),
            ("rope", "position.temperature=ssmax", "does not fit the model"),
            ("rope", "position.layout=interleaved", "position.layout: half -> interleaved"),
            ("rope", 'position.scaling={method="pi",factor=2.0}', "add original_length = 32")):
        config = tiny(name, "train.seq_len=64", override, f"train.init_from={source}")
        with pytest.raises(UserError, match=expected):
            train(config, [])
        assert not (tmp_path / "run" / "config.toml").exists()
    other = ByteTokenizer()
    other.sha256 = "0" * 64
    with pytest.raises(UserError, match="is another tokenizer than .* --tokenizer .*short"):
        checkpoint.start_from(source, GPT(tiny()), tiny(), other)


def test_accumulation_changes_memory_not_the_gradient(tiny, monkeypatch) -> None:
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda *_, **__: None)
    results = []
    for parts in (1, 2, 4):
        # no clipping, which would hide a factor
        run = run_loop(tiny("rope", "train.steps=1", f"train.accumulate={parts}", "train.grad_clip=0.0"))
        gradient = torch.cat([p.grad.flatten() for p in run.model.parameters()])
        figures = [run.state.metrics[key] for key in ("loss", "grad_norm")]
        results.append(torch.cat((gradient, torch.tensor(figures))))
        torch.testing.assert_close(results[-1], results[0], atol=1e-5, rtol=1e-4)
        assert gradient.norm().item() == pytest.approx(figures[1], rel=1e-3)
    run = run_loop(tiny("rope", "train.steps=1", "train.grad_clip=0.5"))
    clipped = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    assert clipped.norm().item() == pytest.approx(0.5, rel=1e-3)


def test_learning_rates(tiny) -> None:
    t = tiny("rope", "train.steps=100", "train.warmup=10", "train.lr=1.0", "train.min_lr=0.1").train
    rates = [learning_rate(step, t) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[55] == pytest.approx(0.55)
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[99] < 0.101
    t = t.model_copy(update={"schedule": "wsd"})
    rates = [learning_rate(step, t) for step in range(100)]
    assert set(rates[10:81]) == {1.0} and rates[90] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.145)
    t = t.model_copy(update={"warmup": 90})             # longer than wsd leaves: it decays from there
    rates = [learning_rate(step, t) for step in range(88, 100)]
    assert rates[1:3] == [1.0, 1.0] and np.abs(np.diff(rates)).max() < 0.1


def test_wandb_gets_every_line_and_the_summary(tiny, tmp_path: Path, monkeypatch) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert train(tiny("rope", "run.wandb=true", "train.steps=5"), []) == 0
    run = wandb.init.return_value
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [1, 2, 3, 4, 5]
    assert run.summary.update.call_args.args[0]["steps"] == 5 and run.finish.called
    shutil.rmtree(tmp_path / "run" / "checkpoints")                     # a resume goes on as the same run
    (tmp_path / "run" / "summary.json").unlink()
    assert train(tiny("rope", "run.wandb=true", "train.steps=5"), []) == 0
    asked = [(call.kwargs["id"], call.kwargs["resume"]) for call in wandb.init.call_args_list]
    assert asked == [(None, "allow"), (str(run.id), "allow")]


def test_compile_pays_only_on_long_cpu_runs_and_where_there_is_a_compiler(tiny, monkeypatch, capsys) -> None:
    def decision(n_steps: int, device: str) -> bool:
        config = tiny("rope", f"train.steps={n_steps}", "train.compile=auto")
        return should_compile(GPT(config), config.train, torch.device(device))

    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert [decision(10, "cpu"), decision(10**9, "cpu"), decision(10, "cuda")] == [False, True, True]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert decision(10**9, "cpu") and not decision(10, "cuda")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not decision(10**9, "cpu") and "needs a C++ compiler" in capsys.readouterr().out


@pytest.mark.slow
def test_runs_in_16_bits_end_where_one_in_32_does(tiny, tmp_path: Path) -> None:
    """In float16 the first scale, 2^16 times the loss, is too large for some gradients, and is halved."""
    losses = []
    for name in ("float32", "bfloat16", "float16"):
        config = tiny("rope", "train.steps=60", "train.lr=1e-2", f"train.dtype={name}",
                      f"run.dir={tmp_path / name}", "run.log_every=60")
        assert train(config, []) == 0
        losses.append(json.loads((tmp_path / name / "summary.json").read_text())["val_loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=0.02)


def test_an_overflow_halves_the_scale_and_is_not_a_bad_step(tiny, monkeypatch, capsys) -> None:
    config = tiny("rope", "train.dtype=float16", "train.steps=9", "train.max_bad_steps=1")
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**40))
    assert train(config, []) == 0
    lines = metrics(Path(config.run.dir))
    assert lines[0]["grad_norm"] is None and not any("n_bad" in line for line in lines)
    assert capsys.readouterr().out.count("NOT APPLIED") == [line["grad_norm"] for line in lines].count(None)
    state = json.loads((Path(config.run.dir) / "checkpoints" / "00000008" / "state.json").read_text())
    assert state["scaler"]["scale"] <= 2.0**39


def test_an_overflow_is_judged_by_the_scale_of_its_step(tiny, monkeypatch) -> None:
    """Although it is read late: of four steps, the first leaves a scale of 2, the second of 1."""
    forward = GPT.forward

    def with_infinite_gradient(self: GPT, *tokens: torch.Tensor, **more) -> torch.Tensor:
        loss = forward(self, *tokens, **more)
        if self.training:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(GPT, "forward", with_infinite_gradient)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=4.0))
    config = tiny("rope", "train.dtype=float16", "train.steps=4", "run.log_every=4")
    assert train(config, []) == 0
    line = metrics(Path(config.run.dir))[-1]
    assert (line["step"], line["n_bad"], line["loss_scale"]) == (4, 3, 0.25)


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_opened(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    def validate(*_: Any) -> dict[str, float]:
        loss = losses.pop(0)
        if loss is None:
            raise KeyboardInterrupt
        return {"val_loss": loss, "val_bpb": 1.0}

    losses = [3.0, 1.0, None, 2.0, 1.5]                     # at steps 3, 6, 9; resumed: 9, 12
    monkeypatch.setattr("train.validate", validate)
    config = tiny("rope", "run.eval_every=3", "run.save_every=3", "run.keep=1", "run.keep_best=true")
    with pytest.raises(KeyboardInterrupt):
        train(config, [])
    assert train(config, []) == 0
    folder = Path(config.run.dir)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00000006", "00000012"]
    found = [checkpoint.open_run(folder, which).state.step for which in ("newest", "best", "6", "12")]
    assert found == [12, 6, 6, 12]
    with pytest.raises(UserError, match="--checkpoint 9: .* steps 6, 12"):
        checkpoint.open_run(folder, "9")
    for which in ("best", "newest"):
        arguments = (folder, "--checkpoint", which, "--lengths", "32", "--replace", "--protocol", "fixed")
        assert call("eval", *arguments).code == call("compare", folder, "--out", tmp_path / "out").code == 0


@pytest.mark.slow
def test_train_and_model_need_four_packages_and_what_torch_brings() -> None:
    code = ("import sys\nfor name in ('wandb', 'datasets', 'matplotlib', 'tqdm', 'tiktoken', 'tokenizers', "
            "'pandas', 'fsspec.x', 'huggingface_hub', 'transformers'):\n"
            "    sys.modules[name] = None\nimport train, model\n")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
