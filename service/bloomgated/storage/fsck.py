"""A data directory judged from outside: what a start would find, and what it would not look at.

Nothing in the directory is changed, created or touched. Where the database has a log, even a reading SQLite
would make files beside it, so a copy is judged, in the system's folder for temporary files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bloomgated.errors import DirectoryUnusable, JournalDamaged
from bloomgated.storage.database import (
    DATABASE_NAME,
    MARK_NAME,
    copy_files,
    find_mark,
    has_log,
    judge_database,
)
from bloomgated.storage.directory import DirectoryLock
from bloomgated.storage.recovery import Judgement, judge, readable
from bloomgated.storage.snapshots import SnapshotStore


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a file. ``damage`` is false for what is only worth knowing."""

    path: str
    reason: str
    damage: bool = True


@dataclass(frozen=True, slots=True)
class FoundFilter:
    """A filter as a start would serve it. ``damage`` is empty where it is READY."""

    name: str
    damage: str
    restored: bool = False
    """DAMAGED only because the directory is a backup, with all that the backup had."""

    @property
    def state(self) -> str:
        """READY or DAMAGED."""
        return "DAMAGED" if self.damage else "READY"


@dataclass(slots=True)
class Report:
    """What was found."""

    findings: list[Finding] = field(default_factory=list)
    filters: list[FoundFilter] = field(default_factory=list)
    last_seq: int = 0
    refused: bool = False
    """Whether a start would be refused."""

    @property
    def damaged(self) -> bool:
        """Whether anything is not as it was written, or would not be served whole."""
        return any(each.damage for each in self.findings) or any(
            each.damage and not each.restored for each in self.filters
        )


def check(directory: Path) -> Report:
    """Judge ``directory``; blocks, and takes the memory that a start takes.

    Raises DirectoryInUse where a daemon runs on it, and StartError otherwise where nothing can be said.
    """
    lock = DirectoryLock(directory, looking=True)
    try:
        return _check(directory)
    except JournalDamaged as error:
        return Report([Finding(error.path, f"{error.reason}; {error.hint}")], refused=True)
    finally:
        lock.release()


def _check(directory: Path) -> Report:
    mark = find_mark(directory)
    if mark is None:
        return Report()
    snapshots = SnapshotStore(directory)
    with readable(snapshots), _readable(directory) as copy:
        opened = judge_database(directory / DATABASE_NAME, directory / MARK_NAME, mark, copy=copy)
        found = judge(opened, snapshots, thorough=True)
    return Report(
        list(_findings(found, snapshots)),
        [FoundFilter(each.name, each.damage, each.restored) for each in found.filters],
        opened.last_seq,
    )


@contextmanager
def _readable(directory: Path) -> Iterator[Path | None]:
    """A copy of the database where reading the original would leave a trace, for as long as it is needed."""
    path = directory / DATABASE_NAME
    if not has_log(path):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="bloomgated-fsck-") as folder:
        copy = Path(folder) / DATABASE_NAME
        try:
            copy_files(path, copy)
        except OSError as error:
            raise DirectoryUnusable(
                str(directory),
                f"the journal cannot be copied to {folder} ({error.strerror}); TMPDIR names another place",
            ) from None
        yield copy


def _findings(found: Judgement, snapshots: SnapshotStore) -> Iterator[Finding]:
    for flaw in found.unusable:
        yield Finding(str(snapshots.path(flaw.file)), f"{flaw.reason}; a start would move it aside")
    for flaw in found.unsound_spares:
        yield Finding(
            str(snapshots.path(flaw.file)), f"{flaw.reason}; a start would use the newer one, which is sound"
        )
    kept = {file.name for each in found.filters for file in each.files}
    for flaw in found.outdated:
        what = (
            f"kept while {flaw.filter.name} is damaged, but of no use"
            if flaw.file.name in kept
            else "no longer needed, so a start would remove it"
        )
        yield Finding(str(snapshots.path(flaw.file)), f"{flaw.reason}; {what}", damage=False)
    outdated = {flaw.file.name for flaw in found.outdated}
    for name in found.unrecorded:
        if name not in outdated:
            yield Finding(
                str(snapshots.folder / name), "no record names it; a start would remove it", damage=False
            )
    for name in snapshots.moved_aside():
        yield Finding(
            str(snapshots.folder / name),
            "moved aside by an earlier start; nothing reads it, so it may be deleted",
            damage=False,
        )
