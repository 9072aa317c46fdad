"""What the filters of one client share, and the verbs that are not about one filter's keys."""

from __future__ import annotations

from google.protobuf.wrappers_pb2 import StringValue

from bloomgate import transport
from bloomgate.errors import DeadlineExceeded, NotServing, Overloaded, Unavailable
from bloomgate.filters import FilterSpec, HashScheme, OnFull, ParameterError
from bloomgate.metrics import ClientMetrics
from bloomgate.names import check_name
from bloomgate.options import ClientOptions
from bloomgate.stats import CreateResult, FilterStats, read_stats
from bloomgate.steps import Deadline, Retry, Steps
from bloomgate.v1 import admin_pb2
from bloomgate.v1 import filters_pb2 as pb

# grpc.health.v1.HealthCheckResponse.ServingStatus
_HEALTH = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


class Session:
    """Options, metrics, the daemon's limits once they are known; and what is worth another attempt.

    A check has one more attempt, at once, where a connection broke: a lookup is cheaper than a wait, and
    where the daemon is away every check would wait. Other reads are tried again while the daemon cannot be
    reached. Of the administrative verbs only those that change nothing are: a drop that is tried again would
    answer that there is no such filter.
    """

    def __init__(self, options: ClientOptions, metrics: ClientMetrics) -> None:
        self.options = options
        self.metrics = metrics
        self.limits: pb.Limits | None = None
        self.checks = Retry((Unavailable,), None, but_not=(NotServing,), attempts=2)
        self.reads = Retry((Unavailable,), options.backoff)
        self.adds = Retry(
            (Unavailable, DeadlineExceeded, Overloaded), options.backoff, options.add_attempt_timeout
        )
        self.once = Retry((), options.backoff)

    def admin_deadline(self) -> Deadline:
        """The deadline of an administrative call made now."""
        return Deadline(self.options.clock, self.options.admin_timeout)

    def create_filter(
        self,
        name: str,
        capacity: int,
        error_rate: float,
        on_full: OnFull | str,
        hash_scheme: HashScheme,
        seed: int | None,
        key_format: str,
    ) -> Steps[CreateResult]:
        """Create a filter, judged here first: protobuf's own words about a bad value name no field."""
        check_name(name, "name")
        if seed is not None and hash_scheme is HashScheme.BLAKE2B_128:
            raise ParameterError("seed", "a value", "left out for BLAKE2B_128: the daemon draws its secret")
        spec = FilterSpec.plan(
            capacity,
            error_rate,
            on_full=on_full,
            hash_scheme=hash_scheme,
            seed=seed,
            key_format=key_format,
        )
        request = admin_pb2.CreateFilterRequest(
            name=name,
            spec=pb.FilterSpec(
                # The kernel's numbers are the wire's.
                kind=pb.Kind.ValueType(spec.kind),
                capacity=spec.capacity,
                error_rate=spec.error_rate,
                on_full=pb.OnFull.ValueType(spec.on_full),
                hash_scheme=pb.HashScheme.ValueType(spec.hasher.scheme),
                seed=seed,
                key_format=spec.key_format,
            ),
        )
        reply = yield from self.once.call(transport.CREATE_FILTER, request, self.admin_deadline())
        return CreateResult(read_stats(reply.filter), reply.created)

    def list_filters(self) -> Steps[list[FilterStats]]:
        """Every filter, by name."""
        request = admin_pb2.ListFiltersRequest()
        reply = yield from self.reads.call(transport.LIST_FILTERS, request, self.admin_deadline())
        return [read_stats(stats) for stats in reply.filters]

    def drop_filter(self, name: str) -> Steps[None]:
        """Drop a filter for good."""
        request = admin_pb2.DropFilterRequest(name=check_name(name, "name"))
        yield from self.once.call(transport.DROP_FILTER, request, self.admin_deadline())

    def snapshot_filter(self, name: str) -> Steps[FilterStats]:
        """Write a snapshot now."""
        request = admin_pb2.SnapshotFilterRequest(name=check_name(name, "name"))
        reply = yield from self.once.call(transport.SNAPSHOT_FILTER, request, self.admin_deadline())
        return read_stats(reply.filter)

    def health(self, timeout: float) -> Steps[str]:
        """The daemon's word for its own health, by the standard health service; asked once."""
        deadline = Deadline(self.options.clock, timeout)
        reply = yield from self.once.call(transport.HEALTH, StringValue(), deadline)
        return _HEALTH[reply.value] if reply.value < len(_HEALTH) else "UNKNOWN"
