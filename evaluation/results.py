"""What eval.py writes: FILE.parquet, the table of all that was measured, and FILE.json, its sums.

The table has one row for each window of text, or example of a probe, under each method, protocol and length.
From the protocol to the report it is a pandas DataFrame with the columns of COLUMNS. Rows stay in the order
in which they were measured, so the windows of a place come in the same order in every run.

A second evaluation is merged into the file if both have the same targets, model and code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout

from base.errors import UserError
from base.files import finite, flush, read_json, write_whole
from config import MUST_AGREE

# Columns of the table and their types. Numbers of type float are NaN where a protocol has no such number.
# Losses are sums over the row's targets, in nats. Those of SUMMED may be added up over rows.
COLUMNS = {
    "run": "str",               # the run's folder, as it was named in the command
    "seed": "int",              # train.seed
    "encoding": "str",          # position.encoding
    "extend": "str",            # the method of --extend, "none" without one
    "protocol": "str",
    "length": "int",            # context in tokens
    "place": "str",             # position: bucket, such as 128-180, both included. Others: a number, as text,
                                # or "". repeat, copy: distance of the copies in tokens; retrieval: depth;
                                # algorithms: symbols. They stay in the order in which they were measured
    "document": "float",        # number of the window's document among those longer than --longest;
                                # of the example's facts
    "end": "float",             # the last target is token `end` of the document; for rolling, of it and what
                                # the tokenizer puts before it
    "tokens": "int",            # targets
    "bytes": "float",           # of the targets
    "nll": "float",             # loss of the targets
    "truncated_nll": "float",   # fixed: with the last L tokens of the context alone, without a method
    "control_nll": "float",     # repeat, copy: with another passage in place of the first copy
    "first_nll": "float",       # repeat, copy: of the same tokens in the first copy
    "correct": "float",         # probes: 1 if all of the answer is right, otherwise 0
    "seconds": "float",         # the row's share of the time of its forward passes. Those that fixed and
                                # position share count for the protocol that came first, 0 for the other
}
SUMMED = ("tokens", "bytes", "nll", "truncated_nll", "control_nll", "first_nll", "correct", "seconds")
SUM_KEYS = ["extend", "protocol", "length", "place"]    # together they name a sum of the JSON
EXTENDED_SUFFIX = "-extended"                           # after the text's name in the file of --extend all
NO_METHOD = "none"                                      # the model without --extend, in tables and messages


class Results(NamedTuple):
    """The content of both files."""

    head: dict[str, Any]                # every key of the JSON except records
    table: pd.DataFrame


# -----------------------------------------------------------------------------------------------------------
# The table


def make_table(**columns: Any) -> pd.DataFrame:
    """A table of these columns, arrays of equal length or one value for all; others are NaN, 0 or empty."""
    assert columns.keys() <= COLUMNS.keys()
    defaults = {"str": "", "int": 0, "float": math.nan}
    values = {name: columns.get(name, defaults[kind]) for name, kind in COLUMNS.items()}
    index = None if columns else range(0)           # without columns there are no rows
    return pd.DataFrame(values, index=index).astype(COLUMNS)


def join(*tables: pd.DataFrame) -> pd.DataFrame:
    """Tables one below the other."""
    filled = [table for table in tables if len(table)]
    return pd.concat(filled, ignore_index=True) if filled else make_table()


def add(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Both in one: methods and protocols in the order in which they came, each with its lengths in order."""
    table = join(table, rows)
    order = table[["extend", "protocol", "length"]].copy()
    for name in ("extend", "protocol"):
        order[name] = pd.factorize(order[name])[0]
    return table.loc[order.sort_values([*order], kind="stable").index].reset_index(drop=True)


