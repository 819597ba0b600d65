"""Where documents come from: opening the SOURCE of data/prepare.py, and reading it in little memory.

A source is a list of shards. A shard is a file, or a part of a dataset of the Hugging Face hub (see
data/remote.py). It is read from its start and yields documents, each with its split. For a shard without a
split, a hash of each document's text chooses the split.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from data.integrity import times
from data.loader import SPLITS
from data.tasks import TASKS, Made
from data.tokenizer import Tokenizer
from runtime.errors import UserError, one_line

FILE_VAL_SHARE = 0.1            # of the .txt files of a folder, or of a single file
ROW_VAL_SHARE = 0.01            # of rows and lines, which are many
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
BLOCK = 2**19                   # bytes read at a time
ROWS = 16                       # rows of a table read at a time
SHOWN = 3                       # names of files that are left out
MAX_LINE = 2**25                # bytes of a line of .jsonl: it is held in memory
TASK_DOCUMENTS = {"train": range(400, 40_000), "val": range(400)}       # their numbers
STDLIB_LEFT_OUT = {     # paths inside the library -> why
    "test/*": "tests",
    "tests/*": "tests",
    "idle_test/*": "tests",
    "site-packages/*": "not the standard library",
    "__pycache__/*": "not source",
    "_sysconfigdata*": "generated when this Python was built",
    "config-*/*": "generated when this Python was built",
    "pydoc_data/topics.py": "generated from the documentation",
    "encodings/cp*.py": "generated character tables",
    "encodings/iso8859*.py": "generated character tables",
    "encodings/koi8*.py": "generated character tables",
    "encodings/mac*.py": "generated character tables",
    "html/entities.py": "mostly a table",
    "lib2to3/*": "not in every Python",
}


class Part(NamedTuple):
    """Bytes of a file, from start to end (None: the file's end)."""

    path: Path
    start: int = 0
    end: int | None = None


class Generated(NamedTuple):
    """A generated document of a task, determined by its number."""

    task: str
    length: int
    number: int

    def make(self, tokenizer: Tokenizer) -> Made:
        """Its ids, the separator first, and which of them are answers. Raises UserError."""
        try:
            return TASKS[self.task].make(tokenizer, self.length, self.number)
        except ValueError as error:
            raise UserError(f"source {self.task}: {error}; give a longer --length") from error


class Document(NamedTuple):
    """One document: its split, its place for messages, and its text."""

    split: str
    where: str
    text: bytes | Part | Generated

    def blocks(self, start: int) -> Iterator[bytes]:
        """The bytes from `start` on, BLOCK at a time."""
        if isinstance(self.text, bytes):
            yield from (self.text[i:i + BLOCK] for i in range(start, len(self.text), BLOCK))
        elif isinstance(self.text, Part):
            place, end = self.text.start + start, self.text.end
            with self.text.path.open("rb") as file:
                file.seek(place)
                while block := file.read(BLOCK if end is None else min(BLOCK, end - place)):
                    place += len(block)
                    yield block


class Shard(Protocol):
    """A part of a source that is read from its start."""

    size: float             # shares of the source's size, for progress
    seen: float             # how much of `size` has been read

    @property
    def split(self) -> str | None:
        """The split of all its documents; None: a hash of each document chooses."""
        ...

    def documents(self) -> Iterator[Document]:
        """All documents, always in the same order."""
        ...


class Source(NamedTuple):
    """An opened SOURCE."""

    name: str                   # as meta.json records it
    revision: str | None
    shards: Sequence[Shard]
    identity: Any               # JSON; changes if the content may have changed
    n_bytes: int | None         # about how much text there is, if known
    files: Sequence[Path] = ()  # on this machine, of which `identity` is the checksum


class Rows(NamedTuple):
    """How the rows of tables, or the lines of .jsonl, become documents."""

    column: str = "text"
    val_share: float = ROW_VAL_SHARE

    def document(self, split: str | None, where: str, value: Any) -> Document:
        """The document of a row: a string, UTF-8 bytes, or null for an empty one. Raises UserError."""
        if isinstance(value, str):
            try:
                value = value.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{where}: {self.column!r} has half of a surrogate pair at character "
                                f"{error.start}; repair or remove it") from error
        if not isinstance(value, bytes | None):
            raise UserError(f"{where}: {self.column!r} must be a string, got {type(value).__name__}; name "
                            "the column of the text with --text-column")
        text = value or b""
        return Document(split or ("val" if rank(text) < self.val_share else "train"), where, text)

    def values(self, where: str, column: Any) -> list[bytes | None]:
        """The texts of an Arrow column. Raises UserError if it is not text."""
        import pyarrow
        if pyarrow.types.is_null(column.type):
            return [None] * len(column)
        try:
            return column.cast(pyarrow.large_binary()).to_pylist()
        except pyarrow.ArrowNotImplementedError as error:
            raise UserError(f"{where}: {self.column!r} must be text, but is {column.type}; name the column "
                            "of the text with --text-column") from error

    def absent(self, where: str, names: Iterable[str]) -> UserError:
        """The error for a missing column."""
        return UserError(f"{where}: no column {self.column!r}; name the column of the text with "
                         f"--text-column: {', '.join(map(str, names)) or 'none'}")


