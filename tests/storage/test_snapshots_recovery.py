"""Snapshots, and the way back from them: every acknowledged key with exact counts, or DAMAGED; never less."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomgate.filters import BloomFilter, DataDamaged, Segment
from bloomgate.filters import image as image_format
from bloomgate.filters.image import freeze
from bloomgated.errors import StartError
from bloomgated.storage import recovery
from bloomgated.storage import snapshots as snapshots_module
from bloomgated.storage.records import Add, Grow, Snapshots
from bloomgated.storage.snapshots import SnapshotStore, ordinal_of
from storage.making import (
    DATABASE,
    Live,
    World,
    assert_equal,
    copy_as_killed,
    flip,
    recover_in,
    small_spec,
)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run one test's coroutine, which may take no longer than a minute."""
    return asyncio.run(asyncio.wait_for(work, 60))


def keys_of(rnd: random.Random, count: int) -> list[bytes]:
    return [rnd.randbytes(8) for _ in range(count)]


def filled(keys: list[bytes], **spec: Any) -> BloomFilter:
    bloom = BloomFilter.of(small_spec(**spec))
    bloom.add_many(keys)
    return bloom


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "snapshots").glob("*"))


async def killed(world: World, to: Path) -> Path:
    """A copy of the world's directory as a kill would leave it; the world itself is closed."""
    copy_as_killed(world.directory, to)
    await world.close()
    return to


# -- files


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A filter of several bodies comes back to the byte, with its generation and seq."""
    bloom = filled(keys_of(random.Random(1), 300))
    assert len(bloom.bodies) > 1
    store = SnapshotStore(tmp_path, wall_clock=lambda: 12.5)
    file = store.write(0xAB, freeze(bloom, 3, 77), 1)
    assert (file.generation, file.seq, file.stamp, file.time) == (3, 77, 77, 12.5)
    assert files_in(tmp_path) == [file.name] == ["00000000000000ab-3-1.bgf"]
    path = tmp_path / "snapshots" / file.name
    assert path.stat().st_size == file.size
    assert path.stat().st_mode & 0o077 == 0
    image = store.load(file)
    assert (image.generation, image.seq) == (3, 77)
    assert image.filter.to_bytes() == bloom.to_bytes()
    assert path.read_bytes() == image_format.to_bytes(bloom, 3, 77)


def test_a_snapshot_never_overwrites_another(tmp_path: Path) -> None:
    """A file that is there, recorded or not, stays; the new one takes the next free name."""
    store = SnapshotStore(tmp_path)
    first = store.write(1, freeze(filled([b"one"]), 1, 5), 1)
    second = store.write(1, freeze(filled([b"two"]), 1, 6), 1)
    assert (ordinal_of(first), ordinal_of(second)) == (1, 2)
    assert store.load(first).filter.might_contain(b"one")
    assert store.load(second).filter.might_contain(b"two")


def test_every_flipped_byte_of_a_snapshot_is_damaged(tmp_path: Path) -> None:
    """The file's path and a reason are given, whatever byte it is."""
    store = SnapshotStore(tmp_path)
    file = store.write(1, freeze(filled(keys_of(random.Random(2), 30)), 1, 5), 1)
    path = tmp_path / "snapshots" / file.name
    for at in range(file.size):
        flip(path, at)
        with pytest.raises(DataDamaged) as damaged:
            store.load(file)
        assert damaged.value.path == str(path)
        assert damaged.value.reason
        flip(path, at)
    store.load(file)


def test_a_snapshot_of_another_length_is_damaged(tmp_path: Path) -> None:
    """Cut anywhere, or longer by a byte."""
    store = SnapshotStore(tmp_path)
    file = store.write(1, freeze(filled([b"one"]), 1, 5), 1)
    path = tmp_path / "snapshots" / file.name
    whole = path.read_bytes()
    for data in (*(whole[:length] for length in range(len(whole))), whole + b"\0"):
        path.write_bytes(data)
        with pytest.raises(DataDamaged):
            store.load(file)


