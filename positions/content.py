"""Logits changed by the content of the query, of the key, or of the tokens in between.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, D channels of a head, P rows of a
table. Angles in radians.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

import rope
from positions.absolute import EvenWidthOptions
from positions.contract import At, Encoding, Options, Shape, falling, odd_head, slanted
from positions.distance import ALiBi, ALiBiOptions, KerpleLog, PairMLP

KEYS_AT_A_TIME = 128    # keys whose products with a table are held in memory at once


def cut(table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The slice of a table (P, D) that these row numbers use, and the row numbers within that slice.

    On a GPU it is the whole table, since computing the range would wait for the device; under torch.compile
    too, since the size of the slice would not be known.
    """
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return table, rows
    first, last = map(int, rows.aminmax())
    return table[first:last + 1], rows - first


class RelativeKeyOptions(Options):
    max_distance: int | None = Field(
        None, ge=1, description="larger distances share the vector of this one (default: train.seq_len - 1, "
                                "the longest in training)")


class RelativeKey(Encoding):
    """A learned vector per distance: logits += q_i . E[min(i - j, M)] / sqrt(D). Shaw, arXiv:1803.02155, 3.

    Shaw et al. 2018 as in Hugging Face BERT's "relative_key", made causal: M = max_distance, E (M + 1, D)
    for each layer, shared by its heads. Like BERT's, it omits Shaw's second table, on the values, which has
    no effect in the paper (section 4.3). Shaw's base model clips at M = 16; BERT's table covers its whole
    context, which is the default here. A row of the table learns from the few keys at its distance alone, and
    starts with products near 0: lr_scale.
    """

    Options = RelativeKeyOptions
    takes_floats = False
    lr_scale = 10.0

    def __init__(self, shape: Shape, options: RelativeKeyOptions) -> None:
        super().__init__(shape, options)
        self.max_distance = options.max_distance or shape.seq_len - 1
        table = torch.empty(shape.n_layer, self.max_distance + 1, shape.head_dim)
        self.table = nn.Parameter(nn.init.normal_(table, std=0.02))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        B, H, _, D = q.shape
        if at.ahead is not None:
            bias = slanted(q @ self.vectors(falling(at), at.layer).mT)  # (B, H, Tq, Tk)
        else:
            rows = at.distance().clamp(max=self.max_distance)           # (1 or B, 1, Tq, Tk)
            table, rows = cut(self.table[at.layer], rows)
            products = q @ table.mT     # (B, H, Tq, P) with all rows, then gather: not Tq Tk vectors
            bias = products.gather(-1, rows.expand(B, H, -1, -1))
        return torch.add(logits, bias, alpha=D**-0.5)

    def vectors(self, distances: Tensor, layer: int) -> Tensor:
        """Those of each distance (P,), (P, D); a key ahead of the query has that of distance 0."""
        return F.embedding(distances.clamp(0, self.max_distance), self.table[layer])


class RelativeKeyQuery(RelativeKey):
    """Both sides: logits += (q_i + k_j) . E[min(i - j, M)] / sqrt(D). Huang et al. 2020, arXiv:2009.13658.

    The paper's method 4, Hugging Face BERT's "relative_key_query", made causal. Both terms use one table.
    """

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        B, H, Tq, D = q.shape
        biases = []                                                     # (B, H, Tq, keys) each
        for start in range(0, k.shape[2], KEYS_AT_A_TIME):
            keys = k[:, :, start:start + KEYS_AT_A_TIME]
            n = keys.shape[2]
            if at.ahead is not None:
                rising = at.ahead - start - n + 1 + torch.arange(Tq + n - 1, device=q.device)
                biases.append(slanted(keys @ self.vectors(rising, at.layer).mT).mT)
            else:
                rows = at._replace(k_pos=at.k_pos[:, start:start + n]).distance().clamp(max=self.max_distance)
                table, rows = cut(self.table[at.layer], rows)
                products = (keys @ table.mT).mT                         # (B, H, P, keys)
                biases.append(products.gather(-2, rows.expand(B, H, -1, -1)))
        return torch.add(super().scores(logits, q, k, at), torch.cat(biases, dim=-1), alpha=D**-0.5)


