"""Remote sources: datasets of the Hugging Face hub, and files at a URL.

`hf:NAME` streams a dataset of the hub, or a local folder in its layout (README.md with `configs:`, or files
named after their split), through the `datasets` package. No code of a dataset is ever run. The commit is
resolved first, so that all files belong to one commit.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import http.client
import os
import re
import shutil
import socket
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from data.sources import BLOCK, ROWS, SUFFIXES, Document, Rows, Source, identity_of, open_local
from runtime.errors import UserError, describe_exception
from runtime.files import name_in_errors
from runtime.lock import lock

LINE_BY_LINE = ("Salesforce/wikitext", "wikitext")      # datasets whose rows are lines
VALIDATION = ("validation", "valid", "val", "test")     # splits to validate on, the first that is there
HEADING = re.compile(rb"= (?!= ).*(?<! =) =")
TIMEOUT_S = 60
MAX_EXPANSION = 100             # of a .zip: text is about 3 times as large as its archive ...
EXPANDS_FREELY = 2**30          # ... but up to these bytes any is fine


class DatasetPart:
    """Part `index` of n_parts of a streamed dataset: a document per row, or per article of several rows."""

    def __init__(self, name: str, dataset: Any, index: int, n_parts: int, n_rows: float | None,
                 split: str | None, rows: Rows, joins: bool) -> None:
        self.name, self.dataset, self.index, self.n_parts = name, dataset, index, n_parts
        self.n_rows, self.split, self.rows, self.joins = n_rows, split, rows, joins
        self.size, self.seen = 1.0, 0.0

    def documents(self) -> Iterator[Document]:
        values = self._values()
        for where, value in articles(values) if self.joins else values:
            yield self.rows.document(self.split, where, value)
        self.seen = self.size

    def _values(self) -> Iterator[tuple[str, Any]]:
        part = self.dataset.shard(self.n_parts, self.index).with_format("arrow") if self.n_parts > 1 \
            else self.dataset.with_format("arrow")
        name = self.name if self.n_parts == 1 else f"{self.name}, part {self.index + 1} of {self.n_parts}"
        number = 0
        try:
            for table in part.iter(ROWS):
                if self.rows.column not in table.column_names:
                    raise self.rows.absent(name, table.column_names)
                for value in self.rows.values(name, table[self.rows.column]):
                    number += 1
                    if self.n_rows:
                        self.seen = min(1.0, number / self.n_rows)
                    yield f"{name}: row {number}", value
        except UserError:
            raise
        except Exception as error:  # each file format and HTTP library has its own exceptions
            raise UserError(f"{name}: cannot be read after row {number} ({describe_exception(error)}); "
                            "if the network failed, the same command resumes from there") from error


def articles(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Join rows that are lines into documents, which ` = Title = ` after an empty line opens (WikiText)."""
    opened, has_text = "", False
    lines: list[bytes] = []
    for where, value in rows:
        line = (value or b"").rstrip(b"\n") + b"\n"                     # an empty line is an empty row
        if has_text and lines[-1].isspace() and HEADING.fullmatch(line.strip()):
            yield opened, b"".join(lines)
            opened, lines, has_text = "", [], False
        opened = opened or where
        lines.append(line)
        has_text = has_text or not line.isspace()
    if lines:
        yield opened, b"".join(lines)


