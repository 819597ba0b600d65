"""The field guide: computed properties agree with theory, every encoding has its picture, row and section."""

import functools
import math

import pytest
import torch
from toys import every_encoding_slowly

from base.errors import UserError
from docs import gallery
from docs import properties as measured
from positions import ENCODINGS, Encoding

L = 128


found = functools.cache(measured.properties)


@every_encoding_slowly
def test_properties_that_classes_declare_are_found(name: str) -> None:
    p, encoding = found(name), measured.make(name)
    assert (p.change < gallery.ROUNDING) == encoding.is_relative
    assert p.is_defined == (encoding.max_length is None)
    assert p.n_parameters == sum(w.numel() for w in encoding.parameters())


@pytest.mark.slow
def test_sinusoids_and_rotations_are_linear_and_other_vectors_are_not() -> None:
    """An offset is no matrix product, bits carry, learned rows are independent; a bias has no vector.

    Without its cosine a sine is not linear either.
    """
    assert all(found(name).residual < 1e-4 for name in ("sinusoidal", "rope", "p_rope", "xpos"))
    assert all(found(name).residual > 0.05 for name in ("learned", "integer", "integer_normalised", "binary"))
    assert all(found(name).residual is None for name in ("none", "alibi", "cope"))
    sines = measured.position_vectors(measured.make("sinusoidal", "position.sine_alone=true"), 4 * L + 1)
    assert measured.linear_residual(sines) > 0.3


def test_the_residual_is_that_of_the_best_multiple_of_a_line() -> None:
    """PE(p) = p: the matrices are numbers w. The residual at odd p of the w that fits even p, by hand."""
    p = torch.arange(513, dtype=torch.float64)
    expected = 0.0
    for k in (1, 8, 64):
        even, odd = p[:-k][::2], p[:-k][1::2]
        w = (even @ (even + k)) / (even @ even)
        expected = max(expected, ((odd + k - w * odd).norm() / (odd + k).norm()).item())
    assert measured.linear_residual(p[:, None].repeat(1, 5)) == pytest.approx(expected, rel=1e-6)
    # fewer points than channels always fit some matrix: points that were not fitted must tell
    points = torch.randn(128, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert measured.linear_residual(points) > 0.9


@pytest.mark.slow
def test_codes_are_unique_by_as_much_as_their_formula_says() -> None:
    neighbours = 1 / (4 * L)                                            # over the ends, of a straight line
    for name in ("alibi", "integer", "integer_normalised"):
        assert found(name).gap == pytest.approx(neighbours)
    assert found("binary").gap == pytest.approx(math.sqrt(1 / 10))      # one bit of the 10 of 0 ... 512
    assert all(found(name).gap > 0 for name in ("learned", "sinusoidal", "rope", "kerple_log", "fire"))
    # what clips, shares or does nothing
    assert not any(found(name).gap for name in ("none", "t5", "relative_key", "relative_key_query", "cope"))


@pytest.mark.parametrize(("codes", "gap", "step"), [
    ([0, 1, 3], 1 / 3, 2 / 3), ([0, 3, 5, 3], 0, 3 / 5), ([4, 4, 4], 0, 0)])
def test_the_gap_is_between_any_two_codes_and_the_step_between_neighbours(codes: list[float], gap: float,
                                                                          step: float) -> None:
    """Over the largest distance of any two."""
    points = torch.tensor(codes, dtype=torch.float64)[:, None]
    assert measured.smallest_gap(points) == pytest.approx(gap)
    assert measured.largest_step(points) == pytest.approx(step)


def test_biases_and_logits_are_by_distance() -> None:
    slopes = torch.tensor([2**-4, 2**-8, 2**-2], dtype=torch.float64)   # ALiBi's of three heads
    torch.testing.assert_close(measured.biases(measured.make("alibi"), 300),
                               -slopes[:, None] * torch.arange(301))
    frequency = 10_000 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    decay = (torch.arange(301)[:, None] * frequency).cos().mean(dim=1)
    expected = 8 * decay.expand(3, -1)                                  # 64 channels of ones over sqrt(64)
    torch.testing.assert_close(measured.logits(measured.make("rope"), 300), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_every_picture_is_drawn_and_committed(tmp_path) -> None:
    for name in ENCODINGS:
        gallery.draw(name, tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {f"{name}.png" for name in ENCODINGS}
    committed = {path.name for path in gallery.PICTURES.iterdir()}
    assert committed - drawn == {"rope-long-term-decay.png"} and drawn < committed, "run `make gallery`"
    assert all(5_000 < path.stat().st_size < 90_000 for path in tmp_path.iterdir())     # blank: some 2,000


def test_the_committed_guide_is_what_the_code_generates() -> None:
    """Apart from the figures of the properties, which depend on the machine."""
    guide = gallery.GUIDE.read_text()
    blocks = {"contents": gallery.contents(), **{name: gallery.section(name) for name in ENCODINGS}}
    assert gallery.update(guide, blocks) == guide, "run `make gallery`"
    table = guide.partition("<!-- begin properties -->")[2].partition("<!-- end properties -->")[0]
    for name in ENCODINGS:
        assert f"| [`{name}`](#{name}) |" in table, "run `make gallery`"
        section = guide.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert "**Use it**" in section and "**Beyond L.**" in section, "run `make gallery`"
    assert gallery.UNWRITTEN not in guide, "docs/encodings.md: write the new section"


def test_what_is_written_by_hand_stays_and_a_new_encoding_gets_a_section(monkeypatch) -> None:
    guide = gallery.update(gallery.GUIDE.read_text(), {"alibi": "OLD"})
    monkeypatch.setitem(ENCODINGS, "mine", Encoding)
    text = gallery.update(guide, {"alibi": "NEW", "mine": "GENERATED"})
    assert text.endswith("## mine\n\n<!-- begin mine -->\nGENERATED\n<!-- end mine -->\n\n"
                         "- **Use it** (not written yet)\n- **Beyond L.** (not written yet)\n")
    assert text.replace("NEW", "OLD").startswith(guide.rstrip())
    assert gallery.update(text, {"alibi": "NEW", "mine": "GENERATED"}) == text
    for line in ("<!-- begin properties -->", "<!-- end properties -->"):
        with pytest.raises(UserError, match="properties"):
            gallery.update(guide.replace(line + "\n", ""), {"properties": ""})
