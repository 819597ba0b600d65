"""The documentation agrees with the repository: its links, its lists, and every command that it shows."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from packaging.requirements import Requirement
from toys import ROOT, call

from positions import ENCODINGS

PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/*.md")))]
NOTES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("results/**/*.md"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(page: str) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTES])
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        file, _, anchor = target.partition("#")
        if not target.startswith("http"):
            path = (ROOT / page).parent / file if file else ROOT / page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", [*PAGES, *NOTES])
def test_no_wrapped_line_begins_a_list(page: str) -> None:
    assert not re.search(r"^ *[+*] ", read(page), re.M)       # our lists begin with a hyphen
    assert not re.search(r"\S\n *1[.)] ", read(page))          # or, after a blank line, with a 1


def test_the_readme_leads_to_every_page_command_and_room() -> None:
    readme = read("README.md")
    files = [path.name for path in ROOT.glob("*.py")]
    rooms = [f"]({path.parent.name}" for path in ROOT.glob("*/__init__.py")]
    missing = [page for page in PAGES[1:] if f"]({page})" not in readme]
    missing += [name for name in files + rooms if name not in readme]
    assert not missing
    missing = [name for name in ENCODINGS if f"`{name}`" not in read("docs/encodings.md")]
    assert not missing, f"docs/encodings.md has no section on {missing}: `make gallery` adds one"


def test_constraints_pin_what_pyproject_asks_for() -> None:
    pins = dict(line.split("==") for line in read("constraints.txt").splitlines() if "==" in line)
    project = tomllib.loads(read("pyproject.toml"))["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        wanted = Requirement(text)
        assert pins.get(wanted.name.replace("_", "-"), "0") in wanted.specifier, f"{text}: run make lock"


# -----------------------------------------------------------------------------------------------------------
# Every command at toy size, in the order in which a reader types them


BLOCK = re.compile(r"(?:`(?P<path>[\w./-]+)`:\s*\n\s*)?^(?P<indent> *)```(?P<language>\w*)\n(?P<content>.*?)"
                   r"^(?P=indent)```$|`(?P<inline>(?:python|make) [^`]+)`", re.M | re.S)
TRAIN = ("train.steps=2 train.warmup=1 train.batch_size=4 train.val_windows=4 "
         "model.n_layer=2 model.n_embd=96")
EVAL = "--windows 2 --tokens 2048 --lengths 64,128,256"
RULES = [                                       # pattern, replacement; all of them apply to each command
    (r"\b(train|sweep)\.py (?!--help)[^&;#\n]*", rf"\g<0> {TRAIN} "),
    (r"\beval\.py (?!--help)[^&;#\n]*", rf"\g<0> {EVAL} "),
    (r"\bpython sweep\.py (?![^\n]*--eval)", rf'\g<0>--eval="{EVAL}" '),
    (r'--eval="(?!--windows)', rf'\g<0>{EVAL} '),
    (r"configs/quick\.toml configs/alibi\.toml --seeds 0,1(,2)?", "configs/alibi.toml --seeds 0"),
    (r"\bdata[./]prepare(?:\.py)? (?!--help)[^&;#\n]*", r"\g<0> --limit-tokens 200000 "),
    (r"bpe:8192", "bpe:300"),
    (r"--tokens 200$", "--tokens 20"),
    (r"-m pytest -k", r"-m pytest -q tests/test_positions.py -k"),
]
SKIPPED = "|".join((
    r"^make (test|lint|gallery|compare|bench|lock|row|verify|study)|pytest tests/|documentation|-m bench",
    r"https?://|hf:|sdists:|tinyshakespeare|^pip |^hf |-m (venv|pip)",                      # need the network
    r"gpt2-124m|-m gpu|--nnodes|--submitit",                       # need GPUs or a cluster
    r"models?/|smol|\bMODEL\b|lambada|lm_eval",         # tests of hf/ run them, with a model of their own
    r"results/rows|sqrt-sweep|rows/sqrt",               # what a reader has made before
    r"^\.venv/bin/python (train|eval)|--grid|--trials"))  # `checkout`, other tests
IN_PROCESS = re.compile(r"python (?:-m )?(train|eval|compare|sweep|sample|export|data[./]prepare)(?:\.py)? "
                        r"[^|&;<>$\n]*")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the tracked files, with the texts and the trained runs that the pages assume."""
    scratch = tmp_path_factory.mktemp("documented")
    folder = scratch / "nanorope"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("t*.py"))
    for i, source in enumerate(sources):
        path = scratch / "books" / ("val" if i < 4 else "train") / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, path)
    for name in ("another.txt", "book.txt", "my-text.txt"):
        shutil.copy(sources[0], folder / name)
    texts = [source.read_text(encoding="utf-8") for source in sources]
    rows = (json.dumps({"body": text[i:i + 2000]}) for text in texts for i in range(0, len(text), 2000))
    with pyarrow.output_stream(str(folder / "dump.jsonl.zst"), compression="zstd") as file:
        file.write("\n".join(rows).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        for name, value in (("HOME", str(scratch)), ("WANDB_MODE", "offline"), ("HF_HUB_OFFLINE", "1")):
            patch.setenv(name, value)
        for command in ("python data/prepare.py stdlib", "python train.py configs/quick.toml",
                        "python train.py configs/rope.toml", "python eval.py runs/quick"):
            run(command, set())
        yield folder


def write_files(page: str, folder: Path) -> set[str]:
    """Write the files that a page shows, register the encoding that it adds; -> the names of the modules."""
    shown = {folder / found["path"]: found["content"] for found in BLOCK.finditer(page) if found["path"]}
    for path, content in shown.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content), encoding="utf-8")
    lines = re.search(r"Add two lines to .*?`(from [^`]+)`, and\s+`([^`]+)` in `ENCODINGS`", page, re.S)
    assert lines or not any(path.parent.name == "positions" for path in shown)     # it is registered
    if lines:
        path = folder / "positions" / "__init__.py"
        text = path.read_text(encoding="utf-8").replace("\n__all__", f"{lines[1]}\n\n__all__", 1)
        path.write_text(text.rstrip().removesuffix("}") + f"    {lines[2]}\n}}\n", encoding="utf-8")
    return {path.stem for path in shown if path.suffix == ".py"}


