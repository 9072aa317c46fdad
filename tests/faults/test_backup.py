"""``bloomgated backup`` makes a consistent copy, and a directory restored from one answers no wrong "no"."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from click.testing import CliRunner

from bloomgate import Client
from bloomgate.filters import Segment
from bloomgate.v1 import filters_pb2
from bloomgated.errors import BackupRefused, JournalDamaged, StartError
from bloomgated.main import cli
from bloomgated.storage import backup as module
from bloomgated.storage import sqlite as sqlite_journal
from bloomgated.storage.backup import back_up
from bloomgated.storage.directory import DirectoryLock
from bloomgated.storage.fsck import check as fsck
from bloomgated.storage.mark import read_mark
from bloomgated.storage.records import Add, Drop
from conftest import StartDaemon
from daemon.calls import DEFINITELY_NOT, MAYBE, add, check, create, stats
from faults.test_fsck import everything
from storage.making import (
    DATABASE,
    MARK,
    WAL,
    World,
    assert_equal,
    contents,
    copy_as_killed,
    flip,
    recover_in,
)
from support.daemon import refused
from support.tally import record

NAMES = ("a", "b", "c")


async def _make(where: Path) -> World:
    """Filters with and without snapshots, and the journal after them; killed and stopped."""
    world = World(where / "live")
    for name in NAMES:
        await world.create(name)
        await world.add(name, [f"{name}-{number}".encode() for number in range(30)])
    for name in ("a", "b", "a", "b"):
        await world.snapshot(name)
        await world.add(name, [f"{name}-{world.journal.last_seq}".encode()])
    copy_as_killed(world.directory, where / "killed")
    await world.close()
    copy_as_killed(world.directory, where / "stopped")
    return world


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    """Where ``killed`` and ``stopped`` are, and the world that they were made from; tests use copies."""
    where = tmp_path_factory.mktemp("made")
    return where, asyncio.run(_make(where))


def run(*arguments: Any) -> Any:
    """`bloomgated backup` with arguments, in this process."""
    return CliRunner().invoke(cli, ["backup", *map(str, arguments)])


def start(directory: Path, **options: Any) -> World:
    """Start on a directory and stop."""

    async def work() -> World:
        world = World(directory, **options)
        await world.close()
        return world

    return asyncio.run(work())


def assert_restored(directory: Path) -> None:
    """Every filter is damaged, as restored, and says what to do."""
    found = recover_in(directory)
    assert set(found) == set(NAMES)
    for each in found.values():
        assert each.bloom is None
        assert each.damage.startswith("restored from a backup that ended at seq ")
        assert "load a new filter beside it" in each.damage
        assert "--assert-no-later-adds" in each.damage


# -- the copy


@pytest.mark.parametrize("state", ["killed", "stopped"])
def test_a_copy_of_a_stopped_directory(made: tuple[Path, World], state: str, tmp_path: Path) -> None:
    """It has every filter to the byte; the original is not touched; its journal is another one; and until its
    operator vouches for it, all of it is restored."""
    where, world = made
    source, target = copy_as_killed(where / state, tmp_path / "source"), tmp_path / "copy"
    before = everything(source)
    copied = back_up(source, target)
    assert everything(source) == before
    assert (copied.filters, copied.seq) == (3, world.journal.last_seq)
    assert copied.bytes == sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert read_mark(target / MARK).journal_id != read_mark(source / MARK).journal_id
    assert sorted(path.name for path in target.iterdir()) == [DATABASE, MARK, "snapshots"]
    assert not any(path.stat().st_mode & 0o077 for path in (target, *target.rglob("*")))
    report = fsck(target)
    assert not report.damaged
    assert all(each.restored and each.state == "DAMAGED" for each in report.filters)
    assert report.findings == []
    for _ in range(2):
        assert_restored(target)
    found = start(target, assert_no_later_adds=True)
    for name in NAMES:
        assert_equal(found.recovered[name], world.filters[name])
    assert not fsck(target).damaged
    assert not any(each.damage for each in start(target).recovered.values())


def test_the_restored_entry_is_what_the_format_says(made: tuple[Path, World], tmp_path: Path) -> None:
    """`docs/FORMAT.md`: the last seq of the copy, as eight bytes."""
    where, world = made
    back_up(where / "stopped", tmp_path / "copy")
    with closing(sqlite3.connect(f"file:{tmp_path / 'copy' / DATABASE}?immutable=1", uri=True)) as connection:
        (value,) = connection.execute("SELECT value FROM meta WHERE key = 'restored'").fetchone()
    assert value == world.journal.last_seq.to_bytes(8, "little")


def test_the_command_says_what_it_copied(made: tuple[Path, World], tmp_path: Path) -> None:
    """One sentence; the directory comes from flags or a settings file, as for serve; an empty one will do."""
    where, world = made
    (tmp_path / "settings.toml").write_text(f"data_dir = '{where / 'stopped'}'\n")
    (tmp_path / "empty").mkdir()
    for target, arguments in (
        ("one", ("--data-dir", where / "stopped")),
        ("two", ("--set", f"data_dir={where / 'stopped'}")),
        ("empty", ("--config", tmp_path / "settings.toml")),
    ):
        ended = run(tmp_path / target, *arguments)
        assert ended.exit_code == 0
        assert ended.stdout.startswith(f"copied {where / 'stopped'} to {tmp_path / target}: 3 filters, ")
        assert ended.stdout.endswith(f" bytes, up to seq {world.journal.last_seq}\n")
        assert ended.stdout.count("\n") == 1


def test_a_copy_of_a_running_daemon_and_its_start(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """While Adds go on and snapshots are taken, the copy has all that was acknowledged before it. Started,
    its filters answer maybe over restarts, take Adds, and know what they lack; one that is created later is
    whole; once the operator vouches for it, all of them are, with what was added meanwhile."""
    daemon, target, stop = start_daemon(), tmp_path / "copy", threading.Event()
    acknowledged: list[bytes] = []
    with daemon.stubs() as (filters, admin):
        name = create(admin, "busy", capacity=200_000)

    def traffic() -> None:
        with Client(daemon.grpc) as client:
            busy, number = client.filter("busy"), 0
            while not stop.is_set():
                keys = [b"%d-%d" % (number, each) for each in range(200)]
                busy.add_many(keys)
                acknowledged.extend(keys)
                number += 1
                if number % 5 == 0:
                    client.snapshot_filter("busy")

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        while len(acknowledged) < 2000:
            stop.wait(0.01)
        before = list(acknowledged)
        ended = refused("backup", str(target), "--data-dir", str(daemon.directory))
        during = len(acknowledged) - len(before)
    finally:
        stop.set()
        thread.join()
    assert ended.returncode == 0, ended.stderr
    assert during > 0
    assert ended.stdout.startswith(f"copied {daemon.directory} to {target}: 1 filters, ")
    daemon.kill()

    copy = start_daemon(directory=target)
    with copy.stubs() as (filters, admin):
        shown = stats(filters, name)
        assert shown.state == filters_pb2.FILTER_STATE_DAMAGED
        assert shown.damage.startswith("restored from a backup ")
        assert check(filters, name, b"never") == [MAYBE]
        add(filters, name, b"while damaged")
        create(admin, "later")
        add(filters, "later", b"key")
        assert check(filters, "later", b"key", b"never") == [MAYBE, DEFINITELY_NOT]
    copy.kill()
    copy = start_daemon(directory=target)
    with copy.stubs() as (filters, _):
        assert stats(filters, name).damage == shown.damage
        assert check(filters, "later", b"key", b"never") == [MAYBE, DEFINITELY_NOT]
    assert copy.stop() == 0
    copy = start_daemon("--assert-no-later-adds", directory=target)
    with copy.stubs() as (filters, _):
        assert stats(filters, name).state == filters_pb2.FILTER_STATE_READY
        assert set(check(filters, name, *before, b"while damaged")) == {MAYBE}
        assert DEFINITELY_NOT in check(filters, name, *(b"absent-%d" % number for number in range(20)))
    assert copy.log().count("asserted: nothing was added after the backup") == 1
    assert copy.stop() == 0
    record("backup under load, put back", 1, "recovers; answers maybe until the operator vouches for it")


def test_an_assertion_about_a_directory_that_is_not_restored(
    made: tuple[Path, World], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It changes nothing, and one line in the log says so."""
    caplog.set_level("INFO")
    where, world = made
    directory = copy_as_killed(where / "stopped", tmp_path / "data")
    before = contents(directory)
    found = start(directory, assert_no_later_adds=True).recovered
    assert contents(directory) == before
    assert caplog.text.count("this directory is not a restored one") == 1
    for name in NAMES:
        assert_equal(found[name], world.filters[name])


