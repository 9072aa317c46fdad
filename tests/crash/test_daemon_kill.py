"""Acknowledged means durable, for a real process that is killed at any moment."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from bloomgate.filters.hashing import Hasher, HashScheme
from bloomgate.v1 import admin_pb2, filters_pb2
from support.daemon import DaemonProcess
from support.tally import record, rounds

LANES = 2
# Of each lane; at length 520 kills in all.
ROUNDS = rounds(12, 260)
SEED = 20_240_607
# So that snapshots, trims and growth are under way at any moment.
FLAGS = (
    "--set", "journal.retention=0", "--set", "snapshot.interval=0.03", "--set", "snapshot.check_every=0.02",
    "--set", "snapshot.journal_bytes=4000", "--set", "log_level=warning",
)  # fmt: skip
STEADY = {
    "growing": filters_pb2.FilterSpec(capacity=50, error_rate=1e-6),
    "keyed": filters_pb2.FilterSpec(
        capacity=200_000, error_rate=1e-6, hash_scheme=2, on_full=filters_pb2.ON_FULL_DEGRADE
    ),
}
# Created and dropped over and over, by one caller each, which so knows what is acknowledged.
PASSING = ("passing-a", "passing-b")


@dataclass
class Passing:
    """What the one caller of a passing filter knows of it."""

    exists: bool = False
    unsure: bool = False
    """Its last create or drop got no answer."""
    life: int = 0
    keys: list[bytes] = field(default_factory=list)
    """Acknowledged in this life."""
    sent: list[bytes] = field(default_factory=list)
    """Sent in this life."""
    old: list[bytes] = field(default_factory=list)
    """Sent in earlier lives, the last of them."""


class Lane:
    """One data directory, over many lives of its daemon."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._choose = random.Random(seed)
        self._seed = seed
        self._acknowledged: dict[str, list[bytes]] = defaultdict(list)
        self._sent: dict[str, int] = defaultdict(int)
        self._passing = {name: Passing() for name in PASSING}
        self._numbers: dict[int, int] = defaultdict(int)
        self.kills = 0
        self.kills_in_start = 0
        self.trimmed = 0

    def run(self) -> None:
        """All rounds, and a last look."""
        for number in range(ROUNDS):
            if number % 4 == 3:
                self._killed_in_start()
            daemon = DaemonProcess(self._directory, *FLAGS)
            try:
                with daemon.stubs() as (filters, admin):
                    self._verify(filters, admin)
                    self._round(number, daemon, filters, admin)
            finally:
                daemon.kill()
            self.kills += 1
            with closing(sqlite3.connect(self._directory / "bloomgate.db")) as connection:
                (first,) = connection.execute("SELECT min(seq) FROM journal WHERE kind = 3").fetchone()
            self.trimmed += (first or 0) > 100
        daemon = DaemonProcess(self._directory, *FLAGS)
        with daemon.stubs() as (filters, admin):
            self._verify(filters, admin)
        assert daemon.stop() == 0

    def _killed_in_start(self) -> None:
        """Kill it somewhere on the way to its ready line."""
        daemon = DaemonProcess(self._directory, *FLAGS, ready=False)
        threading.Event().wait(self._choose.uniform(0.1, 0.7))
        daemon.kill()
        self.kills_in_start += 1

    def _round(self, number: int, daemon: DaemonProcess, filters: Any, admin: Any) -> None:
        for name, spec in STEADY.items():
            admin.CreateFilter(admin_pb2.CreateFilterRequest(name=name, spec=spec))
        hashers = {name: hasher_of(filters, name) for name in STEADY}
        killed = threading.Event()
        callers: list[Callable[[random.Random], None]] = [
            *[
                lambda choose, name=name: self._add(choose, name, hashers[name], filters, admin)
                for name in STEADY
            ]
            * 2,
            *[lambda choose, name=name: self._pass(choose, name, filters, admin) for name in PASSING],
        ]

        def calling(which: int) -> None:
            choose = random.Random(f"{self._seed}-{number}-{which}")
            try:
                while True:
                    callers[which](choose)
            except grpc.RpcError as error:
                # Only the kill may end a call.
                if not killed.is_set() or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise

        with ThreadPoolExecutor(len(callers)) as threads:
            running = [threads.submit(calling, which) for which in range(len(callers))]
            # Not to order anything: this is the random moment.
            threading.Event().wait(self._choose.uniform(0.01, 0.35))
            killed.set()
            daemon.kill()
        for each in running:
            each.result()

    def _keys(self, choose: random.Random, count: int) -> list[bytes]:
        first = choose.getrandbits(64)
        return [b"%x-%d" % (first, i) for i in range(count)]

    def _add(self, choose: random.Random, name: str, hasher: Hasher, filters: Any, admin: Any) -> None:
        """One call of a caller of a steady filter."""
        if choose.random() < 0.02:
            admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name=name), timeout=30)
            return
        keys = self._keys(choose, choose.choice([1, 1, 1, 1, 5, 13, 100]))
        self._sent[name] += len(keys)
        if choose.random() < 0.5:
            request = filters_pb2.AddRequest(filter=name, keys=keys)
        else:
            digests = hasher.digests(keys)
            request = filters_pb2.AddRequest(filter=name, digests=digests, hash_id=hasher.hash_id)
        reply = filters.Add(request, timeout=30)
        assert len(reply.was_new) == len(keys)
        self._acknowledged[name] += keys

    def _pass(self, choose: random.Random, name: str, filters: Any, admin: Any) -> None:
        """One call of the one caller of a passing filter."""
        known = self._passing[name]
        if not known.exists:
            known.unsure = True
            spec = filters_pb2.FilterSpec(capacity=100, error_rate=1e-9)
            reply = admin.CreateFilter(admin_pb2.CreateFilterRequest(name=name, spec=spec), timeout=30)
            assert reply.created
            known.exists, known.unsure = True, False
        elif choose.random() < 0.1:
            known.unsure = True
            admin.DropFilter(admin_pb2.DropFilterRequest(name=name), timeout=30)
            self._begin_anew(known)
        elif choose.random() < 0.05:
            admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name=name), timeout=30)
        else:
            keys = self._keys(choose, choose.choice([1, 3, 30]))
            # All that is sent is looked for in later lives, in this one only what is acknowledged.
            known.sent += keys
            filters.Add(filters_pb2.AddRequest(filter=name, keys=keys), timeout=30)
            known.keys += keys

    @staticmethod
    def _begin_anew(known: Passing) -> None:
        known.old = (known.old + known.sent)[-5000:]
        known.keys, known.sent = [], []
        known.exists, known.unsure = False, False
        known.life += 1

    def _verify(self, filters: Any, admin: Any) -> None:
        """All that is known to be durable is there."""
        listed = {each.name: each for each in admin.ListFilters(admin_pb2.ListFiltersRequest()).filters}
        assert all(each.state == filters_pb2.FILTER_STATE_READY for each in listed.values()), listed
        for name, keys in self._acknowledged.items():
            assert_maybe(filters, name, keys)
            assert len(keys) <= listed[name].added_count <= self._sent[name]
            # A steady filter's keys are distinct; at its error rate hardly one passes for old.
            assert len(keys) * 0.999 <= listed[name].approximate_count <= self._sent[name]
        for name, known in self._passing.items():
            if known.unsure:
                # The create or drop that got no answer was done, or it was not; no third way.
                if known.exists and name not in listed:
                    self._begin_anew(known)
                known.exists, known.unsure = name in listed, False
            assert known.exists == (name in listed)
            if known.exists:
                assert_maybe(filters, name, known.keys)
                if known.old:
                    answers = answers_of(filters, name, known.old)
                    assert set(answers) == {filters_pb2.ANSWER_DEFINITELY_NOT}


