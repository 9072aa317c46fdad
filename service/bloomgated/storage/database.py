"""The SQLite file of a journal: how it is created, opened and judged.

    journal   seq, kind, filter_id, running (seconds), payload, crc       one row a record
    meta      key, value, crc                                             see meta.py

SQLite does not notice a cut write-ahead log, and believes what a page says. So every row carries a CRC, seqs
above the trim mark are gapless, the rows kept below it are counted and summed, and the mark beside the file
tells how far the journal had come. What no row shows, such as a page that is both free and in use, would lose
rows later: SQLite's own check is asked about that.

Judging goes through connections that cannot write. A writing one would copy the write-ahead log into the
database and delete it as soon as it is closed, also where the start is refused. Even a reading one makes a
file of shared memory where there is a log: who may leave no trace at all judges a copy.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from bloomgate.filters.errors import DataDamaged
from bloomgated.errors import DirectoryUnusable, JournalDamaged, TrimmedAway
from bloomgated.storage.directory import sync_directory
from bloomgated.storage.journal import Placed
from bloomgated.storage.mark import CREATING, IN_USE, Mark, MarkFile, read_mark
from bloomgated.storage.meta import (
    TrimState,
    check_keys,
    read_journal_id,
    read_restored,
    read_trim,
    write_journal_id,
    write_trim,
)
from bloomgated.storage.records import Row, decode

DATABASE_NAME = "bloomgate.db"
MARK_NAME = "bloomgate.db-mark"

_SCHEMA = """
CREATE TABLE journal (
  seq INTEGER PRIMARY KEY, kind INTEGER NOT NULL, filter_id INTEGER NOT NULL, running REAL NOT NULL,
  crc INTEGER NOT NULL, payload BLOB NOT NULL
) STRICT;
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL) STRICT, WITHOUT ROWID;
"""
# SQLite's file format versions for writing and reading. It obeys them, and a database of ours never has
# others: a flipped bit here would make it read-only, or ignore the log.
_WAL_VERSIONS, _WAL_VERSIONS_AT = b"\x02\x02", 18

# What reading an altered database raises: columns may be of any type and size, error messages not be UTF-8.
_UNREADABLE = (sqlite3.Error, struct.error, TypeError, ValueError, OverflowError)

_ROW = struct.Struct("<QBQd")

# Seconds that a start waits for a program that reads the database.
READER_PATIENCE = 60
# What is left of a log that a reader let grow, once it begins anew.
LOG_BYTES = 64 << 20


def row_crc(seq: int, row: Row, running: float) -> int:
    """CRC-32 of a row with all its columns."""
    return zlib.crc32(row.payload, zlib.crc32(_ROW.pack(seq, row.kind, row.filter_id, running)))


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection that commits when told to. ``mode`` is ro, rw or rwc, with further URI parameters."""
    # One thread at a time uses it, but opening and writing happen on two.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def has_log(path: Path) -> bool:
    """Whether a part of the database at ``path`` may be in a file beside it."""
    logs = (Path(f"{path}{suffix}") for suffix in ("-wal", "-journal"))
    return any(log.exists() and log.stat().st_size for log in logs)


