"""Compare runs on identical targets: group seeds into curves, and compute tables with intervals.

compare.py describes what the intervals cover, intervals.py how they are computed.
L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from base.errors import UserError
from config import MAY_DIFFER, differing_keys
from evaluation.estimates import claims, estimates
from evaluation.figures import merge_positions
from evaluation.protocols import PROTOCOLS
from evaluation.report import Section
from evaluation.results import BY_POSITION, COLUMNS, GAIN, NO_METHOD, PERPLEXITY, join
from evaluation.runs import Run, without_seed

ROUNDING = 1e-4         # nats per token; below it two forward passes agree


class Curve(NamedTuple):
    """A row of each table: runs that differ only in their seed, under one method of --extend."""

    label: str
    extend: str
    runs: list[Run]


def make_curves(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Curve]:
    """A curve for each name and method of --extend: runs of one name differ only in their seed.

    The name of a run is that of --label, else its own. Raises UserError where runs of one name are not
    samples of one thing.
    """
    if names and len(names) != len(runs):
        raise UserError(f"--label: given {len(names)} times for {len(runs)} runs; give one for each, in the "
                        "same order")
    groups: dict[str, list[Run]] = {}
    for run, name in zip(runs, names or [run.label for run in runs], strict=True):
        groups.setdefault(name, []).append(run._replace(label=name))
    curves = []
    for name, group in groups.items():
        check_samples(name, group)
        for extend in group[0].table.extend.unique():
            label = name if extend == NO_METHOD else f"{name} + {extend}"
            curves.append(Curve(label, extend, group))
    return curves


def check_samples(name: str, group: Sequence[Run]) -> None:
    """Raise UserError unless runs of one name differ only in their seed, and were evaluated alike."""
    first = group[0]
    for run in group:
        pair = f"runs {first.name} and {run.name}, both {name!r}"
        changes = differing_keys(first.config, run.config, MAY_DIFFER["seeds"])
        bases = [without_seed(x.config["train.init_from"]) for x in (first, run)]
        if bases[0] != bases[1]:
            changes.append("train.init_from")
        if changes:
            raise UserError(f"{pair}: differ in {', '.join(changes)}; runs of one name must differ only in "
                            "their seed, so give each run a --label")
        if places_of(run) != places_of(first):
            raise UserError(f"{pair}: evaluated differently; give eval.py the same --extend, --protocol and "
                            "--lengths")
    n_seeds = len({run.seed for run in group})
    n_bases = len({run.config["train.init_from"] for run in group})
    if n_seeds < len(group) or n_bases not in (1, len(group)):
        raise UserError(f"runs {', '.join(run.name for run in group)}, all {name!r}: have the same seed or "
                        "began from the same run: not independent samples; leave one out")


def places_of(run: Run) -> set[tuple[str, str, int, str]]:
    """What was measured of a run."""
    places = run.table[["extend", "protocol", "length", "place"]].drop_duplicates()
    return {*places.itertuples(index=False, name=None)}


def table_of(curves: Sequence[Curve]) -> pd.DataFrame:
    """The rows of all runs, with the label of their curves."""
    runs = {run.name: run for curve in curves for run in curve.runs}
    return join(*(run.table.assign(label=run.label) for run in runs.values()))


def place_curves(rows: pd.DataFrame, states: pd.Series, encodings: pd.Series) -> pd.DataFrame:
    """Estimates with what figures.py needs besides; states of gates and encodings are given by label."""
    has_method = rows["extend"] != NO_METHOD
    places = [PROTOCOLS[protocol].column(length, place) for protocol, length, place in
              zip(rows["protocol"], rows["length"], rows["place"], strict=True)]
    return rows.assign(
        name=rows["label"] + (" + " + rows["extend"]).where(has_method, ""), text="",
        state=rows["label"].map(states), encoding=rows["label"].map(encodings),
        x=[float(x) for x, _ in places], heading=[heading for _, heading in places])


# -----------------------------------------------------------------------------------------------------------
# Tables


def make_sections(curves: Sequence[Curve], baseline: str, gate: pd.DataFrame) -> list[Section]:
    """The tables of each protocol, and of its gains over the curves of the label `baseline`."""
    L = curves[0].runs[0].head["seq_len"]
    table = table_of(curves)
    sections = []
    marked = {}                                 # key -> estimates that may be bold: one family of tests
    for measure in (measure for protocol in PROTOCOLS.values() for measure in protocol.measures()):
        key, form = measure.key, measure.form
        needed = [name for name in form.score if name in COLUMNS]
        rows = table[table["protocol"] == measure.protocol].dropna(subset=needed)
        if rows.empty:                                  # older results lack a column
            continue
        if form is BY_POSITION:
            rows = merge_positions(rows)
        # places that have one column, such as depths, become one
        places = {}
        for length, place in rows[["length", "place"]].drop_duplicates().itertuples(index=False):
            _, heading = PROTOCOLS[measure.protocol].column(length, place)
            places[place] = place if heading == place else ""
        rows = rows.assign(place=rows["place"].map(places))
        values = estimates(rows, form.score)
        is_drawn = form is not PERPLEXITY               # its intervals hide what a gain shows
        sections.append(Section(key, measure.title, measure.note, form, values, is_drawn))
        if form is GAIN:                    # it is over truncation already; near 0 at L, which is no finding
            others = values[values["length"] != L]
            if len(others):
                marked[key] = others
            continue
        gains = estimates(rows, form.score, baseline)
        if len(gains):
            over = form._replace(y_label=f"difference ({form.y_label})", form=f"+{form.form}")
            if form.figure is not float:                # of what is shown, it is one of losses
                over = GAIN._replace(x_label=form.x_label)
            marked[f"{key}-gain"] = gains
            sections.append(Section(f"{key}-gain", f"Gain over {baseline}, {key}", "", over, gains))

    claimed = pd.DataFrame()
    if marked:
        pretrained = [curve.label for curve in curves if curve.runs[0].trained_on is None]     # no samples
        claimed = claims(pd.concat(marked), gate, whole=pretrained)
    encodings = table.groupby("label")["encoding"].first()
    placed = []
    for section in sorted(sections, key=lambda section: section.form is not GAIN):      # the main one first
        rows = section.curves.assign(is_better=False)
        if section.key in marked:
            better = claimed.loc[section.key, "is_better"]
            rows.loc[better.index, "is_better"] = better
        placed.append(section._replace(curves=place_curves(rows, gate["state"], encodings)))
    return placed


# -----------------------------------------------------------------------------------------------------------
# What may be concluded


def remarks(curves: Sequence[Curve]) -> list[str]:
    """What differs among runs."""
    lines = []
    runs = {run.name: run for curve in curves for run in curve.runs}
    for key, what in (("commit", "evaluated by different code"), ("dtype", "evaluated in different dtypes"),
                      ("train_dtype", "trained in different dtypes")):
        names: dict[str, list[str]] = {}                # value -> the runs that have it
        for name, run in runs.items():
            value = str(run.head.get(key) or "unknown")[:12]
            names.setdefault(value, []).append(name)
        if len(names) > 1:
            listed = "; ".join(f"{value} ({', '.join(same)})" for value, same in names.items())
            lines.append(f"Warning: {what}: {listed}")
    for curve in curves:
        if is_blind(curve):
            lines.append(f"{curve.label} predicts the same with any context beyond L: it does not see it.")
    lines += [f"Warning: run {run.title}." for run in runs.values() if run.title != run.name]
    return lines


def is_blind(curve: Curve) -> bool:
    """Whether contexts beyond L change none of the losses, but for rounding: truncated is another forward."""
    fixed = [run.table[(run.table.extend == curve.extend) & (run.table.protocol == "fixed")]
             for run in curve.runs]
    beyond = join(*(rows[rows.length > curve.runs[0].head["seq_len"]] for rows in fixed))
    change = (beyond.nll - beyond.truncated_nll).abs()
    return len(beyond) > 0 and bool((change <= ROUNDING * beyond.tokens).all())
