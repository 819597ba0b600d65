"""What the content of tokens does to logits and products: gates, counts, reflections, chosen positions.

None of them holds T x T numbers for all queries at once. Those from PaTH on, and the gates of `forgetting`,
do not read positions.

Legend: B batch, T time (the Tq queries are the last of the Tk keys), C = n_embd, H = n_head, D channels of a
head, P rows of a table, R rank. Angles in radians.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rope
from positions.bias import ALiBi, ALiBiOptions, KerpleLog, PairMLP, rounded
from positions.contract import At, Encoding, Options, Shape, for_each_head

CHUNK = 64      # keys whose reflections are applied at once


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
        if torch.is_grad_enabled():     # autograd would keep a gate, a count and an index for each logit
            return logits + checkpoint(self.at_counts, logits, products, use_reentrant=False,
                                       preserve_rng_state=False)
        return logits + self.at_counts(logits, products)

    @staticmethod
    def at_counts(logits: Tensor, products: Tensor) -> Tensor:
        """Logits (B, H, Tq, Tk), products (B, H, Tq, P) -> those at each fractional count, (B, H, Tq, Tk)."""
        # from each key to the query: keys ahead are masked, and their gates 0
        count = logits.sigmoid().flip(-1).cumsum(dim=-1).flip(-1).clamp(max=products.shape[-1] - 1)
        whole = count.long()
        steps = F.pad(products.diff(dim=-1), (0, 1))                    # from each whole count to the next
        return torch.addcmul(products.gather(-1, whole), steps.gather(-1, whole), count - whole)


class Forgetting(Encoding):
    """Forget gates: logits += sum_{l=j+1..i} log f_l, f_l = sigmoid(w x_l + b). Lin 2025, arXiv:2503.02130.

    The Forgetting Transformer (FoX), section 3: ALiBi with a slope that depends on the tokens in between, per
    head and layer. x is the layer's normalised input. Positions are not used. As in the authors' code, w
    starts with std 0.02 and b at 0, so f near 1/2: a steep penalty of 0.7 per token.
    """

    can_fold = True
    folds_sums = True

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        n_layer, H, C = shape.n_layer, shape.n_head, shape.n_embd
        self.w = nn.Parameter(nn.init.normal_(torch.empty(n_layer, H, C), std=0.02))
        self.b = nn.Parameter(torch.zeros(n_layer, H))

    def features(self, x: Tensor, layer: int) -> Tensor:
        gate = F.linear(x, self.w[layer], self.b[layer])                # (B, T, H)
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return F.logsigmoid(gate).transpose(1, 2)[..., None]            # (B, H, T, 1)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        # In fp64 and relative to the block's first query, so that tokens before or after both query and key
        # add no rounding errors.
        c = at.features[..., 0].cumsum(dim=-1, dtype=rope.widest(q.device))     # (B, H, Tk)
        c = (c - c[..., -q.shape[2], None]).to(logits.dtype)
        bias = c[..., -q.shape[2]:, None] - c[..., None, :]             # (B, H, Tq, Tk): queries come last
        return logits + bias.clamp(max=0)                               # for keys ahead: an empty sum

    def fold(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """The difference of the sums up to query and key: each is a channel of the one, times 1 in the other.

        The query's, constant along a row, would change no weight, but without it the rounding errors of other
        pairs enter a gate's gradient. In 16 bits a sum takes three channels, each with what the one before
        rounds off. The kernel sums in fp32: an error of 2^-24 times the sum of log f up to the middle query.
        """
        Tq, D = q.shape[2:]
        c = at.features.cumsum(dim=2, dtype=rope.widest(q.device))      # (B, H, Tk, 1)
        c = (c - c[:, :, -Tq + Tq // 2, None]) * D**0.5

        def channels(rest: Tensor) -> Tensor:
            pieces = []
            for _ in range(3 if q.dtype.itemsize == 2 else 1):
                high = rounded(rest, q.dtype) if q.dtype.itemsize == 2 else rest
                pieces.append((rest + (high - rest).detach()).to(q.dtype))      # the gradient is that of rest
                rest = rest.detach() - high
            return torch.cat(pieces, dim=-1)                            # (B, H, T, 1 or 3)

        # each with casts of its own: one gradient in 16 bits would round their difference once more
        of_q, of_k = channels(c[:, :, -Tq:]), channels(-c)
        return (torch.cat((q, of_q, torch.ones_like(of_q)), dim=-1),
                torch.cat((k, torch.ones_like(of_k), of_k), dim=-1))


class GRAPEAPOptions(Options):
    p_dim: int = Field(8, ge=2, multiple_of=2, description="n, the numbers p of a token for each head")


class GRAPEAP(Encoding):
    """ALiBi with content: logits += slope[h] sum_{l=j+1..i} logsigmoid(p_i . R_l p'_l / n). arXiv:2512.07805.

    GRAPE's additive path integral, Zhang et al. 2025. p_t = W x_t has n numbers per head, x the layer's
    normalised input; p' is p over its root mean square, and R_l turns the pairs (c, c + n/2) by -l radians.
    The slopes are ALiBi's and fixed. As in the authors' code (github.com/model-architectures/GRAPE, GRAPE-AP
    v1), p_i is neither normalised nor turned, so the bias depends on the positions l themselves; in the paper
    it does not. The authors have model.qk_norm on.
    """

    Options = GRAPEAPOptions
    is_relative = False

    def __init__(self, shape: Shape, options: GRAPEAPOptions) -> None:
        super().__init__(shape, options)
        n_layer, C = shape.n_layer, shape.n_embd
        self.n_head = shape.n_head
        self.w = nn.Parameter(0.5 * C**-0.5 * torch.randn(n_layer, self.n_head * options.p_dim, C))

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return ALiBi.slopes(self.n_head).to(q_pos.device, non_blocking=True)[:, None, None]     # (H, 1, 1)

    def features(self, x: Tensor, layer: int) -> Tensor:
        return F.linear(x, self.w[layer]).unflatten(-1, (self.n_head, -1)).transpose(1, 2)      # (B, H, T, n)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        Tq, Tk, n = q.shape[2], k.shape[2], at.features.shape[-1]
        with torch.autocast(q.device.type, enabled=False):
            p = at.features.to(logits.dtype)
            # in fp64: the radians are whole positions, which may be large
            one_turn = torch.ones(n // 2, dtype=rope.widest(q.device), device=q.device)
            angle = rope.angles(at.k_pos[:, None], -one_turn)
            turned = rope.rotate(F.rms_norm(p, (n,)), angle)            # (B, H, Tk, n)
            steps = at.tables * F.logsigmoid(p[:, :, -Tq:] @ turned.mT / n)         # (B, H, Tq, Tk)
        after = F.pad(steps.tril(Tk - Tq)[..., 1:], (0, 1))             # key j: the step of j + 1
        return logits + after.flip(-1).cumsum(dim=-1).flip(-1)          # from the query backwards


class DAPEOptions(Options):
    bias: Literal["alibi", "kerple_log"] = Field(
        "alibi", description="the bias by distance that the network adapts; the paper's best is kerple_log's")


class DAPE(Encoding):
    """A bias adapted to the logits: logits += b + MLP([logits, b]), over the heads. Zheng, arXiv:2405.14722.

    Data-adaptive positional encoding (also CAPE), Zheng et al. 2024. b is ALiBi's or KERPLE's bias; the MLP
    sees the logits and the biases of all heads for one query and key, 2 H -> 32 -> H with LeakyReLU. As in
    the authors' code (github.com/chuanyang-Zheng/DAPE) each layer has its own, with PyTorch's start; here
    KERPLE's p and a are shared by the layers. lr_scale is 1, not tuned: b is useful from the start.
    """

    Options = DAPEOptions
    n_hidden = 32

    def __init__(self, shape: Shape, options: DAPEOptions) -> None:
        super().__init__(shape, options)
        H = shape.n_head
        plain = ALiBiOptions.model_validate({"encoding": "alibi"})
        self.bias = ALiBi(shape, plain) if options.bias == "alibi" else KerpleLog(shape, options)
        self.mlps = nn.ModuleList(
            PairMLP(2 * H, self.n_hidden, nn.LeakyReLU(inplace=True), H) for _ in range(shape.n_layer))

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Any:
        return self.bias.tables(q_pos, k_pos)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        seen = logits.masked_fill(logits.isneginf(), 0)                 # the MLP would make NaN of -inf
        b = self.bias.scores(logits.new_zeros(()), q, k, at).to(logits.dtype)       # (1 or B, H, Tq, Tk)
        both = torch.cat((seen, b.expand_as(seen)), dim=1)              # (B, 2 H, Tq, Tk)
        with torch.autocast(logits.device.type, enabled=False):
            return logits + b + self.mlps[at.layer](both)


def short_convolution(x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    """Each channel of x (B, H, T, F) over the last n tokens of its document; weight (H, F, n), last = own."""
    out = x * weight[..., None, :, -1]
    for past in range(1, min(weight.shape[-1], x.shape[2])):
        earlier = F.pad(x, (0, 0, past, -past))                         # (B, H, T, F)
        if documents is not None:
            same = F.pad(documents, (past, -past), value=-1) == documents
            earlier = earlier * same[:, None, :, None]
        out = out + earlier * weight[..., None, :, -1 - past]
    return out


class PaTHOptions(Options):
    rank: int = Field(32, ge=1, description="R of the matrix that makes w from the layer's input")


class PaTH(Encoding):
    """Reflections in between: logits q_i^T H_i H_(i-1) ... H_(j+1) k_j / sqrt(D), H_t = I - beta_t w_t w_t^T.

    Yang et al. 2025, arXiv:2505.16381, section 3: like RoPE with a matrix for each token. beta_t = 2
    sigmoid(u x_t + b), and w_t is silu(convolution of W x_t over 3 tokens), normalised to length 1; x is the
    layer's normalised input, W has rank R. In the authors' code the heads that share a key share w and beta;
    here each head of queries has its own. Positions are not used.

    Chunk by chunk of keys, from the query backwards, r = q_i^T H_i ... H_(e) is kept for every query of the
    block. With w (c, D) and B = diag(beta) of a chunk, M = (I + strictly lower part of B w w^T)^-1 B:
    r <- r - r w^T M w for the whole chunk, and r . k_j - r w^T M (w k_j for t > j, else 0) is the logit. For
    queries inside the chunk r w^T is cut to t <= i.
    """

    Options = PaTHOptions

    def __init__(self, shape: Shape, options: PaTHOptions) -> None:
        super().__init__(shape, options)
        n_layer, H, C, D = shape.n_layer, shape.n_head, shape.n_embd, shape.head_dim
        self.down = nn.Parameter(0.02 * torch.randn(n_layer, options.rank, C))
        self.up = nn.Parameter(0.02 * torch.randn(n_layer, H * D, options.rank))
        self.convolution = nn.Parameter(3**-0.5 * (2 * torch.rand(n_layer, H, D, 3) - 1))   # PyTorch's start
        self.u = nn.Parameter(0.02 * torch.randn(n_layer, H, C))
        self.b = nn.Parameter(torch.zeros(n_layer, H))

    def features(self, x: Tensor, layer: int) -> Tensor:
        H = self.b.shape[1]
        w = F.linear(F.linear(x, self.down[layer]), self.up[layer]).unflatten(-1, (H, -1))      # (B, T, H, D)
        beta = F.linear(x, self.u[layer], self.b[layer])[..., None]     # (B, T, H, 1)
        return torch.cat((w, beta), dim=-1).transpose(1, 2)             # (B, H, T, D + 1)

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        w = F.silu(short_convolution(features[..., :-1], self.convolution[layer], documents))
        w = w * (w.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        return torch.cat((w, 2 * features[..., -1:].sigmoid()), dim=-1)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        Tq, Tk, D = q.shape[2], k.shape[2], q.shape[3]
        with torch.autocast(q.device.type, enabled=False):
            # whole chunks of keys: those added have beta 0, which is no reflection
            n = math.ceil(Tk / CHUNK)
            w, beta, k = (F.pad(x.to(logits.dtype), (0, 0, 0, n * CHUNK - Tk)).unflatten(2, (n, CHUNK))
                          for x in (at.features[..., :D], at.features[..., D:], k))     # (B, H, n, c, D or 1)
            both = beta * (w @ torch.cat((w, k), dim=3).mT)             # (B, H, n, c, 2 c)
            w_w, w_k = (x.tril(-1) for x in both.split(CHUNK, dim=-1))
            # a unit diagonal is taken for granted, so I need not be added
            solved = torch.linalg.solve_triangular(w_w, torch.cat((beta * w, w_k), dim=-1), upper=False,
                                                   unitriangular=True)
            ws, ks, m_ws, m_ks = (x.unbind(2) for x in (w, k, *solved.split((D, CHUNK), dim=-1)))
            i = torch.arange(Tk - Tq, Tk, device=q.device)[:, None]
            is_later = torch.arange(n * CHUNK, device=q.device).view(n, CHUNK) > i[:, None]     # (Tq, n, c)
            row, found = q.to(logits.dtype), []
            for chunk in reversed(range(n)):
                row_w = (row @ ws[chunk].mT).masked_fill(is_later[:, chunk], 0)
                found.append(row @ ks[chunk].mT - row_w @ m_ks[chunk])  # (B, H, Tq, c)
                row = row - row_w @ m_ws[chunk]
            products = torch.cat(found[::-1], dim=-1)[..., :Tk] / D**0.5
        return products.masked_fill(logits.isneginf(), -torch.inf)


class PaTHFoX(PaTH):
    """PaTH with forget gates: its logits + sum_{l=j+1..i} log f_l. Yang et al. 2025, arXiv:2505.16381, 3.4.

    PaTH-FoX: the gates are those of `forgetting`.
    """

    def __init__(self, shape: Shape, options: PaTHOptions) -> None:
        super().__init__(shape, options)
        self.gates = Forgetting(shape, options)

    def features(self, x: Tensor, layer: int) -> Tensor:
        own, gate = super().features(x, layer), self.gates.features(x, layer)
        return torch.cat((own.to(gate.dtype), gate), dim=-1)            # (B, H, T, D + 2)

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        own = super().mix(features[..., :-1], layer, documents)
        return torch.cat((own, features[..., -1:].to(own.dtype)), dim=-1)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        own, gate = at.features[..., :-1], at.features[..., -1:]
        logits = super().scores(logits, q, k, at._replace(features=own))
        return self.gates.scores(logits, q, k, at._replace(features=gate))


class Turned(Encoding):
    """What turns q and k by the angles that `mix` returns, (B, H, Tk, D/2)."""

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        angle = at.features - at.features[:, :, -q.shape[2], None]      # only differences matter
        cos, sin = (x.to(torch.promote_types(q.dtype, torch.float32)) for x in (angle.cos(), angle.sin()))
        k = for_each_head(k, q.shape[1])
        return rope.turn(q, cos[:, :, -q.shape[2]:], sin[:, :, -q.shape[2]:]), rope.turn(k, cos, sin)


class SelectiveRoPEOptions(Options):
    head_multiple = 2

    rank: int = Field(32, ge=1, description="R of the matrix that makes the angles from the layer's input")
    base: float = Field(
        500_000.0, gt=1, description="pair i turns by base^(-2i / D) times what the tokens say")
    n_taps: int = Field(4, ge=1, description="tokens that the convolution of the angles sees; 1: accumulated "
                                             "rotations without one")


class SelectiveRoPE(Turned):
    """RoPE by angles that tokens choose: pair i of q, k at t turns by f_i sum_{l<=t} phi_l. arXiv:2511.17388.

    Movahedi et al. 2025. phi = convolution of W x / |x| over 4 tokens, per head and pair, W of rank R, x the
    part of the layer's normalised input that belongs to a head (C / H channels); f_i = base^(-2i / D) is
    fixed. The logit then depends on the tokens after the key up to the query; phi = 1 everywhere is RoPE.
    Positions are not used. The authors normalise q and k afterwards, with weights per channel, which do not
    commute with a rotation: model.qk_norm, here before it, is the same only while these weights are equal.
    They start the matrices from N(0, 0.02), so that at first tokens turn about 70 times less than here. Their
    optional gate and bias are left out. With n_taps = 1 these are the accumulated rotations of
    arXiv:2606.24975, with angles from the layer's input instead of a table by token.
    """

    Options = SelectiveRoPEOptions

    def __init__(self, shape: Shape, options: SelectiveRoPEOptions) -> None:
        super().__init__(shape, options)
        n_layer, H, C, D = shape.n_layer, shape.n_head, shape.n_embd, shape.head_dim
        self.n_parts = H if C % H == 0 else 1
        self.base = options.base
        # uniform, as PyTorch starts linear layers and convolutions
        self.down, self.up, self.convolution = (
            nn.Parameter(fan_in**-0.5 * (2 * torch.rand(shape) - 1)) for shape, fan_in in (
                ((n_layer, options.rank, C), C), ((n_layer, H * D // 2, options.rank), options.rank),
                ((n_layer, H, D // 2, options.n_taps), options.n_taps)))

    def features(self, x: Tensor, layer: int) -> Tensor:
        x = F.normalize(x.unflatten(-1, (self.n_parts, -1)), dim=-1).flatten(-2)
        phi = F.linear(F.linear(x, self.down[layer]), self.up[layer])   # (B, T, H D/2)
        return phi.unflatten(-1, (self.convolution.shape[1], -1)).transpose(1, 2)       # (B, H, T, D/2)

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        """-> the angles (B, H, Tk, D/2), in fp64: sums over long texts are large, their differences small."""
        wide = rope.widest(features.device)
        phi = short_convolution(features.to(wide), self.convolution[layer].to(wide), documents)
        D = 2 * phi.shape[-1]
        return phi.cumsum(dim=2) * rope.inv_freq(D, self.base, dtype=phi.dtype, device=phi.device)


class RePoOptions(Options):
    head_multiple = 2

    base: float = Field(10_000.0, gt=1, description="pair i turns by base^(-2i / D) per unit of z")


class RePo(Turned):
    """RoPE at positions that tokens choose: z_t = w (silu(G x_t) * V x_t) instead of t. arXiv:2512.14391.

    "Context repositioning", 2025. One real number per head and token, in any order; x is the layer's
    normalised input, G and V are (C / 8, C). Only the causal mask tells the true order. Angles are z f_i,
    f_i = base^(-2i / D). The authors add it to a pretrained model at base 500,000, whose layers 0 to 4 of 16
    keep RoPE. They start from N(0, 0.02), truncated, and x is the residual stream before its norm.
    """

    Options = RePoOptions

    def __init__(self, shape: Shape, options: RePoOptions) -> None:
        super().__init__(shape, options)
        n_layer, H, C, R = shape.n_layer, shape.n_head, shape.n_embd, max(1, shape.n_embd // 8)
        self.base, self.head_dim = options.base, shape.head_dim
        self.gate, self.value, self.out = (
            nn.Parameter(fan_in**-0.5 * (2 * torch.rand(n_layer, n, fan_in) - 1))
            for n, fan_in in ((R, C), (R, C), (H, R)))

    def features(self, x: Tensor, layer: int) -> Tensor:
        hidden = F.silu(F.linear(x, self.gate[layer])) * F.linear(x, self.value[layer])
        return F.linear(hidden, self.out[layer]).transpose(1, 2)[..., None]     # z, (B, H, T, 1)

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        device = features.device
        f = rope.inv_freq(self.head_dim, self.base, dtype=rope.widest(device), device=device)
        return features.to(f.dtype) * f                                 # (B, H, Tk, D/2)
