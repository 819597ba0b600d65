"""Each figure of a result, in a table or in a text, is that of a record in results/."""

import math
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from toys import ROOT

from docs import study
from docs.gallery import update
from docs.rows import read_row
from evaluation.results import records
from evaluation.runs import is_saved, load

RESULTS = ROOT / "results"
# numbers of the pages that are no results: sizes, rates, p, figures of pilots and of others, the gain of a
# model that is blind beyond L by the old definition of truncated (0.013), a rounded difference of two cells
GIVEN = {"1.1", "1.5", "2.5", "4.9", "3.9", "12.1", "0.3", "0.5", "0.375", "87.5", "0.6", "0.001", "0.002",
         "0.013", "14.7"}
GIVEN_OF_TYPER = {"1.9", "0.02", "0.03"}        # what its copy of click changes


blocks = cache(study.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("page", study.PAGES)
def test_the_tables_of_the_study_are_computed_from_its_runs(page: Path) -> None:
    text = page.read_text()
    names = re.findall("<!-- begin (.*) -->", text)
    assert names
    assert update(text, {name: blocks()[name] for name in names}) == text, "run `python -m docs.study`"


@pytest.mark.slow
def test_each_figure_in_the_text_of_the_study_is_in_its_tables() -> None:
    """A number with a decimal point, outside of tables and code, is one of a cell, rounded to its digits.

    The cell is in a row of an encoding that the number's paragraph names, in any column and in any table: of
    ten numbers that are wrong by a little, seven still pass. One with an interval is that of a cell with both
    its ends. The page of the GPU has these alone checked.
    """
    brackets = r"\[[-+\d.,\s]*\]"
    rows = [(set(name_words(title)[:1]),
             [abs(float(x)) for x in re.findall(r"\d+\.\d+", re.sub(brackets, "", cells))])
            for block in blocks().values()
            for title, cells in re.findall(r"^\|([^|]*)\|(.*)$", block, re.MULTILINE)]
    intervals = {(value, *sorted(ends)) for block in blocks().values() for value, *ends in re.findall(
        r"[+-](\d+\.\d+) \[[+-](\d+\.\d+), [+-](\d+\.\d+)\]", block)}
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", study.README.read_text(), re.MULTILINE))
    readme = [sections["Which encoding should I use?"]]
    for text in (*(page.read_text() for page in study.PAGES[1:]), *readme):
        prose = re.sub(r"^```.*?^```|^\|.*?$|\]\(.*?\)", "", text, flags=re.MULTILINE | re.DOTALL)
        for paragraph in re.split(r"\n\n|\n(?=- )", "" if "begin gpu" in text else prose):
            words = set(name_words(paragraph))
            cells = [cell for first_word, row in rows if first_word & words for cell in row]
            given = GIVEN | (GIVEN_OF_TYPER if "typer" in words else set())
            outside = re.sub(f"`[^`]*`|{brackets}", "", paragraph)
            numbers = re.findall(r"(?<![\w.])\d+\.\d+\b", outside)
            for number in set(numbers) - given:
                digits = len(number.partition(".")[2])
                assert any(f"{cell:.{digits}f}" == number for cell in cells), (number, paragraph)
        for value, *ends in re.findall(r"(\d+\.\d\d)(?: nats)?\s\[(\d+\.\d+),\s(\d+\.\d+)\]", prose):
            assert (value, *sorted(ends)) in intervals, (value, ends)


def name_words(text: str) -> list[str]:
    """Words of letters, or letters and digits such as t5, in lower case."""
    return re.findall(r"[a-z]+\d*", text.lower().replace("_", " "))


FLAT = {"books": ("alibi", "alibi-learned", "forgetting", "kerple-log", "sandwich"),
        "docs": ("alibi", "kerple-log"), "study/gpu-books": ("alibi", "kerple-log", "forgetting")}
SECOND_TEXT = {"books": "packages", "docs": "code", "study/gpu-books": "study/gpu-packages"}


@pytest.mark.slow
@pytest.mark.parametrize("data", [*FLAT, *SECOND_TEXT.values()])
def test_what_a_page_calls_flat_is_not_worse_beyond_L_and_rope_breaks_in_each_run(data: str) -> None:
    """Not worse by more than 0.05 nats with 16 L: the whole interval is above (results/README.md)."""
    L = study.runs_of(data)[0].head["seq_len"]
    names = {second: FLAT[first] for first, second in SECOND_TEXT.items()} | FLAT
    gains = study.rows_of(data, f"gain {16 * L}")
    for name in names[data]:
        assert gains["low"][name] > -0.05, name
    assert gains["high"]["rope"] < -0.05
    for length in (2 * L, 4 * L, 16 * L):
        beyond, at_L = (study.rows_of(data, f"fixed {n}")["seeds"] for n in (length, L))
        assert np.all(np.array(beyond["rope"]) < at_L["rope"]), length
        if data in ("books", "packages"):       # "none of their runs has a higher loss"
            assert all(np.all(np.array(beyond[name]) >= at_L[name]) for name in names[data]), length


@cache
def records_of(folder: str) -> dict[str, list[dict[str, Any]]]:
    """The sums of each run in a folder."""
    return {run.name: records(run.table) for run in load(RESULTS / folder)}


@pytest.mark.parametrize(("folder", "least"), [("every-encoding", 30), ("switches", 14)])
def test_each_figure_of_every_encoding_is_that_of_its_record(folder: str, least: int) -> None:
    """Perplexity on fixed targets by length. Where a cell differs, the message has the record's row."""
    page = (RESULTS / folder / "README.md").read_text()
    (table,) = [one for one in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE) if "128 = L" in one]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    lengths = {i: int(length[1]) for i, cell in enumerate(head)
               if (length := re.fullmatch(r"\**(\d+)( = L)?\**", cell))}
    assert len(lengths) > 2 and len(rows) > least
    for row in rows:
        ppl = {r["length"]: r["ppl"] for r in records_of(folder)[row[0]]
               if (r["extend"], r["protocol"]) == (None, "fixed")}
        expected = [(format(ppl[lengths[i]], ".4g") if lengths[i] in ppl else "-") if i in lengths else text
                    for i, text in enumerate(row)]
        assert row == expected, f"the records give the row\n| {' | '.join(expected)} |"


