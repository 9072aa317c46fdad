"""From a data directory back to filters.

A filter's base is its newest recorded snapshot that validates, or, without one, the empty filter of its
create record. It is complete if nothing after the base can have been trimmed: the base's stamp (the create's
seq) is at or above the trim mark. A snapshot that does not validate is moved aside and the other one tried.
What cannot be proven complete is DAMAGED and gets no body at all: an empty filter in its place would answer
"no" wrongly.

A directory put back from a backup may lack what was added after it, so the filters that were in the backup
are DAMAGED too, over any number of restarts, until the operator asserts that nothing was.

``judge`` finds all that out and changes nothing; ``recover`` judges, then acts. So nothing on disk is changed
before the whole journal has been read: a start that is refused leaves the directory as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from bloomgate.filters import BloomBody, BloomFilter, FilterSpec
from bloomgate.filters.errors import DataDamaged
from bloomgated.errors import JournalDamaged, StartError
from bloomgated.storage.journal import Placed
from bloomgated.storage.records import Add, Create, Drop, Grow, SnapshotFile, Snapshots
from bloomgated.storage.snapshots import SnapshotStore

log = logging.getLogger(__name__)

FIRST_GENERATION = 1


class Past(Protocol):
    """What recovery reads of a journal: any Journal nobody writes to yet has it."""

    @property
    def durable_seq(self) -> int:
        """See Journal."""

    @property
    def trim_mark(self) -> int:
        """See Journal."""

    @property
    def restored(self) -> int:
        """See Journal."""

    def replay(self, after: int) -> Iterator[Placed]:
        """See Journal."""


@dataclass(slots=True)
class Recovered:
    """A filter as the journal and its snapshots tell it. ``bloom`` is None where ``damage`` says why.

    ``last_seq`` is its newest record in the journal that changes content; ``base_seq`` the base's stamp, or
    the journal's end where there is none.
    """

    filter_id: int
    name: str
    spec: FilterSpec
    generation: int = FIRST_GENERATION
    files: tuple[SnapshotFile, ...] = ()
    bloom: BloomFilter | None = None
    damage: str = ""
    restored: bool = False
    """DAMAGED for no other reason than that it is of a backup, and may lack later Adds."""
    base_seq: int = 0
    last_seq: int = 0
    journal_bytes: int = 0
    """Bytes of digests journalled after the base."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """A recorded snapshot with which something is wrong."""

    filter: Recovered
    file: SnapshotFile
    reason: str


@dataclass(slots=True)
class Judgement:
    """What a start would find. Recorded files in none of the lists are sound, or were not looked at since
    the start does not need them."""

    filters: list[Recovered] = field(default_factory=list)
    unusable: list[Flaw] = field(default_factory=list)
    """Files that do not validate: a start moves them aside."""
    unsound_spares: list[Flaw] = field(default_factory=list)
    """Older files that do not validate, and that a start does not look at; only of a thorough judgement."""
    outdated: list[Flaw] = field(default_factory=list)
    """Files that can no longer be a base: a start removes them, or keeps those of a DAMAGED filter."""
    unrecorded: list[str] = field(default_factory=list)
    """Names of what no record names: a start removes it."""


def judge(
    past: Past,
    snapshots: SnapshotStore,
    *,
    assert_no_later_adds: bool = False,
    thorough: bool = False,
    bodies: bool = True,
) -> Judgement:
    """Find what a start would, changing nothing; blocks. Raises JournalDamaged where it would be refused.

    ``thorough`` validates also the files that a start does not look at. Without ``bodies`` a body is let go
    as soon as it is validated, and no record is applied: whole is what has no ``damage`` then.
    """
    catalog = read_catalog(past.replay(0))
    for path, header in snapshots.headers():
        if header.seq > past.durable_seq:
            raise JournalDamaged(
                str(path), f"holds seq {header.seq}, but the journal ends at {past.durable_seq}"
            )
    found = Judgement(sorted(catalog.values(), key=lambda each: each.name))
    for each in catalog.values():
        _load_base(each, past, snapshots, found, thorough)
        if each.filter_id <= past.restored and not assert_no_later_adds:
            _hold_restored(each, past)
        if not bodies:
            each.bloom = None
    lowest = min((each.base_seq for each in catalog.values()), default=past.durable_seq)
    if bodies:
        for entry in past.replay(min(lowest, past.durable_seq)):
            _apply(entry, catalog)
    recorded = {file.name for each in catalog.values() for file in each.files}
    found.unrecorded = snapshots.unrecorded(recorded | {flaw.file.name for flaw in found.unusable})
    return found


def recover(past: Past, snapshots: SnapshotStore, *, assert_no_later_adds: bool = False) -> list[Recovered]:
    """Rebuild every filter that exists; blocks. Raises JournalDamaged if the journal cannot be, StartError if
    the disk does not let it."""
    with readable(snapshots):
        found = judge(past, snapshots, assert_no_later_adds=assert_no_later_adds)
        for flaw in found.unusable:
            log.error("snapshot of %s cannot be used: %s: %s", flaw.filter.name, flaw.file.name, flaw.reason)
            if snapshots.move_aside(flaw.file) is None:
                log.error("snapshot %s of %s is missing", flaw.file.name, flaw.filter.name)
        for name in found.unrecorded:
            snapshots.remove(name)
            log.info("removed %s, which no record names", name)
        if past.restored and assert_no_later_adds:
            _warn_of_unplanned(past, found.filters)
        return found.filters


def _warn_of_unplanned(past: Past, filters: list[Recovered]) -> None:
    """Adds to a DAMAGED filter go to its first body, since there was no plan: it may be far over its own."""
    for each in filters:
        if each.bloom is not None and each.filter_id <= past.restored < each.last_seq:
            log.warning(
                "filter %s took Adds while it was DAMAGED, which no plan was made for: look at its expected"
                " error rate, and rebuild it if that is too high",
                each.name,
            )


@contextmanager
def readable(snapshots: SnapshotStore) -> Iterator[None]:
    """Within: what the disk refuses of the snapshots is a StartError. It is no verdict on any of them."""
    try:
        yield
    except OSError as error:
        raise StartError(
            f"{error.filename or snapshots.folder}: the disk refuses it ({error.strerror}); mend the disk and"
            " start again, nothing is lost by waiting"
        ) from None


def read_catalog(entries: Iterable[Placed]) -> dict[int, Recovered]:
    """The filters that exist, by id, with their recorded files; nothing is loaded or judged."""
    filters: dict[int, Recovered] = {}
    for entry in entries:
        match entry.record:
            case Create(name, spec):
                filters[entry.seq] = Recovered(entry.seq, name, spec, last_seq=entry.seq)
            case Add(filter_id) | Grow(filter_id):
                # Taken down here, from all that is there: a filter's idle snapshots may be stamped ahead only
                # if it has no record after the older one, and the replay below may begin after that.
                if filter_id in filters:
                    filters[filter_id].last_seq = entry.seq
            case Snapshots(filter_id, files):
                if filter_id in filters and files:
                    filters[filter_id].generation = max(file.generation for file in files)
                if filter_id in filters:
                    filters[filter_id].files = files
            case Drop(filter_id):
                filters.pop(filter_id, None)
    return filters


def _load_base(
    recovered: Recovered, past: Past, snapshots: SnapshotStore, found: Judgement, thorough: bool
) -> None:
    """Give ``recovered`` its base, or the reason why it is damaged; note the files that are not usable."""
    sound: list[SnapshotFile] = []
    outdated: list[SnapshotFile] = []
    reasons = []
    for file in reversed(recovered.files):
        reason = ""
        # Sound perhaps, but what came after it is gone, and stays so.
        if file.stamp < past.trim_mark:
            reason = f"reaches to seq {file.stamp} only"
        elif file.generation != recovered.generation:
            reason = f"is of generation {file.generation}, {recovered.generation} is current"
        if reason:
            outdated.append(file)
            reasons.append(f"{file.name} {reason}")
            found.outdated.append(Flaw(recovered, file, reason))
            continue
        spare = recovered.bloom is not None
        # A spare is kept as it is: validated when it is needed.
        if not spare or thorough:
            try:
                image = snapshots.load(file)
                _judge_spec(image.filter.spec, file, recovered)
            except DataDamaged as damage:
                flaw = Flaw(recovered, file, damage.reason)
                if spare:
                    found.unsound_spares.append(flaw)
                    sound.append(file)
                else:
                    found.unusable.append(flaw)
                    reasons.append(f"{file.name}: {damage.reason}")
                continue
            if not spare:
                recovered.bloom, recovered.spec = image.filter, image.filter.spec
                recovered.base_seq = file.stamp
        sound.append(file)
    if recovered.bloom is not None:
        # What can no longer be a base does not count as one of the two files that a trim goes by.
        recovered.files = tuple(reversed(sound))
        return
    recovered.files = tuple(reversed(outdated))
    if recovered.filter_id >= past.trim_mark and recovered.generation == FIRST_GENERATION:
        try:
            # Resident, as a body that was read is: adds must not wait for its pages.
            body = BloomBody.resident(recovered.spec.first_body)
        except MemoryError:
            raise _no_memory(recovered) from None
        recovered.bloom, recovered.base_seq = BloomFilter.of(recovered.spec, [body]), recovered.filter_id
        return
    recovered.base_seq = past.durable_seq
    recovered.damage = "; ".join(reasons) or "no snapshot is recorded"
    if recovered.generation == FIRST_GENERATION:
        recovered.damage += f"; the journal starts after seq {past.trim_mark}"
    else:
        recovered.damage += f"; the journal alone does not make generation {recovered.generation}"
    recovered.damage += ", so it cannot be proven complete"


def _hold_restored(recovered: Recovered, past: Past) -> None:
    """Damage a filter that was in the backup. Its files are kept: an assertion makes them count again."""
    recovered.bloom, recovered.base_seq = None, past.durable_seq
    begun = f"restored from a backup that ended at seq {past.restored}"
    if recovered.damage:
        recovered.damage = f"{begun}, and besides: {recovered.damage}"
    else:
        recovered.damage = (
            f"{begun}, so it may lack what was added after it: load a new filter beside it, as"
            " docs/OPERATIONS.md says; if nothing was added after the backup, start once with"
            " `bloomgated serve --assert-no-later-adds`"
        )
        recovered.restored = True


def _judge_spec(spec: FilterSpec, file: SnapshotFile, recovered: Recovered) -> None:
    """Whether an image of ``spec`` can be the filter's: a rebuild changes sizes, but never how keys hash."""
    if spec.hasher != recovered.spec.hasher:
        raise DataDamaged(file.name, "made under another hash spec than its filter")
    if file.generation == FIRST_GENERATION and spec != recovered.spec:
        raise DataDamaged(file.name, "made under another spec than its filter")


def _apply(entry: Placed, filters: dict[int, Recovered]) -> None:
    record = entry.record
    if not isinstance(record, (Add, Grow)):
        return
    each = filters.get(record.filter_id)
    if each is None:  # dropped since
        return
    if each.bloom is None or entry.seq <= each.base_seq:
        return
    try:
        if isinstance(record, Add):
            each.bloom.insert(record.segment)
            each.journal_bytes += len(record.segment.digests)
        else:
            each.bloom.grow(record.growth)
    except MemoryError:
        raise _no_memory(each) from None
    except IndexError as error:
        # The journal is sound, so its base is not what it says; the other filters serve.
        each.bloom, each.journal_bytes = None, 0
        each.damage = f"seq {entry.seq} does not fit what was recovered before it ({error})"


def _no_memory(recovered: Recovered) -> StartError:
    return StartError(f"filter {recovered.name} needs more memory than there is")
