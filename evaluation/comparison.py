"""Compare runs: `python compare.py RUN [RUN ...] [--baseline LABEL] [--data NAME] [--out DIR]`.

Runs that differ in train.seed alone become one curve, with mean and standard deviation over seeds; each
method of `eval.py --extend` is a curve of its own. Each protocol has a table and a picture. Where sums are
kept for each window there is also the paired gain over a baseline: nats a token on the very same targets,
averaged over seeds first, with a 95 % bootstrap interval over the text (not over seeds). Documents are
resampled where there are at least 10, since windows of one document are alike, else windows.

Writes DIR/report.md, report.html (one file, opens offline), report.csv (every record) and the pictures.
"""

from __future__ import annotations

import csv
import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from config import Config, load_config
from data.loader import read_meta
from evaluation.report import Cell, Map, Table
from runtime.checkpoint import check_links
from runtime.errors import UserError
from runtime.files import read_json

RESAMPLES = 10_000
ENOUGH_DOCUMENTS = 10       # to resample documents; with fewer, windows are
ENOUGH_WINDOWS = 8          # for any interval: fewer say too little about their own spread
HEAD = ("seq_len", "tokenizer", "data", "seed")     # of an eval JSON: what runs must have in common
SUMS = ("nll_sum", "tokens", "truncated_nll_sum", "first_nll_sum", "correct", "trials")
TARGETS = ("document", "end", "tokens", "bytes")    # columns of the .npz that say what was scored
# what numpy and zipfile raise besides on a header or member of nonsense, which is none of our bugs
FROM_NUMPY = (MemoryError, OverflowError, RecursionError, SyntaxError, NotImplementedError, AttributeError,
              TokenError, zlib.error, struct.error)
Record = dict[str, Any]
Column = tuple[float, str]  # place on the x axis, heading


class Run(NamedTuple):
    """What train.py and eval.py left of one run."""

    path: Path
    config: Config
    head: dict[str, Any]                # HEAD of the eval JSON, and data_sha256: None in older ones
    records: list[Record]
    windows: dict[str, np.ndarray]      # "EXTEND/PROTOCOL/LENGTH/COLUMN" -> one number a window


class Curve(NamedTuple):
    """A row of each table: runs that differ in their seed alone, under one extend method."""

    label: str
    extend: str | None
    runs: list[Run]

    def records(self, protocol: str) -> list[list[Record]]:
        """Of each run."""
        return [[r for r in run.records if (r["extend"], r["protocol"]) == (self.extend, protocol)]
                for run in self.runs]

    def windows(self, protocol: str, length: int, column: str) -> np.ndarray:
        """Mean over seeds of what was kept for each window (windows,)."""
        return np.mean([run.windows[f"{self.extend or 'plain'}/{protocol}/{length}/{column}"]
                        for run in self.runs], axis=0)

    def lengths(self, protocol: str) -> list[int]:
        """At which it was measured."""
        return [r["length"] for r in self.records(protocol)[0]]


class Measure(NamedTuple):
    """A figure by length, position or distance, computed from the sums of one place."""

    protocol: str
    title: str
    note: str
    x_label: str
    y_label: str
    scale: str
    form: str
    best: Callable[[Iterable[float]], float]
    figure: Callable[[dict[str, float]], float]
    place: str = ""     # of a probe: what a map of it has beside the length


def loss(sums: dict[str, float]) -> float:
    """Nats a token."""
    return sums["nll_sum"] / sums["tokens"]


def perplexity(sums: dict[str, float]) -> float:
    """exp(loss); infinite where that overflows."""
    return math.exp(loss(sums)) if loss(sums) < 700 else math.inf


def repetition_gain(sums: dict[str, float]) -> float:
    """Loss on the first copy less that on the second, nats a token."""
    return (sums["first_nll_sum"] - sums["nll_sum"]) / sums["tokens"]


CONTEXT = "context (tokens)"
PERPLEXITY = (CONTEXT, "perplexity per token", "log", "#.4g", min, perplexity)
REPETITION = ("distance (tokens)", "gain on the second copy (nats/token)", "linear", ".3f", max,
              repetition_gain, "distance")
