"""Damaged directories under a real daemon: it recovers what was acknowledged, says DAMAGED, or refuses."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bloomgate.v1 import admin_pb2, filters_pb2
from daemon.calls import add, check, create
from kernel.test_images import HOSTILE, forged
from storage.making import contents, copy_as_killed, flip
from support.daemon import DaemonProcess
from support.tally import record, rounds

DATABASE, LOG, MARK = "bloomgate.db", "bloomgate.db-wal", "bloomgate.db-mark"
# What a start may take, in kB: the process itself, and not what a header lies about.
MOST_MEMORY = 300_000
TRIMMING = (
    "--set",
    "journal.retention=0",
    "--set",
    "snapshot.interval=0.05",
    "--set",
    "snapshot.check_every=0.02",
)


@dataclass
class Made:
    """A directory as a killed daemon left it, and the keys that it acknowledged."""

    directory: Path
    keys: dict[str, list[bytes]]

    def copy(self, to: Path) -> Made:
        """A copy to damage."""
        shutil.rmtree(to, ignore_errors=True)
        return Made(copy_as_killed(self.directory, to), self.keys)

    def files(self, filter_id: int) -> list[Path]:
        """A filter's snapshots, newest last."""
        return sorted((self.directory / "snapshots").glob(f"{filter_id:016x}-*.bgf"), key=ordinal)


def ordinal(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])


def make(folder: Path, *flags: str) -> tuple[Made, Made]:
    """The same directory at two moments, killed at each."""
    daemon = DaemonProcess(folder / "live", *flags)
    keys: dict[str, list[bytes]] = {"hurt": [], "well": []}

    def some(filters: Any, count: int) -> None:
        for name, known in keys.items():
            fresh = [b"%s-%d" % (name.encode(), len(known) + number) for number in range(count)]
            for start in range(0, count, 7):
                add(filters, name, *fresh[start : start + 7])
            known += fresh

    with daemon.stubs() as (filters, admin):
        for name in keys:
            create(admin, name, capacity=500, error_rate=1e-9)
        for _ in range(2):
            some(filters, 60)
            for name in keys:
                admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name=name), timeout=30)
        some(filters, 60)
        if flags:
            # Until the journal no longer reaches back to the creation.
            seq = admin.ListFilters(admin_pb2.ListFiltersRequest()).filters[0].journal_seq
            while (
                min(each.snapshot_seq for each in admin.ListFilters(admin_pb2.ListFiltersRequest()).filters)
                < seq
            ):
                some(filters, 1)
        daemon.process.send_signal(19)  # SIGSTOP: a copy of one moment
        earlier = Made(
            copy_as_killed(folder / "live", folder / "earlier"), {n: list(k) for n, k in keys.items()}
        )
        daemon.process.send_signal(18)
        some(filters, 60)
    daemon.kill()
    return earlier, Made(folder / "live", keys)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Made]:
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Made]:
    return make(tmp_path_factory.mktemp("trimmed"), *TRIMMING)


def serves(made: Made, *, damaged: tuple[str, ...] = ()) -> DaemonProcess:
    """Start on it: every acknowledged key is maybe; filters in ``damaged`` are so, and count as unsure."""
    daemon = DaemonProcess(made.directory)
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    assert int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) < MOST_MEMORY
    with daemon.stubs() as (filters, admin):
        listed = {each.name: each for each in admin.ListFilters(admin_pb2.ListFiltersRequest()).filters}
        assert set(listed) == set(made.keys)
        for name, keys in made.keys.items():
            assert set(check(filters, name, *keys)) == {filters_pb2.ANSWER_MAYBE}, name
            hurt = listed[name].state == filters_pb2.FILTER_STATE_DAMAGED
            assert hurt == (name in damaged), listed[name].damage
            absent = set(check(filters, name, b"papaya"))
            assert absent == {filters_pb2.ANSWER_MAYBE if hurt else filters_pb2.ANSWER_DEFINITELY_NOT}
            add(filters, name, b"one more")
            assert set(check(filters, name, b"one more")) == {filters_pb2.ANSWER_MAYBE}
    metrics = daemon.get("/metrics")[1]
    for name, keys in made.keys.items():
        unsure = len(keys) + 2 if name in damaged else 0
        assert f'bloomgate_checks_total{{filter="{name}",result="unsure",via="rpc"}} {unsure}.0' in metrics
    assert daemon.stop() == 0
    return daemon


# -- snapshots


def truncated(file: Path, size: int) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:size] if size >= 0 else data[: len(data) + size])


