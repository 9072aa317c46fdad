"""A disk that is full, and one on which a file may not grow: real file systems, real limits."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from daemon.calls import failure
from support.daemon import DaemonProcess, refused
from support.tally import record, sample
from support.tools import missing

from .test_disk_errors import ENDING, Lived

MEGABYTE = 1 << 20


class Disk:
    """A small file system in memory."""

    def __init__(self, at: Path, size: int) -> None:
        at.mkdir()
        self.at = at
        options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)]
        done = subprocess.run(options, capture_output=True, text=True, check=False)
        if done.returncode:
            missing(f"a tmpfs cannot be mounted here (root is needed): {done.stderr.strip()}")

    def resize(self, size: int) -> None:
        """Make room, or take it."""
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.at)], check=True)

    def fill(self) -> Path:
        """Take all that is left, with one file."""
        ballast = self.at / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while file.write(b"\0" * size):
                        pass
                except OSError:
                    continue
        return ballast

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.at)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk", 8 * MEGABYTE)
    yield made
    made.unmount()


def add_until_refused(lived: Lived, filters: Any) -> None:
    """Add until an Add fails, as unavailable."""

    def endless() -> None:
        while True:
            lived.add(filters)

    with pytest.raises(grpc.RpcError) as caught:
        endless()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def refused_or_serving(directory: Path) -> None:
    """Start there: it says in a sentence why not, or it serves; then end it."""
    daemon = DaemonProcess(directory, ready=False)
    assert daemon.process.stdout is not None
    line = daemon.process.stdout.readline()
    daemon.kill()
    if not line:
        said = daemon.log().splitlines()[-1]
        assert said.startswith("bloomgated: ")
        assert str(directory) in said


def no_litter(lived: Lived) -> None:
    assert not [name for name in lived.snapshots if name.endswith(".tmp")]


def test_a_disk_full_of_adds(start_daemon: Any, disk: Disk) -> None:
    """The Add that finds no room fails as unavailable, the process says so and exits with 3; the snapshots
    stay; with room again all that was acknowledged is there."""
    lived = Lived(start_daemon(directory=disk.at / "data"))
    before = lived.snapshots
    with lived.daemon.stubs() as (filters, _):
        disk.fill()
        add_until_refused(lived, filters)
        assert failure(filters.Add, lived.request()).code in ENDING
        assert lived.daemon.process.wait(30) == 3
    assert "the journal failed, stopping: " in lived.daemon.log()
    assert lived.snapshots == before
    # On a disk that is still full: the log may have given back what it needs, or not.
    refused_or_serving(lived.directory)
    disk.resize(16 * MEGABYTE)
    lived.restarts()
    record("disk full while adding", 1, "recovers; adds fail until there is room")


def test_a_disk_full_of_snapshots(start_daemon: Any, disk: Disk) -> None:
    """A snapshot that finds no room, after a real short write, fails and leaves nothing; Adds go on; with
    room again the next one succeeds."""
    lived = Lived(start_daemon(directory=disk.at / "data"))
    before = lived.snapshots
    size = max(map(len, before.values()))
    used = shutil.disk_usage(disk.at).used
    # Room for the journal, and for half a snapshot.
    disk.resize((used + size // 2) // 4096 * 4096)
    with lived.daemon.stubs() as (filters, admin):
        for _ in range(3):
            said = failure(admin.SnapshotFilter, lived.snapshot)
            assert said.code is grpc.StatusCode.UNAVAILABLE
            assert said.message == "the snapshot could not be written: No space left on device"
            assert lived.snapshots == before
            lived.add(filters)
        lived.verify(filters)
        assert 'bloomgate_snapshot_failures_total{filter="fruit"} 3.0' in lived.daemon.get("/metrics")[1]
        disk.resize(16 * MEGABYTE)
        admin.SnapshotFilter(lived.snapshot, timeout=30)
    assert lived.snapshots != before
    lived.restarts()
    record("disk full while a snapshot is written", 3, "goes on; the snapshots before it stay")


def test_a_disk_full_from_the_beginning(disk: Disk) -> None:
    """A start that cannot make its files is refused in a sentence; with room it begins."""
    disk.fill().rename(disk.at / "full")
    directory = disk.at / "data"
    addresses = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    ended = refused("serve", "--data-dir", str(directory), *addresses)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert str(directory) in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    disk.resize(16 * MEGABYTE)
    lived = Lived(DaemonProcess(directory))
    lived.restarts()
    record("disk full from the beginning", 1, "refuses with path and reason; recovers with room")


@pytest.mark.parametrize("spare", sample([0, 1, 100, 4096, 10_000], 1))
def test_a_file_that_may_not_grow(start_daemon: Any, spare: int) -> None:
    """Where the system cuts a write short and refuses the rest: snapshots fail whole, the journal ends the
    daemon, and all that was acknowledged is there."""
    lived = Lived(start_daemon())
    before = lived.snapshots
    log = lived.directory / "bloomgate.db-wal"
    limit = max(log.stat().st_size + spare, 4096)
    assert limit < max(map(len, before.values()))
    resource.prlimit(lived.daemon.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    with lived.daemon.stubs() as (filters, admin):
        said = failure(admin.SnapshotFilter, lived.snapshot)
        assert said.message == "the snapshot could not be written: File too large"
        assert lived.snapshots == before
        add_until_refused(lived, filters)
        assert lived.daemon.process.wait(30) == 3
    no_litter(lived)
    lived.restarts()
    record("writes cut short by the system", 2, "recovers; adds and snapshots fail whole")
