"""The pictures of eval.py and compare.py: curves against context, position or step, and maps of the probes.

They are legible in black and white and to the colour-blind: each curve has a different colour (Okabe and
Ito), marker and line style; the baseline, which comes first, is black. L = train.seq_len.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from evaluation.report import ASINH_WIDTH, Cell, Map, Table
from evaluation.results import WINDOWED, Record, perplexity

plt.switch_backend("agg")       # not that of a notebook, which this command may lack
STYLES = [("#000000", "o"), ("#0072b2", "s"), ("#d55e00", "^"), ("#009e73", "D"), ("#cc79a7", "v"),
          ("#56b4e9", "P"), ("#e69f00", "X"), ("#888888", "*")]         # colour, marker
DASHES = [(), (6, 3), (2, 2), (8, 2, 2, 2)]     # points on and off
MOST_CURVES = len(STYLES)       # in one picture: more cannot be distinguished
MARKED = 12                     # columns that all get a tick on the x axis; more would overlap


class Line(NamedTuple):
    """A curve of a picture; colour, marker and dash are indices into STYLES and DASHES."""

    label: str
    points: Sequence[tuple[float, Cell]]
    colour: int
    marker: int
    dash: int


def draw_evaluation(records: Sequence[Record], title: str, L: int, path: Path) -> bool:
    """The picture of eval.py: perplexity against context, and loss against position, with L marked.

    False if the records have neither: then there is no picture.
    """
    curves = dict.fromkeys((r["extend"], r["protocol"]) for r in records
                           if r["protocol"] in (*WINDOWED, "position"))
    extends = list(dict.fromkeys(extend for extend, _ in curves))
    contexts, positions = list[Line](), list[Line]()
    for extend, protocol in curves:
        found = [r for r in records if (r["extend"], r["protocol"]) == (extend, protocol)]
        colour = extends.index(extend) % len(STYLES)
        if protocol == "position":
            points = [(math.sqrt((r["bucket"][0] + 1) * r["bucket"][1]), Cell(r["nll_sum"] / r["tokens"]))
                      for r in found]
            positions.append(Line("", points, colour, colour, 0))
        else:
            kind = WINDOWED.index(protocol)
            points = [(r["length"], Cell(perplexity(r["nll_sum"] / r["tokens"]))) for r in found]
            contexts.append(Line(f"{protocol}, {extend}" if extend else protocol, points, colour, kind, kind))
    if not curves:
        return False
    n_panels = bool(contexts) + bool(positions)
    figure, axes = plt.subplots(1, n_panels, figsize=(5.5 * n_panels, 4.6), squeeze=False,
                                layout="constrained")
    if contexts:
        axis = axes[0, 0]
        fixed = [r for r in records if r["protocol"] == "fixed"]
        if fixed:
            truncated = perplexity(fixed[0]["truncated_nll_sum"] / fixed[0]["tokens"])
            axis.axhline(truncated, color="black", linestyle=":", label="fixed, truncated to L")
        lengths = sorted({r["length"] for r in records if r["protocol"] in WINDOWED})
        draw_lines(axis, contexts, "log", L, {length: str(length) for length in lengths})
        axis.set(xlabel="context (tokens)", ylabel="perplexity per token", title="Perplexity against context")
        figure.legend(loc="outside lower center", ncols=4)
    if positions:
        axis = axes[0, -1]
        draw_lines(axis, positions, "linear", L)
        axis.set(xlabel="position in the window (tokens of context)", ylabel="loss (nats per token)",
                 title="Loss by position")
    figure.suptitle(plain_tex(title))
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def draw(shown: Sequence[Table | Map], labels: Sequence[str], out: Path) -> dict[str, list[str]]:
    """Key of a Table or Map -> its pictures as SVG, which are also written as PDF.

    There are several if there are more than MOST_CURVES curves; the baseline, which comes first, is in all.
    """
    first, *others = labels
    n_pictures = math.ceil(len(others) / (MOST_CURVES - 1)) or 1
    size = math.ceil(len(others) / n_pictures) or 1
    groups = [[first, *others[i:i + size]] for i in range(0, len(others), size)] or [[first]]
    pictures: dict[str, list[str]] = {}
    for one in shown:
        known = set(one.rows) if isinstance(one, Table) else {label for label, *_ in one.values.index}
        for group in groups:
            if not known & {*group[1:]} and len(groups) > 1:
                continue
            figure = draw_table(one, group) if isinstance(one, Table) else \
                draw_map(one, [label for label in group if label in known])
            svg, found = io.StringIO(), pictures.setdefault(one.key, [])
            with matplotlib.rc_context({"svg.fonttype": "none"}):
                figure.savefig(svg, format="svg", metadata={"Date": None})
            found.append(svg.getvalue()[svg.getvalue().index("<svg"):])
            figure.savefig(out / (f"{one.key}-{len(found)}.pdf" if len(groups) > 1 else f"{one.key}.pdf"))
            plt.close(figure)
    return pictures


def draw_table(table: Table, labels: Sequence[str]) -> Any:
    """The curves of these labels. Bars are the interval, or else the standard deviation over seeds."""
    figure, axis = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
    lines = []
    for i, label in enumerate(labels):
        row = table.rows.get(label, [])
        points = [(x, cell) for (x, _), cell in zip(table.columns, row, strict=False) if cell]
        lines.append(Line(label, points, i, i, i % len(DASHES)))
    names = dict(table.columns) if len(table.columns) <= MARKED else None
    draw_lines(axis, lines, table.form.scale, table.L, names)
    axis.set(xlabel=table.form.x_label, ylabel=table.form.y_label, title=plain_tex(table.title))
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", fontsize=8, handlelength=4)
    return figure


def draw_map(shown: Map, labels: Sequence[str]) -> Any:
    """A panel for each curve, on one colour scale, with each value written into its cell."""
    grids = {label: shown.values[label].unstack("length") for label in labels}  # depth x length
    across = min(4, len(grids))
    down = math.ceil(len(grids) / across)
    n_rows, n_columns = (max(grid.shape[i] for grid in grids.values()) for i in (0, 1))
    size = (2 + across * max(2.5, 0.62 * n_columns), 1.3 + down * (1 + 0.33 * n_rows))
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(grids):]:
        axis.set_visible(False)
    for axis, (label, grid) in zip(axes.flat, grids.items(), strict=False):
        image = axis.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(grid.shape[1]), [str(x) for x in grid.columns], rotation=45)
        axis.set_yticks(range(grid.shape[0]), [f"{x:g}" for x in grid.index])
        axis.set(title=plain_tex(label), xlabel="context (tokens)", ylabel=shown.place)
        for (i, j), v in ((at, v) for at, v in np.ndenumerate(grid.to_numpy()) if math.isfinite(v)):
            axis.text(j, i, format(v, shown.form), ha="center", va="center", fontsize=7,
                      color="black" if v > 0.5 else "white")
    figure.colorbar(image, ax=axes)
    figure.suptitle(plain_tex(shown.title))
    return figure


def draw_lines(axis: Any, lines: Sequence[Line], scale: str, L: int | None,
               names: dict[float, str] | None = None) -> None:
    """Draw curves; x is logarithmic with a mark at L, linear without L. `names` are ticks of the x axis."""
    for line in lines:
        points = [(x, cell) for x, cell in line.points if math.isfinite(cell.value)]
        if not points:
            continue
        bars = [(max(0.0, cell.value - cell.ends()[0]), max(0.0, cell.ends()[1] - cell.value))
                for _, cell in points]      # 0 where rounding puts the end of a narrow interval inside
        axis.errorbar([x for x, _ in points], [cell.value for _, cell in points],
                      list(zip(*bars, strict=True)) if any(map(any, bars)) else None,
                      label=plain_tex(line.label) or None, capsize=2, linewidth=1.4,
                      linestyle=(0, DASHES[line.dash]) if DASHES[line.dash] else "-",
                      color=STYLES[line.colour][0], marker=STYLES[line.marker][1],
                      markersize=5 if len(points) <= 2 * MARKED else 2)
    plainly = FuncFormatter(lambda x, _: f"{x:g}")
    axis.xaxis.set_major_formatter(plainly)
    if L is not None:
        axis.set_xscale("log")
        axis.axvline(L, color="grey", linewidth=1)
        axis.annotate(f" L = {L}", (L, 0), xycoords=("data", "axes fraction"), va="bottom", color="grey")
        axis.xaxis.set_major_formatter(plainly)
    if names:
        axis.set_xticks(list(names), list(names.values()))
        axis.xaxis.set_minor_locator(NullLocator())
    evenly = MaxNLocator(7, steps=[1, 2, 2.5, 5, 10])      # several ticks, however narrow the range
    if scale == "log":
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low > 10 else evenly)
    if scale == "asinh":
        low, high = axis.get_ylim()
        axis.set_yscale("asinh", linear_width=ASINH_WIDTH)
        ticks = [0.0, *(sign * v for v in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) for sign in (1, -1))]
        is_wide = sum(low <= tick <= high for tick in ticks) >= 4
        axis.yaxis.set_major_locator(FixedLocator(ticks) if is_wide else evenly)
        axis.axhline(0, color="grey", linewidth=1)
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(plainly)
    axis.grid(alpha=0.3)


def plain_tex(label: str) -> str:
    """A label that matplotlib shows unchanged: dollars would begin a formula, a leading "_" would hide it."""
    escaped = label.replace("$", r"\$")
    return f"\u200b{escaped}" if escaped.startswith("_") else escaped
