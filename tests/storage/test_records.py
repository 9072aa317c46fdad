"""Journal records as bytes: what goes in comes out, what is not ours is refused, and the format stays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomgate.filters import BodySpec, DataDamaged, FilterSpec, Growth, HashScheme, OnFull, Segment
from bloomgate.filters.spec import make_hasher
from bloomgated.storage.records import (
    Add,
    Create,
    Drop,
    Grow,
    LeaseFlag,
    Record,
    Row,
    SnapshotFile,
    Snapshots,
    decode,
    encode,
)

SEEDED = settings(derandomize=True, deadline=None)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
IDS = st.integers(1, 2**63 - 1)
COUNTS = st.integers(1, 2**53)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)

bodies = st.builds(BodySpec, st.integers(1, 2**43), st.integers(1, 64), COUNTS)
hashers = st.one_of(
    U32.map(lambda seed: make_hasher(HashScheme.MURMUR3_X64_128, seed)),
    st.binary(min_size=16, max_size=16).map(lambda secret: make_hasher(HashScheme.BLAKE2B_128, secret)),
)
specs = st.builds(
    FilterSpec,
    capacity=COUNTS,
    error_rate=st.floats(1e-9, 0.5),
    on_full=st.sampled_from(OnFull),
    hasher=hashers,
    first_body=bodies,
    key_format=TEXT,
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    digests = draw(st.integers(0, 12).flatmap(lambda n: st.binary(min_size=16 * n, max_size=16 * n)))
    return Segment(draw(U32), digests, draw(st.integers(0, len(digests) // 16)))


files = st.builds(
    SnapshotFile,
    st.from_regex(r"[0-9a-f]{16}-[0-9]+-[0-9]+\.bgf", fullmatch=True),
    U64, U64, U64, U64, U32,
    st.floats(-(2**35), 2**37),
)  # fmt: skip
records = st.one_of(
    st.builds(Create, TEXT, specs),
    st.builds(Drop, IDS),
    st.builds(Add, IDS, segments()),
    st.builds(Grow, IDS, st.builds(Growth, U32, bodies)),
    st.builds(Snapshots, IDS, st.lists(files, max_size=4).map(tuple)),
)


@given(records)
@SEEDED
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    """Encoding and decoding any record of any kind gives an equal one."""
    assert decode(encode(record), "here") == record


@given(records)
@SEEDED
def test_equal_records_give_equal_bytes(record: Record) -> None:
    """Decoding and encoding again changes no byte."""
    row = encode(record)
    again = decode(row, "here")
    assert encode(again) == row


@given(st.integers(-1, 300), st.binary(max_size=300))
@settings(SEEDED, max_examples=400)
def test_arbitrary_bytes_are_a_record_or_damaged(kind: int, payload: bytes) -> None:
    """Bytes that are no record of that kind raise DataDamaged with where they came from, nothing else."""
    _record_or_damaged(Row(kind, 7, payload))


@given(records, st.data())
@settings(SEEDED, max_examples=400)
def test_damaged_records_are_a_record_or_damaged(record: Record, data: st.DataObject) -> None:
    """A record that is cut, lengthened or altered raises DataDamaged, or is another whole record."""
    row = encode(record)
    payload = bytearray(row.payload)
    if payload:
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))] + data.draw(st.binary(max_size=5))
    _record_or_damaged(Row(data.draw(st.sampled_from((row.kind, 1, 2, 3, 4, 5, 6))), 7, bytes(payload)))


def _record_or_damaged(row: Row) -> None:
    try:
        record = decode(row, "the place")
    except DataDamaged as error:
        record, damage = None, error
    if record is not None:
        assert encode(record).payload == row.payload
    else:
        assert (damage.path, bool(damage.reason)) == ("the place", True)


@given(records, st.integers(0, 2**16))
@SEEDED
def test_every_cut_of_a_record_is_refused(record: Record, at: int) -> None:
    """No record is the beginning of another one, but for an Add, whose end its row's checksum covers."""
    row = encode(record)
    if isinstance(record, Add) or not row.payload:
        return
    with pytest.raises(DataDamaged):
        decode(Row(row.kind, row.filter_id, row.payload[: at % len(row.payload)]), "here")


