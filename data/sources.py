"""Where documents come from: the SOURCE of data/prepare.py, opened as a list of parts.

A part is a file, on this machine or on the Hugging Face hub, and is read one document at a time. For a part
without a split, a hash of each document's text chooses it.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname, urlretrieve

from data.loader import SPLITS
from data.tasks import TASKS, Made
from data.tokenizer import Tokenizer
from runtime.errors import UserError

FILE_VAL_SHARE = 0.1            # of the .txt files of a folder, or of a single file
ROW_VAL_SHARE = 0.01            # of rows and lines, which are many
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
KINDS = ".txt, .jsonl (or .gz, .zst of it) or .parquet"
ROWS = 16                       # rows of a table read at a time
TASK_DOCUMENTS = {"train": range(400, 40_000), "val": range(400)}       # their numbers
VALIDATION = ("validation", "valid", "val", "test")     # splits to validate on, the first that is there
HEADING = re.compile(rb"= (?!= ).*(?<! =) =")
STDLIB_LEFT_OUT = (             # tests, other packages, generated files and tables
    "test/*", "tests/*", "idle_test/*", "lib2to3/*", "site-packages/*", "__pycache__/*", "_sysconfigdata*",
    "config-*/*", "pydoc_data/topics.py", "encodings/cp*.py", "encodings/iso8859*.py", "encodings/koi8*.py",
    "encodings/mac*.py", "html/entities.py")


class Options(NamedTuple):
    """Options of data/prepare.py that change what is read."""

    revision: str | None = None
    text_column: str = "text"
    val_share: float | None = None
    limit_tokens: int | None = None
    length: int | None = None


class Part(NamedTuple):
    name: str
    split: str | None           # of all its documents; None: a hash of each chooses
    read: Callable[[], Iterable[Any]]       # always in the same order


class Source(NamedTuple):
    name: str                   # as meta.json records it
    revision: str | None
    parts: Sequence[Part]       # those of val alone come last
    identity: Any = None        # JSON; changes if the content may have changed
    n_bytes: int | None = None  # about how much text there is, if known


class Document(NamedTuple):
    split: str
    text: bytes | Made | None   # None: a row without text
    name: str                   # for messages
    end: tuple[int, int]        # number of its part, and of the documents read from it by then


def documents(source: Source, val_share: float | None, start: tuple[int, int] = (0, 0),
              stop: int | None = None) -> Iterator[Document]:
    """The documents behind `start`, the `end` of one, up to part `stop`. Raises UserError."""
    def checked(text: Any) -> bytes | Made | None:
        if not isinstance(text, str | bytes | Made | None):
            raise TypeError("the text must be a string; name its column with --text-column")
        return text.encode() if isinstance(text, str) else text

    for p, part in list(enumerate(source.parts))[start[0]:stop]:
        d = 0
        try:
            for d, text in enumerate(map(checked, part.read()), 1):
                if (p, d) > start:
                    is_val = isinstance(text, bytes) and rank(text) < (val_share or ROW_VAL_SHARE)
                    split = part.split or ("val" if is_val else "train")
                    yield Document(split, text, f"{part.name}, document {d}", (p, d))
        except Exception as error:  # each file format and HTTP library has its own exceptions
            raise UserError(f"{part.name}: document {d + 1}: {error} ({type(error).__name__}); "
                            "repair it or get it again") from error


def open_source(source: str, out: Path, tokenizer: Tokenizer | None, options: Options) -> Source:
    """Open SOURCE; the tokenizer is for tasks. Raises UserError if it does not exist."""
    share, length = options.val_share or FILE_VAL_SHARE, options.length
    if options.val_share is not None and not 0 < options.val_share < 1:
        raise UserError(f"--val-share {options.val_share}: must be between 0 and 1, such as 0.1")
    if (options.limit_tokens or 2) < 2 or (length or 16) < 16:
        raise UserError("--limit-tokens must be at least 2, --length at least 16")
    if (options.revision and not source.startswith("hf:")) or (length and source not in TASKS):
        raise UserError(f"source {source}: --revision is for hf:NAME, --length for tasks; omit it")
    if source in TASKS:
        if tokenizer is None:
            raise UserError(f"source {source}: bpe:N is learned from text; give byte, gpt2 or a folder")
        make = partial(TASKS[source].make, tokenizer, length or TASKS[source].length)
        return Source(source, None, [Part(source, split, partial(map, make, TASK_DOCUMENTS[split]))
                                     for split in SPLITS])
    if source == "stdlib":
        return open_stdlib(share)
    if source.startswith("hf:"):
        return open_dataset(source, options.text_column, options.revision)
    if source.startswith(("http://", "https://", "file://")):
        return open_url(source, out.parent / ".downloads", options.text_column, share)
    return open_local(source, options.text_column, share)


def rank(text: bytes) -> float:
    """A number in [0, 1) that depends only on the text: the same on any machine and in any order."""
    return int(hashlib.sha256(text).hexdigest()[:8], 16) / 2**32


def read(url: str, column: str) -> Iterator[Any]:
    """The documents of a file: one of .txt, one per row of .parquet, one per line of .jsonl."""
    import fsspec
    import pyarrow.parquet  # comes with datasets; unlike Python, it has zstd

    with fsspec.open(url) as file:
        if url.lower().endswith(".txt"):
            yield file.read()
        elif url.lower().endswith(".parquet"):
            # with buffer_size, pages are read when they are needed, not a row group at once
            table = pyarrow.parquet.ParquetFile(file, buffer_size=2**20)
            if column not in table.schema_arrow.names:
                raise ValueError(f"no {column!r}: give one of {table.schema_arrow.names} as --text-column")
            for batch in table.iter_batches(ROWS, columns=[column]):
                yield from batch.column(0).to_pylist()
        else:
            kind = {".gz": "gzip", ".zst": "zstd"}.get(Path(url).suffix.lower())
            lines: Any = pyarrow.input_stream(file, compression=kind)
            for row in (json.loads(line) for line in io.BufferedReader(lines) if not line.isspace()):
                if column not in row:
                    raise ValueError(f"no {column!r}: give one of {list(row)} as --text-column")
                yield row[column]


def open_stdlib(val_share: float) -> Source:
    """The standard library of this Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if path.is_file() and not any(
        fnmatch(path.relative_to(root).as_posix(), start + pattern)
        for pattern in STDLIB_LEFT_OUT for start in ("", "*/"))]
    revision = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    return of_files("stdlib", revision, paths, split_by_hash(root, paths, val_share))


