"""Rotary position embedding: frequencies, angles, rotation in both layouts, conversion between the layouts.

RoPE rotates channel pair i of a query at position m by the angle m * f_i, and of a key at position n by
n * f_i. A rotation R satisfies R(a)^T R(b) = R(b - a), so the logit q_m . k_n depends on m - n alone.
Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.4.

Which channels form a pair is a convention. There are two, and mixing them up causes most RoPE bugs:

  half          pairs (i, i + R/2): GPT-NeoX, Hugging Face's Llama, ChatGLM-6B (within each half of its heads)
  interleaved   pairs (2i, 2i + 1): the paper, GPT-J, Meta's LLaMA, ChatGLM2 and later

R <= D is the number of channels that rotate. Both layouts are the same function up to a permutation of the
channels, so `to_half` and `to_interleaved` convert trained weights without loss.

Legend: B batch, T time, H = n_head, D channels of a head, R = rotated channels. Angles in radians.
"""

import math

import torch
from torch import Tensor

LAYOUTS = ("half", "interleaved")


def inv_freq(dim: int, base: float = 10_000.0, *, dtype: torch.dtype = torch.float32,
             device: torch.device | str | None = None) -> Tensor:
    """Frequency of each pair: f_i = base^(-2i / dim), i = 0 ... dim/2 - 1. Radians per position, (dim/2,).

    From 1 (a full turn every 2 pi positions) down to nearly 1 / base. RoFormer, section 3.2.2, where f is
    called theta. i counts from 0, as in its code, not from 1. The order of operations is that of Hugging Face
    and other libraries: at large positions the last bit of f makes a visible difference.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary dimension must be a positive even number, got {dim}")
    two_i = torch.arange(0, dim, 2, dtype=dtype, device=device)
    return 1.0 / base ** (two_i / dim)


def makes_full_turn(f: Tensor, L: int) -> Tensor:
    """Whether the pairs of these frequencies (R/2,) make a full circle or more in L positions, (R/2,).

    Beyond L the others would reach angles never seen in training. HoPE stops them, Chen et al. 2024,
    arXiv:2410.21216; FoPE drops them, Hua et al. 2024, arXiv:2412.17739.
    """
    return L * f >= 2 * math.pi


def inv_freq_within(dim: int, L: int, *, device: torch.device | str | None = None) -> Tensor:
    """dim/2 frequencies in geometric steps, from a turn in 32 positions to two turns in L. -> (dim/2,).

    RoPE-ID, "Frayed RoPE", arXiv:2603.18017: no pair meets angles beyond L that it has not met within L.
    """
    fastest = 2 * math.pi / 32
    slowest = 4 * math.pi / L
    return torch.logspace(math.log2(fastest), math.log2(slowest), dim // 2, base=2, device=device)


def widest(device: torch.device) -> torch.dtype:
    """fp64, for long sums and large angles; on Apple's GPUs, which have none, fp32, which loses digits."""
    if device.type == "mps":
        return torch.float32
    return torch.float64


# -----------------------------------------------------------------------------------------------------------
# Rotation


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """angle[..., t, i] = positions[..., t] * inv_freq[i]. Any integers (..., T) -> radians (..., T, R/2).

    Computed in inv_freq's dtype (fp32, or fp64 for exact results), never in the model's: bf16 holds integers
    exactly only up to 256. Positions may have offsets, gaps and repeats. In fp32 the angle of fast pairs at
    position 1e6 is off by up to 0.1 radians, and from 2^24 on positions merge.
    """
    positions = positions.to(inv_freq.dtype)
    return positions[..., None] * inv_freq


def rotate(x: Tensor, angle: Tensor, layout: str = "half") -> Tensor:
    """Rotate the pairs of x (..., T, D) by +angle (..., T, R/2), counter-clockwise; channels from R on pass.

    layout "half" pairs (i, i + R/2), "interleaved" pairs (2i, 2i + 1). Computed in angle's precision,
    returned in x's dtype. The inverse is rotate(x, -angle).
    """
    cos, sin = angle.cos(), angle.sin()
    return turn(x, cos, sin, layout)


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> Tensor:
    """`rotate`, given the cosines and sines (..., T, R/2): computed once per forward pass for all layers.

    (a, b) -> (a cos - b sin, b cos + a sin) for each pair.
    """
    D = x.shape[-1]
    R = 2 * cos.shape[-1]
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if R > D:
        raise ValueError(f"{R} channels to rotate, but x has only {D}")
    turning, passing = x[..., :R], x[..., R:]

    # split the channels that rotate into pairs (a, b), (..., T, R/2) each
    if layout == "half":
        a, b = turning.chunk(2, dim=-1)
    else:
        a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)

    # rotate each pair by its angle, counter-clockwise, in the precision of cos and sin
    new_a = a * cos - b * sin
    new_b = b * cos + a * sin

    # put the pairs back where they were
    if layout == "half":
        turned = torch.cat((new_a, new_b), dim=-1)
    else:
        turned = torch.stack((new_a, new_b), dim=-1).flatten(-2)
    turned = turned.to(x.dtype)

    if R == D:
        return turned
    return torch.cat((turned, passing), dim=-1)


# -----------------------------------------------------------------------------------------------------------
# Conversion between the layouts


def _half_order(n_rows: int, n_head: int, rotary_dim: int | None) -> Tensor:
    """Row order from interleaved pairs to half pairs: first the even channels of each head, then the odd."""
    if n_rows % n_head:
        raise ValueError(f"{n_rows} rows do not divide into {n_head} heads")
    D = n_rows // n_head
    R = rotary_dim
    if R is None:
        R = D
    if R % 2 or not 0 < R <= D:
        raise ValueError(f"rotary_dim must be even and at most the head dimension {D}, got {R}")
    even = torch.arange(0, R, 2)
    odd = torch.arange(1, R, 2)
    passing = torch.arange(R, D)
    channels = torch.cat((even, odd, passing))                          # (D,)
    first_rows = D * torch.arange(n_head)                               # (H,)
    rows = first_rows[:, None] + channels                               # (H, D)
    return rows.flatten()


def to_half(weight: Tensor, n_head: int, rotary_dim: int | None = None) -> Tensor:
    """Permute the rows of a query or key projection from the interleaved to the half layout: same logits.

    `weight` is (n_head * D, C), or a bias (n_head * D,), or a norm over the head dimension (D,), n_head = 1.
    n_head counts the heads of this projection: of keys, the key heads. Only the first rotary_dim channels of
    each head are permuted (default: all). Do not convert the value projection.
    """
    order = _half_order(len(weight), n_head, rotary_dim)
    return weight[order.to(weight.device)]


def to_interleaved(weight: Tensor, n_head: int, rotary_dim: int | None = None) -> Tensor:
    """Permute them from the half to the interleaved layout; inverse of `to_half`."""
    order = _half_order(len(weight), n_head, rotary_dim)
    inverse = order.argsort()
    return weight[inverse.to(weight.device)]
