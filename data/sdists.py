"""Text of source distributions: the projects of a list, downloaded from the package index and read.

A list is a CSV file with the columns name, version, sha256, split. Nothing of a project is built, run or
unpacked: archives are read in memory, and a member's name is only compared and sorted.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from base.errors import UserError
from base.files import make_once
from data.loader import SPLITS, Corpus

KINDS = ("docs", "code")
N_DOWNLOADS = 4                 # at a time
TIMEOUT = 60                    # seconds without an answer
FILE_BYTES = 500_000            # longer files are tables, or generated
DOCS = re.compile(r"(.*/)?(docs?|documentation)/.*\.(rst|md|txt)", re.IGNORECASE)
CODE = re.compile(r".*\.py")
LEFT_OUT = re.compile(          # tests, copies of other packages, translations
    r"(.*/)?((tests?|testing|test_?data|_?vendor(ed)?|_distutils|third_party|extern(als?)?|locales?"
    r"|node_modules)/.*|(test_[^/]*|[^/]*_test|conftest)\.py)", re.IGNORECASE)
DOCS_LEFT_OUT = re.compile(     # change logs, licences, lists of people and of requirements
    r"(.*/)?((change(s|log)?|releases?|release[-_]?notes|whats_?new|news|history)/.*"
    r"|(change|release|whats_?new|news|history|licen[cs]e|copying|copyright|notice|author|contributor|require)"
    r"[^/]*)", re.IGNORECASE)
ROW = re.compile(r"[\w.-]+,[\w.!+-]+,[0-9a-f]{64},(train|val)", re.ASCII)
PASSAGE = 32                    # tokens
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)      # odd: 2^64 / golden ratio


class Project(NamedTuple):
    """A row of a list."""

    name: str
    version: str
    sha256: str                 # of the archive
    split: str


class Text(NamedTuple):
    """A document: the documentation of a project, or its code."""

    project: str
    split: str
    kind: str
    content: bytes


def read_list(path: Path) -> list[Project]:
    """The projects of a list. Raises UserError."""
    header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    expected = ",".join(Project._fields)
    if header != expected:
        raise UserError(f"sdists {path}: the first line must be {expected}; add it")
    for number, line in enumerate(lines, 2):
        if not ROW.fullmatch(line):
            raise UserError(f"sdists {path}, line {number}: {line!r} is not a name, a version, a sha256 and "
                            "train or val; correct it")
    return [Project(*line.split(",")) for line in lines]


def download(project: Project, part: Path) -> None:
    """Download the archive of a project, and check its sha256. Raises UserError.

    The index is that of PIP_INDEX_URL, as for pip, else pypi-simple's default.
    """
    try:
        import pypi_simple
    except ImportError as error:
        raise UserError("sdists: pypi-simple is not installed; run "
                        ".venv/bin/python -m pip install -c constraints.txt -e '.[study]'") from error
    endpoint = os.environ.get("PIP_INDEX_URL") or pypi_simple.PYPI_SIMPLE_ENDPOINT
    try:
        with pypi_simple.PyPISimple(endpoint) as index:
            packages = index.get_project_page(project.name, timeout=TIMEOUT).packages
            archive_of = {package.digests.get("sha256"): package for package in packages}
            index.download_package(archive_of[project.sha256], part, timeout=TIMEOUT)
    except (OSError, LookupError, ValueError, pypi_simple.NoSuchProjectError) as error:
        raise UserError(f"sdists: {project.name} {project.version}: cannot be downloaded "
                        f"({type(error).__name__}: {error}); check the sha256 in the list, the network and "
                        "PIP_INDEX_URL, then give the same command again: it continues") from error


def kind_of(name: str) -> str | None:
    """Whether a file is docs or code; None if it is left out."""
    if LEFT_OUT.fullmatch(name):
        return None
    if DOCS.fullmatch(name) and not DOCS_LEFT_OUT.fullmatch(name):
        return "docs"
    return "code" if CODE.fullmatch(name) else None


def read_project(project: Project, cache: Path) -> list[tuple[str, bytes]]:
    """Kinds and texts of the files of a project, in the order of their paths. Raises UserError.

    Files that are empty, not UTF-8 or have U+FFFD are left out. Lines end in LF, and a text in one of them.
    """
    archive = cache / f"{project.name}-{project.version}-{project.sha256[:12]}"
    make_once(archive, partial(download, project))      # an interrupted run has those before it
    if not tarfile.is_tarfile(archive):
        raise UserError(f"sdists: {project.name} {project.version}: its archive is no tar file; leave it out "
                        "of the list")
    texts: list[tuple[str, str, bytes]] = []
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("./").partition("/")[2]     # without the folder around all files
            kind = kind_of(name)
            if not kind or not member.isfile() or member.size > FILE_BYTES:         # no links
                continue
            file = tar.extractfile(member)
            assert file is not None
            text = file.read().replace(b"\r\n", b"\n").rstrip() + b"\n"
            is_text = b"\0" not in text and "\ufffd" not in text.decode("utf-8", errors="replace")
            if is_text and len(text) > 1:
                texts.append((name, kind, text))
    return [(kind, text) for _, kind, text in sorted(texts)]


def read_texts(path: Path, cache: Path) -> list[Text]:
    """The documents of a list: for each project its documentation, then its code, if it has any.

    Of files with the same text, the first in the order of the list is kept, whatever its project or split.
    In each split, the code of every project is cut to the same number of bytes, at the end of a line: the
    most for which there is no more code than documentation. Raises UserError.
    """
    projects = read_list(path)
    cache.mkdir(parents=True, exist_ok=True)
    digests: set[bytes] = set()         # of the files so far
    texts = []
    with ThreadPoolExecutor(N_DOWNLOADS) as pool:
        contents = pool.map(partial(read_project, cache=cache), projects)
        for project, files in zip(projects, contents, strict=True):
            kept: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
            for kind, content in files:
                digest = hashlib.sha256(content).digest()
                if digest not in digests:
                    digests.add(digest)
                    kept[kind].append(content)
            texts += [Text(project.name, project.split, kind, b"".join(kept[kind])) for kind in KINDS]
    for split in SPLITS:
        limit = code_limit([text for text in texts if text.split == split])
        for place, text in enumerate(texts):
            if text.split == split and text.kind == "code" and len(text.content) > limit:
                end = text.content.rfind(b"\n", 0, limit) + 1
                texts[place] = text._replace(content=text.content[:end])
    return [text for text in texts if text.content]


def code_limit(texts: Sequence[Text]) -> int:
    """The most bytes of code a project for which there is no more code than documentation."""
    n_docs = sum(len(text.content) for text in texts if text.kind == "docs")
    sizes = [len(text.content) for text in texts if text.kind == "code"]
    limits = range(max(sizes, default=0) + 1)
    return bisect_right(limits, n_docs, key=lambda limit: sum(min(size, limit) for size in sizes)) - 1


# -----------------------------------------------------------------------------------------------------------
# What training shares with evaluation


def passages(ids: np.ndarray) -> np.ndarray:
    """A hash of each PASSAGE consecutive ids, (max(0, n - PASSAGE + 1),) uint64."""
    n_passages = max(0, len(ids) - PASSAGE + 1)
    hashes = np.zeros(n_passages, np.uint64)
    for start in range(PASSAGE):
        hashes = hashes * MULTIPLIER + ids[start:start + n_passages].astype(np.uint64)
    return hashes


def shared_passages(corpus: Corpus, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """For each document of val, by its name: its passages that train has too, and all its passages.

    A passage is PASSAGE consecutive tokens of a document, without its separator. Prints them.
    """
    in_train = np.sort(np.concatenate([passages(ids[1:]) for ids in corpus.documents("train")]))
    print(f"passages of {PASSAGE} tokens of val that train has too:")
    shared: dict[str, tuple[int, int]] = {}
    for name, ids in zip(names, corpus.documents("val"), strict=True):
        hashes = np.sort(passages(ids[1:]))         # so searchsorted goes through in_train in order
        first = np.searchsorted(in_train, hashes, "left")
        after_last = np.searchsorted(in_train, hashes, "right")
        shared[name] = (int((first < after_last).sum()), len(hashes))
        print(f"  {name}: {shared[name][0]:,} of {len(hashes):,}")
    return shared
