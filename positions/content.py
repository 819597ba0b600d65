"""Biases on the logits that depend on what stands at the query, at the key, or between the two.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, D channels of a head, P rows of a
table. Angles in radians.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

import rope
from positions.contract import At, Encoding, Options, Shape

KEYS_AT_A_TIME = 256    # whose products with a table are held at once


def cut(table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a table (P, D) that rows, any integers, point into, and where in it they point.

    All of it on a GPU, which would be waited for, and for torch.compile, which would not know its size.
    """
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return table, rows
    first, last = map(int, rows.aminmax())
    return table[first:last + 1], rows - first


class RelativeKeyOptions(Options):
    max_distance: int | None = Field(
        None, ge=1, description="distances beyond it share its vector (default: train.seq_len - 1, the "
                                "longest that is trained)")


class RelativeKey(Encoding):
    """A learned vector per distance: logits += q_i . E[min(i - j, M)] / sqrt(D). Shaw, arXiv:1803.02155, 3.

    Shaw et al. 2018 as in Hugging Face BERT's "relative_key", made causal: M = max_distance, E (M + 1, D)
    for each layer, shared by its heads. Shaw's second table, on the values, is left out there and here: in
    the paper (section 4.3) it adds nothing to this one. Shaw's base model clips at M = 16; BERT's table
    reaches over its whole context, which is the default here.
    """

    Options = RelativeKeyOptions

    def __init__(self, shape: Shape, options: RelativeKeyOptions) -> None:
        super().__init__(shape, options)
        self.max_distance = options.max_distance or shape.seq_len - 1
        table = torch.empty(shape.n_layer, self.max_distance + 1, shape.head_dim)
        self.table = nn.Parameter(nn.init.normal_(table, std=0.02))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        B, H, _, D = q.shape
        rows = at.distance().clamp(max=self.max_distance)               # (1 or B, 1, Tq, Tk)
        table, rows = cut(self.table[at.layer], rows)
        products = q @ table.mT         # (B, H, Tq, P): each with all, then those wanted; not Tq Tk vectors
        return torch.add(logits, products.gather(-1, rows.expand(B, H, -1, -1)), alpha=D**-0.5)


class RelativeKeyQuery(RelativeKey):
    """Both sides: logits += (q_i + k_j) . E[min(i - j, M)] / sqrt(D). Huang et al. 2020, arXiv:2009.13658.

    Their method 4, Hugging Face BERT's "relative_key_query", made causal; one table serves both terms.
    """

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        B, H, _, D = q.shape
        biases = []
        for keys, k_pos in zip(k.split(KEYS_AT_A_TIME, 2), at.k_pos.split(KEYS_AT_A_TIME, 1), strict=True):
            rows = at._replace(k_pos=k_pos).distance().clamp(max=self.max_distance)
            table, rows = cut(self.table[at.layer], rows)
            products = (keys @ table.mT).mT                             # (B, H, P, keys)
            biases.append(products.gather(-2, rows.expand(B, H, -1, -1)))       # (B, H, Tq, keys)
        return torch.add(super().scores(logits, q, k, at), torch.cat(biases, dim=-1), alpha=D**-0.5)


class TransformerXLOptions(Options):
    def problems(self, n_embd: int, head_dim: int) -> dict[str, str]:
        if n_embd % 2:
            return {"encoding": f"needs an even model.n_embd for its pairs of sin and cos, got {n_embd}"}
        return {}


