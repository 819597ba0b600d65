"""The report of compare.py: its tables, and one static HTML page of them that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import pandas as pd

from evaluation.measures import Form

ASINH_WIDTH = 0.05      # gains look linear up to about this, in nats per token, and logarithmic beyond
STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; max-width: 72em; margin: 1.5em auto; padding: 0 1em; }
svg { max-width: 100%; height: auto; } div { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .15em .7em; text-align: right; border: 0 solid #ddd; border-bottom-width: 1px; }
td { white-space: nowrap; }
tr:has(th i) { color: #999; }
tbody th, .words td { text-align: left; font-weight: normal; }"""


class Cell(NamedTuple):
    """Mean over seeds, its standard deviation and a 95 % interval; None if not available."""

    value: float
    spread: float | None = None
    low: float | None = None
    high: float | None = None
    beats: bool = False     # better than what it is compared with, after Holm's correction

    def ends(self) -> tuple[float, float]:
        """Lower and upper end of its bar, the interval."""
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return low, high


Cells = dict[str, dict[str, Cell]]      # label -> heading of the column -> cell


class Table(NamedTuple):
    """Curves by columns: lengths, positions or distances."""

    key: str                            # file name of its picture
    title: str
    note: str
    form: Form
    L: int                              # training length
    x: pd.Series                        # heading of a column -> its place on the x axis, from left to right
    rows: Cells
    failed: Sequence[str] = ()          # labels that fail the gate
    truncated: float | None = None      # of the baseline, with its context cut to L

    def heading(self, name: str) -> str:
        """A column's heading, which marks the training length, or the bucket that ends there."""
        return name + (" = L" if name == str(self.L) else ", L" if name.endswith(f"-{self.L - 1}") else "")

    def text(self, cell: Cell | None) -> str:
        """Value ± standard deviation [interval]; the deviation ends where the value does: 193.9 ± 3.7."""
        if cell is None:
            return "-"
        text = format(cell.value, self.form.form).removesuffix(".")
        if cell.spread is not None:
            form = self.form.form.lstrip("+")
            if "g" in form:
                form = "#.2g" if "e" in text else f".{len(text.partition('.')[2])}f"
            text += f" ± {format(cell.spread, form)}"
        if cell.low is not None and cell.high is not None:
            text += f" [{format(cell.low, self.form.form)}, {format(cell.high, self.form.form)}]"
        return text

    def frame(self, only_means: bool = False) -> pd.DataFrame:
        """The cells as HTML, bold where they beat what they are compared with; or the means as plain text."""
        def text(cell: Cell | None) -> str:
            if only_means:
                return self.text(cell and Cell(cell.value))
            return f"<b>{self.text(cell)}</b>" if cell and cell.beats else self.text(cell)

        def name(label: str) -> str:
            if only_means:
                return label
            return f"<i>{escape(label)}</i>" if label in self.failed else escape(label)

        cells = {name(label): [text(row.get(heading)) for heading in self.x.index]
                 for label, row in self.rows.items()}
        return pd.DataFrame.from_dict(cells, "index", columns=[*map(self.heading, self.x.index)])


def html(title: str, notes: Sequence[str], about: pd.DataFrame, tables: Sequence[Table],
         pictures: dict[str, str]) -> str:
    """report.html: what the signs mean, the runs, and each picture (SVG) above its table."""
    signs = ("± is the standard deviation over training seeds. [a, b] and the bars are a 95 % interval, over "
             "seeds and text if there are several seeds, not corrected for the number of comparisons. A "
             f"number is bold where it beats {about.index[0]} on the same targets, by a test at 5 % with "
             "Holm's correction over the curves of its column, never with one trained run; under 'Gain over "
             "truncation', where it beats its own truncated context. Grey rows fail the gate. '-': the "
             "encoding is not defined there, or it was not measured. The axis of gains is "
             f"linear up to about {ASINH_WIDTH} on both sides of 0 and logarithmic beyond (asinh).")
    parts = ["<!doctype html>\n<html lang='en'>\n<meta charset='utf-8'>",
             f"<title>{escape(title)}</title>\n<style>{STYLE}\n</style>\n<h1>{escape(title)}</h1>",
             *(f"<p>{escape(note)}</p>" for note in (*notes, signs)),
             f"<div>{about.to_html(classes='words')}</div>"]
    for table in tables:
        cells = table.frame().rename_axis(columns=escape(table.form.x_label))
        parts += [f"<h2 id='{table.key}'>{escape(table.title)}</h2>",
                  f"<p>{escape(table.note)}</p>",
                  f"<div>{pictures.get(table.key, '')}</div>",
                  f"<div>{cells.to_html(escape=False)}</div>"]
    return "\n".join([*parts, "</html>\n"])
