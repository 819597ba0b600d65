"""Intervals and p-values of numbers that vary with the training seed and with the text; Holm's correction.

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
import torch

LEVEL = 0.05                # intervals are of 1 - LEVEL
DRAWS = 10_000              # of the error's distribution
ENOUGH_DOCUMENTS = 5        # to be the units of text; with fewer, windows are
ENOUGH_WINDOWS = 8          # for any interval: fewer cannot show how much they vary
ENOUGH_CURVES = 6           # for a prior of their variances
DEGREES = np.geomspace(0.5, 200, 600)   # among which the prior's degrees of freedom are looked up


class Estimate(NamedTuple):
    """A mean over seeds and text, its interval, and its two-sided p-value against 0; None if not known."""

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None


class Prior(NamedTuple):
    """What many curves tell of how the seeds of one of them vary: as much as df + 1 more seeds would."""

    variance: float
    df: float


class Units(NamedTuple):
    """The units of text: what they are called, how many, and of which one each window is a part."""

    name: str
    n: int
    unit: np.ndarray        # (windows,)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the windows of each unit: (..., windows) -> (..., U)."""
        return np.apply_along_axis(lambda row: np.bincount(self.unit, row, self.n), -1, values)


def units_of(document: np.ndarray) -> Units | None:
    """Documents if there are enough, because windows of one document are alike; else windows; else None."""
    names, unit = np.unique(document, return_inverse=True)
    if len(names) >= ENOUGH_DOCUMENTS:
        return Units("documents", len(names), unit)
    if len(document) >= ENOUGH_WINDOWS:
        return Units("windows", len(document), np.arange(len(document)))
    return None


def prior_of(variances: Sequence[float], df: Sequence[int]) -> Prior | None:
    """The empirical-Bayes prior of several curves' variances s^2, each with df degrees of freedom.

    s^2 is distributed as prior.variance F(df, prior.df). So log s^2 has the mean log prior.variance + a(df) -
    a(prior.df), where a(x) = psi(x / 2) - log(x / 2), and the variance psi'(df / 2) + psi'(prior.df / 2).
    Both are solved for the prior. None if there are fewer than ENOUGH_CURVES.

    Smyth 2004, Statistical Applications in Genetics and Molecular Biology 3, article 3 (limma).
    """
    pairs = [(s2, n) for s2, n in zip(variances, df, strict=True) if s2 > 0]
    if len(pairs) < ENOUGH_CURVES:
        return None
    s2, n, prior = (torch.tensor(x, dtype=torch.float64) / 2 for x in (*zip(*pairs, strict=True), DEGREES))
    log = (2 * s2).log() - (n.digamma() - n.log())
    excess = float(log.var() - torch.polygamma(1, n).mean())    # how much the true variances differ
    half = np.interp(-excess, -torch.polygamma(1, prior).numpy(), prior.numpy())
    return Prior(float(np.exp(log.mean().item() + torch.digamma(torch.tensor(half)).item() - np.log(half))),
                 2 * float(half))


