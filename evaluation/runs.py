"""Reading what train.py and eval.py wrote of runs, and refusing runs that cannot be compared.

compare.py writes all that it read into its own folder, from which it can be read again:
  table.parquet      the tables of all runs, one below the other
  training.parquet   their training: run, step, tokens, loss, val_loss
  runs.json          name -> label, config, head of the evaluation, the text it was trained on, summary.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from base.errors import UserError, did_you_mean
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
COLUMNS = ["run", *TRAINING]
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
        return self.name if step in (None, steps) else f"{self.name} (evaluated at step {step} of {steps})"

    @property
    def seed(self) -> str:
        """train.seed, and the name of the run it began from: what identifies a sample."""
        base = self.config["train.init_from"]
        seed = str(self.config["train.seed"])
        return f"{seed} from {Path(base).name}" if base else seed


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
            for child in sorted(path.iterdir()):
                if is_run(child) and find_evaluations(child):
                    runs[str(child)] = read_run(child, data)
                elif is_run(child):
                    print(f"{child}: not evaluated, left out; run `python eval.py {child}`")
        elif not path.exists():
            raise UserError(f"run {path}: no such folder; give runs, a folder of them, or one that "
                            "compare.py wrote")
    if not runs:
        hint = "run `python eval.py RUN` first"
        saved = [str(child) for path in paths for child in sorted(path.glob("*/")) if is_saved(child)]
        if saved:               # a row of the benchmark
            hint = f"give one of {', '.join(saved)}"
        raise UserError(f"{', '.join(map(str, paths))}: no evaluated run there; {hint}")
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
    if data is None:
        data, *others = [name for name in paths if not name.endswith(results.EXTENDED_SUFFIX)] or [*paths]
        if others:
            raise UserError(f"run {folder}: evaluated on {', '.join(paths)}; choose one with --data")
    if data not in paths:
        hint = did_you_mean(data, paths) or f"; run `python eval.py {folder}` on it first"
        raise UserError(f"run {folder}: not evaluated on {data}, but on {', '.join(paths)}{hint}")
    return paths[data]


def read_run(folder: Path, data: str | None) -> Run:
    """A run's config and its evaluation, which must be of its newest checkpoint. Raises UserError."""
    path = choose_evaluation(folder, data)
    head, table = results.read(path)
    sha256 = head.get("checkpoint_sha256") or ""    # older evaluations do not name it
    trained_on = None
    if is_pretrained(folder):
        config = pretrained_config(folder)
        is_newest = files_sha256(folder) == sha256
    else:
        config = load_config(folder / "config.toml")
        is_newest = is_current(folder, sha256)
        meta = read_meta(folder / "corpus.json")
        trained_on = [about["splits"] for about in (meta, *meta.get("mixture", {}).values())]
    if sha256 and not is_newest:
        raise UserError(f"{path}: was measured with weights that are neither the newest nor the best of "
                        f"{folder}; run `python eval.py {folder} --replace` with the same flags, but without "
                        "a step as --checkpoint")
    summary = folder / "summary.json"
    return Run(str(folder), without_seed(folder), flatten(config), head, trained_on,
               read_json(summary) if summary.exists() else {}, read_training(folder),
               table.assign(run=str(folder)))


def read_training(folder: Path) -> pd.DataFrame:
    """RUN/metrics.jsonl: step, tokens, loss and val_loss, NaN where there is none."""
    path = folder / "metrics.jsonl"
    lines = read_log(path) if path.exists() else []
    return pd.DataFrame(lines, columns=TRAINING).astype("float")


# -----------------------------------------------------------------------------------------------------------
# The folder of compare.py


def write_runs(folder: Path, runs: Sequence[Run]) -> None:
    """Write the three files, each whole. Raises OSError."""
    about = {}
    for run in runs:
        about[run.name] = {"label": run.label, "config": run.config, "head": run.head,
                           "trained_on": run.trained_on, "summary": run.summary}
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / TABLE, join(*(run.table for run in runs)))
    write_table(folder / CURVES, pd.concat([run.training.assign(run=run.name) for run in runs])[COLUMNS])
    write_whole(folder / ABOUT, json.dumps(about, indent=1) + "\n")


def load(folder: Path) -> list[Run]:
    """The runs of which compare.py wrote this folder. Raises UserError if it is damaged."""
    try:
        about = read_json(folder / ABOUT)
        table = read_table(folder / TABLE)
        training = pd.DataFrame(columns=COLUMNS)
        if (folder / CURVES).exists():              # older folders have none where nothing is known
            training = pd.read_parquet(folder / CURVES)
        tables = dict(iter(table.groupby("run")))
        curves = dict(iter(training.groupby("run")[TRAINING]))
        return [Run(name, training=curves.get(name, training[TRAINING][:0]),
                    table=tables.get(name, table[:0]), **keys) for name, keys in about.items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: damaged, or not by this compare.py ({error}); compare the runs again "
                        "with --out") from error


# -----------------------------------------------------------------------------------------------------------
# What can be compared


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise UserError unless tokenizer, text, evaluation seed, training length and targets are the same."""
    about = {key: [run.head.get(key) for run in runs] for key in MUST_AGREE["compare"]}
    about["the text they were trained on"] = [run.trained_on for run in runs]
    for what, values in about.items():
        known = [(run, value) for run, value in zip(runs, values, strict=True) if value is not None]
        for run, value in known:
            first, first_value = known[0]
            if value != first_value:
                raise UserError(f"runs {first.name} and {run.name}: {what} differs; compare runs where it is "
                                "the same")
    targets: dict[Any, tuple[Run, np.ndarray]] = {}     # (protocol, length, place) -> a run, its targets
    for run in runs:
        columns = run.table[[*MUST_AGREE["targets"]]].to_numpy()
        measured = run.table.groupby(results.SUM_KEYS, sort=False).indices
        for (_, protocol, length, place), rows in measured.items():
            scores = "fixed" if protocol == "trigram" else protocol             # the gate subtracts them
            earlier, expected = targets.setdefault((scores, length, place), (run, columns[rows]))
            if not np.array_equal(expected, columns[rows], equal_nan=True):
                raise UserError(f"runs {earlier.name} and {run.name}: {protocol} at {length}: different "
                                f"targets, by {flags(earlier, protocol)} and by {flags(run, protocol)}; "
                                "evaluate one of them again, with the flags of the other one and --replace")


def short_commit(revision: str) -> str:
    """A commit by seven digits, with what follows it; any other text as it is."""
    return re.sub(r"(?<=^[0-9a-f]{7})[0-9a-f]{33}", "", revision)


def flags(run: Run, protocol: str) -> str:
    """The flags of eval.py that chose the targets of a protocol."""
    settings = run.head.get("settings", {}).get(protocol, {})
    return " ".join(f"--{name} {value}" for name, value in settings.items()
                    if name not in ("length", "truncated") and value is not None)
