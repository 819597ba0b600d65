"""The pages of `train.py --help`: what the sections of a config, encodings and scaling methods accept."""

from __future__ import annotations

import textwrap

from base.errors import UserError, did_you_mean
from base.schema import describe_choice
from config import SECTIONS
from positions import ENCODINGS, Options
from positions.scaling import SCALINGS


def help_text(topic: str | None = None) -> str:
    """What `train.py --help [TOPIC]` prints; a topic is a section, encoding, scaling method or "all"."""
    pages = {name: describe_choice(f"[{name}]", schema, schema) for name, schema in SECTIONS.items()}
    pages |= {name: describe_choice(name, kind, kind) for name, kind in SCALINGS.items()}
    for name, kind in ENCODINGS.items():
        pages[name] = [*describe_choice(name, kind, kind.Options, Options.model_fields), "",
                       f"lr_scale is {kind.lr_scale:g} by default; for it, layers, temperature and more: "
                       "--help position"]
    if topic == "all":
        return "\n\n".join("\n".join(page) for page in pages.values())
    if topic in pages:
        return "\n".join(pages[topic])
    if topic is not None:
        hint = did_you_mean(topic, pages) or "; --help lists the topics"
        raise UserError(f"--help {topic!r}: unknown topic{hint}")
    return "\n".join([
        "sections of a config (set a key in CONFIG.toml, or by section.key=value on the command line):",
        *(f"  [{name}]: {schema.__doc__.splitlines()[0]}" for name, schema in SECTIONS.items()),
        "", "encodings (position.encoding):", textwrap.indent(textwrap.fill(", ".join(ENCODINGS)), "  "),
        "", "scaling methods of rotary encodings (position.scaling):", f"  {', '.join(SCALINGS)}",
        "", "keys with type, default and meaning: --help SECTION|ENCODING|METHOD|all, such as --help train"])
