"""What eval.py shows of its records: the table on the screen and the picture. L = train.seq_len."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def table(records: Sequence[dict[str, Any]], lengths: Sequence[int], L: int) -> Iterator[str]:
    """The figures by length, for the screen; "-" where the encoding cannot go."""
    found = {r["protocol"] for r in records}
    protocols = [p for p in ("nonoverlap", "rolling", "sliding", "fixed") if p in found]
    for extend in dict.fromkeys(r["extend"] for r in records):
        mine = [r for r in records if r["extend"] == extend]
        cells = {(r["protocol"], r["length"]): r for r in mine if r["protocol"] in protocols}
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
                truncated = math.exp(fixed["truncated_nll_sum"] / fixed["tokens"])
                line += f"{truncated:13.4g}{fixed['gain']:+20.4f}"
            yield line + ("   <- training length" if length == L else "")
        yield from probe_table(mine)


def _cell(line: dict[str, Any] | None, key: str) -> str:
    return f"{line[key]:11.4g}" if line else f"{'-':>11}"


def probe_table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each distance of repeat and copy, and for each length of passkey, of one curve."""
    for protocol in ("repeat", "copy"):
        for r in (r for r in records if r["protocol"] == protocol):
            first = r["first_nll_sum"] / r["tokens"]
            yield (f"{protocol:7} {r['distance']:6} tokens apart: first copy {first:6.3f} nats/token, second "
                   f"{first - r['gain']:6.3f}, gain {r['gain']:+.3f}")
    asked = [r for r in records if r["protocol"] == "passkey"]
    for length in dict.fromkeys(r["length"] for r in asked):
        found = [f"{r['correct']}/{r['trials']} at {r['depth']:g}" for r in asked if r["length"] == length]
        yield f"passkey {length:6} tokens: found, by depth: {', '.join(found)}"


def plot(records: Sequence[dict[str, Any]], title: str, L: int, path: Path) -> None:
    """Perplexity against context, and loss against position, with the training length marked."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, ScalarFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    styles = {"nonoverlap": "o--", "rolling": "v:", "sliding": "^-.", "fixed": "s-"}
    curves = dict.fromkeys((r["extend"], r["protocol"]) for r in records
                           if r["protocol"] in (*styles, "position"))
    colors = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
    colour = {extend: colors[i % len(colors)]
              for i, extend in enumerate(dict.fromkeys(extend for extend, _ in curves))}
    for extend, protocol in curves:
        lines = [r for r in records if (r["extend"], r["protocol"]) == (extend, protocol)]
        if protocol in styles:
            left.plot([r["length"] for r in lines], [r["ppl"] for r in lines], styles[protocol],
                      color=colour[extend], label=f"{protocol}, {extend}" if extend else protocol)
        else:
            right.plot([math.sqrt((r["bucket"][0] + 1) * r["bucket"][1]) for r in lines],
                       [math.log(r["ppl"]) for r in lines], ".-", color=colour[extend])
    fixed = [r for r in records if r["protocol"] == "fixed"]
    if fixed:
        truncated = math.exp(fixed[0]["truncated_nll_sum"] / fixed[0]["tokens"])
        left.axhline(truncated, color="black", linestyle=":", label="fixed, truncated to L")
    left.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="perplexity per token",
             title="perplexity against context")
    right.set(xscale="log", xlabel="position in the window (tokens of context)",
              ylabel="loss (nats per token)", title="loss by position")
    ticks = sorted({r["length"] for r in records if r["protocol"] in styles}) or [L]
    left.set_xticks(ticks, [str(t) for t in ticks])
    left.minorticks_off()
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    left.yaxis.set_major_formatter(ScalarFormatter())
    for axis in (left, right):
        axis.axvline(L, color="grey", linewidth=1)
        axis.annotate(f" L = {L}", (L, 0), xycoords=("data", "axes fraction"), va="bottom", color="grey")
        axis.grid(alpha=0.3)
    if left.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
