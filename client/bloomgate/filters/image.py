"""The one binary form of a filter: snapshot file, lease bootstrap and export are the same bytes.

Version 1, all numbers little-endian, nothing aligned:

    prelude    8  magic 89 42 47 46 0d 0a 1a 0a      ("BGF" framed so that text transfers show)
               2  format version u16 = 1
               4  header length u32, from the first magic byte through the header CRC
    header     4  spec length u32, then the spec (below)
               8  generation u64
               8  seq u64                 every add up to here is inside, later ones may be
               8  added count u64         keys of all adds, repeated ones included
               4  number of bodies u32
             28   per body: bits u64, hashes u32, capacity u64, count u64
               4  CRC-32 of everything before
    bodies        ceil(bits / 8) bytes each, in order; the unused high bits of a last byte are 0
    trailer    4  CRC-32 of the bodies

    spec       1  kind u8 (1 Bloom)
               1  on_full u8 (1 grow, 2 reject, 3 degrade)
               1  hash scheme u8 (1 murmur3 x64 128, 2 keyed BLAKE2b 128)
               1  seed length u8 (4 or 16), then the seed or secret
               8  capacity u64
               8  error rate f64
              20  first body: bits u64, hashes u32, capacity u64
               2  key format length u16, then that much UTF-8

Equal content gives equal bytes. Reading judges everything before it allocates a body; any wrong byte is
DataDamaged with the path it was given.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from bloomgate.filters import sizing
from bloomgate.filters.bloom import BloomBody
from bloomgate.filters.errors import DataDamaged, ParameterError
from bloomgate.filters.growing import BloomFilter
from bloomgate.filters.hashing import HashScheme
from bloomgate.filters.sizing import BodySpec
from bloomgate.filters.spec import FilterSpec, Kind, OnFull, check_key_format, make_hasher

FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 20
MAX_BODIES = 64
MAX_COUNT = 2**53

_MAGIC = b"\x89BGF\r\n\x1a\n"
_PRELUDE = struct.Struct("<8sHI")
_U32 = struct.Struct("<I")
_COUNTS = struct.Struct("<QQQI")
_BODY_SPEC = struct.Struct("<QIQ")
_BODY = struct.Struct("<QIQQ")
_SPEC_HEAD = struct.Struct("<BBBB")
_SPEC_SIZE = struct.Struct("<Qd")
_U16 = struct.Struct("<H")
# Larger headers than the largest spec and 64 bodies can fill are not ours.
_MAX_HEADER = 4096


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """A filter's spec, counts and body list at one moment; its bodies may be read later.

    Bits only ever go from 0 to 1, so an image cut from it holds every key of that moment, and perhaps more.
    """

    spec: FilterSpec
    bodies: tuple[BloomBody, ...]
    counts: tuple[int, ...]
    added_count: int
    generation: int = 0
    seq: int = 0

    @property
    def body_bytes(self) -> int:
        """Bytes of all bodies together."""
        return sum(body.spec.nbytes for body in self.bodies)


@dataclass(frozen=True, slots=True)
class Image:
    """A filter read from an image, with the generation and seq that the image names."""

    filter: BloomFilter
    generation: int
    seq: int
    crc: int
    """CRC-32 of the bodies."""


def freeze(bloom: BloomFilter, generation: int = 0, seq: int = 0) -> ImageHeader:
    """Take down what an image of ``bloom`` says of it at this moment."""
    # Read once: the filter may grow meanwhile, in another thread.
    bodies = bloom.bodies
    counts = tuple(body.count for body in bodies)
    return ImageHeader(bloom.spec, bodies, counts, bloom.added_count, generation, seq)


def image_bytes(header: ImageHeader) -> int:
    """How many bytes the image of ``header`` has."""
    return len(_encode_header(header)) + sum(body.spec.nbytes for body in header.bodies) + _U32.size


def image_chunks(header: ImageHeader, chunk_bytes: int = 0) -> Iterator[bytes]:
    """Yield an image's bytes, the header and then chunks of at most ``chunk_bytes``, reading live bodies.

    0: of CHUNK_BYTES.
    """
    chunk_bytes = chunk_bytes or CHUNK_BYTES
    yield _encode_header(header)
    crc = 0
    for body in header.bodies:
        for start in range(0, body.array.size, chunk_bytes):
            # Copied once, then checksummed and handed out from that copy: an add may change the bits between.
            chunk = body.array[start : start + chunk_bytes].tobytes()
            crc = zlib.crc32(chunk, crc)
            yield chunk
    yield _U32.pack(crc)


def to_bytes(bloom: BloomFilter, generation: int = 0, seq: int = 0) -> bytes:
    """The image of a filter."""
    return b"".join(image_chunks(freeze(bloom, generation, seq)))


def from_bytes(data: bytes, path: str = "image") -> Image:
    """Read an image. Raises DataDamaged(path, reason)."""
    return read_image(io.BytesIO(data), len(data), path)


def read_image(stream: BinaryIO, size: int, path: str) -> Image:
    """Read an image of exactly ``size`` bytes from ``stream``. Raises DataDamaged(path, reason).

    Nothing is allocated for a body before the header is proven and ``size`` agrees with it.
    """
    header = read_header(stream, path)
    start = stream.tell()
    if size != start + header.body_bytes + _U32.size:
        raise DataDamaged(path, f"{size} bytes, its header asks for {start + header.body_bytes + _U32.size}")
    crc = 0
    bodies = []
    for spec, count in header.bodies:
        array = np.empty(spec.nbytes, np.uint8)
        view = memoryview(array)  # type: ignore[arg-type]
        for at in range(0, spec.nbytes, CHUNK_BYTES):
            part = view[at : at + CHUNK_BYTES]
            if stream.readinto(part) != len(part):  # type: ignore[attr-defined]
                raise DataDamaged(path, "ended inside a body")
            crc = zlib.crc32(part, crc)
        if spec.bits % 8 and array[-1] >> (spec.bits % 8):
            raise DataDamaged(path, "a bit beyond the last is set")
        bodies.append(BloomBody(spec, array, count))
    if stream.read(_U32.size) != _U32.pack(crc):
        raise DataDamaged(path, "body checksum does not match")
    bloom = BloomFilter.of(header.spec, bodies, header.added_count)
    return Image(bloom, header.generation, header.seq, crc)


@dataclass(frozen=True, slots=True)
class ParsedHeader:
    """A header as read: every number judged, nothing allocated."""

    spec: FilterSpec
    bodies: tuple[tuple[BodySpec, int], ...]
    added_count: int
    generation: int
    seq: int

    @property
    def body_bytes(self) -> int:
        """Bytes that the bodies take in the image."""
        return sum(spec.nbytes for spec, _ in self.bodies)


def read_header(stream: BinaryIO, path: str) -> ParsedHeader:
    """Read and judge an image's header, leaving ``stream`` at the first body. Raises DataDamaged."""
    prelude = stream.read(_PRELUDE.size)
    if len(prelude) < _PRELUDE.size:
        raise DataDamaged(path, "too short for an image")
    magic, version, length = _PRELUDE.unpack(prelude)
    if magic != _MAGIC:
        raise DataDamaged(path, "not a filter image")
    if version != FORMAT_VERSION:
        raise DataDamaged(path, f"format version {version}; this program reads {FORMAT_VERSION}")
    if not _PRELUDE.size < length <= _MAX_HEADER:
        raise DataDamaged(path, f"header length {length} is out of range")
    rest = stream.read(length - _PRELUDE.size)
    if len(rest) != length - _PRELUDE.size:
        raise DataDamaged(path, "ended inside its header")
    content, crc = rest[: -_U32.size], rest[-_U32.size :]
    if crc != _U32.pack(zlib.crc32(content, zlib.crc32(prelude))):
        raise DataDamaged(path, "header checksum does not match")
    return _parse_header(Fields(content, path))


