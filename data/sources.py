"""Where documents come from: the SOURCE of data/prepare.py, opened as a list of readers.

A reader gives the documents of a file, on this machine or on the Hugging Face hub, one at a time. For a
reader without a split, a hash of each document's text chooses it.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from base.errors import UserError
from base.files import make_once, sha256_of
from data.loader import SPLITS
from data.sdists import read_texts
from data.tasks import MIN_LENGTH, TASKS
from data.tokenizer import Tokenizer, to_utf8

FILE_VAL_SHARE = 0.1            # of the .txt files of a folder, or of a single file
ROW_VAL_SHARE = 0.01            # of rows and lines, which are many
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
JSON_LINES = re.compile(r".*\.(jsonl?|ndjson)(\.gz|\.zst)?", re.IGNORECASE)     # .json too on the hub
FORMATS = ".txt, .jsonl (or .gz, .zst of it) or .parquet"
ROWS_AT_ONCE = 16               # of a table
BYTES_AT_ONCE = 2**24           # of a text that a separator splits
TITLE_WITHIN = 4096             # bytes of a text in which its first line ends, if it is a title
TITLE = re.compile(rb" = (?!= ).*(?<! =) =\s*")
EPSILON = 2**-33                # less than the difference of two hash_shares
TASK_DOCUMENTS = {"train": range(400, 40_000), "val": range(400)}       # their numbers
VALIDATION = ("validation", "valid", "val", "dev", "test")      # to validate on the first that is there
STDLIB_LEFT_OUT = re.compile(   # tests, other packages, generated files and tables
    r"(.*/)?((tests?|idle_test|lib2to3|site-packages|__pycache__|config-[^/]*)/.*|_sysconfigdata.*"
    r"|pydoc_data/topics\.py|encodings/(cp|iso8859|koi8|mac).*|html/entities\.py)")
OF_FILES = {"text_column", "separator", "val_share"}        # what changes how a file is read
USED = {                                # SOURCE up to a colon -> the options that it uses; others: OF_FILES
    "hf": {"revision", *OF_FILES}, "stdlib": {"val_share"}, "sdists": set(),
    **dict.fromkeys(TASKS, {"length"})}


class SourceOptions(NamedTuple):
    """Options of data/prepare.py that change what is read."""

    revision: str | None = None
    text_column: str = "text"
    separator: str | None = None
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
    """A document, or a row without text."""

    split: str
    text: Any                   # bytes, a TaskDocument, or None: no text
    name: str                   # for messages


class ColumnError(Exception):
    """--text-column names no column of text."""


def documents(readers: Iterable[Reader], row_share: float) -> Iterator[Document]:
    """The documents of readers, in their order; a hash puts row_share into val. Raises UserError."""
    for reader in readers:
        number = 1
        try:
            for text in reader.read():
                split = reader.split
                if split is None:
                    split = "val" if text and hash_share(text) < row_share else "train"
                yield Document(split, text, f"{reader.name}, document {number}")
                number += 1
        except UserError:
            raise
        except ColumnError as error:
            raise UserError(f"{reader.name}: document {number}: {error}") from error
        except Exception as error:  # each file format and HTTP library has its own exceptions
            remedy = "repair it"
            if reader.name.endswith(".zst"):
                remedy = "decompress it first (zstd -d --long=31)"
            raise UserError(f"{reader.name}: document {number}: {error} ({type(error).__name__}); "
                            f"{remedy}") from error


def share_held_out(source: Source, options: SourceOptions) -> float:
    """The share of rows for validation: --val-share, unless one split would have none of them.

    Reads until both splits have text, and at most --limit-tokens bytes of rows: a token has a byte at least.
    Raises UserError if a split has none.
    """
    share = options.val_share or ROW_VAL_SHARE
    bytes_left = options.limit_tokens or math.inf
    splits: set[str | None] = set()                     # that have text
    shares: set[float] = set()                          # hash_share of each row
    for reader in source.readers:
        if reader.split in splits or (reader.split is None and bytes_left < 0):
            continue
        for document in documents([reader], share):
            if not document.text:
                continue
            splits.add(document.split)
            if len(splits) == len(SPLITS):
                return share
            if reader.split is None:
                shares.add(hash_share(document.text))
                bytes_left -= len(document.text)
            if reader.split or bytes_left < 0:
                break
    if len(shares) < 2:
        missing = "val" if "train" in splits else "train"
        what = "text that differs" if shares else "text"
        raise UserError(f"source {source.name}: no text for {missing}; add {what} ({FORMATS}), or put files "
                        "into the folders train/ and val/ of it")
    # all rows are on one side: put the one that is nearest to the border on the other
    if "val" in splits:
        return max(shares)
    return min(shares) + EPSILON


def check_options(source: str, options: SourceOptions) -> None:
    """Raise UserError for an option that SOURCE does not use. Of several joined by " + ", one must use it."""
    used = {"limit_tokens"}                             # every source does
    for name in source.split(" + "):
        used |= USED.get(name.partition(":")[0], OF_FILES)
    for option, default in SourceOptions._field_defaults.items():
        if option not in used and getattr(options, option) != default:
            raise UserError(f"source {source}: does not use --{option.replace('_', '-')}; omit it")


def open_source(source: str, cache: Path, tokenizer: Tokenizer | None, options: SourceOptions) -> Source:
    """Open SOURCE, or several joined by " + ". Downloads go to `cache`; tasks need the tokenizer.

    Raises UserError if it does not exist.
    """
    share = FILE_VAL_SHARE if options.val_share is None else options.val_share
    if not 0 < share < 1:
        raise UserError(f"--val-share {share}: must be between 0 and 1, such as 0.1")
    names = source.split(" + ")
    if len(names) > 1:
        alone = [name for name in names if name in TASKS or name.startswith("sdists:")]
        if alone:
            raise UserError(f"source {alone[0]}: cannot be joined with others; prepare it alone, and mix "
                            "corpora with data.mixture")
        opened = [open_source(name, cache, tokenizer, options) for name in names]
        return Source(name=" + ".join(one.name for one in opened),
                      revision=", ".join(one.revision for one in opened if one.revision) or None,
                      readers=[reader for one in opened for reader in one.readers],
                      n_bytes=sum(one.n_bytes for one in opened))
    if source in TASKS:
        return open_task(source, tokenizer, options.length)
    if not source.strip() or Path(source).resolve() == Path("/"):
        raise UserError(f"SOURCE {source!r}: an unset variable? give stdlib, a file, a folder, or see --help")
    if source == "stdlib":
        return open_stdlib(share)
    if source.startswith("sdists:"):
        return open_sdists(source, cache)
    if source.startswith("hf:"):
        return open_dataset(source, options)
    if source.startswith(("http://", "https://")):
        return open_url(source, cache, options, share)
    return open_local(source, options, share)


def open_task(source: str, tokenizer: Tokenizer | None, length: int | None) -> Source:
    """Generated documents. Raises UserError without a tokenizer."""
    if tokenizer is None:
        raise UserError(f"source {source}: bpe:N is learned from text; give byte, gpt2 or a folder")
    task = TASKS[source]
    length = length or task.length
    if length < MIN_LENGTH:
        raise UserError(f"--length {length}: too short for {source}; give --length {MIN_LENGTH} or more")
    make = partial(task.make, tokenizer, length)
    return Source(source, None, [Reader(source, split, partial(map, make, TASK_DOCUMENTS[split]))
                                 for split in SPLITS])


def open_stdlib(val_share: float) -> Source:
    """The source text of this Python's standard library, a document per file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py")
             if path.is_file() and not STDLIB_LEFT_OUT.fullmatch(path.relative_to(root).as_posix())]
    return Source("stdlib", f"Python {platform.python_version()}", split_by_hash(root, paths, val_share, {}))


