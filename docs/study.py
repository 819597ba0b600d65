"""The tables of the study, computed from the folders of results/: `python -m docs.study` writes them.

compare.py wrote these folders, and its numbers are shown here. `data` is a folder of the runs that were
evaluated on a text: in results/extrapolation/, in results/gpu/, or one in each of the study's rows in
results/rows/. Rows of other encodings are in docs/benchmark.md alone (docs/rows.py).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from base.command import argument_parser, run_command
from docs.gallery import ROOT, table, update
from evaluation.comparison import label_runs, make_sections, table_of
from evaluation.estimates import FAILED, NOT_GATED, gates
from evaluation.figures import caption, draw_measure
from evaluation.intervals import LEVEL, holm, student
from evaluation.results import GAIN, NO_METHOD, PERPLEXITY, Form, join
from evaluation.runs import Run, check_comparable, load


class Study(NamedTuple):
    """A study with one recipe."""

    folder: Path
    L: int
    texts: dict[str, str]       # data -> the text's name on the page
    lengths: tuple[int, ...]    # contexts besides L
    repeat: str                 # a repeated passage: "repeat" or "use" (protocols.Repeat)
    needles: tuple[Path, ...]   # folders of the runs that were tuned to find facts

    def copy_column(self, length: int) -> str:
        """The column of a passage that is repeated in a context of `length` tokens."""
        return f"{self.repeat} {length - self.L // 2}"

RESULTS = ROOT / "results"
ROWS = sorted(path.parent for path in (RESULTS / "rows").glob("*/row.toml"))    # what `make row` wrote
OF_STUDY = [row for row in ROWS if (ROOT / "configs" / "study" / f"{row.name}.toml").exists()]
# most records of the first study lack the passage in whose place the first copy is
FIRST = Study(RESULTS / "extrapolation", 128, {"books": "prose", "packages": "code"},
              (64, 256, 512, 1024, 2048), "repeat", (RESULTS / "extrapolation" / "needles",))
SECOND = Study(RESULTS / "study", 256, {"docs": "docs", "code": "code"},
               (512, 1024, 4096), "use", tuple(row / "needles" for row in OF_STUDY))
STUDIES = [FIRST, SECOND]
GPU = RESULTS / "gpu"
# the studies that are compared by rank: parameters and L -> texts
RANKED = {"1.1 M, L = 128": ("books", "packages"), "1.1 M, L = 256": ("docs", "code"),
          "12 M, L = 512": ("study/gpu-books", "study/gpu-packages")}
TURNS = "scale-invariant-p0.375"    # of the first study, in which p = 0.5 is called scale-invariant
README = ROOT / "README.md"
PAGES = [README, *(study.folder / name for study in STUDIES for name in ("README.md", "tables.md")),
         GPU / "README.md"]
BASELINE = "rope"
NEW_SEED = "seed-11"    # the folder, in a row, of a seed that was trained after its prediction was published
PREDICTED_FROM = 4      # seeds of a row
BITS = PERPLEXITY._replace(y_label="bits per byte", number=float)
INTERVAL = "{value:+.2f} [{low:+.2f}, {high:+.2f}]"
MEAN = "{value:+.2f}"


# -----------------------------------------------------------------------------------------------------------
# What compare.py computes


@cache
def runs_of(data: str) -> list[Run]:
    """All runs that were evaluated on a text, labelled with the name of their config, rope first."""
    studies = [FIRST.folder, FIRST.folder / "sandwich", GPU, SECOND.folder, *OF_STUDY]
    runs = [run for study in studies if (study / data).exists() for run in load(study / data)]
    check_comparable(runs)
    return sorted(labelled(runs), key=lambda run: run.label != BASELINE)


def labelled(runs: list[Run]) -> list[Run]:
    """The runs, named after their configs."""
    return label_runs(runs, [re.sub(r"-lr-.*", "", Path(run.name).name) for run in runs])


def at_length(rows: pd.DataFrame, length: int) -> pd.DataFrame:
    """The rows of fixed without a method at a length."""
    return rows[(rows["protocol"] == "fixed") & (rows["length"] == length) & (rows["extend"] == NO_METHOD)]


@cache
def gates_of(data: str) -> pd.DataFrame:
    """`gates` of each encoding."""
    runs = runs_of(data)
    return gates(table_of(runs), runs[0].head["seq_len"])


@cache
def tables_of(data: str) -> pd.DataFrame:
    """All of compare.py's tables one below the other; `column` is a table's key and a heading: gain 256."""
    runs = runs_of(data)
    sections = make_sections(runs, runs[0].label, gates_of(data))
    rows = pd.concat([section.curves for section in sections])
    return rows.assign(column=rows["key"] + " " + rows["heading"])


def rows_of(data: str, column: str) -> pd.DataFrame:
    """A row for each curve that has this column, in the order of runs_of."""
    rows = tables_of(data)
    return rows[rows["column"] == column].set_index("name", drop=False)


@cache
def about(data: str) -> pd.DataFrame:
    """Each curve, best at L first, with whether it fails the gate, or was not gated."""
    at_L = runs_of(data)[0].head["seq_len"]
    fixed = rows_of(data, f"fixed {at_L}")
    is_failed = gates_of(data)["state"].isin([FAILED, NOT_GATED])
    curves = pd.DataFrame({"title": in_italics(fixed["name"], is_failed), "seeds": fixed["n_seeds"].map(str),
                           "loss": -fixed["value"], "is_failed": is_failed})
    return curves.sort_values("loss")


def fails_any(texts: Iterable[str]) -> pd.Series:
    """For each curve whether it fails the gate on one of the texts."""
    return pd.concat([about(data)["is_failed"] for data in texts], axis=1).any(axis=1)


# -----------------------------------------------------------------------------------------------------------
# Cells


def cells(data: str, columns: dict[str, str], form: str = INTERVAL) -> pd.DataFrame:
    """Columns of compare.py's tables as text, by their headings on the page.

    With intervals, bold says that a number is no chance: by Holm's correction for the rows of its column, and
    of several seeds.
    """
    shown_cells = {}
    for heading, column in columns.items():
        rows = rows_of(data, column)
        shown = rows.apply(lambda row: form.format(**row), axis=1)
        if form == INTERVAL:
            is_sure = (holm(rows["p"].fillna(1.0)) < LEVEL) & (rows["n_seeds"] > 1)
            is_sure &= ~rows["is_unstable"] | (rows["seed_low"] > 0) | (rows["seed_high"] < 0)
            shown = shown.where(~is_sure, "**" + shown + "**")
        shown_cells[heading] = shown
    return pd.DataFrame(shown_cells)


def losses(values: pd.Series, heading: str = "loss at L") -> pd.Series:
    """A column of losses."""
    return values.map("{:.3f}".format).rename(heading)


def losses_far(data: str) -> pd.Series:
    """A column of losses with 16 L of context."""
    L = runs_of(data)[0].head["seq_len"]
    return losses(-rows_of(data, f"fixed {16 * L}")["value"], "loss at 16 L")


def in_italics(shown: Any, is_failed: pd.Series) -> Any:
    """Cells, in italics where a curve fails its gate."""
    return shown.where(~is_failed, "*" + shown + "*", axis=0)


def lay_out(corner: str, titles: pd.Series, *columns: pd.Series | pd.DataFrame) -> str:
    """A table with these titles of its rows; "-" where nothing was measured."""
    cells = pd.concat(columns, axis=1).reindex(titles.index).fillna("-")
    rows = [[title, *row] for title, row in zip(titles, cells.to_numpy(), strict=True)]
    return table([corner, *cells], rows)


# -----------------------------------------------------------------------------------------------------------
# Tables of all encodings: a row for each


def overview(study: Study) -> str:
    """Needles, then both texts at 16 L, 64 L and at L; best on the first text at L first."""
    L = study.L
    columns: list[Any] = [facts_found(study)]
    for data, text in study.texts.items():
        numbers = [cells(data, {f"{text}: 16 L": f"gain {16 * L}"}, MEAN),
                   cells(f"{data}-far", {f"{text}: 64 L": f"gain {64 * L}"}, MEAN),
                   cells(data, {f"{text}: {study.repeat}": study.copy_column(16 * L)}, MEAN),
                   losses(about(data)["loss"] * bits_per_nat(data), f"{text}: at L")]
        columns.append(in_italics(pd.concat(numbers, axis=1), about(data)["is_failed"]))
    return lay_out("encoding", about([*study.texts][0]).index.to_series(), *columns)


def front_page(study: Study) -> str:
    """The table of README: rows that fail the gate on neither text, and fewer columns."""
    titles = about([*study.texts][0]).index.to_series()
    gains, at_L = [], []
    for data, text in study.texts.items():
        gains.append(cells(data, {f"{text}: gain at 16 L": f"gain {16 * study.L}"}, MEAN))
        at_L.append(losses(about(data)["loss"] * bits_per_nat(data), f"{text} at L"))
    return lay_out("encoding", titles[~fails_any(study.texts)[titles]], *gains, facts_found(study), *at_L)


def bits_per_nat(data: str) -> float:
    """What a nat per token on the targets of fixed is in bits per byte."""
    fixed = runs_of(data)[0].table.query("protocol == 'fixed'")
    return fixed["tokens"].sum() / fixed["bytes"].sum() / math.log(2)


def facts_found(study: Study) -> pd.Series:
    """Percent of facts among others that are found at 16 L."""
    found = probes(*study.needles).loc[:, NO_METHOD, "multi_key", 16 * study.L]["mean"]
    return found.map("{:.0f}".format).rename("needles, %")


def summary(data: str, *beyond: pd.DataFrame) -> str:
    """These columns, then losses, lead over rope, and seeds; best at L first, a trigram last."""
    at_L = runs_of(data)[0].head["seq_len"]
    curves = about(data)
    trigram = gates_of(data)["trigram"].iloc[0]
    titles = pd.concat([curves["title"], pd.Series({"trigram": "a trigram"})])
    near = losses(pd.concat([curves["loss"], pd.Series({"trigram": trigram})]))
    leads = cells(data, {"lead over rope": f"fixed-lead {at_L}"})
    return lay_out("encoding", titles, *beyond, losses_far(data), near, leads, curves["seeds"])


def by_encoding(study: Study, data: str) -> str:
    """What becomes of each encoding beyond L."""
    L = study.L
    gains = {"gain at 16 L": f"gain {16 * L}", "gain at 2 L": f"gain {2 * L}"}
    far = {"gain at 64 L": f"gain {64 * L}"}
    repeats = {f"{study.repeat} at 16 L": study.copy_column(16 * L),
               f"{study.repeat} at L": study.copy_column(L)}
    return summary(data, cells(data, gains), cells(f"{data}-far", far), cells(data, repeats))


def behind(study: Study) -> str:
    """Validation loss less that of rope, mean over seeds, in the course of the training on text."""
    runs = runs_of([*study.texts][0])
    steps = runs[0].config["train.steps"]
    lines = pd.concat([run.training.assign(label=run.label) for run in runs]).dropna(subset="val_loss")
    lines = lines[lines["step"] > runs[0].config["data.mixture_only"]]
    means = lines.groupby(["label", "step"])["val_loss"].mean().unstack()
    deficits = (means - means.loc[BASELINE]).sort_values(steps).map("{:+.3f}".format)
    deficits.columns = [f"{100 * step / steps:.0f} % of the steps" for step in deficits]
    return lay_out("loss - rope's", deficits.index.to_series(), deficits)


def ranks() -> str:
    """Ranks by loss over both texts, 1 for the best, of what fails the gate in none of the three studies.

    In each study every pair of scale-invariant that rotates makes a turn within L.
    """
    columns = {}
    for name, texts in RANKED.items():
        L = runs_of(texts[0])[0].head["seq_len"]
        is_failed = fails_any(texts)
        for where, length in (("at 16 L", 16 * L), ("at L", L)):
            values = pd.concat([rows_of(data, f"fixed {length}")["value"] for data in texts], axis=1)
            values = values.sum(axis=1, skipna=False)[~is_failed]
            if TURNS in values:
                values["scale-invariant"] = values.pop(TURNS)
            columns[f"{where}: {name}"] = values
    ranked = pd.DataFrame(columns).dropna().rank(ascending=False).astype(int)
    ranked = ranked.sort_index(axis=1).sort_values(min(columns)).astype(str)
    return lay_out("rank", ranked.index.to_series(), ranked)


def by_length(data: str, corner: str, key: str, headings: Sequence[int]) -> str:
    """Gain over truncation by length, or repeat or use by distance."""
    measured = set(tables_of(data)["column"])
    columns = {str(heading): f"{key} {heading}" for heading in headings if f"{key} {heading}" in measured}
    return lay_out(corner, about(data)["title"], cells(data, columns))


def control() -> str:
    """Repeat and use of a passage 16 L before; a row for each run."""
    columns = [cells(f"{data}-control", {f"{text}: repeat": "repeat 1984", f"{text}: use": "use 1984"})
               for data, text in FIRST.texts.items()]
    return lay_out("run", columns[0].index.to_series().sort_values(), *columns)


def novels() -> str:
    """One seed of each row of the second study, on other text than it was trained on."""
    gains = {f"gain at {n} L": f"gain {n * SECOND.L}" for n in (2, 4, 16)}
    at_L = about("novels")
    return lay_out("encoding", at_L.index.to_series(), cells("novels", gains), losses_far("novels"),
                   losses(at_L["loss"]))


def method_names(curves: pd.DataFrame) -> pd.Series:
    """Names of curves of rope under methods: those of the methods."""
    return curves["name"].str.removeprefix(f"{BASELINE} + ")


def gains_of_methods(study: Study) -> str:
    """What methods of --extend gain over truncation on the runs of rope."""
    gains = [cells(f"{data}-methods", {f"{text}: {n} L": f"gain {n * study.L}" for n in (2, 4, 16)})
             for data, text in study.texts.items()]
    curves = rows_of(f"{[*study.texts][0]}-methods", f"gain {2 * study.L}")
    return lay_out(f"{curves['n_seeds'][BASELINE]} seeds of rope", method_names(curves), *gains)


def methods(data: str) -> str:
    """Methods of --extend on the runs of rope, and DroPE."""
    L = FIRST.L
    curves = rows_of(f"{data}-methods", f"gain {2 * L}")
    titles = in_italics(method_names(curves), curves["label"].map(about(data)["is_failed"]))
    columns = cells(f"{data}-methods", {
        "gain at 2 L": f"gain {2 * L}",
        "4 L": f"gain {4 * L}",
        "16 L": f"gain {16 * L}",
        # blanks at the end tell keys from those above; they are dropped below
        "repeat at 2 L": FIRST.copy_column(2 * L),
        "4 L ": FIRST.copy_column(4 * L),
        "16 L ": FIRST.copy_column(16 * L)})
    # for the same windows of 64 L, over the time without a method: the fastest of all evaluations
    costs = join(*(run.table for run in load(FIRST.folder / "costs"))).query(f"length == {64 * L}")
    seconds = costs.groupby(["extend", "run"])["seconds"].sum().groupby("extend").min()
    times = curves["extend"].map(seconds / seconds[NO_METHOD]).map("{:.1f}".format, na_action="ignore")
    return lay_out(f"{curves['n_seeds'][BASELINE]} seeds of rope", titles, columns.rename(columns=str.strip),
                   times.rename("time at 64 L"))


# -----------------------------------------------------------------------------------------------------------
# Probes


@cache
def probes(*folders: Path) -> pd.DataFrame:
    """Right answers in percent, by config, method, protocol and length.

    Columns: `run`, the mean of each run over depths; `place`, the mean of each depth over runs; `mean`.
    """
    parts = []
    for folder in folders:
        for run in load(folder):
            config = re.sub(r"-lr-.*seed\d|-(flip_flop|copying)-seed\d", "", Path(run.name).name)
            parts.append(run.table.assign(config=config))
    keys = ["config", "extend", "protocol", "length"]
    right = join(*parts).groupby([*keys, "run", "place"], sort=False)["correct"].mean()
    percents = (100 * right).round()
    columns = {"mean": percents.groupby(keys, sort=False).mean()}
    for name in ("run", "place"):
        means = percents.groupby([*keys, name], sort=False).mean()
        columns[name] = means.map("{:.0f}".format).groupby(keys, sort=False).agg(" ".join)
    return pd.DataFrame(columns)


def needles(study: Study) -> str:
    """Needles found: a number for each run, and by depth the mean of the runs."""
    L = study.L
    found = probes(*study.needles).xs(NO_METHOD, level="extend").unstack(["protocol", "length"])
    columns = {}
    for kind, what in (("needle", "one fact"), ("multi_key", "of four")):
        for n, length in ((1, "L"), (4, "4 L"), (16, "16 L")):
            columns[f"{what} at {length}"] = found["run", kind, n * L]
        columns[f"{what} at 16 L by depth"] = found["place", kind, 16 * L]
    far = found["mean", "multi_key", 16 * L].dropna().sort_values(ascending=False)
    return lay_out("% found", far.index.to_series(), pd.DataFrame(columns))


def methods_on_needles() -> str:
    """Needles found by the tuned runs of rope under methods of --extend."""
    L = FIRST.L
    found = probes(*FIRST.needles).loc[f"{BASELINE}-methods"]
    near = found.loc[:, "needle", 4 * L].sort_values("mean", ascending=False)
    titles = near.index.to_series().map("`{}`".format).replace(f"`{NO_METHOD}`", "no method")
    columns = {"% found at 4 L": near["run"], "at 16 L": found.loc[:, "needle", 16 * L]["run"],
               "at 4 L by depth": near["place"]}
    return lay_out("rope with", titles, pd.DataFrame(columns))


def algorithms() -> str:
    """Right answers in percent by the number of symbols, one number for each seed."""
    found = probes(FIRST.folder / "algorithms")["run"].unstack(["extend", "protocol", "length"])
    columns = {f"{task}, {n}": found[NO_METHOD, task, 4 * n]
               for task in ("flip_flop", "copying") for n in (16, 32, 64, 128)}
    return lay_out("% right", found.index.to_series(), pd.DataFrame(columns))


# -----------------------------------------------------------------------------------------------------------
# What another seed should give


def seed_numbers(study: Study, row: Path) -> pd.DataFrame:
    """Of each run of a row: the gain at 2, 4 and 16 L on each text, and bits per byte with 16 L over both."""
    columns = {}
    far = []                                            # sums at 16 L on each text
    for data, text in study.texts.items():
        windows = table_of(labelled(load(row / data)))
        for n in (2, 4, 16):
            at_n = at_length(windows, n * study.L).groupby("seed")
            sums = at_n[["nll", "truncated_nll", "tokens", "bytes"]].sum()
            columns[f"{text}: {n} L"] = (sums["truncated_nll"] - sums["nll"]) / sums["tokens"]
            if n == 16:
                far.append(sums)
    over_both = sum(far)
    columns["bits per byte"] = over_both["nll"] / over_both["bytes"] / math.log(2)
    return pd.DataFrame(columns)


def prediction(seeds: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Where one more seed lies with 95 %: mean -+ t s sqrt(1 + 1 / S), with t of S - 1 degrees of freedom."""
    S = len(seeds)
    t = float(student(1 - LEVEL / 2, S - 1))
    reach = t * seeds.std() * math.sqrt(1 + 1 / S)
    return seeds.mean() - reach, seeds.mean() + reach


