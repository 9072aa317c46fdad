"""The daemon's verbs over the kernel, in memory: what ``bloomgate.testing`` answers with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import UInt32Value

from bloomgate import filters, methods
from bloomgate.errors import (
    FilterExists,
    FilterFull,
    FilterNotFound,
    InvalidRequest,
    LimitExceeded,
    StaleHashId,
)
from bloomgate.filters import DIGEST_BYTES, BloomFilter, FilterSpec, HashScheme, OnFull, ParameterError
from bloomgate.session import check_name
from bloomgate.v1 import admin_pb2
from bloomgate.v1 import filters_pb2 as pb

# Stats that the kernel's filter has by the same names.
_OF_THE_FILTER = (
    "bits", "hashes", "bits_set", "memory_bytes", "approximate_count", "added_count", "expected_error_rate",
)  # fmt: skip


@dataclass
class Entry:
    """A filter and what was counted for it."""

    filter: BloomFilter
    snapshot_seq: int = 0
    skips: int = 0
    hits: int = 0
    found: int = 0
    not_found: int = 0
    false_no: int = 0


class FakeVerbs:
    """Every unary method, by path. One thread at a time."""

    def __init__(self, limits: pb.Limits) -> None:
        self.limits = limits
        self.entries: dict[str, Entry] = {}
        self._seq = 0
        self.of_path: dict[str, Callable[[Any], Message]] = {
            methods.ADD.path: self._add,
            methods.MIGHT_CONTAIN.path: self._might_contain,
            methods.STATS.path: self._stats,
            methods.REPORT_OUTCOMES.path: self._report_outcomes,
            methods.HASH_SPEC.path: self._hash_spec,
            methods.CREATE_FILTER.path: self._create_filter,
            methods.LIST_FILTERS.path: self._list_filters,
            methods.DROP_FILTER.path: self._drop_filter,
            methods.SNAPSHOT_FILTER.path: self._snapshot_filter,
            methods.HEALTH.path: lambda _: UInt32Value(value=1),
        }

    def entry(self, name: str, field: str = "filter") -> Entry:
        """A filter's entry. Raises InvalidRequest, FilterNotFound."""
        entry = self.entries.get(check_name(name, field))
        if entry is None:
            raise FilterNotFound(name)
        return entry

    def _judge(self, request: pb.AddRequest | pb.MightContainRequest) -> tuple[Entry, bytes]:
        """The entry and the digests that a request means, judged in the daemon's order: its shape, the
        limits, the filter, the hash id."""
        limits, keys, digests = self.limits, request.keys, request.digests
        if digests:
            if keys:
                raise InvalidRequest("keys", "set keys or digests, not both")
            if len(digests) % DIGEST_BYTES:
                raise InvalidRequest("digests", f"digests must be {DIGEST_BYTES} bytes each")
            if not request.hash_id:
                raise InvalidRequest("hash_id", "digests need the hash_id they were made under")
        _check_limit("keys_per_call", len(keys) or len(digests) // DIGEST_BYTES, limits.keys_per_call)
        _check_limit("bytes_per_key", max(map(len, keys), default=0), limits.bytes_per_key)
        _check_limit("bytes_per_call", sum(map(len, keys)) or len(digests), limits.bytes_per_call)
        if not all(keys):
            raise InvalidRequest("keys", "keys must not be empty")
        entry = self.entry(request.filter)
        hasher = entry.filter.spec.hasher
        if not digests:
            return entry, hasher.digests(keys)
        if request.hash_id != hasher.hash_id:
            raise StaleHashId(request.filter)
        return entry, digests

    def _add(self, request: pb.AddRequest) -> Message:
        entry, digests = self._judge(request)
        try:
            plan = entry.filter.plan_add(digests)
        except filters.FilterFull as full:
            raise FilterFull(request.filter, full.limit, full.allowed, full.needed) from None
        entry.filter.apply(plan)
        self._seq += 1
        return pb.AddResponse(was_new=plan.was_new, seq=self._seq)

    def _might_contain(self, request: pb.MightContainRequest) -> Message:
        entry, digests = self._judge(request)
        found = entry.filter.might_contain_digests(digests)
        entry.hits += sum(found)
        entry.skips += len(found) - sum(found)
        answers = [pb.ANSWER_MAYBE if there else pb.ANSWER_DEFINITELY_NOT for there in found]
        return pb.MightContainResponse(answers=answers)

    def _stats(self, request: pb.StatsRequest) -> Message:
        self.entry(request.filter)
        return pb.StatsResponse(filter=self._describe(request.filter), limits=self.limits)

    def _report_outcomes(self, request: pb.ReportOutcomesRequest) -> Message:
        entry = self.entry(request.filter)
        entry.found += request.found
        entry.not_found += request.not_found
        entry.false_no += request.false_no
        return pb.ReportOutcomesResponse()

    def _hash_spec(self, request: pb.HashSpecRequest) -> Message:
        hasher = self.entry(request.filter).filter.spec.hasher
        reply = pb.HashSpecResponse(hash_scheme=_wire(pb.HashScheme, hasher.scheme), hash_id=hasher.hash_id)
        if isinstance(hasher.seed, bytes):
            reply.secret = hasher.seed
        else:
            reply.seed = hasher.seed
        return reply

    def _create_filter(self, request: admin_pb2.CreateFilterRequest) -> Message:
        check_name(request.name, "name")
        asked = request.spec
        seed = asked.seed if asked.HasField("seed") else None
        try:
            spec = FilterSpec.plan(
                asked.capacity,
                asked.error_rate,
                on_full=OnFull(asked.on_full or OnFull.GROW),
                hash_scheme=HashScheme(asked.hash_scheme or HashScheme.MURMUR3_X64_128),
                seed=seed,
                key_format=asked.key_format,
            )
        except ParameterError as error:
            raise InvalidRequest(f"spec.{error.field}", f"spec.{error}") from None
        entry = self.entries.get(request.name)
        if entry is None:
            self.entries[request.name] = Entry(BloomFilter.of(spec))
        else:
            there = entry.filter.spec
            for field in ("kind", "capacity", "error_rate", "on_full", "key_format"):
                if getattr(spec, field) != getattr(there, field):
                    raise FilterExists(request.name, field)
            if spec.hasher.scheme is not there.hasher.scheme:
                raise FilterExists(request.name, "hash_scheme")
            if seed is not None and seed != there.hasher.seed:
                raise FilterExists(request.name, "seed")
        return admin_pb2.CreateFilterResponse(filter=self._describe(request.name), created=entry is None)

    def _list_filters(self, _: admin_pb2.ListFiltersRequest) -> Message:
        return admin_pb2.ListFiltersResponse(filters=[self._describe(name) for name in sorted(self.entries)])

    def _drop_filter(self, request: admin_pb2.DropFilterRequest) -> Message:
        self.entry(request.name, "name")
        del self.entries[request.name]
        return admin_pb2.DropFilterResponse()

    def _snapshot_filter(self, request: admin_pb2.SnapshotFilterRequest) -> Message:
        self.entry(request.name, "name").snapshot_seq = self._seq
        return admin_pb2.SnapshotFilterResponse(filter=self._describe(request.name))

    def _describe(self, name: str) -> pb.FilterStats:
        entry = self.entries[name]
        spec = entry.filter.spec
        stats = pb.FilterStats(
            name=name,
            spec=pb.FilterSpec(
                kind=_wire(pb.Kind, spec.kind),
                capacity=spec.capacity,
                error_rate=spec.error_rate,
                on_full=_wire(pb.OnFull, spec.on_full),
                hash_scheme=_wire(pb.HashScheme, spec.hasher.scheme),
                key_format=spec.key_format,
            ),
            state=pb.FILTER_STATE_READY,
            generation=1,
            hash_id=spec.hasher.hash_id,
            fill_ratio=entry.filter.bits_set / entry.filter.bits,
            checks_skip=entry.skips,
            checks_hit=entry.hits,
            outcomes_found=entry.found,
            outcomes_not_found=entry.not_found,
            outcomes_false_no=entry.false_no,
            journal_seq=self._seq,
            snapshot_seq=entry.snapshot_seq,
        )
        for field in _OF_THE_FILTER:
            setattr(stats, field, getattr(entry.filter, field))
        for body in entry.filter.bodies:
            size = body.spec
            stats.bodies.add(
                bits=size.bits,
                hashes=size.hashes,
                capacity=size.capacity,
                count=body.count,
                bits_set=body.bits_set,
            )
        return stats


def _wire(enum: Any, number: int) -> Any:
    """The kernel's number as the wire's: they are the same."""
    return enum.ValueType(number)


def _check_limit(limit: str, value: int, allowed: int) -> None:
    if value > allowed:
        raise LimitExceeded(limit, value, allowed)
