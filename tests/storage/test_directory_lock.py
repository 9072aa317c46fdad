"""One process owns a data directory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bloomgate import BloomgateError, Client
from bloomgated.errors import DirectoryInUse, DirectoryUnusable
from bloomgated.storage.directory import LOCK_NAME, DirectoryLock
from conftest import StartDaemon
from support.daemon import refused
from support.tally import record

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
            with pytest.raises(DirectoryUnusable) as refusal:
                DirectoryLock(directory)
        assert str(directory) in str(refusal.value)
        assert f"pid {holder.pid}" in str(refusal.value)
        assert "\n" not in str(refusal.value)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        lock = DirectoryLock(directory)
    assert (directory / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    lock.release()


def test_deleting_the_lock_file_lets_nobody_in(start_daemon: StartDaemon) -> None:
    """Two daemons on one directory answer a wrong no: the second is refused also when the file that was
    locked is gone, or is another one by now."""
    daemon = start_daemon()
    lock = daemon.directory / LOCK_NAME
    for again in (lambda: None, lambda: lock.write_bytes(b"")):
        lock.unlink(missing_ok=True)
        again()
        second = refused(
            "serve", "--data-dir", str(daemon.directory), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"
        )
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        assert "another bloomgated is running on it" in second.stderr
    daemon.kill()
    daemon = start_daemon()
    assert lock.read_text() == f"{daemon.process.pid}\n"
    record("lock file deleted under a running daemon", 2, "refuses a second daemon")


def test_a_directory_that_cannot_be_locked_itself_is_locked_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems lock files that are open for writing only: the lock file alone decides there."""
    flock = fcntl.flock

    def files_only(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", files_only)
    lock = DirectoryLock(tmp_path)
    with pytest.raises(DirectoryInUse, match=f"pid {os.getpid()}"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


def test_those_who_look_keep_owners_away_and_leave_no_trace(tmp_path: Path) -> None:
    """Several may look at once, no owner beside them and none of them beside an owner; nothing is made."""
    looking = [DirectoryLock(tmp_path, looking=True) for _ in range(2)]
    with pytest.raises(DirectoryInUse):
        DirectoryLock(tmp_path)
    for each in looking:
        each.release()
    assert list(tmp_path.iterdir()) == []
    lock = DirectoryLock(tmp_path)
    with pytest.raises(DirectoryInUse) as refusal:
        DirectoryLock(tmp_path, looking=True)
    assert refusal.value.pid == os.getpid()
    lock.release()


def test_the_pid_of_a_process_that_is_gone_is_not_named(tmp_path: Path) -> None:
    """A kill leaves its pid in the file: the operator is sent after no process that does not exist."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (tmp_path / LOCK_NAME).write_text(f"{gone.pid}\n")
    looking = DirectoryLock(tmp_path, looking=True)
    for left in (f"{gone.pid}\n", "", "-1\n", "what", "9" * 32):
        (tmp_path / LOCK_NAME).write_text(left)
        with pytest.raises(DirectoryInUse, match="another bloomgated is running") as refusal:
            DirectoryLock(tmp_path)
        assert refusal.value.pid is None
    looking.release()


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
    with pytest.raises(DirectoryUnusable) as refusal:
        DirectoryLock(directory)
    assert str(directory) in str(refusal.value)
    assert "Not a directory" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_lock_that_the_file_system_does_not_give_is_not_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without locks says so, and sends the operator after no process."""

    def no_locks(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(DirectoryUnusable, match="cannot be locked") as refusal:
        DirectoryLock(tmp_path)
    assert "running" not in str(refusal.value)


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


def test_a_directory_that_was_moved_away_is_written_to_where_it_is_or_not_at_all(
    tmp_path: Path, start_daemon: StartDaemon
) -> None:
    """Under the path that it was started with there may be another daemon's files by now: none is written
    there and none is removed; once the directory is back all goes on."""
    daemon = start_daemon()
    with Client(daemon.grpc) as client:
        fruit = client.filter("fruit")
        client.create_filter("fruit", 1000)
        fruit.add("mango")
        client.snapshot_filter("fruit")
        elsewhere = tmp_path / "moved"
        daemon.directory.rename(elsewhere)
        shutil.copytree(elsewhere, daemon.directory)
        before = {path.name: path.read_bytes() for path in (daemon.directory / "snapshots").iterdir()}
        for _ in range(3):
            with pytest.raises(BloomgateError):
                client.snapshot_filter("fruit")
        fruit.add("cherry")
        assert {path.name: path.read_bytes() for path in (daemon.directory / "snapshots").iterdir()} == before
        assert "the data directory was moved away" in daemon.log()
        shutil.rmtree(daemon.directory)
        elsewhere.rename(daemon.directory)
        client.snapshot_filter("fruit")
    daemon.kill()
    daemon = start_daemon()
    with Client(daemon.grpc) as client:
        assert client.filter("fruit").might_contain_many(["mango", "cherry"]) == [True, True]
    record("data directory renamed under a running daemon", 1, "writes nothing where it was")
