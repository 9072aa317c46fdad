"""What a trim keeps, how a slice of the journal's oldest rows is deleted, and its pages are given back."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator

from bloomgated.storage.meta import TrimState, write_trim
from bloomgated.storage.records import (
    KIND_CREATE,
    KIND_DROP,
    KIND_LEASE_FLAG,
    KIND_SNAPSHOTS,
    LeaseFlag,
    Row,
    decode,
)

# A slice ends after so many rows or bytes, whichever comes first, and gives back so many pages.
TRIM_ROWS = 1000
TRIM_BYTES = 4 << 20
VACUUM_PAGES = 2048
_PAGE_BYTES = 4096


class Kept:
    """The records that no trim deletes: creates and newest snapshots of live filters, and the lease flag."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        """Live filters, with the seq of their newest Snapshots; 0: none."""
        self._flag_seq = 0
        self.lease_seconds = 0.0
        """What the newest LeaseFlag says."""

    def note(self, seq: int, row: Row) -> None:
        """Take down a record; in the order of their seqs."""
        if row.kind == KIND_CREATE:
            self._live[seq] = 0
        elif row.kind == KIND_SNAPSHOTS and row.filter_id in self._live:
            self._live[row.filter_id] = seq
        elif row.kind == KIND_DROP:
            self._live.pop(row.filter_id, None)
        elif row.kind == KIND_LEASE_FLAG:
            flag = decode(row, f"seq {seq}")
            assert isinstance(flag, LeaseFlag)
            self._flag_seq, self.lease_seconds = seq, flag.seconds

    def has_filter_up_to(self, seq: int) -> bool:
        """Whether a live filter was created at or before ``seq``."""
        return any(each <= seq for each in self._live)

    def seqs(self) -> Iterator[int]:
        """Where they are; 0 is nowhere."""
        yield from self._live
        yield from self._live.values()
        if self.lease_seconds:
            yield self._flag_seq


def trim_slice(
    connection: sqlite3.Connection, trim: TrimState, up_to: int, oldest: float, keep: Iterable[int]
) -> tuple[TrimState, int] | None:
    """Delete a slice of the oldest rows up to ``up_to``, but those to ``keep``, and store the mark with it.

    Rows younger than ``oldest``, on the journal's clock, stay. Returns how far it is trimmed now, and about
    how many bytes went to the log; None if no row may go.
    """
    end, running, size = 0, 0.0, 0
    for seq, written, length in connection.execute(
        "SELECT seq, running, length(payload) FROM journal WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
        (trim.mark, up_to, TRIM_ROWS),
    ).fetchall():
        if written > oldest or size > TRIM_BYTES:
            break
        end, running, size = seq, written, size + length
    if not end:
        return None
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS keep (seq INTEGER PRIMARY KEY)")
    connection.execute("DELETE FROM keep")
    connection.executemany("INSERT INTO keep VALUES (?)", [(seq,) for seq in keep if 0 < seq <= end])
    connection.execute("DELETE FROM journal WHERE seq <= ? AND seq NOT IN (SELECT seq FROM keep)", (end,))
    kept, kept_sum = connection.execute(
        "SELECT count(*), coalesce(sum(crc), 0) FROM journal WHERE seq <= ?", (end,)
    ).fetchone()
    trimmed = TrimState(end, kept, kept_sum, running)
    write_trim(connection, trimmed)
    connection.execute("COMMIT")
    # Freed pages are used again, so the file need not shrink at once; moving its tail costs writes.
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if free * 4 > pages:
        # As a script: execute() takes one step of it, which is one page.
        connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
        size += VACUUM_PAGES * _PAGE_BYTES
    return trimmed, size + TRIM_ROWS * 64
