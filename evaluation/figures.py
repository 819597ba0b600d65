"""The figures of eval.py, compare.py and the pages of results/: estimates with their intervals, as curves.

A curve is drawn from rows of a table, one for each of its places, with the columns of estimates.py and:
  text              name of the text
  name              of the curve, written at its end in place of a legend
  encoding, extend  what decides its colour: the same in all figures
  state             of its gate: a curve that did not pass is grey
  x, heading        where the place is on the x axis, and the text there

L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from evaluation.estimates import FAILED, NOT_GATED
from evaluation.extension import METHODS
from evaluation.results import BY_POSITION, GAIN, NO_METHOD, TRAINING, Form
from positions import ENCODINGS

# distinct for the colour-blind: Okabe and Ito 2008 without yellow, and Tol's wine
HUES = ("#e69f00", "#0072b2", "#882255", "#d55e00", "#56b4e9", "#cc79a7", "#009e73", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))      # points on and off
MARKERS = "osD^vPX<>"
GREYS = {FAILED: "#c4c4c4", NOT_GATED: "#808080"}
STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6, "lines.linewidth": 1.2,
    "svg.fonttype": "none", "svg.hashsalt": "nanorope",     # text stays text; equal figures, equal files
    "text.parse_math": False}                               # a label may have TeX's signs
FLAT = 0.25                 # nats per token: what a curve may lose and be shown with the flat ones, zoomed
DODGE = 0.5                 # octaves over which the curves of a place are spread
MOST_BARS = 10              # places that have bars and dots; with more the interval is a band
SMOOTHED = 5                # lines of metrics.jsonl, of the training loss
MERGED = 64                 # first positions that are one place: few targets each, so they are noise
NAME_SIZE = 9               # points, of a name at the end of a curve
NAME_GAP = 12               # points from one name to the next
WIDTH, HEIGHT = 3.4, 2.6                                # of a panel, in inches; more names need more height
LEFT, TOP, BELOW = 0.75, 0.6, 0.95                      # beside, above all and below each panel, in inches


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    curves: pd.DataFrame
    form: Form
    is_log: bool = True     # the x axis


# -----------------------------------------------------------------------------------------------------------
# Colours, and names at the ends of curves


def hue(encoding: str, extend: str) -> str:
    """The colour of an encoding, or of a method of --extend, by its place in the registry."""
    name = encoding if extend == NO_METHOD else extend.replace("+", ":").partition(":")[0]
    known = [*ENCODINGS, *METHODS]
    place = known.index(name) if name in known else len(known)      # old results have others
    return HUES[place % len(HUES)]


def style_curves(curves: pd.DataFrame) -> pd.DataFrame:
    """The curves with `colour`, `dash`, `marker` and `is_named`: at its end; otherwise in the caption alone.

    They are the same in all panels. Curves of one hue have different line styles.
    """
    curves = curves.assign(is_named=curves["state"] != FAILED)
    styles = {}
    hues: list[str] = []                                        # of the names so far
    for i, (name, rows) in enumerate(curves.groupby("name", sort=False)):
        first = rows.iloc[0]
        colour = hue(first["encoding"], first["extend"])
        dash = DASHES[hues.count(colour) % len(DASHES)]
        styles[name] = {"colour": colour, "dash": dash, "marker": MARKERS[i % len(MARKERS)]}
        if rows["is_named"].any():
            hues.append(colour)
    styled = curves.join(pd.DataFrame.from_dict(styles, "index"), on="name")
    grey = curves["state"].map(GREYS)
    return styled.assign(colour=grey.fillna(styled["colour"]))


def spread(wanted: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Places in low ... high, at least `gap` apart, in the order of the wanted ones.

    The largest distance to a wanted place is the smallest possible: x[i] - i gap must not fall, and the
    middle of the running maximum from the left and the running minimum from the right is nearest to that.
    """
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(order))
    packed = wanted[order] - steps
    highest = np.maximum.accumulate(packed)
    lowest = np.minimum.accumulate(packed[::-1])[::-1]
    places = np.empty(len(order))
    places[order] = np.clip((highest + lowest) / 2, low, high - steps[-1]) + steps
    return places


# -----------------------------------------------------------------------------------------------------------
# Panels


def draw(rows: Sequence[Sequence[Panel]], title: str, L: int, shares_y: bool = False) -> Figure:
    """The panels in rows, each of which has one y axis if `shares_y`."""
    # in inches; a letter is about 0.6 as wide as its size
    curves = pd.concat([panel.curves for row in rows for panel in row])
    names = curves["name"][curves["is_named"]].unique()
    beside = 0.3 + 0.6 * NAME_SIZE / 72 * max(map(len, names), default=0)
    height = max(HEIGHT, len(names) * NAME_GAP / 72)
    width = len(rows[0]) * (LEFT + WIDTH + beside)
    total = TOP + len(rows) * (height + BELOW)
    margins = {"left": LEFT / width, "right": 1 - beside / width, "wspace": (LEFT + beside) / WIDTH,
               "bottom": BELOW / total, "top": 1 - TOP / total, "hspace": BELOW / height}

    with rc_context(STYLE):
        figure = Figure(figsize=(width, total))
        figure.text(LEFT / width, 1 - 0.1 / total, title, va="top", fontsize=11)
        axes = figure.subplots(len(rows), len(rows[0]), squeeze=False, gridspec_kw=margins,
                               sharey="row" if shares_y else False)
        for row, panels in zip(axes, rows, strict=True):
            for axis, panel in zip(row, panels, strict=True):
                draw_panel(axis, panel, L)
                set_reach(axis, panels if shares_y else [panel])
                name_ends(axis, panel.curves, height)
    return figure


