"""The commands as typed: --help, --dry-run, exit codes, samples, and what the source may not contain."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import ROOT, every_encoding, lively, tokens

from positions import ENCODINGS
from sample import generate
from train import train

SOURCES = [p for p in ROOT.rglob("*.py") if not {".venv", "runs"} & set(p.relative_to(ROOT).parts)]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=cwd,
                          env={**os.environ, "COLUMNS": "120"})


def test_no_file_hides_a_module_of_the_standard_library() -> None:
    """A script's folder is on the path of the Pythons that torch.compile starts to see what the chip can do:
    one that cannot import its own modules (bench/encodings.py, once) costs all vector instructions.
    """
    assert not {path.stem for path in SOURCES} & sys.stdlib_module_names


@pytest.mark.parametrize("script", ["train.py", "eval.py", "sample.py", "export.py", "data/prepare.py"])
def test_help_is_complete_and_a_wrong_call_is_one_line(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0 and done.stdout.count("\n") > 10 and f"`python {script}" in done.stdout
    done = run(script, "--no-such-option")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_dry_run_prints_the_resolved_config_and_writes_nothing(tmp_path: Path) -> None:
    done = run(str(ROOT / "train.py"), str(ROOT / "configs" / "quick.toml"), "train.lr=0.25", "--dry-run",
               cwd=tmp_path)
    config = tomllib.loads(done.stdout)
    assert (config["train"]["lr"], config["train"]["weight_decay"]) == (0.25, 0.1)
    assert config["run"]["dir"] == "runs/quick"
    assert list(tmp_path.iterdir()) == []


def test_train_names_every_problem_and_the_missing_corpus(tmp_path: Path) -> None:
    done = run(str(ROOT / "train.py"), str(ROOT / "configs" / "quick.toml"), "train.lr.x=1", "model.n_had=2",
               cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "error"]
    done = run(str(ROOT / "train.py"), str(ROOT / "configs" / "quick.toml"), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "data/prepare.py SOURCE --out data/stdlib" in done.stderr


def test_prepare_train_sample_as_typed(tmp_path: Path) -> None:
    text = tmp_path / "poem.txt"
    text.write_bytes(b"the dog chased another dog\n" * 200)
    done = run(str(ROOT / "data" / "prepare.py"), str(text), cwd=tmp_path)
    assert done.returncode == 0 and "data/poem/train.bin: 1 documents" in done.stdout, done.stderr
    done = run(str(ROOT / "train.py"), str(ROOT / "configs" / "quick.toml"), "data.dir=data/poem",
               "train.steps=40", "train.warmup=5", "train.seq_len=32", "train.lr=5e-3", "model.n_embd=48",
               "run.dir=out", cwd=tmp_path)
    assert done.returncode == 0 and "finished out: validation loss" in done.stdout, done.stderr
    command = [str(ROOT / "sample.py"), "out", "--prompt", "the dog", "--tokens", "60",
               "--temperature", "0.5"]
    first, again, other = (run(*command, *more, cwd=tmp_path) for more in ((), (), ("--seed", "1")))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("the dog") and len(first.stdout) > 50, first.stderr
    assert first.stdout == again.stdout != other.stdout
    done = run(*command, "--top-k", "0", cwd=tmp_path)
    assert done.returncode == 2 and "--top-k" in done.stderr and done.stderr.count("\n") == 1


@every_encoding
def test_sampling_with_a_cache_is_the_greedy_argmax_of_full_forwards(name: str, tiny) -> None:
    model, x = lively(tiny(name)), tokens((1, 5))
    sampled = generate(model, x, 20, temperature=0)
    for _ in range(20):
        x = torch.cat((x, model(x)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(sampled, x)


def test_top_k_and_temperature(tiny) -> None:
    model, x = lively(tiny()), tokens((1, 5))
    assert torch.equal(generate(model, x, 9, 1.0, top_k=1), generate(model, x, 9, 0))
    assert torch.equal(generate(model, x, 9, 1e-4, seed=3), generate(model, x, 9, 0))
    likely = model(x)[0, -1].topk(3).indices.tolist()
    draws = {generate(model, x, 1, 5.0, top_k=3, seed=seed)[0, -1].item() for seed in range(40)}
    assert draws == set(likely)


def test_sample_refuses_to_outgrow_a_learned_table(tiny, tmp_path: Path) -> None:
    train(tiny("learned", "train.steps=1"), [])
    done = run("sample.py", str(tmp_path / "run"), "--prompt", "dog", "--tokens", "29")
    assert done.returncode == 0, done.stderr
    done = run("sample.py", str(tmp_path / "run"), "--prompt", "dog", "--tokens", "30")
    assert done.returncode == 2 and "ask for at most 29" in done.stderr and done.stderr.count("\n") == 1


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text" * 10)
    (tmp_path / "file").write_text("")
    done = run("data/prepare.py", str(tmp_path / "a.txt"), "--out", str(tmp_path / "file" / "out"))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_no_code_outside_the_registry_knows_an_encoding_by_name() -> None:
    """No comparison outside positions/ is with an encoding's name."""
    for path in SOURCES:
        if "tests" in path.parts or path.parent.name == "positions":
            continue
        compared = {constant.value for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.Compare | ast.MatchValue) for constant in ast.walk(node)
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, str)}
        assert not compared & set(ENCODINGS), path


def test_the_readme_shows_only_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = readme.split("## The tree")[1].split("```")[1]
    for line in tree.strip().splitlines():
        name = line.split()[0]
        assert (ROOT / name).exists(), name
    for path in [*ROOT.glob("*.py"), *ROOT.glob("data/*.py"), *ROOT.glob("positions/[a-z]*.py")]:
        assert path.relative_to(ROOT).as_posix() in tree, path
    for path in ROOT.glob("configs/*.toml"):
        assert path.name in readme, path
