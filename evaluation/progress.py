"""Shows how far an evaluation is, and announces one that takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

SECONDS_PER_LINE = 30                           # of progress, if the output is not a terminal
SECONDS_TO_BAR = 3                              # on a terminal; before that the rest cannot be estimated
LONG = 1800                                     # seconds of an evaluation that is announced


class Progress:
    """Shows how far an evaluation is: a bar on a terminal, elsewhere a line every 30 seconds, on stderr.

    Times are estimated from `left`, the work of all that is still to be measured.
    """

    def __init__(self, is_shown: bool) -> None:
        self.is_shown, self.done, self.left = is_shown, 0.0, 0.0
        self.began = self.shown_at = time.monotonic()
        self.is_long = False

    def __call__(self, things: Iterable[Any], what: str, work: Sequence[float]) -> Iterator[Any]:
        """Yield the things, which are as much work as this."""
        for number, (thing, amount) in enumerate(zip(things, work, strict=True), start=1):
            yield thing
            self.done, self.left = self.done + amount, max(0.0, self.left - amount)
            if self.is_shown:
                self.show(f"{what}: {number} of {len(work)}", number == len(work))

    def show(self, what: str, is_end: bool) -> None:
        """Show it if it is time."""
        now = time.monotonic()
        if now - self.began < SECONDS_TO_BAR:
            return
        seconds_left = (now - self.began) / self.done * self.left
        if not self.is_long and seconds_left > LONG:
            self.is_long = True
            print(f"this will take about {in_words(seconds_left)} on this machine; for less give --lengths, "
                  "--windows, --tokens or --protocol. Each length is kept once it is measured: the same "
                  "command goes on from there", file=sys.stderr, flush=True)
        line = f"{self.done / (self.done + self.left):4.0%}, {in_words(seconds_left)} left, {what}"
        if sys.stderr.isatty():
            n_full = round(20 * self.done / (self.done + self.left))
            ends = "\r\x1b[K" if is_end and not self.left else ""
            print(f"\r\x1b[K|{'█' * n_full:20}|{line}{ends}", end="", file=sys.stderr, flush=True)
        elif now - self.shown_at >= SECONDS_PER_LINE:
            print(line.lstrip(), file=sys.stderr, flush=True)
            self.shown_at = now


def in_words(seconds: float) -> str:
    """40 s, 12 min or 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
