"""kill -9 at named points: what was acknowledged is there, what was dropped is not, nothing is left lying.

A sample of the points in the suite, all of them in the long run.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from bloomgate.v1 import admin_pb2, filters_pb2
from support.daemon import DaemonProcess, refused
from support.tally import record, sample

from .killing import Point

# Snapshots and trims are under way all the time.
RESTLESS = (
    "--set", "journal.retention=0", "--set", "snapshot.interval=0.05", "--set", "snapshot.check_every=0.02",
)  # fmt: skip
RARE = 1e-9


class World:
    """A data directory, and what its daemons have acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "data"
        self.armed, self.reached = folder / "armed", folder / "reached"
        self.acknowledged: dict[str, list[bytes]] = {"steady": [], "growing": [], "victim": [], "again": []}
        self.old = [b"old-%d" % number for number in range(200)]

    def prepare(self, *flags: str) -> None:
        """Filters with keys and snapshots, a dropped one, one that was created again; then a kill."""
        daemon = DaemonProcess(self.directory, *flags)
        with daemon.stubs() as (filters, admin):
            create(admin, "again", 1000)
            add(filters, "again", self.old)
            create(admin, "gone", 1000)
            for name in ("gone", "again"):
                admin.DropFilter(admin_pb2.DropFilterRequest(name=name), timeout=30)
            for name, capacity in (("steady", 100_000), ("growing", 10), ("victim", 1000), ("again", 1000)):
                create(admin, name, capacity)
                self.add(filters, name, 100)
            for _ in range(2):
                for name in self.acknowledged:
                    self.add(filters, name, 10)
                    admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name=name), timeout=30)
            for name in self.acknowledged:
                self.add(filters, name, 100)
        daemon.kill()

    def add(self, filters: Any, name: str, count: int) -> None:
        """Add so many new keys, in one call."""
        known = self.acknowledged[name]
        keys = [b"%s-%d" % (name.encode(), len(known) + number) for number in range(count)]
        add(filters, name, keys)
        known += keys

    def dies(self, point: Point, trigger: Callable[[Any, Any], None], *flags: str) -> None:
        """Serve with Adds going on, arm it, do what leads to the point, and see it die there."""
        daemon = DaemonProcess(self.directory, *flags, prelude=point.prelude(self.armed, self.reached))

        def adding() -> None:
            with daemon.stubs() as (filters, _):
                try:
                    while True:
                        self.add(filters, "steady", 1)
                        self.add(filters, "growing", 3)
                except grpc.RpcError as error:
                    ended.append(error.code())

        ended: list[Any] = []
        thread = threading.Thread(target=adding)
        try:
            with daemon.stubs() as (filters, admin):
                thread.start()
                self.armed.touch()
                try:
                    trigger(filters, admin)
                except grpc.RpcError as error:
                    ended.append(error.code())
            self._died(daemon, point)
        finally:
            # Whatever went wrong: without a daemon the adding ends.
            daemon.kill()
            thread.join(60)
        # Neither the adding nor what led to the point got an answer.
        assert ended == [grpc.StatusCode.UNAVAILABLE] * (1 if trigger is wait else 2)

    def dies_starting(self, point: Point, *flags: str) -> None:
        """Start, and see it die at the point."""
        self.armed.touch()
        prelude = point.prelude(self.armed, self.reached)
        daemon = DaemonProcess(self.directory, *flags, prelude=prelude, ready=False)
        self._died(daemon, point)

    def _died(self, daemon: DaemonProcess, point: Point) -> None:
        try:
            code = daemon.process.wait(60)
        finally:
            daemon.kill()
        assert self.reached.exists(), f"{point} was never reached\n{daemon.log()}"
        assert code == -signal.SIGKILL

    def verify(self, passing: frozenset[str] = frozenset({"victim"})) -> None:
        """A plain start has all that was acknowledged, and of "victim" and "fresh" what is in ``passing``;
        after its clean stop a check finds nothing wrong, and nothing lies about."""
        self.armed.unlink(missing_ok=True)
        daemon = DaemonProcess(self.directory, *RESTLESS)
        with daemon.stubs() as (filters, admin):
            listed = admin.ListFilters(admin_pb2.ListFiltersRequest(), timeout=30).filters
            names = {each.name for each in listed}
            assert {each.state for each in listed} <= {filters_pb2.FILTER_STATE_READY}
            assert names == {"steady", "growing", "again", *passing}
            for name in names - {"fresh"}:
                assert set(check(filters, name, self.acknowledged[name])) == {filters_pb2.ANSWER_MAYBE}, name
            assert set(check(filters, "again", self.old)) == {filters_pb2.ANSWER_DEFINITELY_NOT}
            for name in ("victim", "fresh"):
                if name in names:
                    admin.DropFilter(admin_pb2.DropFilterRequest(name=name), timeout=30)
                create(admin, name, 1000)
                others = self.acknowledged["victim"] + self.acknowledged["steady"][:100]
                assert set(check(filters, name, others)) == {filters_pb2.ANSWER_DEFINITELY_NOT}
            self.add(filters, "steady", 10)
        assert daemon.stop() == 0
        assert not list(self.directory.rglob("*.tmp"))
        checked = refused("fsck", str(self.directory))
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "no record names it" not in checked.stdout


