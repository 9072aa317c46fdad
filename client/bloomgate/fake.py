"""The daemon's verbs over the kernel, in memory: what ``bloomgate.testing`` answers with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import UInt32Value

from bloomgate import filters, transport
from bloomgate.errors import (
    FilterExists,
    FilterFull,
    FilterNotFound,
    InvalidRequest,
    LimitExceeded,
    StaleHashId,
)
from bloomgate.fake_leases import FakeFilter, FakeLeases
from bloomgate.filters import DIGEST_BYTES, FilterSpec, HashScheme, OnFull, ParameterError
from bloomgate.names import check_name
from bloomgate.v1 import admin_pb2
from bloomgate.v1 import filters_pb2 as pb

# Stats that the kernel's filter has by the same names.
_OF_THE_FILTER = (
    "bits", "hashes", "bits_set", "memory_bytes", "approximate_count", "added_count", "expected_error_rate",
)  # fmt: skip


@dataclass
class Entry:
    """A filter and what was counted for it."""

    filter: FakeFilter
    snapshot_seq: int = 0
    skips: int = 0
    hits: int = 0
    found: int = 0
    not_found: int = 0
    false_no: int = 0


class FakeVerbs:
    """Every unary method, by path. One thread at a time."""

    def __init__(self, limits: pb.Limits, may_renew: Callable[[], bool]) -> None:
        """``may_renew``: whether copies are granted leases at the moment."""
        self.limits = limits
        self.entries: dict[str, Entry] = {}
        self.leases = FakeLeases(lambda name: self.entry(name).filter, self._count, may_renew)
        self._seq = 0
        self.of_path: dict[str, Callable[[Any], Message]] = {
            transport.ADD.path: self._add,
            transport.MIGHT_CONTAIN.path: self._might_contain,
            transport.STATS.path: self._stats,
            transport.REPORT_OUTCOMES.path: self._report_outcomes,
            transport.HASH_SPEC.path: self._hash_spec,
            transport.CREATE_FILTER.path: self._create_filter,
            transport.LIST_FILTERS.path: self._list_filters,
            transport.DROP_FILTER.path: self._drop_filter,
            transport.SNAPSHOT_FILTER.path: self._snapshot_filter,
            transport.HEALTH.path: lambda _: UInt32Value(value=1),
        }

    def entry(self, name: str, field: str = "filter") -> Entry:
        """A filter's entry. Raises InvalidRequest, FilterNotFound."""
        entry = self.entries.get(check_name(name, field))
        if entry is None:
            raise FilterNotFound(name)
        return entry

    def make(self, spec: FilterSpec) -> Entry:
        """An empty filter."""
        return Entry(FakeFilter.made(spec, self.leases))

    def _count(self, name: str, skips: int, hits: int) -> None:
        entry = self.entries.get(name)
        if entry is not None:
            entry.skips += skips
            entry.hits += hits

    def _judge(self, request: pb.AddRequest | pb.MightContainRequest) -> tuple[Entry, bytes]:
        """The entry and the digests that a request means, judged in the daemon's order: its shape, the
        limits, the filter, the hash id."""
        limits, keys, digests = self.limits, request.keys, request.digests
        if digests:
            if keys:
                raise InvalidRequest("keys", "set keys or digests, not both")
            if len(digests) % DIGEST_BYTES:
                raise InvalidRequest(
                    "digests", f"digests must be {DIGEST_BYTES} bytes each, got {len(digests)} bytes"
                )
            if not request.hash_id:
                raise InvalidRequest("hash_id", "digests need the hash_id they were made under")
        _check_limit("keys_per_call", len(keys) or len(digests) // DIGEST_BYTES, limits.keys_per_call)
        _check_limit("bytes_per_key", max(map(len, keys), default=0), limits.bytes_per_key)
        _check_limit("bytes_per_call", sum(map(len, keys)) or len(digests), limits.bytes_per_call)
        if not all(keys):
            raise InvalidRequest("keys", f"keys[{list(keys).index(b'')}] must not be empty")
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
        spec, seed = _asked(request.spec)
        entry = self.entries.get(check_name(request.name, "name"))
        if entry is None:
            self.entries[request.name] = self.make(spec)
        elif differing := spec.differs_from(entry.filter.spec, seed):
            raise FilterExists(request.name, differing)
        return admin_pb2.CreateFilterResponse(filter=self._describe(request.name), created=entry is None)

    def _list_filters(self, _: admin_pb2.ListFiltersRequest) -> Message:
        return admin_pb2.ListFiltersResponse(filters=[self._describe(name) for name in sorted(self.entries)])

    def _drop_filter(self, request: admin_pb2.DropFilterRequest) -> Message:
        self.leases.end(self.entry(request.name, "name").filter)
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
            leases=self.leases.held(name),
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


def _asked(message: pb.FilterSpec) -> tuple[FilterSpec, int | None]:
    """The spec and the seed that a message asks for, judged as the daemon does."""
    if message.kind not in (pb.KIND_UNSPECIFIED, pb.KIND_BLOOM):
        raise InvalidRequest("spec.kind", f"spec.kind must be BLOOM, got {message.kind}")
    if message.on_full not in pb.OnFull.values():
        raise InvalidRequest("spec.on_full", f"spec.on_full {message.on_full} is unknown")
    if message.hash_scheme not in pb.HashScheme.values():
        raise InvalidRequest("spec.hash_scheme", f"spec.hash_scheme {message.hash_scheme} is unknown")
    scheme = HashScheme(message.hash_scheme or HashScheme.MURMUR3_X64_128)
    seed = message.seed if message.HasField("seed") else None
    if seed is not None and scheme is not HashScheme.MURMUR3_X64_128:
        raise InvalidRequest("spec.seed", f"spec.seed is not for {scheme.name}, whose secret is drawn")
    try:
        spec = FilterSpec.plan(
            message.capacity,
            message.error_rate,
            on_full=OnFull(message.on_full or OnFull.GROW),
            hash_scheme=scheme,
            seed=seed,
            key_format=message.key_format,
        )
    except ParameterError as error:
        raise InvalidRequest(f"spec.{error.field}", f"spec.{error}") from None
    return spec, seed


def _wire(enum: Any, number: int) -> Any:
    """The kernel's number as the wire's: they are the same."""
    return enum.ValueType(number)


def _check_limit(limit: str, value: int, allowed: int) -> None:
    if value > allowed:
        raise LimitExceeded(limit, value, allowed)
