"""Intervals cover at their rate, whatever varies: the seed, the text, or both; Holm and Student are right."""

import numpy as np
import pytest
from conftest import slow_except

from evaluation import intervals
from evaluation.intervals import holm, student, two_way, two_way_share, units_of

TRUTH = 0.3
NOISES = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy": lambda rng, shape: rng.standard_t(3, shape) / 3**0.5,      # no fourth moment
    "skewed": lambda rng, shape: rng.exponential(1, shape) - 1,
}
# standard deviations of seeds (scaled so that the mean varies as much as with documents), documents, rest
VARIANCES = {"documents": (0.0, 1.0, 0.3), "seeds": (1.0, 0.1, 0.1), "both": (1.0, 1.0, 0.3),
             "rest": (0.0, 0.0, 1.0), "all": (0.5, 1.0, 1.0)}


def study(rng: np.random.Generator, S: int, documents: int, noise: str, kind: str) -> tuple[np.ndarray, ...]:
    """d (S, windows), tokens and document: documents have 1 to some 10 windows of 8 to 32 tokens each."""
    text = np.random.default_rng(rng.integers(4))                       # one of four texts
    document = np.repeat(np.arange(documents), text.lognormal(1, 0.7, documents).clip(1, 10).astype(int))
    tokens = text.integers(8, 33, len(document)).astype(float)
    seed, shared, rest = VARIANCES[kind]
    draw = NOISES[noise]
    per_token = (TRUTH + seed * (S / documents)**0.5 * draw(rng, (S, 1)) * (S > 1)
                 + shared * draw(rng, documents)[document] + rest * draw(rng, (S, documents))[:, document]
                 + 0.2 * draw(rng, (S, len(document))))
    return per_token * tokens, tokens, document


def estimate(d: np.ndarray, tokens: np.ndarray, document: np.ndarray) -> intervals.Estimate:
    units = units_of(document)
    return two_way(units.sums(d), units.sums(tokens))


def coverage(S: int, documents: int, noise: str, kind: str, n: int) -> float:
    """The share of n simulated studies whose interval holds the truth."""
    rng = np.random.default_rng(S * documents)
    found = [estimate(*study(rng, S, documents, noise, kind)) for _ in range(n)]
    return float(np.mean([e.low <= TRUTH <= e.high for e in found]))


GRID = [(S, documents, noise, kind) for S in (1, 2, 3, 5) for documents in (10, 20, 40) for noise in NOISES
        for kind in VARIANCES if S > 1 or kind == "documents"]


@pytest.mark.parametrize(("S", "documents", "noise", "kind"), slow_except(
    GRID, (1, 10, "normal", "documents"), (3, 20, "normal", "seeds"), (3, 10, "heavy", "both"),
    (2, 10, "normal", "both")))
def test_intervals_cover_the_truth_at_their_rate(S: int, documents: int, noise: str, kind: str) -> None:
    """The band: 92.5 to 97.5 %, and 1.5 % for the standard error of 400 studies, which is 1 %.

    Wider than that with 2 seeds, and where several things vary. Down to 86.5 % if effects are exponential,
    because few skewed seeds look more alike than they are.
    """
    rate = coverage(S, documents, noise, kind, 400)
    highest = 0.99 if S != 2 and kind in ("documents", "seeds") else 1.0
    assert (0.85 if noise == "skewed" else 0.91) <= rate <= highest, rate


@pytest.mark.parametrize(("S", "expected"), [(3, 0.62), (5, 0.83)])
def test_an_effect_of_all_or_nothing_is_covered_too_seldom(S: int, expected: float) -> None:
    """70 % of the runs learn something, the others do not: the rates that docs/comparing.md warns of."""
    rng = np.random.default_rng(1)
    seeds = (rng.random((3_000, S)) < 0.7) - 0.7
    found = [two_way(np.tile(row[:, None], 10), np.ones(10)) for row in seeds]
    rate = np.mean([e.low <= 0 <= e.high for e in found])
    assert rate == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(("S", "trials", "share"), slow_except(
    [(S, n, p) for S in (1, 3) for n in (8, 32, 128) for p in (0.5, 0.9, 0.99)], (1, 32, 0.9), (3, 8, 0.5)))
def test_intervals_of_shares_cover_too(S: int, trials: int, share: float) -> None:
    rng = np.random.default_rng(trials)
    covered = {True: 0, False: 0}
    for _ in range(400):
        curve, baseline = rng.random((2, S, trials)) < [[[share]], [[0.5]]]
        for is_difference in (True, False):
            other = baseline.astype(float) if is_difference else None
            found = two_way_share(curve.astype(float), np.ones(trials), other)
            truth = share - 0.5 * is_difference
            covered[is_difference] += found.low <= truth <= found.high
    assert min(covered.values()) >= 0.925 * 400, covered


