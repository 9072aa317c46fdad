"""How a request reaches the gate: a small port, and gRPC behind it.

The port knows one thing, a unary call: request and timeout in, reply out, or a BloomgateError. The library
speaks to nothing else, so ``bloomgate.testing`` can stand in for a daemon.

One channel per process, made when it is first used. A forked child never touches its parent's: two processes
on one connection would read each other's replies. It makes its own, which works where grpcio carries over a
fork: by default in current versions, with ``GRPC_ENABLE_FORK_SUPPORT=1`` in older ones. With ``=0`` calls of
a child whose parent used gRPC never return, not even at their deadline, whichever client makes them. So there
they are refused instead (ForkNotSupported; a check then answers maybe): in every child that was forked after
any client of this library had opened a channel. What else in the process uses gRPC is not seen.
``AsyncClient`` cannot cross a fork while its loop runs; a loop that the child starts has its own channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue, UInt32Value

from bloomgate.endpoint import Endpoint
from bloomgate.errors import BloomgateError, ClientClosed, ForkNotSupported
from bloomgate.processes import OfProcess, this_process
from bloomgate.v1 import admin_pb2 as admin
from bloomgate.v1 import filters_pb2 as pb
from bloomgate.wire import DETAILS_KEY, decode

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
Done = Callable[[BloomgateError | None], None]
_OFF = ("0", "false", "no")


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """One unary method: its path ``/package.Service/Name`` and the types of its messages."""

    path: str
    request: type[Q]
    response: type[R]


_FILTERS = "/bloomgate.v1.FilterService/"
_ADMIN = "/bloomgate.v1.AdminService/"

ADD = Method(_FILTERS + "Add", pb.AddRequest, pb.AddResponse)
MIGHT_CONTAIN = Method(_FILTERS + "MightContain", pb.MightContainRequest, pb.MightContainResponse)
STATS = Method(_FILTERS + "Stats", pb.StatsRequest, pb.StatsResponse)
REPORT_OUTCOMES = Method(_FILTERS + "ReportOutcomes", pb.ReportOutcomesRequest, pb.ReportOutcomesResponse)
# The one that is no unary call.
LEASE: Method[pb.LeaseRequest, pb.LeaseResponse] = Method(
    _FILTERS + "Lease", pb.LeaseRequest, pb.LeaseResponse
)
HASH_SPEC = Method(_FILTERS + "HashSpec", pb.HashSpecRequest, pb.HashSpecResponse)

CREATE_FILTER = Method(_ADMIN + "CreateFilter", admin.CreateFilterRequest, admin.CreateFilterResponse)
LIST_FILTERS = Method(_ADMIN + "ListFilters", admin.ListFiltersRequest, admin.ListFiltersResponse)
DROP_FILTER = Method(_ADMIN + "DropFilter", admin.DropFilterRequest, admin.DropFilterResponse)
SNAPSHOT_FILTER = Method(_ADMIN + "SnapshotFilter", admin.SnapshotFilterRequest, admin.SnapshotFilterResponse)

# HealthCheckRequest is one string and HealthCheckResponse one enum, both field 1, which on the wire is what
# these two are: so the client needs no health package.
HEALTH = Method("/grpc.health.v1.Health/Check", StringValue, UInt32Value)


class LeaseCall(Protocol):
    """A stream of leases. Iterating gives what the daemon sends; every failure is a BloomgateError."""

    def __iter__(self) -> Iterator[pb.LeaseResponse]:
        """What the daemon sends, until it ends the stream."""

    def cancel(self) -> None:
        """End it at once. Any thread may."""


class LeaseTransport(Protocol):
    """The port of leases, for the thread that keeps them."""

    def lease(self, requests: Iterator[pb.LeaseRequest]) -> LeaseCall:
        """Begin a stream; ``requests`` is iterated in another thread. Raises BloomgateError."""

    def close(self) -> object:
        """End what is under way. Later calls raise ClientClosed."""


class Transport(LeaseTransport, Protocol):
    """The port of a blocking client. Every failure is a BloomgateError."""

    def unary(self, method: Method[Q, R], request: Q, timeout: float) -> R:
        """Call and wait for the reply, ``timeout`` seconds at most."""

    def begin(self, method: Method[Q, R], request: Q, timeout: float, done: Done) -> None:
        """Call without waiting. ``done`` gets None or the error, once, on whatever thread."""

    def close(self) -> None:
        """End what is under way. Later calls raise ClientClosed."""


class AsyncTransport(Protocol):
    """The port of an asyncio client. Every failure is a BloomgateError."""

    async def unary(self, method: Method[Q, R], request: Q, timeout: float) -> R:  # noqa: ASYNC109
        """Call and wait for the reply, ``timeout`` seconds at most."""

    def leases(self) -> LeaseTransport:
        """For leases, which have a thread of their own and no loop."""

    async def close(self) -> None:
        """End what is under way. Later calls raise ClientClosed."""


def _translate(error: Any, closed: bool) -> BloomgateError:
    """A BloomgateError for what grpc raised: RpcError of a sync call or AioRpcError."""
    code = error.code()
    if closed and code is grpc.StatusCode.CANCELLED:
        return ClientClosed()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            return decode(code, error.details() or "", value)
    return decode(code, error.details() or "")


def _open(module: Any, endpoint: Endpoint) -> Any:
    """A channel of ``grpc`` or ``grpc.aio``. Nothing connects yet. Raises ForkNotSupported."""
    process = this_process()
    if process.inherited_grpc and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower() in _OFF:
        raise ForkNotSupported
    process.used_grpc = True
    if endpoint.credentials is None:
        return module.insecure_channel(endpoint.target, endpoint.options)
    return module.secure_channel(endpoint.target, endpoint.credentials, endpoint.options)


def _bind(channel: Any, method: Method[Q, R]) -> Any:
    kind = channel.stream_stream if method is LEASE else channel.unary_unary
    return kind(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.response.FromString,
    )


class _Bound:
    """A channel, once there is one, and what calls its methods."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.channel: grpc.Channel | None = None
        self.calls: dict[str, Any] = {}


