"""Any order of creates, adds, snapshots, drops, crashes and restarts, against an exact model."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bloomgate import errors
from bloomgate.filters import HashScheme, OnFull
from bloomgated.requests import Keys
from daemon import inside
from support.tally import LONG, record, rounds

# So rare that hardly a false positive is expected in all steps together: 2000 * 40 of them with 20 keys each
# ask of less than 2 million absent ones, a chance of 0.2 % in the long run.
RATE = 1e-9
NAMES = ("apple", "banana", "cherry")
STEPS = 40

names = st.sampled_from(NAMES)
# Long enough to fill the filters, and to repeat keys.
keys = st.integers(0, 2**32).map(lambda seed: some_keys(random.Random(seed)))


def some_keys(choose: random.Random) -> list[bytes]:
    """Up to 40 keys of 200."""
    return [b"key-%d" % choose.randrange(200) for _ in range(choose.randrange(40))]


@dataclass
class Model:
    """What a filter must say."""

    capacity: int
    on_full: OnFull
    added: Counter[bytes] = field(default_factory=Counter)
    """Acknowledged keys of this life, and how often each was added."""
    before: set[bytes] = field(default_factory=set)
    """Keys of the lives before it under the same name."""


class Daemon(RuleBasedStateMachine):
    """One data directory through many lives of a gate. Its journal keeps nothing longer than it must."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="bloomgate-"))
        self._loop = asyncio.new_event_loop()
        self._lives = 0
        self._now = 0.0
        self._directory = self._folder / "0"
        self._directory.mkdir()
        self._model: dict[str, Model] = {}
        self._past: dict[str, set[bytes]] = {name: set() for name in NAMES}
        self._open()

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def _open(self) -> None:
        self._stack = AsyncExitStack()
        opened = inside.open_gate(self._directory, clock=lambda: self._now, retention=0)
        self._gate, self._journal = self._run(self._stack.enter_async_context(opened))
        self._verify_all()

    def teardown(self) -> None:
        self._run(self._stack.aclose())
        self._loop.close()
        shutil.rmtree(self._folder)

    # -- what callers do

    def _one(self, name: str) -> str:
        """That filter, or another one that exists, so that most steps are about something."""
        return name if name in self._model or not self._model else min(self._model)

    @rule(
        name=names,
        capacity=st.integers(1, 40),
        on_full=st.sampled_from(list(OnFull)),
        scheme=st.sampled_from(list(HashScheme)),
    )
    def create(self, name: str, capacity: int, on_full: OnFull, scheme: HashScheme) -> None:
        """A name that is taken by another spec is refused, and nothing changes."""
        asked = inside.asked(capacity, RATE, on_full=on_full, hash_scheme=scheme)
        known = self._model.get(name)
        try:
            _, created = self._run(self._gate.create(name, asked))
        except errors.FilterExists:
            assert known is not None
        else:
            assert created == (known is None)
            if known is None:
                self._model[name] = Model(capacity, on_full, before=set(self._past[name]))

    @rule(name=names, batch=keys, hashed=st.booleans())
    def add(self, name: str, batch: list[bytes], hashed: bool) -> None:
        """Keys or digests; each answer is exact, and a full filter that refuses takes nothing."""
        name = self._one(name)
        self._judge(name, batch, self._gate.add(name, self._asked(name, batch, hashed)))

    def _judge(self, name: str, batch: list[bytes], adding: Any) -> None:
        try:
            was_new, _ = self._run(adding)
        except errors.FilterNotFound:
            assert name not in self._model
        except errors.FilterFull:
            known = self._model[name]
            assert known.on_full is OnFull.REJECT
            assert len(set(known.added) | set(batch)) > known.capacity
        else:
            known = self._model[name]
            fresh = [key not in known.added and key not in batch[:place] for place, key in enumerate(batch)]
            assert was_new == fresh
            known.added.update(batch)
            assert known.on_full is not OnFull.REJECT or len(known.added) <= known.capacity

    @rule(name=names, first=keys, then=keys)
    def add_twice(self, name: str, first: list[bytes], then: list[bytes]) -> None:
        """More of them."""
        self.add(name, first, False)
        self.add(name, then, True)

    @rule(name=names, batch=keys, hashed=st.booleans())
    def check(self, name: str, batch: list[bytes], hashed: bool) -> None:
        """Exact answers, at this rate."""
        name = self._one(name)
        if name in self._model:
            answers, degraded = self._run(self._gate.might_contain(name, self._asked(name, batch, hashed)))
            assert not degraded
            assert answers == bytes(key in self._model[name].added for key in batch)

    @rule(name=names)
    def drop(self, name: str) -> None:
        """Its name is free at once."""
        try:
            self._run(self._gate.drop(name))
        except errors.FilterNotFound:
            assert name not in self._model
        else:
            self._past[name] |= set(self._model.pop(name).added)

    # -- what the daemon does by itself

    @rule(name=names)
    def snapshot(self, name: str) -> None:
        """One filter, on demand."""
        name = self._one(name)
        if name in self._model:
            self._run(self._gate.snapshot(name))

    @rule(name=names, first=keys, then=keys)
    def snapshot_between_adds(self, name: str, first: list[bytes], then: list[bytes]) -> None:
        """Its stamp is of the first, which is queued; the second goes on while it waits for that."""
        name = self._one(name)
        if name not in self._model:
            return
        self._journal.released.clear()
        adding = [self._loop.create_task(self._gate.add(name, Keys(tuple(first))))]
        written = self._loop.create_task(self._gate.snapshot(name))
        for _ in range(3):
            self._run(asyncio.sleep(0))
        adding.append(self._loop.create_task(self._gate.add(name, Keys(tuple(then)))))
        self._run(asyncio.sleep(0))
        self._journal.released.set()
        for batch, added in zip((first, then), adding, strict=True):
            self._judge(name, batch, added)
        self._run(written)

    @rule(seconds=st.sampled_from([1.0, 400.0, 1000.0]))
    def tend(self, seconds: float) -> None:
        """Snapshots that are due, idle ones stamped anew, and a trim as far as that allows."""
        self._now += seconds
        self._run(self._gate.tend())

    # -- how lives end

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        """With last snapshots, or without them: a crash."""
        if not clean:
            self._run(self._stack.aclose())
            self._open()
            return
        self._run(self._gate.finish())
        self._run(self._gate.snapshotter.write_changed(self._gate.catalog))
        self._run(self._stack.aclose())
        self._open()

    @precondition(lambda self: self._model)
    @rule(data=st.data(), batches=st.lists(keys, min_size=1, max_size=4), dropping=st.booleans())
    def crash_with_work_under_way(self, data: Any, batches: list[list[bytes]], dropping: bool) -> None:
        """What is queued and not durable is lost whole, and nobody was told of it: the directory is taken as
        it is while the commit is held."""
        name = data.draw(st.sampled_from(sorted(self._model)))
        self._journal.released.clear()
        work = [
            self._loop.create_task(self._gate.add(name, Keys((b"at least one", *batch)))) for batch in batches
        ]
        work.append(self._loop.create_task(self._gate.create("fresh", inside.asked(10, RATE))))
        if dropping:
            work.append(self._loop.create_task(self._gate.drop(name)))
        self._run(asyncio.sleep(0.001))
        assert not any(task.done() and not task.exception() for task in work)
        self._lives += 1
        image = self._folder / str(self._lives)
        shutil.copytree(self._directory, image)
        self._journal.released.set()
        self._run(asyncio.gather(*work, return_exceptions=True))
        self._run(self._stack.aclose())
        self._directory = image
        self._open()

    # -- what must hold

    def _asked(self, name: str, batch: list[bytes], hashed: bool) -> Keys:
        entry = self._gate.catalog.get(name)
        if not hashed or entry is None:
            return Keys(tuple(batch))
        hasher = entry.spec.hasher
        return Keys(digests=hasher.digests(batch), hash_id=hasher.hash_id)

    @invariant()
    def the_catalog_is_exact(self) -> None:
        """These filters and no others, each READY."""
        Daemon.steps += 1
        entries = {entry.name: entry for entry in self._gate.catalog}
        assert set(entries) == set(self._model)
        assert {entry.state for entry in entries.values()} <= {"READY"}

    def _verify_all(self) -> None:
        """After each start: every key, every count, and no key of an earlier life."""
        self.the_catalog_is_exact()
        for name, known in self._model.items():
            stats = self._run(self._gate.stats(name))
            assert stats.fill.approximate_count == len(known.added)
            assert stats.fill.added_count == known.added.total()
            asked = sorted({*known.added, *known.before})
            if asked:
                answers, _ = self._run(self._gate.might_contain(name, Keys(tuple(asked))))
                assert answers == bytes(key in known.added for key in asked)


# Making a failure small takes minutes.
@pytest.mark.timeout(3600)
def test_any_order_of_events_agrees_with_an_exact_model() -> None:
    """Answers, counts and the list of filters are exact at each step and after each start."""
    run_state_machine_as_test(
        Daemon,
        settings=settings(
            max_examples=rounds(50, 2000),
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=not LONG,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    record("any order of creates, adds, snapshots, trims, drops, stops and crashes, in steps", Daemon.steps,
           "agrees with an exact model")  # fmt: skip
