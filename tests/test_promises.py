"""The ten promises, each broken at one moment, through the commands and the files of a run alone.

The ninth, that several processes train as one, is in test_parallel.py; the tenth, that a mistake is one line,
in test_mistakes.py.
"""

import ast
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layers import sources
from toys import ROOT, TINY, Ended, assert_equal_runs, call, metrics, slow_except, tensors, words

from model import GPT
from runtime.checkpoint import load_run

SMALL = [*TINY, "model.n_layer=1", "model.n_embd=16", "model.n_hidden=32"]


class Killed(BaseException):
    """Stands for SIGKILL: no code of ours may catch it."""


class Case:
    """A config on a copy of the small corpus; its runs are in a folder of the test."""

    def __init__(self, folder: Path, corpus_dir: Path) -> None:
        self.folder, self.corpus = folder, folder / "words"
        self.config = folder / "small.toml"
        self.config.write_text(f'[data]\ndir = "{self.corpus}"\n[position]\nencoding = "rope"\n')
        shutil.copytree(corpus_dir, self.corpus)

    def train(self, name: str, *overrides: str) -> Ended:
        return call("train", self.config, *SMALL, f"run.dir={self.folder / name}", *overrides)

    def straight(self, *overrides: str) -> Path:
        """An undisturbed run."""
        assert self.train("straight", *overrides).code == 0
        return self.folder / "straight"


@pytest.fixture
def case(tmp_path: Path, corpus_dir: Path) -> Case:
    return Case(tmp_path, corpus_dir)


def steps_of(run_dir: Path) -> list[int]:
    """The steps of its checkpoints."""
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def one_error(ended: Ended) -> str:
    """What a command says that ended with exit code 2: `error:` lines and nothing else."""
    found = ended.err.splitlines()
    assert ended.code == 2 and found and all(line.startswith("error: ") for line in found), ended
    return ended.err


