"""Figures and the report: one colour for an encoding, no names that overlap, no claim without a gate."""

import itertools
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Annotation

from evaluation import figures, report
from evaluation.estimates import FAILED, NOT_GATED, PASSED, UNCERTAIN
from evaluation.results import GAIN, PERPLEXITY
from positions import ENCODINGS

L = 128
LENGTHS = (64, 128, 256, 512, 1024, 2048)
HOSTILE = "</script><script>alert(1)</script><img src=x>|`$_{x}^&amp;\\frac%#~"


def curve(name: str, encoding: str = "rope", at_longest: float = 0.1, state: str = PASSED, text: str = "",
          extend: str = "none", seeds: int = 3, unstable: bool = False, lengths=LENGTHS,
          is_better: bool = False) -> pd.DataFrame:
    """Rows as estimates.py gives them, of a curve that ends at a value, with intervals of +-0.02."""
    rows = []
    for i, length in enumerate(lengths):
        value = at_longest * i / max(1, len(lengths) - 1)
        of_seeds = tuple(value + 0.01 * (seed - (seeds - 1) / 2) for seed in range(seeds))
        mean = (value, value - 0.02, value + 0.02)
        median = (value + 0.003, min(of_seeds), max(of_seeds))
        shown = median if unstable and length > L else mean
        rows.append({
            "label": name, "extend": extend, "protocol": "fixed", "length": length, "place": "",
            "baseline": "",
            "shown": shown[0], "shown_low": shown[1], "shown_high": shown[2], "value": mean[0],
            "low": mean[1], "high": mean[2], "seed_low": min(of_seeds), "seed_high": max(of_seeds),
            "seeds": of_seeds,
            "n_seeds": seeds, "unit": "documents", "n_units": 12, "is_unstable": unstable and length > L,
            "is_better": is_better, "name": name, "encoding": encoding, "state": state, "text": text,
            "x": float(length), "heading": str(length)})
    return pd.DataFrame(rows)


def gains(*curves: pd.DataFrame) -> Any:
    """A figure of gains whose layout is done."""
    rows = pd.concat(curves, ignore_index=True)
    figure = figures.draw_measure(rows[rows["x"] > L], GAIN, "title", L)
    FigureCanvasAgg(figure).draw()
    return figure


def names_of(axis: Any) -> dict[str, Any]:
    """The names beside a panel, as matplotlib's texts."""
    return {text.get_text(): text for text in axis.texts if not isinstance(text, Annotation)}


# -----------------------------------------------------------------------------------------------------------
# Figures


def test_an_encoding_has_one_colour_in_all_reports() -> None:
    def colours(*curves: pd.DataFrame) -> dict[str, str]:
        styled = figures.style_curves(pd.concat(curves))
        return styled.groupby("name")["colour"].unique().map(lambda found: found.item()).to_dict()

    small = colours(curve("t5", "t5"))
    large = colours(*(curve(name, name) for name in ENCODINGS))
    assert small["t5"] == large["t5"] and {*large.values()} == {*figures.HUES}
    two = colours(curve("x", "alibi", -2), curve("t5", "t5", text="code"), curve("t5", "t5", -1))
    assert two["t5"] == small["t5"]
    assert figures.hue("rope", "yarn:beta_fast=8") == figures.hue("t5", "yarn")
    assert figures.hue("removed", "none") in figures.HUES


def test_curves_of_one_colour_differ_in_their_line_style() -> None:
    curves = pd.concat(curve(name, "rope") for name in ("a", "b", "c", "d"))
    styled = figures.style_curves(curves)
    assert styled["colour"].nunique() == 1 and styled["dash"].map(str).nunique() == 4


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 30])
def test_names_at_the_ends_of_curves_do_not_overlap(n: int) -> None:
    figure = gains(*(curve(f"curve {i}", at_longest=0.1 + 1e-3 * i) for i in range(n)))
    for axis in figure.axes:
        boxes = [text.get_window_extent() for text in names_of(axis).values()]
        assert len(boxes) == n
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_spreading_keeps_order_gap_and_what_fits() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 20):
        wanted = rng.random(n)
        places = figures.spread(wanted, 0.05, 0.0, 1.0)
        order = np.argsort(wanted)
        assert (np.diff(places[order]) >= 0.05 - 1e-12).all()
        assert places.min() >= 0 and places.max() <= 1 + 1e-12
    apart = np.array([0.9, 0.1, 0.5])
    assert figures.spread(apart, 0.05, 0.0, 1.0) == pytest.approx(apart)