# -- files that go while they are copied


async def copy_beside(world: World, target: Path, meanwhile: Callable[[], Any]) -> int:
    """Back up a world that runs, with ``meanwhile`` done between the first copy of the journal and its files;
    returns how often the journal was copied."""
    loop, copied = asyncio.get_running_loop(), 0
    copy_snapshots = module._Backup._copy_snapshots

    def held(self: Any, catalog: Any) -> Any:
        nonlocal copied
        copied += 1
        if copied == 1:
            asyncio.run_coroutine_threadsafe(meanwhile(), loop).result()
        return copy_snapshots(self, catalog)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Backup, "_copy_snapshots", held)
        lock = DirectoryLock(world.directory)
        try:
            await asyncio.to_thread(back_up, world.directory, target)
        finally:
            lock.release()
    return copied


def test_snapshots_that_go_meanwhile(tmp_path: Path) -> None:
    """The journal of one moment names files that are gone at the next: it is copied again, and whole."""

    async def work() -> None:
        world = await _open(tmp_path / "live")

        async def meanwhile() -> None:
            for _ in range(3):
                await world.add("a", [b"%d" % world.journal.last_seq])
                await world.snapshot("a")

        assert await copy_beside(world, tmp_path / "copy", meanwhile) == 2
        await world.add("b", [b"after"])
        found = recover_in(tmp_path / "copy", assert_no_later_adds=True)
        assert_equal(found["a"], world.filters["a"])
        assert found["b"].bloom is not None
        assert not found["b"].bloom.might_contain(b"after")
        await world.close()

    asyncio.run(work())


