"""What reads bytes that others wrote, each as a function of bytes that raises only where something is wrong.

Something is wrong where an input gives another exception than the one that is promised, takes memory beyond
a bound that its length sets, or is read and not written again as the same bytes.
"""

from __future__ import annotations

import io
import os
import random
import struct
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bloomgate.filters import BloomFilter, BodySpec, FilterFull, FilterSpec, Growth, HashScheme, Segment
from bloomgate.filters.errors import DataDamaged
from bloomgate.filters.image import Image, from_bytes, read_header, to_bytes
from bloomgate.filters.image import freeze as freeze_image
from bloomgate.v1 import filters_pb2
from bloomgated.errors import JournalDamaged
from bloomgated.storage.mark import CREATING, IN_USE, Mark, MarkFile, read_mark
from bloomgated.storage.records import (
    Add,
    Create,
    Drop,
    Grow,
    Record,
    Row,
    SnapshotFile,
    Snapshots,
    decode,
    encode,
)

from .mutating import Mend

GOLDEN = Path(__file__).parents[1] / "golden"
Run = Callable[[bytes], None]
# Bytes that reading may take beside three times the input: Python's own objects.
SLACK = 256 << 10
_PRELUDE = b"\x89BGF\r\n\x1a\n\x01\x00"


def leave(_data: bytearray, _rng: random.Random) -> None:
    """Nothing to mend."""


@dataclass(frozen=True)
class Target:
    """A reader of bytes: ``open`` gives the function, and what it needs is gone when that is closed."""

    name: str
    open: Callable[[], AbstractContextManager[Run]]
    seeds: Callable[[], list[bytes]]
    inputs: int
    """How many of them `make fuzz` tries."""
    mend: Mend = leave
    tokens: Sequence[bytes] = ()


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that is gone at the end; in memory, where the machine has such."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def _told(damage: DataDamaged | JournalDamaged, path: str) -> None:
    assert damage.path == path
    assert damage.reason


# -- images


def image_loader(data: bytes) -> None:
    """A filter or DataDamaged; a filter that loads can be asked, added to, and gives the same bytes."""
    bound = 3 * len(data) + SLACK
    # Measuring costs more than reading: one in eight.
    measured = zlib.crc32(data) % 8 == 0
    if measured:
        tracemalloc.start()
    try:
        image = from_bytes(data, "here")
    except DataDamaged as damage:
        _told(damage, "here")
        return
    finally:
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= bound, f"{peak} bytes for an image of {len(data)}"
    header = read_header(io.BytesIO(data), "here")
    assert header.body_bytes < len(data)
    _used(image, data)


def _used(image: Image, data: bytes) -> None:
    bloom = image.filter
    assert to_bytes(bloom, image.generation, image.seq) == data
    assert 0.0 <= bloom.expected_error_rate <= 1.0
    assert bloom.bits_set <= bloom.bits
    digests = data[:64]
    bloom.might_contain_digests(digests)
    try:
        plan = bloom.plan_add(digests, max_growth_bytes=1 << 20)
    except FilterFull:
        return
    bloom.apply(plan)
    assert all(bloom.might_contain_digests(digests))
    freeze_image(bloom)


def image_seeds() -> list[bytes]:
    """The golden images, and small filters of every kind."""
    seeds = [path.read_bytes() for path in sorted(GOLDEN.glob("v1-*.bloom"))]
    secret = bytes(range(16))
    for bloom in (
        BloomFilter.sized(1, 1, seed=0),
        BloomFilter.sized(67, 2, seed=0),
        BloomFilter.sized(64, 64, hash_scheme=HashScheme.BLAKE2B_128, seed=secret),
        BloomFilter(10, 0.5, on_full="reject", seed=1),
        BloomFilter(1, 1e-9, on_full="grow", seed=1),
        BloomFilter(20, 0.1, on_full="grow", hash_scheme=HashScheme.BLAKE2B_128, seed=secret),
        BloomFilter.of(FilterSpec.plan(5, 0.01, on_full="degrade", seed=7, key_format="ä")),
    ):
        bloom.add_many([b"%d" % n for n in range(4)])
        seeds.append(to_bytes(bloom, generation=3, seq=2**40))
    growing = BloomFilter(2, 0.5, on_full="grow", seed=5)
    growing.add_many([b"%d" % n for n in range(60)])
    seeds.append(to_bytes(growing))
    return seeds


