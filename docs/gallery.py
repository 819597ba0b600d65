"""The field guide: pictures and computed properties of every encoding, written into docs/encodings.md.

`python -m docs.gallery` takes no arguments and half a minute on one core. It writes results/gallery/NAME.png
for each encoding of the registry, with a row for each hook that its class overrides. In docs/encodings.md it
replaces the text between `begin NAME` and `end NAME`, adds missing sections, and leaves the rest, which is
written by hand.

Legend: n positions, C = n_embd, H = n_head, D channels of a head, L = train.seq_len.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from base.command import argument_parser, run_command
from base.errors import UserError
from docs.properties import HOOKS, SHAPE, biases, hooks_of, logits, make, position_vectors, properties
from evaluation.figures import DASHES, HUES
from positions import ENCODINGS, Encoding

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "encodings.md"
PICTURES = ROOT / "results" / "gallery"

L = SHAPE.seq_len
ROUNDING = 1e-3         # a residual, or a change of logits, below it counts as 0: fp32 angles leave 1e-6
UNWRITTEN = "(not written yet)"    # in a section that `update` adds; the tests refuse it in the guide
MARGINS = {"left": 0.08, "right": 0.98, "bottom": 0.12, "top": 0.86}    # the "constrained" layout is slow
LOWEST = 40             # lines end this far below the highest logit of a head: a weight of exp(-40)
LINES = [{"color": colour, "linestyle": dash} for colour, dash in zip(HUES[1:], DASHES, strict=False)]


# -----------------------------------------------------------------------------------------------------------
# Pictures


def draw_embed(figure: Any, encoding: Encoding) -> None:
    """Heat map of the vectors that `embed` adds, by position and channel."""
    n = 4 * L
    n_defined = min(n, encoding.max_length or n)
    vectors = position_vectors(encoding, n_defined)
    used = int(vectors.any(dim=0).nonzero().max()) + 1                  # the channels after it hold zeros
    values = torch.full((n, used), torch.nan)
    values[:n_defined] = vectors[:, :used]
    axis = figure.subplots(gridspec_kw=MARGINS | {"right": 1.05})       # the color bar needs room
    image = axis.imshow(values.T.numpy(), aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(image, ax=axis, label="added to the embedding")
    color = "white"
    if n_defined < n:
        color = "black"
        axis.text((n_defined + n) / 2, used / 2, "not defined", ha="center", va="center")
    mark(axis, color=color, linestyle="--")
    axis.set(xlabel="position (tokens)", ylabel="channel")


def draw_rotate(figure: Any, encoding: Encoding) -> None:
    """Logits of all-ones queries and keys, by distance."""
    draw_by_distance(figure, logits(encoding, 8 * L), None, "logit of q = k = 1")


def draw_scores(figure: Any, encoding: Encoding) -> None:
    """What `scores` adds to the logits, by distance."""
    far, near = biases(encoding, 8 * L), biases(encoding, L)
    is_same = torch.allclose(far[:, :L + 1], near, atol=1e-4)
    draw_by_distance(figure, far, None if is_same else near, "added to the logit")


def draw_by_distance(figure: Any, far: Tensor, near: Tensor | None, label: str) -> None:
    """A line per head (H, n), to L / 2 on the left and to 8 L on the right; `near` is drawn thin."""
    names = [f"head {head}" for head in range(1, len(far) + 1)]
    if torch.allclose(far, far[:1].expand_as(far)):
        names = ["all heads"]
    far = far.where(far >= far.amax(dim=1).min() - LOWEST, torch.nan)
    axes = figure.subplots(1, 2, gridspec_kw=MARGINS | {"wspace": 0.25})
    for axis, until in ((axes[0], L // 2), (axes[1], 8 * L)):
        for head, name in enumerate(names):
            style = LINES[head % len(LINES)]
            axis.plot(far[head, :until + 1], **style, label=name)
            if near is not None:
                axis.plot(near[head, :until + 1], **style, linewidth=0.7,
                          label="" if head else "thin: query at L")
        axis.set(xlabel="distance (tokens)", ylabel=label, xlim=(0, until))
        axis.grid(alpha=0.3)
    axes[0].set_title("near: to L / 2")
    axes[1].set_title("far: to 8 L")
    mark(axes[1])
    axes[1].legend()


DRAW: dict[str, Callable[[Any, Encoding], None]] = {
    "embed": draw_embed, "rotate": draw_rotate, "scores": draw_scores}


def mark(axis: Axes, **style: Any) -> None:
    """A vertical line at the training length."""
    axis.axvline(L, **{"color": "grey", "linewidth": 1, **style})
    axis.annotate(f"L = {L}", (L, 1.01), xycoords=("data", "axes fraction"), ha="center")


def draw(name: str, folder: Path) -> None:
    """NAME.png: a row for each hook that the encoding overrides; of `none` what it adds to the logits, 0."""
    encoding = make(name)
    rows = [DRAW[hook] for hook in hooks_of(type(encoding))]
    if not rows:
        rows = [draw_scores]
    figure = Figure(figsize=(10, 5.2 * len(rows)))                      # 2 pixels for each of 192 channels
    figure.suptitle(name, fontweight="bold")
    subfigures = figure.subfigures(len(rows), squeeze=False)[:, 0]
    for draw_row, subfigure in zip(rows, subfigures, strict=True):
        draw_row(subfigure, encoding)
    save(figure, folder / f"{name}.png")


def save(figure: Figure, path: Path) -> None:
    """1,000 pixels wide, in 256 colours: a third of the bytes and no visible difference."""
    figure.savefig(path)
    image = Image.open(path).convert("RGB")
    image.quantize(256, Image.Quantize.MAXCOVERAGE).save(path)


# -----------------------------------------------------------------------------------------------------------
# The guide


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "---:") -> str:
    """A Markdown table: the first column is aligned left, the others right by default."""
    rule = ["---"] + [align] * (len(head) - 1)
    lines = [head, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def contents() -> str:
    """The list of sections, with what each encoding acts on and the first sentence of its docstring."""
    rows = []
    for name, encoding in ENCODINGS.items():
        docstring = inspect.cleandoc(encoding.__doc__ or "") + " "
        sentence = re.split(r"(?<=[^\s.])\.\s", docstring)[0]
        escaped = re.sub(r"([|*])", r"\\\1", sentence)
        acts_on = " and ".join(HOOKS[hook] for hook in hooks_of(encoding)) or "nothing"
        rows.append([f"[`{name}`](#{name})", acts_on, escaped])
    return table(["encoding", "acts on", "what it does"], rows, "---")


def property_table() -> str:
    """Properties; without the numbers of rounding errors, which differ between machines."""
    yes = {True: "yes", False: "no"}
    rows = []
    for name in ENCODINGS:
        p = properties(name)
        rows.append([
            f"[`{name}`](#{name})",
            yes[p.is_defined],
            zero_or(p.change),
            f"yes, {p.gap:.1g}" if p.gap else "no",
            f"{p.step:.1g}",
            zero_or(p.residual),
            yes[p.is_fixed],
            f"{p.n_parameters:,}"])
    head = ["encoding", "defined at 8 L", "distance alone", "unique", "largest step", "linear", "fixed",
            "parameters"]
    return table(head, rows)


def zero_or(x: float | None) -> str:
    """"yes" if x is 0 up to rounding errors, otherwise "no" and x; "-" for None."""
    if x is None:
        return "-"
    return "yes" if x < ROUNDING else f"no, {x:.1g}"


def section(name: str) -> str:
    """The generated part of an encoding's section: its class, sources and picture."""
    encoding = ENCODINGS[name]
    path = Path(inspect.getfile(encoding)).relative_to(ROOT).as_posix()
    numbers = dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{4,5})", encoding.__doc__ or ""))
    sources = [f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in numbers]
    links = [f"[`{encoding.__name__}` in {path}](../{path})", *sources]
    return f"{', '.join(links)}\n![{name}](../results/gallery/{name}.png)"


def update(text: str, blocks: dict[str, str]) -> str:
    """The guide with these blocks between their markers; encodings without a section get one at the end."""
    for name, block in blocks.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
        if begin not in text and name in ENCODINGS:
            text = (f"{text.rstrip()}\n\n## {name}\n\n{begin}{end}\n- **Use it** {UNWRITTEN}\n"
                    f"- **Beyond L.** {UNWRITTEN}\n")
        before, _, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if not has_end:
            raise UserError(f"the page needs a line {begin.strip()} with {end.strip()} below it")
        text = f"{before}{begin}{block}\n{end}{after}"
    return text


def main() -> None:
    argument_parser(__doc__ or "").parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in ENCODINGS:
        draw(name, PICTURES)

    blocks = {"contents": contents(), "properties": property_table()}
    for name in ENCODINGS:
        blocks[name] = section(name)
    GUIDE.write_text(update(GUIDE.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    print(f"wrote docs/encodings.md and {len(ENCODINGS)} pictures in results/gallery")


if __name__ == "__main__":
    run_command(main)
