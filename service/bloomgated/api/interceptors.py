"""What every call passes, outermost first: observe, translate errors, authenticate, bound, parse, authorize.

They wrap the handlers when these are registered. grpc.aio's own interceptors would do the same work with a
coroutine and a handler object more per interceptor and call, which is a measurable part of a unary call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from bloomgate import errors, wire
from bloomgated.api.errors import RETRY_AFTER, translate
from bloomgated.turn import LARGE_BYTES, Turn

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Any], Awaitable[Any]]
"""A request and, outside ``authenticated``, the context; inside it, the Principal that calls."""
Observer = Callable[[str, float], None]

# By both forms in which grpc.aio gives back the code of an abort.
_CODE_NAMES: dict[object, str] = {
    form: code.name for code in grpc.StatusCode for form in (code, code.value[0])
}


class Bound:
    """How much may be under way at once. Health checks do not pass here: they always answer."""

    def __init__(self, what: str, most: int, most_bytes: int = 0) -> None:
        """``what`` is under way, in the words of the message; ``most_bytes`` 0: any."""
        self._what = what
        self._most, self._most_bytes = most, most_bytes
        self._idle = asyncio.Event()
        self._idle.set()
        self.under_way = self.bytes = 0

    @contextmanager
    def hold(self, size: int = 0) -> Iterator[None]:
        """Count one of ``size`` bytes as under way. Raises Overloaded where that would be too much."""
        if self.under_way >= self._most:
            raise errors.Overloaded(
                RETRY_AFTER, f"{self._most} {self._what} are under way, the most there may be"
            )
        # One alone is always taken, or it could never be.
        if self._most_bytes and self.under_way and self.bytes + size > self._most_bytes:
            raise errors.Overloaded(
                RETRY_AFTER,
                f"{self._what} with {self.bytes} bytes are under way, {self._most_bytes} may be",
            )
        self.under_way += 1
        self.bytes += size
        self._idle.clear()
        try:
            yield
        finally:
            self.under_way -= 1
            self.bytes -= size
            if not self.under_way:
                self._idle.set()

    def wrap(self, handler: Handler) -> Handler:
        """``handler`` of raw requests, refused with Overloaded while too much is under way."""

        async def bounded(data: Any, caller: Any) -> Any:
            with self.hold(len(data)):
                return await handler(data, caller)

        return bounded

    async def idle(self) -> None:
        """Return once nothing is under way."""
        await self._idle.wait()


def parsed(handler: Handler, parse: Callable[[bytes], Any], turn: Turn) -> Handler:
    """``handler``, given the request that bytes stand for.

    Here and not by gRPC, which answers bytes that are none with an exception's text, and parses all calls
    that wait before the first of them is judged. A large one when it is its turn.
    """

    async def parsing(data: Any, caller: Any) -> Any:
        if len(data) > LARGE_BYTES:
            async with turn.taken():
                return await work(data, caller)
        return await work(data, caller)

    async def work(data: Any, caller: Any) -> Any:
        return await handler(request_of(data, parse), caller)

    return parsing


def request_of(data: bytes, parse: Callable[[bytes], Any]) -> Any:
    """The request that bytes stand for. Raises InvalidRequest."""
    try:
        return parse(data)
    except DecodeError:
        raise errors.InvalidRequest("request", "the request is not a message of this call") from None


def translated(handler: Handler) -> Handler:
    """``handler``, whose exceptions become a status code, a message and details."""

    async def translating(request: Any, context: Context) -> Any:
        try:
            return await handler(request, context)
        except Exception as raised:
            return await refuse(context, raised)

    return translating


async def refuse(context: Context, raised: Exception) -> None:
    """End a call with the status, message and details of an exception."""
    code, message, details = wire.encode(translate(raised))
    await context.abort(code, message, trailing_metadata=((wire.DETAILS_KEY, details),))


def observed(handler: Handler, started: Callable[[], None], handled: Observer) -> Handler:
    """``handler``, each call of which is counted as it starts, and with code and seconds as it ends."""

    async def observing(request: Any, context: Context) -> Any:
        started()
        began = time.perf_counter()
        code = "OK"
        try:
            return await handler(request, context)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except BaseException:
            code = _CODE_NAMES.get(context.code(), "UNKNOWN")
            raise
        finally:
            handled(code, time.perf_counter() - began)

    return observing
