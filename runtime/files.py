"""Small text files (JSON, TOML): reading with a size limit, and atomic writing; names of folders."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUN_DIR = re.compile(r"([^\0]*/)?[A-Za-z0-9._-]{1,100}/*")
LIMIT = 4 * 2**20       # bytes; parsed JSON takes up to 30 times the memory of its text


def read_text(path: Path, limit: int = LIMIT) -> str:
    """The text of a UTF-8 file. Raises OSError, or ValueError if it is not text, too large or not regular."""
    if is_special(path):
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"larger than {limit:,} bytes")
    return content.decode("utf-8")


def is_special(path: Path) -> bool:
    """Whether this is neither a file nor a folder, such as a FIFO, which would block whoever opens it."""
    try:
        mode = path.stat().st_mode      # asked once: a run that is being trained may delete it meanwhile
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError, or ValueError: no JSON, nested too deeply, no object."""
    try:
        content = json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds {type(content).__name__}, not an object")
    return content


def is_run_dir(path: str) -> bool:
    """Whether the path is FOLDER/NAME with a plain name, cannot lead out of FOLDER, and needs no shell."""
    return bool(RUN_DIR.fullmatch(path) and Path(path).name) and not {"..", "~"} & {*Path(path).parts}


def finite(number: float) -> float | None:
    """The number, or None for infinity and NaN, which JSON cannot hold."""
    return number if math.isfinite(number) else None


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: after a crash it has either its old content or all of the new one."""
    temporary = temporary_path(path)
    with name_in_errors(temporary):
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush(path.parent)


def flush(path: Path) -> None:
    """Fsync a file or a folder: after a power cut it has all that was written, or renamed, before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_fixed(folder: Path) -> bool:
    """Whether a folder cannot be replaced: a mount point, the current folder, or one above it."""
    return os.path.ismount(folder) or Path.cwd().is_relative_to(folder.resolve())


def temporary_path(path: Path) -> Path:
    """The file that `write_whole` writes and then renames; a killed process may leave it behind."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError from writing: the system names the file only when it opens one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