def predictions(study: Study) -> str:
    """The prediction from each row's first seeds, and below it those trained after it, bold where outside."""
    rows = []
    for row in OF_STUDY:
        seeds = seed_numbers(study, row)
        low, high = prediction(seeds[:PREDICTED_FROM])
        rows.append([row.name, *(low.map("{:.3f}".format) + " to " + high.map("{:.3f}".format))])
        later = seeds[PREDICTED_FROM:]
        if (row / NEW_SEED).exists():
            later = pd.concat([later, seed_numbers(study, row / NEW_SEED)])
        for seed, found in later.iterrows():
            shown = found.map("{:.3f}".format)
            shown = shown.where(found.between(low, high), "**" + shown + "**")
            rows.append([f"{row.name}, seed {seed}", *shown])
    return table(["encoding", *seeds], rows)


# -----------------------------------------------------------------------------------------------------------
# On a GPU, at L = 512


def gpu(data: str) -> str:
    """What becomes of each encoding beyond L."""
    return summary(data, cells(data, {
        "gain at 16 L": "gain 8192",
        "gain at 2 L": "gain 1024",
        "use at 16 L": "use 7936",
        "use at L": "use 256"}))


def gpu_60m(data: str) -> str:
    """Runs of 60 M tokens: loss at L, gain of longer contexts, and use of a copy."""
    validation = pd.Series({run.label: run.summary["val_loss"] for run in runs_of(data)})
    columns = {
        "gain at 2 L": "gain 1024",
        "gain at 4 L": "gain 2048",
        "gain at 8 L": "gain 4096",
        "gain at 16 L": "gain 8192",
        "gain at 32 L": "gain 16384",
        "use at L": "use 256",
        "use at 16 L": "use 7936",
        "use at 32 L": "use 16128"}
    return lay_out("encoding", validation.sort_values().index.to_series(), cells(data, columns, MEAN),
                   losses(about(data)["loss"]), losses(validation, "validation"))


