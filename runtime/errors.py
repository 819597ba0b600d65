"""UserError, a mistake that a user can fix, and how values and exceptions appear in its message."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

LONGEST = 2000          # characters of a message


class UserError(ValueError):
    """A mistake that a user can fix, a line per problem. The commands print `error: ...` and exit with 2."""

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(one_line, problems))
        super().__init__("\n".join(self.problems))


def one_line(text: str, longest: int = LONGEST) -> str:
    """The text with its control characters escaped and truncated to `longest` characters.

    So text from a file cannot add lines to a message, control the terminal or fill the screen.
    """
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
                      for c in text)
    return escaped if len(escaped) <= longest else escaped[:longest] + " ..."


def describe_exception(error: BaseException, secret: str | None = None) -> str:
    """Type and message of an exception that a library raised, on one line, with the secret masked."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return one_line(text.replace(secret, "***") if secret else text, longest=300)


def shortened(value: Any) -> str:
    """The repr of a value, truncated so that it fits into a message."""
    try:
        return _SHORT.repr(value)
    except ValueError:          # Python refuses to print an integer of more than 4,300 digits
        return "a very large number"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that suggests the known word nearest to this one; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
