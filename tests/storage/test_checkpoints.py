"""What is committed is moved from SQLite's log into the database by our own hand, so a failure is noticed."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from bloomgate.v1 import filters_pb2, filters_pb2_grpc
from bloomgated.errors import DirectoryUnusable, JournalFailed
from bloomgated.storage import database, trimming
from bloomgated.storage import sqlite as sqlite_journal
from bloomgated.storage.journal import Journal
from bloomgated.storage.sqlite import SqliteJournal
from storage.making import DATABASE, WAL, World, an_add, recover_in, small_spec, until_trimmed
from support.daemon import COMMAND
from support.tally import record
from support.tools import program

RECORD_BYTES = 16_000


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def put(journal: Journal, number: int, keys: int = RECORD_BYTES // 16) -> int:
    """Append an Add and wait until it is durable."""
    seq = journal.append([an_add(1, number, keys)])
    await journal.durable(seq)
    return seq


class Watched:
    """A connection that counts its checkpoints, and fails them when told to."""

    def __init__(self, real: sqlite3.Connection, fails: bool) -> None:
        self._real, self.fails, self.results = real, fails, []  # type: ignore[var-annotated]

    def execute(self, sql: str, *rest: Any) -> Any:
        if sql.startswith("PRAGMA wal_checkpoint"):
            if self.fails:
                raise sqlite3.OperationalError("disk I/O error")
            row = self._real.execute(sql, *rest).fetchone()
            self.results.append(row)
            return self._real.execute("SELECT ?, ?, ?", row)
        return self._real.execute(sql, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def watch(monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> list[Watched]:
    """Watch the connections that write from now on."""
    made: list[Watched] = []
    real = sqlite_journal.open_to_write

    def open_to_write(opened: Any) -> Any:
        connection, mark_file = real(opened)
        made.append(Watched(connection, fails))
        return made[-1], mark_file

    monkeypatch.setattr(sqlite_journal, "open_to_write", open_to_write)
    return made


def test_a_failed_checkpoint_fails_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was acknowledged before it stays, nothing is taken after it, and the log is left for the next
    start: closing the journal tries no sync again."""
    watch(monkeypatch, fails=True)
    monkeypatch.setattr(sqlite_journal, "CHECKPOINT_BYTES", 200_000)

    async def work() -> list[int]:
        journal = SqliteJournal(tmp_path)
        failed = asyncio.Event()
        journal.on_failure = lambda _error: failed.set()
        journal.start()
        acknowledged = []
        while not journal.failed:
            with suppress(JournalFailed):
                acknowledged.append(await put(journal, len(acknowledged)))
        await failed.wait()
        with pytest.raises(JournalFailed, match="disk I/O error"):
            await put(journal, 1000)
        before = (tmp_path / DATABASE).read_bytes()
        await journal.close()
        assert (tmp_path / DATABASE).read_bytes() == before
        assert (tmp_path / WAL).stat().st_size > 200_000
        return acknowledged

    acknowledged = run(work())
    monkeypatch.undo()
    assert 5 < len(acknowledged) < 30
    found = [entry.seq for entry in SqliteJournal(tmp_path).replay(0)]
    assert found[: len(acknowledged)] == acknowledged


def test_the_log_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen megabytes go through it in lone commits, and a trim takes them away: the log never has much
    more than its measure, and all that left it is in the database."""
    (made,) = [watch(monkeypatch)]

    async def work() -> None:
        journal = SqliteJournal(tmp_path, retention=0.0)
        journal.start()
        sizes = []
        for number in range(1000):
            seq = await put(journal, number)
            sizes.append((tmp_path / WAL).stat().st_size)
        assert (tmp_path / DATABASE).stat().st_size > 10 << 20
        journal.trim(seq)
        await until_trimmed(journal, seq)
        sizes.append((tmp_path / WAL).stat().st_size)
        assert max(sizes[:1000]) < sqlite_journal.CHECKPOINT_BYTES * 1.5
        # A trim gives pages back in one transaction.
        assert max(sizes) < sqlite_journal.CHECKPOINT_BYTES * 1.5 + trimming.VACUUM_PAGES * 4120
        await journal.close()

    run(work())
    assert 3 <= len(made[0].results) <= 30
    assert all(log == moved for _, log, moved in made[0].results)
    assert not (tmp_path / WAL).exists()


def test_sqlite_moves_nothing_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own checkpoint would keep a failed sync to itself: the database is not written behind our back."""
    monkeypatch.setattr(sqlite_journal, "CHECKPOINT_BYTES", 1 << 30)

    async def work() -> None:
        journal = SqliteJournal(tmp_path)
        journal.start()
        before = (tmp_path / DATABASE).read_bytes()
        for number in range(500):
            await put(journal, number)
        assert (tmp_path / WAL).stat().st_size > 7 << 20
        assert (tmp_path / DATABASE).read_bytes() == before
        await journal.close()

    run(work())


