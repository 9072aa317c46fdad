"""Single checks that travel together: one call of a filter in flight, who comes meanwhile goes by the next.

There is no timer: a lone caller makes its own call, at once. Each caller keeps its own deadline, and may go
away at any time; the call goes on for the others. A failure is each caller's own.

Under asyncio a task carries each batch, apart for each event loop. Of threads one carries it, the last that
came: its deadline is the latest, so a call that lasts as long as any of them may wait outlives no deadline.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bloomgate.errors import DeadlineExceeded
from bloomgate.processes import OfProcess
from bloomgate.replies import Result
from bloomgate.steps import Deadline, Steps, run, run_async
from bloomgate.transport import AsyncTransport, Transport

Outcome = tuple[Result, bool] | Exception
"""What a check came to, and whether the filter is degraded; or why it failed."""
W = TypeVar("W", bound="_Waiting")

_TOO_LATE = "no answer within the check's deadline"


class _Waiting:
    """A caller whose check goes with the next call."""

    __slots__ = ("deadline", "key")

    def __init__(self, key: bytes, deadline: Deadline) -> None:
        self.key, self.deadline = key, deadline


class _Thread(_Waiting):
    """A thread that waits. Woken with an outcome, or to carry a batch that it belongs to."""

    __slots__ = ("batch", "gone", "outcome", "woken")

    def __init__(self, key: bytes, deadline: Deadline) -> None:
        super().__init__(key, deadline)
        self.outcome: Outcome | None = None
        self.batch: list[_Thread] | None = None
        self.gone = False
        self.woken = threading.Lock()
        self.woken.acquire()


class _Task(_Waiting):
    """A task that waits."""

    __slots__ = ("answered",)

    def __init__(self, key: bytes, deadline: Deadline, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(key, deadline)
        self.answered: asyncio.Future[Outcome] = loop.create_future()


class _Threads:
    """What the threads of one process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.busy = False
        self.waiting: deque[_Thread] = deque()


class _Loop:
    """What the tasks of one event loop share."""

    def __init__(self) -> None:
        self.busy = False
        self.waiting: deque[_Task] = deque()
        # By deadline: those that came later may wait longer.
        self.unanswered: deque[_Task] = deque()
        self.timer: asyncio.TimerHandle | None = None
        # A loop holds its tasks weakly.
        self.carrying: set[asyncio.Task[None]] = set()


