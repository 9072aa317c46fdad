"""A disk that fails: at the system calls of journal, mark and snapshots of a real daemon.

A sample of the calls in the suite, all of them in the long run.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from bloomgate.v1 import admin_pb2, filters_pb2
from daemon.calls import failure
from storage.making import flip
from support.daemon import COMMAND, DaemonProcess
from support.tally import record, sample
from support.tools import program

from .tracing import Trace, failing

RATE = 1e-9
# What a call ends in that comes while the daemon stops: gRPC ends what it has not begun in its own way.
ENDING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
LOG, DATABASE, MARK = "bloomgate.db-wal", "bloomgate.db", "bloomgate.db-mark"


def start_failing(
    directory: Path, log: Path, calls: str, fault: str, path: Path
) -> subprocess.CompletedProcess[str]:
    """Start on ``directory`` while ``calls`` on ``path`` end in ``fault``; where it serves all the same, stop
    it."""
    command = [
        program("strace", "strace"), "-f", "-qq", "-o", str(log), "-P", str(path),
        "-e", f"trace={calls}", "-e", f"inject={calls}:{fault}",
        *COMMAND, "serve", "--data-dir", str(directory), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            assert tracer.stdout is not None
            said = tracer.stdout.readline()
            if said:
                # strace itself does not pass it on.
                children = Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children").read_text()
                os.kill(int(children), signal.SIGTERM)
            _, complaint = tracer.communicate(timeout=30)
        except BaseException:
            tracer.kill()
            raise
    assert Trace(log).injected >= 1
    return subprocess.CompletedProcess(command, tracer.returncode, said, complaint)


class Lived:
    """A daemon with a filter that has two snapshots, and keys beyond them; and what it acknowledged."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon, self.directory = daemon, daemon.directory
        self.acknowledged: list[bytes] = []
        with daemon.stubs() as (filters, admin):
            spec = filters_pb2.FilterSpec(capacity=100_000, error_rate=RATE)
            admin.CreateFilter(admin_pb2.CreateFilterRequest(name="fruit", spec=spec))
            for _ in range(2):
                self.add(filters)
                admin.SnapshotFilter(self.snapshot, timeout=30)
            self.add(filters)

    snapshot = admin_pb2.SnapshotFilterRequest(name="fruit")

    def request(self) -> filters_pb2.AddRequest:
        keys = [b"%d" % (len(self.acknowledged) + number) for number in range(20)]
        return filters_pb2.AddRequest(filter="fruit", keys=keys)

    def add(self, filters: Any) -> None:
        request = self.request()
        filters.Add(request, timeout=30)
        self.acknowledged += request.keys

    def add_four_times(self, filters: Any) -> None:
        """Enough for a fault of the third call."""
        for _ in range(4):
            self.add(filters)

    def path(self, name: str) -> Path:
        """A file by its name; SNAPSHOT is the next one's, as it is written."""
        if name.startswith("SNAPSHOT"):
            return self.directory / "snapshots" / f"{1:016x}-1-3.bgf{name.removeprefix('SNAPSHOT')}"
        return self.directory / name

    @property
    def snapshots(self) -> dict[str, bytes]:
        """What is in the folder of snapshots."""
        return {file.name: file.read_bytes() for file in (self.directory / "snapshots").iterdir()}

    def verify(self, filters: Any) -> None:
        request = filters_pb2.MightContainRequest(filter="fruit", keys=self.acknowledged)
        assert set(filters.MightContain(request, timeout=30).answers) == {filters_pb2.ANSWER_MAYBE}

    def restarts(self) -> None:
        """It starts again, with all that was acknowledged, and stops cleanly; nothing was left lying."""
        self.daemon.kill()
        again = DaemonProcess(self.directory)
        with again.stubs() as (filters, admin):
            self.verify(filters)
            self.add(filters)
            admin.SnapshotFilter(self.snapshot, timeout=30)
        assert again.stop() == 0
        assert not list(self.directory.rglob("*.tmp"))