def rank(text: bytes) -> float:
    """A number in [0, 1) that depends only on the text: the same on any machine and in any order."""
    return int(hashlib.sha256(text).hexdigest()[:8], 16) / 2**32


# -----------------------------------------------------------------------------------------------------------
# Shards


class TextFile:
    """A file, or a part of one, that is one document."""

    def __init__(self, part: Part, split: str) -> None:
        self.part, self.split, self.seen = part, split, 0.0
        size = part.path.stat().st_size
        self.size: float = (size if part.end is None else part.end) - part.start

    def documents(self) -> Iterator[Document]:
        yield Document(self.split, str(self.part.path), self.part)


class JsonLines:
    """A .jsonl, .jsonl.gz or .jsonl.zst file: an object per line, with the text under one key."""

    def __init__(self, path: Path, split: str | None, rows: Rows) -> None:
        self.path, self.split, self.rows = path, split, rows
        self.size, self.seen = float(path.stat().st_size), 0.0

    def documents(self) -> Iterator[Document]:
        with self.path.open("rb") as stored:
            lines, number = self._unpacked(stored), 0
            while line := self._line(lines, number):
                number += 1
                self.seen = stored.tell()
                if not line.isspace():
                    yield self.rows.document(self.split, f"{self.path}:{number}", self._value(line, number))

    def _unpacked(self, stored: IO[bytes]) -> Any:
        if self.path.suffix.lower() == ".gz":
            return gzip.GzipFile(fileobj=stored)
        if self.path.suffix.lower() == ".zst":
            import io

            import pyarrow  # comes with datasets; Python has zstd from 3.14 on
            return io.BufferedReader(pyarrow.input_stream(stored, compression="zstd"))  # type: ignore[arg-type]
        return stored

    def _line(self, lines: Any, number: int) -> bytes:
        try:
            line = lines.readline(MAX_LINE + 1)
        except (EOFError, OSError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno:
                raise                                                   # a fault of the disk, not of the file
            raise UserError(f"{self.path}:{number + 1}: damaged or cut short ({error}); get the file "
                            "again") from error
        if len(line) > MAX_LINE:
            raise UserError(f"{self.path}:{number + 1}: a line of more than {MAX_LINE:,} bytes; put its text "
                            "into a separate .txt file")
        return line

    def _value(self, line: bytes, number: int) -> Any:
        where = f"{self.path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error}); repair or remove the line") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: must be a JSON object, got {type(row).__name__}; repair or remove "
                            "the line")
        if self.rows.column not in row:
            raise self.rows.absent(where, row)
        return row[self.rows.column]


class Parquet:
    """A .parquet file: a document per row."""

    def __init__(self, path: Path, split: str | None, rows: Rows) -> None:
        self.path, self.split, self.rows = path, split, rows
        self.size, self.seen = float(path.stat().st_size), 0.0

    def documents(self) -> Iterator[Document]:
        import pyarrow
        import pyarrow.parquet

        number = 0
        try:
            # with buffer_size, pages are read when they are needed, not a row group at once
            file = pyarrow.parquet.ParquetFile(self.path, buffer_size=2**20)
            if self.rows.column not in file.schema_arrow.names:
                raise self.rows.absent(str(self.path), file.schema_arrow.names)
            for batch in file.iter_batches(ROWS, columns=[self.rows.column]):
                for value in self.rows.values(str(self.path), batch.column(0)):
                    number += 1
                    self.seen = self.size * number / file.metadata.num_rows
                    yield self.rows.document(self.split, f"{self.path}: row {number}", value)
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise                                                   # a fault of the disk, not of the file
            reason = str(error).splitlines()[0]
            raise UserError(f"{self.path}: damaged, read up to row {number} ({reason}); get "
                            "it again") from error


class GeneratedDocuments:
    """The documents of a task in a split."""

    def __init__(self, task: str, length: int, split: str) -> None:
        self.task, self.length, self.split, self.seen = task, length, split, 0.0
        self.size = float(len(TASK_DOCUMENTS[split]))

    def documents(self) -> Iterator[Document]:
        for done, number in enumerate(TASK_DOCUMENTS[self.split], 1):
            self.seen = done
            made = Generated(self.task, self.length, number)
            yield Document(self.split, f"{self.task} {number}", made)


# -----------------------------------------------------------------------------------------------------------
# Sources on this machine


def open_task(name: str, length: int | None) -> Source:
    """The documents of a task."""
    length = TASKS[name].length if length is None else length
    return Source(name, None, [GeneratedDocuments(name, length, split) for split in SPLITS], None, None)


