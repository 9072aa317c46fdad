"""Whose turn it is: large calls are worked on one at a time, so that small ones find the loop free.

gRPC hands the loop about one call each time it comes round. With 48 callers of 100,000 keys each, all of whom
took their share of every round, a check of one key waited three to five seconds before anybody looked at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

# A larger request waits for its turn: parsing and probing it can take a millisecond or more.
LARGE_BYTES = 16 << 10
# Seconds between two large calls where one had to wait: what gRPC has for the loop gets there meanwhile.
# Measured with 100 callers of 100,000 keys: a small check waits two thirds as long at most, and as many large
# calls are answered.
PAUSE = 0.002


class Turn:
    """Taken by one task at a time, in the order in which they ask. Used on the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """It is this task's turn within, or until it gives it up."""
        pause = PAUSE if self._lock.locked() else 0
        await self._lock.acquire()
        self._holder = asyncio.current_task()
        try:
            # A caller that has gone is noticed here, before anything is done for it.
            await asyncio.sleep(pause)
            yield
        finally:
            self.give_up()

    def give_up(self) -> None:
        """What comes now is waiting: the next one may begin. Does nothing where it is not this task's."""
        if self._holder is not None and self._holder is asyncio.current_task():
            self._holder = None
            self._lock.release()
