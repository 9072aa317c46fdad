"""The memory of filters: what they may take, and having it before it is needed.

A fresh body's pages would be had from the operating system one by one, as bits are first set: measured, a
batch of 100,000 keys into a new body of 1 GiB held up the loop for 1.6 s. So bodies are made resident when
they are allocated, and large ones in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bloomgate import errors
from bloomgate.filters import DIGEST_BYTES, AddPlan, BloomBody, BodySpec, Segment, allocate
from bloomgate.filters import FilterFull as KernelFull
from bloomgated.catalog import Catalog, Entry
from bloomgated.config import LimitsConfig
from bloomgated.whole import Whole

log = logging.getLogger(__name__)

# A larger body is allocated in a thread: up to a millisecond a MiB.
ASIDE_BYTES = 4 << 20
# Seconds; memory does not come back as soon as a queue moves.
RETRY_AFTER_MEMORY = 5.0


class Room:
    """What all filters may take together. Used on the event loop."""

    def __init__(self, limits: LimitsConfig, catalog: Callable[[], Catalog], whole: Whole) -> None:
        """``whole`` runs what must not end half done."""
        self._limits, self._catalog, self._whole = limits, catalog, whole
        self._new: list[int] = []
        """Bytes of the filters that are being created."""
        self._growing: list[int] = []
        """Bytes of the bodies that are being allocated for filters that exist."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of all filters' bodies, those included that are being allocated or spare."""
        held = sum(entry.memory_bytes + _spare_bytes(entry) for entry in self._catalog())
        return held + sum(self._new) + sum(self._growing)

    @asynccontextmanager
    async def for_new(self, spec: BodySpec) -> AsyncIterator[BloomBody]:
        """The first body of a filter that is created within. Raises LimitExceeded, Overloaded."""
        self._check(spec.nbytes)
        self._new.append(spec.nbytes)
        try:
            try:
                body = await asyncio.to_thread(BloomBody.resident, spec)
            except MemoryError:
                log.error("no memory for a filter of %d bytes", spec.nbytes)
                raise errors.Overloaded(RETRY_AFTER_MEMORY, "no memory for this filter") from None
            yield body
        finally:
            self._new.remove(spec.nbytes)

    def _check(self, nbytes: int) -> None:
        limits = self._limits
        for limit, value, allowed in (
            ("filters", len(self._catalog()) + len(self._new) + 1, limits.filters),
            ("filter_bytes", nbytes, limits.filter_bytes),
            ("total_bytes", self.memory_bytes + nbytes, limits.total_bytes),
        ):
            if value > allowed:
                raise errors.LimitExceeded(limit, value, allowed)

    def plan(self, entry: Entry, digests: bytes) -> AddPlan:
        """What an Add will do. Raises FilterFull if the filter or the limits do not allow it."""
        if entry.bloom is None:
            # Kept for the rebuild that makes the filter whole again; what was there before is not known.
            return AddPlan([False] * (len(digests) // DIGEST_BYTES), (Segment(0, digests, 0),))
        limits = self._limits
        try:
            plan = entry.bloom.plan_add(digests, max(0, limits.filter_bytes - entry.bloom.memory_bytes))
        except KernelFull as full:
            limit, allowed = full.limit, full.allowed
            if limit == "memory_bytes":
                # The kernel's word for what it was given; the operator knows it under this one.
                limit, allowed = "filter_bytes", limits.filter_bytes
            raise errors.FilterFull(entry.name, limit, allowed, full.needed) from None
        if plan.growths and not _fits(entry, plan):
            # What is spare is for another plan, and this one may need the room.
            entry.spare = []
            self._check_growth(entry, plan)
        return plan

    def _check_growth(self, entry: Entry, plan: AddPlan) -> int:
        """The bytes that a plan adds. What all take is asked only here: too dear for every Add."""
        growth = sum(step.spec.nbytes for step in plan.growths)
        needed, allowed = self.memory_bytes + growth, self._limits.total_bytes
        if needed > allowed:
            raise errors.FilterFull(entry.name, "total_bytes", allowed, needed)
        return growth

    async def allocate_aside(self, entry: Entry, plan: AddPlan) -> None:
        """Have a plan's bodies spare for the next look. Raises Overloaded.

        Whoever goes away meanwhile ends nothing: the thread goes on, and what it allocates counts.
        """
        await self._whole.run(self._allocate_aside(entry, plan))

    async def _allocate_aside(self, entry: Entry, plan: AddPlan) -> None:
        async with entry.allocating:
            # Another Add may have done it meanwhile.
            if better_allocated_aside(entry, plan):
                growth = self._check_growth(entry, plan)
                self._growing.append(growth)
                try:
                    entry.spare = await asyncio.to_thread(_allocated, entry, plan)
                finally:
                    self._growing.remove(growth)


def _spare_bytes(entry: Entry) -> int:
    return sum(body.spec.nbytes for body in entry.spare)


def better_allocated_aside(entry: Entry, plan: AddPlan) -> bool:
    """Whether the plan adds a body too large to be allocated in one step with it."""
    return any(growth.spec.nbytes > ASIDE_BYTES for growth in plan.growths) and not _fits(entry, plan)


def bodies_of(entry: Entry, plan: AddPlan) -> list[BloomBody]:
    """The bodies that the plan adds, spare ones if they fit. Raises Overloaded."""
    return entry.spare if _fits(entry, plan) else _allocated(entry, plan)


def _fits(entry: Entry, plan: AddPlan) -> bool:
    return [body.spec for body in entry.spare] == [growth.spec for growth in plan.growths]


def _allocated(entry: Entry, plan: AddPlan) -> list[BloomBody]:
    try:
        return allocate(plan)
    except MemoryError:
        log.error("no memory for %s to grow", entry.name)
        raise errors.Overloaded(RETRY_AFTER_MEMORY, "no memory to grow") from None
