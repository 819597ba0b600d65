"""The pictures of eval.py and compare.py: curves against context, position or step, and maps of the probes.

They are legible in black and white and to the colour-blind: each curve has a different colour, marker and
line style, from report.py. L = train.seq_len.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.report import ASINH_WIDTH, DASHES, STYLES, Cell, Map, Picture, Table, ends
from evaluation.results import SIGNATURE, perplexity

MOST_CURVES = 8         # in one picture: more cannot be distinguished
MARKED = 12             # columns that all get a tick on the x axis; more would overlap


class Line(NamedTuple):
    """A curve of a picture; colour, marker and dash are indices into STYLES and DASHES."""

    label: str
    points: Sequence[tuple[float, Cell]]
    colour: int
    marker: int
    dash: int


# -----------------------------------------------------------------------------------------------------------
# eval.py


def draw_evaluation(records: Sequence[dict[str, Any]], title: str, L: int, path: Path) -> bool:
    """Perplexity against context, and loss against position, with the training length marked.

    False if the records have neither: then there is no picture.
    """
    by_length = ("nonoverlap", "rolling", "sliding", "fixed")
    curves = dict.fromkeys((r["extend"], r["protocol"]) for r in records
                           if r["protocol"] in (*by_length, "position"))
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
            kind = by_length.index(protocol)
            label = f"{protocol}, {extend}" if extend else protocol
            points = [(r["length"], Cell(perplexity(r["nll_sum"] / r["tokens"]))) for r in found]
            contexts.append(Line(label, points, colour, kind, kind))
    if not curves:
        return False
    plt = pyplot()
    n_panels = bool(contexts) + bool(positions)
    figure, axes = plt.subplots(1, n_panels, figsize=(5.5 * n_panels, 4.6), squeeze=False,
                                layout="constrained")
    if contexts:
        axis = axes[0, 0]
        fixed = [r for r in records if r["protocol"] == "fixed"]
        if fixed:
            truncated = perplexity(fixed[0]["truncated_nll_sum"] / fixed[0]["tokens"])
            if math.isfinite(truncated):
                axis.axhline(truncated, color="black", linestyle=":", label="fixed, truncated to L")
        lengths = sorted({r["length"] for r in records if r["protocol"] in by_length})
        draw_lines(axis, contexts, "log", L, {length: str(length) for length in lengths})
        axis.set(xlabel="context (tokens)", ylabel="perplexity per token", title="Perplexity against context")
        figure.legend(loc="outside lower center", ncols=4)
    if positions:
        axis = axes[0, -1]
        draw_lines(axis, positions, "linear", L)
        axis.set(xlabel="position in the window (tokens of context)", ylabel="loss (nats per token)",
                 title="Loss by position")
    figure.suptitle(plain_tex(title))
    figure.savefig(path, dpi=130, metadata={"Software": SIGNATURE})
    plt.close(figure)
    return True


# -----------------------------------------------------------------------------------------------------------
# compare.py


def draw(tables: Sequence[Table], maps: Sequence[Map], labels: Sequence[str], out: Path) -> list[Picture]:
    """A picture of each table and probe; several if there are more than MOST_CURVES curves."""
    pictures = []
    everything: list[Table | Map] = [*tables, *maps]
    for shown in everything:
        cells = shown.rows if isinstance(shown, Table) else shown.cells
        groups = [group for group in together(labels) if any(label in cells for label in group[1:])]
        for i, group in enumerate(groups or [labels[:1]], start=1):
            name = f"{shown.key}-{i}.png" if len(groups) > 1 else f"{shown.key}.png"
            pictures.append(Picture(out / name, shown.key, shown.title))
            if isinstance(shown, Table):
                draw_table(shown, group, out / name)
            else:
                draw_map(shown, [label for label in group if label in shown.cells], out / name)
    return pictures


def together(labels: Sequence[str]) -> list[list[str]]:
    """The curves of each picture: the baseline, which comes first, is in all of them."""
    first, *others = labels
    n_pictures = math.ceil(len(others) / (MOST_CURVES - 1)) or 1
    size = math.ceil(len(others) / n_pictures) or 1
    return [[first, *others[i:i + size]] for i in range(0, len(others), size)] or [[first]]


def draw_table(table: Table, labels: Sequence[str], path: Path) -> None:
    """The curves of these labels. Bars are the interval, or else the standard deviation over seeds."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
    lines = []
    for i, label in enumerate(labels):
        row = table.rows.get(label, [])
        points = [(x, cell) for (x, _), cell in zip(table.columns, row, strict=False) if cell]
        lines.append(Line(label, points, i, i, i % len(DASHES)))
    names = dict(table.columns) if len(table.columns) <= MARKED else None
    draw_lines(axis, lines, table.scale, table.L, names)
    axis.set(xlabel=table.x_label, ylabel=table.y_label, title=plain_tex(table.title))
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", fontsize=8, handlelength=4)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_map(shown: Map, labels: Sequence[str], path: Path) -> None:
    """One panel of curves by place where each place has one length; else one panel for each curve."""
    keys = sorted({key for label in labels for key in shown.cells[label]})
    places = sorted({place for _, place in keys})
    if len(keys) == len(places):
        rows = {label: {place: value for (_, place), value in shown.cells[label].items()} for label in labels}
        grids = {"": [[rows[label].get(place, math.nan) for place in places] for label in labels]}
        draw_grids(grids, shown, ([f"{x:g}" for x in places], shown.place),
                   ([plain_tex(label) for label in labels], ""), path)
        return
    lengths = sorted({length for length, _ in keys})
    grids = {label: [[shown.cells[label].get((length, place), math.nan) for length in lengths]
                     for place in places] for label in labels}
    draw_grids(grids, shown, ([str(x) for x in lengths], "context (tokens)"),
               ([f"{x:g}" for x in places], shown.place), path)


