"""The asyncio client: the verbs of ``client`` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, ParamSpec, Self, TypeVar, overload

import grpc

from bloomgate.calls import FilterCalls
from bloomgate.endpoint import Endpoint, Tls
from bloomgate.errors import BloomgateError
from bloomgate.filters import HashScheme, Key, OnFull
from bloomgate.guard import AsyncGuard, async_guarded
from bloomgate.leasing import Leasing
from bloomgate.metrics import ClientMetrics
from bloomgate.names import check_name
from bloomgate.options import ClientOptions
from bloomgate.outcomes import AsyncOutcomes
from bloomgate.replies import Result
from bloomgate.session import Session
from bloomgate.stats import CreateResult, FilterStats
from bloomgate.steps import run_async
from bloomgate.transport import AsyncTransport, GrpcAsyncTransport

if TYPE_CHECKING:
    from bloomgate.leased import AsyncReplicaFilter

P = ParamSpec("P")
V = TypeVar("V")


class AsyncClient:
    """A client of one daemon, with a connection for each event loop that uses it, made when first used.

    ``token`` is sent with every call. ``tls`` is a ``Tls`` or gRPC channel credentials; without it nothing is
    encrypted. Raises ParameterError, a ValueError naming the field. Every call can raise BloomgateError,
    except checks and guards, which answer maybe unless ``options.on_error`` is "raise". A cancellation is
    never an answer: it passes.
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
        self._start(GrpcAsyncTransport(Endpoint.judge(target, token, tls, options)), options, metrics)

    def _start(
        self, transport: AsyncTransport, options: ClientOptions, metrics: ClientMetrics | None
    ) -> None:
        self._transport = transport
        self._session = Session(options, metrics or ClientMetrics.in_registry())
        self._filters: dict[tuple[str, bool], AsyncFilter] = {}
        self._leasing = Leasing(lambda: transport.leases(), self._session)

    @classmethod
    def over(
        cls,
        transport: AsyncTransport,
        *,
        options: ClientOptions | None = None,
        metrics: ClientMetrics | None = None,
    ) -> Self:
        """A client over another transport, as ``bloomgate.testing`` makes it."""
        self = cls.__new__(cls)
        self._start(transport, options or ClientOptions(), metrics)
        return self

    @overload
    def filter(self, name: str, *, replica: Literal[False] = False) -> AsyncFilter: ...

    @overload
    def filter(self, name: str, *, replica: Literal[True]) -> AsyncReplicaFilter: ...

    def filter(self, name: str, *, replica: bool = False) -> AsyncFilter:
        """The handle of a filter, whether it exists or not; the same one each time.

        With ``replica`` it answers from a copy in this process, under a lease, and is a context manager that
        gives the copy up. Raises InvalidRequest if no filter can have that name.
        """
        found = self._filters.get((name, replica))
        if found is None:
            made = self._replica_filter(check_name(name)) if replica else self._plain_filter(check_name(name))
            # A loop has one thread, but a client may serve loops in several.
            found = self._filters.setdefault((name, replica), made)
        return found

    def _plain_filter(self, name: str) -> AsyncFilter:
        return AsyncFilter(FilterCalls(self._session, name), self._transport, self._session.options)

    def _replica_filter(self, name: str) -> AsyncFilter:
        # Here, because it is built on this module.
        from bloomgate.leased import AsyncReplicaFilter

        copy = self._leasing.replica(name)
        calls = FilterCalls(self._session, name, copy)
        return AsyncReplicaFilter(calls, self._transport, self._session.options, self._leasing, copy)

    async def create_filter(
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
        return await run_async(steps, self._transport)

    async def list_filters(self) -> list[FilterStats]:
        """Every filter, by name."""
        return await run_async(self._session.list_filters(), self._transport)

    async def drop_filter(self, name: str) -> None:
        """Drop a filter for good. Raises FilterNotFound."""
        await run_async(self._session.drop_filter(name), self._transport)

    async def snapshot_filter(self, name: str) -> FilterStats:
        """Write a snapshot now; returns once it is recorded. Raises FilterNotFound, NotForThisState."""
        return await run_async(self._session.snapshot_filter(name), self._transport)

    async def health(self, timeout: float = 1.0) -> str:  # noqa: ASYNC109
        """What the daemon says of itself: "SERVING", "NOT_SERVING" ... Raises if it says nothing."""
        return await run_async(self._session.health(timeout), self._transport)

    async def ping(self, timeout: float = 1.0) -> bool:  # noqa: ASYNC109
        """Whether the daemon says within ``timeout`` seconds that it serves."""
        try:
            return await self.health(timeout) == "SERVING"
        except BloomgateError:
            return False

    async def close(self) -> None:
        """Report the guards' last outcomes, ``report_timeout`` in all at most, then end what is under way.

        Later checks answer maybe, and so do those that wait for an answer now; all else raises ClientClosed.
        Where the client served several loops: this one's connection is closed on return, those of loops that
        run in other threads are told to close, and a loop that does not run keeps its own until it is gone.
        """
        options = self._session.options
        reports = []
        for each in list(self._filters.values()):
            each._outcomes.report_rest()
            reports += each._outcomes.under_way()
        if reports:
            await asyncio.wait(reports, timeout=options.report_timeout)
        if self._leasing.is_running:
            await asyncio.to_thread(self._leasing.close, options.report_timeout)
        self._leasing.close(0.0)
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncFilter:
    """A filter of the daemon, got from ``AsyncClient.filter``."""

    def __init__(self, calls: FilterCalls, transport: AsyncTransport, options: ClientOptions) -> None:
        self.name = calls.name
        self._calls = calls
        self._transport = transport
        self._options = options
        self._outcomes = AsyncOutcomes(calls, transport, options)

    async def might_contain(self, key: Key) -> bool:
        """False: ``key`` is certainly not there, skip the lookup. True: it may be, or nobody could say."""
        return await run_async(self._calls.check(key), self._transport) is not Result.SKIP

    async def might_contain_many(self, keys: Iterable[Key]) -> list[bool]:
        """``might_contain`` of each key, in order, in few calls."""
        results = await run_async(self._calls.check_many(keys), self._transport)
        skip = Result.SKIP
        return [result is not skip for result in results]

    async def add(self, key: Key) -> bool:
        """Add a key, durably. True: it was certainly not there before. False: it may have been.

        Add before the authority's transaction commits: in the other order a crash in between leaves a key
        that the authority holds and the filter denies. Raises InvalidKey, or BloomgateError if no attempt
        within the deadline was acknowledged; the key may be in all the same, and adding it again is harmless.
        """
        return await run_async(self._calls.add(key), self._transport)

    async def add_many(self, keys: Iterable[Key]) -> list[bool]:
        """``add`` of each key, in order, in few calls. If it raises, some of the keys may be in."""
        return await run_async(self._calls.add_many(keys), self._transport)

    async def stats(self) -> FilterStats:
        """What the filter is, how full it is and what it saved. Raises FilterNotFound."""
        return await run_async(self._calls.stats(), self._transport)

    async def report_outcomes(self, *, found: int = 0, not_found: int = 0, false_no: int = 0) -> None:
        """Tell the daemon what the authority said after hits, and after noes that were audited."""
        await run_async(self._calls.report_outcomes(found, not_found, false_no), self._transport)

    async def flush_outcomes(self) -> None:
        """Report what the guards counted and have not reported yet. Waits ``report_timeout`` at most."""
        await self._outcomes.flush()

    def guard(
        self,
        lookup: Callable[[Key], Awaitable[V]],
        absent: V | None = None,
        audit: float = 0.0,
        lookup_many: Callable[[list[Key]], Awaitable[Sequence[V | None]]] | None = None,
    ) -> AsyncGuard[V]:
        """An async ``lookup`` that is skipped on a definite no: ``await guard(key)`` is then ``absent``.

        A result that is ``absent`` counts as not found. ``audit`` is the share of the noes to look up all the
        same: one that is found is logged as an error and returned. ``lookup_many`` serves ``guard.many``.
        """
        return self._guard(lookup, absent, audit, lookup_many)

    def guarded(
        self,
        absent: V | None = None,
        audit: float = 0.0,
        key: Callable[P, Key] | None = None,
    ) -> Callable[[Callable[P, Awaitable[V]]], Callable[P, Awaitable[V | None]]]:
        """``guard`` as a decorator. ``key`` makes the key of the arguments, as they are passed.

        Without it the key is the argument of the function's first parameter, by place, by name or by
        default. Raises TypeError where there is none or it is ``self`` or ``cls``: a method needs ``key``.
        The function's ``guard`` attribute can flush.
        """
        return async_guarded(lambda function: self._guard(function, absent, audit, None), key)

    def _guard(
        self,
        lookup: Callable[..., Awaitable[V]],
        absent: V | None,
        audit: float,
        lookup_many: Callable[[list[Key]], Awaitable[Sequence[V | None]]] | None,
    ) -> AsyncGuard[V]:
        return AsyncGuard(
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
        return f"<AsyncFilter {self.name}>"
