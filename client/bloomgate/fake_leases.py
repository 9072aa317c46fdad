"""The daemon's leases in one process: what ``bloomgate.testing`` gives copies with.

As the daemon does, an add returns once every copy has acknowledged it; a filter that goes voids its copies
first. Nothing here is durable, and no lease runs out while its holder is alive.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from bloomgate.errors import BloomgateError, Unavailable
from bloomgate.filters import AddPlan, BloomBody, BloomFilter, FilterSpec, Growth, Key, Segment
from bloomgate.filters.image import freeze, image_bytes, image_chunks
from bloomgate.v1 import filters_pb2 as pb

# Seconds of a lease, and how much less a copy is trusted.
DURATION, MARGIN = 2.0, 0.2


class FakeFilter(BloomFilter):
    """A filter whose copies hear of what is added to it, by whichever way."""

    __slots__ = ("leases",)
    leases: FakeLeases

    @classmethod
    def made(cls, spec: FilterSpec, leases: FakeLeases) -> FakeFilter:
        """An empty one."""
        self = cls.of(spec)
        assert isinstance(self, cls)
        self.leases = leases
        return self

    def add(self, key: Key) -> bool:
        """Add a key; its copies have it when this returns."""
        return self.add_many([key])[0]

    def add_many(self, keys: Iterable[Key]) -> list[bool]:
        """Add keys; its copies have them when this returns."""
        was_new = super().add_many(keys)
        self.leases.settled(self)
        return was_new

    def apply(self, plan: AddPlan, grown: Sequence[BloomBody] | None = None) -> None:
        """Do what was planned, and send it to the copies."""
        super().apply(plan, grown)
        self.leases.tell(self, plan.steps)


class _Copy:
    """A subscription: whose, of what, how far."""

    def __init__(self, number: int, call: FakeLeaseCall, name: str, bloom: BloomFilter) -> None:
        self.number, self.call, self.name, self.bloom = number, call, name, bloom
        self.sent = self.acked = 0
        self.ended = False


class FakeLeaseCall:
    """One stream: what the gate sends is iterated, what its client sends is taken in by a thread."""

    def __init__(self, leases: FakeLeases, requests: Iterator[pb.LeaseRequest]) -> None:
        self._leases, self._requests = leases, requests
        self._responses: queue.SimpleQueue[pb.LeaseResponse | BloomgateError | None] = queue.SimpleQueue()
        self.replica = b""
        threading.Thread(target=self._listen, name="fake-leases", daemon=True).start()

    def _listen(self) -> None:
        for request in self._requests:
            self._leases.take(self, request)
        self._leases.leave(self)
        self._responses.put(None)

    def send(self, response: pb.LeaseResponse) -> None:
        """Send it to the client."""
        self._responses.put(response)

    def cancel(self) -> None:
        """End it at once."""
        self._leases.leave(self)
        self._responses.put(Unavailable("the stream was cancelled"))

    def __iter__(self) -> Iterator[pb.LeaseResponse]:
        while (response := self._responses.get()) is not None:
            if isinstance(response, BloomgateError):
                raise response
            yield response


class FakeLeases:
    """All copies of one gate."""

    def __init__(
        self,
        find: Callable[[str], BloomFilter],
        count: Callable[[str, int, int], None],
        may_renew: Callable[[], bool],
    ) -> None:
        """``find`` raises for a name that is not there; ``count`` gets what copies answered."""
        self._find, self._count, self._may_renew = find, count, may_renew
        self._changed = threading.Condition(threading.RLock())
        self._copies: dict[int, _Copy] = {}
        self._numbers = itertools.count(1)
        self._seqs = itertools.count(1)
        self._counted: dict[bytes, int] = {}

    def tell(self, bloom: BloomFilter, steps: Iterable[Segment | Growth]) -> None:
        """Send what was added to the copies of a filter."""
        with self._changed:
            copies = [copy for copy in self._copies.values() if copy.bloom is bloom and not copy.ended]
            for copy, step in itertools.product(copies, steps):
                copy.sent = next(self._seqs)
                copy.call.send(_response(copy.number, copy.sent, step))

    def end(self, bloom: BloomFilter) -> None:
        """A filter goes: its copies are void when ``settled`` returns."""
        with self._changed:
            for copy in self._copies.values():
                if copy.bloom is bloom and not copy.ended:
                    copy.ended, copy.sent = True, next(self._seqs)
                    reset = pb.LeaseReset(subscription=copy.number, seq=copy.sent, end=pb.LEASE_END_DROPPED)
                    copy.call.send(pb.LeaseResponse(reset=reset))

    def settled(self, bloom: BloomFilter | None = None) -> None:
        """Return once the copies, of one filter or all, hold what was sent, or are no longer trusted."""
        with self._changed:
            waits_for = [(copy, copy.sent) for copy in self._copies.values() if bloom in (None, copy.bloom)]
            self._changed.wait_for(
                lambda: all(copy.acked >= seq or copy.number not in self._copies for copy, seq in waits_for),
                DURATION + MARGIN,
            )

    def held(self, name: str) -> int:
        """How many copies there are of the filter of a name."""
        with self._changed:
            return sum(copy.name == name and not copy.ended for copy in self._copies.values())

    # -- what clients send

    def take(self, call: FakeLeaseCall, request: pb.LeaseRequest) -> None:
        """Do what a message asks for."""
        which = request.WhichOneof("message")
        with self._changed:
            if which == "hello":
                call.replica = request.hello.replica
            elif which == "open":
                self._open(call, request.open)
            elif which == "ack":
                copy = self._copies.get(request.ack.subscription)
                if copy is not None:
                    copy.acked = max(copy.acked, request.ack.seq)
            elif which == "close":
                self._copies.pop(request.close.subscription, None)
            elif which == "renew":
                self._renew(call, request.renew)
            self._changed.notify_all()

    def leave(self, call: FakeLeaseCall) -> None:
        """The stream is gone, and its client with it: nobody waits for its copies."""
        with self._changed:
            for number in [number for number, copy in self._copies.items() if copy.call is call]:
                del self._copies[number]
            self._changed.notify_all()

    def _open(self, call: FakeLeaseCall, wanted: pb.LeaseOpen) -> None:
        try:
            bloom = self._find(wanted.filter)
        except BloomgateError as error:
            refused = pb.LeaseRefused(open=wanted.open, reason=error.reason, message=str(error))
            call.send(pb.LeaseResponse(refused=refused))
            return
        copy = _Copy(next(self._numbers), call, wanted.filter, bloom)
        self._copies[copy.number] = copy
        header = freeze(bloom)
        opened = pb.LeaseOpened(open=wanted.open, subscription=copy.number, image_bytes=image_bytes(header))
        call.send(pb.LeaseResponse(opened=opened))
        for data in image_chunks(header):
            call.send(pb.LeaseResponse(chunk=pb.LeaseChunk(subscription=copy.number, data=data)))

    def _renew(self, call: FakeLeaseCall, renew: pb.LeaseRenew) -> None:
        if renew.counts_id > self._counted.get(call.replica, 0):
            self._counted[call.replica] = renew.counts_id
            for each in renew.counts:
                self._count(each.filter, each.skip, each.hit)
        grant = pb.LeaseGrant(
            nonce=renew.nonce, duration_seconds=DURATION, margin_seconds=MARGIN,
            counts_id=self._counted.get(call.replica, 0),
        )  # fmt: skip
        if self._may_renew():
            mine = (copy for copy in self._copies.values() if copy.call is call)
            grant.subscriptions.extend(copy.number for copy in mine if not copy.ended)
        call.send(pb.LeaseResponse(grant=grant))


def _response(subscription: int, seq: int, step: Segment | Growth) -> pb.LeaseResponse:
    if isinstance(step, Segment):
        return pb.LeaseResponse(
            delta=pb.LeaseDelta(subscription=subscription, first_seq=seq, last_seq=seq, digests=step.digests)
        )
    spec = step.spec
    return pb.LeaseResponse(
        grow=pb.LeaseGrow(
            subscription=subscription, seq=seq, body=step.body,
            bits=spec.bits, hashes=spec.hashes, capacity=spec.capacity,
        )
    )  # fmt: skip
