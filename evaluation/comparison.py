"""Compare runs on identical targets: read them, group seeds into curves, and compute tables with intervals.

compare.py describes what is averaged and what is resampled. L = train.seq_len. Loss in nats per token.
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

from config import Config, load_config
from data.loader import read_meta
from evaluation import results
from evaluation.report import Cell, Map, Table
from evaluation.results import TARGETS, Record
from runtime.checkpoint import check_links
from runtime.errors import UserError
from runtime.files import read_text

RESAMPLES = 10_000
ENOUGH_DOCUMENTS = 10       # to resample documents; with fewer, windows are resampled
ENOUGH_WINDOWS = 8          # for any interval: fewer cannot show how much they vary
MOST_KEYS = 3               # config keys in a label
TRAINING_POINTS = 60        # of a training curve
LOG_LIMIT = 2**28           # bytes of metrics.jsonl
HEAD = ("seq_len", "tokenizer", "data", "seed")     # of an eval JSON: what runs must have in common
SUMS = ("nll_sum", "tokens", "truncated_nll_sum", "first_nll_sum", "correct", "trials")
PAIRED = ("nonoverlap", "sliding", "fixed")     # protocols whose sums of each window are compared
Column = tuple[float, str]  # place on the x axis, heading


class Run(NamedTuple):
    """What train.py and eval.py wrote of one run."""

    path: Path
    config: Config
    head: dict[str, Any]                # HEAD of the eval JSON, and data_sha256: None in older ones
    records: list[Record]
    windows: dict[str, np.ndarray]      # "EXTEND/PROTOCOL/LENGTH/COLUMN" -> one number a window
    settings: dict[str, Any]            # protocol -> the settings that decided its targets; {} in older ones


class Curve(NamedTuple):
    """A row of each table: runs that differ only in their seed, under one method of --extend."""

    label: str
    extend: str | None
    runs: list[Run]

    def records(self, protocol: str) -> list[list[Record]]:
        """The records of each run."""
        return [[r for r in run.records if (r["extend"], r["protocol"]) == (self.extend, protocol)]
                for run in self.runs]

    def windows(self, protocol: str, length: int, column: str) -> np.ndarray:
        """Mean over seeds of a column of the sums of each window (windows,)."""
        return np.mean([run.windows[f"{self.extend or 'plain'}/{protocol}/{length}/{column}"]
                        for run in self.runs], axis=0)

    def lengths(self, protocol: str) -> list[int]:
        """The lengths at which it was measured."""
        return [r["length"] for r in self.records(protocol)[0]]


class Measure(NamedTuple):
    """A number by length, position or distance, computed from the sums of one place."""

    protocol: str
    title: str
    note: str
    x_label: str
    y_label: str
    scale: str
    form: str
    figure: Callable[[dict[str, float]], float]
    place: str = ""     # of a probe: the second axis of its map, beside the length


def loss(sums: dict[str, float]) -> float:
    """Nats per token."""
    return sums["nll_sum"] / sums["tokens"]


def perplexity(sums: dict[str, float]) -> float:
    """exp(loss); infinite where that overflows."""
    return math.exp(loss(sums)) if loss(sums) < 700 else math.inf


def repetition_gain(sums: dict[str, float]) -> float:
    """Loss on the first copy minus loss on the second, nats per token."""
    return (sums["first_nll_sum"] - sums["nll_sum"]) / sums["tokens"]


CONTEXT = "context (tokens)"
PERPLEXITY = (CONTEXT, "perplexity per token", "log", "#.4g", perplexity)
REPETITION = ("distance (tokens)", "gain on the second copy (nats/token)", "linear", ".3f", repetition_gain,
              "distance")
GAIN = Measure(
    "fixed", "Gain over truncation, fixed targets",
    "Loss with the context truncated to L minus loss with all of it, on the same targets: positive where "
    "longer context helps, 0 where it is ignored, negative where it breaks the model.",
    CONTEXT, "gain (nats/token)", "asinh", "+.4f",
    lambda sums: (sums["truncated_nll_sum"] - sums["nll_sum"]) / sums["tokens"])
MEASURES = (
    Measure("nonoverlap", "Perplexity, nonoverlap", "Blocks of this length; every token is scored. Falls "
            "with length even for a model that ignores distant context.", *PERPLEXITY),
    Measure("sliding", "Perplexity, sliding", "A window of this length moves by a stride and only the new "
            "tokens are scored, so that every target has nearly all of the context.", *PERPLEXITY),
    Measure("fixed", "Perplexity, fixed targets", "The same tokens at every length, with more context to "
            "their left.", *PERPLEXITY),
    Measure("position", "Loss by position", "One forward over the longest windows.",
            "position (tokens of context)", "loss (nats/token)", "linear", ".3f", loss),
    Measure("repeat", "Repeated text", "How much lower the loss of a passage of the text is at its second "
            "occurrence, by the distance between the two.", *REPETITION),
    Measure("copy", "Repeated random tokens", "The same on shuffled text, where only the first copy can "
            "help.", *REPETITION),
    Measure("passkey", "Passkey", "Share of the keys that are found in a text of this length, over all "
            "depths; the picture shows them by depth.", CONTEXT, "share found", "linear", ".0%",
            lambda sums: sums["correct"] / sums["trials"], "depth"),
)
TRAINING = {"loss": "Training loss", "val_loss": "Validation loss during training"}


# -----------------------------------------------------------------------------------------------------------
# Reading runs, and refusing those that cannot be compared


def find_eval(folder: Path, data: str | None) -> Path:
    """RUN/eval/DATA.json; without data the only one there is. Raises UserError."""
    check_links(folder)
    if not (folder / "config.toml").is_file():
        raise UserError(f"run {folder}: no run there (no config.toml); give folders made by train.py")
    found = {path.stem: path for path in sorted((folder / "eval").glob("*.json"))}
    if not found and not any((folder / "checkpoints").glob("[0-9]*")):
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
    config = load_config(folder / "config.toml")
    try:
        found = results.read(path)
        head = {key: found.head[key] for key in HEAD} | {"data_sha256": found.head.get("data_sha256")}
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise UserError(f"{path} or its .npz: damaged, or of another version of eval.py ({error}); "
                        f"run `python eval.py {folder} --replace`") from error
    return Run(folder, config, head, found.records, found.windows, found.head.get("settings", {}))


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
        if corpus != corpora[0]:
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
            if column in TARGETS and not np.array_equal(array, known):
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
    """The contents of a run's corpora: its own, and those of a mixture."""
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
        groups.setdefault(json.dumps(settings_of(run.config), sort_keys=True), []).append(i)
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
    gains = {protocol: paired(protocol, others, "nll", baseline) for protocol in PAIRED}
    for measure in MEASURES:
        rows = measured(measure, curves)
        for label, row in gains[measure.protocol][0].items() if measure.protocol in PAIRED else ():
            for column, cell in row.items():
                rows[label][column] = rows[label][column]._replace(beats=cell.beats)
        add(measure.protocol, measure, rows)
    intervals, how = paired("fixed", curves, "truncated_nll")
    over_truncation = {
        label: {at: intervals[label][at]._replace(spread=cell.spread) for at, cell in row.items()}
        for label, row in measured(GAIN, curves).items()}
    add("gain", GAIN._replace(note=f"{GAIN.note} Intervals: {how}."), over_truncation)
    for protocol, (rows, how) in gains.items():
        note = (f"Loss of {baseline.label} minus the curve's loss on the same targets: positive where the "
                f"curve is better. Intervals: {how}.")
        title = f"Gain over {baseline.label}, {protocol}"
        add(f"{protocol}-gain", GAIN._replace(title=title, note=note), rows)
    for key, title in TRAINING.items():
        note = "As train.py logged it, in nats per token, averaged over the steps since the previous point."
        measure = Measure("", title, note, "step", "loss (nats/token)", "linear", ".3f", loss)
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
        rows[curve.label] = {column: over_seeds([measure.figure(sums[column]) for sums in seeds])
                             for column in seeds[0]}
    return rows


