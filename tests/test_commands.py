"""Help, dry runs and samples. What goes wrong is in test_mistakes.py and test_promises.py."""

import signal
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import ROOT, call, lively, python, slow_except, tokens

from config import to_toml
from model import GPT
from sample import generate


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


def test_top_k_and_temperature(tiny) -> None:
    """Temperature 0 is the argmax of full forwards; 3 of the most likely are drawn at --top-k 3."""
    model, x = lively(tiny()), tokens((1, 5))
    greedy = x
    for _ in range(9):
        greedy = torch.cat((greedy, model(greedy)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generate(model, x, 9, temperature=0), greedy)
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
            "from base.command import run_command\nrun_command(lambda: print(len(train.SIGNALS)))")
    ended = python("-c", code)
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr
