"""The field guide: computed properties agree with theory, every encoding has its picture, row and section."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, every_encoding

from docs import gallery
from docs import properties as measured
from model import shape_of
from positions import ENCODINGS, Encoding
from runtime.errors import UserError

L = 128


def made(name: str, *overrides: str, kind: type[Encoding] | None = None) -> Encoding:
    config = measured.quick(name, *overrides)
    return (kind or ENCODINGS[name])(shape_of(config), config.position)


@pytest.fixture(scope="module")
def found() -> dict[str, measured.Properties]:
    return {name: measured.properties(name) for name in ENCODINGS}


@every_encoding
def test_properties_that_classes_declare_are_found(name: str, found) -> None:
    p = found[name]
    assert (p.change < gallery.ROUNDING) == ENCODINGS[name].is_relative
    encoding = made(name)
    assert p.is_defined == (encoding.max_length is None)
    assert p.n_parameters == sum(w.numel() for w in encoding.parameters())
    assert p.is_fixed == (not encoding.state_dict())


@pytest.mark.parametrize("name", ["sinusoidal", "rope", "p_rope", "xpos"])
def test_sinusoids_and_rotations_are_linear(name: str, found) -> None:
    assert found[name].residual < 1e-4


@pytest.mark.parametrize("name", ["learned", "integer", "integer_normalised", "binary"])
def test_other_vectors_are_not_linear(name: str, found) -> None:
    """An offset is no matrix product, bits carry, learned rows are independent."""
    assert found[name].residual > 0.05


@pytest.mark.parametrize("name", ["none", "alibi", "cope"])
def test_what_gives_positions_no_vector_is_not_asked(name: str, found) -> None:
    assert found[name].residual is None


def test_the_residual_is_that_of_the_best_multiple_of_a_line() -> None:
    """PE(p) = p: the matrices are numbers w. The residual at odd p of the w that fits even p, by hand."""
    p = torch.arange(513, dtype=torch.float64)
    expected = 0.0
    for k in (1, 8, 64):
        even, odd = p[:-k][::2], p[:-k][1::2]
        w = (even @ (even + k)) / (even @ even)
        expected = max(expected, ((odd + k - w * odd).norm() / (odd + k).norm()).item())
    assert measured.linear_residual(p[:, None].repeat(1, 5)) == pytest.approx(expected, rel=1e-6)


def test_few_random_points_are_not_linear() -> None:
    """Fewer points than channels always fit some matrix: points that were not fitted must tell."""
    points = torch.randn(128, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert measured.linear_residual(points) > 0.9


@pytest.mark.parametrize("name", ["none", "t5", "relative_key", "relative_key_query", "cope"])
def test_what_clips_or_shares_or_does_nothing_is_not_unique(name: str, found) -> None:
    assert found[name].gap == 0


def test_the_others_are_unique_by_as_much_as_their_formula_says(found) -> None:
    neighbours = 1 / (4 * L)                                            # over the ends, of a straight line
    assert found["alibi"].gap == pytest.approx(neighbours)
    assert found["integer"].gap == found["integer_normalised"].gap == pytest.approx(neighbours)
    assert found["binary"].gap == pytest.approx(math.sqrt(1 / 10))      # one bit of the 10 of 0 ... 512
    assert all(found[name].gap > 0 for name in ("learned", "sinusoidal", "rope", "kerple_log", "fire"))


@pytest.mark.parametrize(("codes", "gap"), [([0, 1, 3], 1 / 3), ([0, 2, 5, 2], 0), ([4, 4, 4], 0)])
def test_the_gap_is_between_any_two_codes(codes: list[float], gap: float) -> None:
    assert measured.smallest_gap(torch.tensor(codes, dtype=torch.float64)[:, None]) == pytest.approx(gap)


def test_pure_rotations_in_either_layout_are_axial(found) -> None:
    assert found["rope"].is_axial and found["p_rope"].is_axial
    assert not any(found[name].is_axial for name in ("xpos", "sinusoidal", "alibi", "none"))    # xPos decays
    interleaved = made("rope", "position.layout=interleaved")
    assert measured.is_axial(interleaved)

    class Curved(ENCODINGS["rope"]):
        def tables(self, q_pos, k_pos):
            return super().tables(q_pos**2, k_pos**2)                   # no speed turns it

    assert not measured.is_axial(made("rope", kind=Curved))


def test_biases_and_logits_are_by_distance() -> None:
    slopes = torch.tensor(ENCODINGS["alibi"].slopes(3), dtype=torch.float64)
    found = measured.biases(measured.make("alibi"), 300)
    torch.testing.assert_close(found, -slopes[:, None] * torch.arange(301))
    decay = gallery.rope.long_term_decay(torch.arange(301), gallery.rope.inv_freq(64))
    found = measured.logits(measured.make("rope"), 300)                 # 64 channels of ones over sqrt(64)
    torch.testing.assert_close(found, 8 * decay.double().expand(3, -1), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    captions = {name: gallery.draw(name, folder) for name in ENCODINGS}
    gallery.draw_bits(folder)
    gallery.draw_decay(folder)
    gallery.draw_scale_invariant(folder)
    return folder, captions


@pytest.mark.slow
def test_every_picture_is_drawn_and_committed(pictures) -> None:
    folder, captions = pictures
    wanted = {*(f"{name}.png" for name in ENCODINGS), "binary-bits.png", "rope-long-term-decay.png",
              "scale-invariant.png"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert {path.name for path in gallery.PICTURES.iterdir()} == wanted, "run `make gallery`"
    for path in [*folder.iterdir(), *gallery.PICTURES.iterdir()]:
        with gallery.Image.open(path) as image:
            assert image.width == 1000
        assert 5_000 < path.stat().st_size < 80_000, path               # blank ones have some 2,000
    assert all(caption.endswith(".") for caption in captions.values())


@pytest.mark.slow
def test_hooks_choose_the_rows_of_a_picture(monkeypatch, tmp_path) -> None:
    class Everywhere(ENCODINGS["rope"]):
        def embed(self, x, positions):
            return x + positions[..., None]

        def scores(self, logits, q, k, at):
            return logits - at.distance()

    monkeypatch.setitem(ENCODINGS, "everywhere", Everywhere)
    caption = gallery.draw("everywhere", tmp_path)
    assert caption == " ".join(gallery.draw(name, tmp_path) for name in ("integer", "rope", "alibi"))
    with (gallery.Image.open(tmp_path / "everywhere.png") as three,
          gallery.Image.open(tmp_path / "rope.png") as one):
        assert three.height == 3 * one.height


def test_a_picture_that_shows_the_same_keeps_its_bytes(tmp_path) -> None:
    """As where the CPU is another one: `make gallery` leaves nothing to commit. Another curve is drawn."""
    path = tmp_path / "cope.png"
    gallery.draw("cope", tmp_path)
    drawn = path.read_bytes()
    for change, is_kept in ((gallery.SHADE, True), (gallery.SHADE + 1, False)):
        with gallery.Image.open(path) as image:
            pixels = gallery.np.array(image.convert("RGB"))
        assert (pixels[0, 0] == 255).all()
        pixels[0, 0, 1] -= change
        gallery.Image.fromarray(pixels).save(path)
        before = path.read_bytes()
        gallery.draw("cope", tmp_path)
        assert path.read_bytes() == (before if is_kept else drawn)
        path.write_bytes(drawn)


@pytest.fixture(scope="module")
def blocks(found) -> dict[str, str]:
    return gallery.guide_blocks(dict.fromkeys(ENCODINGS, "Caption."), found, gallery.BENCH, gallery.RUNS)


def test_the_committed_guide_is_what_the_code_generates(blocks) -> None:
    """Captions apart (see below), and the computed figures of the properties, which depend on the machine."""
    def comparable(guide: str) -> list[str]:
        before, _, rest = guide.partition("<!-- begin properties -->")
        table, _, after = rest.partition("<!-- end properties -->")
        captions = re.compile(r"^\*[A-Z].*\*$", re.MULTILINE)
        return [before, re.sub(r"(yes|no), [\d.e-]+", r"\1", table), captions.sub("", after)]

    committed = gallery.GUIDE.read_text()
    assert comparable(committed) == comparable(gallery.update(committed, blocks)), "run `make gallery`"


@pytest.mark.slow
@every_encoding
def test_the_committed_captions_are_those_of_the_pictures(name: str, pictures) -> None:
    assert f"\n*{pictures[1][name]}*\n" in gallery.GUIDE.read_text(), "run `make gallery`"


def test_the_guide_is_written_once(blocks) -> None:
    text = gallery.GUIDE.read_text()
    once = gallery.update(text, blocks)
    assert gallery.update(once, blocks) == once
    begin, end = once.index("<!-- begin alibi -->"), once.index("<!-- end alibi -->")
    hand = once[:begin] + "MINE" + once[begin:begin + 30] + "OLD" + once[end:] + "TAIL\n"
    again = gallery.update(hand, blocks)                                # what is outside stays, inside goes
    assert again == once[:begin] + "MINE" + once[begin:] + "TAIL\n"


def test_a_new_encoding_gets_a_section_by_itself(blocks, monkeypatch) -> None:
    monkeypatch.setitem(ENCODINGS, "mine", Encoding)
    text = gallery.update(gallery.GUIDE.read_text(), blocks | {"mine": "GENERATED"})
    assert text.endswith("## mine\n\n<!-- begin mine -->\nGENERATED\n<!-- end mine -->\n\n"
                         "**When to use it.** Not written yet.\n\n**Beyond L.** Not written yet.\n")
    assert gallery.update(text, blocks | {"mine": "GENERATED"}) == text


@pytest.mark.parametrize("line", ["<!-- begin properties -->", "<!-- end properties -->"])
def test_a_lost_marker_is_a_mistake_and_not_a_second_section(line: str, blocks) -> None:
    with pytest.raises(UserError, match="properties"):
        gallery.update(gallery.GUIDE.read_text().replace(line + "\n", ""), blocks)


@every_encoding
def test_the_committed_guide_describes_every_encoding(name: str) -> None:
    text = gallery.GUIDE.read_text()
    section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert section, f"docs/encodings.md has no section {name}: run `make gallery`"
    assert "**When to use it.**" in section and "**Beyond L.**" in section
    assert gallery.UNWRITTEN not in section, f"docs/encodings.md: write the section {name}"


def test_the_committed_costs_are_plausible() -> None:
    _, costs = gallery.read_costs(gallery.BENCH)
    cells = [cell for found in costs.values() for cell in found if cell != "-"]     # "-": not measured yet
    assert cells and all(0.2 < float(x) < 40 for cell in cells for x in cell.split(", "))


def test_costs_are_read_from_the_bench(tmp_path) -> None:
    path = tmp_path / "bench.md"
    path.write_text("text\n\n| encoding | T 64, batch 2: step / RoPE's (ms) | memory / RoPE's (MB) |\n"
                    "|---|---:|---:|\n| rope | 1.00 (5) | 1.01 (7) |\n")
    shapes, costs = gallery.read_costs(path)
    assert shapes == ["step, memory at T 64"]
    assert costs["rope"] == ["1.00, 1.01"] and costs["alibi"] == ["-"] and set(costs) >= set(ENCODINGS)
    assert gallery.read_costs(tmp_path / "absent.md") == ([], {name: [] for name in ENCODINGS})


def test_perplexities_are_the_plain_fixed_ones(tmp_path) -> None:
    def record(protocol: str, length: int, ppl: float, extend: str | None = None) -> dict:
        return {"extend": extend, "protocol": protocol, "length": length, "ppl": ppl}

    run = {"encoding": "rope", "seq_len": 64, "records": [
        record("fixed", 32, 5.123456), record("fixed", 128, 1234.5), record("nonoverlap", 64, 7.0),
        record("fixed", 512, 9.0, "yarn"), record("position", 64, 8.0)]}
    (tmp_path / "rope.json").write_text(json.dumps(run))
    assert gallery.read_perplexities(tmp_path / "rope.json") == ["5.123", "-", "1234", "-", "-"]
    assert gallery.read_perplexities(tmp_path / "alibi.json") == ["-"] * 5
    (tmp_path / "alibi.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match=r"alibi\.json: this run is of rope"):
        gallery.read_perplexities(tmp_path / "alibi.json")


@pytest.mark.slow
def test_help_and_a_wrong_call(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gallery.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        gallery.main()
    assert "`python -m docs.gallery`" in capsys.readouterr().out
    done = subprocess.run([sys.executable, "-m", "docs.gallery", "--no-such-option"], capture_output=True,
                          text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
