"""Tables of TOML from files that extend one another, and pydantic schemas in words."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from base.errors import UserError, did_you_mean, nearest

# a key's limits as pydantic names them in a JSON schema -> as --help prints them
SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}

Schema = type[BaseModel]
Tables = dict[str, dict[str, Any]]      # section -> key -> value
Origin = dict[str, str]                 # section or section.key -> where it was set, as in a message


class Section(BaseModel):
    """One table of the config; unknown keys and wrong types are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False,
                              use_attribute_docstrings=True)


class Level(NamedTuple):
    """Tables from one place; the keys of a later level replace those of an earlier one."""

    where: str          # for messages: "in FILE", "on the command line"
    tables: Tables


def read_levels(path: Path) -> list[Level]:
    """A file and the files that it extends, the outermost parent first. Raises UserError."""
    levels: list[Level] = []
    parent: Any = path.name             # first the file itself
    while parent is not None:
        asked = f", which {path} extends" if levels else ""
        path = path.parent / str(parent)
        try:
            if len(levels) > 99:
                raise ValueError("it extends itself in a circle; remove one `extends`")
            content = tomllib.loads(path.read_text(encoding="utf-8-sig"), parse_float=to_number)
        except OSError as error:
            others = [*Path("configs").glob("*.toml"), *path.parent.glob("*.toml")]
            files = {file.stem: file for file in others}
            near = nearest(path.stem, files)
            hint = f"did you mean {files[near]}?" if near else "give the path of a .toml file"
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"config {path}: {reason}{asked}; {hint}") from error
        except ValueError as error:
            raise UserError(f"config {path}: not valid TOML: {error}") from error
        parent = content.pop("extends", None)
        for name, keys in content.items():
            if not isinstance(keys, dict):
                hint = did_you_mean(name, ["extends"])
                raise UserError(f"{name} in {path}: must be a table; write [SECTION], and each key below its "
                                f"section{hint}")
        levels.insert(0, Level(f"in {path}", content))
    return levels


def read_overrides(overrides: Sequence[str], sections: Mapping[str, Schema]) -> Level:
    """The tables of `section.key=value` arguments; a bare word is a string, without quotes.

    The schemas of the sections are there to name the one of a key that is given alone.
    """
    tables: Tables = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        section, _, key = name.strip().partition(".")
        if not equals and text.endswith(".toml"):
            raise UserError(f"{text}: a second config; give one, or train several with sweep.py")
        homes = [known for known, schema in sections.items() if name in schema.model_fields]
        if equals and homes:
            raise UserError(f"override {text!r}: the section is missing; did you mean {homes[0]}.{text}?")
        if not (equals and key) or "." in key:
            raise UserError(f"override {text!r}: must read section.key=value, such as train.lr=1e-3 or "
                            'position.scaling={method="yarn",factor=4.0}')
        keys = tables.setdefault(section, {})
        try:
            keys[key] = tomllib.loads(f"value = {value}", parse_float=to_number)["value"]
        except ValueError:
            keys[key] = os.path.expanduser(value.strip())           # a shell leaves run.dir=~/x as it is
    return Level("on the command line", tables)


def to_number(text: str) -> int | float:
    """A float of TOML. 1e3 is an integer, which keys of either kind take."""
    number = float(text)
    return int(number) if number.is_integer() else number


def explain(error: ValidationError, name: str, schema: Schema, origin: Origin, place: str) -> Iterator[str]:
    """One line for each key that is wrong: its full name, where it was set, what is wrong, the fix.

    `origin` says where the keys of the table `name` were set; a missing key belongs to `place`.
    """
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for one in error.errors():
        # without the members of a union, such as "list[int]"; the tag of a table, its method, stays
        keys = [part for part in one["loc"] if isinstance(part, str) and "[" not in part]
        by_key.setdefault((name, *keys), []).append(one)
    for path, errors in by_key.items():
        # position.scaling.METHOD.key without the method; data.mixture.FOLDER as it is
        full_name = ".".join((*path[:2], *(path[3:] or path[2:])))
        kind = errors[0]["type"]
        value = errors[0]["input"]
        messages = dict.fromkeys(one["msg"].replace("Input should be", "must be") for one in errors)
        message = f"{' or '.join(messages)} (got {value!r})"
        if kind == "missing":
            message = f"missing; add {path[-1]} = ..."
        elif kind == "extra_forbidden" and len(path) > 2:
            message = f"unknown key; see train.py --help {path[2]}"
        elif kind == "extra_forbidden":
            known = schema.model_fields
            message = "unknown key" + (did_you_mean(path[1], known, name + ".{}")
                                       or f"; its keys are {', '.join(known)}")
        elif kind == "model_attributes_type" and isinstance(value, str):
            message = f'must be a table, such as {full_name}={{method="yarn",factor=4.0}}'
        elif kind == "union_tag_not_found":
            message = "has no method; add one, such as method = \"yarn\""
        elif kind == "union_tag_invalid":
            tags = errors[0]["ctx"]["expected_tags"].replace("'", "").split(", ")
            method = errors[0]["ctx"]["tag"]
            message = f"unknown method {method!r}" + (did_you_mean(method, tags)
                                                      or f"; choose from {', '.join(tags)}")
        yield f"{full_name} {origin.get('.'.join(path[:2]), place)}: {message}"


def describe_choice(name: str, choice: type, schema: Schema, shared: Collection[str] = ()) -> list[str]:
    """The first line of the docstring of a class, and its schema's keys, without those that all share.

    Two lines for each key: type, limits and default; then the meaning, if it is described.
    """
    lines = [f"{name}: {(choice.__doc__ or 'no docstring yet').strip().splitlines()[0]}"]
    about = schema.model_json_schema()["properties"]
    for key, field in schema.model_fields.items():
        if key not in shared:
            default = "required"
            if not field.is_required():
                default = f"default {json.dumps(field.default)}".replace("null", "unset")
            lines.append(f"  {key:16} {accepted(about[key])}; {default}")
            if field.description:
                lines.append(f"  {'':16} {' '.join(field.description.split())}")
    return lines


def accepted(about: dict[str, Any]) -> str:
    """The values that a field of this JSON schema accepts, such as "integer >= 1"."""
    kinds = []
    for part in about.get("anyOf", [about]):
        kind = part.get("type", "table")
        if "enum" in part:
            kind = " | ".join(map(json.dumps, part["enum"]))
        elif "const" in part:
            kind = json.dumps(part["const"])
        bounds = [f"{sign} {part[name]}" for name, sign in SIGNS.items() if name in part]
        if kind != "null":
            kinds.append(" ".join([kind, *bounds]))
    return " or ".join(kinds)
