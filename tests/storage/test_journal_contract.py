"""What every journal promises, whatever it stores on. A new implementation is one line in HARNESSES."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomgate.filters import BodySpec, Growth, Segment
from bloomgated.errors import JournalFailed, JournalQueueFull
from bloomgated.storage import sqlite as sqlite_journal
from bloomgated.storage import trimming
from bloomgated.storage.journal import Journal, Placed
from bloomgated.storage.records import Add, Create, Drop, Grow, Record, SnapshotFile, Snapshots
from storage.making import Clock, an_add, copy_as_killed, small_spec, until_trimmed


class SqliteHarness:
    """How the contract suite opens, breaks and measures the SQLite journal."""

    name = "sqlite"
    failures = ("disk full", "commit refused", "mark unwritable")
    trim_failures = ("commit refused",)

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self._monkeypatch = monkeypatch
        self.armed = False
        real = sqlite_journal.open_to_write

        def open_to_write(opened: Any) -> Any:
            connection, mark_file = real(opened)
            return BreakableConnection(connection, self), mark_file

        monkeypatch.setattr(sqlite_journal, "open_to_write", open_to_write)

    def new(self, *, directory: Path | None = None, **options: Any) -> sqlite_journal.SqliteJournal:
        """A journal that does not commit before ``start()``."""
        return sqlite_journal.SqliteJournal(directory or self.directory, **options)

    def small_slices(self) -> None:
        """Let a trim take ten rows at a time."""
        self._monkeypatch.setattr(trimming, "TRIM_ROWS", 10)

    def break_commits(self, journal: Any, how: str) -> None:
        """Make the next commit fail."""
        if how == "disk full":
            (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
            journal._connection.execute(f"PRAGMA max_page_count = {pages}")
        elif how == "commit refused":
            self.armed = True
        else:
            full = os.open("/dev/full", os.O_RDWR)
            os.dup2(full, journal._mark_file._fd)
            os.close(full)

    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.directory.iterdir())


class BreakableConnection:
    """A connection whose COMMIT fails once its harness is armed."""

    def __init__(self, real: sqlite3.Connection, harness: SqliteHarness) -> None:
        self._real, self._harness = real, harness

    def execute(self, sql: str, *rest: Any) -> Any:
        if sql == "COMMIT" and self._harness.armed:
            raise sqlite3.OperationalError("disk I/O error")
        return self._real.execute(sql, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


HARNESSES = [SqliteHarness]
FAILURES = [(kind, how) for kind in HARNESSES for how in kind.failures]
TRIM_FAILURES = [(kind, how) for kind in HARNESSES for how in kind.trim_failures]


@pytest.fixture(params=HARNESSES, ids=lambda kind: kind.name)
def harness(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One implementation on a directory of its own."""
    return request.param(tmp_path, monkeypatch)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run one test's coroutine, which may take no longer than half a minute."""
    return asyncio.run(asyncio.wait_for(work, 30))


async def put(journal: Journal, *records: Record) -> int:
    """Append and wait until it is durable."""
    seq = journal.append(records)
    await journal.durable(seq)
    return seq


def seqs(journal: Journal, after: int = 0) -> list[int]:
    return [entry.seq for entry in journal.replay(after)]


def records_of(entries: Iterator[Placed]) -> list[tuple[int, Record]]:
    return [(entry.seq, entry.record) for entry in entries]


def snapshots(filter_id: int, *ordinals: int) -> Snapshots:
    """A Snapshots record, told apart by its files."""
    return Snapshots(
        filter_id,
        tuple(SnapshotFile(f"{filter_id:016x}-1-{n}.bgf", 1, n, n, 100, n, 1.5) for n in ordinals),
    )


