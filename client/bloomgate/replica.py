"""A filter's copy in this process, and until when it may be trusted.

A check takes one object, which has body and deadline, compares clock and deadline, and probes. What the
object holds changes while it is trusted, for Adds only set bits; until when it is trusted never does: a grant
makes a new object. So whatever stops a check between two of its steps, the answer is one of a moment at which
it had already begun.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bloomgate.filters import BloomFilter, Key, encode_key
from bloomgate.options import Backoff
from bloomgate.replies import Result

# Goes on while a machine is suspended; where there is none (macOS), the monotonic clock does.
BOOTTIME: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
now: Callable[[int], float] = time.clock_gettime

_RESULTS = {False: Result.SKIP, True: Result.HIT}


class Counts:
    """Checks that copies answered, by result. Any thread may count; one takes."""

    def __init__(self) -> None:
        # ``next`` of a count cannot be interrupted by another thread, which adding to a number can.
        skips, hits = itertools.count(), itertools.count()
        self.skip: Callable[[], int] = skips.__next__
        self.hit: Callable[[], int] = hits.__next__
        self._seen = [0, 0]
        self._lock = threading.Lock()
        self._many = [0, 0]

    def add(self, skips: int, hits: int) -> None:
        """Count many at once."""
        with self._lock:
            self._many[0] += skips
            self._many[1] += hits

    def take(self) -> tuple[int, int]:
        """Skips and hits since the last time."""
        with self._lock:
            taken, self._many = self._many, [0, 0]
        for place, count in enumerate((self.skip, self.hit)):
            # Counts itself: the next one begins behind it.
            value = count()
            taken[place] += value - self._seen[place]
            self._seen[place] = value + 1
        return taken[0], taken[1]

    def forget(self) -> None:
        """In a forked child: what its parent counted is the parent's to tell."""
        self._lock = threading.Lock()
        self.take()


class Copy:
    """A filter's bodies, and the moment on the clock BOOTTIME from which they prove nothing.

    ``answer(key)`` is whether the filter might contain the key, and counts that; None from the deadline on.
    """

    __slots__ = ("answer", "bloom", "deadline")

    def __init__(self, bloom: BloomFilter, deadline: float, counts: Counts) -> None:
        self.bloom, self.deadline = bloom, deadline
        self.answer = _answering(bloom, deadline, counts)


def _answering(bloom: BloomFilter, deadline: float, counts: Counts) -> Callable[[Key], bool | None]:
    """The check of one key as one call, of the bodies that there are now: the product's hottest path.

    What ``BloomFilter.might_contain`` and ``BloomBody.has`` do, at half their time.
    """
    clock, boottime, skip, hit = now, BOOTTIME, counts.skip, counts.hit
    hash_pair, seed = bloom.spec.hasher.hash_pair, bloom.spec.hasher.seed
    newest, *earlier = reversed(bloom.bodies)
    bits, m, steps = newest.probes()

    def answer(key: Key) -> bool | None:
        if clock(boottime) >= deadline:
            return None
        h1, h2 = start = hash_pair(key if type(key) is bytes and key else encode_key(key), seed)
        for i in steps:
            if not bits[h1 % m]:
                break
            h1 = (h1 + h2) & 0xFFFFFFFFFFFFFFFF
            h2 += i
        else:
            hit()
            return True
        for body in earlier:
            if body.has(*start):
                hit()
                return True
        skip()
        return False

    return answer


VOID = Copy(BloomFilter.sized(8, 1), -math.inf, Counts())
"""A copy that is never trusted."""


@dataclass(slots=True)
class Held:
    """A subscription's copy: which filter, up to which seq. ``bloom`` None: its image is on its way."""

    subscription: int
    journal_id: bytes
    filter_id: int
    generation: int
    seq: int = 0
    bloom: BloomFilter | None = None
    image: bytearray | None = None
    image_bytes: int = 0


class Replica:
    """One filter's copy. Any thread may check; all else is guarded by the lock of whoever leases it."""

    def __init__(self, name: str, max_bytes: int, backoff: Backoff, keep: Callable[[Replica], None]) -> None:
        """``keep`` is called where a check finds nothing to trust: it sees that somebody leases it."""
        self.name, self.max_bytes, self._backoff, self._keep = name, max_bytes, backoff, keep
        self.counts = Counts()
        self.wanted = 0
        """How many have opened it and not closed it."""
        self._reset()

    def _reset(self) -> None:
        self.copy = VOID
        self.held: Held | None = None
        """What is trusted, or was and can be resumed."""
        self.coming: Held | None = None
        """What will take its place at its first grant."""
        self.asked: int | None = None
        """The number of the Open that is not answered."""
        self.put_off(0.0)
        self.pauses: Iterator[float] = self._backoff.pauses()

    def begin_anew(self) -> None:
        """In a forked child: nothing of its parent's is trusted, nor waited for."""
        self.counts.forget()
        self._reset()

    # -- asking

    def check(self, key: Key) -> Result | None:
        """What the copy says of a key; None where it says nothing."""
        found = self.copy.answer(key)
        if found is None:
            self._keep(self)
            return None
        return _RESULTS[found]

    def check_many(self, keys: Sequence[Key]) -> list[Result] | None:
        """What the copy says of each key; None where it says nothing."""
        copy = self.copy
        if now(BOOTTIME) < copy.deadline:
            found = copy.bloom.might_contain_many(keys)
            hits = sum(found)
            self.counts.add(len(found) - hits, hits)
            return [_RESULTS[each] for each in found]
        self._keep(self)
        return None

    @property
    def is_trusted(self) -> bool:
        """Whether it answers checks at this moment."""
        return now(BOOTTIME) < self.copy.deadline

    # -- changing, under the lock

    def put_off(self, seconds: float) -> None:
        """Do not open it for so long."""
        self.open_at = now(BOOTTIME) + seconds

    def trust(self, held: Held, deadline: float) -> Held | None:
        """A grant: trust ``held`` until ``deadline``. Returns what it takes the place of."""
        assert held.bloom is not None
        before = None
        if held is self.coming:
            before, self.held, self.coming = self.held, held, None
            self.copy = Copy(held.bloom, deadline, self.counts)
            self.pauses = self._backoff.pauses()
        elif held is self.held:
            # A grant that was put off may answer an earlier renewal than the last one.
            self.copy = Copy(held.bloom, max(deadline, self.copy.deadline), self.counts)
        return before

    def void(self) -> None:
        """Trust nothing from now on; what is held can still be resumed unless it is let go."""
        self.copy = VOID

    def has_grown(self, bloom: BloomFilter) -> None:
        """A body of ``bloom`` began: a copy that is trusted is to ask it too."""
        if self.copy.bloom is bloom:
            self.copy = Copy(bloom, self.copy.deadline, self.counts)

    def of(self, subscription: int) -> Held | None:
        """What is held by that subscription."""
        for held in (self.held, self.coming):
            if held is not None and held.subscription == subscription:
                return held
        return None

    def let_go(self) -> list[Held]:
        """Void and forget all that there is of it. Returns what the daemon may still count on."""
        self.void()
        gone = [held for held in (self.held, self.coming) if held is not None]
        self.held = self.coming = None
        return gone
