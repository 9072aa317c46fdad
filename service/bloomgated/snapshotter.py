"""When filters are written to disk, and how far the journal may be trimmed.

Two recorded snapshots are kept per filter, so that one damaged file is not the end of it. What a filter needs
of the journal begins at the older one's stamp; with fewer than two it begins at the filter's creation. An
idle filter is stamped anew without being written again, so that it holds nothing back.

One snapshot is written at a time, in a thread that does nothing else. Of those that wait there is one a
filter at most, whoever asks for it, and a stop ends them. A filter whose snapshot failed is left alone for a
thirty-second of the interval, then twice as long with each further failure, up to the interval.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

from bloomgate import errors
from bloomgate.filters.image import freeze
from bloomgated.catalog import Entry, Upkeep
from bloomgated.errors import JournalFailed, JournalQueueFull
from bloomgated.storage.journal import Journal
from bloomgated.storage.records import SnapshotFile, Snapshots
from bloomgated.storage.snapshots import KEPT_PER_FILTER, SnapshotStore, ordinal_of

log = logging.getLogger(__name__)

# What the first failure costs, as a part of the interval.
FIRST_DELAY = 1 / 32

P = ParamSpec("P")
T = TypeVar("T")


class Snapshotter:
    """Takes snapshots, one at a time, and asks the journal to trim. All methods run on one event loop."""

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
        # Its own thread: the loop's are shared with whatever counts the bits of large filters.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._one_at_a_time = asyncio.Lock()
        self._waiting: dict[Entry, asyncio.Future[None]] = {}
        """Filters to be written, in order, that are not begun yet."""
        self._worker: asyncio.Task[None] | None = None
        self._stopping = False
        self.content_seq = journal.last_seq
        """The newest record of any filter that is not about snapshots: what trimming could free."""

    async def snapshot(self, entry: Entry) -> None:
        """Write ``entry`` as it is now or a little later, and return once that is recorded.

        It goes on if the caller goes away. Raises NotForThisState for a damaged filter, FilterNotFound for
        one being dropped, NotServing once stopping, Unavailable if the disk does not take it, JournalFailed
        or JournalQueueFull if the journal does not; the snapshots before it stay.
        """
        if self._stopping:
            raise _stopping()
        _check(entry)
        ended = self._waiting.get(entry)
        if ended is None:
            ended = self._waiting[entry] = asyncio.get_running_loop().create_future()
            # Perhaps nobody is left to hear how it ends; without this the loop would complain of that.
            ended.add_done_callback(asyncio.Future.exception)
            if self._worker is None or self._worker.done():
                self._worker = asyncio.ensure_future(self._work())
        # Not awaited itself: a caller that goes away would cancel it for all that joined.
        await asyncio.wait((ended,))
        ended.result()

    async def tend(self, entries: Callable[[], Iterable[Entry]], pending: Iterable[int] = ()) -> None:
        """Write what is due, stamp what is idle, then trim. ``pending``: the ids of filters being created."""
        for entry in list(entries()):
            if self._stopping:
                return
            if entry.bloom is None or entry.dropping or self._clock() < entry.upkeep.not_before:
                continue
            # What failed is counted and logged there, and tried again later.
            with suppress(errors.BloomgateError, JournalQueueFull):
                await self._tend(entry)
        # Read after the last await: what was created or dropped meanwhile counts.
        self._journal.trim(min([self._journal.durable_seq, *pending, *map(held_back, entries())]))

    async def write_changed(self, entries: Iterable[Entry]) -> None:
        """Write every filter that changed since its newest snapshot: the last thing a clean stop does."""
        for entry in list(entries):
            if entry.bloom is not None and not entry.dropping and entry.last_seq > _newest_seq(entry):
                async with self._one_at_a_time:
                    with suppress(errors.BloomgateError, JournalFailed, JournalQueueFull):
                        await self._write(entry, "no final snapshot of %s, the journal has it: %s")

    async def forget(self, entry: Entry) -> None:
        """Delete the files of a filter whose drop is durable."""
        await self._remove(entry.files)

    def stop(self) -> None:
        """Begin nothing more but ``write_changed``; what waits ends with NotServing. Idempotent."""
        self._stopping = True
        for ended in self._waiting.values():
            ended.set_exception(_stopping())
        self._waiting.clear()

    async def finish(self) -> None:
        """Stop, and return once the snapshot under way has ended."""
        self.stop()
        if self._worker is not None:
            await asyncio.wait((self._worker,))

    async def close(self) -> None:
        """Finish, and let go of the thread: nothing is written or deleted after this. Idempotent."""
        await self.finish()
        self._disk.shutdown()

    async def _work(self) -> None:
        while self._waiting:
            async with self._one_at_a_time:
                # A stop may have come while this waited.
                entry = next(iter(self._waiting), None)
                if entry is None:
                    return
                # From here on a further caller cannot join it: its Adds may be too late for it.
                ended = self._waiting.pop(entry)
                try:
                    await self._write(entry, "snapshot of %s failed: %s")
                except Exception as error:
                    ended.set_exception(error)
                else:
                    ended.set_result(None)

    async def _write(self, entry: Entry, complaint: str) -> None:
        _check(entry)
        try:
            with self._minding(entry, complaint):
                # In one step: the counts and bodies of every record up to seq, and of none after.
                assert entry.bloom is not None
                seq, written_bytes = self._journal.last_seq, entry.journal_bytes
                header = freeze(entry.bloom, entry.generation, seq)
                # A stamp may leave the daemon once it is durable; the first byte is written after that.
                await self._journal.durable(seq)
                ordinal = max(map(ordinal_of, entry.files), default=0) + 1
                file = await self._on_disk(self._store.write, entry.filter_id, header, ordinal)
                await self._record(entry, (*entry.files, file)[-KEPT_PER_FILTER:])
                entry.journal_bytes -= written_bytes
        except OSError as error:
            raise errors.Unavailable(f"the snapshot could not be written: {error.strerror}") from None

    async def _tend(self, entry: Entry) -> None:
        if entry.upkeep.since is None:
            entry.upkeep.since = self._clock()
        if self._clock() < entry.upkeep.since + self._interval and entry.journal_bytes < self._journal_bytes:
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
            if self._stopping or entry.dropping or entry.files[0].seq < entry.last_seq:
                return
            files = (dataclasses.replace(file, stamp=max(file.stamp, stamp)) for file in entry.files)
            with self._minding(entry, "the snapshots of %s could not be stamped anew: %s"):
                await self._record(entry, tuple(files))

    @contextmanager
    def _minding(self, entry: Entry, complaint: str) -> Iterator[None]:
        """Note when it was done; or count and log, once, that it failed, and when to try again."""
        try:
            yield
        except Exception as error:
            delay = min(self._interval, entry.upkeep.delay * 2 or self._interval * FIRST_DELAY)
            entry.upkeep.delay, entry.upkeep.not_before = delay, self._clock() + delay
            entry.snapshot_failures += 1
            log.error(complaint, entry.name, error.strerror if isinstance(error, OSError) else error)
            raise
        entry.upkeep = Upkeep(since=self._clock())

    async def _record(self, entry: Entry, files: tuple[SnapshotFile, ...]) -> None:
        before = {file.name for file in entry.files}
        try:
            seq = self._journal.append([Snapshots(entry.filter_id, files)])
        except Exception:
            # No record names the new file, and none will. Once one is queued it may become durable.
            await self._remove([file for file in files if file.name not in before])
            raise
        await self._journal.durable(seq)
        kept = {file.name for file in files}
        gone, entry.files = [file for file in entry.files if file.name not in kept], files
        await self._remove(gone)
        if entry.dropping:
            await self._remove(files)

    async def _remove(self, files: Iterable[SnapshotFile]) -> None:
        for file in files:
            await self._on_disk(self._store.remove, file.name)

    async def _on_disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._disk.submit(work, *args, **kwargs))


def held_back(entry: Entry) -> int:
    """The highest seq that may be trimmed as far as ``entry`` is concerned."""
    if entry.bloom is None:
        return 2**63 - 1
    return entry.files[0].stamp if len(entry.files) >= KEPT_PER_FILTER else entry.filter_id


def _newest_seq(entry: Entry) -> int:
    return entry.files[-1].seq if entry.files else entry.filter_id


def _check(entry: Entry) -> None:
    if entry.dropping:
        raise errors.FilterNotFound(entry.name)
    if entry.bloom is None:
        raise errors.NotForThisState(entry.name, entry.state)


def _stopping() -> errors.NotServing:
    return errors.NotServing("bloomgated is stopping")
