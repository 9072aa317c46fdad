"""What the storage tests build journals and filters with."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bloomgate.filters import BloomFilter, FilterSpec, Segment
from bloomgate.filters.image import freeze
from bloomgated.storage.journal import Journal
from bloomgated.storage.records import Add, Create, Drop, Grow, Record, SnapshotFile, Snapshots
from bloomgated.storage.recovery import Recovered, recover
from bloomgated.storage.snapshots import KEPT_PER_FILTER, SnapshotStore
from bloomgated.storage.sqlite import SqliteJournal

DATABASE, WAL, MARK = "bloomgate.db", "bloomgate.db-wal", "bloomgate.db-mark"


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def small_spec(capacity: int = 40, *, seed: int = 7, on_full: str = "grow") -> FilterSpec:
    """A filter of a few hundred bytes, so that it is soon full."""
    return FilterSpec.plan(capacity, 0.01, seed=seed, on_full=on_full)


def an_add(filter_id: int, number: int, keys: int = 1) -> Add:
    """An Add that no other number gives."""
    return Add(filter_id, Segment(0, number.to_bytes(16, "little") * keys, 1))


def copy_as_killed(directory: Path, to: Path) -> Path:
    """What a kill at this moment would leave, with no commit under way."""
    shutil.copytree(directory, to, ignore=shutil.ignore_patterns("*-shm"))
    return to


def contents(directory: Path) -> dict[str, bytes]:
    """Every file with its bytes, but for SQLite's shared memory, which says nothing."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b""
        for path in sorted(directory.rglob("*"))
        if not path.name.endswith("-shm")
    }


