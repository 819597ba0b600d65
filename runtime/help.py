"""The pages of `train.py --help`: what the sections of a config, encodings and scaling methods accept."""

from __future__ import annotations

import textwrap
from typing import Any

from base.errors import UserError, did_you_mean
from base.schema import describe_choice
from config import SECTIONS
from positions import ENCODINGS, Options
from positions.scaling import SCALINGS


def help_text(topic: str | None = None) -> str:
    """What `train.py --help [TOPIC]` prints; a topic is a section, encoding, scaling method or "all"."""
    sections = {name: (f"[{name}]", schema, schema) for name, schema in SECTIONS.items()}
    topics: dict[str, tuple[Any, ...]] = {
        **sections, **{name: (name, kind, kind) for name, kind in SCALINGS.items()},
        **{name: (name, kind, kind.Options, Options.model_fields) for name, kind in ENCODINGS.items()}}
    if topic == "all":
        return "\n\n".join("\n".join(describe_choice(*about)) for about in topics.values())
    if topic in topics:
        more = ["", "for its layers, temperature and more: --help position"] * (topic in ENCODINGS)
        return "\n".join([*describe_choice(*topics[topic]), *more])
    if topic is not None:
        hint = did_you_mean(topic, topics) or "; --help lists the topics"
        raise UserError(f"--help {topic!r}: unknown topic{hint}")
    return "\n".join([
        "sections of a config (set a key in CONFIG.toml, or by section.key=value on the command line):",
        *(f"  [{name}]: {schema.__doc__.splitlines()[0]}" for name, schema in SECTIONS.items()),
        "", "encodings (position.encoding):", textwrap.indent(textwrap.fill(", ".join(ENCODINGS)), "  "),
        "", "scaling methods of rotary encodings (position.scaling):", f"  {', '.join(SCALINGS)}",
        "", "keys with type, default and meaning: --help SECTION|ENCODING|METHOD|all, such as --help train"])
