"""The tables of the study, computed from the folders of results/: `python -m docs.study` writes them.

compare.py wrote these folders, and reads them.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from base.command import argument_parser, run_command
from docs.gallery import ROOT, table, update
from evaluation.comparison import Curve, make_curves, make_sections, table_of
from evaluation.estimates import LEAST_GAIN, gates
from evaluation.figures import caption, draw_measure
from evaluation.results import GAIN, NO_METHOD, PERPLEXITY, join, records
from evaluation.runs import Run, check_comparable, load

STUDY = ROOT / "results" / "extrapolation"      # TEXT/: the runs evaluated on a text
PAGE = STUDY / "README.md"
README = ROOT / "README.md"
GPU = ROOT / "results" / "gpu"          # its study has another L
PAGES = [README, PAGE, PAGE.with_name("tables.md"), GPU / "README.md"]
ROWS = ROOT / "results" / "rows"        # those of `make row`: NAME/TEXT
L = 128
BASELINE = "rope"
TEXTS = {"books": "prose", "packages": "code"}
FAR, FAR_REPEAT = str(16 * L), str(16 * L - L // 2)     # a length, and the distance of the copies in it


@cache
def runs_of(folder: Path) -> list[Run]:
    """The runs in a folder of compare.py; none if it is not there."""
    return load(folder) if folder.exists() else []


@cache
def curves_of(data: str) -> list[Curve]:
    """The curves of all runs that were evaluated on a text, named after their config, rope first."""
    folders = [STUDY / data, GPU / "study" / data, *sorted(ROWS.glob(f"*/{data}"))]
    runs = [run for folder in folders for run in runs_of(folder)]
    if runs:
        check_comparable(runs)
    names = [re.sub(r"-lr-.*", "", run.name) for run in runs]
    return sorted(make_curves(runs, names), key=lambda curve: curve.label != BASELINE)


@cache
def tables_of(data: str) -> dict[str, pd.DataFrame]:
    """Key -> table of compare.py: fixed, gain (over truncation), repeat and others; {} without runs.

    A row for each name and heading, the index, with the columns of estimates.py.
    """
    curves = curves_of(data)
    if not curves:
        return {}
    gate = gates(table_of(curves), length_of(curves[0]))
    sections = make_sections(curves, curves[0].label, gate)
    return {section.key: section.curves.set_index(["name", "heading"], drop=False) for section in sections}


def length_of(curve: Curve) -> int:
    """The training length."""
    return curve.runs[0].config["train.seq_len"]


def interval(row: Any) -> str:
    """A number with its interval."""
    if row is None:
        return "-"
    ends = "" if math.isnan(row["low"]) else f" [{row['low']:+.2f}, {row['high']:+.2f}]"
    return f"{row['value']:+.2f}{ends}"


def spread(row: Any) -> str:
    """Mean and standard deviation of the perplexities of all seeds."""
    if row is None:
        return "-"
    seeds = np.array([PERPLEXITY.figure(score) for score in row["seeds"]])
    return f"{seeds.mean():.1f} ± {seeds.std(ddof=1):.1f}" if len(seeds) > 1 else f"{seeds.mean():.1f}"


def gate_of(curve: Curve) -> Any:
    """A row of `gates`."""
    return gates(table_of([curve]), length_of(curve)).loc[curve.runs[0].label]


def is_failed(curve: Curve) -> bool:
    """Whether it fails the gate by its means over seeds; of the passage, over its first time."""
    table = table_of([curve])
    is_at_L = (table.protocol == "repeat") & (table.length == length_of(curve)) & (table.extend == NO_METHOD)
    sums = table[is_at_L][["first_nll", "nll", "tokens"]].sum()
    return gate_of(curve)["below"] <= 0 or (sums.first_nll - sums.nll) / sums.tokens < LEAST_GAIN


def name_of(curve: Curve) -> str:
    """A label; in italics if the curve fails its gate."""
    return f"*{curve.label}*" if is_failed(curve) else curve.label


def bits(curve: Curve) -> float:
    """Bits per byte on the targets of fixed at L, over all seeds."""
    table = join(*(run.table for run in curve.runs))
    rows = table[(table.extend == NO_METHOD) & (table.protocol == "fixed") & (table.length == L)]
    return rows.nll.sum() / math.log(2) / rows.bytes.sum()


def percents(run: Run, kind: str, length: int, extend: str = NO_METHOD) -> list[int]:
    """Right answers of a probe at a length, in percent: one number, or one for each depth."""
    table = run.table
    rows = table[(table.protocol == kind) & (table.length == length) & (table.extend == extend)]
    return [round(100 * share) for share in rows.groupby("place", sort=False).correct.mean()]


def share(correct: Sequence[int]) -> str:
    """The mean over all depths, or runs."""
    return f"{sum(correct) / len(correct):.0f}" if correct else "-"


def tuned() -> dict[str, list[Run]]:
    """Encoding, perhaps with ", frozen" -> its runs that were tuned on needles."""
    groups: dict[str, list[Run]] = {}
    for run in runs_of(STUDY / "needles"):
        if not run.name.endswith("-methods"):
            name = re.sub("-lr-.*seed.", "", run.name).replace("-frozen", ", frozen")
            groups.setdefault(name, []).append(run)
    return groups


def cell_of(data: str, key: str, label: str, column: int | str) -> Any:
    """A row of a table of compare.py; None where nothing was measured."""
    table = tables_of(data).get(key)
    place = (label, str(column))
    return None if table is None or place not in table.index else table.loc[place]


def control() -> str:
    """One row for each run: the gain on a passage 16 L before, and over another passage in its place."""
    head = ["run"]
    columns = []
    for data, text in TEXTS.items():
        head += [f"{text}: over the first time", f"{text}: over another passage"]
        columns += [(f"{data}-control", "repeat"), (f"{data}-control", "use")]
    rows = []
    for label in sorted(tables_of(columns[0][0])["repeat"]["name"].unique()):
        cells = [cell_of(data, key, label, FAR_REPEAT) for data, key in columns]
        rows.append([label, *map(interval, cells)])
    return table(head, rows)


def shares(runs: Sequence[Sequence[int]]) -> str:
    """The mean of each run over its depths."""
    return " ".join(map(share, runs))


def by_depth(runs: Sequence[Sequence[int]]) -> str:
    """The mean of each depth over the runs."""
    return " ".join(map(share, zip(*runs, strict=True)))


def needles() -> str:
    """One row for each encoding: needles found, a number for each run, and by depth the mean of the runs."""
    head = ["% found"]
    for kind in ("one fact", "of four"):
        head += [f"{kind} {place}" for place in ("at L", "at 4 L", "at 16 L", "at 16 L by depth")]
    rows = []
    for name, runs in tuned().items():
        row = [name]
        for kind in ("needle", "multi_key"):
            at_L, at_4L, at_16L = ([percents(run, kind, n * L) for run in runs] for n in (1, 4, 16))
            row += [shares(at_L), shares(at_4L), shares(at_16L), by_depth(at_16L)]
        n_right = sum(map(sum, at_4L + at_16L)) / len(runs)             # of four facts
        rows.append((-n_right, row))
    rows.sort(key=lambda pair: pair[0])
    return table(head, [row for _, row in rows])


def methods_on_needles() -> str:
    """One row for each method of --extend on the tuned runs of rope: the share of needles found by each."""
    runs = [run for run in runs_of(STUDY / "needles") if re.fullmatch("rope-lr.*-methods", run.name)]
    rows = []
    for extend in join(*(run.table for run in runs)).extend.unique():
        near, far = ([percents(run, "needle", n * L, extend) for run in runs] for n in (4, 16))
        name = "no method" if extend == NO_METHOD else f"`{extend}`"
        cells = [shares(by_run) if any(by_run) else "-" for by_run in (near, far)]
        rows.append((-sum(map(sum, near)), [name, *cells, by_depth(near)]))
    rows.sort(key=lambda pair: pair[0])
    return table(["rope with", "% found at 4 L", "at 16 L", "at 4 L by depth"], [row for _, row in rows])


def algorithms() -> str:
    """One row for each encoding: right answers in percent by the number of symbols, one number a seed."""
    columns = [(task, n) for task in ("flip_flop", "copying") for n in (16, 32, 64, 128)]
    runs = runs_of(STUDY / "algorithms")        # NAME-TASK-seedN
    rows = []
    for name in {run.name.rsplit("-", 2)[0] for run in runs}:
        row = [name]
        for task, n in columns:
            seeds = [run for run in runs if re.fullmatch(f"{re.escape(name)}-{task}-seed.", run.name)]
            row.append(" ".join(share(percents(run, task, 4 * n)) for run in seeds))
        rows.append(row)
    return table(["% right", *(f"{task.replace('_', '-')}, {n}" for task, n in columns)], sorted(rows))


def overview() -> str:
    """One row for each encoding, best on prose first: both texts at L, at 16 L and 64 L, and needles."""
    head = ["encoding"]
    for text in TEXTS.values():
        head += [f"{text} at L", "gain of 16 L", "of 64 L", "repeat at 16 L"]
    rows = []
    for label in [curve.label for curve in sorted(curves_of("books"), key=bits)]:
        row = [label]
        for data in TEXTS:
            curve = next(curve for curve in curves_of(data) if curve.label == label)
            cells = [cell_of(data, "gain", label, FAR), cell_of(f"{data}-far", "gain", label, 64 * L),
                     cell_of(data, "repeat", label, FAR_REPEAT)]
            numbers = [f"{bits(curve):.3f}"]
            numbers += ["-" if cell is None else f"{cell['value']:+.2f}" for cell in cells]
            if is_failed(curve):
                numbers = [number if number == "-" else f"*{number}*" for number in numbers]
            row += numbers
        runs = tuned().get(label, [])
        row.append(share([percent for run in runs for percent in percents(run, "multi_key", 16 * L)]))
        rows.append(row)
    return table([*head, "needles at 16 L, %"], rows)


def summary(data: str) -> str:
    """One row for each encoding: how it was trained, and what becomes of it beyond L."""
    curves = sorted(curves_of(data), key=bits)
    has_far = bool(tables_of(f"{data}-far"))
    plain = next(curve for curve in curves if curve.label == BASELINE).runs[0].summary["parameters"]
    rows = []
    for curve in curves:
        label = curve.label
        first = curve.runs[0]
        gate = gate_of(curve)
        rate = re.sub(r".*?-lr-(.*?)-(lr_|seed).*", r"\1", first.name)
        if first.summary["parameters"] > plain:         # it has parameters of its own
            rate += f" x {first.config['position.lr_scale']:g}"
        cells = [cell_of(data, "fixed-gain", label, L), cell_of(data, "gain", label, 2 * L),
                 cell_of(data, "gain", label, FAR)]
        if has_far:
            cells.append(cell_of(f"{data}-far", "gain", label, 64 * L))
        cells += [cell_of(data, "repeat", label, L // 2), cell_of(data, "repeat", label, FAR_REPEAT)]
        rows.append([name_of(curve), rate, f"{first.summary['parameters']:,}", str(len(curve.runs)),
                     f"{gate.loss:.3f}", *map(interval, cells)])
    # below the table: what was scored, and by which code it was trained
    fixed = first.table[(first.table.protocol == "fixed") & (first.table.length == L)]
    revisions = {run.summary["git_revision"][:7] for curve in curves for run in curve.runs}
    about = (f"\n\n{fixed.tokens.sum():,} tokens, {fixed.bytes.sum():,.0f} bytes, "
             f"{fixed.document.nunique()} documents; "
             f"trained in {first.summary['dtype']} at commit {', '.join(sorted(revisions))}.")
    head = [f"encoding (a trigram has {gate.trigram:.3f})", "rate", "parameters", "seeds", "loss at L",
            "over rope at L", "gain of 2 L", "gain of 16 L"]
    if has_far:
        head.append("gain of 64 L")
    return table([*head, "repeat at L", "repeat at 16 L"], rows) + about


@cache
def costs() -> dict[str, float]:
    """Method -> seconds for the same windows of 64 L, the fastest of all evaluations."""
    table = join(*(run.table for run in runs_of(STUDY / "costs")))
    seconds = table[table.length == 64 * L].groupby(["extend", "run"]).seconds.sum()
    return seconds.groupby("extend").min().to_dict()


def methods(data: str) -> str:
    """One row for each method of --extend on the runs of rope, and of DroPE."""
    curves = curves_of(f"{data}-methods")
    if not curves:
        return "Not measured yet."
    seconds = costs()
    failed = {curve.label for curve in curves_of(data) if is_failed(curve)}
    rows = []
    for curve in curves:
        label = curve.label
        cells = [cell_of(f"{data}-methods", "gain", label, n * L) for n in (2, 4, 16)]
        cells += [cell_of(f"{data}-methods", "repeat", label, n * L - L // 2) for n in (2, 4, 16)]
        name = f"*{label}*" if label.partition(" + ")[0] in failed else label
        time = "-"
        if curve.extend in seconds:
            time = f"{seconds[curve.extend] / seconds[NO_METHOD]:.1f}"
        rows.append([name, *map(interval, cells), time])
    return table([f"seeds of rope: {len(curves[0].runs)}", "gain of 2 L", "4 L", "16 L", "repeat at 2 L",
                  "4 L", "16 L", "time at 64 L"], rows)


def gpu() -> str:
    """Two rows for each encoding of the study on a GPU, prose and code."""
    rows = []
    for text_data, text in TEXTS.items():
        data = f"gpu-{text_data}"
        for curve in curves_of(data):
            here = length_of(curve)
            gate = gate_of(curve)
            places = [("fixed-gain", here), ("gain", 2 * here), ("gain", 16 * here), ("repeat", here // 2),
                      ("use", 16 * here - here // 2)]
            cells = [cell_of(data, key, curve.label, column) for key, column in places]
            rows.append([name_of(curve), text, str(len(curve.runs)), f"{gate.loss:.3f}",
                         *map(interval, cells)])
        rows.append(["Kneser-Ney trigram", text, "-", f"{gate.trigram:.3f}", *["-"] * 5])
    return table(["encoding", "text", "seeds", "loss at L", "over rope at L", "gain of 2 L", "of 16 L",
                  "repeat at L", "over another at 16 L"], rows)


def gpu_60m() -> str:
    """A row for each run of 60 M tokens: loss at L on prose, what longer contexts gain, and use of a copy."""
    lengths = [512 * 2**n for n in range(6)]
    rows = []
    for run in runs_of(GPU / "study-60m" / "gpu-books"):
        sums = records(run.table)
        fixed = {r["length"]: r for r in sums if r["protocol"] == "fixed"}
        repeat = {r["length"]: r for r in sums if r["protocol"] == "repeat"}
        at_L = fixed[512]
        gains = [f"{fixed[n]['gain']:+.2f}" if n in fixed else "-" for n in lengths[1:]]
        uses = [f"{repeat[n]['use']:+.2f}" if n in repeat else "-" for n in (512, 8192, 16384)]
        loss = at_L["nll_sum"] / at_L["tokens"]
        name = run.name.partition("-lr-")[0]
        rows.append([name, f"{run.summary['val_loss']:.3f}", f"{loss:.3f}", *gains, *uses])
    rows.sort(key=lambda row: row[1])
    gain_heads = ["gain of 2 L", "of 4 L", "of 8 L", "of 16 L", "of 32 L"]
    use_heads = ["use of a copy at L", "at 16 L", "at 32 L"]
    return table(["encoding", "validation", "loss at L", *gain_heads, *use_heads], rows)


def by_length(data: str, key: str, text: Callable[[Any], str]) -> str:
    """A table of compare.py in Markdown."""
    headings = tables_of(data)[key].drop_duplicates("x").sort_values("x")["heading"]
    rows = []
    for curve in curves_of(data):
        cells = [cell_of(data, key, curve.label, heading) for heading in headings]
        rows.append([name_of(curve), *map(text, cells)])
    columns = [f"{heading} = L" if heading == str(L) else heading for heading in headings]
    return table(["context" if key == "fixed" else "distance", *columns], rows)


def gains() -> pd.DataFrame:
    """The gains over truncation on both texts, for the picture."""
    parts = [tables_of(data)["gain"].assign(text=text) for data, text in TEXTS.items()]
    rows = pd.concat(parts, ignore_index=True)
    return rows[rows["x"] > L]


def blocks() -> Iterator[tuple[str, str]]:
    """Name -> each generated part of the page."""
    yield "overview", overview()
    legend = ("Gain over truncation with paired 95 % intervals; dots are seeds, open marks medians with the "
              f"range of seeds. Grey: {caption(gains())}.")
    yield "picture", textwrap.fill(legend, 120)
    yield "gpu", gpu()
    yield "gpu 60m", gpu_60m()
    yield "control", control()
    yield "needles", needles()
    yield "needles methods", methods_on_needles()
    yield "algorithms", algorithms()
    for data in TEXTS:
        yield f"summary {data}", summary(data)
        yield f"perplexity {data}", by_length(data, "fixed", spread)
        yield f"repeat {data}", by_length(data, "repeat", interval)
        yield f"methods {data}", methods(data)


def main() -> None:
    argument_parser(__doc__ or "").parse_args()
    parts = dict(blocks())
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        names = re.findall("<!-- begin (.*) -->", text)
        page.write_text(update(text, {name: parts[name] for name in names}), encoding="utf-8")
    title = f"Gain over truncation on novels and code: 1.1 M parameters, L = {L}"
    draw_measure(gains(), GAIN, title, L).savefig(PAGE.with_name("gains.png"), dpi=120)
    print("wrote the picture and the tables of", *(str(page.relative_to(ROOT)) for page in PAGES))


if __name__ == "__main__":
    run_command(main)
