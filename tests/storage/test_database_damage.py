"""A journal that is not what was acknowledged is refused, with its path, a reason and a hint, and is left
as it was. Damage that goes unnoticed must be provably harmless."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bloomgate.filters import BloomFilter
from bloomgate.filters.image import freeze
from bloomgated.errors import DirectoryUnusable, JournalDamaged
from bloomgated.storage import database
from bloomgated.storage.mark import CREATING, FORMAT_VERSION, IN_USE, MarkFile, read_mark
from bloomgated.storage.records import Create, Drop, Record, Snapshots
from bloomgated.storage.recovery import recover
from bloomgated.storage.snapshots import SnapshotStore
from bloomgated.storage.sqlite import SqliteJournal
from storage.making import (
    DATABASE,
    MARK,
    WAL,
    World,
    an_add,
    contents,
    copy_as_killed,
    flip,
    recover_in,
    small_spec,
    until_trimmed,
)


class Made:
    """A directory to damage copies of, and what it acknowledged: records by seq, keys by filter."""

    def __init__(self, directory: Path, records: dict[int, Record], keys: dict[str, set[bytes]]) -> None:
        self.directory, self.records, self.keys = directory, records, keys

    def copy(self, to: Path) -> Path:
        shutil.rmtree(to, ignore_errors=True)
        return copy_as_killed(self.directory, to)


async def _make(where: Path) -> dict[str, Made]:
    """Three states of a journal: killed with all in the log, killed with some in it, and stopped cleanly."""
    rnd = random.Random(11)
    world = World(where / "live")
    made: dict[str, Made] = {}

    def keep(name: str) -> None:
        directory = copy_as_killed(world.directory, where / name)
        records = {entry.seq: entry.record for entry in world.journal.replay(0)}
        keys = {live.name: set(live.keys) for live in world.filters.values()}
        made[name] = Made(directory, records, keys)

    async def some_adds(rounds: int) -> None:
        for _ in range(rounds):
            for name in ("a", "b"):
                await world.add(name, [rnd.randbytes(9) for _ in range(rnd.randrange(1, 12))])

    await world.create("a")
    await world.create("b", small_spec(seed=8))
    await some_adds(5)
    await world.snapshot("a")
    await world.snapshot("b")
    await some_adds(5)
    await world.snapshot("a")
    await world.snapshot("b")
    await some_adds(3)
    await world.trim()
    await some_adds(4)
    keep("log")
    await world.close()
    world = World(where / "live")
    for live in world.filters.values():
        live.keys = set(made["log"].keys[live.name])
    await some_adds(4)
    keep("both")
    await world.close()
    keep("stopped")
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """The three directories, made once; tests damage copies."""
    return asyncio.run(_make(tmp_path_factory.mktemp("made")))


def start_in(directory: Path) -> dict[str, Any]:
    """What a start finds, as far as it can go without writing."""
    return recover_in(directory)


def refused(directory: Path) -> JournalDamaged:
    """Assert that a start is refused and changes nothing; return the refusal."""
    before = contents(directory)
    with pytest.raises(JournalDamaged) as caught:
        start_in(directory)
    error = caught.value
    assert str(directory) in error.path
    assert error.reason
    assert error.hint
    assert all(part in str(error) for part in (error.path, error.reason, error.hint))
    assert "\n" not in str(error)
    # Whatever was open must be gone, or closing it later could still write.
    assert contents(directory) == before
    return error


def refused_or_harmless(directory: Path, made: Made) -> bool:
    """Assert that a start is refused and changes nothing, or that all that was acknowledged is there and the
    journal can be written on, and reopened, without losing anything. Returns whether it was refused."""
    before = contents(directory)
    refusal = None
    try:
        found = start_in(directory)
    except JournalDamaged as error:
        refusal = error
    if refusal is not None:
        assert refusal.reason
        assert refusal.hint
        assert contents(directory) == before
        return True
    for name, keys in made.keys.items():
        assert found[name].bloom is not None
        assert all(found[name].bloom.might_contain_many(sorted(keys)))
    journal = SqliteJournal(directory)
    end = max(made.records)
    assert journal.durable_seq == end
    _assert_acknowledged(journal, made)

    async def write_on() -> None:
        journal.start()
        for number in range(30):
            seq = journal.append([an_add(1, number, keys=300)])
            await journal.durable(seq)
        await journal.close()

    try:
        asyncio.run(write_on())
    except DirectoryUnusable:
        # Refused after all, at the first write: nothing was acknowledged since.
        _assert_acknowledged(SqliteJournal(directory), made)
        return True
    again = SqliteJournal(directory)
    assert again.durable_seq == end + 30
    _assert_acknowledged(again, made)
    return False


def _assert_acknowledged(journal: SqliteJournal, made: Made) -> None:
    found = {entry.seq: entry.record for entry in journal.replay(0)}
    assert {seq: found.get(seq) for seq in made.records} == made.records


# -- undamaged


@pytest.mark.parametrize("state", ["log", "both", "stopped"])
def test_an_undamaged_directory_starts(made: dict[str, Made], state: str, tmp_path: Path) -> None:
    """The copies that the tests below damage are sound, so it is the damage that is refused."""
    assert not refused_or_harmless(made[state].copy(tmp_path / "copy"), made[state])


def test_judging_leaves_no_trace(made: dict[str, Made], tmp_path: Path) -> None:
    """A start that gets as far as recovery, and then is given up, has changed nothing in the journal."""
    for state, each in made.items():
        directory = each.copy(tmp_path / state)
        before = contents(directory)
        recover_in(directory)
        assert contents(directory) == before


# -- files that are missing or another's


@pytest.mark.parametrize("state", ["log", "both", "stopped"])
def test_a_missing_database_is_refused(made: dict[str, Made], state: str, tmp_path: Path) -> None:
    """A mark without its database is a loss, not a beginning."""
    directory = made[state].copy(tmp_path / "copy")
    (directory / DATABASE).unlink()
    assert "missing" in refused(directory).reason


def test_an_empty_database_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """A database of no bytes beside a mark in use is a loss too."""
    directory = made["stopped"].copy(tmp_path / "copy")
    (directory / DATABASE).write_bytes(b"")
    refused(directory)


@pytest.mark.parametrize("left", [(DATABASE,), (DATABASE, WAL), (WAL,), ("snapshots",)], ids="+".join)
def test_a_missing_mark_is_refused(made: dict[str, Made], left: tuple[str, ...], tmp_path: Path) -> None:
    """Without its mark, nothing says how far the journal had come: a database, a log or a snapshot without
    one is not taken for a fresh directory."""
    whole = made["both"].copy(tmp_path / "whole")
    directory = tmp_path / "copy"
    directory.mkdir()
    for name in left:
        shutil.move(whole / name, directory / name)
    error = refused(directory)
    assert error.path.endswith(MARK)
    assert "missing" in error.reason


def test_the_mark_of_another_journal_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """A mark that does not name this journal says nothing about it."""
    directory = made["stopped"].copy(tmp_path / "copy")
    mark = read_mark(directory / MARK)
    with closing(MarkFile(directory / MARK, bytes(16))) as file:
        file.write(IN_USE, mark.seq, mark.row_crc)
    assert "another journal" in refused(directory).reason


def test_a_mark_of_another_past_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """The mark holds the last row's checksum: a database that holds another record there is not the one."""
    directory = made["stopped"].copy(tmp_path / "copy")
    mark = read_mark(directory / MARK)
    with closing(MarkFile(directory / MARK, mark.journal_id)) as file:
        file.write(IN_USE, mark.seq, mark.row_crc ^ 1)
    assert str(mark.seq) in refused(directory).reason