def two_way(d: np.ndarray, weight: np.ndarray, prior: Prior | None = None, other: np.ndarray | None = None,
            is_paired: bool = False) -> Estimate:
    """Estimate of sum(d) / sum(weight) from sums d (S, U) and weights (U,), such as nats and tokens.

    With `other` (S', U), on the same text, it is of d less other, which are of other runs, or, if is_paired,
    of the same ones. The error is drawn as se_text t(n - 1) + se_seed t(S - 1), and for other runs their
    se_seed t(S' - 1) too: independent Student's t.
      se_seed^2  variance of the seeds' ratios / S. It holds the rest too, which is also independent by seed.
                 With a prior, the mean of both variances by degrees of freedom, and S - 1 + prior.df of them.
                 That of `other` has none: a wrong one would be in the differences of all curves to it.
      se_text^2  delete-one jackknife over units of the seeds' mean, less the rest.
      n          (sum weight)^2 / sum weight^2: units of unequal weight count as fewer.
    A sum of such t (Behrens and Fisher) covers at least at its rate even with 2 seeds, where the usual
    approximation by one t (Satterthwaite) covers too seldom. Of 1 seed the error of the text alone remains.

    Robinson 1976, Annals of Statistics 4, 963; Owen 2007, Annals of Applied Statistics 1, 386 (crossed
    seeds and texts); Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 11 (jackknife).
    """
    total, share, U = weight.sum(), weight / weight.sum(), len(weight)
    if other is not None and is_paired:
        d, other = d - other, None
    nothing = Prior(0.0, 0.0)
    samples = [(d, prior or nothing), *([] if other is None else [(-other, nothing)])]
    value, rest, error, common = 0.0, 0.0, np.zeros(DRAWS), np.zeros(U)
    for stream, (x, more) in enumerate(samples, start=1):
        S, ratios = len(x), x.sum(axis=1) / total                       # (S,)
        residual = (x - ratios[:, None] * weight) / total               # (S, U), each row sums to 0
        value, common = value + float(ratios.mean()), common + residual.mean(axis=0)
        if S > 1:
            df = S - 1 + more.df
            seeds = ((S - 1) * ratios.var(ddof=1) + more.df * more.variance) / df / S
            error = error + seeds**0.5 * student_draws(df, stream)
            rest += float(((residual - residual.mean(axis=0))**2).sum()) * U / (U - 1) / (S * (S - 1))
    text = max(0.0, float(((common / (1 - share))**2).sum()) * (U - 1) / U - rest)
    n = 1 / float((share**2).sum())
    error = np.abs(text**0.5 * student_draws(max(n - 1, 1.0), 0) + error)
    half = float(np.quantile(error, 1 - LEVEL))
    p = (1 + int((error >= abs(value)).sum())) / (1 + DRAWS)
    return Estimate(value, value - half, value + half, p)


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
        wide, lowest = two_way(padded(found, 1, 1, 0, 0), np.append(trials, [size] * 4)), 0.0
        value = float(found.sum() / len(found) / trials.sum())
    else:
        wide = two_way(padded(found, 1, 0), np.append(trials, [size] * 2), other=padded(other, 0, 1),
                       is_paired=is_paired)
        value = float((found.mean(axis=0) - other.mean(axis=0)).sum() / trials.sum())
        lowest = -1.0
    assert wide.low is not None and wide.high is not None
    return wide._replace(value=value, low=max(lowest, min(value, wide.low)),
                         high=min(1.0, max(value, wide.high)))


@lru_cache(maxsize=256)
def student_draws(df: float, stream: int) -> np.ndarray:
    """DRAWS values of Student's t, evenly spaced in probability and shuffled; streams are independent."""
    values = student((np.arange(DRAWS) + 0.5) / DRAWS, df)
    return np.random.default_rng(stream).permutation(values)


def student(probability: np.ndarray | float, df: float) -> np.ndarray:
    """Quantiles of Student's t: with t = sqrt(df) tan(phi), the density of phi is cos(phi)^(df - 1)."""
    edges = np.linspace(-np.pi / 2, np.pi / 2, 20_001)
    density = np.cos((edges[1:] + edges[:-1]) / 2)**(df - 1)
    cumulative = np.concatenate(([0], density.cumsum())) / density.sum()
    return df**0.5 * np.tan(np.interp(probability, cumulative, edges))


def holm(p: Sequence[float]) -> list[float]:
    """P-values corrected for their number m: the i-th smallest (from 0) times m - i, made to increase.

    Rejecting where a corrected value is below 5 % makes any wrong rejection among the m at most 5 % likely.
    Holm 1979, Scandinavian Journal of Statistics 6, 65.
    """
    corrected, highest = [0.0] * len(p), 0.0
    for i, k in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        highest = max(highest, min(1.0, (len(p) - i) * p[k]))
        corrected[k] = highest
    return corrected