def open_sdists(source: str, cache: Path) -> Source:
    """Open `sdists:LIST[:docs|:code]`: for each project of a list, a document of docs and one of code.

    A kind chooses among the same documents, whose code is cut as if both were read. Raises UserError.
    """
    name = re.sub(":(docs|code)$", "", source)
    path = Path(name.removeprefix("sdists:"))
    readers = [Reader(f"{text.project} {text.kind}", text.split, partial(list, [text.content]))
               for text in read_texts(path, cache) if source in (name, f"{name}:{text.kind}")]
    return Source(source, f"list sha256 {sha256_of(path)}", readers)


def hash_share(text: bytes) -> float:
    """A number in [0, 1) that depends only on the text: the same on any machine and in any order."""
    return int(hashlib.sha256(text).hexdigest()[:8], 16) / 2**32


def read_file(url: str, options: SourceOptions) -> Iterator[bytes | None]:
    """The documents of a file: one per row of .parquet, one per line of .jsonl; None has no text.

    Other files are one, or are split at a separator.
    """
    import fsspec
    import pyarrow.parquet  # comes with datasets; unlike Python, it has zstd

    column = options.text_column
    with fsspec.open(url) as file:
        if url.lower().endswith(".parquet"):
            # with buffer_size, pages are read when they are needed, not a row group at once
            table = pyarrow.parquet.ParquetFile(file, buffer_size=2**20)
            require_column(column, table.schema_arrow.names)
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=[column]):
                yield from map(bytes_of, batch.column(0).to_pylist())
        elif JSON_LINES.fullmatch(url):
            compression = {".gz": "gzip", ".zst": "zstd"}.get(Path(url).suffix.lower())
            lines: Any = pyarrow.input_stream(file, compression=compression)
            for line in io.BufferedReader(lines):
                if line.isspace():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"each line must be an object with a {column!r}, not {line[:40]!r}")
                require_column(column, row)
                yield bytes_of(row[column])
        elif options.separator:
            yield from split_at(options.separator.encode(), file)
        else:
            yield file.read()


