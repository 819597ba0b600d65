"""Preparing: the same corpus whatever the interruptions, which leave nothing that loads; odd text is told."""

import errno
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from conftest import words
from filelock import FileLock

from data import prepare as prepare_module
from data.loader import Corpus
from data.prepare import Options, Partial, default_out, prepare
from runtime.errors import UserError

SHARE = Options(val_share=0.3)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_source(folder: Path) -> Path:
    """Files of all kinds, long and empty documents, and some for a hash to pick."""
    folder.mkdir()
    (folder / "long.txt").write_bytes(words(1, 3000))
    for i in range(12):
        (folder / f"{i}.txt").write_bytes(words(i, 30 * i))
    rows = [{"text": words(i, 20 * (i % 7)).decode()} for i in range(80)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def often(monkeypatch) -> None:
    """Small groups of documents, and a state that is saved after each."""
    monkeypatch.setattr(prepare_module, "GROUP_BYTES", 500)
    monkeypatch.setattr(prepare_module, "SAVE_EVERY_S", 0.0)


def interrupted(monkeypatch, source: Path, out: Path, tokenizer: str, options: Options, n: int) -> None:
    """Prepare until n groups are saved; then half of a document is written, and the end comes."""
    save, saved = Partial.save, []

    def stop(self, end: tuple[int, int]) -> None:
        if len(saved) == n:
            self.files["train.bin"].write(b"half of a document")
            self.files["train.bin"].flush()
            raise KeyboardInterrupt
        saved.append(end)
        save(self, end)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Partial, "save", stop)
        prepare(str(source), out, tokenizer, options)


@pytest.mark.parametrize(("tokenizer", "options"), [
    ("byte", Options(val_share=0.3, limit_tokens=5500)), ("bpe:280", SHARE)])
def test_interrupted_anywhere_it_goes_on_to_the_same_corpus(tokenizer: str, options: Options, tmp_path: Path,
                                                           monkeypatch, often, capsys) -> None:
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "GROUP_BYTES", 2**24)
        prepare(str(source), tmp_path / "straight", tokenizer, options)
    for n in (0, 1, 2):                                                 # three times in a row
        interrupted(monkeypatch, source, out, tokenizer, options, n)
        assert "is kept, and the same command goes on" in capsys.readouterr().err
        for folder in (out, tmp_path / ".out.partial"):
            with pytest.raises(UserError, match="no prepared corpus there"):
                Corpus(folder)
    seen, encode = [], Partial.encode
    monkeypatch.setattr(Partial, "encode", lambda *a: seen.append(a) or encode(*a))
    prepare(str(source), out, tokenizer, options)
    found, expected = contents(out), contents(tmp_path / "straight")
    if options.limit_tokens:        # if a hash chooses, validation has what it chose until the limit
        assert all(found[name] == expected[name] for name in ("train.bin", "train.idx.npy"))
    else:
        assert found == expected and 0 < len(seen) < 90
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("change", ["source", "tokenizer", "options", "file", "cut", "progress.json"])
def test_what_another_command_or_source_left_is_not_used(change: str, tmp_path: Path, monkeypatch, capsys,
                                                        often) -> None:
    source, out, options = write_source(tmp_path / "source"), tmp_path / "out", SHARE
    interrupted(monkeypatch, source, out, "byte", options, 9)
    partial, tokenizer = tmp_path / ".out.partial", "byte"
    if change == "source":
        source = source.rename(tmp_path / "moved")
    elif change == "tokenizer":
        tokenizer = "bpe:270"
    elif change == "options":
        options = Options(val_share=0.4)
    elif change == "file":
        (source / "3.txt").write_bytes(b"new")
    else:
        (partial / ("train.bin" if change == "cut" else change)).write_text('{"plan": ')
    prepare(str(source), out, tokenizer, options)
    assert "starting again" in capsys.readouterr().out
    prepare(str(source), tmp_path / "straight", tokenizer, options)
    assert contents(out) == contents(tmp_path / "straight") and not partial.exists()


