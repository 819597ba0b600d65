"""Probes: exactly the repeated or requested tokens are scored, wherever they are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import lively, measured, tokens

from data.tokenizer import ByteTokenizer
from evaluation import protocols, scoring
from evaluation.protocols import PROTOCOLS, repeat_passages
from evaluation.scoring import Evaluation, Settings, open_text

BYTES = ByteTokenizer()


def evaluation(model, config, corpus_dir: Path, protocols, lengths=(16, 32, 64, 128)) -> Evaluation:
    settings = Settings(protocols, lengths, max(lengths), 8, 8, 256)
    return Evaluation(model, config, BYTES, open_text(None, str(corpus_dir), BYTES), settings)


@pytest.mark.parametrize("length", [32, 33, 64, 200])
def test_the_second_passage_is_the_first_at_its_distance(length: int) -> None:
    stretches = [np.arange(i, i + 200) for i in (0, 1000)]
    tokens, _, first, second = repeat_passages(stretches, length, 32)
    assert tokens.shape == (2, length)
    assert np.array_equal(tokens[:, first], tokens[:, second])
    assert set(second - first) == {length - 16}
    assert np.array_equal(tokens[:, :length - 8], np.stack([s[:length - 8] for s in stretches]))
    assert first.tolist() == [12, 13, 14, 15]                           # the second half of tokens 8 ... 15
    assert second[-1] == length - 1


def test_the_control_differs_in_the_first_copy_alone() -> None:
    stretches = [np.arange(100 * i, 100 * i + 64) for i in range(3)]
    for L in (32, 20):                                                  # passages of 8 and of 5
        tokens, control, _, _ = repeat_passages(stretches, 48, L)
        differs = (tokens != control).all(axis=0)
        assert np.flatnonzero(differs).tolist() == [*range(L // 4, L // 2)]
        assert np.array_equal(tokens[:, ~differs], control[:, ~differs])


def test_losses_at_are_those_of_the_tokens_named(tiny) -> None:
    model, ids, at = lively(tiny()), tokens((3, 20)), np.array([1, 5, 6, 19])
    losses, is_top = scoring.losses_at(model, tiny().train, ids.numpy(), at)
    logits = model(ids)[:, at - 1]
    expected = torch.nn.functional.cross_entropy(logits.mT, ids[:, at], reduction="none")
    assert losses == pytest.approx(expected.detach().numpy(), rel=1e-5)
    best = ids.clone()
    best[:, at] = logits.argmax(-1)
    assert not is_top.all() and scoring.losses_at(model, tiny().train, best.numpy(), at[:1])[1].all()


def test_copy_leaves_nothing_of_the_text_but_its_tokens(tiny, corpus_dir: Path) -> None:
    """What is repeated has the text's tokens in another order, so that the first copy alone can help."""
    found = evaluation(lively(tiny()), tiny(), corpus_dir, ["copy"])
    taken = PROTOCOLS["copy"].stretches(found)
    assert len(taken) == len(found.ends)
    for stretch, (d, _) in zip(taken, found.ends, strict=True):
        text = bytes(found.text.documents[d][1:].astype(np.uint8))
        assert len(stretch) == found.settings.longest and set(stretch.tolist()) <= set(text)
        assert bytes(stretch[:16].astype(np.uint8)) not in text


def test_repeat_is_the_loss_of_an_explicit_forward(tiny, corpus_dir: Path) -> None:
    config = tiny()
    model = lively(config)
    found = evaluation(model, config, corpus_dir, ["repeat"])
    records = measured(found)
    assert [r["length"] for r in records] == [32, 64, 128]
    for r in records:
        first = second = 0.0
        for d, end in found.ends:
            text = found.text.documents[d][end - 128:end]
            ids = torch.tensor(np.concatenate((text[:r["length"] - 8], text[8:16])).astype(np.int64))[None]
            losses = torch.nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none")
            first, second = first + losses[11:15].sum().item(), second + losses[-4:].sum().item()
        assert r["first_nll_sum"] == pytest.approx(first, rel=1e-4)
        assert r["nll_sum"] == pytest.approx(second, rel=1e-4)
        control = np.stack([found.text.documents[d][end - 128:end] for d, end in found.ends])
        control = np.concatenate((control[:, :r["length"] - 8], control[:, 8:16]), axis=1).astype(np.int64)
        control[:, 8:16] = np.roll(control[:, 8:16], 1, axis=0)         # another window's passage comes first
        ids = torch.from_numpy(control)
        losses = torch.nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
        assert r["use"] == pytest.approx(losses[:, -4:].mean().item() - r["nll_sum"] / r["tokens"], abs=1e-4)
        assert r["bytes"] == r["tokens"] == 4 * len(found.ends)


def test_probes_open_as_the_windows_of_training_do(tiny, corpus_dir: Path) -> None:
    config, seen = tiny("rope", "data.bos=true"), []
    model = lively(config)
    hidden = model.hidden
    model.hidden = lambda x, **rest: seen.append(x) or hidden(x, **rest)
    measured(evaluation(model, config, corpus_dir, ["repeat", "copy"]))
    assert seen and all((x[:, 0] == BYTES.separator).all() for x in seen)


def test_passkey_counts_whole_keys(tiny, corpus_dir: Path, monkeypatch) -> None:
    config = tiny()
    found = evaluation(lively(config), config, corpus_dir, ["passkey"])
    seen = []

    def losses_at(model, train, tokens, at):
        seen.append(tokens[:, at])
        is_top = np.ones((len(tokens), len(at)), dtype=bool)
        is_top[0, -2] = False                                           # one digit of one key missed
        return np.ones(is_top.shape), is_top

    monkeypatch.setattr(scoring, "losses_at", losses_at)
    records = measured(found)
    asked = [(length, depth) for length in (32, 64, 128) for depth in protocols.DEPTHS]
    assert [(r["length"], r["place"]) for r in records] == asked
    assert all((r["correct"], r["trials"], r["tokens"], r["ppl"]) == (1, 2, 12, pytest.approx(np.e))
               for r in records)
    assert all(np.array_equal(keys, seen[0]) for keys in seen)
