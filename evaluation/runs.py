"""Reading what train.py and eval.py wrote of runs, and refusing runs that cannot be compared."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from base.errors import UserError
from config import MUST_AGREE, Config, load_config
from data.loader import read_meta
from evaluation import results
from evaluation.results import Record
from hf.pretrained import files_sha256, is_pretrained, pretrained_config
from runtime.checkpoint import is_current


class Run(NamedTuple):
    """What train.py and eval.py wrote of one run."""

    path: Path
    config: Config
    head: dict[str, Any]                # of the evaluation; older ones lack keys
    records: list[Record]
    windows: dict[str, np.ndarray]      # "EXTEND/PROTOCOL/LENGTH/COLUMN" -> one number a window

    @property
    def name(self) -> str:
        """Its folder, and the step at which it was evaluated if that is not its last one."""
        step, steps = self.head.get("step"), self.config.train.steps
        return f"{self.path}" + f" (unfinished: step {step} of {steps})" * (step not in (None, steps))

    @property
    def seed(self) -> str:
        """train.seed, and the seed or else the name of the run it began from: what identifies a sample."""
        base = self.config.train.init_from
        number = re.search(r"-seed(\d+)/*$", base or "")
        origin = number[1] if number else Path(base).name if base else ""
        return f"{self.config.train.seed} from {origin}" if origin else str(self.config.train.seed)


def without_seed(folder: str | Path | None) -> str:
    """The name of a folder, without -seedN at its end."""
    return re.sub(r"-seed\d+$", "", Path(folder).resolve().name) if folder else ""


def find_eval(folder: Path, data: str | None) -> Path:
    """RUN/eval/DATA.json; without data the only one there is. Raises UserError."""
    if not is_pretrained(folder) and not (folder / "config.toml").is_file():
        raise UserError(f"run {folder}: no run there (no config.toml); give a folder that train.py made")
    found = {path.stem: path for path in sorted((folder / "eval").glob("*.json"))}
    if not found:
        raise UserError(f"run {folder}: no eval/*.json; run `python eval.py {folder}` first")
    if data is None and len(found) > 1:
        found = {name: path for name, path in found.items() if not name.endswith(results.EXTENDED)} or found
    if data is None and len(found) > 1:
        raise UserError(f"run {folder}: evaluated on {', '.join(found)}; choose one with --data")
    if data not in (None, *found):
        raise UserError(f"--data {data}: run {folder} was evaluated on {', '.join(found)}")
    return found[data] if data else next(iter(found.values()))


def read_run(folder: Path, data: str | None) -> Run:
    """A run's config and its evaluation, which must be of its newest checkpoint. Raises UserError."""
    path = find_eval(folder, data)
    config = pretrained_config(folder) if is_pretrained(folder) else load_config(folder / "config.toml")
    run = Run(folder, config, *results.read(path))
    sha256 = run.head.get("checkpoint_sha256")      # older evaluations do not name it
    if sha256 is not None and not (
            files_sha256(folder) == sha256 if is_pretrained(folder) else is_current(folder, sha256)):
        raise UserError(f"{path}: evaluated at step {run.head.get('step')}, but the run has another "
                        f"checkpoint now; run `python eval.py {folder} --replace` with the same flags")
    return run


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise UserError unless tokenizer, text, evaluation seed, training length and targets are the same."""
    first, known, trained_on = runs[0], dict[str, tuple[Run, Any]](), list[Any]()
    for run in runs:
        pair = f"runs {first.path} and {run.path}"
        for key in MUST_AGREE["compare"]:
            before, after = first.head.get(key), run.head.get(key)
            if before != after and None not in (before, after):
                raise UserError(f"{pair}: {key} of their evaluations differs, {before!r} and {after!r}; "
                                "compare runs where it is the same")
        if not is_pretrained(run.path):
            meta = read_meta(run.path / "corpus.json")
            trained_on.append([about["splits"] for about in (meta, *meta.get("mixture", {}).values())])
            if trained_on[-1] != trained_on[0]:
                raise UserError(f"{pair}: trained on different text; compare runs on the same corpus")
        counts = {f"{r['protocol']}/{r['length']}/{column_of(r)}/{r.get('depth')}": [r.get(key) for key in (
            "tokens", "bytes", "documents", "trials")] for r in run.records}
        columns = {"/".join(key.rsplit("/", 3)[1:]): array.tolist() for key, array in run.windows.items()
                   if key.endswith(MUST_AGREE["targets"])}
        for place, targets in {**counts, **columns}.items():
            other, wanted = known.setdefault(place, (run, targets))
            if targets != wanted:
                protocol, length = place.split("/")[:2]
                before, after = (x.head.get("settings", {}).get(protocol) for x in (other, run))
                raise UserError(f"runs {other.path} and {run.path}: {protocol} at {length}: different "
                                f"targets, by {before} and {after}; evaluate one of them again, with the "
                                "flags of the other one and --replace")


def column_of(record: Record) -> tuple[float, str]:
    """The place of a record on the x axis, and its heading: its bucket, its distance, or its length."""
    if "bucket" in record:
        start, end = record["bucket"]
        return math.sqrt((start + 1) * end), f"{start}-{end - 1}"
    where = record["distance" if "distance" in record else "length"]
    return where, str(where)
