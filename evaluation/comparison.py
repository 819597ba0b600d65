"""Compare runs on identical targets: group seeds into curves, and compute tables with intervals.

compare.py describes what the intervals cover, intervals.py how they are computed.
L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluation.intervals import LEVEL, Estimate, holm, two_way, two_way_share, units_of
from evaluation.measures import FOUND, GAIN, LOSS, MEASURES, Measure, Score
from evaluation.report import Cell, Map, Table
from evaluation.results import Record
from evaluation.runs import SUMS, Column, Run, column_of
from hf.pretrained import is_pretrained
from runtime.errors import UserError
from runtime.files import read_text

MOST_KEYS = 3               # config keys in a label
TRAINING_POINTS = 60        # of a training curve
LOG_LIMIT = 2**28           # bytes of metrics.jsonl
ENTRY = 0.3     # nats per token that a passage repeated inside L must gain in a study of far context
FORMULA = ("=", "+", "-", "@", "\t", "\r")      # with which a cell begins that a spreadsheet computes
TRAINING = {"loss": "Training loss", "val_loss": "Validation loss during training"}


class Curve(NamedTuple):
    """A row of each table: runs that differ only in their seed, under one method of --extend."""

    label: str
    extend: str | None
    runs: list[Run]

    def records(self, protocol: str) -> list[list[Record]]:
        """The records of each run."""
        return [[r for r in run.records if (r["extend"], r["protocol"]) == (self.extend, protocol)]
                for run in self.runs]

    def windows(self, run: Run, score: Score, protocol: str, length: int) -> dict[str, np.ndarray] | None:
        """The columns of a score for each window or trial of a run; None in older evaluations of probes."""
        keys = {name: f"{self.extend or 'plain'}/{protocol}/{length}/{name}"
                for name in (score.plus, score.minus, score.per, "document") if name}
        found = {name: run.windows[key].astype(float) for name, key in keys.items() if key in run.windows}
        return found if len(found) == len(keys) else None


# -----------------------------------------------------------------------------------------------------------
# Curves and their labels


def make_curves(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Curve]:
    """Group runs that differ only in seeds and [run], and split each group by method of --extend.

    Runs that began from runs (train.init_from) differ only in seeds if this holds for those runs too.

    `names` are the labels of --label, one for each run. Raises UserError where they do not fit the groups.
    """
    if names and len(names) != len(runs):
        raise UserError(f"--label: given {len(names)} times for {len(runs)} runs; give one for each, in the "
                        "same order")
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        own = str(run.path) if is_pretrained(run.path) else ""      # has no seed: never a second sample
        groups.setdefault(json.dumps(settings_of(run), sort_keys=True) + own, []).append(i)
    if names:
        found = [{names[i] for i in group} for group in groups.values()]
        if any(len(label) > 1 for label in found) or len(set.union(*found)) < len(groups):
            raise UserError(f"--label {', '.join(names)}: runs that differ only in train.seed need the same "
                            "label, all others need different ones")
        chosen = [names[group[0]] for group in groups.values()]
    else:
        chosen = labels([runs[group[0]] for group in groups.values()])
    curves = []
    for label, group in zip(chosen, groups.values(), strict=True):
        seeds = [runs[i] for i in group]
        check_replicates(seeds)
        for extend in dict.fromkeys(r["extend"] for r in seeds[0].records):
            curves.append(Curve(f"{label} + {extend}" if extend else label, extend, seeds))
    return curves


def settings_of(run: Run) -> dict[str, Any]:
    """Dotted key -> value of everything in which two curves may differ.

    Instead of the folder of train.init_from there are the settings of that run, as train.init_from.KEY.
    """
    flat: dict[str, Any] = {}

    def add(prefix: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                add(f"{prefix}{key}.", value)
            else:
                flat[prefix + key] = value

    configs = [run.config, *(config for _, config in run.bases)]
    for n, config in enumerate(configs):
        add("train.init_from." * n, config.model_dump(exclude={"run": True, "train": {"seed"}}))
        if n + 1 < len(configs):
            del flat["train.init_from." * n + "train.init_from"]
    return flat


def labels(runs: Sequence[Run]) -> list[str]:
    """The encoding's name; where several share it, also the config keys that differ, or else the folder."""
    by_encoding: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        by_encoding.setdefault(run.config.position.encoding, []).append(i)
    names = [""] * len(runs)
    for encoding, group in by_encoding.items():
        found = differences_in_words([settings_of(runs[i]) for i in group])
        words = found or [f"({name})" for name in folder_names([runs[i].path for i in group])]
        for i, word in zip(group, words, strict=True):
            names[i] = f"{encoding} {word}".strip() if len(group) > 1 else encoding
    return names


