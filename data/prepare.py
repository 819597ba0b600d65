"""Prepare a corpus for train.py: `python data/prepare.py SOURCE [--tokenizer NAME] [--out DIR]`.

SOURCE is one of
  stdlib      the source text of this Python's standard library: always available, no download
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

Tokenizers: byte; gpt2; bpe:N, which has N ids including the separator and is learned from at most 128 MB of
the train split, spread over all of it if its size is known; or FOLDER, the tokenizer of the corpus, run or
Hugging Face model there.

The corpus appears at DIR at once when it is complete. Text is streamed in little memory, on all cores. An
interrupted preparation leaves nothing that loads, only the folder .DIR.partial beside DIR, from which the
same command resumes unless the source has changed. `--check DIR` compares a corpus with its checksums.
"""

import json
import os
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
    SUFFIXES,
    Generated,
    Rows,
    Source,
    identity_of,
    open_local,
    open_stdlib,
    open_task,
)
from data.tasks import TASKS
from data.tokenizer import TOKENIZERS, CorpusTokenizer, byte_lengths, load_tokenizer, tokenizer_of
from data.tokenizer_json import PretrainedTokenizer
from hf.pretrained import is_pretrained, read_config
from hf.tokenizer import read_tokenizer
from runtime.command import argument_parser, run_command
from runtime.errors import UserError
from runtime.files import write_whole

LEARN_BYTES = 2**27             # most text that bpe:N learns from
LEARN_PIECE = 2**14             # bytes that are learned from at a time


class Options(NamedTuple):
    """Options other than source, folder and tokenizer."""

    revision: str | None = None
    text_column: str = "text"
    articles: bool = False
    val_share: float | None = None
    limit_tokens: int | None = None
    length: int | None = None
    unknown_bytes: str = "error"


DEFAULTS = Options()


def open_source(source: str, out: Path, options: Options = DEFAULTS) -> Source:
    """Open SOURCE. Raises UserError if it does not exist."""
    val_share = options.val_share
    rows = Rows(options.text_column, ROW_VAL_SHARE if val_share is None else val_share)
    if (options.revision or options.articles) and not source.startswith("hf:"):
        raise UserError(f"--revision and --articles: are for hf:NAME, not for {source}; omit them")
    if options.length and source not in TASKS:
        raise UserError(f"--length: is for tasks ({', '.join(TASKS)}), not for {source}; omit it")
    if source in TASKS:
        return open_task(source, options.length)
    if source == "stdlib":
        return open_stdlib(val_share)
    if source.startswith("hf:"):
        return open_dataset(source, rows, options.revision, options.articles)
    if source.startswith(("http://", "https://", "file://")):
        return open_url(source, out.parent / ".downloads", rows, val_share)
    return open_local(source, rows, val_share)


def learn_from(source: Source) -> Iterator[bytes]:
    """Text of the train split to learn a vocabulary from: at most LEARN_BYTES, evenly spread if possible."""
    share = min(1.0, LEARN_BYTES / source.n_bytes) if source.n_bytes else 1.0
    seen = taken = 0
    for shard in source.shards:
        if shard.split == "val":
            continue
        for document in shard.documents():
            if document.split != "train" or isinstance(document.text, Generated):
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
    out = out.resolve() if out.is_symlink() else out        # such as one to another disk: it stays a link
    check_replaceable(out)
    given = find_tokenizer(tokenizer_name)
    if isinstance(given, PretrainedTokenizer):      # the others have an id for every byte
        given.on_unknown = options.unknown_bytes
    out.parent.mkdir(parents=True, exist_ok=True)
    found = open_source(source, out, options)
    changed = {key: value for key, value in options._asdict().items() if value != getattr(DEFAULTS, key)}
    plan = {"format_version": FORMAT_VERSION, "source": found.name, "revision": found.revision,
            "identity": found.identity, "tokenizer": given.sha256 if given else tokenizer_name,
            "options": changed}
    with Journal(out, plan) as journal:
        tokenizer = given or learn_tokenizer(tokenizer_name, found, journal.corpus)
        copied = Path(tokenizer_name) / bpe.FILE
        if isinstance(given, PretrainedTokenizer):      # it may have left out tokens
            write_whole(journal.corpus / bpe.FILE, json.dumps(given.content, ensure_ascii=False))
        elif given and copied.exists():
            write_whole(journal.corpus / bpe.FILE, copied.read_text(encoding="utf-8"))
        dtype, task = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32", TASKS.get(source)
        has_mask = task is not None and task.has_mask
        journal.open_splits(dtype, tokenizer.sha256, has_mask)
        encode_all(found, tokenizer, journal, options.limit_tokens or sys.maxsize, workers or n_cores())
        if found.files and identity_of(found.files) != found.identity:
            raise UserError(f"source {found.name}: was changed while it was read; the same command starts "
                            "again")
        meta = {
            "format_version": FORMAT_VERSION,
            "source": found.name,
            "revision": found.revision,
            "dtype": journal.dtype, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot,
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            **({"options": changed} if changed else {}),
            **({"task": {"name": source, "length": options.length or task.length}}
               if task and task.has_windows else {}),
            "splits": {split: about_split(journal, found, split) for split in SPLITS},
        }
        journal.publish(meta)
    return meta


