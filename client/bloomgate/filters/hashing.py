"""key -> digest -> positions.

A *digest* is 16 bytes: two little-endian 64-bit halves h1, h2. It depends on the hash scheme and its seed
alone, so it can be made in the caller's process, journalled, and applied to a body of any size. Schemes are
numbered in files and on the wire, and the list only ever grows.

Positions come from a digest by enhanced double hashing (Dillinger and Manolios 2004) in 64-bit arithmetic:

    position i = ((h1 + i*h2 + (i^3 - i)/6) mod 2^64) mod m          i = 0 .. k-1

stepped as h1 += h2; h2 += i + 1. The wrap at 2^64 matters: reducing h1 and h2 modulo m first leaves only m^2
distinct sequences, so that keys collide as wholes and the error rate rises above the formula by n/m^2. So
does an m that is a power of two, which divides 2^64; sizing.plan avoids those.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any

import mmh3
import numpy as np
from numpy.typing import NDArray

from bloomgate.filters.errors import InvalidKey, ParameterError

DIGEST_BYTES = 16
SECRET_BYTES = 16
MAX_SEED = 2**32 - 1
_MASK = 2**64 - 1
_PAIR = struct.Struct("<QQ")

Key = str | bytes
Halves = tuple[NDArray[np.uint64], NDArray[np.uint64]]


class HashScheme(enum.IntEnum):
    """How a key becomes a digest. Numbers are stored: append, never change."""

    MURMUR3_X64_128 = 1
    BLAKE2B_128 = 2


def encode_key(key: Key) -> bytes:
    """Return the key's bytes: ``str`` as UTF-8, nothing normalised.

    Only what this returns ever reaches mmh3: some of its functions kill the interpreter on a lone surrogate.
    """
    if isinstance(key, str):
        try:
            key = key.encode()
        except UnicodeEncodeError as error:
            raise InvalidKey(f"key cannot be encoded as UTF-8: {error.reason}") from None
    elif not isinstance(key, bytes):
        raise TypeError(f"a key is str or bytes, not {type(key).__name__}")
    if not key:
        raise InvalidKey("key must not be empty")
    return key


def encode_keys(keys: Sequence[Key]) -> Sequence[bytes]:
    """``encode_key`` of each key, in order."""
    # A list of one exact type is judged in C, which is three times as fast as a call for each key. Any other
    # list, and one with a bad key, takes the plain way, which raises for the first bad key.
    kinds: set[type] = set(map(type, keys))
    judged: Sequence[Any] = keys
    if kinds == {str}:
        with suppress(UnicodeEncodeError):
            judged, kinds = [key.encode() for key in judged], {bytes}
    if kinds == {bytes} and all(judged):
        return judged
    return [encode_key(key) for key in keys]


class Hasher:
    """One hash scheme with its seed or secret.

    ``seed`` is a 32-bit number for MURMUR3_X64_128 and 16 secret bytes for BLAKE2B_128.
    """

    __slots__ = ("hash_id", "hash_pair", "scheme", "seed")

    hash_pair: Callable[[bytes, Any], tuple[int, int]]
    """``hash_pair(key, seed)`` is ``pair(key)`` without the call in between, for the one hottest caller."""

    def __init__(self, scheme: HashScheme, seed: int | bytes) -> None:
        self.scheme = HashScheme(scheme)
        self.seed = seed
        if self.scheme is HashScheme.MURMUR3_X64_128:
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
                # Bytes are perhaps a secret meant for the other scheme: not to be shown.
                shown = "bytes" if isinstance(seed, bytes) else seed
                raise ParameterError("seed", shown, f"a whole number from 0 to {MAX_SEED}")
            self.hash_pair = mmh3.mmh3_x64_128_utupledigest
        else:
            if not isinstance(seed, bytes) or len(seed) != SECRET_BYTES:
                # The value is a secret: say what it should be, not what it was.
                raise ParameterError("seed", "a value of another shape", f"{SECRET_BYTES} secret bytes")
            self.hash_pair = _blake2b_pair
        fingerprint = hashlib.blake2b(
            bytes([self.scheme]) + self.seed_bytes, digest_size=8, person=b"bloomgate.hashid"
        )
        # 0 on the wire means "not given".
        self.hash_id = int.from_bytes(fingerprint.digest(), "little") or 1

    @property
    def seed_bytes(self) -> bytes:
        """The seed as 4 little-endian bytes, or the 16 secret bytes."""
        return self.seed if isinstance(self.seed, bytes) else self.seed.to_bytes(4, "little")

    def digest(self, key: bytes) -> bytes:
        """Return the 16-byte digest of one encoded key."""
        return self.digests((key,))

    def digests(self, keys: Iterable[bytes]) -> bytes:
        """Return the digests of encoded keys, 16 bytes each, concatenated in order."""
        murmur = self.scheme is HashScheme.MURMUR3_X64_128
        hash_one: Callable[[bytes, Any], bytes] = mmh3.mmh3_x64_128_digest if murmur else _blake2b
        return b"".join(map(hash_one, keys, repeat(self.seed)))

    def pair(self, key: bytes) -> tuple[int, int]:
        """One encoded key's halves (h1, h2) as two ints: the digest without its bytes."""
        return self.hash_pair(key, self.seed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hasher) and (self.scheme, self.seed) == (other.scheme, other.seed)

    def __hash__(self) -> int:
        return self.hash_id

    def __repr__(self) -> str:
        # No seed: whoever holds it can try low-entropy keys against a filter one by one.
        return f"Hasher({self.scheme.name}, hash_id={self.hash_id:#x})"


def _blake2b(key: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=DIGEST_BYTES, key=secret).digest()


def _blake2b_pair(key: bytes, secret: bytes) -> tuple[int, int]:
    h1, h2 = _PAIR.unpack(_blake2b(key, secret))
    return h1, h2


def pairs(digests: bytes) -> Iterator[tuple[int, int]]:
    """Yield each digest's halves (h1, h2) as two ints. The scalar twin of ``halves``."""
    return _PAIR.iter_unpack(digests)


def halves(digests: bytes) -> Halves:
    """Split concatenated digests into the arrays h1 and h2, each of shape (keys,), dtype uint64.

    On little-endian machines they are views of ``digests``, not to be written to.
    """
    both = np.frombuffer(digests, dtype="<u8").astype(np.uint64, copy=False).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def positions(h1: int, h2: int, bits: int, hashes: int) -> Iterator[int]:
    """Yield the bit indexes of one digest, in order: the definition.

    The loops in bloom.py are this one unrolled, and the tests hold them to it.
    """
    for i in range(1, hashes + 1):
        yield h1 % bits
        h1 = (h1 + h2) & _MASK
        h2 = (h2 + i) & _MASK


def position_array(h1: NDArray[np.uint64], bits: int) -> NDArray[np.int64]:
    """The bit indexes that the first halves stand for, of shape (keys,)."""
    # h1 % bits, in three steps: numpy divides by a scalar with SIMD but not for the remainder (1.8 against
    # 3.5 ns a key).
    whole = h1 // np.uint64(bits)
    whole *= np.uint64(bits)
    np.subtract(h1, whole, out=whole)
    return whole.view(np.int64)


def step(h1: NDArray[np.uint64], h2: NDArray[np.uint64], i: int) -> None:
    """Advance h1 and h2 in place from position i-1 to position i. uint64 wraps at 2^64 by itself."""
    h1 += h2
    h2 += np.uint64(i)