def of_files(name: str, revision: str | None, paths: Iterable[Path], parts: Sequence[Part]) -> Source:
    """A source of files on this machine: size and time of change tell whether they are the same."""
    about = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    identity = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    return Source(name, revision, parts, identity, sum(size for _, size, _ in about))


def open_local(source: str, column: str, val_share: float) -> Source:
    """A file, or a folder of files. Raises UserError if it is missing or has no text."""
    root = Path(source)
    if not root.exists():
        raise UserError(f"source {source}: no such file or folder; give stdlib, a task ({', '.join(TASKS)}), "
                        f"hf:NAME, or a {KINDS} file or a folder of them")
    folder = root if root.is_dir() else root.parent
    visible = [p for p in (sorted(root.rglob("*")) if root.is_dir() else [root]) if p.is_file() and not any(
        part.startswith(".") for part in p.relative_to(folder).parts)]
    has_splits = all((root / split).is_dir() for split in SPLITS)
    paths = [p for p in visible if p.name.lower().endswith(SUFFIXES)
             and (not has_splits or p.relative_to(folder).parts[0] in SPLITS)]
    refuse_partial(source, map(str, paths))
    parts: list[Part] = []
    for split in SPLITS if has_splits else (None,):
        inside = [p for p in paths if split in (None, p.relative_to(folder).parts[0])]
        texts = [p for p in inside if p.suffix.lower() == ".txt"]
        tables = [Part(str(p), split, partial(read, str(p), column)) for p in inside if p not in texts]
        found = [text_part(p, split or "train") for p in texts] if split or (len(texts) == 1 and tables) \
            else split_by_hash(folder, texts, val_share)
        parts += [*(p for p in found if p.split == "train"), *tables, *(p for p in found if p.split == "val")]
    for split in SPLITS:
        if not any(part.split in (split, None) for part in parts):
            raise UserError(f"source {source}: no {KINDS} files for {split}; put text there")
    if others := [p for p in visible if p not in paths]:
        print(f"left out of {source}: {len(others)} files, such as {others[0]}: only {KINDS} files"
              f"{' in train/ and val/' if has_splits else ''} are read", flush=True)
    return of_files(root.name, None, paths, parts)


def refuse_partial(source: str, paths: Iterable[str]) -> None:
    """Raise UserError for a folder in which the hub keeps the first gigabytes of a dataset it converted."""
    if found := re.search(r"/(partial-[^/\0]*)/", "\0".join(paths)):
        raise UserError(f"source {source}: its folder {found[1]} holds only a part of the dataset; give "
                        "a copy that has all of it, or rename the folder to train on the part")


def split_by_hash(root: Path, paths: Sequence[Path], val_share: float) -> list[Part]:
    """Split text files by a hash of the path inside root: the same on any machine, and after adding files.

    A single file is cut in two: the first part for train, the rest for val, not inside a UTF-8 character.
    """
    paths = sorted(paths)
    if len(paths) == 1:
        text = paths[0].read_bytes()
        cut = int(len(text) * (1 - val_share))
        while cut < len(text) and text[cut] & 0xC0 == 0x80:
            cut += 1
        return [Part(str(paths[0]), "train", lambda: [text[:cut]]),
                Part(str(paths[0]), "val", lambda: [text[cut:]])]
    places = {path: rank(os.fsencode(path.relative_to(root).as_posix())) for path in paths}
    limit = max([val_share, *sorted(places.values())[:1]])              # at least one is for val
    return [text_part(path, split) for split in SPLITS for path in paths
            if (places[path] < val_share or places[path] == limit) == (split == "val")]


