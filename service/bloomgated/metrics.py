"""What operators see, for Prometheus.

Filters count in plain integers on their entries; a collector reads them when it is asked, so a check costs no
metric, a series exists from its filter's creation, at zero, and goes with its filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from bloomgate import __version__
from bloomgated.catalog import Entry
from bloomgated.gate import Gate
from bloomgated.outbox import End
from bloomgated.requests import Fill, measure
from bloomgated.watched import Watched

disable_created_metrics()  # type: ignore[no-untyped-call]

T = TypeVar("T")

CALL_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 5e-1, 1.0)
LEASE_WAIT_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)
COMMIT_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
GROUP_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class CallMetrics:
    """gRPC calls, under the names that existing gRPC dashboards know."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self._started = Counter("grpc_server_started_total", "Calls started.", labels, registry=registry)
        self._handled = Counter(
            "grpc_server_handled_total", "Calls ended, by code.", (*labels, "grpc_code"), registry=registry
        )
        self._seconds = Histogram(
            "grpc_server_handling_seconds", "Seconds from start to end of a call.", labels,
            buckets=CALL_BUCKETS, registry=registry,
        )  # fmt: skip

    def of(
        self, call_type: str, service: str, method: str
    ) -> tuple[Callable[[], None], Callable[[str, float], None]]:
        """What to call when a call of ``method`` starts, and with code and seconds when it has ended."""
        labels = (call_type, service, method)
        started, seconds = self._started.labels(*labels), self._seconds.labels(*labels)
        by_code = {"OK": self._handled.labels(*labels, "OK")}

        def handled(code: str, duration: float) -> None:
            counter = by_code.get(code)
            if counter is None:
                counter = by_code[code] = self._handled.labels(*labels, code)
            counter.inc()
            seconds.observe(duration)

        return started.inc, handled


class JournalMetrics:
    """The group commit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "bloomgate_journal_commit_seconds", "Seconds of a group commit, its sync included.",
            buckets=COMMIT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._records = Histogram(
            "bloomgate_journal_group_size",
            "Records of a group commit.",
            buckets=GROUP_BUCKETS,
            registry=registry,
        )

    def committed(self, seconds: float, records: int) -> None:
        """Count a commit."""
        self._seconds.observe(seconds)
        self._records.observe(records)


class DaemonMetrics:
    """All of them, in one registry."""

    def __init__(self, gate: Gate, *, exposed: Sequence[str] = (), watched: Sequence[Watched] = ()) -> None:
        """``exposed``: the listeners that strangers can reach; ``watched``: what is read again."""
        self.registry = CollectorRegistry()
        insecure = Gauge(
            "bloomgate_insecure", "Whether it is reached without TLS and names.", ("listener",),
            registry=self.registry,
        )  # fmt: skip
        for listener in ("grpc", "http"):
            insecure.labels(listener).set(listener in exposed)
        stale = Gauge(
            "bloomgate_reload_failed", "Whether changed files could not be read again.", ("files",),
            registry=self.registry,
        )  # fmt: skip
        for what in ("auth", "tls"):
            stale.labels(what)
        for each in watched:
            stale.labels(each.what).set_function(partial(getattr, each, "failed"))
        self.registry.register(FilterCollector(gate))
        self.registry.register(LeaseCollector(gate))
        lease_wait = Histogram(
            "bloomgate_lease_wait_seconds", "Seconds that Adds and drops waited for leases, if they had to.",
            buckets=LEASE_WAIT_BUCKETS, registry=self.registry,
        )  # fmt: skip
        gate.leases.on_wait = lease_wait.observe
        self.calls = CallMetrics(self.registry)
        self.journal = JournalMetrics(self.registry)


# Name, help, value of one entry; collected per filter.
_COUNTERS: tuple[tuple[str, str, Callable[[Entry], float]], ...] = (
    ("bloomgate_adds_total", "Keys of acknowledged Adds.", lambda entry: entry.adds),
    (
        "bloomgate_snapshot_failures_total",
        "Snapshots that could not be written.",
        lambda entry: entry.snapshot_failures,
    ),
)
_GAUGES: tuple[tuple[str, str, Callable[[Entry], float]], ...] = (
    ("bloomgate_filter_capacity", "Keys the filter is planned for.", lambda entry: entry.spec.capacity),
    ("bloomgate_filter_target_error_rate", "Error rate asked for.", lambda entry: entry.spec.error_rate),
    ("bloomgate_filter_generation", "Which body is current.", lambda entry: entry.generation),
)
# The same of how full a filter is, which is measured once a filter and scrape.
_FILL_GAUGES: tuple[tuple[str, str, Callable[[Fill], float]], ...] = (
    ("bloomgate_filter_memory_bytes", "Bytes of the bodies.", lambda fill: fill.memory_bytes),
    (
        "bloomgate_filter_approximate_count",
        "Keys that were certainly new.",
        lambda fill: fill.approximate_count,
    ),
    ("bloomgate_filter_bits", "Bits of the bodies.", lambda fill: fill.bits),
    ("bloomgate_filter_bits_set", "Set bits of the bodies.", lambda fill: fill.bits_set),
    (
        "bloomgate_filter_expected_error_rate",
        "Error rate that the set bits give.",
        lambda fill: fill.expected_error_rate,
    ),
)


class FilterCollector(Collector):
    """Reads the catalog when Prometheus asks. Runs in any thread."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        """Every family, with a sample per filter."""
        entries = list(self._gate.catalog)
        by_name = [(entry.name, entry) for entry in entries]
        for name, text, value in _COUNTERS:
            yield _family(CounterMetricFamily, name, text, by_name, value)
        for name, text, value in _GAUGES:
            yield _family(GaugeMetricFamily, name, text, by_name, value)
        fills = [(entry.name, measure(entry.bloom)) for entry in entries]
        for name, text, of_fill in _FILL_GAUGES:
            yield _family(GaugeMetricFamily, name, text, fills, of_fill)
        yield from _labelled(entries)
        yield from _snapshots(entries)
        journal = GaugeMetricFamily("bloomgate_journal_seq", "The last durable journal position.")
        if self._gate.opened:
            journal.add_metric((), self._gate.journal.durable_seq)
        yield journal
        yield InfoMetricFamily("bloomgate_build", "What is running.", {"version": __version__})

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read the catalog."""
        return ()


