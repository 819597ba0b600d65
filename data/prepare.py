"""Prepare a corpus for train.py: `python data/prepare.py SOURCE [SOURCE ...] [--tokenizer NAME] [--out DIR]`.

Several SOURCEs become one corpus; copies of a text are found only within each of them. Each is one of
  stdlib      the source text of this Python's standard library: always available, no download
  sdists:LIST[:docs|:code]    the source distributions that a CSV file lists (name, version, sha256, split),
              such as configs/study/sdists.csv; downloaded once by pypi-simple, which the extra [study]
              installs. A document of documentation and one of code per project, or only one of these kinds
  TASK        generated documents, described in data/tasks.py: repeats, passkey, needles, variables, copying,
              reversal, sorting, addition, parity or flip_flop
  FILE        .txt: one text, its last tenth is for validation; or the articles of WikiText, or documents that
              --separator separates. .jsonl, .jsonl.gz, .jsonl.zst: a document per line. .parquet: a document
              per row. A hash of the text puts 1 of 100 of these documents into validation, one at least
  FOLDER      a folder of these files. If subfolders, or the names of all files, are those of splits, train
              and validation (or valid, val, dev, else test), these are the splits. Else each .txt file is a
              document, and a hash of its path puts a tenth into validation; rows as for FILE
  https://... one of these files, or a .zip with one in it; downloaded once (also http)
  hf:NAME[:CONFIG][:SPLIT]    a dataset of the Hugging Face hub, hf:ORG/NAME, or a local folder in its layout,
              hf:./folder. The splits are train and validation, else test. If there is only one split, or
              SPLIT names one, a hash of the text puts 1 document in 100 into validation

Tokenizers: byte; gpt2; bpe:N, which has N ids including the separator and is learned from the first 128 MB of
the train split, even if --limit-tokens keeps less; or FOLDER, the tokenizer of the corpus, run or Hugging
Face model there.

The corpus appears at DIR when it is complete. After an interruption, the same command starts over.
"""

import itertools
import json
import os
import re
import shutil
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ == "__main__":
    if not __package__:             # `python data/prepare.py` searches data/ for modules
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import base.interrupt  # noqa: F401  (Ctrl-C ends the imports below)

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from base.command import argument_parser, positive, run_command
from base.errors import UserError, warn
from base.files import flush, sha256_of, write_whole
from data import tokenizer as tokenizers
from data.loader import FORMAT_VERSION, SPLITS, Corpus, read_meta
from data.sdists import shared_passages
from data.sources import (
    Document,
    Source,
    SourceOptions,
    check_options,
    documents,
    open_source,
    share_held_out,
)
from data.tasks import TASKS, TaskDocument
from data.tokenizer import SEPARATOR, TOKENIZER_FILE, Tokenizer
from hf.pretrained import is_pretrained, read_config
from hf.tokenizer import read_tokenizer