def some_record(rnd: random.Random, number: int) -> Record:
    """Any kind of record, in the mix a daemon writes."""
    filter_id = rnd.randrange(1, 9)
    match rnd.randrange(10):
        case 0:
            return Create(f"filter-{number}", small_spec(seed=number))
        case 1:
            return Drop(filter_id)
        case 2:
            return Grow(filter_id, Growth(rnd.randrange(5), BodySpec(2048, 7, 100)))
        case 3:
            return snapshots(filter_id, number, number + 1)
        case _:
            return Add(filter_id, Segment(rnd.randrange(3), rnd.randbytes(16 * rnd.randrange(1, 50)), 1))


# -- order


def test_seqs_are_consecutive_and_in_the_order_of_the_calls(harness: SqliteHarness) -> None:
    """Each append's seqs follow the last one's, however large the batches are and whatever is durable."""

    async def work() -> None:
        rnd = random.Random(1)
        journal = harness.new()
        journal.start()
        expected: list[tuple[int, Record]] = []
        for number in range(60):
            batch = [an_add(1, number * 100 + i) for i in range(rnd.randrange(1, 6))]
            last = journal.append(batch)
            assert last == journal.last_seq == len(expected) + len(batch)
            expected += zip(range(last - len(batch) + 1, last + 1), batch, strict=True)
            if rnd.random() < 0.3:
                await journal.durable(rnd.randrange(1, last + 1))
        await journal.durable(journal.last_seq)
        assert records_of(journal.replay(0)) == expected
        await journal.close()

    run(work())


def test_an_empty_append_changes_nothing(harness: SqliteHarness) -> None:
    """Appending no records returns the last seq and commits nothing."""

    async def work() -> None:
        journal = harness.new()
        journal.start()
        seq = await put(journal, an_add(1, 1))
        assert journal.append([]) == seq
        await journal.close()
        assert seqs(harness.new()) == [seq]

    run(work())


def test_a_durable_seq_means_that_all_before_it_are(harness: SqliteHarness) -> None:
    """Waiters wake in the order of their seqs, and each finds its seq and all before it to be durable."""

    async def work() -> None:
        journal = harness.new()
        journal.start()
        woken: list[int] = []

        async def one(number: int) -> None:
            seq = journal.append([an_add(1, number)])
            await journal.durable(seq)
            assert journal.durable_seq >= seq
            woken.append(seq)

        for _ in range(20):
            await asyncio.gather(*(one(number) for number in range(30)))
        assert woken == list(range(1, 601))
        await journal.close()

    run(work())


def test_nothing_is_durable_before_it_is_committed(harness: SqliteHarness) -> None:
    """While nothing is committed, the durable seq stays where it was, and replay shows nothing new."""

    async def work() -> None:
        journal = harness.new()
        seq = journal.append([an_add(1, 1), an_add(1, 2)])
        assert (journal.last_seq, journal.durable_seq) == (seq, 0)
        assert seqs(journal) == []
        waiting = asyncio.ensure_future(journal.durable(seq))
        await asyncio.sleep(0)
        assert not waiting.done()
        journal.start()
        await waiting
        assert journal.durable_seq == seq
        await journal.close()

    run(work())


def test_a_cancelled_waiter_harms_nobody(harness: SqliteHarness) -> None:
    """Of many waiters half are cancelled: the others are answered, and the records are all there."""

    async def work() -> None:
        journal = harness.new()
        tasks = [asyncio.ensure_future(put(journal, an_add(1, number))) for number in range(100)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        journal.start()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False] * 50
        await put(journal, an_add(1, 1000))
        assert seqs(journal) == list(range(1, 102))
        await journal.close()

    run(work())


# -- groups


def test_many_concurrent_appends_share_few_commits(harness: SqliteHarness) -> None:
    """Two thousand callers at once take a handful of commits, which together hold every record once."""

    async def work() -> None:
        journal = harness.new()
        commits: list[int] = []
        journal.on_commit = lambda seconds, records: commits.append(records if seconds > 0 else -1)
        journal.start()
        await asyncio.gather(*(put(journal, an_add(1, number)) for number in range(2000)))
        assert sum(commits) == 2000
        assert len(commits) <= 40
        await journal.close()

    run(work())


