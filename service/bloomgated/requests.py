"""What the verbs are asked with and answer with: keys, a spec, stats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bloomgate.filters import DIGEST_BYTES, BloomFilter, BodySpec, FilterSpec, sizing
from bloomgated.catalog import Entry

# Keys hashed or probed before the loop gets to breathe: about two milliseconds.
SLICE_KEYS = 8192


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


@dataclass(frozen=True, slots=True)
class BodyFill:
    """One body: its spec, its certainly new keys and its set bits."""

    spec: BodySpec
    count: int
    bits_set: int


@dataclass(frozen=True, slots=True)
class Fill:
    """How full a filter is: each body looked at once, so that all that is said of them agrees.

    A DAMAGED filter has no bodies, and every absent key of it goes through: rate 1.
    """

    bodies: tuple[BodyFill, ...] = ()
    added_count: int = 0

    @property
    def bits(self) -> int:
        """Bits of all bodies together."""
        return sum(body.spec.bits for body in self.bodies)

    @property
    def bits_set(self) -> int:
        """Set bits of all bodies together."""
        return sum(body.bits_set for body in self.bodies)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all bodies together."""
        return sum(body.spec.nbytes for body in self.bodies)

    @property
    def approximate_count(self) -> int:
        """Certainly new keys of all bodies together."""
        return sum(body.count for body in self.bodies)

    @property
    def expected_error_rate(self) -> float:
        """The chance that an absent key is answered maybe."""
        if not self.bodies:
            return 1.0
        return sizing.error_rate_of_chain((body.spec, body.bits_set) for body in self.bodies)


@dataclass(frozen=True, slots=True)
class Stats:
    """An entry with what takes a moment to find out, and the last durable seq."""

    entry: Entry
    fill: Fill
    journal_seq: int
    leases: int
    """Copies of it that are under a lease."""


def measure(bloom: BloomFilter | None) -> Fill:
    """How full a filter is; counting the bits of large bodies takes a while. Any thread may ask."""
    if bloom is None:
        return Fill()
    bodies = tuple(BodyFill(body.spec, body.count, body.bits_set) for body in bloom.bodies)
    # Last, so that Adds meanwhile never make it less than the certainly new keys.
    return Fill(bodies, bloom.added_count)
