"""Reading what train.py and eval.py wrote of runs, and refusing runs that cannot be compared.

compare.py writes all that it read into its own folder, from which it can be read again:
  table.parquet      the tables of all runs, one below the other
  training.parquet   their training: run, step, tokens, loss, val_loss; missing if nothing is known of it
  runs.json          what the runs have in common, and what each of them has: label, config, heads of the
                     evaluations, the text they were trained on, summary.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from base.errors import UserError
from base.files import read_json, write_whole
from config import MUST_AGREE, flatten, load_config
from data.loader import read_meta
from evaluation import results
from evaluation.results import join, read_table, write_table
from hf.pretrained import files_sha256, is_pretrained, pretrained_config
from runtime.checkpoint import is_current
from runtime.log import read_log

Keys = dict[str, Any]           # "section.key" -> value, as far as JSON can hold it
TRAINING = ["step", "tokens", "loss", "val_loss"]
TABLE, CURVES, ABOUT = "table.parquet", "training.parquet", "runs.json"


class Run(NamedTuple):
    """What train.py and eval.py wrote of one run."""

    name: str                           # its folder, as it was named in the command
    label: str                          # of its curve
    config: Keys
    head: Keys                          # of the evaluation; older ones lack keys
    trained_on: Any                     # the splits of its corpora; None for a Hugging Face folder
    summary: Keys
    training: pd.DataFrame
    table: pd.DataFrame

    @property
    def title(self) -> str:
        """Its folder, and the step at which it was evaluated if that is not its last one."""
        step = self.head.get("step")
        steps = self.config["train.steps"]
        return self.name if step in (None, steps) else f"{self.name} (unfinished: step {step} of {steps})"

    @property
    def seed(self) -> str:
        """train.seed, and the seed or else the name of the run it began from: what identifies a sample."""
        base = self.config["train.init_from"]
        number = re.search(r"-seed(\d+)/*$", base or "")
        origin = number[1] if number else Path(base).name if base else ""
        seed = str(self.config["train.seed"])
        return f"{seed} from {origin}" if origin else seed


def without_seed(folder: str | Path | None) -> str:
    """The name of a folder, without -seedN at its end."""
    return re.sub(r"-seed\d+$", "", Path(folder).resolve().name) if folder else ""


# -----------------------------------------------------------------------------------------------------------
# Reading


def read_runs(paths: Sequence[Path], data: str | None) -> list[Run]:
    """The runs of these folders: runs, folders of runs, and folders that compare.py wrote. Raises UserError.

    Files, such as logs, and what compare.py wrote of runs that are named too, are passed over.
    """
    runs: dict[str, Run] = {}
    for path in paths:
        if is_run(path):
            runs[str(path)] = read_run(path, data)
        elif is_saved(path):
            for run in load(path):
                runs.setdefault(run.name, run)
        elif path.is_dir():
            inside = [child for child in sorted(path.iterdir()) if is_run(child)]
            if not inside:
                raise UserError(f"run {path}: no run there; give a folder that train.py made, a folder of "
                                "them, or one that compare.py wrote")
            for child in inside:
                if find_evaluations(child):
                    runs[str(child)] = read_run(child, data)
                else:
                    print(f"{child}: not evaluated, left out; run `python eval.py {child}`")
        elif not path.exists():
            raise UserError(f"run {path}: no such folder; give runs, a folder of them, or one that "
                            "compare.py wrote")
    if not runs:
        raise UserError(f"{', '.join(map(str, paths))}: no evaluated run there; run `python eval.py RUN` "
                        "first")
    return list(runs.values())


def is_run(path: Path) -> bool:
    """Whether this is a run or a Hugging Face folder."""
    return (path / "config.toml").is_file() or is_pretrained(path)


def is_saved(path: Path) -> bool:
    """Whether compare.py wrote this folder."""
    return (path / TABLE).is_file() and (path / ABOUT).is_file()


def find_evaluations(folder: Path) -> dict[str, Path]:
    """Name of a text -> the evaluation on it."""
    return {path.stem: path for path in sorted((folder / "eval").glob("*.json"))}


def choose_evaluation(folder: Path, data: str | None) -> Path:
    """RUN/eval/DATA.json; without data the only one there is. Raises UserError."""
    paths = find_evaluations(folder)
    if not paths:
        raise UserError(f"run {folder}: no eval/*.json; run `python eval.py {folder}` first")
    if data is None and len(paths) > 1:
        paths = {name: path for name, path in paths.items() if not name.endswith(results.EXTENDED)} or paths
    if data is None and len(paths) > 1:
        raise UserError(f"run {folder}: evaluated on {', '.join(paths)}; choose one with --data")
    if data not in (None, *paths):
        raise UserError(f"--data {data}: run {folder} was evaluated on {', '.join(paths)}")
    return paths[data] if data else next(iter(paths.values()))


def read_run(folder: Path, data: str | None) -> Run:
    """A run's config and its evaluation, which must be of its newest checkpoint. Raises UserError."""
    path = choose_evaluation(folder, data)
    evaluation = results.read(path)
    sha256 = evaluation.head.get("checkpoint_sha256")       # older evaluations do not name it
    if is_pretrained(folder):
        config = pretrained_config(folder)
        trained_on = None
        is_newest = sha256 is None or files_sha256(folder) == sha256
    else:
        config = load_config(folder / "config.toml")
        meta = read_meta(folder / "corpus.json")
        trained_on = [about["splits"] for about in (meta, *meta.get("mixture", {}).values())]
        is_newest = sha256 is None or is_current(folder, sha256)
    if not is_newest:
        raise UserError(f"{path}: evaluated at step {evaluation.head.get('step')}, but the run has another "
                        f"checkpoint now; run `python eval.py {folder} --replace` with the same flags")
    summary = folder / "summary.json"
    table = evaluation.table.assign(run=str(folder))
    return Run(str(folder), without_seed(folder), flatten(config), evaluation.head, trained_on,
               read_json(summary) if summary.exists() else {}, read_training(folder), table)


