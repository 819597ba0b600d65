"""The field guide: pictures and computed properties of every encoding, written into docs/encodings.md.

`python -m docs.gallery` takes no arguments and half a minute on one core. It writes results/gallery/NAME.png
for each encoding of the registry, with a row for each hook that its class overrides, and two classic
pictures. In docs/encodings.md it replaces the text between `begin NAME` and `end NAME`, adds missing
sections, and leaves the rest, which is written by hand. Costs come from results/bench-encodings.md and
perplexities from results/every-encoding/NAME.json, if these exist.

Legend: n positions, C = n_embd, H = n_head, D channels of a head, L = train.seq_len.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import rope
from docs.properties import HOOKS, SHAPE, Properties, added, biases, logits, make, overridden, properties
from evaluation.report import DASHES, STYLES
from positions import ENCODINGS, Encoding
from positions.invariance import factor_and_bias
from runtime.command import argument_parser, run_command
from runtime.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "encodings.md"
PICTURES = ROOT / "results" / "gallery"
BENCH = ROOT / "results" / "bench-encodings.md"
RUNS = ROOT / "results" / "every-encoding"

L = SHAPE.seq_len
ROUNDING = 1e-3         # a residual, or a change of logits, below it counts as 0: fp32 angles leave 1e-6
SHADE = 32              # of 255: between two CPUs the colours of a pixel differed by at most 24
UNWRITTEN = "Not written yet."      # in a section that `update` adds; the tests refuse it in the guide
MULTIPLES = (0.5, 1, 2, 8, 16)
MARGINS = {"left": 0.08, "right": 0.98, "bottom": 0.12, "top": 0.86}    # the "constrained" layout is slow
LOWEST = 40             # lines end this far below the highest logit of a head: a weight of exp(-40)
LINES = [{"color": color, "linestyle": (0, dash) if dash else "-"}
         for (color, _, _), dash in zip(STYLES[1:], DASHES + DASHES, strict=False)]


# -----------------------------------------------------------------------------------------------------------
# Pictures


def draw_embed(figure: Any, encoding: Encoding) -> str:
    """Heat map of the vectors that `embed` adds, by position and channel."""
    n = 4 * L
    n_defined = min(n, encoding.max_length or n)
    values = torch.full((n, SHAPE.n_embd), torch.nan)
    values[:n_defined] = added(encoding, n_defined)
    used = int(values[:n_defined].any(dim=0).nonzero().max()) + 1       # the channels after it hold zeros
    axis = figure.subplots(gridspec_kw=MARGINS | {"right": 1.05})       # the color bar needs room
    image = axis.imshow(values[:, :used].T.numpy(), aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(image, ax=axis, label="added to the embedding")
    if n_defined < n:
        axis.text((n_defined + n) / 2, used / 2, "not defined", ha="center", va="center")
    mark(axis, color="white" if n_defined == n else "black", linestyle="--")
    axis.set(xlabel="position (tokens)", ylabel="channel")
    return (f"The vector added to the embedding of the token at each position, 0 ... {n - 1} = 4 L - 1, in "
            f"{'all' if used == SHAPE.n_embd else f'the first {used} of'} {SHAPE.n_embd} channels.")


def draw_rotate(figure: Any, encoding: Encoding) -> str:
    """Logits of all-ones queries and keys, by distance."""
    draw_by_distance(figure, logits(encoding, 8 * L), None, "logit of q = k = 1")
    return "The logit of a query and a key whose channels are all 1, rotated, over sqrt(D), by distance."


def draw_scores(figure: Any, encoding: Encoding) -> str:
    """What `scores` adds to the logits, by distance."""
    far, near = biases(encoding, 8 * L), biases(encoding, L)
    is_same = torch.allclose(far[:, :L + 1], near, atol=1e-4)
    draw_by_distance(figure, far, None if is_same else near, "added to the logit")
    caption = "Added to the logit of one random query and key, the same at all positions, by distance"
    return caption + ("." if is_same else ", for the query at position 8 L and (thin) the one at L.")


def draw_by_distance(figure: Any, far: Tensor, near: Tensor | None, label: str) -> None:
    """A line per head (H, n), to L / 2 on the left and to 8 L on the right; `near` is drawn thin."""
    heads = ["all heads"] if torch.allclose(far, far[:1].expand_as(far)) else [
        f"head {head}" for head in range(1, len(far) + 1)]
    axes = figure.subplots(1, 2, gridspec_kw=MARGINS | {"wspace": 0.25})
    far = far.where(far >= far.amax(dim=1).min() - LOWEST, torch.nan)
    for axis, until, title in zip(axes, (L // 2, 8 * L), ("near: to L / 2", "far: to 8 L"), strict=True):
        for head, name in enumerate(heads):
            style = LINES[head % len(LINES)]
            axis.plot(far[head, :until + 1], **style, label=name)
            if near is not None:
                axis.plot(near[head, :until + 1], **style, linewidth=0.7,
                          label=None if head else "thin: query at L")
        axis.set(xlabel="distance (tokens)", ylabel=label, xlim=(0, until), title=title)
        axis.grid(alpha=0.3)
    mark(axis)
    axis.legend()


def draw_mask(figure: Any, encoding: Encoding) -> str:
    """The weight of each key if no hook is overridden and all logits are equal."""
    seen = torch.arange(1, 8 * L + 1)
    axis = figure.subplots(gridspec_kw=MARGINS)
    axis.plot(seen, 1 / seen, color=LINES[0]["color"])
    axis.set(xscale="log", yscale="log", xlabel="keys that the query sees (tokens)",
             ylabel="weight of each key")
    axis.grid(alpha=0.3)
    mark(axis)
    return ("Nothing is added. Only the causal mask remains: if all logits are equal, the weight of each key "
            "is one over the number of keys that the query sees, from which a layer can infer the position.")


DRAW: dict[str, Callable[[Any, Encoding], str]] = {
    "embed": draw_embed, "rotate": draw_rotate, "scores": draw_scores}


def mark(axis: Axes, **style: Any) -> None:
    """A vertical line at the training length."""
    axis.axvline(L, **{"color": "grey", "linewidth": 1, **style})
    axis.annotate(f"L = {L}", (L, 1.01), xycoords=("data", "axes fraction"), ha="center")


def draw(name: str, folder: Path) -> str:
    """Write NAME.png, with a row for each hook that the class overrides. Returns its caption."""
    encoding = make(name)
    rows = [DRAW[hook] for hook in overridden(type(encoding))] or [draw_mask]
    figure = Figure(figsize=(10, 5.2 * len(rows)))                      # 2 pixels for each of 192 channels
    figure.suptitle(name, fontweight="bold")
    parts = figure.subfigures(len(rows), squeeze=False)[:, 0]
    captions = [row(part, encoding) for row, part in zip(rows, parts, strict=True)]
    save(figure, folder / f"{name}.png")
    if list(encoding.parameters()):
        captions.append("Parameters before training (seed 0); those that start at 0 are drawn at random.")
    return " ".join(captions)


def draw_bits(folder: Path) -> None:
    """The classic picture of binary positions: each bit changes half as often as the one before."""
    bits = added(make("binary"), 32)[:, :5].T.flip(0)                   # (5, 32), the highest bit on top
    figure = Figure(figsize=(10, 2.8))
    axis = figure.subplots(gridspec_kw=MARGINS | {"bottom": 0.18})
    axis.imshow(bits.numpy(), aspect="auto", cmap="Greys", vmin=0, vmax=3)
    for (bit, position), value in np.ndenumerate(bits.numpy()):
        axis.text(position, bit, f"{value:.0f}", ha="center", va="center")
    axis.set(xlabel="position (tokens)", ylabel="bit = channel", title="binary: the bits of the position",
             xticks=range(32), yticks=range(5), yticklabels=range(4, -1, -1))
    save(figure, folder / "binary-bits.png")


def draw_decay(folder: Path) -> None:
    """The classic picture of RoPE's long-term decay, for several bases and dimensions."""
    figure = Figure(figsize=(10, 4.4))
    distance = torch.arange(10_001)
    edges = torch.logspace(0, 4, 61).round().long().unique()
    axes = figure.subplots(1, 3, sharey=True, gridspec_kw=MARGINS | {"wspace": 0.05})
    for axis, dim in zip(axes, (32, 64, 128), strict=True):
        for base, style in zip((100, 10_000, 500_000), LINES, strict=False):
            curve = rope.long_term_decay(distance, rope.inv_freq(dim, base))
            mean = [curve[a:b].mean() for a, b in zip(edges, edges[1:], strict=False)]
            axis.plot(distance[1:], curve[1:], color=style["color"], alpha=0.25, linewidth=0.5)
            axis.plot((edges[:-1] * edges[1:]).sqrt(), mean, **style,
                      label=f"base {base:,}".replace(",", " "))
        axis.set(xscale="log", xlabel="distance (tokens)", title=f"{dim} rotated channels")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("logit / logit at distance 0")
    axis.legend()
    figure.suptitle("rope: long-term decay of the logit of q = k = 1")
    save(figure, folder / "rope-long-term-decay.png")


