"""Files: JSON that is read, text that is written atomically, what is made once for all processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError, or ValueError if it holds anything else."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"holds {type(content).__name__}, not an object")
    return content


def finite(number: float) -> float | None:
    """The number, or None for infinity and NaN, which JSON cannot hold."""
    return number if math.isfinite(number) else None


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: after a crash it has either its old content or all of the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    temporary.replace(path)


def make_once(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make PATH.part, which becomes `path`, unless it is there; other processes wait for it."""
    part = Path(f"{path}.part")
    with FileLock(f"{path}.lock"):
        if not path.exists():
            write(part)
            part.replace(path)


def sha256_of(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Fsync a file or a folder: after a power cut it has all that was written, or renamed, before."""
    if os.name == "nt" and path.is_dir():       # Windows does not open folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
