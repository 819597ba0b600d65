"""Products of content with the distance between query and key.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, D channels of a head. Angles in
radians.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

import rope
from positions.absolute import EvenWidthOptions
from positions.contract import At, Encoding, Options, Shape

KEYS_AT_A_TIME = 128    # keys whose products with a table are held in memory at once


class RelativeKeyOptions(Options):
    max_distance: int | None = Field(
        None, ge=1, description="larger distances share the vector of this one (default: train.seq_len - 1, "
                                "the longest in training)")


class RelativeKey(Encoding):
    """A learned vector per distance <= M: logits += q_i . E[min(i - j, M)] / sqrt(D). arXiv:1803.02155, 3.

    Shaw et al. 2018 as in Hugging Face BERT's "relative_key", made causal: M = max_distance, E (M + 1, D)
    for each layer, shared by its heads. Like BERT's, it omits Shaw's second table, on the values, which has
    no effect in the paper (section 4.3). Shaw's base model clips at M = 16; BERT's table covers its whole
    context, which is the default here. A row of the table learns from the few keys at its distance alone, and
    starts with products near 0: lr_scale.
    """

    Options = RelativeKeyOptions
    lr_scale = 10.0

    def __init__(self, shape: Shape, options: RelativeKeyOptions) -> None:
        super().__init__(shape, options)
        self.max_distance = options.max_distance or shape.seq_len - 1
        self.table = nn.Parameter(0.02 * torch.randn(shape.n_layer, self.max_distance + 1, shape.head_dim))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        B, H, _, D = q.shape
        rows = at.distance().clamp(max=self.max_distance)               # (1 or B, 1, Tq, Tk)
        # products with all rows, then gather: there are no Tq Tk vectors
        products = q @ self.table[at.layer].mT                          # (B, H, Tq, M + 1)
        bias = products.gather(-1, rows.expand(B, H, -1, -1))           # (B, H, Tq, Tk)
        return torch.add(logits, bias, alpha=D**-0.5)


class RelativeKeyQuery(RelativeKey):
    """Both sides: logits += (q_i + k_j) . E[min(i - j, M)] / sqrt(D). Huang et al. 2020, arXiv:2009.13658.

    The paper's method 4, Hugging Face BERT's "relative_key_query", made causal. Both terms use one table.
    """

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        B, H, _, D = q.shape
        biases = []                                                     # (B, H, Tq, keys) each
        for start in range(0, k.shape[2], KEYS_AT_A_TIME):
            keys = slice(start, start + KEYS_AT_A_TIME)
            rows = at._replace(k_pos=at.k_pos[:, keys], first_distance=None).distance()
            rows = rows.clamp(max=self.max_distance)                    # (1 or B, 1, Tq, keys)
            products = (k[:, :, keys] @ self.table[at.layer].mT).mT     # (B, H, M + 1, keys)
            biases.append(products.gather(-2, rows.expand(B, H, -1, -1)))
        by_key = torch.cat(biases, dim=-1)                              # (B, H, Tq, Tk)
        with_query = super().scores(logits, q, k, at)
        return torch.add(with_query, by_key, alpha=D**-0.5)


class TransformerXL(Encoding):
    """Logits ((q_i + u) . k_j + (q_i + v) . W R[i - j]) / sqrt(D). Dai et al. 2019, arXiv:1901.02860, 3.3.

    R[d] = [sin(d f), cos(d f)], f_i = 10000^(-2i / C): a sinusoid of the distance over C channels, in the
    order of the authors' code (sines first). Each layer has its own W (H D, C); all layers share u and v
    (H, D), the default of that code (its large models do not share). Any distance is defined.

    Let a = W^T (q_i + v), split into a_s for the sines and a_c for the cosines. Then, by the angle sum,

      a . R[i - j] = (a_c cos(i f) + a_s sin(i f)) . cos(j f) + (a_c sin(i f) - a_s cos(i f)) . sin(j f)

    so it is the product of a, rotated by the query's angle, and the key's own sinusoid: there is no table of
    distances to gather from, and gaps cost nothing. W is a matrix like others, but it acts through products
    with a sinusoid that never changes; a short run learns faster at a few times their rate: lr_scale.
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
        # u . k_j, the same for all queries
        by_content = torch.einsum("hd,bhjd->bhj", self.u.to(k.dtype), k)
        by_content = by_content[:, :, None].to(logits.dtype)            # (B, H, 1, Tk)
        logits = logits + by_content / D**0.5
        # a, rotated by the query's angle
        a = (q + self.v[:, None]) @ w                                   # (B, H, Tq, C)
        a_sin, a_cos = a.chunk(2, dim=-1)
        angle = rope.angles(at.q_pos[:, None], f)                       # (1 or B, 1, Tq, C/2)
        turned = rope.turn(torch.cat((a_cos, -a_sin), dim=-1), angle.cos(), angle.sin())
        # its product with the key's sinusoid
        angle = rope.angles(at.k_pos, f)
        wave = torch.cat((angle.cos(), angle.sin()), dim=-1)            # (1 or B, Tk, C)
        by_distance = torch.einsum("bhic,bjc->bhij", turned, wave.to(turned.dtype))
        return torch.add(logits, by_distance, alpha=D**-0.5)
