"""UserError: a mistake that a user can fix, and ends a command with one line and exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that a user can fix, a line per problem. The commands print `error: ...` and exit with 2."""

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(" ".join(problem.splitlines()) for problem in problems)
        super().__init__("\n".join(self.problems))


# names of nanoGPT and of Hugging Face -> ours
ELSEWHERE = {"learning_rate": "lr", "max_iters": "steps", "max_steps": "steps", "block_size": "seq_len",
             "gradient_accumulation_steps": "accumulate", "warmup_iters": "warmup",
             "eval_interval": "eval_every"}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that suggests the known word nearest to this one; empty if none is near."""
    known = list(known)
    near = [ELSEWHERE[word]] if ELSEWHERE.get(word) in known else difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
