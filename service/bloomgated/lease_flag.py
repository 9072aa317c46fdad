"""How long leases last that may be out, as the journal knows it: what a start has to wait for.

It is durable before the first lease is granted, and says the longest duration, margin included, that was
granted since it was set. Where no copy is held it is taken back, so that a daemon without replicas never
waits at its start. Once that is queued it counts as taken back: the next grant sets it anew first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from bloomgated.errors import JournalFailed, JournalQueueFull
from bloomgated.storage.journal import Journal
from bloomgated.storage.records import LeaseFlag

log = logging.getLogger(__name__)


class Flag:
    """The flag in one journal. Used on the event loop."""

    def __init__(self, journal: Journal, on_durable: Callable[[], None]) -> None:
        """``on_durable`` is called whenever it has become durable that leases may be out."""
        self._journal, self._on_durable = journal, on_durable
        self.seconds = journal.lease_seconds
        """What it says, queued or durable."""
        self._seq = 0
        self._waiting: set[asyncio.Task[None]] = set()

    def covers(self, seconds: float) -> bool:
        """Whether a start after a crash would wait for leases of ``seconds``. If not, that is seen to."""
        if self.seconds < seconds:
            self._write(seconds)
            return False
        return self._journal.durable_seq >= self._seq

    def take_back(self) -> None:
        """Say that no lease is out."""
        if self.seconds:
            self._write(0.0)

    def _write(self, seconds: float) -> None:
        try:
            self._seq = self._journal.append([LeaseFlag(seconds)])
        except (JournalFailed, JournalQueueFull) as error:
            log.warning("no leases for now: %s", error)
            return
        self.seconds = seconds
        if seconds:
            task = asyncio.ensure_future(self._tell(self._seq))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    async def _tell(self, seq: int) -> None:
        with contextlib.suppress(JournalFailed):
            await self._journal.durable(seq)
            self._on_durable()

    async def durable(self) -> None:
        """Return once what it says is durable, or never will be: then the next start waits."""
        with contextlib.suppress(JournalFailed):
            await self._journal.durable(self._seq)
