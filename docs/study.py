"""The tables of results/extrapolation/README.md, computed from its runs: `python -m docs.study` writes them.

A run is a folder as train.py and eval.py make it, without its checkpoints: compare.py reads the same ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from docs.gallery import ROOT, table, update
from evaluation.comparison import Curve, frame_of, gate_of, make_curves, make_tables
from evaluation.report import Cell, Table
from evaluation.runs import check_comparable, read_run
from runtime.command import argument_parser, run_command

PAGE = ROOT / "results" / "extrapolation" / "README.md"
RUNS = PAGE.parent / "runs"
L = 128
TEXTS = {"books": "prose", "packages": "code"}


def curves_of(data: str, runs: Path = RUNS) -> list[Curve]:
    """The curves of all runs that have eval/DATA.json, named after their config, rope first."""
    folders = sorted(path.parent.parent for path in runs.glob(f"*/eval/{data}.json"))
    read = [read_run(folder, data) for folder in folders]
    if read:
        check_comparable(read)
    names = [re.sub(r"-lr-.*", "", folder.name) for folder in folders]
    return sorted(make_curves(read, names), key=lambda curve: curve.label != "rope")


def tables_of(curves: Sequence[Curve]) -> dict[str, Table]:
    """Key -> table of compare.py: fixed, gain (over truncation), repeat and others."""
    return {one.key: one for one in make_tables(curves, curves[0], frame_of(curves), L)}


def interval(cell: Cell | None) -> str:
    """A number with its interval."""
    if cell is None:
        return "-"
    ends = f" [{cell.low:+.2f}, {cell.high:+.2f}]" if cell.low is not None and cell.high is not None else ""
    return f"{cell.value:+.2f}{ends}"


def spread(cell: Cell | None) -> str:
    """A mean with its standard deviation over seeds."""
    return "-" if cell is None else f"{cell.value:.1f}" + (f" ± {cell.spread:.1f}" if cell.spread else "")


def name_of(curve: Curve, L: int) -> str:
    """A label; in italics if the curve fails its gate."""
    return f"*{curve.label}*" if gate_of(curve, L).is_failed else curve.label


def summary(data: str) -> str:
    """One row for each encoding: what it is at L, and what becomes of it."""
    curves = curves_of(data)
    near, distant = tables_of(curves), curves_of(f"{data}-far")
    far = tables_of(distant)["gain"].rows if distant else {}
    rows = []
    for curve in sorted(curves, key=lambda curve: near["fixed"].rows[curve.label][str(L)].value):
        records = [r for run in curve.runs for r in run.records
                   if (r["extend"], r["protocol"], r["length"]) == (None, "fixed", L)]
        bpb = sum(r["nll_sum"] for r in records) / math.log(2) / sum(r["bytes"] for r in records)
        gain, gate = near["gain"].rows[curve.label], gate_of(curve, L)
        repeat = near["repeat"].rows[curve.label]
        options, train = curve.runs[0].config.position, curve.runs[0].config.train
        rate = f"{train.lr:g}" + (f", x {options.lr_scale:g}" if options.lr_scale != 1 else "")
        rows.append([name_of(curve, L), rate, str(len(curve.runs)), f"{bpb:.3f}", interval(gain.get("256")),
                     interval(gain.get("2048")), interval(far.get(curve.label, {}).get("8192")),
                     f"{gate.gain:+.2f}", interval(repeat.get(str(16 * L - L // 2))),
                     "failed" if gate.is_failed else "passed"])
    return table(["encoding", "rate", "seeds", "bits/byte at L", "gain of 2 L", "of 16 L", "of 64 L",
                  "repeat at L", "repeat at 16 L", "gate"], rows)


def by_length(data: str, key: str, text: Callable[[Cell | None], str]) -> str:
    """A table of compare.py in Markdown."""
    curves = curves_of(data)
    shown = tables_of(curves)[key]
    rows = [[name_of(curve, L), *(text(shown.rows[curve.label].get(column)) for column in shown.x.index)]
            for curve in curves if curve.label in shown.rows]
    return table(["context" if key == "fixed" else "distance", *map(shown.heading, shown.x.index)], rows)


def blocks() -> Iterator[tuple[str, str]]:
    """Name -> each generated part of the page."""
    for data in TEXTS:
        yield f"summary {data}", summary(data)
        yield f"perplexity {data}", by_length(data, "fixed", spread)
        yield f"repeat {data}", by_length(data, "repeat", interval)


def main() -> None:
    argument_parser(__doc__ or "").parse_args()
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), dict(blocks())), encoding="utf-8")
    print(f"wrote the tables of {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    run_command(main)