GAIN = Measure(
    "fixed", "Gain over truncation, fixed targets",
    "Loss with the context cut to L less loss with all of it, same targets: positive where longer context "
    "helps, 0 where it is ignored, negative where it breaks the model.",
    CONTEXT, "gain (nats/token)", "asinh", "+.4f", max,
    lambda sums: (sums["truncated_nll_sum"] - sums["nll_sum"]) / sums["tokens"])
MEASURES = (
    Measure("nonoverlap", "Perplexity, nonoverlap", "Blocks of this length, every token scored. Falls with "
            "length even for a model that ignores far context.", *PERPLEXITY),
    Measure("sliding", "Perplexity, sliding", "A window of this length moves by a stride and what is new is "
            "scored, so that every target has nearly all of the context.", *PERPLEXITY),
    Measure("fixed", "Perplexity, fixed targets", "The same tokens at every length, with more context to "
            "their left.", *PERPLEXITY),
    Measure("position", "Loss by position", "One forward over the longest windows.",
            "position (tokens of context)", "loss (nats/token)", "linear", ".3f", min, loss),
    Measure("repeat", "Repeated text", "How much cheaper a passage of the text becomes at its second "
            "occurrence, by the distance between the two.", *REPETITION),
    Measure("copy", "Repeated random tokens", "As before, on shuffled text: only the first copy helps.",
            *REPETITION),
    Measure("passkey", "Passkey", "Share of keys found again in a text of this length, over all depths; the "
            "picture has them by depth.", CONTEXT, "share found", "linear", ".0%", max,
            lambda sums: sums["correct"] / sums["trials"], "depth"),
)
PAIRED = ("nonoverlap", "sliding", "fixed")     # protocols whose sums are kept for each window


# -----------------------------------------------------------------------------------------------------------
# Reading runs, and refusing to compare what does not compare


def find_eval(folder: Path, data: str | None) -> Path:
    """RUN/eval/DATA.json; without data the only one there is. Raises UserError."""
    check_links(folder)
    if not (folder / "config.toml").is_file():
        raise UserError(f"run {folder}: no run there (no config.toml); give folders that train.py made")
    found = {path.stem: path for path in sorted((folder / "eval").glob("*.json"))}
    if not found and not any((folder / "checkpoints").glob("[0-9]*")):
        raise UserError(f"run {folder}: no checkpoint yet; train and evaluate it first")
    if not found:
        raise UserError(f"run {folder}: no eval/*.json; run `python eval.py {folder}` first")
    if data is None and len(found) > 1:
        raise UserError(f"run {folder}: evaluated on {', '.join(found)}; choose one with --data")
    if data not in (None, *found):
        raise UserError(f"--data {data}: run {folder} was evaluated on {', '.join(found)}; choose from these")
    return found[data] if data else next(iter(found.values()))


def read_run(folder: Path, data: str | None) -> Run:
    """A run's config, its eval JSON and the sums for each window beside it. Raises UserError."""
    path = find_eval(folder, data)
    try:
        content = read_json(path)
        records = content["records"]
        if not records:
            raise ValueError("no records")
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            windows = {key: arrays[key] for r in records if r["protocol"] in PAIRED
                       for column in (*TARGETS, "nll", *(["truncated_nll"] if "gain" in r else []))
                       for key in [f"{r['extend'] or 'plain'}/{r['protocol']}/{r['length']}/{column}"]}
        head = {key: content[key] for key in HEAD} | {"data_sha256": content.get("data_sha256")}
        return Run(folder, load_config(folder / "config.toml"), head, records, windows)
    except (FileNotFoundError, ValueError, KeyError, TypeError, EOFError, BadZipFile, *FROM_NUMPY) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} or its .npz: damaged, or of another version of eval.py ({error}); "
                        f"run `python eval.py {folder}` again") from error


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
                raise UserError(f"runs {other.path} and {run.path}: {r['protocol']} at {r['length']}: "
                                "different targets; evaluate both with the same --lengths and --windows")
        for key, array in run.windows.items():
            _, protocol, length, column = key.rsplit("/", 3)
            other, known = targets.setdefault(f"{protocol}/{length}/{column}", (run, array))
            if column in TARGETS and not np.array_equal(array, known):
                raise UserError(f"runs {other.path} and {run.path}: {protocol} at {length}: different "
                                "targets; evaluate both with the same --lengths, --windows and so on")


