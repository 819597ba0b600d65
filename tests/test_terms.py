"""The formula of every encoding, one logit at a time in plain loops, against its hooks in fp64.

TERMS: name -> term(p), the logit of a Pair of a query and a key. To add an encoding, add its term here.
"""

import cmath
import importlib
import itertools
import math
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from explicit import config_of, logits_of, model_of
from torch import Tensor
from toys import lively, slow_except, tokens

from model import GPT
from positions import ENCODINGS, At, Encoding, Options, Shape, parts

pytestmark = pytest.mark.usefixtures("no_gradients")

B, T, L, LAYER = 2, 7, 32, 1
# what is computed a few at a time, made so small that these 7 tokens take several times and a rest
PIECES = {"KEYS_AT_A_TIME": 4, "PIECE": 4, "MOST_HIDDEN": 1000}


class Case:
    """An encoding with large random parameters; queries, keys, the layer's input and positions, in fp64."""

    def __init__(self, name: str, overrides: str = "") -> None:
        # of three layers, so that the one asked is neither the first nor the last
        overrides = f"model.n_layer=3 {overrides}"
        self.config = config_of(name, overrides)
        self.encoding = deepcopy(model_of(name, overrides).encoding)
        for key, p in self.encoding.named_parameters():
            if key.rpartition(".")[2] in ("p", "a"):                    # of KERPLE: where no clamp acts
                p.copy_(p.abs() + 0.3)
        self.encoding.clamp()
        m = self.config.model
        random = torch.Generator().manual_seed(1)
        self.H, self.D, self.C = m.n_head, m.head_width, m.n_embd
        self.q, self.k = torch.randn(2, B, self.H, T, self.D, generator=random, dtype=torch.float64)
        self.x = torch.randn(B, T, self.C, generator=random, dtype=torch.float64)
        # gaps that differ between rows, some distances beyond every threshold
        self.pos = torch.randint(1, 40, (B, T), generator=random).cumsum(1)

    def found(self, Tq: int) -> Tensor:
        """Logits of the last Tq queries by the hooks; 0 for masked keys."""
        q = self.q[:, :, -Tq:]
        q_pos = self.pos[:, -Tq:]
        logits = logits_of(self.encoding, q, self.k, q_pos, self.pos, self.x, LAYER)
        return logits.masked_fill(logits.isneginf(), 0)

    def expected(self, term: "Term") -> Tensor:
        """Logits of all queries by the term."""
        out = torch.zeros(B, self.H, T, T, dtype=torch.float64)
        for b, h, i, j in itertools.product(range(B), range(self.H), range(T), range(T)):
            if j <= i:
                out[b, h, i, j] = term(Pair(self, b, h, i, j))
        return out


class Pair(NamedTuple):
    """Query i and key j, both counted from the first token, in row b and head h of layer 1."""

    c: Case
    b: int
    h: int
    i: int
    j: int

    @property
    def q(self) -> Tensor:
        return self.c.q[self.b, self.h, self.i]                         # (D,)

    @property
    def k(self) -> Tensor:
        return self.c.k[self.b, self.h, self.j]

    @property
    def at(self) -> tuple[int, int]:
        """The positions of the query and of the key."""
        return int(self.c.pos[self.b, self.i]), int(self.c.pos[self.b, self.j])

    @property
    def distance(self) -> int:
        return self.at[0] - self.at[1]

    @property
    def e(self) -> Any:
        return self.c.encoding

    @property
    def o(self) -> Any:
        return self.c.config.position


Term = Callable[[Pair], Tensor]


def dot(p: Pair) -> Tensor:
    """No encoding in the layers: none, and what is added to the embeddings."""
    return p.q @ p.k / math.sqrt(p.c.D)


