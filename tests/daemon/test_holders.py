"""Leases over a real journal, in this process: what holders are sent, and what Adds and drops wait for.

Time is a clock of the test's, but where a lease really has to run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bloomgate import errors
from bloomgate.filters import BloomFilter, Growth, Segment
from bloomgate.filters.image import from_bytes
from bloomgated import holders as holders_module
from bloomgated import outbox as outbox_module
from bloomgated import subscriptions as subscriptions_module
from bloomgated.config import LeaseConfig
from bloomgated.gate import Gate
from bloomgated.holders import CopyOf, Holder
from bloomgated.outbox import Chunk, Delta, End, Grant, Message, Opened, Refused, Reset
from bloomgated.requests import Keys

from . import inside
from .inside import HeldJournal, asked, until

T = TypeVar("T", bound=Message)
ANYTHING: Callable[[str], bool] = lambda _name: True  # noqa: E731
REPLICA, OTHER = b"r" * 16, b"o" * 16
# Of tests that wait for a lease to run out: as short as may be.
SHORT = LeaseConfig(duration=0.3, margin=0.1)


class Clock:
    """A clock that stands still unless it is told to move."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


class Replica:
    """A holder that does what it is told, as far as a test lets it."""

    def __init__(self, gate: Gate, replica: bytes = REPLICA, caller: str = "somebody") -> None:
        self.gate = gate
        self.holder: Holder = gate.holders.connect(caller, replica)
        self.bloom: BloomFilter | None = None
        self.subscription = self.seq = 0
        self.opened: Opened | None = None
        self._nonce = 0

    async def next(self, kind: type[T]) -> T:
        """The next message, which must be of that kind."""
        message = await asyncio.wait_for(self.holder.outbox.next(), 30)
        assert isinstance(message, kind), message
        return message

    def has_more(self) -> bool:
        return bool(self.holder.outbox._messages)

    def open(self, name: str = "fruit", **held: Any) -> None:
        self.gate.holders.open(self.holder, 7, CopyOf(name, **held))

    async def take_image(self) -> None:
        """Take in an image, and acknowledge it."""
        self.opened = await self.next(Opened)
        assert self.opened.open == 7
        self.subscription = self.opened.subscription
        data = b""
        while len(data) < self.opened.image_bytes:
            data += (await self.next(Chunk)).data
        image = from_bytes(data)
        self.bloom, self.seq = image.filter, image.seq
        self.ack()

    async def take_delta(self) -> Delta:
        """Take in a delta, without acknowledging it."""
        delta = await self.next(Delta)
        assert self.bloom is not None
        if isinstance(delta.change, Growth):
            self.bloom.grow(delta.change)
        else:
            self.bloom.insert(Segment(len(self.bloom.bodies) - 1, b"".join(delta.change), 0))
        self.seq = delta.last_seq
        return delta

    def ack(self) -> None:
        self.gate.holders.ack(self.holder, self.subscription, self.seq)

    def close(self, subscription: int = 0) -> None:
        self.gate.holders.close(self.holder, subscription or self.subscription)

    def leave(self) -> None:
        self.gate.holders.disconnect(self.holder)

    def renew(self, may: Callable[[str], bool] = ANYTHING) -> int:
        self._nonce += 1
        self.gate.holders.renew(self.holder, self._nonce, may)
        return self._nonce

    async def granted(self) -> bool:
        """Renew; whether the answer extends the copy."""
        nonce = self.renew()
        grant = await self.next(Grant)
        assert grant.nonce == nonce
        return grant.subscriptions == (self.subscription,)

    async def lease(self, name: str = "fruit") -> None:
        """Have a copy under a lease."""
        self.open(name)
        await self.take_image()
        await leased(self)


async def leased(replica: Replica) -> None:
    """Renew until it is granted: the flag may have to be durable first."""
    if not await replica.granted():
        assert (await replica.next(Grant)).subscriptions == (replica.subscription,)