class _GrpcLeaseCall:
    """A stream of gRPC's."""

    def __init__(self, call: Any, is_closed: Callable[[], bool]) -> None:
        self._call, self._is_closed = call, is_closed

    def __iter__(self) -> Iterator[pb.LeaseResponse]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise _translate(error, self._is_closed()) from None

    def cancel(self) -> None:
        """End it at once."""
        self._call.cancel()


class GrpcTransport:
    """Calls over one ``grpc.Channel`` per process. Any thread may call."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._closed = False
        self._bound = OfProcess(_Bound)

    def _callable(self, method: Method[Q, R]) -> Any:
        bound = self._bound.get()
        call = bound.calls.get(method.path)
        if call is None or self._closed:
            with bound.lock:
                if self._closed:
                    raise ClientClosed
                if bound.channel is None:
                    bound.channel = _open(grpc, self._endpoint)
                call = bound.calls[method.path] = _bind(bound.channel, method)
        return call

    def unary(self, method: Method[Q, R], request: Q, timeout: float) -> R:
        """Call and wait for the reply, ``timeout`` seconds at most."""
        call = self._callable(method)
        try:
            reply: R = call(request, timeout=timeout, metadata=self._endpoint.metadata)
        except grpc.RpcError as error:
            raise _translate(error, self._closed) from None
        except ValueError:
            # What grpc says about a channel that was closed meanwhile.
            raise ClientClosed from None
        return reply

    def begin(self, method: Method[Q, R], request: Q, timeout: float, done: Done) -> None:
        """Call without waiting. ``done`` gets None or the error, once, on whatever thread."""
        try:
            future = self._callable(method).future(request, timeout=timeout, metadata=self._endpoint.metadata)
        except BloomgateError as error:
            done(error)
        except ValueError:
            done(ClientClosed())
        else:
            future.add_done_callback(
                lambda call: done(
                    None if call.code() is grpc.StatusCode.OK else _translate(call, self._closed)
                )
            )

    def lease(self, requests: Iterator[pb.LeaseRequest]) -> LeaseCall:
        """Begin a stream; ``requests`` is iterated in another thread. Raises BloomgateError."""
        try:
            call = self._callable(LEASE)(requests, metadata=self._endpoint.metadata)
        except ValueError:
            raise ClientClosed from None
        return _GrpcLeaseCall(call, lambda: self._closed)

    def close(self) -> None:
        """End what is under way. Later calls raise ClientClosed."""
        self._closed = True
        bound = self._bound.get()
        with bound.lock:
            channel, bound.channel = bound.channel, None
            bound.calls = {}
        if channel is not None:
            channel.close()


class _Loops:
    """The channel of each event loop, and what calls its methods. Loops may run in several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of_loop: dict[asyncio.AbstractEventLoop, tuple[grpc.aio.Channel, dict[str, Any]]] = {}
        # A loop holds its tasks weakly.
        self.closing: set[asyncio.Task[None]] = set()


