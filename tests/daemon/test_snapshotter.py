"""When snapshots are written, by whom, and what is left when one fails. Disk, journal and clock are held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bloomgate import errors
from bloomgated.catalog import Entry
from bloomgated.errors import JournalFailed, JournalQueueFull
from bloomgated.gate import Gate
from bloomgated.requests import Keys
from storage.making import Clock

from . import inside


@dataclass
class Held:
    """A gate with some filters, each with one key that no snapshot has, over parts that can be held."""

    gate: Gate
    journal: inside.HeldJournal
    store: inside.HeldStore
    clock: Clock
    directory: Path

    def entry(self, name: str) -> Entry:
        entry = self.gate.catalog.get(name)
        assert entry is not None
        return entry

    def names(self) -> list[str]:
        """The filters whose writing has begun, in order."""
        by_id = {entry.filter_id: entry.name for entry in self.gate.catalog}
        return [by_id[filter_id] for filter_id in self.store.begun]

    def on_disk(self) -> set[str]:
        return {path.name for path in self.directory.glob("snapshots/*")}

    def recorded(self) -> set[str]:
        return {file.name for entry in self.gate.catalog for file in entry.files}

    async def under_way(self, name: str) -> asyncio.Task[None]:
        """A snapshot that has begun and is held."""
        self.store.released.clear()
        begun = len(self.store.begun)
        task = asyncio.ensure_future(self.gate.snapshotter.snapshot(self.entry(name)))
        await inside.until(lambda: len(self.store.begun) > begun)
        return task


@asynccontextmanager
async def held_gate(directory: Path, *names: str) -> AsyncIterator[Held]:
    store, clock = inside.HeldStore(directory), Clock()
    async with inside.open_gate(directory, store=store, clock=clock) as (gate, journal):
        for name in names:
            await gate.create(name, inside.asked(1000, 1e-9))
            await gate.add(name, Keys((b"first",)))
        yield Held(gate, journal, store, clock, directory)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run one test's coroutine, which may take no longer than half a minute."""
    return asyncio.run(asyncio.wait_for(work, 30))


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as a warning or worse since the last time."""
    lines = [record.getMessage() for record in caplog.records if record.levelno > 20]
    caplog.clear()
    return lines


# -- who waits for what


def test_callers_that_go_away_leave_one_snapshot_behind(tmp_path: Path) -> None:
    """Two hundred that give up while another is written cost one more write, not two hundred."""

    async def work() -> None:
        async with held_gate(tmp_path, "one", "two") as it:
            first = await it.under_way("one")
            callers = [asyncio.ensure_future(it.gate.snapshot("two")) for _ in range(200)]
            await asyncio.sleep(0)
            for caller in callers:
                caller.cancel()
            assert all(
                isinstance(end, asyncio.CancelledError)
                for end in await asyncio.gather(*callers, return_exceptions=True)
            )
            it.store.released.set()
            await first
            await inside.until(lambda: bool(it.entry("two").files))
            await it.gate.snapshotter.finish()
            assert it.names() == ["one", "two"]

    run(work())


def test_a_caller_joins_a_snapshot_that_has_not_begun(tmp_path: Path) -> None:
    """And never one that has: what it added before it asked must be in the file that it waits for."""

    async def work() -> None:
        async with held_gate(tmp_path, "one") as it:
            first = await it.under_way("one")
            _, seq = await it.gate.add("one", Keys((b"second",)))
            snapshot = it.gate.snapshotter.snapshot
            joined = [asyncio.ensure_future(snapshot(it.entry("one"))) for _ in range(3)]
            await asyncio.sleep(0)
            joined[0].cancel()
            it.store.released.set()
            await first
            await asyncio.gather(*joined[1:])
            assert it.names() == ["one", "one"]
            older, newer = it.entry("one").files
            assert older.seq < seq <= newer.seq

    run(work())


def test_all_that_joined_hear_of_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each of them, and the log and the count once."""

    async def work() -> None:
        async with held_gate(tmp_path, "one", "two") as it:
            first = await it.under_way("one")
            joined = [asyncio.ensure_future(it.gate.snapshot("two")) for _ in range(3)]
            await asyncio.sleep(0)
            joined[0].cancel()
            it.store.fails = OSError(28, "No space left on device")
            it.store.released.set()
            for task in (first, *joined[1:]):
                with pytest.raises(errors.Unavailable, match="could not be written: No space left on device"):
                    await task
            assert [it.entry(name).snapshot_failures for name in ("one", "two")] == [1, 1]
            assert failures(caplog) == [
                f"snapshot of {name} failed: No space left on device" for name in ("one", "two")
            ]

    run(work())


