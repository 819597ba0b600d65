"""What bench/gpu.py found, as Markdown: the goals and whether they hold, then a table for each part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from bench.gpu_parity import TOLERANCES
from bench.gpu_speed import FULL, OURS, Row, Size

LEAST_MFU, MOST_BIAS = 0.55, 1.15   # issue 6: of the matmul rate of the same run; over RoPE's step at T 1024


def markdown(rows: Sequence[Row], about: dict[str, Any], size: Size, is_smoke: bool) -> str:
    """The whole report."""
    lines = ["# One GPU: parity, speed, evaluation", "",
             *(["**A smoke test at toy size on a CPU: it runs, that is all. No figure below says more.**", ""]
               if is_smoke else []),
             *(f"- {key}: {f'`{value}`' if key == 'command' else value}" for key, value in about.items()), ""]
    for heading, part in (("Goals", goals), ("Parity", parity), ("GPT-2, 124 M", gpt2),
                          ("Encodings over RoPE", encodings), ("Evaluation", evaluation),
                          ("Cut short or failed", problems)):
        found = list(part(rows, size))
        lines += [f"## {heading}", "", *found, ""] if found else []
    return "\n".join(lines)


def of(rows: Sequence[Row], section: str, is_measured: bool = True) -> list[Row]:
    """Rows of a section that hold figures; or those that say why there are none."""
    return [row for row in rows if row["section"] == section and is_measured != ("problem" in row)]


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Markdown: the first column to the left, figures to the right."""
    return [" | ".join(("", *cells, "")).strip()
            for cells in (head, ["---", *["---:"] * (len(head) - 1)], *body)] if body else []


def verdict(is_good: bool | None, size: Size = FULL) -> str:
    """Whether a goal holds; of speed, at full size alone."""
    if size is not FULL:
        return "toy size"
    return "not measured" if is_good is None else "holds" if is_good else "**missed**"


# -----------------------------------------------------------------------------------------------------------
# The parts


def goals(rows: Sequence[Row], size: Size) -> Iterator[str]:
    """Each goal, what was found, whether it holds."""
    checked = [row for row in rows if row["section"] == "parity"]
    wrong = sum(not row["ok"] for row in checked)
    ours = {row["name"]: row for row in of(rows, "gpt2")}
    peers = [row["speed"] for name, row in ours.items() if not name.startswith("nanorope")]
    mfu = ours[OURS]["mfu"] if OURS in ours else None
    biases = [row for row in rows if row["section"] == "encodings" and row["changes_logits"]]
    best: dict[str, float] = {}     # of the ways that an encoding has; not measured: infinite
    for row in biases:
        name = row["name"].partition(",")[0]
        best[name] = min(best.get(name, math.inf), row.get("ratio", math.inf))
    slow = [name for name, ratio in best.items() if ratio > MOST_BIAS]
    yield from table(("goal", "found", ""), [
        ("loss and gradients as in fp64 (tolerances below)",
         f"{len(checked) - wrong} of {len(checked)}" if checked else "-",
         verdict(not wrong if checked else None)),
        (f"MFU of GPT-2 124 M at least {LEAST_MFU:.0%}, counting half of attention",
         "-" if mfu is None else f"{mfu:.1%}", verdict(None if mfu is None else mfu >= LEAST_MFU, size)),
        ("tokens/s over transformers' GPT-2, more than 1", f"{1 / min(peers):.2f}" if peers else "-",
         verdict(min(peers) < 1 if peers else None, size)),
        (f"encodings that change the logits at most {MOST_BIAS} x RoPE's step",
         f"{len(best) - len(slow)} of {len(best)}" if best else "-",
         verdict(not slow if best else None, size)),
    ])
    if slow:
        yield from ("", f"Above {MOST_BIAS} x RoPE, or not measured: {', '.join(slow)}.")


