"""What every command shares: errors in one line with exit code 2, signals, the argument parser."""

from __future__ import annotations

import argparse
import atexit
import errno
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn, TextIO, cast

import torch

from runtime.errors import UserError, one_line, shortened
from runtime.screen import Screen

# what asks a program to stop: Ctrl-C, kill, a lost terminal, Ctrl-\, a limit on CPU time, schedulers
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGUSR1,
           signal.SIGUSR2)

# the fix for a file that cannot be read or written, where the system's message does not name it
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and run the same command again; what was "
                                                  "saved before is intact"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions or give another path"),
    errno.EFBIG: "raise the limit of the shell (ulimit -f) or of the file system",
    errno.EROFS: "make it writable or give another folder",
}


def interrupt(number: int, frame: Any) -> NoReturn:
    """Handle a signal by an exception, so that `finally` and `with` remove temporary files."""
    raise KeyboardInterrupt(number)


def send_again(ignored: Any) -> None:
    """Send a signal again whose exception Python ignored: it was raised in a destructor or a callback.

    This is sys.unraisablehook; other exceptions are reported as always. A thread sends the signal, a moment
    later, since here its exception would be ignored again.
    """
    stop = ignored.exc_value
    if isinstance(stop, KeyboardInterrupt):
        sender = threading.Timer(0.05, os.kill, (os.getpid(), stop.args[0] if stop.args else signal.SIGINT))
        sender.daemon = True
        sender.start()
    else:
        sys.__unraisablehook__(ignored)


def run_command(main: Callable[[], int | None], needs_output: bool = False) -> None:
    """Run main and exit with its code.

    A UserError, a file that cannot be used, and running out of memory end with one line and exit code 2. One
    of SIGNALS ends with one line and exit code 128 + its number. If standard output or standard error is
    lost, main continues without it, unless `needs_output`.
    """
    for number in SIGNALS:
        # nohup ignores SIGHUP, and a shell SIGQUIT in the background; SIGINT was reset by the commands
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    hook, sys.unraisablehook = sys.unraisablehook, send_again
    out, err = Screen(sys.stdout, needs_output), Screen(sys.stderr)
    try:
        with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
            code = exit_code(main)
    finally:
        sys.unraisablehook = hook
        out.finish()
        err.finish()
    if torch.distributed.is_initialized():
        # Python's own end would abort this process now and then (code -6): it stops threads that ask for its
        # lock, and gloo's threads do, even after destroy_process_group (pytorch/pytorch pull request 179291)
        atexit._run_exitfuncs()                 # W&B, temporary folders
        out.finish()
        err.finish()
        os._exit(code)
    sys.exit(code)


def exit_code(main: Callable[[], int | None]) -> int:
    """Run main and return its code, or print in one line what ended it and return 2 or 128 + n."""
    try:
        try:
            end_with_parent()
            return main() or 0
        finally:                        # nothing is left to undo: a further signal ends the process at once
            for number in SIGNALS:
                if signal.getsignal(number) is interrupt:
                    signal.signal(number, signal.SIG_DFL)
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
        return 128 + number
    return 2


def end_with_parent() -> None:
    """If sweep.py started this command, send SIGTERM to it once when the sweep has ended, even if killed.

    NANOROPE_PARENT is the sweep's process number. (PR_SET_PDEATHSIG of Linux would send the signal when the
    thread of the sweep that started this command ends.)
    """
    parent = os.environ.pop("NANOROPE_PARENT", None)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def argument_parser(description: str, epilog: str | None = None,
                    add_help: bool = True) -> argparse.ArgumentParser:
    """An ArgumentParser that reports a wrong call as a UserError: one `error:` line, exit code 2."""

    class Parser(argparse.ArgumentParser):
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            # a shell expands ~ only at the start of a word, not in --out=~/x or run.dir=~/x, and a program
            # that starts this one expands nothing; --prompt takes text
            words = sys.argv[1:] if args is None else args
            if odd := [word for word in words if re.search("[\udc80-\udcff]", word)]:
                raise UserError(f"argument {shortened(odd[0])}: is not UTF-8; rename that file or folder")
            expanded = [word if "--prompt" in (before, word.partition("=")[0]) else
                        re.sub("(^|^[^=]*=)(~[a-z0-9_-]*)(?=/)", lambda found: found[1] + os.path.expanduser(
                            found[2]), word) for before, word in itertools.pairwise(["", *words])]
            return super().parse_known_args(expanded, namespace)

        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message}; see {self.prog} --help")

    return Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                  epilog=epilog, add_help=add_help)
