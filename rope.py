"""Rotary position embedding: frequencies, angles, rotation in both layouts, conversion between the layouts.

RoPE rotates channel pair i of a query at position m by the angle m * f_i, and of a key at position n by
n * f_i. A rotation R satisfies R(a)^T R(b) = R(b - a), so the logit q_m . k_n depends on m - n alone.
Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.4.

Which channels form a pair is a convention. There are two, and mixing them up causes most RoPE bugs:

  half          pairs (i, i + R/2): GPT-NeoX, Hugging Face's Llama, ChatGLM-6B (within each half of its heads)
  interleaved   pairs (2i, 2i + 1): the paper, GPT-J, Meta's LLaMA, ChatGLM2 and later

R <= D is the number of channels that rotate. Both layouts are the same function up to a permutation of the
channels, so `to_half` and `to_interleaved` convert trained weights without loss.

Legend: B batch, T time, H = n_head, D channels of a head, R = rotated channels, A position axes. Angles in
radians.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("half", "interleaved")


def inv_freq(dim: int, base: float = 10_000.0, *, dtype: torch.dtype = torch.float32,
             device: torch.device | str | None = None) -> Tensor:
    """Frequency of each pair: f_i = base^(-2i / dim), i = 0 ... dim/2 - 1. Radians per position, (dim/2,).

    From 1 (a full turn every 2 pi positions) down to nearly 1 / base. RoFormer, section 3.2.2, where f is
    called theta. The order of operations is that of Hugging Face and other libraries: at large positions the
    last bit of f makes a visible difference.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rotary dimension must be a positive even number, got {dim}")
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)