def hasher_of(filters: Any, name: str) -> Hasher:
    spec = filters.HashSpec(filters_pb2.HashSpecRequest(filter=name))
    return Hasher(HashScheme(spec.hash_scheme), getattr(spec, spec.WhichOneof("key")))


def answers_of(filters: Any, name: str, keys: list[bytes]) -> list[int]:
    answers: list[int] = []
    for start in range(0, len(keys), 50_000):
        request = filters_pb2.MightContainRequest(filter=name, keys=keys[start : start + 50_000])
        answers += filters.MightContain(request, timeout=30).answers
    return answers


def assert_maybe(filters: Any, name: str, keys: list[bytes]) -> None:
    answers = answers_of(filters, name, keys)
    assert len(answers) == len(keys)
    lost = [key for key, answer in zip(keys, answers, strict=True) if answer != filters_pb2.ANSWER_MAYBE]
    assert not lost, f"{len(lost)} of {len(keys)} acknowledged keys of {name} are lost"


@pytest.mark.timeout(3600)
def test_every_acknowledged_key_survives_every_kill(tmp_path: Path) -> None:
    """Over many kills at random moments, some of them on the way up, under concurrent Adds of keys
    and digests, growth, snapshots, trims, creates and drops: after each restart every acknowledged key is
    maybe, counts are those of what was sent, dropped filters stay dropped, and those created anew do not show
    the keys of their predecessors."""
    lanes = [Lane(tmp_path / f"lane-{number}", SEED + number) for number in range(LANES)]
    with ThreadPoolExecutor(LANES) as threads:
        for running in [threads.submit(lane.run) for lane in lanes]:
            running.result()
    kills, starts = (sum(getattr(lane, name) for lane in lanes) for name in ("kills", "kills_in_start"))
    assert kills == LANES * ROUNDS
    for lane in lanes:
        # It was about something, on the slowest of machines too: trims took what snapshots had.
        assert lane.trimmed
        assert all(len(keys) > ROUNDS for keys in lane._acknowledged.values())
        assert all(known.life for known in lane._passing.values())
    record(
        "kill -9 at random moments, under adds, growth, snapshots, trims, creates and drops",
        kills,
        "recovers",
    )
    record("kill -9 at random moments of a start", starts, "recovers")