def save(figure: Figure, path: Path) -> None:
    """1,000 pixels wide, in 256 colours: a third of the bytes and no visible difference.

    A file that shows the same stays as it is: the last bits of a curve, and with them the shades of pixels
    at its edge, depend on the CPU.
    """
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(
        256, Image.Quantize.MAXCOVERAGE)
    before, after = (np.asarray(image.convert("RGB"), np.int16) for image in (
        Image.open(path) if path.exists() else Image.new("RGB", (0, 0)), picture))
    if before.shape != after.shape or abs(after - before).max() > SHADE:
        picture.save(path)


def draw_scale_invariant(folder: Path, tau: float = 10.0) -> None:
    """The factor and the bias of position.scale_invariant, and the attention that each range then gets."""
    distance = torch.arange(2**16).double()
    factor, bias = factor_and_bias(distance, tau)
    expected = torch.stack((torch.full_like(bias, 0.5), bias + factor**2 / 2)).exp()    # E exp(a z + m)
    figure = Figure(figsize=(10, 4.4))
    near, far = figure.subplots(1, 2, gridspec_kw=MARGINS | {"wspace": 0.25, "bottom": 0.13})
    for values, style, label in ((factor, LINES[0], "factor a"), (bias, LINES[1], "bias m")):
        near.plot(distance[1:], values[1:], **style, label=label)
    ranges = 2 ** torch.arange(16)                                      # from d to 2 d - 1
    for weights, style, label in zip(expected, LINES, ("plain softmax", f"tau = {tau:g}"), strict=False):
        sums = torch.stack([weights[d:2 * d].sum() for d in ranges])
        far.plot(ranges, sums / weights.sum(), **style, marker=".", label=label)
    near.set(xscale="log", xlabel="distance (tokens)", ylabel="factor on the logit, bias")
    far.set(xscale="log", xlabel="distances d to 2 d - 1, by d (tokens)", ylabel="share of the attention")
    for axis in (near, far):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("scale-invariant attention", fontweight="bold")
    save(figure, folder / "scale-invariant.png")


