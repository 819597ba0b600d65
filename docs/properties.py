"""What one wants of a position encoding, computed by running it: nothing is read off its class but its hooks.

Legend: n positions, C = n_embd, H = n_head, D = C // H, R rotated channels, L = train.seq_len.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import rope
from config import Config, load_config
from model import GPT, shape_of
from positions import ENCODINGS, At, Encoding

QUICK = Path(__file__).resolve().parent.parent / "configs" / "quick.toml"
HOOKS = {"embed": "the token embeddings", "rotate": "queries and keys", "scores": "the logits"}
SMALL = ("model.n_layer=2", "model.n_head=2", "model.n_embd=32", "train.seq_len=32", "train.dtype=float32")
SHIFTS = (1, 8, 64)     # k of the matrices W_k


# -----------------------------------------------------------------------------------------------------------
# What an encoding does, seen through its hooks


def quick(name: str, *overrides: str) -> Config:
    """The quick config with this encoding."""
    return load_config(QUICK, [f"position.encoding={name}", "model.vocab_size=257", *overrides])


def make(name: str, seed: int = 0) -> Encoding:
    """An encoding of the quick config before training; parameters that start at zero drawn at random."""
    torch.manual_seed(seed)
    config = quick(name)
    encoding = ENCODINGS[name](shape_of(config), config.position).double().requires_grad_(False)
    for p in encoding.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)
    return encoding


def overridden(encoding: type[Encoding]) -> list[str]:
    """Which of the three hooks a class overrides."""
    return [hook for hook in HOOKS if getattr(encoding, hook) is not getattr(Encoding, hook)]


def added(encoding: Encoding, n: int) -> Tensor:
    """What `embed` adds to a token embedding at positions 0 ... n - 1, (n, C)."""
    return encoding.embed(torch.zeros(1, n, quick("none").model.n_embd, dtype=torch.float64),
                          torch.arange(n)[None])[0]


def turned(encoding: Encoding, n: int) -> Tensor:
    """The same random query in all heads as `rotate` leaves it at positions 0 ... n - 1, (n, D)."""
    model, at = quick("none").model, torch.arange(n)[None]
    q = random(1, 1, 1, model.n_embd // model.n_head).expand(1, model.n_head, n, -1)
    return encoding.rotate(q, q, At(at, at, 0, encoding.tables(at, at)))[0][0, 0]


def logits(encoding: Encoding, last: int) -> Tensor:
    """Logits of all-ones q and k after `rotate`, at distances 0 ... last from position last, (H, n)."""
    model = quick("none").model
    ones = torch.ones(1, model.n_head, last + 1, model.n_embd // model.n_head, dtype=torch.float64)
    q_pos, k_pos = torch.tensor([[last]]), torch.arange(last + 1)[None]
    q, k = encoding.rotate(ones[:, :, :1], ones, At(q_pos, k_pos, 0, encoding.tables(q_pos, k_pos)))
    return (q @ k.mT)[0, :, 0].flip(-1) / ones.shape[-1]**0.5


def biases(encoding: Encoding, last: int) -> Tensor:
    """What `scores` adds at distances 0 ... last from a query at position last, (H, n).

    One random query, key and token, the same at all positions: what differs comes from the encoding.
    """
    model = quick("none").model
    H, D = model.n_head, model.n_embd // model.n_head
    q, k = random(2, 1, H, 1, D)
    k, x = k.expand(1, H, last + 1, D), random(1, 1, model.n_embd).expand(1, last + 1, -1)
    q_pos, k_pos = torch.tensor([[last]]), torch.arange(last + 1)[None]
    at = At(q_pos, k_pos, 0, encoding.tables(q_pos, k_pos), encoding.features(x, 0))
    plain = q @ k.mT / D**0.5                                           # (1, H, 1, n)
    return (encoding.scores(plain, q, k, at) - plain)[0, :, 0].flip(-1)


def random(*shape: int) -> Tensor:
    """Standard normal numbers, always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# -----------------------------------------------------------------------------------------------------------
# Properties


class Properties(NamedTuple):
    """What one wants of an encoding, as found by running it."""

    gap: float  # smallest difference of two positions' codes, over the largest; 0: some are the same
    residual: float | None  # of PE(p + k) = W_k PE(p), relative; None: no PE to speak of
    is_defined: bool  # finite at 8 L
    is_fixed: bool  # the same whatever the seed, nothing to learn
    is_axial: bool  # rope.axial_angles makes it n-dimensional
    change: float  # of the logits when all positions shift
    n_parameters: int  # at the quick config


