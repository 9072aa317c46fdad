"""From a data directory back to filters.

A filter's base is its newest recorded snapshot that validates, or, without one, the empty filter of its
create record. It is complete if nothing after the base can have been trimmed: the base's stamp (the create's
seq) is at or above the trim mark. A snapshot that does not validate is moved aside and the other one tried.
What cannot be proven complete is DAMAGED and gets no body at all: an empty filter in its place would answer
"no" wrongly.

Nothing on disk is changed before the whole journal has been read and judged: a start that is refused leaves
the directory as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from bloomgate.filters import BloomFilter, FilterSpec
from bloomgate.filters.errors import DataDamaged
from bloomgated.errors import JournalDamaged, StartError
from bloomgated.storage.journal import Journal, Placed
from bloomgated.storage.records import Add, Create, Drop, Grow, SnapshotFile, Snapshots
from bloomgated.storage.snapshots import SnapshotStore

log = logging.getLogger(__name__)

FIRST_GENERATION = 1


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
    base_seq: int = 0
    last_seq: int = 0
    journal_bytes: int = 0
    """Bytes of digests journalled after the base."""


def recover(journal: Journal, snapshots: SnapshotStore) -> list[Recovered]:
    """Rebuild every filter that exists; blocks. Raises JournalDamaged if the journal cannot be."""
    filters = _read_catalog(journal.replay(0))
    for path, header in snapshots.headers():
        if header.seq > journal.durable_seq:
            raise JournalDamaged(
                str(path), f"holds seq {header.seq}, but the journal ends at {journal.durable_seq}"
            )
    unusable = [(each, file) for each in filters.values() for file in _load_base(each, journal, snapshots)]
    lowest = min((each.base_seq for each in filters.values()), default=journal.durable_seq)
    for entry in journal.replay(min(lowest, journal.durable_seq)):
        _apply(entry, filters)
    for each, file in unusable:
        if snapshots.move_aside(file) is None:
            log.error("snapshot %s of %s is missing", file.name, each.name)
    for name in snapshots.remove_unrecorded({file.name for each in filters.values() for file in each.files}):
        log.info("removed %s, which no record names", name)
    return sorted(filters.values(), key=lambda each: each.name)


def _read_catalog(entries: Iterable[Placed]) -> dict[int, Recovered]:
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


def _load_base(recovered: Recovered, journal: Journal, snapshots: SnapshotStore) -> list[SnapshotFile]:
    """Give ``recovered`` its base, or the reason why it is damaged; return the files that do not validate."""
    past: list[SnapshotFile] = []
    sound: list[SnapshotFile] = []
    unusable: list[SnapshotFile] = []
    reasons = []
    for file in reversed(recovered.files):
        # Sound perhaps, but what came after it is gone, and stays so.
        if file.stamp < journal.trim_mark:
            past.append(file)
            reasons.append(f"{file.name} reaches to seq {file.stamp} only")
        elif file.generation != recovered.generation:
            past.append(file)
            reasons.append(f"{file.name} is of generation {file.generation}")
        elif recovered.bloom is not None:
            # The older one is kept as it is: validated when it is needed.
            sound.append(file)
        else:
            try:
                image = snapshots.load(file)
                _judge_spec(image.filter.spec, file, recovered)
            except DataDamaged as damage:
                log.error("snapshot of %s cannot be used: %s", recovered.name, damage)
                unusable.append(file)
                reasons.append(f"{file.name}: {damage.reason}")
                continue
            recovered.bloom, recovered.spec = image.filter, image.filter.spec
            recovered.base_seq = file.stamp
            sound.append(file)
    if recovered.bloom is not None:
        # What can no longer be a base does not count as one of the two files that a trim goes by.
        recovered.files = tuple(reversed(sound))
        return unusable
    recovered.files = tuple(reversed(past))
    if recovered.filter_id >= journal.trim_mark and recovered.generation == FIRST_GENERATION:
        recovered.bloom, recovered.base_seq = BloomFilter.of(recovered.spec), recovered.filter_id
        return unusable
    recovered.base_seq = journal.durable_seq
    recovered.damage = "; ".join(reasons) or "no snapshot is recorded"
    recovered.damage += f"; the journal starts after seq {journal.trim_mark}, so it cannot be proven complete"
    return unusable


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
        raise StartError(f"filter {each.name} needs more memory than there is") from None
    except IndexError as error:
        # The journal is sound, so its base is not what it says; the other filters serve.
        each.bloom, each.journal_bytes = None, 0
        each.damage = f"seq {entry.seq} does not fit what was recovered before it ({error})"
