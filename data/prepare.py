"""Turn text into a corpus for train.py: `python data/prepare.py SOURCE [--tokenizer byte|gpt2] [--out DIR]`.

SOURCE is one of
  stdlib      the source text of the running Python's own standard library: always there, public, no download
  passkey     made-up documents to train for the passkey probe: keys told and asked for (data/passkey.py)
  FILE.txt    one text; its last tenth is for validation
  FOLDER      its .txt files, a document each. Subfolders train/ and val/ are the splits where both exist;
              else a hash of each file's path inside the folder picks a tenth of the files for validation

The corpus appears at DIR all at once when complete; an interrupted preparation leaves nothing that loads.
"""

import hashlib
import json
import os
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the slow imports: no traceback

import numpy as np

# `python data/prepare.py` finds the root's modules
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import UserError, argument_parser, run_command  # noqa: E402
from data.loader import FORMAT_VERSION, SPLITS  # noqa: E402
from data.passkey import passkey_document, repeating_document  # noqa: E402
from data.tokenizer import TOKENIZERS, Tokenizer, byte_lengths, load_tokenizer  # noqa: E402

VAL_SHARE = 0.1
BUILT_IN = ("stdlib", "passkey")
PASSKEY_DOCUMENTS = {"train": range(400, 40_000), "val": range(400)}
PASSKEY_LENGTHS = (24, 129)     # tokens, [from, to): they fit into the quick configs' windows
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


class Document(NamedTuple):
    """A piece of text: where it lies, and which bytes of the file it is (end None: to the file's end)."""

    path: Path
    start: int = 0
    end: int | None = None


class Passkey(NamedTuple):
    """A made-up document: a function of its number. One in four has a key, the others repeat a string."""

    number: int

    def ids(self, tokenizer: Tokenizer) -> np.ndarray:
        """Its tokens, the separator first."""
        rng = np.random.default_rng([self.number, 1])
        if self.number % 4:
            return repeating_document(tokenizer, rng)
        return passkey_document(tokenizer, int(rng.integers(*PASSKEY_LENGTHS)), rng.random(), rng)[0]


def find_documents(source: str) -> Mapping[str, Sequence[Document | Passkey]]:
    """Split -> documents of a SOURCE, in an order that depends on their names alone."""
    if source == "passkey":
        return {split: [Passkey(number) for number in numbers]
                for split, numbers in PASSKEY_DOCUMENTS.items()}
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return split_by_hash(root, [p for p in root.rglob("*.py")
                                    if not why_left_out(p.relative_to(root).as_posix())])
    root = Path(source)
    if root.is_file() and root.suffix == ".txt":
        return split_inside(root)
    if not root.is_dir():
        problem = "is not a .txt file or a folder of them" if root.exists() else "no such file or folder"
        raise UserError(f"source {source}: {problem}; give stdlib, passkey, a .txt file or a folder with "
                        ".txt files")
    if all((root / split).is_dir() for split in SPLITS):
        found = {split: sorted(map(Document, (root / split).rglob("*.txt"))) for split in SPLITS}
    else:
        found = split_by_hash(root, root.rglob("*.txt"))
    for split in SPLITS:
        if not found[split]:
            raise UserError(f"source {source}: no .txt files for {split}; put text there")
    return found