@pytest.mark.slow
def test_every_folder_of_results_can_be_read_again() -> None:
    folders = [path.parent for path in RESULTS.rglob("runs.json")]
    assert len(folders) > 20
    for folder in folders:
        assert is_saved(folder) and load(folder), folder


@pytest.mark.slow
def test_a_prediction_is_of_the_numbers_of_the_tables() -> None:
    row = study.SECOND.folder.parent / "rows" / "rope"
    numbers = study.seed_numbers(study.SECOND, row)
    for data, text in study.SECOND.texts.items():
        for n in (2, 4, 16):
            seeds = study.rows_of(data, f"gain {n * study.SECOND.L}")["seeds"]["rope"]
            np.testing.assert_allclose(numbers[f"{text}: {n} L"], seeds, atol=1e-6)
    assert abs(numbers["bits per byte"].mean() - read_row(row).bits.mean()) < 1e-9


@pytest.mark.parametrize("S", [2, 4, 8])
def test_a_new_seed_is_inside_its_prediction_in_95_percent_of_studies(S: int) -> None:
    seeds = np.random.default_rng(0).normal(size=(S + 1, 40_000))
    low, high = study.prediction(pd.DataFrame(seeds[:S]))
    assert 0.94 < pd.Series(seeds[S]).between(low, high).mean() < 0.96


def test_results_stay_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "results"], cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    rows = [path for path in paths if "rows" in path.parts]         # 17 files and 0.3 MB each
    assert len(paths) - len(rows) <= 160 and len(rows) <= 300
    assert sum(path.stat().st_size for path in paths if path.exists()) < 14e6


def test_the_output_of_make_train_is_that_of_the_record() -> None:
    """The README's output is of one run."""
    readme = (ROOT / "README.md").read_text()
    lines = [line.replace(" = L", "").split() for line in readme.splitlines()
             if re.match(r"\d+( = L)? +[\d.]+ +[\d.]+ ", line)]
    assert len(lines) >= 3
    sums = {(r["protocol"], r["length"]): r for r in records_of("every-encoding")["quick"]}
    for length, *shown in lines:
        block, fixed = sums["nonoverlap", int(length)], sums["fixed", int(length)]
        truncated = math.exp(fixed["truncated_nll_sum"] / fixed["tokens"])
        figures = [block["ppl"], block["bpb"], fixed["ppl"], fixed["bpb"], truncated]
        assert shown == [*(f"{x:.4g}" for x in figures), f"{fixed['gain']:+.4f}"]
