"""The data directory: one process owns it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from bloomgated.errors import DirectoryUnusable

LOCK_NAME = "bloomgate.lock"


class DirectoryLock:
    """Holds a data directory for this process until ``release``, or until the process dies."""

    def __init__(self, directory: Path) -> None:
        """Create ``directory`` if need be and lock it. Raises DirectoryUnusable."""
        self._path = directory / LOCK_NAME
        try:
            # Where a file stands in its place, the lock file says so in clearer words than this would.
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700, parents=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DirectoryUnusable(str(directory), f"cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            self.release()
            if not isinstance(error, BlockingIOError):
                raise DirectoryUnusable(str(directory), f"cannot be locked ({error.strerror})") from None
            named = f" (pid {owner})" if owner.isdigit() else ""
            raise DirectoryUnusable(
                str(directory), f"another bloomgated{named} is running on it; stop that one first"
            ) from None
        # The pid is for the message above alone: the lock, not the file's content, decides.
        # So a disk that is too full for it does not matter here.
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process own the directory. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def sync_directory(directory: Path) -> None:
    """Make the directory's own entries durable: a rename or a new file may else be lost with the power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
