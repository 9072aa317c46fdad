"""Handles of filters that are asked in this process, under a lease, and remotely where there is none."""

from __future__ import annotations

import asyncio
from typing import Self

from bloomgate.aio import AsyncFilter
from bloomgate.calls import FilterCalls
from bloomgate.client import Filter
from bloomgate.filters import Key
from bloomgate.leasing import Leasing
from bloomgate.options import ClientOptions
from bloomgate.replica import Replica
from bloomgate.replies import Result
from bloomgate.steps import run, run_async
from bloomgate.transport import AsyncTransport, Transport


class _Lease:
    """Whether a handle's copy is wanted: from the beginning, until it is closed; opened again, once more."""

    def __init__(self, leasing: Leasing, replica: Replica) -> None:
        self._leasing, self.replica = leasing, replica
        self._entered = 0
        self._open = False
        self.open()

    def open(self) -> None:
        if not self._open:
            self._leasing.want(self.replica)
            self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._leasing.unwant(self.replica)

    def enter(self) -> None:
        self._entered += 1
        self.open()
        self._leasing.keep(self.replica)

    def leave(self) -> None:
        self._entered -= 1
        if not self._entered:
            self.close()

    def wait(self, timeout: float) -> bool:
        return self._leasing.wait(self.replica, timeout)


class ReplicaFilter(Filter):
    """A filter that answers from a copy in this process, got from ``Client.filter(name, replica=True)``.

    The copy is leased when it is first used, or where ``with`` begins, and until ``close`` or the end of
    ``with``. While it is under a lease no Add is acknowledged that it does not hold. Whenever it is not,
    checks go to the daemon. Adds always do.
    """

    def __init__(
        self,
        calls: FilterCalls,
        transport: Transport,
        options: ClientOptions,
        leasing: Leasing,
        replica: Replica,
    ) -> None:
        super().__init__(calls, transport, options)
        self._lease = _Lease(leasing, replica)
        self._replica = replica

    def might_contain(self, key: Key) -> bool:
        """False: ``key`` is certainly not there, skip the lookup. True: it may be, or nobody could say."""
        try:
            found = self._replica.copy.answer(key)
        except Exception:
            # No key: it falls back as it does remotely.
            found = None
        if found is None:
            return run(self._calls.check(key), self._transport) is not Result.SKIP
        return found

    @property
    def is_local(self) -> bool:
        """Whether checks are answered here at this moment."""
        return self._replica.is_trusted

    def wait(self, timeout: float = 5.0) -> bool:
        """Whether checks are answered here, now or within ``timeout`` seconds."""
        return self._lease.wait(timeout)

    def close(self) -> None:
        """Give the copy up, and tell the daemon. Checks go there from now on."""
        self._lease.close()

    def __enter__(self) -> Self:
        self._lease.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.leave()


class AsyncReplicaFilter(AsyncFilter):
    """A filter that answers from a copy in this process, got from ``AsyncClient.filter(name, replica=True)``.

    See ReplicaFilter. The lease is kept by a thread, so a loop that is busy for long does not lose it.
    """

    def __init__(
        self,
        calls: FilterCalls,
        transport: AsyncTransport,
        options: ClientOptions,
        leasing: Leasing,
        replica: Replica,
    ) -> None:
        super().__init__(calls, transport, options)
        self._lease = _Lease(leasing, replica)
        self._replica = replica

    async def might_contain(self, key: Key) -> bool:
        """False: ``key`` is certainly not there, skip the lookup. True: it may be, or nobody could say."""
        try:
            found = self._replica.copy.answer(key)
        except Exception:
            found = None
        if found is None:
            return await run_async(self._calls.check(key), self._transport) is not Result.SKIP
        return found

    @property
    def is_local(self) -> bool:
        """Whether checks are answered here at this moment."""
        return self._replica.is_trusted

    async def wait(self, timeout: float = 5.0) -> bool:  # noqa: ASYNC109
        """Whether checks are answered here, now or within ``timeout`` seconds."""
        return await asyncio.to_thread(self._lease.wait, timeout)

    async def close(self) -> None:
        """Give the copy up, and tell the daemon. Checks go there from now on."""
        self._lease.close()

    async def __aenter__(self) -> Self:
        self._lease.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lease.leave()
