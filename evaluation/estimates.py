"""Estimates from the table of results: for each curve and column a mean over seeds, its interval and range.

A curve is the runs of one `label` under one method of --extend, which differ only in their seed. A column of
a report is a protocol, length and place. Beyond L a run may break where the others do not: where the mean
does not describe the seeds, their median and range are shown. intervals.py has the formulas, results.py the
table.

Legend: S seeds, that is runs; windows: windows or examples. Loss in nats per token, L = train.seq_len.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from evaluation.intervals import LEVEL, Estimate, holm, is_scattered, two_way, two_way_share, units_of
from evaluation.results import FOUND, LOSS, NO_METHOD, REPETITION, USE, Score

CURVE = ["label", "extend"]
COLUMN = ["protocol", "length", "place"]
ESTIMATED = ["shown", "shown_low", "shown_high", "value", "low", "high", "p", "seed_low", "seed_high",
             "seeds", "n_seeds", "unit", "n_units", "is_unstable"]
GATE = ["state", "trigram", "below", "below_low", "below_high", "use", "use_low", "use_high"]
LEAST_USE = 0.3     # nats per token, of a passage repeated inside L; a model below it does not look back
PASSED, FAILED, UNCERTAIN, NOT_GATED = "passed", "failed", "uncertain", "not gated"


# -----------------------------------------------------------------------------------------------------------
# Means, intervals and ranges


class Sample(NamedTuple):
    """The scores of one curve in one column."""

    score: Score
    scores: np.ndarray      # (S, windows), not yet divided by the weight
    weight: np.ndarray      # (windows,), the same for every seed
    targets: tuple[np.ndarray, ...]     # of each window: document, end and tokens, as in the table

    @property
    def of_seeds(self) -> np.ndarray:
        """The score of each seed, over its windows (S,)."""
        return self.scores.sum(axis=1) / self.weight.sum()


def make_sample(rows: pd.DataFrame, score: Score) -> Sample:
    """The rows of some runs on the same windows, which are in the same order in each run."""
    rows = rows.sort_values("run", kind="stable")
    S = rows["run"].nunique()
    n_windows = len(rows) // S
    assert S * n_windows == len(rows), "runs with different windows are refused when they are read"
    scores = np.asarray(score.total(rows), dtype=float).reshape(S, n_windows)
    first_run = rows[:n_windows]
    weight = np.ones(n_windows)                         # examples: each row is one
    if score.per in rows:
        weight = first_run[score.per].to_numpy(float)
    targets = tuple(first_run[name].to_numpy(float) for name in ("document", "end", "tokens"))
    return Sample(score, scores, weight, targets)


def estimate(sample: Sample, baseline: Sample | None = None, is_paired: bool = False) -> dict[str, Any]:
    """A row of `estimates` without its keys: of the sample, or of the sample less the baseline.

    The baseline has the same windows and other runs, or if `is_paired` the same ones.
    """
    # the numbers whose range is shown: of each seed, or of each pair of a seed and one of the baseline
    numbers = sample.of_seeds
    n_seeds = len(numbers)
    is_unstable = is_scattered(numbers)
    if baseline is not None and is_paired:
        assert len(baseline.of_seeds) == n_seeds
        numbers = numbers - baseline.of_seeds
        is_unstable = is_scattered(numbers)
    elif baseline is not None:
        n_seeds = min(n_seeds, len(baseline.of_seeds))
        is_unstable = is_unstable or is_scattered(baseline.of_seeds)
        numbers = np.subtract.outer(numbers, baseline.of_seeds).ravel()

    # the interval of the mean, over seeds and units of text
    units = units_of(*sample.targets)
    if units is not None and sample.score == FOUND:         # the depths of an example have the same facts
        units = units._replace(name="examples") if units.name == "documents" else None
    unit, n_units = "", len(sample.weight)
    mean = Estimate(float(numbers.mean()))
    if units is not None:
        unit, n_units = units.name, units.n
        method = two_way_share if sample.score == FOUND else two_way
        subtracted = units.sums(baseline.scores) if baseline is not None else None
        mean = method(units.sums(sample.scores), units.sums(sample.weight), subtracted, is_paired)

    # what is to be shown of both
    lowest = float(numbers.min())
    highest = float(numbers.max())
    shown, shown_low, shown_high = mean.value, mean.low, mean.high
    if is_unstable:
        shown, shown_low, shown_high = float(np.median(numbers)), lowest, highest
    return {"shown": shown, "shown_low": shown_low, "shown_high": shown_high, **mean._asdict(),
            "seed_low": lowest, "seed_high": highest, "seeds": tuple(numbers.tolist()), "n_seeds": n_seeds,
            "unit": unit, "n_units": n_units, "is_unstable": is_unstable}


def estimates(table: pd.DataFrame, score: Score, baseline: str | None = None) -> pd.DataFrame:
    """One row for each curve and column: its score, or its score less that of the label `baseline`.

    Columns: those of CURVE and COLUMN;
      baseline              its label, "" if there is none
      shown, shown_low, shown_high      what a report shows: mean and interval, or median and range
      value, low, high      mean over seeds, ends of its 95 % interval (NaN if there are too few windows)
      p                     two-sided, of the mean against 0; not corrected: `claims` does that
      seed_low, seed_high   range of the seeds. Of a difference: of all pairs of a seed of each curve
      seeds                 these numbers, to be drawn
      n_seeds               of a difference: of the curve that has fewer
      unit, n_units         what the interval is over, besides seeds: documents, windows, examples or ""
      is_unstable           median and range are shown, because the mean does not describe the seeds
    A method of --extend is compared with the plain curve of the baseline; on the same runs it is paired.
    """
    rows = []
    for column, column_rows in table.groupby(COLUMN, sort=False):
        reference = None
        if baseline is not None:
            is_plain = (column_rows["label"] == baseline) & (column_rows["extend"] == NO_METHOD)
            plain = column_rows[is_plain]
            if plain.empty:
                continue
            reference = make_sample(plain, score)
        for curve, curve_rows in column_rows.groupby(CURVE, sort=False):
            if curve == (baseline, NO_METHOD):
                continue
            is_paired = curve[0] == baseline
            row = estimate(make_sample(curve_rows, score), reference, is_paired)
            keys = {**dict(zip(CURVE, curve, strict=True)), **dict(zip(COLUMN, column, strict=True))}
            rows.append({**keys, "baseline": baseline or "", **row})
    return pd.DataFrame(rows, columns=[*CURVE, *COLUMN, "baseline", *ESTIMATED])


# -----------------------------------------------------------------------------------------------------------
# What may be claimed


def gates(table: pd.DataFrame, L: int) -> pd.DataFrame:
    """For each label whether it has learned enough at L for its other numbers to mean something.

    Two margins, without extension: how far its loss on the targets of fixed is below that of a Kneser-Ney
    trigram of the train split of data.dir, and its use of a repeated passage: how much lower the loss is than
    after another passage, which must be above LEAST_USE. Both are estimates over the same runs and windows,
    with intervals; where seeds differ too much for one, with their range. Columns:
      state     PASSED if both intervals are above their limits, FAILED if one is below, else UNCERTAIN;
                NOT_GATED if a protocol was not measured, at L and for each of its runs
      trigram                           its loss
      below, below_low, below_high      trigram - loss, as shown
      use, use_low, use_high            of the repeated passage, as shown
    """
    rows: dict[Any, dict[str, Any]] = {}
    for label, runs in table.groupby("label", sort=False):
        at_L = runs[(runs["length"] == L) & (runs["extend"] == NO_METHOD)]
        fixed, trigram, repeat = (at_L[at_L["protocol"] == name] for name in ("fixed", "trigram", "repeat"))
        n_runs = runs["run"].nunique()
        if any(part["run"].nunique() < n_runs for part in (fixed, trigram, repeat)):
            rows[label] = {"state": NOT_GATED}
            continue
        of_trigram = make_sample(trigram, LOSS)
        below = estimate(make_sample(fixed, LOSS), of_trigram, is_paired=True)
        # not over the first copy: there a model that breaks would show its breakage
        score = USE.score
        if repeat["control_nll"].isna().any():          # older results have no such control
            score = REPETITION.score
        use = estimate(make_sample(repeat, score))
        state = UNCERTAIN
        if below["shown_high"] < 0 or use["shown_high"] < LEAST_USE:
            state = FAILED
        elif below["shown_low"] > 0 and use["shown_low"] > LEAST_USE:
            state = PASSED
        rows[label] = {"state": state, "trigram": -of_trigram.of_seeds.mean()}
        for name, margin in (("below", below), ("use", use)):
            for end in ("", "_low", "_high"):
                rows[label][name + end] = margin[f"shown{end}"]
    return pd.DataFrame.from_dict(rows, "index", columns=GATE).rename_axis("label")


def claims(frame: pd.DataFrame, gate: pd.DataFrame) -> pd.DataFrame:
    """`estimates` with two more columns: `corrected`, its p-value, and `is_better`, whether it may be bold.

    The rows are one family: all that a report could mark or say in a sentence. So concatenate the tables
    that it marks, at the lengths that it marks: each further row makes a claim harder. Holm's correction is
    over the rows whose label, and baseline if there is one, passed the gate (`gates`), which pretrained
    models do not have. Of one seed nothing is claimed.
    A row is better if its value is above 0, the corrected p-value is below LEVEL and, where seeds differ too
    much for a mean, the whole range of seeds is above 0 as well.
    """
    passed = ["", *gate.index[gate["state"] == PASSED]]         # "": no baseline
    is_sampled = frame["n_seeds"] > 1
    can_be = frame["label"].isin(passed) & frame["baseline"].isin(passed) & is_sampled & frame["p"].notna()
    corrected = frame["p"].where(can_be)
    corrected[can_be] = holm(frame["p"][can_be])
    seeds_agree = ~frame["is_unstable"] | (frame["seed_low"] > 0)
    is_better = (corrected < LEVEL) & (frame["value"] > 0) & seeds_agree
    return frame.assign(corrected=corrected, is_better=is_better)