class GrpcAsyncTransport:
    """Calls over one ``grpc.aio.Channel`` per running event loop, made when the loop first calls."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._closed = False
        self._loops = OfProcess(_Loops)
        self._blocking = GrpcTransport(endpoint)

    def _callable(self, method: Method[Q, R]) -> Any:
        if self._closed:
            raise ClientClosed
        loops = self._loops.get()
        loop = asyncio.get_running_loop()
        bound = loops.of_loop.get(loop)
        if bound is None:
            with loops.lock:
                if self._closed:
                    raise ClientClosed
                for other in [each for each in loops.of_loop if each.is_closed()]:
                    del loops.of_loop[other]
                bound = loops.of_loop[loop] = (_open(grpc.aio, self._endpoint), {})
        channel, calls = bound
        call = calls.get(method.path)
        if call is None:
            call = calls[method.path] = _bind(channel, method)
        return call

    async def unary(self, method: Method[Q, R], request: Q, timeout: float) -> R:  # noqa: ASYNC109
        """Call and wait for the reply, ``timeout`` seconds at most."""
        call = self._callable(method)
        try:
            reply: R = await call(request, timeout=timeout, metadata=self._endpoint.metadata)
        except grpc.RpcError as error:
            raise _translate(error, self._closed) from None
        except grpc.aio.UsageError:
            raise ClientClosed from None
        except asyncio.CancelledError:
            # A channel that is closed cancels its calls: that is not a cancellation of who waits for them.
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise ClientClosed from None
            raise
        return reply

    def leases(self) -> LeaseTransport:
        """For leases, which have a thread of their own and no loop: another connection."""
        return self._blocking

    async def close(self) -> None:
        """End what is under way. Later calls raise ClientClosed.

        The channel of the running loop is closed on return. Those of loops that run in other threads are told
        to close and not waited for; that of a loop that does not run is let go, and what waits there stays.
        """
        self._closed = True
        self._blocking.close()
        loops = self._loops.get()
        with loops.lock:
            of_loop, loops.of_loop = loops.of_loop, {}
        own = of_loop.pop(asyncio.get_running_loop(), None)
        for loop, (channel, _) in of_loop.items():
            # A loop that is closed, now or meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_close_there, loop, channel, loops.closing)
        if own is not None:
            await own[0].close(None)


def _close_there(
    loop: asyncio.AbstractEventLoop, channel: grpc.aio.Channel, closing: set[asyncio.Task[None]]
) -> None:
    task = loop.create_task(channel.close(None))
    closing.add(task)
    task.add_done_callback(closing.discard)
