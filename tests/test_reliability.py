"""What breaks costs no finished work: corpora, checkpoints, disks, numbers, signals, each really broken."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, lively, slow_except
from safetensors import SafetensorError
from test_security import everything, rehash_corpus
from test_train import assert_equal_runs, metrics, stop_after, weights

import eval as eval_command
import train as train_module
from config import Config
from data.loader import Corpus
from evaluation import protocols as eval_module
from model import GPT
from runtime import checkpoint, files
from runtime.command import run_command
from runtime.errors import UserError
from runtime.optimizer import make_optimizer
from train import train


def one_error(main: Callable[[], Any], capsys: pytest.CaptureFixture) -> str:
    """The one line with which a command ends, and exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run_command(main)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


# -----------------------------------------------------------------------------------------------------------
# Corpora


def change_meta(**keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        for key, value in keys.items():
            place, *names = [meta, *key.split("__")]
            for name in names[:-1]:
                place = place[name]
            place[names[-1]] = value
        (folder / "meta.json").write_text(json.dumps(meta))
    return change


def change_ids(function: Callable[[np.ndarray], np.ndarray], split: str = "train") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / f"{split}.bin"
        path.write_bytes(function(np.fromfile(path, dtype=np.uint16)).tobytes())
    return change


def change_offsets(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "val.idx.npy"
        np.save(path, function(np.load(path, allow_pickle=False)))
    return change


def with_one(array: np.ndarray, place: int, value: int) -> np.ndarray:
    array[place] = value
    return array


BAD_CORPORA = {     # fault -> what makes it, and what the message says; checksums are made true again
    "an id beyond the vocabulary": (change_ids(lambda x: with_one(x, -1, 257)), "train.bin holds id 257"),
    "in the other split": (change_ids(lambda x: with_one(x, 0, 999), "val"), "val.bin holds id 999"),
    "ids of another type": (change_ids(lambda x: x.astype(np.uint32)), "train.bin has"),
    "the type in meta.json": (change_meta(dtype="uint32"), "train.bin has"),
    "a type that is none": (change_meta(dtype="object"), "dtype"),
    "an odd shard": (lambda folder: (folder / "train.bin").open("ab").write(b"x") and None, "train.bin has"),
    "an empty shard": (lambda folder: (folder / "train.bin").write_bytes(b"") and None, "train.bin has 0"),
    "a shard cut between ids": (change_ids(lambda x: x[:-1]), "train.bin has"),
    "a missing shard": (lambda folder: (folder / "val.bin").unlink(), "val.bin is missing"),
    "missing offsets": (lambda folder: (folder / "val.idx.npy").unlink(), "val.idx.npy is missing"),
    "offsets that fall": (change_offsets(lambda x: with_one(x, 1, int(x[2]) + 1)), "growing bounds"),
    "an empty document": (change_offsets(lambda x: with_one(x, 1, int(x[0]))), "growing bounds"),
    "offsets beyond the end": (change_offsets(lambda x: with_one(x, -1, int(x[-1]) + 1)), "growing bounds"),
    "offsets of 2^63": (change_offsets(lambda x: with_one(x, -1, 2**63)), "growing bounds"),
    "a first offset above 0": (change_offsets(lambda x: with_one(x, 0, 1)), "growing bounds"),
    "an offset too few": (change_offsets(lambda x: np.delete(x, 1)), "uint64, as numpy.save"),
    "no offset": (change_offsets(lambda x: x[:0]), "uint64, as numpy.save"),
    "signed offsets": (change_offsets(lambda x: x.astype(np.int64)), "uint64, as numpy.save"),
    "a table of offsets": (change_offsets(lambda x: x[None]), "uint64, as numpy.save"),
    "offsets that are text": (lambda folder: (folder / "val.idx.npy").write_text("0, 9") and None,
                              "uint64, as numpy.save"),
    "offsets that claim 2^50": (lambda folder: (folder / "val.idx.npy").write_bytes(
        (folder / "val.idx.npy").read_bytes().replace(b"(3,)", b"(1125899906842624,)")
        .replace(b" " * 17, b"", 1)) and None, "uint64, as numpy.save"),
    "another count of tokens": (change_meta(splits__val__tokens=7), "val.bin has"),
    "no tokens": (change_meta(splits__val__tokens=0), "splits.val.tokens"),
    "a negative count": (change_meta(splits__val__documents=-1), "splits.val.documents"),
    "a split missing": (change_meta(splits={}), "splits"),
    "a tokenizer of other ids": (change_meta(tokenizer__sha256="0" * 64), "another byte tokenizer"),
    "an unknown tokenizer": (change_meta(tokenizer__name="../../etc/passwd"), "unknown; choose from"),
    "another vocabulary": (change_meta(vocab_size=300), "another byte tokenizer"),
    "another separator": (change_meta(eot=0), "another byte tokenizer"),
    "a vocabulary that is a word": (change_meta(vocab_size="many"), "vocab_size"),
    "a later format": (change_meta(format_version=99), "format version 99"),
}


@pytest.mark.parametrize("fault", BAD_CORPORA)
def test_a_bad_corpus_is_one_line_before_step_0(fault: str, tiny, corpus_dir: Path, tmp_path: Path,
                                                capsys) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(corpus_dir, folder)
    change, expected = BAD_CORPORA[fault]
    change(folder)
    if "missing" not in fault and fault != "a split missing":
        rehash_corpus(folder)
    config = tiny("rope", f"data.dir={folder}", "train.steps=2", "model.vocab_size=400")
    error = one_error(lambda: train(config, []), capsys)
    assert expected in error and ("prepare" in error or "choose" in error), error
    assert not (tmp_path / "run").exists()


def test_the_table_of_bad_corpora_starts_from_a_good_one(tiny, corpus_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(corpus_dir, folder)
    rehash_corpus(folder)
    assert len(np.load(folder / "val.idx.npy", allow_pickle=False)) == 3    # what "claim 2^50" edits
    assert train(tiny("rope", f"data.dir={folder}", "train.steps=2"), []) == 0


def test_a_corpus_that_goes_in_mid_run_is_missed_by_the_next_start_alone(tiny, corpus_dir: Path,
                                                                         tmp_path: Path, capsys) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(corpus_dir, folder)
    config = tiny("rope", f"data.dir={folder}")

    class Remove(list):
        def __bool__(self) -> bool:
            shutil.rmtree(folder, ignore_errors=True)
            return False

    assert train(config, Remove()) == 0                     # mapped files live until they are let go
    (tmp_path / "run" / "summary.json").unlink()
    assert "no prepared corpus there" in one_error(lambda: train(config, []), capsys)


# -----------------------------------------------------------------------------------------------------------
# Checkpoints


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "0 bytes": lambda content: b"", "1 byte": lambda content: content[:1],
    "half": lambda content: content[:len(content) // 2], "n - 1 bytes": lambda content: content[:-1],
    "a bit": lambda content: flipped(content, len(content) // 3),
    "a digit of the loss, or a bit": lambda content: flipped(content, content.find(b'"loss": ') + 10),
    "the first byte": lambda content: flipped(content, 0),
    "the last byte": lambda content: flipped(content, len(content) - 1)}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory, corpus_dir: Path) -> tuple[Path, Config]:
    from conftest import TINY

    from config import load_config

    folder = tmp_path_factory.mktemp("two")
    (folder / "c.toml").write_text(f'[data]\ndir = "{corpus_dir}"\n[position]\nencoding = "rope"\n')
    config = load_config(folder / "c.toml", [*TINY, "model.vocab_size=257", f"run.dir={folder / 'run'}"])
    assert train(config, []) == 0
    return folder / "run", config


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_the_older_checkpoint_used(name: str, damage: str, two_checkpoints,
                                                               tmp_path: Path, capsys) -> None:
    run_dir, config = tmp_path / "run", two_checkpoints[1]
    shutil.copytree(two_checkpoints[0], run_dir)
    path = run_dir / "checkpoints" / "00000012" / name
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    before, model = everything(run_dir), lively(config)
    state = checkpoint.load_newest(run_dir, model, make_optimizer(model, config))
    assert state["step"] == 8
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in weights(run_dir, 8).items()
               if key in model.state_dict())
    out = capsys.readouterr().out
    assert f"checkpoint {path.parent} is damaged" in out and out.count("\n") == 1
    older = run_dir / "checkpoints" / "00000008" / name
    older.write_bytes(DAMAGE[damage](older.read_bytes()))
    before |= {older: older.read_bytes()}
    with pytest.raises(UserError, match=r"every checkpoint is damaged \(00000012, 00000008\)"):
        checkpoint.load_newest(run_dir, model)
    assert everything(run_dir) == before


def test_what_a_kill_leaves_behind_is_cleared(tiny, tmp_path: Path) -> None:
    """In making the folder, in a save, in deleting an old checkpoint, in a line, after a power cut."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in (".config.toml.tmp", "corpus.json", ".corpus.json.tmp"):
        (run_dir / name).write_text("half writ")
    config = tiny("rope", "run.keep=2")
    assert train(config, []) == 0
    shutil.copytree(run_dir, tmp_path / "straight")
    (run_dir / "summary.json").unlink()
    (run_dir / ".summary.json.tmp").write_text("{")
    shutil.rmtree(run_dir / "checkpoints" / "00000012")
    for name in (".tmp-00000011", ".tmp-00000004", "00000004"):
        (run_dir / "checkpoints" / name).mkdir()
        (run_dir / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    (run_dir / "checkpoints" / "00000012").mkdir()          # renamed, but its files were lost
    torn = b'\n{"step": 9, "lo\n[3]\n{"step": 1e999}\n\xff\n{"step": 1'
    (run_dir / "metrics.jsonl").open("ab").write(bytes(40) + torn)
    assert train(config, []) == 0
    assert_equal_runs(run_dir, tmp_path / "straight", 12)
    assert set(everything(run_dir)) == {run_dir / path.relative_to(tmp_path / "straight")
                                        for path in everything(tmp_path / "straight")}


def test_what_a_kill_leaves_after_the_last_save_is_cleared_too(tiny, tmp_path: Path) -> None:
    assert train(tiny(), []) == 0
    before = set(everything(tmp_path / "run"))
    (tmp_path / "run" / "summary.json").unlink()
    for name in (".tmp-00000004", "00000004"):              # it was deleting this one
        (tmp_path / "run" / "checkpoints" / name).mkdir()
        (tmp_path / "run" / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    assert train(tiny(), []) == 0
    assert set(everything(tmp_path / "run")) == before


# -----------------------------------------------------------------------------------------------------------
# Disks


def failing_at(n: int, function: Callable, number: int, in_rust: bool = False) -> Callable:
    """A function whose n-th call fails as the system would."""
    calls = iter(range(1, 10**6))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) != n:
            return function(*arguments, **options)
        if in_rust:
            raise SafetensorError(f"Error while serializing: I/O error: x (os error {number})")
        raise OSError(number, os.strerror(number))
    return call


@pytest.mark.parametrize(("place", "n"), slow_except(
    [*(("save_file", n) for n in (3, 4)), *(("flush", n) for n in (6, 7, 8, 9, 10)), ("state.json", 2),
     ("metrics.jsonl", 6), ("summary.json", 1)], ("save_file", 3), ("metrics.jsonl", 6)))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_is_one_line_and_costs_nothing(place: str, n: int, number: int, tiny,
                                                                tmp_path: Path, monkeypatch, capsys) -> None:
    """In the second save, at each of its writes; in a line of the log; at the end. Then there is room."""
    assert train(tiny("rope", f"run.dir={tmp_path / 'straight'}"), []) == 0
    config, run_dir = tiny(), tmp_path / "run"
    with monkeypatch.context() as patch:
        if place in ("save_file", "flush"):
            real = getattr(checkpoint, place)
            patch.setattr(checkpoint, place, failing_at(n, real, number, in_rust=place == "save_file"))
        else:
            fails = failing_at(n, lambda: None, number)
            real_open = Path.open

            def open_or_fail(self: Path, *arguments: Any, **options: Any) -> Any:
                if place in self.name and set(arguments or options.values()) & {"w", "a"}:
                    fails()
                return real_open(self, *arguments, **options)
            patch.setattr(Path, "open", open_or_fail)
        error = one_error(lambda: train(config, []), capsys)
    assert os.strerror(number).lower() in error and str(run_dir) in error
    remedies = {errno.ENOSPC: "free some space and run the same command again", errno.EROFS: "writable"}
    assert remedies[number] in error
    model = lively(config)
    assert checkpoint.load_newest(run_dir, model)["step"] >= 4
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))
    assert train(config, []) == 0
    assert_equal_runs(run_dir, tmp_path / "straight", 12)


@pytest.mark.parametrize("name", ["corpus.json", "config.toml"])
def test_a_disk_that_is_full_from_the_start(name: str, tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    config = tiny()
    with monkeypatch.context() as patch:
        fsync = os.fsync
        patch.setattr(files.os, "fsync",
                      failing_at(2 + 2 * (name == "config.toml"), fsync, errno.ENOSPC))
        assert f".{name}.tmp: no space left" in one_error(lambda: train(config, []), capsys)
    assert train(config, []) == 0


def test_a_folder_that_cannot_be_made(tiny, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    config = tiny("rope", f"run.dir={tmp_path / 'file' / 'run'}")
    assert "not a directory" in one_error(lambda: train(config, []), capsys)


# -----------------------------------------------------------------------------------------------------------
# Numbers that are none


def spoiled(steps: set[int], kind: str) -> Callable:
    """GPT.forward whose loss or gradient is not finite in the training of these steps, from 1."""
    forward, seen = GPT.forward, iter(range(1, 10**6))

    def call(self: GPT, x: Any, y: Any = None, *arguments: Any, **options: Any) -> Any:
        loss = forward(self, x, y, *arguments, **options)
        if not self.training or next(seen) not in steps:
            return loss
        if kind == "loss":
            return loss * math.nan
        if kind == "infinite loss":
            return loss * math.inf
        zero = self.embedding.weight - self.embedding.weight.detach()
        return loss + zero.abs().sqrt().sum()               # adds 0, with an infinite slope
    return call


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("kind", slow_except(["loss", "infinite loss", "gradient"], "gradient"))
def test_an_update_that_is_not_finite_is_not_applied(kind: str, is_ahead: bool, optimizer: str, tiny,
                                                     tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(train_module, "skips_on_device", lambda *_: is_ahead)    # the optimizer skips it
    config = tiny("rope", f"train.optimizer={optimizer}", "run.save_every=1", "run.keep=99",
                  "run.log_every=4", "train.max_bad_steps=3")
    monkeypatch.setattr(GPT, "forward", spoiled({5, 6, 9}, kind))
    assert train(config, []) == 0
    before, after = weights(tmp_path / "run", 4), weights(tmp_path / "run", 6)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    moved = weights(tmp_path / "run", 7)
    assert not any(torch.equal(before[key], moved[key]) for key in before)
    lines = {line["step"]: line for line in metrics(tmp_path / "run")}
    assert sorted(lines) == [4, 5, 6, 8, 9, 12]             # bad ones are always told
    assert [lines[step].get("n_bad") for step in (4, 5, 6, 8, 9, 12)] == [None, 1, 2, None, 1, None]
    assert None in (lines[5]["loss"], lines[5]["grad_norm"])
    corpus = Corpus(config.data.dir)
    assert lines[5]["windows"] == [f"{corpus.folder}:{start}" for _, start in corpus.places(32, 4, 0, 4)]
    inputs, _ = corpus.batch(32, 4, 0, 4)
    starts = [int(name.rpartition(":")[2]) for name in lines[5]["windows"]]
    assert all((corpus.tokens["train"][start:start + 32] == row.numpy()).all()
               for start, row in zip(starts, inputs, strict=True))
    assert "NOT APPLIED, 2 in a row" in capsys.readouterr().out
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_too_many_bad_steps_in_a_row_end_training_with_3(kind: str, is_ahead: bool, tiny, tmp_path: Path,
                                                         monkeypatch, capsys) -> None:
    monkeypatch.setattr(train_module, "skips_on_device", lambda *_: is_ahead)
    config = tiny("rope", "train.max_bad_steps=3", f"run.log_every={9 if is_ahead else 1}")
    monkeypatch.setattr(GPT, "forward", spoiled({2, 3, 6, 7, 8}, kind))     # 2 in a row do not
    assert train(config, []) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: training diverged at step 8: loss ")
    newest = tmp_path / "run" / "checkpoints" / "00000004"
    for expected in ("gradient norm nan", "lr 0.000", f"last good checkpoint: {newest}", "3 steps in a row",
                     f"windows {config.data.dir}:", "train.max_bad_steps", "lower train.lr"):
        assert expected in error
    assert checkpoint.newest(tmp_path / "run") == newest
    assert all(value.isfinite().all() for value in weights(tmp_path / "run", 4).values())


def test_bad_steps_are_counted_through_a_resume(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    config = tiny("rope", "train.max_bad_steps=4", "run.save_every=100")
    monkeypatch.setattr(GPT, "forward", spoiled(set(range(5, 99)), "loss"))
    assert train(config, stop_after(2 * 6 + 1)) == 130      # two looks a step: after step 6
    assert checkpoint.newest(tmp_path / "run").name == "00000006"
    monkeypatch.setattr(GPT, "forward", spoiled(set(range(1, 99)), "loss"))
    assert train(config, []) == 3
    assert "diverged at step 8" in capsys.readouterr().err


def test_a_run_whose_last_step_was_bad_still_ends(tiny, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(GPT, "forward", spoiled({12}, "loss"))
    assert train(tiny(), []) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["loss"] is None and math.isfinite(summary["val_loss"])
    assert train(tiny(), []) == 0


# -----------------------------------------------------------------------------------------------------------
# Signals


def signalled_in(phase: str, stop: list[int], monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the signal come in the middle of a phase of training, once."""
    n_calls, forward, flush = {"n": 0}, GPT.forward, checkpoint.flush

    def once(is_here: bool) -> None:
        n_calls["n"] += is_here
        if is_here and n_calls["n"] == {"step 1": 1, "evaluation": 2, "accumulation": 7, "saving": 3}[phase]:
            stop.append(number)

    def forward_and_signal(self: GPT, *arguments: Any, **options: Any) -> Any:
        once(phase != "saving" and (phase == "evaluation") != self.training)
        return forward(self, *arguments, **options)

    def flush_and_signal(path: Path) -> None:
        once(phase == "saving")
        flush(path)

    monkeypatch.setattr(GPT, "forward", forward_and_signal)
    monkeypatch.setattr(checkpoint, "flush", flush_and_signal)


@pytest.mark.parametrize(("phase", "saved"), slow_except(
    [("step 1", None), ("accumulation", 1), ("evaluation", 6), ("saving", 4)], ("accumulation", 1)))
def test_a_signal_in_any_phase_saves_and_the_same_command_goes_on(phase: str, saved: int | None, tiny,
                                                                  tmp_path: Path, monkeypatch) -> None:
    options = ("train.accumulate=4", "model.dropout=0.2", "train.batch_size=8", "train.val_windows=16")
    assert train(tiny("rope", *options, f"run.dir={tmp_path / 'straight'}"), []) == 0
    stop: list[int] = []
    with monkeypatch.context() as patch:
        signalled_in(phase, stop, patch, signal.SIGUSR1)
        assert train(tiny("rope", *options), stop) == 138
    newest = checkpoint.newest(tmp_path / "run")
    assert (int(newest.name) if newest else None) == saved
    logged = [line["step"] for line in metrics(tmp_path / "run")] if saved else []
    assert logged == list(range(1, (saved or 0) + (phase != "evaluation")))     # its line is to come
    assert train(tiny("rope", *options), []) == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "straight", 12)


def raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_kill_after_a_resume_that_wrote_a_line_ends_bit_equal(tiny, tmp_path: Path, monkeypatch) -> None:
    """Its line is written again by the next start, and stands once."""
    options = ("run.save_every=100", "train.val_windows=16")
    assert train(tiny("rope", *options, f"run.dir={tmp_path / 'straight'}"), []) == 0
    stop: list[int] = []
    with monkeypatch.context() as patch:
        signalled_in("evaluation", stop, patch, signal.SIGTERM)
        assert train(tiny("rope", *options), stop) == 143
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_module, "micro_batches", raise_interrupt)
        train(tiny("rope", *options), [])
    assert [line["step"] for line in metrics(tmp_path / "run")][-1] == 6
    assert train(tiny("rope", *options), []) == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "straight", 12)