def test_a_lone_append_waits_for_nobody(harness: SqliteHarness) -> None:
    """One caller after the other gets a commit each: there is no timer that waits for company."""

    async def work() -> None:
        journal = harness.new()
        commits: list[int] = []
        journal.on_commit = lambda _, records: commits.append(records)
        journal.start()
        for number in range(5):
            await put(journal, an_add(1, number))
        assert commits == [1] * 5
        await journal.close()

    run(work())


# -- a full queue


def test_append_is_all_or_none_when_the_queue_is_full(harness: SqliteHarness) -> None:
    """A batch that does not fit takes no seq and leaves no record; a smaller one may still fit."""

    async def work() -> None:
        journal = harness.new(max_queued_bytes=10_000)
        first = journal.append([an_add(1, 1, keys=300)])
        with pytest.raises(JournalQueueFull) as refused:
            journal.append([an_add(1, 2), an_add(1, 3, keys=400)])
        assert refused.value.allowed == 10_000
        assert 4800 <= refused.value.queued_bytes <= 6000
        assert journal.last_seq == first
        second = journal.append([an_add(1, 4)])
        assert second == first + 1
        journal.start()
        await journal.durable(second)
        assert records_of(journal.replay(0)) == [(1, an_add(1, 1, keys=300)), (2, an_add(1, 4))]
        # What was committed waits no more.
        await put(journal, an_add(1, 5, keys=400))
        await journal.close()

    run(work())


def test_a_batch_larger_than_the_bound_is_taken_when_nothing_waits(harness: SqliteHarness) -> None:
    """A batch that could never fit goes alone; while it waits, nothing else is taken."""

    async def work() -> None:
        journal = harness.new(max_queued_bytes=1000)
        large = journal.append([an_add(1, 1, keys=5000)])
        with pytest.raises(JournalQueueFull):
            journal.append([an_add(1, 2)])
        journal.start()
        await journal.durable(large)
        assert await put(journal, an_add(1, 3)) == large + 1
        await journal.close()

    run(work())


def test_a_record_that_cannot_be_stored_fails_its_caller_alone(harness: SqliteHarness) -> None:
    """It takes no seq, and the journal goes on for everybody else."""

    async def work() -> None:
        journal = harness.new()
        journal.start()
        with pytest.raises(struct.error):
            journal.append([an_add(1, 1), Add(1, Segment(2**40, bytes(16), 1))])
        assert journal.last_seq == 0
        assert await put(journal, an_add(1, 2)) == 1
        await journal.close()

    run(work())


# -- replay


@pytest.mark.parametrize("seed", range(3))
def test_replay_gives_what_was_appended_also_after_reopening(harness: SqliteHarness, seed: int) -> None:
    """Every record of every kind comes back as it was, at its seq, at once and after each reopening."""

    async def work() -> None:
        rnd = random.Random(seed)
        expected: list[tuple[int, Record]] = []
        for _ in range(4):
            journal = harness.new()
            assert records_of(journal.replay(0)) == expected
            assert journal.last_seq == journal.durable_seq == len(expected)
            journal.start()
            for _ in range(15):
                batch = [some_record(rnd, len(expected) + i) for i in range(rnd.randrange(1, 8))]
                last = journal.append(batch)
                expected += zip(range(last - len(batch) + 1, last + 1), batch, strict=True)
            await journal.durable(journal.last_seq)
            assert records_of(journal.replay(0)) == expected
            after = rnd.randrange(len(expected))
            assert records_of(journal.replay(after)) == expected[after:]
            assert seqs(journal, journal.last_seq) == []
            await journal.close()

    run(work())


def test_a_journal_keeps_its_id(harness: SqliteHarness, tmp_path: Path) -> None:
    """The id is 16 bytes, the same after each reopening, and another for another journal."""

    async def work() -> None:
        journal = harness.new()
        first = journal.journal_id
        journal.start()
        await journal.close()
        assert len(first) == 16
        assert harness.new().journal_id == first
        (tmp_path / "other").mkdir()
        assert harness.new(directory=tmp_path / "other").journal_id != first

    run(work())


