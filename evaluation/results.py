"""The results that eval.py writes: FILE.json with records, and FILE.npz with the sums of each window.

A second evaluation is merged into the file if both have the same targets: the same text, checkpoint, seed
and, for each protocol that both measured, the same settings.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import nn

from runtime.errors import UserError
from runtime.files import name_in_errors, read_json, write_whole

WINDOWED = ("nonoverlap", "rolling", "sliding", "fixed")    # protocols with sums of each window
TARGETS = ("document", "end", "tokens", "bytes")            # columns of the .npz that identify the targets
SAME = {                                                    # keys of the JSON that must agree, in words
    "weights_sha256": "another checkpoint", "data_sha256": "another text",
    "tokenizer": "another tokenizer", "encoding": "another encoding", "seq_len": "another training length",
    "seed": "another --seed"}
# what numpy and zipfile also raise for a file with an invalid header or member
FROM_NUMPY = (MemoryError, OverflowError, RecursionError, SyntaxError, NotImplementedError, AttributeError,
              TokenError, zlib.error, struct.error)
Record = dict[str, Any]


class Results(NamedTuple):
    """The content of both files."""

    head: dict[str, Any]                # every key of the JSON except records
    records: list[Record]
    windows: dict[str, np.ndarray]      # "EXTEND/PROTOCOL/LENGTH/COLUMN" -> one number a window


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
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            return Results(content, records, {key: arrays[key] for key in columns})
    except (KeyError, TypeError, EOFError, BadZipFile, *FROM_NUMPY) as error:
        raise ValueError(str(error)) from error


def check_shape(settings: Any, records: Any) -> None:
    """Raise ValueError unless these have the types that merging relies on."""
    if not isinstance(settings, dict) or not all(isinstance(value, dict) for value in settings.values()):
        raise ValueError("settings are no tables")
    for r in records:
        types = type(r["extend"]), type(r["protocol"]), type(r["length"])
        if types not in ((str, str, int), (type(None), str, int)):
            raise ValueError("a record without extend, protocol and length")


def read_mergeable(path: Path, head: dict[str, Any]) -> Results | None:
    """The evaluation in FILE, if one with this head can be merged into it; None if there is no file.

    Raises UserError if the targets or the model differ.
    """
    remedy = "give --json FILE to keep both, or --replace to discard the old one"
    try:
        earlier = read(path)
    except (FileNotFoundError, ValueError) as error:
        if not path.exists():
            return None
        raise UserError(f"{path} or its .npz: exists, but is damaged or no evaluation ({error}); "
                        f"{remedy}") from error
    if "settings" not in earlier.head:
        raise UserError(f"{path}: holds an evaluation by an older eval.py, without its settings; {remedy}")
    for key, difference in SAME.items():
        if earlier.head.get(key) != head[key]:
            raise UserError(f"{path}: holds an evaluation of {difference}; {remedy}")
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


def write(path: Path, results: Results) -> None:
    """Write both files, each whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.npz")
    try:
        with name_in_errors(temporary):
            np.savez(temporary, **results.windows)  # type: ignore[arg-type]
        write_whole(path, json.dumps({**results.head, "records": results.records}, indent=1) + "\n")
        temporary.replace(path.with_suffix(".npz"))
    finally:
        temporary.unlink(missing_ok=True)


def weights_sha256(model: nn.Module) -> str:
    """Checksum of a model's weights, which differs between two checkpoints."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
