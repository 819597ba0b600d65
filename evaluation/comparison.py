"""Compare runs on identical targets: read them, group seeds into curves, and compute tables with intervals.

compare.py describes what the intervals cover, intervals.py how they are computed.
L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import Config, load_config
from data.loader import read_meta
from evaluation import results
from evaluation.intervals import LEVEL, Estimate, holm, two_way, two_way_share, units_of
from evaluation.measures import FOUND, GAIN, LOSS, MEASURES, Measure, Score
from evaluation.report import Cell, Map, Table
from evaluation.results import TARGETS, Record
from hf.pretrained import files_sha256, is_pretrained, pretrained_config
from runtime import checkpoint
from runtime.errors import UserError, shortened
from runtime.files import read_text

MOST_KEYS = 3               # config keys in a label
TRAINING_POINTS = 60        # of a training curve
LOG_LIMIT = 2**28           # bytes of metrics.jsonl
HEAD = ("seq_len", "tokenizer", "data", "seed")     # of an eval JSON: what runs must have in common
KNOWN_LATER = ("data_sha256", "step", "checkpoint_sha256", "init_sha256", "dtype")     # what older ones lack
# column of the .npz -> its sum in a record
SUMS = {"nll": "nll_sum", "truncated_nll": "truncated_nll_sum", "first_nll": "first_nll_sum",
        "tokens": "tokens", "correct": "correct", "trials": "trials"}
NUMBERS = {"bucket", "depth", "distance", *SUMS.values()}     # keys of a record that hold numbers
MOST = 2**53    # the bound of an integer that a float holds exactly
ENTRY = 0.3     # nats per token that a passage repeated inside L must gain in a study of far context
FORMULA = ("=", "+", "-", "@", "\t", "\r")      # with which a cell begins that a spreadsheet computes
Column = tuple[float, str]  # place on the x axis, heading


class Run(NamedTuple):
    """What train.py and eval.py wrote of one run."""

    path: Path
    config: Config
    head: dict[str, Any]                # HEAD of the eval JSON, and KNOWN_LATER: None in older ones
    records: list[Record]
    windows: dict[str, np.ndarray]      # "EXTEND/PROTOCOL/LENGTH/COLUMN" -> one number a window
    settings: dict[str, Any]            # protocol -> the settings that decided its targets; {} in older ones

    @property
    def name(self) -> str:
        """Its folder, and the step at which it was evaluated if that is not its last one."""
        step, steps = self.head["step"], self.config.train.steps
        at = "" if step in (None, steps) else f" (unfinished: step {shortened(step)} of {steps})"
        return f"{self.path}{at}"


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


TRAINING = {"loss": "Training loss", "val_loss": "Validation loss during training"}


# -----------------------------------------------------------------------------------------------------------
# Reading runs, and refusing those that cannot be compared


def find_eval(folder: Path, data: str | None) -> Path:
    """RUN/eval/DATA.json; without data the only one there is. Raises UserError."""
    if not is_pretrained(folder):
        checkpoint.check_links(folder)
        if not (folder / "config.toml").is_file():
            raise UserError(f"run {folder}: no run there (no config.toml); {checkpoint.remedy_for(folder)}")
    found = {path.stem: path for path in sorted((folder / "eval").glob("*.json"))}
    if not found and not is_pretrained(folder) and not any((folder / "checkpoints").glob("[0-9]*")):
        raise UserError(f"run {folder}: no checkpoint yet; train and evaluate it first")
    if not found:
        raise UserError(f"run {folder}: no eval/*.json; run `python eval.py {folder}` first")
    if data is None and len(found) > 1:
        raise UserError(f"run {folder}: evaluated on {', '.join(found)}; choose one with --data")
    if data not in (None, *found):
        raise UserError(f"--data {data}: run {folder} was evaluated on {', '.join(found)}; choose one of "
                        "these")
    return found[data] if data else next(iter(found.values()))


def read_run(folder: Path, data: str | None) -> Run:
    """A run's config, its eval JSON and the sums of each window. Raises UserError."""
    path = find_eval(folder, data)
    is_run = not is_pretrained(folder)
    config = load_config(folder / "config.toml") if is_run else pretrained_config(folder)
    try:
        found = results.read(path)
        check_head(found.head)
        check_records(found.records)
        head = {key: found.head[key] for key in HEAD} | {key: found.head.get(key) for key in KNOWN_LATER}
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise UserError(f"{path} or its .npz: damaged, or of another version of eval.py ({error}); "
                        f"run `python eval.py {folder} --replace`") from error
    run = Run(folder, config, head, found.records, found.windows, found.head.get("settings", {}))
    if is_run:          # its config.toml may have been edited since, such as the seed
        checkpoint.check_checkpoints(folder, config, read_meta(folder / "corpus.json"))
    check_checkpoint(run, path)
    return run