class TransformerXL(Encoding):
    """Logits ((q_i + u) . k_j + (q_i + v) . W R[i - j]) / sqrt(D). Dai et al. 2019, arXiv:1901.02860, 3.3.

    R[d] = [sin(d f), cos(d f)], f_i = 10000^(-2i / C): a sinusoid of the distance over C channels, in the
    order of the authors' code (sines first). W (H D, C) is each layer's own; u and v (H, D) are shared by the
    layers, as is the default there (its large models untie them). Any distance is defined.

    With a = W^T (q_i + v), split into a_s for the sines and a_c for the cosines, and by the angle sum

      a . R[i - j] = (a_c cos if + a_s sin if) . cos jf + (a_c sin if - a_s cos if) . sin jf

    so a turned by the query's angle meets the key's own sinusoid: one product, no table of distances to pick
    from, and gaps cost nothing.
    """

    Options = TransformerXLOptions

    def __init__(self, shape: Shape, options: TransformerXLOptions) -> None:
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
        a_sin, a_cos = ((q + self.v[:, None]) @ w).chunk(2, dim=-1)     # (B, H, Tq, C/2) each
        angle = rope.angles(at.q_pos[:, None], f)                       # (1 or B, 1, Tq, C/2)
        turned = rope.turn(torch.cat((a_cos, -a_sin), dim=-1), angle.cos(), angle.sin())
        angle = rope.angles(at.k_pos, f)
        wave = torch.cat((angle.cos(), angle.sin()), dim=-1)            # (1 or B, Tk, C)
        by_distance = torch.einsum("bhic,bjc->bhij", turned, wave.to(turned.dtype))
        by_content = torch.einsum("hd,bhjd->bhj", self.u.to(k.dtype), k)[:, :, None]        # (B, H, 1, Tk)
        return torch.add(logits + by_content.to(logits.dtype) / D**0.5, by_distance, alpha=D**-0.5)


class CoPEOptions(Options):
    max_pos: int = Field(16, ge=2, description="learned vectors: for the counts 0 ... max_pos - 1, at which "
                                               "counting stops")


class CoPE(Encoding):
    """Counts what the query cares for: logits += q_i . E[sum_{l=j..i} g_il]. CoPE, arXiv:2405.18719, sec. 4.

    Golovneva et al. 2024. The gates g_il = sigmoid(logits[i, l]) make a fractional count, stopped at
    max_pos - 1; E (max_pos, D), each layer's own and shared by its heads, is interpolated between the
    neighbouring whole counts. Positions are not read at all.

    The text writes q . (k + e) without any scale; the authors' code (appendix) adds q . e to logits that are
    already over sqrt(D), and feeds those to the gates. The code is taken, as x-transformers does: it is
    what the paper's numbers come from. Zeros to begin with, theirs too: training starts as NoPE, and E
    learns at once, its gradient being q; the gates do after that.
    """

    Options = CoPEOptions

    def __init__(self, shape: Shape, options: CoPEOptions) -> None:
        super().__init__(shape, options)
        self.table = nn.Parameter(torch.zeros(shape.n_layer, options.max_pos, shape.head_dim))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        Tq, Tk = logits.shape[-2:]
        gates = logits.sigmoid().tril(Tk - Tq)                          # counting ends at the query
        last = self.table.shape[1] - 1
        count = gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=last)  # (B, H, Tq, Tk)
        products = (q @ self.table[at.layer].mT).to(logits.dtype)       # (B, H, Tq, P)
        steps = F.pad(products.diff(dim=-1), (0, 1))                    # from a whole count to the next
        whole = count.long()
        return torch.addcmul(logits + products.gather(-1, whole), steps.gather(-1, whole), count.frac())


class Forgetting(Encoding):
    """Forget gates: logits += sum_{l=j+1..i} log f_l, f_l = sigmoid(w x_l + b). Lin 2025, arXiv:2503.02130.

    The Forgetting Transformer (FoX), section 3: ALiBi whose slope is a function of the tokens in between, per
    head and layer; x is the layer's normalised input. No positions are read. w normal 0.02 and b 0, as in the
    authors' code (its initial decay times are for gates that do not depend on the data): at the start f is
    about 1/2, a steep penalty of 0.7 a token. x-transformers begins with b = 5.
    """

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
        # summed in fp64 and counted from the block's first query: what came before both tokens leaves no
        # rounding, and neither does the future
        c = at.features[..., 0].cumsum(dim=-1, dtype=torch.float64)     # (B, H, Tk)
        c = (c - c[..., -q.shape[2], None]).to(logits.dtype)
        bias = c[..., -q.shape[2]:, None] - c[..., None, :]             # (B, H, Tq, Tk), queries come last
        return logits + bias.clamp(max=0)                               # keys ahead: an empty sum
