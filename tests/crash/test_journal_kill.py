"""A journal whose process is killed with SIGKILL, again and again, has all that it acknowledged.

This file is also the child: it opens the directory, adds from several tasks at once, takes snapshots, trims,
creates and drops, and writes a line to its stdout right after each thing is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bloomgate.filters import BloomFilter, FilterSpec, Segment
from bloomgate.filters.image import freeze
from bloomgated.storage.records import Add, Create, Drop, Grow, SnapshotFile, Snapshots
from bloomgated.storage.recovery import Recovered, recover
from bloomgated.storage.snapshots import SnapshotStore, ordinal_of
from bloomgated.storage.sqlite import SqliteJournal
from support.tally import record, rounds

ROUNDS = rounds(12, 200)
NAMES = ("small", "grown", "idle")
TASKS = 8


# -- the child


class Writer:
    """The daemon's rules in little: append and set bits in one step, tell what is durable."""

    def __init__(self, directory: Path, round_: int) -> None:
        self.round, self.rnd = round_, random.Random(round_)
        tell("opening")
        self.journal = SqliteJournal(directory, retention=0.0)
        self.store = SnapshotStore(directory)
        self.filters: dict[str, Recovered] = {}
        for each in recover(self.journal, self.store):
            assert each.bloom is not None, each.damage
            self.filters[each.name] = each
        self.journal.start()
        tell("started")

    async def live(self) -> None:
        for name in NAMES:
            if name not in self.filters:
                await self.create(name)
        async with asyncio.TaskGroup() as tasks:
            for task in range(TASKS):
                tasks.create_task(self.add_for_ever(task))
            tasks.create_task(self.tend_for_ever())
            tasks.create_task(self.come_and_go())

    async def create(self, name: str) -> None:
        spec = FilterSpec.plan(4000 if name == "small" else 50, 0.01)
        seq = self.journal.append([Create(name, spec)])
        await self.journal.durable(seq)
        self.filters[name] = Recovered(seq, name, spec, bloom=BloomFilter.of(spec), last_seq=seq)
        tell(f"created {name} {seq}")

    async def add(self, name: str, keys: list[bytes]) -> None:
        each = self.filters[name]
        assert each.bloom is not None
        plan = each.bloom.plan_add(each.spec.hasher.digests(keys))
        seq = each.last_seq = self.journal.append(
            [
                Add(each.filter_id, step) if isinstance(step, Segment) else Grow(each.filter_id, step)
                for step in plan.steps
            ]
        )
        each.bloom.apply(plan)
        await self.journal.durable(seq)
        tell(*(f"added {name} {seq} {key.hex()}" for key in keys))

    async def add_for_ever(self, task: int) -> None:
        number = 0
        while True:
            number += 1
            name = NAMES[task % 2] if self.rnd.random() < 0.99 else "idle"
            keys = [b"%d/%d/%d/%d" % (self.round, task, number, i) for i in range(self.rnd.randrange(1, 5))]
            await self.add(name, keys)

    async def tend_for_ever(self) -> None:
        while True:
            for name in self.rnd.sample(NAMES, 3):
                await self.snapshot(self.filters[name])
                held = (
                    each.files[0].stamp if len(each.files) == 2 else each.filter_id
                    for each in self.filters.values()
                )
                self.journal.trim(min(held))
                await asyncio.sleep(0)

    async def snapshot(self, each: Recovered) -> None:
        assert each.bloom is not None
        header = freeze(each.bloom, 1, self.journal.last_seq)
        await self.journal.durable(header.seq)
        ordinal = max(map(ordinal_of, each.files), default=0) + 1
        file = await asyncio.to_thread(self.store.write, each.filter_id, header, ordinal)
        files: tuple[SnapshotFile, ...] = (*each.files, file)[-2:]
        await self.journal.durable(self.journal.append([Snapshots(each.filter_id, files)]))
        for gone in set(each.files) - set(files):
            self.store.remove(gone.name)
        each.files = files

    async def come_and_go(self) -> None:
        number = 0
        while True:
            number += 1
            name = f"brief-{self.round}-{number}"
            await self.create(name)
            await self.add(name, [name.encode()])
            each = self.filters[name]
            tell(f"dropping {name}")
            await self.journal.durable(self.journal.append([Drop(each.filter_id)]))
            del self.filters[name]
            tell(f"dropped {name}")


