"""One process at a time: a lock on a file, released by the system when the process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.errors import one_line
from runtime.files import name_in_errors

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)       # of a file system, such as some network disks
_held: set[int] = set()


class Locked(Exception):
    """Another process holds the lock; the argument describes it."""


def close_inherited() -> None:
    """In a forked child: close the locks that it shares, and would still hold when its parent is dead."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=close_inherited)


@contextmanager
def lock(path: Path, waits: bool = False) -> Iterator[int]:
    """Hold a lock on the file, which is made and removed; yield its descriptor.

    If another process holds it, wait for that process, or raise Locked. On a file system without locks this
    only prints a warning.
    """
    descriptor = _acquire(path, waits)
    _held.add(descriptor)
    try:
        with name_in_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield descriptor
    finally:
        if is_at(path, descriptor):        # its folder may have been renamed, and this be a new one
            with suppress(OSError):         # a disk that has become read-only: the file is taken again later
                path.unlink()               # still locked: nobody takes a file that is about to vanish
        _held.discard(descriptor)
        os.close(descriptor)


def _acquire(path: Path, waits: bool) -> int:
    """The descriptor of the locked file."""
    while True:
        # a file and not the folder, and open for writing: NFS locks nothing else
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(path, descriptor):
                return descriptor
            os.close(descriptor)            # its holder has just removed it: take the next one
        except BlockingIOError as error:
            holder = one_line(os.pread(descriptor, 200, 0).decode("utf-8", "replace")) or "another process"
            if waits:
                print(f"waiting for {holder}, which holds {path}", flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)      # then try again: the file may be removed
            os.close(descriptor)
            if not waits:
                raise Locked(holder) from error
        except OSError as error:
            if error.errno in NO_LOCKS:
                print(f"warning: {path.parent}: its file system has no locks; use it from one process at a "
                      "time", flush=True)
                return descriptor
            os.close(descriptor)
            raise


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the path leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
