"""What every command shares: mistakes told in one line with exit code 2, signals, the argument parser."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from runtime.errors import UserError, one_line

# what to do about a file that cannot be written or read, where the system's words leave it open
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and give the same command again; what was "
                                                  "saved before is untouched"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or give another path"),
    errno.EROFS: "make it writable, or give another folder",
}


def interrupt(number: int, frame: Any) -> NoReturn:
    """Handle a signal: stop what runs, temporary files removed on the way."""
    raise KeyboardInterrupt(number)


def run_command(main: Callable[[], int | None]) -> None:
    """Exit with main's code; a UserError, or a file that cannot be used, ends in one line and code 2.

    Ctrl-C, SIGTERM and others that main gives to `interrupt` end in one line and code 128 + their number.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        sys.exit(main())
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
    except OSError as error:
        reason = f"{error.filename or 'input/output'}: {(error.strerror or str(error)).lower()}"
        remedy = REMEDIES.get(error.errno or 0)
        print("error: " + one_line("; ".join(filter(None, (reason, remedy)))), file=sys.stderr)
    except (MemoryError, RuntimeError) as error:    # torch has two of its own for it, of this kind
        of_torch = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
        if not (of_torch or isinstance(error, MemoryError)):
            raise
        print("error: out of memory; take a smaller batch, length or model (in training a larger "
              "train.accumulate has the same effect as a smaller batch)", file=sys.stderr)
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        print("\n" * sys.stderr.isatty() + f"stopped by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(128 + number)
    sys.exit(2)


def argument_parser(description: str, epilog: str | None = None,
                    add_help: bool = True) -> argparse.ArgumentParser:
    """An ArgumentParser that ends a wrong call like every other mistake: one `error:` line, exit code 2."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message}; see {self.prog} --help")

    return Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                  epilog=epilog, add_help=add_help)
