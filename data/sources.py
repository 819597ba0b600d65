"""Where documents come from: the SOURCE of data/prepare.py, opened as a list of readers.

A reader gives the documents of a file, on this machine or on the Hugging Face hub, one at a time. For a
reader without a split, a hash of each document's text chooses it.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import io
import itertools
import json
import os
import platform
import re
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import translate
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname, urlretrieve

from base.errors import UserError
from base.files import sha256_of
from data.loader import SPLITS
from data.sdists import KINDS as SDIST_KINDS
from data.sdists import read_texts
from data.tasks import TASKS, TaskDocument
from data.tokenizer import Tokenizer

FILE_VAL_SHARE = 0.1            # of the .txt files of a folder, or of a single file
ROW_VAL_SHARE = 0.01            # of rows and lines, which are many
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
JSON_LINES = re.compile(r".*\.(jsonl?|ndjson)(\.gz|\.zst)?", re.IGNORECASE)     # .json too on the hub
KINDS = ".txt, .jsonl (or .gz, .zst of it) or .parquet"
ROWS_AT_ONCE = 16               # of a table
TASK_DOCUMENTS = {"train": range(400, 40_000), "val": range(400)}       # their numbers
VALIDATION = ("validation", "valid", "val", "test")     # splits to validate on, the first that is there
HEADING = re.compile(rb"= (?!= ).*(?<! =) =")
STDLIB_LEFT_OUT = (             # tests, other packages, generated files and tables
    "test/*", "tests/*", "idle_test/*", "lib2to3/*", "site-packages/*", "__pycache__/*", "_sysconfigdata*",
    "config-*/*", "pydoc_data/topics.py", "encodings/cp*.py", "encodings/iso8859*.py", "encodings/koi8*.py",
    "encodings/mac*.py", "html/entities.py")
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PACKAGES_LEFT_OUT = re.compile(     # tests, copies of other packages (typer/_click stays), what builds change
    r"(.*/)?(tests?|testing|_?vendor(ed)?|_distutils|third_party|extern(als?)?)/|.*(version|__config__)[^/]*\.py")
PACKAGE_BYTES = range(60_000, 400_001)  # long enough for many windows; no package outweighs the others
PACKAGES_VAL_SHARE = 0.3                # by package, which leaves 6 M tokens to train on


class SourceOptions(NamedTuple):
    """Options of data/prepare.py that change what is read."""

    revision: str | None = None
    text_column: str = "text"
    val_share: float | None = None
    limit_tokens: int | None = None
    length: int | None = None


class Reader(NamedTuple):
    """Reads the documents of a file, or generates them: always the same, in the same order."""

    name: str
    split: str | None           # of all its documents; None: a hash of each chooses
    read: Callable[[], Iterable[Any]]


class Source(NamedTuple):
    """A SOURCE of data/prepare.py, opened."""

    name: str                   # as meta.json records it
    revision: str | None
    readers: list[Reader]
    n_bytes: int = 0            # about how much text there is, as far as known


class Document(NamedTuple):
    """A document, or a row without text (None)."""

    split: str
    text: bytes | TaskDocument | None
    name: str                   # for messages


def documents(readers: Iterable[Reader], val_share: float | None) -> Iterator[Document]:
    """The documents of readers, in their order. Raises UserError."""
    for reader in readers:
        number = 1
        try:
            for text in reader.read():
                if isinstance(text, str):
                    text = text.encode()
                if not isinstance(text, bytes | TaskDocument | None):
                    raise TypeError("the text must be a string; name its column with --text-column")
                split = reader.split
                if split is None:
                    is_val = isinstance(text, bytes) and rank(text) < (val_share or ROW_VAL_SHARE)
                    split = "val" if is_val else "train"
                yield Document(split, text, f"{reader.name}, document {number}")
                number += 1
        except Exception as error:  # each file format and HTTP library has its own exceptions
            raise UserError(f"{reader.name}: document {number}: {error} ({type(error).__name__}); "
                            "repair it or get it again") from error


def open_source(source: str, cache: Path, tokenizer: Tokenizer | None, options: SourceOptions) -> Source:
    """Open SOURCE, or several joined by " + ". Downloads go to `cache`; tasks need the tokenizer.

    Raises UserError if it does not exist.
    """
    share = FILE_VAL_SHARE if options.val_share is None else options.val_share
    if not 0 < share < 1:
        raise UserError(f"--val-share {share}: must be between 0 and 1, such as 0.1")
    if " + " in source:
        names = source.split(" + ")
        tasks = TASKS.keys() & names
        if tasks:
            raise UserError(f"source {min(tasks)}: has windows and a mask of its own; prepare it alone, and "
                            "mix corpora with data.mixture")
        opened = [open_source(name, cache, tokenizer, options) for name in names]
        revisions = [one.revision for one in opened if one.revision]
        readers = [reader for one in opened for reader in one.readers]
        return Source(" + ".join(one.name for one in opened), ", ".join(revisions) or None, readers,
                      sum(one.n_bytes for one in opened))
    if options.revision and not source.startswith("hf:"):
        raise UserError(f"source {source}: --revision is for hf:NAME; omit it")
    if source in TASKS:
        return open_task(source, tokenizer, options.length)
    if options.length:
        raise UserError(f"source {source}: --length is for tasks; omit it")
    if source == "stdlib":
        return open_stdlib(share)
    if source == "packages":
        return open_packages(options.val_share or PACKAGES_VAL_SHARE)
    if source.startswith("sdists:"):
        return open_sdists(source, cache)
    if source.startswith("hf:"):
        return open_dataset(source, options.text_column, options.revision)
    if source.startswith(("http://", "https://", "file://")):
        return open_url(source, cache, options.text_column, share)
    return open_local(source, options.text_column, share)


def open_task(source: str, tokenizer: Tokenizer | None, length: int | None) -> Source:
    """Generated documents. Raises UserError without a tokenizer."""
    if tokenizer is None:
        raise UserError(f"source {source}: bpe:N is learned from text; give byte, gpt2 or a folder")
    task = TASKS[source]
    make = partial(task.make, tokenizer, length or task.length)
    return Source(source, None, [Reader(source, split, partial(map, make, TASK_DOCUMENTS[split]))
                                 for split in SPLITS])


def open_stdlib(val_share: float) -> Source:
    """The source text of this Python's standard library, a document per file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    patterns = [translate(start + pattern) for start in ("", "*/") for pattern in STDLIB_LEFT_OUT]
    left_out = re.compile("|".join(patterns))
    paths = [path for path in root.rglob("*.py")
             if path.is_file() and not left_out.match(path.relative_to(root).as_posix())]
    return Source("stdlib", f"Python {platform.python_version()}", split_by_hash(root, paths, val_share),
                  size_of(paths))


