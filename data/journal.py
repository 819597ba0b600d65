"""A corpus while it is being written: growing files, and a journal of how much of them is complete.

Everything is in the folder .NAME.partial beside the future corpus: the files in its subfolder corpus/, and
progress.json, which is replaced every SAVE_EVERY_S seconds, after the data that it describes is on disk. To
resume, the files are truncated to the recorded sizes and compared with the recorded checksums. A journal that
another command wrote is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from data import integrity
from data.bpe import FILE as TOKENIZER_FILE
from data.integrity import FILE as VERIFIED_FILE
from data.loader import SPLITS
from runtime.errors import UserError
from runtime.files import flush, is_fixed, write_whole
from runtime.lock import Locked, lock

SAVE_EVERY_S = 10.0
BLOCK = 2**20               # bytes
CORPUS_FILES = {"meta.json", TOKENIZER_FILE, VERIFIED_FILE,
                *(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx.npy", "mask.bin"))}


class Position(NamedTuple):
    """How far a source has been read: n_bytes of a document of a shard, and everything before it."""

    shard: int = 0
    document: int = 0
    n_bytes: int = 0


class GrowingFile:
    """A file that is appended to, and its running checksum."""

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
        """Flush to disk."""
        self.file.flush()
        os.fsync(self.file.fileno())


class Split:
    """Tokens, document starts and perhaps a mask of targets of a split: counts, files, checksums."""

    def __init__(self, folder: Path, split: str, dtype: str, has_mask: bool,
                 saved: dict[str, Any] | None) -> None:
        saved = saved or {"tokens": 0, "bytes": 0, "documents": 0, "sha256": {}}
        self.n_tokens, self.n_bytes, self.dtype = saved["tokens"], saved["bytes"], np.dtype(dtype)
        places = {"tokens": (folder / f"{split}.bin", self.n_tokens * self.dtype.itemsize),
                  "starts": (folder.parent / f"{split}.starts", saved["documents"] * 8)}
        if has_mask:
            places["mask"] = folder / f"{split}.mask.bin", self.n_tokens
        self.files = {name: GrowingFile(path, size, saved["sha256"].get(name))
                      for name, (path, size) in places.items()}
        self.tokens, self.starts = self.files["tokens"], self.files["starts"]

    @property
    def n_documents(self) -> int:
        return self.starts.size // 8

    def write(self, ids: np.ndarray, starts: np.ndarray, mask: np.ndarray, n_bytes: int) -> None:
        """Append ids that encode n_bytes of text, with documents starting at `starts` among them.

        `mask` says which are targets; it is used if the corpus has a mask.
        """
        self.starts.write((starts + self.n_tokens).astype("<u8").data)
        self.tokens.write(ids.data)
        if "mask" in self.files:
            self.files["mask"].write(mask.astype("u1").data)
        self.n_tokens += len(ids)
        self.n_bytes += n_bytes

    def state(self) -> dict[str, Any]:
        """The entry in progress.json, after flushing the data that it describes."""
        sha256 = {}
        for name, file in self.files.items():
            file.flush()
            sha256[name] = file.sha256.hexdigest()
        return {"tokens": self.n_tokens, "bytes": self.n_bytes, "documents": self.n_documents,
                "sha256": sha256}

    def write_index(self, path: Path) -> str:
        """Write document bounds (n_documents + 1,) as np.save does; return the checksum."""
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
    """The corpus that becomes the folder `out`; resumes an interrupted preparation with the same plan.

    The plan is everything that the content depends on. Raises UserError if another process writes to `out`.
    """

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        self.out, self.plan = out, plan
        self.folder = out.parent / f".{out.name}.partial"
        self.corpus = self.folder / "corpus"
        self.position, self.dtype = Position(), ""
        self.splits: dict[str, Split] = {}
        self._tokenizer, self._saved_at = "", time.monotonic()
        self._lock = ExitStack()

    def __enter__(self) -> Journal:
        self.folder.mkdir(exist_ok=True)
        try:
            self._lock.enter_context(lock(self.out.with_name(f".{self.out.name}.lock")))
        except Locked as holder:
            raise UserError(f"--out {self.out}: another process is preparing it, {holder}; wait for it, or "
                            "give another folder") from None
        self._saved = self._read()
        if self._saved is None:
            self._clear()
        self.corpus.mkdir(exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for split in self.splits.values():
            for file in split.files.values():
                file.file.close()
        if kind is None or (self.position == Position() and not (self.corpus / TOKENIZER_FILE).exists()):
            shutil.rmtree(self.folder, ignore_errors=True)              # complete, or nothing to resume from
        else:
            print(f"{self.folder} is kept; the same command resumes from there", file=sys.stderr)
        self._lock.close()

    def open_splits(self, dtype: str, tokenizer_sha256: str, has_mask: bool) -> None:
        """Open the files to resume; start again if they were changed."""
        self.dtype, self._tokenizer = dtype, tokenizer_sha256
        saved = self._saved or {}
        try:
            if saved.get("tokenizer") == tokenizer_sha256:
                self.splits = {split: Split(self.corpus, split, dtype, has_mask, saved["splits"][split])
                               for split in SPLITS}
                self.position = Position(*saved["position"])
        except (OSError, ValueError) as error:
            print(f"warning: {self.folder} is damaged ({error}); starting again", flush=True)
            self.splits, self.position = {}, Position()
        if not self.splits:
            self.splits = {split: Split(self.corpus, split, dtype, has_mask, None) for split in SPLITS}
        self.save(self.position, at_once=True)

    def save(self, position: Position, at_once: bool = False) -> None:
        """Record that everything up to a position is written; on disk every SAVE_EVERY_S or `at_once`."""
        self.position = position
        if not at_once and time.monotonic() < self._saved_at + SAVE_EVERY_S:
            return
        state = {"plan": self.plan, "tokenizer": self._tokenizer, "position": position,
                 "splits": {split: files.state() for split, files in self.splits.items()}}
        write_whole(self.folder / "progress.json", json.dumps({**state, "check": check_of(state)}))
        self._saved_at = time.monotonic()

    def publish(self, meta: dict[str, Any]) -> None:
        """Write meta.json and move the corpus to `out`, replacing an older one."""
        check_replaceable(self.out)                                     # once more: hours may have passed
        integrity.record(self.corpus, [name for about in meta["splits"].values() for name in about["sha256"]])
        write_whole(self.corpus / "meta.json", json.dumps(meta, indent=1))
        old = self.folder / "old"
        shutil.rmtree(old, ignore_errors=True)
        if self.out.exists():
            self.out.rename(old)
        self.corpus.rename(self.out)
        flush(self.out.parent)

    def _read(self) -> dict[str, Any] | None:
        """The content of progress.json; None if it is missing or has another plan."""
        try:
            saved = json.loads((self.folder / "progress.json").read_text(encoding="utf-8"))
            if saved["plan"] != json.loads(json.dumps(self.plan)):
                print(f"{self.folder}: from another command, or the source has changed; starting again",
                      flush=True)
                return None
            if saved.pop("check", None) not in (None, check_of(saved)):     # older ones have none
                raise ValueError("progress.json: checksum differs")
            return saved
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
        write_whole(self.folder / "progress.json", json.dumps({"plan": self.plan}))


def check_of(state: dict[str, Any]) -> str:
    """The checksum that progress.json holds of itself."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def check_replaceable(out: Path) -> None:
    """Raise UserError if `out` is or holds anything except a corpus: replacing it would delete that."""
    if is_fixed(out):
        raise UserError(f"--out {out}: is the current folder, one above it or a mount point, which cannot be "
                        "replaced; give another folder")
    if not out.exists():
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if not out.is_dir() or (names and "meta.json" not in names):
        raise UserError(f"--out {out}: exists and is not a prepared corpus; give another folder")
    if others := sorted(names - CORPUS_FILES):
        raise UserError(f"--out {out}: would be replaced, but has {others[0]!r}, which is not part of a "
                        "corpus; give another folder")

