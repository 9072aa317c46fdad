"""Valid bytes made somewhat wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Mend = Callable[[bytearray, random.Random], None]
"""Corrects in place what would be refused first, such as a checksum."""

MOST_BYTES = 1 << 16
# Of the inputs this share is mended: the rest tries the checks themselves.
MENDED = 0.85
_NUMBERS = [
    0, 1, 2, 3, 7, 8, 16, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 4097, 2**15, 2**16 - 1, 2**16,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 10**9, 2**43, 2**43 + 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
    2**64 - 1,
    # As floats: 1, minus 0, not a number, the infinities.
    0x3FF0000000000000, 0x8000000000000000, 0x7FF8000000000001, 0x7FF0000000000000, 0xFFF0000000000000,
]  # fmt: skip


def mutated(rng: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes], mend: Mend) -> bytes:
    """One of ``seeds`` after a few changes: bits, bytes, numbers, lengths, splices, ``tokens`` put in."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4, 6, 10))):
        _CHANGES[rng.randrange(len(_CHANGES) if tokens else len(_CHANGES) - 2)](rng, data, seeds, tokens)
    del data[MOST_BYTES:]
    if rng.random() < MENDED:
        mend(data, rng)
    return bytes(data)


def _at(rng: random.Random, data: bytearray) -> int:
    # Half of the time near the front, where headers are.
    most = len(data) if rng.random() < 0.5 else min(len(data), 128)
    return rng.randrange(most + 1)


def _flip(rng: random.Random, data: bytearray, *_: object) -> None:
    if data:
        data[_at(rng, data) % len(data)] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, data: bytearray, *_: object) -> None:
    if data:
        data[_at(rng, data) % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(rng: random.Random, data: bytearray, *_: object) -> None:
    width = rng.choice((1, 2, 4, 8))
    number = rng.choice(_NUMBERS) % 2 ** (8 * width)
    at = _at(rng, data)
    data[at : at + width] = number.to_bytes(width, rng.choice(("little", "little", "big")))


def _near(rng: random.Random, data: bytearray, *_: object) -> None:
    # A number that is there, somewhat larger or smaller.
    width, at = rng.choice((1, 2, 4, 8)), _at(rng, data)
    number = int.from_bytes(data[at : at + width], "little") + rng.randint(-9, 9)
    data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")


def _cut(rng: random.Random, data: bytearray, *_: object) -> None:
    del data[_at(rng, data) :]


def _remove(rng: random.Random, data: bytearray, *_: object) -> None:
    at = _at(rng, data)
    del data[at : at + rng.choice((1, 1, 2, 4, 8, 16, rng.randrange(64)))]


def _insert(rng: random.Random, data: bytearray, *_: object) -> None:
    at = _at(rng, data)
    data[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4, 8, 16, rng.randrange(64))))


def _repeat(rng: random.Random, data: bytearray, *_: object) -> None:
    at, length = _at(rng, data), rng.randrange(1, 64)
    data[at:at] = bytes(data[at : at + length]) * rng.choice((1, 1, 2, 3, 40))


def _splice(rng: random.Random, data: bytearray, seeds: Sequence[bytes], _: object) -> None:
    other = rng.choice(seeds)
    if other:
        start = rng.randrange(len(other))
        piece = other[start : start + rng.randrange(1, 200)]
        at = _at(rng, data)
        data[at : at + (len(piece) if rng.random() < 0.5 else 0)] = piece


def _token(rng: random.Random, data: bytearray, _: object, tokens: Sequence[bytes]) -> None:
    at = _at(rng, data)
    data[at:at] = rng.choice(tokens)


_CHANGES: list[Callable[[random.Random, bytearray, Sequence[bytes], Sequence[bytes]], None]] = [
    _flip, _flip, _byte, _byte, _number, _number, _near, _cut, _remove, _insert, _repeat, _splice,
    _token, _token,
]  # fmt: skip