def test_a_failed_curve_is_grey_named_in_the_caption_and_stretches_no_axis() -> None:
    curves = [curve("good", "alibi"), curve("bad", "t5", -0.2, FAILED), curve("worse", "fire", -90.0, FAILED)]
    curves.append(curve("rope", at_longest=-1.0))
    figure = gains(*curves)
    assert [{*names_of(axis)} for axis in figure.axes] == [{"good"}, {"rope"}]
    assert figures.caption(pd.concat(curves)) == "bad, worse (failed)"
    flat, breaking = figure.axes
    greys = {to_hex(line.get_color()) for axis in figure.axes for line in axis.lines}
    assert figures.GREYS[FAILED] in greys and figures.hue("t5", "none") not in greys
    assert flat.get_ylim()[0] > -0.1 and breaking.get_ylim()[0] > -2
    alone = gains(curve("bad", "t5", -0.2, FAILED)).axes[0]             # then it is all there is
    assert alone.get_ylim()[0] < -0.2 and not names_of(alone)


def test_a_curve_that_is_not_gated_is_grey_and_has_its_name() -> None:
    curves = pd.concat([curve("a", "t5", state=NOT_GATED), curve("b", "alibi", state=UNCERTAIN)])
    styled = figures.style_curves(curves).groupby("name")[["colour", "is_named"]].first()
    assert styled["colour"].to_list() == [figures.GREYS[NOT_GATED], figures.hue("alibi", "none")]
    assert styled["is_named"].all() and figures.caption(curves) == "a (not gated)"


@pytest.mark.slow
def test_an_unstable_place_has_an_open_mark_at_the_median_and_a_line_over_the_range() -> None:
    stable, unstable = curve("rope"), curve("rope", unstable=True)
    for rows, face in ((stable, figures.HUES[-1]), (unstable, "#ffffff")):
        axis = gains(rows).axes[0]
        bars, marks, _ = axis.collections
        beyond = rows[rows["x"] > L]
        assert np.asarray(marks.get_offsets())[:, 1] == pytest.approx(beyond["shown"].to_numpy())
        assert to_hex(marks.get_facecolor()[0]) == face
        ends = np.array(bars.get_segments())[:, :, 1]
        assert ends == pytest.approx(beyond[["shown_low", "shown_high"]].to_numpy())


def test_seeds_are_dots() -> None:
    for n, expected in ((5, 4 * 5), (1, 0)):            # a dot would hide the mark of a single seed
        _, _, dots = gains(curve("rope", seeds=n)).axes[0].collections
        assert len(dots.get_offsets()) == expected


@pytest.mark.slow
def test_two_texts_are_side_by_side_with_one_scale_and_flat_curves_are_zoomed() -> None:
    def both(name: str, encoding: str, prose: float, code: float) -> list[pd.DataFrame]:
        return [curve(name, encoding, prose, text="prose"), curve(name, encoding, code, text="code")]

    figure = gains(*both("rope", "rope", -2, -3), *both("alibi", "alibi", 0.03, 0.2))
    above_left, above_right, left, right = figure.axes
    assert [axis.get_title(loc="left").split(":")[0] for axis in figure.axes] == ["prose", "code"] * 2
    assert above_left.get_ylim() == above_right.get_ylim() and left.get_ylim() == right.get_ylim()
    assert np.ptp(above_left.get_ylim()) < 0.5 < np.ptp(left.get_ylim())
    assert [*names_of(above_left), *names_of(left)] == ["alibi", "rope"]
    # one text: side by side; what breaks on one text alone is with what breaks
    assert len(gains(curve("a", at_longest=-2), curve("b")).axes) == 2
    assert len(gains(*both("rope", "rope", 0, -3)).axes) == 2