def make_curves(runs: Sequence[Run]) -> list[Curve]:
    """Group runs that differ in train.seed and [run] alone, and split them by extend method."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        config = run.config.model_dump(exclude={"run": True, "train": {"seed"}})
        groups.setdefault(json.dumps(config, sort_keys=True), []).append(run)
    curves = []
    names = labels([group[0].path for group in groups.values()])
    for label, group in zip(names, groups.values(), strict=True):
        check_replicates(group)
        for extend in dict.fromkeys(r["extend"] for r in group[0].records):
            curves.append(Curve(f"{label} + {extend}" if extend else label, extend, group))
    return curves


def labels(paths: Sequence[Path]) -> list[str]:
    """Folder names without the seed at their end; with as much of the path as makes them differ."""
    for n_parts in range(1, 1 + max(len(path.resolve().parts) for path in paths)):
        names = ["/".join(path.resolve().parts[-n_parts:]) for path in paths]
        short = [re.sub(r"[-_.]?seed[-_=]?\d+$", "", name) or name for name in names]
        for candidate in (short, names):
            if len(set(candidate)) == len(paths):
                return candidate
    raise AssertionError("two configs in one folder")


def trained_on(run: Run) -> list[Any]:
    """What the corpora of a run hold: its own, and those of a mixture."""
    meta = read_meta(run.path / "corpus.json")
    return [about["splits"] for about in (meta, *meta.get("mixture", {}).values())]


def check_replicates(group: Sequence[Run]) -> None:
    """Raise UserError unless these runs of one config have a seed each and were all evaluated alike."""
    def measured_places(run: Run) -> set[Any]:
        return {(r["extend"], r["protocol"], r["length"], column_of(r), r.get("depth")) for r in run.records}

    seeds: dict[int, Run] = {}
    for run in group:
        other = seeds.setdefault(run.config.train.seed, run)
        if other is not run:
            raise UserError(f"runs {other.path} and {run.path}: same config, same train.seed = "
                            f"{run.config.train.seed}; leave one out, it is no second sample")
        if measured_places(run) != measured_places(group[0]):
            raise UserError(f"runs {group[0].path} and {run.path}: seeds of one config, evaluated "
                            "differently; give eval.py the same --extend, --protocol and --lengths")


# -----------------------------------------------------------------------------------------------------------
# Figures


def column_of(record: Record) -> Column:
    """Where a record stands: at its bucket's middle, else its distance, else its length."""
    if "bucket" in record:
        start, end = record["bucket"]
        return math.sqrt((start + 1) * end), f"{start}-{end - 1}"
    where = record["distance"] if "distance" in record else record["length"]
    return where, str(where)


def pooled(records: Iterable[Record], where: Callable[[Record], Any]) -> dict[Any, dict[str, float]]:
    """Sums over the records of each place: never a mean of means."""
    cells: dict[Any, dict[str, float]] = {}
    for r in records:
        cell = cells.setdefault(where(r), dict.fromkeys(SUMS, 0.0))
        for key in SUMS:
            cell[key] += r.get(key) or 0
    return cells


