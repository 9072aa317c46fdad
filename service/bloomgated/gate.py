"""The verbs: the one door for every edge.

A check reads the catalog once and probes; no lock, no disk, no wait. An Add probes, queues its journal
records and sets its bits in one step without an await, then waits for the group commit: when it is
acknowledged it is durable. No snapshot's counts and no later Add can have seen it half done; a snapshot's
bits may hold some of it, which its replay then completes.

All methods run on one event loop. Errors are ``bloomgate.errors``, the kernel's, and the journal's.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bloomgate import errors
from bloomgate.filters import AddPlan, BloomFilter, FilterSpec, Segment
from bloomgate.names import check_name
from bloomgated.catalog import Catalog, Entry
from bloomgated.config import LeaseConfig, LimitsConfig
from bloomgated.holders import Holders
from bloomgated.leases import Leases
from bloomgated.outbox import End
from bloomgated.requests import SLICE_KEYS, Asked, Keys, Stats, measure
from bloomgated.room import Room, better_allocated_aside, bodies_of
from bloomgated.snapshotter import Snapshotter
from bloomgated.storage.journal import Journal
from bloomgated.storage.records import Add, Create, Drop, Grow
from bloomgated.storage.recovery import Recovered
from bloomgated.turn import Turn
from bloomgated.whole import Whole

log = logging.getLogger(__name__)

MOST_COUNTED = 2**64 - 1
# Seconds between two lines in the log about one filter's false noes.
FALSE_NO_LOG_EVERY = 10.0


class Gate:
    """Named filters over a journal. Serves nothing before ``open``."""

    def __init__(
        self,
        limits: LimitsConfig,
        lease: LeaseConfig = LeaseConfig(),  # noqa: B008 - immutable
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._clock = clock
        self.catalog = Catalog()
        self._journal: Journal | None = None
        self._snapshotter: Snapshotter | None = None
        self._whole = Whole()
        self.room = Room(limits, lambda: self.catalog, self._whole)
        self.turn = Turn()
        self.leases = Leases(lease)
        self.holders = Holders(self.leases, lambda: self.catalog)
        self._measuring = ThreadPoolExecutor(1, thread_name_prefix="stats")
        self._creating: set[int] = set()
        """Ids of filters whose creation is not durable yet."""
        self._name_locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def open(
        self, journal: Journal, snapshotter: Snapshotter, recovered: list[Recovered], owner_since: float
    ) -> None:
        """Begin to serve what recovery found.

        ``owner_since``: when this process became the owner of the data directory, on the clock of leases.
        """
        self._journal, self._snapshotter = journal, snapshotter
        self.leases.begin(journal, owner_since)
        self.holders.begin(journal)
        self.catalog = Catalog(
            {
                each.name: Entry(
                    filter_id=each.filter_id,
                    name=each.name,
                    spec=each.spec,
                    bloom=each.bloom,
                    damage=each.damage,
                    generation=each.generation,
                    last_seq=each.last_seq,
                    files=each.files,
                    journal_bytes=each.journal_bytes,
                )
                for each in recovered
            }
        )

    @property
    def opened(self) -> bool:
        """Whether ``open`` was called."""
        return self._journal is not None

    @property
    def journal(self) -> Journal:
        """The open journal. Raises NotServing before ``open``."""
        if self._journal is None:
            raise errors.NotServing("bloomgated is recovering")
        return self._journal

    @property
    def snapshotter(self) -> Snapshotter:
        """The open snapshotter. Raises NotServing before ``open``."""
        if self._snapshotter is None:
            raise errors.NotServing("bloomgated is recovering")
        return self._snapshotter

    # -- for services

    async def might_contain(self, name: str, keys: Keys) -> tuple[bytes, bool]:
        """Per key, in order, a byte: whether the filter might contain it, 1 or 0. And whether it could prove
        no "no" at all."""
        entry = self._entry(name)
        self._check_hash_id(entry, keys)
        bloom = entry.bloom
        if bloom is None:
            entry.checks.unsure += len(keys)
            return b"\1" * len(keys), True
        if len(keys) <= SLICE_KEYS:
            answers = bloom.find_digests(keys.digests or entry.spec.hasher.digests(keys.keys))
        else:
            parts = []
            for part in keys.slices():
                parts.append(bloom.find_digests(part.digests or entry.spec.hasher.digests(part.keys)))
                await asyncio.sleep(0)
            answers = b"".join(parts)
        hits = answers.count(1)
        entry.checks.hit += hits
        entry.checks.skip += len(answers) - hits
        return answers, False

    def might_contain_one(self, name: str, key: bytes) -> tuple[bool, bool]:
        """``might_contain`` of one key, which is most of the calls: no list, no digest, no coroutine."""
        entry = self.catalog.get(name) or self._entry(name)
        bloom = entry.bloom
        if bloom is None:
            entry.checks.unsure += 1
            return True, True
        found = bloom.might_contain(key)
        if found:
            entry.checks.hit += 1
        else:
            entry.checks.skip += 1
        return found, False

    async def add(self, name: str, keys: Keys) -> tuple[list[bool], int]:
        """Add keys; once this returns they are durable. Per key whether it was certainly new, and the seq."""
        entry = self._entry(name)
        self._check_hash_id(entry, keys)
        digests = keys.digests
        if keys.keys:
            parts = []
            for part in keys.slices():
                parts.append(entry.spec.hasher.digests(part.keys))
                if len(part) == SLICE_KEYS:
                    await asyncio.sleep(0)
            digests = b"".join(parts)
        while True:
            if self.catalog.get(name) is not entry or entry.dropping:
                raise errors.FilterNotFound(name)
            if not digests:
                return [], self.journal.durable_seq
            plan = self.room.plan(entry, digests)
            if not better_allocated_aside(entry, plan):
                break
            self.turn.give_up()
            await self.room.allocate_aside(entry, plan)
        was_new, seq = self._add_step(entry, plan)
        # The disk takes its time; other large calls need not wait for it.
        self.turn.give_up()
        await self.journal.durable(seq)
        await self.leases.settled(name, seq)
        entry.adds += len(was_new)
        return was_new, seq

    def _add_step(self, entry: Entry, plan: AddPlan) -> tuple[list[bool], int]:
        """Queue, set: one step with the plan, never an await in it or between the two."""
        records = [
            Add(entry.filter_id, step) if isinstance(step, Segment) else Grow(entry.filter_id, step)
            for step in plan.steps
        ]
        # Before it is journalled: what cannot be allocated must not exist after a restart.
        grown = bodies_of(entry, plan)
        # The journal may refuse, so it comes first; no bit is set that is not queued.
        seq = self.journal.append(records)
        if entry.bloom is not None:
            entry.bloom.apply(plan, grown)
            if grown:
                entry.spare = []
        entry.last_seq = self.snapshotter.content_seq = seq
        self.leases.queued(entry, seq, plan.steps)
        entry.journal_bytes += sum(len(step.digests) for step in plan.steps if isinstance(step, Segment))
        return plan.was_new, seq

    async def stats(self, name: str) -> Stats:
        """What a filter is, how full it is and what it saved."""
        return await self._stats(self._entry(name))

    def report_outcomes(self, name: str, found: int, not_found: int, false_no: int) -> None:
        """Count what the authority said after hits."""
        entry = self._entry(name)
        outcomes = entry.outcomes
        # As far as Stats can show: a caller that reports nonsense must not make it fail.
        outcomes.found = min(outcomes.found + found, MOST_COUNTED)
        outcomes.not_found = min(outcomes.not_found + not_found, MOST_COUNTED)
        outcomes.false_no = min(outcomes.false_no + false_no, MOST_COUNTED)
        self._log_false_no(entry)

    def _log_false_no(self, entry: Entry) -> None:
        """Tell of the false noes since the last line, if that is old enough: no caller floods the log."""
        outcomes, now = entry.outcomes, self._clock()
        untold = outcomes.false_no - outcomes.false_no_logged
        if untold and now >= outcomes.logged_at + FALSE_NO_LOG_EVERY:
            outcomes.false_no_logged, outcomes.logged_at = outcomes.false_no, now
            log.error("the authority has %d keys that %s answered a definite no for", untold, entry.name)

    def hash_spec(self, name: str) -> FilterSpec:
        """The spec whose hasher makes the filter's digests."""
        return self._entry(name).spec

    # -- for operators

    async def create(self, name: str, asked: Asked) -> tuple[Stats, bool]:
        """Create a filter, or find that an equal one exists (False)."""
        check_name(name, "name")
        return await self._whole.run(self._create(name, asked))

    async def _create(self, name: str, asked: Asked) -> tuple[Stats, bool]:
        async with self._name_lock(name):
            entry = self.catalog.get(name)
            if entry is not None:
                if differing := asked.spec.differs_from(entry.spec, asked.seed):
                    raise errors.FilterExists(name, differing)
                return await self._stats(entry), False
            # Before it is journalled: what cannot be allocated must not exist after a restart.
            async with self.room.for_new(asked.spec.first_body) as body:
                filter_id = self.journal.append([Create(name, asked.spec)])
                self._creating.add(filter_id)
                try:
                    await self.journal.durable(filter_id)
                    bloom = BloomFilter.of(asked.spec, [body])
                    entry = Entry(filter_id, name, asked.spec, bloom, last_seq=filter_id)
                    self.catalog = self.catalog.with_entry(entry)
                    self.snapshotter.content_seq = max(self.snapshotter.content_seq, filter_id)
                finally:
                    self._creating.remove(filter_id)
            log.info("created filter %s", name)
            return await self._stats(entry), True

    async def list(self, shown: Callable[[str], bool] = lambda _name: True) -> list[Stats]:
        """Every filter whose name is to be shown, by name."""
        _ = self.journal  # NotServing rather than an empty list
        return [await self._stats(entry) for entry in self.catalog if shown(entry.name)]

    async def drop(self, name: str) -> None:
        """Drop a filter for good; once this returns its name is free."""
        check_name(name, "name")
        await self._whole.run(self._drop(name))

    async def _drop(self, name: str) -> None:
        async with self._name_lock(name):
            entry = self._entry(name)
            seq = self.journal.append([Drop(entry.filter_id)])
            # Checks go on until the drop is durable; an Add behind it in the journal would be lost.
            entry.dropping = True
            await self.journal.durable(seq)
            # Its name stays taken until no copy is trusted any more: copies of what is created under it next
            # must be all there are.
            self.leases.ended(entry, seq, End.DROPPED)
            await self.leases.settled(name, seq)
            self.catalog = self.catalog.without(name)
            self.snapshotter.content_seq = max(self.snapshotter.content_seq, seq)
            await self.snapshotter.forget(entry)
            log.info("dropped filter %s", name)

    async def snapshot(self, name: str) -> Stats:
        """Write a filter to disk now."""
        check_name(name, "name")
        entry = self._entry(name)
        await self.snapshotter.snapshot(entry)
        return await self._stats(entry)

    async def tend(self) -> None:
        """Take the snapshots that are due and trim the journal; called every few seconds."""
        for entry in self.catalog:
            self._log_false_no(entry)
        self.leases.tend()
        await self.snapshotter.tend(lambda: self.catalog, self._creating)

    async def finish(self) -> None:
        """Wait for creations, drops and the snapshot under way; those not begun end with NotServing.

        Called once no new call comes in.
        """
        if self._snapshotter is not None:
            self._snapshotter.stop()
        await self._whole.finished()
        if self._snapshotter is not None:
            await self._snapshotter.finish()

    # -- shared

    def _entry(self, name: str) -> Entry:
        entry = self.catalog.get(name)
        if entry is None:
            check_name(name)
            if self._journal is None:
                raise errors.NotServing("bloomgated is recovering")
            raise errors.FilterNotFound(name)
        return entry

    def _check_hash_id(self, entry: Entry, keys: Keys) -> None:
        if keys.digests and keys.hash_id != entry.spec.hasher.hash_id:
            raise errors.StaleHashId(entry.name)

    async def _stats(self, entry: Entry) -> Stats:
        # Off the loop: counting a large body's bits takes longer than a check may wait. And in a thread of
        # their own: many who ask would else keep those of the loop from whoever creates or grows a filter.
        fill = await asyncio.get_running_loop().run_in_executor(self._measuring, measure, entry.bloom)
        return Stats(entry, fill, self.journal.durable_seq, self.leases.held(entry.name))

    def _name_lock(self, name: str) -> asyncio.Lock:
        return self._name_locks.setdefault(name, asyncio.Lock())
