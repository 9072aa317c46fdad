"""What a client counts. The names of results are the daemon's, so that one dashboard shows both.

A labelled counter exports nothing until it is touched, so a filter's results are touched when its handle is
made. Reasons are the lower-case reason words of ``errors.ERRORS`` and a handful of local ones: a bounded set.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric

from bloomgate.replies import Result

# A check is one loopback call at best, its whole budget at worst.
_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class _Counter(Counter):
    """A counter without its ``_created`` series: a second series per child that nobody graphs."""

    def collect(self) -> Iterable[Metric]:
        return _without_created(super().collect())


class _Histogram(Histogram):
    def collect(self) -> Iterable[Metric]:
        return _without_created(super().collect())


def _without_created(metrics: Iterable[Metric]) -> Iterable[Metric]:
    for metric in metrics:
        metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
        yield metric


class ClientMetrics:
    """The client's metrics in one registry. Get them with ``in_registry``: a registry takes a name once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.checks = _Counter(
            "bloomgate_client_checks",
            "Keys checked, by what the check counted as.",
            ("filter", "result", "via"),
            registry=registry,
        )
        self.fallbacks = _Counter(
            "bloomgate_client_fallbacks",
            "Keys for which the daemon proved nothing, so that the answer was maybe.",
            ("filter", "reason"),
            registry=registry,
        )
        self.lost = _Counter(
            "bloomgate_client_outcomes_lost",
            "Outcomes of lookups whose report failed and may have been counted, so that it is not repeated.",
            ("filter",),
            registry=registry,
        )
        self.check_seconds = _Histogram(
            "bloomgate_client_check_seconds",
            "How long checks took, bulk checks being one each.",
            buckets=_BUCKETS,
            registry=registry,
        )

    @classmethod
    def in_registry(cls, registry: CollectorRegistry = REGISTRY) -> ClientMetrics:
        """The registry's client metrics, made when first asked for."""
        with _lock:
            metrics = _of_registry.get(registry)
            if metrics is None:
                metrics = _of_registry[registry] = cls(registry)
            return metrics

    def of_filter(self, name: str, via: str = "rpc") -> FilterMetrics:
        """One filter's counters, of checks by the daemon ("rpc") or by a copy ("replica")."""
        return FilterMetrics(self, name, via)


_of_registry: weakref.WeakKeyDictionary[CollectorRegistry, ClientMetrics] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class FilterMetrics:
    """One filter's children of the client metrics. A batch counts once, by its number of keys."""

    def __init__(self, metrics: ClientMetrics, name: str, via: str) -> None:
        self._name = name
        self._results = {result: metrics.checks.labels(name, result.value, via) for result in Result}
        self._reasons: dict[str, Counter] = {}
        self._fallbacks = metrics.fallbacks
        self._lost = metrics.lost.labels(name)
        self.observe_seconds = metrics.check_seconds.observe

    def count(self, result: Result, keys: int = 1) -> None:
        """Count ``keys`` checks of one result."""
        self._results[result].inc(keys)

    def count_fallback(self, reason: str, keys: int = 1) -> None:
        """Count ``keys`` checks that fell back for ``reason``."""
        self._results[Result.FALLBACK].inc(keys)
        child = self._reasons.get(reason)
        if child is None:
            child = self._reasons[reason] = self._fallbacks.labels(self._name, reason)
        child.inc(keys)

    def count_lost_outcomes(self, outcomes: int) -> None:
        """Count outcomes that will not be reported."""
        self._lost.inc(outcomes)