def damages(file: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Every class of damage to a snapshot."""
    size = file.stat().st_size
    header = int.from_bytes(file.read_bytes()[10:14], "little")
    for cut in (
        0,
        1,
        7,
        8,
        13,
        14,
        20,
        header - 4,
        header - 1,
        header,
        header + 1,
        (header + size) // 2,
        -5,
        -4,
        -1,
    ):
        yield "cut", lambda file, cut=cut: truncated(file, cut)
    for extra in (b"\0", b"x" * 5000):
        yield "longer", lambda file, extra=extra: file.write_bytes(file.read_bytes() + extra)
    places = (
        0,
        8,
        10,
        14,
        18,
        20,
        30,
        header - 5,
        header - 1,
        header,
        (header + size) // 2,
        size - 5,
        size - 1,
    )
    for place in places:
        for bit in (0, 7):
            yield "flip", lambda file, place=place, bit=bit: flip(file, place, 1 << bit)
    for lie, _ in HOSTILE.values():
        yield "hostile", lambda file, lie=lie: file.write_bytes(lie())
        # Of the size that was recorded, so that it is read and not only measured.
        yield "hostile", lambda file, lie=lie: file.write_bytes(lie().ljust(size, b"\0"))
    yield "hostile", lambda file: file.write_bytes(forged())
    yield "gone", lambda file: file.unlink()


def test_a_damaged_snapshot_is_moved_aside_and_nothing_is_lost(
    made: tuple[Made, Made], tmp_path: Path
) -> None:
    """Each kind, of the newest one: it is kept as it is under another name, the one before it and the
    journal restore the filter, memory stays as it was. A sample in the suite, all of them at length."""
    whole = made[1]
    newest = whole.files(1)[-1]
    cases = list(damages(newest))
    chosen = random.Random(5).sample(cases, rounds(6, len(cases)))
    for _, damage in chosen:
        copy = whole.copy(tmp_path / "copy")
        hurt = copy.files(1)[-1]
        damage(hurt)
        after = hurt.read_bytes() if hurt.exists() else None
        serves(copy)
        aside = hurt.with_name(f"{hurt.name}.damaged-0")
        assert (aside.read_bytes() if aside.exists() else None) == after
    record(
        "snapshot cut, longer, flipped, gone, or with a hostile header",
        len(chosen),
        "recovers; the file is moved aside",
    )


def test_with_both_snapshots_damaged_the_journal_restores(made: tuple[Made, Made], tmp_path: Path) -> None:
    """Where it reaches back to the creation of the filter."""
    copy = made[1].copy(tmp_path / "copy")
    for file in copy.files(1):
        flip(file, file.stat().st_size // 2, 1)
    serves(copy)
    record("both snapshots damaged, the journal whole", 1, "recovers")


def test_with_both_snapshots_damaged_and_the_journal_trimmed(
    trimmed: tuple[Made, Made], tmp_path: Path
) -> None:
    """The filter is DAMAGED: every check is answered maybe and counted as unsure, Adds go on; the other one
    serves; so it stays over restarts."""
    copy = trimmed[1].copy(tmp_path / "copy")
    for file in copy.files(1):
        flip(file, file.stat().st_size // 2, 1)
    serves(copy, damaged=("hurt",))
    serves(copy, damaged=("hurt",))
    record("both snapshots damaged, the journal trimmed", 1, "recovers the others; that filter answers maybe")


# -- the journal


def refused_or_whole(made: Made) -> bool:
    """Start on it: refused in a sentence, with the directory as it was, or all that was acknowledged is
    there. Returns whether it was refused."""
    before = {name: data for name, data in contents(made.directory).items() if "lock" not in name}
    daemon = DaemonProcess(made.directory, ready=False)
    assert daemon.process.stdout is not None
    if daemon.process.stdout.readline().startswith("bloomgated ready "):
        daemon.kill()
        serves(made)
        return False
    assert daemon.process.wait(30) == 1
    daemon.kill()
    said = daemon.log().splitlines()[-1]
    assert said.startswith("bloomgated: ")
    assert str(made.directory) in said
    assert "; " in said, "no hint"
    assert {name: data for name, data in contents(made.directory).items() if "lock" not in name} == before
    return True


@pytest.mark.parametrize("old", [(DATABASE,), (LOG,), (MARK,), (DATABASE, LOG), (DATABASE, MARK)])
def test_files_of_an_earlier_moment_are_refused(
    made: tuple[Made, Made], tmp_path: Path, old: tuple[str, ...]
) -> None:
    """Database, log or mark exchanged for those of an earlier copy: refused, or it takes nothing away.

    (Log and mark together would be the earlier copy whole here, since the database did not change between: a
    directory put back as a whole is told from the current one by `bloomgated backup` alone.)
    """
    earlier, later = made
    copy = later.copy(tmp_path / "copy")
    for name in old:
        shutil.copy(earlier.directory / name, copy.directory / name)
    was_refused = refused_or_whole(copy)
    if LOG in old:
        assert was_refused
    record("database, log or mark of an earlier moment", 1, "refuses with path, reason and hint, or has all")


@pytest.mark.parametrize("gone", [(DATABASE,), (LOG,), (MARK,), (DATABASE, LOG), (DATABASE, LOG, MARK)])
def test_missing_files_are_refused(made: tuple[Made, Made], tmp_path: Path, gone: tuple[str, ...]) -> None:
    """Never taken for a new directory."""
    copy = made[1].copy(tmp_path / "copy")
    for name in gone:
        (copy.directory / name).unlink()
    assert refused_or_whole(copy)
    record("database, log or mark gone", 1, "refuses with path, reason and hint")


def test_damage_anywhere_in_the_journal_is_refused_or_harmless(
    made: tuple[Made, Made], trimmed: tuple[Made, Made], tmp_path: Path
) -> None:
    """Database and log cut at any length, and bytes flipped anywhere in them, under a real daemon."""
    choose, times, refusals = random.Random(17), rounds(6, 400), 0
    for _ in range(times):
        copy = choose.choice((made[1], trimmed[1])).copy(tmp_path / "copy")
        path = copy.directory / choose.choice((DATABASE, LOG, LOG))
        size = path.stat().st_size
        if choose.random() < 0.4:
            truncated(path, choose.randrange(size))
        else:
            for _ in range(choose.choice((1, 1, 8))):
                flip(path, choose.randrange(size), 1 << choose.randrange(8))
        refusals += refused_or_whole(copy)
    assert refusals
    record(
        "journal or its log cut or flipped anywhere", times, "refuses with path, reason and hint, or has all"
    )
