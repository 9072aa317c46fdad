"""A call written once for the blocking and the asyncio client.

A verb is a generator that yields what it waits for, as an ``Rpc`` or a ``Pause``, and is sent the reply or
thrown the error. ``run`` drives it with a blocking transport, ``run_async`` with an asyncio one. So retries,
splitting and what a reply means are one piece of code, and tests can drive it without a clock.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from bloomgate.errors import BloomgateError, DeadlineExceeded, Overloaded
from bloomgate.options import Backoff
from bloomgate.transport import AsyncTransport, Method, Q, R, Transport

T = TypeVar("T")


class Step(Protocol):
    """Something to wait for, in either client."""

    def wait(self, transport: Transport) -> Any:
        """Wait for it, blocking. What is returned or raised goes to whoever yielded it."""

    async def wait_async(self, transport: AsyncTransport) -> Any:
        """Wait for it on the running loop."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """Wait for one unary call, ``timeout`` seconds at most."""

    method: Method[Any, Any]
    request: Message
    timeout: float

    def wait(self, transport: Transport) -> Any:
        """The reply, or a BloomgateError."""
        return transport.unary(self.method, self.request, self.timeout)

    async def wait_async(self, transport: AsyncTransport) -> Any:
        """The reply, or a BloomgateError."""
        return await transport.unary(self.method, self.request, self.timeout)


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for ``seconds``."""

    seconds: float

    def wait(self, _: Transport) -> None:
        """Sleep."""
        time.sleep(self.seconds)

    async def wait_async(self, _: AsyncTransport) -> None:
        """Let others run."""
        await asyncio.sleep(self.seconds)


Steps = Generator[Step, Any, T]


class Deadline:
    """A moment on a monotonic clock."""

    __slots__ = ("_at", "_clock")

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._at = clock() + seconds

    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._at - self._clock()

    def within(self, seconds: float) -> Deadline:
        """The earlier of this one and ``seconds`` from now."""
        return Deadline(self._clock, min(seconds, self.left()))


@dataclass(frozen=True, slots=True)
class Retry:
    """Which errors are worth another attempt, ``attempts`` in all at most, how long one may take, and the
    pauses between them: without a ``backoff``, none."""

    on: tuple[type[BloomgateError], ...]
    backoff: Backoff | None
    attempt_timeout: float = math.inf
    but_not: tuple[type[BloomgateError], ...] = ()
    attempts: float = math.inf

    def call(self, method: Method[Q, R], request: Q, deadline: Deadline) -> Steps[R]:
        """Call until an answer, an error that is not worth it, or the deadline: then the last error."""
        pauses = itertools.repeat(0.0) if self.backoff is None else self.backoff.pauses()
        made = 0
        last: BloomgateError = DeadlineExceeded("no time was left for the call")
        while True:
            left = deadline.left()
            if left <= 0:
                raise last
            try:
                reply: R = yield Rpc(method, request, min(left, self.attempt_timeout))
            except self.on as error:
                made += 1
                if made >= self.attempts or isinstance(error, self.but_not):
                    raise
                last = error
                pause = next(pauses)
                if isinstance(error, Overloaded):
                    pause = max(pause, error.retry_after)
                # A pause that ends too late would only keep the caller waiting for the same error.
                if pause >= deadline.left():
                    raise
            else:
                return reply
            if pause > 0:
                yield Pause(pause)


def run(steps: Steps[T], transport: Transport) -> T:
    """Drive a call to its result, blocking."""
    try:
        step = next(steps)
        while True:
            try:
                reply = step.wait(transport)
            except Exception as error:
                # Only Exception: an interrupt leaves at once, past every judgement of failures.
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def run_async(steps: Steps[T], transport: AsyncTransport) -> T:
    """Drive a call to its result on the running loop. A cancellation leaves at once."""
    try:
        step = next(steps)
        while True:
            try:
                reply = await step.wait_async(transport)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
