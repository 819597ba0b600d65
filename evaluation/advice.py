"""Which method to use for a longer context: the table of `eval.py MODEL --data BOOK --advise`.

L = train.seq_len. Loss in nats per token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from config import Config
from evaluation.extension import Extend, Rescaled
from evaluation.intervals import Estimate, two_way, units_of
from evaluation.protocols import spec_of
from evaluation.results import Results
from hf.export import rope_fields
from model import GPT
from positions.scaling import Scaling

METHODS = ("yarn", "ntk", "dynamic_ntk", "pi", "llama3", "rerope", "self_extend", "dual_chunk",
           "dual_chunk+yarn", "sinks", "window")
PROTOCOLS = ("fixed", "passkey")
WINDOWS = 8                 # the least that give an interval
MULTIPLES = (1, 2, 4)       # of L


class Row(NamedTuple):
    """A method at a length."""

    length: int
    name: str
    worse: Estimate         # its loss minus that of truncation to L, on the same targets
    needles: str            # found, of how many
    seconds: float
    scaling: Scaling | None             # what the method is to RoPE; None if it is something else
    fields: dict[str, Any] | None       # of config.json; None if it has no such form


def rows(found: Results, extends: Sequence[Extend], lengths: Sequence[int], model: GPT,
         config: Config) -> list[Row]:
    """A row for each method at each length beyond L, the lowest loss first."""
    made = []
    for length in (length for length in lengths if length > config.train.seq_len):
        for extend in extends:
            here = [r for r in found.records if (r["extend"], r["length"]) == (spec_of(extend), length)]
            fixed = next(r for r in here if r["protocol"] == "fixed")
            column = {name: found.windows[f"{extend.spec}/fixed/{length}/{name}"]
                      for name in ("nll", "truncated_nll", "tokens", "document")}
            units = units_of(column["document"])
            difference = column["nll"] - column["truncated_nll"]
            worse = Estimate(-fixed["gain"]) if units is None else \
                two_way(units.sums(difference[None]), units.sums(column["tokens"].astype(float)))
            asked = [r for r in here if r["protocol"] == "passkey"]
            correct, trials = (sum(r[key] for r in asked) for key in ("correct", "trials"))
            needles = f"{correct}/{trials}" if asked else "-"
            scaling = scaling_of(extend, model, config, length)
            made.append(Row(length, extend.spec, worse, needles, fixed["seconds"], scaling,
                            rope_fields(config, scaling, length) if scaling else None))
    return sorted(made, key=lambda row: (row.length, row.worse.value))


def scaling_of(extend: Extend, model: GPT, config: Config, length: int) -> Scaling | None:
    """The scaling of RoPE that a method is at this length; None if it is something else."""
    if len(extend.methods) != 1 or not isinstance(method := extend.methods[0], Rescaled):
        return None
    return method.scaling(model, config, length)


def table(made: Sequence[Row], L: int) -> Iterator[str]:
    """The lines to print: the table, and what follows from it."""
    yield (f"\n{'length':>7}  {'method':16} {'loss - truncated, 95 % interval':33} {'needles':>7} "
           f"{'seconds':>7}  in config.json")
    for row in made:
        low, high = row.worse.low, row.worse.high
        between = "" if low is None or high is None else f" ({low:+.4f} ... {high:+.4f})"
        no_form = "as it is" if row.name == "plain" else "no such field"
        written = json.dumps(row.fields) if row.fields else no_form
        yield (f"{row.length:7}  {row.name:16} {f'{row.worse.value:+.4f}{between}':33} {row.needles:>7} "
               f"{row.seconds:7.1f}  {written}")
    for length in dict.fromkeys(row.length for row in made):
        best = next(row for row in made if row.length == length)
        better = best.worse.high is not None and best.worse.high < 0
        yield (f"at {length} tokens {best.name} has the lowest loss"
               + (f", and beats truncation to the last {L} tokens" if better else
                  f"; that it beats truncation to the last {L} tokens is not shown"))


def to_write(made: Sequence[Row]) -> Row | None:
    """The row of the lowest loss at the longest length that config.json can express."""
    fitting = [row for row in made if row.length == made[-1].length and row.fields]
    return fitting[0] if fitting else None
