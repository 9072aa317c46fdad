"""One copy, in the making or held: what it is sent and has acknowledged, how long its lease lasts, and who
waits for it.

One delta is under way at a time; what comes meanwhile is joined into the next. So what a copy acknowledges is
one number, and a slow holder is sent fewer and larger messages.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence

from bloomgate.filters import Growth
from bloomgated.catalog import Entry
from bloomgated.outbox import Delta, End, Outbox, Reset

# Digests of several Adds are joined up to so many bytes.
JOINED_BYTES = 1 << 20
# What may wait for one copy; beyond, it has lagged.
WAITING_BYTES = 32 << 20

Change = bytes | Growth
"""Digests to set, or a body that begins."""

_tickets = itertools.count()


class Run:
    """Changes of one filter from one seq to another: digests in parts, or one body that begins."""

    __slots__ = ("first_seq", "growth", "last_seq", "parts", "size")

    def __init__(self, first_seq: int, last_seq: int, change: Change) -> None:
        self.first_seq, self.last_seq = first_seq, last_seq
        self.growth = None if isinstance(change, bytes) else change
        self.parts = [change] if isinstance(change, bytes) else []
        self.size = sum(map(len, self.parts))


def join(runs: MutableSequence[Run], first_seq: int, last_seq: int, change: Change) -> None:
    """Put a change behind ``runs``: into the last of them where both are digests, and not too many."""
    last = runs[-1] if runs else None
    if (
        last is None
        or last.growth is not None
        or not isinstance(change, bytes)
        or last.size + len(change) > JOINED_BYTES
    ):
        runs.append(Run(first_seq, last_seq, change))
    else:
        last.parts.append(change)
        last.size += len(change)
        last.last_seq = last_seq


class Wait:
    """One who waits until some subscriptions have acknowledged a seq, or stand in the way no more."""

    __slots__ = ("_left", "done")

    def __init__(self, subscriptions: int) -> None:
        self._left = subscriptions
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def one_less(self) -> None:
        """One of them does no more."""
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)


class Subscription:
    """One copy of ``entry``, by one stream. Used on the event loop."""

    __slots__ = (
        "_clock", "_image", "_image_left", "_in_flight", "_sent", "_sent_at", "_waiters", "_waiting",
        "_waiting_bytes", "acked", "begun", "entry", "expires", "gone", "id", "outbox", "renewal", "replica",
        "reset", "stalled",
    )  # fmt: skip

    def __init__(
        self, number: int, entry: Entry, outbox: Outbox, replica: bytes, clock: Callable[[], float]
    ) -> None:
        self.id, self.entry, self.outbox, self.replica, self._clock = number, entry, outbox, replica, clock
        self.acked = 0
        """Its copy holds all up to here."""
        self.begun = False
        """Whether the copy has its base: deltas may follow, and grants."""
        self.expires = -math.inf
        """Until when its holder may trust the copy, on the daemon's clock, margin included."""
        self.reset: End | None = None
        self.gone = False
        """Whether its stream is gone."""
        self.renewal: int | None = None
        """The renewal that waits for a grant."""
        self.stalled = False
        """Whether its lease ran out while somebody waited for it, although its holder had renewed."""
        self._image: Iterator[bytes] | None = None
        self._image_left = 0
        self._waiting: deque[Run] = deque()
        self._waiting_bytes = 0
        self._in_flight: int | None = None
        self._sent, self._sent_at = 0, -math.inf
        self._waiters: list[tuple[int, int, Wait]] = []

    # -- what it is sent

    def send_image(self, chunks: Iterator[bytes], nbytes: int, seq: int) -> None:
        """Send an image of ``nbytes`` that holds all up to ``seq``; deltas wait until it is acknowledged."""
        self._image, self._image_left, self._in_flight, self._sent = chunks, nbytes, seq, seq
        self.outbox.put_image(self)

    def next_chunk(self) -> bytes | None:
        """The next part of its image; None behind the last."""
        if self._image is None:
            return None
        data = next(self._image)
        self._image_left -= len(data)
        if not self._image_left:
            self._image = None
        return data

    def resume(self, missing: list[Run], up_to: int) -> None:
        """The copy is good; send what it lacks up to ``up_to``, before what was delivered meanwhile."""
        since, self._waiting, self._waiting_bytes = self._waiting, deque(missing), 0
        # So that it is known to hold all up to there, whatever the last record of its filter was.
        join(self._waiting, up_to, up_to, b"")
        self._waiting.extend(since)
        self._waiting_bytes = sum(run.size for run in self._waiting)
        self.begun = True
        self._flush()

    def deliver(self, first_seq: int, last_seq: int, change: Change) -> None:
        """Send a durable change of its filter behind those before it."""
        if self.reset is None and not self.gone:
            join(self._waiting, first_seq, last_seq, change)
            self._waiting_bytes += len(change) if isinstance(change, bytes) else 0
            self._flush()

    def _flush(self) -> None:
        if self.begun and self._in_flight is None and self._waiting:
            run = self._waiting.popleft()
            self._waiting_bytes -= run.size
            self._in_flight = self._sent = run.last_seq
            self._sent_at = self._clock()
            self.outbox.put(Delta(self.id, run.first_seq, run.last_seq, run.growth or run.parts))

    def send_reset(self, seq: int, end: End, retry_after: float = 0.0) -> bool:
        """End it, unless it has ended. Its lease goes on until it is closed or runs out."""
        if self.reset is not None or self.gone:
            return False
        self.reset = end
        self._sent = max(self._sent, seq)
        self._drop_unsent()
        self.outbox.put(Reset(self.id, seq, end, retry_after))
        return True

    def leave(self) -> None:
        """Its stream is gone. Its lease goes on until it is closed or runs out."""
        self.gone = True
        self._drop_unsent()

    def _drop_unsent(self) -> None:
        self._image, self.renewal = None, None
        self._waiting.clear()
        self._waiting_bytes = 0

    # -- what is known of it

    @property
    def overfull(self) -> bool:
        """Whether more waits for it than may."""
        return self._waiting_bytes > WAITING_BYTES

    def may_be_granted(self, oldest: float) -> bool:
        """Whether a grant would stand behind all that is durable, and all that was sent before ``oldest`` is
        acknowledged."""
        if self.reset is not None or self.gone or not self.begun or self._waiting:
            return False
        return self._in_flight is None or self._sent_at >= oldest

    def acknowledge(self, seq: int) -> bool:
        """Its copy holds all up to ``seq``; or, reset, is void. False: so much was never sent."""
        if seq > self._sent or self._image is not None:
            return False
        if self._in_flight is not None and seq >= self._in_flight:
            self._in_flight, self.begun = None, True
        if seq > self.acked:
            self.acked = seq
            self._release(seq)
        self._flush()
        return True

    def close(self) -> None:
        """Its copy is not trusted any more."""
        self.leave()
        self.expires = -math.inf
        self._release(math.inf)

    # -- who waits for it

    def wait(self, seq: int, wait: Wait) -> None:
        """Let ``wait`` know once ``seq`` is acknowledged, or the lease is closed or has run out."""
        heapq.heappush(self._waiters, (seq, next(_tickets), wait))
        if len(self._waiters) == 1:
            self._look_later()

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(max(0.0, self.expires - self._clock()), self._look)

    def _look(self) -> None:
        if not self._waiters:
            return
        if self._clock() < self.expires:
            # Renewed since, or the loop's clock is ahead of this one.
            self._look_later()
        else:
            self.stalled = self.renewal is not None and not self.gone
            self._release(math.inf)

    def _release(self, seq: float) -> None:
        while self._waiters and self._waiters[0][0] <= seq:
            heapq.heappop(self._waiters)[2].one_less()
