"""Probes: exactly the repeated or requested tokens are scored, wherever they are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from toys import lively, measured

from base.errors import UserError
from data.tokenizer import ByteTokenizer
from evaluation import protocols, scoring
from evaluation.protocols import PROTOCOLS, Fixed, repeat_passages
from evaluation.scoring import Evaluation, Settings, open_text

BYTES = ByteTokenizer()


def evaluation(model, config, corpus_dir: Path, protocols, lengths=(16, 32, 64, 128)) -> Evaluation:
    settings = Settings(protocols, lengths, max(lengths), 8, 8, 256)
    return Evaluation(model, config, BYTES, open_text(None, str(corpus_dir), BYTES), settings)


@pytest.mark.parametrize("length", [32, 33, 64, 200])
def test_the_second_passage_is_the_first_at_its_distance(length: int) -> None:
    stretches = [np.arange(i, i + 200) for i in (0, 1000)]
    tokens, control, first, second = repeat_passages(stretches, length, 32)
    assert tokens.shape == (2, length)
    assert np.array_equal(tokens[:, first], tokens[:, second])
    assert set(second - first) == {length - 16}
    assert np.array_equal(tokens[:, :length - 8], np.stack([s[:length - 8] for s in stretches]))
    assert first.tolist() == [12, 13, 14, 15]                           # the second half of tokens 8 ... 15
    assert second[-1] == length - 1
    assert np.flatnonzero((tokens != control).any(axis=0)).tolist() == [*range(8, 16)]


def test_the_control_repeats_nothing_of_the_passage() -> None:
    """Although windows of one document are fewer tokens apart than a passage is long."""
    stretches = [np.arange(d * 10_000 + i * 32, d * 10_000 + i * 32 + 1024) for d in (0, 1) for i in range(8)]
    _, control, first, second = repeat_passages(stretches, 1024, 1024)
    for row in control:
        assert not set(row[first]) & set(row[second])


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
    text = np.stack([found.text.documents[d][end - 128:end] for d, end in found.ends]).astype(np.int64)

    def losses(ids: torch.Tensor) -> torch.Tensor:                      # (windows, length - 1)
        return torch.nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")

    for r in records:
        ids = torch.from_numpy(np.concatenate((text[:, :r["length"] - 8], text[:, 8:16]), axis=1))
        control = ids.clone()
        control[:, 8:16] = ids[:, 8:16].roll(len(ids) // 2, dims=0)    # another window's passage comes first
        assert r["first_nll_sum"] == pytest.approx(losses(ids)[:, 11:15].sum().item(), rel=1e-4)
        assert r["nll_sum"] == pytest.approx(losses(ids)[:, -4:].sum().item(), rel=1e-4)
        assert r["control_nll_sum"] == pytest.approx(losses(control)[:, -4:].sum().item(), rel=1e-4)
        assert r["bytes"] == r["tokens"] == 4 * len(found.ends)


def test_where_a_quarter_of_L_is_no_token_nothing_is_repeated(tiny, corpus_dir: Path) -> None:
    config = tiny("rope", "train.seq_len=3")
    assert measured(evaluation(lively(config), config, corpus_dir, ["repeat", "copy"])) == []


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
    assert all((r["correct"], r["examples"], r["tokens"], r["ppl"]) == (1, 2, 12, pytest.approx(np.e))
               for r in records)
    assert all(np.array_equal(keys, seen[0]) for keys in seen)


def test_a_loss_that_is_nan_in_one_window_is_an_error(tiny, corpus_dir: Path, monkeypatch) -> None:
    config = tiny()
    rows = Fixed.rows

    def first_is_nan(*args):
        return rows(*args).assign(nll=lambda table: table.nll.where(table.index > 0))

    monkeypatch.setattr(Fixed, "rows", first_is_nan)
    with pytest.raises(UserError, match="the loss is nan; evaluate another checkpoint"):
        measured(evaluation(lively(config), config, corpus_dir, ["fixed"]))