def _encode_header(header: ImageHeader) -> bytes:
    spec = encode_spec(header.spec)
    parts = [_U32.pack(len(spec)), spec]
    parts.append(_COUNTS.pack(header.generation, header.seq, header.added_count, len(header.bodies)))
    for body, count in zip(header.bodies, header.counts, strict=True):
        parts.append(_BODY.pack(body.spec.bits, body.spec.hashes, body.spec.capacity, count))
    content = b"".join(parts)
    content = _PRELUDE.pack(_MAGIC, FORMAT_VERSION, _PRELUDE.size + len(content) + _U32.size) + content
    return content + _U32.pack(zlib.crc32(content))


def _parse_header(fields: Fields) -> ParsedHeader:
    spec = decode_spec(fields.take(fields.unpack(_U32)[0]), fields.path)
    generation, seq, added_count, body_count = fields.unpack(_COUNTS)
    fields.judge("added count", added_count, 0, MAX_COUNT)
    fields.judge("number of bodies", body_count, 1, MAX_BODIES)
    bodies = []
    for _ in range(body_count):
        bits, hashes, capacity, count = fields.unpack(_BODY)
        fields.judge("count", count, 0, MAX_COUNT)
        bodies.append((_judge_body(fields, bits, hashes, capacity), count))
    fields.end()
    if bodies[0][0] != spec.first_body:
        raise DataDamaged(fields.path, "its first body is not the one its spec asks for")
    return ParsedHeader(spec, tuple(bodies), added_count, generation, seq)