def text_part(path: Path, split: str) -> Part:
    """A file that is one document."""
    return Part(str(path), split, lambda: [path.read_bytes()])


def open_url(url: str, cache: Path, column: str, val_share: float) -> Source:
    """A file at a URL, downloaded once into `cache`; a .zip must hold a single file. Raises UserError."""
    address = urlsplit(url)
    name = f"{address.scheme}://{address.hostname or ''}{address.path}"        # without keys and passwords
    path = Path(url2pathname(address.path))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if address.scheme != "file":
            path = cache / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{path.name}"
            if not path.exists():
                urlretrieve(url, f"{path}.part")                        # noqa: S310
                Path(f"{path}.part").rename(path)
        revision = f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
        if path.suffix.lower() == ".zip":
            with zipfile.ZipFile(path) as archive:
                (inner,) = (entry for entry in archive.namelist() if not entry.endswith("/"))
                is_known = inner.lower().endswith(SUFFIXES)
                path = cache / f"{path.stem}-{Path(inner).name}{'' if is_known else '.txt'}"
                path.write_bytes(archive.read(inner))
    except (OSError, ValueError, HTTPException, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise UserError(f"source {name}: cannot be downloaded, or unpacked into one file "
                        f"({type(error).__name__}: {error}); check the address and the network, or delete "
                        f"{path}") from error
    if not path.name.lower().endswith(SUFFIXES):
        raise UserError(f"source {name}: must end in {', '.join(SUFFIXES)} or .zip; download it yourself")
    return open_local(str(path), column, val_share)._replace(name=name, revision=revision, identity=revision)


def open_dataset(source: str, column: str, revision: str | None) -> Source:
    """Open `hf:NAME[:CONFIG][:SPLIT]`, where NAME is ORG/NAME on the hub or a local folder in its layout.

    Without SPLIT, the splits are train and validation, else test. If there is only one split, or SPLIT names
    one, a hash of each document chooses between train and validation. The commit is resolved first, so that
    all files belong to one commit. No code of a dataset is ever run. Raises UserError.
    """
    import datasets
    from huggingface_hub import HfApi

    name, config, split = [*source.removeprefix("hf:").split(":"), None, None][:3]
    name = str(name)
    is_local = Path(name).is_dir()
    try:
        revision = None if is_local else HfApi().dataset_info(name, revision=revision or "main").sha
        configs = datasets.get_dataset_config_names(name, revision=revision)
        if config not in (None, *configs) and split is None:
            config, split = None, config                                # hf:NAME:SPLIT
        builder = datasets.load_dataset_builder(name, config, revision=revision)
    except Exception as error:  # the client raises the exceptions of three HTTP libraries
        raise UserError(f"source {source}: cannot be opened ({type(error).__name__}: {error}); check the "
                        "name, the configuration and the network; scripts are not run: give a copy of files "
                        "instead") from error
    found = {str(key): list(map(str, urls)) for key, urls in (builder.config.data_files or {}).items()}
    refuse_partial(source, itertools.chain(*found.values()))
    first = split or (next(iter(found)) if len(found) == 1 else "train")
    if first not in found:
        raise UserError(f"source {source}: no configuration or split {first!r}; configurations are "
                        f"{', '.join(configs)}, splits {', '.join(found)}; give hf:NAME:CONFIG:SPLIT")
    val = None if split else next((name for name in VALIDATION if name in found and name != first), None)
    parts: list[Part] = []
    for of_split, key in (("train", first), ("val", val)) if val else ((None, first),):
        reads = [partial(read, url, column) for url in found[key]]
        if Path(name).name == "wikitext":      # its rows are lines
            parts.append(Part(f"{source} [{key}]", of_split, partial(articles, reads)))
        else:
            parts += [Part(url, of_split, reader) for url, reader in zip(found[key], reads, strict=True)]
    if is_local:
        local = f"hf:{Path(name).name}" + source[3 + len(name):]
        return of_files(local, None, map(Path, itertools.chain(*found.values())), parts)
    return Source(source, revision, parts, revision, builder.info.dataset_size)


def articles(reads: Iterable[Callable[[], Iterable[Any]]]) -> Iterator[bytes]:
    """Join rows that are lines into documents, which ` = Title = ` after an empty line opens (WikiText)."""
    lines: list[bytes] = []
    for row in itertools.chain.from_iterable(reader() for reader in reads):
        line = (row or "").encode().rstrip(b"\n") + b"\n"               # an empty line is an empty row
        if lines and lines[-1].isspace() and HEADING.fullmatch(line.strip()) and b"".join(lines).strip():
            yield b"".join(lines)
            lines = []
        lines.append(line)
    yield b"".join(lines)
