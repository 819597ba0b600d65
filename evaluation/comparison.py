"""Compare runs on identical targets: group seeds into curves, and compute tables with intervals.

compare.py describes what the intervals cover, intervals.py how they are computed.
L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from base.errors import UserError
from config import MAY_DIFFER, differences
from evaluation.intervals import LEVEL, Estimate, holm, two_way, two_way_share, units_of
from evaluation.measures import CONTROLLED, FOUND, GAIN, Form
from evaluation.protocols import PROTOCOLS
from evaluation.report import Cell, Cells, Table
from evaluation.results import perplexity
from evaluation.runs import Run, column_of, without_seed
from hf.pretrained import is_pretrained

# column of the .npz -> its sum in a record
SUMS = {"nll": "nll_sum", "truncated_nll": "truncated_nll_sum", "first_nll": "first_nll_sum",
        "control_nll": "control_nll_sum", "tokens": "tokens", "correct": "correct", "trials": "trials"}
LEAST_GAIN = 0.3    # nats per token on a passage repeated inside L; a model below it does not look back
TRUNCATION = ("Loss with the context truncated to L minus loss with all of it, on the same targets: positive "
              "where longer context helps, 0 where it is ignored, negative where it breaks the model.")
CONTROL = ("How much better the second occurrence is predicted than with another passage in place of the "
           "first: 0 where the first is ignored.")


class Curve(NamedTuple):
    """A row of each table: runs that differ only in their seed, under one method of --extend."""

    label: str
    extend: str | None
    runs: list[Run]


def make_curves(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Curve]:
    """A curve for each name and method of --extend: runs of one name differ only in their seed.

    The name of a run is that of --label, else its folder's without -seedN. Raises UserError where runs of one
    name are not samples of one thing.
    """
    if names and len(names) != len(runs):
        raise UserError(f"--label: given {len(names)} times for {len(runs)} runs; give one for each, in the "
                        "same order")
    names = names or [without_seed(run.path) for run in runs]
    groups: dict[str, list[Run]] = {}
    for run, name in zip(runs, names, strict=True):
        groups.setdefault(name, []).append(run)
    curves = []
    for name, group in groups.items():
        first = group[0]
        for run in group:
            pair = f"runs {first.path} and {run.path}, both {name!r}"
            changes = differences(first.config, run.config, MAY_DIFFER["seeds"])
            if without_seed(first.config.train.init_from) != without_seed(run.config.train.init_from):
                changes.append("train.init_from")
            if changes:
                raise UserError(f"{pair}: differ in {', '.join(changes)}; runs of one name must differ only "
                                "in their seed, so give each run a --label")
            if places_of(run) != places_of(first):
                raise UserError(f"{pair}: evaluated differently; give eval.py the same --extend, --protocol "
                                "and --lengths")
        n_seeds = len({run.seed for run in group})
        n_bases = len({run.config.train.init_from for run in group})
        if n_seeds < len(group) or n_bases not in (1, len(group)):
            raise UserError(f"runs {', '.join(str(run.path) for run in group)}, all {name!r}: have the same "
                            "seed or began from the same run: not independent samples; leave one out")
        for extend in dict.fromkeys(r["extend"] for r in first.records):
            label = f"{name} + {extend}" if extend else name
            curves.append(Curve(label, extend, group))
    return curves


def places_of(run: Run) -> set[tuple[Any, ...]]:
    """What was measured of a run."""
    return {(r["extend"], r["protocol"], column_of(r), r.get("depth")) for r in run.records}


def frame_of(curves: Sequence[Curve]) -> pd.DataFrame:
    """Every record of every run, with its curve, its run and the columns of sums: a row of report.csv."""
    rows = []
    for curve in curves:
        for run in curve.runs:
            about = {"label": curve.label, "run": str(run.path), "train_seed": run.seed,
                     "encoding": run.config.position.encoding}
            for r in run.records:
                if r["extend"] == curve.extend:
                    x, column = column_of(r)
                    sums = {name: r.get(key) or 0 for name, key in SUMS.items()}
                    rows.append({**about, "x": x, "column": column, **r, **sums})
    return pd.DataFrame(rows)


# -----------------------------------------------------------------------------------------------------------
# Tables


def make_tables(curves: Sequence[Curve], baseline: Curve, frame: pd.DataFrame, L: int) -> list[Table]:
    """A table of each protocol and one of its gains over the baseline, and of the gains over truncation."""
    failed = [curve.label for curve in curves if gate_of(curve, L).is_failed]
    others = [curve for curve in curves if curve is not baseline]
    measures = [(p.name, p.name, p.title, p.note, p.form) for p in PROTOCOLS.values() if p.name != "trigram"]
    measures += [("gain", "fixed", "Gain over truncation, fixed targets", TRUNCATION, GAIN),
                 ("use", "repeat", "Repeated text, over the control", CONTROL, CONTROLLED)]
    tables = []
    for key, protocol, title, note, form in measures:
        here = frame[frame.protocol == protocol]
        if form is CONTROLLED:                          # not in older records
            here = here[here.control_nll > 0]
        x = here.groupby("column").x.first().sort_values()
        cells = mean_over_seeds(here, form, [curve.label for curve in curves])
        scores, how = estimate(protocol, form, curves)
        gains, how_gains = scores, ""                   # GAIN is over truncation, not over the baseline
        if form is not GAIN:
            gains, how_gains = estimate(protocol, form, others, baseline)
        # into each cell its interval, and whether it beats the baseline
        for label, row in cells.items():
            for column, cell in row.items():
                interval = scores.get(label, {}).get(column, cell)
                beats = gains.get(label, {}).get(column, cell).beats
                low, high = interval.low, interval.high
                if low is not None and high is not None:
                    low, high = sorted((form.figure(low), form.figure(high)))
                row[column] = cell._replace(low=low, high=high, beats=beats)

        truncated = None
        if key == "fixed" and len(here):
            total = here[here.label == baseline.label][["truncated_nll", "tokens"]].sum()
            truncated = perplexity(total.truncated_nll / total.tokens)
        tables.append(Table(key, title, f"{note} {how}".strip(), form, L, x, cells, failed, truncated))
        if form is not GAIN:
            note = f"On the same targets, positive where a curve is better than {baseline.label}. {how_gains}"
            gain = GAIN._replace(x_label=form.x_label)
            if form.figure is float:
                gain = form._replace(y_label=f"difference ({form.y_label})", form=f"+{form.form}")
            title = f"Gain over {baseline.label}, {key}"
            tables.append(Table(f"{key}-gain", title, note, gain, L, x, gains, failed))
    return [table for table in tables if table.rows]


def mean_over_seeds(here: pd.DataFrame, form: Form, labels: Sequence[str]) -> Cells:
    """Label -> column -> the mean over seeds and, of two or more, their standard deviation (n - 1)."""
    sums = here.groupby(["label", "run", "column"])[[*SUMS]].sum()
    figures = (form.score.total(sums) / sums[form.score.per]).map(form.figure)
    cells: Cells = {label: {} for label in labels}
    for (label, column), group in figures.groupby(["label", "column"]):
        seeds = group.to_numpy(dtype=float)
        spread = float(seeds.std(ddof=1)) if len(seeds) > 1 else None
        cells[label][column] = Cell(float(seeds.mean()), spread)
    return {label: row for label, row in cells.items() if row}


# -----------------------------------------------------------------------------------------------------------
# Intervals, of scores and of differences to the baseline


def estimate(protocol: str, form: Form, curves: Sequence[Curve],
             baseline: Curve | None = None) -> tuple[Cells, str]:
    """Label -> column -> the curve's score, or the baseline's subtracted from it; and what intervals cover.

    Without records of each window or trial there are no cells. A cell is better than 0 or the baseline
    (`beats`) if that survives Holm's correction over the curves of its column.
    """
    rows: Cells = {}
    units: dict[str, None] = {}                     # what intervals are over, in order
    all_n_seeds: set[int] = set()
    lengths: dict[tuple[float, str], int] = {}      # place and heading of each column -> its length
    for curve in (*curves, baseline) if baseline else curves:
        for r in curve.runs[0].records:
            if (r["extend"], r["protocol"]) == (curve.extend, protocol):
                lengths[column_of(r)] = r["length"]

    for (_, column), length in sorted(lengths.items()):
        subtracted = None                           # the baseline's scores
        if baseline:
            pair = scores_of(protocol, form, length, baseline)
            if pair is None:
                continue
            subtracted = pair[0]
        estimates: dict[str, Estimate] = {}
        can_beat: dict[str, bool] = {}
        for curve in curves:
            pair = scores_of(protocol, form, length, curve)
            if pair is None:
                continue
            scores, columns = pair
            is_same = baseline is not None and curve.runs is baseline.runs          # methods of --extend
            estimates[curve.label], unit = estimate_one(form, scores, columns, subtracted, is_same)
            units[unit] = None
            n_seeds = len(scores) if subtracted is None else min(len(scores), len(subtracted))
            all_n_seeds.add(n_seeds)
            # one trained seed tells nothing of another; a pretrained model is what it is
            can_beat[curve.label] = n_seeds > 1 or is_pretrained(curve.runs[0].path)
        # the column is complete: correct its p-values for their number
        p = {label: e.p for label, e in estimates.items() if e.p is not None}
        corrected = dict(zip(p, holm(list(p.values())), strict=True))
        for label, e in estimates.items():
            is_significant = corrected.get(label, 1.0) < LEVEL
            beats = e.value > 0 and is_significant and can_beat[label]
            rows.setdefault(label, {})[column] = Cell(e.value, None, e.low, e.high, beats)

    if not rows:
        return rows, ""
    counts = ", ".join(map(str, sorted(all_n_seeds)))
    how = f"95 % intervals over {'; '.join(units)}; number of seeds: {counts}."
    if 1 in all_n_seeds:
        how += " With 1 seed, an interval covers the text alone, not how training varies."
    return rows, how


def scores_of(protocol: str, form: Form, length: int,
              curve: Curve) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
    """The score of each window or trial, (seeds, windows), and their columns; None for loss by position."""
    names = filter(None, (form.score.plus, form.score.minus, form.score.per, "document"))
    keys = {name: f"{curve.extend or 'plain'}/{protocol}/{length}/{name}" for name in names}
    scores = []
    for run in curve.runs:
        if set(keys.values()) - run.windows.keys():
            return None
        columns = {name: run.windows[key].astype(float) for name, key in keys.items()}
        scores.append(form.score.total(columns))
    return np.stack(scores), columns


def estimate_one(form: Form, scores: np.ndarray, columns: dict[str, np.ndarray],
                 subtracted: np.ndarray | None = None, is_same: bool = False) -> tuple[Estimate, str]:
    """The estimate from the scores of windows (seeds, windows), and what its interval is over.

    `subtracted` are the baseline's scores, of the same runs or of others.
    """
    per = columns[form.score.per]
    units = units_of(columns["document"])
    if units is None:
        total = scores.sum(axis=1).mean()
        if subtracted is not None:
            total -= subtracted.sum(axis=1).mean()
        what = "trials" if form.score is FOUND else "windows"
        return Estimate(float(total / per.sum())), f"none, there are only {len(per)} {what}"
    few = ", since documents are too few: other documents are not covered" if units.name == "windows" else ""
    name = "trials" if form.score is FOUND else units.name
    method = two_way_share if form.score is FOUND else two_way
    sums_subtracted = None if subtracted is None else units.sums(subtracted)
    return method(units.sums(scores), units.sums(per), sums_subtracted, is_same), f"{units.n} {name}{few}"


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
    values: dict[str, list[float]] = {"fixed": [], "trigram": [], "repeat": []}
    for run in curve.runs:
        for r in run.records:
            if (r["extend"], r["length"]) == (None, L) and r["protocol"] in values:
                total = r["first_nll_sum"] - r["nll_sum"] if r["protocol"] == "repeat" else r["nll_sum"]
                values[r["protocol"]].append(total / r["tokens"])
    means = {name: sum(x) / len(x) if x else math.nan for name, x in values.items()}
    return Gate(means["fixed"], means["trigram"], means["repeat"])


def remarks(curves: Sequence[Curve]) -> list[str]:
    """What differs among runs."""
    lines = []
    runs = {str(run.path): run for curve in curves for run in curve.runs}
    for key, what in (("commit", "evaluated by different code"), ("dtype", "evaluated in different dtypes"),
                      ("train_dtype", "trained in different dtypes")):
        paths: dict[str, list[str]] = {}                # value -> the runs that have it
        for path, run in runs.items():
            value = str(run.head.get(key) or "unknown")[:12]
            paths.setdefault(value, []).append(path)
        if len(paths) > 1:
            listed = "; ".join(f"{value} ({', '.join(same)})" for value, same in paths.items())
            lines.append(f"Warning: {what}: {listed}")
    for curve in curves:
        gains = []                                      # over truncation, beyond L
        for run in curve.runs:
            gains += [r["gain"] for r in run.records if r["length"] > run.head["seq_len"]
                      and (r["extend"], r["protocol"]) == (curve.extend, "fixed")]
        if gains and not any(gains):
            lines.append(f"{curve.label} predicts the same with any context beyond L: it does not see it.")
    lines += [f"Warning: run {run.name}." for run in runs.values() if run.name != str(run.path)]
    return lines
