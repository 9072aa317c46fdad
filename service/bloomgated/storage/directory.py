"""The data directory: one process owns it.

The directory itself is locked, and a lock file in it, which holds the owner's pid. The file can be deleted
under a running process, and a new one be locked by the next; the directory cannot. The file is there for the
pid, and for file systems that lock no directories.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from bloomgated.errors import DirectoryInUse, DirectoryUnusable

LOCK_NAME = "bloomgate.lock"


class DirectoryLock:
    """Holds a data directory for this process until ``release``, or until the process dies."""

    def __init__(self, directory: Path, *, looking: bool = False) -> None:
        """Create ``directory`` if need be and lock it.

        ``looking`` creates and writes nothing: it keeps owners away, not others who look. Raises
        DirectoryInUse where another process has it, otherwise DirectoryUnusable.
        """
        self._directory = directory
        self._fds: list[int] = []
        try:
            self._take(looking)
        except OSError as error:
            self.release()
            what = "read" if looking else "written"
            raise DirectoryUnusable(str(directory), f"cannot be {what} ({error.strerror})") from None
        except DirectoryUnusable:
            self.release()
            raise

    def _take(self, looking: bool) -> None:
        operation = (fcntl.LOCK_SH if looking else fcntl.LOCK_EX) | fcntl.LOCK_NB
        path = self._directory / LOCK_NAME
        if not looking:
            # Where a file stands in its place, opening it says so in clearer words than this would.
            with suppress(FileExistsError):
                self._directory.mkdir(mode=0o700, parents=True)
        folder = self._open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):
            self._lock(folder, operation)
        try:
            file = self._open(path, os.O_RDONLY if looking else os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            if not looking:
                raise
            return
        try:
            self._lock(file, operation)
        except OSError as error:
            raise DirectoryUnusable(str(self._directory), f"cannot be locked ({error.strerror})") from None
        if not looking:
            # The pid is for a message alone: the lock, not the file's content, decides.
            # So a disk that is too full for it does not matter here.
            with suppress(OSError):
                os.ftruncate(file, 0)
                os.pwrite(file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process own the directory. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _open(self, path: Path, flags: int) -> int:
        self._fds.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
        return self._fds[-1]

    def _lock(self, fd: int, operation: int) -> None:
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError:
            raise DirectoryInUse(str(self._directory), _owner(self._directory / LOCK_NAME)) from None


def _owner(path: Path) -> int | None:
    """The pid that a lock file names, if there is such a process here: it may be an older owner's."""
    with suppress(OSError, ValueError, OverflowError):
        pid = int(path.read_bytes()[:32])
        if pid > 0:
            with suppress(PermissionError):
                os.kill(pid, 0)
            return pid
    return None


def sync_directory(directory: Path) -> None:
    """Make the directory's own entries durable: a rename or a new file may else be lost with the power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
