"""The ``meta`` table of the journal database: a few values, each with its CRC.

- ``journal_id``: 16 random bytes, drawn when the journal was created, or copied by a backup.
- ``trim``: see TrimState.
- ``restored``: the last seq, as u64, of the backup that this database is a copy of. Only in such a copy, and
  there until its operator has asserted that nothing was added after the backup.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from bloomgated.errors import JournalDamaged
from bloomgated.storage.mark import NEWER_HINT

_TRIM = struct.Struct("<QQQd")
_SEQ = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TrimState:
    """How far the journal is trimmed, and the rows kept at or below that mark: their number, and the sum of
    their CRCs. ``running`` is the journal's clock when the last slice was trimmed."""

    mark: int = 0
    kept: int = 0
    kept_sum: int = 0
    running: float = 0.0


def write_journal_id(connection: sqlite3.Connection, journal_id: bytes) -> None:
    """Store the journal's id."""
    _write(connection, "journal_id", journal_id)


def write_trim(connection: sqlite3.Connection, trim: TrimState) -> None:
    """Store how far the journal is trimmed."""
    _write(connection, "trim", _TRIM.pack(trim.mark, trim.kept, trim.kept_sum, trim.running))


def write_restored(connection: sqlite3.Connection, seq: int) -> None:
    """Store that this is a copy which ended at ``seq``; 0 takes that back."""
    if seq:
        _write(connection, "restored", _SEQ.pack(seq))
    else:
        connection.execute("DELETE FROM meta WHERE key = 'restored'")


def read_journal_id(connection: sqlite3.Connection, path: Path) -> bytes:
    """The journal's id. Raises JournalDamaged."""
    return _read(connection, path, "journal_id")


def read_trim(connection: sqlite3.Connection, path: Path) -> TrimState:
    """How far the journal is trimmed. Raises JournalDamaged."""
    return TrimState(*_TRIM.unpack(_read(connection, path, "trim")))


def read_restored(connection: sqlite3.Connection, path: Path) -> int:
    """The last seq of the backup that this is a copy of; 0 where it is none. Raises JournalDamaged."""
    if not connection.execute("SELECT 1 FROM meta WHERE key = 'restored'").fetchone():
        return 0
    (seq,) = _SEQ.unpack(_read(connection, path, "restored"))
    return int(seq)


def check_keys(connection: sqlite3.Connection, path: Path) -> None:
    """Raise JournalDamaged where there is a value that this program does not know: it could be one that
    forbids to go on."""
    for key, value, crc in connection.execute("SELECT key, value, crc FROM meta").fetchall():
        if key not in ("journal_id", "trim", "restored"):
            if crc != _crc(key, value):
                raise JournalDamaged(str(path), "its meta table is damaged")
            raise JournalDamaged(str(path), f"holds {key!r}, which this program does not know", NEWER_HINT)


def _write(connection: sqlite3.Connection, key: str, value: bytes) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (key, value, _crc(key, value)))


def _read(connection: sqlite3.Connection, path: Path, key: str) -> bytes:
    found = connection.execute("SELECT value, crc FROM meta WHERE key = ?", (key,)).fetchone()
    if not found or found[1] != _crc(key, found[0]):
        raise JournalDamaged(str(path), f"its {key} is missing or damaged")
    value: bytes = found[0]
    return value


def _crc(key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key.encode()))
