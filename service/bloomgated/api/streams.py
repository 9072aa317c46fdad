"""Health and reflection. Their streams have no end of their own, so the server ends them when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from bloomgate.errors import Overloaded
from bloomgated.api.auth import Doorkeeper
from bloomgated.api.interceptors import Bound, Context, refuse, request_of, translated

_STOPPING = (grpc.StatusCode.UNAVAILABLE, "bloomgated is stopping")


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The standard service, for names that are all served or all not.

    grpc_health's own ends no watcher, so that it would hold up a stop; and one that is cancelled may not have
    heard of NOT_SERVING before.
    """

    def __init__(self, names: tuple[str, ...], watchers: Bound) -> None:
        self._names = names
        self._watchers = watchers
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        self._ended = False
        self._news = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Change what it says, and tell the watchers."""
        response = health_pb2.HealthCheckResponse
        self._status = response.SERVING if serving else response.NOT_SERVING
        self._tell()

    def end(self) -> None:
        """End the watchers, once they have heard the last change."""
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        # Whoever waits for this one is woken; the next wait is for the next.
        self._news.set()
        self._news = asyncio.Event()

    def handlers(self) -> Any:
        """Its methods, which parse requests themselves: gRPC would tell of what went wrong with that."""
        serialize = health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(
                translated(self.Check), response_serializer=serialize
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(self.Watch, response_serializer=serialize),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    async def Check(self, data: bytes, context: Context) -> health_pb2.HealthCheckResponse:  # noqa: N802
        """The status now; NOT_FOUND for a name that is not served here."""
        request = request_of(data, health_pb2.HealthCheckRequest.FromString)
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service of that name")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, data: bytes, context: Context) -> None:  # noqa: N802
        """Send the status now and whenever it changes.

        Where too many watch already, now: strangers may watch too, and must not be able to hide it.
        """
        try:
            request = request_of(data, health_pb2.HealthCheckRequest.FromString)
            try:
                with self._watchers.hold():
                    await self._watch(request, context)
            except Overloaded:
                await context.write(self._now(request))
                raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await refuse(context, error)

    def _now(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        response = health_pb2.HealthCheckResponse
        return response(status=self._status if request.service in self._names else response.SERVICE_UNKNOWN)

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        told = None
        while True:
            now = self._now(request)
            if now != told:
                told = now
                await context.write(now)
            elif self._ended:
                await context.abort(*_STOPPING)
            else:
                await self._news.wait()


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[name-defined,misc]
    """The standard service, for those who are known."""

    def __init__(self, names: tuple[str, ...], streams: Bound, door: Doorkeeper) -> None:
        super().__init__(names)
        self._streams, self._door = streams, door
        self._ended = asyncio.Event()

    def handlers(self) -> Any:
        """Its method, which parses requests itself, as those of Health do."""
        method = grpc.stream_stream_rpc_method_handler(
            self.ServerReflectionInfo,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})

    def end(self) -> None:
        """End all streams."""
        self._ended.set()

    async def ServerReflectionInfo(  # noqa: N802
        self, requests: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        """Answer requests until the caller has no more."""
        try:
            self._door.caller(context)
            with self._streams.hold():
                async for reply in super().ServerReflectionInfo(self._until_ended(requests), context):
                    yield reply
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await refuse(context, error)
        if self._ended.is_set():
            await context.abort(*_STOPPING)

    async def _until_ended(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The requests, up to the end of the server.

        Not by cancelling the handler's task: where that meets a reply that is being sent, grpc.aio ends the
        task and not the stream, which then holds up the stop.
        """
        ended = asyncio.ensure_future(self._ended.wait())
        request: asyncio.Future[Any] | None = None
        try:
            while True:
                request = asyncio.ensure_future(anext(requests))
                await asyncio.wait((request, ended), return_when=asyncio.FIRST_COMPLETED)
                if not request.done():
                    return
                try:
                    data = request.result()
                except StopAsyncIteration:
                    return
                yield request_of(data, reflection_pb2.ServerReflectionRequest.FromString)
        finally:
            ended.cancel()
            if request is not None:
                # A caller that goes away fails it, and nobody is left to hear of that.
                request.add_done_callback(lambda done: done.cancelled() or done.exception())
                request.cancel()