def differences_in_words(flats: Sequence[dict[str, Any]]) -> list[str]:
    """For each config the keys that differ among the configs, as "lr=0.001"; [] if there are too many."""
    def word(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:g}"
        return value if isinstance(value, str) else json.dumps(value)

    keys = [key for key in dict.fromkeys(key for flat in flats for key in flat)
            if any(flat.get(key) != flats[0].get(key) for flat in flats)]
    if len(keys) > MOST_KEYS:
        return []
    words = [", ".join(f"{key.rpartition('.')[2]}={word(flat[key])}" for key in keys
                       if flat.get(key) is not None) for flat in flats]
    return words if len(set(words)) == len(words) else []


def folder_names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of their paths as is needed to distinguish them."""
    for n_parts in range(1, 1 + max(len(path.resolve().parts) for path in paths)):
        names = ["/".join(path.resolve().parts[-n_parts:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    raise AssertionError("two configs in one folder")


def check_replicates(group: Sequence[Run]) -> None:
    """Raise UserError unless runs of one config differ in their seed and have the same evaluations."""
    def measured_places(run: Run) -> set[Any]:
        return {(r["extend"], r["protocol"], r["length"], column_of(r), r.get("depth")) for r in run.records}

    seeds: dict[tuple[int, ...], Run] = {}
    began: dict[str | None, Run] = {}                   # train.init_from -> the first run that began there
    for run in group:
        other = seeds.setdefault(run.seeds, run)
        if other is not run:
            raise UserError(f"runs {other.path} and {run.path}: same config, same train.seed = {run.seed}; "
                            "leave one out, it is not a second sample")
        init_from = run.config.train.init_from
        other = began.setdefault(init_from, run)
        if run.head["init_sha256"] != other.head["init_sha256"]:
            raise UserError(f"runs {other.path} and {run.path}: seeds of one config that began from "
                            f"different weights of {init_from}, which was trained on in between; start both "
                            "from the same ones")
        if other is not run and len({run.config.train.init_from for run in group}) > 1:
            raise UserError(f"runs {other.path} and {run.path}: both began from {init_from}, and others of "
                            "their group did not: not independent samples; compare one run from each")
        if measured_places(run) != measured_places(group[0]):
            raise UserError(f"runs {group[0].path} and {run.path}: seeds of one config, evaluated "
                            "differently; give eval.py the same --extend, --protocol and --lengths")


# -----------------------------------------------------------------------------------------------------------
# Tables


def make_tables(curves: Sequence[Curve], baseline: Curve, L: int) -> list[Table]:
    """Tables of all measures, gains over truncation and over the baseline, and training, if measured."""
    tables: list[Table] = []

    def add(key: str, measure: Measure, rows: dict[str, dict[Column, Cell]], L: int | None = L) -> None:
        columns = sorted({column for row in rows.values() for column in row})
        cells = {label: [row.get(column) for column in columns] for label, row in rows.items() if row}
        if columns:
            tables.append(Table(key, measure.title, measure.note, measure.x_label, measure.y_label,
                                measure.scale, measure.form, L, columns, cells))

    others = [curve for curve in curves if curve is not baseline]
    gains = {measure.protocol: compared(measure, others, baseline) for measure in MEASURES}
    for measure in (*MEASURES, GAIN):
        rows = measured(measure, curves)
        own, how = compared(measure, curves) if measure.shows_score else ({}, "")
        beaten = own if measure is GAIN else gains[measure.protocol][0]
        for label, row in rows.items():
            for column, cell in row.items():
                interval = own.get(label, {}).get(column, cell)
                better = beaten.get(label, {}).get(column, cell)
                row[column] = cell._replace(low=interval.low, high=interval.high, beats=better.beats)
        add("gain" if measure is GAIN else measure.protocol,
            measure._replace(note=f"{measure.note} {how}".strip()), rows)
    for measure in MEASURES:
        rows, how = gains[measure.protocol]
        title = f"Gain over {baseline.label}, {measure.protocol}"
        if measure.shows_score:
            note = f"The curve's number minus that of {baseline.label}: positive where the curve is better."
            gain = measure._replace(y_label=f"difference ({measure.y_label})", form=f"+{measure.form}")
        else:
            note = (f"Loss of {baseline.label} minus the curve's loss on the same targets: positive where "
                    "the curve is better.")
            gain = GAIN
        add(f"{measure.protocol}-gain", gain._replace(title=title, note=f"{note} {how}"), rows)
    for key, title in TRAINING.items():
        note = "As train.py logged it, in nats per token, averaged over the steps since the previous point."
        measure = Measure("", title, note, "step", "loss (nats/token)", "linear", ".3f", LOSS)
        add(f"train-{key}", measure, training_curves(key, curves), L=None)
    return tables


def measured(measure: Measure, curves: Sequence[Curve]) -> dict[str, dict[Column, Cell]]:
    """Label -> column -> mean and standard deviation over seeds."""
    rows = {}
    for curve in curves:
        seeds = [pooled(records, column_of) for records in curve.records(measure.protocol)]
        rows[curve.label] = {column: over_seeds([measure.number(sums[column]) for sums in seeds])
                             for column in seeds[0]}
    return rows


def pooled(records: Iterable[Record], where: Callable[[Record], Any]) -> dict[Any, dict[str, float]]:
    """Sums over the records of each place: never a mean of means."""
    cells: dict[Any, dict[str, float]] = {}
    for r in records:
        cell = cells.setdefault(where(r), dict.fromkeys(SUMS, 0.0))
        for column, key in SUMS.items():
            cell[column] += r.get(key) or 0
    return cells


def over_seeds(values: Sequence[float]) -> Cell:
    """Mean, and with two seeds or more the standard deviation (n - 1)."""
    with np.errstate(invalid="ignore"):     # a model that diverged has infinite perplexity
        return Cell(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def probe_map(measure: Measure, curves: Sequence[Curve]) -> Map:
    """A probe by length and depth or distance, summed over seeds."""
    def where(r: Record) -> tuple[int, float]:
        return r["length"], r[measure.place]

    cells = {curve.label: {at: measure.number(sums) for at, sums in pooled(
             (r for records in curve.records(measure.protocol) for r in records), where).items()}
             for curve in curves}
    return Map(f"{measure.protocol}-map", f"{measure.title}: {measure.y_label}", measure.place, measure.form,
               {label: row for label, row in cells.items() if row})


def training_curves(key: str, curves: Sequence[Curve]) -> dict[str, dict[Column, Cell]]:
    """Label -> step -> mean over the lines of metrics.jsonl since the previous point, then over seeds.

    The longest run is divided into TRAINING_POINTS parts. A part is placed at its last logged step.
    """
    logs = {curve.label: [training_log(run.path, key) for run in curve.runs]
            for curve in curves if curve.extend is None}
    steps = sorted({step for seeds in logs.values() for log in seeds for step in log})
    size = math.ceil(steps[-1] / TRAINING_POINTS) if steps else 1
    last = {(step - 1) // size: step for step in steps}                 # part -> its last step
    rows: dict[str, dict[Column, Cell]] = {}
    for label, seeds in logs.items():
        parts: dict[int, list[float]] = {}
        for log in seeds:
            own: dict[int, list[float]] = {}
            for step, value in log.items():
                own.setdefault((step - 1) // size, []).append(value)
            for part, values in own.items():
                parts.setdefault(part, []).append(float(np.mean(values)))
        rows[label] = {(last[part], str(last[part])): over_seeds(values) for part, values in parts.items()}
    return rows


def training_log(folder: Path, key: str) -> dict[int, float]:
    """Step -> loss or val_loss of metrics.jsonl, without damaged lines; empty where there is no such file."""
    found: dict[int, float] = {}
    with suppress(OSError, ValueError):
        for line in read_text(folder / "metrics.jsonl", LOG_LIMIT).splitlines():
            with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                entry = json.loads(line)
                found[int(entry["step"])] = float(entry[key])
    return {step: value for step, value in found.items() if math.isfinite(value)}


# -----------------------------------------------------------------------------------------------------------
# Intervals, of scores and of differences to the baseline


def compared(measure: Measure, curves: Sequence[Curve],
             baseline: Curve | None = None) -> tuple[dict[str, dict[Column, Cell]], str]:
    """Label -> column -> the curve's score, or the baseline's subtracted from it; and what intervals cover.

    Without records of each window or trial there are no cells. A cell is better than 0 or the baseline
    (`beats`) if that survives Holm's correction over the curves of its column.
    """
    rows: dict[str, dict[Column, Cell]] = {}
    units: dict[str, list[str]] = {}                # what intervals are over -> the columns where they are
    n_seeds: dict[str, int] = {}
    parts: list[tuple[float, float, float]] = []
    places = {column_of(r): r["length"] for curve in curves for r in curve.records(measure.protocol)[0]}
    for column, length in sorted(places.items()):
        found: dict[str, Estimate] = {}
        for curve in curves:
            one = estimated(measure, length, curve, baseline)
            if one:
                found[curve.label], n_seeds[curve.label], name = one
                if column[1] not in units.setdefault(name, []):
                    units[name].append(column[1])
        parts += [e.parts for label, e in found.items() if n_seeds[label] > 1 and sum(e.parts) > 0]
        p = {label: e.p for label, e in found.items() if e.p is not None}
        corrected = dict(zip(p, holm(list(p.values())), strict=True))
        for label, e in found.items():
            beats = e.value > 0 and corrected.get(label, 1.0) < LEVEL
            rows.setdefault(label, {})[column] = Cell(e.value, None, e.low, e.high, beats)
    return rows, in_words(units, n_seeds, parts) if rows else ""


def estimated(measure: Measure, length: int, curve: Curve,
              baseline: Curve | None) -> tuple[Estimate, int, str] | None:
    """The estimate, its number of seeds, and what its interval is over; None without sums of each window."""
    score, protocol = measure.score, measure.protocol
    columns: dict[str, np.ndarray] = {}
    d = []
    for run, other in paired(curve, baseline or curve):
        found = curve.windows(run, score, protocol, length)
        subtracted = baseline.windows(other, score, protocol, length) if baseline else {}
        if found is None or subtracted is None:
            return None
        columns = found
        with np.errstate(invalid="ignore"):                             # both diverged
            d.append(score.total(columns) - (score.total(subtracted) if baseline else 0))
    sums, per, units = np.stack(d), columns[score.per], units_of(columns["document"])
    if units is None:
        value = float(sums.sum() / len(sums) / per.sum())
        what = "trials" if score is FOUND else "windows"
        return Estimate(value), len(d), f"none, there are only {len(per)} {what}"
    sums, per = units.sums(sums), units.sums(per)
    few = ", since documents are too few: other documents are not covered" if units.name == "windows" else ""
    if score is FOUND:
        return two_way_share(sums, per, baseline is not None), len(d), f"{units.n} trials{few}"
    return two_way(sums, per), len(d), f"{units.n} {units.name}{few}"


def paired(curve: Curve, baseline: Curve) -> list[tuple[Run, Run]]:
    """Their runs of the same seed, whose data order is the same; then the others, as many as both have."""
    left = {run.seeds: run for run in baseline.runs}
    same = [(run, left.pop(run.seeds)) for run in curve.runs if run.seeds in left]
    others = [run for run in curve.runs if all(run is not one for one, _ in same)]
    return [*same, *zip(others, left.values(), strict=False)]


def in_words(units: dict[str, list[str]], n_seeds: dict[str, int],
             parts: Sequence[tuple[float, float, float]]) -> str:
    """What the intervals of a table are over, and which part of the variance is largest."""
    def among(found: dict[str, list[str]], before: str) -> str:
        return "; ".join(f"{name} ({before}{', '.join(rest)})" if len(found) > 1 else name
                         for name, rest in found.items())

    seeds: dict[str, list[str]] = {}
    for label, n in sorted(n_seeds.items(), key=lambda item: item[1]):
        seeds.setdefault(counted(n, "seed"), []).append(label)
    text = f"95 % intervals over {among(units, 'at ')}, and {among(seeds, '')}."
    if "1 seed" in seeds:
        text += " With 1 seed, an interval covers the text alone, not how training varies."
    if parts:
        shares = np.median([np.divide(part, sum(part)) for part in parts], axis=0)
        text += (f" Shares of the variance, median over the table: seeds {shares[0]:.0%}, text "
                 f"{shares[1]:.0%}, both together {shares[2]:.0%}.")
    return text


def counted(n: int, what: str) -> str:
    """1 seed, 2 seeds."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def with_seeds(curves: Sequence[Curve]) -> list[Curve]:
    """The curves, with their number of seeds in the label if it is not the same for all."""
    if len({len(curve.runs) for curve in curves}) == 1:
        return list(curves)
    return [curve._replace(label=f"{curve.label} ({counted(len(curve.runs), 'seed')})") for curve in curves]


