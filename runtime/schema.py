"""Pydantic schemas in words: what a field accepts (for --help), and what is wrong with a value."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from runtime.errors import did_you_mean, shortened

Schema = type[BaseModel]
NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
PLURALS = {int: "integers", float: "numbers"}
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


class Section(BaseModel):
    """One table of the config; unknown keys and wrong types are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def explain_all(error: ValidationError, schemas: Mapping[str, Schema], origin: Mapping[str, str],
                default_place: str, ignore_missing: bool) -> Iterator[str]:
    """One line for each key that is wrong in a config of sections.

    `schemas` are the models of the sections. `origin` says where each section and section.key was set;
    `default_place` is used for those that were not set.
    """
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for one in error.errors():
        if one["type"] == "missing" and ignore_missing:
            continue
        section, *rest = map(str, one["loc"])
        # after the key, pydantic's location names the member of a union and, for a table, the key in it
        field = schemas[section].model_fields.get(rest[0]) if section in schemas and rest else None
        is_in_table = len(rest) > 2 and rest[1] in tables_of(field)
        by_key.setdefault((section, *rest[:3 if is_in_table else 1]), []).append(one)
    homes = {key: f"{section}.{key}" for section, schema in schemas.items() for key in schema.model_fields}
    for (section, *rest), found in by_key.items():
        where = origin.get(".".join((section, *rest[:1])))
        if not where:
            where = default_place if found[0]["type"] == "missing" else "(default)"
        if found[0]["type"] == "extra_forbidden" and not rest:
            yield f"[{section}] {where}: unknown section{did_you_mean(section, schemas)}"
        elif not rest:
            yield f"[{section}] {where}: {found[0]['msg']}"
        elif len(rest) == 1:
            owner = "[position] with this encoding" if section == "position" else f"[{section}]"
            yield explain(f"{section}.{rest[0]}", found, where, schemas[section], owner, homes)
        else:
            key, tag, inner = rest
            schema = tables_of(schemas[section].model_fields[key])[tag]
            owner = f"{section}.{key} with this method"
            yield explain(f"{section}.{key}.{inner}", found, where, schema, owner)


def explain(name: str, errors: Sequence[Any], where: str, schema: Schema, owner: str,
            homes: Mapping[str, str] | None = None) -> str:
    """One line for pydantic's errors on one key: its full name, where it was set, what is wrong, the fix.

    `schema` is the model that the key belongs to and `owner` its name in messages; `homes` gives the full
    names of keys that belong to other models.
    """
    key = name.rpartition(".")[2]
    kind, message = errors[0]["type"], errors[0]["msg"]
    if kind == "rule":
        return f"{name} {where}: {message}"
    if kind == "missing":
        return f"{name} {where}: missing; add {key} = ..."
    if kind == "extra_forbidden":
        known = schema.model_fields
        hint = did_you_mean(key, known)
        if not hint and homes and key in homes:
            hint = f"; did you mean {homes[key]}?"
        elif not hint:
            hint = f"; its keys are {', '.join(known)}"
        return f"{name} {where}: unknown key of {owner}{hint}"
    field = schema.model_fields[key]
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        methods = tables_of(field)
        choices = f"; choose from {', '.join(methods)}"
        if kind == "union_tag_not_found":
            return f"{name}.method {where}: missing{choices}"
        method = errors[0]["ctx"]["tag"]
        hint = did_you_mean(method, methods) or choices
        return f"{name}.method {where}: unknown method {shortened(method)}{hint}"
    return f"{name} {where}: must be {accepted(field)}, got {shortened(errors[0]['input'])}"


def tables_of(field: Any) -> dict[str, Schema]:
    """The models of a field that is a table with a choice of `method`, by method; empty for other fields."""
    parts = get_args(field.annotation) if field is not None else ()
    return {part.model_fields["method"].default: part for part in parts
            if isinstance(part, type) and issubclass(part, BaseModel)}


def checked(value: Any, problems: Mapping[str, str]) -> Any:
    """The validated table; raises pydantic's error if any of its keys has a problem."""
    if problems:
        raise ValidationError.from_exception_data("rules", [
            InitErrorDetails(type=PydanticCustomError("rule", "{problem}", {"problem": problem}),
                             loc=(key,), input=None) for key, problem in problems.items()])
    return value


def describe_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    """Two lines for each key: type, limits and default; then the meaning, if it is described."""
    for key, field in fields.items():
        default = "required" if field.is_required() else f"default {json.dumps(field.default)}"
        yield f"  {key:16} {accepted(field)}; {default.replace('null', 'unset')}"
        if field.description:
            yield f"  {'':16} {field.description}"


def describe_choice(name: str, choice: type, schema: Schema,
                    shared: Collection[str] = ()) -> list[str]:
    """The first line of the docstring of a class, and the keys of its schema that are not shared by all."""
    own = {key: field for key, field in schema.model_fields.items() if key not in shared}
    summary = (choice.__doc__ or "no docstring yet").strip().splitlines()[0]
    return [f"{name}: {summary}", *describe_fields(own)]


def accepted(field: Any) -> str:
    """The values that a field accepts, such as "an integer >= 1"."""
    return type_name(field.annotation) + limits(field)


def type_name(annotation: Any) -> str:
    """A type in words; None among the choices of a union is left out, since TOML has no null."""
    if annotation in NAMES:
        return NAMES[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a table"
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if kind in (dict, list):
        item, *rules = get_args(arguments[-1]) or arguments[-1:]        # Annotated, or a plain type
        container = "table" if kind is dict else "list"
        return f"a {container} of {PLURALS[item]}" + "".join(map(limits, rules))
    return " or ".join(dict.fromkeys(type_name(part) for part in arguments if part is not NoneType))


def limits(field: Any) -> str:
    """The bounds of a field, such as " > 0 and < 1"; empty if it has none."""
    bounds = [f"{sign} {bound if isinstance(bound, int) else format(bound, 'g')}"
              for rule in field.metadata for name, sign in SIGNS.items()
              if (bound := getattr(rule, name, None)) is not None]
    return " " + " and ".join(bounds) if bounds else ""
