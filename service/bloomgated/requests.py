"""What the verbs are asked with and answer with: keys, a spec, stats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bloomgate import errors
from bloomgate.filters import DIGEST_BYTES, BloomFilter, FilterSpec
from bloomgated.catalog import Entry

# Keys hashed or probed before the loop gets to breathe: about two milliseconds.
SLICE_KEYS = 8192
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Keys:
    """What a caller asks about or adds: encoded keys, or digests made under the hash spec ``hash_id``."""

    keys: tuple[bytes, ...] = ()
    digests: bytes = b""
    hash_id: int = 0

    def __len__(self) -> int:
        return len(self.keys) or len(self.digests) // DIGEST_BYTES

    def slices(self) -> Iterator[Keys]:
        """The same in parts of SLICE_KEYS, so that the event loop can breathe between them."""
        for start in range(0, len(self), SLICE_KEYS):
            stop = start + SLICE_KEYS
            digests = self.digests[start * DIGEST_BYTES : stop * DIGEST_BYTES]
            yield Keys(self.keys[start:stop], digests, self.hash_id)


@dataclass(frozen=True, slots=True)
class Asked:
    """A spec as a caller asks for it. ``seed`` None: any is equal."""

    spec: FilterSpec
    seed: int | bytes | None

    def differs_from(self, spec: FilterSpec) -> str:
        """The first field in which an existing filter's ``spec`` is not what is asked for, or ""."""
        pairs = {
            "kind": (spec.kind, self.spec.kind),
            "capacity": (spec.capacity, self.spec.capacity),
            "error_rate": (spec.error_rate, self.spec.error_rate),
            "on_full": (spec.on_full, self.spec.on_full),
            "hash_scheme": (spec.hasher.scheme, self.spec.hasher.scheme),
            "key_format": (spec.key_format, self.spec.key_format),
        }
        if self.seed is not None:
            pairs["seed"] = (spec.hasher.seed, self.seed)
        return next((field for field, (one, other) in pairs.items() if one != other), "")


@dataclass(frozen=True, slots=True)
class Stats:
    """An entry with what takes a moment to find out: set bits per body, the error rate that they give, and
    the last durable seq. A DAMAGED entry has no bodies, and every absent key of it goes through: rate 1."""

    entry: Entry
    bits_set: tuple[int, ...]
    expected_error_rate: float
    journal_seq: int


def check_name(name: str, field: str = "filter") -> str:
    """Return ``name`` if a filter can have it. Raises InvalidRequest."""
    if not NAME.fullmatch(name):
        raise errors.InvalidRequest(field, f"{field} must match {NAME.pattern}")
    return name


def count_bits(bloom: BloomFilter | None) -> tuple[tuple[int, ...], float]:
    """Set bits per body, and the error rate that they give. Any thread may ask."""
    if bloom is None:
        return (), 1.0
    return tuple(body.bits_set for body in bloom.bodies), bloom.expected_error_rate
