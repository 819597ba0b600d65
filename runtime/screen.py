"""Standard output and standard error that may get lost: a closed pipe, a dropped connection, a full disk."""

from __future__ import annotations

import errno
import io
import os
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

FULL = (errno.ENOSPC, errno.EDQUOT)     # there may be room again later


class Screen:
    """A text stream that continues without its file: what cannot be written is dropped.

    So hours of work do not end because a terminal or a log is gone. If `is_needed`, the error is raised
    nevertheless. Characters that the stream's encoding lacks are written as escapes. A line is written at
    once, so that those of two processes do not mix.
    """

    def __init__(self, stream: TextIO | None, is_needed: bool = False) -> None:
        # Python has no stream at all if the descriptor was closed before the start
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")     # noqa: SIM115
        self.is_needed = is_needed
        if isinstance(self.stream, io.TextIOWrapper):
            self.stream.reconfigure(errors="backslashreplace")
            if self.stream.write_through:           # torchrun's `python -u`: would write line and end apart
                self.stream.reconfigure(line_buffering=True, write_through=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def finish(self) -> None:
        """Drop what is still unwritten and cannot be, so that Python does not fail on it at its end."""
        try:
            self.stream.flush()
        except OSError:
            self._discard()

    def _try(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except OSError as error:
            if error.errno not in FULL:
                self._discard()
            if self.is_needed:
                raise

    def _discard(self) -> None:
        """From now on write into nothing, including what the stream still holds."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.stream.fileno())
        os.close(nothing)


def drop_stalled(descriptor: int) -> None:
    """Discard an output whose reader has stopped reading: a write that waits for it would wait for ever."""
    with suppress(OSError, ValueError):             # closed
        if not select.select([], [descriptor], [], 0)[1]:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, descriptor)
            os.close(nothing)
