"""Run every command of README.md and docs/ at toy size, in the order in which a reader types them.

The tracked files are copied to a scratch folder. There, for each page in turn, we write the files that it
shows (a block that follows "`PATH`:") and run its commands: each command of an `sh` block, each `python`
block, and in README.md each inline command. RULES make the commands small; SKIPPED lists those that do not
run, with the reason. Exits with 1 if a command fails. `python .ci/documented.py [PAGE ...]` runs some pages.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *(f"docs/{name}.md" for name in (
    "data", "longer-contexts", "hugging-face", "comparing", "speed", "scaling", "reliability",
    "encodings"))]
BLOCK = re.compile(r"(?:`(?P<path>[\w./-]+)`:\s*\n\s*)?^(?P<indent> *)```(?P<language>\w*)\n(?P<content>.*?)"
                   r"^(?P=indent)```$|`(?P<inline>(?:python|make) [^`]+)`", re.MULTILINE | re.DOTALL)
TRAIN = "train.steps=2 train.warmup=1 train.batch_size=4 train.val_windows=4"
EVAL = "--windows 2 --tokens 2048 --lengths 64,128,256"
RULES = [                                       # pattern, replacement; all of them apply to each command
    (r"\b(train|sweep)\.py (?!--help)[^&;#\n]*", rf"\g<0> {TRAIN} "),
    (r"\beval\.py (?!--help)[^&;#\n]*", rf"\g<0> {EVAL} "),
    (r"\bpython sweep\.py (?![^\n]*--eval)", rf'\g<0>--eval="{EVAL}" '),
    (r'--eval="(?!--windows)', rf'\g<0>{EVAL} '),
    (r"\bdata[./]prepare(?:\.py)? (?!--help|--check)[^&;#\n]*", r"\g<0> --limit-tokens 200000 "),
    (r"bpe:8192", "bpe:300"),
    (r"--tokens 200$", "--tokens 20"),
    (r"-m pytest -k", r"-m pytest -q tests/test_positions.py -k"),
]
SKIPPED = [                                     # pattern, reason why it is not run
    (r"^make (test|lint|gallery)|pytest tests/", "CI runs the tests and the lint themselves"),
    (r"^make (compare|bench|soak)|-m bench\.", "takes minutes or hours"),
    (r"https?://|hf:|tinyshakespeare|^pip ", "needs the network"),
    (r"gpt2-124m|-m gpu", "needs a GPU"),
    (r"smol|--advise", "needs a pretrained model; test_pretrained.py and test_smollm2.py have one"),
    (r"--nnodes|--submitit", "needs several nodes, or a cluster"),
    (r"--grid train.lr|configs/none.toml --seeds", "tests/test_sweep.py runs such sweeps"),
    (r"^lm_eval", "tests/test_lm_eval.py runs this task"),
]


def make_checkout(scratch: Path) -> dict[str, str]:
    """Copy the tracked files and make the inputs that the pages assume. Returns their environment."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    checkout = scratch / "nanorope"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    (checkout / ".venv").symlink_to(sys.prefix)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("t*.py"))
    texts = [path.read_text(encoding="utf-8") for path in sources]
    for split, share in (("train", texts[4:]), ("val", texts[:4])):
        (scratch / "books" / split).mkdir(parents=True)
        for number, text in enumerate(share):
            (scratch / "books" / split / f"{number}.txt").write_text(text, encoding="utf-8")
    for name in ("another.txt", "book.txt", "my-text.txt"):
        (checkout / name).write_text(texts[0], encoding="utf-8")
    parts = (text[i:i + 2000] for text in texts for i in range(0, len(text), 2000))
    lines = "".join(json.dumps({"body": part}) + "\n" for part in parts)
    with pyarrow.output_stream(str(checkout / "dump.jsonl.zst"), compression="zstd") as file:
        file.write(lines.encode())
    (checkout / "models").mkdir()
    (checkout / "models" / "SmolLM2-135M").symlink_to("../runs/quick-hf")      # what the page exports before
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(scratch), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}


def write_files(page: str, checkout: Path) -> None:
    """Write the files that a page shows, and register the encoding that it adds."""
    for found in BLOCK.finditer(page):
        if found["path"]:
            path = checkout / found["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(found["content"]), encoding="utf-8")
    lines = re.search(r"Add two lines to .*?`(from [^`]+)`, and\s+`([^`]+)` in `ENCODINGS`", page, re.DOTALL)
    if lines:
        path = checkout / "positions" / "__init__.py"
        text = path.read_text(encoding="utf-8").replace("\n__all__", f"{lines[1]}\n\n__all__", 1)
        path.write_text(text.rstrip().removesuffix("}") + f"    {lines[2]}\n}}\n", encoding="utf-8")


def commands(page: str, has_inline: bool) -> Iterator[str]:
    """The commands of a page, in reading order."""
    for found in BLOCK.finditer(page):
        if found["inline"] and has_inline:
            yield re.sub(r"\s+", " ", found["inline"])
        elif found["language"] == "python" and not found["path"]:
            yield f"python - <<'END'\n{found['content']}END"
        elif found["language"] == "sh":
            yield from split(textwrap.dedent(found["content"]))


def split(block: str) -> Iterator[str]:
    """The commands of a shell block, without comments: lines, joined while bash needs another one."""
    command = ""
    for line in block.replace("\\\n", " ").splitlines():
        command = f"{command}\n{re.sub(r'(^|  +)#.*', '', line)}".strip()
        check = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True, check=False)
        if command and check.returncode == 0:
            yield command
            command = ""


def expand(command: str, checkout: Path) -> str:
    """The command at toy size; `make TARGET` becomes the commands of the target, without the installation."""
    if command.startswith("make "):
        call = ["make", "-n", "PY=python", "-o", ".venv/.installed", command.split()[1]]
        command = subprocess.check_output(call, cwd=checkout, text=True).strip()
    if "<<" not in command:
        for pattern, replacement in RULES:
            command = re.sub(pattern, replacement, command)
    return command


def main() -> None:
    failed, done, started = [], set(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        environment = make_checkout(Path(name))
        checkout = Path(name) / "nanorope"
        for page in sys.argv[1:] or PAGES:
            text = (ROOT / page).read_text(encoding="utf-8")
            write_files(text, checkout)
            print(f"== {page}")
            for command in commands(text, page == "README.md"):
                reason = next((reason for pattern, reason in SKIPPED if re.search(pattern, command)), None)
                if reason or command in done:
                    print(f"skipped: {command}: {reason or 'ran before'}")
                    continue
                done.add(command)
                start = time.monotonic()
                ran = subprocess.run(["bash", "-euo", "pipefail", "-c", expand(command, checkout)],
                                     cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT, check=False)
                seconds = time.monotonic() - start
                print(f"{'FAILED' if ran.returncode else 'ok'} {seconds:.0f} s: {command}", flush=True)
                if ran.returncode:
                    print(textwrap.indent(ran.stdout[-3000:], "    "))
                    failed.append(f"{page}: {command}")
    print(f"{time.monotonic() - started:.0f} s; {len(failed)} failed", *failed, sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
