"""Compare runs on identical targets: group seeds into curves, and compute tables with intervals.

compare.py describes what the intervals cover, intervals.py how they are computed.
L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from base.errors import UserError
from config import MAY_DIFFER, differences
from evaluation.intervals import LEVEL, Estimate, holm, two_way, two_way_share, units_of
from evaluation.measures import CONTROLLED, FOUND, GAIN, Form
from evaluation.protocols import EVERY, Floor
from evaluation.report import Cell, Cells, Table
from evaluation.results import Record, perplexity
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
    groups: dict[str, list[Run]] = {}
    for run, name in zip(runs, names or [without_seed(run.path) for run in runs], strict=True):
        groups.setdefault(name, []).append(run)
    for name, group in groups.items():
        for run in group:
            pair = f"runs {group[0].path} and {run.path}, both {name!r}"
            before, after = (without_seed(x.config.train.init_from) for x in (group[0], run))
            changes = differences(group[0].config, run.config, MAY_DIFFER["seeds"])
            if changes or before != after:
                raise UserError(f"{pair}: differ in {', '.join(changes) or 'train.init_from'}; runs of one "
                                "name must differ only in their seed, so give each run a --label")
            if places_of(run) != places_of(group[0]):
                raise UserError(f"{pair}: evaluated differently; give eval.py the same --extend, --protocol "
                                "and --lengths")
        n_bases = len({run.config.train.init_from for run in group})
        if len({run.seed for run in group}) < len(group) or n_bases not in (1, len(group)):
            raise UserError(f"runs {', '.join(str(run.path) for run in group)}, all {name!r}: have the same "
                            "seed or began from the same run: not independent samples; leave one out")
    return [Curve(f"{name} + {extend}" if extend else name, extend, group) for name, group in groups.items()
            for extend in dict.fromkeys(r["extend"] for r in group[0].records)]


def places_of(run: Run) -> set[tuple[Any, ...]]:
    """What was measured of a run."""
    return {(r["extend"], r["protocol"], column_of(r), r.get("depth")) for r in run.records}


def frame_of(curves: Sequence[Curve]) -> pd.DataFrame:
    """Every record of every run, with its curve, its run and the columns of sums: a row of report.csv."""
    return pd.DataFrame([
        {"label": curve.label, "run": str(run.path), "train_seed": run.seed,
         "encoding": run.config.position.encoding, "x": column_of(r)[0], "column": column_of(r)[1], **r,
         **{name: r.get(key) or 0 for name, key in SUMS.items()}}
        for curve in curves for run in curve.runs for r in run.records if r["extend"] == curve.extend])


# -----------------------------------------------------------------------------------------------------------
# Tables


def make_tables(curves: Sequence[Curve], baseline: Curve, frame: pd.DataFrame, L: int) -> list[Table]:
    """A table of each protocol and one of its gains over the baseline, and of the gains over truncation."""
    tables, failed = [], [curve.label for curve in curves if gate_of(curve, L).is_failed]
    others = [curve for curve in curves if curve is not baseline]
    for key, protocol, title, note, form in [
            *((p.name, p.name, p.title, p.note, p.form) for p in EVERY.values() if not isinstance(p, Floor)),
            ("gain", "fixed", "Gain over truncation, fixed targets", TRUNCATION, GAIN),
            ("use", "repeat", "Repeated text, over the control", CONTROL, CONTROLLED)]:
        here = frame[frame.protocol == protocol]
        if form is CONTROLLED:                          # not in older records
            here = here[here.control_nll > 0]
        x = here.groupby("column").x.first().sort_values()
        cells = measured(here, form, [curve.label for curve in curves])
        own, how = compared(protocol, form, curves)
        over, over_how = (own, "") if form is GAIN else compared(protocol, form, others, baseline)
        for label, row in cells.items():
            for column, cell in row.items():
                interval = own.get(label, {}).get(column, cell)
                better = over.get(label, {}).get(column, cell)
                row[column] = cell._replace(beats=better.beats)
                if interval.low is not None and interval.high is not None:
                    low, high = sorted(map(form.figure, (interval.low, interval.high)))
                    row[column] = row[column]._replace(low=low, high=high)
        tables.append(Table(key, title, f"{note} {how}".strip(), form, L, x, cells, failed))
        if key == "fixed" and len(here):
            total = here[here.label == baseline.label][["truncated_nll", "tokens"]].sum()
            tables[-1] = tables[-1]._replace(truncated=perplexity(total.truncated_nll / total.tokens))
        if form is not GAIN:
            note = f"On the same targets, positive where a curve is better than {baseline.label}. {over_how}"
            gain = form._replace(y_label=f"difference ({form.y_label})", form=f"+{form.form}") \
                if form.figure is float else GAIN._replace(x_label=form.x_label)
            tables.append(Table(f"{key}-gain", f"Gain over {baseline.label}, {key}", note, gain, L, x, over,
                                failed))
    return [table for table in tables if table.rows]


def measured(here: pd.DataFrame, form: Form, labels: Sequence[str]) -> Cells:
    """Label -> column -> the mean over seeds and, of two or more, their standard deviation (n - 1)."""
    sums = here.groupby(["label", "run", "column"])[[*SUMS]].sum()
    cells: Cells = {label: {} for label in labels}
    for (label, column), seeds in numbers(sums, form).groupby(["label", "column"]):
        found = seeds.to_numpy(dtype=float)
        cells[label][column] = Cell(float(found.mean()), float(found.std(ddof=1)) if len(found) > 1 else None)
    return {label: row for label, row in cells.items() if row}


def numbers(sums: pd.DataFrame, form: Form) -> pd.Series:
    """What is shown, from sums."""
    return (form.score.total(sums) / sums[form.score.per]).map(form.figure)


# -----------------------------------------------------------------------------------------------------------
# Intervals, of scores and of differences to the baseline


def compared(protocol: str, form: Form, curves: Sequence[Curve],
             baseline: Curve | None = None) -> tuple[Cells, str]:
    """Label -> column -> the curve's score, or the baseline's subtracted from it; and what intervals cover.

    Without records of each window or trial there are no cells. A cell is better than 0 or the baseline
    (`beats`) if that survives Holm's correction over the curves of its column.
    """
    rows: Cells = {}
    pretrained = [curve.label for curve in curves if is_pretrained(curve.runs[0].path)]
    units: dict[str, None] = {}                     # what intervals are over, in order
    n_seeds: set[int] = set()
    both = [*curves, *([baseline] if baseline else [])]
    places = {column_of(r): r["length"] for curve in both for r in curve.runs[0].records
              if (r["extend"], r["protocol"]) == (curve.extend, protocol)}
    for (_, column), length in sorted(places.items()):
        scored = {curve.label: one for curve in both if (one := windows_of(protocol, form, length, curve))}
        if baseline and baseline.label not in scored:
            continue
        found: dict[str, Estimate] = {}
        seeds_of: dict[str, int] = {}
        for curve in curves:
            if curve.label in scored:
                d, columns = scored[curve.label]
                other = scored[baseline.label][0] if baseline else None
                is_same = baseline is not None and curve.runs is baseline.runs      # methods of --extend
                found[curve.label], name = estimated(form, d, columns, other, is_same)
                seeds_of[curve.label] = min(len(d), len(d if other is None else other))
                units[name] = None
        n_seeds |= {*seeds_of.values()}
        p = {label: e.p for label, e in found.items() if e.p is not None}
        corrected = dict(zip(p, holm(list(p.values())), strict=True))
        for label, e in found.items():
            beats = e.value > 0 and corrected.get(label, 1.0) < LEVEL and (
                seeds_of[label] > 1 or label in pretrained)             # one seed tells nothing of another
            rows.setdefault(label, {})[column] = Cell(e.value, None, e.low, e.high, beats)
    if not rows:
        return rows, ""
    counts = ", ".join(map(str, sorted(n_seeds)))
    how = f"95 % intervals over {'; '.join(units)}; number of seeds: {counts}."
    if 1 in n_seeds:
        how += " With 1 seed, an interval covers the text alone, not how training varies."
    return rows, how


def windows_of(protocol: str, form: Form, length: int,
               curve: Curve) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
    """The score of each window or trial, (seeds, windows), and their columns; None for loss by position."""
    names = filter(None, (form.score.plus, form.score.minus, form.score.per, "document"))
    keys = {name: f"{curve.extend or 'plain'}/{protocol}/{length}/{name}" for name in names}
    if any(key not in run.windows for run in curve.runs for key in keys.values()):
        return None
    columns = [{name: run.windows[key].astype(float) for name, key in keys.items()} for run in curve.runs]
    return np.stack([form.score.total(each) for each in columns]), columns[-1]


def estimated(form: Form, d: np.ndarray, columns: dict[str, np.ndarray], other: np.ndarray | None = None,
              is_same: bool = False) -> tuple[Estimate, str]:
    """The estimate from the scores of windows (seeds, windows), and what its interval is over.

    `other` are the baseline's, which are of the same runs or of others.
    """
    per, units = columns[form.score.per], units_of(columns["document"])
    if units is None:
        what = "trials" if form.score is FOUND else "windows"
        value = d.sum(axis=1).mean() - (0 if other is None else other.sum(axis=1).mean())
        return Estimate(float(value / per.sum())), f"none, there are only {len(per)} {what}"
    sums, per, others = units.sums(d), units.sums(per), None if other is None else units.sums(other)
    few = ", since documents are too few: other documents are not covered" if units.name == "windows" else ""
    if form.score is FOUND:
        return two_way_share(sums, per, others, is_same), f"{units.n} trials{few}"
    return two_way(sums, per, others, is_same), f"{units.n} {units.name}{few}"


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
    def mean(protocol: str, number: Callable[[Record], float]) -> float:
        found = [number(r) for run in curve.runs for r in run.records
                 if (r["extend"], r["protocol"], r["length"]) == (None, protocol, L)]
        return sum(found) / len(found) if found else math.nan

    loss, trigram = (mean(name, lambda r: r["nll_sum"] / r["tokens"]) for name in ("fixed", "trigram"))
    return Gate(loss, trigram, mean("repeat", lambda r: (r["first_nll_sum"] - r["nll_sum"]) / r["tokens"]))


def remarks(curves: Sequence[Curve]) -> list[str]:
    """What differs among runs."""
    found, runs = [], {str(run.path): run for curve in curves for run in curve.runs}
    for key, what in (("commit", "evaluated by different code"), ("dtype", "evaluated in different dtypes"),
                      ("train_dtype", "trained in different dtypes")):
        values: dict[str, list[str]] = {}
        for path, run in runs.items():
            values.setdefault(str(run.head.get(key) or "unknown")[:12], []).append(path)
        if len(values) > 1:
            listed = "; ".join(f"{value} ({', '.join(paths)})" for value, paths in values.items())
            found.append(f"Warning: {what}: {listed}")
    for curve in curves:
        beyond = [r for run in curve.runs for r in run.records if (r["extend"], r["protocol"]) == (
            curve.extend, "fixed") and r["length"] > run.head["seq_len"]]
        if beyond and not any(r["gain"] for r in beyond):
            found.append(f"{curve.label} predicts the same with any context beyond L: it does not see it.")
    found += [f"Warning: run {run.name}." for run in runs.values() if run.name != str(run.path)]
    return found
