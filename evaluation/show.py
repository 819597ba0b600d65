"""The table that eval.py prints of its records. L = train.seq_len."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from evaluation.results import perplexity


def table(records: Sequence[dict[str, Any]], lengths: Sequence[int], L: int) -> Iterator[str]:
    """Lines with the results at each length; "-" where the encoding is not defined."""
    measured = {r["protocol"] for r in records}
    protocols = [p for p in ("nonoverlap", "rolling", "sliding", "fixed") if p in measured]
    for extend in dict.fromkeys(r["extend"] for r in records):
        found = [r for r in records if r["extend"] == extend]
        cells = {(r["protocol"], r["length"]): r for r in found if r["protocol"] in protocols}
        if extend:
            yield f"\n--extend {extend}"
        if protocols:
            yield "           |" + "|".join(f"{p:^24}" for p in protocols).rstrip()
            yield " length  xL|" + "|".join(f"{'ppl':>11}{'bits/byte':>11}  " for _ in protocols) + (
                "truncated ppl   gain (nats/token)" if "fixed" in protocols else "")
        for length in lengths if protocols else ():
            row = {p: cells.get((p, length)) for p in protocols}
            line = f"{length:7} {length / L:4g}|" + "|".join(f"{_cell(r, 'ppl')}{_cell(r, 'bpb')}  "
                                                            for r in row.values())
            fixed = row.get("fixed")
            if fixed:
                truncated = perplexity(fixed["truncated_nll_sum"] / fixed["tokens"])
                line += f"{truncated:13.4g}{fixed['gain']:+20.4f}"
            yield line + ("   <- training length" if length == L else "")
        yield from probe_table(found)


def _cell(line: dict[str, Any] | None, key: str) -> str:
    if line is None:
        return f"{'-':>11}"
    return f"{math.inf if line[key] is None else line[key]:11.4g}"


def probe_table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line for each distance of repeat and copy, and for each length of a task."""
    for protocol in ("repeat", "copy"):
        for r in (r for r in records if r["protocol"] == protocol):
            first = r["first_nll_sum"] / r["tokens"]
            yield (f"{protocol:7} {r['distance']:6} tokens apart: first copy {first:6.3f} nats/token, second "
                   f"{first - r['gain']:6.3f}, gain {r['gain']:+.3f}")
    asked: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for r in (r for r in records if "correct" in r):
        asked.setdefault((r["protocol"], r["length"]), []).append(r)
    for (protocol, length), found in asked.items():
        if "symbols" in found[0]:
            r = found[0]
            yield f"{protocol:11} {r['symbols']:6} symbols: correct {r['correct']}/{r['trials']}"
        else:
            depths = ", ".join(f"{r['correct']}/{r['trials']} at {r['depth']:g}" for r in found)
            yield f"{protocol:11} {length:6} tokens: correct, by depth: {depths}"