# -- a stop


def test_a_stop_ends_what_has_not_begun(tmp_path: Path) -> None:
    """At once, as not serving, while the one under way goes on; after it a clean stop still writes."""

    async def work() -> None:
        async with held_gate(tmp_path, "one", "three", "two") as it:
            first = await it.under_way("one")
            waiting = [asyncio.ensure_future(it.gate.snapshot(name)) for name in ("one", "two", "two")]
            await asyncio.sleep(0)
            it.gate.snapshotter.stop()
            for ended in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(ended, errors.NotServing)
            with pytest.raises(errors.NotServing):
                await it.gate.snapshot("two")
            assert not first.done()
            it.store.released.set()
            await first
            await it.gate.finish()
            assert it.names() == ["one"]
            await it.gate.snapshotter.write_changed(it.gate.catalog)
            assert it.names() == ["one", "three", "two"]
            assert it.on_disk() == it.recorded()
            assert len(it.on_disk()) == 3

    run(work())


def test_finishing_waits_for_no_more_than_the_one_under_way(tmp_path: Path) -> None:
    """Two hundred callers that went away do not hold up a stop."""

    async def work() -> None:
        async with held_gate(tmp_path, "one", "two") as it:
            first = await it.under_way("one")
            callers = [asyncio.ensure_future(it.gate.snapshot("two")) for _ in range(200)]
            await asyncio.sleep(0)
            for caller in callers:
                caller.cancel()
            finishing = asyncio.ensure_future(it.gate.finish())
            await asyncio.sleep(0)
            assert not finishing.done()
            it.store.released.set()
            await finishing
            assert first.done()
            assert it.names() == ["one"]

    run(work())


def test_tending_ends_with_a_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters that are due but not begun are left to the clean stop's own snapshots, without a complaint, and
    nothing is trimmed any more."""

    async def work() -> None:
        async with held_gate(tmp_path, "one", "three", "two") as it:
            await it.gate.tend()
            it.clock.now += 320
            it.store.released.clear()
            tending = asyncio.ensure_future(it.gate.tend())
            await inside.until(lambda: bool(it.store.begun))
            it.gate.snapshotter.stop()
            it.store.released.set()
            trimmed: list[int] = []
            monkeypatch.setattr(it.journal, "trim", trimmed.append)
            await tending
            assert it.names() == ["one"]
            assert trimmed == []
            await it.gate.tend()
            assert it.names() == ["one"]
            assert failures(caplog) == []

    run(work())


def test_a_stop_ends_stamping_anew_that_waits(tmp_path: Path) -> None:
    """It would be one more record behind the snapshot under way, for nothing."""

    async def work() -> None:
        async with held_gate(tmp_path, "idle", "one") as it:
            await it.gate.tend()
            for _ in range(2):
                await it.gate.snapshot("idle")
            await it.gate.add("one", Keys((b"second",)))
            files = it.entry("idle").files
            first = await it.under_way("one")
            it.clock.now += 320
            tending = asyncio.ensure_future(it.gate.tend())
            await asyncio.sleep(0)
            it.gate.snapshotter.stop()
            it.store.released.set()
            await asyncio.gather(first, tending)
            assert it.entry("idle").files == files

    run(work())


def test_snapshots_do_not_wait_behind_what_counts_bits(tmp_path: Path) -> None:
    """With every thread of the loop busy, a snapshot, a drop and a stop go through."""

    async def work() -> None:
        busy = threading.Event()
        async with held_gate(tmp_path, "one", "two") as it:
            loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(1)
            loop.set_default_executor(threads)
            counting = asyncio.ensure_future(asyncio.to_thread(busy.wait, 60))
            await asyncio.sleep(0)
            await it.gate.snapshotter.snapshot(it.entry("one"))
            await it.gate.snapshotter.snapshot(it.entry("two"))
            await it.gate.drop("one")
            assert it.on_disk() == it.recorded()
            await it.gate.finish()
            await it.gate.snapshotter.close()
            await it.gate.snapshotter.close()
            await it.journal.close()
            assert not counting.done()
            busy.set()
            await counting

    run(work())


# -- what a failure leaves


@pytest.mark.parametrize(
    "refusal", [JournalQueueFull(10, 5), JournalFailed("closed")], ids=["full", "failed"]
)
def test_a_snapshot_that_the_journal_refuses_leaves_no_file(
    tmp_path: Path, refusal: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted and logged, and the two recorded ones stay as they are."""

    async def work() -> None:
        async with held_gate(tmp_path, "one") as it:
            for _ in range(2):
                await it.gate.snapshot("one")
            before, files = it.on_disk(), it.entry("one").files
            it.journal.refuses = refusal
            with pytest.raises(type(refusal)):
                await it.gate.snapshot("one")
            assert it.on_disk() == before == it.recorded()
            assert it.entry("one").files == files
            assert it.entry("one").snapshot_failures == 1
            assert failures(caplog) == [f"snapshot of one failed: {refusal}"]
            it.journal.refuses = None
            await it.gate.snapshot("one")
            assert it.on_disk() == it.recorded() != before

    run(work())


