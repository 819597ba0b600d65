"""Corpora: what goes in comes out, whole or not at all; batches are functions of (seed, step)."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import needs, words
from hypothesis import given, settings
from hypothesis import strategies as st
from test_security import rehash_corpus

from data import integrity
from data import prepare as prepare_module
from data.loader import Corpus
from data.prepare import open_source, prepare
from data.sources import Part, why_left_out
from data.tokenizer import ByteTokenizer, byte_lengths, decode, load_tokenizer
from runtime.errors import UserError


def write_texts(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return folder


def documents_of(corpus: Corpus, split: str) -> list[bytes]:
    tokenizer, offsets = ByteTokenizer(), corpus.offsets[split]
    return [b"".join(map(tokenizer.token_bytes, corpus.tokens[split][a:b].tolist()))
            for a, b in zip(offsets, offsets[1:], strict=False)]


def parts_of(source: Path | str) -> dict[str, list[Part]]:
    """Split -> the texts of a source that is made of .txt files."""
    shards = open_source(str(source), Path("out")).shards
    return {split: [shard.part for shard in shards if shard.split == split] for split in ("train", "val")}


def test_every_byte_of_every_document_comes_back(tmp_path: Path) -> None:
    texts = {f"{i}.txt": words(i, 50 + i) for i in range(30)}
    texts |= {"deep/er/b.txt": bytes(range(256)), "empty.txt": b""}
    meta = prepare(str(write_texts(tmp_path / "source", texts)), tmp_path / "out", "byte")
    corpus = Corpus(tmp_path / "out")
    found = documents_of(corpus, "train") + documents_of(corpus, "val")
    assert sorted(found) == sorted(text for text in texts.values() if text)
    assert meta["splits"]["train"]["bytes"] + meta["splits"]["val"]["bytes"] == sum(map(len, texts.values()))
    for split in ("train", "val"):
        starts = corpus.offsets[split][:-1]
        assert (corpus.tokens[split][starts] == corpus.meta["eot"]).all()  # each opens with the separator
        assert (corpus.tokens[split] == corpus.meta["eot"]).sum() == len(starts)


def test_the_split_is_a_hash_of_the_path_alone(tmp_path: Path) -> None:
    names = {f"{i:03}.txt": b"x" for i in range(300)}
    small = parts_of(write_texts(tmp_path / "a", names))
    more = {f"more/{i}.txt": b"y" for i in range(99)}
    large = parts_of(write_texts(tmp_path / "b", {**names, **more}))
    in_val = {d.path.name for d in small["val"]}
    assert in_val == {d.path.name for d in large["val"]
                      if d.path.parent.name == "b"}                     # additions move nothing
    assert 10 <= len(in_val) <= 60
    assert {"007.txt", "024.txt"} <= in_val and "000.txt" not in in_val  # the same on every machine


def test_train_and_val_folders_are_the_splits(tmp_path: Path) -> None:
    texts = {"train/a.txt": b"a", "train/b.txt": b"b", "val/c.txt": b"c"}
    found = parts_of(write_texts(tmp_path, texts))
    assert [d.path.name for d in found["train"]] == ["a.txt", "b.txt"]
    assert [d.path.name for d in found["val"]] == ["c.txt"]


def test_a_single_text_is_cut_between_characters(tmp_path: Path) -> None:
    text = "äöü€𝄞".encode() * 7
    for n in range(60, len(text)):
        (tmp_path / "a.txt").write_bytes(text[:n].decode(errors="ignore").encode())
        found = parts_of(tmp_path / "a.txt")
        parts = [(tmp_path / "a.txt").read_bytes()[d.start:d.end]
                 for d in (found["train"][0], found["val"][0])]
        assert b"".join(parts) == (tmp_path / "a.txt").read_bytes()
        assert all(part.decode() for part in parts)


def test_stdlib_is_there_with_long_documents_and_without_tests() -> None:
    found = parts_of("stdlib")
    paths = [d.path for documents in found.values() for d in documents]
    assert len(paths) > 400 and sum(p.stat().st_size > 100_000 for p in paths) >= 5
    assert not any("/test/" in p.as_posix() or "/site-packages/" in p.as_posix() for p in paths)
    assert any(p.name == "typing.py" for p in paths) and len(found["val"]) > 20
    assert why_left_out("test/test_os.py") == why_left_out("tkinter/test/x.py") == "tests"
    assert why_left_out("unittest/mock.py") is why_left_out("contest/a.py") is None


def test_an_interrupted_preparation_leaves_nothing_that_loads(tmp_path: Path, monkeypatch) -> None:
    source = write_texts(tmp_path / "s", {f"{i}.txt": b"text" for i in range(20)})
    out = tmp_path / "data" / "out"

    def interrupt(*arguments):
        raise KeyboardInterrupt

    for function in ("write", "encode"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(prepare_module, function, interrupt)
            prepare(str(source), out, "byte")
        assert list(out.parent.iterdir()) == []
    prepare(str(source), out, "byte")
    before = (out / "meta.json").read_text()
    (source / "more.txt").write_bytes(b"new text")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "write", interrupt)
        prepare(str(source), out, "byte")
    assert (out / "meta.json").read_text() == before and Corpus(out)           # the older one is untouched
    prepare(str(source), out, "byte")
    assert (out / "meta.json").read_text() != before and list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train.idx.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "grown", "flipped"])
def test_damage_is_named_before_anything_is_trained(name: str, damage: str, tmp_path: Path,
                                                    corpus_dir: Path) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(corpus_dir, folder)
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:len(content) // 2])
    elif damage == "grown":
        path.write_bytes(content + bytes(8))
    else:
        content[content.index(b'"format_version": 1') + 18 if name == "meta.json" else len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        Corpus(folder)
    assert str(folder) in str(caught.value) and "prepare" in str(caught.value)


@pytest.fixture
def large_corpus(tmp_path: Path, monkeypatch) -> Path:
    """A corpus of which a start reads 4 blocks of 64 bytes per file."""
    monkeypatch.setattr(integrity, "N_BLOCKS", 4)
    monkeypatch.setattr(integrity, "BLOCK", 64)
    source = write_texts(tmp_path / "s", {f"{i:02}.txt": words(i, 500) for i in range(40)})
    prepare(str(source), tmp_path / "corpus", "byte")
    return tmp_path / "corpus"


def change_byte(path: Path, place: int, value: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[place] = content[place] ^ 1 if value is None else value
    path.write_bytes(content)


def check(monkeypatch, folder: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--check", str(folder)])
    prepare_module.main()


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train.idx.npy"])
def test_a_start_sees_a_change_at_the_sampled_places(name: str, large_corpus: Path) -> None:
    """The first and the last byte among them."""
    size = (large_corpus / name).stat().st_size
    assert sum(map(len, integrity.sampled_blocks(large_corpus / name))) <= min(4 * 64, size)
    for place in (0, size - 1):
        change_byte(large_corpus / name, place)
        with pytest.raises(UserError, match=f"{name} is not what was written|beyond its vocabulary"):
            Corpus(large_corpus)
        change_byte(large_corpus / name, place)
    assert Corpus(large_corpus)


def test_check_sees_any_changed_byte(large_corpus: Path, monkeypatch, capsys) -> None:
    check(monkeypatch, large_corpus)
    assert "all files are what was written" in capsys.readouterr().out
    path = large_corpus / "train.bin"
    for place in range(80, 2000, 97):
        change_byte(path, place)
        with pytest.raises(UserError, match="train.bin is not what was written") as caught:
            check(monkeypatch, large_corpus)
        assert len(caught.value.problems) == 1
        change_byte(path, place)


def test_a_copied_file_is_read_whole_once(large_corpus: Path, capsys) -> None:
    Corpus(large_corpus)
    assert capsys.readouterr().out == ""
    os.utime(large_corpus / "train.bin", ns=(0, 0))
    Corpus(large_corpus)
    assert f"reading all of {large_corpus / 'train.bin'}: copied or changed" in capsys.readouterr().out
    Corpus(large_corpus)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("has_record", [True, False])
def test_a_start_sees_any_change_even_if_size_and_time_are_kept(has_record: bool, large_corpus: Path) -> None:
    path = large_corpus / "train.bin"
    if not has_record:                                      # as of corpora prepared by earlier versions
        (large_corpus / "verified.json").unlink()
    for place in (200, 1000, 4001):                         # not among the sampled places
        before = path.stat()
        change_byte(path, place)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(UserError, match="train.bin is not what was written"):
            Corpus(large_corpus)
        change_byte(path, place)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Corpus(large_corpus)


def test_a_corpus_without_verified_json_loads(large_corpus: Path, capsys) -> None:
    """Those prepared by earlier versions, and those whose record has no time of change."""
    path = large_corpus / "verified.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({name: {key: value for key, value in entry.items() if key != "ctime_ns"}
                                for name, entry in record.items()}))
    assert Corpus(large_corpus) and capsys.readouterr() == ("", "")
    path.unlink()
    assert Corpus(large_corpus) and capsys.readouterr().out.count("reading all of") == 3
    assert json.loads(path.read_text()).items() < record.items()        # files of few blocks are read whole
    assert Corpus(large_corpus)
    assert capsys.readouterr() == ("", "")
    path.write_text('{"train.bin": 1}')
    with pytest.raises(UserError, match="verified.json is damaged"):
        Corpus(large_corpus)


def test_a_read_only_corpus_is_checked_at_each_start(large_corpus: Path, monkeypatch, capsys) -> None:
    (large_corpus / "verified.json").unlink()

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(integrity, "write_whole", refuse)
    for _ in range(2):
        assert Corpus(large_corpus)
        assert "verified.json: cannot be written (Read-only file system)" in capsys.readouterr().err


def test_text_overwritten_in_use_is_noticed_at_any_place(large_corpus: Path) -> None:
    """The same bytes again, a new time, another file of that name or none are no change."""
    corpus = Corpus(large_corpus)
    corpus.require_unchanged()
    path = large_corpus / "train.bin"
    for place in (0, 201, 1001):
        change_byte(path, place)
        with pytest.raises(UserError, match="train.bin was overwritten while it was in use"):
            corpus.require_unchanged()
        change_byte(path, place)
        corpus.require_unchanged()
    os.utime(path, ns=(0, 0))
    corpus.require_unchanged()
    path.rename(large_corpus / "moved.bin")
    path.write_bytes(b"another file of this name")
    corpus.require_unchanged()
    (large_corpus / "moved.bin").unlink()
    corpus.require_unchanged()


def test_an_id_beyond_the_vocabulary_is_refused_when_it_is_read(large_corpus: Path) -> None:
    for split in ("train", "val"):          # odd bytes are the high ones of uint16; 200 is not sampled
        change_byte(large_corpus / f"{split}.bin", 201, 255)
    rehash_corpus(large_corpus)             # as if it had been written so
    corpus = Corpus(large_corpus)
    with pytest.raises(UserError, match="id 65.*beyond its vocabulary of 257"):
        corpus.batch(32, corpus.n_in_epoch(32), 0, 0)
    for read in (lambda: corpus.documents("val"), lambda: corpus.val_batches(32, 4, 0)):
        with pytest.raises(UserError, match="beyond its vocabulary of 257"):
            read()


def test_evaluation_does_not_need_the_train_split(large_corpus: Path) -> None:
    whole = Corpus(large_corpus)
    for name in ("train.bin", "train.idx.npy"):
        (large_corpus / name).unlink()
    documents = Corpus(large_corpus, splits=("val",)).documents("val")
    assert np.array_equal(np.concatenate(documents), whole.tokens["val"])


@pytest.mark.parametrize(("make", "expected"), [
    (lambda p: "no/such/place", "no such file or folder"),
    (lambda p: str(write_texts(p, {"a.pdf": b"x"}) / "a.pdf"), "is not a .txt"),
    (lambda p: str(write_texts(p / "s", {"a.md": b"x"})), "no .txt, .jsonl"),
    (lambda p: str(write_texts(p / "s", {"a.txt": b"", "b.txt": b""})), "empty"),
    (lambda p: str(write_texts(p / "s", {"train/a.txt": b"x", "val/a.md": b"x"})), "for val"),
])
def test_a_bad_source_is_one_line(make, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        prepare(make(tmp_path), tmp_path / "out", "byte")
    assert len(caught.value.problems) == 1 and not (tmp_path / "out").exists()


def test_other_peoples_folders_are_not_overwritten(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "s", {"a.txt": b"text" * 9})
    write_texts(tmp_path / "mine", {"thesis.tex": b"x"})
    with pytest.raises(UserError, match="is not a prepared corpus"):
        prepare(str(source), tmp_path / "mine", "byte")
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_a_batch_is_a_function_of_seed_and_step(corpus_dir: Path) -> None:
    a, b = Corpus(corpus_dir), Corpus(corpus_dir)
    for step in (0, 5, 1000, 5):
        assert torch.equal(torch.stack(a.batch(32, 4, 7, step)), torch.stack(b.batch(32, 4, 7, step)))
    x, y = a.batch(32, 4, 7, 0)
    assert torch.equal(x[:, 1:], y[:, :-1]) and x.shape == y.shape == (4, 32)
    assert not torch.equal(x, a.batch(32, 4, 8, 0)[0]) and not torch.equal(x, a.batch(32, 4, 7, 1)[0])


def test_bos_replaces_the_first_input_of_a_window_and_no_target(corpus_dir: Path) -> None:
    plain, bos = Corpus(corpus_dir), Corpus(corpus_dir, bos=True)
    pairs = [(plain.batch(32, 4, 7, 3), bos.batch(32, 4, 7, 3))]
    pairs += zip(plain.val_batches(32, 4, 8), bos.val_batches(32, 4, 8), strict=True)
    assert len(pairs) == 3
    for (x, y), (x_bos, y_bos) in pairs:
        assert torch.equal(y, y_bos) and torch.equal(x[:, 1:], x_bos[:, 1:])
        assert (x_bos[:, 0] == plain.meta["eot"]).all() and not torch.equal(x, x_bos)


@pytest.mark.slow
def test_an_epoch_reads_each_window_once(corpus_dir: Path) -> None:
    corpus = Corpus(corpus_dir)
    n = corpus.windows("train", 32) - 1
    seen: list[set[tuple[int, ...]]] = []
    for epoch in range(2):
        stream = corpus.batch(32, n, 3, epoch)[0]               # a batch the size of an epoch is the epoch
        text = np.asarray(corpus.tokens["train"]).astype(np.int64)
        offset = next(o for o in range(64) if {tuple(text[o + 32 * w:o + 32 * w + 32]) for w in range(n)}
                      == {tuple(row) for row in stream.tolist()})
        assert offset < 64
        seen.append({tuple(row) for row in stream.tolist()})
    assert seen[0] != seen[1]                                           # another offset, another order


def test_ranks_share_a_batch_whatever_their_number(corpus_dir: Path) -> None:
    corpus = Corpus(corpus_dir)
    whole = corpus.batch(32, 8, 0, 3)[0]
    for world_size in (2, 4):
        parts = [corpus.batch(32, 8, 0, 3, rank, world_size)[0] for rank in range(world_size)]
        assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), whole)


def test_validation_windows_are_fixed_spread_and_disjoint(corpus_dir: Path) -> None:
    corpus = Corpus(corpus_dir)
    n = corpus.windows("val", 32)
    everything = torch.cat([x for x, _ in corpus.val_batches(32, 5, 0)])
    assert everything.shape == (n, 32)
    assert torch.equal(everything.flatten(), torch.from_numpy(corpus.tokens["val"][:n * 32].astype(np.int64)))
    few = torch.cat([x for x, _ in corpus.val_batches(32, 5, 7)])
    assert len(few) == 7 and len({tuple(row) for row in few.tolist()}) == 7


def test_too_little_text_for_a_window_is_said(tmp_path: Path) -> None:
    prepare(str(write_texts(tmp_path / "s", {"a.txt": b"short text"})), tmp_path / "out", "byte")
    with pytest.raises(UserError, match="too few for one window"):
        Corpus(tmp_path / "out").batch(32, 1, 0, 0)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_survive_the_byte_tokenizer(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text).tolist()
    assert b"".join(map(tokenizer.token_bytes, ids)) == text and all(i < 256 for i in ids)
    assert byte_lengths(tokenizer)[ids].sum() == len(text)
    assert decode(tokenizer, [256, *ids, 256]) == text.decode(errors="replace")


def test_gpt2_tokenizer_from_its_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(needs("tiktoken")))
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode(b"hello world").tolist() == [31373, 995] and tokenizer.vocab_size == 50_257
    text = "naïve 日本 <|endoftext|> \n\t x" * 3
    ids = tokenizer.encode(text.encode())
    assert decode(tokenizer, ids.tolist()) == text and tokenizer.eot not in ids     # in text it is only text
    assert byte_lengths(tokenizer)[ids].sum() == len(text.encode())
    source = write_texts(tmp_path / "s", {f"{i}.txt": words(i, 90) for i in range(20)})
    meta = prepare(str(source), tmp_path / "out", "gpt2")
    assert meta["dtype"] == "uint16" and meta["tokenizer"]["name"] == "gpt2" and Corpus(tmp_path / "out")


def test_gpt2_tokenizer_without_files_says_how_to_provide_them(tmp_path: Path, monkeypatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    import requests

    def offline(*arguments, **options):
        raise requests.ConnectionError("no network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2")


def test_unknown_tokenizer() -> None:
    with pytest.raises(UserError, match="choose from byte, gpt2"):
        load_tokenizer("bpe")


def test_meta_is_the_documented_format(corpus_dir: Path) -> None:
    meta = json.loads((corpus_dir / "meta.json").read_text())
    assert {"format_version", "dtype", "vocab_size", "tokenizer", "eot", "source", "revision",
            "splits"} == set(meta)
    assert set(meta["splits"]["train"]) == {"tokens", "bytes", "documents", "sha256"}
    assert np.load(corpus_dir / "val.idx.npy", allow_pickle=False).dtype == np.uint64
    assert (corpus_dir / "val.bin").stat().st_size == 2 * meta["splits"]["val"]["tokens"]
