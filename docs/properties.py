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
HOOKS = {"embed": "the token embeddings", "rotate": "queries and keys", "scores": "the logits"}
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


def overridden(encoding: type[Encoding]) -> list[str]:
    """The hooks that a class overrides."""
    return [hook for hook in HOOKS if getattr(encoding, hook) is not getattr(Encoding, hook)]


def random(*shape: int) -> Tensor:
    """Standard normal numbers, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def at(encoding: Encoding, q_pos: Tensor) -> At:
    """Queries at these positions, all keys up to the last, in layer 0. All tokens are one random vector."""
    q_pos, k_pos = q_pos[None], torch.arange(int(q_pos[-1]) + 1)[None]
    features = encoding.features(random(1, 1, SHAPE.n_embd).expand(1, k_pos.shape[1], -1), 0)
    return At(q_pos, k_pos, 0, encoding.tables(q_pos, k_pos),
              None if features is None else encoding.mix(features, 0, None))


def added(encoding: Encoding, n: int) -> Tensor:
    """The vectors that `embed` adds to token embeddings at positions 0 ... n - 1, (n, C)."""
    return encoding.embed(torch.zeros(1, n, SHAPE.n_embd, dtype=torch.float64), torch.arange(n)[None])[0]


def turned(encoding: Encoding, n: int) -> Tensor:
    """One random query after `rotate` at each of the positions 0 ... n - 1, (n, D)."""
    q = random(1, 1, 1, SHAPE.head_dim).expand(1, SHAPE.n_head, n, -1)
    return encoding.rotate(q, q, at(encoding, torch.arange(n)))[0][0, 0]


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
    return (encoding.scores(plain, q, k, at(encoding, torch.tensor([last]))) - plain)[0, :, 0].flip(-1)


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
    encoding, n = make(name), 4 * SHAPE.seq_len + 1
    code = codes(encoding, n)
    vectors = [points for hook, points in code.items() if hook != "scores"]
    model, tokens = lively(name), torch.randint(257, (1, 8 * 32), generator=torch.Generator().manual_seed(0))
    try:
        is_defined = bool(model(tokens).isfinite().all())
    except ValueError:                                                  # positions beyond max_length
        is_defined = False
    position, few = torch.arange(20), tokens[:, :20]
    here, there = model(few, positions=position), model(few, positions=position + 11)
    return Properties(gap=max((smallest_gap(points) for points in code.values()), default=0.0),
                      step=max((largest_step(points) for points in code.values()), default=0.0),
                      residual=max((linear_residual(points) for points in vectors), default=None),
                      is_defined=is_defined, is_fixed=not encoding.state_dict(),
                      change=((there - here).abs().max() / here.std()).item(),
                      n_parameters=sum(p.numel() for p in encoding.parameters()))


def codes(encoding: Encoding, n: int) -> dict[str, Tensor]:
    """Hook -> its code of the positions (`scores`: the distances) 0 ... n - 1, as far as defined, (n, ...).

    `embed`: the vector added. `rotate`: a random query, rotated. `scores`: the biases of all heads.
    """
    n = min(n, encoding.max_length or n)
    ways = {"embed": lambda: added(encoding, n), "rotate": lambda: turned(encoding, n),
            "scores": lambda: biases(encoding, n - 1).T}
    return {hook: ways[hook]() for hook in overridden(type(encoding))}


def smallest_gap(points: Tensor) -> float:
    """Smallest distance between two rows (n, numbers) over the largest; 0 if all rows are equal."""
    gaps = torch.pdist(points)
    return (gaps.min() / gaps.max().clamp(min=1e-9)).item()


def largest_step(points: Tensor) -> float:
    """Largest distance between neighbouring rows (n, numbers), over that of any two; 0 if all are equal."""
    return (points.diff(dim=0).norm(dim=1).max() / torch.pdist(points).max().clamp(min=1e-9)).item()


def linear_residual(points: Tensor) -> float:
    """|PE(p + k) - W_k PE(p)| / |PE(p + k)|, W_k by least squares, the largest over SHIFTS; points (n, C).

    W_k is fitted at even p and judged at odd p, because fewer positions than channels always fit.
    """
    def residual(k: int) -> float:
        before, after = points[:-k], points[k:]
        W = torch.linalg.lstsq(before[::2], after[::2], rcond=1e-7, driver="gelsd").solution
        return ((after - before @ W)[1::2].norm() / after[1::2].norm()).item()
    return max(map(residual, SHIFTS))


def lively(name: str) -> GPT:
    """A small fp64 model with large random parameters, which make every effect visible."""
    torch.manual_seed(0)
    model = GPT(quick(name, *SMALL)).eval().double().requires_grad_(False)
    for p in model.parameters():
        p.normal_(std=0.3 if p.dim() > 1 else 1.0)
    model.encoding.clamp()
    return model