class TransformerXL(Encoding):
    """Logits ((q_i + u) . k_j + (q_i + v) . W R[i - j]) / sqrt(D). Dai et al. 2019, arXiv:1901.02860, 3.3.

    R[d] = [sin(d f), cos(d f)], f_i = 10000^(-2i / C): a sinusoid of the distance over C channels, in the
    order of the authors' code (sines first). Each layer has its own W (H D, C); all layers share u and v
    (H, D), the default of that code (its large models do not share). Any distance is defined.

    Let a = W^T (q_i + v), split into a_s for the sines and a_c for the cosines. Then, by the angle sum,

      a . R[i - j] = (a_c cos if + a_s sin if) . cos jf + (a_c sin if - a_s cos if) . sin jf

    so it is the product of a, rotated by the query's angle, and the key's own sinusoid: there is no table of
    distances to gather from, and gaps cost nothing. Where positions are consecutive, (q_i + v) . W R[d] for
    each distance d is less work still, as in the authors' code. W is a matrix like others, but it acts
    through products with a sinusoid that never changes; a short run learns faster at a few times their rate:
    lr_scale.
    """

    Options = EvenWidthOptions
    lr_scale = 3.0

    def __init__(self, shape: Shape, options: EvenWidthOptions) -> None:
        super().__init__(shape, options)
        C, H, D = shape.n_embd, shape.n_head, shape.head_dim
        self.n_embd = C
        self.u = nn.Parameter(nn.init.normal_(torch.empty(H, D), std=0.02))
        self.v = nn.Parameter(nn.init.normal_(torch.empty(H, D), std=0.02))
        self.w = nn.Parameter(nn.init.normal_(torch.empty(shape.n_layer, H * D, C), std=0.02))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        D = q.shape[-1]
        f = rope.inv_freq(self.n_embd, device=q.device)
        w = self.w[at.layer].unflatten(0, (-1, D))                      # (H, D, C)
        by_content = torch.einsum("hd,bhjd->bhj", self.u.to(k.dtype), k)[:, :, None]        # (B, H, 1, Tk)
        logits = logits + by_content.to(logits.dtype) / D**0.5
        if at.ahead is not None:
            angle = rope.angles(falling(at), f)                         # (P, C/2)
            wave = torch.cat((angle.sin(), angle.cos()), dim=-1).to(w.dtype)
            return torch.add(logits, slanted((q + self.v[:, None]) @ (w @ wave.mT)), alpha=D**-0.5)
        a_sin, a_cos = ((q + self.v[:, None]) @ w).chunk(2, dim=-1)     # (B, H, Tq, C/2) each
        angle = rope.angles(at.q_pos[:, None], f)                       # (1 or B, 1, Tq, C/2)
        turned = rope.turn(torch.cat((a_cos, -a_sin), dim=-1), angle.cos(), angle.sin())
        angle = rope.angles(at.k_pos, f)
        wave = torch.cat((angle.cos(), angle.sin()), dim=-1)            # (1 or B, Tk, C)
        by_distance = torch.einsum("bhic,bjc->bhij", turned, wave.to(turned.dtype))
        return torch.add(logits, by_distance, alpha=D**-0.5)


class CoPEOptions(Options):
    max_pos: int = Field(16, ge=2, description="number of learned vectors, for the counts 0 ... max_pos - 1; "
                                               "larger counts use the last")


