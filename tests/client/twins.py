"""Both clients behind one face, and a real gRPC server over a fake gate."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from bloomgate import AsyncClient, Client, ClientMetrics, ClientOptions, transport
from bloomgate.errors import BloomgateError
from bloomgate.testing import FakeGate
from bloomgate.wire import DETAILS_KEY, encode


class Blocking:
    """An object of the asyncio client whose coroutines run to their end when called."""

    def __init__(self, runner: asyncio.Runner, inner: Any) -> None:
        self._runner = runner
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._wrapped(value) if callable(value) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(self._inner)(*args, **kwargs)

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                return self._runner.run(_settled(result))
            return Blocking(self._runner, result) if callable(result) or hasattr(result, "guard") else result

        return call


async def _settled(coroutine: Any) -> Any:
    """Its result, once what it started in the background has had its turn."""
    try:
        return await coroutine
    finally:
        for _ in range(3):
            await asyncio.sleep(0)


class Twin:
    """One of the two clients."""

    def __init__(self, is_async: bool, runner: asyncio.Runner) -> None:
        self.is_async = is_async
        self._runner = runner
        self.registry = CollectorRegistry()
        self.metrics = ClientMetrics.in_registry(self.registry)

    def client(self, gate: FakeGate, **options: Any) -> Any:
        """A client of the gate."""
        make = gate.async_client if self.is_async else gate.client
        return self._faced(make(ClientOptions(**options), self.metrics))

    def over(self, transport: Any, **options: Any) -> Any:
        """A client over a transport whose ``unary`` blocks."""
        if self.is_async:
            client: Any = AsyncClient.over(
                Awaited(transport), options=ClientOptions(**options), metrics=self.metrics
            )
        else:
            client = Client.over(transport, options=ClientOptions(**options), metrics=self.metrics)
        return self._faced(client)

    def connect(self, target: str, *, token: str | None = None, **options: Any) -> Any:
        """A client of a server."""
        make: Any = AsyncClient if self.is_async else Client
        made = make(target, token=token, options=ClientOptions(**options), metrics=self.metrics)
        return self._faced(made)

    def _faced(self, client: Any) -> Any:
        return Blocking(self._runner, client) if self.is_async else client

    def raised(self, coroutine: Coroutine[Any, Any, object]) -> BaseException:
        """What it raises, on a running loop."""

        async def run() -> BaseException:
            try:
                coroutine.send(None)
            except BaseException as error:
                return error
            raise AssertionError("it raised nothing")

        return self._runner.run(run())

    def lookup(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A lookup as this client takes it."""
        if not self.is_async:
            return function

        async def lookup(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return lookup

    def count(self, name: str, **labels: str) -> float:
        """A metric's value, 0 if it is not exported."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def results(self, name: str) -> tuple[float, float, float]:
        """A filter's skips, hits and fallbacks."""
        skip, hit, fallback = (
            self.count("bloomgate_client_checks_total", filter=name, result=result, via="rpc")
            for result in ("skip", "hit", "fallback")
        )
        return skip, hit, fallback

    def fallbacks(self, name: str, reason: str) -> float:
        """How many checks of a filter fell back for a reason."""
        return self.count("bloomgate_client_fallbacks_total", filter=name, reason=reason)


class Awaited:
    """A transport whose ``unary`` blocks, as the asyncio client takes it."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    async def unary(self, *args: Any) -> Any:
        return self._transport.unary(*args)

    async def close(self) -> None:
        self._transport.close()


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A real gRPC server over a gate. ``hook(name, request, context)`` may answer bytes in its place."""

    def __init__(self, gate: FakeGate, target: str = "127.0.0.1:0") -> None:
        self.gate = gate
        self.hook: Callable[[str, Any, grpc.ServicerContext], bytes | None] = lambda *_: None
        self.seen: list[str] = []
        self.metadata: dict[str, Any] = {}
        self._methods = {
            method.path: method for method in vars(transport).values() if isinstance(method, transport.Method)
        }
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self,))  # type: ignore[arg-type]
        self.target = f"127.0.0.1:{self._server.add_insecure_port(target)}"
        self._server.start()

    def service(self, details: Any) -> Any:
        """gRPC asks how to serve a call."""
        method = self._methods[details.method]

        def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
            name = method.path.rpartition("/")[2]
            self.seen.append(name)
            self.metadata = dict(context.invocation_metadata())
            request = method.request.FromString(data)
            try:
                reply = self.hook(name, request, context)
                return self.gate.answer(method, request).SerializeToString() if reply is None else reply
            except BloomgateError as error:
                code, message, details = encode(error)
                context.set_trailing_metadata(((DETAILS_KEY, details),))
                context.abort(code, message)
                raise AssertionError("abort raises") from error

        return grpc.unary_unary_rpc_method_handler(answer)

    def stop(self) -> None:
        """Stop at once."""
        self._server.stop(None).wait()