class LeaseCollector(Collector):
    """Counts the leases when Prometheus asks. Runs in any thread."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        """Leases per filter, and the ends of subscriptions."""
        leases = self._gate.leases
        names = [(entry.name, entry.name) for entry in self._gate.catalog]
        yield _family(GaugeMetricFamily, "bloomgate_leases", "Copies under a lease.", names, leases.held)
        ends = CounterMetricFamily(
            "bloomgate_lease_resets_total", "Copies that were ended by the daemon, by why.", labels=("end",)
        )
        for end in End:
            ends.add_metric((end.value,), leases.ends[end])
        yield ends

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read the catalog."""
        return ()


def _family(
    kind: type[Any], name: str, text: str, filters: Iterable[tuple[str, T]], value: Callable[[T], float]
) -> Metric:
    family: Metric = kind(name, text, labels=("filter",))
    for filter_name, of_filter in filters:
        family.add_metric((filter_name,), value(of_filter))  # type: ignore[attr-defined]
    return family


def _labelled(entries: list[Entry]) -> Iterator[Metric]:
    checks = CounterMetricFamily(
        "bloomgate_checks_total", "Checks, by what they counted as.", labels=("filter", "result", "via")
    )
    outcomes = CounterMetricFamily(
        "bloomgate_outcomes_total", "What the authority said, as reported.", labels=("filter", "outcome")
    )
    state = GaugeMetricFamily(
        "bloomgate_filter_state", "1 for the state a filter is in.", labels=("filter", "state")
    )
    for entry in entries:
        for via, counted in (("rpc", entry.checks), ("replica", entry.replica_checks)):
            for result in ("skip", "hit", "unsure"):
                checks.add_metric((entry.name, result, via), getattr(counted, result))
        for outcome in ("found", "not_found", "false_no"):
            outcomes.add_metric((entry.name, outcome), getattr(entry.outcomes, outcome))
        for each in ("READY", "DAMAGED"):
            state.add_metric((entry.name, each.lower()), float(entry.state == each))
    yield from (checks, outcomes, state)


def _snapshots(entries: list[Entry]) -> Iterator[Metric]:
    seq = GaugeMetricFamily(
        "bloomgate_snapshot_seq", "Up to where the newest snapshot reaches.", labels=("filter",)
    )
    written = GaugeMetricFamily(
        "bloomgate_snapshot_timestamp_seconds", "When the newest snapshot was written.", labels=("filter",)
    )
    for entry in entries:
        newest = entry.files[-1] if entry.files else None
        seq.add_metric((entry.name,), newest.stamp if newest else 0)
        written.add_metric((entry.name,), newest.time if newest else 0)
    yield from (seq, written)