def open_packages(val_share: float) -> Source:
    """A document per package of constraints.txt: files in the order of a hash, up to 400 kB, 60 kB at least.

    Packages whose names start with the same word are on the same side of the split. Raises UserError.
    """
    readers: list[Reader] = []
    n_bytes = 0
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", CONSTRAINTS.read_text(), re.MULTILINE):
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            package = None
        if package is None or package.version.split("+")[0] != version:
            raise UserError(f"source packages: {name} {version} of constraints.txt is not installed; run "
                            ".venv/bin/python -m pip install -c constraints.txt -e '.[test]'")
        files = [str(file) for file in package.files or [] if file.suffix == ".py"
                 and ".." not in file.parts and not PACKAGES_LEFT_OUT.match(str(file))]
        text = b""
        for file in sorted(files, key=lambda file: rank(file.encode())):
            more = Path(str(package.locate_file(file))).read_bytes()
            if len(text) + len(more) < PACKAGE_BYTES.stop:
                text += more
        if len(text) in PACKAGE_BYTES:
            first_word = re.split(r"[-_.\d]", name)[0]
            split = "val" if rank(first_word.encode()) < val_share else "train"
            readers.append(Reader(name, split, partial(list, [text])))
            n_bytes += len(text)
    return Source("packages", f"constraints.txt sha256 {sha256_of(CONSTRAINTS)}", readers, n_bytes)


def open_sdists(source: str, cache: Path) -> Source:
    """Open `sdists:LIST[:docs|:code]`: for each project of a list, a document of docs and one of code.

    A kind chooses among the same documents, whose code is cut as if both were read. Raises UserError.
    """
    path, _, kind = source.removeprefix("sdists:").rpartition(":")
    if kind not in SDIST_KINDS:
        path, kind = source.removeprefix("sdists:"), ""
    texts = [text for text in read_texts(Path(path), cache) if kind in ("", text.kind)]
    readers = [Reader(f"{text.project} {text.kind}", text.split, partial(list, [text.content]))
               for text in texts]
    return Source(source, f"list sha256 {sha256_of(Path(path))}", readers,
                  sum(len(text.content) for text in texts))


