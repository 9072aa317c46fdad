"""What the gate says about a filter, as plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from bloomgate.errors import MalformedReply
from bloomgate.filters import HashScheme, Kind, OnFull
from bloomgate.v1 import filters_pb2


class FilterState(enum.Enum):
    """Whether a filter can prove its noes."""

    READY = "ready"
    DAMAGED = "damaged"
    """It cannot: every check is answered maybe until it is rebuilt."""


@dataclass(frozen=True, slots=True)
class BodyStats:
    """One bit buffer of a filter: ``count`` of the ``capacity`` keys that it is planned for are in."""

    bits: int
    hashes: int
    capacity: int
    count: int
    bits_set: int


@dataclass(frozen=True, slots=True)
class FilterStats:
    """What a filter is, how full it is and what it saved. Rates are shares from 0 to 1."""

    name: str
    kind: Kind
    capacity: int
    error_rate: float
    on_full: OnFull
    hash_scheme: HashScheme
    key_format: str
    state: FilterState
    damage: str
    """Why the filter is damaged; empty when it is ready."""
    rebuilding: bool
    generation: int
    hash_id: int
    bits: int
    """Of all bodies together."""
    hashes: int
    """Of the body that adds go to."""
    bits_set: int
    fill_ratio: float
    memory_bytes: int
    approximate_count: int
    """The exact number of keys that were certainly new when they were added."""
    added_count: int
    """Keys of all adds, repeated ones included."""
    expected_error_rate: float
    observed_error_rate: float | None
    """From reported outcomes; None without traffic."""
    checks_skip: int
    """Checks and outcomes count since the daemon started."""
    checks_hit: int
    checks_unsure: int
    outcomes_found: int
    outcomes_not_found: int
    outcomes_false_no: int
    journal_seq: int
    """The last durable journal position."""
    snapshot_seq: int
    """Up to where the newest snapshot reaches; 0 without one."""
    snapshot_time: datetime | None
    """In UTC."""
    leases: int
    bodies: tuple[BodyStats, ...]


class CreateResult(NamedTuple):
    """The filter as it is, and whether this call ``created`` it: False where an equal one existed."""

    stats: FilterStats
    created: bool


# Copied as they are: the same name and the same type on the wire and here.
_PLAIN = (
    "name",
    "damage",
    "rebuilding",
    "generation",
    "hash_id",
    "bits",
    "hashes",
    "bits_set",
    "fill_ratio",
    "memory_bytes",
    "approximate_count",
    "added_count",
    "expected_error_rate",
    "checks_skip",
    "checks_hit",
    "checks_unsure",
    "outcomes_found",
    "outcomes_not_found",
    "outcomes_false_no",
    "journal_seq",
    "snapshot_seq",
    "leases",
)
_STATES = {
    filters_pb2.FILTER_STATE_READY: FilterState.READY,
    filters_pb2.FILTER_STATE_DAMAGED: FilterState.DAMAGED,
}


def read_stats(stats: filters_pb2.FilterStats) -> FilterStats:
    """A filter's stats off the wire. Raises MalformedReply where they say nothing that this version knows."""
    spec = stats.spec
    if not stats.name:
        raise MalformedReply("the reply holds no stats")
    try:
        return FilterStats(
            **{name: getattr(stats, name) for name in _PLAIN},
            # The numbers of these are the wire's, and 0 means the first.
            kind=Kind(spec.kind or 1),
            on_full=OnFull(spec.on_full or 1),
            hash_scheme=HashScheme(spec.hash_scheme or 1),
            capacity=spec.capacity,
            error_rate=spec.error_rate,
            key_format=spec.key_format,
            state=_STATES[stats.state],
            observed_error_rate=(
                stats.observed_error_rate if stats.HasField("observed_error_rate") else None
            ),
            snapshot_time=_time(stats),
            bodies=tuple(
                BodyStats(body.bits, body.hashes, body.capacity, body.count, body.bits_set)
                for body in stats.bodies
            ),
        )
    except (KeyError, ValueError) as error:
        raise MalformedReply(f"stats of filter {stats.name!r} are of another version: {error}") from None


def _time(stats: filters_pb2.FilterStats) -> datetime | None:
    return stats.snapshot_time.ToDatetime(UTC) if stats.HasField("snapshot_time") else None
