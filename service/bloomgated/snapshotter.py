"""When filters are written to disk, and how far the journal may be trimmed.

Two recorded snapshots are kept per filter, so that one damaged file is not the end of it. What a filter needs
of the journal begins at the older one's stamp; with fewer than two it begins at the filter's creation. An
idle filter is stamped anew without being written again, so that it holds nothing back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from bloomgate import errors
from bloomgate.filters.image import freeze
from bloomgated.catalog import Entry
from bloomgated.errors import JournalFailed, JournalQueueFull
from bloomgated.storage.journal import Journal
from bloomgated.storage.records import SnapshotFile, Snapshots
from bloomgated.storage.snapshots import KEPT_PER_FILTER, SnapshotStore, ordinal_of

log = logging.getLogger(__name__)


class Snapshotter:
    """Takes snapshots, one at a time, and asks the journal to trim."""

    def __init__(
        self,
        journal: Journal,
        store: SnapshotStore,
        *,
        interval: float,
        journal_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval`` in seconds and ``journal_bytes`` say when a changed filter is due."""
        self._journal, self._store = journal, store
        self._interval, self._journal_bytes = interval, journal_bytes
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self._tended: dict[int, float] = {}
        self.content_seq = journal.last_seq
        """The newest record of any filter that is not about snapshots: what trimming could free."""

    async def snapshot(self, entry: Entry) -> None:
        """Write ``entry`` as it is now and return once that is recorded.

        Raises NotForThisState for a damaged filter, FilterNotFound for one being dropped, Unavailable if the
        disk does not take it; the snapshots before it stay.
        """
        async with self._one_at_a_time:
            if entry.dropping:
                raise errors.FilterNotFound(entry.name)
            if entry.bloom is None:
                raise errors.NotForThisState(entry.name, entry.state)
            # In one step: the counts and bodies of every record up to seq, and of none after.
            seq, written_bytes = self._journal.last_seq, entry.journal_bytes
            header = freeze(entry.bloom, entry.generation, seq)
            # A stamp may leave the daemon once it is durable; the first byte is written after that.
            await self._journal.durable(seq)
            ordinal = max(map(ordinal_of, entry.files), default=0) + 1
            try:
                file = await asyncio.to_thread(self._store.write, entry.filter_id, header, ordinal)
            except OSError as error:
                entry.snapshot_failures += 1
                log.error("snapshot of %s failed: %s", entry.name, error.strerror)
                raise errors.Unavailable(f"the snapshot could not be written: {error.strerror}") from None
            await self._record(entry, (*entry.files, file)[-KEPT_PER_FILTER:])
            entry.journal_bytes -= written_bytes
            self._tended[entry.filter_id] = self._clock()

    async def tend(self, entries: Callable[[], Iterable[Entry]], pending: Iterable[int] = ()) -> None:
        """Write what is due, stamp what is idle, then trim. ``pending``: the ids of filters being created."""
        for entry in list(entries()):
            if entry.bloom is None or entry.dropping:
                continue
            try:
                await self._tend(entry)
            except (errors.BloomgateError, JournalQueueFull) as error:
                log.warning("snapshot of %s put off: %s", entry.name, error)
        # Read after the last await: what was created or dropped meanwhile counts.
        self._journal.trim(min([self._journal.durable_seq, *pending, *map(held_back, entries())]))

    async def write_changed(self, entries: Iterable[Entry]) -> None:
        """Write every filter that changed since its newest snapshot: the last thing a clean stop does."""
        for entry in list(entries):
            if entry.bloom is not None and not entry.dropping and entry.last_seq > _newest_seq(entry):
                try:
                    await self.snapshot(entry)
                except (errors.BloomgateError, JournalFailed, JournalQueueFull) as error:
                    log.error("no final snapshot of %s, the journal has it: %s", entry.name, error)

    async def forget(self, entry: Entry) -> None:
        """Delete the files of a filter whose drop is durable."""
        self._tended.pop(entry.filter_id, None)
        await self._remove(entry.files)

    async def _tend(self, entry: Entry) -> None:
        due_at = self._tended.setdefault(entry.filter_id, self._clock()) + self._interval
        if self._clock() < due_at and entry.journal_bytes < self._journal_bytes:
            return
        if entry.last_seq > _newest_seq(entry):
            await self.snapshot(entry)
        elif self.content_seq > held_back(entry):
            if len(entry.files) == KEPT_PER_FILTER and entry.files[0].seq >= entry.last_seq:
                await self._stamp(entry)
            else:
                await self.snapshot(entry)

    async def _stamp(self, entry: Entry) -> None:
        """Both files hold all there is of an idle filter: say so up to the present."""
        async with self._one_at_a_time:
            stamp = self._journal.durable_seq
            if entry.dropping or entry.files[0].seq < entry.last_seq:
                return
            files = (dataclasses.replace(file, stamp=max(file.stamp, stamp)) for file in entry.files)
            await self._record(entry, tuple(files))
            self._tended[entry.filter_id] = self._clock()

    async def _record(self, entry: Entry, files: tuple[SnapshotFile, ...]) -> None:
        before = entry.files
        await self._journal.durable(self._journal.append([Snapshots(entry.filter_id, files)]))
        entry.files = files
        kept = {file.name for file in files}
        await self._remove([file for file in before if file.name not in kept])
        if entry.dropping:
            await self._remove(files)

    async def _remove(self, files: Iterable[SnapshotFile]) -> None:
        for file in files:
            await asyncio.to_thread(self._store.remove, file.name)


def held_back(entry: Entry) -> int:
    """The highest seq that may be trimmed as far as ``entry`` is concerned."""
    if entry.bloom is None:
        return 2**63 - 1
    return entry.files[0].stamp if len(entry.files) >= KEPT_PER_FILTER else entry.filter_id


def _newest_seq(entry: Entry) -> int:
    return entry.files[-1].seq if entry.files else entry.filter_id
