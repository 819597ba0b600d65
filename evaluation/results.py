"""The results that eval.py writes: FILE.json with records, and FILE.npz with the sums of each window.

A second evaluation is merged into the file if both have the same targets: the same text, checkpoint, seed
and, for each protocol that both measured, the same settings.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from runtime.errors import UserError
from runtime.files import flush, name_in_errors, read_json, temporary_path, write_whole
from runtime.lock import Locked, lock

WINDOWED = ("nonoverlap", "rolling", "sliding", "fixed")    # protocols with sums of each window
PROBED = ("nll", "first_nll", "correct", "trials", "tokens", "document")     # columns of probes, if present
TARGETS = ("document", "end", "tokens", "bytes")            # columns of the .npz that identify the targets
SAME = {                                                    # keys of the JSON that must agree, in words
    "weights_sha256": "another checkpoint", "data_sha256": "another text",
    "tokenizer": "another tokenizer", "encoding": "another encoding", "seq_len": "another training length",
    "seed": "another --seed", "dtype": "another --dtype"}
# what numpy and zipfile also raise for a file with an invalid header or member; RuntimeError: for a password
FROM_NUMPY = (MemoryError, OverflowError, RuntimeError, SyntaxError, AttributeError, TokenError, zlib.error,
              struct.error)
SIGNATURE = "nanorope eval.py"      # in the metadata of its pictures
LARGEST = 709.0         # nats: the exponential of more does not fit into a float
Record = dict[str, Any]


class Results(NamedTuple):
    """The content of both files."""

    head: dict[str, Any]                # every key of the JSON except records
    records: list[Record]
    windows: dict[str, np.ndarray]      # "EXTEND/PROTOCOL/LENGTH/COLUMN" -> one number a window


def perplexity(loss: float) -> float:
    """exp(loss) for a loss in nats per token; infinity where a float cannot hold it, above 709 nats."""
    return math.exp(loss) if loss < LARGEST else math.inf


def read(path: Path) -> Results:
    """FILE.json and FILE.npz. Raises FileNotFoundError, and ValueError where one is damaged."""
    try:
        content = read_json(path)
        records = content.pop("records")
        if not records:
            raise ValueError("no records")
        check_shape(content.get("settings", {}), records)
        columns = [f"{r['extend'] or 'plain'}/{r['protocol']}/{r['length']}/{column}"
                   for r in records if r["protocol"] in WINDOWED
                   for column in (*TARGETS, "nll", *(["truncated_nll"] if "gain" in r else []))]
        probed = [f"{r['extend'] or 'plain'}/{r['protocol']}/{r['length']}/{column}"
                  for r in records if r["protocol"] not in WINDOWED for column in PROBED]
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            columns += [key for key in probed if key in arrays]         # older files have none of probes
            windows = {key: arrays[key] for key in columns}
        check_windows(windows)
        check_sums(records, windows)
        return Results(content, records, windows)
    except (KeyError, TypeError, EOFError, BadZipFile, *FROM_NUMPY) as error:
        raise ValueError(str(error)) from error


def check_sums(records: Sequence[Record], windows: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError unless the sums of each window add up to the records: else one file is older."""
    for r in records:
        if r["protocol"] not in WINDOWED:       # a probe has several records of a length, such as depths
            continue
        nll = windows[f"{r['extend'] or 'plain'}/{r['protocol']}/{r['length']}/nll"]
        if not np.isclose(nll.sum(), r["nll_sum"], rtol=1e-6, equal_nan=True):
            raise ValueError(f"its sums do not add up to the record of {r['protocol']} at {r['length']}")


def check_shape(settings: Any, records: Any) -> None:
    """Raise ValueError unless these have the types that merging relies on."""
    if not isinstance(settings, dict) or not all(isinstance(value, dict) for value in settings.values()):
        raise ValueError("settings are no tables")
    for r in records:
        types = type(r["extend"]), type(r["protocol"]), type(r["length"])
        if types not in ((str, str, int), (type(None), str, int)):
            raise ValueError("a record without extend, protocol and length")


