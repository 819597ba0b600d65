"""What compare.py shows: tables as markdown, pictures, and one HTML page that opens offline.

All of them are drawn from the same Tables. Legible in black and white and to the colour-blind: each curve has
a colour of Okabe and Ito's palette, a marker and a line style of its own, the baseline is black.
"""

from __future__ import annotations

import base64
import html as markup
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import Config
from runtime.files import finite
from runtime.log import start_wandb, without_key

ABREAST = 8             # curves in one picture: more cannot be told apart
ASINH_WIDTH = 0.05      # gains look linear up to about this, nats a token, logarithmic beyond
STYLES = [              # colour, matplotlib's marker, the same as an SVG path around 0,0
    ("#000000", "o", "M-4,0a4,4 0 1 0 8,0a4,4 0 1 0 -8,0"),
    ("#0072b2", "s", "M-4,-4h8v8h-8z"),
    ("#d55e00", "^", "M0,-5l5,9h-10z"),
    ("#009e73", "D", "M0,-6l5,6l-5,6l-5,-6z"),
    ("#cc79a7", "v", "M0,5l5,-9h-10z"),
    ("#56b4e9", "P", "M-2,-5h4v3h3v4h-3v3h-4v-3h-3v-4h3z"),
    ("#e69f00", "X", "M-5,-3l2,-2l3,3l3,-3l2,2l-3,3l3,3l-2,2l-3,-3l-3,3l-2,-2l3,-3z"),
    ("#888888", "*", "M0,-6l2,4h4l-3,3l1,5l-4,-3l-4,3l1,-5l-3,-3h4z"),
]
DASHES = [(), (6, 3), (2, 2), (8, 2, 2, 2)]     # points on and off


class Cell(NamedTuple):
    """Mean over seeds, its standard deviation, a 95 % interval; None where there is none."""

    value: float
    spread: float | None = None
    low: float | None = None
    high: float | None = None


class Table(NamedTuple):
    """Curves by places on the x axis (lengths, positions, distances). L is the training length."""

    key: str                            # file name of its picture
    title: str
    note: str
    x_label: str
    y_label: str
    scale: str                          # of the y axis: log, linear or asinh
    form: str                           # format of a value
    best: Callable[[Iterable[float]], float] | None
    L: int
    columns: list[tuple[float, str]]    # x, heading
    rows: dict[str, list[Cell | None]]  # label -> a cell a column, None where the encoding cannot go

    def heading(self, column: int) -> str:
        """The column's heading; the training length, or the bucket that ends there, is marked."""
        name = self.columns[column][1]
        return f"{name} = L" if name == str(self.L) else f"{name}, L" if self.is_marked(column) else name

    def is_marked(self, column: int) -> bool:
        """Whether the training length is here."""
        name = self.columns[column][1]
        return name == str(self.L) or name.endswith(f"-{self.L - 1}")

    def text(self, cell: Cell | None) -> str:
        """Value ± standard deviation [interval]."""
        if cell is None:
            return "-"
        text = format(cell.value, self.form)
        if cell.spread is not None:
            text += f" ± {format(cell.spread, {'#.4g': '#.2g'}.get(self.form, self.form.lstrip('+')))}"
        if cell.low is not None and cell.high is not None:
            text += f" [{format(cell.low, self.form)}, {format(cell.high, self.form)}]"
        return text

    def is_best(self, label: str, column: int) -> bool:
        """Whether no other curve is better here, and some are worse."""
        values = [row[column] for row in self.rows.values()]
        known = [cell.value for cell in values if cell and math.isfinite(cell.value)]
        cell = self.rows[label][column]
        return bool(self.best and cell and known and min(known) < max(known)
                    and cell.value == self.best(known))


class Map(NamedTuple):
    """A probe by length and place: label -> {(length, depth or distance): value}."""

    key: str
    title: str
    place: str
    form: str
    cells: dict[str, dict[tuple[int, float], float]]


class Picture(NamedTuple):
    """A file and the key of the Table or Map that it shows."""

    path: Path
    key: str
    title: str