def geometric(base: float, dim: int) -> Tensor:
    """base^(-2n / dim), n = 0 ... dim/2 - 1."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def sinusoidal_qk(p: Pair) -> Tensor:
    def added(t: int) -> Tensor:
        return torch.tensor([sinusoidal(p.e, t, n, p.c.D) for n in range(p.c.D)])

    m, n = p.at
    return (p.q + added(m)) @ (p.k + added(n)) / math.sqrt(p.c.D)


# --- Rotary: a complex factor z for each pair of channels


def turned(p: Pair, z_q: Tensor, z_k: Tensor) -> Tensor:
    """sum_pairs Re(conj(q z_q) k z_k) / sqrt(D); the other channels pass."""
    R = 2 * len(z_q)
    first = slice(0, R, 2)
    second = slice(1, R, 2)
    if getattr(p.o, "layout", "half") == "half":
        first = slice(0, R // 2)
        second = slice(R // 2, R)
    q, k = (torch.complex(x[first], x[second]) for x in (p.q, p.k))
    rotary = ((q * z_q).conj() * k * z_k).real.sum()
    return (rotary + p.q[R:] @ p.k[R:]) / math.sqrt(p.c.D)


def waves(t: float | Tensor, f: Tensor) -> Tensor:
    return torch.exp(1j * t * f)


def at_frequencies(p: Pair, f: Tensor) -> Tensor:
    """RoPE with these frequencies."""
    return turned(p, *(waves(t, f) for t in p.at))


def rope(p: Pair) -> Tensor:
    o = p.o
    R = round(p.o.fraction * p.c.D)
    full_every = p.c.config.model.full_every
    is_full = full_every and (LAYER + 1) % full_every == 0
    f = geometric(o.local_base if o.local_base and not is_full else o.base, R)
    if o.spectrum == "hope":                                            # less than one turn in L
        f = f * (L * f >= 2 * math.pi)
    if o.spectrum == "rope_id":                                         # from 2 pi / 32 to 4 pi / L
        f = 2 * math.pi / 32 * (32 * 2 / L) ** (torch.arange(R // 2) / (R // 2 - 1))
    return at_frequencies(p, f)


def rope_2d(p: Pair) -> Tensor:
    f = geometric(p.o.base, p.c.D // 2)
    n = p.o.prompt

    def waves_of(t: int) -> Tensor:                                     # at both axes
        if n:
            return torch.cat([waves(min(t, n - 1), f), waves(max(t - n + 1, 0), f)])
        return torch.cat([waves(t, f), waves(t, f)])

    return turned(p, *(waves_of(t) for t in p.at))


def p_rope(p: Pair) -> Tensor:
    f = geometric(p.o.base, p.c.D)
    f[math.floor(p.o.p * p.c.D / 2):] = 0
    return at_frequencies(p, f)


def xpos(p: Pair) -> Tensor:
    f, (m, n) = geometric(10_000, p.c.D), p.at
    zeta = (torch.arange(0, p.c.D, 2).double() / p.c.D + 0.4) / 1.4
    decay = zeta ** (p.distance / p.o.scale_base)
    return turned(p, decay * waves(m, f), waves(n, f))


def pope(p: Pair) -> Tensor:
    radius = (1 + p.q.exp()).log() * (1 + p.k.exp()).log()
    angle = p.e.delta[LAYER, p.h] - p.distance * geometric(p.o.base, 2 * p.c.D)
    return radius @ angle.cos() / math.sqrt(p.c.D)


def fope(p: Pair) -> Tensor:
    f = geometric(10_000, p.c.D)
    f = f[p.c.config.train.seq_len * f >= 2 * math.pi]
    n_constant = p.c.D // 2 - min(len(f), p.c.D // 4)                   # pairs with cosine = sine = 1

    def z(t: int) -> Tensor:
        cosines = (t * f).cos() @ p.e.cos_mixture[LAYER, p.h]
        sines = (t * f).sin() @ p.e.sin_mixture[LAYER, p.h]
        return torch.complex(*(F.pad(x, (0, n_constant), value=1) for x in (cosines, sines)))

    m, n = p.at
    return turned(p, z(m), z(n))


def convolved(raw: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's depthwise convolution of (T, F), padded on the left; weight (F, n)."""
    padded = F.pad(raw.T[None], (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], groups=weight.shape[0])[0].T