def test_running_time_goes_on_over_restarts_and_never_back(harness: SqliteHarness) -> None:
    """Each record carries the seconds that a daemon had been running, whatever the clock's zero is."""

    async def work() -> None:
        times = []
        for start in (5000.0, 10.0, 700_000.0):
            clock = Clock(start)
            journal = harness.new(clock=clock)
            journal.start()
            for step in (1.0, 2.0, -50.0, 50.5):
                clock.now += step
                await put(journal, an_add(1, len(times)))
                times.append(step)
            found = [entry.running_time for entry in journal.replay(0)]
            await journal.close()
        assert found == sorted(found)
        assert found[3] - found[0] == pytest.approx(2.5)
        assert found[-1] == pytest.approx(3 * 3.5)

    run(work())


# -- trim


def test_a_seq_is_never_given_again(harness: SqliteHarness) -> None:
    """After a trim has taken every record, and a reopening, the next seq is still the next one."""

    async def work() -> None:
        for round_ in range(4):
            journal = harness.new(retention=0.0)
            assert journal.last_seq == journal.durable_seq == journal.trim_mark == round_ * 50
            assert seqs(journal) == []
            journal.start()
            seq = await put(journal, *(an_add(1, number) for number in range(50)))
            assert seq == (round_ + 1) * 50
            journal.trim(seq)
            await until_trimmed(journal, seq)
            await journal.close()

    run(work())


def test_a_trim_keeps_what_the_catalog_is_rebuilt_from(harness: SqliteHarness) -> None:
    """Creates and the newest Snapshots of live filters stay at their seqs; all else up to the mark goes."""

    async def work() -> None:
        journal = harness.new(retention=0.0)
        journal.start()
        one = await put(journal, Create("one", small_spec()))
        two = await put(journal, Create("two", small_spec()))
        await put(journal, an_add(one, 1), snapshots(one, 1), snapshots(two, 2), Grow(two, GROWTH))
        newest = await put(journal, snapshots(one, 1, 3))
        last = await put(journal, an_add(two, 2), an_add(one, 3))
        journal.trim(last - 1)
        await until_trimmed(journal, last - 1)
        assert journal.trim_mark == last - 1
        kept = [
            (one, Create("one", small_spec())),
            (two, Create("two", small_spec())),
            (5, snapshots(two, 2)),
            (newest, snapshots(one, 1, 3)),
            (last, an_add(one, 3)),
        ]
        assert records_of(journal.replay(0)) == kept
        # Those at or below the mark come whatever the caller has already.
        assert records_of(journal.replay(last)) == kept[:-1]
        await journal.close()
        again = harness.new(retention=0.0)
        assert records_of(again.replay(0)) == kept
        assert again.trim_mark == last - 1
        # What was kept once goes when something newer takes its place.
        again.start()
        replaced = await put(again, snapshots(two, 2, 9))
        again.trim(replaced)
        await until_trimmed(again, replaced)
        assert seqs(again) == [one, two, newest, replaced]
        await again.close()

    run(work())


GROWTH = Growth(1, BodySpec(2048, 7, 100))


def test_a_dropped_filter_goes_with_its_drop_and_never_comes_back(harness: SqliteHarness) -> None:
    """In whatever slices a trim comes, a Create is never left without the Drop that ended it."""

    async def work() -> None:
        harness.small_slices()
        journal = harness.new(retention=0.0)
        journal.start()
        stays = await put(journal, Create("stays", small_spec()))
        gone = await put(journal, Create("gone", small_spec()))
        await put(journal, *(an_add(gone, number) for number in range(15)), snapshots(gone, 1))
        dropped = await put(journal, Drop(gone))
        last = await put(journal, *(an_add(stays, number) for number in range(15)))
        for up_to in range(1, last + 1):
            journal.trim(up_to)
            await until_trimmed(journal, up_to)
            left = [record for _, record in records_of(journal.replay(0))]
            assert Create("stays", small_spec()) in left
            if up_to >= dropped:
                assert not any(getattr(record, "filter_id", 0) == gone for record in left)
                assert Create("gone", small_spec()) not in left
        assert seqs(journal) == [stays]
        await journal.close()
        assert seqs(harness.new()) == [stays]

    run(work())