def open_dataset(source: str, rows: Rows, revision: str | None, joins: bool) -> Source:
    """Open `hf:NAME[:CONFIG][:SPLIT]`, where NAME is ORG/NAME on the hub or a local folder.

    Without SPLIT, the splits are train and validation, else test. If there is only one split, or SPLIT names
    one, a hash of each document chooses between train and validation. Raises UserError.
    """
    name, *rest = source.removeprefix("hf:").split(":")
    if not name or len(rest) > 2:
        raise UserError(f"source {source}: must be hf:NAME, hf:NAME:CONFIG, or hf:NAME:CONFIG:SPLIT")
    config, split = (*(part or None for part in rest), None, None)[:2]
    is_local = Path(name).is_dir()
    if not is_local and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise UserError(f"source {source}: neither a folder nor the name of a dataset, as in hf:ORG/NAME")
    if is_local and revision:
        raise UserError(f"--revision {revision}: {name} is a local folder without revisions; leave it out")
    joins = joins or name in LINE_BY_LINE
    found, split, revision = _load(source, name, config, split, None if is_local else (revision or "main"),
                                   joins)
    files = [] if revision else sorted(p for p in Path(name).rglob("*") if p.is_file())
    shards = [part for of_split, key in choose_splits(source, found, split).items()
              for part in _parts(f"{source} [{key}]", found[key], of_split, rows, joins)]
    sizes = [_about(found[key], "num_bytes") for key in found]
    return Source(f"hf:{Path(name).name}" + source[3 + len(name):] if is_local else source, revision, shards,
                  revision or identity_of(files), None if None in sizes else int(sum(filter(None, sizes))),
                  files)


def _load(source: str, name: str, config: str | None, split: str | None,
          revision: str | None, joins: bool) -> tuple[dict[str, Any], str | None, str | None]:
    """Split -> streamed dataset; the split that SOURCE names, if any; the commit, None for a folder."""
    try:
        import datasets
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UserError(f"source {source}: needs the package datasets: pip install datasets") from error
    try:
        if revision:
            revision = HfApi().dataset_info(name, revision=revision).sha
        configs = datasets.get_dataset_config_names(name, revision=revision)
        if config not in (None, *configs) and split is None:
            config, split = None, config                                # hf:NAME:SPLIT
        builder = datasets.load_dataset_builder(name, config, revision=revision)
        # read ROWS rows at a time: the default is a row group, which may be gigabytes
        kind = type(builder.config).__name__        # the builder's class name has the dataset's name in it
        options: dict[str, Any] = {"batch_size": ROWS} if kind == "ParquetConfig" else {}
        if kind == "TextConfig" and not joins and builder.config.sample_by == "line":
            options = {"sample_by": "document"}     # a row would be a line without its line feed
        found = datasets.load_dataset(name, config, revision=revision, streaming=True, **options)
    except Exception as error:  # the client raises the exceptions of three HTTP libraries
        hint = "check the name, the configuration and the network"
        if "scripts are no longer supported" in str(error):
            hint = "give --revision refs/convert/parquet, where the hub may keep a copy as files"
        raise UserError(f"source {source}: cannot be opened ({describe_exception(error)}); {hint}") from error
    if split not in (None, *found):
        raise UserError(f"source {source}: no configuration or split {split!r}; configurations are "
                        f"{', '.join(configs)}, splits {', '.join(found)}")
    return found, split, revision


def choose_splits(source: str, found: dict[str, Any], split: str | None) -> dict[str | None, str]:
    """Split of the corpus (None: a hash chooses) -> split of the dataset."""
    if split or len(found) == 1:
        return {None: split or next(iter(found))}
    if "train" not in found:
        raise UserError(f"source {source}: has no split train; name one of {', '.join(found)}, as in "
                        "hf:NAME:CONFIG:SPLIT")
    val = next((key for key in VALIDATION if key in found), None)
    return {"train": "train", "val": val} if val else {None: "train"}


def _parts(name: str, dataset: Any, split: str | None, rows: Rows, joins: bool) -> Iterator[DatasetPart]:
    """One part per file, so that resuming skips whole files; a single part if rows are joined."""
    if dataset.column_names and rows.column not in dataset.column_names:
        raise rows.absent(name, dataset.column_names)
    n_parts = 1 if joins else dataset.num_shards
    n_rows = _about(dataset, "num_examples")
    if dataset.column_names:
        dataset = dataset.select_columns([rows.column])
    for index in range(n_parts):
        yield DatasetPart(name, dataset, index, n_parts, n_rows and n_rows / n_parts, split, rows, joins)


def _about(dataset: Any, what: str) -> int | None:
    """A number from the dataset's card about this split; None if it is missing."""
    about = (dataset.info.splits or {}).get(str(dataset.split))
    return getattr(about, what, None) or None


