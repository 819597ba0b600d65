"""Prepare a corpus for train.py: `python data/prepare.py SOURCE [SOURCE ...] [--tokenizer NAME] [--out DIR]`.

Several SOURCEs become one corpus. Each is one of
  stdlib      the source text of this Python's standard library: always available, no download
  packages    the Python source of the packages that constraints.txt pins, a document per package: code that
              everybody can rebuild, split by package. First `make test`, which installs them all
  sdists:LIST[:docs|:code]    the source distributions that a CSV file lists (name, version, sha256, split),
              such as configs/study/sdists.csv; downloaded once by pypi-simple, which the extra [study]
              installs. A document of documentation and one of code per project, or only one of these kinds
  TASK        generated documents, described in data/tasks.py: repeats, passkey, needles, variables, copying,
              reversal, sorting, addition, parity or flip_flop
  FILE        .txt: one text, its last tenth is for validation. .jsonl, .jsonl.gz, .jsonl.zst: a document per
              line. .parquet: a document per row. A hash of the text puts 1 document in 100 into validation
  FOLDER      a folder of these files. Subfolders train/ and val/ are the splits if both exist. Else each .txt
              file is a document, and a hash of its path puts a tenth into validation; rows as for FILE
  https://... one of these files, or a .zip with one in it; downloaded once (also http, file)
  hf:NAME[:CONFIG][:SPLIT]    a dataset of the Hugging Face hub, hf:ORG/NAME, or a local folder in its layout,
              hf:./folder. The splits are train and validation, else test. If there is only one split, or
              SPLIT names one, a hash of the text puts 1 document in 100 into validation

Tokenizers: byte; gpt2; bpe:N, which has N ids including the separator and is learned from the first 128 MB of
the train split; or FOLDER, the tokenizer of the corpus, run or Hugging Face model there.

The corpus appears at DIR when it is complete. After an interruption, the same command starts over.
"""

import itertools
import json
import os
import shutil
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
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
from base.errors import UserError
from base.files import flush, sha256_of, write_whole
from data import sources
from data import tokenizer as tokenizers
from data.loader import SPLITS, read_meta
from data.sdists import PASSAGE, count_shared
from data.sources import Document, Options, Part
from data.tasks import TASKS, TaskDocument
from data.tokenizer import TOKENIZER_FILE, Tokenizer, pieces
from hf.pretrained import is_pretrained, read_config
from hf.tokenizer import read_tokenizer

