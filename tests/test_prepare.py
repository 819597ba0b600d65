"""Preparing: the corpus appears whole or not at all; odd text is told."""

import json
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from toys import words

from base.errors import UserError
from data.loader import Corpus
from data.prepare import default_out, prepare
from data.sources import SourceOptions


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_source(folder: Path) -> Path:
    """Texts, an empty one among them, and rows for a hash to pick."""
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_bytes(words(i, 30 * i))
    rows = [{"text": words(i, 20 * (i % 7)).decode()} for i in range(80)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_what_is_no_corpus_is_never_replaced(tmp_path: Path, monkeypatch) -> None:
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    prepare(str(source), out, "byte")
    before = contents(out)
    prepare(str(source), out, "byte")                                   # a corpus alone is replaced
    assert contents(out) == before
    (out / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="--out .*notes.md.* give another folder"):
        prepare(str(source), out, "byte")
    assert contents(out) == {**before, "notes.md": b"mine"}
    monkeypatch.chdir(source)
    assert default_out(".") == default_out("hf:.") == Path("data/source") and default_out("..").name != ".."


def test_a_corpus_is_whole_wherever_its_replacement_is_interrupted(tmp_path: Path, monkeypatch) -> None:
    source, out, remove = tmp_path / "a.txt", tmp_path / "corpus", shutil.rmtree
    source.write_bytes(words(1, 3000))
    old = prepare(str(source), out, "byte")

    def interrupted(folder: Path, **more) -> None:
        remove(folder, **more)
        if folder.name in (".corpus.old", "corpus"):
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    source.write_bytes(words(2, 3000))
    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), out, "byte", replace=True)
    assert json.loads((out / "meta.json").read_text()) == old


def test_a_corpus_of_another_text_tokenizer_or_option_stays(tmp_path: Path) -> None:
    """The tokenizer may have the same name: given, or learned."""
    for name, text in (("a", words(0, 900)), ("b", words(900, 1800))):
        (tmp_path / f"{name}.txt").write_bytes(text)
        prepare(str(tmp_path / f"{name}.txt"), tmp_path / name, "bpe:300")
    before = contents(tmp_path / "a")
    for source, tokenizer, options, different in (
            ("a", "b", {}, "tokenizer"), ("b", "bpe:300", {}, "source and tokenizer"),
            ("b", "a", {}, "source"), ("a", "a", {"limit_tokens": 100}, "options")):
        name = tokenizer if ":" in tokenizer else str(tmp_path / tokenizer)
        with pytest.raises(UserError, match=f"a corpus that differs in {different}, so .*--replace"):
            prepare(str(tmp_path / f"{source}.txt"), tmp_path / "a", name, SourceOptions(**options))
        assert contents(tmp_path / "a") == before
    prepare(str(tmp_path / "a.txt"), tmp_path / "a", "bpe:300")
    assert contents(tmp_path / "a") == before
    other = tmp_path / "elsewhere" / "a.txt"            # of the same name
    other.parent.mkdir()
    other.write_bytes(words(1, 900))
    with pytest.raises(UserError, match=r"differs in text, so .*--replace"):
        prepare(str(other), tmp_path / "a", str(tmp_path / "a"))
    assert contents(tmp_path / "a") == before
    prepare(str(tmp_path / "b.txt"), tmp_path / "a", "bpe:300", replace=True)
    assert contents(tmp_path / "a")["train.bin"] == contents(tmp_path / "b")["train.bin"]


def test_a_name_is_the_tokenizer_of_that_name_whatever_folders_are_here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(words(0, 900))
    prepare("a.txt", Path("byte"), "bpe:300")
    assert prepare("a.txt", Path("out"), "byte")["tokenizer"]["name"] == "byte"


def test_two_at_once_do_not_write_into_one_another(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    with FileLock(tmp_path / ".out.lock"), pytest.raises(UserError, match="another process is preparing it"):
        prepare(str(source), tmp_path / "out", "byte")
    with pytest.raises(UserError, match="no text for train"):
        prepare(str(tmp_path / ".out.lock"), tmp_path / "out", "byte")
    assert [*tmp_path.iterdir()] == [source]                            # no lock stays, if it fails either


@pytest.mark.parametrize(("text", "expected"), [
    (words(0, 900), ""), ("naïve café\n".encode("latin-1") * 40, "that are not UTF-8"),
    ("some text\n".encode("utf-16") * 40, "that are not UTF-8"), (b"some\0text\n" * 40, "have NUL bytes")])
def test_text_that_is_odd_is_told_in_a_line(text: bytes, expected: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    prepare(str(tmp_path / "a.txt"), tmp_path / "out", "byte")
    warning = capsys.readouterr().err
    assert warning.count("\n") == bool(expected) and expected in warning
    assert not expected or "a.txt, document 1" in warning
    ids = Corpus(tmp_path / "out").documents("train")[0][1:]
    assert text.startswith(bytes(ids.astype("u1")))                     # nothing is lost
