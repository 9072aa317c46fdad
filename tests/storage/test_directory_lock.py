"""One process owns a data directory."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bloomgated.errors import DirectoryUnusable
from bloomgated.storage.directory import LOCK_NAME, DirectoryLock

HOLD = """
import sys
from pathlib import Path
from bloomgated.storage.directory import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """The refusal names the directory and the other process; a kill lets go of the lock at once."""
    directory = tmp_path / "data"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        for _ in range(2):
            with pytest.raises(DirectoryUnusable) as refused:
                DirectoryLock(directory)
        assert str(directory) in str(refused.value)
        assert f"pid {holder.pid}" in str(refused.value)
        assert "\n" not in str(refused.value)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        lock = DirectoryLock(directory)
    assert (directory / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    lock.release()


def test_one_process_cannot_lock_twice_and_can_lock_again(tmp_path: Path) -> None:
    """Release lets the next one in; releasing twice closes nobody else's file."""
    lock = DirectoryLock(tmp_path)
    with pytest.raises(DirectoryUnusable):
        DirectoryLock(tmp_path)
    lock.release()
    other = os.open(os.devnull, os.O_RDONLY)
    lock.release()
    os.close(other)
    DirectoryLock(tmp_path).release()


def test_it_makes_the_directory_for_its_owner_alone(tmp_path: Path) -> None:
    """Digests are personal data: a directory that did not exist is made without access for others."""
    directory = tmp_path / "deep" / "data"
    DirectoryLock(directory).release()
    assert directory.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("below", [".", "data", "deep/data"])
def test_a_directory_that_cannot_be_is_refused_in_one_sentence(tmp_path: Path, below: str) -> None:
    """A file stands where the directory, or one above it, should be."""
    (tmp_path / "file").write_bytes(b"")
    directory = tmp_path / "file" / below
    with pytest.raises(DirectoryUnusable) as refused:
        DirectoryLock(directory)
    assert str(directory) in str(refused.value)
    assert "Not a directory" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_lock_that_the_file_system_does_not_give_is_not_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without locks says so, and sends the operator after no process."""

    def no_locks(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(DirectoryUnusable, match="cannot be locked") as refused:
        DirectoryLock(tmp_path)
    assert "running" not in str(refused.value)


def test_a_full_disk_does_not_keep_the_lock_from_being_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pid in the file is for a message; the lock does not need it."""

    def full(_fd: int, _data: bytes, _at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    lock = DirectoryLock(tmp_path)
    with pytest.raises(DirectoryUnusable, match="another bloomgated is running"):
        DirectoryLock(tmp_path)
    lock.release()