# -----------------------------------------------------------------------------------------------------------
# The pages


def gain_curves(study: Study) -> pd.DataFrame:
    """The gains over truncation on both texts."""
    tables = [tables_of(data).assign(text=text) for data, text in study.texts.items()]
    rows = pd.concat(tables, ignore_index=True)
    return rows[(rows["key"] == "gain") & (rows["x"] > study.L)]


def loss_curves(study: Study) -> pd.DataFrame:
    """Bits per byte of what fails the gate on neither text, with the range of seeds as interval."""
    is_failed = fails_any(study.texts)
    parts = []
    for data, text in study.texts.items():
        rows = tables_of(data)
        rows = rows[(rows["key"] == "fixed") & (rows["x"] >= study.L) & ~rows["name"].map(is_failed)]
        factor = -bits_per_nat(data)
        low = factor * rows["seed_high"]
        high = factor * rows["seed_low"]
        seeds = [tuple(factor * score for score in scores) for scores in rows["seeds"]]
        parts.append(rows.assign(text=text, shown=factor * rows["value"], shown_low=low, shown_high=high,
                                 seed_low=low, seed_high=high, seeds=seeds, is_unstable=False))
    return pd.concat(parts, ignore_index=True)


def draw_pictures(study: Study, name: str, curves: pd.DataFrame, form: Form, title: str) -> None:
    """NAME.png, and NAME-narrow.png for a phone."""
    for is_narrow, file in ((False, f"{name}.png"), (True, f"{name}-narrow.png")):
        whole_title = f"{title}: 1.1 M parameters, L = {study.L}"
        figure = draw_measure(curves, form, whole_title, study.L, is_narrow)
        figure.savefig(study.folder / file, dpi=120)


