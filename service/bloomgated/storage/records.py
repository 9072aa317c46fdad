"""Journal records and their bytes.

Every mutation is a record. A filter's id is the seq of its ``Create``: durable seqs are never given twice, so
neither are ids. Payloads, all numbers little-endian (kind and filter id stand in columns of their own):

    1 Create      name length u16, name UTF-8, then the spec as in a filter image
    2 Drop        empty
    3 Add         body u32, certainly new keys u64, then 16-byte digests
    4 Grow        body u32, then the body spec: bits u64, hashes u32, capacity u64
    6 LeaseFlag   seconds f64
    5 Snapshots   number of files u8, then per file, newest last: name length u16, name ASCII,
                  generation u64, seq u64, stamp u64, size u64, CRC-32 of the bodies u32, unix time f64

A ``Snapshots`` record replaces the one before it: it lists all files that are recorded for its filter. A
``LeaseFlag`` does too; it is about no filter: leases of so many seconds may be out, 0: none are.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from bloomgate.filters import DIGEST_BYTES, FilterSpec, Growth, Segment
from bloomgate.filters.errors import DataDamaged
from bloomgate.filters.image import Fields, decode_body_spec, decode_spec, encode_body_spec, encode_spec

_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")
_ADD = struct.Struct("<IQ")
_FILE = struct.Struct("<QQQQId")
# A name is opened, renamed and deleted: it must not lead out of its folder.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# Seconds before or after 1970 that a date can tell, up to some year 6000.
_MOST_TIME = 2**37
# Seconds that a lease lasts at most: a start may have to wait for so long.
MOST_LEASE = 3600.0


@dataclass(frozen=True, slots=True)
class Create:
    """A filter begins to exist, empty, with its own seq as its id."""

    name: str
    spec: FilterSpec


@dataclass(frozen=True, slots=True)
class Drop:
    """A filter ceases to exist."""

    filter_id: int


@dataclass(frozen=True, slots=True)
class Add:
    """A segment's digests are set."""

    filter_id: int
    segment: Segment


@dataclass(frozen=True, slots=True)
class Grow:
    """A filter's next body begins to exist."""

    filter_id: int
    growth: Growth


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A snapshot on disk: its image says ``seq``; it holds every record of its filter up to ``stamp``.

    ``stamp`` moves ahead of ``seq`` while the filter is idle. ``time`` is when it was written, unix seconds.
    """

    name: str
    generation: int
    seq: int
    stamp: int
    size: int
    crc: int
    time: float


@dataclass(frozen=True, slots=True)
class Snapshots:
    """These files, newest last, are what a filter may be recovered from."""

    filter_id: int
    files: tuple[SnapshotFile, ...]


@dataclass(frozen=True, slots=True)
class LeaseFlag:
    """Leases may be out that last ``seconds`` at most, their margin included; 0: none are."""

    seconds: float


Record = Create | Drop | Add | Grow | Snapshots | LeaseFlag

KIND_CREATE, KIND_DROP, KIND_ADD, KIND_GROW, KIND_SNAPSHOTS, KIND_LEASE_FLAG = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, slots=True)
class Row:
    """A record as stored. ``filter_id`` is 0 for a LeaseFlag, and for a Create, whose seq stands in."""

    kind: int
    filter_id: int
    payload: bytes


def encode(record: Record) -> Row:
    """A record's bytes."""
    match record:
        case Add(filter_id, segment):
            return Row(KIND_ADD, filter_id, _ADD.pack(segment.body, segment.new_keys) + segment.digests)
        case Grow(filter_id, growth):
            return Row(KIND_GROW, filter_id, _U32.pack(growth.body) + encode_body_spec(growth.spec))
        case Create(name, spec):
            return Row(KIND_CREATE, 0, _text(name) + encode_spec(spec))
        case Drop(filter_id):
            return Row(KIND_DROP, filter_id, b"")
        case Snapshots(filter_id, files):
            parts = [_U8.pack(len(files))]
            for file in files:
                parts.append(_text(file.name))
                parts.append(
                    _FILE.pack(file.generation, file.seq, file.stamp, file.size, file.crc, file.time)
                )
            return Row(KIND_SNAPSHOTS, filter_id, b"".join(parts))
        case LeaseFlag(seconds):
            return Row(KIND_LEASE_FLAG, 0, _F64.pack(seconds))


def decode(row: Row, where: str) -> Record:
    """A record from its bytes. Raises DataDamaged(where, reason)."""
    fields = Fields(row.payload, where)
    if row.kind == KIND_ADD:
        body, new_keys = fields.unpack(_ADD)
        digests = fields.rest()
        if len(digests) % DIGEST_BYTES or new_keys > len(digests) // DIGEST_BYTES:
            raise DataDamaged(where, f"{new_keys} new keys in {len(digests)} bytes of digests")
        return Add(row.filter_id, Segment(body, digests, new_keys))
    if row.kind == KIND_CREATE:
        name = _take_text(fields)
        return Create(name, decode_spec(fields.rest(), where))
    record: Record
    if row.kind == KIND_GROW:
        (body,) = fields.unpack(_U32)
        record = Grow(row.filter_id, Growth(body, decode_body_spec(fields)))
    elif row.kind == KIND_DROP:
        record = Drop(row.filter_id)
    elif row.kind == KIND_SNAPSHOTS:
        files = []
        for _ in range(fields.unpack(_U8)[0]):
            name = _take_text(fields)
            if not _FILE_NAME.fullmatch(name):
                raise DataDamaged(where, f"{name!r} cannot be the name of a snapshot")
            generation, seq, stamp, size, crc, time = fields.unpack(_FILE)
            # Not a number is in no range.
            fields.judge("time", time, -_MOST_TIME // 4, _MOST_TIME)
            files.append(SnapshotFile(name, generation, seq, stamp, size, crc, time))
        record = Snapshots(row.filter_id, tuple(files))
    elif row.kind == KIND_LEASE_FLAG:
        (seconds,) = fields.unpack(_F64)
        fields.judge("seconds of a lease", seconds, 0, int(MOST_LEASE))
        record = LeaseFlag(seconds)
    else:
        raise DataDamaged(where, f"record kind {row.kind} is unknown")
    fields.end()
    return record


def _text(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data


def _take_text(fields: Fields) -> str:
    try:
        return fields.take(fields.unpack(_U16)[0]).decode()
    except UnicodeDecodeError:
        raise DataDamaged(fields.path, "a name is not UTF-8") from None
