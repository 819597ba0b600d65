"""The documentation agrees with the repository: every link with its target, every file with its list."""

import re
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from positions import ENCODINGS

RESULTS = ROOT / "results"
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/*.md")))]
NOTES = sorted(path.relative_to(ROOT).as_posix() for path in RESULTS.glob("*/README.md"))


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
    # rows for the encodings of a fork do not count
    n_lines = sum(not line.startswith("| [`") and not line.startswith("| `") for line in readme.splitlines())
    long = [line for line in readme.splitlines() if len(line) > 120]
    assert n_lines <= 195, f"README.md has {n_lines} lines besides the rows of encodings; at most 195"
    assert not long, f"README.md: lines of more than 120 characters: {long}"
    assert all(f"]({page})" in readme for page in PAGES[1:])
    missing = [name for name in ENCODINGS if f"`{name}`" not in readme]
    assert not missing, f"README.md: add a row for {missing} to the table of encodings"


@pytest.mark.parametrize("folder", ["positions", "data", "evaluation", "hf", "runtime", "bench", "docs"])
def test_each_folder_lists_its_files(folder: str) -> None:
    listed = (ROOT / folder / "__init__.py").read_text().split('"""')[1]
    files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    missing = files - set(re.findall(r"^(\w+)(?:\.py)?  +", listed, re.MULTILINE))
    assert not missing, f"{folder}/__init__.py: add a line for {missing} to its docstring"


def test_the_readme_shows_only_files_that_exist() -> None:
    tree = (ROOT / "README.md").read_text().split("## The folders")[1].split("```")[1]
    names = [name for line in tree.strip().splitlines() for name in line.partition("  ")[0].split()]
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout
    assert {name for name in tracked.split() if "/" not in name} <= set(names)
    assert all((ROOT / name).exists() for name in names)


def test_nothing_is_fetched_without_encryption() -> None:
    """A corpus by http could be changed on its way here, and no checksum is known before."""
    listed = subprocess.run(["git", "ls-files", "*.md", "*.toml", "Makefile"], cwd=ROOT, capture_output=True,
                            text=True).stdout.split()
    assert "docs/data.md" in listed and "configs/enwik8.toml" in listed
    assert not [name for name in listed if "http://" in (ROOT / name).read_text(encoding="utf-8")]


def test_constraints_pin_every_package_within_the_ranges() -> None:
    """Direct or not: each one that the requirements lead to here, apart from CUDA's, which torch pins."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
                if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left = [(line, "") for line in (*project["dependencies"], *project["optional-dependencies"]["test"])]
    seen = set(left)
    for line, extra in left:                                # grows
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        is_needed = not wanted.marker or wanted.marker.evaluate({"extra": extra})
        if not is_needed or re.match("nvidia|cuda|triton", name):
            continue
        assert name in pins and pins[name] in wanted.specifier, f"{wanted}: run make lock"
        found = {(line, extra) for line in requires(name) or [] for extra in ("", *wanted.extras)} - seen
        left += found
        seen |= found
    assert len({name for name in pins if any(line.startswith(name) for line, _ in left)}) > 30
