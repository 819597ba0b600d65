"""What eval.py prints: the sums at each length, and the advice of --extend all. L = train.seq_len."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import pandas as pd

from base.errors import UserError
from evaluation.estimates import estimates
from evaluation.extension import METHODS, Rescaled
from evaluation.intervals import LEVEL, holm
from evaluation.protocols import PROTOCOLS
from evaluation.results import EXTENDED_SUFFIX, GAIN, NO_METHOD, records
from evaluation.scoring import Evaluation
from hf.export import rope_fields
from positions.scaling import SCALINGS


def needs_options(name: str) -> bool:
    """Whether a method has an option without a default, other than the factor."""
    fields = SCALINGS.get(name, METHODS[name]).model_fields
    return any(field.is_required() for key, field in fields.items() if key != "factor")


ALL = (*(name for name in METHODS if not needs_options(name)), "dual_chunk+yarn")      # of --extend all


def show(table: pd.DataFrame, e: Evaluation) -> Iterator[str]:
    """Lines with the sums at each length, and of each probe; "-" where nothing was measured."""
    for extend, rows in table.groupby("extend", sort=False):
        if extend != NO_METHOD:
            yield f"\n--extend {extend}"
        cells: dict[tuple[str, str], dict[str, str]] = {}       # (protocol, number) -> length -> text
        lines: dict[tuple[str, int, str], list[str]] = {}       # (protocol, length, number) -> texts
        for sums in records(rows):
            protocol = PROTOCOLS[sums["protocol"]]
            length = sums["length"]
            heading = f"{length} = L" if length == e.L else str(length)
            for name, text in protocol.cells(sums).items():
                if "place" in sums:
                    line = lines.setdefault((protocol.name, length, name), [])
                    place = f"{sums['place']:g}" if line else f"{protocol.place_name} {sums['place']:g}"
                    line.append(f"{text} at {place}")
                else:
                    cells.setdefault((protocol.name, name), {})[heading] = text
        if cells:
            yield pd.DataFrame(cells).to_string(na_rep="-")
        for (protocol_name, length, name), texts in lines.items():
            yield f"{protocol_name:11} {length:6} tokens: {name} {', '.join(texts)}"


# -----------------------------------------------------------------------------------------------------------
# --extend all


def choose_all(args: argparse.Namespace) -> None:
    """Into the arguments of eval.py what --extend all stands for, unless they say otherwise."""
    args.extend = [*(spec for spec in args.extend if spec != "all"), *ALL]
    args.skip_unfit = True
    args.protocol = args.protocol or ["fixed", "passkey"]
    args.windows = args.windows or 8
    args.multiples = (1, 2, 4)
    args.suffix = EXTENDED_SUFFIX
    args.show = advice
    if "fixed" not in args.protocol:
        raise UserError(f"--protocol {','.join(args.protocol)}: --extend all needs fixed among them; add it")


def advice(table: pd.DataFrame, e: Evaluation) -> Iterator[str]:
    """Lines of how each method does beyond L, the lowest loss first."""
    beyond = table[table.length > e.L]
    fixed = beyond[beyond.protocol == "fixed"]
    if fixed.empty:
        yield "--extend all: no length is beyond L; give a longer text, or --lengths beyond L"
        return
    keys = ["length", "extend"]
    found = beyond[beyond.protocol == "passkey"].groupby(keys)["correct"]
    gains = estimates(fixed.assign(label=""), GAIN.score).set_index(keys)
    rows = pd.DataFrame({
        "gain": gains["value"],
        "95 % interval": gains["low"].map("{:+.4f} ... ".format) + gains["high"].map("{:+.4f}".format),
        "corrected p": holm(gains["p"].fillna(1.0)),
        "passkey": found.sum().map("{:.0f}/".format) + found.size().map(str),
        "seconds": fixed.groupby(keys)["seconds"].sum().map("{:.1f}".format)})
    rows = rows.loc[gains.index].reset_index().rename(columns={"extend": "method"})
    rows = rows.sort_values(["length", "gain"], ascending=[True, False])
    yield rows.to_string(index=False, float_format="{:+.4f}".format, na_rep="-",
                         formatters={"corrected p": "{:.4f}".format})
    for length, methods in rows.groupby("length"):
        best = methods.iloc[0]
        beats = best["gain"] > 0 and best["corrected p"] < LEVEL
        claim = ", and beats" if beats else "; it is not shown that it beats"
        yield (f"at {length} tokens {best['method']} has the lowest loss{claim} truncation to the last "
               f"{e.L} tokens")
        (extend,) = (extend for extend in e.extends if extend.spec == best["method"])
        # what config.json would say: for one method that changes frequencies alone
        if beats and len(extend.methods) == 1 and isinstance(extend.methods[0], Rescaled):
            scaling = extend.methods[0].scaling(e.model, e.config, length)
            fields = rope_fields(e.config, scaling, length)
            yield f"  in config.json: {json.dumps(fields)}" if fields else "  config.json cannot say this"
