"""A gate for your own tests: no daemon, no network, and failures when you ask for them.

    gate = FakeGate()
    gate.create("blocklist", 1000)
    filter = gate.client().filter("blocklist")
    filter.add("mango")
    assert filter.might_contain("mango")

    gate.fail_with(Unavailable())
    assert filter.might_contain("papaya")  # nobody could say: maybe

Filters are real Bloom filters of the kernel and errors are those of the daemon; nothing is durable.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from bloomgate.aio import AsyncClient
from bloomgate.client import Client
from bloomgate.errors import BloomgateError, ClientClosed
from bloomgate.fake import FakeVerbs
from bloomgate.fake_leases import FakeLeaseCall
from bloomgate.filters import BloomFilter, FilterSpec, HashScheme, OnFull
from bloomgate.metrics import ClientMetrics
from bloomgate.names import check_name
from bloomgate.options import ClientOptions
from bloomgate.transport import Done, LeaseCall, LeaseTransport, Method, Q, R
from bloomgate.v1 import filters_pb2 as pb


class Call(NamedTuple):
    """A call that reached the gate: the method's short name, as "MightContain", and the request."""

    method: str
    request: Any


class ReportedOutcomes(NamedTuple):
    """What callers reported for a filter."""

    found: int
    not_found: int
    false_no: int


@dataclass
class _Failure:
    error: Exception
    times: int | None
    method: str | None


class FakeGate:
    """An in-process gate. The limits are those that it enforces and tells its clients."""

    def __init__(
        self, *, keys_per_call: int = 10_000, bytes_per_key: int = 4096, bytes_per_call: int = 2**22
    ) -> None:
        self.calls: list[Call] = []
        """Every call that reached the gate, failed ones included, oldest first."""
        self._verbs = FakeVerbs(
            pb.Limits(
                keys_per_call=keys_per_call, bytes_per_key=bytes_per_key, bytes_per_call=bytes_per_call
            ),
            lambda: all(failure.method not in (None, "Lease") for failure in list(self._failures)),
        )
        self._failures: list[_Failure] = []
        self._lock = threading.Lock()

    def client(self, options: ClientOptions | None = None, metrics: ClientMetrics | None = None) -> Client:
        """A client of this gate."""
        return Client.over(_Calls(self), options=options, metrics=metrics)

    def async_client(
        self, options: ClientOptions | None = None, metrics: ClientMetrics | None = None
    ) -> AsyncClient:
        """An asyncio client of this gate."""
        return AsyncClient.over(_AsyncCalls(self), options=options, metrics=metrics)

    def create(
        self,
        name: str,
        capacity: int = 1000,
        error_rate: float = 0.01,
        *,
        on_full: OnFull | str = OnFull.GROW,
        hash_scheme: HashScheme = HashScheme.MURMUR3_X64_128,
        seed: int | None = None,
    ) -> BloomFilter:
        """Make a filter without a call, and return it: what is added to it is in."""
        check_name(name, "name")
        spec = FilterSpec.plan(capacity, error_rate, on_full=on_full, hash_scheme=hash_scheme, seed=seed)
        with self._lock:
            if name in self._verbs.entries:
                self._verbs.leases.end(self._verbs.entries[name].filter)
            entry = self._verbs.entries[name] = self._verbs.make(spec)
        self._verbs.leases.settled()
        return entry.filter

    def fail_with(self, error: Exception, times: int | None = None, method: str | None = None) -> None:
        """Fail the next ``times`` calls, or all until ``recover``; of one ``method``, as "Add", or of any."""
        with self._lock:
            self._failures.append(_Failure(error, times, method))

    def recover(self) -> None:
        """Fail no more."""
        with self._lock:
            self._failures.clear()

    def reseed(self, name: str) -> None:
        """As after a drop and a create: the filter is empty and hashes otherwise, so hash ids are stale."""
        with self._lock:
            entry = self._verbs.entry(name)
            old = entry.filter.spec
            fresh = FilterSpec.plan(
                old.capacity, old.error_rate, on_full=old.on_full, hash_scheme=old.hasher.scheme
            )
            self._verbs.entries[name] = self._verbs.make(fresh)
            self._verbs.leases.end(entry.filter)
        self._verbs.leases.settled(entry.filter)

    def outcomes(self, name: str) -> ReportedOutcomes:
        """What callers reported for a filter."""
        entry = self._verbs.entry(name)
        return ReportedOutcomes(entry.found, entry.not_found, entry.false_no)

    def answer(self, method: Method[Q, R], request: Q) -> R:
        """Record the call, and answer it or raise."""
        name = method.path.rpartition("/")[2]
        with self._lock:
            # A copy, as on a wire: the caller may use its request again.
            seen = method.request.FromString(request.SerializeToString())
            self.calls.append(Call(name, seen))
            self._fail_if_asked(name)
            reply: R = self._verbs.of_path[method.path](seen)  # type: ignore[assignment]
        # Without the lock: whoever has a copy may be waiting for it.
        self._verbs.leases.settled()
        return reply

    def lease(self, requests: Iterator[pb.LeaseRequest]) -> FakeLeaseCall:
        """Begin a stream of leases, or raise."""
        with self._lock:
            self.calls.append(Call("Lease", None))
            self._fail_if_asked("Lease")
        return FakeLeaseCall(self._verbs.leases, requests)

    def _fail_if_asked(self, name: str) -> None:
        for failure in self._failures:
            if failure.method in (None, name):
                if failure.times is not None:
                    failure.times -= 1
                    if failure.times <= 0:
                        self._failures.remove(failure)
                raise failure.error


class _Calls:
    """The gate as the transport of a blocking client."""

    def __init__(self, gate: FakeGate) -> None:
        self._gate = gate
        self._closed = False

    def unary(self, method: Method[Q, R], request: Q, timeout: float) -> R:  # noqa: ARG002
        """Answer at once."""
        if self._closed:
            raise ClientClosed
        return self._gate.answer(method, request)

    def begin(self, method: Method[Q, R], request: Q, timeout: float, done: Done) -> None:
        """Answer at once, and say how that went."""
        try:
            self.unary(method, request, timeout)
        except BloomgateError as error:
            done(error)
        else:
            done(None)

    def lease(self, requests: Iterator[pb.LeaseRequest]) -> LeaseCall:
        """Begin a stream of leases."""
        if self._closed:
            raise ClientClosed
        return self._gate.lease(requests)

    def close(self) -> None:
        """Answer no more."""
        self._closed = True


class _AsyncCalls:
    """The gate as the transport of an asyncio client."""

    def __init__(self, gate: FakeGate) -> None:
        self._calls = _Calls(gate)

    async def unary(self, method: Method[Q, R], request: Q, timeout: float) -> R:  # noqa: ASYNC109
        """Answer at once."""
        return self._calls.unary(method, request, timeout)

    def leases(self) -> LeaseTransport:
        """The same, for the thread that keeps leases."""
        return self._calls

    async def close(self) -> None:
        """Answer no more."""
        self._calls.close()
