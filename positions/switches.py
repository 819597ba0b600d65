"""What acts under any encoding: query temperatures and scale-invariant attention.

Softmax over more keys is flatter. A temperature, a factor on a query, multiplies all its logits before any
bias. It depends on n, the number of keys that the query sees, or on its position m, and then logits change if
all positions shift.

Legend: B batch, T time (Tq queries, Tk keys), H = n_head, L = train.seq_len.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from positions.contract import At, Encoding, Shape, starts_of


class Temperature(nn.Module):
    """No factor. Override `forward` to return one."""

    by_position: ClassVar[bool] = False     # does it depend on the position, not on the number of keys?

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def n_keys(self, at: At) -> Tensor:
        """n, the keys that each query sees, (1 or B, T): of its document, its window or chunk, up to it."""
        T, Tk = at.q_pos.shape[1], at.k_pos.shape[1]
        before = torch.arange(Tk - T, Tk, device=at.q_pos.device)[None]
        if at.documents is not None:
            before = before - starts_of(at.documents)
        if at.layer in self.shape.local_layers:
            before = (before % (self.shape.chunk or Tk)).clamp(max=(self.shape.window or Tk) - 1)
        return before + 1

    def forward(self, at: At) -> Tensor | None:
        """The factor on q, (1 or B, 1 or H, T, 1), or None."""
        return None


class LogN(Temperature):
    """q *= max(1, ln n / ln L): keeps attention sharp beyond L. J. Su, github.com/bojone/rerope.

    No parameters, and exactly 1 with n <= L keys, so it can also be applied after training.
    """

    def forward(self, at: At) -> Tensor:
        # ln n / ln L = 1 + ln(n / L) / ln L; the second form rounds to exactly 1 at n = L
        n_over_L = (self.n_keys(at) / self.shape.seq_len).clamp(min=1)
        return (1 + n_over_L.log() / math.log(self.shape.seq_len))[:, None, :, None]


class Constant(Temperature):
    """q *= factor, at every position; used by --extend alone."""

    def __init__(self, shape: Shape, factor: float) -> None:
        super().__init__(shape)
        self.factor = factor

    def forward(self, at: At) -> Tensor:
        return torch.full(at.q_pos.shape, self.factor, device=at.q_pos.device)[:, None, :, None]


class SSMax(Temperature):
    """softmax(s ln(n) z) over n keys, s learned by head and layer. Nakanishi 2025, arXiv:2501.19399.

    s starts at 0.43, the value of the paper's figure 1. The bias that the paper rejects is omitted.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.s = nn.Parameter(torch.full((shape.n_layer, shape.n_head), 0.43))

    def forward(self, at: At) -> Tensor:
        log_n = self.n_keys(at).log()                                   # (1 or B, T)
        return self.s[at.layer][:, None, None] * log_n[:, None, :, None]


class Affine(SSMax):
    """q *= s ln n + b, both learned by head and layer, s = 0 and b = 1 at first. Mistral Large 4's code."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.s = nn.Parameter(torch.zeros_like(self.s))
        self.b = nn.Parameter(torch.ones_like(self.s))

    def forward(self, at: At) -> Tensor:
        return super().forward(at) + self.b[at.layer][:, None, None]


class Llama4(Temperature):
    """q *= 1 + 0.1 ln(1 + floor((m + 1) / L)): steps at multiples of L. Llama 4's code, 2025.

    There L is 8192, and it acts in the layers without an encoding alone. Below L it is 1.
    """

    by_position = True

    def forward(self, at: At) -> Tensor:
        steps = ((at.q_pos + 1) / self.shape.seq_len).floor().clamp(min=0)
        return (1 + 0.1 * steps.log1p())[:, None, :, None]


TEMPERATURES: dict[str, type[Temperature]] = {
    "none": Temperature, "log_n": LogN, "ssmax": SSMax, "llama4": Llama4, "affine": Affine}


class Wrapper(Encoding):
    """An encoding that does what `inner` does; subclasses change something."""

    def __init__(self, inner: Encoding) -> None:
        nn.Module.__init__(self)
        self.inner, self.is_relative, self.max_length = inner, inner.is_relative, inner.max_length
        self.applies_temperature = inner.applies_temperature
        self.embed, self.features, self.mix = inner.embed, inner.features, inner.mix    # type: ignore
        self.rotates_values = inner.rotates_values
        self.turn_values, self.turn_back = inner.turn_values, inner.turn_back           # type: ignore

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> object:
        return self.inner.tables(q_pos, k_pos)

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        return self.inner.rotate(q, k, at)


class Tempered(Wrapper):
    """An encoding whose queries are multiplied by a temperature, or whose logits: `applies_temperature`.

    It is outermost. Attention calls `tempered`, and then the hooks of the encoding inside.
    """

    def __init__(self, inner: Encoding, temperature: Temperature) -> None:
        super().__init__(inner)
        self.temperature = temperature

    def tempered(self, q: Tensor, at: At) -> tuple[Encoding, Tensor, At]:
        factor = self.temperature(at)
        if self.applies_temperature:    # PoPE, BAM: by themselves
            return self.inner, q, at._replace(temperature=factor)
        return self.inner, (q * factor).to(q.dtype), at


class ScaleInvariant(Wrapper):
    """a(d) logits + m(d), a(d) = sqrt(2 ln(1 + d / tau) + 1), m(d) = 1 - a(d)^2. Anson, arXiv:2505.17083.

    Scale-invariant attention, Anson, Wang and Aitchison 2025, equation 16, with their boundary values a(0) =
    1 and m(0) = 0. If logits are independent with mean 0 and variance 1, the expected exp(logit) is e^0.5 /
    (1 + d / tau): beyond tau, the range from d to 2 d gets the same attention for every d. The paper uses it
    with RMSNorm on q and k, for the variance, and with slow pairs that stand still (p_rope); on plain RoPE it
    did not help. No parameters, and distances alone matter.
    """

    def __init__(self, inner: Encoding, tau: float) -> None:
        super().__init__(inner)
        self.tau = tau                                                  # in tokens, above 0
        self.scales_by_distance = inner.by_distance or not inner.has_scores()

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        logits = self.inner.scores(logits, q, k, at)
        a, m = factor_and_bias(at.distance().to(logits.dtype), self.tau)        # (1 or B, 1, Tq, Tk) each
        return torch.addcmul(m, a, logits)                              # masked logits stay -inf


def factor_and_bias(distance: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """The a and m of `ScaleInvariant` at distances of a floating-point type, in that type and shape."""
    m = -2 * torch.log1p(distance / tau)
    return (1 - m).sqrt(), m
