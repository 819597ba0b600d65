"""The documentation agrees with the repository: every figure with its record, every link with its target."""

import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from positions import ENCODINGS

RESULTS = ROOT / "results"
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/*.md")))]
NOTES = sorted(path.relative_to(ROOT).as_posix() for path in RESULTS.glob("*/README.md"))
FILES = {"rope": "quick", "rope, first layer only": "rope-first-layer"}     # label in a table -> its record
Records = list[dict]


def quick(label: str) -> Records:
    return read(RESULTS / "quick" / f"{FILES.get(label, label)}.json", None)


def every(label: str) -> Records:
    return read(RESULTS / "every-encoding" / f"{label}.json", None)


def books(label: str) -> Records:
    return read(RESULTS / "cpu-books" / "records" / f"{label}.json", None)


def sliding(label: str) -> Records:
    return read(RESULTS / "cpu-books" / "records" / f"{label}-sliding.json", None)


def methods(label: str) -> Records:
    method = None if label in ("no method", "plain rope") else label.strip("`")
    return read(RESULTS / "cpu-books" / "records" / "rope.json", method)


def passkey(label: str) -> Records:
    encoding, _, method = label.partition(" under ")
    return read(RESULTS / "cpu-books" / "records" / f"passkey-{encoding}.json", method.strip("`") or None)


def read(path: Path, extend: str | None) -> Records:
    return [r for r in json.loads(path.read_text())["records"] if r["extend"] == extend]


TABLES: dict[str, list[tuple[Callable[[str], Records], str, str, str]]] = {     # in the order of each page
    "README.md": [(quick, "fixed", "ppl", ".2f"), (methods, "fixed", "ppl", ".2f")],
    "docs/longer-contexts.md": [(methods, "fixed", "ppl", ".2f")],
    "results/quick/README.md": [(quick, "fixed", "ppl", ".2f"), (quick, "nonoverlap", "ppl", ".2f")],
    "results/every-encoding/README.md": [(every, "fixed", "ppl", ".4g")],
    "results/cpu-books/README.md": [
        (books, "fixed", "ppl", ".2f"), (books, "nonoverlap", "ppl", ".2f"),
        (sliding, "sliding", "ppl", ".2f"), (methods, "fixed", "ppl", ".2f"),
        (books, "repeat", "gain", "+.2f"), (passkey, "passkey", "correct", "d")],
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
def test_each_figure_of_a_result_is_that_of_its_record(page: str) -> None:
    found = result_tables(page)
    assert len(found) == len(TABLES[page])
    for (lengths, rows), (records_of, protocol, key, form) in zip(found, TABLES[page], strict=True):
        for row in rows:
            records = [r for r in records_of(row[0]) if r["protocol"] == protocol]
            for column, length in lengths.items():
                values = [r[key] for r in records if r["length"] == length]
                text = format(sum(values), form) if values else "-"
                assert row[column] == text, (page, row[0], length)


def test_the_output_of_make_train_is_that_of_the_record() -> None:
    """The README's output, its text and its first table are of one run."""
    readme = (ROOT / "README.md").read_text()
    lines = [line.split("<-")[0].replace("|", " ").split() for line in readme.splitlines()
             if re.match(r" +\d+ +[\d.]+\| ", line)]
    assert len(lines) >= 4
    records = {(r["protocol"], r["length"]): r for r in quick("rope")}
    for length, multiple, *shown in lines:
        block, fixed = records["nonoverlap", int(length)], records["fixed", int(length)]
        truncated = math.exp(fixed["truncated_nll_sum"] / fixed["tokens"])
        figures = [block["ppl"], block["bpb"], fixed["ppl"], fixed["bpb"], truncated]
        assert float(multiple) == int(length) / 128
        assert shown == [*(f"{x:.4g}" for x in figures), f"{fixed['gain']:+.4f}"]
    rise = [f"{records['fixed', length]['ppl']:.3g}" for length in (128, 256, 8192)]
    assert "from {} to {}, and at 64 L it is {}".format(*rise) in " ".join(readme.split())
    alibi = {r["length"]: f"{r['ppl']:.2f}" for r in quick("alibi") if r["protocol"] == "nonoverlap"}
    assert f"ALiBi falls from {alibi[128]} at L to {alibi[8192]} at 64 L" in " ".join(readme.split())


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTES])
def test_every_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        if not target.startswith("http"):
            there = path.parent / file if file else path
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def test_every_page_is_linked_and_the_readme_is_short() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 220 and max(map(len, readme.splitlines())) <= 120
    assert all(f"]({page})" in readme for page in PAGES[1:])
    missing = [name for name in ENCODINGS if f"`{name}`" not in readme]
    assert not missing, f"README.md: add a row for {missing} to the table of encodings"


@pytest.mark.parametrize("folder", ["positions", "data", "evaluation", "hf", "runtime", "bench", "docs"])
def test_each_folder_lists_its_files(folder: str) -> None:
    listed = (ROOT / folder / "__init__.py").read_text().split('"""')[1]
    files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    assert files <= set(re.findall(r"^(\w+)(?:\.py)?  +", listed, re.MULTILINE))


def test_the_readme_shows_only_files_that_exist() -> None:
    tree = (ROOT / "README.md").read_text().split("## The folders")[1].split("```")[1]
    names = [name for line in tree.strip().splitlines() for name in line.partition("  ")[0].split()]
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout
    assert {name for name in tracked.split() if "/" not in name} <= set(names)
    assert all((ROOT / name).exists() for name in names)
