"""Writes the golden data directories of format version 1 beside this file: PYTHONPATH=tests, no arguments.

They were written once and are never rewritten: every later release starts on copies of these very bytes. The
script is kept to say what is in them, and it refuses to replace one. A later format version adds directories
of its own.

data-v1 was stopped cleanly. data-v1-log was killed with a part of the journal in SQLite's log. Both hold the
filters of WHAT; the filter ``dropped`` was in both, and is not.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bloomgate.filters import FilterSpec, HashScheme
from storage.making import Clock, World, copy_as_killed

HERE = Path(__file__).parent
DIRECTORIES = ("data-v1", "data-v1-log")
SECRET = bytes(range(16))
SPECS = {
    "growing": FilterSpec.plan(50, 0.001, on_full="grow", seed=1),
    "keyed": FilterSpec.plan(200, 0.01, on_full="degrade", hash_scheme=HashScheme.BLAKE2B_128, seed=SECRET),
    "rejecting": FilterSpec.plan(
        100, 0.05, on_full="reject", seed=20_010_911, key_format="key-<number>, ä in UTF-8"
    ),
    "empty": FilterSpec.plan(10, 0.1, seed=4),
}
WHAT: dict[str, dict[str, Any]] = {
    "growing": {"keys": 80, "added_count": 90, "bodies": [(50, 50), (100, 30)], "snapshots": 2},
    "keyed": {"keys": 60, "added_count": 60, "bodies": [(200, 60)], "snapshots": 2},
    "rejecting": {"keys": 40, "added_count": 40, "bodies": [(100, 40)], "snapshots": 2},
    "empty": {"keys": 0, "added_count": 0, "bodies": [(10, 0)], "snapshots": 0},
}
"""Per filter: the keys of ``keys``, all certainly new; keys of all adds; capacity and count of each body."""


def keys(name: str, start: int, end: int) -> list[bytes]:
    """The keys of a filter, by number."""
    return [f"{name}-{number}".encode() for number in range(start, end)]


async def fill(directory: Path) -> None:
    """Make both, in ``directory``."""
    world = World(directory / "live", clock=Clock())
    for name in ("growing", "keyed", "rejecting"):
        await world.create(name, SPECS[name])
    await world.create("dropped", FilterSpec.plan(10, 0.1, seed=5))
    await world.add("dropped", keys("dropped", 0, 5))
    for name in ("growing", "keyed"):
        await world.add(name, keys(name, 0, 20))
        await world.snapshot(name)
        await world.add(name, keys(name, 20, 40))
        await world.snapshot(name)
    await world.snapshot("dropped")
    await world.drop("dropped")
    await world.add("rejecting", keys("rejecting", 0, 30))
    await world.snapshot("rejecting")
    await world.snapshot("rejecting")
    await world.create("empty", SPECS["empty"])
    await world.trim()
    # The journal after the snapshots, begun here, ends in the log of the second directory.
    await world.close()
    world = World(directory / "live", clock=Clock())
    await world.add("growing", keys("growing", 40, 80))
    await world.add("growing", keys("growing", 0, 10))
    await world.add("keyed", keys("keyed", 40, 60))
    await world.add("rejecting", keys("rejecting", 30, 40))
    copy_as_killed(directory / "live", directory / "data-v1-log")
    await world.close()
    copy_as_killed(directory / "live", directory / "data-v1")


def main() -> None:
    """Write the directories that do not exist yet."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(fill(Path(folder)))
        for name in DIRECTORIES:
            shutil.copytree(Path(folder) / name, HERE / name)


if __name__ == "__main__":
    main()
