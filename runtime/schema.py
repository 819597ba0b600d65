"""Pydantic schemas in words: what a field accepts (for --help), and what is wrong with a value."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from runtime.errors import did_you_mean

Schema = type[BaseModel]
SIGNS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


class Section(BaseModel):
    """One table of the config; unknown keys and wrong types are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False,
                              use_attribute_docstrings=True)


def explain(error: ValidationError, name: str, schema: Schema, origin: Mapping[str, str],
            place: str) -> Iterator[str]:
    """One line for each key that is wrong: its full name, where it was set, what is wrong, the fix.

    `name` is that of the table; `origin` says where its keys were set, and `place` where a missing key
    belongs. Without a place missing keys are passed over: they may stand in a file that was not read.
    """
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for one in error.errors():
        # without the members of a union, such as "list[int]"; the tag of a table, its method, stays
        keys = [part for part in one["loc"] if isinstance(part, str) and "[" not in part]
        by_key.setdefault((name, *keys), []).append(one)
    for path, found in by_key.items():
        kind, message, known = found[0]["type"], "", schema.model_fields
        if len(path) > 3 or kind.startswith("union_tag"):       # a table with a choice of `method`
            methods = tables_of(known[path[1]])
            known = methods[path[2]].model_fields if len(path) > 3 else methods     # type: ignore[assignment]
        hint = did_you_mean(path[-1], known) or f"; its keys are {', '.join(known)}"
        messages = dict.fromkeys(one["msg"].replace("Input should be", "must be") for one in found)
        message = f"{' or '.join(messages)}, got {found[0]['input']!r}"
        if kind == "missing":
            message = f"missing; add {path[-1]} = ..."
        elif kind == "extra_forbidden":
            message = f"unknown key{hint}"
        elif kind == "union_tag_invalid":
            method, choices = found[0]["ctx"]["tag"], f"; choose from {', '.join(known)}"
            message = f"unknown method {method!r}{did_you_mean(method, known) or choices}"
        if place or kind != "missing":
            where = origin.get(".".join(path[:2]), "(default)" if origin and kind != "missing" else place)
            full_name = ".".join((*path[:2], *(path[3:] or path[2:])))     # without the method
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
