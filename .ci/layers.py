"""Imports point one way: no module imports one of a higher layer, and there is no circle (`make lint`).

import-linter refuses modules that are not packages, such as train.py and model.py. So this script reads the
imports itself, deferred ones and those for type checking included.
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

LAYERS = [      # from the top; a module belongs to the longest name that fits
    ["train", "eval", "compare", "sweep", "sample", "export", "data.prepare", "bench", "docs"],
    ["evaluation"],
    ["runtime"],
    ["hf"],
    ["data"],
    ["model"],
    ["config"],
    ["attention", "runtime.loss", "runtime.flex", "runtime.gradients"],
    ["positions"],
    ["rope"],
    ["runtime.errors", "runtime.files", "runtime.command", "runtime.lock",
     "runtime.screen", "runtime.schema", "runtime.toml"],
]


def layer_of(module: str) -> int:
    """The number of the module's layer, 0 being the top."""
    fitting = [(len(name), number) for number, names in enumerate(LAYERS) for name in names
               if module == name or module.startswith(f"{name}.")]
    if not fitting:
        sys.exit(f"error: {module} is in no layer of {__file__}; add it there")
    return max(fitting)[1]


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The modules of this program that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {name if name in modules else node.module
                      for name in (f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules


def main() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    paths = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): Path(name)
             for name in listed.stdout.split() if not name.startswith(("tests/", ".ci/"))}
    graph = {module: imports_of(path, set(paths)) for module, path in paths.items()}
    wrong = [f"error: {module} imports {other}, which is in a higher layer"
             for module, others in graph.items() for other in sorted(others)
             if layer_of(other) < layer_of(module)]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        wrong.append(f"error: imports in a circle: {' -> '.join(reversed(error.args[1]))}")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