@asynccontextmanager
async def gate_in(
    directory: Path, *, lease: LeaseConfig | None = None, clock: Clock | None = None, **options: Any
) -> AsyncIterator[tuple[Gate, HeldJournal]]:
    async with inside.open_gate(directory, lease=lease, lease_clock=clock, **options) as (gate, journal):
        yield gate, journal


def run(work: Awaitable[None]) -> None:
    asyncio.run(work)  # type: ignore[arg-type]


def keys(*names: str) -> Keys:
    return Keys(tuple(name.encode() for name in names))


async def adding(gate: Gate, journal: HeldJournal, *names: str, name: str = "fruit") -> asyncio.Task[Any]:
    """An Add that is durable, and waits for leases if there are any."""
    before = journal.last_seq
    task = asyncio.ensure_future(gate.add(name, keys(*names)))
    await until(lambda: task.done() or before < journal.last_seq == journal.durable_seq)
    # Whoever waited for that goes on.
    for _ in range(10):
        await asyncio.sleep(0)
    return task


def test_an_add_waits_for_the_acknowledgement_of_its_seq(tmp_path: Path) -> None:
    """Not for the sending, nor for an earlier seq."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            first = await adding(gate, journal, "mango")
            second = await adding(gate, journal, "papaya")
            assert not first.done()
            await replica.take_delta()
            replica.ack()
            await first
            assert not second.done()
            await replica.take_delta()
            replica.ack()
            _, seq = await second
            assert replica.seq == seq
            assert replica.bloom is not None
            assert replica.bloom.might_contain_many(["mango", "papaya"]) == [True, True]

    run(work())


def test_nothing_waits_where_no_copy_is_leased(tmp_path: Path) -> None:
    """Not for a stream, nor for a copy that was not granted a lease yet."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, _):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await gate.add("fruit", keys("a"))
            replica.open()
            await gate.add("fruit", keys("b"))
            await replica.take_image()
            await gate.add("fruit", keys("c"))
            assert gate.leases.held("fruit") == 0
            for _ in "bc":
                await replica.take_delta()
                replica.ack()
            assert replica.bloom is not None
            assert all(replica.bloom.might_contain_many(["a", "b", "c"]))

    run(work())


def test_a_lease_is_not_granted_before_the_flag_is_durable(tmp_path: Path) -> None:
    """A crash in between would have no start wait for it."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            replica.open()
            await replica.take_image()
            journal.released.clear()
            assert not await replica.granted()
            assert gate.leases.held("fruit") == 0
            journal.released.set()
            assert (await replica.next(Grant)).subscriptions == (replica.subscription,)
            assert gate.leases.held("fruit") == 1
        journal = HeldJournal(tmp_path)
        journal.prepare()
        assert journal.lease_seconds == pytest.approx(2.2)
        journal.start()
        await journal.close()

    run(work())


def test_a_grant_stands_behind_every_delta(tmp_path: Path) -> None:
    """With one under way and another waiting there is none; it follows the second one."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            adds = [await adding(gate, journal, "mango"), await adding(gate, journal, "papaya")]
            await replica.take_delta()
            assert not await replica.granted()
            replica.ack()
            await replica.take_delta()
            assert (await replica.next(Grant)).subscriptions == (replica.subscription,)
            replica.ack()
            await asyncio.gather(*adds)

    run(work())