def test_what_is_no_corpus_is_never_replaced(tmp_path: Path, monkeypatch) -> None:
    """Not a file of the user's beside a corpus, nor one that comes while it is prepared."""
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    prepare(str(source), out, "byte")
    before = contents(out)
    prepare(str(source), out, "byte")                                   # a corpus alone is replaced
    assert contents(out) == before
    (out / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="--out .*notes.md.* give another folder"):
        prepare(str(source), out, "byte")
    (out / "notes.md").unlink()
    original = Partial.finish
    monkeypatch.setattr(Partial, "finish", lambda *a: (out / "late.md").write_text("mine") and original(*a))
    with pytest.raises(UserError, match="late.md"):
        prepare(str(source), out, "byte")
    assert contents(out) == {**before, "late.md": b"mine"}
    monkeypatch.chdir(source)
    assert default_out(".") == default_out("hf:.") == Path("data/source") and default_out("..").name != ".."


def test_two_at_once_do_not_write_into_one_another(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    with FileLock(tmp_path / ".out.lock"), pytest.raises(UserError, match="another process is preparing it"):
        prepare(str(source), tmp_path / "out", "byte")
    prepare(str(source), tmp_path / "out", "byte")


def test_a_full_disk_names_the_folder_and_the_same_command_goes_on(tmp_path: Path, monkeypatch,
                                                                   often) -> None:
    source, out, save = write_source(tmp_path / "source"), tmp_path / "out", Partial.save

    def full(self, end: tuple[int, int]) -> None:
        if end > (9, 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, end)

    with monkeypatch.context() as patch, pytest.raises(UserError, match=(
            r"\.out\.partial: No space left on device; .* the same command goes on")):
        patch.setattr(Partial, "save", full)
        prepare(str(source), out, "byte", SHARE)
    prepare(str(source), out, "byte", SHARE)
    prepare(str(source), tmp_path / "straight", "byte", SHARE)
    assert contents(out) == contents(tmp_path / "straight")


@pytest.mark.parametrize(("text", "expected"), [
    (words(0, 900), ""), ("naïve café\n".encode("latin-1") * 40, "is not UTF-8"),
    ("some text\n".encode("utf-16") * 40, "is not UTF-8"), (b"some\0text\n" * 40, "has NUL bytes")])
def test_text_that_is_odd_is_told_in_a_line(text: bytes, expected: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    for tokenizer in ("byte", "bpe:257"):
        prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer)
        told = capsys.readouterr().err
        assert told.count("\n") == bool(expected) and expected in told and ("a.txt" in told) == bool(expected)
        ids = Corpus(tmp_path / "out").documents("train")[0][1:]
        assert tokenizer != "byte" or text.startswith(bytes(ids.astype("u1")))      # lossless
        assert tokenizer == "byte" or "UTF-8" in expected or len(ids) == int(len(text) * 0.9)


def test_memory_holds_a_group_of_documents_whatever_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_module, "GROUP_BYTES", 200)
    (tmp_path / "a.jsonl").write_bytes(b"".join(b'{"text": "%090d"}\n' % i for i in range(500)))
    groups, write = [], Partial.write_group
    monkeypatch.setattr(Partial, "write_group", lambda *a: groups.append(len(a[1])) or write(*a))
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", "byte", Options(val_share=0.5))
    assert sum(groups) == 500 and max(groups) == 3


@pytest.mark.slow
def test_killed_at_any_moment_the_same_command_goes_on(tmp_path: Path, monkeypatch, often) -> None:
    """SIGKILL for real, of a process that is slowed down so that it can be hit."""
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    prepare(str(source), tmp_path / "straight", "byte", SHARE)
    save, generator = Partial.save, random.Random(0)
    monkeypatch.setattr(Partial, "save", lambda *a: (time.sleep(0.1), save(*a)))
    progress, saved = tmp_path / ".out.partial" / "progress.json", 0
    for _ in range(4):
        child = multiprocessing.get_context("fork").Process(target=prepare,
                                                            args=(str(source), out, "byte", SHARE))
        child.start()
        while not progress.exists() or progress.stat().st_mtime_ns == saved:
            time.sleep(0.002)
        time.sleep(generator.uniform(0.0, 0.15))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL and not out.exists()
        saved = progress.stat().st_mtime_ns
    prepare(str(source), out, "byte", SHARE)
    assert contents(out) == contents(tmp_path / "straight")