def perplexity(loss: float) -> float:
    """exp(loss) for a loss in nats per token; infinity where a float cannot hold it, above 709 nats."""
    return math.exp(loss) if loss < 709.0 else math.inf


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The sums of each method, protocol, length and place, as the JSON has them (docs/longer-contexts.md)."""
    columns = {name: table[name].to_numpy() for name in ("document", *SUMMED)}
    sums = table.groupby(SUM_KEYS, sort=False).indices
    return [record(key, {name: column[rows] for name, column in columns.items()})
            for key, rows in sums.items()]


def record(key: tuple[str, str, int, str], columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """The sums of one place: perplexity is exp(nll / tokens), bits per byte are nll / ln 2 / bytes."""
    extend, protocol, length, place = key
    # numpy's sum of an array, as everywhere: pandas adds in another order
    sums = {name: float(columns[name].sum()) for name in SUMMED}
    nll, tokens = sums["nll"], int(sums["tokens"])
    has_text = not math.isnan(sums["bytes"])
    document = columns["document"]
    n_documents = len(np.unique(document[~np.isnan(document)]))         # 0 where sums alone are known
    result: dict[str, Any] = {
        "extend": None if extend == NO_METHOD else extend, "protocol": protocol, "length": int(length),
        "nll_sum": nll, "tokens": tokens, "bytes": int(sums["bytes"]) if has_text else None,
        "documents": n_documents if has_text else None,
        "ppl": finite(perplexity(nll / tokens)),
        "bpb": nll / math.log(2) / sums["bytes"] if has_text else None,
        "seconds": round(sums["seconds"], 3)}
    if protocol == "position":
        first, last = place.split("-")
        result["bucket"] = [int(first), int(last) + 1]
    elif place:
        result["place"] = float(place)
    for name, difference in (("truncated_nll", "gain"), ("first_nll", "gain"), ("control_nll", "use")):
        if not math.isnan(sums[name]):
            result[f"{name}_sum"] = sums[name]
            result[difference] = (sums[name] - nll) / tokens
    if not math.isnan(sums["correct"]):
        result["correct"] = int(sums["correct"])
        result["examples"] = len(columns["correct"])
    return result


# -----------------------------------------------------------------------------------------------------------
# How reports show a protocol: a number of each place, computed from sums over windows or examples


class Score(NamedTuple):
    """A number of which more is better: (plus - minus) / per. They are columns of the table, or "" for 0.

    `examples`, 1 in each row, is a column of reports alone.
    """

    plus: str
    minus: str
    per: str = "tokens"

    def columns(self) -> list[str]:
        """The columns of the table that it needs."""
        return [name for name in self if name in COLUMNS]

    def total(self, columns: Mapping[str, Any]) -> Any:
        """The numerator, from the columns or from their sums."""
        plus = columns[self.plus] if self.plus else 0
        minus = columns[self.minus] if self.minus else 0
        return plus - minus


class Form(NamedTuple):
    """A number by length, position or distance, with its axes and its format."""

    x_label: str
    y_label: str
    number_format: str
    score: Score
    number: Callable[[float], float] = float    # the number that is shown, from the score
    is_difference: bool = False                 # figures have a line at 0


class Measure(NamedTuple):
    """A table of a report: the number, and what is said above the table."""

    key: str                                    # names its picture
    title: str
    note: str
    form: Form


CONTEXT = "context (tokens)"
LOSS = Score("", "nll")
FOUND = Score("correct", "", "examples")
PERPLEXITY = Form(CONTEXT, "perplexity per token", "#.4g", LOSS, lambda score: perplexity(-score))
BY_POSITION = Form("position (tokens of context)", "loss (nats/token)", "z.3f", LOSS, lambda score: -score)
REPETITION = Form("distance (tokens)", "first copy's loss - second's (nats/token)", "z.3f",
                  Score("first_nll", "nll"), is_difference=True)
USE = REPETITION._replace(y_label="use of the first copy (nats/token)", score=Score("control_nll", "nll"))
ANSWERS = Form(CONTEXT, "share correct", ".0%", FOUND)
GAIN = Form(CONTEXT, "gain over truncation (nats/token)", "+z.3f", Score("truncated_nll", "nll"),
            is_difference=True)
TRAINING = Form("tokens (millions)", "training loss (nats/token)", "z.3f", LOSS)


# -----------------------------------------------------------------------------------------------------------
# The files


def read(path: Path) -> Results:
    """FILE.json and FILE.parquet. Raises UserError where one is missing or damaged."""
    try:
        head = read_json(path)
        del head["records"]
        return Results(head, read_table(path.with_suffix(".parquet")))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} or its .parquet: damaged, or not by this eval.py ({error}); evaluate again "
                        "with --replace") from error


def read_table(path: Path) -> pd.DataFrame:
    """A table; numbers that an older one lacks are NaN. Raises OSError, ValueError or KeyError."""
    table = pd.read_parquet(path)
    known = [name for name, kind in COLUMNS.items() if kind != "float" or name in table]
    return make_table(**table[known])


def write(path: Path, results: Results) -> None:
    """Write both files, each whole or not at all. Raises OSError.

    The table comes first: a kill in between leaves one that holds all that the old JSON sums up, but for
    --replace, which must then be given again.
    """
    write_table(path.with_suffix(".parquet"), results.table)
    write_whole(path, json.dumps({**results.head, "records": records(results.table)}, indent=1) + "\n")


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table atomically, as Parquet."""
    temporary = path.with_name(f".{path.name}.tmp")
    table.to_parquet(temporary, compression="zstd", index=False)
    flush(temporary)
    temporary.replace(path)


def read_mergeable(path: Path, head: dict[str, Any], is_replaced: bool) -> Results:
    """The evaluation in FILE, if one with this head can be merged into it; an empty one if there is none.

    Raises UserError if the targets, the model or the code differ, unless the old evaluation `is_replaced`.
    """
    if is_replaced or not path.exists():
        return Results({"settings": {}}, make_table())
    earlier = read(path)
    remedy = "give --json FILE to keep both, or --replace to discard the old one"
    for key in MUST_AGREE["merge"]:
        if earlier.head.get(key) != head[key]:
            what = "by other code" if key == "commit" else f"with another {key}"
            raise UserError(f"{path}: holds an evaluation {what}; {remedy}")
    for protocol, settings in head["settings"].items():
        before = earlier.head["settings"].get(protocol, settings)
        others = [f"{name} {before.get(name)}" for name in {**before, **settings}
                  if before.get(name) != settings.get(name)]
        if others:
            same = "give the same"
            if before.get("length") != settings.get("length"):      # position is of the longest length alone
                same = f"give {before['length']} among --lengths too, or leave {protocol} out of --protocol"
            raise UserError(f"{path}: holds {protocol} on other targets, by {', '.join(others)}; {same}, or "
                            f"{remedy.removeprefix('give ')}")
    return earlier


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Find out before hours of computing that FILE can be written; no other eval.py writes it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=0):
            yield
    except Timeout as error:
        raise UserError(f"{path}: another eval.py writes it; wait for it, or give --json FILE") from error