def require_column(column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        raise ColumnError(f"no {column!r}: give one of {[*columns]} as --text-column")


def bytes_of(text: str | None) -> bytes | None:
    """UTF-8 of the text of a row, if it has one."""
    if not isinstance(text, str | None):
        raise ColumnError("the text must be a string; name its column with --text-column")
    return None if text is None else to_utf8(text)[0]


def split_at(separator: bytes, file: Any) -> Iterator[bytes]:
    """Cut a text at its separators, each with the rest of its line if that is white space."""
    rest_of_line = b"" if separator.endswith(b"\n") else rb"(?:[^\S\n]*(?:\n|\Z))?"
    pattern = re.compile(re.escape(separator) + rest_of_line)
    rest = b""
    while lines := file.read(BYTES_AT_ONCE) + file.readline():          # whole lines
        *documents, rest = pattern.split(rest + lines)
        yield from documents
    yield rest


def is_wikitext(reader: Reader) -> bool:
    """Whether the rows of a table, or the lines of a text, are those of WikiText: the first is a title."""
    import fsspec

    if is_text(reader.name):
        with fsspec.open(reader.name) as file:
            rows = file.read(TITLE_WITHIN).splitlines()
    else:
        rows = [document.text for document in itertools.islice(documents([reader], 0), ROWS_AT_ONCE)]
    first = next((row for row in rows if row and not row.isspace()), b"")
    return TITLE.fullmatch(first) is not None


def is_text(name: str) -> bool:
    return name.lower().endswith(".txt")


def reader_of(path: Path | str, split: str | None, options: SourceOptions) -> Reader:
    """The reader of a file."""
    return Reader(str(path), split, partial(read_file, str(path), options))


def readers_of(urls: Iterable[Path | str], split: str | None, options: SourceOptions) -> list[Reader]:
    """A reader for each file, or one for the articles of WikiText.

    Raises UserError for the hub's own conversion of the start of a dataset.
    """
    readers = [reader_of(url, split, options) for url in urls]
    for reader in readers:
        if Path(reader.name).parent.name.startswith("partial-"):
            raise UserError(f"source {reader.name}: its folder partial-... holds only a part of the dataset; "
                            "give a copy that has all of it, or rename the folder to train on the part")
    if readers and is_wikitext(readers[0]):
        return [Reader(readers[0].name, split, partial(articles, readers))]
    return readers


def files_in(folder: Path) -> list[Path]:
    """The files of a folder, sorted, without hidden ones; links are followed, and each file is there once."""
    paths: dict[Path, Path] = {}            # by where a file or folder really is
    for parent, folders, names in os.walk(folder, followlinks=True):
        is_first = paths.setdefault(Path(parent).resolve(), Path(parent)) == Path(parent)
        folders[:] = sorted(name for name in folders if is_first and name[0] != ".")
        for name in sorted(names):
            path = Path(parent, name)
            if is_first and name[0] != "." and not (path.is_symlink() and path.resolve() in paths):
                paths[path.resolve()] = path                            # its own name, if a link came first
    return sorted(path for path in paths.values() if path.is_file())


def validation_of(splits: Iterable[str]) -> str | None:
    """The split to validate on, if there is one."""
    return next((name for name in VALIDATION if name in splits), None)


def split_by_name(folder: Path, paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Files by the split that they are named after; empty without one to train on and one to validate.

    The folders train/ and validation/ are splits, whatever lies beside them. Otherwise the path of every file
    must name one, such as data/test-00000.parquet or wiki.valid.txt.
    """
    names = {"train", *VALIDATION}
    by_folder: dict[str, list[Path]] = {name: [] for name in names if (folder / name).is_dir()}
    by_word: dict[str, list[Path]] = {}
    for path in paths:
        inside = path.relative_to(folder)
        words = names & {*re.split("[^a-z]+", inside.as_posix().lower())}
        by_folder.setdefault(inside.parts[0], []).append(path)
        by_word.setdefault(" ".join(words), []).append(path)
    if "train" in by_folder and validation_of(by_folder):
        return by_folder
    is_whole = by_word.keys() <= names and "train" in by_word and validation_of(by_word)
    return by_word if is_whole else {}


def split_by_hash(root: Path, paths: list[Path], val_share: float,
                  originals: dict[Path, Path]) -> list[Reader]:
    """Split text files by a hash of the path inside root: the same on any machine, and after adding files.

    A copy is on the side of its original. A single file is cut in two: the first part for train, the rest for
    val, not inside a UTF-8 character.
    """
    if len(paths) == 1:
        text = paths[0].read_bytes()
        cut = int(len(text) * (1 - val_share))
        while cut < len(text) and text[cut] & 0xC0 == 0x80:
            cut += 1
        return [Reader(str(paths[0]), "train", partial(list, [text[:cut]])),
                Reader(str(paths[0]), "val", partial(list, [text[cut:]]))]
    shares: dict[Path, float] = {}
    for path in sorted(paths):
        inside = originals.get(path, path).relative_to(root)
        shares[path] = hash_share(os.fsencode(inside.as_posix()))
    limit = max(val_share, min(shares.values(), default=0) + EPSILON)   # at least one is for val
    return [reader_of(path, "val" if share < limit else "train", SourceOptions())
            for path, share in shares.items()]


def open_local(source: str, options: SourceOptions, val_share: float) -> Source:
    """A file, or a folder of files; what is left out is counted. Raises UserError if it is missing."""
    root = Path(source)
    if not root.exists():
        raise UserError(f"source {source}: no such file or folder; give stdlib, a task ({', '.join(TASKS)}), "
                        f"hf:NAME, or a {FORMATS} file or a folder of them")
    folder = root if root.is_dir() else root.parent
    paths: list[Path] = []
    left_out: Counter[str] = Counter()
    for path in files_in(root) if root.is_dir() else [root]:
        if path.name.lower().endswith(SUFFIXES):
            paths.append(path)
        else:
            left_out[path.suffix or path.name] += 1
    first: dict[str, Path] = {}                         # of equal texts
    originals = {path: first.setdefault(sha256_of(path), path) for path in paths if is_text(path.name)}
    splits = split_by_name(folder, paths) if root.is_dir() else {}
    validation = validation_of(splits)
    if validation:
        # splits as they are named; train has no file of validation, and other splits are not read
        held_out = {originals.get(path) for path in splits[validation]}
        train = [path for path in splits["train"] if originals.get(path, path) not in held_out]
        left_out[f"equal to one of {validation}"] = len(splits["train"]) - len(train)
        for name, others in splits.items():
            if name not in ("train", validation):
                left_out[f"in {name}"] = len(others)
        readers = readers_of(train, "train", options) + readers_of(splits[validation], "val", options)
    else:
        # a hash chooses: of the path of a file that is one text, of each row or article of the others
        texts = [path for path in originals
                 if not options.separator and not is_wikitext(reader_of(path, None, options))]
        others = sorted(originals.keys() - {*texts})
        tables = [path for path in paths if path not in originals]
        readers = split_by_hash(folder, texts, val_share, originals)
        readers += readers_of(tables, None, options) + readers_of(others, None, options)
    counts = [f"{n:,} {kind}" for kind, n in left_out.most_common() if n]
    if counts:
        print(f"left out of {root.name}: {', '.join(counts)} ({FORMATS} is read)")
    return Source(root.name, None, readers, sum(path.stat().st_size for path in paths))


def download(url: str, part: Path) -> None:
    """Download a file; `part` may have its start, of a download that was interrupted.

    The client gives up a connection that stalls, and asks for the rest again, five times in a row.
    """
    from huggingface_hub.file_download import http_get

    with part.open("ab") as file:
        http_get(url, file, resume_size=file.tell())


def open_url(url: str, cache: Path, options: SourceOptions, val_share: float) -> Source:
    """A file at a URL, downloaded once into `cache`; a .zip must hold a single file. Raises UserError."""
    address = urlsplit(url)
    name = f"{address.scheme}://{address.hostname}{address.path}"       # without keys and passwords
    path = cache / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{Path(address.path).name}"
    text = path
    cache.mkdir(parents=True, exist_ok=True)
    try:
        make_once(path, partial(download, url))
        revision = f"sha256 {sha256_of(path)}"
        if path.suffix.lower() == ".zip":
            with zipfile.ZipFile(path) as archive:
                (inner,) = (entry for entry in archive.namelist() if not entry.endswith("/"))
                is_known = inner.lower().endswith(SUFFIXES)
                text = cache / f"{path.stem}-{Path(inner).name}{'' if is_known else '.txt'}"
                make_once(text, lambda part: part.write_bytes(archive.read(inner)))
    except Exception as error:  # the client raises the exceptions of its HTTP library
        raise UserError(f"source {name}: cannot be downloaded, or unpacked into one file "
                        f"({type(error).__name__}: {str(error).replace(url, name)}); check the address and "
                        f"the network, then give the same command again, or delete {path}*") from error
    return open_local(str(text), options, val_share)._replace(name=name, revision=revision)


def open_dataset(source: str, options: SourceOptions) -> Source:
    """Open `hf:NAME[:CONFIG][:SPLIT]`, where NAME is ORG/NAME on the hub or a local folder in its layout.

    Without SPLIT, the splits are train and validation, else test. If there is only one split, or SPLIT names
    one, a hash of each document chooses between train and validation. The commit is resolved first, so that
    all files belong to one commit. No code of a dataset is ever run. Raises UserError.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    name, config, split = [*source.removeprefix("hf:").split(":"), "", ""][:3]
    revision = options.revision
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
    urls: dict[str, list[str]] = {}
    for key, files in (builder.config.data_files or {}).items():
        urls[str(key)] = [str(file) for file in files]
    for url in itertools.chain(*urls.values()):
        if not (url.lower().endswith(SUFFIXES) or JSON_LINES.fullmatch(url)):
            raise UserError(f"source {source}: cannot read {url}; give the dataset as {FORMATS} files")
    # the splits: those of the dataset, or one that a hash splits
    if len(urls) == 1:
        split = split or min(urls)
    train = split or "train"
    if train not in urls:
        raise UserError(f"source {source}: no configuration or split {train!r}; configurations are "
                        f"{', '.join(configs)}, splits {', '.join(urls)}; give hf:NAME:CONFIG:SPLIT")
    val = validation_of(urls)
    if split or not val:
        readers = readers_of(urls[train], None, options)
    else:
        readers = readers_of(urls[train], "train", options) + readers_of(urls[val], "val", options)
    return Source(source, revision, readers, builder.info.dataset_size or 0)


def articles(readers: Iterable[Reader]) -> Iterator[bytes]:
    """Join lines into documents, which ` = Title = ` after an empty line opens: WikiText.

    A row is a line, or all lines of a file.
    """
    document: list[bytes] = []
    for row in itertools.chain.from_iterable(reader.read() for reader in readers):
        for line in (row or b"").splitlines() or [b""]:                 # an empty line is an empty row
            is_title = TITLE.fullmatch(line) and document and document[-1].isspace()
            if is_title and b"".join(document).strip():
                yield b"".join(document)
                document = []
            document.append(line + b"\n")
    yield b"".join(document)
