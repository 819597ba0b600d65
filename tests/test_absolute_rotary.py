"""Integer and binary positions, p-RoPE, xPos and FoPE: each against its formula in plain loops."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from conftest import lively, tokens

import rope
from attention import Mask, attend_fused
from model import GPT
from positions import At
from runtime.checkpoint import load_run
from runtime.device import autocast
from train import train

D = 16
layouts = pytest.mark.parametrize("layout", rope.LAYOUTS)


def vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -----------------------------------------------------------------------------------------------------------
# Absolute


def added(name: str, c: int, t: int, L: int) -> float:
    """What the encoding adds to channel c at position t."""
    if name == "binary":
        text = f"{t:b}"
        return float(text[-1 - c]) if c < len(text) else 0.0
    return float(t) if name == "integer" else t / L


@pytest.mark.parametrize("name", ["integer", "integer_normalised", "binary"])
def test_the_position_is_added_as_the_formula_says(name: str, tiny) -> None:
    encoding = lively(tiny(name)).encoding
    at = torch.tensor([[0, 1, 2, 5, 31], [7, 8, 100, 65_536, 1_000_003]])
    x = vectors(2, 5, 32)
    y = encoding.embed(x, at)
    for b in range(2):
        for i in range(5):
            for c in range(32):
                expected = x[b, i, c].item() + added(name, c, at[b, i].item(), L=32)
                assert y[b, i, c].item() == pytest.approx(expected, abs=1e-5, rel=1e-7), (b, i, c)
    torch.testing.assert_close(encoding.embed(x, at[:1]), x + (y - x)[:1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shift", [0, 10**6, 2**40])
def test_huge_integers_stay_finite(dtype: str, shift: int, tiny) -> None:
    config = tiny("integer", f"train.dtype={dtype}")
    for model in (lively(config), lively(config).to(torch.bfloat16)):
        with autocast(config.train, torch.device("cpu")):
            logits = model(tokens((2, 16)), positions=torch.arange(16) + shift)
        logits.float().logsumexp(-1).sum().backward()
        assert logits.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_binary_has_as_many_positions_as_its_channels_can_count(tiny) -> None:
    narrow = lively(tiny("binary", "model.n_embd=8"))
    assert narrow.encoding.max_length == 256
    assert narrow(tokens((1, 2)), positions=torch.tensor([0, 255])).isfinite().all()
    with pytest.raises(ValueError, match=r"positions 0 \.\.\. 255 only, got 256"):
        narrow(tokens((1, 2)), positions=torch.tensor([0, 256]))
    wide = lively(tiny("binary", "model.n_embd=96")).encoding
    assert wide.max_length is None
    bits = wide.embed(torch.zeros(1, 1, 96), torch.tensor([[2**63 - 2]]))[0, 0]
    assert bits.tolist() == [0.0] + [1.0] * 62 + [0.0] * 33


# -----------------------------------------------------------------------------------------------------------
# Rotary


def logits(encoding, q: torch.Tensor, k: torch.Tensor, q_pos: torch.Tensor,
           k_pos: torch.Tensor) -> torch.Tensor:
    q, k = encoding.rotate(q, k, At(q_pos, k_pos, 0, encoding.tables(q_pos, k_pos)))
    return q @ k.mT


def pair_logit(q: list[float], k: list[float], distance: int, frequencies: list[float], decay: list[float],
               layout: str) -> float:
    """q . k of one query and key, pair by pair: q rotated by distance * f, times decay ^ distance."""
    total = 0.0
    for i, f in enumerate(frequencies):
        a, b = (i, i + D // 2) if layout == "half" else (2 * i, 2 * i + 1)
        cos, sin = math.cos(distance * f), math.sin(distance * f)
        turned_a, turned_b = q[a] * cos - q[b] * sin, q[a] * sin + q[b] * cos
        total += decay[i] ** distance * (turned_a * k[a] + turned_b * k[b])
    return total


def expected_logits(q: torch.Tensor, k: torch.Tensor, q_pos: torch.Tensor, k_pos: torch.Tensor,
                    frequencies: list[float], decay: list[float], layout: str) -> torch.Tensor:
    out = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i, m in enumerate(q_pos[b].tolist()):
                for j, n in enumerate(k_pos[b].tolist()):
                    out[b, h, i, j] = pair_logit(q[b, h, i].tolist(), k[b, h, j].tolist(), m - n, frequencies,
                                                 decay, layout)
    return out


K_POS = torch.tensor([[0, 1, 2, 9, 10, 40, 41], [100, 103, 104, 105, 300, 301, 302]])
Q_POS = K_POS[:, 3:]                                                    # four queries after three cached keys


@layouts
@pytest.mark.parametrize(("p", "kept"), [(0.75, 6), (0.5, 4), (0.3, 2), (1.0, 8), (0.0, 0)])
def test_p_rope_is_the_formula(p: float, kept: int, layout: str, tiny) -> None:
    options = (f"position.p={p}", "position.base=500", f"position.layout={layout}")
    encoding = lively(tiny("p_rope", *options)).encoding
    q, k = vectors(2, 2, 4, D), vectors(2, 2, 7, D, seed=1)
    frequencies = [500 ** (-2 * i / D) if i < kept else 0.0 for i in range(D // 2)]
    torch.testing.assert_close(logits(encoding, q, k, Q_POS, K_POS),
                               expected_logits(q, k, Q_POS, K_POS, frequencies, [1.0] * 8, layout),
                               atol=1e-4, rtol=0)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 1.0])
@pytest.mark.parametrize("dim", [16, 20, 64])
def test_p_rope_has_the_frequencies_of_transformers(p: float, dim: int) -> None:
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    from transformers import LlamaConfig

    if "proportional" not in functions:
        pytest.skip("this transformers has no proportional RoPE")
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, rope_parameters={
        "rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": p})
    peer, factor = functions["proportional"](config, torch.device("cpu"))
    assert factor == 1 and torch.equal(rope.stop_slowest(rope.inv_freq(dim), p), peer)


def test_p_rope_runs_from_none_to_rope(tiny) -> None:
    x = tokens((2, 100))
    assert torch.equal(lively(tiny("p_rope", "position.p=1"))(x), lively(tiny("rope"))(x))
    assert torch.equal(lively(tiny("p_rope", "position.p=0"))(x), lively(tiny("none"))(x))
    half = lively(tiny("p_rope", "position.p=0.5"))(x)
    assert (half - lively(tiny("rope", "position.fraction=0.5"))(x)).abs().max() > 1e-2


@layouts
@pytest.mark.parametrize("scale_base", [512, 20])
def test_xpos_is_the_formula(scale_base: int, layout: str, tiny) -> None:
    encoding = lively(tiny("xpos", f"position.scale_base={scale_base}", f"position.layout={layout}")).encoding
    q, k = vectors(2, 2, 4, D), vectors(2, 2, 7, D, seed=1)
    frequencies = [10_000 ** (-2 * i / D) for i in range(D // 2)]
    decay = [((2 * i / D + 0.4) / 1.4) ** (1 / scale_base) for i in range(D // 2)]
    found = logits(encoding, q, k, Q_POS, K_POS)
    expected = expected_logits(q, k, Q_POS, K_POS, frequencies, decay, layout)
    seen = (Q_POS[:, :, None] >= K_POS[:, None])[:, None].expand_as(found)   # it grows with negative distance
    torch.testing.assert_close(found[seen], expected[seen], atol=1e-4, rtol=0)
    if scale_base == 512:
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_xpos_agrees_with_rotary_embedding_torch(tiny) -> None:
    peer = pytest.importorskip("rotary_embedding_torch").RotaryEmbedding(D, use_xpos=True)
    q, k = vectors(1, 2, 700, D, dtype=torch.float32), vectors(1, 2, 700, D, seed=1, dtype=torch.float32)
    at = torch.arange(700)[None]
    found = logits(lively(tiny("xpos", "position.layout=interleaved")).encoding, q, k, at, at)
    peer_q, peer_k = peer.rotate_queries_and_keys(q, k)
    torch.testing.assert_close(found.tril(), (peer_q @ peer_k.mT).tril(), atol=1e-4, rtol=1e-5)


def test_xpos_agrees_with_x_transformers(tiny) -> None:
    module = pytest.importorskip("x_transformers.x_transformers")
    q, k = vectors(1, 2, 700, D, dtype=torch.float32), vectors(1, 2, 700, D, seed=1, dtype=torch.float32)
    at = torch.arange(700)[None]
    angle, scale = module.RotaryEmbedding(D, use_xpos=True)(at)
    peer_q = module.apply_rotary_pos_emb(q, angle, scale)
    peer_k = module.apply_rotary_pos_emb(k, angle, scale**-1)
    found = logits(lively(tiny("xpos", "position.layout=interleaved")).encoding, q, k, at, at)
    torch.testing.assert_close(found.tril(), (peer_q @ peer_k.mT).tril(), atol=1e-4, rtol=1e-5)


def test_xpos_without_decay_is_rope(tiny) -> None:
    x = tokens((2, 100))
    assert torch.equal(lively(tiny("xpos", "position.scale_base=1e30"))(x), lively(tiny("rope"))(x))
    assert (lively(tiny("xpos"))(x) - lively(tiny("rope"))(x)).abs().max() > 1e-3


def test_xpos_stays_in_range_far_from_zero_and_over_long_spans(tiny) -> None:
    encoding = lively(tiny("xpos", "position.base=100")).encoding
    q, k, v = vectors(3, 1, 1, 50, D, dtype=torch.float32)
    at = torch.arange(50)[None]
    far = at + 10**6                                                    # 1.25 * 10^6 / 512 e-folds from zero
    torch.testing.assert_close(logits(encoding, q, k, far, far).tril(), logits(encoding, q, k, at, at).tril(),
                               atol=0.3, rtol=0)                        # fp32's angles
    spread = at * 700                                                   # 34,300 positions, 67 scale_base
    q.requires_grad_(), k.requires_grad_()
    at = At(spread, spread, 0, encoding.tables(spread, spread))
    y = attend_fused(q, k, v, encoding, at, Mask(), 0.0)
    y.sum().backward()
    assert all(x.isfinite().all() for x in (y, q.grad, k.grad))
    last = torch.tensor([[10**7]])                                      # one query after keys of any age
    old = torch.tensor([[0, 10**6, 10**7 - 512, 10**7]])
    one = logits(encoding, torch.ones(1, 1, 1, D), torch.ones(1, 1, 4, D), last, old)[0, 0, 0]
    assert one.isfinite().all() and one[:2].abs().max() < 1e-6 and one[3] == pytest.approx(D)


@pytest.mark.parametrize("name", ["p_rope", "xpos"])
def test_tables_do_not_follow_the_model_to_bfloat16(name: str, tiny) -> None:
    at = torch.tensor([[0, 257, 4099]])
    made = GPT(tiny(name)).to(torch.bfloat16).encoding.tables(at, at)
    assert all(torch.equal(a, b) and a.dtype == torch.float32
               for a, b in zip(made, lively(tiny(name)).encoding.tables(at, at), strict=True))


# -----------------------------------------------------------------------------------------------------------
# FoPE


@layouts
@pytest.mark.parametrize(("L", "M", "N"), [(32, 2, 2), (4096, 6, 4), (6, 0, 0)])
def test_fope_mixes_the_waves_that_turn_within_L(L: int, M: int, N: int, layout: str, tiny) -> None:
    """Every second layer and head in loops; pairs beyond N have cosine = sine = 1."""
    encoding = lively(tiny("fope", f"train.seq_len={L}", f"position.layout={layout}")).encoding.double()
    assert encoding.cos_mixture.shape == encoding.sin_mixture.shape == (2, 2, M, N)
    at = torch.tensor([[0, 3, 50, 4000], [1, 2, 7, 9]])
    x, y = vectors(2, 2, 4, D), vectors(2, 1, 4, D, seed=1)             # one head of keys
    q, k = encoding.rotate(x, y, At(at, at, 1, encoding.tables(at, at)))

    def mixed(mixture: torch.Tensor, wave, h: int, c: int, t: int) -> float:
        if c >= N:
            return 1.0
        return sum(mixture[1, h, m, c].item() * wave(t * 10_000 ** (-2 * m / D)) for m in range(M))

    for b, h, t, c in itertools.product(range(2), range(2), range(4), range(D // 2)):
        cos, sin = (mixed(mixture, wave, h, c, int(at[b, t])) for mixture, wave in (
            (encoding.cos_mixture, math.cos), (encoding.sin_mixture, math.sin)))
        i, j = (c, c + D // 2) if layout == "half" else (2 * c, 2 * c + 1)
        for before, after in ((x[b, h, t], q[b, h, t]), (y[b, 0, t], k[b, h, t])):
            u, v = before[i].item(), before[j].item()
            assert after[i].item() == pytest.approx(u * cos - v * sin, abs=1e-3)        # angles are fp32
            assert after[j].item() == pytest.approx(v * cos + u * sin, abs=1e-3)


def test_fopes_mixtures_begin_at_single_waves_with_xaviers_noise(tiny) -> None:
    """M = 6 waves, N = 4 mixtures: every second wave begins one; without noise nothing else is in it."""
    plain = GPT(tiny("fope", "train.seq_len=4096", "position.gain=0")).encoding
    expected = torch.zeros(6, 4)
    expected[0, 0] = expected[2, 1] = expected[4, 2] = 1
    assert torch.equal(plain.cos_mixture, expected.expand(2, 2, 6, 4))
    noisy = GPT(tiny("fope", "train.seq_len=100000", "model.n_embd=512", "position.gain=0.5")).encoding
    H, M, N = noisy.sin_mixture.shape[1:]
    begins = range(0, M, math.ceil(M / N))
    noise = noisy.sin_mixture.clone()
    noise[:, :, list(begins), list(range(len(begins)))] -= 1
    assert noise.std().item() == pytest.approx(0.5 * math.sqrt(2 / (N * (M + H))), rel=0.2)
    assert not torch.equal(noisy.sin_mixture, noisy.cos_mixture)


def test_fopes_mixtures_are_saved_and_not_trained(tiny, tmp_path: Path) -> None:
    config = tiny("fope", "train.steps=2")
    assert train(config, []) == 0
    torch.manual_seed(config.train.seed)
    expected = GPT(config).encoding
    torch.manual_seed(1)
    found = load_run(tmp_path / "run")[0].encoding
    assert torch.equal(found.cos_mixture, expected.cos_mixture)
    assert torch.equal(found.sin_mixture, expected.sin_mixture)