def size_of(paths: Iterable[Path]) -> int:
    """Bytes of files."""
    return sum(path.stat().st_size for path in paths)


def rank(text: bytes) -> float:
    """A number in [0, 1) that depends only on the text: the same on any machine and in any order."""
    return int(hashlib.sha256(text).hexdigest()[:8], 16) / 2**32


def read_file(url: str, column: str = "text") -> Iterator[Any]:
    """The documents of a file: one per row of .parquet, one per line of .jsonl, else one."""
    import fsspec
    import pyarrow.parquet  # comes with datasets; unlike Python, it has zstd

    with fsspec.open(url) as file:
        if url.lower().endswith(".parquet"):
            # with buffer_size, pages are read when they are needed, not a row group at once
            table = pyarrow.parquet.ParquetFile(file, buffer_size=2**20)
            if column not in table.schema_arrow.names:
                raise ValueError(f"no {column!r}: give one of {table.schema_arrow.names} as --text-column")
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=[column]):
                yield from batch.column(0).to_pylist()
        elif JSON_LINES.fullmatch(url):
            compression = {".gz": "gzip", ".zst": "zstd"}.get(Path(url).suffix.lower())
            lines: Any = pyarrow.input_stream(file, compression=compression)
            for line in io.BufferedReader(lines):
                if line.isspace():
                    continue
                row = json.loads(line)
                if column not in row:
                    raise ValueError(f"no {column!r}: give one of {list(row)} as --text-column")
                yield row[column]
        else:
            yield file.read()


def readers_of(urls: Iterable[str], split: str | None, column: str) -> list[Reader]:
    """A reader for each file. Raises UserError for the hub's own conversion of the start of a dataset."""
    readers: list[Reader] = []
    for url in urls:
        if "/partial-" in url:
            raise UserError(f"source {url}: its folder partial-... holds only a part of the dataset; give a "
                            "copy that has all of it, or rename the folder to train on the part")
        readers.append(Reader(url, split, partial(read_file, url, column)))
    return readers


def open_local(source: str, column: str, val_share: float) -> Source:
    """A file, or a folder of files. Raises UserError if it is missing or has no text."""
    root = Path(source)
    if not root.exists():
        raise UserError(f"source {source}: no such file or folder; give stdlib, a task ({', '.join(TASKS)}), "
                        f"hf:NAME, or a {KINDS} file or a folder of them")
    folder = root
    names = [source]
    if root.is_dir():
        # unlike rglob, it follows links, and leaves out hidden files
        names = glob.glob(f"{glob.escape(source)}/**", recursive=True)
    else:
        folder = root.parent
    paths = [path for path in sorted(map(Path, names))
             if path.is_file() and path.name.lower().endswith(SUFFIXES)]
    # folders called like the splits are the splits; files beside them are left out
    readers: list[Reader] = []
    if all((folder / split).is_dir() for split in SPLITS):
        of_split = {split: [path for path in paths if path.relative_to(folder).parts[0] == split]
                    for split in SPLITS}
        for split in SPLITS:
            readers += readers_of(map(str, of_split[split]), split, column)
        return Source(root.name, None, readers, size_of(itertools.chain(*of_split.values())))
    # otherwise a hash chooses: of the path of a text, of each row of a table
    texts = [path for path in paths if path.name.lower().endswith(".txt")]
    tables = [str(path) for path in paths if path not in texts]
    readers = split_by_hash(folder, texts, val_share) + readers_of(tables, None, column)
    return Source(root.name, None, readers, size_of(paths))