def properties(name: str) -> Properties:
    """The properties of one encoding, each measured by its function below."""
    encoding, n = make(name), 4 * quick(name).train.seq_len + 1
    code = codes(encoding, n)
    vectors = [points for hook, points in code.items() if hook != "scores"]
    other = codes(make(name, seed=1), n)
    parameters = list(encoding.parameters())
    is_fixed = not parameters and all(torch.equal(code[hook], other[hook]) for hook in code)
    return Properties(gap=max((smallest_gap(points) for points in code.values()), default=0.0),
                      residual=max((linear_residual(points) for points in vectors), default=None),
                      is_defined=is_defined(name), is_fixed=is_fixed, is_axial=is_axial(encoding),
                      change=change_when_shifted(name), n_parameters=sum(p.numel() for p in parameters))


def codes(encoding: Encoding, n: int) -> dict[str, Tensor]:
    """Hook -> what it gives positions (`scores`: distances) 0 ... n - 1, as far as defined, (n, numbers).

    `embed`: the vector added; `rotate`: a random query, turned; `scores`: the biases of all heads.
    """
    n = min(n, encoding.max_length or n)
    ways = {"embed": lambda: added(encoding, n), "rotate": lambda: turned(encoding, n),
            "scores": lambda: biases(encoding, n - 1).T}
    return {hook: ways[hook]() for hook in overridden(type(encoding))}


def smallest_gap(points: Tensor) -> float:
    """Smallest distance of two rows (n, numbers) over the largest; 0 where all are the same."""
    gaps = torch.pdist(points)
    return (gaps.min() / gaps.max().clamp(min=1e-30)).item()


def linear_residual(points: Tensor) -> float:
    """|PE(p + k) - W_k PE(p)| / |PE(p + k)|, W_k by least squares, the largest over SHIFTS; points (n, C).

    W_k is fitted at even p and judged at odd p: with fewer positions than channels any points would fit.
    """
    found = []
    for k in SHIFTS:
        before, after = points[:-k], points[k:]
        W = torch.linalg.lstsq(before[::2], after[::2], rcond=1e-7, driver="gelsd").solution
        found.append(((after - before @ W)[1::2].norm() / after[1::2].norm()).item())
    return max(found)


def lively(name: str) -> GPT:
    """A small fp64 model with large random parameters, so that what may show does."""
    torch.manual_seed(0)
    model = GPT(quick(name, *SMALL)).eval().double().requires_grad_(False)
    for p in model.parameters():
        p.normal_(std=0.3 if p.dim() > 1 else 1.0)
    return model


def tokens(n: int) -> Tensor:
    """Random ids (1, n)."""
    return torch.randint(257, (1, n), generator=torch.Generator().manual_seed(0))


def is_defined(name: str) -> bool:
    """Whether a model gives finite logits at 8 L, and does not refuse such positions."""
    model = lively(name)
    try:
        return bool(model(tokens(8 * 32)).isfinite().all())
    except ValueError:                                                  # how max_length shows
        return False


def change_when_shifted(name: str) -> float:
    """Largest change of a model's logits when all positions grow by 11, over their standard deviation."""
    model, at = lively(name), torch.arange(20)
    here = model(tokens(20), positions=at)
    return ((model(tokens(20), positions=at + 11) - here).abs().max() / here.std()).item()


def is_axial(encoding: Encoding) -> bool:
    """Whether rope.axial_angles makes an n-dimensional form of it, whose logits see differences per axis.

    It must turn channel pairs by position times speed and do nothing else. Then either axis of a plane gets
    every second speed, and logits are compared between two points, and the same two points moved.
    """
    if overridden(type(encoding)) != ["rotate"]:
        return False
    points = turned(encoding, 99)
    for layout in rope.LAYOUTS:
        pairs = points.unflatten(-1, (-1, 2) if layout == "interleaved" else (2, -1))
        a, b = pairs.unbind(-1 if layout == "interleaved" else -2)
        speed = torch.atan2(a[0] * b[1] - b[0] * a[1], a[0] * a[1] + b[0] * b[1])       # (R/2,)
        if torch.allclose(points, rope.rotate(points[0], rope.angles(torch.arange(99), speed), layout),
                          atol=1e-4):
            plane = torch.tensor([[7, 2], [3, 9]])                      # two points, (row, column) each
            here, there = (rope.rotate(points[0], rope.axial_angles(plane + move, [speed[::2]] * 2), layout)
                           for move in (torch.tensor([0, 0]), torch.tensor([11, 5])))
            return torch.allclose(here[0] @ here[1], there[0] @ there[1], atol=1e-4)
    return False