def test_a_replica_that_does_not_apply_loses_its_lease(tmp_path: Path) -> None:
    """It renews, and an Add waits: no more grants, a reset when the lease has run out, and it is left out,
    for twice as long the next time."""

    async def work() -> None:
        async with gate_in(tmp_path, lease=SHORT) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            for delay in (3.0, 6.0):
                await replica.lease()
                add = await adding(gate, journal, f"mango {delay}")
                await replica.take_delta()
                await asyncio.sleep(0.12)  # a third of the duration, and more
                assert not await replica.granted()
                await asyncio.wait_for(add, 10)
                reset = await replica.next(Reset)
                assert (reset.end, reset.retry_after) == (End.LAGGED, pytest.approx(delay))
                replica.open()
                refused = await replica.next(Refused)
                assert isinstance(refused.error, errors.Overloaded)
                assert 0 < refused.retry_after <= delay
                replica.close()
                another = Replica(gate, OTHER)
                await another.lease()
                another.close()
                # Its time is over: not forgotten, though.
                until_then, before = gate.holders._held_off[REPLICA, "fruit"]
                gate.holders._held_off[REPLICA, "fruit"] = (gate.leases.clock(), before)
                assert until_then > gate.leases.clock()

    run(work())


def test_a_replica_that_was_away_goes_on_where_it_was(tmp_path: Path) -> None:
    """It did not renew, its lease ran out, and an Add went on without it. It has the delta, and a grant."""

    async def work() -> None:
        async with gate_in(tmp_path, lease=SHORT) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            add = await adding(gate, journal, "mango")
            await asyncio.wait_for(add, 10)
            assert gate.leases.held("fruit") == 0
            await replica.take_delta()
            replica.ack()
            assert await replica.granted()

    run(work())


@pytest.mark.parametrize("how", ["close", "close elsewhere", "expiry"])
def test_only_a_close_or_time_releases_a_lease(tmp_path: Path, how: str) -> None:
    """A stream that breaks does not, nor does a new copy of the same replica."""

    async def work() -> None:
        async with gate_in(tmp_path, lease=SHORT if how == "expiry" else None) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            add = await adding(gate, journal, "mango")
            again = Replica(gate)
            if how != "close":
                replica.leave()
            stranger = Replica(gate, OTHER)
            stranger.close(replica.subscription)
            again.open()
            await again.take_image()
            assert not add.done()
            if how == "close":
                replica.close()
            elif how == "close elsewhere":
                again.close(replica.subscription)
            await asyncio.wait_for(add, 10)
            assert again.bloom is not None
            assert again.bloom.might_contain("mango")

    run(work())


def test_a_drop_waits_and_keeps_its_name(tmp_path: Path) -> None:
    """Until the copy is void: what is created under the name next has copies of its own only."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, _):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            dropping = asyncio.ensure_future(gate.drop("fruit"))
            reset = await replica.next(Reset)
            assert reset.end is End.DROPPED
            creating = asyncio.ensure_future(gate.create("fruit", asked()))
            replica.open()
            assert isinstance((await replica.next(Refused)).error, errors.FilterNotFound)
            replica.renew()
            assert (await replica.next(Grant)).subscriptions == ()
            assert not dropping.done()
            assert not creating.done()
            gate.holders.ack(replica.holder, replica.subscription, reset.seq)
            await dropping
            _, created = await creating
            assert created

    run(work())


def test_leases_count_under_the_name_whatever_filter_they_are_of(tmp_path: Path) -> None:
    """A lease of the filter before it, which was never acknowledged, holds up an Add of the new one."""

    async def work() -> None:
        clock = Clock()
        async with gate_in(tmp_path, clock=clock) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            (entry,) = gate.catalog
            gate.catalog = gate.catalog.without("fruit")
            await gate.create("fruit", asked())
            add = await adding(gate, journal, "mango")
            assert not add.done()
            assert not replica.has_more()
            replica.close()
            await add
            assert gate.catalog.get("fruit") is not entry

    run(work())


def test_a_start_waits_for_the_leases_of_the_run_before(tmp_path: Path) -> None:
    """Adds and drops of any filter, new ones included, from when the directory was taken over on. After the
    flag is taken back, nothing waits."""

    async def work() -> None:
        async with gate_in(tmp_path, lease=SHORT) as (gate, _):
            await gate.create("fruit", asked())
            await Replica(gate).lease()
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with gate_in(tmp_path, lease=SHORT) as (gate, _):
            await gate.create("other", asked())
            await asyncio.gather(gate.add("other", keys("a")), gate.drop("fruit"))
            # Less what opening took, which is counted from before.
            assert loop.time() - began >= 0.39
            gate.leases.tend()
            await gate.add("other", keys("b"))
        async with gate_in(tmp_path, lease=LeaseConfig(duration=60)) as (gate, _):
            await asyncio.wait_for(gate.add("other", keys("c")), 30)

    run(work())


def test_the_flag_is_taken_back_once_nothing_is_leased(tmp_path: Path) -> None:
    """Not while a lease may be trusted; and it is set anew before the next one."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            last = journal.last_seq
            gate.leases.tend()
            assert journal.last_seq == last
            replica.close()
            gate.leases.tend()
            assert journal.last_seq == last + 1
            journal.released.clear()
            replica.open()
            await replica.take_image()
            assert not await replica.granted()
            journal.released.set()
            assert (await replica.next(Grant)).subscriptions == (replica.subscription,)
            assert journal.last_seq == last + 2

    run(work())


