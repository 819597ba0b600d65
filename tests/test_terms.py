"""The formula of every encoding, one logit at a time in plain loops, against its hooks in fp64.

TERMS: name -> term(c, b, h, i, j), the logit of query i and key j, both counted from the first token, in row
b and head h of layer 1. To add an encoding, add its term here.
"""

import cmath
import importlib
import itertools
import math
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import lively, tokens
from explicit import config_of, logits_of, model_of
from torch import Tensor

from model import GPT
from positions import ENCODINGS, At, Encoding, Options, Shape

pytestmark = pytest.mark.usefixtures("no_gradients")

B, T, L, LAYER = 2, 9, 32, 1
# what is computed a few at a time, made so small that these 9 tokens take several times and a rest
PIECES = {"KEYS_AT_A_TIME": 4, "CHUNK": 4, "TILE": 3, "MOST_HIDDEN": 1000}


class Case:
    """An encoding with large random parameters; queries, keys, the layer's input and positions, in fp64."""

    def __init__(self, name: str, overrides: str = "") -> None:
        self.config = config_of(name, overrides)
        self.encoding, self.options = deepcopy(model_of(name, overrides).encoding), self.config.position
        for key, p in self.encoding.named_parameters():
            if key.rpartition(".")[2] in ("p", "a"):                    # of KERPLE: where no clamp acts
                p.copy_(p.abs() + 0.3)
        self.encoding.clamp()
        m, random = self.config.model, torch.Generator().manual_seed(1)
        self.H, self.D, self.C = m.n_head, m.head_width, m.n_embd
        self.q, self.k = torch.randn(2, B, self.H, T, self.D, generator=random, dtype=torch.float64)
        self.x = torch.randn(B, T, self.C, generator=random, dtype=torch.float64)
        # gaps that differ between rows, some distances beyond every threshold
        self.pos = torch.randint(1, 40, (B, T), generator=random).cumsum(1)

    def found(self, Tq: int = T) -> Tensor:
        """Logits of the last Tq queries by the hooks; 0 for masked keys."""
        q, q_pos = self.q[:, :, -Tq:], self.pos[:, -Tq:]
        logits = logits_of(self.encoding, q, self.k, q_pos, self.pos, self.x, LAYER)
        return logits.masked_fill(logits.isneginf(), 0)

    def expected(self, term: Callable[..., Tensor]) -> Tensor:
        """Logits of all queries by the term."""
        out = torch.zeros(B, self.H, T, T, dtype=torch.float64)
        for b, h, i, j in itertools.product(range(B), range(self.H), range(T), range(T)):
            out[b, h, i, j] = term(self, b, h, i, j) if j <= i else 0
        return out

    def distance(self, b: int, i: int, j: int) -> int:
        return int(self.pos[b, i] - self.pos[b, j])


