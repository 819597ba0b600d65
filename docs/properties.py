"""Properties of the position encodings, measured by running them: nothing is read from a declaration.

Legend: n positions, C = n_embd, H = n_head, D channels of a head, L = train.seq_len.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from config import Config, load_config
from model import GPT, shape_of
from positions import ENCODINGS, At, Encoding

QUICK = Path(__file__).resolve().parent.parent / "configs" / "quick.toml"
HOOKS = {"embed": "embeddings", "rotate": "q and k", "scores": "logits"}
SMALL = ("model.n_layer=2", "model.n_head=2", "model.n_embd=32", "train.seq_len=32", "train.dtype=float32")
SHIFTS = (1, 8, 64)     # k of the matrices W_k


# -----------------------------------------------------------------------------------------------------------
# What the hooks of an encoding do


def quick(name: str, *overrides: str) -> Config:
    """The quick config with this encoding."""
    return load_config(QUICK, [f"position.encoding={name}", "model.vocab_size=257", *overrides])


SHAPE = shape_of(quick("none"))


def make(name: str, *overrides: str) -> Encoding:
    """An encoding of the quick config before training; parameters that start at 0 are drawn at random."""
    torch.manual_seed(0)
    encoding = ENCODINGS[name](SHAPE, quick(name, *overrides).position).double().requires_grad_(False)
    for p in encoding.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)
    return encoding


def hooks_of(encoding: type[Encoding]) -> list[str]:
    """The hooks that a class overrides."""
    return [hook for hook in HOOKS if getattr(encoding, hook) is not getattr(Encoding, hook)]


def random(*shape: int) -> Tensor:
    """Standard normal numbers, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def at(encoding: Encoding, q_pos: Tensor) -> At:
    """Queries at these positions, all keys up to the last, in layer 0. All tokens are one random vector."""
    Tk = int(q_pos[-1]) + 1
    q_pos = q_pos[None]
    k_pos = torch.arange(Tk)[None]
    x = random(1, 1, SHAPE.n_embd).expand(1, Tk, -1)
    features = encoding.features(x, 0)
    if features is not None:
        features = encoding.mix(features, 0, None)
    return At(q_pos, k_pos, 0, encoding.tables(q_pos, k_pos), features)


def position_vectors(encoding: Encoding, n: int) -> Tensor:
    """The vectors that `embed` adds to token embeddings at positions 0 ... n - 1, (n, C)."""
    x = torch.zeros(1, n, SHAPE.n_embd, dtype=torch.float64)
    positions = torch.arange(n)[None]
    return encoding.embed(x, positions)[0]


def rotated_query(encoding: Encoding, n: int) -> Tensor:
    """One random query after `rotate` at each of the positions 0 ... n - 1, (n, D)."""
    q = random(1, 1, 1, SHAPE.head_dim).expand(1, SHAPE.n_head, n, -1)
    q, _ = encoding.rotate(q, q, at(encoding, torch.arange(n)))
    return q[0, 0]


def logits(encoding: Encoding, last: int) -> Tensor:
    """Logits of all-ones q and k after `rotate`, at distances 0 ... last from position last, (H, n)."""
    ones = torch.ones(1, SHAPE.n_head, last + 1, SHAPE.head_dim, dtype=torch.float64)
    q, k = encoding.rotate(ones[:, :, :1], ones, at(encoding, torch.tensor([last])))
    return (q @ k.mT)[0, :, 0].flip(-1) / SHAPE.head_dim**0.5


def biases(encoding: Encoding, last: int) -> Tensor:
    """What `scores` adds at distances 0 ... last from a query at position last, (H, n).

    One random query and one random key, the same at all positions: differences come from the encoding.
    """
    q, k = random(2, 1, SHAPE.n_head, 1, SHAPE.head_dim)
    k = k.expand(-1, -1, last + 1, -1)
    plain = q @ k.mT / SHAPE.head_dim**0.5                              # (1, H, 1, n)
    changed = encoding.scores(plain, q, k, at(encoding, torch.tensor([last])))
    return (changed - plain)[0, :, 0].flip(-1)


