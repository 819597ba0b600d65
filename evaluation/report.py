"""The report of compare.py: its tables, as Markdown and as one HTML page that opens offline.

pictures.py draws the same tables. The palette below serves all pictures and the page: the colours of Okabe
and Ito, which the colour-blind can distinguish, each with a marker; the baseline, which comes first, is
black.
"""

from __future__ import annotations

import base64
import hashlib
import html as markup
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import Config
from runtime.errors import UserError
from runtime.files import finite, read_text
from runtime.log import start_wandb, without_key

ASINH_WIDTH = 0.05      # gains look linear up to about this, in nats per token, and logarithmic beyond
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
ABOUT = ["encoding", "extend", "seeds", "runs"]
MOST_COLUMNS = 30       # of a table in Markdown: curves with more points have a picture alone


class Cell(NamedTuple):
    """Mean over seeds, its standard deviation and a 95 % interval; None if not available."""

    value: float
    spread: float | None = None
    low: float | None = None
    high: float | None = None
    beats: bool = False     # better than what it is compared with, by an interval that excludes 0


class Table(NamedTuple):
    """Curves by columns: lengths, positions, distances, or steps of training."""

    key: str                            # file name of its picture
    title: str
    note: str
    x_label: str
    y_label: str
    scale: str                          # of the y axis: log, linear or asinh
    form: str                           # format of a value
    L: int | None                       # training length; None where x is not a number of tokens
    columns: list[tuple[float, str]]    # x, heading
    rows: dict[str, list[Cell | None]]  # label -> one cell a column, None where there is no figure

    def heading(self, column: int) -> str:
        """The column's heading; the training length, or the bucket that ends there, is marked."""
        name = self.columns[column][1]
        return f"{name} = L" if name == str(self.L) else f"{name}, L" if self.is_marked(column) else name

    def is_marked(self, column: int) -> bool:
        """Whether the training length is in this column."""
        name = self.columns[column][1]
        return self.L is not None and (name == str(self.L) or name.endswith(f"-{self.L - 1}"))

    def about(self) -> str:
        """What the table shows, and the scales of its axes."""
        x = "linear" if self.L is None else "logarithmic"
        y = {"log": "logarithmic", "linear": "linear",
             "asinh": f"linear up to about {ASINH_WIDTH} on both sides of 0 and logarithmic beyond (asinh)"}
        return f"{self.note} The x axis is {x}, the y axis {y[self.scale]}."

    def text(self, cell: Cell | None) -> str:
        """Value ± standard deviation [interval]; the deviation ends where the value does: 193.9 ± 3.7."""
        if cell is None:
            return "-"
        text = format(cell.value, self.form).removesuffix(".")
        if cell.spread is not None:
            form = self.form.lstrip("+")
            if "g" in form:
                form = "#.2g" if "e" in text else f".{len(text.partition('.')[2])}f"
            text += f" ± {format(cell.spread, form)}"
        if cell.low is not None and cell.high is not None:
            text += f" [{format(cell.low, self.form)}, {format(cell.high, self.form)}]"
        return text


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


def ends(cell: Cell) -> tuple[float, float]:
    """Lower and upper end of the cell's bar: the interval, or else one standard deviation."""
    if cell.low is not None and cell.high is not None:
        return cell.low, cell.high
    spread = finite(cell.spread or 0.0) or 0.0
    return cell.value - spread, cell.value + spread


def signs(baseline: str) -> str:
    """The legend of the tables."""
    return ("± is the standard deviation over training seeds. [a, b] is a 95 % interval, over seeds and text "
            "if there are several seeds; it is not corrected for the number of comparisons. A number is bold "
            f"where it beats {baseline} on the same targets, by a test at 5 % with Holm's correction over "
            "the curves of its column; under 'Gain over truncation', where it beats its own truncated "
            "context. '-' means that there is no result: the encoding is not defined there, or it was not "
            "measured.")


# -----------------------------------------------------------------------------------------------------------
# Markdown


def markdown(title: str, notes: Sequence[str], about: dict[str, list[str]], tables: Sequence[Table],
             pictures: Sequence[Picture]) -> str:
    """report.md: the curves, each table under its picture, then the maps of the probes; signed at its end."""
    runs = {label: [plain(cell) for cell in cells] for label, cells in about.items()}
    paragraphs = [line for note in (*notes, signs(next(iter(about)))) for line in (plain(note), "")]
    lines = [f"# {plain(title)}", "", *paragraphs, *rows_of(["curve", *ABOUT], runs), ""]
    for table in tables:
        lines += [f"## {plain(table.title)}", "", plain(table.about()), ""]
        lines += [f"![{plain(table.title)}]({p.path.name})" for p in pictures if p.key == table.key]
        if len(table.columns) <= MOST_COLUMNS:
            lines += ["", *rows_of_table(table)]
        lines += [""]
    shown = {table.key for table in tables}
    maps = [f"![{plain(p.title)}]({p.path.name})\n" for p in pictures if p.key not in shown]
    return signed("\n".join([*lines, *(["## Probes in detail", ""] if maps else []), *maps]))