def test_an_older_database_beside_a_newer_mark_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """A database restored from an older copy lacks its end."""
    directory = made["stopped"].copy(tmp_path / "copy")
    for name in (DATABASE, WAL):
        shutil.copy(made["log"].directory / name, directory / name)
    assert "its end is missing" in refused(directory).reason


def test_a_mark_that_lags_is_taken(made: dict[str, Made], tmp_path: Path) -> None:
    """The mark is not synced, so a loss of power may leave an older one: the journal is read to its end."""
    directory = made["both"].copy(tmp_path / "copy")
    shutil.copy(made["log"].directory / MARK, directory / MARK)
    assert not refused_or_harmless(directory, made["both"])


def test_a_start_moves_a_lagging_mark_to_the_end(made: dict[str, Made], tmp_path: Path) -> None:
    """Records that a kill left ahead of the mark are watched over from the next start on."""
    directory = made["both"].copy(tmp_path / "copy")
    shutil.copy(made["log"].directory / MARK, directory / MARK)

    async def start_and_be_killed() -> Path:
        world = World(directory)
        killed = copy_as_killed(directory, tmp_path / "killed")
        await world.close()
        return killed

    killed = asyncio.run(start_and_be_killed())
    assert read_mark(killed / MARK).seq == max(made["both"].records)


