"""Tables of TOML from files that extend one another, and pydantic schemas in words."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from base.errors import UserError, did_you_mean, nearest

SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}

Schema = type[BaseModel]
Tables = dict[str, dict[str, Any]]      # section -> key -> value
Origin = dict[str, str]                 # section or section.key -> where it was set, as in a message


class Section(BaseModel):
    """One table of the config; unknown keys and wrong types are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False,
                              use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def take_whole_numbers(cls, keys: Any) -> Any:
        """1e3, which is no integer in TOML, for a key that takes integers and no floats."""
        taken = dict(keys)
        for key, value in keys.items():
            field = cls.model_fields.get(key)
            if field and isinstance(value, float) and value.is_integer():
                kinds = (field.annotation, *get_args(field.annotation))
                if int in kinds and float not in kinds:
                    taken[key] = int(value)
        return taken


class Layer(NamedTuple):
    """Tables from one place; the keys of a later layer replace those of an earlier one."""

    where: str          # for messages: "in FILE", "on the command line"
    tables: Tables


def read_layers(path: Path) -> list[Layer]:
    """A file and the files that it extends, the outermost parent first. Raises UserError."""
    layers: list[Layer] = []
    parent: Any = path.name
    while parent is not None:
        asked = f", which {path} extends" if layers else ""
        path = path.parent / str(parent)
        try:
            if len(layers) > 99:
                raise ValueError("it extends itself in a circle; remove one `extends`")
            content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            files = {}
            for folder in (Path("configs"), path.parent):
                files.update({file.stem: file for file in folder.glob("*.toml")})
            near = nearest(path.name.removesuffix(".toml"), files)
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
        layers.insert(0, Layer(f"in {path}", content))
    return layers


def read_overrides(overrides: Sequence[str], keys_of: Mapping[str, Collection[str]]) -> Layer:
    """The tables of `section.key=value` arguments; a bare word is a string, without quotes.

    keys_of has the keys of each section, to name the one of a key that is given alone.
    """
    tables: Tables = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        section, _, key = name.strip().partition(".")
        if not equals and text.endswith(".toml"):
            raise UserError(f"{text}: a second config; give one, or train several with sweep.py")
        homes = [known for known, keys in keys_of.items() if name in keys]
        if equals and homes:
            raise UserError(f"override {text!r}: the section is missing; did you mean {homes[0]}.{text}?")
        if not (equals and key) or "." in key:
            raise UserError(f"override {text!r}: must read section.key=value, such as train.lr=1e-3 or "
                            'position.scaling={method="yarn",factor=4.0}')
        keys = tables.setdefault(section, {})
        try:
            keys[key] = tomllib.loads(f"value = {value}")["value"]
        except ValueError:
            keys[key] = os.path.expanduser(value.strip())           # a shell leaves run.dir=~/x as it is
    return Layer("on the command line", tables)


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
        first = errors[0]
        kind = first["type"]
        known = schema.model_fields
        if len(path) > 3 or kind.startswith("union_tag"):       # a table with a choice of `method`
            methods = tables_of(known[path[1]])
            known = methods[path[2]].model_fields if len(path) > 3 else methods     # type: ignore[assignment]
        full_name = ".".join((*path[:2], *(path[3:] or path[2:])))     # without the method
        where = origin.get(".".join(path[:2]), place)
        messages = dict.fromkeys(one["msg"].replace("Input should be", "must be") for one in errors)
        value = first["input"]
        message = f"{' or '.join(messages)} (got {value!r})"
        if kind == "missing":
            message = f"missing; add {path[-1]} = ..."
        elif kind == "extra_forbidden":
            hint = did_you_mean(path[-1], known, full_name.removesuffix(path[-1]) + "{}")
            message = "unknown key" + (hint or f"; its keys are {', '.join(known)}")
        elif kind == "model_attributes_type" and isinstance(value, str):
            method = nearest(value, tables_of(known[path[1]])) or "yarn"
            message = f'must be a table; write {".".join(path)}={{method="{method}",factor=4.0}}'
        elif kind == "union_tag_invalid":
            method = first["ctx"]["tag"]
            hint = did_you_mean(method, known) or f"; choose from {', '.join(known)}"
            message = f"unknown method {method!r}{hint}"
        yield f"{full_name} {where}: {message}"


def tables_of(field: Any) -> dict[str, Schema]:
    """The models of a field that is a table with a choice of `method`, by method."""
    return {part.model_fields["method"].default: part for part in get_args(field.annotation)
            if isinstance(part, type) and issubclass(part, BaseModel)}


def describe_choice(name: str, choice: type, schema: Schema, shared: Collection[str] = ()) -> list[str]:
    """The first line of the docstring of a class, and its schema's keys, without those that all share.

    Two lines for each key: type, limits and default; then the meaning, if it is described.
    """
    lines = [f"{name}: {(choice.__doc__ or 'no docstring yet').strip().splitlines()[0]}"]
    about = schema.model_json_schema()["properties"]
    for key, field in schema.model_fields.items():
        if key not in shared:
            default = "required" if field.is_required() else f"default {json.dumps(field.default)}"
            lines.append(f"  {key:16} {accepted(about[key])}; {default.replace('null', 'unset')}")
            lines += [f"  {'':16} {' '.join(field.description.split())}"] if field.description else []
    return lines


def accepted(about: dict[str, Any]) -> str:
    """The values that a field of this JSON schema accepts, such as "integer >= 1"."""
    kinds = []
    for part in about.get("anyOf", [about]):
        choices = part.get("enum", [part["const"]] if "const" in part else [])
        bounds = [f"{sign} {part[name]}" for name, sign in SIGNS.items() if name in part]
        kind = " | ".join(map(json.dumps, choices)) if choices else part.get("type", "table")
        kinds.append(" ".join([kind, " and ".join(bounds)]).strip())
    return " or ".join(kind for kind in kinds if kind != "null")
