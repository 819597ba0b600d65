"""Tables of TOML from files that extend one another and from the command line, and values written as TOML.

Nothing here knows a schema. A problem is a line added to `problems`, so that all are reported at once.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import did_you_mean

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
    if path.resolve() in seen:
        problems.append(f"extends in {seen[-1]}: {path} extends itself in a circle; remove one `extends`")
        return []
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = did_you_mean(path.name, [file.name for file in path.parent.glob("*.toml")])
        problems.append(f"config {path}: {(error.strerror or str(error)).lower()}"
                        f"{hint or '; give the path of a .toml file'}")
        return []
    except ValueError as error:
        problems.append(f"config {path}: not valid TOML: {error}; see https://toml.io")
        return []
    parent, layers = content.pop("extends", None), []
    if isinstance(parent, str):
        layers = read_layers(path.parent / parent, problems, (*seen, path.resolve()))
    elif parent is not None:
        problems.append(f'extends in {path}: must be a file name such as "quick.toml", got {parent!r}')
    for name in [name for name, keys in content.items() if not isinstance(keys, dict)]:
        del content[name]
        problems.append(f"{name} in {path}: must be a table; write [SECTION], and each key below its section")
    return [*layers, Layer(f"in {path}", content)]


def read_overrides(overrides: Sequence[str], problems: list[str]) -> Layer:
    """The tables of `section.key=value` arguments; a bare word is a string, without quotes."""
    tables: Tables = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        section, _, name = key.strip().partition(".")
        if not (equals and section and name):
            problems.append(f"override {text!r}: must read section.key=value, such as train.lr=1e-3")
        elif "." in name:
            key = f"{section}.{name.partition('.')[0]}"
            problems.append(f"override {text!r}: {key} is set as a whole; write {key}=...")
        else:
            keys = tables.setdefault(section, {})
            try:
                keys[name] = tomllib.loads(f"value = {value}")["value"]
            except ValueError:
                keys[name] = os.path.expanduser(value.strip())          # a shell leaves run.dir=~/x as it is
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


def as_toml(value: Any) -> str:
    """A value as TOML; tables are written inline."""
    if isinstance(value, dict):
        pairs = [f"{key if BARE_KEY.fullmatch(key) else as_toml(key)} = {as_toml(inner)}"
                 for key, inner in value.items()]
        return "{ " + ", ".join(pairs) + " }"
    # JSON writes strings, numbers, booleans and lists as TOML does, except for this character
    return json.dumps(value).replace("\x7f", "\\u007f")
