"""The record table of the study: `python -m docs.rows` writes it into docs/benchmark.md.

Its rows are those of results/study and those that `make row` wrote into results/rows/NAME. Such a folder has
  docs/, code/, docs-far/, code-far/, needles/      what compare.py wrote of the runs on a text
  trials.csv                                        the rates that were tried
  row.toml                                          date, author, and a note: what is new in it
A row's number is bits per byte with 16 L of context over both texts, the mean of its seeds. It counts if the
row passes the gate on both texts. `--verify FOLDER` checks a folder of results/rows.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from base.command import argument_parser, run_command
from base.errors import UserError
from config import Config, flatten, load_config
from docs.gallery import ROOT, table, update
from docs.study import labelled
from evaluation.comparison import table_of
from evaluation.estimates import PASSED, gates
from evaluation.results import NO_METHOD
from evaluation.runs import Run, load
from model import GPT, Cache
from runtime.log import read_log

PAGE = ROOT / "docs" / "benchmark.md"
FOLDERS = [ROOT / "results" / "study", *sorted((ROOT / "results" / "rows").glob("*"))]
RECIPE = ROOT / "configs" / "study.toml"
TEXTS = ("docs", "code")
# keys of a config that may differ from the recipe, besides [position], and keys that follow from others
OWN = ("train.lr", "train.seed", "data.bos", "model.window", "model.full_every")
DERIVED = ("run.dir", "model.vocab_size")
ROUNDING = 1e-9         # of logits in fp64
RETRAINED = 50          # steps
LOSS_TOLERANCE = 1e-5   # nats per token, of a loss in training
SCORE_TOLERANCE = 1e-4  # nats per token, of a window that is evaluated again


class Row(NamedTuple):
    """What the table says of an encoding."""

    name: str
    bits: pd.Series             # seed -> bits per byte at 16 L over both texts
    states: tuple[str, ...]     # of the gate on each text
    commit: str
    about: dict[str, str]       # row.toml

    @property
    def counts(self) -> bool:
        """Whether it passes the gate on both texts."""
        return set(self.states) == {PASSED}

    def seeds_better_than(self, other: Row) -> str:
        """In how many of the seeds that both have the number is lower."""
        gain = (other.bits - self.bits).dropna()
        return f"{(gain > 0).sum()} of {len(gain)}"


# -----------------------------------------------------------------------------------------------------------
# The table


def read_rows(folder: Path) -> list[Row]:
    """The rows of a folder. Raises UserError if a file is damaged."""
    about = tomllib.loads((folder / "row.toml").read_text(encoding="utf-8"))
    states, sums = {}, []
    for text in TEXTS:
        runs = labelled(load(folder / text))
        L = runs[0].head["seq_len"]
        states[text] = gates(table_of(runs), L)["state"]
        far = at_length(table_of(runs), 16 * L)
        sums.append(far.groupby(["label", "seed"])[["nll", "bytes"]].sum())
    total = pd.concat(sums).groupby(["label", "seed"]).sum()
    bits = total["nll"] / math.log(2) / total["bytes"]
    commits = {run.label: run.summary["git_revision"][:7] for run in runs}
    return [Row(name, bits[name], tuple(states[text][name] for text in TEXTS), commits[name], about)
            for name in commits]


def at_length(rows: pd.DataFrame, length: int) -> pd.DataFrame:
    """The rows of fixed without a method at a length."""
    return rows[(rows["protocol"] == "fixed") & (rows["length"] == length) & (rows["extend"] == NO_METHOD)]


def record_table() -> str:
    """All rows, the best first; those that do not pass the gate last, in italics."""
    rows = [row for folder in FOLDERS if (folder / "row.toml").exists() for row in read_rows(folder)]
    rows.sort(key=lambda row: (not row.counts, row.bits.mean()))
    cells = []
    for row, worse in zip(rows, [*rows[1:], None], strict=True):
        number = f"{row.bits.mean():.4f}"
        name = row.name
        better = "-" if worse is None else row.seeds_better_than(worse)
        if not row.counts:
            name = f"*{name}*"
            number = f"*{number}*"
        cells.append([name, number, f"{row.bits.min():.4f} to {row.bits.max():.4f}", better,
                      ", ".join(row.states), row.about["date"], row.about["author"], row.commit,
                      row.about["note"]])
    return table(["row", "bits per byte at 16 L", "range of seeds", "better than the next row in seeds",
                  "gate on docs, code", "date", "author", "commit", "what is new"], cells)


# -----------------------------------------------------------------------------------------------------------
# Checks of a row


def verify(folder: Path, has_text: bool) -> None:
    """Print what was checked of each row in a folder; with the text its runs too.

    Raises UserError at the first thing that is wrong.
    """
    runs = labelled(load(folder / TEXTS[0]))
    for row in read_rows(folder):
        seeds = ", ".join(f"{bits:.4f}" for bits in row.bits)
        states = ", ".join(row.states)
        print(f"{row.name}: {row.bits.mean():.4f} bits per byte at 16 L; seeds: {seeds}; gate: {states}")
        own_runs = [run for run in runs if run.label == row.name]
        settings = [settings_of(run) for run in own_runs][0]
        print("  recipe: followed in all runs")
        print("  model:", check_model(load_config(RECIPE, [*settings, "model.vocab_size=64"])))
        if has_text:
            print("  training:", check_training(own_runs[0], settings))
        for run in own_runs:
            if has_text and (ROOT / run.name / "checkpoints").exists():
                print("  weights:", check_weights(run))


def settings_of(run: Run) -> list[str]:
    """The overrides that make the run's config of the recipe. Raises UserError if it is not of the recipe."""
    recipe = flatten(load_config(RECIPE))
    settings = []
    for key, value in run.config.items():
        is_own = key.startswith("position.") or key in OWN
        if value is None or key in DERIVED or (not is_own and value == recipe[key]):
            continue
        if not is_own:
            raise UserError(f"{run.name}: {key} = {value} is not that of {RECIPE.name}; train a config that "
                            "extends it")
        settings.append(f"{key}={json.dumps(value)}")
    return settings