def read_training(folder: Path) -> pd.DataFrame:
    """RUN/metrics.jsonl: step, tokens, loss and val_loss, NaN where there is none."""
    path = folder / "metrics.jsonl"
    lines = read_log(path) if path.exists() else []
    return pd.DataFrame(lines, columns=TRAINING).astype("float")


# -----------------------------------------------------------------------------------------------------------
# The folder of compare.py


def write_runs(folder: Path, runs: Sequence[Run]) -> None:
    """Write the three files, each whole. Raises OSError."""
    parts: dict[str, list[Keys]] = {
        "config": [run.config for run in runs], "head": [run.head for run in runs],
        "summary": [run.summary for run in runs], "more": [{"trained_on": run.trained_on} for run in runs]}
    common: dict[str, Keys] = {}
    about: dict[str, Keys] = {run.name: {"label": run.label} for run in runs}
    for part, tables in parts.items():
        common[part], rests = split_common(tables)
        for run, rest in zip(runs, rests, strict=True):
            if rest:
                about[run.name][part] = rest
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / TABLE, join(*(run.table for run in runs)))
    training = [run.training.assign(run=run.name)[["run", *TRAINING]] for run in runs if len(run.training)]
    if training:
        write_table(folder / CURVES, pd.concat(training, ignore_index=True))
    else:
        (folder / CURVES).unlink(missing_ok=True)
    write_whole(folder / ABOUT, json.dumps({"common": common, "runs": about}, indent=1) + "\n")


def split_common(tables: Sequence[Keys]) -> tuple[Keys, list[Keys]]:
    """What all of these tables have with the same value, and what each has besides."""
    common = {}
    for key, value in tables[0].items():
        if all(key in table and table[key] == value for table in tables):
            common[key] = value
    rests = [{key: value for key, value in table.items() if key not in common} for table in tables]
    return common, rests


def load(folder: Path) -> list[Run]:
    """The runs of which compare.py wrote this folder. Raises UserError if it is damaged."""
    try:
        table = read_table(folder / TABLE)
        training = pd.DataFrame(columns=["run", *TRAINING])
        if (folder / CURVES).exists():
            training = pd.read_parquet(folder / CURVES)
        about = read_json(folder / ABOUT)
        common = about["common"]
        runs = []
        tables = dict(iter(table.groupby("run", sort=False)))
        curves = dict(iter(training.groupby("run", sort=False)[TRAINING]))
        for name, entry in about["runs"].items():
            parts = {part: common[part] | entry.get(part, {}) for part in common}
            runs.append(Run(name, entry["label"], parts["config"], parts["head"], parts["more"]["trained_on"],
                            parts["summary"], curves.get(name, training[TRAINING][:0]),
                            tables.get(name, table[:0])))
        return runs
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: damaged, or not by this compare.py ({error}); compare the runs again "
                        "with --out") from error


# -----------------------------------------------------------------------------------------------------------
# What can be compared


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise UserError unless tokenizer, text, evaluation seed, training length and targets are the same."""
    first = runs[0]
    trained = [run for run in runs if run.trained_on is not None]
    targets: dict[tuple[Any, ...], tuple[Run, np.ndarray]] = {}         # protocol, length, place -> of a run
    for run in runs:
        pair = f"runs {first.name} and {run.name}"
        for key in MUST_AGREE["compare"]:
            before = first.head.get(key)
            after = run.head.get(key)
            if before != after and None not in (before, after):
                raise UserError(f"{pair}: {key} of their evaluations differs, {before!r} and {after!r}; "
                                "compare runs where it is the same")
        if run.trained_on is not None and run.trained_on != trained[0].trained_on:
            raise UserError(f"runs {trained[0].name} and {run.name}: trained on different text; compare runs "
                            "on the same corpus")
        columns = run.table[list(MUST_AGREE["targets"])].to_numpy()
        for (_, *place), rows in run.table.groupby(results.PLACE, sort=False).indices.items():
            wanted = columns[rows]
            earlier, known = targets.setdefault(tuple(place), (run, wanted))
            if not is_same(known, wanted):
                protocol, length, _ = place
                before = earlier.head.get("settings", {}).get(protocol)
                after = run.head.get("settings", {}).get(protocol)
                raise UserError(f"runs {earlier.name} and {run.name}: {protocol} at {length}: different "
                                f"targets, by {before} and {after}; evaluate one of them again, with the "
                                "flags of the other one and --replace")


def is_same(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether numbers of targets agree, as far as both are known: older evaluations lack some (NaN)."""
    if left.shape != right.shape:
        return False
    is_known = ~(np.isnan(left) | np.isnan(right))
    return bool((left == right)[is_known].all())
