"""Biases by distance against their formulas, computed pair by pair, and two other libraries."""

import math
from collections.abc import Callable

import pytest
import torch
from conftest import lively, tokens
from torch import Tensor

from model import GPT
from positions import At, Encoding, distance
from positions.distance import T5, ALiBi
from runtime.errors import UserError

B, H, TQ, TK = 2, 2, 7, 12
NAMES = ["alibi", "t5", "kerple_log", "kerple_power", "bam", "fire", "sandwich"]
LEARNED = ["t5", "kerple_log", "kerple_power", "bam", "fire"]
BY_LAYER = ["bam", "fire"]


def positive(encoding: Encoding) -> None:
    """Make the parameters of KERPLE random, in the range where no clamp acts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in encoding.named_parameters():
            if name in ("p", "a"):
                p.copy_(torch.rand(p.shape, generator=generator) + 0.3)


def scattered(layer: int = 0) -> At:
    """Queries after cached keys, gaps that differ between rows, some positions beyond every threshold."""
    steps = torch.randint(1, 40, (B, TK), generator=torch.Generator().manual_seed(0))
    k_pos = steps.cumsum(1) - steps[:, :1]                              # from 0 on
    return At(k_pos[:, -TQ:], k_pos, layer, None)


def added(encoding: Encoding, at: At) -> Tensor:
    """What the encoding adds to logits of 0."""
    q, k = torch.zeros(B, H, at.q_pos.shape[1], 16), torch.zeros(B, H, at.k_pos.shape[1], 16)
    at = at._replace(tables=encoding.tables(at.q_pos, at.k_pos))
    logits = torch.zeros(*q.shape[:3], k.shape[2], dtype=next(encoding.parameters(), q).dtype)
    return encoding.scores(logits, q, k, at)


def alibi(e: Encoding, h: int, i: int, j: int, layer: int) -> float:
    return -(2 ** (-8 * (h + 1) / H)) * (i - j)


def t5(e: Encoding, h: int, i: int, j: int, layer: int) -> float:
    d = i - j
    bucket = d if d < 16 else min(31, 16 + math.floor(math.log(d / 16) / math.log(8) * 16))
    return e.table.weight[bucket, h].item()


def kerple_log(e: Encoding, h: int, i: int, j: int, layer: int) -> float:
    return -e.p[h].item() * math.log(1 + e.a[h].item() * (i - j))


def kerple_power(e: Encoding, h: int, i: int, j: int, layer: int) -> float:
    return -e.a[h].item() * (i - j) ** e.p[h].item()


def bam(e: Encoding, h: int, i: int, j: int, layer: int) -> float:
    return -math.exp(e.s[layer, h].item()) * (i - j + 1e-5) ** e.beta[layer, h].item()


def fire(e: Encoding, h: int, i: int, j: int, layer: int) -> float:
    c, L = abs(e.c[layer].item()), abs(e.threshold[layer].item() * 32)
    share = math.log(c * (i - j) + 1) / (math.log(c * max(i, L) + 1) + 1e-6)
    first, _, second = e.mlps[layer]
    total = second.bias[h].item()
    for unit in range(32):
        total += second.weight[h, unit].item() * max(0.0, first.weight[unit, 0].item() * share
                                                     + first.bias[unit].item())
    return total


def sandwich(e: Encoding, h: int, i: int, j: int, layer: int) -> float:
    """(p_i . p_j) over the head's ratio, p the sinusoids of Vaswani et al. with 128 channels."""
    def p(t: int) -> list[float]:
        a = [t / 10_000 ** (2 * n / 128) for n in range(64)]
        return [math.sin(x) for x in a] + [math.cos(x) for x in a]
    return sum(x * y for x, y in zip(p(i), p(j), strict=True)) / ((h + 1) * 8 / H)


