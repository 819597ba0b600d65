"""Laws of rotation, both layouts against explicit matrices, complex numbers and two other implementations."""

import math

import pytest
import torch
from conftest import lively, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

import rope
from evaluation.extension import parse
from model import GPT
from runtime.device import autocast
from runtime.errors import UserError
from runtime.optimizer import make_optimizer

D = 16
layouts = pytest.mark.parametrize("layout", rope.LAYOUTS)
positions = st.integers(-100_000, 100_000)


def vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def angle(position: int, dim: int = D) -> torch.Tensor:
    return rope.angles(torch.tensor(position), rope.inv_freq(dim, dtype=torch.float64))


def matrix(angles: torch.Tensor, layout: str) -> torch.Tensor:
    """The block-diagonal rotation matrix of RoFormer, equation 15, written out pair by pair."""
    R = torch.zeros(D, D, dtype=torch.float64)
    for i, a in enumerate(angles.tolist()):
        first, second = (i, i + D // 2) if layout == "half" else (2 * i, 2 * i + 1)
        R[first, first] = R[second, second] = math.cos(a)
        R[first, second], R[second, first] = -math.sin(a), math.sin(a)
    return R


@layouts
@settings(deadline=None)
@given(a=positions, b=positions)
def test_rotations_form_a_group_that_preserves_norms(layout: str, a: int, b: int) -> None:
    x, y = vectors(2, D)
    turned = rope.rotate(x, angle(a), layout)
    assert turned.norm().item() == pytest.approx(x.norm().item(), abs=1e-10)
    torch.testing.assert_close(rope.rotate(turned, angle(b), layout),
                               rope.rotate(x, angle(a) + angle(b), layout),
                               atol=1e-10, rtol=0)                      # R(a) R(b) = R(a + b)
    torch.testing.assert_close(turned @ y, x @ rope.rotate(y, -angle(a), layout),
                               atol=1e-10, rtol=0)                      # R(a)^T = R(-a)


@layouts
@settings(deadline=None)
@given(m=positions, n=positions, shift=positions)
def test_the_logit_depends_on_the_distance_alone(layout: str, m: int, n: int, shift: int) -> None:
    q, k = vectors(2, D)
    here = rope.rotate(q, angle(m), layout) @ rope.rotate(k, angle(n), layout)
    there = rope.rotate(q, angle(m + shift), layout) @ rope.rotate(k, angle(n + shift), layout)
    torch.testing.assert_close(here, there, atol=1e-10, rtol=0)


@layouts
def test_rotation_is_the_block_diagonal_matrix(layout: str) -> None:
    for position in (0, 1, 7, 1000, -3):
        x = vectors(5, D)
        torch.testing.assert_close(rope.rotate(x, angle(position), layout),
                                   x @ matrix(angle(position), layout).T, atol=1e-12, rtol=0)


def test_interleaved_rotation_is_complex_multiplication() -> None:
    x, a = vectors(3, 9, D), rope.angles(torch.arange(9), rope.inv_freq(D, dtype=torch.float64))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(a), a)
    torch.testing.assert_close(rope.rotate(x, a, "interleaved"), torch.view_as_real(turned).flatten(-2),
                               atol=1e-12, rtol=0)


def test_frequencies_are_the_closed_form() -> None:
    assert rope.inv_freq(8, 10_000.0).tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    with pytest.raises(ValueError, match="even"):
        rope.inv_freq(7)