def pooled(records: Iterable[Record], where: Callable[[Record], Any]) -> dict[Any, dict[str, float]]:
    """Sums over the records of each place: never a mean of means."""
    cells: dict[Any, dict[str, float]] = {}
    for r in records:
        cell = cells.setdefault(where(r), dict.fromkeys(SUMS, 0.0))
        for key in SUMS:
            cell[key] += r.get(key) or 0
    return cells


def over_seeds(values: Sequence[float]) -> Cell:
    """Mean, and with two seeds or more the standard deviation (n - 1)."""
    with np.errstate(invalid="ignore"):     # a model that diverged has infinite perplexity
        return Cell(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def probe_map(measure: Measure, curves: Sequence[Curve]) -> Map:
    """A probe by length and depth or distance, summed over seeds."""
    def where(r: Record) -> tuple[int, float]:
        return r["length"], r[measure.place]

    cells = {curve.label: {at: measure.figure(sums) for at, sums in pooled(
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
# Differences and their intervals


def paired(protocol: str, curves: Sequence[Curve], column: str,
           baseline: Curve | None = None) -> tuple[dict[str, dict[Column, Cell]], str]:
    """Label -> length -> this column of the baseline (default: of the curve itself) minus the curve's loss.

    In nats per token, with intervals; also returns what was resampled.
    """
    rows: dict[str, dict[Column, Cell]] = {}
    units: dict[str, list[int]] = {}
    lengths = {length for curve in curves for length in curve.lengths(protocol)}
    for length in sorted(lengths & set(baseline.lengths(protocol)) if baseline else lengths):
        present = [curve for curve in curves if length in curve.lengths(protocol)]
        d = np.stack([(baseline or curve).windows(protocol, length, column)
                      - curve.windows(protocol, length, "nll") for curve in present], axis=1)
        tokens, document = (present[0].windows(protocol, length, name) for name in ("tokens", "document"))
        cells, unit = contrast(d, tokens, document)
        units.setdefault(unit, []).append(length)
        for curve, cell in zip(present, cells, strict=True):
            rows.setdefault(curve.label, {})[length, str(length)] = cell
    if len(units) == 1:
        return rows, next(iter(units))
    return rows, "; ".join(f"{unit} (at {', '.join(map(str, at))})" for unit, at in units.items())


def contrast(d: np.ndarray, tokens: np.ndarray, document: np.ndarray) -> tuple[list[Cell], str]:
    """Differences d (windows, curves) in nats per token, with intervals; and what was resampled, in words."""
    names, index = np.unique(document, return_inverse=True)
    unit = (f"bootstrap over {len(d)} windows, since there are only {len(names)} documents: these intervals "
                "are too narrow")
    if len(names) >= ENOUGH_DOCUMENTS:
        by_document = np.zeros((len(names), d.shape[1]))
        np.add.at(by_document, index, d)
        d, tokens = by_document, np.bincount(index, weights=tokens)
        unit = f"bootstrap over {len(names)} documents"
    ratio = d.sum(axis=0) / tokens.sum()
    if len(d) < ENOUGH_WINDOWS:
        return [Cell(float(x)) for x in ratio], f"none, there are only {len(d)} windows"
    low, high = interval(d, tokens)
    cells = [Cell(float(x), None, float(a), float(b), beats=bool(a > 0))
             if np.isfinite([a, b]).all() else Cell(float(x))           # no interval where one unit decides
             for x, a, b in zip(ratio, low, high, strict=True)]
    return cells, unit


def interval(d: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of sum(d) / sum(tokens) for each column of d (units, curves) when units are resampled.

    The bootstrap-t: quantiles of (ratio* - ratio) / se*, times se, where se is the linearised standard
    error of a ratio. Percentiles of ratio* itself are too narrow for the dozen units that are common here.
    Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 12.5.
    """
    n, total = len(d), tokens.sum()
    ratio = d.sum(axis=0) / total                                       # (curves,)
    residual = d - ratio * tokens[:, None]                              # (units, curves), sums to 0
    small_sample = math.sqrt(n / (n - 1))
    se = small_sample * np.sqrt((residual**2).sum(axis=0)) / total
    rng, pivots = np.random.default_rng(0), []
    for _ in range(RESAMPLES // 500):                                   # parts, to bound memory
        weight = rng.multinomial(n, np.full(n, 1 / n), size=500).astype(float)          # (500, units)
        drawn = (weight @ tokens)[:, None]
        shift = weight @ residual / drawn                               # ratio* - ratio (500, curves)
        square = (weight @ residual**2 - 2 * shift * (weight @ (residual * tokens[:, None]))
                  + shift**2 * (weight @ tokens**2)[:, None])
        square[square < 1e-12 * (d**2).sum(axis=0)] = 0                 # rounding: all drawn are equal
        shift[np.abs(shift) < 1e-9 * np.abs(ratio)] = 0
        with np.errstate(divide="ignore", invalid="ignore"):
            pivot = shift / (small_sample * np.sqrt(square.clip(min=0)) / drawn)
        pivots.append(np.nan_to_num(pivot, posinf=np.inf, neginf=-np.inf))      # 0 / 0
    with np.errstate(invalid="ignore"):                                 # between infinite pivots
        low, high = np.quantile(np.concatenate(pivots), [0.025, 0.975], axis=0)
    return np.minimum(ratio, ratio - high * se), np.maximum(ratio, ratio - low * se)    # rounding, all equal


def write_csv(curves: Sequence[Curve], path: Path) -> None:
    """Write every record of every run on a line, with its curve, run and training seed."""
    rows = [{"label": curve.label, "run": str(run.path), "train_seed": run.config.train.seed,
             "encoding": run.config.position.encoding, **run.head, **r}
            for curve in curves for run in curve.runs for r in run.records if r["extend"] == curve.extend]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