FORMULAS: dict[str, Callable[..., float]] = {f.__name__: f for f in (
    alibi, t5, kerple_log, kerple_power, bam, fire, sandwich)}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_bias_is_its_formula(name: str, layer: int, tiny) -> None:
    encoding = lively(tiny(name)).double().encoding
    positive(encoding)
    at = scattered(layer)
    bias = added(encoding, at).expand(B, H, TQ, TK)
    seen = ((b, h, i, j) for b in range(B) for h in range(H) for i in range(TQ)
            for j in range(TK - TQ + i + 1))
    for b, h, i, j in seen:
        expected = FORMULAS[name](encoding, h, at.q_pos[b, i].item(), at.k_pos[b, j].item(), layer)
        assert bias[b, h, i, j].item() == pytest.approx(expected, abs=1e-5, rel=1e-5), (b, h, i, j)


@pytest.mark.parametrize("name", NAMES)
def test_masked_keys_stay_masked_and_give_no_nan(name: str, tiny) -> None:
    encoding = lively(tiny(name)).encoding
    at = torch.arange(9)[None]
    mask = torch.ones(9, 9).tril().bool()
    q = torch.zeros(1, H, 9, 16)
    logits = torch.zeros(1, H, 9, 9).masked_fill(~mask, -torch.inf).requires_grad_()
    out = encoding.scores(logits, q, q, At(at, at, 0, encoding.tables(at, at)))
    assert (out[:, :, ~mask] == -torch.inf).all() and out[:, :, mask].isfinite().all()
    (out.softmax(-1) * torch.randn(9, generator=torch.Generator().manual_seed(0))).sum().backward()
    grads = [p.grad for p in (logits, *encoding.parameters()) if p.grad is not None]     # layer 0's
    assert all(grad.isfinite().all() for grad in grads)
    assert len(grads) > 1 or not list(encoding.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_bias_is_fp32_under_autocast(name: str, tiny) -> None:
    encoding = lively(tiny(name)).encoding
    at = scattered()
    with torch.autocast("cpu", torch.bfloat16):
        low = added(encoding, at)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, added(encoding, at), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", LEARNED)
def test_all_layers_share_parameters_or_none_does(name: str, tiny) -> None:
    encoding = lively(tiny(name)).encoding
    biases = [added(encoding, scattered(layer)) for layer in (0, 1)]
    assert torch.equal(*biases) == (name not in BY_LAYER)


# BAM

def test_bam_starts_as_alibi_and_multiplies_logit_and_bias_by_the_temperature(tiny) -> None:
    bam, alibi, at = GPT(tiny("bam")).encoding, GPT(tiny("alibi")).encoding, scattered()
    torch.testing.assert_close(added(bam, at), added(alibi, at).expand(B, H, TQ, TK), atol=1e-4, rtol=1e-5)
    model = lively(tiny("bam", "position.temperature=ssmax"))
    factor = model.temperature(at.q_pos)[1].detach()                    # with negative factors
    at, q = at._replace(layer=1, temperature=factor), torch.zeros(B, H, TQ, 16)
    logits = torch.randn(B, H, TQ, TK, generator=torch.Generator().manual_seed(0))
    logits[..., -3:] = -torch.inf
    found = model.encoding.scores(logits, q, q, at)
    expected = (logits + added(model.encoding, at._replace(temperature=None))) * factor
    assert (factor < 0).any() and (found[..., -3:] == -torch.inf).all()
    torch.testing.assert_close(found[..., :-3], expected[..., :-3])


def test_bam_bars_near_tokens_with_a_negative_power_and_stays_finite(tiny) -> None:
    model = lively(tiny("bam", "position.temperature=ssmax"))
    for beta in (-2.0, -30.0, 30.0):
        model.zero_grad()
        model.encoding.beta.data.fill_(beta)
        model(tokens((1, 32)), tokens((1, 32), 1)).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    model.encoding.beta.data.fill_(-2.0)
    bias = added(model.encoding, At(torch.arange(9)[None], torch.arange(9)[None], 0, None)).detach()[0]
    assert (bias[:, 8, 8] < -1e9).all() and (bias[:, 8].diff(dim=-1) < 0).all()


# T5

@pytest.mark.parametrize(("num_buckets", "max_distance"),
                         [(32, 128), (32, 64), (16, 128), (64, 512), (32, 4096), (8, 20), (2, 2), (33, 100)])
def test_t5_buckets_are_hugging_faces(num_buckets: int, max_distance: int) -> None:
    t5_module = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(4097)
    peer = t5_module.T5Attention._relative_position_bucket(-distance, False, num_buckets, max_distance)
    found = T5.bucket(distance, num_buckets, max_distance)
    assert torch.equal(found, peer)
    assert found[max_distance:].unique().tolist() == [num_buckets - 1]   # one entry for all beyond


def test_t5_bias_is_x_transformers(tiny) -> None:
    x_transformers = pytest.importorskip("x_transformers.x_transformers")
    encoding = lively(tiny("t5", "position.max_distance=40", "position.num_buckets=12")).encoding
    peer = x_transformers.RelativePositionBias(1.0, True, 12, 40, H)  # scale 1, not sqrt(D)
    peer.relative_attention_bias.weight.data.copy_(encoding.table.weight)
    at = torch.arange(200)[None]
    torch.testing.assert_close(added(encoding, At(at[:, 150:], at, 0, None)),
                               peer(50, 200)[None].expand(B, -1, -1, -1), atol=1e-6, rtol=1e-6)


def test_t5_starts_with_the_spread_of_hugging_faces(tiny) -> None:
    model = GPT(tiny("t5", "model.n_embd=256", "model.n_head=16"))
    assert model.encoding.table.weight.std().item() == pytest.approx(1 / 16, rel=0.1)


def test_t5_refuses_a_distance_within_the_exact_buckets(tiny) -> None:
    with pytest.raises(UserError, match="must exceed the 16 distances"):
        tiny("t5", "position.max_distance=16")


# KERPLE

def test_kerple_power_one_is_alibi(tiny, monkeypatch) -> None:
    slopes = [1 / 16, 1 / 32]            # ALiBi's 1/256 is below KERPLE's clamp
    monkeypatch.setattr(ALiBi, "slopes", staticmethod(lambda n_head: slopes))
    encoding = lively(tiny("kerple_power")).encoding
    with torch.no_grad():
        encoding.p.fill_(1.0)
        encoding.a.copy_(torch.tensor(slopes))
    linear = lively(tiny("alibi")).encoding
    torch.testing.assert_close(added(encoding, scattered()), added(linear, scattered()))


@pytest.mark.parametrize(("name", "p"), [("kerple_log", 5.0), ("kerple_power", 2.0)])
def test_kerple_is_clamped_at_every_forward_and_can_leave_the_bound(name: str, p: float, tiny) -> None:
    encoding = GPT(tiny(name)).encoding
    with torch.no_grad():
        encoding.p.copy_(torch.tensor([-3.0, 5.0]))
        encoding.a.copy_(torch.tensor([0.5, -3.0]))
    added(encoding, scattered()).sum().backward()
    torch.testing.assert_close(encoding.p.data, torch.tensor([0.01, p]))
    torch.testing.assert_close(encoding.a.data, torch.tensor([0.5, 0.01]))
    assert (encoding.p.grad != 0).all() and (encoding.a.grad != 0).all()


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
def test_kerple_starts_uniform(name: str, tiny) -> None:
    encoding = GPT(tiny(name, "model.n_embd=1024", "model.n_head=512")).encoding
    for p, top in ((encoding.p, 2), (encoding.a, 1)):
        assert p.shape == (512,) and p.min() >= 0 and 0.95 * top < p.max() < top
        assert p.mean().item() == pytest.approx(top / 2, rel=0.1)


# FIRE, and DAPE's MLP

@pytest.mark.parametrize("name", ["fire", "dape"])
@pytest.mark.parametrize("most", [1, 2000, 10_000])     # a row of queries at a time, three, all
def test_an_mlp_in_blocks_of_rows_is_the_same_as_at_once(name: str, most: int, tiny, monkeypatch) -> None:
    model, x = lively(tiny(name)).double(), tokens((2, 10))
    at_once = model(x).detach()                         # a backward pass may follow
    monkeypatch.setattr(distance, "MOST_HIDDEN", most)
    with torch.no_grad():
        torch.testing.assert_close(model(x), at_once, atol=1e-9, rtol=1e-9)


def test_fire_starts_as_its_authors_start(tiny) -> None:
    encoding = GPT(tiny("fire", "model.n_layer=3")).encoding
    assert encoding.c.tolist() == pytest.approx([0.1] * 3)
    assert (encoding.threshold * encoding.seq_len).tolist() == [32.0] * 3


@pytest.mark.parametrize("threshold", [0.3, 0.75, 1.5, 3.0])
def test_fire_around_its_threshold_where_positions_are_consecutive(threshold: float, tiny) -> None:
    """The same values and gradients with rows before it, at it, beyond it, and both in one block."""
    encoding, at = lively(tiny("fire")).double().encoding, torch.arange(60)[None]
    with torch.no_grad():
        encoding.threshold.fill_(threshold)                             # of 32 tokens; 0.75 and 1.5: at a row
    q, k = torch.randn(2, 1, 2, 60, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for ahead in (None, 0):
        place = At(at, at, 0, None, ahead=ahead)
        bias = encoding.scores(torch.zeros(1, 2, 60, 60).double(), q, k, place).tril()
        gradients = torch.autograd.grad(bias.sin().sum(), list(encoding.parameters()), allow_unused=True)
        found.append([bias, *(g for g in gradients if g is not None)])
    for without, with_it in zip(*found, strict=True):
        torch.testing.assert_close(with_it, without)


def test_fire_depends_on_the_distance_alone_up_to_its_threshold(tiny) -> None:
    encoding = lively(tiny("fire")).encoding
    with torch.no_grad():
        encoding.threshold.fill_(1.0)
    near, shifted, far = (added(encoding, At(p, p, 0, None)) for p in
                          (torch.arange(n, n + 16)[None] for n in (0, 17, 48)))
    torch.testing.assert_close(near, shifted)
    assert (near - far).abs().max() > 1e-2


# Sandwich

def test_sandwich_ignores_what_the_softmax_does_and_has_no_parameters(tiny) -> None:
    encoding = lively(tiny("sandwich", "position.dim=64")).encoding
    assert not list(encoding.parameters())
    at = torch.zeros(1, 1, dtype=torch.long)
    assert added(encoding, At(at, at, 0, None))[0, :, 0, 0].tolist() == [32 / 4, 32 / 8]    # dim/2 H / (8 h)


# ALiBi

def test_learned_alibi_starts_at_the_fixed_slopes_and_learns(tiny) -> None:
    fixed, learned = GPT(tiny("alibi")), GPT(tiny("alibi", "position.learned=true"))
    torch.testing.assert_close(added(learned.encoding, scattered()), added(fixed.encoding, scattered()))
    assert not list(fixed.encoding.parameters())
    assert [p.shape for p in learned.encoding.parameters()] == [(2,)]
    learned(tokens((2, 32)), tokens((2, 32), 1)).backward()
    assert (learned.encoding.log_slopes.grad != 0).all()


def test_learned_alibi_never_rewards_distance(tiny) -> None:
    encoding = lively(tiny("alibi", "position.learned=true")).encoding
    with torch.no_grad():
        encoding.log_slopes.copy_(torch.tensor([-5.0, 2.0]))
    at = torch.arange(6)[None]
    bias = added(encoding, At(at[:, -1:], at, 0, None))[0, :, 0]
    torch.testing.assert_close(bias, -torch.tensor([-5.0, 2.0]).exp()[:, None] * (5 - at))
