"""The folder of a run while it is trained: locked against a second process, and found again if renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from runtime.errors import UserError
from runtime.lock import Locked, is_at, lock

LOCK = ".lock"


class RunFolder:
    """Where a run is. The process that writes it keeps the folder locked and open, to find a renamed one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._lock = 0
        self._held = ExitStack()

    def take(self) -> None:
        """Make and lock the folder. Raises UserError if another process trains this run."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._descriptor = os.open(self.path, os.O_RDONLY)
        self._held.callback(os.close, self._descriptor)

    def _take_lock(self) -> None:
        try:
            self._lock = self._held.enter_context(lock(self.path / LOCK))
        except Locked as holder:
            hint = "; to train with several processes, start them by torchrun" \
                if "SLURM_PROCID" in os.environ and "LOCAL_RANK" not in os.environ else ""
            raise UserError(f"run {self.path}: is being trained by {holder}; wait for that process or stop "
                            f"it, or give another run.dir{hint}") from None

    def find(self) -> bool:
        """Set `path` to where the folder is now, with a warning if it was renamed. False if it was deleted.

        If the lock's file was deleted, lock a new one. Raises UserError if another process has. Only Linux
        tells the new name; elsewhere a renamed folder counts as deleted.
        """
        is_there = self._follow()
        if is_there and self._descriptor is not None and not is_at(self.path / LOCK, self._lock):
            self._take_lock()
        return is_there

    def _follow(self) -> bool:
        if self._descriptor is None:
            return True
        own = os.fstat(self._descriptor)
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self.path.stat(), own):
                return True
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            if os.path.samestat(path.stat(), own):
                print(f"warning: run {self.path}: was renamed; training continues in {path}", flush=True)
                self.path = path
                return True
        return False

    def make_again(self) -> None:
        """Make the folder where it was, after it was deleted. Raises UserError if another process has."""
        self.close()
        self.take()
        print(f"warning: run {self.path}: was deleted; it is written again with the next checkpoint",
              flush=True)

    def close(self) -> None:
        self._descriptor = None
        self._held.close()


@contextmanager
def claimed(path: Path, is_writer: bool) -> Iterator[RunFolder]:
    """The folder of a run, made and locked by the process that writes it.

    Raises UserError if another process trains this run. A folder that stays empty is removed.
    """
    folder = RunFolder(path)
    if not is_writer:
        yield folder
        return
    try:
        folder.take()
        yield folder
    finally:
        folder.close()
        with suppress(OSError):
            path.rmdir()
