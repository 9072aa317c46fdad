"""``bloomgated fsck`` finds what a start would find, and changes nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bloomgated.errors import DirectoryUnusable, JournalDamaged
from bloomgated.main import cli
from bloomgated.storage import fsck as module
from bloomgated.storage.fsck import Report, check
from bloomgated.storage.mark import CREATING, MarkFile
from conftest import StartDaemon
from daemon.calls import add, create
from daemon.calls import check as ask
from storage.making import DATABASE, MARK, WAL, World, copy_as_killed, flip, recover_in
from support.daemon import refused
from support.tally import record, rounds

KEYS = {
    name: [*([f"{name}-{number}" for number in range(30)] if name != "c" else ()), f"{name}-after"]
    for name in "abc"
}


async def _make(where: Path) -> None:
    """Two filters that need their snapshots, one that does not, and Adds after them; killed and stopped."""
    world = World(where / "live")
    for name in ("a", "b"):
        await world.create(name)
        await world.add(name, [key.encode() for key in KEYS[name][:30]])
        await world.snapshot(name)
        await world.add(name, [f"{name}-between".encode()])
        await world.snapshot(name)
    await world.create("c")
    await world.trim()
    for name in ("a", "b", "c"):
        await world.add(name, [f"{name}-after".encode()])
    copy_as_killed(world.directory, where / "killed")
    await world.close()
    copy_as_killed(world.directory, where / "stopped")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``killed``, with a log, and ``stopped``; tests damage copies."""
    where = tmp_path_factory.mktemp("made")
    asyncio.run(_make(where))
    return where


def a_copy(made: Path, state: str, tmp_path: Path) -> Path:
    for number in range(100_000):
        if not (tmp_path / f"{state}-{number}").exists():
            return copy_as_killed(made / state, tmp_path / f"{state}-{number}")
    raise AssertionError


def run(*arguments: str) -> Any:
    """`bloomgated fsck` with arguments, in this process."""
    return CliRunner().invoke(cli, ["fsck", *arguments])