def stop_slowest(inv_freq: Tensor, p: float) -> Tensor:
    """Stop the slowest pairs: frequency 0 from pair floor(p R/2) on. p = 1: RoPE, p = 0: NoPE. -> (R/2,).

    p-RoPE, Barbero et al. 2024, arXiv:2410.06205. The other pairs keep RoPE's frequencies, whereas rotating
    only p * R channels spreads the frequencies over the whole range.
    """
    dim = 2 * len(inv_freq)
    f = inv_freq.clone()
    f[int(p * dim // 2):] = 0.0
    return f


def stop_unfinished(inv_freq: Tensor, L: int) -> Tensor:
    """Stop the pairs that make less than one turn in L positions. -> (R/2,).

    HoPE, Chen et al. 2024, arXiv:2410.21216: beyond L these pairs would reach angles never seen in training.
    FoPE, Hua et al. 2024, arXiv:2412.17739, drops the same ones.
    """
    return inv_freq.masked_fill(L * inv_freq < 2 * math.pi, 0.0)


def inv_freq_in_sight(dim: int, L: int, *, device: torch.device | str | None = None) -> Tensor:
    """dim/2 frequencies in geometric steps, from a turn in 32 positions to two turns in L. -> (dim/2,).

    RoPE-ID, "Frayed RoPE", arXiv:2603.18017: no pair meets angles beyond L that it has not met within L.
    """
    return torch.logspace(math.log2(2 * math.pi / 32), math.log2(4 * math.pi / L), dim // 2, 2, device=device)


# -----------------------------------------------------------------------------------------------------------
# Scaling: other frequencies for a context that is `factor` (s) times the training length L. Some functions
# take and return frequencies (R/2,), of any dtype; others return a new base. At s = 1 each returns its input
# to the last bit.


def interpolate(inv_freq: Tensor, factor: float) -> Tensor:
    """Position interpolation: f_i / s, as if positions were s times closer. Chen 2023, arXiv:2306.15595, 2.3.

    `linear` in Hugging Face. Up to s L every angle was seen in training, but neighbours differ by less.
    """
    return inv_freq / factor


def ntk_base(dim: int, base: float, factor: float) -> float:
    """NTK-aware: base s^(R / (R - 2)). The fastest pair keeps frequency 1, the slowest gets f / s as in PI.

    bloc97 2023, r/LocalLLaMA; YaRN, Peng et al. 2023, arXiv:2309.00071, section 3.1. R >= 4.
    """
    if dim < 4:
        raise ValueError(f"NTK scaling needs 4 rotary channels or more, got {dim}")
    return base * factor ** (dim / (dim - 2))


def dynamic_ntk_base(dim: int, base: float, factor: float, L: int, T: int) -> float:
    """NTK-aware with the scale that T tokens need: s' = a T / L - (a - 1), a = factor; 1 for T <= L.

    emozilla 2023, r/LocalLLaMA; YaRN, section 3.3. With a = 1 the scale is T / L: the result is that of
    NTK-aware scaling for T tokens. A larger a stretches more than T needs.
    """
    return ntk_base(dim, base, 1 + factor * max(0, T - L) / L)      # this order: exactly 1 at T <= L


def pair_that_turns(times: float, dim: int, base: float, L: int) -> float:
    """Real-valued index of the pair that makes `times` turns in L: R ln(L / (2 pi times)) / (2 ln base).

    YaRN, section 3.2. From L f / (2 pi) = times and f = base^(-2i / R); below 0 if no pair is that fast.
    """
    return dim * math.log(L / (2 * math.pi * times)) / (2 * math.log(base))


def yarn(inv_freq: Tensor, base: float, factor: float, L: int, beta_fast: float = 32.0,
         beta_slow: float = 1.0, truncate: bool = True) -> Tensor:
    """Keep pairs with beta_fast turns within L or more, interpolate those below beta_slow, mix in between.

    f' = (1 - g) f + g f / s, g = clamp((i - low) / (high - low), 0, 1). low and high are the indices of the
    pairs that turn beta_fast and beta_slow times; `truncate` rounds them outwards, and they are clamped to
    0 ... R - 1 as in the authors' code. YaRN, Peng et al. 2023, arXiv:2309.00071, section 3.2 (NTK-by-parts).
    """
    dim = 2 * len(inv_freq)
    low, high = (pair_that_turns(beta, dim, base, L) for beta in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    i = torch.arange(dim // 2, dtype=inv_freq.dtype, device=inv_freq.device)
    g = ((i - low) / max(high - low, 1e-3)).clamp(0, 1)             # low = high: a step
    return torch.lerp(inv_freq, inv_freq / factor, g)


def yarn_attention_factor(factor: float) -> float:
    """0.1 ln s + 1, a factor on both cos and sin, so its square is on the logits. YaRN, section 3.4."""
    return 0.1 * math.log(factor) + 1


def llama3(inv_freq: Tensor, factor: float, L: int, low_freq_factor: float = 1.0,
           high_freq_factor: float = 4.0) -> Tensor:
    """Keep pairs with high_freq_factor turns in L or more, interpolate those below low, mix in between.

    f' = (1 - g) f / s + g f, g = clamp((turns - low) / (high - low), 0, 1), turns = L f / (2 pi). Llama 3.1's
    code, github.com/meta-llama/llama-models (there s = 8, L = 8192); not in its paper, arXiv:2407.21783.
    """
    turns = L * inv_freq / (2 * math.pi)
    g = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return torch.lerp(inv_freq / factor, inv_freq, g)


def mrrope(inv_freq: Tensor, factor: float, L: int, beta_fast: float = 32.0,
           beta_slow: float = 1.0) -> Tensor:
    """MrRoPE-Pro: f'_i = f_i / s^(m (m + 1) / (n (n + 1))), m = clamp(i - low, 0, n). arXiv:2601.22181, 2026.

    low is the last pair with more than beta_fast turns in L, or 0; low + n is the first with fewer than
    beta_slow. Seen as digits in a mixed radix, pair low + k passes a factor s^(2 (k + 1) / (n (n + 1))) on to
    all slower pairs: little at first, more and more towards the slow ones. The factors multiply to s.
    """
    turns = L * inv_freq / (2 * math.pi)                                # falls with i
    low = (turns > beta_fast).sum().sub(1).clamp(min=0)
    n = ((turns >= beta_slow).sum() - low).clamp(min=1)
    m = (torch.arange(len(inv_freq), device=inv_freq.device) - low).clamp(min=0).minimum(n)
    return inv_freq / factor ** (m * (m + 1) / (n * (n + 1))).to(inv_freq.dtype)


def longrope_attention_factor(factor: float, L: int) -> float:
    """sqrt(1 + ln s / ln L), on both cos and sin. LongRoPE's code, github.com/microsoft/LongRoPE; L >= 2."""
    return math.sqrt(1 + math.log(factor) / math.log(L))


# -----------------------------------------------------------------------------------------------------------
# Rotation


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """angle[..., t, i] = positions[..., t] * inv_freq[i]. Any integers (..., T) -> radians (..., T, R/2).

    Computed in inv_freq's dtype (fp32, or fp64 for exact results), never in the model's: bf16 holds integers
    exactly only up to 256. Positions may have offsets, gaps and repeats.
    """
    return positions.to(inv_freq.dtype)[..., None] * inv_freq


def axial_angles(positions: Tensor, inv_freqs: Sequence[Tensor]) -> Tensor:
    """Angles for positions with A axes: each axis rotates its own share of the channel pairs.

    Positions (..., T, A) and one inv_freq (R_a/2,) per axis -> radians (..., T, sum_a R_a/2), axis by axis.
    A logit then depends on the difference along each axis alone. This is the 2-D form of ChatGLM-6B (axes:
    position in the text, position in the answer) and of vision transformers (row, column). ChatGLM-6B pairs
    (i, i + D/4) inside each half of the head; layout "half" here pairs (i, i + D/2): a permutation of it.
    """
    if positions.shape[-1] != len(inv_freqs):
        raise ValueError(f"positions have {positions.shape[-1]} axes, "
                         f"but {len(inv_freqs)} inv_freqs were given")
    return torch.cat([angles(positions[..., a], f) for a, f in enumerate(inv_freqs)], dim=-1)


def rotate(x: Tensor, angle: Tensor, layout: str = "half") -> Tensor:
    """Rotate the pairs of x (..., T, D) by +angle (..., T, R/2), counter-clockwise; channels from R on pass.

    layout "half" pairs (i, i + R/2), "interleaved" pairs (2i, 2i + 1). Computed in angle's precision,
    returned in x's dtype. The inverse is rotate(x, -angle).
    """
    return turn(x, angle.cos(), angle.sin(), layout)


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "half") -> Tensor:
    """`rotate`, given the cosines and sines (..., T, R/2): computed once per forward pass for all layers.

    (a, b) -> (a cos - b sin, b cos + a sin) for each pair.
    """
    R = 2 * cos.shape[-1]
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if x.shape[-1] < R:
        raise ValueError(f"{R} channels to rotate, but x has only {x.shape[-1]}")
    is_trained = x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if is_trained and x.device.type == "cpu" and x.dtype == cos.dtype and not cos.requires_grad:
        return Turned.apply(x, cos, sin, layout)
    turned, passed = x[..., :R], x[..., R:]
    a, b = pairs(turned, layout)
    if layout == "half":
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    turned = turned.to(x.dtype)
    return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned


def pairs(x: Tensor, layout: str) -> tuple[Tensor, ...]:
    """The two channels of each pair of x (..., T, R), as views (..., T, R/2)."""
    return x.chunk(2, dim=-1) if layout == "half" else x.unflatten(-1, (-1, 2)).unbind(-1)


class Turned(torch.autograd.Function):
    """`turn` in half of the passes over memory, for eager training on a CPU. Its gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        R, y = 2 * cos.shape[-1], torch.empty_like(x)
        (a, b), (c, d) = pairs(x[..., :R], layout), pairs(y[..., :R], layout)
        torch.mul(a, cos, out=c).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=d).addcmul_(a, sin)
        y[..., R:] = x[..., R:]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return Turned.apply(grad, cos, -sin, ctx.layout), None, None, None


# -----------------------------------------------------------------------------------------------------------
# Conversion between the layouts


def _half_order(n_rows: int, n_head: int, rotary_dim: int | None) -> Tensor:
    """Row order from interleaved pairs to half pairs: first the even channels of each head, then the odd."""
    if n_rows % n_head:
        raise ValueError(f"{n_rows} rows do not divide into {n_head} heads")
    D = n_rows // n_head
    R = D if rotary_dim is None else rotary_dim
    if R % 2 or not 0 < R <= D:
        raise ValueError(f"rotary_dim must be even and at most the head dimension {D}, got {R}")
    channel = torch.cat((torch.arange(0, R, 2), torch.arange(1, R, 2), torch.arange(R, D)))
    return (D * torch.arange(n_head)[:, None] + channel).flatten()


def to_half(weight: Tensor, n_head: int, rotary_dim: int | None = None) -> Tensor:
    """Convert a query or key projection trained with interleaved rotation for half rotation: same logits.

    `weight` is (H * D, C), or a bias (H * D,), or a norm over the head dimension (D,) with n_head=1. Only the
    first rotary_dim channels of each head are permuted (default: all). Do not convert the value projection.
    """
    return weight[_half_order(len(weight), n_head, rotary_dim).to(weight.device)]


def to_interleaved(weight: Tensor, n_head: int, rotary_dim: int | None = None) -> Tensor:
    """Convert a query or key projection trained with half rotation for interleaved; inverse of `to_half`."""
    order = _half_order(len(weight), n_head, rotary_dim)
    return weight[order.argsort().to(weight.device)]


def long_term_decay(distance: Tensor, inv_freq: Tensor) -> Tensor:
    """sum_i cos(distance * f_i) / (R/2) for distances (...): the logit of all-ones q and k, 1 at distance 0.

    It falls with distance on average, not monotonically, and slower for a larger base. RoFormer, section
    3.4.3, bounds the logit by the mean |S_j| of partial sums of the same terms; this simpler curve is the one
    usually drawn.
    """
    return angles(distance, inv_freq).cos().mean(dim=-1)
