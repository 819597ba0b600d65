"""Pydantic schemas in words: what a field accepts (for --help), and what is wrong with a value."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from runtime.errors import did_you_mean, shortened

NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
PLURALS = {int: "integers", float: "numbers"}
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def explain(name: str, errors: Sequence[Any], where: str, schema: type[BaseModel], owner: str,
            homes: Mapping[str, str] | None = None) -> str:
    """One line for what pydantic's errors say about one key: its name, where it was set, and the fix.

    `name` ends with the key, as in "train.lr". `schema` is the model that the key belongs to and `owner` its
    name in messages; `homes` gives the full names of keys that belong elsewhere.
    """
    key = name.rpartition(".")[2]
    kind, message = errors[0]["type"], errors[0]["msg"]
    if kind in ("rule", "value_error"):
        return f"{name} {where}: {message.removeprefix('Value error, ')}"
    if kind == "missing":
        return f"{name} {where}: missing; add {key} = ..."
    if kind == "extra_forbidden":
        hint = did_you_mean(key, schema.model_fields)
        if not hint and homes and key in homes:
            hint = f"; did you mean {homes[key]}?"
        return f"{name} {where}: unknown key of {owner}{hint or '; --help lists the keys'}"
    field = schema.model_fields[key]
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        methods = [part.model_fields["method"].default for part in get_args(field.annotation)
                   if part is not NoneType]
        choices = f"; choose from {', '.join(methods)}"
        if kind == "union_tag_not_found":
            return f"{name}.method {where}: missing{choices}"
        method = errors[0]["ctx"]["tag"]
        return f"{name}.method {where}: unknown method {shortened(method)}" \
               f"{did_you_mean(method, methods) or choices}"
    return f"{name} {where}: must be {accepted(field)}, got {shortened(errors[0]['input'])}"


def rule_broken(problems: Mapping[str, str]) -> ValidationError:
    """The error to raise in a validator of a table for what is wrong with some of its keys."""
    return ValidationError.from_exception_data("rule", [
        InitErrorDetails(type=PydanticCustomError("rule", "{problem}", {"problem": problem}), loc=(key,),
                         input=None) for key, problem in problems.items()])


def describe_fields(fields: Mapping[str, Any]) -> Iterator[str]:
    """Two lines for each key: type, limits and default; then the meaning."""
    for key, field in fields.items():
        default = "required" if field.is_required() else f"default {json.dumps(field.default)}"
        yield f"  {key:16} {accepted(field)}; {default.replace('null', 'unset')}"
        yield f"  {'':16} {field.description}"


def describe_choice(name: str, choice: type, schema: type[BaseModel],
                    shared: Collection[str]) -> list[str]:
    """The first line of the docstring of a class, and the keys of its schema that are not shared by all."""
    own = {key: field for key, field in schema.model_fields.items() if key not in shared}
    summary = (choice.__doc__ or "no docstring yet").strip().splitlines()[0]
    return ["", f"{name}: {summary}", *describe_fields(own)]


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
    """The bounds that a field sets, such as " > 0 and < 1"; empty where there are none."""
    bounds = [f"{sign} {getattr(rule, name):g}" for rule in field.metadata for name, sign in SIGNS.items()
              if hasattr(rule, name)]
    return " " + " and ".join(bounds) if bounds else ""