def commands(page: str, has_inline: bool) -> Iterator[str]:
    """The commands of a page, in reading order: of `sh` and `python` blocks, and of the README's text."""
    for found in BLOCK.finditer(page):
        if found["inline"] and has_inline:
            yield re.sub(r"\s+", " ", found["inline"])
        elif found["language"] == "python" and not found["path"]:
            yield f"python - <<'END'\n{found['content']}END"
        elif found["language"] == "sh":
            yield from split(found["content"])
        else:           # no `bash` or `console`, whose commands would not be run
            assert found["language"] in (None, "", "python", "text", "toml", "yaml"), found["language"]


def split(block: str) -> list[str]:
    """The commands of a shell block: its lines without comments, joined where one ends in a backslash."""
    lines = (re.sub(r"(^|  +)#.*", "", line).strip() for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line]


def run(command: str, added: set[str]) -> None:
    """Run a command at toy size: in this process if it is one of ours and needs no `added` module."""
    if command.startswith("make "):             # the commands of the target, without the installation
        call_make = ["make", "--no-print-directory", "-n", "PY=python", "-o", ".venv/.installed",
                     command.split()[1]]
        for line in split(subprocess.check_output(call_make, text=True)):
            run(line, added)
        return
    for pattern, replacement in RULES if "<<" not in command else ():
        command = re.sub(pattern, replacement, command)
    own = IN_PROCESS.fullmatch(command)
    if own and not any(name in command for name in added):
        words = [os.path.expanduser(word) for word in shlex.split(command)]
        ended = call(own[1].replace("/", "."), *words[words.index("-m") + 2 if words[1] == "-m" else 2:])
        assert ended.code == 0, f"{command}\n{ended.out[-2000:]}{ended.err[-2000:]}"
    else:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], text=True, capture_output=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, checkout: Path) -> None:
    added = write_files(read(page), checkout)
    for command in dict.fromkeys(commands(read(page), page == "README.md")):
        if not re.search(SKIPPED, command):
            run(command, added)