def parity(rows: Sequence[Row], size: Size) -> Iterator[str]:
    """Errors of loss and worst gradient of each case, a column a way of computing."""
    found = [row for row in rows if row["section"] == "parity"]
    ways = list(dict.fromkeys((row["dtype"], row["way"]) for row in found))
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in found:
        cell = row.get("problem") or f"{row['loss']:.0e} / {row['gradient']:.0e}"
        cell = cell if row["ok"] else f"**FAIL** {cell}"
        cells.setdefault(row["case"], {})[row["dtype"], row["way"]] = cell
    limits = "; ".join(f"{str(dtype).removeprefix('torch.')} {tolerance.loss:.0e} / {tolerance.gradient:.0e}"
                       for dtype, tolerance in TOLERANCES.items())
    yield ("Relative error of the loss / largest of any parameter's gradient, against an explicit softmax in "
           f"fp64 on the CPU. Tolerances: {limits}.")
    yield ""
    yield from table(("case", *map(", ".join, ways)),
                     [(case, *(of_case.get(way, "-") for way in ways)) for case, of_case in cells.items()])


def gpt2(rows: Sequence[Row], size: Size) -> Iterator[str]:
    """Tokens/s and MFU by both conventions."""
    for rate in of(rows, "matmul"):
        least, median, most = (rate[key] / 1e12 for key in ("least", "flops", "most"))
        yield (f"T {size.T}, bf16, torch.compile, fused AdamW, gradients clipped. Ceiling: a dense bf16 "
               f"product of {rate['n']} x {rate['n']} matrices, measured between the steps: {median:.1f} "
               f"TFLOP/s ({least:.1f} ... {most:.1f}). MFU counts the half of attention that is not masked "
               "(model.flops_per_token), in parentheses all of it (PaLM, nanoGPT).")
        yield ""
    yield from table(
        ("", "parameters", "batch", "ms a step", "tokens/s", "MFU", "speed over ours", "peak GB"),
        [(row["name"], f"{row['parameters'] / 1e6:.1f} M", str(row["batch_size"]), f"{row['ms']:.1f}",
          f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.1%} ({row['mfu_full']:.1%})", f"{row['speed']:.3f}",
          f"{row['peak'] / 1e9:.1f}") for row in of(rows, "gpt2")])
    yield from (f"\n{row['name']}: {row['problem']}" for row in of(rows, "gpt2", False))


def encodings(rows: Sequence[Row], size: Size) -> Iterator[str]:
    """Each encoding's step over RoPE's."""
    if not of(rows, "encodings") + of(rows, "encodings", False):
        return
    yield (f"T {size.T}, batch {size.batch_size}, GPT-2's width, n_layer = {size.n_layer} and a small "
           "vocabulary, so that attention has a larger share of the step than in the whole model. `eager`: "
           "it did not compile in time, and is measured over eager RoPE.")
    yield ""
    yield from table(("encoding", "way", "ms a step", "over RoPE's, median (least ... most)",
                      "memory over RoPE's", ""),
                     [(row["name"], row["way"], f"{row['ms']:.2f}",
                       f"{row['ratio']:.3f} ({row['least']:.3f} ... {row['most']:.3f})",
                       f"{row['peak_ratio']:.2f}" if row["peak_ratio"] else "-",
                       verdict(row["ratio"] <= MOST_BIAS, size) if row["changes_logits"] else "")
                      for row in of(rows, "encodings")])
    yield from (f"\n{row['name']}: {row['problem']}" for row in of(rows, "encodings", False))


def evaluation(rows: Sequence[Row], size: Size) -> Iterator[str]:
    """Seconds for one long text."""
    yield from table(("encoding", "tokens", "seconds", "tokens/s", "peak GB"),
                     [(row["name"], f"{row['T']:,}", f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,.0f}",
                       f"{row['peak'] / 1e9:.1f}") for row in of(rows, "evaluation")])


def problems(rows: Sequence[Row], size: Size) -> Iterator[str]:
    """What did not end by itself."""
    for row in of(rows, "problem", False):
        command = [*row["command"][:3], *(["..."] if row["command"][3:] else [])]
        yield f"- `{' '.join(command)}`: {row['problem']}"
