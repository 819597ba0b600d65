"""Where documents come from: the SOURCE of data/prepare.py, opened as a list of parts.

A part is a file, on this machine or on the Hugging Face hub, and is read one document at a time. For a part
without a split, a hash of each document's text chooses it.
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
LINES = re.compile(r".*\.(jsonl?|ndjson)(\.gz|\.zst)?", re.IGNORECASE)   # the hub calls them .json too
KINDS = ".txt, .jsonl (or .gz, .zst of it) or .parquet"
ROWS = 16                       # rows of a table read at a time
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
    parts: Sequence[Part]
    n_bytes: int | None = None  # about how much text there is, if known


class Document(NamedTuple):
    split: str
    text: bytes | TaskDocument | None   # None: a row without text
    name: str                   # for messages


def checked(text: Any) -> bytes | TaskDocument | None:
    if not isinstance(text, str | bytes | TaskDocument | None):
        raise TypeError("the text must be a string; name its column with --text-column")
    return text.encode() if isinstance(text, str) else text


def documents(parts: Iterable[Part], val_share: float | None) -> Iterator[Document]:
    """The documents of parts. Raises UserError."""
    for part in parts:
        d = 0
        try:
            for d, text in enumerate(map(checked, part.read()), 1):
                is_val = isinstance(text, bytes) and rank(text) < (val_share or ROW_VAL_SHARE)
                split = part.split or ("val" if is_val else "train")
                yield Document(split, text, f"{part.name}, document {d}")
        except Exception as error:  # each file format and HTTP library has its own exceptions
            raise UserError(f"{part.name}: document {d + 1}: {error} ({type(error).__name__}); "
                            "repair it or get it again") from error


def open_source(source: str, out: Path, tokenizer: Tokenizer | None, options: Options) -> Source:
    """Open SOURCE; the tokenizer is for tasks. Raises UserError if it does not exist."""
    share = FILE_VAL_SHARE if options.val_share is None else options.val_share
    column, length = options.text_column, options.length
    if not 0 < share < 1:
        raise UserError(f"--val-share {share}: must be between 0 and 1, such as 0.1")
    if " + " in source:
        if tasks := TASKS.keys() & source.split(" + "):
            raise UserError(f"source {min(tasks)}: has windows and a mask of its own; prepare it alone, and "
                            "mix corpora with data.mixture")
        several = [open_source(one, out, tokenizer, options) for one in source.split(" + ")]
        names, revisions, parts, sizes = zip(*several, strict=True)
        return Source(" + ".join(names), ", ".join(filter(None, revisions)) or None, sum(parts, []),
                      sum(size or 0 for size in sizes))
    if (options.revision and not source.startswith("hf:")) or (length and source not in TASKS):
        raise UserError(f"source {source}: --revision is for hf:NAME, --length for tasks; omit it")
    if source in TASKS:
        if tokenizer is None:
            raise UserError(f"source {source}: bpe:N is learned from text; give byte, gpt2 or a folder")
        make = partial(TASKS[source].make, tokenizer, length or TASKS[source].length)
        return Source(source, None, [Part(source, split, partial(map, make, TASK_DOCUMENTS[split]))
                                     for split in SPLITS])
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        left_out = re.compile("|".join(translate(start + pattern) for start in ("", "*/")
                                       for pattern in STDLIB_LEFT_OUT))
        paths = [path for path in root.rglob("*.py")
                 if path.is_file() and not left_out.match(path.relative_to(root).as_posix())]
        return Source(source, f"Python {platform.python_version()}", split_by_hash(root, paths, share),
                      sum(path.stat().st_size for path in paths))
    if source == "packages":
        return open_packages(options.val_share or PACKAGES_VAL_SHARE)
    if source.startswith("sdists:"):
        return open_sdists(source, out.parent / ".downloads")
    if source.startswith("hf:"):
        return open_dataset(source, column, options.revision)
    if source.startswith(("http://", "https://", "file://")):
        return open_url(source, out.parent / ".downloads", column, share)
    return open_local(source, column, share)


def open_packages(val_share: float) -> Source:
    """A document per package of constraints.txt: files in the order of a hash, up to 400 kB, 60 kB at least.

    Packages whose names start with the same word are on the same side of the split. Raises UserError.
    """
    packages: list[tuple[str, bytes]] = []
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", CONSTRAINTS.read_text(), re.MULTILINE):
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            package = None
        if package is None or package.version.split("+")[0] != version:
            raise UserError(f"source packages: {name} {version} of constraints.txt is not installed; run "
                            ".venv/bin/python -m pip install -c constraints.txt -e '.[test]'")
        files = sorted((str(file) for file in package.files or [] if file.suffix == ".py"
                        and ".." not in file.parts and not PACKAGES_LEFT_OUT.match(str(file))),
                       key=lambda file: rank(file.encode()))
        text = b""
        for file in files:
            more = Path(str(package.locate_file(file))).read_bytes()
            if len(text) + len(more) < PACKAGE_BYTES.stop:
                text += more
        if len(text) in PACKAGE_BYTES:
            packages.append((name, text))
    parts = [Part(name, "val" if rank(re.split(r"[-_.\d]", name)[0].encode()) < val_share else "train",
                  partial(list, [text])) for name, text in packages]
    sha256 = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
    n_bytes = sum(len(text) for _, text in packages)
    return Source("packages", f"constraints.txt sha256 {sha256}", parts, n_bytes)


def open_sdists(source: str, cache: Path) -> Source:
    """Open `sdists:LIST[:docs|:code]`: for each project of a list, a document of docs and one of code.

    A kind chooses among the same documents, whose code is cut as if both were read. Raises UserError.
    """
    path, _, kind = source.removeprefix("sdists:").rpartition(":")
    if kind not in SDIST_KINDS:
        path, kind = source.removeprefix("sdists:"), ""
    texts = [text for text in read_texts(Path(path), cache) if kind in ("", text.kind)]
    parts = [Part(f"{text.project} {text.kind}", text.split, partial(list, [text.content])) for text in texts]
    return Source(source, f"list sha256 {sha256_of(Path(path))}", parts,
                  sum(len(text.content) for text in texts))


def rank(text: bytes) -> float:
    """A number in [0, 1) that depends only on the text: the same on any machine and in any order."""
    return int(hashlib.sha256(text).hexdigest()[:8], 16) / 2**32


def read(url: str, column: str = "text") -> Iterator[Any]:
    """The documents of a file: one per row of .parquet, one per line of .jsonl, else one."""
    import fsspec
    import pyarrow.parquet  # comes with datasets; unlike Python, it has zstd

    with fsspec.open(url) as file:
        if url.lower().endswith(".parquet"):
            # with buffer_size, pages are read when they are needed, not a row group at once
            table = pyarrow.parquet.ParquetFile(file, buffer_size=2**20)
            if column not in table.schema_arrow.names:
                raise ValueError(f"no {column!r}: give one of {table.schema_arrow.names} as --text-column")
            for batch in table.iter_batches(ROWS, columns=[column]):
                yield from batch.column(0).to_pylist()
        elif LINES.fullmatch(url):
            kind = {".gz": "gzip", ".zst": "zstd"}.get(Path(url).suffix.lower())
            lines: Any = pyarrow.input_stream(file, compression=kind)
            for row in (json.loads(line) for line in io.BufferedReader(lines) if not line.isspace()):
                if column not in row:
                    raise ValueError(f"no {column!r}: give one of {list(row)} as --text-column")
                yield row[column]
        else:
            yield file.read()


def open_local(source: str, column: str, val_share: float) -> Source:
    """A file, or a folder of files. Raises UserError if it is missing or has no text."""
    root = Path(source)
    if not root.exists():
        raise UserError(f"source {source}: no such file or folder; give stdlib, a task ({', '.join(TASKS)}), "
                        f"hf:NAME, or a {KINDS} file or a folder of them")
    folder = root if root.is_dir() else root.parent
    has_splits = all((root / split).is_dir() for split in SPLITS)
    # unlike rglob, it follows links, and leaves out hidden files
    names = glob.glob(f"{glob.escape(source)}/**", recursive=True) if root.is_dir() else [source]
    paths = [path for path in sorted(map(Path, names))
             if path.is_file() and path.name.lower().endswith(SUFFIXES)
             and (not has_splits or path.relative_to(folder).parts[0] in SPLITS)]
    refuse_partial(source, map(str, paths))
    parts = [Part(str(path), path.relative_to(folder).parts[0] if has_splits else None,
                  partial(read, str(path), column)) for path in paths]
    texts = [part for part in parts if part.name.lower().endswith(".txt")]
    tables = [part for part in parts if part not in texts]
    if not has_splits:
        texts = split_by_hash(folder, [Path(part.name) for part in texts], val_share)
    parts = [*(part for part in texts if part.split == "train"), *tables,
             *(part for part in texts if part.split == "val")]
    return Source(root.name, None, parts, sum(path.stat().st_size for path in paths))


def refuse_partial(source: str, paths: Iterable[str]) -> None:
    """Raise UserError for a folder in which the hub keeps the first gigabytes of a dataset it converted."""
    partial_folder = re.search(r"/(partial-[^/\0]*)/", "\0".join(paths))
    if partial_folder:
        raise UserError(f"source {source}: its folder {partial_folder[1]} holds only a part of the dataset; "
                        "give a copy that has all of it, or rename the folder to train on the part")


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
    return [Part(str(path), split, partial(read, str(path))) for split in SPLITS for path in paths
            if (places[path] < val_share or places[path] == limit) == (split == "val")]


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

    name, config, split = [*source.removeprefix("hf:").split(":"), None, None][:3]
    name = str(name)
    has_lines = Path(name).name == "wikitext"       # its rows are lines of documents
    try:
        if HF_HUB_OFFLINE and not Path(name).is_dir():          # what is in the cache, as a local folder
            name = huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision)
            revision = Path(name).name
        elif not Path(name).is_dir():
            revision = huggingface_hub.HfApi().dataset_info(name, revision=revision or "main").sha
        configs = datasets.get_dataset_config_names(name, revision=revision)
        if config not in (None, *configs) and split is None:
            config, split = None, config                                # hf:NAME:SPLIT
        builder = datasets.load_dataset_builder(name, config, revision=revision)
    except Exception as error:  # the client raises the exceptions of three HTTP libraries
        raise UserError(f"source {source}: cannot be opened ({type(error).__name__}: {error}); check the "
                        "name, the configuration and the network; scripts are not run: give files") from error
    data_files = builder.config.data_files or {}
    urls_of_split = {str(key): list(map(str, urls)) for key, urls in data_files.items()}
    urls = list(itertools.chain(*urls_of_split.values()))
    refuse_partial(source, urls)
    if odd := [url for url in urls if not (url.lower().endswith(SUFFIXES) or LINES.fullmatch(url))]:
        raise UserError(f"source {source}: cannot read {odd[0]}; give the dataset as {KINDS} files")
    first = split or (next(iter(urls_of_split)) if len(urls_of_split) == 1 else "train")
    if first not in urls_of_split:
        raise UserError(f"source {source}: no configuration or split {first!r}; configurations are "
                        f"{', '.join(configs)}, splits {', '.join(urls_of_split)}; give hf:NAME:CONFIG:SPLIT")
    val = None
    if not split:
        others = [name for name in VALIDATION if name in urls_of_split and name != first]
        val = others[0] if others else None
    parts: list[Part] = []
    for of_split, key in (("train", first), ("val", val)) if val else ((None, first),):
        reads = [partial(read, url, column) for url in urls_of_split[key]]
        if has_lines:
            parts.append(Part(f"{source} [{key}]", of_split, partial(articles, reads)))
        else:
            parts += map(Part, urls_of_split[key], itertools.repeat(of_split), reads)
    return Source(source, revision, parts, builder.info.dataset_size)


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