@pytest.mark.slow
def test_a_fine_tuning_resumes_bit_for_bit(tiny, tmp_path: Path) -> None:
    """With dropout and accumulation, stopped twice in a row; test_train does it over an epoch's end."""
    assert train(tiny("rope", f"run.dir={tmp_path / 'short'}"), []) == 0
    options = (f"train.init_from={tmp_path / 'short'}", "train.seq_len=128", "train.batch_size=8",
               "train.accumulate=4", "model.dropout=0.2", "train.steps=10", "run.save_every=100")
    config = tiny("rope", *options)
    assert train(tiny("rope", *options, f"run.dir={tmp_path / 'straight'}"), []) == 0
    assert [train(config, stop_after(n)) for n in (18, 8)] == [130, 130]
    assert train(config, []) == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "straight", 10)


@pytest.mark.parametrize("script", ["train.py", *(pytest.param(script, marks=pytest.mark.slow) for script in (
    "eval.py", "sample.py", "compare.py", "sweep.py", "data/prepare.py"))])
def test_ctrl_c_while_a_command_starts_shows_no_traceback(script: str) -> None:
    process = subprocess.Popen([sys.executable, str(ROOT / script), "none"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    time.sleep(0.25)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    if "Fatal Python error: init" in err:
        pytest.skip("the interpreter itself was still starting")
    assert "Traceback" not in err and out == "" and err.count("\n") <= 1
    assert process.returncode in (-signal.SIGINT, 130, 2)


def test_ctrl_c_in_a_command_is_one_line_and_130(two_checkpoints, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py", str(two_checkpoints[0]), "--lengths", "32"])
    monkeypatch.setattr(eval_module, "token_losses", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        run_command(eval_command.main)
    signal.signal(signal.SIGINT, handler)
    assert caught.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped by SIGINT"
