"""A consistent copy of a data directory, also while a daemon runs on it.

SQLite's backup interface copies the database as of one moment. Snapshots never change once they are
recorded, so those that the copied journal names are copied after it; if one is gone by then, the journal
names others by now and is copied again.

The copy is a journal of its own, with an id of its own: it may give seqs again that the original gave later.
It says that it is restored, and up to which seq, before it can be started: the mark comes last, and a start
refuses a database without one. It is judged, as a start would judge it, before its mark gets its name.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from bloomgated.errors import BackupRefused, DirectoryInUse, JournalDamaged
from bloomgated.storage.database import (
    DATABASE_NAME,
    MARK_NAME,
    Opened,
    connect,
    copy_files,
    find_mark,
    has_log,
    judge_database,
)
from bloomgated.storage.directory import LOCK_NAME, DirectoryLock, sync_directory
from bloomgated.storage.mark import IN_USE, Mark, MarkFile, read_mark
from bloomgated.storage.meta import write_journal_id, write_restored
from bloomgated.storage.recovery import Recovered, judge, read_catalog
from bloomgated.storage.snapshots import SnapshotStore

# How often the journal is copied anew for a snapshot that is gone, and a mark that looks damaged read anew.
_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Copied:
    """What a backup holds."""

    filters: int
    bytes: int
    seq: int


def back_up(directory: Path, target: Path) -> Copied:
    """Copy ``directory`` to ``target``, which is new or empty; blocks.

    Raises BackupRefused, or another StartError, where it cannot be made or would not be whole; nothing of it
    is left then.
    """
    _check_target(directory, target)
    reading = None
    with suppress(DirectoryInUse):
        # Held, so that no daemon starts meanwhile; where one runs, the copy is made beside it.
        reading = DirectoryLock(directory, looking=True)
    try:
        made = not target.exists()
        writing = DirectoryLock(target)
        try:
            if [path.name for path in target.iterdir()] != [LOCK_NAME]:
                raise BackupRefused(f"{target}: another program writes there too")
            return _make(_Backup(directory, target, live=reading is None), target, made)
        finally:
            writing.release()
    finally:
        if reading is not None:
            reading.release()


def _make(backup: _Backup, target: Path, made: bool) -> Copied:
    try:
        copied = backup.make()
        (target / LOCK_NAME).unlink()
    except BaseException as error:
        _remove(target, made)
        if isinstance(error, JournalDamaged):
            raise BackupRefused(f"{error.path}: {error.reason}; no backup was made") from None
        if isinstance(error, OSError | sqlite3.Error):
            raise BackupRefused(f"{target}: the backup cannot be made ({error})") from None
        raise
    return copied


def _check_target(directory: Path, target: Path) -> None:
    try:
        if target.resolve().is_relative_to(directory.resolve()):
            raise BackupRefused(f"{target}: is in the data directory itself; name another place")
        if target.exists() and not target.is_dir():
            raise BackupRefused(f"{target}: is not a directory")
        if target.exists() and any(target.iterdir()):
            raise BackupRefused(f"{target}: is not empty; name a new or an empty directory")
        if not target.parent.is_dir():
            raise BackupRefused(f"{target}: the directory that it would be in does not exist")
    except OSError as error:
        raise BackupRefused(f"{target}: cannot be read ({error.strerror})") from None


def _remove(target: Path, made: bool) -> None:
    with suppress(OSError):
        # First, since without it nothing of the rest can be started.
        (target / MARK_NAME).unlink(missing_ok=True)
    shutil.rmtree(target / "snapshots", ignore_errors=True)
    for path in target.iterdir():
        with suppress(OSError):
            path.unlink()
    if made:
        with suppress(OSError):
            target.rmdir()


class _Backup:
    """One backup under way, to a directory that nobody else writes to."""

    def __init__(self, directory: Path, target: Path, *, live: bool) -> None:
        self._directory, self._target, self._live = directory, target, live
        self._from, self._to = directory / DATABASE_NAME, target / DATABASE_NAME
        self._mark_path = directory / MARK_NAME

    def make(self) -> Copied:
        """Make it."""
        opened, catalog = self._copy()
        for each in catalog.values():
            if each.filter_id <= opened.restored:
                raise BackupRefused(
                    f"{self._directory}: filter {each.name} is DAMAGED, since it was restored itself; no"
                    " backup was made, rebuild or drop it first, or assert that nothing was added"
                )
        journal_id = self._make_its_own(opened.last_seq)
        fresh = self._target / f"{MARK_NAME}.new"
        with closing(MarkFile(fresh, journal_id)) as mark_file:
            mark_file.write(IN_USE, opened.last_seq, self._last_crc(opened.last_seq), sync=True)
        self._verify(read_mark(fresh))
        # All that it speaks of is durable before the mark is.
        for folder in (self._target / "snapshots", self._target):
            if folder.exists():
                sync_directory(folder)
        fresh.rename(self._target / MARK_NAME)
        sync_directory(self._target)
        sync_directory(self._target.parent)
        files = (path for path in self._target.rglob("*") if path.is_file() and path.name != LOCK_NAME)
        return Copied(len(catalog), sum(path.stat().st_size for path in files), opened.last_seq)

    def _copy(self) -> tuple[Opened, dict[int, Recovered]]:
        """Copy the database, then the snapshots that it records, until they are of one moment."""
        missing: set[str] = set()
        for _ in range(_ATTEMPTS):
            # Read before the database is copied, so the copy must have come as far.
            mark = self._read_mark()
            self._copy_database()
            opened = judge_database(self._from, self._mark_path, mark, copy=self._to)
            catalog = read_catalog(opened.replay(0))
            before, missing = missing, self._copy_snapshots(catalog)
            # Named again although it is gone: that is damage, for the judgement to find.
            if not self._live or not missing - before:
                break
        return opened, catalog

    def _read_mark(self) -> Mark:
        for attempt in range(_ATTEMPTS):
            try:
                mark = find_mark(self._directory)
                break
            except JournalDamaged:
                # Perhaps read while it was written.
                if not self._live or attempt == _ATTEMPTS - 1:
                    raise
        if mark is None:
            raise BackupRefused(f"{self._directory}: holds no journal, so there is nothing to copy")
        return mark

    def _copy_database(self) -> None:
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{self._to}{suffix}").unlink(missing_ok=True)
        if not self._from.exists():
            raise JournalDamaged(str(self._from), "is missing")
        os.close(os.open(self._to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if not self._live:
            copy_files(self._from, self._to)
            return
        # In one step, in which a writer goes on, and its log is not cut.
        with closing(connect(self._from, "ro")) as reading, closing(sqlite3.connect(self._to)) as writing:
            reading.backup(writing)

    def _copy_snapshots(self, catalog: dict[int, Recovered]) -> set[str]:
        """Copy what is not copied yet, remove what is no longer recorded; return the names that are gone."""
        store, copies = SnapshotStore(self._directory), SnapshotStore(self._target)
        files = {file.name: file for each in catalog.values() for file in each.files}
        if files:
            copies.folder.mkdir(mode=0o700, exist_ok=True)
        missing = set()
        for name, file in files.items():
            to = copies.path(file)
            if to.exists():
                continue
            try:
                with open(store.path(file), "rb") as reading, open(to, "xb", opener=_private) as writing:
                    shutil.copyfileobj(reading, writing, 1 << 20)
                    writing.flush()
                    os.fsync(writing.fileno())
            except FileNotFoundError:
                missing.add(name)
        for name in copies.unrecorded(set(files)):
            copies.remove(name)
        return missing

    def _make_its_own(self, last_seq: int) -> bytes:
        """Give the copied database its own id and say that it is a restored one; make it durable."""
        journal_id = os.urandom(16)
        with closing(connect(self._to, "rw")) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            write_journal_id(connection, journal_id)
            write_restored(connection, last_seq)
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if has_log(self._to):
            raise BackupRefused(f"{self._to}: its log cannot be moved into it; no backup was made")
        with open(self._to, "rb") as file:
            os.fsync(file.fileno())
        return journal_id

    def _last_crc(self, last_seq: int) -> int:
        with closing(connect(self._to, "ro&immutable=1")) as connection:
            found = connection.execute("SELECT crc FROM journal WHERE seq = ?", (last_seq,)).fetchone()
        # Trimmed, if there is no such row: the trim mark speaks for it.
        return found[0] if found else 0

    def _verify(self, mark: Mark) -> None:
        """Judge the copy as a start would, and the older snapshots too."""
        opened = judge_database(self._from, self._mark_path, mark, copy=self._to)
        # That it is restored goes without saying; whole it must be but for that.
        found = judge(
            opened, SnapshotStore(self._target), assert_no_later_adds=True, thorough=True, bodies=False
        )
        for flaw in (*found.unusable, *found.unsound_spares):
            path = SnapshotStore(self._directory).path(flaw.file)
            raise BackupRefused(
                f"{path}: {flaw.reason}; no backup was made, `bloomgate snapshot {flaw.filter.name}` writes"
                " another one"
            )
        for each in found.filters:
            if each.damage:
                raise BackupRefused(
                    f"{self._directory}: filter {each.name} is DAMAGED ({each.damage}); no backup was made,"
                    " rebuild or drop it first"
                )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
