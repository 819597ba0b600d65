"""The results that eval.py writes: FILE.json with records, and FILE.npz with the sums of each window.

A second evaluation is merged into the file if both have the same targets, model and code.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock, Timeout

from base.errors import UserError
from base.files import flush, read_json, write_whole
from config import MUST_AGREE

WINDOWED = ("nonoverlap", "rolling", "sliding", "fixed", "trigram")      # perplexities of windows
EXTENDED = "-extended"              # after the text's name in the file of eval.py --extend all
Record = dict[str, Any]


class Results(NamedTuple):
    """The content of both files."""

    head: dict[str, Any]                # every key of the JSON except records
    records: list[Record]
    windows: dict[str, np.ndarray]      # "EXTEND/PROTOCOL/LENGTH/COLUMN" -> one number a window or trial


def perplexity(loss: float) -> float:
    """exp(loss) for a loss in nats per token; infinity where a float cannot hold it, above 709 nats."""
    return math.exp(loss) if loss < 709.0 else math.inf


def read(path: Path) -> Results:
    """FILE.json and FILE.npz. Raises UserError where one is missing or damaged."""
    try:
        content = read_json(path)
        records = content.pop("records")
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            windows = dict(arrays)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise UserError(f"{path} or its .npz: damaged, or not by eval.py ({error}); evaluate again with "
                        "--replace") from error
    return Results(content, records, windows)


def read_mergeable(path: Path, head: dict[str, Any], is_replaced: bool) -> Results:
    """The evaluation in FILE, if one with this head can be merged into it; an empty one if there is none.

    Raises UserError if the targets, the model or the code differ, unless the old evaluation `is_replaced`.
    """
    if is_replaced or not path.exists():
        return Results({"settings": {}}, [], {})
    earlier = read(path)
    remedy = "give --json FILE to keep both, or --replace to discard the old one"
    for key in MUST_AGREE["merge"]:
        if earlier.head.get(key) != head[key]:
            raise UserError(f"{path}: holds an evaluation with another {key}; {remedy}")
    flags: dict[str, None] = {}
    for protocol, settings in head["settings"].items():
        before = earlier.head.get("settings", {}).get(protocol, settings)
        flags |= dict.fromkeys(f"the default --{name}" if value is None else
                               f"--lengths up to {value}" if name == "length" else f"--{name} {value}"
                               for name, value in before.items() if settings.get(name, value) != value)
    if flags:
        raise UserError(f"{path}: holds other targets; give all of {' '.join(flags)} to measure on the same "
                        f"ones, or {remedy.removeprefix('give ')}")
    return earlier


def combine(earlier: Results, new: Results) -> Results:
    """Both evaluations in one; the new one replaces records that both have."""
    def place(r: Record) -> tuple[Any, ...]:
        return r["extend"], r["protocol"], r["length"], *(str(r.get(key)) for key in ("bucket", "depth"))

    records = list({place(r): r for r in (*earlier.records, *new.records)}.values())
    extends = list(dict.fromkeys(r["extend"] for r in records))
    protocols = list(dict.fromkeys(r["protocol"] for r in records))
    records.sort(key=lambda r: (extends.index(r["extend"]), protocols.index(r["protocol"]), r["length"]))
    settings = {**earlier.head.get("settings", {}), **new.head["settings"]}
    return Results({**new.head, "settings": settings}, records, {**earlier.windows, **new.windows})


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Find out before hours of computing that FILE can be written; no other eval.py writes it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=0):
            yield
    except Timeout as error:
        raise UserError(f"{path}: another eval.py writes it; wait for it, or give --json FILE") from error


def write(path: Path, results: Results) -> None:
    """Write both files, each whole or not at all. Raises OSError.

    The .npz comes first: a kill in between leaves one that holds all that the records of the old JSON need.
    """
    temporary = path.with_name(f".{path.stem}.tmp.npz")
    np.savez(temporary, **results.windows)      # type: ignore[arg-type]
    flush(temporary)
    temporary.replace(path.with_suffix(".npz"))
    write_whole(path, json.dumps({**results.head, "records": results.records}, indent=1) + "\n")
