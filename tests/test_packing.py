"""Windows of packed documents and mixtures of corpora: who sees what, and who gives how much."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import draw, every_encoding_slowly, lively, places_of, tokens

import attention
from config import MIX
from data.loader import Corpus, Mixture
from model import GPT
from train import train

EOT = 256


@every_encoding_slowly
@pytest.mark.parametrize("option", ["model.window=5", "position.temperature=ssmax"])
def test_a_packed_document_is_as_if_alone_at_its_positions(name: str, option: str, tiny) -> None:
    model = lively(tiny(name, option)).double()
    x, lengths = tokens((2, 30)), [7, 1, 12, 10]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, -1)
    packed = model(x, documents=documents)
    starts = [0, 7, 8, 20]
    for start, length in zip(starts, lengths, strict=True):
        alone = model(x[:, start:start + length], positions=torch.arange(start, start + length))
        # tables are fp32, and the origin of xpos' powers moves
        torch.testing.assert_close(packed[:, start:start + length], alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(packed[:, 7:], model(x)[:, 7:], atol=1e-3)    # the mask is what does it
    changed = x.clone()
    changed[:, :8] = (changed[:, :8] + 1) % 257
    # forgetting subtracts sums that began in the documents before: equal but for rounding
    leaked = model(changed, documents=documents)[:, 8:] - packed[:, 8:]
    assert leaked.abs().max() < 1e-9


@every_encoding_slowly
@pytest.mark.parametrize("option", ["train.steps=1", "model.chunk=5", "position.temperature=llama4"])
def test_a_packed_document_is_as_if_alone(name: str, option: str, tiny, monkeypatch) -> None:
    """At consecutive positions and at those of train.positions, also on the paths of long rows."""
    monkeypatch.setattr(attention, "MOST_LOGITS", 2 * 2 * 16 * 5)
    monkeypatch.setattr(attention, "MIN_QUERIES", 5)
    monkeypatch.setattr(attention, "FUSE_FROM", 1)
    model = lively(tiny(name, option, "data.cross_documents=mask", "train.seq_len=16")).double()
    limit = model.encoding.max_length or 99
    x, T = tokens((2, 16)), 16
    documents = torch.tensor([[0] * 7 + [1] * 9, [0] * 5 + [1] * 11])
    for positions in (None, torch.arange(T) + (torch.arange(T) > 4) * (limit - T)):
        packed = model(x, positions=positions, documents=documents)
        for row, start in ((0, 7), (1, 5)):
            given = None if positions is None else positions[:T - start]
            alone = model(x[row:row + 1, start:], positions=given)
            torch.testing.assert_close(packed[row:row + 1, start:], alone, atol=1e-5, rtol=1e-5)


def test_each_packed_document_has_a_prompt_of_its_own(tiny) -> None:
    model = lively(tiny("rope_2d", "position.prompt=3", "data.cross_documents=mask")).double()
    x, documents = tokens((1, 16)), torch.tensor([[0] * 7 + [1] * 9])
    torch.testing.assert_close(model(x, documents=documents)[:, 7:], model(x[:, 7:]), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_training_and_validation_keep_within_documents_when_asked(tiny, tmp_path: Path, monkeypatch) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    forward = GPT.forward

    def watch(self, x, y=None, positions=None, cache=None, documents=None, reduction="mean"):
        seen.append((x, documents))
        return forward(self, x, y, positions, cache, documents, reduction)

    monkeypatch.setattr(GPT, "forward", watch)
    long = ("train.steps=2", "train.seq_len=512", "train.accumulate=2")
    train(tiny("rope", *long, "data.cross_documents=mask"), [])
    assert len(seen) > 4                                # two steps of two parts, and the validation's batches
    assert all(torch.equal(documents, (x == EOT).cumsum(1)) for x, documents in seen)
    assert any(documents.amax() > documents.amin() for _, documents in seen)
    seen.clear()
    train(tiny("rope", "train.steps=2", "data.cross_documents=never", f"run.dir={tmp_path / 'never'}"), [])
    assert all(documents is None for _, documents in seen)
    inside = draw(Corpus(tiny().data.dir, "never"), 32, 4, 0, 0)[0]
    crossing = draw(Corpus(tiny().data.dir), 32, 4, 0, 0)[0]
    assert torch.equal(seen[0][0], inside) and not torch.equal(inside, crossing)


@pytest.mark.parametrize("seq_len", [8, 32, 100])
def test_windows_that_never_cross(seq_len: int, other_dir: Path) -> None:
    """Each lies in one document, an epoch has as many as fit in each, apart, at offsets of its own."""
    corpus = Corpus(other_dir, "never")
    offsets = corpus.offsets["train"]
    lengths = np.diff(offsets)
    n_fitting = (lengths - 1) // seq_len                                # windows in each document
    n = corpus.n_windows("train", seq_len)
    assert n == n_fitting.sum() > 0
    epochs = []
    for epoch in range(3):
        places = np.array([start for _, start in places_of(corpus, seq_len, n, 5, epoch)])
        document = np.searchsorted(offsets, places, side="right") - 1
        assert (places + seq_len < offsets[document + 1]).all()
        assert np.array_equal(np.bincount(document, minlength=len(lengths)), n_fitting)
        assert (np.diff(np.sort(places)) >= seq_len).all()
        epochs.append(places.tolist())
    assert len({tuple(places) for places in epochs}) == 3               # other orders,
    has_room = (lengths - 1 > n_fitting * seq_len)[n_fitting > 0].any()
    assert len({tuple(sorted(places)) for places in epochs}) == (3 if has_room else 1)  # and other offsets
    assert (draw(corpus, seq_len, n, 5, 0)[0][:, 1:] != EOT).all()
    val = torch.cat([b.inputs for b in corpus.val_batches(seq_len, 2, 0)])
    assert (val[:, 1:] != EOT).all() and len(val) == corpus.n_windows("val", seq_len)


def test_a_mixture_has_its_shares_and_walks_through_each_corpus(corpus_dir: Path, other_dir: Path) -> None:
    corpus = Mixture(corpus_dir, {str(other_dir): 0.3})
    places = []
    for step in range(3):
        drawn = places_of(corpus, 32, MIX, 1, step)
        assert Counter(c.folder for c, _ in drawn) == {corpus_dir: 700, other_dir: 300}
        assert len({c.folder for c, _ in drawn[:40]}) == 2              # scattered
        places += drawn
    for c in (corpus, corpus.others[0]):
        starts = [start for owner, start in places if owner is c]
        n = c.n_windows("train", 32)
        for first in range(0, len(starts) - n, n):
            walk = sorted(starts[first:first + n])
            assert len(set(walk)) == n and (np.diff(walk) == 32).all()      # each window once an epoch
    x, _ = draw(corpus, 32, 200, 1, 0)
    upper = ((x >= ord("A")) & (x <= ord("Z"))).any(dim=1).float().mean()
    assert 0.2 < upper < 0.4                                            # the text is the other's, too
    assert torch.equal(x, draw(Mixture(corpus_dir, {str(other_dir): 0.3}), 32, 200, 1, 0)[0])
    halves = [draw(corpus, 32, 200, 1, 0, rank, 2)[0] for rank in range(2)]
    assert torch.equal(torch.stack(halves, dim=1).flatten(0, 1), x)


def test_the_order_of_a_mixture_does_not_depend_on_the_size_of_steps(corpus_dir: Path, other_dir: Path,
                                                                     tmp_path: Path) -> None:
    """Of three corpora; steps of 300 windows cross from one mix of MIX = 1,000 to the next."""
    third = tmp_path / "third"
    shutil.copytree(other_dir, third)
    corpus = Mixture(corpus_dir, {str(third): 0.2, str(other_dir): 0.3})
    small, large = ([(c.folder, start) for step in range(3000 // size)
                     for c, start in places_of(corpus, 32, size, 1, step)] for size in (300, 1000))
    assert small == large
    for first in range(0, 3000, MIX):
        shares = Counter(folder for folder, _ in small[first:first + MIX])
        assert shares == {corpus_dir: 500, other_dir: 300, third: 200}


def test_the_first_steps_can_be_the_mixture_alone(corpus_dir: Path, other_dir: Path) -> None:
    """Then the shares are those of the whole mixture, and the walk through each corpus begins anew."""
    mixture = {str(other_dir): 0.3}
    plain = Mixture(corpus_dir, mixture)
    curriculum = Mixture(corpus_dir, mixture, mixture_only=5)
    first = [place for step in range(5) for place in places_of(curriculum, 32, 8, 1, step)]
    assert {c.folder for c, _ in first} == {other_dir}
    n = curriculum.others[0].n_windows("train", 32)
    assert len({start for _, start in first[:n]}) == min(n, len(first))     # no window twice in an epoch
    for step in range(3):
        later = [[(c.folder, start) for c, start in places_of(corpus, 32, 8, 1, at)]
                 for corpus, at in ((plain, step), (curriculum, 5 + step))]
        assert later[0] == later[1]
