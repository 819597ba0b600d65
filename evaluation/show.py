"""The tables that eval.py prints. L = train.seq_len."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence

import pandas as pd

from evaluation.extension import Rescaled
from evaluation.intervals import LEVEL, Estimate, holm, two_way, units_of
from evaluation.protocols import Evaluation, spec_of
from evaluation.results import WINDOWED, Record, Results, perplexity
from hf.export import rope_fields


def table(records: Sequence[Record], lengths: Sequence[int], L: int) -> Iterator[str]:
    """Lines with the results at each length, and of each probe; "-" where nothing was measured."""
    for extend in dict.fromkeys(r["extend"] for r in records):
        same = [r for r in records if r["extend"] == extend]
        places = {(r["protocol"], r["length"]): r for r in same}
        if extend:
            yield f"\n--extend {extend}"
        cells: dict[tuple[str, str], dict[str, str]] = {}               # (protocol, number) -> length -> text
        for protocol, length in itertools.product(WINDOWED, lengths):
            if r := places.get((protocol, length)):
                ppl = math.inf if r["ppl"] is None else r["ppl"]
                row = {"ppl": f"{ppl:.4g}"}
                if r["bpb"]:
                    row["bits/byte"] = f"{r['bpb']:.4g}"
                if protocol == "fixed":
                    truncated = perplexity(r["truncated_nll_sum"] / r["tokens"])
                    row["truncated ppl"] = f"{truncated:.4g}"
                    row["gain (nats/token)"] = f"{r['gain']:+z.4f}"
                heading = f"{length} = L" if length == L else str(length)
                for name, text in row.items():
                    cells.setdefault((protocol, name), {})[heading] = text
        if cells:
            yield pd.DataFrame(cells).to_string(na_rep="-")
        for (protocol, length), r in places.items():
            if "distance" in r:
                use = f", over the control {r['use']:+z.3f}" if "use" in r else ""     # not in older records
                yield (f"{protocol:11} {r['distance']:6} tokens apart: gain on the second copy "
                       f"{r['gain']:+z.3f} nats/token{use}")
            elif "symbols" in r:
                yield f"{protocol:11} {r['symbols']:6} symbols: correct {r['correct']}/{r['trials']}"
            elif "depth" in r:
                depths = ", ".join(f"{x['correct']}/{x['trials']} at {x['depth']:g}" for x in same
                                   if (x["protocol"], x["length"]) == (protocol, length))
                yield f"{protocol:11} {length:6} tokens: correct, by depth: {depths}"


def advice(results: Results, e: Evaluation) -> Iterator[str]:
    """The lines of --extend all: how each method does beyond L, the lowest loss first."""
    rows = []
    beyond = [length for length in e.possible if length > e.L]
    for length, extend in itertools.product(beyond, e.extends):
        here = [r for r in results.records if (r["extend"], r["length"]) == (spec_of(extend), length)]
        fixed = next(r for r in here if r["protocol"] == "fixed")
        nll, truncated, tokens, document = (results.windows[f"{extend.spec}/fixed/{length}/{name}"]
                                            for name in ("nll", "truncated_nll", "tokens", "document"))
        worse = Estimate(-fixed["gain"])        # without an interval
        units = units_of(document)
        if units is not None:
            worse = two_way(units.sums((nll - truncated)[None]), units.sums(tokens.astype(float)))
        passkeys = [r for r in here if r["protocol"] == "passkey"]
        # what config.json would say: for one method that changes frequencies alone
        fields = None
        if len(extend.methods) == 1 and isinstance(extend.methods[0], Rescaled):
            scaling = extend.methods[0].scaling(e.model, e.config, length)
            fields = rope_fields(e.config, scaling, length)
        rows.append({
            "length": length, "method": extend.spec, "loss - truncated": worse.value,
            "95 % interval": "" if worse.low is None else f"{worse.low:+.4f} ... {worse.high:+.4f}",
            "passkey": "/".join(str(sum(r[key] for r in passkeys)) for key in ("correct", "trials")),
            "seconds": f"{fixed['seconds']:.1f}", "p": 1.0 if worse.p is None else worse.p,
            "config.json": json.dumps(fields)})
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
