"""Help, dry runs and samples. What goes wrong is in test_mistakes.py and test_promises.py."""

import shutil
import signal
import tomllib
from pathlib import Path

import pytest
import torch
from toys import ROOT, call, lively, python, slow_except, tokens

from config import load_config, to_toml
from model import GPT
from runtime.dry_run import training_bytes
from runtime.parallel import Process
from sample import generate
from train import train


@pytest.mark.slow
def test_help_fits_a_screen_and_has_topics() -> None:
    page = call("train", "--help")
    assert page.code == 0 and page.out.count("\n") <= 50 and "--help train" in page.out
    topics = {topic: call("train", "--help", topic).out for topic in ("train", "rope", "yarn", "all")}
    assert "beta_fast" in topics["yarn"] and len(topics["all"]) == max(map(len, topics.values()))
    for name in ("eval", "compare", "sweep", "sample", "export", "data.prepare"):
        page = call(name, "--help")
        assert page.code == 0 and page.out.count("\n") > 10, name


def test_a_dry_run_prints_config_and_size_and_writes_nothing(tiny, tmp_path: Path) -> None:
    """As TOML; the size is that of the model which a run would train."""
    model, path = GPT(tiny()), tmp_path / "config.toml"
    path.write_text(to_toml(tiny()))
    before = list(tmp_path.rglob("*"))
    ended = call("train", path, "--dry-run", "train.lr=0.25")
    assert ended.code == 0 and ended == call("train", "--dry-run", path, "train.lr=0.25")
    assert tomllib.loads(ended.out)["train"]["lr"] == 0.25
    assert f"{model.n_parameters():,} parameters" in ended.out
    assert list(tmp_path.rglob("*")) == before


def test_a_dry_run_works_before_the_corpus_is_there(monkeypatch) -> None:
    """GPT-2 on OpenWebText: docs/scaling.md has 798 MFLOP a token, 7.8e18 in all, 5.2 h at 520,000/s."""
    monkeypatch.chdir(ROOT)
    ended = call("train", "configs/gpt2-124m.toml", "--dry-run", "--tokens-per-s", "5200",
                 "train.dtype=bfloat16", "train.device=cpu", "data.dir=nowhere/openwebtext")
    assert ended.code == 0, ended.err
    lines = Path("configs/gpt2-124m.toml").read_text().splitlines()
    (comment,) = (line.removeprefix("# ") for line in lines if "prepare.py" in line)
    assert comment in ended.out
    assert "123,587,328 parameters" in ended.out and "9,830,400,000 tokens x 798." in ended.out
    assert "= 7.8e+18 FLOP" in ended.out and "525.13 hours at 5,200 tokens/s" in ended.out
    ended = call("train", "configs/wikitext103.toml", "--dry-run", "data.dir=nowhere/wikitext103")
    assert "vocab_size = 50304" in ended.out                            # from --tokenizer gpt2 of the line
    ended = call("train", "configs/gpt2-124m.toml", "--dry-run", "data.dir=nowhere/else")
    assert ended.code == 2 and "nowhere/else: no prepared corpus" in ended.err


@pytest.mark.parametrize(("device", "shape", "measured"), [
    ("cuda", "model.n_layer=12 model.n_embd=768 model.n_head=12 model.vocab_size=50304 train.seq_len=1024 "
             "train.batch_size=32 train.dtype=bfloat16", 19.704e9),
    ("cpu", "model.n_layer=6 model.n_embd=384 model.n_head=6 model.vocab_size=257 train.seq_len=256 "
            "train.batch_size=16 train.dtype=float32", 1.516e9)])
def test_memory_by_the_formula_is_that_of_a_measured_step(device: str, shape: str, measured: float) -> None:
    """By bench.steps: results/gpu/training.md, and on two cores."""
    config = load_config(ROOT / "configs" / "quick-adamw.toml", [*shape.split(), "train.accumulate=1"])
    with torch.device("meta"):
        model = GPT(config)
    n_bytes = training_bytes(config, model, Process(torch.device(device)), is_explicit=False)
    assert n_bytes == pytest.approx(measured, rel=0.05)
    # two processes share the batch, not the weights
    assert 0.5 < training_bytes(config, model, Process(torch.device(device), 0, 2), False) / n_bytes < 0.65


