"""The commands as typed: --help, --dry-run, exit codes, samples, and what the source may not contain."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import ROOT, every_encoding_slowly, lively, python, tokens

import train as train_command
from config import to_toml
from data.tokenizer import ByteTokenizer, decode
from model import GPT
from positions import ENCODINGS
from runtime import run as run_folder
from runtime.errors import UserError
from runtime.help import help_text
from sample import generate, stream, text_of
from train import train

SOURCES = [p for p in ROOT.rglob("*.py") if not {".venv", "runs"} & set(p.relative_to(ROOT).parts)]


def test_no_file_hides_a_module_of_the_standard_library() -> None:
    """A script's folder is on the path of the Pythons that torch.compile starts to see what the chip can do:
    one that cannot import its own modules (bench/encodings.py, once) costs all vector instructions.
    """
    assert not {path.stem for path in SOURCES} & sys.stdlib_module_names


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", "eval.py", "sample.py", "export.py", "data/prepare.py"])
def test_help_is_complete_and_a_wrong_call_is_one_line(script: str) -> None:
    done = python(script, "--help")
    assert done.returncode == 0 and done.stdout.count("\n") > 10 and f"`python {script}" in done.stdout
    done = python(script, "--no-such-option")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_help_of_train_fits_a_screen_and_has_topics(monkeypatch, capsys) -> None:
    def shown(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        assert train_command.main() == 0
        return capsys.readouterr().out

    assert shown("--help").count("\n") <= 50 and "--help train" in shown("-h")
    assert shown("--help", "yarn") == help_text("yarn") + "\n" and "beta_fast" in help_text("yarn")
    assert all(len(shown("--help", topic)) < len(shown("--help", "all")) for topic in ("train", "rope"))


def dry_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    train_command.main()
    return capsys.readouterr().out


@every_encoding_slowly
def test_dry_run_prints_config_and_size_as_toml_and_writes_nothing(name: str, tiny, tmp_path: Path,
                                                                   monkeypatch, capsys) -> None:
    """In any order of the arguments; the size is that of the model which a run would train."""
    model, path = GPT(tiny(name)), tmp_path / "config" / f"{name}.toml"
    path.parent.mkdir()
    path.write_text(to_toml(tiny(name)))
    monkeypatch.chdir(tmp_path)
    before = list(tmp_path.rglob("*"))
    out = dry_run(monkeypatch, capsys, str(path), "--dry-run", "train.lr=0.25")
    assert out == dry_run(monkeypatch, capsys, "--dry-run", str(path), "train.lr=0.25")
    config = tomllib.loads(out)
    assert (config["train"]["lr"], config["train"]["weight_decay"]) == (0.25, 0.1)
    assert f"{model.n_parameters():,} parameters, {model.flops_per_token(32):,} FLOPs per token" in out
    assert list(tmp_path.rglob("*")) == before


def test_dry_run_checks_the_corpus(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "rope.toml"
    path.write_text(to_toml(tiny()))
    for override, expected in (("data.dir=nowhere", "no prepared corpus there"),
                               ("train.seq_len=99999", "too few"), ("model.vocab_size=9", "vocab_size")):
        with pytest.raises(UserError, match=expected):
            dry_run(monkeypatch, capsys, str(path), override, "--dry-run")


@pytest.mark.slow
def test_train_names_every_problem_and_the_missing_corpus(tmp_path: Path) -> None:
    done = python(ROOT / "train.py", ROOT / "configs" / "quick.toml", "train.lr.x=1", "model.n_had=2",
                  cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "error"]
    done = python(str(ROOT / "train.py"), str(ROOT / "configs" / "quick.toml"), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "data/prepare.py SOURCE --out data/stdlib" in done.stderr


@pytest.mark.slow
def test_prepare_train_sample_as_typed(tmp_path: Path) -> None:
    text = tmp_path / "poem.txt"
    text.write_bytes(b"the dog chased another dog\n" * 200)
    done = python(str(ROOT / "data" / "prepare.py"), str(text), cwd=tmp_path)
    assert done.returncode == 0 and "data/poem/train.bin: 1 documents" in done.stdout, done.stderr
    done = python(str(ROOT / "train.py"), str(ROOT / "configs" / "quick.toml"), "data.dir=data/poem",
               "train.steps=40", "train.warmup=5", "train.seq_len=32", "train.lr=5e-3", "model.n_embd=48",
               "run.dir=out", cwd=tmp_path)
    assert done.returncode == 0 and "finished out: validation loss" in done.stdout, done.stderr
    command = [str(ROOT / "sample.py"), "out", "--prompt", "the dog", "--tokens", "60",
               "--temperature", "0.5"]
    first, again, other = (python(*command, *more, cwd=tmp_path) for more in ((), (), ("--seed", "1")))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("the dog") and len(first.stdout) > 50, first.stderr
    assert first.stdout == again.stdout != other.stdout
    done = python(*command, "--top-k", "0", cwd=tmp_path)
    assert done.returncode == 2 and "--top-k" in done.stderr and done.stderr.count("\n") == 1


@every_encoding_slowly
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


@pytest.mark.slow
def test_sample_refuses_to_outgrow_a_learned_table(tiny, tmp_path: Path) -> None:
    train(tiny("learned", "train.steps=1"), [])
    done = python("sample.py", str(tmp_path / "run"), "--prompt", "dog", "--tokens", "29")
    assert done.returncode == 0, done.stderr
    done = python("sample.py", str(tmp_path / "run"), "--prompt", "dog", "--tokens", "30")
    assert done.returncode == 2 and "ask for at most 29" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text" * 10)
    (tmp_path / "file").write_text("")
    done = python("data/prepare.py", str(tmp_path / "a.txt"), "--out", str(tmp_path / "file" / "out"))
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


def test_sampled_text_comes_in_whole_characters() -> None:
    """Piece by piece it is the text of all tokens; a character whose bytes are tokens comes in one piece."""
    tokenizer = ByteTokenizer()
    ids = [tokenizer.eot, *"aä日🙂".encode(), 0xC3, ord("b"), 999, 0xE6]
    pieces = list(text_of(tokenizer, iter(ids)))
    assert "".join(pieces) == decode(tokenizer, ids) == "aä日🙂\ufffdb\ufffd"
    assert [piece for piece in pieces if piece][:4] == list("aä日🙂")


def test_sampling_prints_a_token_before_it_draws_the_next(tiny) -> None:
    model, forwards = lively(tiny()), []
    hidden = model.hidden
    model.hidden = lambda *arguments, **options: forwards.append(1) or hidden(*arguments, **options)
    for n_drawn, _ in enumerate(stream(model, tokens((1, 5)), 4), start=1):
        assert len(forwards) == n_drawn


def test_the_revision_of_a_changed_checkout_is_dirty(tmp_path: Path, monkeypatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "run.py"))
    assert run_folder.git_revision() is None
    (tmp_path / "run.py").write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(*command)
    commit = git("rev-parse", "HEAD")
    assert run_folder.git_revision() == commit
    (tmp_path / "run.py").write_text("2")
    assert run_folder.git_revision() == f"{commit}-dirty"


def test_the_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links and not missing