def split_by_hash(root: Path, paths: Sequence[Path], val_share: float) -> list[Reader]:
    """Split text files by a hash of the path inside root: the same on any machine, and after adding files.

    A single file is cut in two: the first part for train, the rest for val, not inside a UTF-8 character.
    """
    if len(paths) == 1:
        text = paths[0].read_bytes()
        cut = int(len(text) * (1 - val_share))
        while cut < len(text) and text[cut] & 0xC0 == 0x80:
            cut += 1
        return [Reader(str(paths[0]), "train", partial(list, [text[:cut]])),
                Reader(str(paths[0]), "val", partial(list, [text[cut:]]))]
    ranks = {path: rank(os.fsencode(path.relative_to(root).as_posix())) for path in sorted(paths)}
    limit = max(val_share, min(ranks.values(), default=0) + 2**-33)     # at least one is for val
    readers: list[Reader] = []
    for split in SPLITS:
        names = [str(path) for path in ranks if (ranks[path] < limit) == (split == "val")]
        readers += readers_of(names, split, "")
    return readers


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
        revision = f"sha256 {sha256_of(path)}"
        if path.suffix.lower() == ".zip":
            with zipfile.ZipFile(path) as archive:
                (inner,) = (entry for entry in archive.namelist() if not entry.endswith("/"))
                is_known = inner.lower().endswith(SUFFIXES)
                path = cache / f"{path.stem}-{Path(inner).name}{'' if is_known else '.txt'}"
                path.write_bytes(archive.read(inner))
    except (OSError, ValueError, HTTPException, zipfile.BadZipFile) as error:
        raise UserError(f"source {name}: cannot be downloaded, or unpacked into one file ({error}); check "
                        f"the address and the network, or delete {path}") from error
    return open_local(str(path), column, val_share)._replace(name=name, revision=revision)


def open_dataset(source: str, column: str, revision: str | None) -> Source:
    """Open `hf:NAME[:CONFIG][:SPLIT]`, where NAME is ORG/NAME on the hub or a local folder in its layout.

    Without SPLIT, the splits are train and validation, else test. If there is only one split, or SPLIT names
    one, a hash of each document chooses between train and validation. The commit is resolved first, so that
    all files belong to one commit. No code of a dataset is ever run. Raises UserError.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    name, config, split = [*source.removeprefix("hf:").split(":"), "", ""][:3]
    has_lines = Path(name).name == "wikitext"       # its rows are lines of documents
    try:
        if not Path(name).is_dir():
            if HF_HUB_OFFLINE:          # what is in the cache, as a local folder
                name = huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision)
                revision = Path(name).name
            else:
                revision = huggingface_hub.HfApi().dataset_info(name, revision=revision or "main").sha
        configs = datasets.get_dataset_config_names(name, revision=revision)
        if config not in ("", *configs) and not split:
            split = config                                              # hf:NAME:SPLIT
            config = ""
        builder = datasets.load_dataset_builder(name, config or None, revision=revision)
    except Exception as error:  # the client raises the exceptions of three HTTP libraries
        raise UserError(f"source {source}: cannot be opened ({type(error).__name__}: {error}); check the "
                        "name, the configuration and the network; scripts are not run: give files") from error
    # the files of each split, which must be of the kinds that we read
    data_files = builder.config.data_files or {}
    urls_of_split = {str(key): list(map(str, urls)) for key, urls in data_files.items()}
    for url in itertools.chain(*urls_of_split.values()):
        if not (url.lower().endswith(SUFFIXES) or JSON_LINES.fullmatch(url)):
            raise UserError(f"source {source}: cannot read {url}; give the dataset as {KINDS} files")
    # the splits: those of the dataset, or one that a hash splits
    train = split or (next(iter(urls_of_split)) if len(urls_of_split) == 1 else "train")
    if train not in urls_of_split:
        raise UserError(f"source {source}: no configuration or split {train!r}; configurations are "
                        f"{', '.join(configs)}, splits {', '.join(urls_of_split)}; give hf:NAME:CONFIG:SPLIT")
    val = [name for name in VALIDATION if name in urls_of_split and name != train]
    chosen = {train: "train", val[0]: "val"} if val and not split else {train: None}
    readers: list[Reader] = []
    for key, of_split in chosen.items():
        of_files = readers_of(urls_of_split[key], of_split, column)
        if has_lines:
            of_files = [Reader(f"{source} [{key}]", of_split, partial(articles, of_files))]
        readers += of_files
    return Source(source, revision, readers, builder.info.dataset_size or 0)


def articles(readers: Iterable[Reader]) -> Iterator[bytes]:
    """Join rows that are lines into documents, which ` = Title = ` after an empty line opens (WikiText)."""
    lines: list[bytes] = []
    for row in itertools.chain.from_iterable(reader.read() for reader in readers):
        line = (row or "").encode().rstrip(b"\n") + b"\n"               # an empty line is an empty row
        is_title = HEADING.fullmatch(line.strip()) and lines and lines[-1].isspace()
        if is_title and b"".join(lines).strip():
            yield b"".join(lines)
            lines = []
        lines.append(line)
    yield b"".join(lines)
