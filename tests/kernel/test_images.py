"""Images: one binary form, equal for equal content, kept for ever, and proven before it is believed."""

from __future__ import annotations

import hashlib
import io
import math
import runpy
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from bloomgate.filters import (
    BloomFilter,
    BodySpec,
    DataDamaged,
    FilterSpec,
    HashScheme,
    Kind,
    OnFull,
    image,
)

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDEN_SHA256 = {
    "v1-fixed.bloom": "f154564e77b61fedeb1a7e7feccdb50aaa0555cbdbf8bfda16b8a071ea24ce55",
    "v1-grown.bloom": "3519a616bfd31eb5629e66a303d9e692cac67ba2fab052dd0ca43fcf90f70996",
    "v1-keyed.bloom": "7751450ee30dbf3cfc9a8826f874d5382c4013a3a8de22be873d6672eb926518",
    "v1-sized.bloom": "41164152c0ac0df71d76bf229bfccfe0efaf46e8cedd142dc771bd5578ae149b",
}


# -- what stays for ever


@pytest.mark.parametrize("name", GOLDEN_SHA256)
def test_golden_images_load_and_encode_to_the_same_bytes(name: str) -> None:
    """Every image ever released loads, holds its keys, and is written again to the byte."""
    data = (GOLDEN / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == GOLDEN_SHA256[name], "golden images are never rewritten"
    read = image.from_bytes(data, name)
    assert image.to_bytes(read.filter, read.generation, read.seq) == data
    keys = [f"key-{n}" for n in range(200)]
    assert all(read.filter.might_contain_many(keys))
    assert all(key in read.filter for key in keys)
    assert read.filter.added_count == 210
    assert read.seq == 1000 * read.generation


def test_golden_images_can_be_made_again() -> None:
    """Hashing, sizing and the format have not moved: making the images anew gives the files kept."""
    made = runpy.run_path(str(GOLDEN / "make_images.py"))["images"]()
    assert made == {name: (GOLDEN / name).read_bytes() for name in GOLDEN_SHA256}


def test_golden_images_say_what_they_are() -> None:
    """Kind, policy, scheme, seed, chain and note are read back as they were written."""
    read = {name: image.from_bytes((GOLDEN / name).read_bytes()).filter for name in GOLDEN_SHA256}
    fixed, grown, keyed, sized = (read[f"v1-{word}.bloom"] for word in ("fixed", "grown", "keyed", "sized"))
    assert (fixed.spec.kind, fixed.spec.on_full) == (Kind.BLOOM, OnFull.REJECT)
    assert (fixed.spec.hasher.seed, fixed.spec.key_format) == (20_010_911, "key-<number>, ä in UTF-8")
    assert [body.count for body in grown.bodies] == [50, 100, 50]
    assert (keyed.spec.hasher.scheme, keyed.spec.on_full) == (HashScheme.BLAKE2B_128, OnFull.DEGRADE)
    assert keyed.spec.hasher.seed == bytes(range(16))
    assert (sized.bits, sized.hashes, sized.spec.hasher.seed) == (2001, 7, 2**32 - 1)


def test_equal_content_gives_equal_bytes() -> None:
    """Two filters made apart by the same adds have one image; another seq or key makes another."""
    one, other = (BloomFilter(100, seed=1) for _ in range(2))
    for bloom in (one, other):
        bloom.add_many([b"a", b"b"])
    assert one.to_bytes() == other.to_bytes() == image.to_bytes(one, 0, 0)
    assert image.to_bytes(one, seq=1) != one.to_bytes()
    other.add(b"c")
    assert other.to_bytes() != one.to_bytes()


def test_chunks_are_bounded_and_make_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image comes in chunks of at most CHUNK_BYTES, and reads back in chunks just as well."""
    monkeypatch.setattr(image, "CHUNK_BYTES", 64)
    bloom = BloomFilter(50, 0.001, seed=1)
    bloom.add_many([b"%d" % n for n in range(200)])
    header = image.freeze(bloom, 3, 4)
    chunks = list(image.image_chunks(header))
    assert all(len(chunk) <= 64 for chunk in chunks[1:])
    assert header.body_bytes == bloom.memory_bytes == sum(map(len, chunks[1:-1]))
    read = image.from_bytes(b"".join(chunks))
    assert (read.generation, read.seq) == (3, 4)
    assert read.crc == zlib.crc32(b"".join(chunks[1:-1]))
    assert read.filter.to_bytes() == bloom.to_bytes()


def test_image_cut_while_adds_go_on_holds_every_key_of_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds and growths between two chunks leave the image whole: keys and counts of the cut."""
    monkeypatch.setattr(image, "CHUNK_BYTES", 32)
    bloom = BloomFilter(100, 0.01, seed=1)
    before = [b"before-%d" % n for n in range(150)]
    bloom.add_many(before)
    counts = [body.count for body in bloom.bodies]
    parts = []
    for number, chunk in enumerate(image.image_chunks(image.freeze(bloom, seq=9))):
        parts.append(chunk)
        bloom.add_many([b"meanwhile-%d-%d" % (number, n) for n in range(40)])
    assert len(bloom.bodies) > 2
    read = image.from_bytes(b"".join(parts))
    assert [body.count for body in read.filter.bodies] == counts
    assert (read.filter.added_count, read.seq) == (150, 9)
    assert all(read.filter.might_contain_many(before))


# -- what is damaged


def small_image() -> bytes:
    bloom = BloomFilter.sized(61, 3, seed=1)
    bloom.add_many([b"a", b"b"])
    return image.to_bytes(bloom, 1, 2)


def refused(data: bytes, reason: str = ".", size: int | None = None) -> DataDamaged:
    """Reading ``data`` must be DataDamaged with its path and reason, after allocating next to nothing."""
    tracemalloc.start()
    try:
        with pytest.raises(DataDamaged, match=reason) as caught:
            image.read_image(io.BytesIO(data), len(data) if size is None else size, "the/path")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000
    assert caught.value.path == "the/path"
    assert caught.value.reason
    assert str(caught.value) == f"the/path: {caught.value.reason}"
    return caught.value


def test_every_flipped_byte_is_noticed() -> None:
    """Whichever byte of an image is changed, and to whichever of these values, it is refused."""
    data = small_image()
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises(DataDamaged):
                image.from_bytes(bytes(damaged))


def test_every_truncation_is_noticed() -> None:
    """An image cut at any length is refused, also when the caller was told its full size."""
    data = small_image()
    for length in range(len(data)):
        refused(data[:length])
        refused(data[:length], size=len(data))


@pytest.mark.parametrize("extra", [b"\x00", b"x" * 100, small_image()])
def test_trailing_bytes_are_noticed(extra: bytes) -> None:
    """Whatever follows an image is refused."""
    refused(small_image() + extra, "its header asks for")


def spec_bytes(
    *,
    kind: int = 1,
    on_full: int = 3,
    scheme: int = 1,
    seed: bytes = b"\1\0\0\0",
    capacity: int = 14,
    error_rate: float = 0.125,
    first: tuple[int, int, int] = (61, 3, 14),
    key_format: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """A spec as image.py draws it, packed here by hand."""
    return (
        struct.pack("<BBBB", kind, on_full, scheme, len(seed))
        + seed
        + struct.pack("<Qd", capacity, error_rate)
        + struct.pack("<QIQ", *first)
        + struct.pack("<H", len(key_format))
        + key_format
        + tail
    )


def forged(
    *,
    version: int = 1,
    spec: bytes | None = None,
    spec_length: int | None = None,
    added: int = 2,
    count_of_bodies: int | None = None,
    bodies: tuple[tuple[int, int, int, int], ...] = ((61, 3, 14, 2),),
    tail: bytes = b"",
    buffer: bytes = bytes(8),
) -> bytes:
    """An image as drawn in image.py with both checksums right, whatever its fields say."""
    spec = spec_bytes() if spec is None else spec
    content = struct.pack("<I", len(spec) if spec_length is None else spec_length) + spec
    content += struct.pack("<QQQI", 1, 2, added, len(bodies) if count_of_bodies is None else count_of_bodies)
    content += b"".join(struct.pack("<QIQQ", *body) for body in bodies) + tail
    head = struct.pack("<8sHI", b"\x89BGF\r\n\x1a\n", version, 14 + len(content) + 4) + content
    return head + struct.pack("<I", zlib.crc32(head)) + buffer + struct.pack("<I", zlib.crc32(buffer))


def test_the_forger_knows_the_format() -> None:
    """Without a lie in it a forged image is accepted, so the refusals below are for the lies."""
    read = image.from_bytes(forged())
    assert read.filter.to_bytes()
    assert (read.generation, read.seq, read.filter.approximate_count) == (1, 2, 2)


HUGE = 2**62
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "unknown version": (lambda: forged(version=2), "format version 2"),
    "version 0": (lambda: forged(version=0), "format version 0"),
    "no bits": (lambda: forged(spec=spec_bytes(first=(0, 3, 14))), "bits 0 is out of range"),
    "huge bits": (lambda: forged(spec=spec_bytes(first=(HUGE, 3, 14))), "bits 4611686018427387904"),
    "no hashes": (lambda: forged(spec=spec_bytes(first=(61, 0, 14))), "hashes 0 is out of range"),
    "many hashes": (lambda: forged(spec=spec_bytes(first=(61, 10**9, 14))), "hashes 1000000000"),
    "no body capacity": (lambda: forged(spec=spec_bytes(first=(61, 3, 0))), "body capacity 0"),
    "no bits in the body": (lambda: forged(bodies=((0, 3, 14, 2),)), "bits 0 is out of range"),
    "huge bits in the body": (lambda: forged(bodies=((HUGE, 3, 14, 2),)), "bits 4611686018427387904"),
    "huge but allowed bits": (
        lambda: forged(spec=spec_bytes(first=(2**43, 3, 14)), bodies=((2**43, 3, 14, 2),)),
        "its header asks for 10995116",
    ),
    "many hashes in the body": (lambda: forged(bodies=((61, 10**9, 14, 2),)), "hashes 1000000000"),
    "huge count": (lambda: forged(bodies=((61, 3, 14, 2**64 - 1),)), "count 18446744073709551615"),
    "huge added count": (lambda: forged(added=2**64 - 1), "added count 18446744073709551615"),
    "no bodies": (lambda: forged(bodies=()), "number of bodies 0"),
    "endless bodies": (lambda: forged(count_of_bodies=2**32 - 1), "number of bodies 4294967295"),
    "missing bodies": (lambda: forged(count_of_bodies=2), "ended inside a field of 28 bytes"),
    "bytes after the bodies": (lambda: forged(tail=b"x"), "1 bytes too many"),
    "another first body": (lambda: forged(bodies=((60, 3, 14, 2),)), "its first body is not the one"),
    "spec longer than the header": (lambda: forged(spec_length=2**32 - 1), "ended inside a field"),
    "bytes after the spec": (lambda: forged(spec=spec_bytes(tail=b"xy")), "2 bytes too many"),
    "unknown kind": (lambda: forged(spec=spec_bytes(kind=77)), "spec: 77"),
    "unknown policy": (lambda: forged(spec=spec_bytes(on_full=0)), "spec: 0"),
    "unknown scheme": (lambda: forged(spec=spec_bytes(scheme=9)), "hash_scheme must be one of"),
    "no seed": (lambda: forged(spec=spec_bytes(seed=b"")), "seed must be"),
    "long seed": (lambda: forged(spec=spec_bytes(seed=bytes(16))), "seed must be"),
    "short secret": (lambda: forged(spec=spec_bytes(scheme=2, seed=bytes(4))), "seed must be"),
    "no capacity": (lambda: forged(spec=spec_bytes(capacity=0)), "capacity 0"),
    "huge capacity": (lambda: forged(spec=spec_bytes(capacity=2**64 - 1)), "capacity 18446744073709551615"),
    "NaN rate": (lambda: forged(spec=spec_bytes(error_rate=math.nan)), "error rate must be"),
    "infinite rate": (lambda: forged(spec=spec_bytes(error_rate=math.inf)), "error rate must be"),
    "negative rate": (lambda: forged(spec=spec_bytes(error_rate=-0.1)), "error rate must be"),
    "bad UTF-8": (lambda: forged(spec=spec_bytes(key_format=b"\xff\xfe")), "spec: 'utf-8' codec"),
    "long note": (lambda: forged(spec=spec_bytes(key_format=b"x" * 257)), "key_format must be at most 256"),
    "a bit beyond the last": (lambda: forged(buffer=bytes(7) + b"\x20"), "a bit beyond the last is set"),
    "another magic": (lambda: b"\x89PNG" + forged()[4:], "not a filter image"),
    "nothing": (lambda: b"", "too short for an image"),
    "a short header": (lambda: struct.pack("<8sHI", b"\x89BGF\r\n\x1a\n", 1, 14), "header length 14"),
    "an endless header": (
        lambda: struct.pack("<8sHI", b"\x89BGF\r\n\x1a\n", 1, 2**32 - 1),
        "header length 4294967295",
    ),
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_hostile_headers_are_refused_by_what_they_say(lie: str) -> None:
    """A header whose checksums are right is judged all the same, before a body is allocated for it."""
    make, reason = HOSTILE[lie]
    assert reason in refused(make()).reason


def test_short_body_is_noticed_while_reading() -> None:
    """A stream that ends inside a body is refused, whatever size it was said to have."""
    data = forged()
    refused(data[:-8], "ended inside a body", size=len(data))
    refused(data[:-2], "body checksum does not match", size=len(data))


def test_from_bytes_of_a_filter_names_the_image() -> None:
    """BloomFilter.from_bytes reads what to_bytes wrote, and refuses what nobody wrote."""
    bloom = BloomFilter(10, seed=1)
    bloom.add("a")
    copy = BloomFilter.from_bytes(bloom.to_bytes())
    assert "a" in copy
    assert "b" not in copy
    assert copy.add("b")
    with pytest.raises(DataDamaged) as caught:
        BloomFilter.from_bytes(b"not an image")
    assert caught.value.path == "image"


# -- specs on their own, as journals carry them


def test_specs_round_trip() -> None:
    """A spec read from its bytes is equal to the one written, for every policy and scheme."""
    for on_full in OnFull:
        for scheme in HashScheme:
            spec = FilterSpec.plan(1000, 0.001, on_full=on_full, hash_scheme=scheme, key_format="sku, ä")
            assert image.decode_spec(image.encode_spec(spec), "p") == spec
    sized = FilterSpec.sized(1, 64, seed=0)
    assert image.decode_spec(image.encode_spec(sized), "p") == sized


def test_body_specs_round_trip_inside_other_fields() -> None:
    """A body spec is taken off the front of a record, the rest is left, and limits are judged."""
    spec = BodySpec(1024, 7, 100)
    fields = image.Fields(image.encode_body_spec(spec) + b"rest", "p")
    assert image.decode_body_spec(fields) == spec
    assert fields.rest() == b"rest"
    fields.end()
    with pytest.raises(DataDamaged, match="hashes 65"):
        image.decode_body_spec(image.Fields(image.encode_body_spec(BodySpec(1024, 65, 100)), "p"))
    with pytest.raises(DataDamaged, match="ended inside a field of 20 bytes"):
        image.decode_body_spec(image.Fields(b"short", "p"))


def test_what_is_taken_down_is_of_one_moment() -> None:
    """A filter that grows meanwhile is taken down as it was, counts and bodies alike."""
    grown = BloomFilter(10, 0.01, seed=1)
    grown.add_many([b"%d" % n for n in range(25)])
    chains = [grown.bodies[:1], grown.bodies]

    class Growing:
        spec, added_count = grown.spec, 25

        @property
        def bodies(self) -> object:
            return chains.pop(0) if chains else grown.bodies

    header = image.freeze(Growing())  # type: ignore[arg-type]
    assert header.bodies == grown.bodies[:1]
    assert header.counts == (grown.bodies[0].count,)