def check_checkpoint(run: Run, path: Path) -> None:
    """Raise UserError if the evaluation is not of the run's newest checkpoint; name an unfinished run.

    Of a Hugging Face folder it must be of the files that are there now. Older evaluations do not record
    their checkpoint: a warning says so.
    """
    sha256 = run.head["checkpoint_sha256"]
    if sha256 is None:
        print(f"warning: {path}: by an older eval.py, which did not record its checkpoint: it may be of an "
              "earlier step", file=sys.stderr)
    elif is_pretrained(run.path):
        if any(run.path.glob("*.safetensors")) and files_sha256(run.path) != sha256:
            raise UserError(f"{path}: is of another config.json, tokenizer.json or weights than "
                            f"{run.path} now has; run `python eval.py {run.path} --replace` with the same "
                            "flags")
    elif not checkpoint.is_newest(run.path, str(sha256)):
        raise UserError(f"{path}: evaluated at step {shortened(run.head['step'])}, but the run has another "
                        f"checkpoint now; run `python eval.py {run.path} --replace` with the same flags")
    if run.name != f"{run.path}":
        print(f"warning: run {run.name}", file=sys.stderr)


def check_head(head: dict[str, Any]) -> None:
    """Raise ValueError or KeyError unless the head of an evaluation has the types that we rely on."""
    for key, kind in zip(HEAD, (int, str, str, int), strict=True):
        if type(head[key]) is not kind or (key == "seq_len" and not 0 < head[key] < MOST):
            raise ValueError(f"{key} = {shortened(head[key])}")


def check_records(records: Sequence[Record]) -> None:
    """The same for its records: each has the sums of its measures, and numbers where numbers belong."""
    for r in records:
        wanted = ["length"]
        for measure in (*MEASURES, GAIN):
            if measure.protocol == r["protocol"]:
                columns = (measure.score.plus, measure.score.minus, measure.score.per)
                wanted += [SUMS[column] for column in columns if column]
                wanted += ["bucket"] if measure.protocol == "position" else [measure.place or "length"]
        for key in {*wanted, *(NUMBERS & r.keys())}:
            if not is_valid(key, r[key]):
                raise ValueError(f"{shortened(r['protocol'])} at {shortened(r['length'])}: {key} = "
                                 f"{shortened(r[key])}")


