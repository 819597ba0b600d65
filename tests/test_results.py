"""Each figure of a result, in a table or in the README's text, is that of a record in results/.

A row of a table is named after a record: results/FOLDER/NAME.json, or one for each seed, NAME-seedS.json. A
cell is the mean over the seeds, optionally followed by " ± " and their standard deviation.
"""

import json
import math
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import ROOT

from data.tasks import ALGORITHMS
from evaluation.results import read

RESULTS = ROOT / "results"


@cache
def records_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["records"]


class Source(NamedTuple):
    """Where the figures of a table come from. A label that is not in `names` is the name of its record."""

    folder: str
    names: dict[str, str]
    protocol: str
    key: str = "ppl"
    form: str = ".2f"
    prefix: str = ""            # of all records
    methods_of: str = ""        # the record of all rows, whose labels are methods of --extend

    def row(self, label: str) -> tuple[str, str | None]:
        """The record and the method of a row."""
        if self.methods_of:
            return self.methods_of, None if label in ("no method", "plain rope") else label.strip("`")
        name, _, method = label.partition(" under ")
        return self.prefix + self.names.get(name, name), method.strip("`") or None

    def seeds(self, label: str) -> list[dict[int, float]]:
        """Length -> figure, for each seed. Counts, such as those of keys found by depth, are added up."""
        name, method = self.row(label)
        paths = [path for pattern in (f"{name}.json", f"{name}-seed[0-9]*.json")
                 for path in sorted((RESULTS / self.folder).glob(pattern))]
        assert paths, f"results/{self.folder} has no record {name}.json for the row {label}"
        found = []
        for path in paths:
            figures: dict[int, float] = {}
            for r in records_of(path):
                if (r["extend"], r["protocol"]) == (method, self.protocol):
                    figures[r["length"]] = figures.get(r["length"], 0) + r[self.key]
            found.append(figures)
        return found

    def cell(self, label: str, length: int, has_spread: bool = False) -> str:
        """The text of a cell."""
        values = [figures[length] for figures in self.seeds(label) if length in figures]
        if not values:
            return "-"
        text = format(values[0] if len(values) == 1 else statistics.mean(values), self.form)
        return f"{text} ± {statistics.stdev(values):{self.form.lstrip('+')}}" if has_spread else text


STUDY = "extrapolation/records"
METHODS = Source(STUDY, {}, "fixed", form=".1f", methods_of="rope-extended")
TABLES: dict[str, list[Source]] = {             # in the order of each page
    "README.md": [Source(STUDY, {}, "fixed", form=".1f"), METHODS],
    "results/extrapolation/README.md": [
        Source(STUDY, {}, "fixed", form=".1f"), Source(STUDY, {}, "nonoverlap", form=".1f"),
        Source(STUDY, {}, "repeat", "gain", "+.2f"), METHODS,
        Source(STUDY, {}, "repeat", "gain", "+.2f", methods_of="rope-extended"),
        *(Source(STUDY, {}, kind, "correct", ".1f", "needles-")
          for kind in ("needle", "multi_key", "multi_query")),
        *(Source(STUDY, {}, "variables", "correct", ".1f", prefix)
          for prefix in ("variables-", "long-variables-")),
        *(Source(STUDY, {}, task, "correct", ".0f", f"algorithm-{task}-") for task in ALGORITHMS),
        Source(STUDY, {}, "fixed", form=".1f", prefix="code-")],
    "docs/longer-contexts.md": [METHODS],
    "results/every-encoding/README.md": [Source("every-encoding", {}, "fixed", form=".4g")],
}


def result_tables(page: str) -> list[tuple[dict[int, int], list[list[str]]]]:
    """The tables with a column for each context length: column -> length, and the rows."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        lengths = {i: int(length[1]) for i, cell in enumerate(head)
                   if (length := re.fullmatch(r"\**(\d+)( = L)?\**", cell))}
        if len(lengths) > 2:
            found.append((lengths, rows))
    return found


@pytest.mark.parametrize("page", TABLES)
def test_each_figure_of_a_table_is_that_of_its_record(page: str) -> None:
    """Where it is not, the message has the row that the records give, to be copied."""
    found = result_tables(page)
    assert len(found) == len(TABLES[page])
    for (lengths, rows), source in zip(found, TABLES[page], strict=True):
        for row in rows:
            expected = [source.cell(row[0], lengths[i], "±" in text) if i in lengths else text
                        for i, text in enumerate(row)]
            assert row == expected, f"{page}: the records give the row\n| {' | '.join(expected)} |"


def test_evaluations_made_before_still_load() -> None:
    older = [path.with_suffix(".json") for path in RESULTS.rglob("*.npz")]
    assert older and all(read(path).records and read(path).windows for path in older)


def test_the_output_of_make_train_is_that_of_the_record() -> None:
    """The README's output and its first paragraphs are of one run."""
    readme = (ROOT / "README.md").read_text()
    lines = [line.replace(" = L", "").split() for line in readme.splitlines()
             if re.match(r"\d+( = L)? +[\d.]+ +[\d.]+ ", line)]
    assert len(lines) >= 4
    records = {(r["protocol"], r["length"]): r for r in records_of(RESULTS / "every-encoding" / "quick.json")}
    for length, *shown in lines:
        block, fixed = records["nonoverlap", int(length)], records["fixed", int(length)]
        truncated = math.exp(fixed["truncated_nll_sum"] / fixed["tokens"])
        figures = [block["ppl"], block["bpb"], fixed["ppl"], fixed["bpb"], truncated]
        assert shown == [*(f"{x:.4g}" for x in figures), f"{fixed['gain']:+.4f}"]
    text = " ".join(readme.split())
    rise = [f"{records['fixed', length]['ppl']:.3g}" for length in (128, 256, 8192)]
    assert "from {} to {}, and at 64 L it is {}".format(*rise) in text


def test_each_figure_in_the_text_of_the_results_is_in_a_record() -> None:
    """A number with a decimal point, outside of tables and code, is a record's, rounded to its digits."""
    readme = (ROOT / "README.md").read_text()
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", readme, re.MULTILINE))
    values = [r[key] for source in TABLES["README.md"] for path in (RESULTS / source.folder).glob("*.json")
              for r in records_of(path) for key in ("ppl", "bpb", "gain")
              if r.get(key) is not None]
    for title in ("Results", "Longer contexts for a trained model"):
        prose = re.sub(r"^```.*?^```|^\|.*?$|`[^`]*`", "", sections[title], flags=re.MULTILINE | re.DOTALL)
        for text in re.findall(r"(?<![\w.])\d+\.\d+\b(?! M bytes)", prose):
            digits = len(text.partition(".")[2])
            assert any(f"{abs(value):.{digits}f}" == text for value in values), f"{title}: {text}"
