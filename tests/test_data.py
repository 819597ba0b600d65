"""Corpora: what goes in comes out, whole or not at all; batches are functions of (seed, step)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from test_sources import both, write_texts
from toys import draw, places_of, words

from base.errors import UserError
from config import TrainConfig
from data.loader import Corpus
from data.prepare import prepare
from data.tokenizer import ByteTokenizer


@pytest.mark.parametrize("separator", [256, 70_000])    # ids of 16 bits and of 32
def test_every_byte_of_every_document_comes_back(separator: int, tmp_path: Path, monkeypatch) -> None:
    special = {*range(256, separator + 1)}
    for key, value in {"separator": separator, "vocab_size": separator + 1, "special": special}.items():
        monkeypatch.setattr(ByteTokenizer, key, value)
    texts = {f"{i}.txt": words(i, 50 + i) for i in range(30)}
    texts |= {"deep/er/b.txt": bytes(range(256)), "empty.txt": b""}
    meta = prepare(str(write_texts(tmp_path / "source", texts)), tmp_path / "out", "byte")
    train, val = both(tmp_path / "out")
    assert sorted(train + val) == sorted(filter(None, texts.values()))
    assert meta["splits"]["train"]["bytes"] + meta["splits"]["val"]["bytes"] == sum(map(len, texts.values()))
    corpus = Corpus(tmp_path / "out")
    for split in ("train", "val"):
        opened = np.flatnonzero(corpus.tokens[split] == separator)      # each document by one
        assert np.array_equal(opened, corpus.offsets[split][:-1])


@pytest.mark.parametrize(("name", "damage"), [
    ("train.bin", "cut"), ("val.idx.npy", "cut"), ("train.bin", "missing"), ("meta.json", "missing")])
def test_damage_is_named_before_anything_is_trained(name: str, damage: str, tmp_path: Path,
                                                    corpus_dir: Path) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(corpus_dir, folder)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage == "cut":
        (folder / name).write_bytes(content[:len(content) // 2])
    with pytest.raises(UserError) as caught:
        Corpus(folder)
    assert str(folder) in str(caught.value) and "prepare" in str(caught.value)


def test_evaluation_does_not_need_the_train_split(tmp_path: Path, corpus_dir: Path) -> None:
    shutil.copytree(corpus_dir, tmp_path / "corpus", ignore=shutil.ignore_patterns("train*"))
    documents = Corpus(tmp_path / "corpus", splits=("val",)).documents("val")
    assert np.array_equal(np.concatenate(documents), Corpus(corpus_dir).tokens["val"])


def test_epochs_count_how_often_a_window_is_read(tmp_path: Path) -> None:
    """Under cross_documents = never the ends of documents are in no window."""
    texts = {f"{i}.txt": words(i, 60 + i) for i in range(20)}
    prepare(str(write_texts(tmp_path / "source", texts)), tmp_path / "out", "byte")
    corpus = Corpus(tmp_path / "out", "never")
    t = TrainConfig(seq_len=32, batch_size=4, steps=10 * corpus.n_windows("train", 32) // 4)
    starts = [start for step in range(t.steps) for _, start in corpus.window_starts(t, step)]
    offsets = corpus.offsets["train"]
    n_reads = np.histogram(starts, offsets)[0]                          # of each document
    assert abs(n_reads / ((np.diff(offsets) - 1) // 32) - corpus.n_epochs(t)).max() <= 1


def test_a_corpus_of_another_format_is_refused(corpus_dir: Path, tmp_path: Path) -> None:
    meta = json.loads((corpus_dir / "meta.json").read_text())
    for changed in ({**meta, "format_version": 2}, {"name": "of another program"}):
        (tmp_path / "meta.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match="another version or program; prepare it again"):
            Corpus(tmp_path)


def test_a_batch_without_a_scored_target_divides_by_1(corpus_dir: Path) -> None:
    corpus = Corpus(corpus_dir)
    corpus.is_scored["train"] = np.zeros(len(corpus.tokens["train"]), bool)
    batch = corpus.batch(TrainConfig(seq_len=32, batch_size=4), 0)
    assert batch.loss_divisor == 1 and (batch.targets < 0).all()


def test_a_batch_is_a_function_of_seed_and_step(corpus_dir: Path) -> None:
    a, b = Corpus(corpus_dir), Corpus(corpus_dir)
    for step in (0, 5, 1000, 5):
        assert torch.equal(torch.stack(draw(a, 32, 4, 7, step)), torch.stack(draw(b, 32, 4, 7, step)))
    x, y = draw(a, 32, 4, 7, 0)
    assert torch.equal(x[:, 1:], y[:, :-1]) and x.shape == y.shape == (4, 32)
    assert not torch.equal(x, draw(a, 32, 4, 8, 0)[0]) and not torch.equal(x, draw(a, 32, 4, 7, 1)[0])


def test_bos_replaces_the_first_input_of_a_window_and_no_target(corpus_dir: Path) -> None:
    plain, bos = Corpus(corpus_dir), Corpus(corpus_dir, bos=True)
    t = TrainConfig(seq_len=32, batch_size=4, seed=7)
    for a, b in zip([plain.batch(t, 3), *plain.val_batches(32, 4, 8)],
                    [bos.batch(t, 3), *bos.val_batches(32, 4, 8)], strict=True):
        assert torch.equal(a.targets, b.targets) and torch.equal(a.inputs[:, 1:], b.inputs[:, 1:])
        assert (b.inputs[:, 0] == plain.separator).all() and not torch.equal(a.inputs, b.inputs)


def test_an_epoch_reads_each_window_once(corpus_dir: Path) -> None:
    corpus = Corpus(corpus_dir)
    n = corpus.n_windows("train", 32)
    seen: list[set[bytes]] = []
    for epoch in range(2):
        stream = draw(corpus, 32, n, 3, epoch)[0]               # a batch the size of an epoch is the epoch
        seen.append({row.tobytes() for row in stream.numpy()})
        text = np.asarray(corpus.tokens["train"]).astype(np.int64)
        assert any({text[o + 32 * w:][:32].tobytes() for w in range(n)} == seen[-1] for o in range(64))
    assert seen[0] != seen[1]                                           # another offset,
    orders = [np.argsort([start for _, start in places_of(corpus, 32, n, 3, epoch)]).tolist()
              for epoch in range(2)]
    assert orders[0] != orders[1] and list(range(n)) not in orders     # and another order, not the text's
    offsets = [min(start for _, start in places_of(corpus, 32, n, 3, epoch)) for epoch in range(9)]
    assert max(offsets) > (len(corpus.tokens["train"]) - 1) % 32        # a window gives room for them


def test_ranks_share_a_batch_whatever_their_number(corpus_dir: Path) -> None:
    corpus = Corpus(corpus_dir)
    whole = draw(corpus, 32, 8, 0, 3)[0]
    for world_size in (2, 4):
        parts = [draw(corpus, 32, 8, 0, 3, rank, world_size)[0] for rank in range(world_size)]
        assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), whole)


def test_validation_windows_are_fixed_spread_and_disjoint(corpus_dir: Path) -> None:
    corpus = Corpus(corpus_dir)
    n = corpus.n_windows("val", 32)
    everything = torch.cat([b.inputs for b in corpus.val_batches(32, 5, 0)])
    assert everything.shape == (n, 32)
    assert torch.equal(everything.flatten(), torch.from_numpy(corpus.tokens["val"][:n * 32].astype(np.int64)))
    few = torch.cat([b.inputs for b in corpus.val_batches(32, 5, 7)])
    assert torch.equal(few, everything[torch.arange(7) * n // 7])


def test_meta_is_the_documented_format(corpus_dir: Path) -> None:
    meta = json.loads((corpus_dir / "meta.json").read_text())
    assert {"format_version", "dtype", "vocab_size", "tokenizer", "eot", "source", "revision", "options",
            "splits"} == set(meta)
    assert set(meta["splits"]["train"]) == {"tokens", "bytes", "documents", "sha256"}
    assert np.load(corpus_dir / "val.idx.npy", allow_pickle=False).dtype == np.uint64
    assert (corpus_dir / "val.bin").stat().st_size == 2 * meta["splits"]["val"]["tokens"]
