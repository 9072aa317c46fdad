"""What every call passes, outermost first: observe, translate errors, bound, parse.

They wrap the handlers when these are registered. grpc.aio's own interceptors would do the same work with a
coroutine and a handler object more per interceptor and call, which is a measurable part of a unary call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from bloomgate import errors, wire
from bloomgated.api.errors import RETRY_AFTER, translate

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Awaitable[Any]]
Observer = Callable[[str, float], None]

# By both forms in which grpc.aio gives back the code of an abort.
_CODE_NAMES: dict[object, str] = {
    form: code.name for code in grpc.StatusCode for form in (code, code.value[0])
}


class Bound:
    """How many unary calls may be under way at once. Health checks do not pass here: they always answer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle = asyncio.Event()
        self._idle.set()
        self.under_way = 0

    def wrap(self, handler: Handler) -> Handler:
        """``handler``, refused with Overloaded while too many calls are under way."""

        async def bounded(request: Any, context: Context) -> Any:
            if self.under_way >= self._most:
                raise errors.Overloaded(
                    RETRY_AFTER, f"{self._most} calls are under way, the most there may be"
                )
            self.under_way += 1
            self._idle.clear()
            try:
                return await handler(request, context)
            finally:
                self.under_way -= 1
                if not self.under_way:
                    self._idle.set()

        return bounded

    async def idle(self) -> None:
        """Return once no call is under way."""
        await self._idle.wait()


def parsed(handler: Handler, parse: Callable[[bytes], Any]) -> Handler:
    """``handler``, given the request that bytes stand for.

    Here and not by gRPC, which answers bytes that are none with an exception's text, and parses all calls
    that wait before the first of them is judged.
    """

    async def parsing(data: Any, context: Context) -> Any:
        try:
            request = parse(data)
        except DecodeError:
            raise errors.InvalidRequest("request", "the request is not a message of this call") from None
        return await handler(request, context)

    return parsing


def translated(handler: Handler) -> Handler:
    """``handler``, whose exceptions become a status code, a message and details."""

    async def translating(request: Any, context: Context) -> Any:
        try:
            return await handler(request, context)
        except Exception as raised:
            code, message, details = wire.encode(translate(raised))
        return await context.abort(code, message, trailing_metadata=((wire.DETAILS_KEY, details),))

    return translating


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