def blocks() -> dict[str, str]:
    """Name -> each generated part of the pages."""
    parts = {
        "readme": front_page(SECOND),
        "control": control(),
        "novels": novels(),
        "needles methods": methods_on_needles(),
        "algorithms": algorithms(),
        "behind": behind(SECOND),
        "predictions": predictions(SECOND),
        "methods": gains_of_methods(SECOND),
        "ranks": ranks(),
        "gpu 60m": gpu_60m("study-60m/gpu-books")}
    for data in FIRST.texts:
        parts[f"gpu {data}"] = gpu(f"study/gpu-{data}")
        parts[f"methods {data}"] = methods(data)
    for study in STUDIES:
        name = study.folder.name
        legend = ("The figure has gains over truncation with paired 95 % intervals. Dots are seeds; "
                  "open marks are medians with the range of seeds.")
        if grey := caption(gain_curves(study)):
            legend += f" Grey: {grey}."
        parts[f"overview {name}"] = overview(study)
        parts[f"picture {name}"] = textwrap.fill(legend, 120)
        parts[f"needles {name}"] = needles(study)
        for data in study.texts:
            parts[f"summary {data}"] = by_encoding(study, data)
            parts[f"gain {data}"] = by_length(data, "context", "gain", study.lengths)
            lengths = [study.L, *(length for length in study.lengths if length > study.L)]
            distances = [length - study.L // 2 for length in lengths]                   # of the copies
            parts[f"repeat {data}"] = by_length(data, "distance", study.repeat, distances)
    return parts


def main() -> None:
    argument_parser(__doc__ or "").parse_args()
    parts = blocks()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        names = re.findall("<!-- begin (.*) -->", text)
        page.write_text(update(text, {name: parts[name] for name in names}), encoding="utf-8")
    for study in STUDIES:
        draw_pictures(study, "gains", gain_curves(study), GAIN, "Gain over truncation")
    draw_pictures(SECOND, "losses", loss_curves(SECOND), BITS, "Loss with longer context")
    print("wrote the pictures and the tables of", *PAGES)


if __name__ == "__main__":
    run_command(main)
