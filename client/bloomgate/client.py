"""The blocking client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, ParamSpec, Self, TypeVar, overload

import grpc

from bloomgate.calls import FilterCalls
from bloomgate.endpoint import Endpoint, Tls
from bloomgate.errors import BloomgateError
from bloomgate.filters import HashScheme, Key, OnFull
from bloomgate.guard import Guard, guarded
from bloomgate.leasing import Leasing
from bloomgate.metrics import ClientMetrics
from bloomgate.names import check_name
from bloomgate.options import ClientOptions
from bloomgate.outcomes import Outcomes
from bloomgate.replies import Result
from bloomgate.session import Session
from bloomgate.stats import CreateResult, FilterStats
from bloomgate.steps import Deadline, run
from bloomgate.transport import GrpcTransport, Transport

if TYPE_CHECKING:
    from bloomgate.leased import ReplicaFilter

P = ParamSpec("P")
V = TypeVar("V")


class Client:
    """A client of one daemon. Any thread may use it, and so may a forked child; it connects when first used.

    ``token`` is sent with every call. ``tls`` is a ``Tls`` or gRPC channel credentials; without it nothing is
    encrypted. Raises ParameterError, a ValueError naming the field. Every call can raise BloomgateError,
    except checks and guards, which answer maybe unless ``options.on_error`` is "raise".
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        token: str | None = None,
        tls: Tls | grpc.ChannelCredentials | None = None,
        options: ClientOptions | None = None,
        metrics: ClientMetrics | None = None,
    ) -> None:
        options = options or ClientOptions()
        self._start(GrpcTransport(Endpoint.judge(target, token, tls, options)), options, metrics)

    def _start(self, transport: Transport, options: ClientOptions, metrics: ClientMetrics | None) -> None:
        self._transport = transport
        self._session = Session(options, metrics or ClientMetrics.in_registry())
        self._filters: dict[tuple[str, bool], Filter] = {}
        self._leasing = Leasing(lambda: transport, self._session)

    @classmethod
    def over(
        cls,
        transport: Transport,
        *,
        options: ClientOptions | None = None,
        metrics: ClientMetrics | None = None,
    ) -> Self:
        """A client over another transport, as ``bloomgate.testing`` makes it."""
        self = cls.__new__(cls)
        self._start(transport, options or ClientOptions(), metrics)
        return self

    @overload
    def filter(self, name: str, *, replica: Literal[False] = False) -> Filter: ...

    @overload
    def filter(self, name: str, *, replica: Literal[True]) -> ReplicaFilter: ...

    def filter(self, name: str, *, replica: bool = False) -> Filter:
        """The handle of a filter, whether it exists or not; the same one each time.

        With ``replica`` it answers from a copy in this process, under a lease, and is a context manager that
        gives the copy up. Raises InvalidRequest if no filter can have that name.
        """
        found = self._filters.get((name, replica))
        if found is None:
            made = self._replica_filter(check_name(name)) if replica else self._plain_filter(check_name(name))
            # The first of two threads makes it.
            found = self._filters.setdefault((name, replica), made)
        return found

    def _plain_filter(self, name: str) -> Filter:
        return Filter(FilterCalls(self._session, name), self._transport, self._session.options)

    def _replica_filter(self, name: str) -> Filter:
        # Here, because it is built on this module.
        from bloomgate.leased import ReplicaFilter

        copy = self._leasing.replica(name)
        calls = FilterCalls(self._session, name, copy)
        return ReplicaFilter(calls, self._transport, self._session.options, self._leasing, copy)

    def create_filter(
        self,
        name: str,
        capacity: int,
        error_rate: float = 0.01,
        *,
        on_full: OnFull | str = OnFull.GROW,
        hash_scheme: HashScheme = HashScheme.MURMUR3_X64_128,
        seed: int | None = None,
        key_format: str = "",
    ) -> CreateResult:
        """Create a filter for ``capacity`` keys at ``error_rate``; an equal one that exists is as good.

        Raises FilterExists naming the field in which an existing one differs, and ParameterError or
        InvalidRequest, both ValueErrors, naming a field that is not acceptable.
        """
        steps = self._session.create_filter(
            name, capacity, error_rate, on_full, hash_scheme, seed, key_format
        )
        return run(steps, self._transport)

    def list_filters(self) -> list[FilterStats]:
        """Every filter, by name."""
        return run(self._session.list_filters(), self._transport)

    def drop_filter(self, name: str) -> None:
        """Drop a filter for good. Raises FilterNotFound."""
        run(self._session.drop_filter(name), self._transport)

    def snapshot_filter(self, name: str) -> FilterStats:
        """Write a snapshot now; returns once it is recorded. Raises FilterNotFound, NotForThisState."""
        return run(self._session.snapshot_filter(name), self._transport)

    def health(self, timeout: float = 1.0) -> str:
        """What the daemon says of itself: "SERVING", "NOT_SERVING" ... Raises if it says nothing."""
        return run(self._session.health(timeout), self._transport)

    def ping(self, timeout: float = 1.0) -> bool:
        """Whether the daemon says within ``timeout`` seconds that it serves."""
        try:
            return self.health(timeout) == "SERVING"
        except BloomgateError:
            return False

    def close(self) -> None:
        """Report the guards' last outcomes, ``report_timeout`` in all at most, then end what is under way.

        Later checks answer maybe, and so do those that wait for an answer now; all else raises ClientClosed.
        """
        options = self._session.options
        outcomes = [each._outcomes for each in list(self._filters.values())]
        for each in outcomes:
            each.report_rest()
        deadline = Deadline(options.clock, options.report_timeout)
        self._leasing.close(max(0.0, deadline.left()))
        for each in outcomes:
            each.wait(deadline.left())
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Filter:
    """A filter of the daemon, got from ``Client.filter``."""

    def __init__(self, calls: FilterCalls, transport: Transport, options: ClientOptions) -> None:
        self.name = calls.name
        self._calls = calls
        self._transport = transport
        self._options = options
        self._outcomes = Outcomes(calls, transport, options)

    def might_contain(self, key: Key) -> bool:
        """False: ``key`` is certainly not there, skip the lookup. True: it may be, or nobody could say."""
        return run(self._calls.check(key), self._transport) is not Result.SKIP

    def might_contain_many(self, keys: Iterable[Key]) -> list[bool]:
        """``might_contain`` of each key, in order, in few calls."""
        results = run(self._calls.check_many(keys), self._transport)
        skip = Result.SKIP
        return [result is not skip for result in results]

    def add(self, key: Key) -> bool:
        """Add a key, durably. True: it was certainly not there before. False: it may have been.

        Add before the authority's transaction commits: in the other order a crash in between leaves a key
        that the authority holds and the filter denies. Raises InvalidKey, or BloomgateError if no attempt
        within the deadline was acknowledged; the key may be in all the same, and adding it again is harmless.
        """
        return run(self._calls.add(key), self._transport)

    def add_many(self, keys: Iterable[Key]) -> list[bool]:
        """``add`` of each key, in order, in few calls. If it raises, some of the keys may be in."""
        return run(self._calls.add_many(keys), self._transport)

    def stats(self) -> FilterStats:
        """What the filter is, how full it is and what it saved. Raises FilterNotFound."""
        return run(self._calls.stats(), self._transport)

    def report_outcomes(self, *, found: int = 0, not_found: int = 0, false_no: int = 0) -> None:
        """Tell the daemon what the authority said after hits, and after noes that were audited."""
        run(self._calls.report_outcomes(found, not_found, false_no), self._transport)

    def flush_outcomes(self) -> None:
        """Report what the guards counted and have not reported yet. Waits ``report_timeout`` at most."""
        self._outcomes.flush()

    def guard(
        self,
        lookup: Callable[[Key], V],
        absent: V | None = None,
        audit: float = 0.0,
        lookup_many: Callable[[list[Key]], Sequence[V | None]] | None = None,
    ) -> Guard[V]:
        """A ``lookup`` that is skipped on a definite no: ``guard(key)`` is then ``absent``.

        A result that is ``absent`` counts as not found. ``audit`` is the share of the noes to look up all the
        same: one that is found is logged as an error and returned. ``lookup_many`` serves ``guard.many``.
        """
        return self._guard(lookup, absent, audit, lookup_many)

    def guarded(
        self,
        absent: V | None = None,
        audit: float = 0.0,
        key: Callable[P, Key] | None = None,
    ) -> Callable[[Callable[P, V]], Callable[P, V | None]]:
        """``guard`` as a decorator. ``key`` makes the key of the arguments, as they are passed.

        Without it the key is the argument of the function's first parameter, by place, by name or by
        default. Raises TypeError where there is none or it is ``self`` or ``cls``: a method needs ``key``.
        The function's ``guard`` attribute can flush.
        """
        return guarded(lambda function: self._guard(function, absent, audit, None), key)

    def _guard(
        self,
        lookup: Callable[..., V],
        absent: V | None,
        audit: float,
        lookup_many: Callable[[list[Key]], Sequence[V | None]] | None,
    ) -> Guard[V]:
        return Guard(
            self._calls,
            self._transport,
            self._outcomes,
            self._options,
            lookup,
            absent,
            audit,
            lookup_many,
        )

    def __repr__(self) -> str:
        return f"<Filter {self.name}>"
