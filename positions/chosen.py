"""Positions that the content of tokens chooses: counts of relevant tokens, rotations by learned angles.

None of them reads positions.

Legend: B batch, T time (the Tq queries are the last of the Tk keys), C = n_embd, H = n_head, D channels of a
head, P = max_pos rows of a table, R rank. Angles in radians.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rope
from positions.contract import At, Encoding, Options, Shape, for_each_head
from positions.parts import short_convolution, uniform


class CoPEOptions(Options):
    max_pos: int = Field(16, ge=2, description="number of learned vectors, for the counts 0 ... max_pos - 1; "
                                               "larger counts use the last")


class CoPE(Encoding):
    """Counts relevant tokens: logits += q_i . E[sum_{l=j..i} g_il]. CoPE, arXiv:2405.18719, sec. 4.

    Golovneva et al. 2024. The gates g_il = sigmoid(logits[i, l]) sum to a fractional count, clamped at
    max_pos - 1. E (max_pos, D), one for each layer and shared by its heads, starts at zero and is
    interpolated between the neighbouring whole counts. Positions are not used. The paper's text has q . (k +
    e) without a scale. We follow the authors' code (appendix), which adds q . e to logits that are divided by
    sqrt(D), and takes the gates from those.
    """

    Options = CoPEOptions

    def __init__(self, shape: Shape, options: CoPEOptions) -> None:
        super().__init__(shape, options)
        self.table = nn.Parameter(torch.zeros(shape.n_layer, options.max_pos, shape.head_dim))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        products = (q @ self.table[at.layer].mT).to(logits.dtype)       # (B, H, Tq, P)
        if not torch.is_grad_enabled():
            return logits + self.interpolate(logits, products)
        # recomputed in backward: otherwise a gate, a count and an index of each logit would be stored
        return logits + checkpoint(self.interpolate, logits, products, use_reentrant=False,
                                   preserve_rng_state=False)

    @staticmethod
    def interpolate(logits: Tensor, products: Tensor) -> Tensor:
        """Logits (B, H, Tq, Tk), products (B, H, Tq, P) -> those at each fractional count, (B, H, Tq, Tk)."""
        P = products.shape[-1]
        # sum the gates from each key to the query; keys ahead are masked, and their gates 0
        gates = logits.sigmoid()
        count = gates.flip(-1).cumsum(dim=-1).flip(-1)
        count = count.clamp(max=P - 1)
        # between two whole counts: the product at the lower one, and a share of the step to the next
        whole = count.long()
        steps = F.pad(products.diff(dim=-1), (0, 1))                    # (B, H, Tq, P)
        return torch.addcmul(products.gather(-1, whole), steps.gather(-1, whole), count - whole)


class ContentRotation(Encoding):
    """Rotate q and k by the angles that `mix` returns, (B, H, Tk, D/2)."""

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        Tq = q.shape[2]
        angle = at.features - at.features[:, :, -Tq, None]              # only differences matter
        precise = torch.promote_types(q.dtype, torch.float32)
        cos, sin = angle.cos().to(precise), angle.sin().to(precise)
        k = for_each_head(k, q.shape[1])
        q = rope.turn(q, cos[:, :, -Tq:], sin[:, :, -Tq:])              # queries are the last of the keys
        return q, rope.turn(k, cos, sin)


class SelectiveRoPEOptions(Options):
    head_multiple = 2

    rank: int = Field(32, ge=1, description="R of the matrix that makes the angles from the layer's input")
    base: float = Field(
        500_000.0, gt=1, description="pair i turns by base^(-2i / D) times what the tokens say")
    n_taps: int = Field(4, ge=1, description="tokens that the convolution of the angles sees; 1: accumulated "
                                             "rotations without one")


class SelectiveRoPE(ContentRotation):
    """RoPE by angles that tokens choose: pair i of q, k at t turns by f_i sum_{l<=t} phi_l. arXiv:2511.17388.

    Movahedi et al. 2025. phi is W x, convolved over 4 tokens for each head and pair. x is the layer's
    normalised input, of which each head's C / H channels are scaled to length 1; W, of rank R (16 in the
    authors' code), reads all C. f_i = base^(-2i / D) is fixed. The logit then depends on the tokens after the
    key up to the query; phi = 1 everywhere is RoPE. Positions are not used. The authors normalise q and k
    afterwards, with weights per channel, which do not commute with a rotation: model.qk_norm, here before it,
    is the same only while these weights are equal. They start the matrices from N(0, 0.02), so that at first
    tokens turn about 70 times less than here. Their optional gate and bias are left out. With n_taps = 1
    these are the accumulated rotations of arXiv:2606.24975, with angles from the layer's input instead of a
    table by token.
    """

    Options = SelectiveRoPEOptions

    def __init__(self, shape: Shape, options: SelectiveRoPEOptions) -> None:
        super().__init__(shape, options)
        n_layer, H, C, D = shape.n_layer, shape.n_head, shape.n_embd, shape.head_dim
        self.n_slices = H if C % H == 0 else 1                          # of x, normalised one by one
        self.base = options.base
        self.down = uniform(n_layer, options.rank, C, fan_in=C)
        self.up = uniform(n_layer, H * D // 2, options.rank, fan_in=options.rank)
        self.convolution = uniform(n_layer, H, D // 2, options.n_taps, fan_in=options.n_taps)

    def features(self, x: Tensor, layer: int) -> Tensor:
        H = self.convolution.shape[1]
        x = F.normalize(x.unflatten(-1, (self.n_slices, -1)), dim=-1).flatten(-2)
        phi = F.linear(F.linear(x, self.down[layer]), self.up[layer])   # (B, T, H D/2)
        return phi.unflatten(-1, (H, -1)).transpose(1, 2)               # (B, H, T, D/2)

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        """-> the angles (B, H, Tk, D/2), in fp64: sums over long texts are large, their differences small."""
        wide = rope.widest(features.device)
        phi = short_convolution(features.to(wide), self.convolution[layer].to(wide), documents)
        D = 2 * phi.shape[-1]
        f = rope.inv_freq(D, self.base, dtype=wide, device=phi.device)
        return phi.cumsum(dim=2) * f


class RePoOptions(Options):
    head_multiple = 2

    base: float = Field(10_000.0, gt=1, description="pair i turns by base^(-2i / D) per unit of z")


class RePo(ContentRotation):
    """RoPE at positions that tokens choose: z_t = w (silu(G x_t) * V x_t) instead of t. arXiv:2512.14391.

    "Context repositioning", 2025. One real number per head and token, in any order; x is the layer's
    normalised input, G and V are (C / 8, C). Only the causal mask tells the true order. Angles are z f_i,
    f_i = base^(-2i / D). The authors add it to a pretrained model at base 500,000, whose layers 0 to 4 of 16
    keep RoPE. They start from N(0, 0.02), truncated, and x is the residual stream before its norm.
    """

    Options = RePoOptions

    def __init__(self, shape: Shape, options: RePoOptions) -> None:
        super().__init__(shape, options)
        n_layer, H, C = shape.n_layer, shape.n_head, shape.n_embd
        R = max(1, C // 8)
        self.base, self.head_dim = options.base, shape.head_dim
        self.gate = uniform(n_layer, R, C, fan_in=C)
        self.value = uniform(n_layer, R, C, fan_in=C)
        self.out = uniform(n_layer, H, R, fan_in=R)

    def features(self, x: Tensor, layer: int) -> Tensor:
        gate = F.silu(F.linear(x, self.gate[layer]))                    # (B, T, R)
        hidden = gate * F.linear(x, self.value[layer])
        z = F.linear(hidden, self.out[layer])                           # (B, T, H)
        return z.transpose(1, 2)[..., None]                             # (B, H, T, 1)

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        wide = rope.widest(features.device)
        f = rope.inv_freq(self.head_dim, self.base, dtype=wide, device=features.device)
        return features.to(wide) * f                                    # (B, H, Tk, D/2)