def n_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_tokenizer(name: str) -> CorpusTokenizer | None:
    """The tokenizer of a name, or of a corpus, run or model folder; None if it must be learned."""
    for file in ("meta.json", "corpus.json"):
        if (Path(name) / file).is_file():
            return tokenizer_of(read_meta(Path(name) / file), Path(name))
    if is_pretrained(name):
        return read_tokenizer(Path(name), read_config(Path(name))[1])
    return None if bpe.size_of(name) else load_tokenizer(name)


def learn_tokenizer(name: str, source: Source, folder: Path) -> CorpusTokenizer:
    """The tokenizer bpe:N, learned and saved in the folder unless it is there already."""
    size = bpe.size_of(name)
    assert size is not None
    if not (folder / bpe.FILE).exists():
        print(f"learning {name} from {source.name}", flush=True)
        content = bpe.learn(learn_from(source), size)
        write_whole(folder / bpe.FILE, content)
    return load_tokenizer(name, folder)


def encode_all(source: Source, tokenizer: CorpusTokenizer, journal: Journal, limit: int,
               workers: int) -> None:
    """Read, encode and write all documents that the journal does not have yet."""
    lengths, train = byte_lengths(tokenizer), journal.splits["train"]
    first_val = next((i for i, shard in enumerate(source.shards) if shard.split == "val"), len(source.shards))

    def encode_chunk(chunk: list[Piece]) -> list[Encoded]:
        return encode(chunk, tokenizer, lengths, journal.dtype)

    is_utf8 = True
    with Progress(source, journal) as progress:
        for end in (first_val, len(source.shards)):                     # shards of val alone come last
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
    """Append a chunk's ids to a split, at most `room` of them."""
    ids = part.ids[:room]
    if len(ids) < len(part.ids) and room in part.starts + 1:
        ids = ids[:-1]                                                  # no separator without a document
    starts = part.starts[part.starts < len(ids)]
    journal.splits[part.split].write(ids, starts, part.mask[:len(ids)], int(lengths[ids].sum()))


def check_utf8(chunk: list[Piece]) -> bool:
    """Whether a chunk is UTF-8; print a warning if not."""
    for piece in chunk:
        try:
            if isinstance(piece.text, bytes):
                piece.text.decode("utf-8")
        except UnicodeDecodeError as error:
            print(f"warning: {piece.where}: not UTF-8 ({error.reason}); these bytes stay, one token each; "
                  "convert text in another encoding first", file=sys.stderr, flush=True)
            return False
    return True


def about_split(journal: Journal, source: Source, split: str) -> dict[str, Any]:
    """Write the index of a split and return its meta.json entry. Raises UserError if it has no text."""
    files = journal.splits[split]
    if not files.n_documents:
        drawn = any(shard.split is None for shard in source.shards)
        reason = "no document's hash chose this split; change --val-share or add text" if drawn else \
            "all its documents are empty; add text"
        raise UserError(f"source {source.name}: no text for {split}: {reason}")
    sha256 = {f"{split}.bin": files.tokens.sha256.hexdigest(),
              f"{split}.idx.npy": files.write_index(journal.corpus / f"{split}.idx.npy")}
    if "mask" in files.files:
        sha256[f"{split}.mask.bin"] = files.files["mask"].sha256.hexdigest()
    return {"tokens": files.n_tokens, "bytes": files.n_bytes, "documents": files.n_documents,
            "sha256": sha256}