def test_a_copy_is_taken_up_again_with_what_it_lacks(tmp_path: Path) -> None:
    """From the journal, growth and what is queued meanwhile included, and nothing twice."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            await gate.create("fruit", asked(100))
            replica = Replica(gate)
            await replica.lease()
            replica.close()
            replica.leave()
            await gate.add("fruit", keys(*(f"more {i}" for i in range(150))))
            journal.released.clear()
            add = asyncio.ensure_future(gate.add("fruit", keys("queued")))
            await until(lambda: journal.last_seq > journal.durable_seq)
            before = replica.opened
            assert before is not None
            bloom, seq = replica.bloom, replica.seq
            replica = Replica(gate)
            replica.bloom = bloom
            replica.open(
                journal_id=before.journal_id,
                filter_id=before.filter_id,
                generation=before.generation,
                seq=seq,
            )
            opened = await replica.next(Opened)
            assert opened.image_bytes == 0
            replica.subscription = opened.subscription
            journal.released.set()
            await add
            (entry,) = gate.catalog
            while replica.seq < journal.durable_seq:
                await replica.take_delta()
                replica.ack()
            assert entry.bloom is not None
            assert replica.bloom is not None
            assert len(replica.bloom.bodies) == len(entry.bloom.bodies) == 2
            assert replica.bloom.might_contain("queued")
            assert all(replica.bloom.might_contain_many([f"more {i}" for i in range(150)]))
            await leased(replica)

    run(work())


@pytest.mark.parametrize("why", ["journal", "filter", "generation", "ahead", "far behind", "trimmed"])
def test_what_cannot_be_proven_to_lack_nothing_gets_an_image(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another journal's copy, another filter's, of a history that is not this one, or too old."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock(), retention=0.0) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            assert replica.opened is not None
            held = {
                "journal_id": replica.opened.journal_id, "filter_id": replica.opened.filter_id,
                "generation": 1, "seq": replica.seq,
            }  # fmt: skip
            replica.close()
            for number in range(5):
                await gate.add("fruit", keys(f"key {number}"))
            if why == "journal":
                held["journal_id"] = bytes(16)
            elif why == "filter":
                held["filter_id"] = 99
            elif why == "generation":
                held["generation"] = 2
            elif why == "ahead":
                held["seq"] = journal.durable_seq + 1
            elif why == "far behind":
                monkeypatch.setattr(holders_module, "MOST_RESUMED", 4)
            else:
                await gate.snapshot("fruit")
                journal.trim(journal.durable_seq)
                await until(lambda: journal.trim_mark > replica.seq)
            replica.open(**held)
            await replica.take_image()
            assert replica.bloom is not None
            assert all(replica.bloom.might_contain_many([f"key {number}" for number in range(5)]))

    run(work())


def test_after_a_restart_what_was_trimmed_is_not_taken_for_nothing(tmp_path: Path) -> None:
    """The filter's last record may be gone with the others: its seq then says less than the trim mark."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock(), retention=0.0) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            replica.open()
            await replica.take_image()
            await gate.add("fruit", keys("mango"))
            stats = await gate.snapshot("fruit")
            journal.trim(stats.entry.files[-1].stamp)
            await until(lambda: journal.trim_mark > replica.seq)
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            assert replica.opened is not None
            again = Replica(gate)
            again.open(
                journal_id=journal.journal_id,
                filter_id=replica.opened.filter_id,
                generation=1,
                seq=replica.seq,
            )
            await again.take_image()
            assert again.bloom is not None
            assert again.bloom.might_contain("mango")

    run(work())