def mend_image(data: bytearray, rng: random.Random) -> None:
    """Correct lengths and checksums, so that what is inside gets judged."""
    if len(data) < 60:
        return
    if rng.random() < 0.9:
        data[:10] = _PRELUDE
    spec_length = int.from_bytes(data[14:18], "little")
    bodies_at = 18 + spec_length + 24
    first_at = 18 + 4 + data[21] + 16
    if rng.random() < 0.5 and bodies_at + 24 < len(data):
        data[bodies_at + 4 : bodies_at + 24] = data[first_at : first_at + 20]
    if rng.random() < 0.7 and bodies_at + 4 < len(data):
        bodies = int.from_bytes(data[bodies_at : bodies_at + 4], "little")
        length = bodies_at + 4 + 28 * bodies + 4
        if length <= len(data):
            data[10:14] = length.to_bytes(4, "little")
            sizes = [
                (int.from_bytes(data[at : at + 8], "little") + 7) // 8
                for at in range(bodies_at + 4, length - 4, 28)
            ]
            if rng.random() < 0.7 and sum(sizes) < 1 << 15:
                whole = length + sum(sizes) + 4
                data.extend(bytes(max(0, whole - len(data))))
                del data[whole:]
    length = int.from_bytes(data[10:14], "little")
    if 18 <= length <= len(data) - 4:
        data[length - 4 : length] = zlib.crc32(data[: length - 4]).to_bytes(4, "little")
        data[-4:] = zlib.crc32(data[length:-4]).to_bytes(4, "little")


# -- journal payloads


def journal_payload(data: bytes) -> None:
    """A record or DataDamaged; a record is written again as the same bytes. The first byte is the kind."""
    row = Row(data[0] % 8 if data else 0, 0 if data[:1] == b"\1" else 7, data[1:])
    try:
        record = decode(row, "here")
    except DataDamaged as damage:
        _told(damage, "here")
        return
    assert encode(record).payload == row.payload
    if isinstance(record, Snapshots):
        for file in record.files:
            # As a listing tells it.
            filters_pb2.FilterStats().snapshot_time.FromNanoseconds(int(file.time * 1e9))
            assert (Path("folder") / file.name).parent == Path("folder")


def payload_seeds() -> list[bytes]:
    """A few of every kind of record."""
    plain = FilterSpec.plan(1000, 0.01, seed=7, key_format="e-mail")
    keyed = FilterSpec.plan(
        1, 0.5, on_full="reject", hash_scheme=HashScheme.BLAKE2B_128, seed=bytes(range(16))
    )
    file = SnapshotFile("0000000000000009-1-1.bgf", 1, 100, 120, 1300, 0xDEADBEEF, 1.7e9)
    records: list[Record] = [
        Create("fraud", plain),
        Create("ü", keyed),
        Drop(7),
        Add(7, Segment(0, b"", 0)),
        Add(7, Segment(1, bytes(range(48)), 2)),
        Grow(7, Growth(1, BodySpec(20103, 8, 2000))),
        Snapshots(7, ()),
        Snapshots(7, (file, file)),
    ]
    return [bytes([row.kind]) + row.payload for row in map(encode, records)]


# -- the mark


@contextmanager
def mark_reader() -> Iterator[Run]:
    """A mark or JournalDamaged; a mark is written again as the same bytes."""
    with folder() as directory:
        path, again = directory / "mark", directory / "again"

        def run(data: bytes) -> None:
            path.write_bytes(data)
            try:
                mark = read_mark(path)
            except JournalDamaged as damage:
                _told(damage, str(path))
                return
            _write_mark(again, mark)
            assert again.read_bytes() == data

        yield run


def _write_mark(path: Path, mark: Mark) -> None:
    file = MarkFile(path, mark.journal_id)
    try:
        file.write(mark.state, mark.seq, mark.row_crc)
    finally:
        file.close()


def mark_seeds() -> list[bytes]:
    """One of each state."""
    seeds = []
    with folder() as directory:
        for state, seq in ((CREATING, 0), (IN_USE, 12), (IN_USE, 2**63)):
            _write_mark(directory / "mark", Mark(state, bytes(range(16)), seq, 0xDEADBEEF))
            seeds.append((directory / "mark").read_bytes())
    return seeds


def mend_mark(data: bytearray, rng: random.Random) -> None:
    """Correct the length, mostly, and the checksum."""
    if rng.random() < 0.8:
        data.extend(bytes(max(0, 64 - len(data))))
        del data[64:]
    if len(data) >= 4:
        data[-4:] = struct.pack("<I", zlib.crc32(data[:-4]))


@contextmanager
def _plain(run: Run) -> Iterator[Run]:
    yield run


READERS = [
    Target("image loader", lambda: _plain(image_loader), image_seeds, 300_000, mend_image),
    Target("journal payloads", lambda: _plain(journal_payload), payload_seeds, 350_000),
    Target("mark file", mark_reader, mark_seeds, 200_000, mend_mark),
]
