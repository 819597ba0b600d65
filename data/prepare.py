"""Turn text into a corpus for train.py: `python data/prepare.py SOURCE [--tokenizer NAME] [--out DIR]`.

SOURCE is one of
  stdlib      the source text of the running Python's own standard library: always there, public, no download
  passkey     made-up documents to train for the passkey probe: keys told and asked for (data/passkey.py)
  FILE        .txt: one text, its last tenth is for validation. .jsonl, .jsonl.gz, .jsonl.zst: a document a
              line. .parquet: a document a row. A hash of its text picks one document in 100 for validation
  FOLDER      such files. Subfolders train/ and val/ are the splits where both exist; else of the .txt files,
              a document each, a hash of the path inside the folder picks a tenth, and of rows as for a file
  https://... such a file, or a .zip with one file in it, is fetched once (http, https, file)
  hf:NAME[:CONFIG][:SPLIT]    a dataset of the Hugging Face hub, hf:ORG/NAME, or a local folder in its layout,
              hf:./folder. Train and validation, else test, are the splits; where there is none to validate
              on, and of a SPLIT that is asked for, a hash of its text picks one document in 100

Tokenizers: byte; gpt2; bpe:N, learned from 128 MB of the train split at most, spread over all of it where its
size is known, with N ids, the separator included; or FOLDER, that of the corpus, run or model of Hugging Face
there.

The corpus appears at DIR all at once when complete. Text streams through little memory, over all cores. An
interrupted preparation leaves nothing that loads, but DIR's neighbour .DIR.partial, from which the same
command goes on, unless the source has changed.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # no traceback if Ctrl-C comes during the slow imports
    if not __package__:     # `python data/prepare.py` searches data/ for modules; they are in its parent
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from data import bpe, integrity
from data.encode import Encoded, Piece, chunked, encode, in_order, read_pieces
from data.journal import Journal, Position, check_replaceable
from data.loader import FORMAT_VERSION, SPLITS, Corpus, read_meta
from data.pieces import cut_before_space, pieces
from data.remote import LINE_BY_LINE, open_dataset, open_url
from data.sources import (
    FILE_VAL_SHARE,
    ROW_VAL_SHARE,
    STDLIB_LEFT_OUT,
    Passkey,
    Rows,
    Source,
    open_builtin,
    open_local,
)
from data.tokenizer import TOKENIZERS, CorpusTokenizer, byte_lengths, load_tokenizer, tokenizer_of
from hf.pretrained import is_pretrained, read_config
from hf.tokenizer import read_tokenizer
from runtime.command import argument_parser, run_command
from runtime.errors import UserError

BUILT_IN = ("stdlib", "passkey")
LEARN_BYTES = 2**27             # of text that bpe:N learns from, at most
LEARN_PIECE = 2**14             # bytes that are learned from at a time


class Options(NamedTuple):
    """What may be asked for beside source, place and tokenizer."""

    revision: str | None = None
    text_column: str = "text"
    articles: bool = False
    val_share: float | None = None
    limit_tokens: int | None = None


DEFAULTS = Options()


def open_source(source: str, out: Path, options: Options = DEFAULTS) -> Source:
    """What SOURCE means. Raises UserError for one that is not there."""
    val_share = options.val_share
    rows = Rows(options.text_column, ROW_VAL_SHARE if val_share is None else val_share)
    if (options.revision or options.articles) and not source.startswith("hf:"):
        raise UserError(f"--revision and --articles: are for hf:NAME, not for {source}; leave them out")
    if source in BUILT_IN:
        return open_builtin(source, val_share)
    if source.startswith("hf:"):
        return open_dataset(source, rows, options.revision, options.articles)
    if source.startswith(("http://", "https://", "file://")):
        return open_url(source, out.parent / ".downloads", rows, val_share)
    return open_local(source, rows, val_share)


def learn_from(source: Source) -> Iterator[bytes]:
    """Text of the train split to learn a vocabulary from: LEARN_BYTES at most, evenly spread if possible."""
    share = min(1.0, LEARN_BYTES / source.n_bytes) if source.n_bytes else 1.0
    seen = taken = 0
    for shard in source.shards:
        if shard.split == "val":
            continue
        for document in shard.documents():
            if document.split != "train" or isinstance(document.text, Passkey):
                continue
            for text in pieces(document.blocks(0), cut_before_space, LEARN_PIECE):
                seen += len(text)
                if taken + len(text) <= min(seen * share, LEARN_BYTES):
                    taken += len(text)
                    yield text
            if taken + LEARN_PIECE > LEARN_BYTES:
                return


# -----------------------------------------------------------------------------------------------------------
# The corpus


def prepare(source: str, out: Path, tokenizer_name: str, options: Options = DEFAULTS,
            workers: int | None = None) -> dict[str, Any]:
    """Write a corpus to the folder `out`, complete or not at all, and return its meta.json."""
    check_replaceable(out)
    given = find_tokenizer(tokenizer_name)
    out.parent.mkdir(parents=True, exist_ok=True)
    found = open_source(source, out, options)
    said = {key: value for key, value in options._asdict().items() if value != getattr(DEFAULTS, key)}
    plan = {"format_version": FORMAT_VERSION, "source": found.name, "revision": found.revision,
            "identity": found.identity, "tokenizer": given.sha256 if given else tokenizer_name,
            "options": said}
    with Journal(out, plan) as journal:
        tokenizer = given or learn_tokenizer(tokenizer_name, found, journal.corpus)
        if given and (Path(tokenizer_name) / bpe.FILE).exists():
            shutil.copyfile(Path(tokenizer_name) / bpe.FILE, journal.corpus / bpe.FILE)
        journal.open_splits("uint16" if tokenizer.vocab_size <= 2**16 else "uint32", tokenizer.sha256)
        encode_all(found, tokenizer, journal, options.limit_tokens or sys.maxsize, workers or n_cores())
        meta = {
            "format_version": FORMAT_VERSION,
            "source": found.name,
            "revision": found.revision,
            "dtype": journal.dtype, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot,
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            **({"options": said} if said else {}),
            "splits": {split: about_split(journal, found, split) for split in SPLITS},
        }
        journal.publish(meta)
    return meta


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_tokenizer(name: str) -> CorpusTokenizer | None:
    """The tokenizer of that name, or of a corpus, run or model in that folder; None for one to be learned."""
    for file in ("meta.json", "corpus.json"):
        if (Path(name) / file).is_file():
            return tokenizer_of(read_meta(Path(name) / file), Path(name))
    if is_pretrained(name):
        return read_tokenizer(Path(name), read_config(Path(name))[1])
    return None if bpe.size_of(name) else load_tokenizer(name)


def learn_tokenizer(name: str, source: Source, folder: Path) -> CorpusTokenizer:
    """The tokenizer bpe:N, learned and put into the folder, unless it is there."""
    size = bpe.size_of(name)
    assert size is not None
    if not (folder / bpe.FILE).exists():
        print(f"learning {name} from {source.name}", flush=True)
        content = bpe.learn(learn_from(source), size)
        temporary = folder / f".{bpe.FILE}.tmp"
        temporary.write_text(content, encoding="ascii")
        temporary.rename(folder / bpe.FILE)
    return load_tokenizer(name, folder)


def encode_all(source: Source, tokenizer: CorpusTokenizer, journal: Journal, limit: int,
               workers: int) -> None:
    """Read, encode and write all documents that the journal does not have."""
    lengths, train = byte_lengths(tokenizer), journal.splits["train"]
    first_val = next((i for i, shard in enumerate(source.shards) if shard.split == "val"), len(source.shards))

    def encode_chunk(chunk: list[Piece]) -> list[Encoded]:
        return encode(chunk, tokenizer, lengths, journal.dtype)

    is_utf8 = True
    with Progress(source, journal) as progress:
        for end in (first_val, len(source.shards)):                     # those of val alone come last
            is_full = end == first_val and train.n_tokens >= limit
            found = read_pieces(source.shards[:end], tokenizer, journal.position)
            with closing(in_order(encode_chunk, chunked(found), workers)) as work:
                while not is_full and (done := next(work, None)):
                    chunk, encoded = done
                    for part in encoded:
                        room = limit - train.n_tokens if part.split == "train" else len(part.ids)
                        is_full |= room < len(part.ids)
                        write(journal, part, room, lengths)
                    journal.save(chunk[-1].end)
                    progress.show(chunk)
                    is_utf8 = is_utf8 and (tokenizer.name == "byte" or check_utf8(chunk))
            journal.save(max(journal.position, Position(end)), at_once=True)


def write(journal: Journal, part: Encoded, room: int, lengths: np.ndarray) -> None:
    """Write what a chunk adds to a split, as far as there is room."""
    ids = part.ids[:room]
    if len(ids) < len(part.ids) and room in part.starts + 1:
        ids = ids[:-1]                                                  # a separator with nothing behind it
    starts = part.starts[part.starts < len(ids)]
    journal.splits[part.split].write(ids, starts, int(lengths[ids].sum()))


def check_utf8(chunk: list[Piece]) -> bool:
    """Whether a chunk is UTF-8; a warning if not."""
    for piece in chunk:
        try:
            if isinstance(piece.text, bytes):
                piece.text.decode("utf-8")
        except UnicodeDecodeError as error:
            print(f"warning: {piece.where}: not UTF-8 ({error.reason}); such bytes are kept, a token each; "
                  "text in another encoding is better converted first", file=sys.stderr, flush=True)
            return False
    return True


def about_split(journal: Journal, source: Source, split: str) -> dict[str, Any]:
    """What meta.json says of a split, whose index is written. Raises UserError for one without text."""
    files = journal.splits[split]
    if not files.n_documents:
        drawn = any(shard.split is None for shard in source.shards)
        reason = "no document's hash falls there; change --val-share or add text" if drawn else \
            "its documents are all empty; add text"
        raise UserError(f"source {source.name}: no text for {split}: {reason}")
    index = files.write_index(journal.corpus / f"{split}.idx.npy")
    return {"tokens": files.n_tokens, "bytes": files.n_bytes, "documents": files.n_documents,
            "sha256": {f"{split}.bin": files.tokens.sha256.hexdigest(), f"{split}.idx.npy": index}}


class Progress:
    """A bar: text read, its speed, the time that is left. In a file, a line now and then."""

    def __init__(self, source: Source, journal: Journal) -> None:
        from tqdm import tqdm

        self.source, self.sizes = source, np.cumsum([0.0, *(shard.size for shard in source.shards)])
        is_terminal = sys.stderr.isatty()
        self.bar = tqdm(desc="preparing", unit="B", unit_scale=True, leave=False,
                        delay=1 if is_terminal else 30, mininterval=0.2 if is_terminal else 30,
                        initial=sum(split.n_bytes for split in journal.splits.values()))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def show(self, chunk: list[Piece]) -> None:
        """A chunk has been written. The share of the source that has been read tells how much there is."""
        n_bytes = sum(len(piece.text) for piece in chunk if isinstance(piece.text, bytes))
        shard = chunk[-1].end.shard
        share = (self.sizes[shard] + self.source.shards[shard].seen) / max(1.0, self.sizes[-1])
        if share > 0:
            self.bar.total = int((self.bar.n + n_bytes) / share)
        self.bar.update(n_bytes)


def check(folder: Path) -> None:
    """Compare the full checksums of a corpus, and renew verified.json. Raises UserError if a file differs."""
    splits = read_meta(folder / "meta.json")["splits"]
    sums = {name: splits[split]["sha256"].get(name, "") for split in SPLITS
            for name in (f"{split}.bin", f"{split}.idx.npy")}
    integrity.check_sums(folder, sums)
    try:
        integrity.record(folder, list(sums))
    except OSError as error:        # a read-only folder: the result stands all the same
        print(f"warning: {folder / integrity.FILE}: cannot be written ({error.strerror})", file=sys.stderr)
    Corpus(folder)                  # sizes, offsets and ids agree with meta.json


def describe(meta: dict[str, Any], out: Path) -> Iterator[str]:
    """What was written, for the screen."""
    for split in SPLITS:
        about = meta["splits"][split]
        yield (f"{out}/{split}.bin: {about['documents']:,} documents, {about['bytes']:,} bytes, "
               f"{about['tokens']:,} tokens ({meta['tokenizer']['name']})")


def default_out(source: str) -> Path:
    """data/ and the source's name, without its ending; of "." and "..", that of the folder."""
    name = urlsplit(source).path if "://" in source else \
        os.path.abspath(source.removeprefix("hf:").split(":")[0])
    return Path("data") / Path(name.removesuffix(".gz").removesuffix(".zst")).stem


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="see above")
    parser.add_argument("--check", type=Path, metavar="DIR",
                        help="prepare nothing; compare all files of the corpus DIR with their checksums")
    parser.add_argument("--tokenizer", default="byte", metavar="NAME",
                        help=f"{', '.join(TOKENIZERS)} or FOLDER, that of a corpus, a run or a model of "
                             "Hugging Face (default byte)")
    parser.add_argument("--out", type=Path, help="folder to write (default data/<the source's name>)")
    parser.add_argument("--revision", help="hf: a commit, branch or tag (default main); meta.json records "
                                           "the commit")
    parser.add_argument("--text-column", default="text", metavar="NAME",
                        help="of rows, and of the objects in .jsonl (default text)")
    parser.add_argument("--articles", action="store_true",
                        help="hf: rows are lines, and ` = Title = ` opens a document; by itself on "
                             f"{LINE_BY_LINE[0]}")
    parser.add_argument("--val-share", type=float, metavar="X",
                        help=f"share that a hash puts into validation (default {FILE_VAL_SHARE} of .txt "
                             f"files or of a single one, {ROW_VAL_SHARE} of rows)")
    parser.add_argument("--limit-tokens", type=int, metavar="N",
                        help="end the train split after N tokens, separators included, its last document cut "
                             "short. Validation files stay whole; where a hash picks, validation is what it "
                             "picked until then")
    parser.add_argument("--workers", type=int, help="threads (default: one a core); the result is the same")
    args = parser.parse_args()
    if args.check:
        check(args.check)
        print(f"{args.check}: all files are what was written")
        return
    if args.source is None:
        raise UserError("SOURCE is missing; see data/prepare.py --help")
    if args.val_share is not None and not 0 < args.val_share < 1:
        raise UserError(f"--val-share {args.val_share}: must lie between 0 and 1, such as 0.1")
    for name, value, least in (("--limit-tokens", args.limit_tokens, 2), ("--workers", args.workers, 1)):
        if value is not None and value < least:
            raise UserError(f"{name} {value}: must be at least {least}")
    out = args.out or default_out(args.source)
    if args.source == "stdlib":
        print("left out of stdlib: "
              + ", ".join(f"{pattern} ({why})" for pattern, why in STDLIB_LEFT_OUT.items()))
    options = Options(args.revision, args.text_column, args.articles, args.val_share, args.limit_tokens)
    meta = prepare(args.source, out, args.tokenizer, options, args.workers)
    for line in describe(meta, out):
        print(line)


if __name__ == "__main__":
    run_command(main)