def test_copies_are_refused_that_cannot_be_had(tmp_path: Path) -> None:
    """Each with its reason; a DAMAGED filter, which nothing can be proven of, among them."""

    async def work() -> None:
        lease = LeaseConfig(per_filter=1, per_caller=2)
        async with gate_in(tmp_path, lease=lease, clock=Clock()) as (gate, _):
            for name in ("fruit", "other", "third", "damaged"):
                await gate.create(name, asked())
            damaged = gate.catalog.get("damaged")
            assert damaged is not None
            damaged.bloom = None
            replica = Replica(gate)
            expected: list[tuple[str, int, type[Exception]]] = [
                ("absent", 0, errors.FilterNotFound),
                ("damaged", 0, errors.NotForThisState),
                ("fruit", 100, errors.LimitExceeded),
            ]
            for name, max_bytes, error in expected:
                replica.open(name, max_bytes=max_bytes)
                assert isinstance((await replica.next(Refused)).error, error)
            await replica.lease("fruit")
            second = Replica(gate, OTHER)
            second.open("fruit")
            refused = await second.next(Refused)
            assert "lease.per_filter allows 1" in str(refused.error)
            replica.open("other")
            replica.open("third")
            await replica.next(Opened)
            assert "lease.per_caller allows 2" in str((await replica.next(Refused)).error)

    run(work())


def test_an_acknowledgement_of_what_was_never_sent_ends_the_stream(tmp_path: Path) -> None:
    """Adds would go on that the copy does not hold."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            replica.open()
            opened = await replica.next(Opened)
            with pytest.raises(errors.InvalidRequest):
                gate.holders.ack(replica.holder, opened.subscription, journal.durable_seq)
            with pytest.raises(errors.InvalidRequest):
                gate.holders.ack(replica.holder, opened.subscription, journal.durable_seq + 9)

    run(work())


def test_deltas_are_joined_while_one_is_under_way(tmp_path: Path) -> None:
    """However many Adds there are meanwhile; and growth keeps its place among them."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            await gate.create("fruit", asked(100))
            replica = Replica(gate)
            await replica.lease()
            names = [f"key {number}" for number in range(150)]
            adds = [await adding(gate, journal, name) for name in names]
            deltas = 0
            while replica.seq < journal.durable_seq:
                await replica.take_delta()
                deltas += 1
                replica.ack()
            await asyncio.gather(*adds)
            assert deltas == 4  # the first, the rest up to the growth, the growth, and what came behind it
            assert replica.bloom is not None
            assert len(replica.bloom.bodies) == 2
            assert all(replica.bloom.might_contain_many(names))

    run(work())


def test_an_image_does_not_delay_the_deltas_of_another_copy(tmp_path: Path) -> None:
    """Its parts go out while there is nothing else to send."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            await gate.create("fruit", asked())
            await gate.create("large", asked(2_000_000))
            replica = Replica(gate)
            await replica.lease()
            subscription = replica.subscription
            replica.open("large")
            await replica.next(Opened)
            await replica.next(Chunk)
            add = await adding(gate, journal, "mango")
            delta = await replica.next(Delta)
            assert delta.subscription == subscription
            gate.holders.ack(replica.holder, subscription, delta.last_seq)
            await add
            await replica.next(Chunk)

    run(work())


def test_a_copy_that_more_waits_for_than_may_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is the daemon's; and it is left out for a while."""
    monkeypatch.setattr(subscriptions_module, "WAITING_BYTES", 100)

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, journal):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            for number in range(3):
                await adding(gate, journal, *(f"key {number} {each}" for each in range(5)))
            await replica.take_delta()
            assert (await replica.next(Reset)).end is End.LAGGED
            replica.close()

    run(work())


