"""The mark beside the database: how far the journal had come, told by another file.

SQLite takes a cut or altered write-ahead log for an ordinary end. The mark is what notices: after each commit
it is overwritten in place with the last seq and that row's CRC. It is not synced, so after a loss of power it
may lag, but it is never ahead of a durable journal by itself. 64 bytes, little-endian:

    8  magic "BGMARK\\r\\n"
    2  format version of the whole directory u16
    1  state u8: 1 the database is being created, nothing was acknowledged; 2 in use
    1  zero
   16  journal id
    8  last seq u64
    4  CRC-32 of that row u32
   20  zeros
    4  CRC-32 of the 60 bytes before
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from bloomgated.errors import JournalDamaged

FORMAT_VERSION = 1
CREATING, IN_USE = 1, 2
NEWER_HINT = "start the version of bloomgated that wrote it; nothing was changed"

_MAGIC = b"BGMARK\r\n"
_LAYOUT = struct.Struct("<8sHBx16sQI20x")
_CRC = struct.Struct("<I")
_SIZE = _LAYOUT.size + _CRC.size


@dataclass(frozen=True, slots=True)
class Mark:
    """What a mark file says."""

    state: int
    journal_id: bytes
    seq: int
    row_crc: int


def read_mark(path: Path) -> Mark:
    """Read and judge a mark. Raises JournalDamaged, and FileNotFoundError if there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JournalDamaged(str(path), f"cannot be read ({error.strerror})") from None
    if len(data) != _SIZE or data[_LAYOUT.size :] != _CRC.pack(zlib.crc32(data[: _LAYOUT.size])):
        raise JournalDamaged(str(path), "the mark is damaged")
    magic, version, state, journal_id, seq, row_crc = _LAYOUT.unpack_from(data)
    if magic != _MAGIC:
        raise JournalDamaged(str(path), "not a bloomgate mark")
    if version != FORMAT_VERSION:
        raise JournalDamaged(
            str(path),
            f"the directory has format version {version}, this program reads {FORMAT_VERSION}",
            NEWER_HINT,
        )
    if state not in (CREATING, IN_USE) or data[: _LAYOUT.size] != _pack(state, journal_id, seq, row_crc):
        raise JournalDamaged(str(path), "the mark is not one that bloomgated writes")
    return Mark(state, journal_id, seq, row_crc)


def _pack(state: int, journal_id: bytes, seq: int, row_crc: int) -> bytes:
    return _LAYOUT.pack(_MAGIC, FORMAT_VERSION, state, journal_id, seq, row_crc)


class MarkFile:
    """Overwrites a mark in place."""

    def __init__(self, path: Path, journal_id: bytes) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._journal_id = journal_id

    def write(self, state: int, seq: int, row_crc: int, *, sync: bool = False) -> None:
        """Overwrite the mark in one write; ``sync`` makes it durable too."""
        data = _pack(state, self._journal_id, seq, row_crc)
        data += _CRC.pack(zlib.crc32(data))
        if os.pwrite(self._fd, data, 0) != len(data):
            raise OSError("short write of the mark")
        if sync:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