def open_stdlib(val_share: float | None) -> Source:
    """The standard library of this Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in root.rglob("*.py") if not why_left_out(p.relative_to(root).as_posix())]
    shards = split_by_hash(root, paths, val_share)
    revision = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    return Source("stdlib", revision, shards, identity_of(paths), total(shards), paths)


def why_left_out(path: str) -> str | None:
    """Why a file of the standard library is left out of the corpus; None if it is not."""
    return next((why for pattern, why in STDLIB_LEFT_OUT.items()
                 if fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}")), None)


def open_local(source: str, rows: Rows, val_share: float | None) -> Source:
    """A file, or a folder of files. Raises UserError if it is missing or has no text."""
    root = Path(source)
    kinds = ".txt, .jsonl (or .gz, .zst of it) or .parquet"
    if not root.is_dir():
        if not (root.is_file() and is_text(root)):
            problem = f"is not a {kinds} file" if root.exists() else "no such file or folder"
            raise UserError(f"source {source}: {problem}; give stdlib, a task ({', '.join(TASKS)}), "
                            f"hf:NAME, or a {kinds} file or a folder of them")
        paths, shards = [root], shards_of(root.parent, [root], None, rows, val_share)
    elif all((root / split).is_dir() for split in SPLITS):
        found = {split: texts_in(root / split) for split in SPLITS}
        paths = [path for split in SPLITS for path in found[split]]
        shards = [shard for split in SPLITS
                  for shard in shards_of(root, found[split], split, rows, val_share)]
    else:
        paths = texts_in(root)
        shards = shards_of(root, paths, None, rows, val_share)
    for split in SPLITS:
        if not any(shard.split in (split, None) for shard in shards):
            raise UserError(f"source {source}: no {kinds} files for {split}; put text there")
    others = [str(path.relative_to(root)) for path in sorted(set(visible_files(root)) - set(paths))]
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        where = " in train/ and val/" if all((root / split).is_dir() for split in SPLITS) else ""
        print(f"left out of {source}: {len(others)} files, since only {kinds} files{where} are read: "
              f"{', '.join(map(one_line, others[:SHOWN]))}{more}", flush=True)
    return Source(root.name, None, shards, identity_of(paths), total(shards), paths)


def is_text(path: Path) -> bool:
    """Whether this is a file of a supported kind."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def texts_in(root: Path) -> list[Path]:
    """The files of supported kinds in a folder and its subfolders, but not hidden ones (.git)."""
    return sorted(path for path in visible_files(root) if is_text(path))


def visible_files(root: Path) -> Iterator[Path]:
    """All files in a folder and its subfolders, but not hidden ones (.git); none if it is no folder."""
    return (path for path in root.rglob("*") if path.is_file() and not any(
        part.startswith(".") for part in path.relative_to(root).parts))


def shards_of(root: Path, paths: Sequence[Path], split: str | None, rows: Rows,
              val_share: float | None) -> list[Any]:
    """Shards of files, in an order that depends on names only: train, rows of either split, val."""
    kinds = {path: path.suffix.lower() for path in paths}
    texts = [path for path in paths if kinds[path] == ".txt"]
    tables = [Parquet(path, split, rows) if kinds[path] == ".parquet" else JsonLines(path, split, rows)
              for path in paths if kinds[path] != ".txt"]
    if split:
        return [*(TextFile(Part(path), split) for path in texts), *tables]
    if len(texts) == 1 and tables:
        return [TextFile(Part(texts[0]), "train"), *tables]             # rows are split by hash
    found = split_by_hash(root, texts, val_share)
    return [*(s for s in found if s.split == "train"), *tables, *(s for s in found if s.split == "val")]


def split_by_hash(root: Path, paths: Sequence[Path], val_share: float | None) -> list[TextFile]:
    """Split files by a hash of the path inside root: the same on any machine, and after adding files."""
    share = FILE_VAL_SHARE if val_share is None else val_share

    def place(path: Path) -> float:
        return rank(os.fsencode(path.relative_to(root).as_posix()))

    paths = sorted(p for p in paths if p.is_file())
    if len(paths) == 1:
        return split_inside(paths[0], share)
    val = {p for p in paths if place(p) < share} or {min(paths, key=place)} if paths else set()
    return [*(TextFile(Part(p), "train") for p in paths if p not in val),
            *(TextFile(Part(p), "val") for p in sorted(val))]


def split_inside(path: Path, val_share: float) -> list[TextFile]:
    """The first part of a file for train, the rest for val; the cut is not inside a UTF-8 character."""
    cut = int(path.stat().st_size * (1 - val_share))
    with path.open("rb") as file:
        file.seek(cut)
        for byte in file.read(3):
            if byte & 0xC0 != 0x80:
                break
            cut += 1
    return [TextFile(Part(path, 0, cut), "train"), TextFile(Part(path, cut), "val")]


def identity_of(paths: Iterable[Path]) -> str:
    """A checksum that changes if a file is added, removed or changed, even if its time is set back."""
    about = [(str(path.resolve()), times(path.stat())) for path in paths]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def total(shards: Iterable[Shard]) -> int:
    """Bytes of all shards, as they are stored."""
    return int(sum(shard.size for shard in shards))