@pytest.mark.slow
def test_a_figure_is_written_in_three_forms_and_tex_does_no_harm(tmp_path: Path) -> None:
    figure = gains(curve(HOSTILE), curve("$x"))
    svg = figures.save(figure, tmp_path / "gain")
    assert {path.name for path in tmp_path.iterdir()} == {"gain.svg", "gain.pdf", "gain.png"}
    assert svg.startswith("<svg") and "$_{x}^" in svg and "<script" not in svg
    again = figures.save(gains(curve(HOSTILE), curve("$x")), tmp_path / "again")
    assert again == svg


def test_training_curves_are_means_of_seeds_and_failed_ones_stretch_no_axis() -> None:
    tokens = np.arange(1, 31) * 1e5
    parts = [pd.DataFrame({"name": name, "encoding": name, "extend": "none", "state": state, "text": "",
                           "run": f"{name}{seed}", "tokens": tokens, "loss": end + seed})
             for name, end, state in (("rope", 3.0, PASSED), ("t5", 30.0, FAILED)) for seed in (0, 1)]
    axis = figures.draw_training(pd.concat(parts), "title", L).axes[0]
    assert axis.lines[0].get_ydata() == pytest.approx(3.5) and axis.lines[0].get_xdata().min() >= 1
    assert axis.get_ylim()[1] < 10 and {*names_of(axis)} == {"rope"}


def test_the_first_positions_are_one_place_with_all_their_targets() -> None:
    rows = [{"run": "a", "extend": "none", "place": place, "document": window, "tokens": 10, "bytes": 20.0,
             "nll": 100.0 * window + i, "seconds": 1.0}
            for i, place in enumerate(("0-3", "4-63", "64-127")) for window in range(3)]
    merged = figures.merge_positions(pd.DataFrame(rows))
    first = merged[merged["place"] == "0-63"]
    assert [*merged["place"].unique()] == ["0-63", "64-127"]
    assert first["nll"].tolist() == [1.0, 201.0, 401.0] and first["document"].tolist() == [0, 1, 2]
    assert set(first["tokens"]) == {20} and figures.merge_positions(merged[:0]).empty
    short = pd.DataFrame(rows).replace({"4-63": "4-31"})
    assert [*figures.merge_positions(short[short["place"] != "64-127"])["place"]] == ["0-31"] * 3


def test_one_run_has_gain_beside_loss_by_position() -> None:
    positions = curve("rope", at_longest=4.0, lengths=[64 * 2**n for n in range(12)])
    positions["protocol"] = "position"
    one = figures.draw_evaluation(positions[:0], positions, "title", L)
    both = figures.draw_evaluation(curve("rope"), positions, "title", L)
    assert len(one.axes) == 1 and len({axis.get_ylabel() for axis in both.axes}) == 2
    assert all({*names_of(axis)} == {"rope"} and axis.get_legend() is None for axis in both.axes)


# -----------------------------------------------------------------------------------------------------------
# The report


def page(*curves: pd.DataFrame, baseline: str = "rope", remarks=(), form=PERPLEXITY) -> str:
    """report.html of these curves: -loss, gains over the baseline and over truncation."""
    rows = pd.concat(curves, ignore_index=True)
    losses = rows.assign(key="fixed", shown=rows["shown"] - 4, is_better=False)
    better = rows[rows["name"] != baseline].assign(key="fixed-lead", baseline=baseline)
    about = rows.drop_duplicates("name")
    gates = about.set_index("label")[["state"]].assign(below=0.1, below_low=0.05, below_high=0.2, use=0.5,
                                                       use_low=0.4, use_high=0.6)
    sections = [report.Section("gain", "Gain over truncation", "Positive is good.", GAIN, rows, "<svg/>"),
                report.Section("fixed", "Perplexity", "Lower is better.", form, losses),
                report.Section("fixed-lead", "Lead over rope", "", GAIN, better, "<svg></svg>")]
    shown = pd.concat([losses, better])
    sentences = report.summarize(about, shown, "books", L)
    return report.html("title", remarks, sentences, report.signs(shown, baseline),
                       report.describe_curves(about, gates), sections, L)