def draw_panel(axis: Any, panel: Panel, L: int) -> None:
    """The curves of a panel and what stands at its axes, without names."""
    places = panel.curves.drop_duplicates("x").sort_values("x")
    has_bars = panel.is_log and len(places) <= MOST_BARS
    curves = panel.curves.sort_values("x", kind="stable").groupby(["text", "name"], sort=False)
    for i, (_, rows) in enumerate(curves):
        if has_bars:
            shift = DODGE * ((i + 0.5) / len(curves) - 0.5)
            rows = rows.assign(x=rows["x"] * 2**shift)
        draw_curve(axis, rows, has_bars)

    axis.set_title(panel.title, loc="left")
    axis.set_xlabel(panel.form.x_label)
    axis.set_ylabel(panel.form.y_label)
    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if panel.form.is_difference:
        axis.axhline(0, color="black", linewidth=0.8)
    if panel.is_log:
        axis.set_xscale("log", base=2)
        if places["x"].min() <= L <= places["x"].max():
            axis.axvline(L, color="grey", linewidth=0.8, linestyle=":")
            if not has_bars:                            # below bars the tick says which place is L
                axis.annotate("L", (L, 1.01), xycoords=("data", "axes fraction"), color="grey", ha="center")
    axis.xaxis.set_major_formatter("{x:g}")
    if has_bars:
        axis.set_xticks(places["x"], [mark_L(heading, L) for heading in places["heading"]])
    axis.xaxis.set_minor_locator(NullLocator())


def draw_curve(axis: Any, curve: pd.DataFrame, has_bars: bool) -> None:
    """A line with a band, or with bars and dots.

    Mean and interval are a mark and a broad bar, median and range an open mark and a thin line, seeds dots.
    """
    key = curve.iloc[0]
    layer = 4 if key.is_named else 1
    style = {"color": key.colour, "zorder": layer}
    axis.plot(curve["x"], curve["shown"], linestyle=key.dash, **style)
    if not has_bars:
        axis.fill_between(curve["x"], curve["shown_low"], curve["shown_high"], alpha=0.15, linewidth=0,
                          **style)
        return
    for is_unstable, rows in curve.groupby("is_unstable"):
        face, bar, alpha = ("white", 0.8, 1.0) if is_unstable else (key.colour, 3.0, 0.35)
        axis.vlines(rows["x"], rows["shown_low"], rows["shown_high"], linewidth=bar, alpha=alpha, **style)
        axis.scatter(rows["x"], rows["shown"], s=16, c=face, edgecolors=key.colour, marker=key.marker,
                     zorder=layer + 1)
    several = curve[curve["seeds"].map(len) > 1]
    seeds = several[["x", "seeds"]].explode("seeds").astype(float)
    axis.scatter(seeds["x"], seeds["seeds"], s=2.5, color=key.colour, zorder=layer + 2)


def set_reach(axis: Any, panels: Sequence[Panel]) -> None:
    """The y axis: as far as the named curves of these panels reach. Failed ones stretch no axis."""
    curves = pd.concat([panel.curves for panel in panels])
    if curves["is_named"].any():
        curves = curves[curves["is_named"]]
    ends = curves.reindex(columns=["shown", "shown_low", "shown_high", "seed_low", "seed_high"])
    low, high = np.nanmin(ends), np.nanmax(ends)
    if panels[0].form.is_difference:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low) or 0.1
    axis.set_ylim(low - margin, high + margin)


def mark_L(heading: str, L: int) -> str:
    """The heading of a place, with the length in L below it where that is a whole number."""
    if not heading.isdigit() or int(heading) % L:
        return heading
    times = int(heading) // L
    return f"{heading}\n= L" if times == 1 else f"{heading}\n= {times} L"


def name_ends(axis: Any, curves: pd.DataFrame, height: float) -> None:
    """Write names beside the ends of their curves, and join them, in a panel of this height in inches."""
    named = curves[curves["is_named"]].sort_values("x", kind="stable")
    last = named.drop_duplicates(["text", "name"], keep="last")
    if last.empty:
        return
    to_axis = axis.transData + axis.transAxes.inverted()
    ends = to_axis.transform(last[["x", "shown"]].to_numpy(float))          # (names, 2)
    places = spread(ends[:, 1], NAME_GAP / 72 / height, 0.0, 1.0)
    for row, (x, y), place in zip(last.itertuples(), ends, places, strict=True):
        style = {"color": row.colour, "transform": axis.transAxes}
        axis.plot([x, 1.0, 1.03], [y, y, place], linewidth=0.6, linestyle=":", clip_on=False, **style)
        axis.text(1.04, place, row.name, va="center", fontsize=NAME_SIZE, **style)


