"""The trigram: its probabilities sum to 1, follow the formula, and eval.py scores the targets of fixed."""

from collections import Counter

import numpy as np
import pytest
from test_probes import evaluation
from toys import lively, measured

from data.loader import Corpus
from evaluation.trigram import Trigram

V = 7
IDS = np.random.default_rng(0).choice(V - 1, 400, p=[.5, .2, .1, .1, .05, .05])     # 6 is never seen


@pytest.mark.parametrize("context", [(0, 1), (4, 5), (6, 0), (0, 6), (6, 6)])
def test_probabilities_sum_to_1_after_any_context(context: tuple[int, int]) -> None:
    losses = [Trigram(IDS, V).losses(np.array([*context, w])) for w in range(V)]
    assert np.exp(-np.concatenate(losses)).sum() == pytest.approx(1, abs=1e-12)


def test_probabilities_are_those_of_the_formula_in_loops() -> None:
    text = IDS.tolist()
    counts = [Counter(zip(text, text[1:], text[2:], strict=False))]
    for _ in range(2):
        counts.insert(0, Counter(gram[1:] for gram in counts[0]))

    def probability(gram: tuple[int, ...]) -> float:
        if not gram:
            return 1 / V
        own, lower = counts[len(gram) - 1], probability(gram[1:])
        after = [count for other, count in own.items() if other[:-1] == gram[:-1]]
        if not after:
            return lower
        kinds = Counter(own.values())
        discount = kinds[1] / (kinds[1] + 2 * kinds[2]) if kinds[1] else 0.5
        return (max(own[gram] - discount, 0) + discount * len(after) * lower) / sum(after)

    some = np.random.default_rng(1).integers(0, V, 60)
    expected = [-np.log(probability(tuple(some[i - 2:i + 1].tolist()))) for i in range(2, len(some))]
    assert np.allclose(Trigram(IDS, V).losses(some), expected, rtol=1e-12)


def test_all_targets_of_fixed_are_scored(tiny, corpus_dir) -> None:
    """Where all tokens of a window are targets and a document begins with it: its separator counts twice."""
    config = tiny()
    e = evaluation(lively(config), config, corpus_dir, ["fixed", "trigram"], lengths=[32])
    e.settings, e.ends = e.settings._replace(targets=32), [(0, 32), (1, 40)]
    fixed, record = measured(e)
    assert all(record[key] == fixed[key] for key in ("tokens", "bytes", "documents"))
    assert record["protocol"] == "trigram" and record["nll_sum"] < fixed["nll_sum"]     # the model is random
    trigram = Trigram(Corpus(corpus_dir, splits=("train",)).tokens["train"], 257)
    first, second = (e.text.documents[d].astype(int) for d in (0, 1))
    expected = [trigram.losses(ids).sum() for ids in (np.append(first[0], first[:33]), second[7:41])]
    assert record["tokens"] == 64 and record["nll_sum"] == pytest.approx(sum(expected))