SPEC = FilterSpec(
    capacity=1000,
    error_rate=0.01,
    on_full=OnFull.GROW,
    hasher=make_hasher(HashScheme.MURMUR3_X64_128, 0x01020304),
    first_body=BodySpec(10051, 7, 1000),
    key_format="e-mail, lower case",
)
KEYED = FilterSpec(
    capacity=5,
    error_rate=0.5,
    on_full=OnFull.REJECT,
    hasher=make_hasher(HashScheme.BLAKE2B_128, bytes(range(16))),
    first_body=BodySpec(1024, 1, 5),
)
# Journals that are out there hold these bytes: lines are added, never changed.
GOLDEN: list[tuple[Record, int, int, str]] = [
    (
        Create("fraud", SPEC),
        1,
        0,
        "0500 6672617564"
        "01 01 01 04 04030201 e803000000000000 7b14ae47e17a843f"
        "4327000000000000 07000000 e803000000000000"
        "1200 652d6d61696c2c206c6f7765722063617365",
    ),
    (
        Create("ü", KEYED),
        1,
        0,
        "0200 c3bc"
        "01 02 02 10 000102030405060708090a0b0c0d0e0f 0500000000000000 000000000000e03f"
        "0004000000000000 01000000 0500000000000000"
        "0000",
    ),
    (Drop(9), 2, 9, ""),
    (
        Add(9, Segment(1, bytes(range(32)), 2)),
        3,
        9,
        "01000000 0200000000000000 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    (Add(9, Segment(0, b"", 0)), 3, 9, "00000000 0000000000000000"),
    (
        Grow(9, Growth(1, BodySpec(20103, 8, 2000))),
        4,
        9,
        "01000000 874e000000000000 08000000 d007000000000000",
    ),
    (Snapshots(9, ()), 5, 9, "00"),
    (LeaseFlag(2.5), 6, 0, "0000000000000440"),
    (LeaseFlag(0.0), 6, 0, "0000000000000000"),
    (
        Snapshots(
            9,
            (
                SnapshotFile("0000000000000009-1-1.bgf", 1, 100, 120, 1300, 0xDEADBEEF, 1700000000.5),
                SnapshotFile("b", 2, 3, 4, 5, 6, 0.0),
            ),
        ),
        5,
        9,
        "02"
        "1800 303030303030303030303030303030392d312d312e626766"
        "0100000000000000 6400000000000000 7800000000000000 1405000000000000 efbeadde 00002040fc54d941"
        "0100 62"
        "0200000000000000 0300000000000000 0400000000000000 0500000000000000 06000000 0000000000000000",
    ),
]


@pytest.mark.parametrize(("record", "kind", "filter_id", "payload"), GOLDEN)
def test_the_format_does_not_drift(record: Record, kind: int, filter_id: int, payload: str) -> None:
    """Every kind of record has the bytes that it had in the first version, and they still read the same."""
    row = Row(kind, filter_id, bytes.fromhex(payload))
    assert encode(record) == row
    assert decode(row, "here") == record


def test_an_unknown_kind_is_damaged() -> None:
    """Kinds are appended: one that this program does not know is refused, not skipped."""
    for kind in (0, 7, 255):
        with pytest.raises(DataDamaged, match="unknown"):
            decode(Row(kind, 9, b""), "here")


def test_an_add_cannot_count_more_new_keys_than_it_has() -> None:
    """The number of new keys is judged, since replay adds it without counting."""
    with pytest.raises(DataDamaged, match="new keys"):
        decode(Row(3, 9, encode(Add(9, Segment(0, bytes(32), 3))).payload), "here")
    with pytest.raises(DataDamaged, match="digests"):
        decode(Row(3, 9, encode(Add(9, Segment(0, bytes(33), 1))).payload), "here")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../b", "/etc/b", "a/b", "a\0b", "a\nb", ".hidden", "é", "-b"]
)
def test_a_snapshots_name_stays_in_its_folder(name: str) -> None:
    """It is opened, renamed and deleted: a record that names anything else is damaged."""
    row = encode(Snapshots(9, (SnapshotFile(name, 1, 2, 3, 4, 5, 6.0),)))
    with pytest.raises(DataDamaged, match="cannot be the name of a snapshot"):
        decode(row, "here")


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf, 1e300, -1e12])
def test_a_snapshots_time_is_a_date(time: float) -> None:
    """Else a listing of the filters could not be told."""
    row = encode(Snapshots(9, (SnapshotFile("b", 1, 2, 3, 4, 5, time),)))
    with pytest.raises(DataDamaged, match="time"):
        decode(row, "here")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 3601.0])
def test_a_lease_is_no_longer_than_a_start_may_wait(seconds: float) -> None:
    """A start waits for as long as the flag says."""
    with pytest.raises(DataDamaged, match="seconds of a lease"):
        decode(encode(LeaseFlag(seconds)), "here")