@pytest.mark.parametrize("dim", [D, D // 2])
def test_half_is_interleaved_with_channels_permuted(dim: int) -> None:
    a = rope.angles(torch.arange(7), rope.inv_freq(dim, dtype=torch.float64))
    x = vectors(7, D)
    to_half = rope.to_half(torch.eye(D, dtype=torch.float64), 1, dim)           # as a matrix: x_half = P x
    torch.testing.assert_close(rope.rotate(x @ to_half.T, a, "half"),
                               rope.rotate(x, a, "interleaved") @ to_half.T, atol=1e-12, rtol=0)


@settings(deadline=None)
@given(n_head=st.integers(1, 4), pairs=st.integers(1, 5), passed=st.integers(0, 3))
def test_layout_conversion_inverts(n_head: int, pairs: int, passed: int) -> None:
    weight = vectors(n_head * (2 * pairs + passed), 6)
    there = rope.to_half(weight, n_head, 2 * pairs)
    assert torch.equal(rope.to_interleaved(there, n_head, 2 * pairs), weight)
    assert pairs == 1 or not torch.equal(there, weight)
    assert torch.equal(rope.to_half(weight[:, 0], n_head, 2 * pairs), there[:, 0])  # a bias converts alike


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_trained_model_converts_between_layouts(tiny, fraction: float) -> None:
    options = (f"position.fraction={fraction}", "model.qk_norm=true", "model.bias=true",
               "model.norm=layernorm")
    config = tiny("rope", "position.layout=interleaved", *options)
    model = lively(config)
    optimizer = make_optimizer(model, config)
    for step in range(3):                                               # trained, so that no symmetry is left
        model(tokens((4, 32), step), tokens((4, 32), step + 1)).backward()
        optimizer.step()
    other = GPT(tiny("rope", "position.layout=half", *options)).eval()
    weights = model.state_dict()
    rotary_dim = model.encoding.rotary_dim
    for name, weight in weights.items():
        if ".attention.q." in name or ".attention.k." in name:
            weights[name] = rope.to_half(weight, 2, rotary_dim)
        elif "q_norm" in name or "k_norm" in name:
            weights[name] = rope.to_half(weight, 1, rotary_dim)
    other.load_state_dict(model.state_dict())
    x = tokens((2, 100), 9)
    assert (other(x) - model(x)).abs().max() > 1e-2                 # unconverted: shapes fit, logits do not
    other.load_state_dict(weights)
    torch.testing.assert_close(other(x), model(x), atol=1e-5, rtol=1e-5)


def test_fraction_passes_the_rest_unchanged() -> None:
    x = vectors(3, D)
    a = rope.angles(torch.tensor([4, 5, 6]), rope.inv_freq(D // 4, dtype=torch.float64))
    turned = rope.rotate(x, a)
    assert torch.equal(turned[:, D // 4:], x[:, D // 4:])
    torch.testing.assert_close(turned[:, :D // 4], rope.rotate(x[:, :D // 4], a))
    with pytest.raises(ValueError, match="channels to rotate"):
        rope.rotate(x[:, :2], a)


def test_axial_angles_turn_each_share_by_its_own_axis() -> None:
    f = rope.inv_freq(D // 2, dtype=torch.float64)
    x = vectors(6, D)
    rows, columns = torch.tensor([0, 0, 1, 1, 5, 5]), torch.tensor([3, 1, 4, 1, 5, 9])
    turned = rope.rotate(x, rope.axial_angles(torch.stack((rows, columns), -1), (f, f)), "interleaved")
    torch.testing.assert_close(turned[:, :D // 2],
                               rope.rotate(x[:, :D // 2], rope.angles(rows, f), "interleaved"))
    torch.testing.assert_close(turned[:, D // 2:],
                               rope.rotate(x[:, D // 2:], rope.angles(columns, f), "interleaved"))
    with pytest.raises(ValueError, match="axes"):
        rope.axial_angles(rows[:, None], (f, f))


def test_parity_with_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    peer = llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=4 * D, num_attention_heads=4, head_dim=D))
    at = torch.randint(100_000, (2, 50), generator=torch.Generator().manual_seed(0))
    q, k = vectors(2, 4, 50, D, dtype=torch.float32), vectors(2, 4, 50, D, seed=1, dtype=torch.float32)
    expected = llama.apply_rotary_pos_emb(q, k, *peer(q, at))
    a = rope.angles(at[:, None], rope.inv_freq(D))
    for found, other in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rope.rotate(found, a), other, atol=1e-5, rtol=1e-5)


def test_parity_with_rotary_embedding_torch() -> None:
    module = pytest.importorskip("rotary_embedding_torch")
    peer = module.RotaryEmbedding(D)
    at = torch.randint(100_000, (50,), generator=torch.Generator().manual_seed(0))
    x = vectors(2, 4, 50, D, dtype=torch.float32)
    expected = module.apply_rotary_emb(peer(at), x)
    torch.testing.assert_close(rope.rotate(x, rope.angles(at, rope.inv_freq(D)), "interleaved"), expected,
                               atol=1e-5, rtol=1e-5)


def test_angles_do_not_follow_the_model_to_bfloat16(tiny) -> None:
    config = tiny("rope", "train.dtype=bfloat16")
    model = lively(config)
    at = torch.tensor([[0, 257, 4099, 65_537]])                         # none but 0 is a bfloat16
    expected = model.encoding.tables(at, at)
    for made in (GPT(config).to(torch.bfloat16).encoding.tables(at, at),):
        assert all(torch.equal(a, b) and a.dtype == torch.float32
                   for a, b in zip(made, expected, strict=True))
    seen = []
    model.encoding.rotate = lambda q, k, at: seen.append(at.tables) or (q, k)
    with autocast(config.train, torch.device("cpu")):
        model(tokens((1, 4)), positions=at)
    assert len(seen) == 2
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(seen[0], expected, strict=True))


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_callers_dtype_comes_back(layout: str, dtype: torch.dtype) -> None:
    x = vectors(3, D).to(dtype)
    turned = rope.rotate(x, rope.angles(torch.arange(3), rope.inv_freq(D)), layout)
    assert turned.dtype == dtype
    exact = rope.rotate(x.double(), rope.angles(torch.arange(3), rope.inv_freq(D)), layout)
    torch.testing.assert_close(turned.double(), exact, atol=2 * torch.finfo(dtype).eps + 1e-7, rtol=2e-2)


def test_long_term_decay_is_the_logit_of_ones() -> None:
    f = rope.inv_freq(D, dtype=torch.float64)
    distance = torch.arange(300)
    ones = torch.ones(300, D, dtype=torch.float64)
    logits = (rope.rotate(ones, rope.angles(distance, f)) * ones[0]).sum(-1) / D
    decay = rope.long_term_decay(distance, f)
    torch.testing.assert_close(decay, logits, atol=1e-12, rtol=0)
    assert decay[0] == 1 and decay[200:].mean() < decay[:100].mean() < 1
    slower = rope.long_term_decay(distance, rope.inv_freq(D, 1e6, dtype=torch.float64))
    assert slower[100:].mean() > decay[100:].mean()


def test_rope_serves_outside_attention() -> None:
    """GlobalPointer's span scores: q, k for each entity type, logit[m, n] = R(m) q_m . R(n) k_n, m <= n."""
    q, k = vectors(2, 3, 7, D), vectors(2, 3, 7, D, seed=1)             # (B, types, T, D)
    a = rope.angles(torch.arange(7), rope.inv_freq(D, dtype=torch.float64))
    scores = rope.rotate(q, a) @ rope.rotate(k, a).mT
    scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).tril(-1), -torch.inf)
    for m in range(7):
        for n in range(m, 7):
            relative = matrix(angle(n) - angle(m), "half")
            expected = torch.einsum("bhd,de,bhe->bh", q[:, :, m], relative, k[:, :, n])
            torch.testing.assert_close(scores[:, :, m, n], expected, atol=1e-10, rtol=0)
    assert scores[:, :, 3, 2].isneginf().all()


@pytest.mark.parametrize("L", [32, 128, 4096])
def test_hope_stops_the_pairs_without_a_whole_turn(L: int) -> None:
    f = rope.inv_freq(64)
    found = rope.stop_unfinished(f, L)
    turns = [L * 10_000 ** (-2 * i / 64) / (2 * math.pi) for i in range(32)]
    assert found.tolist() == [x if n >= 1 else 0 for x, n in zip(f.tolist(), turns, strict=True)]
    assert 0 < (found == 0).sum() < 32


def test_rope_id_goes_from_a_turn_in_32_positions_to_two_turns_in_L() -> None:
    f = rope.inv_freq_in_sight(32, 4096)
    assert f.shape == (16,) and 2 * math.pi / f[0].item() == pytest.approx(32)
    assert 4096 * f[-1].item() == pytest.approx(4 * math.pi)
    torch.testing.assert_close(f[1:] / f[:-1], (f[1] / f[0]).expand(15))


def test_the_spectrum_is_that_of_the_config(tiny) -> None:
    at = torch.arange(9)[None]
    for spectrum, expected in (("geometric", rope.inv_freq(8)), ("rope_id", rope.inv_freq_in_sight(8, 32)),
                               ("hope", rope.stop_unfinished(rope.inv_freq(8), 32))):
        encoding = lively(tiny("rope", "position.fraction=0.5", f"position.spectrum={spectrum}")).encoding
        found, factor = encoding.frequencies(at)
        assert torch.equal(found, expected) and factor == 1
    scaled = lively(tiny("rope", "position.spectrum=hope", 'position.scaling={method="pi",factor=4.0}'))
    expected = rope.stop_unfinished(rope.inv_freq(16), 32) / 4          # the same pairs stand still
    assert torch.equal(scaled.encoding.frequencies(at)[0], expected)


def test_a_scaling_of_rope_id_is_refused(tiny) -> None:
    with pytest.raises(UserError, match="position.scaling .*: changes a base, which spectrum = rope_id"):
        tiny("rope", "position.spectrum=rope_id", 'position.scaling={method="pi",factor=4.0}')
    config = tiny("rope", "position.spectrum=rope_id")
    (method,) = parse("yarn").methods
    assert "changes a base" in method.problem(lively(config), config, 64)