def test_a_trim_never_goes_past_what_is_durable(harness: SqliteHarness) -> None:
    """Asked for more than there is, it takes what is durable, and what comes later stays."""

    async def work() -> None:
        journal = harness.new(retention=0.0)
        journal.start()
        seq = await put(journal, an_add(1, 1))
        journal.append([an_add(1, 2)])
        journal.trim(10**9)
        await until_trimmed(journal, seq)
        await journal.durable(seq + 1)
        await put(journal, an_add(1, 3))
        assert journal.trim_mark == seq
        assert seqs(journal) == [seq + 1, seq + 2]
        await journal.close()

    run(work())


async def ask_to_trim(journal: Journal, up_to: int) -> int:
    """Ask for a trim and let it run as far as it goes; two commits stand behind it. Returns the mark."""
    journal.trim(up_to)
    for number in range(2):
        await put(journal, an_add(1, 10**6 + number))
    return journal.trim_mark


def test_a_trim_takes_nothing_younger_than_the_retention(harness: SqliteHarness) -> None:
    """Records go once they are as old as the retention, counted in running time, not before."""

    async def work() -> None:
        clock = Clock()
        journal = harness.new(retention=900.0, clock=clock)
        journal.start()
        old = await put(journal, an_add(1, 1), an_add(1, 2))
        clock.now += 600
        young = await put(journal, an_add(1, 3))
        clock.now += 299
        assert await ask_to_trim(journal, young) == 0
        clock.now += 2
        assert await ask_to_trim(journal, young) == old
        clock.now += 600
        assert await ask_to_trim(journal, young) == young
        await journal.close()

    run(work())


def test_a_trim_that_must_wait_costs_nothing(harness: SqliteHarness) -> None:
    """Asked for what is too young, the journal waits to be asked again; it does not try over and over."""

    async def work() -> None:
        asked = [0]

        def clock() -> float:
            asked[0] += 1
            return 5.0

        journal = harness.new(retention=900.0, clock=clock)
        journal.start()
        seq = await put(journal, an_add(1, 1))
        journal.trim(seq)
        for number in range(30):
            await put(journal, an_add(1, number))
        assert asked[0] < 40
        await journal.close()

    run(work())


def test_the_retention_counts_running_time_over_restarts(harness: SqliteHarness) -> None:
    """Neither a long pause nor another zero of the clock makes a record older; running on does."""

    async def work() -> None:
        seq = 0
        for round_, start in enumerate((100.0, 10_000_000.0, 3.0)):
            clock = Clock(start)
            journal = harness.new(retention=900.0, clock=clock)
            journal.start()
            seq = seq or await put(journal, an_add(1, 1))
            assert await ask_to_trim(journal, seq) == 0, f"round {round_}"
            clock.now += 400
            assert await ask_to_trim(journal, seq) == (0 if round_ < 2 else seq), f"round {round_}"
            await journal.close()

    run(work())


