"""The report of compare.py: what can be said in five sentences, then figures and tables, on one page.

The page is static HTML that opens offline. Its tables have the same rows as its figures (figures.py), with
the column `is_better`: whether a number is bold (estimates.py). L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import pandas as pd

from evaluation.estimates import FAILED, LEAST_USE, NOT_GATED, PASSED, UNCERTAIN
from evaluation.figures import GREYS, caption, mark_L
from evaluation.intervals import LARGEST_SPREAD, OUTLIER_LEVEL
from evaluation.results import Form

MOST_COLUMNS = 9        # places whose cells have intervals; with more they would not fit on 1,200 pixels
ONE_RATE = ("One learning rate for all: if it was not chosen for each, the order may change when it is "
            "(docs/fair-comparisons.md).")
STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; max-width: 72em; margin: 1.5em auto; padding: 0 1em; }
li { margin: .3em 0; } figcaption, .signs { color: #555; font-size: 14px; }
div, figure { overflow-x: auto; margin: 1em 0; } figure svg { max-width: max(100%, 45em); height: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .55em; text-align: right; vertical-align: top; border-bottom: 1px solid #ddd; }
td, thead th { white-space: nowrap; } td small { color: #666; font-size: 11px; }
tbody th { position: sticky; left: 0; background: white; max-width: 11em; overflow-wrap: anywhere; }
tbody th, .words td, .words th { text-align: left; font-weight: normal; white-space: normal; }
tr:has(th i), tr:has(th i) small { color: #999; }"""
# below the tables: what their numbers and the marks in figures mean
SIGNS = f"""A number is a mean over seeds, above its interval [a, b] and, beyond L, the range of seeds.
In figures a full mark and a broad bar are mean and interval, an open mark and a thin line median and range,
and small dots are seeds. Bold: better, by a test at 5 % with Holm's correction over all that could be bold,
than {{baseline}} on the same targets or, under "Gain over truncation", than the own context cut to L. A row
is grey if it failed the gate or was not gated: nothing follows from it. "-": the encoding is not defined
there, or it was not measured. An interval is of 95 % and covers how seeds and text vary: {{units}}; with 1
seed, the text alone. Where seeds differ by more than an interval of their mean can describe (a standard
deviation above {LARGEST_SPREAD:g}, or an outlier by Grubbs' test at {OUTLIER_LEVEL:.0%}), median and range
stand in its place. The range a ... b of S seeds holds a new seed with a probability of (S - 1) / (S + 1),
50 % for 3 seeds, and the median of all possible ones with 1 - 2^(1 - S), whatever their distribution; of a
difference it is over all pairs of a seed of each curve. It cannot show a break that no seed had."""


class Section(NamedTuple):
    """A table with its figure."""

    key: str                # names the figure's files
    title: str
    note: str
    form: Form
    curves: pd.DataFrame    # see figures.py
    is_drawn: bool = False
    figure: str = ""        # SVG


# -----------------------------------------------------------------------------------------------------------
# Tables


def cell(row: Any, form: Form, L: int, is_brief: bool) -> str:
    """The HTML of a number: what is shown, its interval and, beyond L, the range of seeds."""
    def text(score: float) -> str:
        return format(form.number(score), form.number_format).removesuffix(".")

    shown = f"<b>{text(row.shown)}</b>" if row.is_better else text(row.shown)
    lines = []
    if not row.is_unstable and not math.isnan(row.low):
        low, high = sorted((row.low, row.high), key=form.number)
        lines.append(f"[{text(low)}, {text(high)}]")
    if row.is_unstable or (row.length > L and len(row.seeds) > 1):
        low, high = sorted((row.seed_low, row.seed_high), key=form.number)
        lines.append(f"{text(low)} ... {text(high)}")
    if is_brief or not lines:
        return shown
    return f"{shown}<br><small>{'<br>'.join(lines)}</small>"


def name_cell(name: str, state: str) -> str:
    """A curve's name; in italics, which STYLE makes a grey row, if nothing follows from it."""
    return f"<i>{escape(name)}</i>" if state in GREYS else escape(name)


def make_table(section: Section, L: int, is_text: bool = False) -> pd.DataFrame:
    """A row for each curve, a column for each place, cells of HTML; or plain text, the numbers alone."""
    curves = section.curves.assign(is_better=False) if is_text else section.curves
    is_brief = is_text or curves["x"].nunique() > MOST_COLUMNS
    cells = [cell(row, section.form, L, is_brief) for row in curves.itertuples()]
    columns = curves.drop_duplicates("x").sort_values("x")["heading"]
    table = curves.assign(cell=cells).pivot(index="name", columns="heading", values="cell")
    table = table.reindex(index=curves["name"].unique(), columns=columns).fillna("-")
    table.columns = [mark_L(heading, L).replace("\n", " ") for heading in columns]
    if is_text:
        return table.rename_axis(None)
    states = curves.groupby("name")["state"].first()
    table.index = [name_cell(name, states[name]) for name in table.index]
    return table.rename_axis(columns=escape(section.form.x_label))