def low_rank(e: Any, x: Tensor, h: int, H: int) -> Tensor:
    """x (T, C) times the head's share of the columns of up and down. (T, F)"""
    return x @ (e.up[LAYER].unflatten(0, (H, -1))[h] @ e.down[LAYER]).T


@cache
def selective_angles(c: Case, b: int, h: int) -> Tensor:
    """Of each token and pair: what the tokens up to it said, times the pair's frequency."""
    e: Any = c.encoding
    x = F.normalize(c.x[b].unflatten(1, (c.H, -1)), dim=-1).flatten(1)
    phi = convolved(low_rank(e, x, h, c.H), e.convolution[LAYER, h])    # (T, D / 2)
    return phi.cumsum(dim=0) * geometric(c.config.position.base, c.D)


def selective_rope(p: Pair) -> Tensor:
    angles = selective_angles(p.c, p.b, p.h)
    return turned(p, waves(1, angles[p.i]), waves(1, angles[p.j]))


def repo(p: Pair) -> Tensor:
    e = p.e
    f = geometric(p.o.base, p.c.D)
    x = p.c.x[p.b]
    hidden = F.silu(x @ e.gate[LAYER].T) * (x @ e.value[LAYER].T)
    z = hidden @ e.out[LAYER, p.h]                                      # (T,)
    return turned(p, waves(z[p.i], f), waves(z[p.j], f))


# --- Biases by distance: what is added in head h at distance d from a query at m


def slope(h: int, H: int) -> float:
    """2^(-8 (h + 1) / H); for other H those of the power of two below, then every second of the next."""
    P = 2 ** math.floor(math.log2(H))
    if h < P:
        return 2 ** (-8 * (h + 1) / P)
    return 2 ** (-4 * (2 * (h - P) + 1) / P)


def alibi(p: Pair, d: int) -> Tensor | float:
    if p.o.learned:
        return -d * p.e.log_slopes[p.h].exp()
    return -d * slope(p.h, p.c.H)


def kerple_log(p: Pair, d: int) -> Tensor:
    return -p.e.p[p.h] * (1 + p.e.a[p.h] * d).log()


def kerple_power(p: Pair, d: int) -> Tensor:
    return -p.e.a[p.h] * d ** p.e.p[p.h]


def bam(p: Pair, d: int) -> Tensor:
    return -p.e.s[LAYER, p.h].exp() * (d + 1e-5) ** p.e.beta[LAYER, p.h]


def t5(p: Pair, d: int) -> Tensor:
    n = p.o.num_buckets
    exact = p.o.num_buckets // 2
    if d >= exact:
        share = math.log(d / exact) / math.log(p.o.max_distance / exact)
        d = min(n - 1, exact + math.floor(share * (n - exact)))
    return p.e.table.weight[d, p.h]


def fire(p: Pair, d: int) -> Tensor:
    scale = abs(p.e.c[LAYER])
    threshold = abs(p.e.threshold[LAYER] * L)
    farthest = max(p.at[0], threshold)
    share = (scale * d + 1).log() / ((scale * farthest + 1).log() + 1e-6)
    first, _, second = p.e.mlps[LAYER]
    hidden = (first.weight[:, 0] * share + first.bias).clamp(min=0)
    return second.weight[p.h] @ hidden + second.bias[p.h]


def sandwich(p: Pair, d: int) -> Tensor:
    """(p_m . p_(m - d)) over the head's ratio, p the sinusoids of Vaswani et al."""
    waves_m, waves_n = (waves(t, geometric(10_000, p.o.dim)) for t in p.at)
    return (waves_m.conj() @ waves_n).real / ((p.h + 1) * 8 / p.c.H)


BIASES = {f.__name__: f for f in (alibi, kerple_log, kerple_power, bam, t5, fire, sandwich)}


