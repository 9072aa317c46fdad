"""What holders of copies ask for: one stream each, a subscription per copy.

A subscription is registered before its copy is cut, in one step, so that nothing falls between the two. A
holder whose copy is good to some seq gets only what came after, where the journal still has all of that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bloomgate import errors
from bloomgate.filters.image import freeze, image_bytes, image_chunks
from bloomgated.catalog import Catalog, Entry
from bloomgated.errors import TrimmedAway
from bloomgated.leases import Leases
from bloomgated.outbox import End, Grant, Opened, Outbox, Refused
from bloomgated.storage.journal import Journal
from bloomgated.storage.records import Add, Grow
from bloomgated.subscriptions import Run, Subscription, join

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 10
# A holder that is further behind gets a new image: reading the journal for it would cost more.
MOST_RESUMED = 100_000
# Durations that a holder is left out after it kept somebody waiting; doubled each time; the most seconds.
HELD_OFF, MOST_HELD_OFF = 10, 600.0
# Holders that are remembered for what they did and what they counted.
MOST_REMEMBERED = 100_000
MOST_COUNTED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class CopyOf:
    """A filter that a holder wants a copy of, and what it has of it already. ``max_bytes`` 0: any size."""

    name: str
    journal_id: bytes = b""
    filter_id: int = 0
    generation: int = 0
    seq: int = 0
    max_bytes: int = 0


class Holder:
    """One stream: whose it is, what it is sent, and its subscriptions."""

    def __init__(self, caller: str, replica: bytes) -> None:
        """``replica`` names the process that holds the copies, over all its streams."""
        self.caller, self.replica = caller, replica
        self.outbox = Outbox()
        self.subscriptions: dict[int, Subscription] = {}
        self.resuming: set[asyncio.Task[None]] = set()


class Holders:
    """All streams. Used on the event loop."""

    def __init__(self, leases: Leases, catalog: Callable[[], Catalog]) -> None:
        self._leases, self._catalog = leases, catalog
        self._journal: Journal | None = None
        self._connected: set[Holder] = set()
        self._held_off: OrderedDict[tuple[bytes, str], tuple[float, float]] = OrderedDict()
        """Until when, and for how long, a replica is not given copies of a filter."""
        self._counted: OrderedDict[bytes, int] = OrderedDict()
        """The number of each replica's last counts."""
        leases.on_flag, leases.on_stalled = self._grant_deferred, self._stalled

    def begin(self, journal: Journal) -> None:
        """Serve copies of what ``journal`` records."""
        self._journal = journal

    def connect(self, caller: str, replica: bytes) -> Holder:
        """A stream begins."""
        holder = Holder(caller, replica)
        self._connected.add(holder)
        if self._leases.stopping:
            holder.outbox.end(errors.NotServing("bloomgated is stopping"))
        return holder

    def disconnect(self, holder: Holder) -> None:
        """The stream is gone, whatever became of its holder: its leases go on until they run out."""
        self._connected.discard(holder)
        for task in holder.resuming:
            task.cancel()
        for each in holder.subscriptions.values():
            each.leave()
            if each.expires <= self._leases.clock():
                self._leases.forget(each)

    def end(self) -> None:
        """End all streams, once they have been sent what is there."""
        for holder in self._connected:
            holder.outbox.end(errors.NotServing("bloomgated is stopping"))

    # -- copies

    def open(self, holder: Holder, number: int, wanted: CopyOf) -> None:
        """Begin a copy, or refuse it; the holder is told under its own ``number``."""
        try:
            entry = self._judge(holder, wanted)
        except errors.BloomgateError as error:
            retry_after = error.retry_after if isinstance(error, errors.Overloaded) else 0.0
            holder.outbox.put(Refused(number, error, retry_after))
            return
        subscription = self._leases.register(
            lambda given: Subscription(given, entry, holder.outbox, holder.replica, self._leases.clock)
        )
        holder.subscriptions[subscription.id] = subscription
        if not self._is_good(wanted, entry):
            self._send_image(subscription, number)
        elif entry.last_seq <= wanted.seq and self._reaches_back(wanted.seq):
            self._resume(subscription, number, [], self._leases.durable_seq)
        else:
            task = asyncio.ensure_future(self._send_missing(subscription, number, wanted.seq))
            holder.resuming.add(task)
            task.add_done_callback(holder.resuming.discard)

    def _judge(self, holder: Holder, wanted: CopyOf) -> Entry:
        """The filter to copy. Raises BloomgateError where there is to be no copy."""
        leases, now = self._leases, self._leases.clock()
        if self._journal is None or leases.stopping:
            raise errors.NotServing(f"bloomgated is {'stopping' if leases.stopping else 'recovering'}")
        entry = self._catalog().get(wanted.name)
        if entry is None or entry.dropping:
            raise errors.FilterNotFound(wanted.name)
        if entry.bloom is None:
            raise errors.NotForThisState(wanted.name, entry.state)
        if 0 < wanted.max_bytes < entry.memory_bytes:
            raise errors.LimitExceeded("max_bytes", entry.memory_bytes, wanted.max_bytes)
        left_out_until, _ = self._held_off.get((holder.replica, wanted.name), (now, 0.0))
        if left_out_until > now:
            raise errors.Overloaded(left_out_until - now, "this replica kept Adds waiting")
        config = leases.config
        live = [each for each in leases.under(wanted.name) if not each.gone or each.expires > now]
        for what, held, most in (
            ("lease.per_filter", len(live), config.per_filter),
            ("lease.per_caller", self._of_caller(holder.caller), config.per_caller),
        ):
            if held >= most:
                raise errors.Overloaded(config.duration, f"{held} copies are held, {what} allows {most}")
        return entry

    def _of_caller(self, caller: str) -> int:
        return sum(len(each.subscriptions) for each in self._connected if each.caller == caller)

    def _is_good(self, wanted: CopyOf, entry: Entry) -> bool:
        """Whether the copy that a holder has can be one of this filter as it was at that seq."""
        return (
            (wanted.filter_id, wanted.generation) == (entry.filter_id, entry.generation)
            and self._journal is not None
            and wanted.journal_id == self._journal.journal_id
            # Past the journal's end it would be of a history that this one is not.
            and 0 <= self._leases.durable_seq - wanted.seq <= MOST_RESUMED
        )

    def _reaches_back(self, seq: int) -> bool:
        """Whether the journal has all after ``seq``: a filter's last record may have been trimmed else."""
        return self._journal is not None and self._journal.trim_mark <= seq

    def _send_image(self, subscription: Subscription, number: int) -> None:
        """Cut an image at what is durable: in this step, and behind the registration."""
        entry, seq = subscription.entry, self._leases.durable_seq
        assert entry.bloom is not None
        header = freeze(entry.bloom, entry.generation, seq)
        nbytes = image_bytes(header)
        self._open(subscription, number, nbytes)
        subscription.send_image(image_chunks(header, CHUNK_BYTES), nbytes, seq)

    def _open(self, subscription: Subscription, number: int, nbytes: int) -> None:
        assert self._journal is not None
        entry, journal_id = subscription.entry, self._journal.journal_id
        subscription.outbox.put(
            Opened(number, subscription.id, journal_id, entry.filter_id, entry.generation, nbytes)
        )

    async def _send_missing(self, subscription: Subscription, number: int, after: int) -> None:
        """Send what is durable now and came after ``after``; the rest is being delivered already."""
        up_to, journal, entry = self._leases.durable_seq, self._journal, subscription.entry
        assert journal is not None
        missing: list[Run] | None = None
        try:
            missing = await asyncio.to_thread(_missing, journal, entry.filter_id, after, up_to)
        except TrimmedAway:
            pass
        except Exception:
            # A new image does as well.
            log.exception("the journal could not be read for a copy of %s", entry.name)
        if subscription.reset is not None:
            # Its end was sent already, to a holder that had not heard of its beginning.
            subscription.outbox.put(Refused(number, errors.FilterNotFound(entry.name)))
        elif missing is None:
            self._send_image(subscription, number)
        else:
            self._resume(subscription, number, missing, up_to)

    def _resume(self, subscription: Subscription, number: int, missing: list[Run], up_to: int) -> None:
        self._open(subscription, number, 0)
        subscription.resume(missing, up_to)

    def close(self, holder: Holder, number: int) -> None:
        """The holder does not trust this copy any more, whichever of its streams it came by."""
        found = self._leases.find(number)
        if found is not None and found.replica == holder.replica:
            found.close()
            self._leases.forget(found)
            for each in self._connected:
                each.subscriptions.pop(number, None)

    def ack(self, holder: Holder, number: int, seq: int) -> None:
        """The holder has applied all up to ``seq``. Raises InvalidRequest if it cannot have."""
        found = holder.subscriptions.get(number)
        # One that was closed meanwhile is nobody's any more.
        if found is not None and not found.acknowledge(seq):
            raise errors.InvalidRequest("seq", f"seq {seq} was not sent to subscription {number}")
        if found is not None and found.renewal is not None:
            self._grant(holder, [found])

    # -- renewals

    def renew(self, holder: Holder, nonce: int, may: Callable[[str], bool]) -> None:
        """Extend what may be extended; the rest follows when it may. ``may``: for filters of that name."""
        for each in list(holder.subscriptions.values()):
            if may(each.entry.name):
                each.renewal = nonce
            else:
                self._leases.reset(each, End.REVOKED)
        self._grant(holder, list(holder.subscriptions.values()), nonce)

    def _grant(self, holder: Holder, asked: Iterable[Subscription], answer: int | None = None) -> None:
        """Extend those of ``asked`` that may be; the renewal ``answer`` is answered in any case."""
        leases, now = self._leases, self._leases.clock()
        by_nonce: dict[int, list[int]] = {} if answer is None else {answer: []}
        if leases.may_grant():
            for each in asked:
                if each.renewal is not None and each.may_be_granted(now - leases.config.duration / 3):
                    # Taken down before the grant is on its way.
                    each.expires = now + leases.longest
                    by_nonce.setdefault(each.renewal, []).append(each.id)
                    each.renewal = None
        counts_id = self._counted.get(holder.replica, 0)
        for nonce, granted in by_nonce.items():
            holder.outbox.put(Grant(nonce, tuple(granted), counts_id))

    def _grant_deferred(self) -> None:
        for holder in self._connected:
            self._grant(holder, holder.subscriptions.values())

    def _stalled(self, subscription: Subscription) -> None:
        """Its holder kept somebody waiting, or what waits for it is too much: leave it out for a while."""
        key, now = (subscription.replica, subscription.entry.name), self._leases.clock()
        until, before = self._held_off.pop(key, (now, 0.0))
        least = HELD_OFF * self._leases.config.duration
        # Again soon after the last time: twice as long.
        again = before > 0.0 and now - until < before
        delay = min(max(least, 2 * before if again else least), max(least, MOST_HELD_OFF))
        self._held_off[key] = (now + delay, delay)
        if len(self._held_off) > MOST_REMEMBERED:
            self._held_off.popitem(last=False)
        log.warning("a replica of %s does not keep up: none for it for %.0f s", key[1], delay)
        self._leases.reset(subscription, End.LAGGED, retry_after=delay)

    # -- what copies answered

    def count(self, holder: Holder, counts_id: int, counts: Iterable[tuple[str, int, int]]) -> None:
        """Count checks, (filter, skip, hit) each, unless counts of that number were counted already."""
        if counts_id <= self._counted.get(holder.replica, 0):
            return
        self._counted[holder.replica] = counts_id
        self._counted.move_to_end(holder.replica)
        if len(self._counted) > MOST_REMEMBERED:
            self._counted.popitem(last=False)
        catalog = self._catalog()
        for name, skip, hit in counts:
            entry = catalog.get(name)
            if entry is not None:
                checks = entry.replica_checks
                checks.skip = min(checks.skip + skip, MOST_COUNTED)
                checks.hit = min(checks.hit + hit, MOST_COUNTED)


def _missing(journal: Journal, filter_id: int, after: int, up_to: int) -> list[Run]:
    """A filter's changes after one seq up to another. Blocks. Raises TrimmedAway, JournalDamaged."""
    runs: list[Run] = []
    for placed in journal.replay(after, gapless=True):
        record = placed.record
        if after < placed.seq <= up_to and isinstance(record, Add | Grow) and record.filter_id == filter_id:
            join(
                runs,
                placed.seq,
                placed.seq,
                record.segment.digests if isinstance(record, Add) else record.growth,
            )
    return runs
