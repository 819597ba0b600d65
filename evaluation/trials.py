"""Trials: the values that each config is trained with, the choice among them, and how much it matters.

The rule (docs/fair-comparisons.md): every config has the same number of trials. All are trained with the
first seed, the better half also with the second, and the one with the lowest validation loss at
L = train.seq_len, the mean over both seeds, is chosen. No longer context has a part in it.
"""

from __future__ import annotations

import csv
import itertools
import re
import shlex
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config import Config, differences, load_config
from evaluation.report import plain, rows_of
from evaluation.sweeping import DIVERGED, Job, Point, Points
from hf.pretrained import pretrained_tables
from model import GPT
from runtime.errors import UserError, did_you_mean, shortened
from runtime.files import read_json, read_text, write_whole

VALIDATION = "validation loss"
SECOND = "validation loss, second seed"
OTHERS = "others"       # in a file of trials: the configs that have no entry of their own
EQUAL = ("data", "run", "train.steps", "train.batch_size", "train.seq_len", "train.seed", "train.val_windows",
         "train.init_from", "train.position")    # no trial may change these: tokens, their order, the loss


class Trial(NamedTuple):
    """One trained trial."""

    config: str                     # the path of its file
    point: Point
    is_default: bool                # its values are the config's own
    problem: str                    # "" if it was trained to the end
    losses: dict[str, float]        # VALIDATION, SECOND, "loss at LENGTH", as far as measured: nats per token

    @property
    def name(self) -> str:
        """The config's name."""
        return Path(self.config).stem

    @property
    def values(self) -> str:
        """The point as text."""
        return " ".join(self.point)

    @property
    def score(self) -> float:
        """The validation loss, the mean over the seeds that it was trained with; lower is better."""
        return statistics.fmean(self.losses[key] for key in (VALIDATION, SECOND) if key in self.losses)


# -----------------------------------------------------------------------------------------------------------
# The points of each config


def grid_points(grid: Sequence[str]) -> list[Point]:
    """All combinations of `section.key=value,value` texts, each a list of overrides. Raises UserError."""
    axes = []
    for text in grid:
        key, _, values = text.partition("=")
        choices = re.split(r",(?![^\[]*\])", values)                     # not at the commas of a [list]
        if "." not in key or not all(choices) or len(set(choices)) < len(choices):
            raise UserError(f"--grid {text}: must read section.key=value,value with different values, such "
                            "as train.lr=1e-3,2e-3")
        axes.append([f"{key}={value}" for value in choices])
    keys = [text.partition("=")[0] for text in grid]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--grid {key}: given twice; give all its values in one flag")
    return [list(point) for point in itertools.product(*axes)]


def read_points(path: Path, configs: Sequence[str]) -> dict[str, list[Point]]:
    """Config -> its points in a file of --trials. Raises UserError.

    The file is TOML: NAME = ["GRID", ...], where NAME.toml is the config, or `others` for the configs that
    are not named, and GRID is written as for --grid, with a blank between keys. A config has the points of
    all its grids.
    """
    try:
        content = tomllib.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"--trials {path}: not valid TOML: {error}; see sweep.py --help") from error
    names = [Path(config).stem for config in configs]
    points = {}
    for name in content:
        if name not in (*names, OTHERS):
            raise UserError(f"--trials {path}: {name} is none of the configs"
                            f"{did_you_mean(name, names) or '; remove it, or add the config to the command'}")
    for config, name in zip(configs, names, strict=True):
        grids = content.get(name, content.get(OTHERS))
        if not isinstance(grids, list) or not grids or not all(isinstance(grid, str) for grid in grids):
            got = "nothing" if grids is None else shortened(grids)
            raise UserError(f'--trials {path}: {name} must be a list of grids such as ["train.lr=1e-3,2e-3"],'
                            f" got {got}; add it, or {OTHERS} = [...] for all configs that are not named")
        points[config] = [point for grid in grids for point in grid_points(split(grid, f"--trials {path}"))]
    return points