def biased(p: Pair) -> Tensor:
    return dot(p) + BIASES[p.o.encoding](p, p.distance)


# --- Content


def relative_key(p: Pair) -> Tensor:
    longest = p.o.max_distance or L - 1
    assert p.e.table.shape == (3, longest + 1, p.c.D)
    read_by = p.q + p.k if p.o.encoding == "relative_key_query" else p.q
    return dot(p) + read_by @ p.e.table[LAYER, min(p.distance, longest)] / math.sqrt(p.c.D)


def transformer_xl(p: Pair) -> Tensor:
    angle = p.distance * geometric(10_000, p.c.C)
    sinusoids = torch.cat((angle.sin(), angle.cos()))
    r = (p.e.w[LAYER] @ sinusoids).unflatten(0, (p.c.H, p.c.D))[p.h]
    by_content = (p.q + p.e.u[p.h]) @ p.k
    by_distance = (p.q + p.e.v[p.h]) @ r
    return (by_content + by_distance) / math.sqrt(p.c.D)


def cope(p: Pair) -> Tensor:
    last = p.o.max_pos - 1
    gates = [dot(p._replace(j=n)).sigmoid() for n in range(p.j, p.i + 1)]
    count = min(float(sum(gates)), last)
    low = int(count)
    products = p.e.table[LAYER] @ p.q
    return dot(p) + torch.lerp(products[low], products[min(low + 1, last)], count - low)


@cache
def forget_gates(c: Case, b: int, h: int) -> Tensor:
    e = getattr(c.encoding, "gates", c.encoding)
    return F.logsigmoid(c.x[b] @ e.w[LAYER, h] + e.b[LAYER, h])         # (T,)


def forgotten(p: Pair) -> Tensor:
    return forget_gates(p.c, p.b, p.h)[p.j + 1:p.i + 1].sum()


def forgetting(p: Pair) -> Tensor:
    return dot(p) + forgotten(p)


def log_forgetting(p: Pair) -> Tensor:
    return dot(p) - p.e.log_p[LAYER, p.h].exp() * (1 - forgotten(p)).log()


def grape_ap(p: Pair) -> Tensor:
    n = p.o.p_dim
    total = dot(p)
    row = p.c.x[p.b] @ p.e.w[LAYER].unflatten(0, (p.c.H, n))[p.h].T     # (T, n)
    for t in range(p.j + 1, p.i + 1):
        length = row[t].square().mean().sqrt()
        z = torch.complex(*row[t].chunk(2)) / length * cmath.exp(-1j * p.c.pos[p.b, t])
        product = row[p.i] @ torch.cat((z.real, z.imag)) / n
        total = total + slope(p.h, p.c.H) * F.logsigmoid(product)
    return total


def dape(p: Pair) -> Tensor:
    d, base, (first, _, last) = p.distance, p.e.bias, p.e.mlps[LAYER]
    assert first.weight.shape == (32, 2 * p.c.H)
    assert last.weight.shape == (p.c.H, 32)
    heads = range(p.c.H)
    biases = torch.tensor([-slope(h, p.c.H) * d for h in heads], dtype=torch.float64)
    if p.o.bias == "kerple_log":
        biases = -base.p * (1 + base.a * d).log()
    logits = torch.stack([dot(p._replace(h=h)) for h in heads])
    hidden = first.weight @ torch.cat((logits, biases)) + first.bias
    hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
    return dot(p) + biases[p.h] + last.weight[p.h] @ hidden + last.bias[p.h]


@cache
def reflections(c: Case, b: int, h: int) -> list[Tensor]:
    """I - beta w w^T (D, D) of each token."""
    e: Any = c.encoding
    w = F.silu(convolved(low_rank(e, c.x[b], h, c.H), e.convolution[LAYER, h]))
    w = w / w.norm(dim=-1, keepdim=True)
    beta = 2 * torch.sigmoid(c.x[b] @ e.u[LAYER, h] + e.b[LAYER, h])
    return [torch.eye(c.D).double() - beta[t] * torch.outer(w[t], w[t]) for t in range(T)]


