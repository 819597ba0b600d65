"""Preparing: the same corpus whatever the workers and interruptions, which leave nothing that loads."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import slow_except, words

from data import journal as journal_module
from data import prepare as prepare_module
from data.journal import Journal, Position
from data.loader import Corpus
from data.prepare import Options, default_out, prepare
from data.sources import JsonLines
from runtime.command import run_command
from runtime.errors import UserError


class Killed(BaseException):
    """Stands for the end of the process."""


def contents(folder: Path) -> dict[str, bytes]:
    """All files but verified.json, which holds times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "verified.json"}


def write_source(folder: Path) -> Path:
    """Files of all kinds, with documents longer than a piece, empty ones, and some for a hash to pick."""
    folder.mkdir()
    (folder / "long.txt").write_bytes(words(1, 3000))
    for i in range(12):
        (folder / f"{i}.txt").write_bytes(words(i, 30 * i))
    rows = [{"text": words(i, 20 * (i % 7)).decode()} for i in range(80)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def often(monkeypatch) -> None:
    """Small pieces, and a journal that is written after each chunk."""
    monkeypatch.setattr("data.pieces.MAX_PIECE", 200)
    monkeypatch.setattr(journal_module, "SAVE_EVERY_S", 0.0)


def interrupted(monkeypatch, source: Path, out: Path, tokenizer: str, options: Options, n_chunks: int,
                is_half: bool) -> None:
    """Prepare until n_chunks are in the journal; then one is written, or half of it, and the end comes."""
    save, saved = Journal.save, []

    def stop(self, position: Position, at_once: bool = False) -> None:
        if len(saved) == n_chunks + 1:                                  # the first is that of the start
            if is_half:
                self.splits["train"].tokens.file.write(b"half of a chunk")
                self.splits["train"].tokens.file.flush()
            raise Killed
        saved.append(position)
        save(self, position, at_once)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Journal, "save", stop)
        prepare(str(source), out, tokenizer, options, workers=2)


@pytest.mark.parametrize(("tokenizer", "options"), [
    ("byte", Options(val_share=0.3, limit_tokens=5500)),
    pytest.param("byte", Options(val_share=0.3), marks=pytest.mark.slow),
    pytest.param("bpe:280", Options(val_share=0.3), marks=pytest.mark.slow)])
def test_interrupted_anywhere_it_goes_on_to_the_same_corpus(tokenizer: str, options: Options, tmp_path: Path,
                                                           monkeypatch, often) -> None:
    source, out = write_source(tmp_path / "source"), tmp_path / "corpora" / "out"
    prepare(str(source), out, tokenizer, options, workers=1)
    expected = contents(out)
    n_documents = Corpus(out).meta["splits"]["train"]["documents"]
    for n_chunks in (0, 2, 11):
        for path in out.iterdir():
            path.unlink()
        out.rmdir()
        for more in (0, 1, 3):                                          # three times in a row
            interrupted(monkeypatch, source, out, tokenizer, options, n_chunks * (not more) + more, more != 1)
            assert not out.exists()
            with pytest.raises(UserError, match="no prepared corpus"):
                Corpus(out.parent / ".out.partial" / "corpus")
        done = json.loads((out.parent / ".out.partial" / "progress.json").read_text())
        assert sum(about["bytes"] for about in done["splits"].values()) > 0
        prepare(str(source), out, tokenizer, options, workers=3)
        assert contents(out) == expected and os.listdir(out.parent) == ["out"]
    assert n_documents >= 20


def test_going_on_reads_and_encodes_only_what_is_missing(tmp_path: Path, monkeypatch, often) -> None:
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    encode, seen = prepare_module.encode, []

    def counted(chunk, *arguments):
        seen.append(sum(len(piece.text) for piece in chunk))
        return encode(chunk, *arguments)

    monkeypatch.setattr(prepare_module, "encode", counted)
    meta = prepare(str(source), out, "byte", Options(val_share=0.3), workers=1)
    total = sum(about["bytes"] for about in meta["splits"].values())
    assert sum(seen) == total
    interrupted(monkeypatch, source, out, "byte", Options(val_share=0.3), 30, False)
    done = json.loads((tmp_path / ".out.partial" / "progress.json").read_text())
    seen.clear()
    prepare(str(source), out, "byte", Options(val_share=0.3), workers=1)
    assert 0 < sum(seen) == total - sum(about["bytes"] for about in done["splits"].values()) < total / 2


@pytest.mark.parametrize("change", slow_except(
    ["source", "tokenizer", "options", "file", "flipped", "cut", "journal", "edited"], "source", "edited"))
def test_what_another_command_or_source_left_is_not_used(change: str, tmp_path: Path, monkeypatch, capsys,
                                                        often) -> None:
    source, out, options = write_source(tmp_path / "source"), tmp_path / "out", Options(val_share=0.3)
    interrupted(monkeypatch, source, out, "byte", options, 9, False)
    partial, tokenizer = tmp_path / ".out.partial", "byte"
    if change == "source":
        source = source.rename(tmp_path / "moved")
    elif change == "tokenizer":
        tokenizer = "bpe:270"
    elif change == "options":
        options = Options(val_share=0.4)
    elif change == "file":
        (source / "3.txt").write_bytes(b"new")
    elif change == "journal":
        (partial / "progress.json").write_text('{"plan": ')
    elif change == "edited":
        journal = json.loads((partial / "progress.json").read_text())
        (partial / "progress.json").write_text(json.dumps({**journal, "position": [-1, 0, 0]}))
    else:
        content = bytearray((partial / "corpus" / "train.bin").read_bytes())
        content[100] ^= 1
        (partial / "corpus" / "train.bin").write_bytes(content if change == "flipped" else content[:50])
    prepare(str(source), out, tokenizer, options)
    assert "starting again" in capsys.readouterr().out
    before = contents(out)
    prepare(str(source), out, tokenizer, options)
    assert contents(out) == before and not partial.exists()