def remarks(curves: Sequence[Curve], baseline: Curve, L: int) -> list[str]:
    """What the report says about all tables: the numbers of seeds, and whether the entry criterion is met.

    The criterion: a model that does not predict a repeated passage better inside L cannot show how it uses
    what is further away.
    """
    if len({len(curve.runs) for curve in curves}) == 1:
        found = [f"Each curve has {counted(len(baseline.runs), 'seed')}."]
    else:
        found = ["The curves have different numbers of seeds. A difference is over as many seeds as both of "
                 "its curves have."]
    measure = next(measure for measure in MEASURES if measure.protocol == "repeat")
    inside = [pooled((r for r in records if r["length"] == L), column_of)
              for records in baseline.records("repeat") if records]
    if not inside:
        return found
    criterion = (f"Entry criterion: gain of {baseline.label} on a passage repeated inside L = {L}, at least "
                 f"{ENTRY} nats per token")
    gains = [measure.number(sums) for places in inside for sums in places.values()]
    if not gains:
        return [*found, f"{criterion}: not measured; run eval.py --protocol repeat --lengths {L}."]
    is_met = np.mean(gains) >= ENTRY
    return [*found, f"{criterion}: {np.mean(gains):.3f}, "
            + ("met." if is_met else "not met: nothing about the use of far context follows.")]


def write_csv(curves: Sequence[Curve], path: Path) -> None:
    """Write every record of every run on a line, with its curve, run and training seed.

    Text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    rows = [{"label": curve.label, "run": str(run.path), "train_seed": run.seed,
             "encoding": run.config.position.encoding, **run.head, **r}
            for curve in curves for run in curve.runs for r in run.records if r["extend"] == curve.extend]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        keys = list(dict.fromkeys(key for row in rows for key in row))
        writer.writerow(quoted(keys))
        writer.writerows(quoted([row.get(key) for key in keys]) for row in rows)


def quoted(cells: Sequence[Any]) -> list[Any]:
    """A line of the CSV in which no text begins like a formula."""
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in cells]