def create(admin: Any, name: str, capacity: int) -> None:
    spec = filters_pb2.FilterSpec(capacity=capacity, error_rate=RARE)
    reply = admin.CreateFilter(admin_pb2.CreateFilterRequest(name=name, spec=spec), timeout=30)
    assert reply.created, name


def add(filters: Any, name: str, keys: list[bytes]) -> None:
    filters.Add(filters_pb2.AddRequest(filter=name, keys=keys), timeout=30)


def check(filters: Any, name: str, keys: list[bytes]) -> list[int]:
    answers: list[int] = []
    for start in range(0, len(keys), 50_000):
        request = filters_pb2.MightContainRequest(filter=name, keys=keys[start : start + 50_000])
        answers += filters.MightContain(request, timeout=30).answers
    return answers


def wait(_filters: Any, _admin: Any) -> None:
    """What goes on by itself leads to the point."""


def drop(_filters: Any, admin: Any) -> None:
    admin.DropFilter(admin_pb2.DropFilterRequest(name="victim"), timeout=30)


def make(_filters: Any, admin: Any) -> None:
    create(admin, "fresh", 1000)


def snapshot(_filters: Any, admin: Any) -> None:
    admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name="steady"), timeout=30)


def row(point: Point, name: str = "") -> Any:
    return pytest.param(point, id=name or str(point))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> World:
    """What each test begins with a copy of."""
    world = World(tmp_path_factory.mktemp("prepared"))
    world.prepare()
    return world


@pytest.fixture
def world(prepared: World, tmp_path: Path) -> World:
    """A directory whose daemon was killed, and what it had acknowledged."""
    world = World(tmp_path)
    shutil.copytree(prepared.directory, world.directory)
    world.acknowledged = {name: list(keys) for name, keys in prepared.acknowledged.items()}
    return world


@pytest.mark.parametrize(
    "point",
    [
        row(Point("COMMIT of add", "before")),
        row(Point("COMMIT of add", "after")),
        row(Point("MarkFile.write", "after")),
    ],
)
def test_killed_around_the_commit(world: World, point: Point) -> None:
    """Before the commit, after it and before the mark, after the mark and before the answer."""
    world.dies(point, wait)
    world.verify()
    record("kill -9 around the commit of an add, drop or create", 1, "recovers")


@pytest.mark.parametrize(
    ("point", "trigger", "passing"),
    sample(
        [
            pytest.param(Point(what, when), trigger, frozenset(passing), id=f"{when} {what}")
            for what, when, trigger, passing in (
                ("COMMIT of drop", "before", drop, {"victim"}),
                ("COMMIT of create", "before", make, {"victim"}),
                ("COMMIT of drop", "after", drop, set()),
                ("COMMIT of create", "after", make, {"victim", "fresh"}),
                ("Catalog.with_entry", "before", make, {"victim", "fresh"}),
                ("Catalog.without", "before", drop, set()),
                ("Catalog.with_entry", "after", make, {"victim", "fresh"}),
            )
        ],
        4,
    ),
)
def test_killed_within_a_drop_or_create(
    world: World, point: Point, trigger: Any, passing: frozenset[str]
) -> None:
    """Queued, it is as if it had never been asked for; durable, it is done, though nobody was told and the
    catalog did not show it yet."""
    world.dies(point, trigger)
    world.verify(passing)
    record("kill -9 around the commit of an add, drop or create", 1, "recovers")


@pytest.mark.parametrize(
    "point",
    sample(
        [
            row(Point("a chunk of a snapshot", "after")),
            row(Point("a chunk of a snapshot", "after", 2)),
            row(Point("fsync of a snapshot", "before")),
            row(Point("rename of a snapshot", "before")),
            row(Point("rename of a snapshot", "after")),
            row(Point("Snapshotter._record", "before")),
            row(Point("COMMIT of snapshots", "before")),
            row(Point("COMMIT of snapshots", "after")),
            row(Point("SnapshotStore.remove", "before")),
            row(Point("SnapshotStore.remove", "after")),
        ],
        4,
    ),
)
def test_killed_within_a_snapshot(world: World, point: Point) -> None:
    """While it is written, before its sync, around its rename, around the commit of its record, around the
    removal of the oldest one."""
    world.dies(point, snapshot)
    world.verify()
    record("kill -9 within a snapshot", 1, "recovers")


