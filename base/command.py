"""What every command shares: errors in one line with exit code 2, signals, the argument parser."""

from __future__ import annotations

import argparse
import atexit
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from base.errors import UserError


def run_command(main: Callable[[], int | None]) -> None:
    """Run main and exit with its code.

    A UserError, a file that cannot be used, and running out of memory end with a line for each problem and
    exit code 2; Ctrl-C, SIGTERM and SIGHUP with 128 + their number, by an exception, so that `finally` is
    executed.
    """
    def interrupt(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt(number)

    code, lines = 2, []
    try:
        with handled_signals(interrupt, "SIGINT", "SIGTERM", "SIGHUP"):
            code = main() or 0
    except UserError as error:
        lines = [f"error: {problem}" for problem in error.problems]
    except OSError as error:
        lines = [f"error: {error.filename or 'input/output'}: {error.strerror or error}"]
    except (MemoryError, RuntimeError) as error:
        # torch raises OutOfMemoryError, a RuntimeError, on CUDA, and a plain RuntimeError on the CPU
        is_out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_out_of_memory and "allocate memory" not in str(error):
            raise
        lines = ["error: out of memory; use a smaller length or model, or in training a smaller batch or a "
                 "larger train.accumulate"]
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        code, lines = 128 + number, [f"stopped by {signal.Signals(number).name}"]
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr, flush=True)
    if torch.distributed.is_initialized():
        # Python's own end would abort this process now and then (code -6): it stops threads that ask for its
        # lock, and gloo's threads do, even after destroy_process_group (pytorch/pytorch pull request 179291)
        atexit._run_exitfuncs()     # W&B, temporary folders
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def handled_signals(handler: Callable[[int, Any], None], *names: str) -> Iterator[None]:
    """Call the handler at these signals, unless one is ignored (SIGHUP under nohup) or Windows lacks it."""
    handlers = {}
    for name in names:
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in handlers.items():
            signal.signal(number, earlier)


def run_parser(description: str | None, epilog: str | None = None,
               add_help: bool = True) -> argparse.ArgumentParser:
    """The parser of a command that opens RUN."""
    parser = argument_parser(description, epilog, add_help)
    parser.add_argument("run", metavar="RUN", help="a folder that train.py made, a Hugging Face folder, or "
                        "hf:ORG/NAME of the hub")
    parser.add_argument("--checkpoint", default="newest", metavar="WHICH",
                        help="of a folder of train.py: newest (default), best (run.keep_best), or its step")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or mps")
    return parser


def argument_parser(description: str | None, epilog: str | None = None,
                    add_help: bool = True) -> argparse.ArgumentParser:
    """An ArgumentParser that reports a wrong call as a UserError: one `error:` line, exit code 2."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            if self.prog in ("train.py", "sweep.py"):
                message = re.sub(r"(unrecognized arguments: --\S+).*",
                                 r"\1; write a config key as section.key=value: train.lr=1e-3", message)
            # argparse takes a value that begins with a dash for another option
            message = re.sub(r"(--\S+): expected one argument", r'\g<0>; write \1="VALUE"', message)
            raise UserError(f"{message}; see {self.prog} --help")

    return Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                  epilog=epilog, add_help=add_help)


def positive(text: str) -> int:
    """The type of an argument that is a number of things."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def integers(text: str) -> list[int]:
    """The type of an argument that is numbers and commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers and commas, such as 0,1,2") from None
