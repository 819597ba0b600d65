"""What acts under any encoding: query temperatures and scale-invariant attention.

Softmax over more keys is flatter. A temperature, a factor on a query, multiplies all its logits, before a
bias is added (BAM's bias too). It may depend on n, the number of keys that the query sees, or on m, the
number of tokens before it in its document, never on positions: logits stay the same if all positions shift.

Legend: B batch, T time (Tq queries, Tk keys), H = n_head, L = train.seq_len.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from positions.contract import At, Encoding, NoPE, Options, Shape


class Temperature(nn.Module):
    """A factor on the queries. Subclasses override `forward`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def n_keys(self, at: At) -> Tensor:
        """n, the keys that each query sees, (1 or B, Tq): of its document, its window or chunk, up to it."""
        n_before = at.n_before
        assert n_before is not None
        if at.layer in self.shape.local_layers:
            if self.shape.chunk:
                n_before = n_before % self.shape.chunk
            if self.shape.window:
                n_before = n_before.clamp(max=self.shape.window - 1)
        return n_before + 1

    def forward(self, at: At) -> Tensor:
        """The factor on q, (1 or B, 1 or H, Tq, 1)."""
        raise NotImplementedError


class NoTemperature(Temperature):
    """Queries stay as they are: `encodings_of` adds no wrapper for it."""


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
        log_n = self.n_keys(at).log()                                   # (1 or B, Tq)
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

    There L is 8192, and it acts in the layers without an encoding alone. Below L it is 1. As there, m is the
    token's number in its document, whatever its position.
    """

    def forward(self, at: At) -> Tensor:
        assert at.n_before is not None
        steps = ((at.n_before + 1) / self.shape.seq_len).floor()
        return (1 + 0.1 * steps.log1p())[:, None, :, None]


TEMPERATURES: dict[str, type[Temperature]] = {
    "none": NoTemperature, "log_n": LogN, "ssmax": SSMax, "llama4": Llama4, "affine": Affine}


class Wrapper(Encoding):
    """An encoding that delegates each hook of the layers to `inner`; subclasses override some.

    The flags for faster paths are off unless a subclass sets them: always correct. `embed` is not called.
    """

    def __init__(self, inner: Encoding) -> None:
        nn.Module.__init__(self)
        self.inner = inner
        self.has_scores = True
        self.is_relative = inner.is_relative

    def tables(self, q_pos: Tensor, k_pos: Tensor) -> Any:
        return self.inner.tables(q_pos, k_pos)

    def features(self, x: Tensor, layer: int) -> Tensor | None:
        return self.inner.features(x, layer)

    def mix(self, features: Tensor, layer: int, documents: Tensor | None) -> Tensor:
        return self.inner.mix(features, layer, documents)

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        return self.inner.rotate(q, k, at)

    def turn_values(self, v: Tensor, at: At) -> Tensor:
        return self.inner.turn_values(v, at)

    def turn_back(self, y: Tensor, at: At) -> Tensor:
        return self.inner.turn_back(y, at)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        return self.inner.scores(logits, q, k, at)

    def fold(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        return self.inner.fold(q, k, at)


class Tempered(Wrapper):
    """An encoding whose rotated queries are multiplied by a temperature, and so all products with them.

    What `scores` adds is not multiplied, except for its own products with q, and under `tempers_bias`.
    """

    def __init__(self, inner: Encoding, temperature: Temperature) -> None:
        super().__init__(inner)
        self.temperature = temperature
        # a bias times the temperature depends on more than the distance
        self.by_distance = inner.by_distance and not inner.tempers_bias
        self.scales_by_distance = inner.scales_by_distance
        self.has_scores = inner.has_scores
        self.max_fold_queries = 0 if inner.tempers_bias else inner.max_fold_queries

    def scaled(self, q: Tensor, at: At) -> Tensor:
        """Queries (B, H, Tq, D) times the temperature."""
        return (q * self.temperature(at)).to(q.dtype)

    def rotate(self, q: Tensor, k: Tensor, at: At) -> tuple[Tensor, Tensor]:
        q, k = self.inner.rotate(q, k, at)
        return self.scaled(q, at), k

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        if self.inner.tempers_bias:     # scores = logits + bias: those of a logit 0 are the bias alone
            bias = self.inner.scores(logits.new_zeros(()), q, k, at)
            return logits + self.temperature(at) * bias
        return self.inner.scores(logits, self.scaled(q, at), k, at)


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
        self.scales_by_distance = inner.by_distance or not inner.has_scores

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, at: At) -> Tensor:
        logits = self.inner.scores(logits, q, k, at)
        distance = at.distance().to(logits.dtype)                       # (1 or B, 1, Tq, Tk)
        m = -2 * torch.log1p(distance / self.tau)
        a = (1 - m).sqrt()
        return torch.addcmul(m, a, logits)                              # masked logits stay -inf


def encodings_of(encoding: Encoding, no_encoding: NoPE, temperature: Temperature,
                 n_layer: int) -> list[Encoding]:
    """The encoding of each layer: this one or none, inside what acts under any encoding.

    Layers of the same kind share one, so that its tables are computed once.
    """
    options: Options = no_encoding.options

    def wrapped(inner: Encoding, kind: str) -> Encoding:
        has_temperature = not isinstance(temperature, NoTemperature)
        if has_temperature and options.temperature_layers in ("all", kind):
            inner = Tempered(inner, temperature)
        if options.scale_invariant:
            inner = ScaleInvariant(inner, options.scale_invariant)
        return inner

    # position.encoding = "none". Layers whose encoding was dropped still count as encoded
    is_none = isinstance(encoding, NoPE) and encoding is not no_encoding
    encoded = wrapped(encoding, "unencoded" if is_none else "encoded")
    unencoded = wrapped(no_encoding, "unencoded")
    encodings = []
    for layer in range(n_layer):
        encodings.append(encoded if options.is_encoded(layer) else unencoded)
    return encodings