def check_model(config: Config) -> str:
    """A token changes no logits before it, and decoding with a cache equals the full pass. In fp64."""
    torch.manual_seed(0)
    model = GPT(config).double().eval()
    T = config.train.seq_len + 16
    tokens = torch.randint(1, model.embedding.num_embeddings, (1, T))
    changed = tokens.clone()
    changed[0, -1] = 0
    cache = Cache(config.model.n_layer)
    with torch.no_grad():
        logits = model(tokens)
        leak = (model(changed) - logits)[:, :-1].abs().max().item()
        decoded = torch.cat([model(tokens[:, t:t + 1], cache=cache) for t in range(T)], dim=1)
    gap = (decoded - logits).abs().max().item()
    if leak > ROUNDING or gap > ROUNDING:
        raise UserError(f"{config.position.encoding}: a later token changes logits by {leak:.2g}, decoding "
                        f"with a cache by {gap:.2g}; both must be 0 up to rounding")
    return f"a later token changes logits by {leak:.1g}, decoding with a cache by {gap:.1g}"


def check_training(run: Run, settings: list[str]) -> str:
    """Train a run again, and compare the losses of its first steps."""
    with tempfile.TemporaryDirectory() as scratch:
        # the last steps but one of the start, which leave the rate of the first ones as it was
        steps = run.config["data.mixture_only"] + 1
        run_program("train.py", RECIPE, *settings, f"train.steps={steps}", f"run.dir={scratch}/run")
        lines = read_log(Path(scratch) / "run" / "metrics.jsonl")
    logged = run.training.set_index("step")["loss"]
    again = pd.DataFrame(lines).set_index("step")["loss"]
    gaps = (again - logged).loc[:RETRAINED].abs()
    if not gaps.max() <= LOSS_TOLERANCE:
        raise UserError(f"{run.name}: losses of its first {RETRAINED} steps, trained again, differ by "
                        f"{gaps.max():.2g} nats, more than {LOSS_TOLERANCE:g}")
    return f"losses of the first {RETRAINED} steps, trained again, differ by {gaps.max():.1g} nats at most"


def check_weights(run: Run) -> str:
    """Evaluate the weights of a run again at L, and compare each window."""
    L = run.head["seq_len"]
    fixed = run.head["settings"]["fixed"]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "again.json"
        run_program("eval.py", run.name, "--data", f"data/study-{TEXTS[0]}", "--protocol", "fixed",
                    "--lengths", L, "--longest", fixed["longest"], "--windows", fixed["windows"],
                    "--json", path)
        again = pd.read_parquet(path.with_suffix(".parquet"))
    known = at_length(run.table, L).reset_index(drop=True)
    gap = ((again["nll"] - known["nll"]) / known["tokens"]).abs().max()
    if not gap <= SCORE_TOLERANCE:
        raise UserError(f"{run.name}: a window, evaluated again, differs by {gap:.2g} nats per token, more "
                        f"than {SCORE_TOLERANCE:g}")
    return f"{len(known)} windows of {run.name}, evaluated again, differ by {gap:.1g} nats per token at most"


def run_program(*arguments: object) -> None:
    """Run a program of this repository without its output. Raises CalledProcessError."""
    subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--verify", type=Path, metavar="FOLDER", help="check this row")
    args = parser.parse_args()
    if args.verify:
        has_text = (ROOT / "data" / "study" / "meta.json").exists()
        verify(args.verify, has_text)
        if not has_text:
            print("no run was checked, because data/study is not there; `make study-data` makes it")
        return
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), {"rows": record_table()}), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    run_command(main)
