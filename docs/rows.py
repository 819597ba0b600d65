"""The record table of the study: `python -m docs.rows` writes it into docs/benchmark.md.

`make row` wrote the rows, results/rows/NAME. Each has
  docs/, code/, docs-far/, code-far/, needles/      what compare.py wrote of the runs on a text
  trials.csv, needles.csv                           the rates that were tried, in training and for needles
  row.toml                                          date, author, and a note: what is new in it
A row's number is bits per byte with 16 L of context over both texts, the mean of its seeds. It counts if the
row passes the gate on both texts. `--verify FOLDER` checks a row.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from base.command import argument_parser, run_command
from base.errors import UserError
from config import SECTIONS, Config, flatten, load_config, toml_value
from docs.gallery import ROOT, table, update
from docs.study import ROWS, at_length, labelled
from evaluation.comparison import table_of
from evaluation.estimates import PASSED, gates
from evaluation.runs import Run, check_comparable, load, short_commit
from model import GPT, Cache
from runtime.log import read_log

PAGE = ROOT / "docs" / "benchmark.md"
REFERENCE = ROOT / "results" / "rows" / "rope"      # whose text and windows every row must have
RECIPE = ROOT / "configs" / "study.toml"
TEXTS = ("docs", "code")
FOLDERS = (*TEXTS, "docs-far", "code-far", "needles")
# keys of a config that may differ from the recipe, besides [position], and keys that follow from others
OWN = ("train.lr", "train.seed", "data.bos", "model.window", "model.full_every")
DERIVED = ("run.dir", "model.vocab_size", "train.device", "train.compile")
ROUNDING = 1e-9         # of logits in fp64
RETRAINED = 50          # steps
LOSS_TOLERANCE = 1e-5   # nats per token, of a loss in training
SCORE_TOLERANCE = 1e-4  # nats per token, of a window that is evaluated again


class Row(NamedTuple):
    """What the table says of an encoding."""

    name: str
    bits: pd.Series             # seed -> bits per byte at 16 L over both texts
    truncated: float            # the same with the last L tokens of the context alone, mean over seeds
    states: tuple[str, ...]     # of the gate on each text
    n_trials: int
    trial: str                  # the one with the lowest loss: its overrides
    chosen: str                 # the name of its run, which is seed 0
    commit: str
    about: dict[str, str]       # row.toml

    @property
    def is_counted(self) -> bool:
        """Whether it passes the gate on both texts."""
        return set(self.states) == {PASSED}

    def seeds_better_than(self, other: Row) -> str:
        """In how many of the seeds that both have the number is lower."""
        lead = (other.bits - self.bits).dropna()
        return f"{(lead > 0).sum()} of {len(lead)}"


# -----------------------------------------------------------------------------------------------------------
# The table


def read_row(folder: Path) -> Row:
    """Raises UserError if there is none, a file is damaged, or a seed was not evaluated on both texts."""
    if not (folder / "row.toml").exists():
        raise UserError(f"{folder}: no row there; run `make row CONFIG=configs/rows/{folder.name}.toml`")
    about = tomllib.loads((folder / "row.toml").read_text(encoding="utf-8"))
    states, sums = [], []
    for text in TEXTS:
        runs = labelled(load(folder / text))
        L = runs[0].head["seq_len"]
        states.append(gates(table_of(runs), L)["state"].iloc[0])
        far = at_length(table_of(runs), 16 * L)
        sums.append(far.groupby("seed")[["nll", "truncated_nll", "bytes"]].sum())
    if list(sums[0].index) != list(sums[1].index):
        raise UserError(f"{folder}: its seeds differ between {' and '.join(TEXTS)}; run `make row` again")
    total = sums[0] + sums[1]
    bits = total.div(math.log(2) * total["bytes"], axis=0)
    commits = {run.summary["git_revision"] for run in runs}
    commit = ", ".join(sorted(map(short_commit, commits)))
    trials = pd.read_csv(folder / "trials.csv")
    best = trials.loc[trials["mean"].idxmin()]
    return Row(folder.name, bits["nll"], bits["truncated_nll"].mean(), tuple(states), len(trials),
               best["trial"], best["run"], commit, about)


def record_table() -> str:
    """All rows, the best first; those that do not pass the gate last, in italics."""
    rows = sorted(map(read_row, ROWS), key=lambda row: (not row.is_counted, row.bits.mean()))
    cells = []
    for row, following in zip_longest(rows, rows[1:]):
        name = row.name
        better = "-"
        if not row.is_counted:
            name = f"*{name}*"
        elif following and following.is_counted:
            better = row.seeds_better_than(following)
        cells.append([name, row.about["note"], f"{row.bits.mean():.3f}",
                      f"{row.bits.min():.3f} to {row.bits.max():.3f}", better, f"{row.truncated:.3f}",
                      ", ".join(dict.fromkeys(row.states)), f"{len(row.bits)}, {row.n_trials}",
                      f"{row.about['date']} {row.commit} {row.about['author']}"])
    return table(["row", "what is new", "bits per byte at 16 L", "range of seeds",
                  "seeds better than the next row", "truncated to L", "gate (docs, code)", "seeds, trials",
                  "when, commit, who"], cells, align="---")


# -----------------------------------------------------------------------------------------------------------
# Checks of a row


def verify(folder: Path, has_text: bool, others: Sequence[Path] = ()) -> None:
    """Print what was checked; with the text its runs too. Raises UserError at the first wrong thing.

    It also prints in how many seeds the row beats each of the others that pass the gate.

    Where train.py or eval.py itself fails, it raises CalledProcessError.
    """
    row = read_row(folder)
    print(f"{row.name}: {row.bits.mean():.4f} bits per byte at 16 L")
    print("seeds:", ", ".join(f"{bits:.4f}" for bits in row.bits))
    for other in map(read_row, others):
        if other.is_counted and other.name != row.name:
            seeds = row.seeds_better_than(other)
            print(f"better than {other.name} ({other.bits.mean():.4f}) in {seeds} seeds")
    print("gate on docs, code:", ", ".join(row.states))
    print(f"rate: the best of {row.n_trials} trials is that of {row.chosen}")
    check_runs(folder, row)
    print("recipe, seeds, text and windows: those of the study")
    first_run = load(folder / TEXTS[0])[0]
    settings = settings_of(first_run)
    print("model:", check_model(load_config(RECIPE, [*settings, "model.vocab_size=64"])))
    if not has_text:
        print("runs: not checked, because data/study is not there; `make study-data` makes it")
        return
    print("training:", check_training(first_run, settings))
    runs = [(run, text) for text in TEXTS for run in load(folder / text)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:                    # evaluations run side by side
        for n, found in enumerate(pool.map(check_weights, *zip(*runs, strict=True)), start=1):
            print(f"weights ({n} of {len(runs)}):", found, flush=True)


def check_runs(folder: Path, row: Row) -> None:
    """Raise UserError unless the runs are seeds 0, 1, ... of the trial that was chosen, by the recipe."""
    rate = re.search(r"train\.lr=(\S+)", row.trial)
    for data in FOLDERS:
        if not (folder / data).exists():
            print(f"{data}: missing")
            continue
        runs = load(folder / data)
        check_comparable([*load(REFERENCE / data), *runs])
        for seed, run in enumerate(runs):
            name = run.name
            if data == "needles":
                name = run.config["train.init_from"]        # it is tuned from seed 0
            expected = f"{row.chosen.removesuffix('-seed0')}-seed{seed}"
            if Path(name).name != expected:
                raise UserError(f"{folder / data}: has {name} instead of {expected}, by the lowest loss in "
                                "trials.csv; run `make row` again")
            if data == "needles":
                dtype = run.head["train_dtype"]
                if dtype != "float32":
                    raise UserError(f"{folder / data}: was tuned in {dtype} instead of float32; delete "
                                    "runs/needles and run `make row` again")
                continue
            settings_of(run)
            wanted: dict[str, float] = {"train.seed": seed}             # names can be changed
            if rate:
                wanted["train.lr"] = float(rate[1])
            for key, value in wanted.items():
                if run.config[key] != value:
                    raise UserError(f"{folder / data}: {name} has {key} = {run.config[key]} instead of "
                                    f"{value}; run `make row` again")


def settings_of(run: Run) -> list[str]:
    """The overrides that make the run's config of the recipe. Raises UserError if it is not of the recipe."""
    recipe = flatten(load_config(RECIPE))
    defaults = {f"{section}.{key}": field.get_default(call_default_factory=True)
                for section, schema in SECTIONS.items() for key, field in schema.model_fields.items()}
    settings = []
    for key in recipe | run.config:
        value = run.config.get(key, defaults.get(key))          # of a key that is newer than the run
        if key.startswith("position.") or key in OWN:
            if isinstance(value, dict):
                value = {name: inner for name, inner in value.items() if inner is not None}
            if value is not None:
                settings.append(f"{key}={toml_value(value)}")
        elif key not in DERIVED and value != recipe.get(key):
            raise UserError(f"{run.name}: {key} = {value} is not that of {RECIPE.name}; train a config that "
                            "extends it")
    return settings


