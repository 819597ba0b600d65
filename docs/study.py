"""The tables of the study, computed from the folders of results/: `python -m docs.study` writes them.

compare.py wrote these folders, and reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from base.command import argument_parser, run_command
from docs.gallery import ROOT, table, update
from evaluation.comparison import Curve, frame_of, gate_of, make_curves, make_tables
from evaluation.pictures import draw_table
from evaluation.report import Cell, Table
from evaluation.results import NO_METHOD, join, records
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
def tables_of(data: str) -> dict[str, Table]:
    """Key -> table of compare.py: fixed, gain (over truncation), repeat and others; {} without runs."""
    curves = curves_of(data)
    if not curves:
        return {}
    return {one.key: one for one in make_tables(curves, curves[0], frame_of(curves), length_of(curves[0]))}


def length_of(curve: Curve) -> int:
    """The training length."""
    return curve.runs[0].config["train.seq_len"]


def interval(cell: Cell | None) -> str:
    """A number with its interval."""
    if cell is None:
        return "-"
    ends = f" [{cell.low:+.2f}, {cell.high:+.2f}]" if cell.low is not None and cell.high is not None else ""
    return f"{cell.value:+.2f}{ends}"


def spread(cell: Cell | None) -> str:
    """A mean with its standard deviation over seeds."""
    return "-" if cell is None else f"{cell.value:.1f}" + (f" ± {cell.spread:.1f}" if cell.spread else "")


def name_of(curve: Curve) -> str:
    """A label; in italics if the curve fails its gate."""
    return f"*{curve.label}*" if gate_of(curve, length_of(curve)).is_failed else curve.label


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


def control() -> str:
    """One row for each run: the gain on a passage 16 L before, and over another passage in its place."""
    tables = [tables_of(f"{data}-control")[key].rows for data in TEXTS for key in ("repeat", "use")]
    return table(["run", *(f"{text}: {what}" for text in TEXTS.values() for what in (
        "over the first time", "over another passage"))],
                 [[label, *(interval(rows[label].get(FAR_REPEAT)) for rows in tables)]
                  for label in sorted(tables[0])])


def needles() -> str:
    """One row for each encoding: needles found, a number for each run, and by depth the mean of the runs."""
    rows, order = {}, {}
    for name, runs in tuned().items():
        rows[name] = [name]
        for kind in ("needle", "multi_key"):
            by_length = {n: [percents(run, kind, n * L) for run in runs] for n in (1, 4, 16)}
            rows[name] += [" ".join(map(share, by_run)) for by_run in by_length.values()]
            rows[name].append(" ".join(map(share, zip(*by_length[16], strict=True))))
        order[name] = -sum(map(sum, by_length[4] + by_length[16])) / len(runs)          # of four facts
    columns = [f"{name} {at}" for name in ("one fact", "of four")
               for at in ("at L", "at 4 L", "at 16 L", "at 16 L by depth")]
    return table(["% found", *columns], [rows[name] for name in sorted(rows, key=lambda name: order[name])])


def methods_on_needles() -> str:
    """One row for each method of --extend on the tuned runs of rope: the share of needles found by each."""
    runs = [run for run in runs_of(STUDY / "needles") if re.fullmatch("rope-lr.*-methods", run.name)]
    rows = {}
    for extend in join(*(run.table for run in runs)).extend.unique():
        near, far = ([percents(run, "needle", n * L, extend) for run in runs] for n in (4, 16))
        name = "no method" if extend == NO_METHOD else f"`{extend}`"
        rows[-sum(map(sum, near)), extend] = [name, *(
            " ".join(map(share, by_run)) if any(by_run) else "-" for by_run in (near, far)),
            " ".join(map(share, zip(*near, strict=True)))]
    return table(["rope with", "% found at 4 L", "at 16 L", "at 4 L by depth"],
                 [rows[key] for key in sorted(rows, key=lambda key: key[0])])


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
    curves = {data: curves_of(data) for data in TEXTS}
    rows = []
    for curve in sorted(curves["books"], key=bits):
        row = [curve.label]
        for data in TEXTS:
            shown = tables_of(data)
            one = next(same for same in curves[data] if same.label == curve.label)
            gain, repeat = (shown[key].rows[curve.label].get(column) for key, column in (
                ("gain", FAR), ("repeat", FAR_REPEAT)))
            distant = tables_of(f"{data}-far")["gain"].rows.get(curve.label, {}).get(str(64 * L))
            numbers = [f"{bits(one):.3f}", *("-" if x is None else f"{x.value:+.2f}"
                                             for x in (gain, distant, repeat))]
            is_failed = gate_of(one, L).is_failed
            row += [f"*{x}*" if is_failed and x != "-" else x for x in numbers]
        rows.append([*row, share([percent for run in tuned().get(curve.label, [])
                                  for percent in percents(run, "multi_key", 16 * L)])])
    return table(["encoding", *(text for name in TEXTS.values() for text in (
        f"{name} at L", "gain of 16 L", "of 64 L", "repeat at 16 L")), "needles at 16 L, %"], rows)


def summary(data: str) -> str:
    """One row for each encoding: how it was trained, and what becomes of it beyond L."""
    curves, near, distant = curves_of(data), tables_of(data), tables_of(f"{data}-far")
    far = distant["gain"].rows if distant else {}
    rows = []
    made = {curve.label: [run.summary for run in curve.runs] for curve in curves}
    for curve in sorted(curves, key=bits):
        gain, repeat = (near[key].rows[curve.label] for key in ("gain", "repeat"))
        gate = gate_of(curve, L)
        trained = made[curve.label][0]
        rate = re.sub(r".*?-lr-(.*?)-(lr_|seed).*", r"\1", curve.runs[0].name)
        if trained["parameters"] > made[BASELINE][0]["parameters"]:       # its own
            rate += f" x {curve.runs[0].config['position.lr_scale']:g}"
        over = near["fixed-gain"].rows.get(curve.label, {}).get(str(L))
        rows.append([name_of(curve), rate, f"{trained['parameters']:,}", str(len(curve.runs)),
                     f"{gate.loss:.3f}", interval(over),
                     interval(gain.get(str(2 * L))), interval(gain.get(FAR)),
                     *([interval(far.get(curve.label, {}).get(str(64 * L)))] if far else []),
                     interval(repeat.get(str(L // 2))), interval(repeat.get(FAR_REPEAT))])
    table_of_one = curves[0].runs[0].table
    scored = table_of_one[(table_of_one.protocol == "fixed") & (table_of_one.length == L)]
    head = f"encoding (a trigram has {gate.trigram:.3f})"
    commits = sorted({run["git_revision"][:7] for runs in made.values() for run in runs})
    about = (f"\n\n{scored.tokens.sum():,} tokens, {scored.bytes.sum():,.0f} bytes, "
             f"{scored.document.nunique()} documents; "
             f"trained in {trained['dtype']} at commit {', '.join(commits)}.")
    columns = ["rate", "parameters", "seeds", "loss at L", "over rope at L", "gain of 2 L", "gain of 16 L",
               *["gain of 64 L"] * bool(far), "repeat at L", "repeat at 16 L"]
    return table([head, *columns], rows) + about


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
    shown, seconds = tables_of(f"{data}-methods"), costs()
    failed = {curve.label for curve in curves_of(data) if gate_of(curve, L).is_failed}
    rows = [[f"*{curve.label}*" if curve.label.split(" + ")[0] in failed else curve.label,
             *(interval(shown["gain"].rows[curve.label].get(str(n * L))) for n in (2, 4, 16)),
             *(interval(shown["repeat"].rows[curve.label].get(str(n * L - L // 2))) for n in (2, 4, 16)),
             f"{seconds[curve.extend] / seconds[NO_METHOD]:.1f}" if curve.extend in seconds else "-"]
            for curve in curves]
    return table([f"seeds of rope: {len(curves[0].runs)}", "gain of 2 L", "4 L", "16 L", "repeat at 2 L",
                  "4 L", "16 L", "time at 64 L"], rows)


def gpu() -> str:
    """Two rows for each encoding of the study on a GPU, prose and code."""
    rows = []
    for data, text in TEXTS.items():
        shown, curves = tables_of(f"gpu-{data}"), curves_of(f"gpu-{data}")
        for curve in curves:
            here = length_of(curve)
            gate = gate_of(curve, here)
            cells = [shown[key].rows.get(curve.label, {}).get(str(column)) for key, column in (
                ("fixed-gain", here), ("gain", 2 * here), ("gain", 16 * here), ("repeat", here // 2),
                ("use", 16 * here - here // 2))]
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


def by_length(data: str, key: str, text: Callable[[Cell | None], str]) -> str:
    """A table of compare.py in Markdown."""
    curves, shown = curves_of(data), tables_of(data)[key]
    rows = [[name_of(curve), *(text(shown.rows[curve.label].get(column)) for column in shown.x.index)]
            for curve in curves if curve.label in shown.rows]
    return table(["context" if key == "fixed" else "distance", *map(shown.heading, shown.x.index)], rows)


def blocks() -> Iterator[tuple[str, str]]:
    """Name -> each generated part of the page."""
    yield "overview", overview()
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
    for data, name in TEXTS.items():
        figure = draw_table(tables_of(data)["fixed"], [curve.label for curve in curves_of(data)])
        figure.savefig(PAGE.with_name(f"{name}.png"), dpi=90)
    print("wrote the pictures and the tables of", *(str(page.relative_to(ROOT)) for page in PAGES))


if __name__ == "__main__":
    run_command(main)
