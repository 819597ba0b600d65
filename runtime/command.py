"""What every command shares: errors in one line with exit code 2, signals, the argument parser."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from runtime.errors import UserError, one_line

# the fix for a file that cannot be read or written, where the system's message does not name it
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and run the same command again; what was "
                                                  "saved before is intact"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions or give another path"),
    errno.EROFS: "make it writable or give another folder",
}


def interrupt(number: int, frame: Any) -> NoReturn:
    """Handle a signal by an exception, so that `finally` and `with` remove temporary files."""
    raise KeyboardInterrupt(number)


def run_command(main: Callable[[], int | None]) -> None:
    """Run main and exit with its code.

    A UserError, a file that cannot be used, and running out of memory end with one line and exit code 2. A
    signal that `interrupt` handles ends with one line and exit code 128 + its number: SIGINT (Ctrl-C),
    SIGTERM, and those that main adds.
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
    except (MemoryError, RuntimeError) as error:
        # torch raises OutOfMemoryError, a RuntimeError, on CUDA, and a plain RuntimeError on the CPU
        is_out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_out_of_memory and "allocate memory" not in str(error):
            raise
        print("error: out of memory; use a smaller batch, length or model (for training, a larger "
              "train.accumulate saves as much memory as a smaller batch)", file=sys.stderr)
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        print("\n" * sys.stderr.isatty() + f"stopped by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(128 + number)
    sys.exit(2)


def argument_parser(description: str, epilog: str | None = None,
                    add_help: bool = True) -> argparse.ArgumentParser:
    """An ArgumentParser that reports a wrong call as a UserError: one `error:` line, exit code 2."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message}; see {self.prog} --help")

    return Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                  epilog=epilog, add_help=add_help)