LEARN_BYTES = 2**27             # most text that bpe:N learns from
LEARN_PIECE = 2**14             # bytes that are learned from at a time
TOGETHER = 256                  # documents that are encoded on all cores, then written
DEFAULTS = Options()
CORPUS_FILES = {"meta.json", TOKENIZER_FILE,
                *(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx.npy", "mask.bin"))}


def find_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer of a name, or of a corpus, run or model folder; None if it must be learned."""
    for file in ("meta.json", "corpus.json"):
        if (Path(name) / file).is_file():
            return tokenizers.tokenizer_of(read_meta(Path(name) / file), Path(name))
    if is_pretrained(name):
        return read_tokenizer(Path(name), read_config(Path(name))[1])
    return None if tokenizers.size_of(name) else tokenizers.load_tokenizer(name)


def learn_from(documents: Iterable[Document]) -> Iterator[bytes]:
    """Text to learn a vocabulary from: the first LEARN_BYTES of the train split."""
    n_bytes = 0
    for document in documents:
        if document.split == "train" and isinstance(document.text, bytes):
            yield from pieces(document.text, LEARN_PIECE)
            n_bytes += len(document.text)
        if n_bytes > LEARN_BYTES:
            return


class Writer:
    """The growing files of a corpus: ids, starts of documents and, for tasks, a mask of answers."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, has_mask: bool) -> None:
        self.folder, self.tokenizer, self.has_mask = folder, tokenizer, has_mask
        self.lengths = tokenizers.byte_lengths(tokenizer)
        self.dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
        self.files = {name: (folder / name).open("wb") for split in SPLITS
                      for name in (f"{split}.bin", f"{split}.mask.bin")[:1 + has_mask]}
        self.starts = {split: array("Q") for split in SPLITS}
        self.n_bytes = dict.fromkeys(SPLITS, 0)
        self.n_null, self.has_warned = 0, False

    def n_tokens(self, split: str) -> int:
        return self.files[f"{split}.bin"].tell() // self.dtype.itemsize

    def write(self, documents: Iterator[Document], limit: int, pool: Executor, bar: tqdm) -> None:
        """Append documents, which are encoded on all cores, until the train split has `limit` tokens."""
        while group := list(itertools.islice(documents, TOGETHER)):
            for document, (ids, mask) in zip(group, pool.map(self.encode, group), strict=True):
                split = document.split
                room = limit - self.n_tokens("train") if split == "train" else len(ids)
                if min(room, len(ids)) > 1:                 # no separator without a document
                    self.starts[split].append(self.n_tokens(split))
                    self.files[f"{split}.bin"].write(ids[:room].astype(self.dtype).data)
                    if self.has_mask and mask is not None:
                        self.files[f"{split}.mask.bin"].write(mask[:room].astype("u1").data)
                    n_bytes = int(self.lengths[ids[:room]].sum())
                    self.n_bytes[split] += n_bytes
                    bar.update(n_bytes)
                self.n_null += document.text is None
                if room < len(ids):
                    return

    def encode(self, document: Document) -> tuple[np.ndarray, np.ndarray | None]:
        """The ids of a document, the separator first, and which of them are answers."""
        if isinstance(document.text, TaskDocument):
            return document.text.ids.astype(np.uint32), document.text.is_answer
        text = document.text or b""
        try:
            is_text = "\0" not in text.decode("utf-8")
        except UnicodeDecodeError:
            is_text = False
        if not is_text and not self.has_warned:
            self.has_warned = True
            print(f"warning: {document.name} is not UTF-8, or has NUL bytes; --tokenizer byte keeps all "
                  "bytes, others replace those outside UTF-8 by U+FFFD", file=sys.stderr, flush=True)
        return np.append(np.array([self.tokenizer.eot], np.uint32), self.tokenizer.encode(text)), None

    def finish(self, split: str) -> dict[str, Any]:
        """Write the index of a split and return its meta.json entry."""
        starts, n_tokens = self.starts[split], self.n_tokens(split)
        np.save(self.folder / f"{split}.idx.npy", np.array([*starts, n_tokens], "<u8"))
        names = (f"{split}.bin", f"{split}.idx.npy", f"{split}.mask.bin")[:2 + self.has_mask]
        for name in names:
            if name in self.files:
                self.files[name].close()
            flush(self.folder / name)
        return {"tokens": n_tokens, "bytes": self.n_bytes[split], "documents": len(starts),
                "sha256": {name: sha256_of(self.folder / name) for name in names}}


def prepare(source: str, out: Path, tokenizer_name: str, options: Options = DEFAULTS,
            replace: bool = False) -> dict[str, Any]:
    """Write a corpus to the folder `out`, complete or not at all, and return its meta.json.

    It replaces a corpus of another tokenizer, on which runs may depend, only if `replace`. Raises UserError.
    """
    out = out.resolve() if out.is_symlink() else out        # such as one to another disk: it stays a link
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name} if out.exists() else set()
    if names and (names - CORPUS_FILES or "meta.json" not in names):
        raise UserError(f"--out {out}: would be replaced, but {min(names - CORPUS_FILES or names)} is not "
                        "part of a prepared corpus; give another folder")
    given = find_tokenizer(tokenizer_name)
    before = read_meta(out / "meta.json")["tokenizer"] if names and not replace else {}
    if given:
        require_same(out, before, given)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.partial")
    try:
        with FileLock(out.with_name(f".{out.name}.lock"), timeout=0):
            shutil.rmtree(folder, ignore_errors=True)                   # of a process that was killed
            folder.mkdir()
            try:
                meta = write_corpus(folder, source, out, given, tokenizer_name, options, before)
                shutil.rmtree(out, ignore_errors=True)
                folder.rename(out)
                return meta
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except Timeout:
        raise UserError(f"--out {out}: another process is preparing it; give another folder") from None
    except OSError as error:        # such as a full disk
        raise UserError(f"{error.filename or folder}: {error.strerror or error}") from error


def require_same(out: Path, before: dict[str, str], tokenizer: Tokenizer) -> None:
    """Raise UserError if the corpus to replace, unless `before` is empty, is by another tokenizer."""
    if before and before["sha256"] != tokenizer.sha256:
        raise UserError(f"--out {out}: holds a corpus by another tokenizer, {before['name']}, whose runs "
                        "could not be resumed; give another folder, or --replace")


def write_corpus(folder: Path, source: str, out: Path, given: Tokenizer | None, tokenizer_name: str,
                 options: Options, before: dict[str, str]) -> dict[str, Any]:
    """Write a corpus to `folder`; meta.json comes last. Without a given tokenizer, one is learned.

    `before` is that of the corpus to replace, if it must be the same. Raises UserError.
    """
    task = TASKS.get(source)
    text_source = sources.open_source(source, out, given, options)
    file = given.file if given else ""
    if given is None:
        print(f"learning {tokenizer_name} from {text_source.name}", flush=True)
        texts = learn_from(sources.documents(text_source.parts, options.val_share))
        file = tokenizers.learn(texts, tokenizers.size_of(tokenizer_name) or 0)
    if file:
        write_whole(folder / TOKENIZER_FILE, file)
    tokenizer = given or tokenizers.load_tokenizer(tokenizer_name, folder)
    require_same(out, before, tokenizer)
    corpus = Writer(folder, tokenizer, task is not None and task.has_mask)
    with ThreadPoolExecutor() as pool, tqdm(        # threads: tiktoken releases the interpreter's lock
            desc="preparing", total=text_source.n_bytes, unit="B", unit_scale=True, disable=None) as bar:
        for is_val in (False, True):        # of a dataset with a split val, all of it, whatever the limit
            parts = [part for part in text_source.parts if (part.split == "val") == is_val]
            corpus.write(sources.documents(parts, options.val_share), options.limit_tokens or sys.maxsize,
                         pool, bar)
    if corpus.n_null:
        print(f"left out of {text_source.name}: {corpus.n_null:,} rows without text (null)", flush=True)
    for split in SPLITS:
        if not corpus.n_tokens(split):
            raise UserError(f"source {text_source.name}: no text for {split}; add text ({sources.KINDS}), or "
                            "change --val-share if a hash of each document chooses its split")
    changed = {key: value for key, value in options._asdict().items() if value != getattr(DEFAULTS, key)}
    splits = {split: corpus.finish(split) for split in SPLITS}
    meta = {
        "format_version": 1, "source": text_source.name, "revision": text_source.revision,
        "dtype": corpus.dtype.name, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        **({"options": changed} if changed else {}),
        **({"task": {"name": source, "length": options.length or task.length}}
           if task and task.has_windows else {}),
        "splits": splits,
    }
    if source.startswith("sdists:"):
        meta["shared_passages"] = shared_passages(corpus, text_source.parts)
    write_whole(folder / "meta.json", json.dumps(meta, indent=1))
    return meta


def shared_passages(corpus: Writer, parts: Sequence[Part]) -> dict[str, tuple[int, int]]:
    """For each part of val, its passages that train has too, and all its passages; also printed.

    A passage is PASSAGE consecutive tokens of the corpus. Each part has one document.
    """
    documents = {}
    for split in SPLITS:
        tokens = np.fromfile(corpus.folder / f"{split}.bin", corpus.dtype)
        documents[split] = np.split(tokens, np.array(corpus.starts[split][1:], np.int64))
    names = [part.name for part in parts if part.split == "val"]
    report = dict(zip(names, count_shared(documents["train"], documents["val"]), strict=True))
    print(f"passages of {PASSAGE} tokens of val that train has too:")
    for name, (n_shared, n_passages) in report.items():
        print(f"  {name}: {n_shared:,} of {n_passages:,}")
    return report


def default_out(source: str) -> Path:
    """data/ and the source's name without .txt, .zip ...; for "." and "..", the name of that folder."""
    path = source.removeprefix("hf:").removeprefix("sdists:").split(":")[0]
    name = Path(urlsplit(source).path if "://" in source else os.path.abspath(path)).name
    for suffix in (*sources.SUFFIXES, ".zip", ".csv"):      # not the stem: books-0.5 and books-0.75 differ
        name = name.removesuffix(suffix)
    return Path("data") / name


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", metavar="SOURCE", nargs="+", help="see above")
    parser.add_argument("--tokenizer", default="byte", metavar="NAME",
                        help="byte, gpt2, bpe:N, or the folder of a corpus, run or Hugging Face model")
    parser.add_argument("--out", type=Path, help="folder to write (default data/<the source's name>)")
    parser.add_argument("--replace", action="store_true",
                        help="replace a corpus by another tokenizer in the folder")
    parser.add_argument("--revision", help="hf: a commit, branch or tag (default main)")
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of tables and .jsonl objects")
    parser.add_argument("--val-share", type=float, metavar="X",
                        help="share of validation if a hash chooses (default .1 of .txt files, .01 of rows)")
    parser.add_argument("--limit-tokens", type=positive, metavar="N",
                        help="end the train split after N tokens; validation files stay whole, and if a hash "
                             "chooses, validation has what it chose until then")
    parser.add_argument("--length", type=int, metavar="L",
                        help="tasks: train.seq_len (default 128, algorithms 64, a quarter of it in symbols)")
    args = parser.parse_args()
    options = Options(*(getattr(args, name) for name in Options._fields))
    out = args.out or default_out(args.source[0])
    meta = prepare(" + ".join(args.source), out, args.tokenizer, options, args.replace)
    for split, about in meta["splits"].items():
        print(f"{out}/{split}.bin: {about['documents']:,} documents, {about['bytes']:,} bytes, "
              f"{about['tokens']:,} tokens ({meta['tokenizer']['name']})")
    if meta["splits"]["val"]["documents"] < 5 and "task" not in meta:
        print("warning: intervals need at least 5 documents for validation; give a larger --val-share, or "
              "put files into the folders train/ and val/ of SOURCE yourself", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
