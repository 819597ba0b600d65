"""Penalties that the content of tokens sets: forget gates, and a bias by distance that the logits adapt.

None of them holds T x T numbers for all queries at once. The gates of `forgetting` do not read positions.

Legend: B batch, T time (the Tq queries are the last of the Tk keys), C = n_embd, H = n_head, D channels of a
head. Angles in radians.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

import rope
from positions.bias import ALiBi, ALiBiOptions, KerpleLog
from positions.contract import At, Encoding, Options, Shape
from positions.parts import PairMLP, round_to


class Forgetting(Encoding):
    """Forget gates: logits += sum_{l=j+1..i} log f_l, f_l = sigmoid(w x_l + b). Lin 2025, arXiv:2503.02130.

    The Forgetting Transformer (FoX), section 3: ALiBi with a slope that depends on the tokens in between, per
    head and layer. x is the layer's normalised input. Positions are not used. As in the authors' code, w
    starts with std 0.02 and b at 0, so f near 1/2: a steep penalty of 0.7 per token.
    """

    max_fold_queries = 256     # over more queries its sums lose digits

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
        Tq = q.shape[2]
        sums = at.features[..., 0].cumsum(dim=-1, dtype=rope.widest(q.device))      # (B, H, Tk)
        sums = (sums - sums[..., -Tq, None]).to(logits.dtype)
        of_queries = sums[..., -Tq:]                                    # queries are the last of the keys
        bias = of_queries[..., :, None] - sums[..., None, :]            # (B, H, Tq, Tk)
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

        # each with casts of its own: one gradient in 16 bits would round their difference once more
        of_q = self.channels(c[:, :, -Tq:], q.dtype)                    # (B, H, Tq, 1 or 3)
        of_k = self.channels(-c, q.dtype)                               # (B, H, Tk, 1 or 3)
        q = torch.cat((q, of_q, torch.ones_like(of_q)), dim=-1)
        k = torch.cat((k, torch.ones_like(of_k), of_k), dim=-1)
        return q, k

    @staticmethod
    def channels(sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Sums (B, H, T, 1) in fp64 as channels of this dtype that add up to them, (B, H, T, 1 or 3)."""
        if dtype.itemsize > 2:
            return sums.to(dtype)
        pieces = []
        rest = sums
        for _ in range(3):
            high = round_to(rest, dtype)
            piece = rest + (high - rest).detach()                       # high, with the gradient of rest
            pieces.append(piece.to(dtype))
            rest = rest.detach() - high
        return torch.cat(pieces, dim=-1)


class LogForgetting(Forgetting):
    """Logarithm of forgetting: logits -= p[h] log(1 + F_ij), F_ij = -sum_{l=j+1..i} log f_l. Here, 2026.

    KERPLE's logarithmic kernel (arXiv:2205.09921) of a distance that the tokens in between set: F is the
    penalty of `forgetting` (arXiv:2503.02130), whose gates f start near 1/2. So weights decay by a power of
    the content in between, not exponentially, and what is far stays within reach. Per head and layer; no
    positions are used. p starts at 2 (h + 1) / H, in the range of KERPLE's, and its logarithm is trained.
    """

    max_fold_queries = 0        # a logarithm of a sum is no product of channels

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        p = 2 * torch.arange(1, shape.n_head + 1) / shape.n_head
        self.log_p = nn.Parameter(p.log().repeat(shape.n_layer, 1))     # (n_layer, H)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        forgotten = super().scores(logits.new_zeros(()), q, k, at)      # -F, (B, H, Tq, Tk)
        p = self.log_p[at.layer].exp()[:, None, None]                   # (H, 1, 1)
        return logits - p * torch.log1p(-forgotten)


class GRAPEAPOptions(Options):
    p_dim: int = Field(8, ge=2, multiple_of=2, description="n, the numbers p of a token for each head")