def path(p: Pair) -> Tensor:
    row = p.q
    for t in range(p.i, p.j, -1):
        row = row @ reflections(p.c, p.b, p.h)[t]
    return row @ p.k / math.sqrt(p.c.D)


def path_fox(p: Pair) -> Tensor:
    return path(p) + forgotten(p)


TERMS: dict[str, Term] = {
    **dict.fromkeys(("none", "learned", "integer", "integer_normalised", "binary", "sinusoidal"), dot),
    **{f.__name__: f for f in (
        sinusoidal_qk, rope, rope_2d, p_rope, xpos, pope, fope, selective_rope, repo, relative_key,
        transformer_xl, cope, forgetting, log_forgetting, grape_ap, dape, path,
        path_fox)},
    **dict.fromkeys(BIASES, biased),
    "relative_key_query": relative_key,
}
VARIANTS = {        # other values of an encoding's options
    "rope": ["position.layout=interleaved position.base=500", "position.fraction=0.5",
             "position.fraction=0.25 position.layout=interleaved", "position.spectrum=hope",
             "position.spectrum=rope_id position.fraction=0.5", "model.window=5 position.local_base=50",
             "model.window=5 position.local_base=50 model.full_every=2"],
    "rope_2d": ["position.layout=interleaved position.base=500", "position.prompt=9"],
    "sinusoidal_qk": ["position.layout=half position.base=500", "position.sine_alone=true position.base=500"],
    "p_rope": ["position.p=0.0 position.base=500", "position.p=0.2 position.base=500",
               "position.p=0.9 position.base=500", "position.p=0.5 position.layout=interleaved"],
    "xpos": ["position.scale_base=20", "position.layout=interleaved"],
    "pope": ["position.base=500"],
    "fope": ["train.seq_len=4096", "train.seq_len=6", "position.layout=interleaved"],
    "selective_rope": ["position.n_taps=1 position.rank=5 position.base=500"],
    "repo": ["position.base=500"],
    "alibi": ["position.learned=true", "model.n_head=6 model.n_embd=96"],
    "t5": ["position.num_buckets=12 position.max_distance=40"],
    "sandwich": ["position.dim=64"],
    "relative_key": ["position.max_distance=5"],
    "relative_key_query": ["position.max_distance=5"],
    "cope": ["position.max_pos=3"],
    "grape_ap": ["position.p_dim=2"],
    "dape": ["position.bias=kerple_log"],
}
PLAIN = [(name, "") for name in ENCODINGS]
CASES = PLAIN + [(name, options) for name, variants in VARIANTS.items() for options in variants]
FP32_ANGLES = ("sinusoidal_qk", "rope", "rope_2d", "p_rope", "xpos", "pope", "fope", "transformer_xl",
               "sandwich")
# BAM's logarithm of the distance is fp32 too; PaTH has 1e-6 under the root of a length
TOLERANCE = {**dict.fromkeys(FP32_ANGLES, 3e-4), "bam": 1e-5, "path": 1e-5, "path_fox": 1e-5}


@pytest.mark.parametrize(("name", "overrides"), slow_except(CASES, *PLAIN))
def test_logits_are_the_formula(name: str, overrides: str, monkeypatch) -> None:
    """Of all queries, of some after cached keys, and of one."""
    modules = {parts, *(importlib.import_module(encoding.__module__) for encoding in ENCODINGS.values())}
    for constant, size in PIECES.items():
        having = [module for module in modules if constant in vars(module)]
        assert having, f"no module has {constant} any more"
        for module in having:
            monkeypatch.setattr(module, constant, size)
    if name not in TERMS:
        pytest.skip("write its formula in TERMS; where its angles are fp32, add it to FP32_ANGLES")
    c = Case(name, overrides)
    tolerance = TOLERANCE.get(name, 1e-9)
    expected = c.expected(TERMS[name])
    if TERMS[name] is not dot and "p=0.0" not in overrides:
        assert (expected - c.expected(dot)).abs().max() > 0.05
    for Tq in (T, 4, 1):
        torch.testing.assert_close(c.found(Tq), expected[:, :, -Tq:], atol=tolerance, rtol=tolerance)