# -----------------------------------------------------------------------------------------------------------
# URLs


def open_url(url: str, cache: Path, rows: Rows, val_share: float | None) -> Source:
    """A file at a URL, downloaded once into `cache`; a .zip must hold a single file. Raises UserError."""
    address = urlsplit(url)
    name = f"{address.scheme}://{address.hostname or ''}{address.path}"        # without keys and passwords
    cache.mkdir(parents=True, exist_ok=True)
    with lock(cache / f".{cached_name(url)}.lock", waits=True):         # two commands may want the same file
        path = fetch(url, name, cache)
        revision = f"sha256 {sha256_of(path)}"
        if path.suffix.lower() == ".zip":
            path = unpacked(path, name)
    if not path.name.lower().endswith(SUFFIXES):
        raise UserError(f"source {name}: must end in {', '.join(SUFFIXES)} or .zip; download it yourself, "
                        "and give the file")
    return open_local(str(path), rows, val_share)._replace(name=name, revision=revision, identity=revision,
                                                            files=())


def cached_name(url: str) -> str:
    """The name of a URL's file in the cache."""
    return f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{Path(urlsplit(url).path).name}"


def fetch(url: str, name: str, cache: Path) -> Path:
    """The path of a URL's file in the cache, after downloading it if it is not there."""
    path = cache / cached_name(url)
    if path.exists():
        print(f"{name} was downloaded before: {path}")
        return path
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310
            expected = response.headers.get("Content-Length")
            store(response, path, int(expected) if expected else None)
    except (OSError, ValueError, http.client.HTTPException) as error:   # URLError is an OSError
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"source {name}: cannot be downloaded ({describe_exception(error)}); "
                        "check the address and the network") from error
    return path


def unpacked(path: Path, name: str) -> Path:
    """The only file of an archive, unpacked beside it; a name without a known ending becomes .txt."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = [entry for entry in archive.infolist() if not entry.is_dir()]
            if len(files) != 1:
                raise UserError(f"source {name}: must hold one file, but has {len(files)}; unpack it and "
                                "give the folder")
            size, free = files[0].file_size, shutil.disk_usage(path.parent).free     # no more is ever read
            if size > free or size > max(MAX_EXPANSION * files[0].compress_size, EXPANDS_FREELY):
                raise UserError(f"source {name}: {path} has {path.stat().st_size:,} bytes and claims to "
                                f"unpack to {size:,}; {free:,} are free. Unpack it yourself if you trust it, "
                                "and give the file")
            inner = Path(files[0].filename).name
            suffix = "" if inner.lower().endswith(SUFFIXES) else ".txt"
            text = path.with_name(f"{path.stem}-{inner}{suffix}")
            if not text.exists():
                with archive.open(files[0]) as source:
                    store(source, text, size)
    except UserError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:   # or a password
        raise UserError(f"source {name}: {path} is damaged or encrypted ({describe_exception(error)}); "
                        "delete it to download it again") from error
    return text


def store(source: IO[bytes], path: Path, expected: int | None) -> None:
    """Write what is read to a file, which appears at once when it is whole.

    Raises ValueError if it does not have the expected number of bytes, or is not what was read: on a file
    system without locks another process may write it too, although each under a name of its own.
    """
    for stale in path.parent.glob(f"{glob.escape(path.name)}.*.part"):  # of a killed process
        stale.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.part")
    digest, size = hashlib.sha256(), 0
    try:
        with name_in_errors(temporary), temporary.open("wb") as file:
            while block := source.read(BLOCK):
                file.write(block)
                digest.update(block)
                size += len(block)
            file.flush()
            os.fsync(file.fileno())
        if expected not in (None, size):
            raise ValueError(f"got {size:,} of {expected:,} bytes")
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    if path.stat().st_size != size or sha256_of(path) != digest.hexdigest():
        raise ValueError(f"{path} is not what was received; delete it")


def sha256_of(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