def everything(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file and folder: bytes, mode and when it was changed."""
    found = {}
    for path in (directory, *directory.rglob("*")):
        data, about = path.read_bytes() if path.is_file() else b"", path.stat()
        found[str(path.relative_to(directory))] = (data, about.st_mode, about.st_mtime_ns)
    return found


def checked(directory: Path) -> Report:
    """What fsck finds; it has changed nothing."""
    before = everything(directory)
    report = check(directory)
    assert everything(directory) == before
    return report


def agrees(directory: Path) -> Report:
    """Assert that fsck says what a start does then."""
    report = checked(directory)
    if report.refused:
        assert report.damaged
        with pytest.raises(JournalDamaged) as refusal:
            recover_in(directory)
        assert [(each.path, each.reason) for each in report.findings] == [
            (refusal.value.path, f"{refusal.value.reason}; {refusal.value.hint}")
        ]
        return report
    found = recover_in(directory)
    assert [(each.name, each.damage) for each in report.filters] == [
        (each.name, each.damage) for each in found.values()
    ]
    if any(each.damage for each in report.filters):
        assert report.damaged
    return report


# -- sound


@pytest.mark.parametrize("state", ["killed", "stopped"])
def test_a_sound_directory(made: Path, state: str, tmp_path: Path) -> None:
    """A line for each filter and a closing sentence, exit code 0; no file is made, changed or touched."""
    directory = a_copy(made, state, tmp_path)
    before = everything(directory)
    ended = run(str(directory))
    assert everything(directory) == before
    assert ended.exit_code == 0
    *filters, last = ended.stdout.splitlines()
    assert filters == ["a: READY", "b: READY", "c: READY"]
    assert last.startswith(f"{directory}: sound, a start would serve 3 of 3 filters whole, up to seq ")
    assert ended.stderr == ""
    assert agrees(directory).findings == []


@pytest.mark.parametrize("left", ["nothing", "a mark of a creation"])
def test_a_directory_where_nothing_was_acknowledged_is_sound(left: str, tmp_path: Path) -> None:
    """A start would begin there, and fsck makes none."""
    if left != "nothing":
        recover_in(tmp_path)
        os.truncate(tmp_path / MARK, 0)
        with closing(MarkFile(tmp_path / MARK, bytes(16))) as mark:
            mark.write(CREATING, 0, 0)
    report = checked(tmp_path)
    assert not report.damaged
    assert (report.filters, report.findings, report.last_seq) == ([], [], 0)


def test_what_is_only_worth_knowing_is_a_note(made: Path, tmp_path: Path) -> None:
    """Leftovers of a crash and what was moved aside are listed, and are no damage."""
    directory = a_copy(made, "stopped", tmp_path)
    snapshots = directory / "snapshots"
    for name in ("0000000000000099-1-1.bgf", "x.bgf.tmp", "y.bgf.damaged-0"):
        (snapshots / name).write_bytes(b"left")
    ended = run(str(directory))
    assert ended.exit_code == 0
    assert ended.stdout.splitlines()[:3] == [
        f"{snapshots / '0000000000000099-1-1.bgf'}: note: no record names it; a start would remove it",
        f"{snapshots / 'x.bgf.tmp'}: note: no record names it; a start would remove it",
        f"{snapshots / 'y.bgf.damaged-0'}: note: moved aside by an earlier start; nothing reads it, so it may"
        " be deleted",
    ]


# -- damage


def test_a_filter_that_would_be_damaged(made: Path, tmp_path: Path) -> None:
    """Both files are named, and the filter with its reason; exit code 1. After a start has moved them aside,
    the filter is found as damaged as before, and its files are explained."""
    directory = a_copy(made, "killed", tmp_path)
    files = sorted((directory / "snapshots").glob("*-1-*.bgf"))[:2]
    for file in files:
        flip(file, 70)
    before = everything(directory)
    ended = refused("fsck", str(directory))
    assert everything(directory) == before
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert {line.split(": ")[0] for line in lines[:2]} == {str(file) for file in files}
    assert all(line.endswith("; a start would move it aside") for line in lines[:2])
    assert lines[2].startswith("a: DAMAGED, ")
    assert lines[2].endswith("so it cannot be proven complete")
    assert lines[3:5] == ["b: READY", "c: READY"]
    assert f"{directory}: damaged, a start would serve 2 of 3 filters whole" in lines[5]
    agrees(directory)
    report = agrees(directory)
    assert [each.state for each in report.filters] == ["DAMAGED", "READY", "READY"]
    notes = [each.path for each in report.findings if not each.damage]
    assert notes == [f"{file}.damaged-0" for file in files]
    record("both snapshots of a filter damaged", 1, "recovers the others; the filter answers maybe")


def test_an_older_snapshot_that_a_start_would_not_look_at(made: Path, tmp_path: Path) -> None:
    """The start serves all; the file that is there for the day when the newer one is damaged is no help."""
    for how in ("flipped", "gone"):
        directory = a_copy(made, "stopped", tmp_path)
        older = min((directory / "snapshots").glob("*.bgf"))
        if how == "flipped":
            flip(older, 70)
        else:
            older.unlink()
        ended = run(str(directory))
        assert ended.exit_code == 1
        assert ended.stdout.startswith(f"{older}: ")
        assert "READY" in ended.stdout
        assert "DAMAGED" not in ended.stdout
        report = agrees(directory)
        assert report.damaged
        assert "a start would use the newer one" in report.findings[0].reason


def test_a_file_that_reaches_not_far_enough_is_explained(tmp_path: Path) -> None:
    """What lies before the trim mark is of no use to a damaged filter, and is kept; another one does not need
    it, and it will be removed."""

    async def make(directory: Path) -> None:
        world = World(directory)
        for name in ("a", "b"):
            await world.create(name)
            await world.add(name, [b"1"])
            await world.snapshot(name)
        await world.add("b", [b"2"])
        seq = await world.add("a", [b"2"])
        await world.snapshot("b")
        await world.trim(seq)
        await world.close()

    asyncio.run(make(tmp_path))
    report = agrees(tmp_path)
    assert [each.state for each in report.filters] == ["DAMAGED", "READY"]
    first, second = report.findings
    assert not first.damage
    assert "kept while a is damaged" in first.reason
    assert not second.damage
    assert "a start would remove it" in second.reason
    report = agrees(tmp_path)
    assert [each.path for each in report.findings] == [first.path, second.path]
    assert not Path(second.path).exists()
    assert Path(first.path).exists()


@pytest.mark.parametrize("state", ["killed", "stopped"])
def test_fsck_and_a_start_never_disagree(made: Path, state: str, tmp_path: Path) -> None:
    """Any file cut, flipped or gone: they refuse alike and find the same filters damaged for the same reason;
    and where fsck says sound, every key is there."""
    rnd = random.Random(41)
    tried = {True: 0, False: 0}
    for _ in range(rounds(60, 2000)):
        directory = a_copy(made, state, tmp_path)
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        for file in rnd.sample(files, rnd.choice((1, 1, 1, 2))):
            size, how = file.stat().st_size, rnd.choice(("cut", "flip", "flip", "gone"))
            if how == "cut":
                os.truncate(file, rnd.randrange(size))
            elif how == "flip":
                flip(file, rnd.randrange(size), 1 << rnd.randrange(8))
            else:
                file.unlink()
        damaged = agrees(directory).damaged
        tried[damaged] += 1
        if not damaged:
            for name, recovered in recover_in(directory).items():
                assert recovered.bloom is not None
                assert all(recovered.bloom.might_contain_many(KEYS[name]))
    assert tried[True] > 20
    assert tried[False] < sum(tried.values()) * 0.8
    record(
        "file of a data directory cut, flipped or removed", sum(tried.values()), "fsck says what a start does"
    )


@pytest.mark.parametrize("name", [MARK, DATABASE, WAL])
def test_a_journal_that_a_start_would_refuse(made: Path, name: str, tmp_path: Path) -> None:
    """The file, the reason and the hint, exit code 1."""
    directory = a_copy(made, "killed", tmp_path)
    (directory / name).unlink()
    ended = run(str(directory))
    assert ended.exit_code == 1
    first, last = ended.stdout.splitlines()
    assert first.startswith(str(directory / (MARK if name == MARK else DATABASE)))
    assert "docs/OPERATIONS.md" in first
    assert last == f"{directory}: damaged, a start would be refused"


# -- where it cannot be checked


def test_a_running_daemons_directory_is_not_checked(start_daemon: StartDaemon) -> None:
    """The files move under it: exit code 2, with the daemon's pid, and nothing is touched."""
    daemon = start_daemon()
    with daemon.stubs() as (filters, admin):
        name = create(admin)
        add(filters, name, b"key")
        before = {path: data for path, data in everything(daemon.directory).items() if "-shm" not in path}
        ended = refused("fsck", str(daemon.directory))
        after = {path: data for path, data in everything(daemon.directory).items() if "-shm" not in path}
        assert ended.returncode == 2
        assert f"(pid {daemon.process.pid})" in ended.stderr
        assert ended.stdout == ""
        assert ended.stderr.count("\n") == 1
        assert after == before
        assert ask(filters, name, b"key") == [2]
    said = json.loads(run("--json", str(daemon.directory)).stdout)
    assert said["verdict"] == "unchecked"
    assert str(daemon.process.pid) in said["summary"]


def test_what_is_no_directory_is_not_checked(tmp_path: Path) -> None:
    """A file, or nothing: exit code 2 and one sentence; nothing is made."""
    (tmp_path / "file").write_bytes(b"")
    for name in ("file", "nothing"):
        ended = run(str(tmp_path / name))
        assert ended.exit_code == 2
        assert str(tmp_path / name) in ended.stderr
        assert ended.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_without_permission_is_not_checked(made: Path, tmp_path: Path) -> None:
    """Nothing can be said of what cannot be read: not sound, not damaged."""
    directory = a_copy(made, "stopped", tmp_path)
    directory.chmod(0)
    try:
        if os.geteuid():
            with pytest.raises(DirectoryUnusable, match="Permission denied"):
                check(directory)
        else:
            # Root may read everything, so somebody else asks.
            os.seteuid(65534)
            try:
                with pytest.raises(DirectoryUnusable, match="Permission denied"):
                    check(directory)
            finally:
                os.seteuid(0)
    finally:
        directory.chmod(0o700)


def test_no_room_for_a_copy_is_not_damage(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to do, and a directory without a log needs no copy."""

    def full(_path: Path, _to: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "copy_files", full)
    with pytest.raises(DirectoryUnusable, match=r"No space left on device.*TMPDIR"):
        check(a_copy(made, "killed", tmp_path))
    assert not checked(a_copy(made, "stopped", tmp_path)).damaged


# -- for machines


def test_json(made: Path, tmp_path: Path) -> None:
    """One object with the findings, the filters and the verdict; the exit code is the same."""
    directory = a_copy(made, "stopped", tmp_path)
    sound = run("--json", str(directory))
    assert sound.exit_code == 0
    said = json.loads(sound.stdout)
    assert said["verdict"] == "sound"
    assert said["findings"] == []
    assert said["filters"][0] == {"name": "a", "state": "READY", "reason": ""}
    assert said["refused"] is False
    flip(max((directory / "snapshots").glob("*.bgf")), 70)
    damaged = run("--json", str(directory))
    assert damaged.exit_code == 1
    said = json.loads(damaged.stdout)
    assert said["verdict"] == "damaged"
    assert said["findings"][0]["damage"] is True
    assert said["findings"][0]["path"].endswith(".bgf")
    assert said["summary"].startswith(str(directory))