def test_a_snapshot_that_is_gone_is_damaged(tmp_path: Path) -> None:
    """A missing file is damage, not an error of another kind."""
    store = SnapshotStore(tmp_path)
    file = store.write(1, freeze(filled([b"one"]), 1, 5), 1)
    store.remove(file.name)
    store.remove(file.name)
    with pytest.raises(DataDamaged, match="cannot be read"):
        store.load(file)
    assert store.move_aside(file) is None


def test_a_sound_image_that_was_not_recorded_under_its_name_is_damaged(tmp_path: Path) -> None:
    """Generation, seq and checksum must be those that were recorded."""
    store = SnapshotStore(tmp_path)
    file = store.write(1, freeze(filled([b"one"]), 1, 5), 1)
    for change in ({"generation": 2}, {"seq": 4}, {"crc": file.crc ^ 1}, {"size": file.size + 1}):
        with pytest.raises(DataDamaged):
            store.load(dataclasses.replace(file, **change))


def test_a_damaged_file_moved_aside_is_kept(tmp_path: Path) -> None:
    """Moved aside again and again, under the same name, each stays what it was; starts leave them alone."""
    store = SnapshotStore(tmp_path)
    for number in range(3):
        file = store.write(1, freeze(filled([b"%d" % number]), 1, 5), 1)
        aside = store.move_aside(file)
        assert aside is not None
        assert aside.name == f"{file.name}.damaged-{number}"
    assert store.unrecorded(set()) == []
    contents = {(tmp_path / "snapshots" / name).read_bytes() for name in files_in(tmp_path)}
    assert len(contents) == 3


def test_a_start_removes_what_no_record_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Temporary files and unrecorded snapshots are left over from a crash, and the log names them; other
    files are not ours."""
    caplog.set_level("INFO")

    async def work() -> None:
        world = World(tmp_path)
        await world.create("a")
        await world.add("a", [b"one"])
        await world.snapshot("a")
        recorded = world.filters["a"].files[0].name
        await world.write("a")
        folder = tmp_path / "snapshots"
        (folder / f"{recorded}.tmp").write_bytes(b"half")
        (folder / "notes.txt").write_bytes(b"mine")
        await world.close()
        assert len(files_in(tmp_path)) == 4
        gone = sorted({*files_in(tmp_path)} - {recorded, "notes.txt"})
        assert_equal(recover_in(tmp_path)["a"], world.filters["a"])
        assert files_in(tmp_path) == sorted([recorded, "notes.txt"])
        told = [record.getMessage() for record in caplog.records if record.name == recovery.log.name]
        assert told == [f"removed {name}, which no record names" for name in gone]

    run(work())


# -- writing that fails


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk that takes forty bytes more."""
    real, left = os.write, [40]

    def write(fd: int, data: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, memoryview(data)[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(snapshots_module.os, "write", write)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_no_litter(tmp_path: Path) -> None:
    """The error names the cause, nothing of the new file stays, and the one before is as it was."""
    store = SnapshotStore(tmp_path)
    header = freeze(filled([b"one"]), 1, 5)
    path = tmp_path / "snapshots" / "0000000000000001-1-1.bgf"
    path.parent.mkdir()
    path.write_bytes(b"".join(image_format.image_chunks(header)))
    before = path.read_bytes()
    for ordinal in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            store.write(1, header, ordinal)
        assert files_in(tmp_path) == [path.name]
        assert path.read_bytes() == before


def test_a_snapshot_is_durable_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced under its temporary name, then renamed, then the directory is synced."""
    store = SnapshotStore(tmp_path)
    store.write(1, freeze(filled([b"one"]), 1, 5), 1)
    done: list[tuple[str, str]] = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(fd: int) -> None:
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        real_sync(fd)

    def rename(path: Path, target: Path) -> Path:
        done.append(("rename", path.name))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    file = store.write(1, freeze(filled([b"two"]), 1, 6), 2)
    assert done == [("sync", f"{file.name}.tmp"), ("rename", f"{file.name}.tmp"), ("sync", "snapshots")]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failing_sync_or_rename_leaves_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whatever step fails, only what was there before is there after it."""
    store = SnapshotStore(tmp_path)
    first = store.write(1, freeze(filled([b"one"]), 1, 5), 1)

    def fail(*_args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "rename")), fail)
    with pytest.raises(OSError, match="Input/output"):
        store.write(1, freeze(filled([b"two"]), 1, 6), 1)
    monkeypatch.undo()
    assert files_in(tmp_path) == [first.name]
    store.load(first)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from bloomgate.filters import BloomFilter
