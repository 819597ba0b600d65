"""Compare runs on identical targets: tables of all curves, with intervals, and of differences.

A curve is the runs of one label, which differ only in their seed, under one method of --extend. compare.py
describes what the intervals cover, intervals.py how they are computed.
L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from base.errors import UserError
from config import MAY_DIFFER, differing_keys
from evaluation.estimates import claims, estimates
from evaluation.figures import merge_positions
from evaluation.protocols import PROTOCOLS, Protocol
from evaluation.report import ONE_RATE, Section
from evaluation.results import BY_POSITION, GAIN, NO_METHOD, PERPLEXITY, join
from evaluation.runs import Run, short_commit, without_seed

# -----------------------------------------------------------------------------------------------------------
# Curves


def label_runs(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    """The runs with these names as labels, if there are any.

    Raises UserError where runs of one label are not samples of one thing.
    """
    if names and len(names) != len(runs):
        raise UserError(f"--label: given {len(names)} times for {len(runs)} runs; give one for each, in the "
                        "same order")
    labelled = [*runs]
    if names:
        labelled = [run._replace(label=name) for run, name in zip(runs, names, strict=True)]
    for label in dict.fromkeys(run.label for run in labelled):
        check_samples([run for run in labelled if run.label == label])
    return labelled


def check_samples(runs: Sequence[Run]) -> None:
    """Raise UserError unless runs of one label differ only in their seed, and were evaluated alike."""
    first = runs[0]
    for run in runs:
        pair = f"runs {first.name} and {run.name}, both {first.label!r}"
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
    n_seeds = len({run.seed for run in runs})
    n_bases = len({run.config["train.init_from"] for run in runs})
    if n_seeds < len(runs) or n_bases not in (1, len(runs)):
        names = ", ".join(run.name for run in runs)
        raise UserError(f"runs {names}, all {first.label!r}: are not independent samples: two have the same "
                        "seed, or some but not all began from the same run; leave one out")


def places_of(run: Run) -> set[Any]:
    """What was measured of a run."""
    return {*run.table.groupby(["extend", "protocol", "length", "place"]).groups}


def table_of(runs: Sequence[Run]) -> pd.DataFrame:
    """The rows of all runs, with the label of their curves."""
    return join(*(run.table.assign(label=run.label) for run in runs))


def place_curves(rows: pd.DataFrame, states: pd.Series, encodings: pd.Series) -> pd.DataFrame:
    """Estimates with what figures.py needs besides; states of gates and encodings are given by label."""
    places = [PROTOCOLS[protocol].column(length, place) for protocol, length, place in
              zip(rows["protocol"], rows["length"], rows["place"], strict=True)]
    method = (" + " + rows["extend"]).where(rows["extend"] != NO_METHOD, "")
    return rows.assign(name=rows["label"] + method, text="", state=rows["label"].map(states),
                       encoding=rows["label"].map(encodings), x=[float(x) for x, _ in places],
                       heading=[heading for _, heading in places])


# -----------------------------------------------------------------------------------------------------------
# Tables


def make_sections(runs: Sequence[Run], baseline: str, gate: pd.DataFrame) -> list[Section]:
    """The tables of each protocol, and of its leads over the curves of the label `baseline`."""
    table = table_of(runs)
    sections = []
    for protocol in PROTOCOLS.values():
        for measure in protocol.measures():
            form = measure.form
            rows = table[table["protocol"] == protocol.name].dropna(subset=form.score.columns())
            if rows.empty:                              # older results lack a column
                continue
            if form is BY_POSITION:
                rows = merge_positions(rows)
            if type(protocol).column is Protocol.column:
                rows = rows.assign(place="")            # places such as depths have one column
            is_drawn = form is not PERPLEXITY           # its intervals hide what a difference shows
            values = estimates(rows, form.score)
            sections.append(Section(measure.key, measure.title, measure.note, form, values, is_drawn))
            if form in (GAIN, BY_POSITION):             # over truncation already; differences are in fixed
                continue
            leads = estimates(rows, form.score, baseline)
            if leads.empty:
                continue
            over = form._replace(number_format=f"+{form.number_format}")
            if form is PERPLEXITY:                      # its lead is one of losses
                over = GAIN
            title = f"Lead over {baseline}, {measure.key}"
            sections.append(Section(f"{measure.key}-lead", title, "", over, leads))

    if not sections:
        raise UserError("these runs have only the trigram; run eval.py with --protocol fixed,trigram,repeat")

    # what may be bold is one family of tests: leads, and gains beyond L (at L a gain is near 0, and with less
    # context the truncated model sees more)
    curves = pd.concat({section.key: section.curves for section in sections})
    curves["key"] = curves.index.get_level_values(0)
    is_gain = (curves["key"] == "gain") & (curves["length"] > runs[0].head["seq_len"])
    better = claims(curves[is_gain | (curves["baseline"] != "")], gate)["is_better"]
    curves["is_better"] = better.reindex(curves.index, fill_value=False)
    curves = place_curves(curves, gate["state"], table.groupby("label")["encoding"].first())
    sections.sort(key=lambda section: section.key != "gain")                            # the main one first
    return [section._replace(curves=curves.loc[section.key]) for section in sections]


def remarks(runs: Sequence[Run]) -> list[str]:
    """What differs among runs, or should."""
    lines = []
    rates = {run.config["train.lr"] for run in runs}
    if len(rates) == 1 and len({run.config["position.encoding"] for run in runs}) > 1:
        lines.append(ONE_RATE)
    for key, what in (("commit", "evaluated by different code"), ("dtype", "evaluated in different dtypes"),
                      ("train_dtype", "trained in different dtypes")):
        first: dict[str, str] = {}          # value -> a run that has it
        for run in runs:
            first.setdefault(short_commit(run.head.get(key) or "unknown"), run.name)
        if len(first) > 1:
            values = ", ".join(f"{value} (such as {name})" for value, name in first.items())
            lines.append(f"Warning: {what}: {values}")
    trained = [run for run in runs if run.trained_on is not None]
    for label in dict.fromkeys(run.label for run in trained):
        run = next(run for run in trained if run.label == label)
        changes = differing_keys(trained[0].config, run.config,
                                 [*MAY_DIFFER["seeds"], *MAY_DIFFER["tuned"], "train.lr", "model.vocab_size"])
        if changes:
            lines.append(f"Warning: {trained[0].label} and {label} differ besides [position]: "
                         + ", ".join(changes))
    return lines + [f"Warning: run {run.title}." for run in runs if run.title != run.name]
