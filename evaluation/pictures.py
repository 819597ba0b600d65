"""The pictures of eval.py and compare.py: curves against context, position or step.

They are legible in black and white and to the colour-blind: each curve has a different colour (Okabe and
Ito), marker and line style; the baseline, which comes first, is black. L = train.seq_len.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from evaluation.measures import BY_POSITION, PERPLEXITY
from evaluation.protocols import PROTOCOLS
from evaluation.report import ASINH_WIDTH, Cell, Cells, Table
from evaluation.results import NO_METHOD, perplexity

plt.switch_backend("agg")       # not that of a notebook, which this command may lack
plt.rcParams["svg.fonttype"] = "none"       # text stays text
STYLES = [("#000000", "o"), ("#0072b2", "s"), ("#d55e00", "^"), ("#009e73", "D"), ("#cc79a7", "v"),
          ("#56b4e9", "P"), ("#e69f00", "X"), ("#888888", "*")]         # colour, marker
DASHES = ["-", (0, (6, 3)), (0, (2, 2)), (0, (8, 2, 2, 2))]     # points on and off
MOST_CURVES = len(STYLES)       # in one panel: more cannot be distinguished
MARKED = 12                     # columns that all get a tick on the x axis; more would overlap


def draw_evaluation(table: pd.DataFrame, title: str, L: int, path: Path) -> bool:
    """The picture of eval.py: perplexity against context, and loss against position, with L marked.

    False if the table has neither: then there is no picture.
    """
    tables = []
    for name, form in (("Perplexity against context", PERPLEXITY), ("Loss by position", BY_POSITION)):
        shown = table[[PROTOCOLS[protocol].form is form for protocol in table.protocol]]
        rows: Cells = {}
        x: dict[str, float] = {}
        for (protocol, extend, length, place), group in shown.groupby(
                ["protocol", "extend", "length", "place"], sort=False):
            label = protocol if extend == NO_METHOD else f"{protocol}, {extend}"
            at, column = PROTOCOLS[protocol].column(length, place)
            x[column] = at
            rows.setdefault(label, {})[column] = Cell(form.figure(-group.nll.sum() / group.tokens.sum()))
        if rows:
            tables.append(Table("", name, "", form, L, pd.Series(x).sort_values(), rows))
    if not tables:
        return False
    figure, axes = plt.subplots(1, len(tables), figsize=(5.5 * len(tables), 4.6), squeeze=False,
                                layout="constrained")
    fixed = table[table.truncated_nll.notna()]
    if len(fixed):
        truncated = perplexity(fixed.truncated_nll.sum() / fixed.tokens.sum())
        axes[0, 0].axhline(truncated, color="black", linestyle=":", label="fixed, truncated to L")
    for axis, panel in zip(axes.flat, tables, strict=True):
        draw_curves(axis, panel, list(panel.rows))
    figure.legend(loc="outside lower center", ncols=2 * len(tables), fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def draw(tables: Sequence[Table], labels: Sequence[str], out: Path) -> dict[str, str]:
    """Key of a table -> its picture as SVG, which is also written as a file, and as PDF."""
    pictures = {}
    for table in tables:
        figure = draw_table(table, labels)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        figure.savefig(out / f"{table.key}.pdf")
        plt.close(figure)
        svg = file.getvalue()
        (out / f"{table.key}.svg").write_text(svg, encoding="utf-8")
        pictures[table.key] = svg[svg.index("<svg"):]
    return pictures


def draw_table(table: Table, labels: Sequence[str]) -> Any:
    """The curves of a table: several panels for more than MOST_CURVES, each with the baseline (the first)."""
    baseline, others = labels[0], labels[1:]
    n_parts = math.ceil(len(others) / (MOST_CURVES - 1)) or 1
    # split before the curves that this table lacks are left out: a curve has the same colour in all tables
    parts = [part for part in np.array_split(others, n_parts) if table.rows.keys() & {baseline, *part}]
    figure, axes = plt.subplots(len(parts), figsize=(8.5, 4.4 * len(parts)), squeeze=False,
                                layout="constrained")
    for axis, part in zip(axes.flat, parts, strict=True):
        draw_curves(axis, table, [baseline, *part])
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, handlelength=4,
                    title="bars: 95 % intervals", title_fontsize=8)
    return figure


def draw_curves(axis: Any, table: Table, labels: Sequence[str]) -> None:
    """Draw the curves of these labels. Bars are 95 % intervals; curves that fail the gate stretch no axis."""
    for i, label in enumerate(labels):
        row = table.rows.get(label, {})
        points = [(x, row[heading]) for heading, x in table.x.items()
                  if heading in row and math.isfinite(row[heading].value)]
        if not points:
            continue
        bars = [(max(0.0, cell.value - cell.ends()[0]), max(0.0, cell.ends()[1] - cell.value))
                for _, cell in points]      # 0 where rounding puts the end of a narrow interval inside
        colour, marker = STYLES[i % len(STYLES)]
        axis.errorbar([x for x, _ in points], [cell.value for _, cell in points],
                      list(zip(*bars, strict=True)) if any(map(any, bars)) else None,
                      label=label.replace("$", r"\$"), capsize=2, linewidth=1.4, color=colour, marker=marker,
                      linestyle=DASHES[(i + i // len(STYLES)) % len(DASHES)],
                      markersize=5 if len(points) <= 2 * MARKED else 2)
    axis.set(xlabel=table.form.x_label, ylabel=table.form.y_label)
    axis.set_title(table.title, pad=16)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.axvline(table.L, color="grey", linewidth=1)
    axis.annotate(f"L = {table.L}", (table.L, 1), xycoords=("data", "axes fraction"), va="bottom",
                  ha="center", color="grey", fontsize=8)
    if table.truncated:
        axis.axhline(table.truncated, color="black", linestyle=":", linewidth=1, label="truncated to L")
    if len(table.x) <= MARKED:
        axis.set_xticks(table.x, table.x.index)
        axis.xaxis.set_minor_locator(NullLocator())
    if table.form.scale == "log":
        axis.set_yscale("log")
    passing = [end for label in labels if label not in table.failed
               for cell in table.rows.get(label, {}).values() for end in cell.ends() if math.isfinite(end)]
    if table.failed and passing:
        axis.dataLim.update_from_data_y(passing, ignore=True)
        axis.autoscale_view()
    if table.form.scale == "log":
        low, high = axis.get_ylim()
        evenly = MaxNLocator(7, steps=[1, 2, 2.5, 5, 10])       # several ticks, however narrow the range
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low > 10 else evenly)
    if table.form.scale == "asinh":
        axis.set_yscale("asinh", linear_width=ASINH_WIDTH, base=0)      # 0: ticks at any round number
        axis.axhline(0, color="grey", linewidth=1)
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