def test_a_share_of_all_or_none_has_an_interval_with_a_width() -> None:
    every = two_way_share(np.ones((3, 8)), np.ones(8))
    assert every.value == every.high == 1 and 0.5 < every.low < 0.9
    none = two_way_share(np.zeros((1, 8)), np.ones(8))
    assert none.value == none.low == 0 and 0.1 < none.high < 0.5
    alike = two_way_share(np.zeros((2, 50)), np.full(50, 4.0), np.zeros((2, 50)))
    assert alike.low < alike.value == 0 < alike.high and alike.p > 0.9


def test_estimates_shift_and_scale_with_the_numbers() -> None:
    d, tokens, document = study(np.random.default_rng(0), 3, 12, "skewed", "all")
    before, moved = estimate(d, tokens, document), estimate(-2 * d + 0.5 * tokens, tokens, document)
    assert np.allclose(moved[:3], [0.5 - 2 * before.value, 0.5 - 2 * before.high, 0.5 - 2 * before.low])
    assert estimate(d, tokens, document) == before                     # the same every time
    assert before.value == pytest.approx(d.sum() / 3 / tokens.sum())
    same = two_way(np.full((3, 9), 0.2), np.ones(9))
    assert np.allclose(same[:3], 0.2)                                   # nothing varies: no width


def test_the_interval_excludes_0_where_p_is_below_5_percent() -> None:
    rng = np.random.default_rng(3)
    found = [two_way(rng.normal(rng.uniform(0, 0.5), 1, (S, 20)), np.ones(20)) for S in (1, 2, 4) * 30]
    assert [e.p < 0.05 for e in found] == [e.low > 0 or e.high < 0 for e in found]
    assert 10 < sum(e.p < 0.05 for e in found) < 80


def test_one_seed_is_the_t_test_of_equal_documents() -> None:
    d = np.random.default_rng(0).normal(1, 1, 10)
    half = 2.262157 * d.std(ddof=1) / 10**0.5                           # t of 9 degrees of freedom
    found = two_way(d[None], np.ones(10))
    assert np.allclose([found.low, found.high], [d.mean() - half, d.mean() + half], rtol=1e-3)


def test_the_text_error_is_what_documents_share_less_what_varies_with_the_seed_too() -> None:
    """The analysis of variance: (MS of documents - MS of rest) / (S U), if all seeds have the same mean."""
    rng = np.random.default_rng(0)
    shared = 2 * rng.normal(size=10)
    d, other = rng.normal(size=(3, 10)) + shared, 0.5 * rng.normal(size=(2, 10))
    d -= d.mean(axis=1, keepdims=True)
    other -= other.mean(axis=1, keepdims=True)

    def rest_of(x: np.ndarray) -> float:
        """The variance that the rest adds to the mean over seeds of a document."""
        return x.var(axis=0, ddof=1).sum() / 9 / len(x)

    def half_width(mean: np.ndarray, rest: float) -> float:
        return 2.262157 * ((mean.var(ddof=1) - rest) / 10)**0.5         # t of 9 degrees of freedom

    mean, mean_other = d.mean(axis=0), other.mean(axis=0)
    assert two_way(d, np.ones(10)).high == pytest.approx(half_width(mean, rest_of(d)), rel=1e-3)
    difference = half_width(mean - mean_other, rest_of(d) + rest_of(other))
    assert two_way(d, np.ones(10), other).high == pytest.approx(difference, rel=1e-3)


def test_quantiles_of_student_are_those_of_tables() -> None:
    """At 97.5 %: of 1,000 degrees of freedom nearly the normal distribution's 1.96."""
    known = {1: 12.7062, 2: 4.30265, 4: 2.77645, 9: 2.26216, 30: 2.04227, 1000: 1.96234}
    for df, wanted in known.items():
        found = student(np.array([0.025, 0.5, 0.975]), df)
        assert np.allclose(found, [-wanted, 0, wanted], rtol=1e-4, atol=1e-6)


def test_holm_multiplies_the_smallest_by_the_most() -> None:
    """The example of Holm 1979 with four hypotheses, and that p-values are not reordered."""
    assert np.allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.2]) == [0.2] and max(holm([0.5, 0.9])) == 1


def test_units_are_documents_or_windows_or_none() -> None:
    assert units_of(np.repeat(np.arange(5), 2)).name == "documents"
    assert units_of(np.zeros(8)).name == "windows" and units_of(np.zeros(7)) is None
    units = units_of(np.array([4, 4, 1, 2, 3, 0]))
    assert np.array_equal(units.sums(np.array([[1, 2, 3, 4, 5, 6]])), [[6, 3, 4, 5, 3]])