class Progress:
    """A progress bar: text read, speed, time left. If stderr is a file, a line every 30 seconds."""

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
        """Show that a chunk is written; estimate the total from the share of the source read so far."""
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
            for name in (f"{split}.bin", f"{split}.idx.npy", f"{split}.mask.bin")
            if name in splits[split]["sha256"] or not name.endswith(".mask.bin")}
    integrity.compare_whole(folder, sums)
    Corpus(folder)                  # sizes, offsets and ids agree with meta.json


def describe(meta: dict[str, Any], out: Path) -> Iterator[str]:
    """The lines to print about a new corpus."""
    for split in SPLITS:
        about = meta["splits"][split]
        yield (f"{out}/{split}.bin: {about['documents']:,} documents, {about['bytes']:,} bytes, "
               f"{about['tokens']:,} tokens ({meta['tokenizer']['name']})")


def default_out(source: str) -> Path:
    """data/ and the source's name without .txt, .zip ...; for "." and "..", the name of that folder."""
    name = Path(urlsplit(source).path if "://" in source else
                os.path.abspath(source.removeprefix("hf:").split(":")[0])).name
    suffix = next((end for end in (*SUFFIXES, ".zip") if name.lower().endswith(end)), "")
    return Path("data") / name[:len(name) - len(suffix)]    # not the stem: books-0.5 and books-0.75 differ


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="see above")
    parser.add_argument("--check", type=Path, metavar="DIR",
                        help="prepare nothing; compare all files of the corpus DIR with their checksums")
    parser.add_argument("--tokenizer", default="byte", metavar="NAME",
                        help=f"{', '.join(TOKENIZERS)}, or the folder of a corpus, run or Hugging Face "
                             "model (default byte)")
    parser.add_argument("--out", type=Path, help="folder to write (default data/<the source's name>)")
    parser.add_argument("--revision", help="hf: a commit, branch or tag (default main); meta.json records "
                                           "the commit")
    parser.add_argument("--text-column", default="text", metavar="NAME",
                        help="the text in tables and in .jsonl objects (default text)")
    parser.add_argument("--articles", action="store_true",
                        help="hf: rows are lines, ` = Title = ` opens a document; always on for "
                             f"{LINE_BY_LINE[0]}")
    parser.add_argument("--val-share", type=float, metavar="X",
                        help=f"share of validation if a hash chooses (default {FILE_VAL_SHARE} of .txt files "
                             f"or of a single one, {ROW_VAL_SHARE} of rows)")
    parser.add_argument("--limit-tokens", type=int, metavar="N",
                        help="end the train split after N tokens, including separators; its last document is "
                             "truncated. Validation files stay whole; if a hash chooses, validation has what "
                             "it chose until then")
    parser.add_argument("--length", type=int, metavar="L",
                        help="tasks: inputs of a training window, train.seq_len (default "
                             f"{TASKS['needles'].length}; algorithms {TASKS['parity'].length}, with up to a "
                             "quarter of it in symbols)")
    parser.add_argument("--unknown-bytes", choices=("error", "skip", "replace"), default="error",
                        help="what to do with characters for which the tokenizer of a Hugging Face model has "
                             "no id: stop, leave them out, or put U+FFFD (or ?) there (default error)")
    parser.add_argument("--workers", type=int, help="threads (default: one per core); the result is the same")
    args = parser.parse_args()
    if args.check:
        check(args.check)
        print(f"{args.check}: all files are what was written")
        return
    if args.source is None:
        raise UserError("SOURCE is missing; see data/prepare.py --help")
    if args.val_share is not None and not 0 < args.val_share < 1:
        raise UserError(f"--val-share {args.val_share}: must be between 0 and 1, such as 0.1")
    for name, value, least in (("--limit-tokens", args.limit_tokens, 2), ("--workers", args.workers, 1),
                               ("--length", args.length, 16)):
        if value is not None and value < least:
            raise UserError(f"{name} {value}: must be at least {least}")
    out = args.out or default_out(args.source)
    if args.source == "stdlib":
        print("left out of stdlib: "
              + ", ".join(f"{pattern} ({why})" for pattern, why in STDLIB_LEFT_OUT.items()))
    options = Options(args.revision, args.text_column, args.articles, args.val_share, args.limit_tokens,
                      args.length, args.unknown_bytes)
    meta = prepare(args.source, out, args.tokenizer, options, args.workers)
    for line in describe(meta, out):
        print(line)


if __name__ == "__main__":
    run_command(main)