def check_windows(windows: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless the columns of each place are equally many numbers, its counts positive."""
    lengths: dict[str, int] = {}
    for key, column in windows.items():
        place, _, name = key.rpartition("/")
        if column.ndim != 1 or column.dtype.kind not in "biuf" or not len(column):
            raise ValueError(f"{key} is no list of numbers")
        if len(column) != lengths.setdefault(place, len(column)):
            raise ValueError(f"{place} has columns of different lengths")
        if name in ("tokens", "trials") and not ((column > 0) & np.isfinite(column)).all():
            raise ValueError(f"{key} has a number that is not positive")


def check_own(path: Path, is_replaced: bool) -> None:
    """Raise UserError if .npz or .png of FILE, or FILE if it `is_replaced`, was not written by eval.py.

    An own file is recognised by its beginning: it may be damaged further on, or empty after a power cut.
    """
    begins = {".json": rb'\s*({\s*"run"|$)' if is_replaced else b"",
              # an archive of columns, one of no column, an empty file
              ".npz": rb"PK\x03\x04.{26}[^\0]+/\w+/\d+/\w+\.npy|PK\x05\x06|$",
              # older versions did not sign their pictures
              ".png": rb"\x89PNG.*Software\0(%b)|$" % (SIGNATURE.encode() + b"|Matplotlib" * path.is_file())}
    for suffix, begin in begins.items():
        file = path.with_suffix(suffix)
        if file.exists() and not (file.is_file() and re.match(begin, start_of(file), re.DOTALL)):
            raise UserError(f"{file}: was not written by eval.py, so it is not replaced; move it away, or "
                            "give another --json FILE")


def start_of(path: Path) -> bytes:
    """The first bytes of a file."""
    with path.open("rb") as file:
        return file.read(1000)


def read_mergeable(path: Path, head: dict[str, Any], is_replaced: bool) -> Results | None:
    """The evaluation in FILE, if one with this head can be merged into it; None if there is none to keep.

    Raises UserError if the targets or the model differ. An evaluation that `is_replaced` may have any, and be
    damaged, but another file is not replaced.
    """
    check_own(path, is_replaced)
    if is_replaced:
        return None
    remedy = "give --json FILE to keep both, or --replace to discard the old one"
    try:
        earlier = read(path)
    except (FileNotFoundError, ValueError) as error:
        if not path.exists():
            for other in (path.with_suffix(".npz"), path.with_suffix(".png")):
                if other.exists():
                    raise UserError(f"{other}: exists without {path.name}: left by a killed eval.py, or "
                                    f"another file; {remedy}") from error
            return None
        raise UserError(f"{path} or its .npz: exists, but is damaged or no evaluation ({error}); "
                        f"{remedy}") from error
    for key in ("settings", "dtype"):
        if key not in earlier.head:
            raise UserError(f"{path}: holds an evaluation by an older eval.py, without its {key}; {remedy}")
    for key, difference in SAME.items():
        if earlier.head.get(key) != head[key]:
            raise UserError(f"{path}: holds an evaluation of {difference}; {remedy}")
    if earlier.head.get("position", head["position"]) != head["position"]:      # older files lack it
        raise UserError(f"{path}: holds an evaluation of another [position]; {remedy}")
    for protocol, settings in head["settings"].items():
        before = earlier.head["settings"].get(protocol, settings)
        if before != settings:
            if before.get("longest", 0) < settings.get("longest", 0):   # --longest cannot be below a length
                raise UserError(f"{path}: holds {protocol} on the targets of a shorter --longest; {remedy}")
            flags = " ".join(flag(name, value) for name, value in before.items()
                             if settings.get(name, value) != value)
            raise UserError(f"{path}: holds {protocol} on other targets; give {flags} to measure on the same "
                            f"ones, or {remedy.removeprefix('give ')}")
    return earlier


def reusable(earlier: Results | None, head: dict[str, Any]) -> Results | None:
    """The part of a mergeable evaluation that need not be measured again.

    An older one did not record [position]; a method with a list is not known by its name.
    """
    if earlier is None or "position" not in earlier.head:
        return None
    return earlier._replace(records=[r for r in earlier.records if "[...]" not in (r["extend"] or "")])


def flag(name: str, value: Any) -> str:
    """The flag to type for a setting of the JSON."""
    if name == "length":                # of position: the longest of --lengths
        return f"--lengths up to {value}"
    return f"the default --{name}" if value is None else f"--{name} {value}"


def merge(earlier: Results, new: Results) -> Results:
    """Both evaluations in one; the new one replaces records that both have."""
    def place(r: Record) -> tuple[Any, ...]:
        inside = [r.get(key) for key in ("bucket", "depth", "distance")]
        return r["extend"], r["protocol"], r["length"], str(inside)

    records = list({place(r): r for r in (*earlier.records, *new.records)}.values())
    extends = list(dict.fromkeys(r["extend"] for r in records))
    protocols = list(dict.fromkeys(r["protocol"] for r in records))
    records.sort(key=lambda r: (extends.index(r["extend"]), protocols.index(r["protocol"]), r["length"]))
    settings = {**earlier.head["settings"], **new.head["settings"]}
    return Results({**new.head, "settings": settings}, records, {**earlier.windows, **new.windows})


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Find out that FILE can be written before hours of computing, and keep other processes from writing it.

    Raises OSError, and UserError if another eval.py is going to write it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with lock(path.with_name(f".{path.name}.lock")):
            yield
    except Locked as holder:
        raise UserError(f"{path}: is being written by {holder}; wait for it, then run the same command, or "
                        "give --json FILE") from None


def write(path: Path, results: Results) -> None:
    """Write both files, each whole or not at all. Raises OSError.

    The .npz comes first: a kill in between leaves one that holds all that the records of the old JSON need.
    """
    temporary = temporary_path(path.with_suffix(".npz"))
    try:
        with name_in_errors(temporary):
            with temporary.open("wb") as file:
                np.savez(file, **results.windows)   # type: ignore[arg-type]
            flush(temporary)
            temporary.replace(path.with_suffix(".npz"))
        write_whole(path, json.dumps({**results.head, "records": results.records}, indent=1) + "\n")
    finally:
        temporary.unlink(missing_ok=True)
