"""Work that runs to its end even if its caller goes away: half a creation would be no creation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Whole:
    """What is under way of such work. Used on one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns or raises. It goes on where this is cancelled."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Nobody is left to hear how it ends; without this the loop would complain of that.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def finished(self) -> None:
        """Return once nothing of it is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)
