"""The pages of `train.py --help`: what the sections of a config, encodings and scaling methods accept."""

from __future__ import annotations

import textwrap

from config import SECTIONS
from positions import ENCODINGS, Options
from positions.scaling import SCALINGS
from runtime.errors import UserError, did_you_mean
from runtime.schema import describe_choice


def help_text(topic: str | None = None) -> str:
    """What `train.py --help [TOPIC]` prints; a topic is a section, encoding, scaling method or "all"."""
    topics = {name: describe_choice(f"[{name}]", schema, schema) for name, schema in SECTIONS.items()}
    for name, encoding in ENCODINGS.items():
        topics[name] = describe_choice(name, encoding, encoding.Options, Options.model_fields)
        topics[name] += [f"lr_scale is {encoding.lr_scale:g} by default; all shared keys: --help position"]
    topics |= {name: describe_choice(name, scaling, scaling) for name, scaling in SCALINGS.items()}
    topics["all"] = [line for lines in topics.values() for line in [*lines, ""]]
    if topic in topics:
        return "\n".join(topics[topic])
    if topic is not None:
        hint = did_you_mean(topic, topics) or "; --help lists the topics"
        raise UserError(f"--help {topic!r}: unknown topic{hint}")
    return "\n".join([
        "sections of a config (set a key in CONFIG.toml, or by section.key=value on the command line):",
        *(f"  {topics[section][0]}" for section in SECTIONS),
        "", "encodings (position.encoding):", textwrap.indent(textwrap.fill(", ".join(ENCODINGS)), "  "),
        "", "scaling methods of rotary encodings (position.scaling):", f"  {', '.join(SCALINGS)}",
        "", "keys with type, default and meaning: --help SECTION|ENCODING|METHOD|all, such as --help train"])
