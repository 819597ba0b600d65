"""UserError, a mistake that a user can fix, and how values appear in its message."""

from __future__ import annotations

import reprlib
from typing import Any

LONGEST = 2000          # characters of a message


class UserError(ValueError):
    """What a user can mend: one line a problem. The commands print each as `error: ...` and exit with 2."""

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(one_line, problems))
        super().__init__("\n".join(self.problems))


def one_line(text: str, longest: int = LONGEST) -> str:
    """Text whose control characters are spelled out: what a file holds cannot add lines or steer a screen.

    Nor fill it: what is beyond `longest` characters is left out.
    """
    spelled = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
                      for c in text)
    return spelled if len(spelled) <= longest else spelled[:longest] + " ..."


def told(error: BaseException, secret: str | None = None) -> str:
    """Kind of an exception of somebody else's code and what it says, on one line, without a secret."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return one_line(text.replace(secret, "***") if secret else text, longest=300)


def shown(value: Any) -> str:
    """A value as Python writes it, shortened: a message holds a few words of what it is about."""
    try:
        return _SHORT.repr(value)
    except ValueError:          # an integer of more than 4,300 digits
        return "a very large number"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
