"""Intervals and p-values of numbers that vary with the training seed and with the text; Holm's correction.

estimates.py applies them to tables of results.

The same text is scored for every seed, so the two are crossed, not nested: d[s, u] = mean + seed[s] + text[u]
+ rest[s, u], per token. One component of variance is estimated for each, and Student's t allows for how few
seeds and units of text there are. Seeds of two curves are not paired: runs that share one are hardly alike.
tests/test_intervals.py checks on simulated studies that the intervals cover the truth at their rate.

Legend: S seeds, U units of text: documents, or windows if there are few documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd

LEVEL = 0.05                # intervals are of 1 - LEVEL
DRAWS = 10_000              # of the error's distribution
LARGEST_SPREAD = 0.1        # of seeds whose mean describes them: standard deviation, nats per token or share
OUTLIER_LEVEL = 0.01        # of Grubbs' test: at 5 % one column in twenty would have an outlier by chance
ENOUGH_DOCUMENTS = 5        # to be the units of text; with fewer, windows are
ENOUGH_WINDOWS = 8          # for any interval: fewer cannot show how much they vary
# an error's distribution is integrated over these, evenly spaced in the logit: down to 1e-8 at both ends
LOGITS = np.linspace(-18, 18, 101)
PROBABILITIES = 1 / (1 + np.exp(-LOGITS))
WEIGHTS = PROBABILITIES * (1 - PROBABILITIES) * (LOGITS[1] - LOGITS[0])


class Estimate(NamedTuple):
    """A mean over seeds and text, its interval, and its two-sided p-value against 0; NaN if not known."""

    value: float
    low: float = np.nan
    high: float = np.nan
    p: float = np.nan


class Units(NamedTuple):
    """The units of text: what they are called, how many, and of which one each window is a part."""

    name: str
    n: int
    unit: np.ndarray        # (windows,)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the windows of each unit: (..., windows) -> (..., U)."""
        return np.apply_along_axis(lambda row: np.bincount(self.unit, row, self.n), -1, values)


def units_of(document: np.ndarray, end: np.ndarray, tokens: np.ndarray) -> Units | None:
    """Documents if there are enough, because windows of one document are alike; else windows; else None.

    Windows that share targets, as in long buckets of `position`, are one unit. The targets of a window are
    the last `tokens` tokens up to `end`. Where windows overlap they have equally many, so those that overlap
    are neighbours when sorted by `end`. NaN where windows share none, or where that is not known (repeat).
    """
    names, unit = np.unique(document, return_inverse=True)
    if len(names) >= ENOUGH_DOCUMENTS:
        return Units("documents", len(names), unit)
    order = np.lexsort((end, document))
    start = end - tokens
    is_apart = ~(start[order][1:] < end[order][:-1])                    # true of NaN; >= would be false
    is_next = is_apart | (np.diff(document[order]) != 0)
    unit[order] = np.append(0, is_next.cumsum())
    n = int(unit.max()) + 1
    return Units("windows", n, unit) if n >= ENOUGH_WINDOWS else None


def two_way(d: np.ndarray, weight: np.ndarray, other: np.ndarray | None = None,
            is_paired: bool = False) -> Estimate:
    """Estimate of sum(d) / sum(weight) from sums d (S, U) and weights (U,), such as nats and tokens.

    With `other` (S', U), on the same text, it is of d less other, which are of other runs, or, if is_paired,
    of the same ones. The error is se_text t(n - 1) + se_seed t(S - 1), and for other runs their
    se_seed t(S' - 1) too: independent Student's t. The interval is of draws of it, p is its tail.
      rest       what varies with seed and unit together
      se_seed^2  variance of the seeds' ratios / S; the rest is in it
      se_text^2  delete-one jackknife over units of the seeds' mean, less the rest, which would count twice
      n          (sum weight)^2 / sum weight^2: units of unequal weight count as fewer.
    A sum of such t (Behrens and Fisher) covers at least at its rate even with 2 seeds, where the usual
    approximation by one t (Satterthwaite) covers too seldom. Of 1 seed the error of the text alone remains.

    Robinson 1976, Annals of Statistics 4, 963; Owen 2007, Annals of Applied Statistics 1, 386 (crossed
    seeds and texts); Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 11 (jackknife).
    """
    total = weight.sum()
    share = weight / total                                              # (U,)
    U = len(weight)
    if other is not None and is_paired:
        d = d - other
        other = None
    samples = [d] if other is None else [d, -other]

    value = 0.0
    seed_terms = []                     # of each sample: se_seed and its degrees of freedom
    rest = 0.0                          # variance of what varies with seed and unit together
    residual = np.zeros(U)              # mean over seeds, of both samples
    for x in samples:
        S = len(x)
        ratios = x.sum(axis=1) / total                                  # (S,)
        value += float(ratios.mean())
        residuals = (x - ratios[:, None] * weight) / total              # (S, U), each row sums to 0
        mean = residuals.mean(axis=0)
        residual += mean
        se_seed = 0.0
        if S > 1:
            se_seed = (ratios.var(ddof=1) / S)**0.5
            rest += float(((residuals - mean)**2).sum()) * U / (U - 1) / (S * (S - 1))
        seed_terms.append((se_seed, max(S - 1.0, 1.0)))

    # the jackknife's variance holds the rest, which the seeds' variance holds already
    left_out = residual / (1 - share)                                   # of the mean without each unit, (U,)
    jackknife = float((left_out**2).sum()) * (U - 1) / U
    se_text = max(0.0, jackknife - rest)**0.5
    n = 1 / float((share**2).sum())
    terms = [(se_text, max(n - 1, 1.0)), *seed_terms]
    error = sum(se * student_draws(df, stream) for stream, (se, df) in enumerate(terms))
    half_width = float(np.quantile(np.abs(error), 1 - LEVEL))
    return Estimate(value, value - half_width, value + half_width, tail(value, terms))


