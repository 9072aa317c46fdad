"""How a request reaches the gate: a small port, and gRPC behind it.

The port knows one thing, a unary call: request and timeout in, reply out, or a BloomgateError. The library
speaks to nothing else, so ``bloomgate.testing`` can stand in for a daemon.

One channel per process, made when it is first used. A forked child never touches its parent's: two processes
on one connection would read each other's replies. It makes its own, which works where grpcio carries over a
fork: by default in current versions, with ``GRPC_ENABLE_FORK_SUPPORT=1`` in older ones. With ``=0`` calls of
a child never return, not even at their deadline, so there they are refused instead (a check then answers
maybe). ``AsyncClient`` cannot cross a fork while its loop runs; a loop that the child starts has its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from bloomgate.endpoint import Endpoint
from bloomgate.errors import BloomgateError, ClientClosed, Unavailable
from bloomgate.wire import DETAILS_KEY, decode

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)
Done = Callable[[BloomgateError | None], None]


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """One unary method: its path ``/package.Service/Name`` and the types of its messages."""

    path: str
    request: type[Q]
    response: type[R]


class Transport(Protocol):
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


def _check_fork_support() -> None:
    if os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "1").lower() in ("0", "false", "no"):
        raise Unavailable("this process was forked after gRPC was used, and gRPC's fork support is off")


class GrpcTransport:
    """Calls over one ``grpc.Channel`` per process. Any thread may call."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._closed = False
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._channel: grpc.Channel | None = None
        self._calls: dict[str, Any] = {}

    def _callable(self, method: Method[Q, R]) -> Any:
        if self._closed:
            raise ClientClosed
        if self._pid != os.getpid():
            self._leave_to_parent()
        call = self._calls.get(method.path)
        if call is None:
            with self._lock:
                if self._channel is None:
                    self._channel = _open(grpc, self._endpoint)
                call = self._calls[method.path] = _bind(self._channel, method)
        return call

    def _leave_to_parent(self) -> None:
        if self._channel is not None:
            _check_fork_support()
            # Kept for good: closing it would speak on the parent's connection, and so may its end.
            _LEFT_TO_PARENT.append((self._channel, self._calls))
        self._forget()

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

    def close(self) -> None:
        """End what is under way. Later calls raise ClientClosed."""
        self._closed = True
        if self._pid == os.getpid():
            with self._lock:
                channel, self._channel = self._channel, None
                self._calls = {}
            if channel is not None:
                channel.close()


# Channels that a forked child must neither use nor close.
_LEFT_TO_PARENT: list[object] = []


def _open(module: Any, endpoint: Endpoint) -> Any:
    """A channel of ``grpc`` or ``grpc.aio``. Nothing connects yet."""
    if endpoint.credentials is None:
        return module.insecure_channel(endpoint.target, endpoint.options)
    return module.secure_channel(endpoint.target, endpoint.credentials, endpoint.options)


def _bind(channel: Any, method: Method[Q, R]) -> Any:
    return channel.unary_unary(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.response.FromString,
    )


class GrpcAsyncTransport:
    """Calls over one ``grpc.aio.Channel`` per running event loop, made when the loop first calls."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._closed = False
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._of_loop: dict[asyncio.AbstractEventLoop, tuple[grpc.aio.Channel, dict[str, Any]]] = {}

    def _callable(self, method: Method[Q, R]) -> Any:
        if self._closed:
            raise ClientClosed
        if self._pid != os.getpid():
            if self._of_loop:
                _check_fork_support()
                _LEFT_TO_PARENT.append(self._of_loop)
            self._forget()
        loop = asyncio.get_running_loop()
        bound = self._of_loop.get(loop)
        if bound is None:
            for other in [each for each in self._of_loop if each.is_closed()]:
                del self._of_loop[other]
            bound = self._of_loop[loop] = (_open(grpc.aio, self._endpoint), {})
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
        return reply

    async def close(self) -> None:
        """End what is under way. Later calls raise ClientClosed."""
        self._closed = True
        if self._pid == os.getpid():
            bound = self._of_loop.pop(asyncio.get_running_loop(), None)
            if bound is not None:
                await bound[0].close(None)