def check_model(config: Config) -> str:
    """A token changes no logits before it, and decoding with a cache equals the full pass. In fp64."""
    torch.manual_seed(0)
    model = GPT(config).double().eval()
    L = config.train.seq_len
    tokens = torch.randint(1, model.embedding.num_embeddings, (1, L + 16))
    changed = tokens.clone()
    changed[0, -1] = 0
    cache = Cache(config.model.n_layer)
    with torch.no_grad():
        logits = model(tokens)
        leak = (model(changed) - logits)[:, :-1].abs().max().item()
        prompt_then_tokens = [tokens[:, :L], *tokens[:, L:].split(1, dim=1)]
        decoded = torch.cat([model(part, cache=cache) for part in prompt_then_tokens], dim=1)
    gap = (decoded - logits).abs().max().item()
    if leak > ROUNDING or gap > ROUNDING:
        raise UserError(f"{config.position.encoding}: a later token changes logits by {leak:.2g}, decoding "
                        f"with a cache by {gap:.2g}; both must be 0 up to rounding")
    return f"a later token changes logits by {leak:.1g}, decoding with a cache by {gap:.1g}"


def check_training(run: Run, settings: list[str]) -> str:
    """Train the first steps of a run again, and compare the losses that it logged."""
    with tempfile.TemporaryDirectory() as scratch:
        # it takes the same first steps: the rate still warms up, text comes after the strings, and what is
        # dropped is dropped later
        run_program("train.py", RECIPE, *settings, f"data.mixture_only={RETRAINED}", "position.drop_at=1.0",
                    f"train.steps={RETRAINED + 1}", f"run.dir={scratch}/run")
        lines = read_log(Path(scratch) / "run" / "metrics.jsonl")
    logged = run.training.set_index("step")["loss"]
    again = pd.DataFrame(lines).set_index("step")["loss"]
    gaps = (again - logged).loc[:RETRAINED].abs()
    if not gaps.max() <= LOSS_TOLERANCE:
        raise UserError(f"{run.name}: losses of its first {RETRAINED} steps, trained again, differ by "
                        f"{gaps.max():.2g} nats, more than {LOSS_TOLERANCE:g}")
    return f"{gaps.count()} losses of the first {RETRAINED} steps differ by {gaps.max():.1g} nats at most"