def tell(*lines: str) -> None:
    """Write lines to the parent, unbuffered: what the process said before a kill is in the pipe."""
    data = "".join(f"{line}\n" for line in lines).encode()
    while data:
        data = data[os.write(1, data) :]


# -- the parent


class Told:
    """What the children have told so far."""

    def __init__(self) -> None:
        self.keys: dict[str, set[bytes]] = {}
        self.dropped: set[str] = set()
        self.dropping: set[str] = set()
        self.seq = 0

    def take(self, line: bytes) -> None:
        word, _, rest = line.decode().partition(" ")
        fields = rest.split()
        if word == "created":
            self.keys[fields[0]] = set()
        elif word == "added":
            self.keys[fields[0]].add(bytes.fromhex(fields[2]))
        elif word == "dropping":
            self.dropping.add(fields[0])
        elif word == "dropped":
            self.dropped.add(fields[0])
        if word in ("created", "added"):
            self.seq = max(self.seq, int(fields[1]))


def live_and_die(directory: Path, round_: int, rnd: random.Random, told: Told) -> int:
    """Run a child and kill it at a moment of its life that ``rnd`` draws; returns the lines it told."""
    after_lines, after_seconds = rnd.choice(
        [
            (0, rnd.uniform(0.0, 0.03)),  # while it creates, recovers or starts
            (rnd.randrange(2, 100), rnd.uniform(0.0, 0.005)),
            (rnd.randrange(100, 2500), 0.0),
            (rnd.randrange(100, 2500), rnd.uniform(0.0, 0.02)),
        ]
    )
    buffer, lines, until = b"", 0, None
    with (
        subprocess.Popen(
            [sys.executable, __file__, str(directory), str(round_)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        ) as child,
        selectors.DefaultSelector() as selector,
    ):
        assert child.stdout is not None
        fd = child.stdout.fileno()
        selector.register(fd, selectors.EVENT_READ)
        while True:
            # The clock starts once the child has said enough; the first word comes before it opens anything.
            if until is None and lines > after_lines:
                until = time.monotonic() + after_seconds
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            if not selector.select(left):
                continue
            data = os.read(fd, 1 << 16)
            if not data:
                raise AssertionError(f"the child ended by itself, with {child.wait()}")
            buffer += data
            lines = buffer.count(b"\n")
        child.send_signal(signal.SIGKILL)
        # Whatever it told before it died counts; half a line was not told.
        while data := os.read(fd, 1 << 16):
            buffer += data
        child.wait()
    whole = buffer.split(b"\n")[:-1]
    for line in whole:
        told.take(line)
    return len(whole)


def check(directory: Path, told: Told) -> None:
    """Every acknowledged key is there, every filter whose drop was acknowledged is not."""
    journal = SqliteJournal(directory)
    found = {each.name: each for each in recover(journal, SnapshotStore(directory))}
    assert journal.durable_seq >= told.seq
    for name, keys in told.keys.items():
        if name in told.dropped:
            assert name not in found
            continue
        if name in told.dropping and name not in found:
            continue  # its drop may have become durable, though nobody heard of it
        bloom = found[name].bloom
        assert bloom is not None, found[name].damage
        ordered = sorted(keys)
        missing = [
            k for k, there in zip(ordered, bloom.might_contain_many(ordered), strict=True) if not there
        ]
        assert not missing, f"{name} lost {missing[:3]} of {len(keys)}"


@pytest.mark.timeout(3600)
def test_a_journal_killed_at_any_moment_has_all_that_it_acknowledged(tmp_path: Path) -> None:
    """Many lives on one growing directory, each ended by SIGKILL while adds, snapshots, trims, creations
    and drops are under way; after each one, recovery finds every acknowledged key and no dropped filter."""
    rnd, told = random.Random(2024), Told()
    total = 0
    for round_ in range(ROUNDS):
        total += live_and_die(tmp_path, round_, rnd, told)
        check(tmp_path, told)
    assert set(NAMES) <= set(told.keys)
    assert total > 100 * ROUNDS
    assert SqliteJournal(tmp_path).trim_mark > 0
    assert len(told.dropped) > ROUNDS // 2
    record("kill -9 of a journal's writer at random moments", ROUNDS, "recovers")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):

        async def main() -> None:
            await Writer(Path(sys.argv[1]), int(sys.argv[2])).live()

        asyncio.run(main())
