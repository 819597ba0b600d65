"""Biases on the logits that depend on the distance between query and key, not on their content.

All are added after the division by sqrt(D), and are not divided by it.

Legend: B batch, T time (Tq queries, Tk keys), C = n_embd, H = n_head, D channels of a head.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

import rope
from positions.contract import At, Encoding, Options, Shape
from positions.parts import PairMLP, ToeplitzBias, round_to, toeplitz_distances


class ALiBiOptions(Options):
    learned: bool = Field(
        False, description="train the slopes, one per head, shared by all layers, starting at the fixed ones")


class ALiBi(Encoding):
    """Linear penalty: logits[h, i, j] -= slope[h] * (i - j). Press et al. 2022, arXiv:2108.12409, section 3.

    No parameters, any T. The slopes are the paper's, see `slopes`. With `learned` their logarithms are
    trained, which keeps them positive (as in x-transformers and McGill's length-generalization). The paper
    found that learned slopes extrapolate worse. Adam moves a logarithm by about train.lr a step: in a short
    run a slope could change by a factor of two only, hence lr_scale.
    """

    Options = ALiBiOptions
    by_distance = True
    max_fold_queries = 2**24
    lr_scale = 10.0

    def __init__(self, shape: Shape, options: ALiBiOptions) -> None:
        super().__init__(shape, options)
        self.n_head = shape.n_head
        self.log_slopes = None                                          # (H,)
        if options.learned:
            self.log_slopes = nn.Parameter(self.slopes(shape.n_head).log())
            # the gradients of folded slopes would be small differences of large sums, lost in bf16
            self.max_fold_queries = 0

    @staticmethod
    def slopes(n_head: int) -> Tensor:
        """2^(-8 (h + 1) / H) if H is a power of two; else those of P heads, then the 1st, 3rd ... of 2 P.

        P is the largest power of two up to H: the rule of the authors' code, also of BLOOM's and MPT's.
        """
        P = 2 ** (n_head.bit_length() - 1)
        slopes = [2 ** (-8 * (h + 1) / P) for h in range(P)]
        slopes += [2 ** (-8 * (2 * h + 1) / (2 * P)) for h in range(n_head - P)]
        return torch.tensor(slopes)

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        slopes = self.slopes(self.n_head) if self.log_slopes is None else self.log_slopes.exp()
        return slopes.to(q_pos.device, non_blocking=q_pos.is_cuda)[:, None, None]       # (H, 1, 1)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        return logits - at.tables * at.distance()

    def fold(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """-slope (i - j) = slope j - slope i, and the softmax ignores slope i, which all keys share.

        So the slope becomes a channel of q, and the position j, relative to the first key's, one of k. In 16
        bits one channel holds neither exactly. Therefore j has three digits to base 256, exact up to 2^24,
        and the slope two pieces, with a relative error of 2^-16: six channels. The kernel sums in fp32, with
        an error of 2^-24 slope j.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        slope = at.tables.to(dtype) * q.shape[-1]**0.5              # (H, 1, 1); the kernel divides by sqrt(D)
        high = round_to(slope, torch.bfloat16)
        j = (at.k_pos - at.k_pos.min())[:, None, :, None]               # (1 or B, 1, Tk, 1)

        # channels: each of the two pieces, times each of the three digits
        pieces, digits = [], []
        for piece in (high, slope - high):
            for n in range(3):
                half_power = 16**n              # 256^n is its square: one half in q, one in k, for fp16
                pieces.append(piece * half_power)
                digits.append((j // 256**n % 256) * half_power)
        of_q = torch.cat(pieces, dim=-1).to(q.dtype)                    # (H, 1, 6)
        of_k = torch.cat(digits, dim=-1).to(k.dtype)                    # (1 or B, 1, Tk, 6)
        q = torch.cat((q, of_q.expand(*q.shape[:3], -1)), dim=-1)
        k = torch.cat((k, of_k.expand(*k.shape[:3], -1)), dim=-1)
        return q, k


class T5Options(Options):
    num_buckets: int = Field(
        32, ge=2, description="biases per head. Distances below half of it have one each; the others share")
    max_distance: int = Field(
        128, ge=2, description="tokens; all distances from here on share the last bucket. Must exceed "
                               "num_buckets / 2")

    def problems(self, config: Any) -> dict[str, str]:
        n_exact = self.num_buckets // 2
        if self.max_distance <= n_exact:
            return {"max_distance": f"must exceed num_buckets / 2 = {n_exact}, got {self.max_distance}"}
        return {}


class T5(Encoding):
    """Learned bias by distance: logits += b[h, bucket(i - j)]. Raffel et al. 2020, arXiv:1910.10683, 2.1.

    The buckets are the authors' for a decoder: half of them hold one distance each, the other half grow
    logarithmically. All layers share one table, which starts with std C^-0.5 (as in Hugging Face's T5). T5
    omits the 1 / sqrt(D) on q k^T and starts with smaller queries; here the factor stays, as everywhere.
    x-transformers and KERPLE's GPT-NeoX multiply the bias by sqrt(D); neither the paper nor T5's code does.

    Adam moves a number by about train.lr a step, so in a short run a bias could not reach the sizes that are
    useful, 1 to 10; hence lr_scale. T5 itself trained for half a million steps (3.1.2).
    """

    Options = T5Options
    by_distance = True
    lr_scale = 20.0

    def __init__(self, shape: Shape, options: T5Options) -> None:
        super().__init__(shape, options)
        self.num_buckets, self.max_distance = options.num_buckets, options.max_distance
        self.table = nn.Embedding(self.num_buckets, shape.n_head)
        nn.init.normal_(self.table.weight, std=shape.n_embd**-0.5)

    def bucket(self, distance: Tensor) -> Tensor:
        """Distances, integers >= 0 -> buckets 0 ... num_buckets - 1. In fp32, to round as T5 does."""
        n_exact = self.num_buckets // 2
        far = torch.log(distance.clamp(min=n_exact).float() / n_exact)
        share = far / math.log(self.max_distance / n_exact)             # 0 at n_exact, 1 at max_distance
        shared_bucket = n_exact + (share * (self.num_buckets - n_exact)).long()
        shared_bucket = shared_bucket.clamp(max=self.num_buckets - 1)
        return torch.where(distance < n_exact, distance, shared_bucket)

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        distance = torch.arange(self.max_distance + 1, device=q_pos.device)     # the last: and all beyond
        return self.table(self.bucket(distance)).T                      # (H, max_distance + 1)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        distance = at.distance()[:, 0].clamp(max=self.max_distance)     # (1 or B, Tq, Tk)
        bias = at.tables[:, distance]                                   # (H, 1 or B, Tq, Tk)
        return logits + bias.transpose(0, 1)


class Kerple(Encoding):
    """The base of KERPLE's two kernels: numbers p, a > 0 for each head. Chi et al. 2022, arXiv:2205.09921.

    They are named as in the authors' code: p is the scale of the log kernel, but the exponent of the power
    kernel. As in the authors' code, all layers share them, p ~ U(0, 2) and a ~ U(0, 1) at the start, and the
    parameters are clamped to at least 0.01 (and p of the power kernel to at most 2). lr_scale lets a short
    run move heads that start without a useful penalty.
    """

    by_distance = True
    lr_scale = 10.0
    bounds: ClassVar = {"p": (0.01, None), "a": (0.01, None)}

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.p = nn.Parameter(2 * torch.rand(shape.n_head))             # (H,)
        self.a = nn.Parameter(torch.rand(shape.n_head))

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        return self.p[:, None, None], self.a[:, None, None]             # (H, 1, 1) each


class KerpleLog(Kerple):
    """Logarithmic penalty: logits -= p[h] log(1 + a[h] (i - j)). KERPLE, Chi et al. 2022, arXiv:2205.09921.

    The better of the paper's two kernels.
    """

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        p, a = at.tables
        return logits - p * torch.log1p(a * at.distance())


class KerplePower(Kerple):
    """Power penalty: logits -= a[h] (i - j)^p[h], 0 < p <= 2. KERPLE, Chi et al. 2022, arXiv:2205.09921.

    ALiBi is p = 1 with fixed a, but the clamp excludes its slopes below 0.01.
    """

    # beyond 2 the kernel is not conditionally positive definite
    bounds: ClassVar = {"p": (0.01, 2.0), "a": (0.01, None)}

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        p, a = at.tables
        return logits - a * at.distance() ** p


class BAM(Encoding):
    """Penalty of any power: logits -= exp(s[h]) (i - j + 1e-5)^beta[h]. Bianchessi et al., arXiv:2505.22842.

    The Bayesian attention mechanism, 2025: the logarithm of a generalised Gaussian prior over the position of
    the key. Each layer and head has its own s and beta. It starts as ALiBi: beta = 1, and exp(s) is ALiBi's
    slope. Unlike kerple_power, beta is free: with beta < 0 a head does not see the near tokens and leaves the
    far ones alone. The authors combine it with SSMax, which multiplies the sum of logit and bias by s ln n;
    so any temperature does here. Their script also trains the location of the prior, which is fixed at
    distance 0 here, and has one prior for all layers. The bias is limited to -exp(80) so that it and its
    gradient are finite in fp32.
    """

    by_distance = True
    tempers_bias = True

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.s = nn.Parameter(ALiBi.slopes(shape.n_head).log().repeat(shape.n_layer, 1))    # (n_layer, H)
        self.beta = nn.Parameter(torch.ones(shape.n_layer, shape.n_head))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        s = self.s[at.layer][:, None, None]                             # (H, 1, 1)
        beta = self.beta[at.layer][:, None, None]
        log_distance = (at.distance() + 1e-5).log()                     # (1 or B, 1, Tq, Tk)
        return logits - (s + beta * log_distance).clamp(max=80).exp()


class FIRE(Encoding):
    """Learns MLP, c, M: logits += MLP(log(1 + c (i - j)) / log(1 + c max(i, M))). Li 2024, arXiv:2310.04418.

    By Li et al. The MLP is 1 -> 32 -> H with ReLU. c is learned and starts at 0.1; the threshold M is learned
    too, as a factor on L = train.seq_len that starts at 1. As in the public code (mcleish7/arithmetic; there
    M starts at 512), each layer has its own, and absolute values keep c and M positive. Up to M the bias
    depends on the distance alone, beyond it also on the query's position. The MLP starts as in PyTorch, with
    outputs below 1 where a useful bias is 1 to 10: lr_scale.
    """

    is_relative = False
    lr_scale = 10.0
    n_hidden = 32

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        n_layer, n_head = shape.n_layer, shape.n_head
        self.seq_len = shape.seq_len
        self.c = nn.Parameter(torch.full((n_layer,), 0.1))
        self.threshold = nn.Parameter(torch.ones(n_layer))              # M / L
        self.mlps = nn.ModuleList(
            PairMLP(1, self.n_hidden, nn.ReLU(inplace=True), n_head) for _ in range(n_layer))

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        c = self.c[at.layer].abs()
        threshold = (self.threshold[at.layer] * self.seq_len).abs()
        mlp = self.mlps[at.layer]
        Tq = logits.shape[2]
        n = 0       # queries whose bias depends on the distance alone: it is computed once for each distance
        if at.first_distance is not None and q.device.type == "cpu" and not torch.compiler.is_compiling():
            is_near = (at.q_pos < threshold).all(dim=0)     # in every batch row: documents may differ
            n = int(is_near.cumprod(dim=0).sum())
        biases = []
        with torch.autocast(logits.device.type, enabled=False):         # bf16 would merge far distances
            if n:
                near = at._replace(q_pos=at.q_pos[:, :n])
                distance = toeplitz_distances(near).clamp(min=0)        # (P,)
                share = torch.log1p(c * distance) / (torch.log1p(c * threshold) + 1e-6)
                of_distance = mlp(share[None, None, None])[:, :, 0]     # (1, H, P)
                of_pair = ToeplitzBias.apply(of_distance, n)            # (1, H, n, Tk)
                biases.append(of_pair.expand(len(at.q_pos), -1, -1, -1))
            if n < Tq:
                beyond = at._replace(q_pos=at.q_pos[:, n:], first_distance=None)
                longest = torch.maximum(beyond.q_pos, threshold)[:, None, :, None]
                share = torch.log1p(c * beyond.distance()) / (torch.log1p(c * longest) + 1e-6)
                biases.append(mlp(share))                               # (1 or B, H, Tq - n, Tk)
        return logits + torch.cat(biases, dim=2)                        # (1 or B, H, Tq, Tk)


class SandwichOptions(Options):
    dim: int = Field(
        128, ge=2, multiple_of=2, description="channels of the sinusoids, two per frequency; the paper's "
                                              "only hyperparameter. The bias at distance 0 grows with it")


class Sandwich(Encoding):
    """Products of sinusoids: logits += H / (8 h) sum_k cos((i - j) f_k). Chi et al. 2023, arXiv:2212.10356.

    Heads h = 1 ... H. f_k = 10000^(-2k / dim) for k = 0 ... dim/2 - 1, as in Vaswani et al. and PyTorch's
    attention-gym. NVIDIA's NeMo uses k = 1 ... dim/2, slightly different frequencies, and subtracts dim/2,
    which the softmax ignores. No parameters. The bias falls roughly as the logarithm of the distance.
    """

    Options = SandwichOptions
    by_distance = True

    def __init__(self, shape: Shape, options: SandwichOptions) -> None:
        super().__init__(shape, options)
        self.n_head, self.dim = shape.n_head, options.dim

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        f = rope.inv_freq(self.dim, device=q.device).to(rope.widest(q.device))  # many terms cancel
        q_angle = rope.angles(at.q_pos, f)                              # (1 or B, Tq, dim/2)
        k_angle = rope.angles(at.k_pos, f)
        # cos(a - b) = cos a cos b + sin a sin b: one matrix product for any distances
        q_wave = torch.cat((q_angle.cos(), q_angle.sin()), dim=-1)      # (1 or B, Tq, dim)
        k_wave = torch.cat((k_angle.cos(), k_angle.sin()), dim=-1)
        total = (q_wave @ k_wave.mT)[:, None]                           # (1 or B, 1, Tq, Tk)
        ratio = 8 / self.n_head * torch.arange(1, self.n_head + 1, device=q.device)
        return logits + total.to(logits.dtype) / ratio[:, None, None]
