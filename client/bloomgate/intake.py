"""What the daemon sends to a client's copies, and what it does to them.

A delta is applied whole before it is acknowledged. What cannot be applied ends its copy: a copy that lacks
something is not kept.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping

from bloomgate.errors import LimitExceeded
from bloomgate.filters import BloomFilter, BodySpec, DataDamaged, Growth, Segment
from bloomgate.filters.image import from_bytes
from bloomgate.lease_stream import LeaseStream
from bloomgate.replica import Held, Replica
from bloomgate.transport import LeaseCall
from bloomgate.v1 import filters_pb2 as pb

_log = logging.getLogger("bloomgate")

# Of an image: its header and checksum, beside the bodies.
_MOST_BESIDE = 8192
# Seconds before a copy is asked for again that is larger than it may be here: it rarely shrinks.
_TOO_LARGE = 60.0


class LeaseState:
    """What one process has of its leases. A forked child makes its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.replica_id = os.urandom(16)
        self.thread: threading.Thread | None = None
        self.stream: LeaseStream | None = None
        self.call: LeaseCall | None = None
        self.opens = 0
        # Counts that were sent and are not known to be counted, under a number; and that number.
        self.counts_id = 0
        self.uncounted: list[pb.ReplicaCounts] = []


class Intake:
    """Takes in what one stream after the other brings, in the thread that listens to it."""

    def __init__(self, replicas: Mapping[str, Replica], max_bytes: int) -> None:
        """``max_bytes``: what the bodies of one copy may take."""
        self._replicas, self._max_bytes = replicas, max_bytes

    def take(self, mine: LeaseState, stream: LeaseStream, response: pb.LeaseResponse) -> None:
        """Do what it says."""
        which = response.WhichOneof("message")
        # The long ones without the lock, which renewals need: only this thread changes a copy.
        if which == "delta":
            delta = response.delta
            self._change(
                mine, stream, delta.subscription, delta.last_seq, lambda held: _apply(held, delta.digests)
            )
        elif which == "chunk":
            self._add_chunk(mine, stream, response.chunk)
        elif which == "grow":
            grow = response.grow
            self._change(
                mine, stream, grow.subscription, grow.seq, lambda held: self._grow(stream, held, grow)
            )
        else:
            with mine.lock:
                if which == "grant":
                    self._granted(mine, stream, response.grant)
                elif which == "opened":
                    self._opened(stream, response.opened)
                elif which == "refused":
                    self._refused(response.refused)
                elif which == "reset":
                    self._was_reset(stream, response.reset)

    def _granted(self, mine: LeaseState, stream: LeaseStream, grant: pb.LeaseGrant) -> None:
        stream.tick = max(0.01, grant.duration_seconds / 3)
        if mine.uncounted and grant.counts_id >= mine.counts_id:
            mine.uncounted = []
        asked_at = stream.asked_at(grant.nonce)
        if asked_at is None:
            return
        deadline = asked_at + grant.duration_seconds - grant.margin_seconds
        for number in grant.subscriptions:
            replica, held = _held(stream, number)
            if replica is not None and held is not None:
                before = replica.trust(held, deadline)
                if before is not None:
                    say_close(stream, before.subscription)
        mine.changed.notify_all()

    def _opened(self, stream: LeaseStream, opened: pb.LeaseOpened) -> None:
        replica = self._asking(opened.open)
        if replica is None:
            say_close(stream, opened.subscription)
            return
        replica.asked = None
        held = Held(opened.subscription, opened.journal_id, opened.filter_id, opened.generation)
        if opened.image_bytes > replica.max_bytes + _MOST_BESIDE:
            say_close(stream, opened.subscription)
            replica.put_off(_TOO_LARGE)
            return
        if opened.image_bytes:
            held.image, held.image_bytes = bytearray(), opened.image_bytes
        else:
            # As this copy is: what it lacks follows.
            assert replica.held is not None
            held.bloom, held.seq = replica.held.bloom, replica.held.seq
        replica.coming = held
        stream.subscriptions[held.subscription] = replica

    def _asking(self, number: int) -> Replica | None:
        return next((each for each in self._replicas.values() if each.asked == number), None)

    def _refused(self, refused: pb.LeaseRefused) -> None:
        replica = self._asking(refused.open)
        if replica is not None:
            replica.asked = None
            pause = _TOO_LARGE if refused.reason == LimitExceeded.reason else next(replica.pauses)
            replica.put_off(max(pause, refused.retry_after_seconds))
            _log.info("no copy of %s for now: %s", replica.name, refused.message)

    def _was_reset(self, stream: LeaseStream, reset: pb.LeaseReset) -> None:
        replica, held = _held(stream, reset.subscription)
        if replica is not None and held is not None:
            # Void first: what is acknowledged below lets somebody go on.
            for each in replica.let_go():
                stream.subscriptions.pop(each.subscription, None)
                if each is not held:
                    say_close(stream, each.subscription)
            replica.put_off(max(next(replica.pauses), reset.retry_after_seconds))
        ack = pb.LeaseAck(subscription=reset.subscription, seq=reset.seq)
        stream.send(pb.LeaseRequest(ack=ack))
        say_close(stream, reset.subscription)

    def _add_chunk(self, mine: LeaseState, stream: LeaseStream, chunk: pb.LeaseChunk) -> None:
        _, held = _held(stream, chunk.subscription)
        if held is None or held.image is None:
            return
        held.image += chunk.data
        if len(held.image) < held.image_bytes:
            return
        self._change(mine, stream, chunk.subscription, 0, _read_image)
        # Its first grant need not wait for the next tick.
        stream.renew_soon()

    def _change(
        self,
        mine: LeaseState,
        stream: LeaseStream,
        subscription: int,
        seq: int,
        change: Callable[[Held], None],
    ) -> None:
        """Do to a copy what the daemon says, all of it, and acknowledge that."""
        replica, held = _held(stream, subscription)
        if replica is None or held is None:
            return
        try:
            change(held)
        except (DataDamaged, ValueError, IndexError, MemoryError) as error:
            _log.error("a copy of %s is given up: %s", replica.name, error)
            with mine.lock:
                replica.put_off(_TOO_LARGE)
                for each in replica.let_go():
                    stream.subscriptions.pop(each.subscription, None)
                    say_close(stream, each.subscription)
        else:
            held.seq = max(held.seq, seq)
            ack = pb.LeaseAck(subscription=subscription, seq=held.seq)
            stream.send(pb.LeaseRequest(ack=ack))

    def _grow(self, stream: LeaseStream, held: Held, grow: pb.LeaseGrow) -> None:
        spec = BodySpec(grow.bits, grow.hashes, grow.capacity)
        bloom = _base_of(held)
        if bloom.memory_bytes + spec.nbytes > self._max_bytes:
            raise ValueError("it outgrew replica_max_bytes")
        bloom.grow(Growth(grow.body, spec))
        stream.subscriptions[held.subscription].has_grown(bloom)


def _held(stream: LeaseStream, subscription: int) -> tuple[Replica | None, Held | None]:
    replica = stream.subscriptions.get(subscription)
    return replica, None if replica is None else replica.of(subscription)


def say_close(stream: LeaseStream, subscription: int) -> None:
    """Tell the daemon that a copy is not trusted any more."""
    stream.send(pb.LeaseRequest(close=pb.LeaseClose(subscription=subscription)))


def _base_of(held: Held) -> BloomFilter:
    if held.bloom is None:
        raise ValueError("a change came before its image")
    return held.bloom


def _read_image(held: Held) -> None:
    assert held.image is not None
    image = from_bytes(bytes(held.image), "the image of a copy")
    held.image = None
    held.bloom, held.seq = image.filter, image.seq


def _apply(held: Held, digests: bytes) -> None:
    bloom = _base_of(held)
    if digests:
        bloom.insert(Segment(len(bloom.bodies) - 1, digests, 0))