class GRAPEAP(Encoding):
    """ALiBi with content: logits += slope[h] sum_{l=j+1..i} logsigmoid(match of i and l). arXiv:2512.07805.

    GRAPE's additive path integral, Zhang et al. 2025. The match is p_i . R_l p'_l / n. p_t = W x_t has n
    numbers per head, x the layer's normalised input; p' is p over its root mean square, and R_l turns the
    pairs (c, c + n/2) by -l radians. The slopes are ALiBi's and fixed. As in the authors' code
    (github.com/model-architectures/GRAPE, GRAPE-AP v1), p_i is neither normalised nor turned, so the bias
    depends on the positions l themselves; in the paper it does not. The authors have model.qk_norm on.
    """

    Options = GRAPEAPOptions
    is_relative = False

    def __init__(self, shape: Shape, options: GRAPEAPOptions) -> None:
        super().__init__(shape, options)
        n_layer, C = shape.n_layer, shape.n_embd
        self.n_head = shape.n_head
        self.w = nn.Parameter(0.5 * C**-0.5 * torch.randn(n_layer, self.n_head * options.p_dim, C))

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        slopes = ALiBi.slopes(self.n_head).to(q_pos.device, non_blocking=q_pos.is_cuda)
        return slopes[:, None, None]                                    # (H, 1, 1)

    def features(self, x: Tensor, layer: int) -> Tensor:
        p = F.linear(x, self.w[layer]).unflatten(-1, (self.n_head, -1))         # (B, T, H, n)
        return p.transpose(1, 2)                                        # (B, H, T, n)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        Tq, Tk = logits.shape[2:]
        n = at.features.shape[-1]
        with torch.autocast(q.device.type, enabled=False):
            p = at.features.to(logits.dtype)                            # (B, H, Tk, n)
            # in fp64: the radians are whole positions, which may be large
            one_radian = torch.ones(n // 2, dtype=rope.widest(q.device), device=q.device)
            angle = rope.angles(at.k_pos[:, None], -one_radian)
            turned = rope.rotate(F.rms_norm(p, (n,)), angle)            # R_l p'_l
            steps = F.logsigmoid(p[:, :, -Tq:] @ turned.mT / n)         # (B, H, Tq, Tk)
            steps = at.tables * steps
        # the sum of key j begins with the step of j + 1, and goes up to the query
        steps = steps.tril(Tk - Tq)
        next_steps = F.pad(steps[..., 1:], (0, 1))
        sums = next_steps.flip(-1).cumsum(dim=-1).flip(-1)
        return logits + sums


class DAPEOptions(Options):
    bias: Literal["alibi", "kerple_log"] = Field(
        "alibi", description="the bias by distance that the network adapts; the paper's best is kerple_log's")


class DAPE(Encoding):
    """A bias adapted to the logits: logits += b + MLP([logits, b]); it mixes heads. Zheng, arXiv:2405.14722.

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
        if options.bias == "alibi":
            plain = ALiBiOptions.model_validate({"encoding": "alibi"})      # DAPEOptions has no `learned`
            self.bias: Encoding = ALiBi(shape, plain)
        else:
            self.bias = KerpleLog(shape, options)
        self.mlps = nn.ModuleList()
        for _ in range(shape.n_layer):
            self.mlps.append(PairMLP(2 * H, self.n_hidden, nn.LeakyReLU(inplace=True), H))

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Any:
        return self.bias.tables(q_pos, k_pos)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        zero = logits.new_zeros(())
        b = self.bias.scores(zero, q, k, at).to(logits.dtype)           # (1 or B, H, Tq, Tk)
        seen = logits.masked_fill(logits.isneginf(), 0)                 # the MLP would make NaN of -inf
        both = torch.cat((seen, b.expand_as(seen)), dim=1)              # (B, 2 H, Tq, Tk)
        with torch.autocast(logits.device.type, enabled=False):
            return logits + b + self.mlps[at.layer](both)