LEARN_BYTES = 2**27             # most text that bpe:N learns from
DOCUMENTS_AT_ONCE = 256         # encoded on all cores, then written
DEFAULTS = SourceOptions()
SEPARATOR_LINE = re.compile(rf"^{re.escape(SEPARATOR)}\r?$".encode(), re.MULTILINE)
CORPUS_FILES = {"meta.json", TOKENIZER_FILE,
                *(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx.npy", "mask.bin"))}
FAULTS = {                      # of documents -> what is said about them
    "null": "rows without text (null) are left out",
    "odd": "documents have NUL bytes or bytes that are not UTF-8; --tokenizer byte keeps all bytes, others "
           "replace those outside UTF-8 by U+FFFD",
    "lost": "documents have U+FFFD, in place of characters that were lost before, or of lone surrogates",
    "joined": f"documents have lines of {SEPARATOR} alone; --separator '{SEPARATOR}' splits .txt files there"}


def find_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer of a name, or of a corpus, run or model folder; None if it must be learned."""
    if name in ("byte", "gpt2"):                        # whatever folders are here: ./gpt2 is one of them
        return tokenizers.load_tokenizer(name)
    folder = Path(name)
    for file in ("meta.json", "corpus.json"):
        if (folder / file).is_file():
            return tokenizers.tokenizer_of(read_meta(folder / file), folder)
    if is_pretrained(name):
        return read_tokenizer(folder, read_config(folder)[1])
    return None if tokenizers.size_of(name) else tokenizers.load_tokenizer(name, folder)


def learn_from(texts: Iterable[Document]) -> Iterator[bytes]:
    """Text to learn a vocabulary from: the first LEARN_BYTES of the train split."""
    n_bytes = 0
    for document in texts:
        if document.split == "train" and document.text:
            yield document.text
            n_bytes += len(document.text)
        if n_bytes > LEARN_BYTES:
            return


def encode(document: Document, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray | None]:
    """The ids of a document, the separator first, and for a task which of them are answers."""
    if isinstance(document.text, TaskDocument):
        return document.text
    separator = np.array([tokenizer.separator], np.uint32)
    return np.append(separator, tokenizer.encode(document.text or b"")), None


def encode_all(texts: Iterator[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, Any]]:
    """Documents, and what `encode` makes of each."""
    with ThreadPoolExecutor() as pool:                  # threads: tiktoken releases the interpreter's lock
        while group := list(itertools.islice(texts, DOCUMENTS_AT_ONCE)):
            encoded = pool.map(partial(encode, tokenizer=tokenizer), group)
            yield from zip(group, encoded, strict=True)


def faults_of(text: bytes | TaskDocument | None) -> Iterator[str]:
    """What a user should know about a document: keys of FAULTS."""
    if text is None:
        yield "null"
    if not isinstance(text, bytes):
        return
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        decoded = "\0"
    if "\0" in decoded:                                 # as UTF-16 has
        yield "odd"
    if "\ufffd" in decoded:
        yield "lost"
    if SEPARATOR_LINE.search(text):
        yield "joined"


class Writer:
    """The growing files of a split: ids, starts of documents and, for tasks, a mask of answers."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.split = split
        self.dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
        self.byte_lengths = tokenizers.byte_lengths(tokenizer)
        self.file = (folder / f"{split}.bin").open("wb")
        self.mask = bytearray()
        self.starts = array("Q")                        # of documents, in tokens
        self.n_tokens = 0
        self.n_bytes = 0

    def append(self, ids: np.ndarray, is_answer: np.ndarray | None) -> int:
        """Append a document, and return the number of its bytes."""
        if len(ids) < 2:                                # no separator without a document
            return 0
        self.starts.append(self.n_tokens)
        self.file.write(ids.astype(self.dtype).data)
        if is_answer is not None:
            self.mask += is_answer[:len(ids)].tobytes()
        n_bytes = int(self.byte_lengths[ids].sum())
        self.n_tokens += len(ids)
        self.n_bytes += n_bytes
        return n_bytes

    def finish(self) -> dict[str, Any]:
        """Close the file, write index and mask, and return what meta.json says of the split."""
        self.file.close()
        paths = [self.folder / f"{self.split}.bin", self.folder / f"{self.split}.idx.npy"]
        np.save(paths[1], np.array([*self.starts, self.n_tokens], "<u8"))
        if self.mask:
            paths.append(self.folder / f"{self.split}.mask.bin")
            paths[2].write_bytes(self.mask)
        for path in paths:
            flush(path)
        return {"tokens": self.n_tokens, "bytes": self.n_bytes, "documents": len(self.starts),
                "sha256": {path.name: sha256_of(path) for path in paths}}


def prepare(source: str, out: Path, tokenizer_name: str, options: SourceOptions = DEFAULTS,
            replace: bool = False) -> dict[str, Any]:
    """Write a corpus to the folder `out`, complete or not at all, and return its meta.json.

    It replaces a corpus that differs in source, revision, tokenizer or options, on which runs may depend,
    only if `replace`. Raises UserError.
    """
    out = out.resolve()                                 # a link, such as one to another disk, stays a link
    # only a corpus is replaced
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    others = names - CORPUS_FILES
    if names and (others or "meta.json" not in names):
        raise UserError(f"--out {out}: would be replaced, but {min(others or names)} is not part of a "
                        "prepared corpus; give another folder")
    before = read_meta(out / "meta.json") if names else None
    tokenizer = find_tokenizer(tokenizer_name)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.partial")
    lock = out.with_name(f".{out.name}.lock")
    try:
        with FileLock(lock, timeout=0):
            shutil.rmtree(folder, ignore_errors=True)                   # of a process that was killed
            folder.mkdir()
            try:
                meta = write_corpus(folder, source, out, tokenizer, tokenizer_name, options,
                                    None if replace else before)
                # the old corpus is renamed, not deleted, before the new one is in its place
                old = out.with_name(f".{out.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                if out.exists():
                    out.rename(old)
                folder.rename(out)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):                                 # Windows deletes it later
                    lock.unlink()
    except Timeout:
        raise UserError(f"--out {out}: another process is preparing it; give another folder") from None
    if before:
        print(f"{out}: replaced its corpus, of {before['source']}")
    return meta


def write_corpus(folder: Path, source: str, out: Path, tokenizer: Tokenizer | None, tokenizer_name: str,
                 options: SourceOptions, before: dict[str, Any] | None) -> dict[str, Any]:
    """Write a corpus to `folder`; meta.json comes last. Without a tokenizer, one is learned.

    `before` is the meta.json of the corpus at `out`, if the new one must agree with it. Raises UserError.
    """
    check_options(source, options)
    opened = open_source(source, out.parent / ".downloads", tokenizer, options)
    row_share = share_held_out(opened, options)
    # learn the tokenizer, and keep its file in the corpus
    if tokenizer is None:
        print(f"learning {tokenizer_name} from {opened.name}", flush=True)
        texts = learn_from(documents(opened.readers, row_share))
        file = tokenizers.learn(texts, tokenizers.size_of(tokenizer_name) or 0)
        write_whole(folder / TOKENIZER_FILE, file)
        tokenizer = tokenizers.load_tokenizer(tokenizer_name, folder)
    elif tokenizer.file:
        write_whole(folder / TOKENIZER_FILE, tokenizer.file)
    changed = {key: value for key, value in options._asdict().items() if value != getattr(DEFAULTS, key)}
    origin: dict[str, Any] = {
        "source": opened.name, "revision": opened.revision, "options": changed,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256}}
    if before:
        different = [key for key, value in origin.items() if before.get(key, {}) != value]
        refuse_changes(out, different)
    task = TASKS.get(source)
    writers = {split: Writer(folder, split, tokenizer) for split in SPLITS}
    write_documents(opened, row_share, writers, tokenizer, options.limit_tokens or sys.maxsize,
                    task is not None and task.has_mask)
    # describe the corpus
    splits = {split: writer.finish() for split, writer in writers.items()}
    if before and before["splits"] != splits:
        refuse_changes(out, ["text"])                   # another folder of this name, or edited files
    meta: dict[str, Any] = {
        "format_version": FORMAT_VERSION, **origin, "dtype": writers["train"].dtype.name,
        "vocab_size": tokenizer.vocab_size, "eot": tokenizer.separator}
    if task and task.has_windows:
        meta["task"] = {"name": source, "length": options.length or task.length}
    meta["splits"] = splits
    write_whole(folder / "meta.json", json.dumps(meta, indent=1))
    if source.startswith("sdists:"):
        names = [reader.name for reader in opened.readers if reader.split == "val"]     # of its documents
        meta["shared_passages"] = shared_passages(Corpus(folder), names)
        write_whole(folder / "meta.json", json.dumps(meta, indent=1))
    return meta


def refuse_changes(out: Path, different: list[str]) -> None:
    """Raise UserError if a corpus would be replaced by one that differs in something."""
    if different:
        raise UserError(f"--out {out}: holds a corpus that differs in {' and '.join(different)}, so its runs "
                        "could not be resumed; give another folder, or --replace")


def write_documents(source: Source, row_share: float, writers: dict[str, Writer], tokenizer: Tokenizer,
                    limit: int, has_mask: bool) -> None:
    """Encode and write documents, of the train split until it has `limit` tokens; print what is odd."""
    n_faults: Counter[str] = Counter()
    examples: dict[str, str] = {}
    # what has a split val comes last, all of it, whatever the limit
    val = [reader for reader in source.readers if reader.split == "val"]
    train = [reader for reader in source.readers if reader.split != "val"]
    bar = tqdm(desc="preparing", total=source.n_bytes or None, unit="B", unit_scale=True, disable=None)
    for readers in (train, val):
        for document, (ids, is_answer) in encode_all(documents(readers, row_share), tokenizer):
            for fault in faults_of(document.text):
                n_faults[fault] += 1
                examples.setdefault(fault, document.name)
            writer = writers[document.split]
            room = len(ids)
            if document.split == "train":
                room = limit - writer.n_tokens
            bar.update(writer.append(ids[:room], is_answer if has_mask else None))
            if room < len(ids):
                break
    bar.close()
    for fault, n in n_faults.items():
        warn(f"{n:,} {FAULTS[fault]}; such as {examples[fault]}")


def default_out(source: str) -> Path:
    """data/ and the source's name without .txt, .zip ...; for "." and "..", the name of that folder."""
    path = source.removeprefix("hf:").removeprefix("sdists:").split(":")[0]
    name = Path(urlsplit(source).path if "://" in source else os.path.abspath(path)).name
    # not the stem: books-0.5 and books-0.75 differ
    return Path("data", re.sub(r"\.(txt|parquet|zip|csv|jsonl(\.gz|\.zst)?)$", "", name))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", metavar="SOURCE", nargs="+", help="see above")
    parser.add_argument("--tokenizer", default="byte", metavar="NAME",
                        help="byte, gpt2, bpe:N, or the folder of a corpus, run or Hugging Face model")
    parser.add_argument("--out", type=Path, help="folder to write (default data/<the source's name>)")
    parser.add_argument("--replace", action="store_true",
                        help="replace a corpus that differs in source, revision, tokenizer or options")
    parser.add_argument("--revision", help="hf: a commit, branch or tag (default main)")
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of tables and .jsonl objects")
    parser.add_argument("--separator", metavar="TEXT",
                        help=f"what separates the documents of a .txt file, such as '{SEPARATOR}'")
    parser.add_argument("--val-share", type=float, metavar="X",
                        help="share of validation if a hash chooses (default .1 of .txt files, .01 of rows)")
    parser.add_argument("--limit-tokens", type=positive, metavar="N",
                        help="end the train split after N tokens; validation files stay whole, and if a hash "
                             "chooses, validation has what it chose until then")
    parser.add_argument("--length", type=positive, metavar="L",
                        help="tasks: train.seq_len (default 128, algorithms 64, a quarter of it in symbols)")
    args = parser.parse_args()
    options = SourceOptions(*(getattr(args, name) for name in SourceOptions._fields))
    out = args.out or default_out(args.source[0])
    meta = prepare(" + ".join(args.source), out, args.tokenizer, options, args.replace)
    for split, about in meta["splits"].items():
        print(f"{out}/{split}.bin: {about['documents']:,} documents, {about['bytes']:,} bytes, "
              f"{about['tokens']:,} tokens ({meta['tokenizer']['name']})")
    if meta["splits"]["val"]["documents"] < 5 and "task" not in meta:
        warn("val has fewer than 5 documents, so intervals are over windows, and say nothing about other "
             "documents; give more files, or --separator to cut a file into documents")


if __name__ == "__main__":
    run_command(main)
