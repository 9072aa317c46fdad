"""What an attacker does to MurmurHash3 x64 128: it was made to be fast, and every step of it can be undone.

With the seed, a key for any digest is computed outright. Without it, keys can be made that have one digest
under every seed: a pair of blocks may take either of two values, and the state after it is the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import product

_MASK = 2**64 - 1
_C1, _C2 = 0x87C37B91114253D5, 0x4CF5AD432745937F
_ADD1, _ADD2 = 0x52DCE729, 0x38495AB5
_FIFTH = pow(5, -1, 2**64)
_BLOCK = struct.Struct("<QQ")
BLOCK_BYTES = 16


def _left(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) & _MASK


def _right(x: int, by: int) -> int:
    return _left(x, 64 - by)


def _mixed(k1: int, k2: int) -> tuple[int, int]:
    """A block's halves as they enter the state."""
    return _left(k1 * _C1 & _MASK, 31) * _C2 & _MASK, _left(k2 * _C2 & _MASK, 33) * _C1 & _MASK


def _unmixed(m1: int, m2: int) -> tuple[int, int]:
    """The block whose halves enter the state so."""
    k1 = _right(m1 * pow(_C2, -1, 2**64) & _MASK, 31) * pow(_C1, -1, 2**64) & _MASK
    k2 = _right(m2 * pow(_C1, -1, 2**64) & _MASK, 33) * pow(_C2, -1, 2**64) & _MASK
    return k1, k2


def _after(state: tuple[int, int], block: bytes) -> tuple[int, int]:
    h1, h2 = state
    m1, m2 = _mixed(*_BLOCK.unpack(block))
    h1 = ((_left(h1 ^ m1, 27) + h2) * 5 + _ADD1) & _MASK
    h2 = ((_left(h2 ^ m2, 31) + h1) * 5 + _ADD2) & _MASK
    return h1, h2


def _unfinished(x: int) -> int:
    x ^= x >> 33
    x = x * pow(0xC4CEB9FE1A85EC53, -1, 2**64) & _MASK
    x ^= x >> 33
    x = x * pow(0xFF51AFD7ED558CCD, -1, 2**64) & _MASK
    return x ^ x >> 33


def key_of(h1: int, h2: int, seed: int, first: bytes = b"") -> bytes:
    """The key that begins with ``first``, whole blocks, ends with one block more, and hashes to h1 and h2."""
    length = len(first) + BLOCK_BYTES
    h2 = (h2 - h1) & _MASK
    h1 = _unfinished((h1 - h2) & _MASK)
    h2 = _unfinished(h2)
    h2 = (h2 - h1) & _MASK
    h1 = (h1 - h2) & _MASK
    h1, h2 = h1 ^ length, h2 ^ length
    before1, before2 = seed, seed
    for start in range(0, len(first), BLOCK_BYTES):
        before1, before2 = _after((before1, before2), first[start : start + BLOCK_BYTES])
    m1 = _right(((h1 - _ADD1) * _FIFTH - before2) & _MASK, 27) ^ before1
    m2 = _right(((h2 - _ADD2) * _FIFTH - h1) & _MASK, 31) ^ before2
    return first + _BLOCK.pack(*_unmixed(m1, m2))


def colliding(pairs: int) -> Iterator[bytes]:
    """2^pairs keys of 32 * pairs bytes, all of one digest, whatever the seed.

    In the first block a bit of each half is turned so that it arrives as the top bit, where adding is the
    same as turning: the two cancel in the second half of the state. In the second block the top bit that is
    left in the first half is turned back.
    """
    zero = _mixed(0, 0)
    plain = bytes(2 * BLOCK_BYTES)
    turned = _BLOCK.pack(*_unmixed(zero[0] ^ 1 << 36, zero[1] ^ 1 << 32))
    turned += _BLOCK.pack(*_unmixed(zero[0] ^ 1 << 63, zero[1]))
    for parts in product((plain, turned), repeat=pairs):
        yield b"".join(parts)