def connect_to_judge(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, for when no other connection can be open."""
    # Without a log even a reading connection would create an empty one, so SQLite is told not to look for it.
    return connect(path, "ro" if has_log(path) else "ro&immutable=1")


def copy_files(path: Path, to: Path) -> None:
    """Copy a database that nobody has open, with its log. Raises OSError; what is missing is not copied."""
    for suffix in ("", "-wal", "-journal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{path}{suffix}", f"{to}{suffix}")


@dataclass(frozen=True, slots=True)
class Opened:
    """A judged journal database. ``reading`` is the file that was judged: ``path``, or a copy of it."""

    path: Path
    reading: Path
    mark_path: Path
    journal_id: bytes
    trim: TrimState
    restored: int
    last_seq: int
    running: float

    @property
    def durable_seq(self) -> int:
        """The highest seq in it."""
        return self.last_seq

    @property
    def trim_mark(self) -> int:
        """The highest seq that may be missing."""
        return self.trim.mark

    def replay(self, after: int) -> Iterator[Placed]:
        """As Journal.replay, while nobody writes."""
        return read_entries(self, after, self.last_seq, shared=False)


def find_mark(directory: Path) -> Mark | None:
    """What the mark in ``directory`` says; None where nothing was acknowledged yet and a start begins anew.

    Raises JournalDamaged.
    """
    path, mark_path = directory / DATABASE_NAME, directory / MARK_NAME
    try:
        mark = read_mark(mark_path)
    except FileNotFoundError:
        found = next((p for p in (path, Path(f"{path}-wal")) if p.exists()), None) or _any_file(
            directory / "snapshots"
        )
        if found:
            raise JournalDamaged(str(mark_path), f"is missing beside {found.name}") from None
        return None
    return None if mark.state == CREATING else mark


def _any_file(folder: Path) -> Path | None:
    """One of the files in ``folder``. Raises JournalDamaged where nobody can say: they may be there."""
    try:
        return min(folder.iterdir(), default=None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalDamaged(str(folder), f"cannot be read ({error.strerror})") from None


def open_database(directory: Path) -> Opened:
    """Judge the journal database in ``directory``, creating it where nothing is there yet.

    Raises JournalDamaged where it is not what was acknowledged, having changed nothing, and DirectoryUnusable
    where it cannot be created.
    """
    path, mark_path = directory / DATABASE_NAME, directory / MARK_NAME
    mark = find_mark(directory)
    if mark is None:
        try:
            _create(path, mark_path)
        except (OSError, sqlite3.Error) as error:
            raise DirectoryUnusable(str(directory), f"the journal cannot be created ({error})") from None
        mark = read_mark(mark_path)
    return judge_database(path, mark_path, mark)


def judge_database(path: Path, mark_path: Path, mark: Mark, *, copy: Path | None = None) -> Opened:
    """Judge a database by its mark. Raises JournalDamaged where it is not what was acknowledged.

    ``copy`` is a copy of it with its log, which is read in its stead.
    """
    reading = copy or path
    try:
        with open(reading, "rb") as file:
            versions = os.pread(file.fileno(), len(_WAL_VERSIONS), _WAL_VERSIONS_AT)
    except FileNotFoundError:
        raise JournalDamaged(str(path), f"is missing, but the journal had come to seq {mark.seq}") from None
    except OSError as error:
        raise JournalDamaged(str(path), f"cannot be read ({error.strerror})") from None
    if versions != _WAL_VERSIONS:
        raise JournalDamaged(str(path), "is not a database in WAL mode")
    try:
        with closing(connect_to_judge(reading)) as connection:
            return _judge(connection, path, reading, mark_path, mark)
    except _UNREADABLE as error:
        raise JournalDamaged(str(path), f"SQLite cannot read it ({error})") from None


def _judge(connection: sqlite3.Connection, path: Path, reading: Path, mark_path: Path, mark: Mark) -> Opened:
    """Whether the database is the one the mark speaks of, and is whole; rows are judged as they are read."""
    journal_id = read_journal_id(connection, path)
    if journal_id != mark.journal_id:
        raise JournalDamaged(str(mark_path), f"belongs to another journal than {path.name}")
    trim = read_trim(connection, path)
    restored = read_restored(connection, path)
    check_keys(connection, path)
    last, running = connection.execute("SELECT max(seq), max(running) FROM journal").fetchone()
    last_seq = max(last or 0, trim.mark)
    if mark.seq > last_seq:
        raise JournalDamaged(
            str(path), f"ends at seq {last_seq}, but had come to {mark.seq}: its end is missing"
        )
    stored = connection.execute("SELECT crc FROM journal WHERE seq = ?", (mark.seq,)).fetchone()
    if stored[0] != mark.row_crc if stored else mark.seq > trim.mark:
        raise JournalDamaged(str(path), f"seq {mark.seq} is not the record that was written last")
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise JournalDamaged(str(path), f"SQLite finds it damaged ({' '.join(found.split())})")
    running = max(running or 0.0, trim.running)
    return Opened(path, reading, mark_path, journal_id, trim, restored, last_seq, running)


def open_to_write(opened: Opened) -> tuple[sqlite3.Connection, MarkFile]:
    """Connect for writing, after all was judged, and make durable what was read.

    A process killed between a write and its sync leaves records that can be read, but that the loss of power
    could still take. The checkpoint writes them once more, into the database, and syncs that; only then may
    they count as durable. Raises DirectoryUnusable.
    """
    connection = None
    try:
        connection = connect(opened.path, "rw")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        # SQLite's own checkpoint keeps its failure to itself and tries again: a sync, tried again.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError(f"journal mode is {mode}")
        # A reader, such as a backup under way, may hold what it reads where it is. All that stands behind it
        # can be moved only once it is done, so it is waited for, unless nothing does.
        connection.execute(f"PRAGMA busy_timeout = {READER_PATIENCE * 1000}")
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
        if busy:
            raise sqlite3.OperationalError(f"another program uses it, and did for {READER_PATIENCE} s")
        connection.execute("PRAGMA busy_timeout = 100")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        last = connection.execute("SELECT seq, crc FROM journal WHERE seq = ?", (opened.last_seq,)).fetchone()
        mark_file = MarkFile(opened.mark_path, opened.journal_id)
        if last:
            # A kill between a commit and its mark left the mark behind.
            mark_file.write(IN_USE, *last)
    except (OSError, sqlite3.Error) as error:
        if connection is not None:
            connection.close()
        raise DirectoryUnusable(str(opened.path.parent), f"the journal cannot be written ({error})") from None
    return connection, mark_file


def _create(path: Path, mark_path: Path) -> None:
    """Create an empty database and its mark. A crash at any point leaves what the next start does over."""
    journal_id = os.urandom(16)
    # Aside and renamed, so that there is no moment with half a mark.
    fresh = Path(f"{mark_path}.new")
    with closing(MarkFile(fresh, journal_id)) as mark_file:
        mark_file.write(CREATING, 0, 0, sync=True)
        fresh.rename(mark_path)
        sync_directory(path.parent)
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        with closing(connect(path, "rwc")) as connection:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.executescript(_SCHEMA)
            write_journal_id(connection, journal_id)
            write_trim(connection, TrimState())
        os.chmod(path, 0o600)
        # The directory itself may be new too.
        for folder in (path.parent, path.parent.parent):
            sync_directory(folder)
        # From here on a missing database is a loss.
        mark_file.write(IN_USE, 0, 0, sync=True)


def read_entries(
    opened: Opened, after: int, last_seq: int, *, shared: bool, gapless: bool = False
) -> Iterator[Placed]:
    """Yield the records after ``after`` up to ``last_seq`` and the kept ones below, judging every row.

    ``shared``: whether this process may be writing to it meanwhile. ``gapless``: see Journal.replay.
    """
    path, kept, kept_sum = opened.path, 0, 0
    try:
        with closing(connect(path, "ro") if shared else connect_to_judge(opened.reading)) as connection:
            # One read transaction, so that rows and trim mark are of one moment.
            connection.execute("BEGIN")
            trim = read_trim(connection, path)
            if gapless and trim.mark > after:
                raise TrimmedAway
            for seq, row, running, crc in _rows(connection, path, 0, trim.mark):
                kept, kept_sum = kept + 1, kept_sum + crc
                yield Placed(seq, running, decode(row, f"{path} seq {seq}"))
            if (kept, kept_sum) != (trim.kept, trim.kept_sum):
                raise JournalDamaged(
                    str(path), f"{trim.kept} records were kept up to seq {trim.mark}, these are not they"
                )
            expected = max(trim.mark, after) + 1
            for seq, row, running, _ in _rows(connection, path, expected - 1, last_seq):
                if seq != expected:
                    break
                expected += 1
                yield Placed(seq, running, decode(row, f"{path} seq {seq}"))
            if expected <= last_seq:
                raise JournalDamaged(str(path), f"seq {expected} is missing")
    except _UNREADABLE as error:
        raise JournalDamaged(str(path), f"SQLite cannot read it ({error})") from None
    except DataDamaged as error:
        raise JournalDamaged(error.path, error.reason) from None


def _rows(
    connection: sqlite3.Connection, path: Path, after: int, up_to: int
) -> Iterator[tuple[int, Row, float, int]]:
    found = connection.execute(
        "SELECT seq, kind, filter_id, running, crc, payload FROM journal"
        " WHERE seq > ? AND seq <= ? ORDER BY seq",
        (after, up_to),
    )
    for seq, kind, filter_id, running, crc, payload in found:
        row = Row(kind, filter_id, payload)
        if crc != row_crc(seq, row, running):
            raise JournalDamaged(str(path), f"seq {seq} is damaged")
        yield seq, row, running, crc