class AtCounts(torch.autograd.Function):
    """Logits (B, H, Tq, Tk), products (B, H, Tq, P) -> those at each fractional count, (B, H, Tq, Tk).

    Autograd would keep a gate, a count, and an index of 8 bytes for each logit. The backward pass computes
    them again.
    """

    @staticmethod
    def counts(logits: Tensor, products: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gates, the whole counts (int64), the rest of each, and the slope there: 0 at the last count."""
        gates = logits.sigmoid().tril(logits.shape[-1] - logits.shape[-2])      # the count ends at the query
        count = gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=products.shape[-1] - 1)
        whole = count.long()
        steps = F.pad(products.diff(dim=-1), (0, 1))                    # from each whole count to the next
        return gates, whole, count - whole, steps.gather(-1, whole)

    @staticmethod
    def forward(ctx: Any, logits: Tensor, products: Tensor) -> Tensor:
        ctx.save_for_backward(logits, products)
        _, whole, rest, slope = AtCounts.counts(logits, products)
        return torch.addcmul(products.gather(-1, whole), slope, rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, products = ctx.saved_tensors
        gates, whole, rest, slope = AtCounts.counts(logits, products)
        by_gate = (grad * slope).cumsum(dim=-1)                         # a gate counts for all keys before it
        nothing = torch.zeros_like(products)
        at_whole, at_next = (nothing.scatter_add(-1, whole, x) for x in (grad - grad * rest, grad * rest))
        return by_gate * gates * (1 - gates), at_whole + F.pad(at_next, (1, 0))[..., :-1]


class CoPE(Encoding):
    """Counts relevant tokens: logits += q_i . E[sum_{l=j..i} g_il]. CoPE, arXiv:2405.18719, sec. 4.

    Golovneva et al. 2024. The gates g_il = sigmoid(logits[i, l]) sum to a fractional count, clamped at
    max_pos - 1. E (max_pos, D), one for each layer and shared by its heads, is interpolated between the
    neighbouring whole counts. Positions are not used.

    The paper's text has q . (k + e) without a scale. The authors' code (appendix) adds q . e to logits that
    are divided by sqrt(D), and takes the gates from those. We follow the code, as x-transformers does: the
    paper's numbers come from it. As there, E starts at zero: training starts as NoPE, then E learns first.
    """

    Options = CoPEOptions

    def __init__(self, shape: Shape, options: CoPEOptions) -> None:
        super().__init__(shape, options)
        self.table = nn.Parameter(torch.zeros(shape.n_layer, options.max_pos, shape.head_dim))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        products = (q @ self.table[at.layer].mT).to(logits.dtype)       # (B, H, Tq, P)
        return logits + AtCounts.apply(logits, products)


class Forgetting(Encoding):
    """Forget gates: logits += sum_{l=j+1..i} log f_l, f_l = sigmoid(w x_l + b). Lin 2025, arXiv:2503.02130.

    The Forgetting Transformer (FoX), section 3: ALiBi with a slope that depends on the tokens in between, per
    head and layer. x is the layer's normalised input. Positions are not used. As in the authors' code, w
    starts with std 0.02 and b at 0 (the code's initial decay times are only for gates that ignore the data),
    so f starts near 1/2: a steep penalty of 0.7 per token. x-transformers starts with b = 5.
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
        assert at.features is not None
        # In fp64 and relative to the block's first query, so that tokens before or after both query and key
        # add no rounding errors.
        c = at.features[..., 0].cumsum(dim=-1, dtype=torch.float64)     # (B, H, Tk)
        c = (c - c[..., -q.shape[2], None]).to(logits.dtype)
        bias = c[..., -q.shape[2]:, None] - c[..., None, :]             # (B, H, Tq, Tk): queries come last
        return logits + bias.clamp(max=0)                               # for keys ahead: an empty sum

    def fold(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """The difference of the sums up to query and key: each is a channel of the one, times 1 in the other.

        The query's, constant along a row, would change no weight. But the gradient of a gate is the sum of
        the logits' gradients from later queries to earlier keys; with both channels no other pair's rounding
        errors enter it. In 16 bits a sum takes three channels, each with what the one before rounds off. The
        kernel sums in fp32: an error of 2^-24 times the sum of log f between the key and the middle query.
        """
        assert at.features is not None
        Tq, D = q.shape[2:]
        c = at.features.cumsum(dim=2, dtype=torch.float64)              # (B, H, Tk, 1)
        c = (c - c[:, :, -Tq + Tq // 2, None]) * D**0.5

        def channels(rest: Tensor) -> Tensor:
            pieces = []
            for _ in range(3 if q.dtype.itemsize == 2 else 1):
                pieces.append(rest.to(q.dtype))
                rest = rest - pieces[-1]
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
    The slopes are ALiBi's and fixed: a step costs at most what the query agrees to. As in the authors' code
    (github.com/model-architectures/GRAPE, GRAPE-AP v1), p_i is neither normalised nor turned, so the bias
    depends on the positions l themselves; in the paper it does not. The authors have model.qk_norm on.

    Each query sums over its own row: a block of rows needs no other, and T x T numbers never exist.
    """

    Options = GRAPEAPOptions
    is_relative = False

    def __init__(self, shape: Shape, options: GRAPEAPOptions) -> None:
        super().__init__(shape, options)
        n_layer, C = shape.n_layer, shape.n_embd
        self.n_head = shape.n_head
        self.w = nn.Parameter(0.5 * C**-0.5 * torch.randn(n_layer, self.n_head * options.p_dim, C))

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        slopes = torch.tensor(ALiBi.slopes(self.n_head)).to(q_pos.device, non_blocking=True)
        return slopes[:, None, None]                                    # (H, 1, 1)

    def features(self, x: Tensor, layer: int) -> Tensor:
        return F.linear(x, self.w[layer]).unflatten(-1, (self.n_head, -1)).transpose(1, 2)      # (B, H, T, n)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        assert at.features is not None
        Tq, Tk, n = q.shape[2], k.shape[2], at.features.shape[-1]
        with torch.autocast(q.device.type, enabled=False):
            p = at.features.to(logits.dtype)
            # in fp64: the radians are whole positions, which may be large
            angle = rope.angles(at.k_pos[:, None], -torch.ones(n // 2, dtype=torch.float64, device=q.device))
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
    KERPLE's p and a are shared by the layers. It holds 2 H numbers more for each query and key.

    Its lr_scale is 1, unlike FIRE's: b is useful from the start, and what goes into the MLP is large already
    (b is tens at hundreds of tokens), so its outputs move fast. We have not tuned it.
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


class TAPAOptions(Options):
    alpha: float = Field(0.1, gt=0, description="exponent of the distance in the phase; the paper's: 0.1")

    def problems(self, n_embd: int, head_dim: int) -> dict[str, str]:
        return odd_head(head_dim)


class TAPA(Encoding):
    """Product times phase: logits a cos(2 pi (i - j)^alpha p), a and p products of half heads each.

    Token-aware phase attention, Wang et al. 2025, arXiv:2509.12635. a = q_A . k_A / sqrt(D / 2) over
    the first half of a head's channels, p = q_P . k_P / sqrt(D / 2) over the second: the content says how
    fast the logit swings with the distance, and at distance 0 it is a. The swing slows down: with alpha = 0.1
    the phase at 1,024 is twice that at 1. No parameters. The formula is from a reading of the paper's text;
    we found no code of the authors to compare with. A temperature multiplies a alone, since a factor on q
    would change the phase.
    """

    Options = TAPAOptions
    applies_temperature = True

    def __init__(self, shape: Shape, options: TAPAOptions) -> None:
        super().__init__(shape, options)
        self.alpha = options.alpha

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):              # a phase in bf16 would be noise
            q_a, q_p, k_a, k_p = (half for x in (q, k) for half in x.to(logits.dtype).chunk(2, dim=-1))
            a, p = (x @ y.mT * (2 / q.shape[-1])**0.5 for x, y in ((q_a, k_a), (q_p, k_p)))
        a = a if at.temperature is None else a * at.temperature
        swing = (2 * math.pi * at.distance().to(p.dtype)**self.alpha * p).cos()        # (B, H, Tq, Tk)
        return (a * swing).masked_fill(logits.isneginf(), -torch.inf)