def test_counts_are_counted_once_over_streams(tmp_path: Path) -> None:
    """Sent again they are not, whichever stream they come by; another replica's are its own."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, _):
            await gate.create("fruit", asked())
            entry = gate.catalog.get("fruit")
            assert entry is not None
            first, again, other = Replica(gate), Replica(gate), Replica(gate, OTHER)
            gate.holders.count(first.holder, 1, [("fruit", 5, 2), ("absent", 1, 1)])
            gate.holders.count(again.holder, 1, [("fruit", 5, 2)])
            gate.holders.count(other.holder, 1, [("fruit", 10, 0)])
            gate.holders.count(again.holder, 2, [("fruit", 0, 1)])
            assert (entry.replica_checks.skip, entry.replica_checks.hit) == (15, 3)
            again.renew()
            assert (await again.next(Grant)).counts_id == 2
            stats = await gate.stats("fruit")
            assert stats.leases == 0

    run(work())


def test_who_may_not_have_a_copy_any_more_loses_it(tmp_path: Path) -> None:
    """At the next renewal."""

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, _):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            replica.renew(lambda name: name != "fruit")
            assert (await replica.next(Reset)).end is End.REVOKED
            assert (await replica.next(Grant)).subscriptions == ()

    run(work())


def test_a_stop_ends_copies_and_takes_the_flag_back(tmp_path: Path) -> None:
    """It waits until none is trusted, so that the next start need not."""

    async def work() -> None:
        async with gate_in(tmp_path, lease=SHORT) as (gate, journal):
            await gate.create("fruit", asked())
            polite, gone = Replica(gate), Replica(gate, OTHER)
            await polite.lease()
            await gone.lease()
            gone.leave()
            stopping = asyncio.ensure_future(gate.leases.stop())
            reset = await polite.next(Reset)
            assert reset.end is End.STOPPING
            gate.holders.ack(polite.holder, polite.subscription, reset.seq)
            polite.close()
            await asyncio.wait_for(stopping, 10)
            polite.open()
            assert isinstance((await polite.next(Refused)).error, errors.NotServing)
        journal = HeldJournal(tmp_path)
        journal.prepare()
        assert journal.lease_seconds == 0.0
        journal.start()
        await journal.close()

    run(work())


def test_streams_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    """Once their leases have run out."""

    async def work() -> None:
        clock = Clock()
        async with gate_in(tmp_path, clock=clock) as (gate, _):
            await gate.create("fruit", asked())
            for _ in range(3):
                replica = Replica(gate)
                await replica.lease()
                replica.leave()
            gate.leases.tend()
            assert len(list(gate.leases.under("fruit"))) == 3
            clock.at += 2.3
            gate.leases.tend()
            assert not list(gate.leases.under("fruit"))
            assert not gate.holders._connected

    run(work())


def test_a_stream_that_asks_and_never_reads_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers would pile up; its leases go on until they run out."""
    monkeypatch.setattr(outbox_module, "MOST_UNSENT", 50)

    async def work() -> None:
        async with gate_in(tmp_path, clock=Clock()) as (gate, _):
            await gate.create("fruit", asked())
            replica = Replica(gate)
            await replica.lease()
            for _ in range(100):
                replica.renew()
            assert await replica.holder.outbox.next() is None
            assert isinstance(replica.holder.outbox.ended, errors.Overloaded)
            assert gate.leases.held("fruit") == 1

    run(work())