# --- Added to the embeddings: what channel n gets at position t


def binary(e: Encoding, t: int, n: int) -> float:
    return float(t >> n & 1)


def sinusoidal(e: Any, t: int, n: int, width: int = 32) -> float:
    if e.options.sine_alone:
        return math.sin(t / e.options.base ** (n / width))
    if e.options.layout == "half":
        pair = n % (width // 2)
        is_cosine = n >= width // 2
    else:
        pair = n // 2
        is_cosine = n % 2 == 1
    angle = t / e.options.base ** (2 * pair / width)
    return math.cos(angle) if is_cosine else math.sin(angle)


EMBEDDED: dict[str, Callable[[Any, int, int], float]] = {
    "learned": lambda e, t, n: float(e.table.weight[t, n]),
    "integer": lambda e, t, n: float(t),
    "integer_normalised": lambda e, t, n: t / L,
    "binary": binary,
    "sinusoidal": sinusoidal,
}


@pytest.mark.parametrize(("name", "overrides"), [
    *((name, "") for name in EMBEDDED), ("sinusoidal", "position.layout=half position.base=500"),
    ("sinusoidal", "position.sine_alone=true position.base=500")])
def test_what_is_added_to_the_embeddings_is_the_formula(name: str, overrides: str) -> None:
    encoding = model_of(name, overrides).encoding
    pos = torch.tensor([[0, 1, 2, 5, 31], [7, 8, 100, 1000, 20_003]])
    if name == "learned":
        pos = pos[:1]
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    added = torch.tensor([[[EMBEDDED[name](encoding, t, n) for n in range(32)] for t in row]
                          for row in pos.tolist()], dtype=torch.float64)
    factor, close = (32**0.5, 2e-3) if name == "sinusoidal" else (1.0, 1e-6)       # fp32's angles
    torch.testing.assert_close(encoding.embed(x, pos), factor * x + added, atol=close, rtol=1e-6)


# --- Where they begin, and what their parameters may be


def start(name: str, n_head: int = 2, head_dim: int = 16, n_layer: int = 2, seq_len: int = L,
          **options: Any) -> Any:
    """A new encoding, as a model of this shape makes it."""
    torch.manual_seed(0)
    shape = Shape(n_layer, n_head, n_head * head_dim, head_dim, seq_len)
    return ENCODINGS[name](shape, ENCODINGS[name].Options(encoding=name, **options))


def test_parameters_start_as_the_authors_do() -> None:
    assert start("t5", n_head=16).table.weight.std() == pytest.approx(1 / 16, rel=0.1)
    torch.manual_seed(0)
    learned = GPT(config_of("learned"))
    assert 0.9 < learned.encoding.table.weight.std() / learned.embedding.weight.std() < 1.1
    for name in ("kerple_log", "kerple_power"):                         # p ~ U(0, 2), a ~ U(0, 1)
        encoding = start(name, n_head=512)
        for p, top in ((encoding.p, 2), (encoding.a, 1)):
            assert p.shape == (512,)
            assert p.min() >= 0
            assert 0.95 * top < p.max() < top
            assert p.mean() == pytest.approx(top / 2, rel=0.1)
    fire = start("fire", n_layer=3)
    assert fire.c.tolist() == pytest.approx([0.1] * 3)
    assert fire.threshold.tolist() == [1] * 3
    assert (start("forgetting").b == 0).all()
    for name, key in (("forgetting", "w"), ("relative_key", "table"), ("transformer_xl", "w")):
        assert getattr(start(name), key).std() == pytest.approx(0.02, rel=0.2), name
    p = start("log_forgetting", n_head=4, n_layer=3).log_p.exp()
    torch.testing.assert_close(p, torch.tensor([0.5, 1, 1.5, 2]).expand(3, 4))
    assert (start("cope").table == 0).all()
    assert torch.equal(start("pope").delta, torch.zeros(2, 2, 16))
    slopes = torch.tensor([slope(h, 6) for h in range(6)]).log()
    torch.testing.assert_close(start("alibi", n_head=6, learned=True).log_slopes, slopes)
    bam = start("bam", n_head=6)                                        # ALiBi's bias
    torch.testing.assert_close(bam.s, slopes.repeat(2, 1))
    assert (bam.beta == 1).all()
    s = GPT(config_of("rope", "position.temperature=ssmax")).get_parameter("temperature.s")
    assert torch.equal(s, torch.full((2, 2), 0.43))


def test_fopes_mixtures_begin_at_single_waves_with_xaviers_noise() -> None:
    """M = 6 waves, N = 4 mixtures: every second wave begins one; without noise nothing else is in it."""
    plain = start("fope", seq_len=4096, gain=0)
    expected = torch.zeros(6, 4)
    expected[[0, 2, 4], [0, 1, 2]] = 1
    assert torch.equal(plain.cos_mixture, expected.expand(2, 2, 6, 4))
    noisy = start("fope", head_dim=256, seq_len=100_000, gain=0.5)
    noise = noisy.sin_mixture - noisy.sin_mixture.round().clamp(0, 1)
    H, M, N = noise.shape[1:]
    assert noise.std() == pytest.approx(0.5 * math.sqrt(2 / (N * (M + H))), rel=0.2)
    assert not torch.equal(noisy.sin_mixture, noisy.cos_mixture)
    assert not list(noisy.parameters())
    assert "cos_mixture" in noisy.state_dict()  # saved, not trained


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
    assert p.min() == pytest.approx(low)
    assert p.max() == pytest.approx(high)
    assert (gradient != 0).all()


# --- Precision


def test_near_keys_stay_exact_after_long_texts() -> None:
    """A sum of 50,000 gates in fp32 has errors of 0.01; the difference of two near sums must not."""
    encoding = ENCODINGS["forgetting"](Shape(1, 1, 4, 4, 8), Options(encoding="forgetting"))
    log_f = F.logsigmoid(torch.randn(1, 1, 50_000, 1, generator=torch.Generator().manual_seed(0)))
    q = torch.zeros(1, 1, 4, 4)
    k = torch.zeros(1, 1, 50_000, 4)
    pos = torch.arange(50_000)[None]
    bias = encoding.scores(torch.zeros(1, 1, 4, 50_000), q, k, At(pos[:, -4:], pos, 0, None, log_f))
    assert bias[0, 0, 3, -10].item() == pytest.approx(log_f[0, 0, -9:, 0].sum().item(), abs=1e-5)
    assert bias.dtype == torch.float32


def test_xpos_stays_in_range_far_from_zero_and_over_long_spans() -> None:
    """At 10^6, 1.25 * 10^6 / 512 e-folds from zero; and over 67 scale_base."""
    encoding = model_of("xpos", "position.base=100").encoding
    pos = torch.arange(50)[None]
    q, k = torch.randn(2, 1, 1, 50, 16, generator=torch.Generator().manual_seed(0))
    near, far = (logits_of(encoding, q, k, at, at) for at in (pos, pos + 10**6))
    torch.testing.assert_close(far, near, atol=0.3, rtol=0)             # fp32's angles
    assert logits_of(encoding, q, k, 700 * pos, 700 * pos).tril().isfinite().all()
    last = torch.tensor([[10**7]])
    old = torch.tensor([[0, 10**6, 10**7 - 512, 10**7]])
    ones = torch.ones(1, 1, 4, 16)
    one = logits_of(encoding, ones[:, :, :1], ones, last, old)[0, 0, 0]
    assert one.isfinite().all()
    assert one[:2].abs().max() < 1e-6
    assert one[3] == pytest.approx(4)