def is_valid(key: str, value: Any) -> bool:
    """Whether a record may have this value: a number, positive if we divide by it or if it is a length."""
    if key == "bucket":
        return (isinstance(value, list) and len(value) == 2 and all(is_valid("depth", x) for x in value)
                and 0 <= value[0] < value[1])
    if type(value) not in (int, float) or (type(value) is int and abs(value) >= MOST):
        return False
    return key not in ("length", "tokens", "trials", "distance") or 1 <= value < math.inf


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise UserError unless tokenizer, text, evaluation seed, training length and targets are the same."""
    first = runs[0]
    corpora = [trained_on(run) for run in runs]
    targets: dict[str, tuple[Run, np.ndarray]] = {}
    counts: dict[Any, tuple[Run, Any]] = {}
    for run, corpus in zip(runs, corpora, strict=True):
        pair = f"runs {first.path} and {run.path}"
        for key, what in zip(HEAD, ("training length", "tokenizer", "evaluation data", "evaluation seed"),
                             strict=True):
            if run.head[key] != first.head[key]:
                raise UserError(f"{pair}: {what} differs, {first.head[key]!r} and {run.head[key]!r}; compare "
                                "runs where it is the same")
        texts = [r.head["data_sha256"] for r in (first, run)]
        if texts[0] != texts[1] and None not in texts:
            raise UserError(f"{pair}: evaluated on different texts that are both called {run.head['data']}; "
                            "evaluate both on the same one")
        dtypes = [r.head["dtype"] for r in (first, run)]
        if dtypes[0] != dtypes[1] and None not in dtypes:
            print(f"warning: {pair}: evaluated in {dtypes[0]} and {dtypes[1]}, which differ by rounding",
                  file=sys.stderr)
        if corpus != corpora[0] and corpus and corpora[0]:
            raise UserError(f"{pair}: trained on different text; compare runs on the same corpus")
        for r in run.records:
            place = (r["protocol"], r["length"], column_of(r), r.get("depth"))
            counted = [r.get(key) for key in ("tokens", "bytes", "documents", "trials")]
            other, known_counts = counts.setdefault(place, (run, counted))
            if counted != known_counts:
                raise other_targets(other, run, r["protocol"], r["length"])
        for key, array in run.windows.items():
            _, protocol, length, column = key.rsplit("/", 3)
            other, known = targets.setdefault(f"{protocol}/{length}/{column}", (run, array))
            if column in (*TARGETS, "trials") and not np.array_equal(array, known):
                raise other_targets(other, run, protocol, length)


def other_targets(a: Run, b: Run, protocol: str, length: int | str) -> UserError:
    """The error of two runs that were measured on different targets, with the flags that differ if known."""
    before, after = (run.settings.get(protocol, {}) for run in (a, b))
    flags = [f"{results.flag(name, before[name])} and {results.flag(name, after[name])}"
             for name in before if name in after and before[name] != after[name]]
    differ = f" ({', '.join(flags)})" if flags else ""
    return UserError(f"runs {a.path} and {b.path}: {protocol} at {length}: different targets{differ}; "
                     "evaluate one of them again, with the flags of the other one and --replace")


def trained_on(run: Run) -> list[Any]:
    """The contents of a run's corpora: its own, and those of a mixture; [] for a Hugging Face folder."""
    if is_pretrained(run.path):
        return []
    meta = read_meta(run.path / "corpus.json")
    return [about["splits"] for about in (meta, *meta.get("mixture", {}).values())]


# -----------------------------------------------------------------------------------------------------------
# Curves and their labels


def make_curves(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Curve]:
    """Group runs that differ only in train.seed and [run], and split each group by method of --extend.

    `names` are the labels of --label, one for each run. Raises UserError where they do not fit the groups.
    """
    if names and len(names) != len(runs):
        raise UserError(f"--label: given {len(names)} times for {len(runs)} runs; give one for each, in the "
                        "same order")
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        own = str(run.path) if is_pretrained(run.path) else ""      # has no seed: never a second sample
        groups.setdefault(json.dumps(settings_of(run.config), sort_keys=True) + own, []).append(i)
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


def settings_of(config: Config) -> dict[str, Any]:
    """Dotted key -> value of everything in which two curves may differ."""
    flat: dict[str, Any] = {}

    def add(prefix: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                add(f"{prefix}{key}.", value)
            else:
                flat[prefix + key] = value

    add("", config.model_dump(exclude={"run": True, "train": {"seed"}}))
    return flat


def labels(runs: Sequence[Run]) -> list[str]:
    """The encoding's name; where several share it, also the config keys that differ, or else the folder."""
    by_encoding: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        by_encoding.setdefault(run.config.position.encoding, []).append(i)
    names = [""] * len(runs)
    for encoding, group in by_encoding.items():
        found = differences_in_words([settings_of(runs[i].config) for i in group])
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

    seeds: dict[int, Run] = {}
    for run in group:
        other = seeds.setdefault(run.config.train.seed, run)
        if other is not run:
            raise UserError(f"runs {other.path} and {run.path}: same config, same train.seed = "
                            f"{run.config.train.seed}; leave one out, it is not a second sample")
        if run.head["init_sha256"] != group[0].head["init_sha256"]:
            raise UserError(f"runs {group[0].path} and {run.path}: seeds of one config that began from "
                            f"different weights of {run.config.train.init_from}, which was trained on in "
                            "between; start both from the same ones")
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


def column_of(record: Record) -> Column:
    """The column of a record: the middle of its bucket, else its distance, else its length."""
    if "bucket" in record:
        start, end = record["bucket"]
        return math.sqrt((start + 1) * end), f"{start}-{end - 1}"
    where = record["distance"] if "distance" in record else record["length"]
    return where, str(where)


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
    left = {run.config.train.seed: run for run in baseline.runs}
    same = [(run, left.pop(run.config.train.seed)) for run in curve.runs if run.config.train.seed in left]
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
    rows = [{"label": curve.label, "run": str(run.path), "train_seed": run.config.train.seed,
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