def check_weights(run: Run, text: str) -> str:
    """Evaluate the weights of a run again at L and 16 L, and compare each window."""
    if not (ROOT / run.name / "checkpoints").exists():
        return f"not checked, because {run.name} is not there"
    L = run.head["seq_len"]
    fixed = run.head["settings"]["fixed"]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "again.json"
        run_program("eval.py", run.name, "--data", f"data/study-{text}", "--protocol", "fixed", "--lengths",
                    f"{L},{16 * L}", "--longest", fixed["longest"], "--windows", fixed["windows"],
                    "--json", path)
        again = pd.read_parquet(path.with_suffix(".parquet"))
    known = pd.concat([at_length(run.table, length) for length in (L, 16 * L)], ignore_index=True)
    gaps = ((again["nll"] - known["nll"]) / known["tokens"]).abs()
    if not gaps.max(skipna=False) <= SCORE_TOLERANCE:
        raise UserError(f"{run.name}: a window of {text}, evaluated again, differs by {gaps.max():.2g} nats "
                        f"per token, more than {SCORE_TOLERANCE:g}")
    return f"{len(gaps)} windows of {run.name} on {text} differ by {gaps.max():.1g} nats per token at most"


def run_program(*arguments: object) -> None:
    """Run a program of this repository without its output. Raises CalledProcessError."""
    # with one thread, as row.sh trains: their number changes the rounding
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, check=True,
                   stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--verify", type=Path, metavar="FOLDER", help="check this row")
    args = parser.parse_args()
    if args.verify:
        has_text = (ROOT / "data" / "study" / "meta.json").exists()
        verify(args.verify, has_text, others=ROWS)
        return
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), {"rows": record_table()}), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    run_command(main)