@pytest.mark.parametrize(
    "point",
    sample(
        [
            row(Point("DELETE FROM keep", "before")),
            row(Point("COMMIT of trim", "before")),
            row(Point("COMMIT of trim", "after")),
            row(Point("PRAGMA page_count", "after"), "before the vacuum"),
        ],
        2,
    ),
)
def test_killed_within_a_trim(world: World, point: Point) -> None:
    """Before and after its commit, and before space is given back."""
    world.dies(point, wait, *RESTLESS)
    world.verify()
    record("kill -9 within a trim", 1, "recovers")


@pytest.mark.parametrize(
    "point",
    sample([row(Point("Snapshotter.forget", "before")), row(Point("SnapshotStore.remove", "after"))], 1),
)
def test_killed_before_a_dropped_filters_files_are_gone(world: World, point: Point) -> None:
    """The drop is durable, its files or one of them are still there: the next start removes them."""
    world.dies(point, drop)
    world.verify(frozenset())
    record("kill -9 after a drop, before its files are gone", 1, "recovers")


@pytest.mark.parametrize("when", sample(["before", "after"], 1))
def test_killed_around_a_checkpoint(world: World, when: str) -> None:
    """Of the writer's own, when the log has grown."""

    def fill(filters: Any, _admin: Any) -> None:
        for _ in range(100):
            world.add(filters, "victim", 10_000)

    world.dies(Point("PRAGMA wal_checkpoint(PASSIVE)", when), fill)
    world.verify()
    record("kill -9 around a checkpoint", 1, "recovers")


@pytest.mark.parametrize(
    "point",
    sample(
        [
            row(Point("read_catalog", "before")),
            row(Point("read_catalog", "after")),
            row(Point("SnapshotStore.load", "before")),
            row(Point("SnapshotStore.load", "after")),
            row(Point("_apply", "after", 5)),
            row(Point("SnapshotStore.move_aside", "before")),
            row(Point("SnapshotStore.move_aside", "after")),
            row(Point("SnapshotStore.remove", "before")),
            row(Point("SnapshotStore.remove", "after")),
            row(Point("PRAGMA wal_checkpoint(TRUNCATE)", "before")),
            row(Point("PRAGMA wal_checkpoint(TRUNCATE)", "after")),
            row(Point("MarkFile.write", "before")),
            row(Point("MarkFile.write", "after")),
        ],
        5,
    ),
)
def test_killed_during_recovery(world: World, point: Point) -> None:
    """At each of its steps, with a damaged snapshot to move aside and an unrecorded one to remove; twice."""
    folder = world.directory / "snapshots"
    newest = max(folder.iterdir(), key=lambda file: (file.name.split("-")[0], file.name))
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    shutil.copy(newest, folder / f"{99:016x}-1-1.bgf")
    world.dies_starting(point)
    if point.what not in ("SnapshotStore.move_aside", "SnapshotStore.remove"):
        # These are done by then.
        world.reached.unlink()
        world.dies_starting(point)
    world.verify()
    assert [file.name for file in folder.iterdir() if "damaged" in file.name] == [f"{newest.name}.damaged-0"]
    record("kill -9 during recovery", 1, "recovers")


@pytest.mark.parametrize(
    "point",
    sample(
        [
            row(Point("MarkFile.write", "before")),
            row(Point("MarkFile.write", "after")),
            row(Point("rename of the mark", "before")),
            row(Point("rename of the mark", "after")),
            row(Point("PRAGMA journal_mode = WAL", "after")),
            row(Point("schema", "after")),
            row(Point("MarkFile.write", "before", 2)),
            row(Point("MarkFile.write", "after", 2)),
            row(Point("PRAGMA wal_checkpoint(TRUNCATE)", "after")),
        ],
        4,
    ),
)
def test_killed_while_a_directory_is_made(tmp_path: Path, point: Point) -> None:
    """Nothing was acknowledged, so the next start begins anew, or goes on."""
    world = World(tmp_path)
    world.dies_starting(point)
    world.armed.unlink()
    world.prepare()
    world.verify()
    record("kill -9 while a data directory is made", 1, "recovers")