def draw_grids(grids: dict[str, list[list[float]]], shown: Map, x: tuple[list[str], str],
               y: tuple[list[str], str], path: Path) -> None:
    """Panels on one colour scale of monotone lightness, with each value written into its cell."""
    plt = pyplot()
    known = [v for grid in grids.values() for row in grid for v in row if math.isfinite(v)] or [0.0]
    low, high = (0.0, 1.0) if "%" in shown.form else (min(known), max(known))
    across = min(4, len(grids))
    down = math.ceil(len(grids) / across)
    size = (2 + across * max(2.5, 0.62 * len(x[0])), 1.3 + down * (1 + 0.33 * len(y[0])))
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis in axes.flat[len(grids):]:
        axis.set_visible(False)
    for axis, (label, grid) in zip(axes.flat, grids.items(), strict=False):
        image = axis.imshow(grid, cmap="cividis", vmin=low, vmax=high, aspect="auto")
        axis.set_xticks(range(len(x[0])), x[0], rotation=45)
        axis.set_yticks(range(len(y[0])), y[0])
        axis.set(title=plain_tex(label), xlabel=x[1])
        for i, row in enumerate(grid):
            for j, v in enumerate(row):
                if math.isfinite(v):
                    axis.text(j, i, format(v, shown.form.replace(".3f", ".2f")), ha="center", va="center",
                              fontsize=7, color="black" if v > (low + high) / 2 else "white")
    for axis in axes[:, 0]:
        axis.set_ylabel(y[1])
    figure.colorbar(image, ax=axes)
    figure.suptitle(plain_tex(shown.title))
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -----------------------------------------------------------------------------------------------------------
# Shared


def pyplot() -> Any:
    """Matplotlib without a display. Imported late: it takes a second, which other commands need not spend."""
    os.environ["MPLBACKEND"] = "agg"    # not that of a notebook, which this command may lack
    from matplotlib import pyplot as plt
    return plt


def draw_lines(axis: Any, lines: Sequence[Line], scale: str, L: int | None,
               names: dict[float, str] | None = None) -> None:
    """Draw curves; x is logarithmic with a mark at L, linear without L. `names` are ticks of the x axis."""
    for line in lines:
        points = [(x, cell) for x, cell in line.points if math.isfinite(cell.value)]
        if not points:
            continue
        bars = [(cell.value - ends(cell)[0], ends(cell)[1] - cell.value) for _, cell in points]
        axis.errorbar([x for x, _ in points], [cell.value for _, cell in points],
                      list(zip(*bars, strict=True)) if any(map(any, bars)) else None,
                      label=plain_tex(line.label) or None, capsize=2, linewidth=1.4,
                      linestyle=(0, DASHES[line.dash]) if DASHES[line.dash] else "-",
                      color=STYLES[line.colour][0], marker=STYLES[line.marker][1],
                      markersize=5 if len(points) <= 2 * MARKED else 2)
    set_x_scale(axis, L, names)
    set_y_scale(axis, scale)
    axis.grid(alpha=0.3)


def set_x_scale(axis: Any, L: int | None, names: dict[float, str] | None) -> None:
    """Ticks that read as plain numbers, and a mark at L."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    if L is not None:
        axis.set_xscale("log")
        axis.axvline(L, color="grey", linewidth=1)
        axis.annotate(f" L = {L}", (L, 0), xycoords=("data", "axes fraction"), va="bottom", color="grey")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if names:
        axis.set_xticks(list(names), list(names.values()))
        axis.xaxis.set_minor_locator(NullLocator())


def set_y_scale(axis: Any, scale: str) -> None:
    """Several ticks, as plain numbers, even if the range is narrow."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    evenly = MaxNLocator(7, steps=[1, 2, 2.5, 5, 10])
    low, high = axis.get_ylim()
    if scale == "log":
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low > 10 else evenly)
    if scale == "asinh":
        axis.set_yscale("asinh", linear_width=ASINH_WIDTH)
        values = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
        ticks = [0, *values, *(-v for v in values)]
        is_wide = sum(low <= tick <= high for tick in ticks) >= 4
        axis.yaxis.set_major_locator(FixedLocator(ticks) if is_wide else evenly)
        axis.axhline(0, color="grey", linewidth=1)
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def plain_tex(label: str) -> str:
    """A label that matplotlib shows unchanged: dollars would begin a formula, a leading "_" would hide it."""
    escaped = label.replace("$", r"\$")
    return f"\u200b{escaped}" if escaped.startswith("_") else escaped