@pytest.fixture
def lived(start_daemon: Any) -> Lived:
    program("strace", "strace")
    return Lived(start_daemon())


@pytest.mark.parametrize(
    ("calls", "fault", "name"),
    sample(
        [
            ("fdatasync,fsync", "error=EIO", LOG),
            ("fdatasync,fsync", "error=ENOSPC", LOG),
            ("fdatasync,fsync", "error=EIO:when=2", LOG),
            ("pwrite64", "error=ENOSPC", LOG),
            ("pwrite64", "error=EIO", LOG),
            ("pwrite64", "error=EDQUOT:when=2", LOG),
            ("pwrite64", "error=EIO", MARK),
            ("pwrite64", "error=ENOSPC:when=3", MARK),
        ],
        4,
    ),
)
def test_a_journal_that_cannot_be_written_ends_the_daemon(
    lived: Lived, tmp_path: Path, calls: str, fault: str, name: str
) -> None:
    """The Adds that wait fail as unavailable, no later one is taken, nothing is tried again; the process says
    why and exits with 3, and the next start has all that was acknowledged."""
    daemon = lived.daemon
    with daemon.stubs() as (filters, _):
        with failing(daemon, calls, fault, [lived.path(name)], tmp_path / "strace") as trace:
            with pytest.raises(grpc.RpcError) as caught:
                lived.add_four_times(filters)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert failure(filters.Add, lived.request()).code in ENDING
            assert daemon.process.wait(30) == 3
        assert trace.injected == 1
        assert trace.after_the_first("fdatasync") == trace.after_the_first("fsync") == 0
    assert "the journal failed, stopping" in daemon.log()
    lived.restarts()
    record(
        "disk error at a write or sync of the journal or its mark",
        1,
        "recovers; adds fail, nothing is tried again",
    )


@pytest.mark.parametrize(
    ("calls", "fault", "name"),
    sample(
        [
            ("openat", "error=ENOSPC", "SNAPSHOT.tmp"),
            ("openat", "error=EIO", "SNAPSHOT.tmp"),
            ("write", "error=EIO", "SNAPSHOT.tmp"),
            ("write", "error=ENOSPC:when=2", "SNAPSHOT.tmp"),
            ("fsync", "error=EIO", "SNAPSHOT.tmp"),
            ("fsync", "error=ENOSPC", "SNAPSHOT.tmp"),
            ("rename", "error=EIO", "SNAPSHOT.tmp"),
            ("rename", "error=ENOSPC", "SNAPSHOT.tmp"),
            ("fsync", "error=EIO", "snapshots"),
        ],
        3,
    ),
)
def test_a_snapshot_that_cannot_be_written_changes_nothing(
    lived: Lived, tmp_path: Path, calls: str, fault: str, name: str
) -> None:
    """It fails as unavailable and is counted; those before it stay as they were, nothing is left lying, the
    daemon serves on; once the disk is well again the next one succeeds."""
    daemon, before = lived.daemon, lived.snapshots
    with daemon.stubs() as (filters, admin):
        with failing(daemon, calls, fault, [lived.path(name)], tmp_path / "strace") as trace:
            said = failure(admin.SnapshotFilter, lived.snapshot)
            assert said.code is grpc.StatusCode.UNAVAILABLE
            assert said.message.startswith("the snapshot could not be written")
            assert lived.snapshots == before
            lived.add(filters)
            lived.verify(filters)
        assert trace.injected == 1
        assert 'bloomgate_snapshot_failures_total{filter="fruit"} 1.0' in daemon.get("/metrics")[1]
        lived.add(filters)
        admin.SnapshotFilter(lived.snapshot, timeout=30)
    assert len(lived.snapshots) == 2
    lived.restarts()
    record(
        "disk error at an open, write, sync or rename of a snapshot",
        1,
        "goes on; the snapshots before it stay",
    )