from bloomgate.filters.image import freeze
from bloomgated.storage.snapshots import SnapshotStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SnapshotStore(Path(sys.argv[1]))
small = store.write(1, freeze(BloomFilter(10, seed=1), 1, 5), 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.write(1, freeze(BloomFilter(10_000_000, seed=1), 1, 6), 2)
except OSError as error:
    print(error.strerror)
store.load(small)
"""


def test_a_real_limit_of_the_system_leaves_no_litter(tmp_path: Path) -> None:
    """The operating system itself cuts the write short."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "File too large\n"
    assert files_in(tmp_path) == ["0000000000000001-1-1.bgf"]


# -- recovery


async def two_snapshots(directory: Path, *, trim: bool = True) -> World:
    """Filters a and b with two snapshots each and adds after them, trimmed by the rule; c without any."""
    rnd = random.Random(3)
    world = World(directory)
    for name, seed in (("a", 1), ("b", 2)):
        await world.create(name, small_spec(seed=seed))
    for _ in range(2):
        for name in ("a", "b"):
            await world.add(name, keys_of(rnd, 20))
            await world.snapshot(name)
    if trim:
        await world.trim()
    await world.create("c", small_spec(seed=3))
    for name in ("a", "b", "c"):
        await world.add(name, keys_of(rnd, 25))
    return world


def test_without_snapshots_the_journal_alone_restores(tmp_path: Path) -> None:
    """From its create record on, through growth, to the byte."""

    async def work() -> World:
        world = World(tmp_path / "live")
        await world.create("a")
        for _ in range(8):
            await world.add("a", keys_of(random.Random(4), 30))
        await world.add("a", keys_of(random.Random(5), 200))
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    found = recover_in(tmp_path / "killed")["a"]
    assert_equal(found, world.filters["a"])
    assert len(world.filters["a"].bloom.bodies) > 2
    assert found.base_seq == found.filter_id
    assert found.last_seq == world.filters["a"].last_seq
    assert found.journal_bytes == 16 * (8 * 30 + 200)


def test_the_newest_snapshot_and_the_journal_restore(tmp_path: Path) -> None:
    """The base is the newest snapshot; what was added after it comes from the journal."""

    async def work() -> World:
        world = await two_snapshots(tmp_path / "live")
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    found = recover_in(tmp_path / "killed")
    for name, live in world.filters.items():
        assert_equal(found[name], live)
        assert found[name].files == live.files
        assert found[name].last_seq == live.last_seq
        assert found[name].journal_bytes == 16 * 25
    assert found["a"].base_seq == world.filters["a"].files[-1].stamp


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_newest_snapshot_is_moved_aside_and_the_other_one_used(tmp_path: Path, how: str) -> None:
    """Nothing is lost, the damaged file is kept for whoever wants to look at it, and others are untouched."""

    async def work() -> World:
        world = await two_snapshots(tmp_path / "live")
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    older, newest = world.filters["a"].files
    path = tmp_path / "killed" / "snapshots" / newest.name
    damaged_bytes = damage(path, how)
    found = recover_in(tmp_path / "killed")
    for name, live in world.filters.items():
        assert_equal(found[name], live)
    assert found["a"].files == (older,)
    assert found["a"].base_seq == older.stamp
    assert not path.exists()
    aside = path.with_name(f"{newest.name}.damaged-0")
    if how == "gone":
        assert not aside.exists()
    else:
        assert aside.read_bytes() == damaged_bytes
    # The record still names it: the next start must find its way without the file.
    again = recover_in(tmp_path / "killed")
    assert_equal(again["a"], world.filters["a"])
    assert aside.exists() == (how != "gone")


def damage(path: Path, how: str) -> bytes:
    """Damage a file in one of three ways; returns what is left."""
    if how == "flip":
        flip(path, path.stat().st_size // 2)
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 5)
    else:
        path.unlink()
        return b""
    return path.read_bytes()


def test_with_both_damaged_the_journal_restores_if_it_reaches_back(tmp_path: Path) -> None:
    """Without a trim the create record and all after it are there, so no snapshot is needed."""

    async def work() -> World:
        world = await two_snapshots(tmp_path / "live", trim=False)
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    for file in world.filters["a"].files:
        flip(tmp_path / "killed" / "snapshots" / file.name, 100)
    found = recover_in(tmp_path / "killed")
    for name, live in world.filters.items():
        assert_equal(found[name], live)
    assert found["a"].files == ()


def test_with_both_damaged_after_a_trim_the_filter_is_damaged_and_others_serve(tmp_path: Path) -> None:
    """It has a reason and no body; its Adds stay in the journal; both files are kept aside."""

    async def work() -> World:
        world = await two_snapshots(tmp_path / "live")
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    files = world.filters["a"].files
    for file in files:
        flip(tmp_path / "killed" / "snapshots" / file.name, 100)
    for _ in range(2):
        found = recover_in(tmp_path / "killed")
        assert found["a"].bloom is None
        assert all(file.name in found["a"].damage for file in files)
        assert "proven complete" in found["a"].damage
        assert found["a"].last_seq == world.filters["a"].last_seq
        assert_equal(found["b"], world.filters["b"])
        assert_equal(found["c"], world.filters["c"])
    assert [name for name in files_in(tmp_path / "killed") if "damaged" in name] == [
        f"{file.name}.damaged-0" for file in files
    ]


def test_adds_of_a_damaged_filter_are_kept_and_told(tmp_path: Path) -> None:
    """What was journalled while it was damaged counts in last_seq, also when it is the only filter."""

    async def work() -> int:
        world = await two_snapshots(tmp_path)
        for name in ("b", "c"):
            await world.drop(name)
        for file in world.filters["a"].files:
            flip(world.path(file), 100)
        await world.close()
        world = World(tmp_path)
        assert world.filters == {}
        filter_id = world.recovered["a"].filter_id
        seq = world.journal.append([Add(filter_id, Segment(0, bytes(32), 0))])
        await world.journal.durable(seq)
        await world.close()
        return seq

    seq = run(work())
    found = recover_in(tmp_path)["a"]
    assert found.bloom is None
    assert found.last_seq == seq


def test_the_file_of_another_filter_is_damaged(tmp_path: Path) -> None:
    """Swapped files do not answer for each other, even where seq, size and checksum are the same."""

    async def work() -> World:
        world = World(tmp_path / "live")
        await world.create("a", small_spec(seed=1))
        await world.create("b", small_spec(seed=2))
        await world.create("c", small_spec(seed=1, on_full="degrade"))
        for name in ("a", "b", "c"):
            # Empty and of one seq, so only the spec tells them apart.
            header = freeze(world.filters[name].bloom, 1, 3)
            world.filters[name].files = (world.store.write(world.filters[name].filter_id, header, 1),)
        for name in ("a", "b", "c"):
            await world.record(name, world.filters[name].files)
        for name in ("a", "b", "c"):
            await world.add(name, [name.encode()])
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    files = {name: live.files[0] for name, live in world.filters.items()}
    assert files["a"].crc == files["b"].crc
    for other in ("b", "c"):
        directory = copy_as_killed(tmp_path / "killed", tmp_path / other)
        shutil.copy(directory / "snapshots" / files[other].name, directory / "snapshots" / files["a"].name)
        found = recover_in(directory)
        assert found["a"].files == ()
        for name, live in world.filters.items():
            assert_equal(found[name], live)
        assert f"{files['a'].name}.damaged-0" in files_in(directory)


def test_swapped_files_of_trimmed_filters_are_damaged(tmp_path: Path) -> None:
    """Two filters whose files were exchanged answer maybe, both; the third serves."""

    async def work() -> World:
        world = await two_snapshots(tmp_path / "live")
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    folder = tmp_path / "killed" / "snapshots"
    for one, other in zip(world.filters["a"].files, world.filters["b"].files, strict=True):
        (folder / one.name).rename(folder / "swap")
        (folder / other.name).rename(folder / one.name)
        (folder / "swap").rename(folder / other.name)
    found = recover_in(tmp_path / "killed")
    # b was created after the trim mark's lowest base, or it may not be: what is READY must be whole.
    assert found["a"].bloom is None
    for name in ("b", "c"):
        if found[name].bloom is not None:
            assert_equal(found[name], world.filters[name])
    assert_equal(found["c"], world.filters["c"])


def test_a_snapshot_older_than_the_trim_mark_does_not_count(tmp_path: Path) -> None:
    """Where the journal was trimmed past a stamp, that snapshot alone cannot prove anything."""

    async def work() -> World:
        world = await two_snapshots(tmp_path / "live", trim=False)
        await world.trim(world.filters["a"].files[-1].stamp)  # past the older one: against the rule
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    older, newest = world.filters["a"].files
    sound = recover_in(copy_as_killed(tmp_path / "killed", tmp_path / "sound"))
    assert_equal(sound["a"], world.filters["a"])
    # It is not one of two any more, so that a trim holds back as for a filter with one.
    assert sound["a"].files == (newest,)
    flip(tmp_path / "killed" / "snapshots" / newest.name, 100)
    found = recover_in(tmp_path / "killed")
    assert found["a"].bloom is None
    assert older.name in found["a"].damage
    assert str(older.stamp) in found["a"].damage
    assert (tmp_path / "killed" / "snapshots" / older.name).exists()


def test_a_filter_without_snapshot_created_before_the_trim_mark_is_damaged(tmp_path: Path) -> None:
    """An empty filter is never put in the place of one whose Adds are gone."""

    async def work() -> World:
        world = World(tmp_path / "live")
        await world.create("a")
        await world.add("a", [b"one"])
        await world.add("a", [b"two"])
        await world.trim(2)
        await world.create("b")
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    found = recover_in(tmp_path / "killed")
    assert found["a"].bloom is None
    assert "no snapshot" in found["a"].damage
    assert_equal(found["b"], world.filters["b"])


def test_a_stamp_ahead_of_the_seq_is_honoured(tmp_path: Path) -> None:
    """An idle filter, stamped up to the present, holds nothing back: after the trim either file alone
    restores it."""

    async def work() -> World:
        world = World(tmp_path / "live")
        rnd = random.Random(6)
        await world.create("idle")
        await world.create("busy", small_spec(seed=8))
        await world.add("idle", keys_of(rnd, 30))
        await world.snapshot("idle")
        await world.snapshot("idle")
        for _ in range(3):
            await world.add("busy", keys_of(rnd, 30))
            await world.snapshot("busy")
        await world.stamp("idle")
        older, newest = world.filters["idle"].files
        assert older.stamp > older.seq
        assert world.trim_limit() > newest.seq
        await world.trim()
        await world.add("idle", keys_of(rnd, 5))
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    for number, file in enumerate(world.filters["idle"].files):
        directory = copy_as_killed(tmp_path / "killed", tmp_path / f"without-{number}")
        flip(directory / "snapshots" / file.name, 100)
        found = recover_in(directory)
        assert_equal(found["idle"], world.filters["idle"])
        assert found["idle"].journal_bytes == 16 * 5
        assert found["idle"].base_seq == file.stamp


def test_last_seq_says_whether_the_older_snapshot_lags(tmp_path: Path) -> None:
    """After a restart the newest record is known even where the replay began after it, so a filter whose
    older file lacks something is not taken for idle and stamped."""

    async def work() -> None:
        world = World(tmp_path / "live")
        await world.create("a")
        await world.snapshot("a")
        seq = await world.add("a", [b"one"])
        await world.snapshot("a")
        await world.close()
        world = World(tmp_path / "live")
        live = world.filters["a"]
        assert live.last_seq == seq
        assert live.files[0].seq < live.last_seq
        live.keys.add(b"one")
        await world.stamp("a")
        await world.trim()
        newest = world.filters["a"].files[-1]
        await killed(world, tmp_path / "killed")
        flip(tmp_path / "killed" / "snapshots" / newest.name, 100)
        assert_equal(recover_in(tmp_path / "killed")["a"], live)

    run(work())


def test_a_fuzzy_snapshot_gives_exact_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds between and during the chunks of a snapshot leave their bits in it; replayed over it, they count
    once, and the filter is what it was to the byte."""
    monkeypatch.setattr(image_format, "CHUNK_BYTES", 16)

    async def work() -> World:
        rnd = random.Random(9)
        world = World(tmp_path / "live")
        await world.create("a", small_spec(200))
        await world.add("a", keys_of(rnd, 60))
        real = snapshots_module._write_all

        def write_and_add(fd: int, data: bytes) -> None:
            real(fd, data)
            world.queue("a", keys_of(rnd, 1))

        monkeypatch.setattr(snapshots_module, "_write_all", write_and_add)
        await world.snapshot("a", during=keys_of(rnd, 20))
        monkeypatch.setattr(snapshots_module, "_write_all", real)
        file = world.filters["a"].files[0]
        await world.add("a", keys_of(rnd, 3))
        fuzzy = world.store.load(file).filter
        assert fuzzy.approximate_count < 65
        inside = sum(fuzzy.might_contain(key) for key in world.filters["a"].keys)
        assert inside > 80
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    assert_equal(recover_in(tmp_path / "killed")["a"], world.filters["a"])


def test_growth_is_replayed_once(tmp_path: Path) -> None:
    """Growths before, during and after a snapshot, and one that is journalled twice, give the bodies that
    there were."""

    async def work() -> World:
        rnd = random.Random(10)
        world = World(tmp_path / "live")
        await world.create("a", small_spec(20))
        await world.add("a", keys_of(rnd, 70))
        await world.snapshot("a", during=keys_of(rnd, 120))
        await world.add("a", keys_of(rnd, 300))
        live = world.filters["a"]
        grows = [entry.record for entry in world.journal.replay(0) if isinstance(entry.record, Grow)]
        assert len(grows) == len(live.bloom.bodies) - 1 >= 4
        again = world.journal.append(grows)
        await world.journal.durable(again)
        await killed(world, tmp_path / "killed")
        return world

    world = run(work())
    assert_equal(recover_in(tmp_path / "killed")["a"], world.filters["a"])
    flip(tmp_path / "killed" / "snapshots" / world.filters["a"].files[0].name, 100)
    assert_equal(recover_in(tmp_path / "killed")["a"], world.filters["a"])


def test_an_add_to_a_body_that_is_missing_damages_its_filter_alone(tmp_path: Path) -> None:
    """The journal is sound, so the base is not what it says: DAMAGED with the seq, and the others serve."""

    async def work() -> World:
        world = World(tmp_path)
        await world.create("a")
        await world.create("b", small_spec(seed=8))
        await world.add("a", [b"one"])
        await world.add("b", [b"one"])
        bad = world.journal.append([Add(1, Segment(3, bytes(16), 1))])
        await world.journal.durable(bad)
        await world.add("b", [b"two"])
        await world.close()
        return world

    world = run(work())
    found = recover_in(tmp_path)
    assert found["a"].bloom is None
    assert "seq 5" in found["a"].damage
    assert_equal(found["b"], world.filters["b"])


def test_a_dropped_filter_does_not_come_back_under_its_name(tmp_path: Path) -> None:
    """A filter created anew under the name of a dropped one has none of its keys, and none of its files."""

    async def work() -> World:
        world = World(tmp_path)
        await world.create("a")
        await world.add("a", [b"old"])
        await world.snapshot("a")
        old = world.filters["a"].files[0]
        image = world.path(old).read_bytes()
        await world.drop("a")
        world.path(old).write_bytes(image)  # as if the process had been killed before it was removed
        await world.create("a")
        await world.add("a", [b"new"])
        await world.close()
        return world

    world = run(work())
    found = recover_in(tmp_path)
    assert_equal(found["a"], world.filters["a"])
    assert not found["a"].bloom.might_contain(b"old")
    assert files_in(tmp_path) == []


def test_an_older_generation_never_stands_in_for_a_newer_one(tmp_path: Path) -> None:
    """What a rebuild made is not in the old generation's files, nor in the journal: DAMAGED."""

    async def work() -> None:
        world = World(tmp_path)
        await world.create("a")
        await world.add("a", [b"one"])
        old = await world.write("a")
        bloom = filled([b"one", b"from the authority"])
        seq = world.journal.durable_seq
        new = world.store.write(1, freeze(bloom, 2, seq), 2)
        await world.record("a", (old, new))
        await world.close()

    run(work())
    sound = recover_in(tmp_path)["a"]
    assert sound.generation == 2
    assert sound.bloom is not None
    assert sound.bloom.might_contain(b"from the authority")
    flip(tmp_path / "snapshots" / "0000000000000001-2-2.bgf", 100)
    found = recover_in(tmp_path)["a"]
    assert found.bloom is None
    assert "generation 1" in found.damage


def test_no_generation_changes_how_keys_hash(tmp_path: Path) -> None:
    """A rebuild keeps scheme and seed, since the journal holds digests: an image with others is damaged."""

    async def work() -> None:
        world = World(tmp_path)
        await world.create("a", small_spec(seed=1))
        await world.add("a", [b"one"])
        bloom = filled([b"one"], capacity=500, seed=2)
        await world.record("a", (world.store.write(1, freeze(bloom, 2, world.journal.durable_seq), 1),))
        await world.close()

    run(work())
    found = recover_in(tmp_path)["a"]
    assert found.bloom is None
    assert "hash spec" in found.damage


def test_a_record_of_no_files_is_taken(tmp_path: Path) -> None:
    """A filter all of whose snapshots were lost may say so; it is restored from the journal."""

    async def work() -> World:
        world = World(tmp_path)
        await world.create("a")
        await world.add("a", [b"one"])
        await world.journal.durable(world.journal.append([Snapshots(1, ())]))
        await world.close()
        return world

    world = run(work())
    assert_equal(recover_in(tmp_path)["a"], world.filters["a"])


def test_an_empty_directory_recovers_to_nothing(tmp_path: Path) -> None:
    """The first start has no filters, and makes its journal."""
    assert recover_in(tmp_path) == {}
    assert (tmp_path / DATABASE).exists()


# -- walks


class Walk:
    """Random adds, growths, snapshots, stamps, trims, drops, kills and damage, against plain sets."""

    def __init__(self, seed: int, directory: Path, *, damages: int) -> None:
        self.rnd = random.Random(seed)
        self.directory, self.damages = directory, damages
        self.starts = self.damaged = self.restored = 0
        self.hurt: set[int] = set()
        """Filters with a damaged file among those recorded: they need not survive another."""

    async def go(self, steps: int) -> None:
        world = World(self.directory / "0")
        for _ in range(steps):
            world = await self._step(world)
        world = await self._kill(world)
        await world.close()

    async def _step(self, world: World) -> World:
        rnd = self.rnd
        names = sorted(world.filters)
        if not names or (len(names) < 3 and rnd.random() < 0.1):
            free = [name for name in ("a", "b", "c") if name not in world.recovered and name not in names]
            if free:
                on_full = rnd.choice(("grow", "degrade"))
                await world.create(
                    free[0], small_spec(rnd.choice((8, 30)), seed=rnd.randrange(3), on_full=on_full)
                )
                return world
            if not names:
                # All are damaged: what is left is to begin anew.
                for each in list(world.recovered.values()):
                    world.filters[each.name] = Live(each.filter_id, each.name, BloomFilter.of(each.spec))
                    await world.drop(each.name)
                world.recovered.clear()
                return world
        name = rnd.choice(names)
        match rnd.choices(("add", "snapshot", "stamp", "trim", "kill", "drop"), (40, 14, 5, 12, 8, 1))[0]:
            case "add":
                keys = keys_of(rnd, rnd.choice((1, 1, 3, 15)))
                if rnd.random() < 0.3:  # some that are there already
                    keys += rnd.sample(
                        sorted(world.filters[name].keys), min(2, len(world.filters[name].keys))
                    )
                await world.add(name, keys)
            case "snapshot":
                during = keys_of(rnd, rnd.randrange(20)) if rnd.random() < 0.5 else []
                await world.snapshot(name, during)
                if len(world.filters[name].files) == 2 and all(
                    world.path(file).exists() for file in world.filters[name].files
                ):
                    await self._look_whether_healed(world, name)
            case "stamp":
                await world.stamp(name)
            case "trim":
                await world.trim()
            case "kill":
                return await self._kill(world)
            case "drop":
                world.recovered.pop(name, None)
                await world.drop(name)
        return world

    async def _look_whether_healed(self, world: World, name: str) -> None:
        try:
            for file in world.filters[name].files:
                world.store.load(file)
        except DataDamaged:
            return
        self.hurt.discard(world.filters[name].filter_id)

    async def _kill(self, world: World) -> World:
        self.starts += 1
        lost = world.filters
        old_damage = {name for name, each in world.recovered.items() if each.bloom is None}
        directory = await killed(world, self.directory / str(self.starts))
        may_be_damaged: set[str] = set(old_damage)
        with_files = [live for live in lost.values() if live.files]
        for _ in range(self.rnd.randrange(self.damages + 1) if with_files else 0):
            live = self.rnd.choice(with_files)
            path = directory / "snapshots" / self.rnd.choice(live.files).name
            if path.exists():
                damage(path, self.rnd.choice(("flip", "cut", "gone")))
                if live.filter_id in self.hurt or len(live.files) < 2:
                    may_be_damaged.add(live.name)
                self.hurt.add(live.filter_id)
        again = World(directory)
        assert set(again.recovered) == set(lost) | old_damage
        for name, live in lost.items():
            found = again.recovered[name]
            if found.bloom is None:
                assert name in may_be_damaged, f"one damaged file made {name} DAMAGED: {found.damage}"
                assert found.damage
                self.damaged += 1
                continue
            self.restored += 1
            assert_equal(found, live)
            assert found.last_seq <= live.last_seq
            again.filters[name].keys = live.keys
        return again


@pytest.mark.parametrize("seed", range(30))
def test_a_walk_with_single_damages_loses_nothing(tmp_path: Path, seed: int) -> None:
    """Whatever happens in between, every filter comes back whole after each kill; with two sound snapshots
    or an untrimmed journal, one damaged file never makes it DAMAGED."""
    walk = Walk(seed, tmp_path, damages=1)
    run(walk.go(100))
    assert walk.restored > 0


@pytest.mark.parametrize("seed", range(100, 120))
def test_a_walk_with_many_damages_never_answers_a_wrong_no(tmp_path: Path, seed: int) -> None:
    """With several files damaged at a time filters become DAMAGED; those that are READY are whole."""
    walk = Walk(seed, tmp_path, damages=4)
    run(walk.go(100))
    assert walk.restored > 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_a_snapshot_that_cannot_be_opened_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Too many open files says nothing of this one: the start is refused, and the file stays where it is."""
    store = SnapshotStore(tmp_path)
    file = store.write(1, freeze(BloomFilter(100, seed=1), 1, 5), 1)

    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("builtins.open", failing)
    with pytest.raises(StartError, match="cannot be read"):
        store.load(file)
    monkeypatch.undo()
    assert store.load(file).seq == 5


def test_a_filter_that_memory_cannot_hold_refuses_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not damaged: called so, its records would be trimmed away."""
    store = SnapshotStore(tmp_path)
    file = store.write(1, freeze(BloomFilter(100, seed=1), 1, 5), 1)

    def failing(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("bloomgated.storage.snapshots.read_image", failing)
    with pytest.raises(StartError, match="more memory"):
        store.load(file)