def over_seeds(values: Sequence[float]) -> Cell:
    """Mean, and the standard deviation (n - 1) where there are two seeds."""
    with np.errstate(invalid="ignore"):     # a model that diverged has infinite perplexity
        return Cell(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def measured(measure: Measure, curves: Sequence[Curve]) -> dict[str, dict[Column, Cell]]:
    """Label -> column -> mean and standard deviation over seeds."""
    rows = {}
    for curve in curves:
        seeds = [pooled(records, column_of) for records in curve.records(measure.protocol)]
        rows[curve.label] = {column: over_seeds([measure.figure(sums[column]) for sums in seeds])
                             for column in seeds[0]}
    return rows


def probe_map(measure: Measure, curves: Sequence[Curve]) -> Map:
    """A probe by length and depth or distance, summed over seeds."""
    def where(r: Record) -> tuple[int, float]:
        return r["length"], r[measure.place]

    cells = {curve.label: {at: measure.figure(sums) for at, sums in pooled(
             (r for records in curve.records(measure.protocol) for r in records), where).items()}
             for curve in curves}
    return Map(f"{measure.protocol}-map", f"{measure.title}: {measure.y_label}", measure.place, measure.form,
               {label: row for label, row in cells.items() if row})


def paired(protocol: str, curves: Sequence[Curve], column: str,
           baseline: Curve | None = None) -> tuple[dict[str, dict[Column, Cell]], str]:
    """Label -> length -> this column of the baseline (default: of the curve itself) less the curve's loss.

    Nats a token, with intervals; also returns what was resampled.
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


def make_tables(curves: Sequence[Curve], baseline: Curve, L: int) -> list[Table]:
    """Every measure, gains over truncation, gains over the baseline; what no run has is left out."""
    def add(key: str, measure: Measure, rows: dict[str, dict[Column, Cell]]) -> None:
        columns = sorted({column for row in rows.values() for column in row})
        cells = {label: [row.get(column) for column in columns] for label, row in rows.items() if row}
        if columns:
            tables.append(Table(key, measure.title, measure.note, measure.x_label, measure.y_label,
                                measure.scale, measure.form, measure.best, L, columns, cells))

    tables: list[Table] = []
    for measure in MEASURES:
        add(measure.protocol, measure, measured(measure, curves))
    intervals, how = paired("fixed", curves, "truncated_nll")
    gains = {label: {at: intervals[label][at]._replace(spread=cell.spread) for at, cell in row.items()}
             for label, row in measured(GAIN, curves).items()}
    add("gain", GAIN._replace(note=f"{GAIN.note} Intervals: {how}."), gains)
    for protocol in PAIRED:
        others = [curve for curve in curves if curve is not baseline]
        rows, how = paired(protocol, others, "nll", baseline)
        note = (f"Loss of {baseline.label} less the curve's on the very same targets: positive where the "
                f"curve is better. Intervals: {how}.")
        title = f"Gain over {baseline.label}, {protocol}"
        add(f"{protocol}-gain", GAIN._replace(title=title, note=note), rows)
    return tables


def contrast(d: np.ndarray, tokens: np.ndarray, document: np.ndarray) -> tuple[list[Cell], str]:
    """Nats a token of differences d (windows, curves) with intervals, and what was resampled, in words."""
    names, index = np.unique(document, return_inverse=True)
    unit = f"bootstrap over {len(d)} windows of {len(names)} documents, too few to resample: optimistic"
    if len(names) >= ENOUGH_DOCUMENTS:
        by_document = np.zeros((len(names), d.shape[1]))
        np.add.at(by_document, index, d)
        d, tokens = by_document, np.bincount(index, weights=tokens)
        unit = f"bootstrap over {len(names)} documents"
    ratio = d.sum(axis=0) / tokens.sum()
    if len(d) < ENOUGH_WINDOWS:
        return [Cell(float(x)) for x in ratio], f"none, there are only {len(d)} windows"
    low, high = interval(d, tokens)
    cells = [Cell(float(x), None, float(a), float(b)) if np.isfinite([a, b]).all() else Cell(float(x))
             for x, a, b in zip(ratio, low, high, strict=True)]         # no interval where one unit decides
    return cells, unit


def interval(d: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of sum(d) / sum(tokens) for each column of d (units, curves), units being resampled.

    The bootstrap-t: quantiles of (ratio* - ratio) / se*, times se, where se is the linearised standard error
    of a ratio. Percentiles of ratio* itself are too narrow for the dozen units that we often have. Efron and
    Tibshirani 1993, An Introduction to the Bootstrap, section 12.5.
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
        square[square < 1e-12 * (d**2).sum(axis=0)] = 0                 # rounding: all drawn are alike
        shift[np.abs(shift) < 1e-9 * np.abs(ratio)] = 0
        with np.errstate(divide="ignore", invalid="ignore"):
            pivot = shift / (small_sample * np.sqrt(square.clip(min=0)) / drawn)
        pivots.append(np.nan_to_num(pivot, posinf=np.inf, neginf=-np.inf))      # 0 / 0
    with np.errstate(invalid="ignore"):                                 # between infinite pivots
        low, high = np.quantile(np.concatenate(pivots), [0.025, 0.975], axis=0)
    return np.minimum(ratio, ratio - high * se), np.maximum(ratio, ratio - low * se)    # rounding, all alike


# -----------------------------------------------------------------------------------------------------------
# Command


def write_csv(curves: Sequence[Curve], path: Path) -> None:
    """Every record of every run, one a line, with its curve, run and training seed."""
    rows = [{"label": curve.label, "run": str(run.path), "train_seed": run.config.train.seed,
             "encoding": run.config.position.encoding, **run.head, **r}
            for curve in curves for run in curve.runs for r in run.records if r["extend"] == curve.extend]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