def test_small_commits_are_moved_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small commit writes a whole page or two to the log: they count as what they take there."""
    (made,) = [watch(monkeypatch)]

    async def work() -> None:
        journal = SqliteJournal(tmp_path)
        journal.start()
        for number in range(1500):
            await put(journal, number, keys=1)
        assert (tmp_path / WAL).stat().st_size < sqlite_journal.CHECKPOINT_BYTES * 1.5
        await journal.close()

    run(work())
    assert len(made[0].results) >= 2


def test_a_reader_stands_in_no_ones_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a backup or a replay reads, the log grows and nothing fails; afterwards it is moved and cut."""
    (made,) = [watch(monkeypatch)]
    monkeypatch.setattr(database, "LOG_BYTES", 1 << 20)
    monkeypatch.setattr(sqlite_journal, "CHECKPOINT_BYTES", 1 << 19)

    async def work() -> None:
        journal = SqliteJournal(tmp_path)
        journal.start()
        await put(journal, 0)
        with closing(database.connect(tmp_path / DATABASE, "ro")) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM journal").fetchone() == (1,)
            replay = journal.replay(0)
            assert next(replay).seq == 1
            for number in range(1, 200):
                await put(journal, number)
            assert (tmp_path / WAL).stat().st_size > 3 << 20
            assert reader.execute("SELECT count(*) FROM journal").fetchone() == (1,)
            replay.close()  # type: ignore[attr-defined]
            held = len(made[0].results)
        for number in range(200, 300):
            await put(journal, number)
        assert (tmp_path / WAL).stat().st_size <= 1 << 20
        assert [entry.seq for entry in journal.replay(0)] == list(range(1, 301))
        assert any(moved < log for _, log, moved in made[0].results[:held])
        assert all(moved == log for _, log, moved in made[0].results[held + 1 :])
        await journal.close()

    run(work())


def test_a_start_goes_beside_a_reader_that_has_read_to_the_end(tmp_path: Path) -> None:
    """A backup that is still under way does not keep the daemon from starting again; what was read then is
    in the database, synced, before it counts as durable."""

    async def work() -> None:
        journal = SqliteJournal(tmp_path)
        journal.start()
        for number in range(3):
            await put(journal, number)
        with closing(database.connect(tmp_path / DATABASE, "ro")) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM journal").fetchone() == (3,)
            await journal.close()
            assert (tmp_path / WAL).stat().st_size > 0
            again = SqliteJournal(tmp_path)
            again.start()
            await put(again, 3)
            assert [entry.seq for entry in again.replay(0)] == [1, 2, 3, 4]
            assert reader.execute("SELECT count(*) FROM journal").fetchone() == (3,)
            await again.close()

    run(work())


def test_a_start_waits_for_a_reader_that_stands_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records behind what it reads cannot be moved: the start waits until it is done, but not for ever."""

    async def work() -> None:
        journal = SqliteJournal(tmp_path)
        journal.start()
        await put(journal, 0)
        with closing(database.connect(tmp_path / DATABASE, "ro")) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM journal").fetchone() == (1,)
            await put(journal, 1)
            await journal.close()
            monkeypatch.setattr(database, "READER_PATIENCE", 0)
            with pytest.raises(DirectoryUnusable, match="another program uses it"):
                SqliteJournal(tmp_path).prepare()
            monkeypatch.setattr(database, "READER_PATIENCE", 60)
            again = SqliteJournal(tmp_path)
            preparing = asyncio.get_running_loop().run_in_executor(None, again.prepare)
            reader.execute("COMMIT")
            await preparing
            again.start()
            await put(again, 2)
            await again.close()

    run(work())


# -- a real daemon, and a disk that fails under it


@contextmanager
def daemon_on_a_failing_disk(
    directory: Path, call: str, error: str
) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """A daemon that gets ``error`` from every ``call`` on its database file; stubs, and the process."""
    log = directory.parent / "failing.log"
    # -D: the daemon stays this process's own child, so that it can be killed.
    command = [
        program("strace", "strace"), "-D", "-f", "--seccomp-bpf", "-qq",
        "-o", str(directory.parent / "strace.log"),
        "-P", str(directory / DATABASE), "-e", f"trace={call}", "-e", f"inject={call}:error={error}",
        *COMMAND, "serve", "--data-dir", str(directory), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
    ]  # fmt: skip
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("bloomgated ready "), log.read_text()
            with grpc.insecure_channel(line.split("grpc=")[1].split()[0]) as channel:
                yield filters_pb2_grpc.FilterServiceStub(channel), process
        finally:
            process.kill()


@pytest.mark.parametrize(("call", "error"), [("fsync,fdatasync", "EIO"), ("pwrite64", "ENOSPC")])
def test_a_disk_that_fails_under_a_checkpoint(tmp_path: Path, call: str, error: str) -> None:
    """The database file cannot be written or synced, while its log can: the daemon says so and ends by
    itself, and the next start has every key that was acknowledged."""
    directory = tmp_path / "data"

    async def make() -> None:
        world = World(directory)
        await world.create("filter", small_spec(200_000))
        await world.add("filter", [b"before"])
        await world.close()

    run(make())
    acknowledged = [b"before"]
    with daemon_on_a_failing_disk(directory, call, error) as (filters, process):
        refused = None
        while refused is None and len(acknowledged) < 600_000:
            keys = [b"%d" % (len(acknowledged) + number) for number in range(20_000)]
            try:
                filters.Add(filters_pb2.AddRequest(filter="filter", keys=keys), timeout=30)
            except grpc.RpcError as failure:
                refused = failure.code()
            else:
                acknowledged += keys
        assert refused not in (None, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert process.wait(30) == 3
    assert len(acknowledged) > 100_000
    assert "the journal failed" in (tmp_path / "failing.log").read_text()
    assert (tmp_path / "strace.log").read_text().count("(INJECTED)") >= 1
    bloom = recover_in(directory)["filter"].bloom
    assert bloom is not None
    assert all(bloom.might_contain_many(acknowledged))
    record("disk error under the database file at a checkpoint", 1, "recovers every acknowledged key")