def test_a_file_stays_once_its_record_is_queued(tmp_path: Path) -> None:
    """A commit that fails may have been written all the same, and would then name a file that is gone."""

    async def work() -> None:
        async with held_gate(tmp_path, "one") as it:
            it.journal.loses = OSError(5, "Input/output error")
            with pytest.raises(JournalFailed):
                await it.gate.snapshotter.snapshot(it.entry("one"))
            assert len(it.on_disk()) == 1
            assert it.recorded() == set()
            assert it.entry("one").snapshot_failures == 1
        async with held_gate(tmp_path) as it:
            assert (await it.gate.might_contain("one", Keys((b"first", b"never"))))[0] == bytes([True, False])
            assert it.on_disk() == set()

    run(work())


def test_a_failing_snapshot_is_tried_again_ever_more_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a thirty-second of the interval, then twice that and so on up to the interval, with one line in
    the log for each; the other filters are written meanwhile, and a success ends it."""

    async def work() -> None:
        async with held_gate(tmp_path, "one") as it:
            await it.gate.tend()
            it.clock.now += 320
            it.store.fails = OSError(28, "No space left on device")
            began, tried = it.clock.now, []
            for _ in range(1600):
                before = len(it.store.begun)
                await it.gate.tend()
                if len(it.store.begun) > before:
                    tried.append(it.clock.now - began)
                    assert failures(caplog) == ["snapshot of one failed: No space left on device"]
                it.clock.now += 1
            assert tried == [0, 10, 30, 70, 150, 310, 630, 950, 1270, 1590]
            assert it.entry("one").snapshot_failures == len(tried)
            assert failures(caplog) == []

            await it.gate.create("two", inside.asked())
            await it.gate.add("two", Keys((b"a",)))
            it.entry("two").upkeep.since = it.clock.now - 320
            it.store.fails = None
            await it.gate.tend()
            assert (len(it.entry("one").files), len(it.entry("two").files)) == (0, 1)
            await it.gate.drop("two")
            # Asked for, it is tried at once; and the delays begin anew.
            await it.gate.snapshot("one")
            await it.gate.add("one", Keys((b"again",)))
            it.clock.now += 320
            it.store.fails = OSError(28, "No space left on device")
            before = len(it.store.begun)
            for _ in range(2):
                await it.gate.tend()
                it.clock.now += 10
            assert len(it.store.begun) == before + 2

    run(work())


def test_stamping_anew_that_fails_is_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, and both files stay as they were recorded."""

    async def work() -> None:
        async with held_gate(tmp_path, "one", "two") as it:
            await it.gate.tend()
            for _ in range(2):
                await it.gate.snapshot("one")
            await it.gate.add("two", Keys((b"second",)))
            stamps = [file.stamp for file in it.entry("one").files]
            it.entry("two").upkeep.not_before = it.clock.now + 1000
            it.clock.now += 320
            it.journal.refuses = JournalQueueFull(10, 5)
            for _ in range(3):
                await it.gate.tend()
            assert failures(caplog) == [
                "the snapshots of one could not be stamped anew: 10 bytes wait to be journalled, 5 may"
            ]
            assert it.on_disk() == it.recorded()
            assert [file.stamp for file in it.entry("one").files] == stamps
            it.journal.refuses = None
            it.clock.now += 10
            await it.gate.tend()
            assert all(file.stamp > max(stamps) for file in it.entry("one").files)

    run(work())


def test_a_filter_dropped_while_it_is_written_leaves_no_file(tmp_path: Path) -> None:
    """Neither on disk nor after a restart."""

    async def work() -> None:
        async with held_gate(tmp_path, "one") as it:
            first = await it.under_way("one")
            dropping = asyncio.ensure_future(it.gate.drop("one"))
            await inside.until(lambda: len(it.gate.catalog) == 0)
            it.store.released.set()
            await dropping
            await first
            assert it.on_disk() == set()
        async with held_gate(tmp_path) as it:
            assert len(it.gate.catalog) == 0

    run(work())
