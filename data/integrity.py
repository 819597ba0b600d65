"""Whether the files of a corpus are unchanged: sampled blocks at every start, all bytes where that is needed.

SHA-256 of 18 GB takes a minute. So data/prepare.py records the full checksums in meta.json, and a start
compares only N_BLOCKS blocks, evenly spread over each file; files of up to 16 MiB are read whole. Their
digests, with size and times of the file, are in verified.json. A start compares all bytes of a file for which
these differ, or are missing, and renews verified.json; so does `data/prepare.py --check`. The system sets the
time of change (ctime) at each write: unlike the time of modification, no program can set it back.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import read_json, write_whole

N_BLOCKS, BLOCK = 64, 2**18     # blocks per file that a start reads, and their bytes
FILE = "verified.json"


def sampled_blocks(path: Path) -> Iterator[bytes]:
    """N_BLOCKS blocks at fixed places, the first and the last among them; all blocks of a small file."""
    n_blocks = -(-path.stat().st_size // BLOCK)
    n_read = min(n_blocks, N_BLOCKS)
    with path.open("rb") as file:
        for i in range(n_read):
            file.seek(i * (n_blocks - 1) // max(1, n_read - 1) * BLOCK)
            yield file.read(BLOCK)


def read_sampled(path: Path, inspect: Callable[[bytes], None] | None = None) -> tuple[str, bool]:
    """SHA-256 of the sampled blocks, and whether these are the whole file; `inspect` gets each block."""
    digest = hashlib.sha256()
    for block in sampled_blocks(path):
        digest.update(block)
        if inspect:
            inspect(block)
    return digest.hexdigest(), path.stat().st_size <= N_BLOCKS * BLOCK


def record(folder: Path, names: Iterable[str]) -> None:
    """Write size, times and sampled checksum of files that are verified now to verified.json."""
    try:
        before = read_record(folder)
    except UserError:                   # damaged: it held nothing but this
        before = {}
    entries = before | {
        name: {**times((folder / name).stat()), "sampled_sha256": read_sampled(folder / name)[0]}
        for name in names}
    write_whole(folder / FILE, json.dumps(entries, indent=1))


def read_record(folder: Path) -> dict[str, Any]:
    """The content of verified.json; empty for a corpus that has none. Raises UserError if it is damaged."""
    try:
        entries = read_json(folder / FILE)
        if not all(isinstance(entry["sampled_sha256"], str) for entry in entries.values()):
            raise ValueError("a checksum is not a string")
        return entries
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise fault(folder, f"{FILE} is damaged ({error})") from error


def is_unchanged(path: Path, entry: dict[str, Any]) -> bool:
    """Whether size and times are those of the last full check; older entries have no time of change."""
    now = times(path.stat())
    return now == {"ctime_ns": now["ctime_ns"], **{key: entry.get(key) for key in now if key in entry}}


def compare_whole(folder: Path, sums: dict[str, str]) -> None:
    """Compare the full SHA-256 of the files, and renew verified.json if possible. Raises UserError."""
    check_sums(folder, sums)
    try:
        record(folder, sums)
    except OSError as error:        # a read-only folder: the result is still valid
        print(f"warning: {folder / FILE}: cannot be written ({error.strerror})", file=sys.stderr)


def check_sums(folder: Path, sums: dict[str, str]) -> None:
    """Compare the full SHA-256 of the files. Raises UserError for the first that differs."""
    for name, expected in sums.items():
        with existing(folder, name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise fault(folder, f"{name} is not what was written (checksum differs)")


def existing(folder: Path, name: str) -> Path:
    """The path of a file of the corpus. Raises UserError if it is missing."""
    if not (folder / name).is_file():
        raise fault(folder, f"{name} is missing")
    return folder / name


def fault(folder: Path, problem: str) -> UserError:
    """The error for a corpus that cannot be used."""
    return UserError(f"corpus {folder}: {problem}; prepare it again with data/prepare.py")


def times(about: os.stat_result) -> dict[str, int]:
    """What changes when a file is written to: its size, and when its content and its entry changed."""
    return {"size": about.st_size, "mtime_ns": about.st_mtime_ns, "ctime_ns": about.st_ctime_ns}