def test_the_report_begins_with_five_sentences_and_says_nothing_twice() -> None:
    html = page(curve("rope", unstable=True), curve("alibi", "alibi", 0.2, is_better=True),
                curve("t5", "t5", 0.3, FAILED), curve("fire", "fire", 0.4, UNCERTAIN),
                remarks=[report.ONE_RATE])
    parts = [(tag, " ".join(unescape(text).split()))
             for tag, text in re.findall(r"<(p|li|figcaption)\b[^>]*>(.*?)</", html, re.DOTALL)]
    said = [text for tag, text in parts if tag == "li"]
    assert len(said) == 5
    compared, text, gate, best, unknown = said
    assert all(name in compared for name in ("rope", "alibi", "t5", "fire")) and "L = 128" in compared
    assert "12 documents" in text and "books" in text and "64 to 2048" in text
    assert "passed: rope and alibi; uncertain: fire; failed: t5" in gate
    assert all(f"alibi has the lowest loss with {length} tokens" in best for length in (128, 2048))
    assert "t5" not in best and "fire" not in best and ", below that of rope" in best
    assert "new seed of rope" in unknown and "alibi" not in unknown
    assert html.index(report.ONE_RATE) < html.index(compared) < html.index("<table")
    sentences = [sentence for _, text in parts for sentence in re.split(r"(?<=[.]) ", text) if sentence]
    assert len(sentences) > 12 and len({*sentences}) == len(sentences)


def test_nothing_is_bold_ranked_or_black_without_a_gate() -> None:
    html = page(curve("rope", state=NOT_GATED), curve("alibi", "alibi", 0.2, NOT_GATED))
    assert "<b>" not in html and "Nothing is ranked" in html and "lowest loss" not in html
    assert "To gate a run" in html and "To gate a run" not in page(curve("rope", state=FAILED))
    assert html.count("<th><i>rope</i></th>") == 3 and html.count("<th><i>alibi</i></th>") == 4


def test_a_cell_is_mean_and_interval_or_median_and_range() -> None:
    def cells(rows: pd.DataFrame, form=GAIN) -> dict[str, list[str]]:
        section = report.Section("", "", "", form, rows)
        (row,) = report.make_table(section, L).to_dict("records")
        return {heading: [re.sub("<.*?>", "", line) for line in cell.split("<br>")]
                for heading, cell in row.items()}

    stable = cells(curve("rope", at_longest=0.5))
    assert [*stable] == ["64", "128 = L", "256 = 2 L", "512 = 4 L", "1024 = 8 L", "2048 = 16 L"]
    assert stable["128 = L"] == ["+0.100", "[+0.080, +0.120]"]
    assert stable["2048 = 16 L"] == ["+0.500", "[+0.480, +0.520]", "+0.490 ... +0.510"]
    unstable = cells(curve("rope", at_longest=0.5, unstable=True))
    assert unstable["2048 = 16 L"] == ["+0.503", "+0.490 ... +0.510"]
    assert cells(curve("rope", at_longest=0.5, seeds=1))["2048 = 16 L"] == ["+0.500", "[+0.480, +0.520]"]
    # perplexity falls where the score rises: the ends change places
    assert cells(curve("rope", at_longest=-4.0), PERPLEXITY)["2048 = 16 L"][1] == "[53.52, 55.70]"
    many = curve("rope", lengths=[64 * 2**n for n in range(report.MOST_COLUMNS + 1)], is_better=True)
    assert all(len(lines) == 1 for lines in cells(many).values())
    for is_text, n_bold in ((False, len(many)), (True, 0)):
        table = report.make_table(report.Section("", "", "", GAIN, many), L, is_text)
        assert str(table.to_numpy()).count("<b>") == n_bold