def dot(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    """No encoding in the layers: none, and what is added to the embeddings."""
    return c.q[b, h, i] @ c.k[b, h, j] / math.sqrt(c.D)


def geometric(base: float, dim: int) -> Tensor:
    """base^(-2n / dim), n = 0 ... dim/2 - 1."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def sinusoidal_qk(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    q, k = (x[b, h, t] + torch.tensor([sinusoidal(c.encoding, int(c.pos[b, t]), n, c.D) for n in range(c.D)])
            for x, t in ((c.q, i), (c.k, j)))
    return q @ k / math.sqrt(c.D)


# --- Rotary: a complex factor z for each pair of channels


def turned(c: Case, b: int, h: int, i: int, j: int, z_i: Tensor, z_j: Tensor) -> Tensor:
    """sum_pairs Re(conj(q z_i) k z_j) / sqrt(D); the other channels pass."""
    q, k, R = c.q[b, h, i], c.k[b, h, j], 2 * len(z_i)
    is_half = getattr(c.options, "layout", "half") == "half"
    first, second = (slice(0, R // 2), slice(R // 2, R)) if is_half else (slice(0, R, 2), slice(1, R, 2))
    q_pairs, k_pairs = (torch.complex(x[first], x[second]) for x in (q, k))
    return (((q_pairs * z_i).conj() * k_pairs * z_j).real.sum() + q[R:] @ k[R:]) / math.sqrt(c.D)


def waves(t: float | Tensor, f: Tensor) -> Tensor:
    return torch.exp(1j * t * f)


def rope(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    o, R = c.options, round(c.options.fraction * c.D)
    is_full = c.config.model.full_every and (LAYER + 1) % c.config.model.full_every == 0
    f = geometric(o.local_base if o.local_base and not is_full else o.base, R)
    if o.spectrum == "hope":                                            # less than one turn in L
        f = f * (L * f >= 2 * math.pi)
    if o.spectrum == "rope_id":                                         # from 2 pi / 32 to 4 pi / L
        f = 2 * math.pi / 32 * (32 * 2 / L) ** (torch.arange(R // 2) / (R // 2 - 1))
    return turned(c, b, h, i, j, waves(c.pos[b, i], f), waves(c.pos[b, j], f))


def rope_2d(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    f = geometric(c.options.base, c.D // 2)
    n = c.options.prompt

    def waves_of(t: Tensor) -> Tensor:                                  # at both axes
        axes = (min(t, n - 1), max(t - n + 1, 0)) if n else (t, t)
        return torch.cat([waves(p, f) for p in axes])

    return turned(c, b, h, i, j, waves_of(c.pos[b, i]), waves_of(c.pos[b, j]))


def p_rope(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    f = geometric(c.options.base, c.D)
    f[math.floor(c.options.p * c.D / 2):] = 0
    return turned(c, b, h, i, j, waves(c.pos[b, i], f), waves(c.pos[b, j], f))


def xpos(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    f, zeta = geometric(10_000, c.D), (torch.arange(0, c.D, 2) / c.D + 0.4) / 1.4
    decay = zeta.double() ** (c.distance(b, i, j) / c.options.scale_base)
    return turned(c, b, h, i, j, decay * waves(c.pos[b, i], f), waves(c.pos[b, j], f))


def pope(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    radius = (1 + c.q[b, h, i].exp()).log() * (1 + c.k[b, h, j].exp()).log()
    f = geometric(c.options.base, 2 * c.D)
    return radius @ (c.encoding.delta[LAYER, h] - c.distance(b, i, j) * f).cos() / math.sqrt(c.D)


def fope(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    f = geometric(10_000, c.D)
    f = f[c.config.train.seq_len * f >= 2 * math.pi]
    n_constant = c.D // 2 - min(len(f), c.D // 4)                       # pairs with cosine = sine = 1
    mixtures = c.encoding.cos_mixture[LAYER, h], c.encoding.sin_mixture[LAYER, h]

    def z(t: int) -> Tensor:
        a = c.pos[b, t] * f
        mixed = (wave @ mixture for wave, mixture in zip((a.cos(), a.sin()), mixtures, strict=True))
        return torch.complex(*(F.pad(x, (0, n_constant), value=1) for x in mixed))

    return turned(c, b, h, i, j, z(i), z(j))


def convolved(raw: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's depthwise convolution of (T, F), padded on the left; weight (F, n)."""
    padded = F.pad(raw.T[None], (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], groups=weight.shape[0])[0].T


@cache
def selective_angles(c: Case, b: int, h: int) -> Tensor:
    """Of each token and pair: what the tokens up to it said, times the pair's frequency."""
    e = c.encoding
    x = torch.cat([part / part.norm(dim=-1, keepdim=True) for part in c.x[b].chunk(c.H, dim=-1)], dim=-1)
    raw = x @ (e.up[LAYER].unflatten(0, (c.H, c.D // 2))[h] @ e.down[LAYER]).T
    phi = convolved(raw, e.convolution[LAYER, h])                       # (T, D / 2)
    return phi.cumsum(dim=0) * geometric(c.options.base, c.D)


def selective_rope(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    return turned(c, b, h, i, j, *(waves(1, selective_angles(c, b, h)[t]) for t in (i, j)))


def repo(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    e = c.encoding
    z = [e.out[LAYER, h] @ (F.silu(e.gate[LAYER] @ x) * (e.value[LAYER] @ x)) for x in c.x[b, [i, j]]]
    return turned(c, b, h, i, j, *(waves(t, geometric(c.options.base, c.D)) for t in z))


# --- Biases by distance: what is added in head h at distance d from a query at m


def slope(h: int, H: int) -> float:
    """2^(-8 (h + 1) / H); for other H those of the power of two below, then every second of the next."""
    P = 2 ** math.floor(math.log2(H))
    return 2 ** (-8 * (h + 1) / P) if h < P else 2 ** (-4 * (2 * (h - P) + 1) / P)


def t5(c: Case, h: int, d: int, m: int) -> Tensor:
    n, exact = c.options.num_buckets, c.options.num_buckets // 2
    if d >= exact:
        share = math.log(d / exact) / math.log(c.options.max_distance / exact)
        d = min(n - 1, exact + math.floor(share * (n - exact)))
    return c.encoding.table.weight[d, h]


def fire(c: Case, h: int, d: int, m: int) -> Tensor:
    scale, threshold = abs(float(c.encoding.c[LAYER])), abs(float(c.encoding.threshold[LAYER]) * L)
    share = math.log(scale * d + 1) / (math.log(scale * max(m, threshold) + 1) + 1e-6)
    first, _, second = c.encoding.mlps[LAYER]
    return second.weight[h] @ (first.weight[:, 0] * share + first.bias).clamp(min=0) + second.bias[h]


def sandwich(c: Case, h: int, d: int, m: int) -> Tensor:
    """(p_m . p_(m - d)) over the head's ratio, p the sinusoids of Vaswani et al."""
    angles = [t * geometric(10_000, c.options.dim) for t in (m, m - d)]
    return (angles[0].sin() @ angles[1].sin() + angles[0].cos() @ angles[1].cos()) / ((h + 1) * 8 / c.H)


BIASES: dict[str, Callable[[Case, int, int, int], Tensor | float]] = {
    "alibi": lambda c, h, d, m: (
        -d * (c.encoding.log_slopes[h].exp() if c.options.learned else slope(h, c.H))),
    "kerple_log": lambda c, h, d, m: -c.encoding.p[h] * (1 + c.encoding.a[h] * d).log(),
    "kerple_power": lambda c, h, d, m: -c.encoding.a[h] * d ** c.encoding.p[h],
    "bam": lambda c, h, d, m: -c.encoding.s[LAYER, h].exp() * (d + 1e-5) ** c.encoding.beta[LAYER, h],
    "t5": t5, "fire": fire, "sandwich": sandwich}


def biased(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    return dot(c, b, h, i, j) + BIASES[c.options.encoding](c, h, c.distance(b, i, j), int(c.pos[b, i]))


# --- Content


def relative_key(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    longest = c.options.max_distance or L - 1
    assert c.encoding.table.shape == (2, longest + 1, c.D)
    e = c.encoding.table[LAYER, min(c.distance(b, i, j), longest)]
    is_both = c.options.encoding == "relative_key_query"
    return dot(c, b, h, i, j) + (c.q[b, h, i] + c.k[b, h, j] * is_both) @ e / math.sqrt(c.D)


def transformer_xl(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    angle = c.distance(b, i, j) * geometric(10_000, c.C)
    r = (c.encoding.w[LAYER] @ torch.cat((angle.sin(), angle.cos())))[h * c.D:(h + 1) * c.D]
    u, v = c.encoding.u[h], c.encoding.v[h]
    return ((c.q[b, h, i] + u) @ c.k[b, h, j] + (c.q[b, h, i] + v) @ r) / math.sqrt(c.D)


def cope(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    gates = [1 / (1 + math.exp(-dot(c, b, h, i, n))) for n in range(j, i + 1)]
    products, last = c.encoding.table[LAYER] @ c.q[b, h, i], c.options.max_pos - 1
    low = int(count := min(sum(gates), last))
    return dot(c, b, h, i, j) + torch.lerp(products[low], products[min(low + 1, last)], count - low)


@cache
def forget_gates(c: Case, b: int, h: int) -> Tensor:
    e = getattr(c.encoding, "gates", c.encoding)
    return F.logsigmoid(c.x[b] @ e.w[LAYER, h] + e.b[LAYER, h])         # (T,)


def forgetting(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    return dot(c, b, h, i, j) + forget_gates(c, b, h)[j + 1:i + 1].sum()


def grape_ap(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    n = c.options.p_dim
    p, total = c.x[b] @ c.encoding.w[LAYER, h * n:(h + 1) * n].T, dot(c, b, h, i, j)
    for t in range(j + 1, i + 1):
        z = torch.complex(*p[t].chunk(2)) / p[t].square().mean().sqrt() * cmath.exp(-1j * c.pos[b, t])
        total = total - slope(h, c.H) * (1 + (-p[i] @ torch.cat((z.real, z.imag)) / n).exp()).log()
    return total


def dape(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    d, base, (first, _, last) = c.distance(b, i, j), c.encoding.bias, c.encoding.mlps[LAYER]
    assert first.weight.shape == (32, 2 * c.H) and last.weight.shape == (c.H, 32)
    biases = [-slope(n, c.H) * d if c.options.bias == "alibi"
              else -base.p[n] * math.log(1 + base.a[n] * d) for n in range(c.H)]
    logits = [dot(c, b, n, i, j) for n in range(c.H)]
    hidden = first.weight @ torch.tensor(logits + biases).double() + first.bias
    return (dot(c, b, h, i, j) + biases[h] + last.bias[h]
            + last.weight[h] @ torch.where(hidden > 0, hidden, 0.01 * hidden))


@cache
def reflections(c: Case, b: int, h: int) -> list[Tensor]:
    """I - beta w w^T (D, D) of each token."""
    e = c.encoding
    raw = c.x[b] @ (e.up[LAYER].unflatten(0, (c.H, c.D))[h] @ e.down[LAYER]).T
    w = F.silu(convolved(raw, e.convolution[LAYER, h]))
    w = w / w.norm(dim=-1, keepdim=True)
    beta = 2 * torch.sigmoid(c.x[b] @ e.u[LAYER, h] + e.b[LAYER, h])
    return [torch.eye(c.D).double() - beta[t] * torch.outer(w[t], w[t]) for t in range(T)]


def path(c: Case, b: int, h: int, i: int, j: int) -> Tensor:
    row = c.q[b, h, i]
    for t in range(i, j, -1):
        row = row @ reflections(c, b, h)[t]
    forgotten = forget_gates(c, b, h)[j + 1:i + 1].sum() if c.options.encoding == "path_fox" else 0
    return row @ c.k[b, h, j] / math.sqrt(c.D) + forgotten


TERMS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("none", "learned", "integer", "integer_normalised", "binary", "sinusoidal"), dot),
    **{f.__name__: f for f in (
        sinusoidal_qk, rope, rope_2d, p_rope, xpos, pope, fope, selective_rope, repo, relative_key,
        transformer_xl, cope, forgetting, grape_ap, dape, path)},
    **dict.fromkeys(BIASES, biased), "relative_key_query": relative_key, "path_fox": path}
VARIANTS = [*((name, "") for name in ENCODINGS), *(("rope", options) for options in (
    "position.layout=interleaved position.base=500", "position.fraction=0.5",
    "position.fraction=0.25 position.layout=interleaved", "position.spectrum=hope",
    "position.spectrum=rope_id position.fraction=0.5", "model.window=5 position.local_base=50",
    "model.window=5 position.local_base=50 model.full_every=2")),
    ("rope_2d", "position.layout=interleaved position.base=500"), ("rope_2d", "position.prompt=9"),
    ("sinusoidal_qk", "position.layout=half position.base=500"), ("repo", "position.base=500"),
    ("sinusoidal_qk", "position.sine_alone=true position.base=500"),
    *(("p_rope", f"position.p={p} position.base=500") for p in (0.0, 0.2, 0.3, 0.9)),
    ("p_rope", "position.p=0.5 position.layout=interleaved"), ("xpos", "position.scale_base=20"),
    ("xpos", "position.layout=interleaved"), ("pope", "position.base=500"), ("fope", "train.seq_len=4096"),
    ("fope", "train.seq_len=6"), ("fope", "position.layout=interleaved"), ("alibi", "position.learned=true"),
    ("alibi", "model.n_head=6 model.n_embd=96"), ("t5", "position.num_buckets=12 position.max_distance=40"),
    ("sandwich", "position.dim=64"), ("relative_key", "position.max_distance=5"),
    ("relative_key_query", "position.max_distance=5"), ("cope", "position.max_pos=3"),
    ("grape_ap", "position.p_dim=2"), ("dape", "position.bias=kerple_log"),
    ("selective_rope", "position.n_taps=1 position.rank=5 position.base=500")]
FP32_ANGLES = ("sinusoidal_qk", "rope", "rope_2d", "p_rope", "xpos", "pope", "fope", "transformer_xl",
               "sandwich")
# BAM's logarithm of the distance is fp32 too; PaTH has 1e-6 under the root of a length
TOLERANCE = {**dict.fromkeys(FP32_ANGLES, 3e-4), "bam": 1e-5, "path": 1e-5, "path_fox": 1e-5}


@pytest.mark.parametrize(("name", "overrides"), VARIANTS)
def test_logits_are_the_formula(name: str, overrides: str, monkeypatch) -> None:
    """Of all queries, of some after cached keys, and of one."""
    for module in {importlib.import_module(encoding.__module__) for encoding in ENCODINGS.values()}:
        for constant in set(PIECES) & set(vars(module)):
            monkeypatch.setattr(module, constant, PIECES[constant])
    if name not in TERMS:
        pytest.skip("write its formula in TERMS; where its angles are fp32, add it to FP32_ANGLES")
    c, tolerance = Case(name, overrides), TOLERANCE.get(name, 1e-9)
    found = [c.found(Tq) for Tq in (T, 4, 1)]
    expected, plain = c.expected(TERMS[name]), c.expected(dot)
    assert name in ("none", *EMBEDDED) or "p=0.0" in overrides or (expected - plain).abs().max() > 0.1
    for logits in found:
        torch.testing.assert_close(logits, expected[:, :, -logits.shape[2]:], atol=tolerance, rtol=tolerance)


# --- Added to the embeddings: what channel n gets at position t


def binary(e: Encoding, t: int, n: int) -> float:
    text = f"{t:b}"
    return float(text[-1 - n]) if n < len(text) else 0.0


def sinusoidal(e: Any, t: int, n: int, width: int = 32) -> float:
    if e.options.sine_alone:
        return math.sin(t / e.options.base ** (n / width))
    pair, is_cos = (n % (width // 2), 2 * n >= width) if e.options.layout == "half" else (n // 2, n % 2)
    return (math.cos if is_cos else math.sin)(t / e.options.base ** (2 * pair / width))


EMBEDDED: dict[str, Callable[[Any, int, int], float]] = {
    "learned": lambda e, t, n: float(e.table.weight[t, n]), "integer": lambda e, t, n: float(t),
    "integer_normalised": lambda e, t, n: t / L, "binary": binary, "sinusoidal": sinusoidal}


@pytest.mark.parametrize(("name", "overrides"), [
    *((name, "") for name in EMBEDDED), ("sinusoidal", "position.layout=half position.base=500"),
    ("sinusoidal", "position.sine_alone=true position.base=500")])
def test_what_is_added_to_the_embeddings_is_the_formula(name: str, overrides: str) -> None:
    encoding, factor = model_of(name, overrides).encoding, 32**0.5 if name == "sinusoidal" else 1.0
    pos = torch.tensor([[0, 1, 2, 5, 31], [7, 8, 100, 1000, 20_003]])[:1 if name == "learned" else 2]
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    added = [[[EMBEDDED[name](encoding, t, n) for n in range(32)] for t in row] for row in pos.tolist()]
    close = 2e-3 if name == "sinusoidal" else 1e-6                      # fp32's angles
    torch.testing.assert_close(encoding.embed(x, pos), factor * x + torch.tensor(added).double(), atol=close,
                               rtol=1e-6)


# --- Where they begin, and what their parameters may be


def start(name: str, overrides: str = "") -> Any:
    torch.manual_seed(0)
    return GPT(config_of(name, overrides)).encoding


def test_parameters_start_as_the_authors_do() -> None:
    wide = start("t5", "model.n_embd=256 model.n_head=16")
    assert wide.table.weight.std() == pytest.approx(1 / 16, rel=0.1)
    torch.manual_seed(0)
    learned = GPT(config_of("learned"))
    assert 0.9 < learned.encoding.table.weight.std() / learned.embedding.weight.std() < 1.1
    for name in ("kerple_log", "kerple_power"):                         # p ~ U(0, 2), a ~ U(0, 1)
        encoding = start(name, "model.n_embd=1024 model.n_head=512")
        for p, top in ((encoding.p, 2), (encoding.a, 1)):
            assert p.shape == (512,) and p.min() >= 0 and 0.95 * top < p.max() < top
            assert p.mean() == pytest.approx(top / 2, rel=0.1)
    fire = start("fire", "model.n_layer=3")
    assert fire.c.tolist() == pytest.approx([0.1] * 3) and fire.threshold.tolist() == [1] * 3
    assert (start("forgetting").b == 0).all()
    for name, key in (("forgetting", "w"), ("relative_key", "table"), ("transformer_xl", "w")):
        assert getattr(start(name), key).std() == pytest.approx(0.02, rel=0.2), name
    assert (start("cope").table == 0).all() and (start("pope").delta == 0).all()
    assert start("pope").delta.shape == (2, 2, 16)
    slopes = torch.tensor([slope(h, 6) for h in range(6)]).log()
    six = "model.n_head=6 model.n_embd=96"
    torch.testing.assert_close(start("alibi", f"{six} position.learned=true").log_slopes, slopes)
    bam = start("bam", six)                                             # ALiBi's bias
    torch.testing.assert_close(bam.s, slopes.repeat(2, 1))
    assert (bam.beta == 1).all()
    torch.manual_seed(0)
    s = dict(GPT(config_of("rope", "position.temperature=ssmax")).named_parameters())["temperature.s"]
    assert s.shape == (2, 2) and (s == 0.43).all()


def test_fopes_mixtures_begin_at_single_waves_with_xaviers_noise() -> None:
    """M = 6 waves, N = 4 mixtures: every second wave begins one; without noise nothing else is in it."""
    plain, expected = start("fope", "train.seq_len=4096 position.gain=0"), torch.zeros(6, 4)
    expected[[0, 2, 4], [0, 1, 2]] = 1
    assert torch.equal(plain.cos_mixture, expected.expand(2, 2, 6, 4))
    noisy = start("fope", "train.seq_len=100000 model.n_embd=512 position.gain=0.5")
    noise = noisy.sin_mixture - noisy.sin_mixture.round().clamp(0, 1)
    H, M, N = noise.shape[1:]
    assert noise.std() == pytest.approx(0.5 * math.sqrt(2 / (N * (M + H))), rel=0.2)
    assert not torch.equal(noisy.sin_mixture, noisy.cos_mixture)
    assert not list(noisy.parameters()) and "cos_mixture" in noisy.state_dict()     # saved, not trained


@pytest.mark.parametrize(("name", "parameter", "low", "high"), [
    ("kerple_log", "p", 0.01, 7.0), ("kerple_power", "p", 0.01, 2.0), ("kerple_power", "a", 0.01, 7.0),
    ("pope", "delta", -2 * math.pi, 0.0)])
def test_a_parameter_is_clamped_after_a_step_and_can_leave_the_bound(name: str, parameter: str,
                                                                     low: float, high: float) -> None:
    model = lively(config_of(name))
    p = dict(model.encoding.named_parameters())[parameter]
    p.copy_(torch.linspace(-9, 7, p.numel()).view(p.shape))
    model.set_step(1)
    with torch.enable_grad():
        losses = [model(tokens((2, 32)), tokens((2, 32), 1)) for _ in range(2)]     # two forwards
        gradient, = torch.autograd.grad(losses[0], p)
    assert p.min() == pytest.approx(low) and p.max() == pytest.approx(high) and (gradient != 0).all()


# --- Precision


def test_near_keys_stay_exact_after_long_texts() -> None:
    """A sum of 50,000 gates in fp32 has errors of 0.01; the difference of two near sums must not."""
    encoding = ENCODINGS["forgetting"](Shape(1, 1, 4, 4, 8), Options(encoding="forgetting"))
    log_f = F.logsigmoid(torch.randn(1, 1, 50_000, 1, generator=torch.Generator().manual_seed(0)))
    q, k, pos = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 50_000, 4), torch.arange(50_000)[None]
    bias = encoding.scores(torch.zeros(1, 1, 4, 50_000), q, k, At(pos[:, -4:], pos, 0, None, log_f))
    assert bias[0, 0, 3, -10].item() == pytest.approx(log_f[0, 0, -9:, 0].sum().item(), abs=1e-5)
    assert bias.dtype == torch.float32


def test_xpos_stays_in_range_far_from_zero_and_over_long_spans() -> None:
    """At 10^6, 1.25 * 10^6 / 512 e-folds from zero; and over 67 scale_base."""
    encoding, pos = model_of("xpos", "position.base=100").encoding, torch.arange(50)[None]
    q, k = torch.randn(2, 1, 1, 50, 16, generator=torch.Generator().manual_seed(0))
    near, far = (logits_of(encoding, q, k, at, at) for at in (pos, pos + 10**6))
    torch.testing.assert_close(far, near, atol=0.3, rtol=0)             # fp32's angles
    assert logits_of(encoding, q, k, 700 * pos, 700 * pos).tril().isfinite().all()
    last, old = torch.tensor([[10**7]]), torch.tensor([[0, 10**6, 10**7 - 512, 10**7]])
    one = logits_of(encoding, torch.ones(1, 1, 1, 16), torch.ones(1, 1, 4, 16), last, old)[0, 0, 0]
    assert one.isfinite().all() and one[:2].abs().max() < 1e-6 and one[3] == pytest.approx(4)


@pytest.mark.parametrize("name", [n for n, e in ENCODINGS.items() if e.by_distance or n == "fire"])
def test_biases_by_distance_are_fp32_under_autocast(name: str) -> None:
    encoding, none = lively(config_of(name)).encoding, torch.zeros(1, 2, 9, 16)
    pos = torch.arange(9)[None] * 37
    exact = logits_of(encoding, none, none, pos, pos)
    with torch.autocast("cpu", torch.bfloat16):
        masked = torch.zeros(1, 2, 9, 9).masked_fill(exact.isneginf(), -torch.inf)
        low = encoding.scores(masked, none, none, At(pos, pos, LAYER, encoding.tables(pos, pos)))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, exact, atol=1e-6, rtol=1e-6)