def signed(text: str) -> str:
    """The text with a last line by which it is recognised as unchanged."""
    return f"{text}\n<!-- compare.py wrote this, sha256 {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def check_replaceable(folder: Path, keys: Sequence[str]) -> None:
    """Raise UserError if writing a report with these pictures would overwrite what compare.py did not write.

    A folder with an unchanged report is compare.py's.
    """
    report = folder / "report.md"
    try:
        text = read_text(report)
        if text == signed(text.rpartition("\n<!--")[0]):
            return
    except (OSError, ValueError):       # no report, or none of ours
        pass
    names = ["report.md", "report.html", "report.csv", *(f"{key}.png" for key in keys)]
    found = [name for name in names if (folder / name).exists()]
    if found:
        raise UserError(f"--out {folder}: {found[0]} is there, and compare.py did not write it or it was "
                        "edited since; move it away, or give another folder")


def rows_of_table(table: Table) -> Iterator[str]:
    """A Table as a Markdown table."""
    def bold(text: str, is_bold: bool) -> str:
        return f"**{text}**" if is_bold else text

    headings = [bold(table.heading(i), table.is_marked(i)) for i in range(len(table.columns))]
    rows = {label: [bold(table.text(cell), cell is not None and cell.beats) for cell in row]
            for label, row in table.rows.items()}
    yield from rows_of([table.x_label, *headings], rows)


def rows_of(head: Sequence[str], rows: dict[str, list[str]]) -> Iterator[str]:
    """A Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for label, cells in rows.items():
        yield f"| {plain(label)} | {' | '.join(cells)} |"


def plain(text: str) -> str:
    """Escape text for Markdown: labels come from folders and configs, which may contain any character."""
    return "".join(f"&#{ord(c)};" if c in "<>&|[]*`\\\n" else c for c in text)


# -----------------------------------------------------------------------------------------------------------
# HTML and W&B


def html(title: str, notes: Sequence[str], about: dict[str, list[str]], tables: Sequence[Table],
         pictures: Sequence[Picture]) -> str:
    """report.html: the page of report-template.html with the data and the maps of the probes in it."""
    shown = {table.key for table in tables}
    data = {
        "title": title, "about": {"head": ABOUT, "rows": list(about.items())}, "asinh": ASINH_WIDTH,
        "signs": " ".join([*notes, signs(next(iter(about)))]),
        "styles": [[colour, path] for colour, _, path in STYLES],
        "dashes": [" ".join(map(str, dash)) for dash in DASHES],
        "tables": [as_json(table) for table in tables],
        "maps": [{"title": p.title, "png": base64.b64encode(p.path.read_bytes()).decode()}
                 for p in pictures if p.key not in shown],
    }
    # a label may hold "</script>": without any "<" nothing can end the element that holds the data
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    template = (Path(__file__).parent / "report-template.html").read_text(encoding="utf-8")
    before, _, after = template.partition("DATA")
    return before.replace("TITLE", markup.escape(title)) + text + after


def as_json(table: Table) -> dict[str, Any]:
    """A table for the page: numbers to draw and texts to read; null where a number is not finite."""
    def cell_json(cell: Cell | None) -> dict[str, Any] | None:
        if cell is None:
            return None
        low, high = ends(cell)
        return {"y": finite(cell.value), "low": finite(low), "high": finite(high), "text": table.text(cell),
                "beats": cell.beats}

    return {"key": table.key, "title": table.title, "note": table.about(), "x": table.x_label,
            "y": table.y_label, "scale": table.scale, "L": table.L,
            "columns": [{"x": x, "name": table.heading(i), "marked": table.is_marked(i)}
                        for i, (x, _) in enumerate(table.columns)],
            "rows": [(label, [cell_json(cell) for cell in row]) for label, row in table.rows.items()]}


def to_wandb(out: Path, config: Config, tables: Sequence[Table], pictures: Sequence[Picture]) -> None:
    """Log tables and pictures as a W&B run, in the config's project; print a warning if that fails."""
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
    except Exception as error:  # any fault of the logger: the report is already written
        print(f"warning: W&B failed: {without_key(error)}")
