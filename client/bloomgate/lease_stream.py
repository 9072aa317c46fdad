"""One Lease stream: what is sent on it and when, and when each renewal was asked for.

gRPC takes the requests from ``requests`` in a thread of its own: there renewals fall due. The clock
is read before a renewal is handed over: a copy is trusted from that moment, not from the grant's arrival.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from bloomgate.replica import BOOTTIME, Replica, now
from bloomgate.v1 import filters_pb2 as pb

# Seconds between renewals until a grant has said how long leases last.
FIRST_TICK = 0.25
# Renewals that may be answered yet: a grant that comes later is of no use.
MOST_ASKED = 16


class LeaseStream:
    """The sending side of a stream."""

    def __init__(
        self, replica: bytes, due: Callable[[LeaseStream], None], renewal: Callable[[], pb.LeaseRenew]
    ) -> None:
        """``due`` is called at each tick, and may send; ``renewal`` makes the renewal of that tick."""
        self._replica, self._due, self._renewal = replica, due, renewal
        self._outgoing: queue.SimpleQueue[pb.LeaseRequest | None] = queue.SimpleQueue()
        self._asked: dict[int, float] = {}
        self._nonce = 0
        self.subscriptions: dict[int, Replica] = {}
        """What the daemon sends on this stream is about these."""
        self.tick = FIRST_TICK
        self._next_tick = now(BOOTTIME)
        self.heard_at = self._next_tick
        """When the daemon last sent something."""

    def send(self, request: pb.LeaseRequest) -> None:
        """Send behind all that was sent before. Any thread may."""
        self._outgoing.put(request)

    def renew_soon(self) -> None:
        """Let the next renewal be now."""
        self._next_tick = now(BOOTTIME)
        # Wakes whoever waits for something to send, and is nothing itself.
        self._outgoing.put(pb.LeaseRequest())

    def end(self) -> None:
        """Send what was put, then say that there is no more."""
        self._outgoing.put(None)

    def asked_at(self, nonce: int) -> float | None:
        """The clock before that renewal was sent; None for one that nobody remembers."""
        return self._asked.get(nonce)

    def requests(self) -> Iterator[pb.LeaseRequest]:
        """What to send, in order, as it falls due."""
        yield pb.LeaseRequest(hello=pb.LeaseHello(replica=self._replica))
        while True:
            wait = self._next_tick - now(BOOTTIME)
            if wait <= 0:
                self._next_tick = now(BOOTTIME) + self.tick
                self._due(self)
                yield self._renewed()
                continue
            try:
                request = self._outgoing.get(timeout=wait)
            except queue.Empty:
                continue
            if request is None:
                return
            if request.WhichOneof("message") is not None:
                yield request

    def _renewed(self) -> pb.LeaseRequest:
        request = pb.LeaseRequest(renew=self._renewal())
        self._nonce += 1
        request.renew.nonce = self._nonce
        self._asked[self._nonce] = now(BOOTTIME)
        self._asked.pop(self._nonce - MOST_ASKED, None)
        return request