def two_way_share(found: np.ndarray, trials: np.ndarray, other: np.ndarray | None = None,
                  is_paired: bool = False) -> Estimate:
    """The same for a share of trials, or a difference of two shares: found (S, U) of trials (U,).

    If every trial is found the variance is 0, but the interval must not be. So trials are added for the
    interval, not for the value: two found and two missed (Agresti and Coull 1998, The American Statistician
    52, 119); for a difference, one found by each of the two alone (Bonett and Price 2012, Journal of
    Educational and Behavioral Statistics 37, 479).
    """
    size = float(trials.mean())         # a unit may hold several trials, which are alike

    def padded(x: np.ndarray, *added: int) -> np.ndarray:
        return np.concatenate((x, np.tile(size * np.array(added), (len(x), 1))), axis=1)

    if other is None:
        wide = two_way(padded(found, 1, 1, 0, 0), np.append(trials, [size] * 4))
        value = float(found.sum() / len(found) / trials.sum())
        lowest = 0.0
    else:
        wide = two_way(padded(found, 1, 0), np.append(trials, [size] * 2), other=padded(other, 0, 1),
                       is_paired=is_paired)
        value = float((found.mean(axis=0) - other.mean(axis=0)).sum() / trials.sum())
        lowest = -1.0
    return wide._replace(value=value, low=max(lowest, min(value, wide.low)),
                         high=min(1.0, max(value, wide.high)))


def is_scattered(seeds: np.ndarray) -> bool:
    """Whether the seeds (S,) differ by more than an interval of their mean can describe.

    Beyond L a run may break where its neighbours do not. Then the standard deviation is above LARGEST_SPREAD,
    or the largest residual is an outlier by Grubbs' test, which needs 3 seeds.
    """
    S = len(seeds)
    if S < 2:
        return False
    spread = float(seeds.std(ddof=1))
    largest = float(np.abs(seeds - seeds.mean()).max())
    return spread > LARGEST_SPREAD or (S > 2 and largest > critical_residual(S) * spread)


@lru_cache(maxsize=64)
def critical_residual(S: int) -> float:
    """The value that max |x - mean| / s of S normal numbers exceeds in OUTLIER_LEVEL of the cases.

    Grubbs 1950, Annals of Mathematical Statistics 21, 27; with Bonferroni's bound, from Student's t.
    """
    t = float(student(1 - OUTLIER_LEVEL / (2 * S), S - 2))
    return (S - 1) / S**0.5 * (t**2 / (S - 2 + t**2))**0.5


@lru_cache(maxsize=256)
def student_draws(df: float, stream: int) -> np.ndarray:
    """DRAWS values of Student's t, evenly spaced in probability and shuffled; streams are independent."""
    values = student((np.arange(DRAWS) + 0.5) / DRAWS, df)
    return np.random.default_rng(stream).permutation(values)


def tail(value: float, terms: Sequence[tuple[float, float]]) -> float:
    """P(|sum of se t(df)| >= |value|) for independent Student's t, of which `terms` has (se, df).

    The sum is integrated over all terms but the one that reaches |value| most often, whose tail is known. So
    p may be as small as Holm's correction for many rows needs: of DRAWS draws none would be below 1e-4.
    """
    def reaches(x: np.ndarray, se: float, df: float) -> np.ndarray:     # P(se t(df) >= x)
        phi, cumulative = student_table(df)
        return np.interp(np.arctan2(-x, se * df**0.5), phi, cumulative)

    *others, heaviest = sorted(terms, key=lambda term: float(reaches(np.array(abs(value)), *term)))
    sums = np.zeros(1)
    weights = np.ones(1)
    for se, df in others:
        sums = np.add.outer(sums, se * student(PROBABILITIES, df)).ravel()
        weights = np.multiply.outer(weights, WEIGHTS).ravel()
    return min(1.0, 2 * float(weights @ reaches(abs(value) - sums, *heaviest)))


def student(probability: np.ndarray | float, df: float) -> np.ndarray:
    """Quantiles of Student's t."""
    phi, cumulative = student_table(df)
    return df**0.5 * np.tan(np.interp(probability, cumulative, phi))


@lru_cache(maxsize=64)
def student_table(df: float) -> tuple[np.ndarray, np.ndarray]:
    """Angles phi and the probabilities below them; t = sqrt(df) tan(phi), with density cos(phi)^(df - 1)."""
    phi = np.linspace(-np.pi / 2, np.pi / 2, 20_001)
    density = np.cos((phi[1:] + phi[:-1]) / 2)**(df - 1)
    return phi, np.concatenate(([0], density.cumsum())) / density.sum()


def holm(p: pd.Series) -> pd.Series:
    """P-values corrected for their number m: the i-th smallest (from 0) times m - i, made to increase.

    Rejecting where a corrected value is below 5 % makes any wrong rejection among the m at most 5 % likely.
    Holm 1979, Scandinavian Journal of Statistics 6, 65.
    """
    values = p.to_numpy()
    smallest_first = values.argsort(kind="stable")
    factors = np.arange(len(p), 0, -1)                                  # m - i
    corrected = np.empty(len(p))
    corrected[smallest_first] = np.maximum.accumulate(np.minimum(1.0, factors * values[smallest_first]))
    return pd.Series(corrected, p.index)
