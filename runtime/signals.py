"""Signals in training: they wait until the loop has saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from runtime.command import SIGNALS, interrupt
from runtime.screen import drop_stalled


class Stopped(Exception):
    """A signal (its number is the argument) arrived, and the training state is complete: it can be saved."""


@contextmanager
def deferred_signals(stop: list[int]) -> Iterator[None]:
    """Inside, each signal that would interrupt the command is only appended to `stop`.

    Further ones change nothing, until the process ends: Slurm sends SIGTERM after SIGUSR1, and torchrun
    repeats the terminal's SIGINT, while a save may be under way.
    """
    def note(number: int, frame: Any) -> None:
        stop.append(number)
        for descriptor in (1, 2):
            drop_stalled(descriptor)

    handled = [number for number in SIGNALS if signal.getsignal(number) is interrupt]
    for number in handled:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in handled if not stop else ():      # after a stop the process only has to end
            signal.signal(number, interrupt)