def test_a_snapshot_that_is_gone_and_stays_recorded(tmp_path: Path) -> None:
    """That is damage and not a change: the backup ends, and says which file."""

    async def work() -> None:
        world = await _open(tmp_path / "live")
        gone = world.path(world.filters["a"].files[1])

        async def meanwhile() -> None:
            gone.unlink()

        with pytest.raises(BackupRefused, match=gone.name):
            await copy_beside(world, tmp_path / "copy", meanwhile)
        assert not (tmp_path / "copy").exists()
        await world.close()

    asyncio.run(work())


async def _open(directory: Path) -> World:
    world = World(directory)
    for name in ("a", "b"):
        await world.create(name)
        for key in (b"1", b"2"):
            await world.add(name, [key])
            await world.snapshot(name)
    return world


# -- what is refused


@pytest.mark.parametrize(
    "what",
    ["inside", "itself", "not empty", "a file", "no parent", "no source", "empty source"],
)
def test_a_place_that_will_not_do(made: tuple[Path, World], what: str, tmp_path: Path) -> None:
    """One sentence with the path, exit code 1, and nothing is made or removed."""
    where, _ = made
    source, target = copy_as_killed(where / "stopped", tmp_path / "source"), tmp_path / "copy"
    if what == "inside":
        target = source / "copy"
    elif what == "itself":
        target = source
    elif what == "not empty":
        target.mkdir()
        (target / "file").write_bytes(b"mine")
    elif what == "a file":
        target.write_bytes(b"mine")
    elif what == "no parent":
        target = target / "copy"
    elif what == "no source":
        source = tmp_path / "nothing"
    else:
        source = tmp_path / "empty"
        source.mkdir()
    before = contents(tmp_path)
    ended = run(target, "--data-dir", source)
    assert isinstance(ended.exception, StartError)
    assert str(target) in str(ended.exception) or str(source) in str(ended.exception)
    assert "\n" not in str(ended.exception)
    assert contents(tmp_path) == before


def test_a_refusal_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    """As every refusal of the command."""
    ended = refused("backup", str(tmp_path / "copy"), "--data-dir", str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"bloomgated: {tmp_path / 'copy'}: ")
    assert ended.stderr.count("\n") == 1