def test_a_start_makes_durable_what_it_read(made: dict[str, Made], tmp_path: Path) -> None:
    """What a killed process had written but perhaps not synced is in the synced database once a start is
    through: the log may go, and nothing is lost."""
    directory = made["log"].copy(tmp_path / "copy")

    async def start_and_lose_the_log() -> Path:
        world = World(directory)
        killed = copy_as_killed(directory, tmp_path / "killed")
        await world.close()
        return killed

    killed = asyncio.run(start_and_lose_the_log())
    (killed / WAL).unlink(missing_ok=True)
    assert not refused_or_harmless(killed, made["log"])


def test_starting_does_nothing_that_blocks_once_it_is_prepared(
    made: dict[str, Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is made durable by prepare, in whatever thread; start then only starts the writer, which
    knows what a trim must keep."""
    directory = made["log"].copy(tmp_path / "copy")
    statements: list[tuple[int, str]] = []

    def watched(path: Path, mode: str) -> sqlite3.Connection:
        connection = connect(path, mode)
        connection.set_trace_callback(lambda sql: statements.append((threading.get_ident(), sql)))
        return connection

    connect = database.connect
    monkeypatch.setattr(database, "connect", watched)

    def open_journal() -> SqliteJournal:
        journal = SqliteJournal(directory, retention=0.0)
        recover(journal, SnapshotStore(directory))
        journal.prepare()
        return journal

    async def work() -> Path:
        journal = await asyncio.to_thread(open_journal)
        assert any("wal_checkpoint" in sql for _, sql in statements)
        killed = copy_as_killed(directory, tmp_path / "killed")
        journal.start()
        await journal.durable(journal.append([an_add(1, 1)]))
        journal.trim(journal.durable_seq)
        await until_trimmed(journal, journal.durable_seq)
        await journal.close()
        return killed

    killed = asyncio.run(work())
    assert threading.get_ident() not in {thread for thread, _ in statements}
    (killed / WAL).unlink(missing_ok=True)
    assert not refused_or_harmless(killed, made["log"])
    assert recover_in(directory).keys() == recover_in(killed).keys()


def test_a_prepared_journal_that_is_never_started_closes(made: dict[str, Made], tmp_path: Path) -> None:
    """A stop may come right after recovery; nothing is lost by it."""
    directory = made["both"].copy(tmp_path / "copy")
    journal = SqliteJournal(directory)
    recover(journal, SnapshotStore(directory))
    journal.prepare()
    asyncio.run(journal.close())
    assert not refused_or_harmless(directory, made["both"])


# -- the mark's bytes


def test_a_truncated_mark_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """A mark of any other length than its own is damaged."""
    directory = made["stopped"].copy(tmp_path / "copy")
    whole = (directory / MARK).read_bytes()
    for length in range(len(whole)):
        (directory / MARK).write_bytes(whole[:length])
        refused(directory)
    (directory / MARK).write_bytes(whole + b"\0")
    refused(directory)


def test_any_flipped_byte_of_the_mark_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """Every byte of the mark is covered by its checksum."""
    directory = made["stopped"].copy(tmp_path / "copy")
    for at in range((directory / MARK).stat().st_size):
        for mask in (0xFF, 0x01):
            flip(directory / MARK, at, mask)
            refused(directory)
            flip(directory / MARK, at, mask)
    assert start_in(directory)


def test_an_unreadable_mark_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """A mark that cannot be read is one sentence, not a traceback."""
    directory = made["stopped"].copy(tmp_path / "copy")
    (directory / MARK).unlink()
    (directory / MARK).mkdir()
    assert "cannot be read" in refused(directory).reason


def test_a_newer_format_is_refused_untouched(made: dict[str, Made], tmp_path: Path) -> None:
    """The directory of a newer version is left alone, and the hint says which program to start."""
    directory = made["both"].copy(tmp_path / "copy")
    data = bytearray((directory / MARK).read_bytes())
    struct.pack_into("<H", data, 8, FORMAT_VERSION + 1)
    struct.pack_into("<I", data, len(data) - 4, zlib.crc32(data[:-4]))
    (directory / MARK).write_bytes(data)
    error = refused(directory)
    assert f"version {FORMAT_VERSION + 1}" in error.reason
    assert "version of bloomgated" in error.hint


# -- the log


@pytest.mark.parametrize("state", ["log", "both"])
def test_a_removed_log_is_refused(made: dict[str, Made], state: str, tmp_path: Path) -> None:
    """SQLite opens a database without its log and says ok; the mark does not."""
    directory = made[state].copy(tmp_path / "copy")
    (directory / WAL).unlink()
    refused(directory)


@pytest.mark.parametrize("state", ["log", "both"])
def test_a_log_cut_anywhere_is_refused_or_harmless(made: dict[str, Made], state: str, tmp_path: Path) -> None:
    """At frame boundaries and between them: either the start is refused, or nothing acknowledged was in the
    part that is gone."""
    size = (made[state].directory / WAL).stat().st_size
    frame = 4096 + 24
    lengths = {0, 1, 31, 32, size - 1, size - 24, *range(32, size, frame * max(1, size // frame // 60))}
    lengths |= set(random.Random(5).sample(range(size), 40))
    outcomes = []
    for length in sorted(lengths):
        directory = made[state].copy(tmp_path / "copy")
        os.truncate(directory / WAL, length)
        outcomes.append(refused_or_harmless(directory, made[state]))
    assert outcomes.count(True) > len(outcomes) * 0.9


@pytest.mark.parametrize("state", ["log", "both"])
def test_a_flipped_byte_of_the_log_is_refused_or_harmless(
    made: dict[str, Made], state: str, tmp_path: Path
) -> None:
    """SQLite ends the log at the first frame that does not check out, and says nothing; we do."""
    size = (made[state].directory / WAL).stat().st_size
    rnd = random.Random(6)
    spread = {*range(32), *(rnd.randrange(size) for _ in range(120)), *(size - 1 - i for i in range(5))}
    outcomes = []
    for at in sorted(spread):
        directory = made[state].copy(tmp_path / "copy")
        flip(directory / WAL, at, rnd.choice((0xFF, 1 << rnd.randrange(8))))
        outcomes.append(refused_or_harmless(directory, made[state]))
    assert outcomes.count(True) > len(outcomes) // 2


# -- the database


@pytest.mark.parametrize("state", ["both", "stopped"])
def test_a_flipped_byte_of_the_database_is_refused_or_harmless(
    made: dict[str, Made], state: str, tmp_path: Path
) -> None:
    """In headers, tree pages, rows, free pages: what is not refused does no harm, and can be written on."""
    size = (made[state].directory / DATABASE).stat().st_size
    rnd = random.Random(7)
    spread = {*range(112), *(rnd.randrange(size) for _ in range(200))}
    spread |= {page + i for page in range(0, size, 4096) for i in (0, 1, 3, 5, 8, 9)}
    for at in sorted(spread):
        directory = made[state].copy(tmp_path / "copy")
        flip(directory / DATABASE, at, rnd.choice((0xFF, 1 << rnd.randrange(8))))
        refused_or_harmless(directory, made[state])


def test_a_truncated_database_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """Cut at any page, or inside one."""
    size = (made["stopped"].directory / DATABASE).stat().st_size
    for length in [*range(0, size, 4096), 100, 5000, size - 1]:
        directory = made["stopped"].copy(tmp_path / "copy")
        os.truncate(directory / DATABASE, length)
        refused(directory)


def change(directory: Path, sql: str, *values: Any) -> None:
    """Change the database as somebody with a SQL shell would."""
    with closing(sqlite3.connect(directory / DATABASE)) as connection:
        assert connection.execute(sql, values).rowcount != 0
        connection.commit()


def trim_mark_of(directory: Path) -> int:
    return SqliteJournal(directory).trim_mark


def test_a_row_missing_in_the_middle_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """Seqs above the trim mark have no gaps, and the first that is missing is named."""
    for seq in sorted(seq for seq in made["stopped"].records):
        directory = made["stopped"].copy(tmp_path / "copy")
        if seq > trim_mark_of(directory):
            change(directory, "DELETE FROM journal WHERE seq = ?", seq)
            error = refused(directory)
            assert str(seq) in error.reason or "its end is missing" in error.reason


def test_rows_missing_at_the_end_are_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """The mark knows where the end was."""
    end = max(made["stopped"].records)
    for first in (end, end - 3, 0):
        directory = made["stopped"].copy(tmp_path / "copy")
        change(directory, "DELETE FROM journal WHERE seq >= ?", first)
        assert "its end is missing" in refused(directory).reason


def test_a_row_missing_below_the_trim_mark_is_refused(tmp_path: Path) -> None:
    """The records that a trim kept are counted and summed: a lost one is noticed, an added one too."""

    async def make() -> None:
        journal = SqliteJournal(tmp_path / "made", retention=0.0)
        journal.start()
        journal.append([Create("one", small_spec()), Create("two", small_spec()), an_add(1, 1), Drop(2)])
        journal.append([Create("three", small_spec()), Snapshots(1, ()), an_add(1, 2), an_add(5, 3)])
        await journal.durable(8)
        journal.trim(7)
        await until_trimmed(journal, 7)
        await journal.close()

    (tmp_path / "made").mkdir()
    asyncio.run(make())
    assert [entry.seq for entry in SqliteJournal(tmp_path / "made").replay(0)] == [1, 5, 6, 8]
    for seq in (1, 5, 6):
        directory = copy_as_killed(tmp_path / "made", tmp_path / f"without-{seq}")
        change(directory, "DELETE FROM journal WHERE seq = ?", seq)
        assert "were kept" in refused(directory).reason
    for seq in (2, 7):
        directory = copy_as_killed(tmp_path / "made", tmp_path / f"with-{seq}")
        crc = database.row_crc(seq, database.Row(3, 1, bytes(28)), 0.0)
        change(directory, "INSERT INTO journal VALUES (?, 3, 1, 0.0, ?, ?)", seq, crc, bytes(28))
        assert "were kept" in refused(directory).reason


@pytest.mark.parametrize(
    "column",
    [
        "payload = cast(substr(payload, 1, length(payload) - 1) || x'07' as blob)",
        "payload = cast(payload || x'00' as blob)",
        "kind = kind % 5 + 1",
        "filter_id = filter_id + 1",
        "running = running + 1000",
        "crc = crc + 1",
    ],
)
def test_an_altered_row_is_refused(made: dict[str, Made], column: str, tmp_path: Path) -> None:
    """Every column of a row is covered by its checksum, wherever it stands in the journal."""
    seqs = sorted(made["stopped"].records)
    for seq in (seqs[0], seqs[3], seqs[len(seqs) // 2], seqs[-1]):
        directory = made["stopped"].copy(tmp_path / "copy")
        change(directory, f"UPDATE journal SET {column} WHERE seq = ?", seq)
        refused(directory)


@pytest.mark.parametrize("key", ["journal_id", "trim"])
@pytest.mark.parametrize(
    "how", ["DELETE FROM meta", "UPDATE meta SET value = x'00'", "UPDATE meta SET crc = 1"]
)
def test_altered_meta_is_refused(made: dict[str, Made], key: str, how: str, tmp_path: Path) -> None:
    """The journal's id and its trim mark are checksummed, too."""
    directory = made["stopped"].copy(tmp_path / "copy")
    change(directory, f"{how} WHERE key = ?", key)
    assert key in refused(directory).reason


def test_a_snapshot_ahead_of_the_journal_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    """A stamp was durable before its file was written: a journal that ends before it has lost its end."""
    directory = made["stopped"].copy(tmp_path / "copy")
    end = max(made["stopped"].records)
    bloom = BloomFilter.of(small_spec())
    SnapshotStore(directory).write(1, freeze(bloom, 1, end), 7)
    assert start_in(directory)
    SnapshotStore(directory).write(1, freeze(bloom, 1, end + 1), 8)
    error = refused(directory)
    assert error.path.endswith(".bgf")
    assert str(end + 1) in error.reason


def test_a_refused_start_moves_no_snapshot(made: dict[str, Made], tmp_path: Path) -> None:
    """Damaged snapshots and files left over stay where they are when the journal is refused."""
    directory = made["stopped"].copy(tmp_path / "copy")
    folder = directory / "snapshots"
    for path in sorted(folder.iterdir()):
        flip(path, 200)
    (folder / "left.bgf.tmp").write_bytes(b"left")
    change(directory, "DELETE FROM journal WHERE seq = ?", max(made["stopped"].records) - 2)
    refused(directory)


# -- creation


def test_every_crash_while_creating_begins_anew(tmp_path: Path) -> None:
    """Killed at any line of the creation, the next start has an empty journal that works."""
    states: list[Path] = []
    target = tmp_path / "data"
    target.mkdir()

    def look(frame: FrameType, event: str, _arg: object) -> Callable[..., Any] | None:
        if frame.f_code is database._create.__code__ and event in ("call", "line", "return"):
            states.append(copy_as_killed(target, tmp_path / f"state-{len(states)}"))
            return look
        return None

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        SqliteJournal(target)
    finally:
        sys.settrace(tracing)
    assert len(states) > 12
    assert len({tuple(contents(state)) for state in states}) >= 4
    for state in states:
        assert_begins(state)


@pytest.mark.parametrize(
    "left",
    [
        {},
        {f"{MARK}.new": b""},
        {f"{MARK}.new": b"BGMARK\r\n123"},
        {f"{MARK}.new": b"\0" * 64},
        {MARK: b"creating"},
        {MARK: b"creating", DATABASE: b""},
        {MARK: b"creating", DATABASE: b"SQLite format 3\0half"},
        {MARK: b"creating", DATABASE: b"\0" * 4096, f"{DATABASE}-journal": b"\0" * 600},
        {MARK: b"creating", DATABASE: b"\0" * 4096, WAL: b"\0" * 5000, f"{DATABASE}-shm": b"\0" * 32768},
        {MARK: b"creating", f"{MARK}.new": b"\0", f"{DATABASE}-shm": b""},
        {"bloomgate.lock": b"123\n"},
    ],
)
def test_what_a_crash_while_creating_can_leave_is_done_over(left: dict[str, bytes], tmp_path: Path) -> None:
    """Half a database under a mark that says so holds nothing that was acknowledged."""
    for name, data in left.items():
        (tmp_path / name).write_bytes(data)
        if data == b"creating":
            with closing(MarkFile(tmp_path / name, bytes(16))) as mark_file:
                os.truncate(tmp_path / name, 0)
                mark_file.write(CREATING, 0, 0)
    assert_begins(tmp_path)


def assert_begins(directory: Path) -> None:
    """A start works, and so does the one after it."""

    async def work() -> None:
        for number in range(2):
            world = World(directory)
            assert world.journal.last_seq == number * 2
            await world.create(f"filter-{number}")
            await world.add(f"filter-{number}", [b"key"])
            await world.close()

    asyncio.run(work())
    assert set(recover_in(directory)) == {"filter-0", "filter-1"}


def test_a_directory_that_cannot_be_written_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes no database says so to the operator; the next start begins anew."""
    monkeypatch.setattr(
        database, "_SCHEMA", "PRAGMA max_page_count = 1; CREATE TABLE t (a); CREATE TABLE u (a);"
    )
    with pytest.raises(DirectoryUnusable) as caught:
        SqliteJournal(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "full" in str(caught.value)
    monkeypatch.undo()
    assert_begins(tmp_path)


def test_a_journal_that_cannot_be_written_is_refused_at_start(made: dict[str, Made], tmp_path: Path) -> None:
    """Readable is not enough: another program's lock is found before anything is served."""
    directory = made["both"].copy(tmp_path / "copy")

    async def work() -> None:
        journal = SqliteJournal(directory)
        recover(journal, SnapshotStore(directory))
        with closing(sqlite3.connect(directory / DATABASE)) as other:
            other.execute("PRAGMA locking_mode = EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(DirectoryUnusable) as caught:
                journal.start()
        assert str(directory) in str(caught.value)
        await journal.close()

    database_connect = database.connect

    def impatient(path: Path, mode: str) -> sqlite3.Connection:
        connection = database_connect(path, mode)
        connection.execute("PRAGMA busy_timeout = 10")
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "connect", impatient)
        asyncio.run(work())
    assert not refused_or_harmless(directory, made["both"])
