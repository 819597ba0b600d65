"""Compare runs on identical targets: group seeds into curves, and compute tables with intervals.

compare.py describes what the intervals cover, intervals.py how they are computed.
L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from base.errors import UserError
from config import MAY_DIFFER
from evaluation.intervals import LEVEL, Estimate, holm, two_way, two_way_share, units_of
from evaluation.measures import FOUND, GAIN, Form, Score
from evaluation.protocols import PROTOCOLS
from evaluation.report import Cell, Cells, Table
from evaluation.results import COLUMNS, NO_METHOD, join, perplexity
from evaluation.runs import Keys, Run, without_seed

LEAST_GAIN = 0.3    # nats per token on a passage repeated inside L; a model below it does not look back


class Curve(NamedTuple):
    """A row of each table: runs that differ only in their seed, under one method of --extend."""

    label: str
    extend: str
    runs: list[Run]


def make_curves(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Curve]:
    """A curve for each name and method of --extend: runs of one name differ only in their seed.

    The name of a run is that of --label, else its own. Raises UserError where runs of one name are not
    samples of one thing.
    """
    if names and len(names) != len(runs):
        raise UserError(f"--label: given {len(names)} times for {len(runs)} runs; give one for each, in the "
                        "same order")
    groups: dict[str, list[Run]] = {}
    for run, name in zip(runs, names or [run.label for run in runs], strict=True):
        groups.setdefault(name, []).append(run._replace(label=name))
    curves = []
    for name, group in groups.items():
        check_samples(name, group)
        for extend in group[0].table.extend.unique():
            label = name if extend == NO_METHOD else f"{name} + {extend}"
            curves.append(Curve(label, extend, group))
    return curves


def check_samples(name: str, group: Sequence[Run]) -> None:
    """Raise UserError unless runs of one name differ only in their seed, and were evaluated alike."""
    first = group[0]
    for run in group:
        pair = f"runs {first.name} and {run.name}, both {name!r}"
        changes = differences(first.config, run.config, MAY_DIFFER["seeds"])
        bases = [without_seed(x.config["train.init_from"]) for x in (first, run)]
        if bases[0] != bases[1]:
            changes.append("train.init_from")
        if changes:
            raise UserError(f"{pair}: differ in {', '.join(changes)}; runs of one name must differ only in "
                            "their seed, so give each run a --label")
        if places_of(run) != places_of(first):
            raise UserError(f"{pair}: evaluated differently; give eval.py the same --extend, --protocol and "
                            "--lengths")
    n_seeds = len({run.seed for run in group})
    n_bases = len({run.config["train.init_from"] for run in group})
    if n_seeds < len(group) or n_bases not in (1, len(group)):
        raise UserError(f"runs {', '.join(run.name for run in group)}, all {name!r}: have the same seed or "
                        "began from the same run: not independent samples; leave one out")


def differences(old: Keys, new: Keys, may_differ: Sequence[str]) -> list[str]:
    """`section.key: old -> new` for each key that differs, besides sections and keys that may."""
    lines = []
    is_other_encoding = old.get("position.encoding") != new.get("position.encoding")
    for key in old | new:
        section = key.partition(".")[0]
        if key in may_differ or section in may_differ or old.get(key) == new.get(key):
            continue
        if section == "position" and is_other_encoding and key != "position.encoding":
            continue                            # its options follow from it
        lines.append(f"{key}: {old.get(key, 'unset')} -> {new.get(key, 'unset')}")
    return lines


def places_of(run: Run) -> set[tuple[str, str, int, str]]:
    """What was measured of a run."""
    places = run.table[["extend", "protocol", "length", "place"]].drop_duplicates()
    return {*places.itertuples(index=False, name=None)}


def frame_of(curves: Sequence[Curve]) -> pd.DataFrame:
    """The rows of all runs, with the label of their curve, and the place on the x axis and its heading."""
    parts = []
    for curve in curves:
        for run in curve.runs:
            rows = run.table[run.table.extend == curve.extend]
            parts.append(rows.assign(label=curve.label, trials=1.0))
    frame = pd.concat(parts, ignore_index=True)
    columns = {place: PROTOCOLS[place[0]].column(*place[1:]) for place in
               frame[["protocol", "length", "place"]].drop_duplicates().itertuples(index=False, name=None)}
    places = pd.MultiIndex.from_frame(frame[["protocol", "length", "place"]])
    frame["x"] = places.map({place: x for place, (x, _) in columns.items()})
    frame["column"] = places.map({place: heading for place, (_, heading) in columns.items()})
    return frame


# -----------------------------------------------------------------------------------------------------------
# Tables


def make_tables(curves: Sequence[Curve], baseline: Curve, frame: pd.DataFrame, L: int,
                failed: Sequence[str]) -> list[Table]:
    """The tables of each protocol, and of its gains over the baseline; rows of `failed` labels are grey."""
    tables = []
    for measure in (measure for protocol in PROTOCOLS.values() for measure in protocol.measures()):
        key, form = measure.key, measure.form
        needed = [name for name in form.score if name in COLUMNS]
        here = frame[frame.protocol == measure.protocol].dropna(subset=needed)
        if here.empty:                                  # older results lack a column
            continue
        x = here.groupby("column").x.first().sort_values()
        cells = mean_over_seeds(here, form, [curve.label for curve in curves])
        scores, units = estimates(here, form, curves)
        gains, units_of_gains = scores, units           # GAIN is over truncation, not over the baseline
        if form is not GAIN:
            gains, units_of_gains = estimates(here, form, curves, baseline)
        # into each cell its interval, and whether it beats the baseline
        for label, row in cells.items():
            for column, cell in row.items():
                interval = scores[label][column]
                beats = gains.get(label, {}).get(column, cell).beats
                low, high = interval.low, interval.high
                if low is not None and high is not None:
                    low, high = sorted((form.figure(low), form.figure(high)))
                row[column] = cell._replace(low=low, high=high, beats=beats)

        truncated = None
        if key == "fixed":
            total = here[here.label == baseline.label][["truncated_nll", "tokens"]].sum()
            truncated = perplexity(total.truncated_nll / total.tokens)
        note = f"{measure.note} {caption(units)}".strip()
        tables.append(Table(key, measure.title, note, form, L, x, cells, failed, truncated))
        if form is GAIN or not gains:
            continue
        note = (f"On the same targets, positive where a curve is better than {baseline.label}. "
                f"{caption(units_of_gains)}")
        form_of_gains = GAIN._replace(x_label=form.x_label)
        if form.figure is float:
            form_of_gains = form._replace(y_label=f"difference ({form.y_label})", form=f"+{form.form}")
        title = f"Gain over {baseline.label}, {key}"
        tables.append(Table(f"{key}-gain", title, note, form_of_gains, L, x, gains, failed))
    return tables


def mean_over_seeds(here: pd.DataFrame, form: Form, labels: Sequence[str]) -> Cells:
    """Label -> column -> the mean over seeds and, of two or more, their standard deviation (n - 1)."""
    names = [name for name in {*form.score} if name]
    sums = here.groupby(["label", "run", "column"])[names].sum()
    figures = (form.score.total(sums) / sums[form.score.per]).map(form.figure)
    cells: Cells = {label: {} for label in labels}
    for (label, column), group in figures.groupby(["label", "column"]):
        seeds = group.to_numpy(dtype=float)
        spread = float(seeds.std(ddof=1)) if len(seeds) > 1 else None
        cells[label][column] = Cell(float(seeds.mean()), spread)
    return {label: row for label, row in cells.items() if row}


# -----------------------------------------------------------------------------------------------------------
# Intervals, of scores and of differences to the baseline


class Scores(NamedTuple):
    """The score of each window or trial in one column of a table, and what it is divided by."""

    value: np.ndarray       # (seeds, windows)
    per: np.ndarray         # (windows,)
    document: np.ndarray    # (windows,)
    is_trials: bool


class Units(NamedTuple):
    """What the intervals of a table are over, for its caption: names of units, and numbers of seeds."""

    names: list[str]
    n_seeds: list[int]


def estimates(here: pd.DataFrame, form: Form, curves: Sequence[Curve],
              baseline: Curve | None = None) -> tuple[Cells, Units]:
    """Label -> column -> the curve's score, or the baseline's subtracted from it; and what intervals cover.

    A cell is better than 0 or the baseline (`beats`) if that survives Holm's correction over the curves of
    its column.
    """
    by_label = {curve.label: curve for curve in curves}
    rows: Cells = {}
    names: dict[str, None] = {}
    n_seeds: set[int] = set()
    for column, in_column in here.sort_values("x", kind="stable").groupby("column", sort=False):
        scores = {label: scores_of(rows_of_curve, form.score)
                  for label, rows_of_curve in in_column.groupby("label", sort=False)}
        subtracted = scores.pop(baseline.label, None) if baseline else None
        if baseline and subtracted is None:
            continue
        column_estimates: dict[str, Estimate] = {}
        can_beat: dict[str, bool] = {}
        for label in [label for label in by_label if label in scores]:
            # methods of --extend on the same runs
            is_paired = baseline is not None and by_label[label].runs is baseline.runs
            column_estimates[label], name = estimate_one(scores[label], subtracted, is_paired)
            names[name] = None
            n = min(len(x.value) for x in (scores[label], subtracted) if x is not None)
            n_seeds.add(n)
            # one trained seed tells nothing of another; a pretrained model is what it is
            can_beat[label] = n > 1 or by_label[label].runs[0].trained_on is None
        # the column is complete: correct its p-values for their number
        p = {label: e.p for label, e in column_estimates.items() if e.p is not None}
        corrected = dict(zip(p, holm(list(p.values())), strict=True))
        for label, e in column_estimates.items():
            is_significant = corrected.get(label, 1.0) < LEVEL
            beats = e.value > 0 and is_significant and can_beat[label]
            rows.setdefault(label, {})[str(column)] = Cell(e.value, None, e.low, e.high, beats)
    return rows, Units(list(names), sorted(n_seeds))


def caption(units: Units) -> str:
    """What the intervals of a table cover."""
    if not units.names:
        return ""
    counts = ", ".join(map(str, units.n_seeds))
    text = f"95 % intervals over {'; '.join(units.names)}; number of seeds: {counts}."
    if 1 in units.n_seeds:
        text += " With 1 seed, an interval covers the text alone, not how training varies."
    return text


def scores_of(rows: pd.DataFrame, score: Score) -> Scores:
    """The scores of one curve in one column, from its rows: run after run, with the same windows in each."""
    n_seeds = rows.run.nunique()
    n_windows = len(rows) // n_seeds
    first = rows[:n_windows]
    value = score.total(rows).to_numpy(dtype=float).reshape(n_seeds, n_windows)
    return Scores(value, first[score.per].to_numpy(dtype=float), first.document.to_numpy(), score is FOUND)


def estimate_one(scores: Scores, subtracted: Scores | None = None,
                 is_paired: bool = False) -> tuple[Estimate, str]:
    """The estimate from scores, less those of the baseline, and what its interval is over."""
    units = units_of(scores.document)
    if units is None:
        total = scores.value.sum(axis=1).mean()
        if subtracted is not None:
            total -= subtracted.value.sum(axis=1).mean()
        n = len(scores.per)
        noun = ("trial" if scores.is_trials else "window") + ("" if n == 1 else "s")
        return Estimate(float(total / scores.per.sum())), f"none, there are only {n} {noun}"
    few = ", since documents are too few: other documents are not covered" if units.name == "windows" else ""
    name = "trials" if scores.is_trials else units.name
    method = two_way_share if scores.is_trials else two_way
    sums_subtracted = None if subtracted is None else units.sums(subtracted.value)
    estimate = method(units.sums(scores.value), units.sums(scores.per), sums_subtracted, is_paired)
    return estimate, f"{units.n} {name}{few}"


# -----------------------------------------------------------------------------------------------------------
# What may be concluded


class Gate(NamedTuple):
    """What a curve must pass, or nothing follows from it: means over seeds, without extension, in nats."""

    loss: float         # on the targets of fixed; NaN where it was not measured
    trigram: float      # a Kneser-Ney trigram of the same training text, on the same targets
    gain: float         # on a repeated passage

    @property
    def is_failed(self) -> bool:
        return self.loss >= self.trigram or self.gain < LEAST_GAIN

    def __str__(self) -> str:
        if math.isnan(self.loss - self.trigram + self.gain):
            return "failed" if self.is_failed else "needs eval.py --protocol fixed,trigram,repeat"
        return (f"{'failed' if self.is_failed else 'passed'}: loss {self.loss:.3f}, trigram "
                f"{self.trigram:.3f}, repeat {self.gain:+.3f}")


def gate_of(curve: Curve, L: int) -> Gate:
    """The figures of the gate: means over seeds, NaN where there are none."""
    at_L = [run.table[(run.table.extend == NO_METHOD) & (run.table.length == L)] for run in curve.runs]
    sums = join(*at_L).groupby(["protocol", "run"])[["nll", "first_nll", "tokens"]].sum()
    losses = (sums.nll / sums.tokens).groupby("protocol").mean()
    gains = ((sums.first_nll - sums.nll) / sums.tokens).groupby("protocol").mean()
    return Gate(losses.get("fixed", math.nan), losses.get("trigram", math.nan), gains.get("repeat", math.nan))


def remarks(curves: Sequence[Curve]) -> list[str]:
    """What differs among runs."""
    lines = []
    runs = {run.name: run for curve in curves for run in curve.runs}
    for key, what in (("commit", "evaluated by different code"), ("dtype", "evaluated in different dtypes"),
                      ("train_dtype", "trained in different dtypes")):
        names: dict[str, list[str]] = {}                # value -> the runs that have it
        for name, run in runs.items():
            value = str(run.head.get(key) or "unknown")[:12]
            names.setdefault(value, []).append(name)
        if len(names) > 1:
            listed = "; ".join(f"{value} ({', '.join(same)})" for value, same in names.items())
            lines.append(f"Warning: {what}: {listed}")
    for curve in curves:
        if is_blind(curve):
            lines.append(f"{curve.label} predicts the same with any context beyond L: it does not see it.")
    lines += [f"Warning: run {run.title}." for run in runs.values() if run.title != run.name]
    return lines


def is_blind(curve: Curve) -> bool:
    """Whether contexts beyond L change none of the losses."""
    fixed = [run.table[(run.table.extend == curve.extend) & (run.table.protocol == "fixed")]
             for run in curve.runs]
    beyond = join(*(rows[rows.length > curve.runs[0].head["seq_len"]] for rows in fixed))
    return len(beyond) > 0 and bool((beyond.nll == beyond.truncated_nll).all())
