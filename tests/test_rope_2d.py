"""RoPE over positions with two axes: two ordinary RoPEs, each on half of the pairs."""

import pytest
import torch
from conftest import lively, tokens

import rope
from positions import ENCODINGS, At
from positions.scaling import YaRN
from runtime.errors import UserError

T, D = 30, 16
layouts = pytest.mark.parametrize("layout", rope.LAYOUTS)


def grid(seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Random positions (batch, T, 2)."""
    return torch.randint(0, 50, (batch, T, 2), generator=torch.Generator().manual_seed(seed))


def vectors(seed: int) -> torch.Tensor:
    return torch.randn(2, 2, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits(encoding, at: torch.Tensor) -> torch.Tensor:
    q, k = encoding.rotate(vectors(0), vectors(1), At(at, at, 0, encoding.tables(at, at)))
    return q @ k.mT


@layouts
@pytest.mark.parametrize("at", [grid(), grid(1, batch=2), torch.arange(T)[None]],
                         ids=["grid", "batch", "equal"])
def test_it_is_a_rope_of_each_half_by_its_axis(layout: str, at: torch.Tensor, tiny) -> None:
    encoding = lively(tiny("rope_2d", f"position.layout={layout}", "position.base=500")).encoding
    # channels whose pairs the first axis turns; in layout half a pair's second member is D/2 further on
    first = torch.arange(D // 2) if layout == "interleaved" else torch.arange(D // 4).repeat(2)
    if layout == "half":
        first[D // 4:] += D // 2
    f = rope.inv_freq(D // 2, 500.0)
    expected = torch.zeros(2, 2, T, T, dtype=torch.float64)
    for axis, channels in enumerate((first, first + (D // 2 if layout == "interleaved" else D // 4))):
        one = at if at.dim() == 2 else at[..., axis]
        q, k = (rope.rotate(vectors(i)[..., channels], rope.angles(one[:, None], f), layout) for i in (0, 1))
        expected += q @ k.mT
    torch.testing.assert_close(logits(encoding, at), expected, atol=1e-5, rtol=1e-5)


@layouts
def test_logits_depend_on_the_difference_along_each_axis_alone(layout: str, tiny) -> None:
    model = lively(tiny("rope_2d", f"position.layout={layout}")).double()
    x, at = tokens((1, T)), grid()
    plain = model(x, positions=at)
    for shift in ((11, 0), (0, 11), (7, 40)):
        torch.testing.assert_close(model(x, positions=at + torch.tensor(shift)), plain, atol=1e-4, rtol=0)
    for axis in (0, 1):
        moved = at.clone()
        moved[0, 5, axis] += 1
        assert (model(x, positions=moved) - plain).abs().max() > 1e-2
    assert (model(x, positions=at.flip(-1)) - plain).abs().max() > 1e-2


def test_positions_with_one_axis_are_used_for_both(tiny) -> None:
    model = lively(tiny("rope_2d"))
    x, at = tokens((2, T)), torch.arange(T)
    plain = model(x)
    for same in (at, at[None], at.repeat(2, 1), at[None, :, None].expand(1, -1, 2)):
        assert torch.equal(model(x, positions=same), plain)


def test_cached_decoding_equals_the_full_forward(tiny) -> None:
    model = lively(tiny("rope_2d"))
    x = tokens((2, T))
    for at in (grid(), grid(1, batch=2)):
        cache = model.new_cache()
        parts = [model(x[:, i:j], positions=at[:, i:j], cache=cache)
                 for i, j in ((0, 7), (7, 8), (8, 9), (9, 20), (20, T))]
        torch.testing.assert_close(torch.cat(parts, 1), model(x, positions=at), atol=2e-4, rtol=1e-4)
        assert torch.equal(cache.positions, at)


def test_chatglms_answer_keeps_one_axis_and_advances_the_other(tiny) -> None:
    """ChatGLM-6B: the text at (0 ... n - 1, 0), the answer at (n - 1, 1 ...); n differs in each sequence."""
    model = lively(tiny("rope_2d"))
    x = tokens((2, T))
    at = torch.zeros(2, T, 2, dtype=torch.long)
    for row, n in enumerate((10, 20)):
        at[row, :, 0] = torch.arange(T).clamp(max=n - 1)
        at[row, :, 1] = (torch.arange(T) - n + 1).clamp(min=0)
    whole = model(x, positions=at)
    for row in (0, 1):
        alone = model(x[row:row + 1], positions=at[row:row + 1])
        torch.testing.assert_close(alone, whole[row:row + 1], atol=1e-4, rtol=1e-4)


def test_scaling_acts_on_the_frequencies_of_each_axis(tiny) -> None:
    model = lively(tiny("rope_2d", 'position.scaling={method = "yarn", factor = 4.0, beta_fast = 4.0}'))
    f, factor = model.encoding.frequencies(torch.arange(T))
    assert torch.equal(f, YaRN(factor=4.0, beta_fast=4.0).frequencies(D // 2, 1e4, 32, torch.arange(T))[0])
    assert factor > 1.1 and f.shape == (D // 4,)
    with pytest.raises(UserError, match="short_factor must have 4 numbers, one for each pair, got 8"):
        tiny("rope_2d", 'position.scaling={method = "longrope", factor = 2.0, '
                        f"short_factor = {[1.0] * 8}, long_factor = {[2.0] * 8}}}")


@pytest.mark.parametrize("name", [name for name in ENCODINGS if ENCODINGS[name].n_axes == 1])
def test_others_refuse_positions_with_axes(name: str, tiny) -> None:
    model = lively(tiny(name))
    for n_axes in (1, 2):
        with pytest.raises(ValueError, match=r"takes positions \(T,\) or \(B, T\), got \(1, 5, "):
            model(tokens((1, 5)), positions=torch.zeros(1, 5, n_axes, dtype=torch.long))


def test_wrong_shapes_are_refused_in_one_line(tiny) -> None:
    model, x = lively(tiny("rope_2d")), tokens((1, T))
    for at in (grid()[..., :1], torch.zeros(1, T, 3), grid()[None]):
        with pytest.raises(ValueError, match=r"RoPE2D takes positions \(T,\) or \(B, T\) or \(B, T, 2\), "):
            model(x, positions=at)
    cache = model.new_cache()
    model(x, positions=grid(), cache=cache)
    with pytest.raises(ValueError, match="give positions= with as many axes"):  # which axis goes on?
        model(x[:, :1], cache=cache)
    assert model(x[:, :1], positions=grid()[:, :1], cache=cache).isfinite().all()
    sharp = lively(tiny("rope_2d", "position.temperature=log_n"))
    assert sharp(x).isfinite().all()
    with pytest.raises(ValueError, match="must have one axis"):
        sharp(x, positions=grid())
    with pytest.raises(UserError, match="multiple of 4 channels"):
        tiny("rope_2d", "model.n_head=1", "model.n_embd=6")