def damage(directory: Path, how: str) -> None:
    files = sorted((directory / "snapshots").glob("0000000000000001-*"))
    if how == "older snapshot":
        flip(files[0], 70)
    elif how == "newer snapshot":
        flip(files[1], 70)
    elif how == "snapshot gone":
        files[1].unlink()
    elif how == "log gone":
        (directory / WAL).unlink()
    elif how == "database gone":
        (directory / DATABASE).unlink()
    elif how == "mark gone":
        (directory / MARK).unlink()
    else:
        flip(directory / MARK, 30)


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        "older snapshot", "newer snapshot", "snapshot gone", "log gone", "database gone", "mark gone",
        "mark flipped",
    ],
)  # fmt: skip
def test_a_damaged_source_is_refused(
    made: tuple[Path, World], how: str, existed: bool, tmp_path: Path
) -> None:
    """The file of the source is named, and nothing is left where the copy would be."""
    where, _ = made
    source, target = copy_as_killed(where / "killed", tmp_path / "source"), tmp_path / "copy"
    damage(source, how)
    if existed:
        target.mkdir()
    before = contents(tmp_path)
    with pytest.raises(StartError) as caught:
        back_up(source, target)
    assert str(source) in str(caught.value)
    assert contents(tmp_path) == before
    record("backup of a damaged directory", 1, "refuses, and leaves no copy")


def test_a_restored_directory_is_not_copied_before_it_is_whole(
    made: tuple[Path, World], tmp_path: Path
) -> None:
    """A copy of a copy could be vouched for by who knows of the second one only."""
    where, _ = made
    back_up(where / "stopped", tmp_path / "one")
    with pytest.raises(BackupRefused, match="restored itself"):
        back_up(tmp_path / "one", tmp_path / "two")
    assert not (tmp_path / "two").exists()
    start(tmp_path / "one", assert_no_later_adds=True)
    assert back_up(tmp_path / "one", tmp_path / "two").filters == 3


# -- a copy that is not finished


def test_every_crash_of_a_backup_leaves_nothing_that_starts(made: tuple[Path, World], tmp_path: Path) -> None:
    """Killed at any line, what is there is refused, or there is nothing yet and a start begins anew with no
    filter; from the mark on it is whole, and restored."""
    where, _ = made
    source = copy_as_killed(where / "killed", tmp_path / "source")
    target = tmp_path / "target"
    states: list[Path] = []
    codes = {each.__code__ for each in vars(module._Backup).values() if hasattr(each, "__code__")}
    codes |= {back_up.__code__}

    def look(frame: FrameType, event: str, _arg: object) -> Callable[..., Any] | None:
        if frame.f_code not in codes:
            return None
        if event == "line" and target.exists():
            state = copy_as_killed(target, tmp_path / f"state-{len(states)}")
            if states and contents(state) == contents(states[-1]):
                shutil.rmtree(state)
            else:
                states.append(state)
        return look

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        back_up(source, target)
    finally:
        sys.settrace(tracing)
    endings = []
    for state in states:
        try:
            found = recover_in(state)
        except JournalDamaged:
            endings.append("refused")
            continue
        if found:
            assert_restored(state)
            endings.append("whole")
        else:
            assert not (state / "snapshots").exists()
            endings.append("nothing")
    assert endings == sorted(endings, key=["nothing", "refused", "whole"].index)
    assert endings.count("refused") > 8
    assert set(endings) == {"nothing", "refused", "whole"}
    record("backup killed at any line", len(endings), "refuses to start on what is not whole")