def describe_curves(curves: pd.DataFrame, gates: pd.DataFrame) -> pd.DataFrame:
    """A row for each curve: encoding, method, seeds and gate. `curves` has a row for each name."""
    rows = {}
    for row in curves.itertuples():
        gate = gates.loc[row.label]
        cells = {"encoding": row.encoding, "method": row.extend, "seeds": row.n_seeds, "gate": gate["state"]}
        for column, what in (("below", "loss below a trigram's"), ("use", "use of a repeated passage")):
            low, high = gate[f"{column}_low"], gate[f"{column}_high"]
            is_known = gate["state"] != NOT_GATED
            cells[what] = f"{gate[column]:+.2f} [{low:+.2f}, {high:+.2f}]" if is_known else "-"
        rows[name_cell(row.name, row.state)] = cells
    return pd.DataFrame.from_dict(rows, "index").rename_axis(columns="curve")


# -----------------------------------------------------------------------------------------------------------
# What is said in words


def signs(rows: pd.DataFrame, baseline: str) -> str:
    """How to read the numbers of these rows."""
    units = rows[["n_units", "unit"]].drop_duplicates().to_numpy()
    texts = [f"{n} {unit or 'windows, too few for an interval'}" for n, unit in units]
    return SIGNS.format(baseline=baseline, units=", ".join(texts))


def summarize(curves: pd.DataFrame, rows: pd.DataFrame, text: str, L: int) -> Iterator[str]:
    """What was compared, on what, what passed, what is best at L and at the longest length, what is open.

    `curves` has a row for each curve, `rows` has those of all tables, with the keys of their tables.
    """
    counts = " or ".join(map(str, sorted({*curves["n_seeds"]})))
    yield f"Compared: {join(curves['name'])}, trained at L = {L} tokens. Seeds of each: {counts}."

    losses = rows[rows["key"] == "fixed"]
    if losses.empty:
        yield f"They are evaluated on {text}, but not on fixed targets, so lengths cannot be compared."
    else:
        first = losses.iloc[0]
        units = f"{first['n_units']} {first['unit'] or 'windows'}"
        yield (f"They are scored on the same targets of {text} ({units}) at every length, from "
               f"{losses['length'].min()} to {losses['length'].max()} tokens of context.")

    parts = []
    for state in (PASSED, UNCERTAIN, FAILED, NOT_GATED):
        names = curves["name"][curves["state"] == state]
        if len(names):
            parts.append(f"{state}: {join(names)}")
    hint = ""
    if NOT_GATED in [*curves["state"]]:
        hint = " To gate a run that was trained here: python eval.py RUN --protocol fixed,trigram,repeat."
    yield (f"Gate at L, a loss below a trigram's and {LEAST_USE:g} nats or more by a repeated "
           f"passage: {'; '.join(parts)}.{hint}")

    passed = losses[losses["state"] == PASSED]
    if passed.empty:
        yield "Nothing is ranked, because no curve passed the gate."
    else:
        here = passed[passed["length"].isin([L, passed["length"].max()])]
        best = here.loc[here.groupby("length")["shown"].idxmax()]
        better = rows[(rows["key"] == "fixed-lead") & rows["is_better"]].set_index(["name", "length"])
        claims = []
        for row in best.itertuples():
            claim = (f"{row.name} has the lowest loss with {row.length} tokens ({-row.shown:.3f} nats per "
                     "token")
            if (row.name, row.length) in better.index:
                claim += f", below that of {better['baseline'].iloc[0]}"
            claims.append(f"{claim})")
        yield f"Of those that passed, {join(claims)}."

    limits = ["whether the order is the same on another text, at another size or training length"]
    unstable = losses["name"][losses["is_unstable"] & (losses["length"] > L)].unique()
    if len(unstable):
        limits.append(f"what a new seed of {join(unstable)} does beyond L, where its seeds differ too much "
                      "for an interval")
    yield f"Not known: {'; '.join(limits)}; and a difference that is not bold may be chance."


def join(names: Sequence[str]) -> str:
    """a, b and c."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else str(last)


# -----------------------------------------------------------------------------------------------------------
# The page


def html(title: str, remarks: Sequence[str], sentences: Iterable[str], signs: str, about: pd.DataFrame,
         sections: Sequence[Section], L: int) -> str:
    """report.html: remarks, five sentences, the curves, how to read, and each figure above its table."""
    parts = ["<!doctype html>\n<html lang='en'>\n<meta charset='utf-8'>",
             "<meta name='viewport' content='width=device-width'>",
             f"<title>{escape(title)}</title>\n<style>{STYLE}\n</style>\n<h1>{escape(title)}</h1>",
             *(f"<p>{escape(remark)}</p>" for remark in remarks),
             f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>",
             f"<div>{about.to_html(classes='words', escape=False, border=0)}</div>",
             f"<p class='signs'>{escape(signs)}</p>"]
    for section in sections:
        parts.append(f"<h2 id='{section.key}'>{escape(section.title)}</h2>\n<p>{escape(section.note)}</p>")
        if section.figure:
            grey = caption(section.curves)
            below = f"{section.title}, in grey: {grey}." if grey else ""
            parts.append(f"<figure>{section.figure}<figcaption>{escape(below)}</figcaption></figure>")
        if "shown" in section.curves:
            parts.append(f"<div>{make_table(section, L).to_html(escape=False, border=0)}</div>")
    return "\n".join([*parts, "</html>\n"])