# -----------------------------------------------------------------------------------------------------------
# Pictures


def draw(tables: Sequence[Table], maps: Sequence[Map], labels: Sequence[str], out: Path) -> list[Picture]:
    """A picture of each table and probe, several where there are more curves than can be told apart."""
    import matplotlib
    matplotlib.use("Agg")

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
    """Curves to a picture: the baseline, which comes first, is in each of them."""
    first, *others = labels
    n_pictures = math.ceil(len(others) / (ABREAST - 1)) or 1
    size = math.ceil(len(others) / n_pictures) or 1
    return [[first, *others[i:i + size]] for i in range(0, len(others), size)] or [[first]]


def draw_table(table: Table, labels: Sequence[str], path: Path) -> None:
    """Curves of these labels against x, bars for the interval or else the standard deviation over seeds."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
    for i, label in enumerate(labels):
        points = [(x, cell) for (x, _), cell in zip(table.columns, table.rows.get(label, []), strict=False)
                  if cell and math.isfinite(cell.value)]
        if points:
            bars = [(cell.value - ends(cell)[0], ends(cell)[1] - cell.value) for _, cell in points]
            axis.errorbar([x for x, _ in points], [cell.value for _, cell in points],
                          list(zip(*bars, strict=True)), label=plain_tex(label), capsize=2, linewidth=1.4,
                          linestyle=(0, DASHES[i % 4]) if DASHES[i % 4] else "-",
                          color=STYLES[i][0], marker=STYLES[i][1], markersize=5)
    axis.set(xscale="log", xlabel=table.x_label, ylabel=table.y_label, title=table.title)
    set_scale(axis, table)
    axis.axvline(table.L, color="grey", linewidth=1)
    axis.annotate(f" L = {table.L}", (table.L, 0), xycoords=("data", "axes fraction"), va="bottom",
                  color="grey")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, handlelength=4)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plain_tex(label: str) -> str:
    """A label that matplotlib shows as it is: dollars would begin a formula, "_" would hide it."""
    return label.replace("$", r"\$").replace("_", "\u200b_", label.startswith("_"))


def ends(cell: Cell) -> tuple[float, float]:
    """Lower and upper end of the cell's bar."""
    if cell.low is not None and cell.high is not None:
        return cell.low, cell.high
    spread = cell.spread if cell.spread is not None and math.isfinite(cell.spread) else 0.0
    return cell.value - spread, cell.value + spread


def set_scale(axis: Any, table: Table) -> None:
    """Both axes with ticks that read as plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    if len(table.columns) <= 12:
        axis.set_xticks([x for x, _ in table.columns], [name for _, name in table.columns])
        axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if table.scale == "log":
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low > 5 else range(1, 10)))
        axis.yaxis.set_minor_locator(NullLocator())
    if table.scale == "asinh":
        axis.set_yscale("asinh", linear_width=ASINH_WIDTH)
        ticks = [sign * x for x in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) for sign in (-1, 1)]
        axis.yaxis.set_major_locator(FixedLocator([0, *ticks]))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.axhline(0, color="grey", linewidth=1)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def draw_map(shown: Map, labels: Sequence[str], path: Path) -> None:
    """Curves by place where each place has one length; else a panel a curve, places by length."""
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
    """Panels on one colour scale that is monotone in lightness, each value written into its cell."""
    from matplotlib import pyplot as plt

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
    figure.suptitle(shown.title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -----------------------------------------------------------------------------------------------------------
# Report


def markdown(title: str, about: dict[str, list[str]], tables: Sequence[Table],
             pictures: Sequence[Picture]) -> str:
    """report.md: the curves, then each table under its picture, then the probes' maps."""
    runs = {label: [plain(cell) for cell in cells] for label, cells in about.items()}
    lines = [f"# {plain(title)}", "", "± is the standard deviation over seeds, brackets are 95 % intervals "
             "over the text, **bold** is the best of a column.", "", *rows_of(["curve", *ABOUT], runs), ""]
    for table in tables:
        lines += [f"## {plain(table.title)}", "", plain(table.note), ""]
        lines += [f"![{plain(table.title)}]({p.path.name})" for p in pictures if p.key == table.key]
        headings = [f"**{table.heading(i)}**" if table.is_marked(i) else table.heading(i)
                    for i in range(len(table.columns))]
        lines += ["", *rows_of([table.x_label, *headings], {
            label: [f"**{table.text(cell)}**" if table.is_best(label, i) else table.text(cell)
                    for i, cell in enumerate(row)] for label, row in table.rows.items()}), ""]
    shown = {table.key for table in tables}
    maps = [f"![{plain(p.title)}]({p.path.name})\n" for p in pictures if p.key not in shown]
    return "\n".join([*lines, *(["## Probes in detail", ""] if maps else []), *maps])


