"""Reading what train.py and eval.py wrote of runs, and refusing runs that cannot be compared."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import Config, load_config
from data.loader import read_meta
from evaluation import results
from evaluation.measures import GAIN, MEASURES
from evaluation.results import TARGETS, Record
from hf.pretrained import files_sha256, is_pretrained, pretrained_config
from runtime import checkpoint
from runtime.errors import UserError, shortened

HEAD = ("seq_len", "tokenizer", "data", "seed")     # of an eval JSON: what runs must have in common
KNOWN_LATER = ("data_sha256", "step", "checkpoint_sha256", "init_sha256", "dtype")     # what older ones lack
# column of the .npz -> its sum in a record
SUMS = {"nll": "nll_sum", "truncated_nll": "truncated_nll_sum", "first_nll": "first_nll_sum",
        "tokens": "tokens", "correct": "correct", "trials": "trials"}
NUMBERS = {"bucket", "depth", "distance", *SUMS.values()}     # keys of a record that hold numbers
MOST = 2**53    # the bound of an integer that a float holds exactly
Column = tuple[float, str]  # place on the x axis, heading


class Run(NamedTuple):
    """What train.py and eval.py wrote of one run."""

    path: Path
    config: Config
    head: dict[str, Any]                # HEAD of the eval JSON, and KNOWN_LATER: None in older ones
    records: list[Record]
    windows: dict[str, np.ndarray]      # "EXTEND/PROTOCOL/LENGTH/COLUMN" -> one number a window
    settings: dict[str, Any]            # protocol -> the settings that decided its targets; {} in older ones
    bases: list[tuple[Path, Config]]    # the run of train.init_from, that of its own, ..., while still there

    @property
    def name(self) -> str:
        """Its folder, and the step at which it was evaluated if that is not its last one."""
        step, steps = self.head["step"], self.config.train.steps
        at = "" if step in (None, steps) else f" (unfinished: step {shortened(step)} of {steps})"
        return f"{self.path}{at}"

    @property
    def seeds(self) -> tuple[int, ...]:
        """train.seed of the run, then of the run it began from, and so on: what identifies a sample."""
        return tuple(config.train.seed for config in (self.config, *(config for _, config in self.bases)))

    @property
    def seed(self) -> str:
        """The same in words: 0, or "1 from 0" for a run with seed 1 that began from one with seed 0."""
        return " from ".join(str(seed) for seed in self.seeds)


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
    run = Run(folder, config, head, found.records, found.windows, found.head.get("settings", {}),
              bases_of(config))
    if is_run:          # its config.toml may have been edited since, such as the seed
        checkpoint.check_checkpoints(folder, config, read_meta(folder / "corpus.json"))
    check_checkpoint(run, path)
    return run


def bases_of(config: Config) -> list[tuple[Path, Config]]:
    """The run that train.init_from names and the one that this began from, and so on.

    They end where a folder is no longer there, or is a Hugging Face folder, which has no seed.
    """
    found: list[tuple[Path, Config]] = []
    while config.train.init_from:
        folder = Path(config.train.init_from)
        if not (folder / "config.toml").is_file() or folder in (path for path, _ in found):
            break
        config = load_config(folder / "config.toml")
        found.append((folder, config))
    return found


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
        if any(own != known for own, known in zip(corpus, corpora[0], strict=False)):
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


def trained_on(run: Run) -> list[list[Any]]:
    """The contents of a run's corpora, its own and those of a mixture, then of the runs it began from.

    [] for a Hugging Face folder.
    """
    if is_pretrained(run.path):
        return []
    metas = [read_meta(folder / "corpus.json") for folder in (run.path, *(folder for folder, _ in run.bases))]
    return [[about["splits"] for about in (meta, *meta.get("mixture", {}).values())] for meta in metas]


def column_of(record: Record) -> Column:
    """The column of a record: the middle of its bucket, else its distance, else its length."""
    if "bucket" in record:
        start, end = record["bucket"]
        return math.sqrt((start + 1) * end), f"{start}-{end - 1}"
    where = record["distance"] if "distance" in record else record["length"]
    return where, str(where)