def split(text: str, where: str) -> list[str]:
    """The arguments in a text, as a shell splits them. Raises UserError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{where}: {shortened(text)} has {str(error).lower()}; close the quotes") from error


def check_fair(points: Points, overrides: Sequence[str]) -> list[str]:
    """The differences between the configs, apart from [position] and the keys of the trials.

    Raises UserError unless every config has as many trials, their validation losses are comparable, and each
    key has an effect.
    """
    counts = {Path(config).stem: len(own) for config, own in points.items()}
    if len(set(counts.values())) > 1:
        raise UserError("--choose: every config needs the same number of trials, got "
                        + ", ".join(f"{n} for {name}" for name, n in counts.items()))
    if max(counts.values()) < 2:
        raise UserError("--choose: there is nothing to choose from; give --grid or --trials with at least "
                        "two trials")
    keys = {config: {override.partition("=")[0] for point in own for override in point}
            for config, own in points.items()}
    first = load(next(iter(points)), overrides)
    unequal = []
    for config, own_keys in keys.items():
        resolved = load(config, overrides)
        for key in sorted(own_keys):
            if key.startswith(EQUAL):
                raise UserError(f"--choose: trials must not differ in {key}, because their losses would not "
                                f"be comparable; give {key}=VALUE for all instead")
            if key == "position.lr_scale" and not has_own_parameters(resolved):
                raise UserError(f"--choose: {key} has no effect on {config}, which has no parameters of "
                                "position; give it as many trials over train.lr by --trials")
        if resolved.train.seq_len != first.train.seq_len:
            raise UserError(f"--choose: {config} has another train.seq_len than {next(iter(points))}, and "
                            "losses are comparable at one length only; give train.seq_len=VALUE for all")
        lines = differences(first, resolved, ["run", "position"])
        unequal += [f"{Path(config).stem}: {line}" for line in lines
                    if line.partition(":")[0] not in own_keys]
    return unequal


def load(config: str, overrides: Sequence[str]) -> Config:
    """The config with these overrides."""
    return load_config(config, overrides, pretrained_tables)


def has_own_parameters(config: Config) -> bool:
    """Whether the encoding or the query temperature has parameters."""
    model_config = config.model.model_copy(update={"vocab_size": config.model.vocab_size or 2})
    with torch.device("meta"):                  # shapes without memory
        model = GPT(config.model_copy(update={"model": model_config}))
    return len([*model.encoding.parameters(), *model.temperature.parameters()]) > 0


# -----------------------------------------------------------------------------------------------------------
# The choice


def trial_arguments(eval_arguments: Sequence[str], L: int) -> list[str]:
    """Arguments of eval.py for a trial: those of --eval without methods of --extend, at L and 8 L alone."""
    kept, is_value = [], False
    for argument in eval_arguments:
        if not (is_value or argument.startswith("--extend")):
            kept.append(argument)
        is_value = argument == "--extend"
    return [*kept, "--protocol", "fixed", "--lengths", f"{L},{8 * L}"]


def read_trials(jobs: Sequence[Job], failed: Mapping[str, str], overrides: Sequence[str]) -> list[Trial]:
    """What the jobs of all trials measured; `failed` has the problem of each job that failed."""
    defaults = {config: load(config, overrides) for config in {job.config for job in jobs}}
    trials = []
    for job in jobs:
        problem, losses = failed.get(job.name, ""), dict[str, float]()
        if not problem or problem.startswith("eval.py"):    # trained: the choice needs no evaluation
            val_loss = measured(job.run_dir / "summary.json", lambda found: found["val_loss"])
            if not problem and job.eval_arguments is not None:
                losses = measured(job.run_dir / "trial.json", lambda found: {
                    f"loss at {r['length']}": r["nll_sum"] / r["tokens"] for r in found["records"]})
            losses, problem = ({VALIDATION: val_loss, **losses}, "") if val_loss else ({}, DIVERGED)
        changed = differences(defaults[job.config], load(job.config, job.overrides), ["run"])
        is_default = all(line.startswith("train.seed:") for line in changed)
        trials.append(Trial(job.config, job.point, is_default, problem, losses))
    return trials


def measured(path: Path, pick: Callable[[dict[str, Any]], Any]) -> Any:
    """What `pick` takes from the JSON of a trial. Raises UserError if the file is damaged."""
    try:
        return pick(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}); delete this file, the same command "
                        "writes it again") from error


def better_half(trials: Sequence[Trial]) -> list[Trial]:
    """The trials of one config that may still be chosen, the best first: those that were trained with both
    seeds, or half of them (rounded up, at least two) while there was one. Raises UserError if there is none.
    """
    config, incomplete = trials[0].config, [t.values for t in trials if t.problem not in ("", DIVERGED)]
    if incomplete:
        raise UserError(f"config {config}: nothing is chosen, because {len(incomplete)} of its {len(trials)} "
                        f"trials failed ({', '.join(incomplete)}); the same command tries them again")
    trained = sorted((t for t in trials if t.losses), key=lambda t: t.score)
    if not trained:
        raise UserError(f"config {config}: all of its {len(trials)} trials diverged; give lower rates")
    return [t for t in trained if SECOND in t.losses] or trained[:max(2, (len(trials) + 1) // 2)]


def with_second_seed(trials: Sequence[Trial], again: Sequence[Trial]) -> list[Trial]:
    """The trials, with the losses and problems of those that were trained with the second seed too."""
    second = {(t.config, t.values): t for t in again}
    merged = []
    for t in trials:
        if other := second.get((t.config, t.values)):
            losses = t.losses | {SECOND: other.losses[VALIDATION]} if other.losses else {}
            t = t._replace(problem=other.problem, losses=losses)
        merged.append(t)
    return merged


def better_halves(trials: Sequence[Trial]) -> tuple[dict[str, list[Trial]], list[str]]:
    """Config name -> its better half, the chosen trial first; and a line for each config that has none."""
    halves, problems = dict[str, list[Trial]](), list[str]()
    for name, own in itertools.groupby(trials, key=lambda t: t.name):
        try:
            halves[name] = better_half(list(own))
        except UserError as error:
            problems += error.problems
    return halves, problems


# -----------------------------------------------------------------------------------------------------------
# How much the choice matters


def sensitivity(trials: Sequence[Trial], chosen: Mapping[str, Trial], L: int,
                unequal: Sequence[str]) -> str:
    """sensitivity.md: every trial, and the configs at their default and at their chosen trial.

    `chosen` has a trial for each config where one was chosen. `unequal` are the differences between the
    configs apart from [position] and the keys of the trials.
    """
    configs = {t.name: [other for other in trials if other.name == t.name] for t in trials}
    default = {t.name: t for t in reversed(trials) if t.is_default}
    heads = list(dict.fromkeys(head for t in trials for head in t.losses))
    of_all = [head for head in heads if head != SECOND]     # of every trial
    by_config, by_trial = {}, []
    for name, own in configs.items():
        points = [plain(of[name].values) if name in of else "-" for of in (default, chosen)]
        n_diverged = sum(t.problem == DIVERGED for t in own)
        by_config[name] = [*points, *(shown(spread(own, head)) for head in of_all), str(n_diverged)]
        for t in own:
            marks = [word for word, of in (("default", default), ("chosen", chosen)) if t is of.get(name)]
            cells = [name, t.values, ", ".join([*marks, t.problem] if t.problem else marks)]
            by_trial.append(f"| {' | '.join(map(plain, cells))} | "
                            f"{' | '.join(shown(t.losses.get(head)) for head in heads)} |")
    apart = "; ".join(map(plain, unequal))
    return "\n".join([
        "# How much the choice of the trial matters", "",
        f"Each config had {len(configs[trials[0].name])} trials with the first seed"
        + (", and the better half of them with the second" if SECOND in heads else "") + ". The trial with "
        f"the lowest validation loss, which is measured at L = {L}, was chosen"
        + (", by the mean over both seeds" if SECOND in heads else "") + ". The other losses are of the "
        "first seed on fixed targets, the same tokens at every length; they had no part in the choice. All "
        "losses are in nats per token.",
        "", "Apart from [position] and the keys of the trials, the configs "
        + (f"differ: {apart}." if apart else "are equal."),
        "", "## By config", "",
        "A range is the highest loss minus the lowest, over the trials of the config that did not diverge.",
        "", *rows_of(["config", "default", "chosen", *(f"range of {head}" for head in of_all), "diverged"],
                     by_config),
        "", *(f"- {sentence}" for head in of_all for sentence in orders(head, default, chosen)),
        *(f"- At the edge of its grid, so that a better value may lie beyond: {name}, {override}."
          for name, t in chosen.items() for override in edges(t, configs[name])),
        "", "## By trial", "", *rows_of(["config", "trial", "", *heads], {}), *by_trial, ""])


def orders(head: str, default: Mapping[str, Trial], chosen: Mapping[str, Trial]) -> Iterator[str]:
    """A sentence on the order of the configs by a loss at the default and at the chosen trials."""
    both = [name for name in chosen if head in chosen[name].losses
            and name in default and head in default[name].losses]
    if len(both) > 1:
        before, after = (sorted(both, key=lambda name: of[name].losses[head]) for of in (default, chosen))
        apart = shown(spread([chosen[name] for name in both], head))
        earlier = "the same" if before == after else ", ".join(before)
        yield (f"Order by {head}, the lowest first: {', '.join(after)} at the chosen trials ({apart} from "
               f"the first to the last); {earlier} at the default ones.")


def edges(chosen: Trial, trials: Sequence[Trial]) -> Iterator[str]:
    """The overrides of a trial whose number is the lowest or highest of this key among the trials."""
    for override in chosen.point:
        key = override.partition("=")[0]
        with suppress(ValueError):              # not a number
            numbers = {float(other.partition("=")[2]) for t in trials for other in t.point
                       if other.partition("=")[0] == key}
            if len(numbers) > 1 and float(override.partition("=")[2]) in (min(numbers), max(numbers)):
                yield override


def spread(trials: Sequence[Trial], head: str) -> float | None:
    """The highest loss minus the lowest."""
    losses = [t.losses[head] for t in trials if head in t.losses]
    return max(losses) - min(losses) if losses else None


def shown(loss: float | None) -> str:
    """A loss in a table."""
    return "-" if loss is None else f"{loss:.4f}"


def write_sensitivity(out: Path, trials: Sequence[Trial], chosen: Mapping[str, Trial], L: int,
                      unequal: Sequence[str]) -> None:
    """Write OUT/sensitivity.md, and sensitivity.csv with every digit."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "sensitivity.md", sensitivity(trials, chosen, L, unequal))
    with (out / "sensitivity.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        heads = list(dict.fromkeys(head for t in trials for head in t.losses))
        writer.writerow(["config", "trial", "is_default", "is_chosen", "problem", *heads])
        writer.writerows([t.name, t.values, int(t.is_default), int(chosen.get(t.name) is t), t.problem,
                          *(t.losses.get(head, "") for head in heads)] for t in trials)
