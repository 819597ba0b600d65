"""Tables of TOML from files that extend one another and from the command line, and values written as TOML.

Nothing here knows a schema. A problem is a line added to `problems`, so that all are reported at once.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import shortened
from runtime.files import read_text

LIMIT = 2**17           # bytes of a file; the largest of configs/ has a few hundred
DEEPEST = 20            # files that extend one another, and tables or lists inside one another
LARGEST = 2**53         # integers up to this are exact as a float
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")        # TOML requires quotes around any other key
OVERRIDE = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+\s*=")      # section.key=value, and no path

Tables = dict[str, dict[str, Any]]      # section -> key -> value
Origin = dict[str, str]                 # section or section.key -> where it was set, as in a message


class Layer(NamedTuple):
    """Tables from one place; the keys of a later layer replace those of an earlier one."""

    where: str          # for messages: "in FILE", "on the command line"
    tables: Tables


def read_layers(path: Path, problems: list[str], seen: tuple[Path, ...] = ()) -> list[Layer]:
    """A file and the files that it extends, the outermost parent first; `seen` are files that extend it."""
    try:
        if path.resolve() in seen or len(seen) > DEEPEST:
            problems.append(f"extends in {seen[-1]}: {path} extends itself in a circle, or more than "
                            f"{DEEPEST} others; remove one `extends`")
            return []
        content = tomllib.loads(read_text(path, LIMIT))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        hint = f"did you mean {path.with_name(near[0])}?" if near else "give the path of a .toml file"
        problems.append(f"config {path}: no such file; {hint}")
        return []
    except OSError as error:
        reason = (error.strerror or "").lower()
        problems.append(f"config {path}: {reason}; give the path of a readable .toml file")
        return []
    except (ValueError, RuntimeError) as error:     # not TOML, or nested too deeply; symlinks in a circle
        problems.append(f"config {path}: not valid TOML: {error}; see https://toml.io")
        return []
    parent = content.pop("extends", None)
    layers: list[Layer] = []
    if isinstance(parent, str):
        layers = read_layers(path.parent / parent, problems, (*seen, path.resolve()))
    elif parent is not None:
        problems.append(f'extends in {path}: must be a file name such as "quick.toml", '
                        f"got {shortened(parent)}")
    for name in [name for name, keys in content.items() if not isinstance(keys, dict)]:
        del content[name]       # the message does not show the value: the file may be one of secrets
        problems.append(f"{name} in {path}: must be a table; write [SECTION], and each key below its section")
    return [*layers, Layer(f"in {path}", content)]


def read_overrides(overrides: Sequence[str], problems: list[str]) -> Layer:
    """The tables of `section.key=value` arguments."""
    tables: Tables = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        section, *names = key.strip().split(".")
        if not equals or not names or not all((section, *names)):
            problems.append(f"override {shortened(text)}: must read section.key=value, such as train.lr=1e-3")
        elif len(names) > 1:
            problems.append(f"override {shortened(text)}: {section}.{names[0]} is set as a whole; "
                            f"write {section}.{names[0]}=...")
        else:
            tables.setdefault(section, {})[names[0]] = _parse_value(value.strip())
    return Layer("on the command line", tables)


def merge(layers: Sequence[Layer],
          kinds: Mapping[str, tuple[str, Collection[str]]]) -> tuple[Tables, Origin]:
    """The tables of all layers in one, and for each section and section.key where it was set.

    `kinds` has, for some sections, the key that names a kind and the keys that all kinds share: a layer that
    changes the kind drops the other keys of earlier layers.
    """
    tables: Tables = {}
    origin: Origin = {}
    for where, own in layers:
        for section, keys in own.items():
            old = tables.setdefault(section, {})
            kind, shared = kinds.get(section, ("", ()))
            if keys.get(kind, old.get(kind)) != old.get(kind):
                for key in set(old) - set(shared):
                    del old[key]
            old.update(keys)
            origin |= {section: where, **{f"{section}.{key}": where for key in keys}}
    return tables, origin


def update_old_keys(tables: Tables, origin: Origin) -> None:
    """Put keys of runs that an older train.py started into their present form."""
    train = tables.get("train", {})
    if "pose_length" in train and not {"positions", "position_range"} & set(train):
        train |= {"positions": "pose", "position_range": train.pop("pose_length")}
        origin["train.position_range"] = origin["train.pose_length"]


def drop_large_values(tables: Tables, origin: Origin, problems: list[str]) -> None:
    """Remove each value that is nested deeply, or holds an integer that a float cannot hold exactly."""
    for section, keys in tables.items():
        for key in [key for key, value in keys.items() if not is_small(value)]:
            del keys[key]
            problems.append(f"{section}.{key} {origin[f'{section}.{key}']}: must hold no integer beyond 2^53 "
                            f"and no deep nesting; --help {section} lists the keys")


def _parse_value(text: str) -> Any:
    """A TOML value; a bare word is a string, so that a shell needs no nested quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):    # no TOML, an integer of thousands of digits, deep nesting
        return text
    return parsed["value"] if len(parsed) == 1 else text


def is_small(value: Any, depth: int = 0) -> bool:
    """Whether the value is not nested deeply and all its integers are exact as a float."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return depth < DEEPEST and all(is_small(part, depth + 1) for part in parts)
    return not isinstance(value, int) or abs(value) <= LARGEST


def as_toml(value: Any) -> str:
    """A value as TOML; tables are written inline."""
    if isinstance(value, dict):
        pairs = [f"{key if BARE_KEY.fullmatch(key) else as_toml(key)} = {as_toml(inner)}"
                 for key, inner in value.items()]
        return "{ " + ", ".join(pairs) + " }"
    # JSON writes strings, numbers, booleans and lists as TOML does, except for this character
    return json.dumps(value).replace("\x7f", "\\u007f")
