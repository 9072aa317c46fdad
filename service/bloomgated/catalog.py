"""name -> entry: an immutable map, swapped whole, so that a check reads it once and needs no lock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bloomgate.filters import BloomBody, BloomFilter, FilterSpec
from bloomgated.storage.records import SnapshotFile


@dataclass(slots=True)
class Checks:
    """What checks counted as, since the process started."""

    skip: int = 0
    hit: int = 0
    unsure: int = 0


@dataclass(slots=True)
class Outcomes:
    """What the authority said after hits, as callers reported it, since the process started."""

    found: int = 0
    not_found: int = 0
    false_no: int = 0
    false_no_logged: int = 0
    """How many of those the log has told of; the last time at ``logged_at``."""
    logged_at: float = -math.inf


@dataclass(slots=True)
class Upkeep:
    """When its snapshots are due, on the snapshotter's clock in seconds."""

    since: float | None = None
    """The interval to the next one runs from here; None before it was first looked at."""
    delay: float = 0.0
    """How long it is left alone after its last failure; 0 after a success."""
    not_before: float = -math.inf


@dataclass(slots=True, eq=False)
class Entry:
    """One filter as the daemon holds it. The event loop alone changes it."""

    filter_id: int
    name: str
    spec: FilterSpec
    bloom: BloomFilter | None
    """None: DAMAGED, ``damage`` says why, and every check is answered maybe."""
    damage: str = ""
    generation: int = 1
    last_seq: int = 0
    """Its newest record that changes content, durable or not."""
    files: tuple[SnapshotFile, ...] = ()
    """Recorded snapshots, newest last."""
    journal_bytes: int = 0
    """Bytes of digests journalled since the newest snapshot was begun."""
    upkeep: Upkeep = field(default_factory=Upkeep)
    snapshot_failures: int = 0
    """Snapshots that could not be written, recorded or stamped anew."""
    dropping: bool = False
    spare: list[BloomBody] = field(default_factory=list)
    """Bodies that an Add has allocated and not begun yet."""
    allocating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while that is done."""
    adds: int = 0
    """Keys of acknowledged Adds since the process started."""
    checks: Checks = field(default_factory=Checks)
    """Those that were asked here; ``unsure`` among them alone."""
    replica_checks: Checks = field(default_factory=Checks)
    """Those that copies answered, as their holders reported them."""
    outcomes: Outcomes = field(default_factory=Outcomes)

    @property
    def state(self) -> str:
        """READY or DAMAGED."""
        return "READY" if self.bloom is not None else "DAMAGED"

    @property
    def memory_bytes(self) -> int:
        """Bytes of its bodies."""
        return self.bloom.memory_bytes if self.bloom is not None else 0

    @property
    def observed_error_rate(self) -> float | None:
        """The rate of false positives among absent keys that outcomes tell of; None without traffic.

        Outcomes are reported for a part of the hits only, so the share q of them that were false stands for
        all hits: q * hit / (q * hit + skip).
        """
        reported = self.outcomes.found + self.outcomes.not_found
        if not reported:
            return None
        false_hits = self.outcomes.not_found / reported * (self.checks.hit + self.replica_checks.hit)
        absent = false_hits + self.checks.skip + self.replica_checks.skip
        return false_hits / absent if absent else None


class Catalog:
    """An immutable map of entries by name."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self._entries = dict(sorted((entries or {}).items()))

    def get(self, name: str) -> Entry | None:
        """The entry of that name, if there is one."""
        return self._entries.get(name)

    def with_entry(self, entry: Entry) -> Catalog:
        """A catalog that has ``entry`` too."""
        return Catalog({**self._entries, entry.name: entry})

    def without(self, name: str) -> Catalog:
        """A catalog that does not have ``name``."""
        return Catalog({key: entry for key, entry in self._entries.items() if key != name})

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