def why_left_out(path: str) -> str | None:
    """The reason for which a file of the standard library does not enter the corpus; None if it does."""
    return next((why for pattern, why in STDLIB_LEFT_OUT.items()
                 if fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}")), None)


def split_by_hash(root: Path, paths: Any) -> dict[str, list[Document]]:
    """The hash of its path inside root puts a file into a split: stable across machines and additions."""
    def rank(path: Path) -> float:
        return int(hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest()[:8], 16) / 2**32

    paths = sorted(p for p in paths if p.is_file())
    if len(paths) == 1:
        return split_inside(paths[0])
    val = {p for p in paths if rank(p) < VAL_SHARE} or {min(paths, key=rank)} if paths else set()
    return {"train": [Document(p) for p in paths if p not in val], "val": [Document(p) for p in sorted(val)]}


def split_inside(path: Path) -> dict[str, list[Document]]:
    """The first nine tenths of a file, and the rest; the cut does not fall inside a character of UTF-8."""
    text = path.read_bytes()
    cut = int(len(text) * (1 - VAL_SHARE))
    while cut < len(text) and text[cut] & 0xC0 == 0x80:
        cut += 1
    return {"train": [Document(path, 0, cut)], "val": [Document(path, cut)]}


def read(document: Document | Passkey, tokenizer: Tokenizer) -> np.ndarray:
    """Ids of a document, the separator first. Raises UserError for text that the tokenizer cannot take."""
    if isinstance(document, Passkey):
        return document.ids(tokenizer)
    text = document.path.read_bytes()[document.start:document.end]
    try:
        ids = tokenizer.encode(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{document.path}: not UTF-8 at byte {error.start}, which tokenizer {tokenizer.name} "
                        "needs; convert the file or use --tokenizer byte") from error
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise UserError(f"{document.path}: id {ids.max()} is beyond the vocabulary of {tokenizer.vocab_size}")
    return np.concatenate(([tokenizer.eot], ids))


def write_split(folder: Path, split: str, documents: Sequence[Document | Passkey], tokenizer: Tokenizer,
                dtype: str) -> dict[str, Any]:
    """Write SPLIT.bin and SPLIT.idx.npy, a document at a time; return what meta.json says of them."""
    from tqdm import tqdm

    offsets, n_bytes, lengths = [0], 0, byte_lengths(tokenizer)
    with (folder / f"{split}.bin").open("wb") as file:
        for document in tqdm(documents, desc=split, unit="file", leave=False, delay=1, disable=None):
            ids = read(document, tokenizer)
            if len(ids) == 1:
                continue                                                # an empty file is no document
            file.write(ids.astype(dtype).tobytes())
            offsets.append(offsets[-1] + len(ids))
            n_bytes += int(lengths[ids].sum())
    if len(offsets) == 1:
        raise UserError(f"split {split}: all {len(documents)} files are empty; add text")
    np.save(folder / f"{split}.idx.npy", np.array(offsets, dtype=np.uint64))
    checksums = {}
    for name in (f"{split}.bin", f"{split}.idx.npy"):
        with (folder / name).open("rb") as file:
            checksums[name] = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
    return {"tokens": offsets[-1], "bytes": n_bytes, "documents": len(offsets) - 1, "sha256": checksums}


def prepare(source: str, out: Path, tokenizer_name: str) -> dict[str, Any]:
    """Write a corpus to the folder `out`, complete or not at all, and return its meta.json."""
    tokenizer = load_tokenizer(tokenizer_name)
    documents = find_documents(source)
    if out.exists() and not (out / "meta.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists and is not a prepared corpus; give another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        meta = {
            "format_version": FORMAT_VERSION,
            "source": source if source in BUILT_IN else Path(source).name,
            "revision": f"Python {'.'.join(map(str, sys.version_info[:3]))}" if source == "stdlib" else None,
            "dtype": dtype, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot,
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            "splits": {split: write_split(new, split, documents[split], tokenizer, dtype)
                       for split in SPLITS},
        }
        with (new / "meta.json").open("w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if out.exists():
            out.rename(Path(temporary) / "old")
        new.rename(out)
    return meta


def describe(meta: dict[str, Any], out: Path) -> Iterator[str]:
    """What was written, for the screen."""
    for split in SPLITS:
        about = meta["splits"][split]
        yield (f"{out}/{split}.bin: {about['documents']:,} documents, {about['bytes']:,} bytes, "
               f"{about['tokens']:,} tokens ({meta['tokenizer']['name']})")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", metavar="SOURCE", help="stdlib, passkey, a .txt file or a folder of them")
    parser.add_argument("--tokenizer", default="byte", help=f"{' or '.join(TOKENIZERS)} (default byte)")
    parser.add_argument("--out", type=Path, help="folder to write (default data/<the source's name>)")
    args = parser.parse_args()
    out = args.out or Path("data") / Path(args.source).stem
    if args.source == "stdlib":
        print("left out of stdlib: "
              + ", ".join(f"{pattern} ({why})" for pattern, why in STDLIB_LEFT_OUT.items()))
    for line in describe(prepare(args.source, out, args.tokenizer), out):
        print(line)


if __name__ == "__main__":
    run_command(main)
