"""The embedded journal: SQLite, one writer thread, group commit.

Everything queued goes into one transaction and one sync; the next group forms while it runs. There is no
timer: a lone record waits for nobody, a crowd shares one sync.

The writer thread also moves what was committed from SQLite's log into the database, between the groups. A
move that fails is a failed commit like any other; one that a reader stands in the way of goes on later.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from bloomgated.errors import DirectoryUnusable, JournalFailed, JournalQueueFull
from bloomgated.storage.database import connect, open_database, open_to_write, read_entries, row_crc
from bloomgated.storage.journal import Placed
from bloomgated.storage.mark import IN_USE, MarkFile
from bloomgated.storage.meta import write_restored
from bloomgated.storage.records import (
    KIND_ADD,
    Record,
    Row,
    encode,
)
from bloomgated.storage.trimming import Kept, trim_slice

log = logging.getLogger(__name__)

# The log is moved into the database once about so much was written to it.
CHECKPOINT_BYTES = 4 << 20
# A restored journal is not trimmed before so many bytes were added to it: its operator may yet say that it
# lacks nothing, and what was trimmed could not be proven then.
RESTORED_BYTES = 1 << 30
# What a row takes beside its payload, about, and what a commit takes beside its rows.
_ROW_BYTES, _COMMIT_BYTES = 64, 3 * 4096


class SqliteJournal:
    """A Journal in ``bloomgate.db`` of a data directory. See the port for what it promises."""

    def __init__(
        self,
        directory: Path,
        *,
        retention: float = 900.0,
        max_queued_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Judge or create it; blocks. ``retention`` in seconds of running time.

        Raises JournalDamaged, and DirectoryUnusable where it cannot be created. One that exists is not
        written to before ``prepare``.
        """
        self._opened = opened = open_database(directory)
        self.journal_id = opened.journal_id
        self._trim, self._restored = opened.trim, opened.restored
        self._last_seq = self._durable_seq = opened.last_seq
        self._retention, self._max_queued_bytes = retention, max_queued_bytes
        self._clock, self._running_base, self._running = clock, opened.running - clock(), opened.running
        self.on_commit: Callable[[float, int], None] = lambda _seconds, _records: None
        self.on_failure: Callable[[Exception], None] = lambda _error: None
        self._failed: Exception | None = None
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._tickets = itertools.count()
        self._queued_bytes = 0
        # Shared with the writer thread, under the condition.
        self._wake = threading.Condition()
        self._queue: list[tuple[int, Row]] = []
        self._trim_to = 0
        self._closing = self._closed = False
        # From prepare on; the writer thread's own from start on.
        self._connection: sqlite3.Connection | None = None
        self._mark_file: MarkFile | None = None
        self._logged_bytes = self._restored_bytes = 0
        self._kept, self._lease_seconds = Kept(), 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._write, name="journal-writer", daemon=True)

    def prepare(self, *, assert_no_later_adds: bool = False) -> None:
        """Make durable what was read, and connect for writing; blocks.

        Called once, in any thread, after recovery has read and judged what is there. With
        ``assert_no_later_adds`` it is no longer a restored one, and that is durable. Raises DirectoryUnusable
        where it cannot be written.
        """
        self._connection, self._mark_file = open_to_write(self._opened)
        if assert_no_later_adds:
            self._forget_restored(self._connection)
        if self._restored:
            (self._restored_bytes,) = self._connection.execute(
                "SELECT coalesce(sum(length(payload)), 0) FROM journal WHERE seq > ?", (self._restored,)
            ).fetchone()
        for seq, kind, filter_id, payload in self._connection.execute(
            "SELECT seq, kind, filter_id, payload FROM journal WHERE kind <> ? ORDER BY seq", (KIND_ADD,)
        ):
            self._kept.note(seq, Row(kind, filter_id, payload))
        self._lease_seconds = self._kept.lease_seconds

    def _forget_restored(self, connection: sqlite3.Connection) -> None:
        if not self._restored:
            log.warning(
                "--assert-no-later-adds: this directory is not a restored one, so it changes nothing; take"
                " it out of the command line, or it will speak for the next backup that is put back"
            )
            return
        try:
            connection.execute("BEGIN IMMEDIATE")
            write_restored(connection, 0)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            connection.close()
            raise DirectoryUnusable(
                str(self._opened.path.parent), f"the journal cannot be written ({error})"
            ) from None
        log.warning("asserted: nothing was added after the backup, which ended at seq %d", self._restored)
        self._restored = 0

    def start(self) -> None:
        """Begin to commit; called once, on the event loop. Prepares first, blocking it, if nobody has."""
        if self._connection is None:
            self.prepare()
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    # -- the port, on the event loop

    @property
    def last_seq(self) -> int:
        """See Journal."""
        return self._last_seq

    @property
    def durable_seq(self) -> int:
        """See Journal."""
        return self._durable_seq

    @property
    def trim_mark(self) -> int:
        """See Journal."""
        return self._trim.mark

    @property
    def restored(self) -> int:
        """See Journal."""
        return self._restored

    @property
    def failed(self) -> bool:
        """Whether a commit has failed, so that nothing more is taken."""
        return self._failed is not None

    def append(self, records: Sequence[Record]) -> int:
        """See Journal."""
        if self._failed:
            raise JournalFailed(str(self._failed))
        if self._closing:
            raise JournalFailed("the journal is closed")
        # Encoded here and not in the writer: what cannot be encoded is its caller's failure alone.
        rows = [encode(record) for record in records]
        size = sum(map(_size, rows))
        # A batch larger than the whole bound is taken when nothing else waits, or it could never be.
        if self._queued_bytes and self._queued_bytes + size > self._max_queued_bytes:
            raise JournalQueueFull(self._queued_bytes, self._max_queued_bytes)
        self._queued_bytes += size
        with self._wake:
            for row in rows:
                self._last_seq += 1
                self._queue.append((self._last_seq, row))
            self._wake.notify()
        return self._last_seq

    async def durable(self, seq: int) -> None:
        """See Journal."""
        if seq <= self._durable_seq:
            return
        if self._failed:
            raise JournalFailed(str(self._failed))
        if self._closed:
            raise JournalFailed("the journal is closed")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (seq, next(self._tickets), future))
        await future

    @property
    def lease_seconds(self) -> float:
        """See Journal."""
        return self._lease_seconds

    def replay(self, after: int, *, gapless: bool = False) -> Iterator[Placed]:
        """See Journal."""
        return read_entries(
            self._opened, after, self._durable_seq, shared=self._connection is not None, gapless=gapless
        )

    def trim(self, up_to: int) -> None:
        """See Journal."""
        with self._wake:
            self._trim_to = max(self._trim_to, min(up_to, self._durable_seq))
            self._wake.notify()

    async def close(self) -> None:
        """See Journal."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident:
            # Not joined in a thread of the loop's: those may all be busy.
            await self._ended.wait()
            self._thread.join()
        self._closed = True
        self._fail_waiters("the journal is closed")
        # After a failure this may fail too; what was acknowledged is safe already.
        with suppress(sqlite3.Error, OSError):
            if self._connection is not None:
                self._disconnect(self._connection)
        with suppress(OSError):
            if self._mark_file is not None:
                self._mark_file.close()

    def _disconnect(self, connection: sqlite3.Connection) -> None:
        """Close it: the last connection to go moves the log into the database, and deletes it."""
        if self._failed is None:
            connection.close()
            return
        # Nothing is tried again. One that cannot write goes last, so the log stays for the next start.
        with closing(connect(self._opened.path, "ro")) as last:
            last.execute("SELECT count(*) FROM meta").fetchone()
            connection.close()

    def _committed(self, seq: int, size: int, seconds: float, records: int) -> None:
        self._durable_seq = seq
        self._queued_bytes -= size
        while self._waiters and self._waiters[0][0] <= seq:
            future = heapq.heappop(self._waiters)[2]
            if not future.done():
                future.set_result(None)
        self.on_commit(seconds, records)

    def _fail(self, error: Exception) -> None:
        self._failed = error
        self._fail_waiters(str(error))
        self.on_failure(error)

    def _fail_waiters(self, reason: str) -> None:
        for _, _, future in self._waiters:
            if not future.done():
                future.set_exception(JournalFailed(reason))
        self._waiters.clear()

    # -- the writer thread

    def _write(self) -> None:
        assert self._loop is not None
        assert self._connection is not None
        assert self._mark_file is not None
        connection, mark_file = self._connection, self._mark_file
        trim_to = 0
        try:
            while True:
                with self._wake:
                    while not (self._queue or self._closing or max(trim_to, self._trim_to) > self._trim.mark):
                        self._wake.wait()
                    if self._closing and not self._queue:
                        return
                    group, self._queue = self._queue, []
                    # Taken off, so that one asked for during a slice is not lost with that slice's.
                    trim_to, self._trim_to = max(trim_to, self._trim_to), 0
                if group:
                    started = time.perf_counter()
                    size = self._commit(connection, mark_file, group)
                    seconds = time.perf_counter() - started
                    self._loop.call_soon_threadsafe(self._committed, group[-1][0], size, seconds, len(group))
                # Where nothing is old enough yet, the next trim() asks again.
                if trim_to > self._trim.mark and not self._trim_slice(connection, trim_to):
                    trim_to = 0
                if self._logged_bytes >= CHECKPOINT_BYTES:
                    self._checkpoint(connection)
        except Exception as error:
            # Whatever it was: never tried again, see the port.
            self._loop.call_soon_threadsafe(self._fail, error)
        finally:
            self._loop.call_soon_threadsafe(self._ended.set)

    def _running_time(self) -> float:
        # Never back: by seq, rows only ever get younger, and a trim relies on it.
        self._running = max(self._running, self._running_base + self._clock())
        return self._running

    def _commit(
        self, connection: sqlite3.Connection, mark_file: MarkFile, group: list[tuple[int, Row]]
    ) -> int:
        """Make a group durable, then move the mark. Returns the bytes it took off the queue."""
        running = self._running_time()
        rows = [
            (seq, row.kind, row.filter_id, running, row_crc(seq, row, running), row.payload)
            for seq, row in group
        ]
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?)", rows)
        connection.execute("COMMIT")
        mark_file.write(IN_USE, rows[-1][0], rows[-1][4])
        for seq, row in group:
            self._kept.note(seq, row)
        size = sum(_size(row) for _, row in group)
        self._logged_bytes += size + _COMMIT_BYTES
        self._restored_bytes += size
        return size

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Move what is in the log into the database, as far as no reader still needs it where it is."""
        # Whether it came to the end does not matter: the next one goes on, and the log grows meanwhile.
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self._logged_bytes = 0

    def _trim_slice(self, connection: sqlite3.Connection, up_to: int) -> bool:
        """Delete a slice of the oldest rows. Returns whether there was one that may go."""
        if self._restored_bytes < RESTORED_BYTES and self._kept.has_filter_up_to(self._restored):
            return False
        oldest = self._running_time() - self._retention
        sliced = trim_slice(connection, self._trim, up_to, oldest, self._kept.seqs())
        if sliced is None:
            return False
        self._trim, written = sliced
        self._logged_bytes += written
        return True


def _size(row: Row) -> int:
    return _ROW_BYTES + len(row.payload)
