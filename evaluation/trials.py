"""Trials: the values that each config is trained with, and the choice among them.

The rule (docs/fair-comparisons.md): every config has the same number of trials. All are trained with the
same seeds, and the one with the lowest mean validation loss at L = train.seq_len is chosen. No longer context
has a part in it.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from base.errors import UserError, did_you_mean
from base.files import read_json, write_whole
from config import MUST_AGREE, toml_value
from evaluation.sweeping import DIVERGED, Job, Point, Points

OTHERS = "others"       # in a file of trials: the configs that have no entry of their own


# -----------------------------------------------------------------------------------------------------------
# The points of each config


def grid_points(grid: Sequence[str]) -> list[Point]:
    """All combinations of `section.key=value,value` texts, each a list of overrides. Raises UserError."""
    axes = dict[str, list[str]]()
    for text in grid:
        key, _, values = text.partition("=")
        choices = re.split(r",(?![^\[{]*[\]}])", values)                 # not inside a [list] or {table}
        if "." not in key or not all(choices):
            raise UserError(f"--grid {text}: must read section.key=value,value, such as train.lr=1e-3,2e-3")
        axes.setdefault(key, []).extend(f"{key}={value}" for value in choices)
    return [list(point) for point in itertools.product(*axes.values())]


def read_points(path: Path, configs: Sequence[str]) -> dict[str, list[Point]]:
    """Config -> its points in a file of --trials. Raises UserError.

    The file is TOML: NAME = ["GRID", ...], where NAME.toml is the config, or `others` for the configs that
    are not named, and GRID is written as for --grid, with a blank between keys. A config has the points of
    all its grids.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        grids = {name: [shlex.split(grid) for grid in texts] for name, texts in content.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--trials {path}: {error}; see sweep.py --help for an example") from error
    names = [Path(config).stem for config in configs]
    for name in grids.keys() - {*names, OTHERS}:
        raise UserError(f"--trials {path}: {name} is none of the configs{did_you_mean(name, names)}")
    points = {}
    for config, name in zip(configs, names, strict=True):
        own = grids.get(name) or grids.get(OTHERS)
        if not own:
            raise UserError(f"--trials {path}: no trials for {name}; add them as NAME = "
                            f'["train.lr=1e-3,2e-3"], or {OTHERS} = [...] for all that are not named')
        points[config] = [point for grid in own for point in grid_points(grid)]
    return points


def check_fair(points: Points) -> None:
    """Raise UserError unless every config has as many trials, whose losses are comparable."""
    counts = {Path(config).stem: len(of_config) for config, of_config in points.items()}
    if len(set(counts.values())) > 1 or min(counts.values()) < 2:
        raise UserError("--choose: every config needs the same number of trials, at least two, got "
                        + ", ".join(f"{n} for {name}" for name, n in counts.items()))
    overrides = [override for of_config in points.values() for point in of_config for override in point]
    for override in overrides:
        if override.startswith(MUST_AGREE["trials"]):
            key = override.partition("=")[0]
            remedy = {"run.dir": "give --runs FOLDER", "train.seed": "give --seeds"}
            raise UserError(f"--choose: trials must not differ in {key}, because their losses would not be "
                            f"comparable; {remedy.get(key, f'give {key}=VALUE for all')} instead")


# -----------------------------------------------------------------------------------------------------------
# The choice


def choose(jobs: Sequence[Job], failed: Mapping[str, str], out: Path) -> list[str]:
    """Write out/trials.csv with every run and out/chosen.toml with the best trial of each config.

    `failed` has the problem of each job that failed. Returns problems: a run that failed, so that nothing is
    chosen, or a config whose trials all diverged.
    """
    problems = [f"run {name}: {problem}" for name, problem in failed.items() if problem != DIVERGED]
    if problems:
        return [*problems, "nothing is chosen before all runs are done; the same command tries them again"]
    rows = []
    for job in jobs:
        loss = None if job.name in failed else read_json(job.run_dir / "summary.json")["val_loss"]
        rows.append({"config": Path(job.config).stem, "trial": shlex.join(job.point), "run": job.name,
                     "val_loss": math.inf if loss is None else loss})       # a run that diverged loses
    runs = pd.DataFrame(rows)
    runs["mean"] = runs.groupby(["config", "trial"]).val_loss.transform("mean")
    best = runs.loc[runs.groupby("config", sort=False)["mean"].idxmin()]
    chosen = best[best["mean"] < math.inf]
    out.mkdir(parents=True, exist_ok=True)
    runs.to_csv(out / "trials.csv", index=False)
    text = "".join(f"{toml_value(config)} = {toml_value([trial])}\n"
                   for config, trial in zip(chosen.config, chosen.trial, strict=True))
    write_whole(out / "chosen.toml", text)
    print(runs.to_string(index=False, float_format="%.4f"), f"\n{out}/chosen.toml:", text, sep="\n", end="")
    return [f"config {config}: all of its trials diverged; give lower rates"
            for config in best.config[best["mean"] == math.inf]]
