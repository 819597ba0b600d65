"""Reflections between query and key: each token in between reflects the query. Positions are not read.

Legend: B batch, T time (the Tq queries are the last of the Tk keys), C = n_embd, H = n_head, D channels of a
head, R rank, c = PIECE.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from positions.contract import At, Encoding, Options, Shape
from positions.gates import Forgetting
from positions.parts import short_convolution, uniform

PIECE = 64      # keys whose reflections are applied at once


def in_pieces(x: Tensor, n: int) -> Tensor:
    """Tokens of x (B, H, T, F) in n pieces, (B, H, n, c, F), the last of which zeros fill."""
    n_missing = n * PIECE - x.shape[2]
    x = F.pad(x, (0, 0, 0, n_missing))
    return x.unflatten(2, (n, PIECE))


class PaTHOptions(Options):
    rank: int = Field(32, ge=1, description="R of the matrix that makes w from the layer's input")


class PaTH(Encoding):
    """Reflections in between: logits q_i^T S_i S_(i-1) ... S_(j+1) k_j / sqrt(D), S_t = I - beta_t w_t w_t^T.

    Yang et al. 2025, arXiv:2505.16381, section 3: like RoPE with a matrix for each token. beta_t = 2
    sigmoid(u x_t + b), and w_t is silu(convolution of W x_t over 3 tokens), normalised to length 1; x is the
    layer's normalised input, W has rank R. In the authors' code the heads that share a key share w and beta;
    here each head of queries has its own. Positions are not used.

    Keys are taken in pieces of c tokens, from the query backwards. r = q_i^T S_i ... S_e, where e is the
    first token after the piece. Let a_t be what S_t subtracts along w_t:

      a_t = beta_t (r w_t - sum_{s>t} a_s w_s . w_t)

    With w (c, D) and b = diag(beta) of the piece, a = r w^T M, M = (I + tril(b w w^T, -1))^-1 b. Then

      logit_j = r . k_j - sum_{t>j} a_t w_t . k_j,    r <- r - a w

    For queries inside the piece r w^T is 0 at t > i, and so is a.
    """

    Options = PaTHOptions

    def __init__(self, shape: Shape, options: PaTHOptions) -> None:
        super().__init__(shape, options)
        n_layer, H, C, D = shape.n_layer, shape.n_head, shape.n_embd, shape.head_dim
        R = options.rank
        self.down = nn.Parameter(0.02 * torch.randn(n_layer, R, C))
        self.up = nn.Parameter(0.02 * torch.randn(n_layer, H * D, R))
        self.convolution = uniform(n_layer, H, D, 3, fan_in=3)
        self.u = nn.Parameter(0.02 * torch.randn(n_layer, H, C))
        self.b = nn.Parameter(torch.zeros(n_layer, H))

    def features(self, x: Tensor, layer: int) -> Tensor:
        H = self.b.shape[1]
        low_rank = F.linear(x, self.down[layer])                        # (B, T, R)
        w = F.linear(low_rank, self.up[layer])                          # (B, T, H D)
        w = w.unflatten(-1, (H, -1))
        beta = F.linear(x, self.u[layer], self.b[layer])                # (B, T, H)
        features = torch.cat((w, beta[..., None]), dim=-1)              # (B, T, H, D + 1)
        return features.transpose(1, 2)                                 # (B, H, T, D + 1)

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        w = features[..., :-1]
        beta = features[..., -1:]

        # neighbours mixed, and w of length 1
        w = short_convolution(w, self.convolution[layer], documents)
        w = F.silu(w)
        squared_length = w.square().sum(-1, keepdim=True)
        w = w * (squared_length + 1e-6).rsqrt()

        beta = 2 * beta.sigmoid()
        return torch.cat((w, beta), dim=-1)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        Tq, Tk = logits.shape[2:]
        D = q.shape[3]
        with torch.autocast(q.device.type, enabled=False):
            # zeros in the last piece have beta = 0, which is no reflection
            n = math.ceil(Tk / PIECE)
            features = in_pieces(at.features.to(logits.dtype), n)
            w, beta = features.split((D, 1), dim=-1)                    # (B, H, n, c, D or 1)
            k = in_pieces(k.to(logits.dtype), n)                        # (B, H, n, c, D)

            # Of each piece M w and M (w k_j for t > j). The solver takes a unit diagonal for granted, so I
            # need not be added.
            w_and_k = torch.cat((w, k), dim=3)
            products = beta * (w @ w_and_k.mT)                          # (B, H, n, c, 2 c)
            w_w, w_k = products.split(PIECE, dim=-1)
            w_w = w_w.tril(-1)
            w_k = w_k.tril(-1)
            right_side = torch.cat((beta * w, w_k), dim=-1)
            solution = torch.linalg.solve_triangular(w_w, right_side, upper=False, unitriangular=True)
            m_w, m_wk = solution.split((D, PIECE), dim=-1)

            # A reflection acts only on the queries from its own token on.
            i = torch.arange(Tk - Tq, Tk, device=q.device)
            t = torch.arange(n * PIECE, device=q.device).view(n, PIECE)
            is_later = t[:, None] > i[:, None]                          # (n, Tq, c)

            # unbind, since the gradient of each index would be a tensor of all pieces
            w_of = w.unbind(2)
            k_of = k.unbind(2)
            m_w_of = m_w.unbind(2)
            m_wk_of = m_wk.unbind(2)

            # From the last piece to the first: r is q_i^T times all reflections of the pieces after this one.
            r = q.to(logits.dtype)                                      # (B, H, Tq, D)
            blocks = []
            for piece in reversed(range(n)):
                r_w = r @ w_of[piece].mT                                # (B, H, Tq, c)
                r_w = r_w.masked_fill(is_later[piece], 0)
                block = r @ k_of[piece].mT - r_w @ m_wk_of[piece]
                blocks.append(block)
                r = r - r_w @ m_w_of[piece]
            blocks.reverse()
            reflected = torch.cat(blocks, dim=-1)[..., :Tk]             # (B, H, Tq, Tk)
            reflected = reflected / D**0.5
        return reflected.masked_fill(logits.isneginf(), -torch.inf)


class PaTHFoX(PaTH):
    """PaTH with forget gates: its logits + sum_{l=j+1..i} log f_l. Yang et al. 2025, arXiv:2505.16381, 3.4.

    PaTH-FoX: the gates are those of `forgetting`.
    """

    def __init__(self, shape: Shape, options: PaTHOptions) -> None:
        super().__init__(shape, options)
        self.gates = Forgetting(shape, options)

    def features(self, x: Tensor, layer: int) -> Tensor:
        reflections = super().features(x, layer)                        # (B, H, T, D + 1)
        gates = self.gates.features(x, layer)                           # (B, H, T, 1)
        return torch.cat((reflections.to(gates.dtype), gates), dim=-1)

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        gates = features[..., -1:]
        reflections = super().mix(features[..., :-1], layer, documents)
        return torch.cat((reflections, gates.to(reflections.dtype)), dim=-1)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        reflections = at.features[..., :-1]
        gates = at.features[..., -1:]
        logits = super().scores(logits, q, k, at._replace(features=reflections))
        return self.gates.scores(logits, q, k, at._replace(features=gates))
