"""The keys of a bulk call: in a list, encoded, and cut into what one call takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from bloomgate.filters import InvalidKey, Key, encode_key
from bloomgate.filters.hashing import encode_keys

T = TypeVar("T")

KEY_ERRORS = (InvalidKey, TypeError)


def listed(keys: Iterable[Key]) -> list[Key]:
    if isinstance(keys, str | bytes):
        raise TypeError("keys is an iterable of keys, not one key")
    return list(keys)


class Chunks(Generic[T]):
    """Keys in parts of ``size``, the last of which can be taken back once, to be cut smaller."""

    def __init__(self, keys: list[T], size: int) -> None:
        self._keys = keys
        self._size = size
        self._start = self._next = 0
        self.taken_back = False

    def __iter__(self) -> Iterator[list[T]]:
        while self._next < len(self._keys):
            self._start, self._next = self._next, self._next + self._size
            yield self._keys[self._start : self._next]

    def take_back(self, size: int) -> bool:
        """Go on before the last part, in parts of ``size``. False: that is no smaller than it was."""
        if size >= min(self._next, len(self._keys)) - self._start:
            return False
        self.taken_back = True
        self._next, self._size = self._start, size
        return True


def encode_valid(chunk: Sequence[Key]) -> tuple[list[bytes], list[tuple[int, Exception]]]:
    """The chunk's keys encoded, and the place and error of each that cannot be a key."""
    # Usually all can be.
    with suppress(*KEY_ERRORS):
        return list(encode_keys(chunk)), []
    encoded: list[bytes] = []
    invalid: list[tuple[int, Exception]] = []
    for place, key in enumerate(chunk):
        try:
            encoded.append(encode_key(key))
        except KEY_ERRORS as error:
            invalid.append((place, error))
    return encoded, invalid