def flip(path: Path, at: int, mask: int = 0xFF) -> None:
    """Change one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ mask]))


async def until_trimmed(journal: Journal, mark: int) -> None:
    """Return once the journal is trimmed up to ``mark``."""
    async with asyncio.timeout(20):
        while journal.trim_mark < mark:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)


@dataclass
class Live:
    """A filter of a ``World``: the body that serves, and the set that it must agree with."""

    filter_id: int
    name: str
    bloom: BloomFilter
    files: tuple[SnapshotFile, ...] = ()
    last_seq: int = 0
    keys: set[bytes] = field(default_factory=set)


class World:
    """Filters over a journal, kept by the rules that bind the daemon: append before bits, stamps of durable
    seqs, two snapshots, a trim to the lowest of the older ones. Retention is nothing unless given."""

    def __init__(self, directory: Path, *, assert_no_later_adds: bool = False, **options: object) -> None:
        """Open and recover; needs a running loop."""
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.journal = SqliteJournal(directory, **{"retention": 0.0, **options})  # type: ignore[arg-type]
        self.store = SnapshotStore(directory, wall_clock=lambda: 1.5)
        found = recover(self.journal, self.store, assert_no_later_adds=assert_no_later_adds)
        self.recovered = {each.name: each for each in found}
        self.filters = {
            each.name: Live(each.filter_id, each.name, each.bloom, each.files, each.last_seq)
            for each in self.recovered.values()
            if each.bloom is not None
        }
        self.journal.prepare(assert_no_later_adds=assert_no_later_adds)
        self.journal.start()

    async def create(self, name: str, spec: FilterSpec | None = None) -> Live:
        """Create a filter and wait until that is durable."""
        spec = spec or small_spec()
        seq = self.journal.append([Create(name, spec)])
        await self.journal.durable(seq)
        self.filters[name] = Live(seq, name, BloomFilter.of(spec), last_seq=seq)
        return self.filters[name]

    def queue(self, name: str, keys: Iterable[bytes]) -> int:
        """Append an Add and set its bits: one step."""
        live = self.filters[name]
        keys = list(keys)
        plan = live.bloom.plan_add(live.bloom.spec.hasher.digests(keys))
        records: list[Record] = [
            Add(live.filter_id, step) if isinstance(step, Segment) else Grow(live.filter_id, step)
            for step in plan.steps
        ]
        live.last_seq = self.journal.append(records)
        live.bloom.apply(plan)
        live.keys.update(keys)
        return live.last_seq

    async def add(self, name: str, keys: Iterable[bytes]) -> int:
        """Add keys and wait until they are durable."""
        seq = self.queue(name, keys)
        await self.journal.durable(seq)
        return seq

    async def write(self, name: str, during: Sequence[bytes] = ()) -> SnapshotFile:
        """Write a snapshot, with ``during`` added between its header and its bodies; not recorded."""
        live = self.filters[name]
        header = freeze(live.bloom, 1, self.journal.last_seq)
        await self.journal.durable(header.seq)
        if during:
            await self.add(name, during)
        ordinal = max((int(file.name[:-4].rpartition("-")[2]) for file in live.files), default=0) + 1
        return self.store.write(live.filter_id, header, ordinal)

    async def record(self, name: str, files: tuple[SnapshotFile, ...]) -> None:
        """Record files, then remove those that no longer are."""
        live = self.filters[name]
        await self.journal.durable(self.journal.append([Snapshots(live.filter_id, files)]))
        before, live.files = live.files, files
        for file in before:
            if file.name not in {each.name for each in files}:
                self.store.remove(file.name)

    async def snapshot(self, name: str, during: Sequence[bytes] = ()) -> None:
        """Write and record."""
        file = await self.write(name, during)
        await self.record(name, (*self.filters[name].files, file)[-KEPT_PER_FILTER:])

    async def stamp(self, name: str) -> None:
        """Stamp an idle filter's files up to the present, if both hold all that there is."""
        live = self.filters[name]
        if len(live.files) == KEPT_PER_FILTER and live.files[0].seq >= live.last_seq:
            stamp = self.journal.durable_seq
            await self.record(name, tuple(dataclasses.replace(file, stamp=stamp) for file in live.files))

    async def drop(self, name: str) -> None:
        """Drop a filter and its files."""
        live = self.filters.pop(name)
        await self.journal.durable(self.journal.append([Drop(live.filter_id)]))
        for file in live.files:
            self.store.remove(file.name)

    def trim_limit(self) -> int:
        """The lowest seq that a filter holds: the older of two stamps, or its creation."""
        held = (
            live.files[0].stamp if len(live.files) >= KEPT_PER_FILTER else live.filter_id
            for live in self.filters.values()
        )
        return min(held, default=self.journal.durable_seq)

    async def trim(self, up_to: int | None = None) -> None:
        """Trim, by the rule unless told otherwise, and wait for it."""
        limit = self.trim_limit() if up_to is None else up_to
        self.journal.trim(limit)
        await until_trimmed(self.journal, limit)

    def path(self, file: SnapshotFile) -> Path:
        """Where a snapshot is."""
        return self.directory / "snapshots" / file.name

    async def close(self) -> None:
        """Close the journal, as a clean stop does."""
        await self.journal.close()


def recover_in(directory: Path, *, assert_no_later_adds: bool = False) -> dict[str, Recovered]:
    """What a start in ``directory`` finds, by name, without writing to the journal."""
    journal, store = SqliteJournal(directory), SnapshotStore(directory)
    return {each.name: each for each in recover(journal, store, assert_no_later_adds=assert_no_later_adds)}


def assert_equal(recovered: Recovered, live: Live) -> None:
    """The recovered filter answers, counts and grows like the one that was lost, to the byte."""
    assert recovered.damage == ""
    assert recovered.bloom is not None
    missing = [key for key in live.keys if not recovered.bloom.might_contain(key)]
    assert not missing, f"{live.name} lost {missing[:3]} of {len(live.keys)}"
    assert recovered.bloom.approximate_count == live.bloom.approximate_count
    assert recovered.bloom.added_count == live.bloom.added_count
    assert recovered.bloom.to_bytes() == live.bloom.to_bytes()
    assert (recovered.filter_id, recovered.spec) == (live.filter_id, live.bloom.spec)
