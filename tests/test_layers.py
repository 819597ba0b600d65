"""Imports point one way, and the source keeps what a fork relies on."""

import ast
import re
import shutil
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from toys import ROOT, python

from positions import ENCODINGS

LAYERS = [      # from the top; a module belongs to the longest name that fits
    ["train", "eval", "compare", "sweep", "sample", "export", "data.prepare", "hf.lm_eval", "bench", "docs"],
    ["evaluation"],
    ["runtime"],
    ["hf"],
    ["data"],
    ["model"],
    ["config"],
    ["attention"],
    ["positions"],
    ["rope"],
    ["base"],
]
ROOMS = ("positions", "data", "evaluation", "hf", "runtime", "base", "bench", "docs")
PATHS = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in sorted((ROOT / room).glob("*.py")))]


@cache
def sources() -> dict[str, ast.Module]:
    """The syntax tree of each module."""
    trees = {}
    for path in PATHS:
        name = path.relative_to(ROOT).as_posix().removesuffix(".py").removesuffix("/__init__")
        trees[name.replace("/", ".")] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def layer_of(module: str) -> int:
    """The number of the module's layer, 0 being the top."""
    fitting = [(len(name), number) for number, names in enumerate(LAYERS) for name in names
               if f"{module}.".startswith(f"{name}.")]
    assert fitting, f"{module} is in no layer of this file; add it"
    return max(fitting)[1]


def imports_of(tree: ast.AST) -> set[str]:
    """The modules of this program that a file imports anywhere, also late or for type checking alone."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in sources() else node.module for name in names}
    return found & sources().keys()


def test_imports_point_one_way() -> None:
    graph = {module: imports_of(tree) for module, tree in sources().items()}
    wrong = [f"{module} imports {other}, which is in a higher layer" for module, others in graph.items()
             for other in sorted(others) if layer_of(other) < layer_of(module)]
    assert not wrong
    TopologicalSorter(graph).prepare()          # raises CycleError


def test_only_positions_knows_encodings_by_name() -> None:
    for module, tree in sources().items():
        compared = {constant.value for node in ast.walk(tree)
                    if isinstance(node, ast.Compare | ast.MatchValue) for constant in ast.walk(node)
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, str)}
        assert module.startswith("positions") or not compared & set(ENCODINGS), module


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_a_package_that_lists_its_files(room: str) -> None:
    """Python prefers a module of the user, such as a data.py, to a folder that is no package."""
    lines = (ast.get_docstring(sources()[room]) or "").splitlines()
    listed = re.findall(r"\w+", " ".join(line.partition("  ")[0] for line in lines))
    missing = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__", *listed}
    assert not missing, f"{room}/__init__.py: add {missing} to its docstring"


def test_no_file_hides_a_module_of_the_standard_library() -> None:
    """A script's folder is on the path of the Pythons that torch.compile starts to look at the chip."""
    assert not {module.rpartition(".")[2] for module in sources()} & sys.stdlib_module_names


@pytest.mark.slow
@pytest.mark.parametrize("parts", [["rope.py"], ["rope.py", "positions"]])
def test_rotations_and_encodings_work_in_another_project(parts: list[str], tmp_path: Path) -> None:
    """Copied into an empty folder: rope.py needs torch alone, positions/ also pydantic."""
    for part in parts:
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile)(ROOT / part, tmp_path / part)
    code = ["import sys, torch, rope", "x = torch.randn(1, 2, 5, 8)",
            "assert rope.rotate(x, rope.angles(torch.arange(5), rope.inv_freq(8))).shape == x.shape"]
    if len(parts) > 1:
        code += ["from positions import ENCODINGS, At, Shape",
                 "options = ENCODINGS['rope'].Options(encoding='rope')",
                 "encoding, pos = ENCODINGS['rope'](Shape(1, 2, 16, 8, 5), options), torch.arange(5)[None]",
                 "encoding.rotate(x, x, At(pos, pos, 0, encoding.tables(pos, pos)))"]
    ended = python("-c", "\n".join(code), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