def test_a_dry_run_refuses_what_training_refuses(tiny, tmp_path: Path, monkeypatch) -> None:
    """A batch that the processes cannot share, before they join."""
    path = tmp_path / "config.toml"
    path.write_text(to_toml(tiny()))
    for name, value in (("WORLD_SIZE", "3"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    ended = call("train", path, "--dry-run")
    assert ended.code == 2 and "batch_size 4: must be a multiple of 3 processes" in ended.err


def test_a_dry_run_of_a_run_that_has_started_needs_no_weights_to_start_from(tiny, tmp_path: Path) -> None:
    path, source = tmp_path / "config.toml", tmp_path / "source"
    train(tiny("rope", "train.steps=1", "train.warmup=0", f"run.dir={source}"), [])
    config = tiny("rope", "train.steps=1", "train.warmup=0", f"train.init_from={source}")
    path.write_text(to_toml(config))
    train(config, [])
    shutil.rmtree(source / "checkpoints")
    assert call("train", path, "--dry-run").code == 0
    assert "no checkpoint yet" in call("train", path, "--dry-run", f"run.dir={tmp_path / 'new'}").err


def test_a_run_that_ends_in_its_warm_up_says_so(tiny, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(tiny()))
    pages = [call("train", path, "--dry-run", f"train.warmup={n}").out for n in (12, 13)]
    assert ["within train.warmup = 13" in page for page in pages] == [False, True]


def test_top_k_and_temperature(tiny) -> None:
    """Temperature 0 is the argmax of full forwards; 3 of the most likely are drawn at --top-k 3."""
    model, x = lively(tiny()), tokens((1, 5))
    greedy = x
    for _ in range(9):
        greedy = torch.cat((greedy, model(greedy)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generate(model, x, 9, temperature=0), greedy)
    assert torch.equal(generate(model, x, 9, 0, ends={greedy[0, 5].item()}), x)         # its end is not shown
    assert torch.equal(generate(model, x, 9, 1.0, top_k=1), generate(model, x, 9, 0))
    assert torch.equal(generate(model, x, 9, 1e-4, seed=3), generate(model, x, 9, 0))
    assert torch.equal(generate(model, x, 9, 5.0, seed=3), generate(model, x, 9, 5.0, seed=3))
    draws = {generate(model, x, 1, 5.0, top_k=3, seed=seed)[0, -1].item() for seed in range(40)}
    assert draws == set(model(x)[0, -1].topk(3).indices.tolist())


@pytest.mark.parametrize("name", slow_except(
    ["train", "eval", "compare", "sweep", "sample", "export", "data/prepare"], "train", "data/prepare"))
def test_ctrl_c_during_the_imports_prints_no_traceback(name: str, tmp_path: Path) -> None:
    """It comes while torch is imported: here a torch that sends it. A shell reports this end as 130."""
    path = tmp_path / "torch.py"
    path.write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    ended = python(ROOT / f"{name}.py", "--help", PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.slow
def test_commands_import_what_windows_has() -> None:
    """Without fcntl and resource, and with the signals of Windows alone."""
    code = ("import signal, sys\nfor name in ('fcntl', 'resource', 'pwd', 'grp', 'termios'):\n"
            "    sys.modules[name] = None\nfor name in ('HUP', 'USR1', 'USR2', 'QUIT', 'ALRM', 'KILL'):\n"
            "    delattr(signal, 'SIG' + name)\n"
            "import train, eval, compare, sample, export, sweep, data.prepare\n"
            "from base.command import handled_signals\n"
            "with handled_signals(print, *train.SIGNALS):\n    print(signal.getsignal(signal.SIGTERM))")
    ended = python("-c", code)
    assert (ended.returncode, ended.stdout) == (0, "<built-in function print>\n"), ended.stderr