# -----------------------------------------------------------------------------------------------------------
# The guide


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "---:") -> str:
    """A Markdown table: the first column is aligned left, the others right by default."""
    lines = [head, ["---"] + [align] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def link(name: str) -> str:
    """A link to the section of an encoding."""
    return f"[`{name}`](#{name})"


def places(name: str) -> str:
    """What the encoding acts on, in words."""
    return " and ".join(HOOKS[hook] for hook in overridden(ENCODINGS[name])) or "nothing"


def contents() -> str:
    """The list of sections, with the first sentence of each docstring."""
    rows = []
    for name, encoding in ENCODINGS.items():
        sentence = re.split(r"(?<=\S)\.\s", (encoding.__doc__ or "").strip() + " ")[0]
        rows.append([link(name), places(name), sentence.replace("|", "\\|").replace("*", "\\*")])
    return table(["encoding", "acts on", "what it does"], rows, "---")


def property_cells(p: Properties) -> list[str]:
    """Properties in words, with their numbers, except rounding errors, which differ between machines."""
    yes = {True: "yes", False: "no"}
    linear, change = ("-" if x is None else "yes" if x < ROUNDING else f"no, {x:.1g}"
                      for x in (p.residual, p.change))
    unique = f"yes, {p.gap:.1g}" if p.gap else "no"
    return [unique, linear, yes[p.is_defined], yes[p.is_fixed], yes[p.is_axial], change]


def read_costs(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """The table of bench/each_encoding.py -> shapes, and encoding -> "time, memory" relative to RoPE's."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    head = rows[0] if rows else []
    columns = [i for i, cell in enumerate(head) if "step / RoPE's" in cell]     # memory is in the next column
    costs = {row[0]: [", ".join(row[i + j].split(" (")[0] for j in (0, 1)) for i in columns] for row in rows}
    shapes = [f"step, memory at {head[i].split(',')[0]}" for i in columns]
    return shapes, {name: costs.get(name, ["-"] * len(columns)) for name in ENCODINGS}


def read_perplexities(path: Path) -> list[str]:
    """The JSON of eval.py -> perplexity on fixed targets at the MULTIPLES of L, "-" if not measured."""
    if not path.exists():
        return ["-"] * len(MULTIPLES)
    run = json.loads(path.read_text())
    if run["encoding"] != path.stem:
        raise UserError(f"{path}: this run is of {run['encoding']}; name the file {run['encoding']}.json")
    found = {r["length"] / run["seq_len"]: r["ppl"] for r in run["records"]
             if r["protocol"] == "fixed" and r["extend"] is None}
    return [f"{found[m]:.4g}" if m in found else "-" for m in MULTIPLES]


def section(name: str, caption: str, numbers: str) -> str:
    """The generated part of an encoding's section."""
    text = inspect.cleandoc(ENCODINGS[name].__doc__ or "")
    path = Path(inspect.getfile(ENCODINGS[name])).relative_to(ROOT).as_posix()
    sources = [f"[arXiv:{number}](https://arxiv.org/abs/{number})"
               for number in dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{4,5})", text))]
    where = [f'Acts on {places(name)}: `position.encoding = "{name}"`', f"[{path}](../{path})", *sources]
    return "\n\n".join([", ".join(where), f"```text\n{text}\n```",
                        f"![{name}](../results/gallery/{name}.png)", f"*{caption}*", numbers])


def guide_blocks(captions: dict[str, str], found: dict[str, Properties], bench: Path,
                 runs: Path) -> dict[str, str]:
    """Marker -> the generated text there."""
    shapes, costs = read_costs(bench)
    lengths = [{0.5: "L/2", 1: "L"}.get(m, f"{m} L") for m in MULTIPLES]
    ppl = {name: read_perplexities(runs / f"{name}.json") for name in ENCODINGS}
    names = ["encoding", "unique", "linear", "defined at 8 L", "fixed", "n-D here", "distance alone"]
    numbers = {name: [f"{p.n_parameters:,}", *costs[name]] for name, p in found.items()}
    blocks = {"contents": contents(),
              "properties": table([*names, "parameters", *shapes], [
                  [link(name), *property_cells(p), *numbers[name]] for name, p in found.items()]),
              "perplexities": table(["encoding", *lengths], [[link(name), *ppl[name]] for name in ppl])}
    head = ["parameters", *shapes, *(f"perplexity at {length}" for length in lengths)]
    return blocks | {name: section(name, captions[name], table(head, [[*numbers[name], *ppl[name]]]))
                     for name in ENCODINGS}


def update(text: str, blocks: dict[str, str]) -> str:
    """The guide with these blocks between their markers; encodings without a section get one at the end."""
    for name, block in blocks.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
        if begin not in text and name in ENCODINGS:
            text = (f"{text.rstrip()}\n\n## {name}\n\n{begin}{end}\n**When to use it.** {UNWRITTEN}\n\n"
                    f"**Beyond L.** {UNWRITTEN}\n")
        before, has_begin, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if not (has_begin and has_end):
            raise UserError(f"docs/encodings.md: needs a line {begin.strip()} with {end.strip()} below it")
        text = f"{before}{begin}{block}\n{end}{after}"
    return text


def main() -> None:
    argument_parser(__doc__).parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    captions = {name: draw(name, PICTURES) for name in ENCODINGS}
    draw_bits(PICTURES)
    draw_decay(PICTURES)
    draw_scale_invariant(PICTURES)
    found = {name: properties(name) for name in ENCODINGS}
    GUIDE.write_text(update(GUIDE.read_text(), guide_blocks(captions, found, BENCH, RUNS)))
    print(f"wrote docs/encodings.md and {len(ENCODINGS) + 3} pictures in results/gallery")


if __name__ == "__main__":
    run_command(main)