ABOUT = ["encoding", "extend", "seeds", "runs"]


def rows_of(head: Sequence[str], rows: dict[str, list[str]]) -> Iterator[str]:
    """A markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for label, cells in rows.items():
        yield f"| {plain(label)} | {' | '.join(cells)} |"


def plain(text: str) -> str:
    """Text that markdown shows as it is: labels are file names, which may hold anything."""
    return "".join(f"&#{ord(c)};" if c in "<>&|[]*`\\\n" else c for c in text)


def html(title: str, about: dict[str, list[str]], tables: Sequence[Table],
         pictures: Sequence[Picture]) -> str:
    """report.html: the page report-template.html with the data in it, probes' maps included."""
    shown = {table.key for table in tables}
    data = {
        "title": title, "about": {"head": ABOUT, "rows": list(about.items())}, "asinh": ASINH_WIDTH,
        "styles": [[colour, path] for colour, _, path in STYLES],
        "dashes": [" ".join(map(str, dash)) for dash in DASHES],
        "tables": [as_json(table) for table in tables],
        "maps": [{"title": p.title, "png": base64.b64encode(p.path.read_bytes()).decode()}
                 for p in pictures if p.key not in shown],
    }
    # a label may say "</script>": no "<" at all can end the element that holds the data
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    template = (Path(__file__).parent / "report-template.html").read_text(encoding="utf-8")
    before, _, after = template.partition("DATA")
    return before.replace("TITLE", markup.escape(title)) + text + after


def as_json(table: Table) -> dict[str, Any]:
    """A table for the page: figures to draw, texts to read; null where a figure is not finite."""
    def cell_json(label: str, i: int, cell: Cell | None) -> dict[str, Any] | None:
        if cell is None:
            return None
        low, high = ends(cell)
        return {"y": finite(cell.value), "low": finite(low), "high": finite(high), "text": table.text(cell),
                "best": table.is_best(label, i)}

    return {"key": table.key, "title": table.title, "note": table.note, "x": table.x_label,
            "y": table.y_label, "scale": table.scale, "L": table.L,
            "columns": [{"x": x, "name": table.heading(i), "marked": table.is_marked(i)}
                        for i, (x, _) in enumerate(table.columns)],
            "rows": [(label, [cell_json(label, i, cell) for i, cell in enumerate(row)])
                     for label, row in table.rows.items()]}


def to_wandb(out: Path, config: Config, tables: Sequence[Table], pictures: Sequence[Picture]) -> None:
    """Log tables and pictures as a run of W&B, in the project of the config; a warning if that fails."""
    run = start_wandb(out, config)
    try:
        if run:
            import wandb
            for table in tables:
                heads: list[str | int] = ["curve", *(table.heading(i) for i in range(len(table.columns)))]
                rows = [[label, *map(table.text, row)] for label, row in table.rows.items()]
                run.log({f"table/{table.key}": wandb.Table(columns=heads, data=rows)})
            for p in pictures:
                run.log({f"picture/{p.path.stem}": wandb.Image(str(p.path), caption=p.title)})
            run.finish()
    except Exception as error:  # a logger's fault, whatever it is: the report is written already
        print(f"warning: W&B failed: {without_key(error)}")
