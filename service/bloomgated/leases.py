"""Who holds copies of filters, up to which seq, and until when.

A lease is the promise that no Add is acknowledged behind its holder's back while it lasts. So an Add, and the
end of a filter, wait until every lease under the filter's name that has not run out has acknowledged their
seq. A lease is released by a Close alone: a stream that breaks is no proof that its holder has stopped
answering. After a start nothing completes until every lease that an earlier run may have granted has run out.

Time is CLOCK_BOOTTIME, which goes on while a machine is suspended. A holder counts from before it asked for a
renewal, and less the margin; here it is counted from the grant, and with the margin on top. So clocks may
differ in rate by the margin over the duration.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from bloomgate.filters import Growth, Segment
from bloomgated.catalog import Entry
from bloomgated.config import LeaseConfig
from bloomgated.lease_flag import Flag
from bloomgated.outbox import End
from bloomgated.storage.journal import Journal
from bloomgated.subscriptions import Run, Subscription, Wait, join

log = logging.getLogger(__name__)

# Seconds between looks at whether the last lease has run out, when the daemon stops.
_LOOK = 0.02


def boottime() -> float:
    """Seconds on the clock of leases."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leases:
    """All of them. Used on the event loop; there are none before ``begin``."""

    def __init__(self, config: LeaseConfig, *, clock: Callable[[], float] = boottime) -> None:
        self.config, self.clock = config, clock
        # Ids of earlier runs must not come again: their holders may still name them.
        self._numbers = itertools.count(time.time_ns())
        self._by_name: dict[str, dict[int, Subscription]] = {}
        self._by_number: dict[int, Subscription] = {}
        self._unsent: deque[tuple[Entry, int, Sequence[Segment | Growth]]] = deque()
        """Queued and not durable yet: entry, the last one's seq, changes."""
        self._flag: Flag | None = None
        self._earlier_until = 0.0
        self.durable_seq = 0
        """All changes up to here are on their way to every subscription."""
        self.stopping = False
        self.ends: Counter[End] = Counter()
        """Subscriptions that were reset, by why, since the process started."""
        self.on_wait: Callable[[float], None] = lambda _seconds: None
        """Called with the seconds that an Add or a drop waited for leases."""
        self.on_flag: Callable[[], None] = lambda: None
        """Called when leases may be granted that could not be before."""
        self.on_stalled: Callable[[Subscription], None] = lambda _subscription: None
        """Called with one whose holder renewed, and kept somebody waiting until its lease ran out."""

    def begin(self, journal: Journal, since: float) -> None:
        """``since``: when this process became the owner of the data directory, on the clock of leases."""
        self._flag = Flag(journal, lambda: self.on_flag())
        self.durable_seq = journal.durable_seq
        # What was granted after the backup that a directory was restored from, nobody knows.
        longest = max(self._flag.seconds, self.longest if journal.restored else 0.0)
        if longest:
            self._earlier_until = since + longest
            log.info("leases of an earlier run may last for %.1f s more", self._earlier_until - self.clock())

    @property
    def longest(self) -> float:
        """Seconds from a grant until nobody trusts the copy any more."""
        return self.config.duration + self.config.margin

    # -- what the gate tells, and waits for

    def queued(self, entry: Entry, last_seq: int, changes: Sequence[Segment | Growth]) -> None:
        """These changes were queued as the journal's last records, each one record; in the same step."""
        self._unsent.append((entry, last_seq, changes))

    def durable(self, seq: int) -> None:
        """All up to ``seq`` is durable: send it on, before anybody who waited for that goes on."""
        changed: dict[Entry, list[Run]] = {}
        while self._unsent and self._unsent[0][1] <= seq:
            entry, last, changes = self._unsent.popleft()
            if entry.name in self._by_name:
                for at, change in enumerate(changes, last - len(changes) + 1):
                    digests = change.digests if isinstance(change, Segment) else change
                    join(changed.setdefault(entry, []), at, at, digests)
        self.durable_seq = seq
        for entry, runs in changed.items():
            for each in list(self._by_name.get(entry.name, {}).values()):
                if each.entry is entry:
                    for run in runs:
                        each.deliver(run.first_seq, run.last_seq, run.growth or b"".join(run.parts))
                    if each.overfull:
                        self.on_stalled(each)

    async def settled(self, name: str, seq: int) -> None:
        """Return once no lease under ``name`` can hide what the durable ``seq`` brought."""
        started = None
        while (left := self._earlier_until - self.clock()) > 0:
            started = started or self.clock()
            await asyncio.sleep(left)
        if name in self._by_name:
            now = self.clock()
            held = [each for each in self._by_name[name].values() if each.acked < seq and each.expires > now]
            if held:
                started = started or now
                wait = Wait(len(held))
                for each in held:
                    each.wait(seq, wait)
                await wait.done
                for each in held:
                    if each.stalled:
                        each.stalled = False
                        self.on_stalled(each)
        if started is not None:
            self.on_wait(self.clock() - started)

    def ended(self, entry: Entry, seq: int, end: End) -> None:
        """A filter, or this generation of it, ends with the durable ``seq``."""
        for each in list(self._by_name.get(entry.name, {}).values()):
            if each.entry is entry:
                self.reset(each, end, seq)

    # -- subscriptions

    def register(self, make: Callable[[int], Subscription]) -> Subscription:
        """A subscription under a number that was never used: what is durable from now on is sent to it."""
        made = make(next(self._numbers))
        self._by_number[made.id] = made
        self._by_name.setdefault(made.entry.name, {})[made.id] = made
        return made

    def find(self, number: int) -> Subscription | None:
        """The subscription of that number, whichever stream it came by."""
        return self._by_number.get(number)

    def under(self, name: str) -> Iterable[Subscription]:
        """The subscriptions under a name."""
        return self._by_name.get(name, {}).values()

    def may_grant(self) -> bool:
        """Whether a lease could be granted now. If not, ``on_flag`` is called once it can."""
        return self._flag is not None and not self.stopping and self._flag.covers(self.longest)

    def reset(self, subscription: Subscription, end: End, seq: int = 0, retry_after: float = 0.0) -> None:
        """End a subscription, with the ``seq`` that its holder is to acknowledge; 0: the durable one."""
        if subscription.send_reset(seq or self.durable_seq, end, retry_after):
            self.ends[end] += 1

    def forget(self, subscription: Subscription) -> None:
        """Nobody waits for it, and nobody holds it."""
        self._by_number.pop(subscription.id, None)
        under = self._by_name.get(subscription.entry.name, {})
        under.pop(subscription.id, None)
        if not under:
            self._by_name.pop(subscription.entry.name, None)

    def held(self, name: str) -> int:
        """How many leases under ``name`` have not run out. Any thread may ask."""
        now = self.clock()
        return sum(each.expires > now for each in list(self._by_name.get(name, {}).values()))

    def tend(self) -> None:
        """Forget what has run out on streams that are gone, and take the flag back where no copy is held."""
        now = self.clock()
        for each in list(self._by_number.values()):
            if each.gone and each.expires <= now:
                self.forget(each)
        self._take_flag_back(now)

    def _take_flag_back(self, now: float) -> None:
        held = any(each.expires > now for each in self._by_number.values())
        if self._flag is not None and not held and now >= self._earlier_until:
            self._flag.take_back()

    async def stop(self) -> None:
        """End all, wait until no copy is trusted, and say in the journal that none is."""
        self.stopping = True
        for each in self._by_number.values():
            self.reset(each, End.STOPPING)
        while any(each.expires > self.clock() for each in self._by_number.values()):  # noqa: ASYNC110
            # Closed by their holders, one by one, or run out.
            await asyncio.sleep(_LOOK)
        self._take_flag_back(self.clock())
        if self._flag is not None:
            await self._flag.durable()
