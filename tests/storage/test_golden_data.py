"""A data directory of any released format version starts for ever; a newer one is left alone."""

from __future__ import annotations

import hashlib
import runpy
import shutil
import sqlite3
import struct
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from bloomgate.v1 import admin_pb2, filters_pb2
from bloomgated.errors import JournalDamaged
from bloomgated.storage.fsck import check as fsck
from bloomgated.storage.mark import FORMAT_VERSION
from conftest import StartDaemon
from daemon.calls import MAYBE, add, check, stats
from storage.making import DATABASE, MARK, contents, recover_in
from support.tally import record

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDEN_SHA256 = {
    "data-v1": "cecf70d376023c98ed930a633a128188b7905977031296b8a40eee3c82a6d414",
    "data-v1-log": "659f6705ba481d1e6e53caa17abe19e068263adbce2be4ce7d9931f9b7fbfdf6",
}
MADE = runpy.run_path(str(GOLDEN / "make_data.py"))
NEWER_IMAGE = 2


def copy(name: str, to: Path) -> Path:
    """A copy to start on."""
    shutil.copytree(GOLDEN / name, to / "data")
    return to / "data"


@pytest.mark.parametrize("name", GOLDEN_SHA256)
def test_golden_directories_are_never_rewritten(name: str) -> None:
    """They are what was released, to the byte."""
    digest = hashlib.sha256()
    for path, data in contents(GOLDEN / name).items():
        digest.update(f"{path} {len(data)} ".encode() + data)
    assert digest.hexdigest() == GOLDEN_SHA256[name]


@pytest.mark.parametrize("name", GOLDEN_SHA256)
def test_golden_directories_start(name: str, tmp_path: Path, start_daemon: StartDaemon) -> None:
    """Every filter is READY with its spec, its exact counts and bodies, and every key; a dropped one is gone.
    Adds go on, and the next start has them too."""
    directory = copy(name, tmp_path)
    found = recover_in(directory)
    assert {each: found[each].spec for each in found} == MADE["SPECS"]
    daemon = start_daemon()
    with daemon.stubs() as (filters, admin):
        listed = admin.ListFilters(admin_pb2.ListFiltersRequest()).filters
        assert [each.name for each in listed] == sorted(MADE["WHAT"])
        for each, what in MADE["WHAT"].items():
            shown = stats(filters, each)
            assert shown.state == filters_pb2.FILTER_STATE_READY
            assert shown.approximate_count == what["keys"]
            assert shown.added_count == what["added_count"]
            assert [(body.capacity, body.count) for body in shown.bodies] == what["bodies"]
            keys = MADE["keys"](each, 0, what["keys"])
            assert check(filters, each, *keys) == [MAYBE] * len(keys)
            # Seeds and keys are fixed, so this holds for ever.
            assert check(filters, each, *MADE["keys"]("absent", 0, 100)).count(MAYBE) <= 3
            add(filters, each, b"later")
    daemon.kill()
    for each, recovered in recover_in(directory).items():
        assert recovered.bloom is not None
        assert all(
            recovered.bloom.might_contain_many([*MADE["keys"](each, 0, MADE["WHAT"][each]["keys"]), b"later"])
        )
    record("data directory of format version 1", 1, "recovers every key, count and spec")


def refused_untouched(directory: Path) -> JournalDamaged:
    """Assert that a start is refused, changes nothing, and that fsck says the same."""
    before = contents(directory)
    with pytest.raises(JournalDamaged) as caught:
        recover_in(directory)
    assert contents(directory) == before
    report = fsck(directory)
    assert report.refused
    assert report.findings[0].path == caught.value.path
    assert caught.value.reason in report.findings[0].reason
    assert "version of bloomgated that wrote it" in caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", GOLDEN_SHA256)
def test_a_directory_of_a_newer_version_is_refused_untouched(name: str, tmp_path: Path) -> None:
    """The version in the mark is of the whole directory."""
    directory = copy(name, tmp_path)
    data = bytearray((directory / MARK).read_bytes())
    struct.pack_into("<H", data, 8, FORMAT_VERSION + 1)
    struct.pack_into("<I", data, len(data) - 4, zlib.crc32(data[:-4]))
    (directory / MARK).write_bytes(data)
    assert f"version {FORMAT_VERSION + 1}" in refused_untouched(directory).reason
    record("data directory of a newer format version", 1, "refuses, and changes nothing")


def test_a_journal_with_an_entry_of_a_newer_version_is_refused_untouched(tmp_path: Path) -> None:
    """An entry that this program does not know may be one that forbids to answer no."""
    directory = copy("data-v1", tmp_path)
    with closing(sqlite3.connect(directory / DATABASE)) as connection:
        value = b"\1"
        crc = zlib.crc32(value, zlib.crc32(b"hitherto-unknown"))
        connection.execute("INSERT INTO meta VALUES ('hitherto-unknown', ?, ?)", (value, crc))
        connection.commit()
    assert "'hitherto-unknown'" in refused_untouched(directory).reason
    record("data directory with an entry of a newer version", 1, "refuses, and changes nothing")


def test_an_image_of_a_newer_version_is_moved_aside(tmp_path: Path) -> None:
    """It does not validate here, so the other one and the journal restore the filter; it is kept."""
    directory = copy("data-v1-log", tmp_path)
    newest = directory / "snapshots" / "0000000000000001-1-2.bgf"
    data = bytearray(newest.read_bytes())
    struct.pack_into("<H", data, 8, NEWER_IMAGE)
    newest.write_bytes(data)
    (finding,) = fsck(directory).findings
    assert finding.path == str(newest)
    assert f"version {NEWER_IMAGE}" in finding.reason
    bloom = recover_in(directory)["growing"].bloom
    assert bloom is not None
    assert bloom.approximate_count == MADE["WHAT"]["growing"]["keys"]
    assert all(bloom.might_contain_many(MADE["keys"]("growing", 0, 80)))
    assert newest.with_name(f"{newest.name}.damaged-0").read_bytes() == data
    record("snapshot of a newer image version", 1, "recovers from the older one; the file is moved aside")
