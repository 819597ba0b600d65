"""What eval.py prints: the sums at each length, and the advice of --extend all. L = train.seq_len."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from base.errors import UserError
from evaluation.estimates import estimate, make_sample
from evaluation.extension import EXTENSIONS, Extend, Rescaled
from evaluation.intervals import LEVEL, holm
from evaluation.protocols import PROTOCOLS
from evaluation.results import EXTENDED, GAIN, NO_METHOD, records
from evaluation.scoring import Evaluation
from hf.export import rope_fields

# of --extend all: what needs no options
ALL = (*(name for name in EXTENSIONS if name not in ("base", "longrope")), "dual_chunk+yarn")


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
    args.suffix = EXTENDED
    args.show = advice
    if "fixed" not in args.protocol:
        raise UserError(f"--protocol {','.join(args.protocol)}: --extend all needs fixed among them; add it")


def advice(table: pd.DataFrame, e: Evaluation) -> Iterator[str]:
    """Lines of how each method does beyond L, the lowest loss first."""
    beyond = [length for length in e.possible if length > e.L]
    rows = [compare_with_truncation(table, e, extend, length) for length in beyond for extend in e.extends]
    if not rows:
        yield "--extend all: no length is beyond L; give a longer text, or --lengths beyond L"
        return
    frame = pd.DataFrame(rows).sort_values(["length", "loss - truncated"])
    frame["p"] = frame.groupby("length").p.transform(lambda p: holm(p.tolist()))
    yield frame.drop(columns=["p", "config.json"]).to_string(index=False, float_format="{:+.4f}".format)
    for length, best in frame.groupby("length").first().iterrows():
        beats = best["loss - truncated"] < 0 and best["p"] < LEVEL      # corrected for the number of methods
        claim = ", and beats" if beats else "; it is not shown that it beats"
        yield (f"at {length} tokens {best['method']} has the lowest loss{claim} truncation to the last "
               f"{e.L} tokens")
        if beats and best["config.json"] != "null":
            yield f"  in config.json: {best['config.json']}"


def compare_with_truncation(table: pd.DataFrame, e: Evaluation, extend: Extend,
                            length: int) -> dict[str, Any]:
    """A row of the advice: one method at one length."""
    here = table[(table.extend == extend.spec) & (table.length == length)]
    fixed = here[here.protocol == "fixed"]
    gain = estimate(make_sample(fixed, GAIN.score))
    low, high = -gain["high"], -gain["low"]     # NaN if there are too few windows
    passkeys = here[here.protocol == "passkey"]
    # what config.json would say: for one method that changes frequencies alone
    fields = None
    if len(extend.methods) == 1 and isinstance(extend.methods[0], Rescaled):
        scaling = extend.methods[0].scaling(e.model, e.config, length)
        fields = rope_fields(e.config, scaling, length)
    return {
        "length": length, "method": extend.spec, "loss - truncated": -gain["value"],
        "95 % interval": "" if math.isnan(low) else f"{low:+.4f} ... {high:+.4f}",
        "passkey": f"{passkeys.correct.sum():.0f}/{len(passkeys)}", "seconds": f"{fixed.seconds.sum():.1f}",
        "p": 1.0 if math.isnan(gain["p"]) else gain["p"], "config.json": json.dumps(fields)}
