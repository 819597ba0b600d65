"""A corpus while it is being written: files that grow, what of them is sound, and where to go on.

All lies in .NAME.partial beside the corpus to be, with the files in its subfolder corpus/ and progress.json,
replaced every SAVE_EVERY_S seconds after what it tells of has reached the disk. Going on, files are checked
against it by checksum and cut to what it tells; it counts for nothing if another command wrote it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from data import integrity
from data.bpe import FILE as TOKENIZER_FILE
from data.integrity import FILE as VERIFIED_FILE
from data.loader import SPLITS
from runtime.errors import UserError

SAVE_EVERY_S = 10.0
BLOCK = 2**20               # bytes
FILES = ("tokens", "starts")
CORPUS_FILES = {"meta.json", TOKENIZER_FILE, VERIFIED_FILE,
                *(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx.npy"))}


class Position(NamedTuple):
    """How far a source has been read: so many bytes of a document of a shard, and all before it."""

    shard: int = 0
    document: int = 0
    n_bytes: int = 0


class GrowingFile:
    """A file that is appended to, and the checksum of all of it."""

    def __init__(self, path: Path, size: int = 0, sha256: str | None = None) -> None:
        self.file = path.open("r+b" if size else "w+b")
        self.sha256 = hashlib.sha256()
        left = size
        while left and (block := self.file.read(min(BLOCK, left))):
            self.sha256.update(block)
            left -= len(block)
        if left or (size and self.sha256.hexdigest() != sha256):
            raise ValueError(f"{path.name} is not what was written")
        self.size = size
        self.file.truncate(size)

    def write(self, content: memoryview) -> None:
        self.file.write(content)
        self.sha256.update(content)
        self.size += content.nbytes

    def flush(self) -> None:
        """To the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())