def test_an_older_corpus_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch, often) -> None:
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    prepare(str(source), out, "byte")
    before = contents(out)
    (source / "more.txt").write_bytes(b"new text")
    interrupted(monkeypatch, source, out, "byte", Options(), 5, True)
    assert contents(out) == before and Corpus(out)
    rename = Path.rename

    def stop_between(self, target):                                     # the older is away
        if Path(target) == out:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", stop_between)
        prepare(str(source), out, "byte")
    assert contents(tmp_path / ".out.partial" / "old") == before and not out.exists()
    prepare(str(source), out, "byte")
    assert contents(out) != before and sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_what_is_no_corpus_is_never_replaced(tmp_path: Path, monkeypatch) -> None:
    """Not a file of the user's beside a corpus, be it the source, nor one that comes while it is prepared."""
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    prepare(str(source), out, "byte")
    prepare(str(source), out, "byte")                                   # a corpus alone is replaced
    for place in (out / "notes.md", out / "text.txt"):
        place.write_text("mine " * 50)
        before = contents(out)
        with pytest.raises(UserError, match=f"--out .*{place.name}.* give another folder"):
            prepare(str(place if place.suffix == ".txt" else source), out, "byte")
        assert contents(out) == before
        place.unlink()
    original = prepare_module.encode_all

    def late(*arguments) -> None:
        original(*arguments)
        (out / "late.md").write_text("mine")

    monkeypatch.setattr(prepare_module, "encode_all", late)
    with pytest.raises(UserError, match="late.md"):
        prepare(str(source), out, "byte")
    assert (out / "late.md").read_text() == "mine"
    monkeypatch.chdir(source)
    assert default_out(".") == default_out("hf:.") == Path("data/source") and default_out("..").name != ".."


def test_two_at_once_do_not_write_into_one_another(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    with Journal(tmp_path / "out", {}), pytest.raises(UserError, match="another process is preparing it"):
        prepare(str(source), tmp_path / "out", "byte")
    prepare(str(source), tmp_path / "out", "byte")


def test_memory_holds_a_few_pieces_whatever_the_file(tmp_path: Path, monkeypatch) -> None:
    """What has been read ahead of what is written stays bounded."""
    (tmp_path / "a.jsonl").write_bytes(b"".join(b'{"text": "%090d"}\n' % i for i in range(3000)))
    monkeypatch.setattr("data.pieces.MAX_PIECE", 400)
    ahead, read = [], JsonLines.documents

    def counted(self):
        for document in read(self):
            self.n_read = getattr(self, "n_read", 0) + 1
            yield document

    show = prepare_module.Progress.show

    def behind(self, chunk):
        ahead.append(self.source.shards[0].n_read - chunk[-1].end.document)
        show(self, chunk)

    monkeypatch.setattr(JsonLines, "documents", counted)
    monkeypatch.setattr(prepare_module.Progress, "show", behind)
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", "byte", Options(val_share=0.5), workers=2)
    assert len(ahead) > 500 and max(ahead) <= 5 * (2 + 4)               # chunks of five lines


@pytest.mark.slow
def test_killed_at_any_moment_the_same_command_goes_on(tmp_path: Path, monkeypatch, often) -> None:
    """SIGKILL for real, of a process that is slowed down so that it can be hit."""
    source, out, options = write_source(tmp_path / "source"), tmp_path / "out", Options(val_share=0.3)
    prepare(str(source), tmp_path / "straight", "byte", options)
    save, generator = Journal.save, random.Random(0)
    monkeypatch.setattr(Journal, "save", lambda *a, **k: (time.sleep(0.01), save(*a, **k)))
    progress, saved = tmp_path / ".out.partial" / "progress.json", 0
    for _ in range(4):
        child = multiprocessing.get_context("fork").Process(target=prepare,
                                                            args=(str(source), out, "byte", options))
        child.start()
        while not progress.exists() or progress.stat().st_mtime_ns == saved:
            time.sleep(0.002)
        time.sleep(generator.uniform(0.0, 0.15))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL and not out.exists()
        saved = progress.stat().st_mtime_ns
    assert json.loads(progress.read_text())["position"] > [0, 0, 0]
    prepare(str(source), out, "byte", options)
    assert contents(out) == contents(tmp_path / "straight") and not progress.parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_a_line(number: int, tmp_path: Path, monkeypatch, capsys, often) -> None:
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(source), "--out", str(out), "--val-share", "0.3"])
    write, written = prepare_module.write, []

    def signalled(*arguments) -> None:
        written.append(arguments)
        if len(written) == 5:
            os.kill(os.getpid(), number)
        write(*arguments)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
            patch.setattr(prepare_module, "write", signalled)
            run_command(prepare_module.main)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert caught.value.code == 128 + number
    printed = capsys.readouterr().err
    assert "the same command resumes from there" in printed and "Traceback" not in printed
    prepare(str(source), tmp_path / "straight", "byte", Options(val_share=0.3))
    prepare_module.main()
    assert contents(out) == contents(tmp_path / "straight") and not (tmp_path / ".out.partial").exists()
