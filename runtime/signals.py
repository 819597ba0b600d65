"""Signals in training: the first one waits until the loop can save, a second one interrupts at once."""

from __future__ import annotations

import signal
from typing import Any

from runtime.command import interrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """A signal (its number is the argument) arrived, and the training state is complete: it can be saved."""


def interrupt_at_once() -> None:
    """Let each of SIGNALS end the command at once, while there is nothing to save."""
    for number in SIGNALS:
        signal.signal(number, interrupt)


def defer_signals(stop: list[int]) -> None:
    """From now on append the first of SIGNALS to `stop`; needs `interrupt_at_once` to be called before."""
    def note(number: int, frame: Any) -> None:
        if stop:
            interrupt(number, frame)
        stop.append(number)

    for number in SIGNALS:
        if signal.getsignal(number) is interrupt:
            signal.signal(number, note)