def in_forward(n: int, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` before the n-th forward pass of training from now on."""
    forward, left = GPT.forward, [n]

    def call_first(self: GPT, *arguments: Any, **options: Any) -> Any:
        left[0] -= self.training
        if self.training and left[0] == 0:
            act()
        return forward(self, *arguments, **options)

    monkeypatch.setattr(GPT, "forward", call_first)


def at_rename(name: str, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` before anything gets this name."""
    for function in ("rename", "replace"):
        def call_first(source: Any, target: Any, real: Any = getattr(os, function), **more: Any) -> None:
            if Path(target).name == name:
                act()
            real(source, target, **more)

        monkeypatch.setattr(os, function, call_first)


def die() -> None:
    raise Killed


# 1. A run killed at any moment resumes, and ends bit-equal to one that was not

@pytest.mark.parametrize("overrides", [
    "model.dropout=0.2 train.accumulate=2 train.positions=pose train.position_range=64",
    *slow_except(["train.optimizer=muon train.lr=1e-2 data.cross_documents=mask train.schedule=wsd",
                  "data.mixture={MORE=0.5} train.batch_size=16 train.seq_len=128",       # beyond an epoch
                  "train.dtype=float16 run.keep_best=true position.drop_at=0.4"])])
def test_a_killed_run_ends_bit_equal(overrides: str, case: Case, monkeypatch) -> None:
    """Killed in a step, and while a checkpoint gets its name."""
    shutil.copytree(case.corpus, case.folder / "more")
    keys = overrides.replace("MORE", f'"{case.folder / "more"}"').split()
    # a scale that overflows at first, so that a resume has to know how far it has come down
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**24))
    straight, run_dir = case.straight(*keys), case.folder / "run"
    n_parts = 2 if "accumulate" in overrides else 1
    for kill in (lambda patch: in_forward(7 * n_parts, die, patch),
                 lambda patch: at_rename("00000008", die, patch)):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)      # SIGKILL runs no `finally`
            kill(patch)
            case.train("run", *keys)
        assert 4 in steps_of(run_dir) and 8 not in steps_of(run_dir)
        assert not (run_dir / "summary.json").exists()
    ended = case.train("run", *keys)
    assert ended.code == 0 and "resum" in ended.out
    assert_equal_runs(run_dir, straight)
    assert not list(run_dir.rglob("*tmp*")), "what the kill left behind is still there"


def test_a_resume_asks_what_a_run_is_not_where_it_lies(case: Case, monkeypatch) -> None:
    """Its corpus has moved, its folder is behind a link, and device and compile are written otherwise."""
    straight, run_dir = case.straight(), case.folder / "run"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        in_forward(7, die, patch)
        case.train("run")
    case.corpus.rename(case.folder / "moved")
    scratch = case.folder / "scratch" / "disk"
    scratch.parent.mkdir()
    run_dir.rename(scratch)
    run_dir.symlink_to(scratch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = case.train("run", f"data.dir={case.folder / 'moved'}", "train.device=auto", "train.compile=auto")
    assert ended.code == 0, ended.err
    assert_equal_runs(run_dir, straight)
    assert run_dir.is_symlink() and load_run(run_dir)


# 2. A signal saves, then ends; a second one during the save does not lose it

@pytest.mark.parametrize("number", slow_except(
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], signal.SIGUSR1))
def test_a_signal_saves_even_if_a_second_one_comes(number: signal.Signals, case: Case, monkeypatch) -> None:
    overrides = ("run.save_every=100", "train.accumulate=2")
    straight, run_dir = case.straight(*overrides), case.folder / "run"
    renamed = []

    def second() -> None:
        renamed.append(1)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        in_forward(12, lambda: os.kill(os.getpid(), number), patch)         # the second part of step 6
        for step in ("00000005", "00000006"):
            at_rename(step, second, patch)
        ended = case.train("run", *overrides)
    assert (ended.code, len(renamed)) == (128 + number, 1) and "Traceback" not in ended.err
    assert steps_of(run_dir) in ([5], [6])
    assert case.train("run", *overrides).code == 0
    assert_equal_runs(run_dir, straight)


# 3. A checkpoint is written, synced, renamed; a damaged one is skipped for the one before

def test_a_checkpoint_is_on_disk_before_it_has_its_name(case: Case, monkeypatch) -> None:
    """So are the lines of the log up to it."""
    run_dir, synced, checked = case.folder / "run", dict[int, int](), []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        about = os.fstat(descriptor)
        synced[about.st_ino] = about.st_size
        fsync(descriptor)

    def check() -> None:
        (temporary,) = (path for path in (run_dir / "checkpoints").iterdir() if not path.name.isdigit())
        files = [*temporary.iterdir(), run_dir / "metrics.jsonl"]
        assert {path.name for path in files} >= {"model.safetensors", "optimizer.safetensors", "state.json"}
        assert all(synced.get(path.stat().st_ino) == path.stat().st_size for path in files)
        assert temporary.stat().st_ino in synced
        checked.append(1)

    monkeypatch.setattr(os, "fsync", noted)
    at_rename("00000004", check, monkeypatch)
    assert case.train("run").code == 0 and checked


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(name: str, case: Case) -> None:
    straight, run_dir = case.straight(), case.folder / "run"
    shutil.copytree(straight, run_dir)
    (run_dir / "summary.json").unlink()
    damaged = run_dir / "checkpoints" / "00000012" / name
    content = damaged.read_bytes()
    place = len(content) * 2 // 3
    damaged.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1:])
    ended = case.train("run")
    said = [line for line in (ended.out + ended.err).splitlines() if "00000012" in line and "damaged" in line]
    assert ended.code == 0 and said, ended
    assert_equal_runs(run_dir, straight)
    (run_dir / "summary.json").unlink()
    for step in steps_of(run_dir):                      # cut short, all of them
        path = run_dir / "checkpoints" / f"{step:08d}" / name
        path.write_bytes(path.read_bytes()[:-1])
    before = everything(run_dir)
    assert "every checkpoint is damaged" in one_error(case.train("run"))
    assert everything(run_dir) == before


# 4. Nothing that comes from others is executed

BANNED_CALLS = {"exec", "eval", "compile", "__import__", "os.system", "os.popen", "torch.jit.load",
                "torch.hub.load", "pandas.read_pickle", "yaml.load"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
BANNED_KEYWORDS = {"weights_only=False", "shell=True", "trust_remote_code=True", "allow_pickle=True"}
NEEDED_KEYWORDS = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from (name for name in names if name.partition(".")[0] in BANNED_MODULES)
        if isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {ast.unparse(keyword) for keyword in node.keywords}
            if name in BANNED_CALLS or keywords & BANNED_KEYWORDS or \
                    NEEDED_KEYWORDS.get(name) not in {None, *keywords}:
                yield ast.unparse(node)


def test_no_source_executes_text_or_unpickles() -> None:
    assert all([*offences(ast.parse(text))] for text in ("eval('1')", "import pickle", "torch.load(p)"))
    found = {module: [*offences(tree)] for module, tree in sources().items()}
    assert len(found) > 40 and not any(found.values()), found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus_dir: Path) -> Path:
    """A folder with two finished and evaluated runs, their corpus and a Hugging Face folder made of one."""
    case = Case(tmp_path_factory.mktemp("finished"), corpus_dir)
    for seed, name in enumerate(("run", "twin")):
        assert case.train(name, f"train.seed={seed}").code == 0 == evaluate(case.folder, run=name).code
    assert call("export", case.folder / "run", case.folder / "hf").code == 0
    return case.folder


def evaluate(folder: Path, *arguments: object, run: str = "run", protocol: str = "nonoverlap,fixed") -> Ended:
    return call("eval", folder / run, "--lengths", "16,32", "--windows", "8", "--tokens", "256", "--protocol",
                protocol, "--data", folder / "words", *arguments)


@pytest.mark.parametrize("name", [
    "run/checkpoints/00000012/model.safetensors", "words/meta.json", "run/eval/words.parquet",
    "hf/model.safetensors", "hf/config.json"])
def test_a_pickle_is_not_loaded_wherever_it_lies(name: str, finished: Path, tmp_path: Path) -> None:
    folder, sentinel = tmp_path / "copy", tmp_path / "sentinel"
    shutil.copytree(finished, folder)
    (folder / "run" / "summary.json").unlink()
    hostile = f"cos\nsystem\n(S'touch {sentinel}'\ntR.".encode()
    (folder / name).write_bytes(hostile)
    if name.startswith("hf"):
        ended = evaluate(folder, run="hf")
    elif "eval" in name:
        ended = call("compare", folder / "run", "--out", folder / "report")
    else:
        ended = call("train", folder / "run/config.toml", f"run.dir={folder}/run", f"data.dir={folder}/words")
    assert not sentinel.exists() and "Traceback" not in ended.err
    is_skipped = ended.code == 0 and "damaged" in ended.out + ended.err and "checkpoints" in name
    assert is_skipped or one_error(ended)


# 5. A second train.py is refused; so is a resume under another config or corpus

def test_a_second_training_of_a_run_is_refused(case: Case, monkeypatch) -> None:
    """Also by another name of its folder."""
    (case.folder / "link").symlink_to(case.folder / "run")
    found: list[Ended] = []
    in_forward(6, lambda: found.extend(case.train(name) for name in ("run", "link")), monkeypatch)
    assert case.train("run").code == 0
    assert len(found) == 2 and all("another run.dir" in one_error(ended) for ended in found), found


def test_a_resume_under_another_config_or_corpus_lists_the_differences(case: Case, monkeypatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        in_forward(7, die, patch)
        case.train("run")
    before = everything(case.folder / "run")
    error = one_error(case.train("run", "train.lr=0.5", "position.base=50"))
    assert "train.lr: 0.001 -> 0.5" in error and "position.base: 10000.0 -> 50.0" in error
    (case.folder / "text.txt").write_bytes(words(99, 9000))
    assert call("data.prepare", case.folder / "text.txt", "--out", case.folder / "other").code == 0
    assert f"{case.folder / 'other'}" in one_error(case.train("run", f"data.dir={case.folder / 'other'}"))
    assert everything(case.folder / "run") == before


# 6. An evaluation says what it is of; what does not belong together is not compared

@pytest.fixture
def evaluated(finished: Path, tmp_path: Path, monkeypatch) -> Path:
    """A copy of the folder with an evaluation; no figures are drawn."""
    monkeypatch.setattr("eval.draw_evaluation", lambda *_, **__: True)
    monkeypatch.setattr("compare.draw_sections", lambda sections, *_: sections)
    return shutil.copytree(finished, tmp_path / "copy")


def test_an_evaluation_names_checkpoint_text_settings_and_code(evaluated: Path) -> None:
    head = json.loads((evaluated / "run" / "eval" / "words.json").read_text())
    weights = evaluated / "run" / "checkpoints" / "00000012" / "model.safetensors"
    assert head["checkpoint_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert (head["data"], head["seed"], head["train_dtype"]) == ("words", 0, "float32")
    assert head["data_sha256"] and head["settings"]["fixed"]
    last_commit = ["git", "log", "-1", "--format=%H", "--", "*.py", ":!tests"]          # of the code
    revision = subprocess.run(last_commit, cwd=ROOT, capture_output=True, text=True).stdout
    assert (head["commit"] or "").startswith(revision.strip())


def test_an_evaluation_of_an_older_checkpoint_is_not_compared(evaluated: Path) -> None:
    newest = evaluated / "run" / "checkpoints" / "00000012"
    newest.rename(evaluated / "later")
    assert evaluate(evaluated, "--replace").code == 0                   # of step 8
    assert call("compare", evaluated / "run", "--out", evaluated / "report").code == 0
    (evaluated / "later").rename(newest)
    assert "--replace" in one_error(call("compare", evaluated / "run", "--out", evaluated / "report"))


def test_a_copied_or_renamed_checkpoint_is_not_the_newest(evaluated: Path) -> None:
    folder = evaluated / "run" / "checkpoints"
    shutil.copytree(folder / "00000008", folder / "00000099")
    ended = evaluate(evaluated, "--replace")
    assert ended.code == 0 and "00000099 is damaged (it is of step 8: a copy, or renamed)" in ended.out
    assert json.loads((evaluated / "run" / "eval" / "words.json").read_text())["step"] == 12


# 7. A full disk or an interrupted prepare leaves nothing that loads; the same command goes on

def fill_disk(n_bytes: int = 2**13) -> None:
    """From now on no file may become larger than this."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def disk() -> Iterator[None]:
    """There is room again after the test."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("way", ["full disk", "kill"])
def test_an_interrupted_preparation_leaves_nothing_that_loads(way: str, disk: None, tmp_path: Path,
                                                              monkeypatch) -> None:
    (tmp_path / "source").mkdir()
    for i in range(40):
        (tmp_path / "source" / f"{i:02}.txt").write_bytes(words(i, 4000))
    command = ["data.prepare", tmp_path / "source", "--out"]
    assert call(*command, tmp_path / "straight").code == 0
    with monkeypatch.context() as patch:
        if way == "full disk":
            fill_disk(2**16)
            assert "large" in one_error(call(*command, tmp_path / "out"))
            fill_disk(-1)
        else:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)      # SIGKILL runs no `finally`
            at_rename("out", die, patch)
            with pytest.raises(Killed):
                call(*command, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert call(*command, tmp_path / "out").code == 0
    left, right = ({path.name: content for path, content in everything(tmp_path / name).items()}
                   for name in ("straight", "out"))
    assert left == right
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"source", "straight", "out"}


def test_a_disk_that_is_full_costs_no_checkpoint(disk: None, case: Case, monkeypatch) -> None:
    straight, run_dir = case.straight(), case.folder / "run"
    with monkeypatch.context() as patch:
        in_forward(6, fill_disk, patch)
        error = one_error(case.train("run"))
    fill_disk(-1)
    assert "large" in error and str(run_dir) in error and steps_of(run_dir) == [4]
    assert case.train("run").code == 0
    assert_equal_runs(run_dir, straight)


# 8. A step that is not finite changes nothing; too many in a row end with code 3

Weights = dict[str, torch.Tensor]


def spoil(steps: Collection[int], kind: str, monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """Make loss or gradient of these steps not finite; -> the weights before each step so far."""
    forward, seen = GPT.forward, list[Weights]()

    def spoiled(self: GPT, *arguments: Any, **options: Any) -> Any:
        loss = forward(self, *arguments, **options)
        if not self.training:
            return loss
        seen.append({name: p.detach().clone() for name, p in self.named_parameters()})
        if len(seen) not in steps:
            return loss
        zero = self.embedding.weight - self.embedding.weight.detach()
        return loss * math.nan if kind == "loss" else loss + zero.abs().sqrt().sum()    # + 0, infinite slope

    monkeypatch.setattr(GPT, "forward", spoiled)
    return seen


@pytest.mark.parametrize(("kind", "optimizer"), [
    ("loss", "adamw"), ("gradient", "muon"), ("gradient", "of a fork")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_not_saved(kind: str, optimizer: str, case: Case,
                                                                    monkeypatch) -> None:
    run_dir = case.folder / "run"
    seen = spoil({5, 6}, kind, monkeypatch)
    if optimizer == "of a fork":        # one that does not read found_inf
        optimizer = "adamw"
        monkeypatch.setattr("runtime.optimizer.AdamW", lambda *groups, **keys: torch.optim.AdamW(
            *groups, **keys | {"fused": False}))
    ended = case.train("run", f"train.optimizer={optimizer}", "run.save_every=1", "run.keep=99")
    assert ended.code == 0 and steps_of(run_dir) == [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
    before, after, moved = seen[4], seen[6], seen[7]        # steps 5 and 6 were skipped, step 7 was not
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(torch.equal(before[name], moved[name]) for name in before)
    counts = [x for name, x in tensors(run_dir, 7).items() if name.endswith("/step")]
    assert counts and all(x == 5 for x in counts)
    said = {line["step"]: line for line in metrics(run_dir)}
    assert [said[step].get("n_bad") for step in (4, 5, 6, 7)] == [None, 1, 2, None]
    assert None in (said[5]["loss"], said[5]["grad_norm"])


def test_too_many_bad_steps_end_with_3_and_keep_the_good_checkpoints(case: Case, monkeypatch) -> None:
    spoil(range(5, 99), "loss", monkeypatch)
    ended = case.train("run", "train.max_bad_steps=4", "run.save_every=1", "run.keep=2")
    assert ended.code == 3 and ended.err.startswith("error: training diverged at step 8")
    assert ended.err.count("\n") == 1 and f"{case.folder / 'run'}/checkpoints/00000004" in ended.err
    assert steps_of(case.folder / "run") == [3, 4]
    assert [line["n_bad"] for line in metrics(case.folder / "run")[4:]] == [1, 2, 3, 4]     # the last one too
    assert all(x.isfinite().all() for step in (3, 4) for x in tensors(case.folder / "run", step).values())
    assert "lower train.lr" in ended.err


def test_a_model_without_a_finite_loss_is_not_blamed_on_its_rate(case: Case, monkeypatch) -> None:
    spoil(range(1, 99), "loss", monkeypatch)
    ended = case.train("run", "train.max_bad_steps=4")
    assert ended.code == 3 and "no step was finite: try pytest -k rope" in ended.err