def encode_body_spec(spec: BodySpec) -> bytes:
    """A body spec as bytes, as in the spec's first body."""
    return _BODY_SPEC.pack(spec.bits, spec.hashes, spec.capacity)


def decode_body_spec(fields: Fields) -> BodySpec:
    """Take and judge a body spec. Raises DataDamaged."""
    return _judge_body(fields, *fields.unpack(_BODY_SPEC))


def _judge_body(fields: Fields, bits: int, hashes: int, capacity: int) -> BodySpec:
    fields.judge("bits", bits, 1, sizing.MAX_BITS)
    fields.judge("hashes", hashes, 1, sizing.MAX_HASHES)
    fields.judge("body capacity", capacity, 1, MAX_COUNT)
    return BodySpec(bits, hashes, capacity)


def encode_spec(spec: FilterSpec) -> bytes:
    """A filter's spec as bytes; see the format at the top."""
    seed, key_format = spec.hasher.seed_bytes, spec.key_format.encode()
    return b"".join(
        (
            _SPEC_HEAD.pack(spec.kind, spec.on_full, spec.hasher.scheme, len(seed)),
            seed,
            _SPEC_SIZE.pack(spec.capacity, spec.error_rate),
            encode_body_spec(spec.first_body),
            _U16.pack(len(key_format)),
            key_format,
        )
    )


def decode_spec(data: bytes, path: str) -> FilterSpec:
    """Read and judge a spec. Raises DataDamaged(path, reason)."""
    fields = Fields(data, path)
    kind, on_full, scheme, seed_length = fields.unpack(_SPEC_HEAD)
    seed_bytes = fields.take(seed_length)
    capacity, error_rate = fields.unpack(_SPEC_SIZE)
    first_body = decode_body_spec(fields)
    key_format = fields.take(fields.unpack(_U16)[0])
    fields.end()
    fields.judge("capacity", capacity, 1, MAX_COUNT)
    try:
        # A sized filter's rate is what its bits give, so only a probability is asked for here.
        if not 0.0 <= error_rate <= 1.0:
            raise ParameterError("error rate", error_rate, "a number from 0 to 1")
        if on_full == OnFull.GROW:
            # Growth plans bodies for shares of it.
            sizing.check_error_rate(error_rate)
        murmur = scheme == HashScheme.MURMUR3_X64_128 and seed_length == _U32.size
        return FilterSpec(
            capacity=capacity,
            error_rate=error_rate,
            on_full=OnFull(on_full),
            hasher=make_hasher(scheme, int.from_bytes(seed_bytes, "little") if murmur else seed_bytes),
            first_body=first_body,
            key_format=check_key_format(key_format.decode()),
            kind=Kind(kind),
        )
    except ValueError as error:
        raise DataDamaged(path, f"spec: {error}") from None


class Fields:
    """Takes fields off untrusted bytes from the front. Every failure is DataDamaged(path, reason)."""

    __slots__ = ("_at", "_data", "path")

    def __init__(self, data: bytes, path: str) -> None:
        self._data = data
        self._at = 0
        self.path = path

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes."""
        field = self._data[self._at : self._at + length]
        if len(field) != length:
            raise DataDamaged(self.path, f"ended inside a field of {length} bytes")
        self._at += length
        return field

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        """The next fields, as ``layout`` says."""
        return layout.unpack(self.take(layout.size))

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._data):
            raise DataDamaged(self.path, f"{len(self._data) - self._at} bytes too many")

    def judge(self, name: str, value: float, least: int, most: int) -> None:
        """``value`` must lie in the range."""
        if not least <= value <= most:
            raise DataDamaged(self.path, f"{name} {value} is out of range {least}..{most}")