class Batches:
    """The checks of one filter."""

    def __init__(
        self,
        ask: Callable[[Sequence[bytes], Deadline], Steps[list[Outcome]]],
        limits: Callable[[], tuple[int, int]],
    ) -> None:
        """``ask`` asks for many keys and raises no Exception; ``limits`` are the keys and bytes of a call."""
        self._ask, self._limits = ask, limits
        self._threads = OfProcess(_Threads)
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = weakref.WeakKeyDictionary()

    def _take(self, waiting: deque[W]) -> list[W]:
        """The first of those that wait, as many as one call takes."""
        most_keys, most_bytes = self._limits()
        taken: list[W] = []
        nbytes = 0
        while waiting and len(taken) < most_keys:
            nbytes += len(waiting[0].key)
            if taken and nbytes > most_bytes:
                break
            taken.append(waiting.popleft())
        return taken

    # -- threads

    def check(self, key: bytes, deadline: Deadline, transport: Transport) -> Outcome:
        """Check ``key``, alone or with others. Raises nothing but what interrupts the thread."""
        threads = self._threads.get()
        with threads.lock:
            me = None
            if threads.busy:
                me = _Thread(key, deadline)
                threads.waiting.append(me)
            else:
                threads.busy = True
        if me is None:
            try:
                return run(self._ask((key,), deadline), transport)[0]
            finally:
                self._hand_over(threads)
        try:
            me.woken.acquire(timeout=max(0.0, deadline.left()))
        except BaseException:
            self._leave(threads, me)
            raise
        with threads.lock:
            batch = me.batch
            if batch is None and me.outcome is None:
                me.gone = True
                return DeadlineExceeded(_TOO_LATE)
        if batch is not None:
            self._carry(threads, batch, deadline, transport)
        assert me.outcome is not None
        return me.outcome

    def _carry(
        self, threads: _Threads, batch: list[_Thread], deadline: Deadline, transport: Transport
    ) -> None:
        outcomes: Sequence[Outcome] = [DeadlineExceeded(_TOO_LATE)] * len(batch)
        try:
            outcomes = run(self._ask([each.key for each in batch], deadline), transport)
        finally:
            # Whatever interrupts this one: the others have an outcome, and somebody carries the next batch.
            for each, outcome in zip(batch, outcomes, strict=True):
                each.outcome = outcome
                each.woken.release()
            self._hand_over(threads)

    def _hand_over(self, threads: _Threads) -> None:
        """Let somebody who waits carry the next batch, or be idle."""
        with threads.lock:
            for each in [each for each in threads.waiting if each.gone]:
                threads.waiting.remove(each)
            batch = self._take(threads.waiting)
            if batch:
                batch[-1].batch = batch
                batch[-1].woken.release()
            else:
                threads.busy = False

    def _leave(self, threads: _Threads, me: _Thread) -> None:
        """One that waits is interrupted, perhaps just when it was to carry a batch."""
        with threads.lock:
            me.gone = True
            batch = me.batch
            if batch is not None:
                threads.waiting.extendleft(each for each in reversed(batch) if each is not me)
        if batch is not None:
            self._hand_over(threads)

    # -- tasks

    async def check_async(self, key: bytes, deadline: Deadline, transport: AsyncTransport) -> Outcome:
        """Check ``key``, alone or with others. Raises nothing but a cancellation."""
        loop = asyncio.get_running_loop()
        state = self._loops.get(loop)
        if state is None:
            state = self._loops[loop] = _Loop()
        if not state.busy:
            state.busy = True
            try:
                return (await run_async(self._ask((key,), deadline), transport))[0]
            finally:
                self._send_next(state, loop, transport)
        me = _Task(key, deadline, loop)
        state.waiting.append(me)
        state.unanswered.append(me)
        if state.timer is None:
            state.timer = loop.call_later(max(0.0, deadline.left()), self._expire, state, loop)
        return await me.answered

    def _send_next(self, state: _Loop, loop: asyncio.AbstractEventLoop, transport: AsyncTransport) -> None:
        while state.waiting and state.waiting[0].answered.done():
            state.waiting.popleft()
        batch = self._take(state.waiting)
        state.busy = bool(batch)
        if batch:
            task = loop.create_task(self._carry_async(state, loop, batch, transport))
            state.carrying.add(task)
            task.add_done_callback(state.carrying.discard)

    async def _carry_async(
        self, state: _Loop, loop: asyncio.AbstractEventLoop, batch: list[_Task], transport: AsyncTransport
    ) -> None:
        # Those that went away meanwhile are not asked for. The last has the latest deadline.
        batch = [each for each in batch if not each.answered.done()]
        outcomes: Sequence[Outcome] = [DeadlineExceeded(_TOO_LATE)] * len(batch)
        try:
            if batch:
                outcomes = await run_async(
                    self._ask([each.key for each in batch], batch[-1].deadline), transport
                )
        finally:
            for each, outcome in zip(batch, outcomes, strict=True):
                if not each.answered.done():
                    each.answered.set_result(outcome)
            self._send_next(state, loop, transport)

    def _expire(self, state: _Loop, loop: asyncio.AbstractEventLoop) -> None:
        """Answer those whose deadline has passed; look again when the next one's does."""
        state.timer = None
        while state.unanswered:
            first = state.unanswered[0]
            if not first.answered.done():
                left = first.deadline.left()
                if left > 0:
                    state.timer = loop.call_later(left, self._expire, state, loop)
                    return
                first.answered.set_result(DeadlineExceeded(_TOO_LATE))
            state.unanswered.popleft()


@dataclass(frozen=True, slots=True)
class Check:
    """A step: wait for one check, which goes alone or with others."""

    batches: Batches
    key: bytes
    deadline: Deadline

    def wait(self, transport: Transport) -> Outcome:
        """What it came to."""
        return self.batches.check(self.key, self.deadline, transport)

    async def wait_async(self, transport: AsyncTransport) -> Outcome:
        """What it came to."""
        return await self.batches.check_async(self.key, self.deadline, transport)