def test_a_step_of_the_wall_clock_deletes_nothing(
    harness: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year forward or back on the wall clock leaves every record where it is, also over a restart."""

    async def work() -> None:
        journal = harness.new(retention=900.0)
        journal.start()
        seq = await put(journal, an_add(1, 1))
        now = time.time()
        for wall in (now + 3e7, now - 3e7):
            monkeypatch.setattr(time, "time", lambda wall=wall: wall)
            assert await ask_to_trim(journal, seq) == 0
            await journal.close()
            journal = harness.new(retention=900.0)
            journal.start()
            assert await ask_to_trim(journal, seq) == 0
        await journal.close()

    run(work())


def test_every_slice_of_a_trim_stores_its_mark(harness: SqliteHarness, tmp_path: Path) -> None:
    """Killed after any slice, the journal opens with that slice's mark and every record after it."""

    async def work() -> None:
        harness.small_slices()
        journal = harness.new(retention=0.0)
        journal.start()
        one = await put(journal, Create("one", small_spec()))
        last = await put(journal, *(an_add(one, number) for number in range(60)))
        for up_to in (7, 20, 45, last):
            journal.trim(up_to)
            await until_trimmed(journal, up_to)
            await put(journal, an_add(one, 1000 + up_to))  # behind the slice's last write
            killed = copy_as_killed(harness.directory, tmp_path / "killed")
            again = harness.new(directory=killed)
            assert again.trim_mark == up_to
            assert seqs(again) == [one, *range(up_to + 1, journal.durable_seq + 1)]
            shutil.rmtree(killed)
        await journal.close()

    run(work())


def test_appends_go_on_while_a_trim_is_under_way(harness: SqliteHarness) -> None:
    """A long trim comes in slices: commits get their turn between them, and see it move on."""

    async def work() -> None:
        harness.small_slices()
        journal = harness.new(retention=0.0)
        journal.start()
        last = await put(journal, *(an_add(1, number) for number in range(500)))
        marks: list[int] = []
        journal.on_commit = lambda _seconds, _records: marks.append(journal.trim_mark)
        journal.trim(last)
        while journal.trim_mark < last:
            await put(journal, an_add(1, 10**6))
        between = {mark for mark in marks if 0 < mark < last}
        assert len(between) >= 3
        assert marks == sorted(marks)
        assert seqs(journal) == list(range(last + 1, journal.last_seq + 1))
        await journal.close()

    run(work())


def test_the_file_does_not_grow_without_bound(harness: SqliteHarness) -> None:
    """Forty megabytes go through a journal that holds less than one at a time; it stays below eight."""

    async def work() -> None:
        journal = harness.new(retention=0.0)
        journal.start()
        one = await put(journal, Create("one", small_spec()))
        sizes = []
        for round_ in range(50):
            seq = await put(journal, *(an_add(one, round_ * 100 + number, keys=500) for number in range(100)))
            journal.trim(seq)
            await until_trimmed(journal, seq)
            sizes.append(harness.size())
        assert max(sizes) < 8 << 20
        await journal.close()
        assert harness.size() < 2 << 20

    run(work())


def test_a_trim_gives_a_peak_back(harness: SqliteHarness) -> None:
    """After a burst of sixteen megabytes is trimmed, most of the file is given back."""

    async def work() -> None:
        journal = harness.new(retention=0.0)
        journal.start()
        seq = await put(journal, *(an_add(1, number, keys=1000) for number in range(1000)))
        journal.trim(seq)
        await until_trimmed(journal, seq)
        for number in range(3):
            await put(journal, an_add(1, number))
        await journal.close()
        assert harness.size() < 6 << 20

    run(work())


def test_a_slice_is_bounded_in_bytes(harness: SqliteHarness) -> None:
    """A few large records make a slice of their own, so that a commit never waits for all of them."""

    async def work() -> None:
        journal = harness.new(retention=0.0)
        journal.start()
        seq = await put(journal, *(an_add(1, number, keys=65_536) for number in range(32)))
        marks = []
        journal.on_commit = lambda _seconds, _records: marks.append(journal.trim_mark)
        journal.trim(seq)
        while journal.trim_mark < seq:
            await put(journal, an_add(1, 10**6))
        assert {mark for mark in marks if 0 < mark < seq}
        await journal.close()

    run(work())


# -- the end


def test_close_commits_what_is_queued(harness: SqliteHarness) -> None:
    """What was appended before close is durable after it, awaited or not, and its waiters are answered."""

    async def work() -> None:
        journal = harness.new()
        journal.start()
        waiting = [asyncio.ensure_future(put(journal, an_add(1, number))) for number in range(20)]
        await asyncio.sleep(0)
        for number in range(20, 300):
            journal.append([an_add(1, number)])
        await journal.close()
        assert await asyncio.gather(*waiting) == list(range(1, 21))
        assert seqs(harness.new()) == list(range(1, 301))

    run(work())


def test_a_closed_journal_takes_nothing(harness: SqliteHarness) -> None:
    """Closing twice is once; an append after it raises, and nobody waits for ever."""

    async def work() -> None:
        journal = harness.new()
        journal.start()
        seq = await put(journal, an_add(1, 1))
        early = asyncio.ensure_future(journal.durable(seq + 1))
        await asyncio.sleep(0)
        # A descriptor that takes a freed number must not be closed by the second close.
        await journal.close()
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
        await journal.close()
        for fd in fds:
            os.close(fd)
        with pytest.raises(JournalFailed):
            journal.append([an_add(1, 2)])
        with pytest.raises(JournalFailed):
            await early
        with pytest.raises(JournalFailed):
            await journal.durable(seq + 1)
        await journal.durable(seq)

    run(work())


def test_a_journal_that_was_never_started_can_be_closed(harness: SqliteHarness) -> None:
    """A start that is given up after recovery closes what it opened."""
    run(harness.new().close())


# -- failure


@pytest.mark.parametrize(("kind", "how"), FAILURES)
def test_a_failed_commit_fails_the_journal_for_good(
    kind: Callable[..., SqliteHarness], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiters get JournalFailed, appends raise it, on_failure comes once, and a reopening has all that was
    acknowledged, in order, with nothing between."""

    async def work() -> None:
        harness = kind(tmp_path, monkeypatch)
        journal = harness.new()
        failures: list[Exception] = []
        journal.on_failure = failures.append
        journal.start()
        acknowledged = [await put(journal, an_add(1, number, keys=20)) for number in range(30)]
        harness.break_commits(journal, how)
        doomed = [
            asyncio.ensure_future(put(journal, an_add(1, number, keys=2000))) for number in range(100, 140)
        ]
        results = await asyncio.gather(*doomed, return_exceptions=True)
        assert {type(result) for result in results} == {JournalFailed}
        assert len(failures) == 1
        assert journal.failed
        with pytest.raises(JournalFailed):
            journal.append([an_add(1, 1)])
        with pytest.raises(JournalFailed):
            await journal.durable(journal.last_seq)
        # What is durable stays so, and a trim that is asked for now does no harm.
        await journal.durable(acknowledged[-1])
        assert journal.durable_seq == acknowledged[-1]
        journal.trim(1)
        await journal.close()
        await journal.close()
        assert len(failures) == 1

        harness.armed = False
        again = harness.new()
        found = records_of(again.replay(0))
        assert found[:30] == [(number + 1, an_add(1, number, keys=20)) for number in range(30)]
        assert [seq for seq, _ in found] == list(range(1, len(found) + 1))
        again.start()
        assert await put(again, an_add(1, 999)) == len(found) + 1
        await again.close()

    run(work())


@pytest.mark.parametrize(("kind", "how"), TRIM_FAILURES)
def test_a_failed_trim_fails_the_journal_too(
    kind: Callable[..., SqliteHarness], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice that cannot be committed is a failed commit like any other, and takes nothing away."""

    async def work() -> None:
        harness = kind(tmp_path, monkeypatch)
        journal = harness.new(retention=0.0)
        failed = asyncio.Event()
        journal.on_failure = lambda _error: failed.set()
        journal.start()
        seq = await put(journal, *(an_add(1, number) for number in range(20)))
        harness.break_commits(journal, how)
        journal.trim(seq)
        await failed.wait()
        with pytest.raises(JournalFailed):
            journal.append([an_add(1, 1)])
        await journal.close()
        again = harness.new()
        assert again.trim_mark == 0
        assert seqs(again) == list(range(1, seq + 1))

    run(work())
