"""Laws of rotation: both layouts against matrices and complex numbers, conversion, two positions a token."""

import math

import pytest
import torch
from explicit import config_of, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import lively, tokens

import rope
from base.errors import UserError
from evaluation.extension import parse
from model import GPT
from runtime.device import autocast

D = 16
layouts = pytest.mark.parametrize("layout", rope.LAYOUTS)
positions = st.integers(-100_000, 100_000)


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
@settings(deadline=None, max_examples=20)
@given(a=positions, b=positions, shift=positions)
def test_rotations_form_a_group_and_logits_depend_on_the_distance_alone(layout: str, a: int, b: int,
                                                                        shift: int) -> None:
    x, y = vectors(2, D)
    close = {"atol": 1e-10, "rtol": 0}
    turned = rope.rotate(x, angle(a), layout)
    assert turned.norm().item() == pytest.approx(x.norm().item(), abs=1e-10)
    both = rope.rotate(x, angle(a) + angle(b), layout)                  # R(a) R(b) = R(a + b)
    torch.testing.assert_close(rope.rotate(turned, angle(b), layout), both, **close)
    torch.testing.assert_close(turned @ y, x @ rope.rotate(y, -angle(a), layout), **close)  # R(a)^T = R(-a)
    here = turned @ rope.rotate(y, angle(b), layout)
    there = rope.rotate(x, angle(a + shift), layout) @ rope.rotate(y, angle(b + shift), layout)
    torch.testing.assert_close(here, there, **close)


@layouts
def test_rotation_is_the_block_diagonal_matrix(layout: str) -> None:
    for position in (0, 1, 7, 1000, -3):
        x = vectors(5, D)
        torch.testing.assert_close(rope.rotate(x, angle(position), layout),
                                   x @ matrix(angle(position), layout).T, atol=1e-12, rtol=0)


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_rest_passes_and_the_callers_dtype_comes_back(layout: str, dtype: torch.dtype) -> None:
    x = vectors(3, D).to(dtype)
    a = rope.angles(torch.tensor([4, 5, 6]), rope.inv_freq(D // 2))
    turned = rope.rotate(x, a, layout)
    exact = rope.rotate(x.double(), a, layout)
    assert turned.dtype == dtype
    assert torch.equal(turned[:, D // 2:], x[:, D // 2:])
    torch.testing.assert_close(turned.double(), exact, atol=2 * torch.finfo(dtype).eps + 1e-7, rtol=2e-2)
    torch.testing.assert_close(turned[:, :D // 2], rope.rotate(x[:, :D // 2], a, layout))


# --- The layouts are one function up to a permutation


@settings(deadline=None, max_examples=20)
@given(n_head=st.integers(1, 4), pairs=st.integers(1, 5), passed=st.integers(0, 3))
def test_layout_conversion_inverts(n_head: int, pairs: int, passed: int) -> None:
    weight = vectors(n_head * (2 * pairs + passed), 6)
    there = rope.to_half(weight, n_head, 2 * pairs)
    assert torch.equal(rope.to_interleaved(there, n_head, 2 * pairs), weight)
    assert pairs == 1 or not torch.equal(there, weight)
    assert torch.equal(rope.to_half(weight[:, 0], n_head, 2 * pairs), there[:, 0])  # a bias converts alike


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_model_converts_between_layouts(fraction: float) -> None:
    shared = f"position.fraction={fraction} model.qk_norm=true model.bias=true model.norm=layernorm"
    model, other = (lively(config_of("rope", f"{shared} position.layout={x}")) for x in rope.LAYOUTS[::-1])
    x = tokens((2, 100), 9)
    weights = model.state_dict()
    assert (other(x) - model(x)).abs().max() > 1e-2                 # unconverted: shapes fit, logits do not
    for name, weight in weights.items():
        if ".attention.q." in name or ".attention.k." in name:
            weights[name] = rope.to_half(weight, 2, round(fraction * D))
        elif "q_norm" in name or "k_norm" in name:
            weights[name] = rope.to_half(weight, 1, round(fraction * D))
    other.load_state_dict(weights)
    torch.testing.assert_close(other(x), model(x), atol=1e-5, rtol=1e-5)


# --- Frequencies and angles


@pytest.mark.parametrize("name", ["rope", "rope_2d", "p_rope", "xpos", "pope"])
def test_angles_stay_in_fp32_under_autocast_and_in_a_model_in_bfloat16(name: str, monkeypatch) -> None:
    config = config_of(name, "train.dtype=bfloat16")
    at = torch.tensor([[0, 257, 4099, 65_537]])         # but 0, none is a bfloat16
    model = lively(config)
    seen = []
    expected = model.encoding.tables(at, at)
    rotate = model.encoding.rotate
    monkeypatch.setattr(model.encoding, "rotate", lambda q, k, at: seen.append(at.tables) or rotate(q, k, at))
    with autocast(config.train, torch.device("cpu")):
        model(tokens((1, 4)), positions=at)
    for tables in (*seen, GPT(config).bfloat16().encoding.tables(at, at)):
        for table, table_in_fp32 in zip(tables, expected, strict=True):
            for a, b in zip(table, table_in_fp32, strict=True):
                assert torch.equal(a, b)
                assert a.dtype == torch.float32
    assert len(seen) == 2


def test_a_spectrum_keeps_its_pairs_under_a_scaling_or_refuses_it() -> None:
    scaled = model_of("rope", 'position.spectrum=hope position.scaling={method="pi",factor=4.0}')
    f = rope.inv_freq(16)
    expected = f.where(rope.makes_full_turn(f, 32), 0.0) / 4            # the same pairs stand still
    assert torch.equal(scaled.encoding.layer_frequencies(False, torch.arange(9)[None])[0], expected)
    with pytest.raises(UserError, match="position.scaling .*: changes frequencies, which spectrum = rope_id"):
        config_of("rope", 'position.spectrum=rope_id position.scaling={method="pi",factor=4.0}')
    config = config_of("rope", "position.spectrum=rope_id")
    (method,) = parse("yarn").methods
    assert "frequencies of position.base" in method.problem(lively(config), config, 64)


# --- Two positions per token


def test_a_prompt_makes_positions_of_two_axes_absolute() -> None:
    """An answer's distance to its prompt grows on one axis alone: test_terms has the formula."""
    model = model_of("rope_2d", "position.prompt=10")
    x, pos = tokens((1, 30)), torch.arange(30)
    assert not model.encoding.is_relative
    assert (model(x, positions=pos + 5) - model(x, positions=pos)).abs().max() > 1e-2


def test_positions_of_other_shapes_are_refused() -> None:
    x = tokens((2, 30))
    for name in ("none", "rope_2d"):
        for shape in ((1,), (7,), (60,), (3, 30), (1, 30, 2)):
            with pytest.raises(ValueError, match="give a position for each of the tokens"):
                model_of(name)(x, positions=torch.zeros(shape, dtype=torch.long))