# -----------------------------------------------------------------------------------------------------------
# Figures


def draw_measure(curves: pd.DataFrame, form: Form, title: str, L: int, is_narrow: bool = False) -> Figure:
    """One number at each place, two texts side by side, or for a phone one above the other.

    Of gains, what stays flat is zoomed, in panels apart from what breaks.
    """
    curves = style_curves(as_shown(curves, form))
    groups = {"": curves}
    if form == GAIN:
        lowest = curves.groupby("name", sort=False)["shown"].min()
        is_flat = curves["name"].map(lowest >= -FLAT)
        groups = {f"no loss above {FLAT:g} nats": curves[is_flat], "larger losses": curves[~is_flat]}
    texts = list(curves["text"].unique())
    rows = []
    for what, group in groups.items():
        if not group.empty:
            rows.append([Panel(": ".join(filter(None, (text, what))), group[group["text"] == text], form)
                         for text in texts])
    if len(texts) == 1:
        rows = [[panel for row in rows for panel in row]]
    if is_narrow:
        rows = [[panel] for row in rows for panel in row]
    return draw(rows, title, L, shares_y=len(texts) > 1)


def as_shown(curves: pd.DataFrame, form: Form) -> pd.DataFrame:
    """The curves with their scores as the numbers of a form."""
    shown = curves.copy()
    for name in ("shown", "shown_low", "shown_high", "seed_low", "seed_high"):
        shown[name] = curves[name].map(form.number)
    shown["seeds"] = [tuple(map(form.number, seeds)) for seeds in curves["seeds"]]
    return shown


def draw_training(training: pd.DataFrame, title: str, L: int) -> Figure:
    """Loss on the training batches against tokens: mean and range of the seeds.

    `training` has the columns name, encoding, extend, state, text, run, tokens and loss. The first third,
    where all losses fall, is left out.
    """
    lines = training.dropna(subset="loss").sort_values("tokens", kind="stable")
    by_run = lines.groupby("run")["loss"]
    lines["loss"] = by_run.transform(lambda loss: loss.rolling(SMOOTHED, 1, center=True).mean())
    late = lines[lines["tokens"] > lines["tokens"].max() / 3]
    places = late.groupby(["name", "encoding", "extend", "state", "text", "tokens"], sort=False)["loss"]
    curves = places.agg(shown="mean", shown_low="min", shown_high="max").reset_index()
    curves["x"] = curves["tokens"] / 1e6
    return draw([[Panel("", style_curves(curves), TRAINING, is_log=False)]], title, L)


def draw_evaluation(gains: pd.DataFrame, by_position: pd.DataFrame, title: str, L: int) -> Figure:
    """The picture of one run: gain over truncation beside loss by position; one of them may be empty."""
    curves = style_curves(pd.concat([gains, as_shown(by_position, BY_POSITION)]))
    row = []
    for what, protocol, form in (("Fixed targets", "fixed", GAIN),
                                 ("Loss by position", "position", BY_POSITION)):
        here = curves[curves["protocol"] == protocol]
        if not here.empty:
            row.append(Panel(what, here, form))
    return draw([row], title, L)


def caption(curves: pd.DataFrame) -> str:
    """Which curves are grey, and why; "" if none is."""
    grey = curves[curves["state"].isin([*GREYS])]
    texts = grey.groupby(["state", "name"], sort=False)["text"].agg(lambda text: " and ".join(text.unique()))
    parts = []
    for (state, where), rows in texts.reset_index().groupby(["state", "text"], sort=False):
        why = f"{state} on {where}" if where else state
        parts.append(f"{', '.join(rows['name'])} ({why})")
    return "; ".join(parts)


def save(figure: Figure, path: Path) -> str:
    """Write the figure as PATH.svg, .pdf and .png, and return the SVG."""
    file = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None})
        figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
        figure.savefig(path.with_suffix(".png"), dpi=150)
    svg = file.getvalue()
    path.with_suffix(".svg").write_text(svg, encoding="utf-8")
    return svg[svg.index("<svg"):]


def merge_positions(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the protocol position, with the first MERGED positions of each window as one place."""
    if table.empty:
        return table
    last = table["place"].str.partition("-")[2].astype(int)
    is_early = last < MERGED
    window = table.groupby(["run", "extend", "place"]).cumcount()       # the same windows in each place
    early = table[is_early].assign(place=f"0-{last[is_early].max()}")   # windows may be shorter than MERGED
    how = dict.fromkeys(table, "last") | dict.fromkeys(("tokens", "bytes", "nll", "seconds"), "sum")
    merged = early.groupby(["run", "extend", window[is_early]], sort=False).agg(how)
    return pd.concat([merged, table[~is_early]], ignore_index=True)
