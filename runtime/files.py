"""Small files beside the tensors (JSON, TOML): read with a limit, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT = 4 * 2**20       # bytes; parsed, JSON takes up to 30 times as much memory as text


def read_text(path: Path, limit: int = LIMIT) -> str:
    """A file as UTF-8. Raises OSError, and ValueError where it is no text, too large or no regular file."""
    if path.exists() and not path.is_file() and not path.is_dir():      # of a folder, open() says so
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"larger than {limit:,} bytes")
    return content.decode("utf-8")


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises OSError, and ValueError for anything that is no JSON or too deep."""
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def finite(number: float) -> float | None:
    """The number; None for infinities and nan, which JSON cannot hold."""
    return number if math.isfinite(number) else None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it exists whole or not at all, whatever happens to the machine."""
    temporary = temporary_path(path)
    with name_in_errors(temporary):
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def temporary_path(path: Path) -> Path:
    """Where `write_whole` writes before it renames: what a kill may leave, and the next start overwrites."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Let an OSError that comes from writing to path say so: the system names files only where it opens."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