# -----------------------------------------------------------------------------------------------------------
# Properties


class Properties(NamedTuple):
    """The measured properties of an encoding."""

    gap: float  # smallest difference of two positions' codes, relative to the largest; 0: two are equal
    step: float  # largest distance of neighbours' codes, relative to the largest of all
    residual: float | None  # of PE(p + k) = W_k PE(p), relative; None: the encoding gives positions no vector
    is_defined: bool  # finite at 8 L
    is_fixed: bool  # nothing is learned or drawn: every seed gives the same codes
    change: float  # of the logits when all positions shift, relative to their standard deviation
    n_parameters: int  # at the quick config


def properties(name: str) -> Properties:
    """The properties of one encoding."""
    encoding = make(name)
    code = codes(encoding, 4 * SHAPE.seq_len + 1)
    gaps = [smallest_gap(points) for points in code.values()]
    steps = [largest_step(points) for points in code.values()]
    residuals = [linear_residual(points) for hook, points in code.items() if hook != "scores"]

    # a small model at 8 times its training length
    model = random_model(name)
    tokens = torch.randint(257, (1, 8 * 32), generator=torch.Generator().manual_seed(0))
    try:
        is_defined = bool(model(tokens).isfinite().all())
    except ValueError:                                                  # positions beyond max_length
        is_defined = False

    # its logits where all positions are shifted by 11
    few = tokens[:, :20]
    positions = torch.arange(20)
    here = model(few, positions=positions)
    shifted = model(few, positions=positions + 11)
    change = (shifted - here).abs().max() / here.std()
    # of several hooks the best gap counts, because one suffices to tell positions apart; else the worst
    return Properties(
        gap=max(gaps, default=0.0), step=max(steps, default=0.0), residual=max(residuals, default=None),
        is_defined=is_defined, is_fixed=not encoding.state_dict(), change=change.item(),
        n_parameters=sum(p.numel() for p in encoding.parameters()))


def codes(encoding: Encoding, n: int) -> dict[str, Tensor]:
    """Hook -> its code of the positions (`scores`: the distances) 0 ... n - 1, as far as defined, (n, ...).

    `embed`: the vector added. `rotate`: a random query, rotated. `scores`: the biases of all heads.
    """
    n = min(n, encoding.max_length or n)
    code = {}
    for hook in hooks_of(type(encoding)):
        if hook == "embed":
            code[hook] = position_vectors(encoding, n)
        elif hook == "rotate":
            code[hook] = rotated_query(encoding, n)
        else:
            code[hook] = biases(encoding, n - 1).T
    return code


def smallest_gap(points: Tensor) -> float:
    """Smallest distance between two rows (n, numbers) over the largest; 0 if all rows are equal."""
    gaps = torch.pdist(points)
    return (gaps.min() / gaps.max().clamp(min=1e-9)).item()


def largest_step(points: Tensor) -> float:
    """Largest distance between neighbouring rows (n, numbers), over that of any two; 0 if all are equal."""
    steps = points.diff(dim=0).norm(dim=1)
    largest_distance = torch.pdist(points).max().clamp(min=1e-9)
    return (steps.max() / largest_distance).item()


def linear_residual(points: Tensor) -> float:
    """|PE(p + k) - W_k PE(p)| / |PE(p + k)|, W_k by least squares, the largest over SHIFTS; points (n, C).

    W_k is fitted at even p and judged at odd p, because fewer positions than channels always fit.
    """
    residuals = []
    for k in SHIFTS:
        before, after = points[:-k], points[k:]
        W = torch.linalg.lstsq(before[::2], after[::2], rcond=1e-7, driver="gelsd").solution
        error = (after - before @ W)[1::2]
        residuals.append((error.norm() / after[1::2].norm()).item())
    return max(residuals)


def random_model(name: str) -> GPT:
    """A small fp64 model with large random parameters, which make every effect visible."""
    torch.manual_seed(0)
    model = GPT(quick(name, *SMALL)).eval().double().requires_grad_(False)
    for p in model.parameters():
        p.normal_(std=0.3 if p.dim() > 1 else 1.0)
    model.encoding.clamp()
    return model