class Split:
    """Tokens of a split, and where its documents start: counts, files, checksums."""

    def __init__(self, folder: Path, split: str, dtype: str, saved: dict[str, Any] | None) -> None:
        saved = saved or {"tokens": 0, "bytes": 0, "documents": 0, "sha256": dict.fromkeys(FILES)}
        self.n_tokens, self.n_bytes, self.dtype = saved["tokens"], saved["bytes"], np.dtype(dtype)
        sha256 = saved["sha256"]
        size = self.n_tokens * self.dtype.itemsize
        self.tokens = GrowingFile(folder / f"{split}.bin", size, sha256["tokens"])
        self.starts = GrowingFile(folder.parent / f"{split}.starts", saved["documents"] * 8, sha256["starts"])

    @property
    def n_documents(self) -> int:
        return self.starts.size // 8

    def write(self, ids: np.ndarray, starts: np.ndarray, n_bytes: int) -> None:
        """Add ids, documents that start at places among them, and the bytes of text that these are."""
        self.starts.write((starts + self.n_tokens).astype("<u8").data)
        self.tokens.write(ids.data)
        self.n_tokens += len(ids)
        self.n_bytes += n_bytes

    def state(self) -> dict[str, Any]:
        """For progress.json; all that it tells of is on the disk."""
        sha256 = {}
        for name in FILES:
            file: GrowingFile = getattr(self, name)
            file.flush()
            sha256[name] = file.sha256.hexdigest()
        return {"tokens": self.n_tokens, "bytes": self.n_bytes, "documents": self.n_documents,
                "sha256": sha256}

    def write_index(self, path: Path) -> str:
        """The .npy of document bounds (n_documents + 1,), as np.save would write it; return its checksum."""
        self.starts.flush()
        with path.open("w+b") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<u8", "fortran_order": False, "shape": (self.n_documents + 1,)})
            self.starts.file.seek(0)
            shutil.copyfileobj(self.starts.file, file, BLOCK)
            file.write(np.array([self.n_tokens], dtype="<u8").data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()


class Journal:
    """The corpus that becomes the folder `out`: goes on where the same plan was interrupted.

    A plan is whatever the content depends on. Raises UserError where another process writes the same corpus.
    """

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        self.out, self.plan = out, plan
        self.folder = out.parent / f".{out.name}.partial"
        self.corpus = self.folder / "corpus"
        self.position, self.dtype = Position(), ""
        self.splits: dict[str, Split] = {}
        self._tokenizer, self._saved_at = "", time.monotonic()

    def __enter__(self) -> Journal:
        self.folder.mkdir(exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise UserError(f"--out {self.out}: another process is preparing it; wait for it, or give "
                            "another folder") from error
        self._saved = self._read()
        if self._saved is None:
            self._clear()
        self.corpus.mkdir(exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for split in self.splits.values():
            split.tokens.file.close()
            split.starts.file.close()
        if kind is None or (self.position == Position() and not (self.corpus / TOKENIZER_FILE).exists()):
            shutil.rmtree(self.folder, ignore_errors=True)              # done, or nothing to go on from
        else:
            print(f"{self.folder} keeps what is done; the same command goes on from there", file=sys.stderr)
        os.close(self._lock)

    def open_splits(self, dtype: str, tokenizer_sha256: str) -> None:
        """Make the files ready to go on; from their start where they are not what was written."""
        self.dtype, self._tokenizer = dtype, tokenizer_sha256
        saved = self._saved or {}
        try:
            if saved.get("tokenizer") == tokenizer_sha256:
                self.splits = {split: Split(self.corpus, split, dtype, saved["splits"][split])
                               for split in SPLITS}
                self.position = Position(*saved["position"])
        except (OSError, ValueError) as error:
            print(f"warning: {self.folder} is damaged ({error}); starting again", flush=True)
            self.splits, self.position = {}, Position()
        if not self.splits:
            self.splits = {split: Split(self.corpus, split, dtype, None) for split in SPLITS}
        self.save(self.position, at_once=True)

    def save(self, position: Position, at_once: bool = False) -> None:
        """Everything up to a position has been written; said on disk, too, at once or now and then."""
        self.position = position
        if not at_once and time.monotonic() < self._saved_at + SAVE_EVERY_S:
            return
        state = {"plan": self.plan, "tokenizer": self._tokenizer, "position": position,
                 "splits": {split: files.state() for split, files in self.splits.items()}}
        temporary = self.folder / ".progress.json.tmp"
        write_flushed(temporary, json.dumps(state))
        temporary.replace(self.folder / "progress.json")
        self._saved_at = time.monotonic()

    def publish(self, meta: dict[str, Any]) -> None:
        """Write meta.json and give the corpus its place, all at once; an older one there goes."""
        check_replaceable(self.out)                                     # again: hours may have passed
        integrity.record(self.corpus, [name for about in meta["splits"].values() for name in about["sha256"]])
        write_flushed(self.corpus / "meta.json", json.dumps(meta, indent=1))
        old = self.folder / "old"
        shutil.rmtree(old, ignore_errors=True)
        if self.out.exists():
            self.out.rename(old)
        self.corpus.rename(self.out)

    def _read(self) -> dict[str, Any] | None:
        """What progress.json says; None where there is none of this plan."""
        try:
            saved = json.loads((self.folder / "progress.json").read_text(encoding="utf-8"))
            if saved["plan"] == json.loads(json.dumps(self.plan)):
                return saved
            print(f"{self.folder}: of another command, or its source has changed; starting again", flush=True)
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            print(f"warning: {self.folder} is damaged ({error}); starting again", flush=True)
        return None

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        write_flushed(self.folder / "progress.json", json.dumps({"plan": self.plan}))


def check_replaceable(out: Path) -> None:
    """Raise UserError where `out` is, or holds, anything but a corpus: what replaces it would delete that."""
    if not out.exists():
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if not out.is_dir() or (names and "meta.json" not in names):
        raise UserError(f"--out {out}: exists and is not a prepared corpus; give another folder")
    if others := sorted(names - CORPUS_FILES):
        raise UserError(f"--out {out}: would be replaced whole, and has {others[0]!r}, which is no part of a "
                        "corpus; give another folder")


def write_flushed(path: Path, text: str) -> None:
    """Write a file, to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