def test_a_disk_that_fails_under_a_backup(
    made: tuple[Path, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever sync fails, nothing is left, and the original is as it was."""
    where, _ = made
    source, target = copy_as_killed(where / "killed", tmp_path / "source"), tmp_path / "target"
    before, fsync, failed = contents(tmp_path), os.fsync, 0
    while True:
        left = failed

        def failing(fd: int) -> None:
            nonlocal left
            if left == 0:
                raise OSError(28, os.strerror(28))
            left -= 1
            fsync(fd)

        monkeypatch.setattr(os, "fsync", failing)
        refusal = ""
        try:
            back_up(source, target)
        except BackupRefused as error:
            refusal = str(error)
        if not refusal:
            break
        assert "No space left on device" in refusal
        assert str(target) in refusal
        assert contents(tmp_path) == before
        failed += 1
    assert failed >= 8
    monkeypatch.setattr(os, "fsync", fsync)
    assert_restored(target)
    record("disk full at a sync of a backup", failed, "refuses, and leaves no copy")


def test_an_interrupted_backup_leaves_nothing(
    made: tuple[Path, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is no failure of the disk, but the copy goes all the same."""

    def interrupted(_self: Any, _mark: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Backup, "_verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        back_up(made[0] / "stopped", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


# -- a restored directory


def test_what_a_restored_directory_holds_is_not_trimmed_away(
    made: tuple[Path, World], tmp_path: Path
) -> None:
    """Its operator may look at it for days before vouching for it: all that is needed then is still there."""
    where, world = made
    back_up(where / "stopped", tmp_path / "copy")

    async def work() -> None:
        restored = World(tmp_path / "copy")
        assert restored.filters == {}
        await restored.create("later")
        for number in range(50):
            restored.journal.trim(await restored.add("later", [b"%d" % number]))
        assert restored.journal.trim_mark == 0
        await restored.close()

    asyncio.run(work())
    found = start(tmp_path / "copy", assert_no_later_adds=True).recovered
    for name in NAMES:
        assert_equal(found[name], world.filters[name])


def test_a_restored_directory_without_old_filters_is_trimmed(
    made: tuple[Path, World], tmp_path: Path
) -> None:
    """When all that was in the backup is dropped, nothing holds the journal."""
    where, _ = made
    back_up(where / "stopped", tmp_path / "copy")

    async def work() -> None:
        restored = World(tmp_path / "copy")
        for each in restored.recovered.values():
            seq = restored.journal.append([Drop(each.filter_id)])
        await restored.journal.durable(seq)
        await restored.trim(seq)
        await restored.close()

    asyncio.run(work())
    assert recover_in(tmp_path / "copy") == {}


def test_adds_that_a_trim_took_while_it_was_damaged(
    made: tuple[Path, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored journal that has grown large is trimmed all the same. What a filter was given is gone
    then, so no assertion makes it whole; one that is whole without it is READY."""
    where, world = made
    monkeypatch.setattr(sqlite_journal, "RESTORED_BYTES", 10_000)
    back_up(where / "stopped", tmp_path / "copy")

    async def work() -> None:
        restored = World(tmp_path / "copy")
        for number in range(1000):
            digest = number.to_bytes(16, "little")
            seq = restored.journal.append([Add(restored.recovered["a"].filter_id, Segment(0, digest, 0))])
        await restored.journal.durable(seq)
        await restored.create("later")
        await restored.trim(seq)
        await restored.close()

    asyncio.run(work())
    found = start(tmp_path / "copy", assert_no_later_adds=True).recovered
    assert found["a"].bloom is None
    assert "cannot be proven complete" in found["a"].damage
    assert found["later"].bloom is not None
    for _ in range(2):
        again = recover_in(tmp_path / "copy")
        assert again["a"].bloom is None
        assert not again["a"].damage.startswith("restored")
    assert world.filters["a"].keys
    record(
        "restored journal trimmed before its operator vouched for it", 1, "recovers; the filter answers maybe"
    )


def test_a_flipped_byte_never_makes_a_restored_filter_whole(made: tuple[Path, World], tmp_path: Path) -> None:
    """The entry is a row like any other: a start that does not see it is refused."""
    where, _ = made
    back_up(where / "stopped", tmp_path / "copy")
    database = tmp_path / "copy" / DATABASE
    data = database.read_bytes()
    at = data.index(b"restored")
    page = at - at % 4096
    refusals = 0
    for offset in {
        *range(page, page + 40),
        *range(at - 40, min(at + 60, page + 4096)),
        *range(page + 4096 - 130, page + 4096),
    }:
        for mask in (0xFF, 1):
            flip(database, offset, mask)
            try:
                found = recover_in(tmp_path / "copy")
            except JournalDamaged:
                refusals += 1
            else:
                assert all(each.bloom is None for each in found.values())
                assert len(found) == len(NAMES)
            flip(database, offset, mask)
    assert refusals > 100
    record("byte flipped around the entry of a restored directory", refusals, "refuses")
