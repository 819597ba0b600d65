"""Trials: the values that each config is trained with, and the choice among them.

The rule (docs/fair-comparisons.md): every config has the same number of trials. All are trained with the
first seed, the better half also with the second, and the one with the lowest validation loss at
L = train.seq_len, the mean over both seeds, is chosen. No longer context has a part in it.
"""

from __future__ import annotations

import itertools
import re
import shlex
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas
import torch

from config import differences, load_config
from evaluation.sweeping import DIVERGED, Job, Point, Points
from hf.pretrained import pretrained_tables
from model import shape_of
from positions import ENCODINGS
from runtime.errors import UserError, did_you_mean
from runtime.files import read_json

FIRST, SECOND = "validation loss", "validation loss, second seed"
OTHERS = "others"       # in a file of trials: the configs that have no entry of their own
EQUAL = ("data", "run", "train.steps", "train.batch_size", "train.seq_len", "train.seed", "train.val_windows",
         "train.init_from", "train.position")    # no trial may change these: tokens, their order, the loss


@dataclass
class Trial:
    """One trained trial."""

    config: str                     # the path of its file
    point: Point
    problem: str = ""               # "" if it was trained to the end
    losses: dict[str, float] = field(default_factory=dict)      # FIRST, SECOND: nats per token

    @property
    def values(self) -> str:
        """The point as text."""
        return " ".join(self.point)

    @property
    def score(self) -> float:
        """The validation loss, the mean over the seeds that it was trained with; lower is better."""
        return statistics.fmean(self.losses.values())


# -----------------------------------------------------------------------------------------------------------
# The points of each config


def grid_points(grid: Sequence[str]) -> list[Point]:
    """All combinations of `section.key=value,value` texts, each a list of overrides. Raises UserError."""
    axes = dict[str, list[str]]()
    for text in grid:
        key, _, values = text.partition("=")
        choices = re.split(r",(?![^\[]*\])", values)                     # not at the commas of a [list]
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
        grids = {name: [shlex.split(grid) for grid in own] for name, own in content.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--trials {path}: {error}; see sweep.py --help for an example") from error
    names = [Path(config).stem for config in configs]
    for name in grids.keys() - {*names, OTHERS}:
        raise UserError(f"--trials {path}: {name} is none of the configs{did_you_mean(name, names)}")
    without = [name for name in names if not grids.get(name, grids.get(OTHERS))]
    if without:
        raise UserError(f"--trials {path}: no trials for {', '.join(without)}; add them as NAME = "
                        f'["train.lr=1e-3,2e-3"], or {OTHERS} = [...] for all that are not named')
    return {config: [point for grid in grids.get(name, grids.get(OTHERS, [])) for point in grid_points(grid)]
            for config, name in zip(configs, names, strict=True)}


def check_fair(points: Points, overrides: Sequence[str]) -> list[str]:
    """The differences between the configs, apart from [position] and the keys of the trials.

    Raises UserError unless every config has as many trials, their validation losses are comparable, and each
    key has an effect.
    """
    counts = {Path(config).stem: len(own) for config, own in points.items()}
    if len(set(counts.values())) > 1 or min(counts.values()) < 2:
        raise UserError("--choose: every config needs the same number of trials, at least two, got "
                        + ", ".join(f"{n} for {name}" for name, n in counts.items()))
    first = load_config(next(iter(points)), overrides, pretrained_tables)
    unequal = []
    for config, own in points.items():
        resolved = load_config(config, overrides, pretrained_tables)
        keys = {override.partition("=")[0] for point in own for override in point}
        for key in sorted(keys):
            if key.startswith(EQUAL):
                raise UserError(f"--choose: trials must not differ in {key}, because their losses would not "
                                f"be comparable; give {key}=VALUE for all instead")
        with torch.device("meta"):              # shapes without memory
            encoding = ENCODINGS[resolved.position.encoding](shape_of(resolved), resolved.position)
        is_trained = resolved.position.temperature == "ssmax" or [*encoding.parameters()]
        if "position.lr_scale" in keys and not is_trained:
            raise UserError(f"--choose: position.lr_scale has no effect on {config}, which has no parameters "
                            "of position; give it as many trials over train.lr by --trials")
        if resolved.train.seq_len != first.train.seq_len:
            raise UserError(f"--choose: {config} has another train.seq_len than {next(iter(points))}, and "
                            "losses are comparable at one length only; give train.seq_len=VALUE for all")
        lines = differences(first, resolved, ["run", "position"])
        unequal += [f"{Path(config).stem}: {line}" for line in lines if line.partition(":")[0] not in keys]
    return unequal


# -----------------------------------------------------------------------------------------------------------
# The choice


def read_losses(trials: dict[Point, Trial], jobs: Sequence[Job], failed: Mapping[str, str], key: str) -> None:
    """Add the validation losses of these jobs to the trials; `failed` has the problem of each that failed."""
    for job in jobs:
        t = trials.setdefault((job.config, *job.point), Trial(job.config, job.point))
        loss = None if job.name in failed else read_json(job.run_dir / "summary.json")["val_loss"]
        if loss is None:
            t.problem, t.losses = failed.get(job.name, DIVERGED), {}
        else:
            t.losses[key] = loss


def better_halves(trials: Sequence[Trial]) -> tuple[dict[str, list[Trial]], list[str]]:
    """Config -> its better half, the chosen trial first; and a line for each config that has none.

    The better half are the trials that may still be chosen: those that were trained with both seeds, or
    half of them (rounded up, at least two) while there was one.
    """
    halves, problems = dict[str, list[Trial]](), list[str]()
    for config, group in itertools.groupby(trials, key=lambda t: t.config):
        own = list(group)
        failed = [t.values for t in own if t.problem not in ("", DIVERGED)]
        trained = sorted((t for t in own if t.losses), key=lambda t: t.score)
        if failed:
            problems.append(f"config {config}: nothing is chosen, because {len(failed)} of its {len(own)} "
                            f"trials failed ({', '.join(failed)}); the same command tries them again")
        elif not trained:
            problems.append(f"config {config}: all of its {len(own)} trials diverged; give lower rates")
        else:
            half = trained[:max(2, (len(own) + 1) // 2)]
            halves[config] = [t for t in trained if SECOND in t.losses] or half
    return halves, problems


def write_trials(path: Path, trials: Sequence[Trial], chosen: Mapping[str, Trial]) -> str:
    """Write every trial with its losses as CSV. Returns it as text."""
    table = pandas.DataFrame([
        {"config": Path(t.config).stem, "trial": t.values,
         "remarks": "chosen" if chosen.get(t.config) is t else t.problem, **t.losses} for t in trials])
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False)
    return table.to_string(index=False, float_format="%.4f", na_rep="-", justify="left")