def test_old_files_that_cannot_be_removed_hold_up_nothing(lived: Lived, tmp_path: Path) -> None:
    """The snapshot counts all the same; the next start removes what no record names."""
    oldest = lived.directory / "snapshots" / f"{1:016x}-1-1.bgf"
    with lived.daemon.stubs() as (_, admin):
        with failing(lived.daemon, "unlink", "error=EIO", [oldest], tmp_path / "strace") as trace:
            admin.SnapshotFilter(lived.snapshot, timeout=30)
        assert trace.injected == 1
    assert oldest.exists()
    lived.restarts()
    assert not oldest.exists()
    record("disk error at the removal of an old snapshot", 1, "recovers; the next start removes it")


@pytest.mark.parametrize(
    ("calls", "fault", "name"),
    sample(
        [
            ("openat", "error=EIO", DATABASE),
            ("openat", "error=EACCES", DATABASE),
            ("pread64", "error=EIO", DATABASE),
            ("openat", "error=EIO", MARK),
            ("read", "error=EIO", MARK),
            ("pread64", "error=EIO", LOG),
            ("fdatasync,fsync", "error=EIO", DATABASE),
            ("pwrite64", "error=ENOSPC", DATABASE),
            ("pwrite64", "error=EROFS", MARK),
        ],
        3,
    ),
)
def test_a_start_on_a_failing_disk_is_refused(
    lived: Lived, tmp_path: Path, calls: str, fault: str, name: str
) -> None:
    """One sentence with the path and the reason, exit 1, nothing of what was read is lost; on a disk that is
    well again it starts with all that was acknowledged."""
    lived.daemon.kill()
    ended = start_failing(lived.directory, tmp_path / "strace", calls, fault, lived.path(name))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("bloomgated: ")
    assert str(lived.directory) in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    lived.restarts()
    record(
        "disk error during a start", 1, "refuses with path, reason and hint; recovers once the disk is well"
    )


@pytest.mark.parametrize(
    ("calls", "fault"),
    sample([("read", "error=EIO"), ("openat", "error=EIO"), ("openat", "error=EACCES")], 1),
)
def test_a_snapshot_that_cannot_be_read(lived: Lived, tmp_path: Path, calls: str, fault: str) -> None:
    """One that the disk no longer gives back is moved aside and the one before it serves; one that this
    process may not read is a sentence, and stays where it is."""
    lived.daemon.kill()
    newest = lived.directory / "snapshots" / f"{1:016x}-1-2.bgf"
    whole = newest.read_bytes()
    ended = start_failing(lived.directory, tmp_path / "strace", calls, fault, newest)
    if "EACCES" in fault:
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith(f"bloomgated: {newest}: cannot be read (")
        assert newest.read_bytes() == whole
    else:
        assert ended.returncode == 0
        assert "snapshot of fruit cannot be used" in ended.stderr
        assert newest.with_name(f"{newest.name}.damaged-0").read_bytes() == whole
    lived.restarts()


@pytest.mark.parametrize(
    ("calls", "fault", "name"),
    sample(
        [
            ("rename", "error=EROFS", f"{1:016x}-1-2.bgf"),
            ("fsync", "error=EIO", ""),
            ("openat", "error=EIO", ""),
            ("getdents64", "error=EIO", ""),
        ],
        1,
    ),
)
def test_a_folder_of_snapshots_that_fails_a_start_is_a_sentence(
    lived: Lived, tmp_path: Path, calls: str, fault: str, name: str
) -> None:
    """Where it cannot be listed, or a damaged snapshot not be moved aside: path and reason, exit 1; on a disk
    that is well again it starts with all that was acknowledged."""
    lived.daemon.kill()
    folder = lived.directory / "snapshots"
    flip(folder / f"{1:016x}-1-2.bgf", 1000, 1)
    ended = start_failing(lived.directory, tmp_path / "strace", calls, fault, folder / name)
    lived.restarts()
    assert (ended.returncode, ended.stdout) == (1, "")
    # What was found damaged before it is in the log.
    sentence = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert len(sentence) == 1, ended.stderr
    assert sentence[0].startswith(f"bloomgated: {folder}")
    record(
        "disk error during a start", 1, "refuses with path, reason and hint; recovers once the disk is well"
    )
