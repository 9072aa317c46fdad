"""A Bloom filter: a chain of bodies that grows, refuses or degrades when its capacity is reached.

An add is two steps, so that a daemon can journal between them: ``plan_add`` probes and decides, changing
nothing; ``apply`` does what was decided.

A digest is set in a segment's body unless an earlier body contains it already. Later bodies cannot: a segment
always names the body that was the last when it was planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bloomgate.filters import hashing, sizing
from bloomgate.filters.bloom import SLICE_KEYS, BloomBody
from bloomgate.filters.errors import FilterFull
from bloomgate.filters.hashing import DIGEST_BYTES, HashScheme, Key, encode_key, encode_keys
from bloomgate.filters.plan import AddPlan, Growth, Segment, allocate
from bloomgate.filters.spec import FilterSpec, OnFull

# Up to this many keys the scalar path is the faster one (measured: they cross at 90 absent keys, 45 present
# ones and 45 added ones).
SCALAR_KEYS = 48


class BloomFilter:
    """A set of keys that can be asked "might it contain this key?".

    ``BloomFilter(1_000_000, 0.01)`` holds a million keys at one false positive in a hundred absent keys, in
    1.2 MB. It never answers False for a key that was added. One thread adds; any thread may ask.
    """

    __slots__ = ("added_count", "bodies", "spec")

    def __init__(
        self,
        capacity: int,
        error_rate: float = 0.01,
        *,
        on_full: OnFull | str = OnFull.GROW,
        hash_scheme: HashScheme = HashScheme.MURMUR3_X64_128,
        seed: int | bytes | None = None,
    ) -> None:
        """Plan for ``capacity`` keys (1 .. 10^11) at ``error_rate`` (1e-9 .. 0.5).

        ``on_full`` is "grow", "reject" or "degrade". Raises ParameterError, a ValueError naming the field.
        """
        spec = FilterSpec.plan(capacity, error_rate, on_full=on_full, hash_scheme=hash_scheme, seed=seed)
        self._start(spec, (BloomBody(spec.first_body),), 0)

    def _start(self, spec: FilterSpec, bodies: tuple[BloomBody, ...], added_count: int) -> None:
        self.spec = spec
        self.bodies = bodies
        self.added_count = added_count

    @classmethod
    def of(
        cls, spec: FilterSpec, bodies: Sequence[BloomBody] | None = None, added_count: int = 0
    ) -> BloomFilter:
        """A filter of ``spec``: empty, or over ``bodies`` as they are."""
        self = cls.__new__(cls)
        self._start(spec, tuple(bodies or (BloomBody(spec.first_body),)), added_count)
        return self

    @classmethod
    def sized(
        cls,
        bits: int,
        hashes: int,
        *,
        hash_scheme: HashScheme = HashScheme.MURMUR3_X64_128,
        seed: int | bytes | None = None,
    ) -> BloomFilter:
        """A filter of exactly ``bits`` bits and ``hashes`` hashes, which degrades instead of growing."""
        return cls.of(FilterSpec.sized(bits, hashes, hash_scheme=hash_scheme, seed=seed))

    # -- asking

    def might_contain(self, key: Key) -> bool:
        """False: the key was certainly never added. True: it may have been."""
        hasher, bodies = self.spec.hasher, self.bodies
        # The usual key is spared the calls of encode_key and Hasher.pair: 110 ns of 770.
        h1, h2 = hasher.hash_pair(key if type(key) is bytes and key else encode_key(key), hasher.seed)
        return bodies[-1].has(h1, h2) or (len(bodies) > 1 and any(body.has(h1, h2) for body in bodies[:-1]))

    __contains__ = might_contain

    def might_contain_many(self, keys: Iterable[Key]) -> list[bool]:
        """``might_contain`` of each key, in order; several times cheaper a key from a hundred keys on."""
        answers: list[bool] = []
        for digests in self._digest_slices(keys):
            answers += map(bool, self.find_digests(digests))
        return answers

    def might_contain_digests(self, digests: bytes) -> list[bool]:
        """``might_contain`` of each 16-byte digest, in order."""
        return list(map(bool, self.find_digests(digests)))

    def find_digests(self, digests: bytes) -> bytes:
        """``might_contain`` of each 16-byte digest, in order, a byte each: 1 or 0."""
        if len(digests) <= SCALAR_KEYS * DIGEST_BYTES:
            return bytes([any(body.has(h1, h2) for body in self.bodies) for h1, h2 in hashing.pairs(digests)])
        return self._found(digests).tobytes()

    def _found(self, digests: bytes) -> NDArray[np.bool_]:
        h1, h2 = hashing.halves(digests)
        *earlier, newest = self.bodies
        found = newest.has_many((h1, h2))
        for body in earlier:
            absent = np.flatnonzero(~found)
            found[absent] = body.has_many((h1[absent], h2[absent]))
        return found

    def _digest_slices(self, keys: Iterable[Key]) -> Iterator[bytes]:
        """The keys' digests, concatenated, a slice of keys at a time so that each is still in the cache."""
        if isinstance(keys, (str, bytes)):
            raise TypeError("keys is one key, not an iterable of keys")
        if not isinstance(keys, (list, tuple)):
            keys = list(keys)
        for start in range(0, len(keys), SLICE_KEYS):
            yield self.spec.hasher.digests(encode_keys(keys[start : start + SLICE_KEYS]))

    # -- adding

    def add(self, key: Key) -> bool:
        """Add a key. True: it was certainly not there before. False: it may have been.

        Raises FilterFull where ``on_full`` is "reject" and the capacity is reached.
        """
        # What plan_add and apply come to for one key that fits, at a quarter of their cost.
        h1, h2 = self.spec.hasher.pair(encode_key(key))
        newest = self.bodies[-1]
        was_new = not any(body.has(h1, h2) for body in self.bodies)
        if was_new:
            if newest.count >= newest.spec.capacity and self.spec.on_full is not OnFull.DEGRADE:
                return self.add_many((key,))[0]
            newest.set(h1, h2)
            newest.count += 1
        self.added_count += 1
        return was_new

    def add_many(self, keys: Iterable[Key]) -> list[bool]:
        """Add keys; per key, in order, whether it was certainly new.

        A key is certainly new if some bit of it was 0 before the batch and no equal key stands before it in
        the batch. Raises FilterFull, and adds nothing, where ``on_full`` is "reject" and they do not fit.
        """
        plan = self.plan_add(b"".join(self._digest_slices(keys)))
        self.apply(plan)
        return plan.was_new

    def plan_add(self, digests: bytes, max_growth_bytes: int | None = None) -> AddPlan:
        """Decide what adding ``digests`` would do, changing nothing.

        Raises FilterFull if ``on_full`` refuses the batch, or if growing would take more than
        ``max_growth_bytes``.
        """
        was_new = self._was_new(digests)
        new_keys = was_new.count(True)
        last = len(self.bodies) - 1
        # Not below 0: steps applied twice count twice, and may leave a body with more keys than its capacity.
        room = max(0, self.bodies[last].spec.capacity - self.bodies[last].count)
        if new_keys > room and self.spec.on_full is OnFull.REJECT:
            raise FilterFull("capacity", self.spec.capacity, self.approximate_count + new_keys)
        if new_keys <= room or self.spec.on_full is OnFull.DEGRADE:
            return AddPlan(was_new, (Segment(last, digests, new_keys),) if digests else ())
        return AddPlan(was_new, self._grow_steps(digests, was_new, room, max_growth_bytes))

    def _was_new(self, digests: bytes) -> list[bool]:
        """Per key: certainly not found, and no equal digest before it in the batch."""
        if len(digests) <= SCALAR_KEYS * DIGEST_BYTES:
            few = [not there for there in self.might_contain_digests(digests)]
            _strike_repeats(digests, few, [i for i, new in enumerate(few) if new])
            return few
        absent = ~self._found(digests)
        at = np.flatnonzero(absent)
        was_new: list[bool] = absent.tolist()
        # A digest that comes twice shows as neighbours once the first halves are sorted (6 ns a key). Only
        # those that do are compared as wholes, one by one.
        h1 = hashing.halves(digests)[0][at]
        ordered = np.sort(h1)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            # Not np.isin: that of numpy 2.0.0 overflows on 64-bit numbers without a sign.
            nearest = twice[np.minimum(np.searchsorted(twice, h1), twice.size - 1)]
            _strike_repeats(digests, was_new, at[nearest == h1].tolist())
        return was_new

    def _grow_steps(
        self, digests: bytes, was_new: list[bool], room: int, max_growth_bytes: int | None
    ) -> tuple[Segment | Growth, ...]:
        """Split a batch at the exact keys where a body is full, with the growths between."""
        new_at = np.flatnonzero(was_new)
        steps: list[Segment | Growth] = []
        body, start, taken, growth_bytes = len(self.bodies) - 1, 0, 0, 0
        while new_at.size - taken > room:
            stop = int(new_at[taken + room])
            if stop > start:
                steps.append(Segment(body, digests[start * DIGEST_BYTES : stop * DIGEST_BYTES], room))
            body, start, taken = body + 1, stop, taken + room
            spec = self.spec.body(body)
            if spec.bits > sizing.MAX_BITS:
                raise FilterFull("bits of a body", sizing.MAX_BITS, spec.bits)
            growth_bytes += spec.nbytes
            if max_growth_bytes is not None and growth_bytes > max_growth_bytes:
                held = self.memory_bytes
                raise FilterFull("memory_bytes", held + max_growth_bytes, held + growth_bytes)
            steps.append(Growth(body, spec))
            room = spec.capacity
        steps.append(Segment(body, digests[start * DIGEST_BYTES :], int(new_at.size) - taken))
        return tuple(steps)

    def apply(self, plan: AddPlan, grown: Sequence[BloomBody] | None = None) -> None:
        """Do what ``plan_add`` decided, before anything else changes the filter.

        ``grown`` are the plan's new bodies where they were allocated already, by ``allocate``.
        """
        bodies = iter(allocate(plan) if grown is None else grown)
        for step in plan.steps:
            if isinstance(step, Segment):
                self.insert(step)
            else:
                self.grow(step, next(bodies))

    def insert(self, segment: Segment) -> None:
        """Set a segment's digests and add its counts, as planned or as journalled."""
        digests = segment.digests
        body = self.bodies[segment.body]
        earlier = self.bodies[: segment.body]
        self.added_count += len(digests) // DIGEST_BYTES
        body.count += segment.new_keys
        if len(digests) <= SCALAR_KEYS * DIGEST_BYTES:
            for h1, h2 in hashing.pairs(digests):
                if not any(each.has(h1, h2) for each in earlier):
                    body.set(h1, h2)
            return
        h1s, h2s = hashing.halves(digests)
        for each in earlier:
            absent = ~each.has_many((h1s, h2s))
            h1s, h2s = h1s[absent], h2s[absent]
        body.set_many((h1s, h2s))

    def grow(self, growth: Growth, body: BloomBody | None = None) -> None:
        """Begin the next body, ``body`` if it is given; one that exists already is not begun again.

        Raises IndexError if a body before it is missing.
        """
        if growth.body > len(self.bodies):
            raise IndexError(f"body {growth.body} cannot follow body {len(self.bodies) - 1}")
        if growth.body == len(self.bodies):
            # A new tuple, swapped whole: a reader in another thread has the old chain or the new one.
            self.bodies = (*self.bodies, body or BloomBody.resident(growth.spec))

    # -- as bytes

    def to_bytes(self) -> bytes:
        """The filter's image; equal filters give equal bytes."""
        from bloomgate.filters import image  # here, because image is built on this module

        return image.to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> BloomFilter:
        """Read a filter from its image. Raises DataDamaged."""
        from bloomgate.filters import image

        return image.from_bytes(data).filter

    # -- what it is worth

    @property
    def bits(self) -> int:
        """Bits of all bodies together."""
        return sum(body.spec.bits for body in self.bodies)

    @property
    def hashes(self) -> int:
        """Hash count of the body that adds go to."""
        return self.bodies[-1].spec.hashes

    @property
    def bits_set(self) -> int:
        """Set bits of all bodies together."""
        return sum(body.bits_set for body in self.bodies)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all bit buffers together."""
        return sum(body.spec.nbytes for body in self.bodies)

    @property
    def approximate_count(self) -> int:
        """How many keys were certainly new when they were added; a false positive is not counted."""
        return sum(body.count for body in self.bodies)

    @property
    def expected_error_rate(self) -> float:
        """The chance that an absent key is answered True, from the bits really set: 0 when empty."""
        return sizing.error_rate_of_chain((body.spec, body.bits_set) for body in self.bodies)

    def __repr__(self) -> str:
        return (
            f"<BloomFilter {self.approximate_count} of {self.spec.capacity} keys at {self.spec.error_rate:g},"
            f" {len(self.bodies)} bodies, {self.bits} bits>"
        )


def _strike_repeats(digests: bytes, was_new: list[bool], at: list[int]) -> None:
    """Make ``was_new`` false at those indexes ``at`` whose digest stands at an earlier one of them."""
    seen: set[bytes] = set()
    for i in at:
        digest = digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]
        was_new[i] = digest not in seen
        seen.add(digest)
