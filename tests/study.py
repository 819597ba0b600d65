"""The tables of the study, computed from results/extrapolation/runs: `python -m tests.study` writes them.

A run is a folder as train.py and eval.py make it, without its checkpoints: compare.py reads the same ones.
"""

from __future__ import annotations

import json
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
from evaluation.results import read
from evaluation.runs import check_comparable, read_run

PAGE = ROOT / "results" / "extrapolation" / "README.md"
README = ROOT / "README.md"
GPU = ROOT / "results" / "gpu"          # its study has another L
PAGES = [README, PAGE, PAGE.with_name("tables.md"), GPU / "README.md"]
RUNS = PAGE.parent / "runs"
ROWS = ROOT / "results" / "rows"        # those of `make row`: NAME/RUN
NEEDLES = PAGE.parent / "needles"       # runs tuned on needles: NAME.json, or NAME-frozen.json
ALGORITHMS = PAGE.parent / "algorithms"     # NAME-TASK-seedN.json
COSTS = PAGE.parent / "costs"           # one evaluation of all methods, three times: N.json
L = 128
TEXTS = {"books": "prose", "packages": "code"}
FAR, FAR_REPEAT = str(16 * L), str(16 * L - L // 2)     # a length, and the distance of the copies in it


@cache
def curves_of(data: str) -> list[Curve]:
    """The curves of all runs that have eval/DATA.json, named after their config, rope first."""
    found = (*RUNS.glob(f"*/eval/{data}.json"), *ROWS.glob(f"*/*/eval/{data}.json"),
             *GPU.glob(f"study/*/eval/{data}.json"))
    folders = sorted(path.parent.parent for path in found)
    read = [read_run(folder, data) for folder in folders]
    if read:
        check_comparable(read)
    names = [re.sub(r"-lr-.*", "", folder.name) for folder in folders]
    return sorted(make_curves(read, names), key=lambda curve: curve.label != "rope")


@cache
def tables_of(data: str) -> dict[str, Table]:
    """Key -> table of compare.py: fixed, gain (over truncation), repeat and others; {} without runs."""
    curves = curves_of(data)
    if not curves:
        return {}
    return {one.key: one for one in make_tables(curves, curves[0], frame_of(curves), length_of(curves[0]))}


def length_of(curve: Curve) -> int:
    """The training length."""
    return curve.runs[0].config.train.seq_len


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
    records = [r for run in curve.runs for r in run.records
               if (r["extend"], r["protocol"], r["length"]) == (None, "fixed", L)]
    return sum(r["nll_sum"] for r in records) / math.log(2) / sum(r["bytes"] for r in records)


def found(path: Path, kind: str, length: int, extend: str | None = None) -> list[int]:
    """Correct answers of a probe at a length, in percent: one number, or one for each depth."""
    return [round(100 * r["correct"] / r["trials"]) for r in read(path).records
            if (r["protocol"], r["length"], r["extend"]) == (kind, length, extend)]


def share(correct: Sequence[int]) -> str:
    """The mean over all depths, or runs."""
    return f"{sum(correct) / len(correct):.0f}" if correct else "-"


def tuned() -> dict[str, list[Path]]:
    """Encoding, perhaps with ", frozen" -> records of its runs that were tuned on needles."""
    runs: dict[str, list[Path]] = {}
    for path in sorted({*NEEDLES.glob("*-seed?.json"), *NEEDLES.glob("*-frozen.json")}):
        runs.setdefault(re.sub("-lr-.*seed.", "", path.stem).replace("-frozen", ", frozen"), []).append(path)
    return runs


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
    for name, paths in tuned().items():
        rows[name] = [name]
        for kind in ("needle", "multi_key"):
            by_length = {n: [found(path, kind, n * L) for path in paths] for n in (1, 4, 16)}
            rows[name] += [" ".join(map(share, runs)) for runs in by_length.values()]
            rows[name].append(" ".join(map(share, zip(*by_length[16], strict=True))))
        order[name] = -sum(map(sum, by_length[4] + by_length[16])) / len(paths)         # of four facts
    columns = [f"{name} {at}" for name in ("one fact", "of four")
               for at in ("at L", "at 4 L", "at 16 L", "at 16 L by depth")]
    return table(["% found", *columns], [rows[name] for name in sorted(rows, key=lambda name: order[name])])


def methods_on_needles() -> str:
    """One row for each method of --extend on the tuned runs of rope: the share of needles found by each."""
    paths, rows = sorted(NEEDLES.glob("rope-lr*-methods.json")), {}
    for extend in dict.fromkeys(r["extend"] for path in paths for r in read(path).records):
        near, far = ([found(path, "needle", n * L, extend) for path in paths] for n in (4, 16))
        rows[-sum(map(sum, near)), extend] = [f"`{extend}`" if extend else "no method", *(
            " ".join(map(share, runs)) if any(runs) else "-" for runs in (near, far)),
            " ".join(map(share, zip(*near, strict=True)))]
    return table(["rope with", "% found at 4 L", "at 16 L", "at 4 L by depth"],
                 [rows[key] for key in sorted(rows, key=lambda key: key[0])])


def algorithms() -> str:
    """One row for each encoding: right answers in percent by the number of symbols, one number a seed."""
    columns = [(task, n) for task in ("flip_flop", "copying") for n in (16, 32, 64, 128)]
    rows = [[name, *(" ".join(share(found(path, task, 4 * n)) for path in sorted(
                ALGORITHMS.glob(f"{name}-{task}-seed?.json"))) for task, n in columns)]
            for name in {path.name.rsplit("-", 2)[0] for path in ALGORITHMS.glob("*.json")}]
    return table(["% right", *(f"{task.replace('_', '-')}, {n}" for task, n in columns)], sorted(rows))


def overview() -> str:
    """One row for each encoding, best on prose first: both texts at L, at 16 L and 64 L, and needles."""
    curves = {data: curves_of(data) for data in TEXTS}
    rows = []
    for curve in sorted(curves["books"], key=bits):
        row = [curve.label]
        for data in TEXTS:
            shown = tables_of(data)
            one = next(each for each in curves[data] if each.label == curve.label)
            gain, repeat = (shown[key].rows[curve.label].get(column) for key, column in (
                ("gain", FAR), ("repeat", FAR_REPEAT)))
            distant = tables_of(f"{data}-far")["gain"].rows.get(curve.label, {}).get(str(64 * L))
            numbers = [f"{bits(one):.3f}", *("-" if x is None else f"{x.value:+.2f}"
                                             for x in (gain, distant, repeat))]
            is_failed = gate_of(one, L).is_failed
            row += [f"*{x}*" if is_failed and x != "-" else x for x in numbers]
        rows.append([*row, share([percent for path in tuned().get(curve.label, [])
                                  for percent in found(path, "multi_key", 16 * L)])])
    return table(["encoding", *(text for name in TEXTS.values() for text in (
        f"{name} at L", "gain of 16 L", "of 64 L", "repeat at 16 L")), "needles at 16 L, %"], rows)


def summary(data: str) -> str:
    """One row for each encoding: how it was trained, and what becomes of it beyond L."""
    curves, near, distant = curves_of(data), tables_of(data), tables_of(f"{data}-far")
    far = distant["gain"].rows if distant else {}
    rows, made = [], {curve.label: [json.loads((run.path / "summary.json").read_text()) for run in curve.runs]
                      for curve in curves}
    for curve in sorted(curves, key=bits):
        gain, repeat = (near[key].rows[curve.label] for key in ("gain", "repeat"))
        gate = gate_of(curve, L)
        trained = made[curve.label][0]
        rate = re.sub(r".*?-lr-(.*?)-(lr_|seed).*", r"\1", curve.runs[0].path.name)
        if trained["parameters"] > made["rope"][0]["parameters"]:       # its own
            rate += f" x {curve.runs[0].config.position.lr_scale:g}"
        over = near["fixed-gain"].rows.get(curve.label, {}).get(str(L))
        rows.append([name_of(curve), rate, f"{trained['parameters']:,}", str(len(curve.runs)),
                     f"{gate.loss:.3f}", interval(over),
                     interval(gain.get(str(2 * L))), interval(gain.get(FAR)),
                     *([interval(far.get(curve.label, {}).get(str(64 * L)))] if far else []),
                     interval(repeat.get(str(L // 2))), interval(repeat.get(FAR_REPEAT))])
    scored = next(r for r in curves[0].runs[0].records if r["protocol"] == "fixed")
    head = f"encoding (a trigram has {gate.trigram:.3f})"
    commits = sorted({run["git_revision"][:7] for runs in made.values() for run in runs})
    about = (f"\n\n{scored['tokens']:,} tokens, {scored['bytes']:,} bytes, {scored['documents']} documents; "
             f"trained in {trained['dtype']} at commit {', '.join(commits)}.")
    columns = ["rate", "parameters", "seeds", "loss at L", "over rope at L", "gain of 2 L", "gain of 16 L",
               *["gain of 64 L"] * bool(far), "repeat at L", "repeat at 16 L"]
    return table([head, *columns], rows) + about


@cache
def costs() -> dict[str | None, float]:
    """Method -> seconds for the same windows of 64 L, the fastest of all evaluations."""
    records = [r for path in COSTS.glob("*.json") for r in read(path).records if r["length"] == 64 * L]
    return {r["extend"]: r["seconds"] for r in sorted(records, key=lambda r: -r["seconds"])}


def methods(data: str) -> str:
    """One row for each method of --extend on the runs of rope, and of DroPE."""
    curves = curves_of(f"{data}-methods")
    if not curves:
        return "Not measured yet."
    found, seconds = tables_of(f"{data}-methods"), costs()
    failed = {curve.label for curve in curves_of(data) if gate_of(curve, L).is_failed}
    rows = [[f"*{curve.label}*" if curve.label.split(" + ")[0] in failed else curve.label,
             *(interval(found["gain"].rows[curve.label].get(str(n * L))) for n in (2, 4, 16)),
             *(interval(found["repeat"].rows[curve.label].get(str(n * L - L // 2))) for n in (2, 4, 16)),
             f"{seconds[curve.extend] / seconds[None]:.1f}" if curve.extend in seconds else "-"]
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
    for folder in sorted((GPU / "study-60m").iterdir()):
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        records = json.loads((folder / "eval" / "gpu-books.json").read_text(encoding="utf-8"))["records"]
        fixed = {r["length"]: r for r in records if r["protocol"] == "fixed"}
        repeat = {r["length"]: r for r in records if r["protocol"] == "repeat"}
        at_L = fixed[512]
        gains = [f"{fixed[n]['gain']:+.2f}" if n in fixed else "-" for n in lengths[1:]]
        uses = [f"{repeat[n]['use']:+.2f}" if n in repeat else "-" for n in (512, 8192, 16384)]
        loss = at_L["nll_sum"] / at_L["tokens"]
        name = folder.name.partition("-lr-")[0]
        rows.append([name, f"{summary['val_loss']:.3f}", f"{loss:.3f}", *gains, *uses])
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
