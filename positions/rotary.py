"""Rotary encodings: queries and keys are rotated by their positions, so that logits depend on the distance.

Legend: B batch, T time (Tq queries, Tk keys), D channels of a head, R rotated channels. Angles in radians.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

import rope
from positions.contract import At, Encoding, Options, Shape, for_each_head
from positions.scaling import AnyScaling, Scaling


class RotaryOptions(Options):
    head_multiple = 2

    base: float = Field(
        10_000.0, gt=1, description="the slowest pair rotates by about 1 / base radians per position")
    layout: Literal["half", "interleaved"] = Field(
        "half", description="which channels form a pair. half: i and i + R/2 (Hugging Face); interleaved: "
                            "2i and 2i + 1 (the paper, Meta). R channels of each head rotate")
    scaling: AnyScaling | None = Field(
        None, discriminator="method", description="other frequencies for longer contexts, for example "
                                                  '{ method = "yarn", factor = 4.0 }; --help lists the '
                                                  "methods, and --help yarn the keys of one")

    def rotary_dim(self, head_dim: int) -> int:
        """R, the number of channels of each head that rotate: by default all."""
        return head_dim

    def problems(self, config: Any) -> dict[str, str]:
        if self.scaling is not None:
            problem = self.scaling.problem(self.rotary_dim(config.model.head_width))
            if problem:
                return {"scaling": problem}
        return super().problems(config)


class RoPEOptions(RotaryOptions):
    head_multiple = 1       # with `fraction`

    spectrum: Literal["geometric", "hope", "rope_id"] = Field(
        "geometric", description="the frequencies. geometric: base^(-2i / R); hope: the same, but pairs with "
                                 "less than one turn in L = train.seq_len stand still (Chen 2024); rope_id: "
                                 "geometric steps from a turn in 32 positions to two turns in L, whatever "
                                 "base is, meant for fraction = 0.5 (Frayed RoPE, 2026)")
    local_base: float | None = Field(
        None, gt=1, description="the base in layers with model.window or model.chunk, where no scaling acts "
                                "(Gemma 3: 10,000, and base = 1,000,000 in the others). Default: base")
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of each head's channels that rotate, R of them: GPT-NeoX 0.25, "
                                     "ChatGLM2 0.5; the rest carry no position")

    rotate_values: bool = Field(
        False, description="values are rotated as keys, and results back as queries, R(i)^T sum a R(j) v_j, "
                           "so that the value path knows the distance too (DeepSeek V4)")

    def rotary_dim(self, head_dim: int) -> int:
        return round(self.fraction * head_dim)

    def problems(self, config: Any) -> dict[str, str]:
        m = config.model
        R = round(self.fraction * m.head_width, 6)
        if R % 2 or not R:
            return {"fraction": f"must rotate an even number of the {m.head_width} channels of a head "
                                f"(model.head_dim, or n_embd / n_head), got {R:g}"}
        if self.spectrum == "rope_id" and self.scaling:
            return {"scaling": "changes frequencies, which spectrum = rope_id sets; remove one of them"}
        if self.spectrum != "geometric" and self.local_base:
            return {"local_base": f"needs spectrum = geometric, got {self.spectrum}; remove one of them"}
        if self.local_base and m.window is None and m.chunk is None:
            return {"local_base": "has no effect without model.window or model.chunk; remove it"}
        return super().problems(config)


def layers_within_length(shape: Shape) -> frozenset[int]:
    """The layers in which a window or chunks keep all distances below L: --extend leaves them alone."""
    reach = min(shape.window or math.inf, shape.chunk or math.inf)
    return shape.local_layers if reach <= shape.seq_len else frozenset()


class RoPE(Encoding):
    """Rotate q and k by position times f_i = base^(-2i / R): logits depend on distance. RoFormer, sec. 3."""

    # A subclass gets every scaling if its options subclass RotaryOptions, and every method of --extend if
    # they subclass RoPEOptions. It overrides `frequencies` or `rotate`, or `tables`, if its layers differ.
    Options: ClassVar[type[RotaryOptions]] = RoPEOptions
    spectrum = "geometric"

    def __init__(self, shape: Shape, options: RotaryOptions) -> None:
        super().__init__(shape, options)
        self.base, self.layout = options.base, options.layout
        self.rotary_dim = options.rotary_dim(shape.head_dim)
        self.seq_len = shape.seq_len
        self.scaling: Scaling | None = options.scaling          # --extend sets another one
        # local layers, those that --extend leaves alone, have a base and a scaling of their own
        local_layers = layers_within_length(shape)
        self.local_base, self.local_scaling = options.base, options.scaling
        if isinstance(options, RoPEOptions):
            self.spectrum = options.spectrum
            self.turns_values = options.rotate_values
            if options.local_base:
                local_layers = shape.local_layers
                self.local_base, self.local_scaling = options.local_base, None
        # unlike Attention's: without local_base, a layer whose window is longer than L is not local
        self.is_local = [layer in local_layers for layer in range(shape.n_layer)]

    def frequencies(self, f: Tensor) -> Tensor:
        """Radians per position of each pair, (R/2,), given f, those of the layer's base and scaling."""
        if self.spectrum == "rope_id":
            return rope.inv_freq_within(self.rotary_dim, self.seq_len, device=f.device)
        if self.spectrum == "hope":     # the same pairs stand still under every scaling
            plain = rope.inv_freq(self.rotary_dim, self.base, device=f.device)
            return f.where(rope.makes_full_turn(plain, self.seq_len), 0.0)
        return f

    def layer_frequencies(self, is_local: bool, k_pos: Tensor) -> tuple[Tensor, float]:
        """The frequencies of local or other layers, for keys at k_pos, and a factor on their cos and sin."""
        base, scaling = self.base, self.scaling
        if is_local:
            base, scaling = self.local_base, self.local_scaling
        if scaling is None:
            f, factor = rope.inv_freq(self.rotary_dim, base, device=k_pos.device), 1.0
        else:
            f, factor = scaling.frequencies(self.rotary_dim, base, self.seq_len, k_pos)
            assert f.shape == (self.rotary_dim // 2,), f"{scaling.method}: a frequency for each pair, (R/2,)"
        return self.frequencies(f), factor

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> list[tuple[Any, ...]]:
        """For each layer its `cos_and_sin`. Layers with the same frequencies share one."""
        is_shared = self.local_base == self.base and self.local_scaling is self.scaling
        table_of: dict[bool, tuple[Any, ...]] = {}
        tables = []
        for is_local in self.is_local:
            key = is_local and not is_shared
            if key not in table_of:
                f, factor = self.layer_frequencies(is_local, k_pos)
                table_of[key] = self.cos_and_sin(q_pos, k_pos, f, factor)
            tables.append(table_of[key])
        return tables

    def angles(self, positions: Tensor, f: Tensor) -> Tensor:
        """Positions (1 or B, T), f (R/2,) -> radians (1 or B, T, R/2)."""
        return rope.angles(positions, f)

    def cos_and_sin(self, q_pos: Tensor, k_pos: Tensor, f: Tensor, factor: float) -> tuple[Any, ...]:
        """The cosines and sines of queries, then of keys, (1 or B, 1, T, R/2) each, times the factor."""
        q_angle = self.angles(q_pos, f)[:, None]
        k_angle = self.angles(k_pos, f)[:, None]
        tables = q_angle.cos(), q_angle.sin(), k_angle.cos(), k_angle.sin()
        # as_strided makes torch.compile store the cosines; otherwise it recomputes them in every layer
        return tuple((x * factor).as_strided(x.shape, x.stride()) for x in tables)

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        q_cos, q_sin, k_cos, k_sin = at.tables[at.layer]
        return rope.turn(q, q_cos, q_sin, self.layout), rope.turn(k, k_cos, k_sin, self.layout)

    def turn_values(self, v: Tensor, at: At) -> Tensor:
        """Rotate values (B, G, Tk, D) as keys, under rotate_values."""
        if not self.turns_values:
            return v
        _, _, cos, sin = at.tables[at.layer]
        return rope.turn(v, cos, sin, self.layout)

    def turn_back(self, y: Tensor, at: At) -> Tensor:
        """Rotate the results (B, H, Tq, D) back from the positions of their queries, under rotate_values."""
        if not self.turns_values:
            return y
        cos, sin, _, _ = at.tables[at.layer]
        square = cos**2 + sin**2                # a scaling's factor squared: values and results have one each
        return rope.turn(y, cos / square, -sin / square, self.layout)


class RoPE2DOptions(RotaryOptions):
    head_multiple = 4
    prompt: int = Field(
        0, ge=0, description="n: the first n tokens are a prompt, at (0 ... n - 1, 0), and what follows is "
                             "its answer, at (n - 1, 1 ...), as in ChatGLM-6B. 0: the two are equal")

    def rotary_dim(self, head_dim: int) -> int:
        """R, the number of channels of each head that each of the axes rotates: half."""
        return head_dim // 2

    def problems(self, config: Any) -> dict[str, str]:
        if self.prompt and config.data.cross_documents == "mask" and config.data.positions == "row":
            return {"prompt": 'acts in the first document of a row alone; use data.positions = "document"'}
        return super().problems(config)


class RoPE2D(RoPE):
    """Two positions per token; each rotates half of the pairs, f_i = base^(-4i / D). Heo, arXiv:2403.13298.

    Heo et al. 2024 ("axial") use an image's rows and columns; ChatGLM-6B uses the position in the prompt and
    the position in the answer. Logits depend on the difference along each axis alone. Both axes follow from
    the position in the text: they are equal, or cut at `prompt`. ChatGLM-6B pairs (i, i + D/4) inside each
    half of a head; layout "half" here pairs (i, i + D/2): a permutation of it.
    """

    Options = RoPE2DOptions

    def __init__(self, shape: Shape, options: RoPE2DOptions) -> None:
        super().__init__(shape, options)
        self.prompt, self.is_relative = options.prompt, not options.prompt

    def angles(self, positions: Tensor, f: Tensor) -> Tensor:
        """Positions (1 or B, T) -> radians (1 or B, T, R): first the pairs of one axis, then of the other."""
        in_prompt = in_answer = positions
        if self.prompt:
            in_prompt = positions.clamp(max=self.prompt - 1)
            in_answer = (positions - self.prompt + 1).clamp(min=0)
        return torch.cat((rope.angles(in_prompt, f), rope.angles(in_answer, f)), dim=-1)


class PRoPEOptions(RotaryOptions):
    p: float = Field(
        0.75, ge=0, lt=1, description="share of the pairs that rotate, the fastest; the paper's best: 0.75, "
                                      "Gemma 4 has 0.25. 1 would be rope; 0: none")


class PRoPE(RoPE):
    """RoPE whose slowest pairs do not rotate: f_i = 0 for i >= p D/2. Barbero et al. 2024, arXiv:2410.06205.

    The slow pairs carry content, which in a long context even slow rotation distorts, so here they do not
    rotate. This differs from rope's `fraction`, which spreads all frequencies, slow ones too, over fewer
    channels. p D/2 is rounded down, as in transformers ("proportional").
    """

    Options = PRoPEOptions

    def frequencies(self, f: Tensor) -> Tensor:
        pair = torch.arange(len(f), device=f.device)
        return f.where(pair < self.options.p * self.rotary_dim // 2, 0.0)


class XPosOptions(RotaryOptions):
    scale_base: float = Field(
        512.0, ge=1, description="positions over which the fastest pair shrinks to 2/7; larger is closer to "
                                 "rope. fp32 and bf16 overflow in sequences 140 times as long, fp16 in 14")


class XPos(RoPE):
    """RoPE, and pair c's logit term decays as zeta_c^((i - j) / scale_base). Sun 2022, arXiv:2212.10554.

    xPos: q at i is scaled by zeta_c^(i / scale_base), k at j by zeta_c^(-j / scale_base); zeta_c = (2c /
    D + 0.4) / 1.4, so fast pairs fade out with distance first. The paper's blockwise attention is not
    included.
    """

    Options = XPosOptions

    def cos_and_sin(self, q_pos: Tensor, k_pos: Tensor, f: Tensor, factor: float) -> tuple[Any, ...]:
        q_cos, q_sin, k_cos, k_sin = super().cos_and_sin(q_pos, k_pos, f, factor)
        R, scale_base = self.rotary_dim, self.options.scale_base
        zeta = (torch.arange(0, R, 2, device=q_pos.device) / R + 0.4) / 1.4     # (R/2,)
        # only distances matter: with the origin amid the queries powers stay small; far keys underflow to 0
        origin = (q_pos.amin(-1, keepdim=True) + q_pos.amax(-1, keepdim=True)) // 2             # (1 or B, 1)
        q_power = (q_pos - origin)[:, None, :, None] / scale_base               # (1 or B, 1, T, 1)
        k_power = (k_pos - origin)[:, None, :, None] / scale_base
        q_scale = zeta ** q_power                                               # (1 or B, 1, T, R/2)
        k_scale = zeta ** -k_power
        return q_cos * q_scale, q_sin * q_scale, k_cos * k_scale, k_sin * k_scale


class PoPEOptions(RotaryOptions):
    head_multiple = 1

    layout: Literal["half"] = Field("half", description="no choice here: a pair is made from one channel")

    def rotary_dim(self, head_dim: int) -> int:
        """R = 2 D: each channel becomes a pair."""
        return 2 * head_dim


class PoPE(RoPE):
    """Content as radius, position as angle: sum_c softplus(q_c) softplus(k_c) cos((j - i) f_c + delta_c).

    Over sqrt(D) as usual; i is the query's and j the key's position. Gopalakrishnan et al. 2025,
    arXiv:2509.10534, section 3. Each of the D channels is a pair of its own, with a radius of at least 0 and
    an angle from the position alone: f_c = base^(-c / D), and q and k are twice as wide in their product.

    delta (n_layer, H, D) is learned and starts at 0, as in the paper's experiments on longer contexts. In the
    authors' code each head of keys has one, here each head of queries. It is clamped to [-2 pi, 0].
    """

    Options = PoPEOptions
    bounds: ClassVar = {"delta": (-2 * math.pi, 0.0)}

    def __init__(self, shape: Shape, options: PoPEOptions) -> None:
        super().__init__(shape, options)
        self.delta = nn.Parameter(torch.zeros(shape.n_layer, shape.n_head, shape.head_dim))

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        q_cos, q_sin, k_cos, k_sin = at.tables[at.layer]
        precise = torch.promote_types(q.dtype, torch.float32)
        q_radius, k_radius = F.softplus(q.to(precise)), F.softplus(k.to(precise))
        delta = self.delta[at.layer][:, None]                           # (H, 1, D)
        q_wide = torch.cat((q_radius * delta.cos(), -q_radius * delta.sin()), dim=-1)       # at angle -delta
        k_wide = torch.cat((k_radius * k_cos, k_radius * k_sin), dim=-1)        # (B, G, Tk, 2 D)
        return rope.turn(q_wide, q_cos, q_sin).to(q.dtype), k_wide.to(k.dtype)


class FoPEOptions(RotaryOptions):
    head_multiple = 4

    gain: float = Field(0.3, ge=0, description="size of the random mixture; in the paper 0.3 at 60 M "
                                               "parameters, 0.6 at 1.2 B. 0: every wave is a single one")


class FoPE(RoPE):
    """RoPE whose cosines and sines mix several frequencies: cos_c = sum_m C[m, c] cos(t f_m). Hua 2024.

    Fourier position embedding, Hua et al. 2024, arXiv:2412.17739. The frequencies are RoPE's M with a turn or
    more in L = train.seq_len; there are N = min(M, D / 4) mixtures, for the first N pairs. The others are
    constant, cosine = sine = 1. C and, for the sines, S are (M, N) for each layer and head: random, plus 1
    where the mixture c begins, m = c ceil(M / N). They are not trained, but a part of the checkpoint.

    As in the authors' code (github.com/TsinghuaC3I/Fourier-Position-Embedding), the noise has the standard
    deviation gain sqrt(2 / (N (M + H))), Xavier's for three axes. The result is no rotation: lengths change,
    and logits depend on more than the distance. Under a scaling the same M pairs stay. Each head of queries
    has its own matrices, so k gets as many heads.
    """

    Options = FoPEOptions
    is_relative = False
    cos_mixture: Tensor     # (n_layer, H, M, N)
    sin_mixture: Tensor

    def __init__(self, shape: Shape, options: FoPEOptions) -> None:
        super().__init__(shape, options)
        f = rope.inv_freq(self.rotary_dim, self.base, device="cpu")     # M is read, so never "meta"
        M = int(rope.makes_full_turn(f, self.seq_len).sum())
        N = min(M, self.rotary_dim // 4)
        std = options.gain * math.sqrt(2 / max(1, N * (M + shape.n_head)))
        begins = torch.arange(0, M, math.ceil(M / N) if N else 1)       # at most N
        for name in ("cos_mixture", "sin_mixture"):
            mixture = std * torch.randn(shape.n_layer, shape.n_head, M, N)
            mixture[:, :, begins, torch.arange(len(begins))] += 1
            self.register_buffer(name, mixture)

    def cos_and_sin(self, q_pos: Tensor, k_pos: Tensor, f: Tensor, factor: float) -> tuple[Any, ...]:
        """Those of the M waves that are mixed, then the factor."""
        M = self.cos_mixture.shape[2]
        return *super().cos_and_sin(q_pos, k_pos, f[:M], factor), factor

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        q_cos, q_sin, k_cos, k_sin, factor = at.tables[at.layer]
        cos_mixture = self.cos_mixture[at.layer]                        # (H, M, N)
        sin_mixture = self.sin_mixture[at.layer]
        q_cos = self.mixed(q_cos, cos_mixture, factor)
        q_sin = self.mixed(q_sin, sin_mixture, factor)
        k_cos = self.mixed(k_cos, cos_mixture, factor)
        k_sin = self.mixed(k_sin, sin_mixture, factor)
        k = for_each_head(k, q.shape[1])                                # (B, H, Tk, D)
        return rope.turn(q, q_cos, q_sin, self.layout), rope.turn(k, k_cos, k_sin, self.layout)

    def mixed(self, waves: Tensor, mixture: Tensor, factor: float) -> Tensor:
        """Waves (1 or B, 1, T, M) mixed by (H, M, N), then the constant pairs: (1 or B, H, T, R/2)."""
        n_constant = self.rotary_dim // 2 - mixture.shape[-1]
        with torch.autocast(waves.device.type, enabled=False):
            return F.pad(waves @ mixture.to(waves.dtype), (0, n_constant), value=factor)
