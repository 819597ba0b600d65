"""UserError, a mistake that a user can fix: it ends a command with one line and exit code 2. Warnings."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from functools import cache


class UserError(ValueError):
    """A mistake that a user can fix, a line per problem. The commands print `error: ...` and exit with 2."""

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(" ".join(problem.splitlines()) for problem in problems)
        super().__init__("\n".join(self.problems))


def warn(text: str) -> None:
    """Print a warning to stderr. What train.py warns of is a line of its log instead."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


warn_once = cache(warn)         # each text once in a process


# names of nanoGPT and of Hugging Face -> ours
ELSEWHERE = {"learning_rate": "lr", "max_iters": "steps", "max_steps": "steps", "block_size": "seq_len",
             "gradient_accumulation_steps": "accumulate", "warmup_iters": "warmup",
             "eval_interval": "eval_every"}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to this one, in any case of letters; None if none is near."""
    by_letters = {name.lower(): name for name in known}
    if ELSEWHERE.get(word) in by_letters:
        return ELSEWHERE[word]
    near = difflib.get_close_matches(word.lower(), by_letters, n=1)
    return by_letters[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """The end of a message that suggests the nearest known word, in this form; empty if none is near."""
    near = nearest(word, known)
    return f"; did you mean {form.format(near)}?" if near else ""
