"""The Lease stream: messages to the holders' words and back.

A reader takes in what the holder sends, a writer sends it what is in its outbox. Who calls is asked when the
stream begins and again at each renewal, so that whoever may not have a copy any more loses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from bloomgate import errors
from bloomgate.filters import Growth
from bloomgate.v1 import filters_pb2 as pb
from bloomgated.access import READERS, REPLICAS, Principal
from bloomgated.api.auth import Doorkeeper, needs
from bloomgated.api.errors import translate
from bloomgated.api.interceptors import Bound, Context, request_of
from bloomgated.config import LeaseConfig
from bloomgated.holders import CopyOf, Holder, Holders
from bloomgated.outbox import Chunk, Delta, End, Grant, Message, Opened, Refused, Reset

# What a holder sends is small: even counts of a thousand filters with the longest names are below that.
LARGEST_BYTES = 1 << 20
REPLICA_BYTES = 16
_ENDS = {end: pb.LeaseEnd.Value(f"LEASE_END_{end.name}") for end in End}


class LeaseService:
    """The Lease method, over the holders."""

    def __init__(self, holders: Holders, config: LeaseConfig, door: Doorkeeper) -> None:
        self._holders, self._config, self._door = holders, config, door
        self._streams = Bound("lease streams", config.streams)

    async def Lease(self, _: Any, context: Context) -> None:  # noqa: N802
        """One holder's copies, from its Hello until the stream ends."""
        caller = self._known(context)
        with self._streams.hold():
            await self._serve(context, caller)

    def _known(self, context: Context) -> Principal:
        caller = self._door.caller(context)
        if not caller.has(REPLICAS):
            raise needs(REPLICAS)
        return caller

    async def _serve(self, context: Context, caller: Principal) -> None:
        hello = await _next(context)
        if hello is None:
            return
        replica = hello.hello.replica
        if hello.WhichOneof("message") != "hello" or len(replica) != REPLICA_BYTES:
            raise errors.InvalidRequest("hello", f"a stream begins with hello, of {REPLICA_BYTES} bytes")
        holder = self._holders.connect(caller.name, replica)
        reading = asyncio.ensure_future(self._read(context, holder, caller))
        try:
            while (message := await holder.outbox.next()) is not None:
                await context.write(self._encoded(message))
            assert holder.outbox.ended is not None
            if not isinstance(holder.outbox.ended, _HasLeft):
                raise holder.outbox.ended
        finally:
            reading.cancel()
            self._holders.disconnect(holder)

    async def _read(self, context: Context, holder: Holder, caller: Principal) -> None:
        try:
            while (message := await _next(context)) is not None:
                which = message.WhichOneof("message")
                if which == "ack":
                    self._holders.ack(holder, message.ack.subscription, message.ack.seq)
                elif which == "renew":
                    caller = self._renewed(context, holder, message.renew)
                elif which == "open":
                    self._open(holder, caller, message.open)
                elif which == "close":
                    self._holders.close(holder, message.close.subscription)
                else:
                    raise errors.InvalidRequest("message", "the stream knows no such message, here")
            holder.outbox.end(_HasLeft())
        except Exception as error:
            holder.outbox.end(error)

    def _renewed(self, context: Context, holder: Holder, renew: pb.LeaseRenew) -> Principal:
        caller = self._known(context)
        if renew.counts_id:
            counts = ((each.filter, each.skip, each.hit) for each in renew.counts)
            self._holders.count(
                holder, renew.counts_id, (each for each in counts if caller.may(READERS, each[0]))
            )
        self._holders.renew(holder, renew.nonce, lambda name: caller.may(REPLICAS, name))
        return caller

    def _open(self, holder: Holder, caller: Principal, wanted: pb.LeaseOpen) -> None:
        # Whether it exists is not for those to know who may not have it.
        if not caller.may(REPLICAS, wanted.filter):
            holder.outbox.put(Refused(wanted.open, needs(REPLICAS)))
            return
        self._holders.open(
            holder,
            wanted.open,
            CopyOf(
                wanted.filter,
                wanted.journal_id,
                wanted.filter_id,
                wanted.generation,
                wanted.seq,
                wanted.max_bytes,
            ),
        )

    def _encoded(self, message: Message) -> bytes:
        encode: Callable[[Any], pb.LeaseResponse] = _ENCODERS[type(message)]
        response = encode(message)
        if isinstance(message, Grant):
            response.grant.duration_seconds = self._config.duration
            response.grant.margin_seconds = self._config.margin
        return response.SerializeToString()


class _HasLeft(Exception):
    """The holder says nothing more, and is sent nothing more."""


async def _next(context: Context) -> pb.LeaseRequest | None:
    """The next message of the holder; None behind the last."""
    data: Any = await context.read()
    # At the end gRPC gives an object of its own.
    if not isinstance(data, bytes):
        return None
    if len(data) > LARGEST_BYTES:
        raise errors.InvalidRequest(
            "message", f"a message has {LARGEST_BYTES} bytes at most, got {len(data)}"
        )
    request: pb.LeaseRequest = request_of(data, pb.LeaseRequest.FromString)
    return request


def _opened(message: Opened) -> pb.LeaseResponse:
    return pb.LeaseResponse(
        opened=pb.LeaseOpened(
            open=message.open,
            subscription=message.subscription,
            journal_id=message.journal_id,
            filter_id=message.filter_id,
            generation=message.generation,
            image_bytes=message.image_bytes,
        )
    )


def _refused(message: Refused) -> pb.LeaseResponse:
    error = translate(message.error)
    return pb.LeaseResponse(
        refused=pb.LeaseRefused(
            open=message.open,
            reason=error.reason,
            message=str(error),
            retry_after_seconds=message.retry_after,
        )
    )


def _chunk(message: Chunk) -> pb.LeaseResponse:
    return pb.LeaseResponse(chunk=pb.LeaseChunk(subscription=message.subscription, data=message.data))


def _delta(message: Delta) -> pb.LeaseResponse:
    if isinstance(message.change, Growth):
        growth = message.change
        return pb.LeaseResponse(
            grow=pb.LeaseGrow(
                subscription=message.subscription,
                seq=message.last_seq,
                body=growth.body,
                bits=growth.spec.bits,
                hashes=growth.spec.hashes,
                capacity=growth.spec.capacity,
            )
        )
    return pb.LeaseResponse(
        delta=pb.LeaseDelta(
            subscription=message.subscription,
            first_seq=message.first_seq,
            last_seq=message.last_seq,
            digests=b"".join(message.change),
        )
    )


def _reset(message: Reset) -> pb.LeaseResponse:
    return pb.LeaseResponse(
        reset=pb.LeaseReset(
            subscription=message.subscription,
            seq=message.seq,
            end=_ENDS[message.end],
            retry_after_seconds=message.retry_after,
        )
    )


def _grant(message: Grant) -> pb.LeaseResponse:
    return pb.LeaseResponse(
        grant=pb.LeaseGrant(
            nonce=message.nonce, subscriptions=message.subscriptions, counts_id=message.counts_id
        )
    )


_ENCODERS: dict[type, Callable[[Any], pb.LeaseResponse]] = {
    Opened: _opened,
    Refused: _refused,
    Chunk: _chunk,
    Delta: _delta,
    Reset: _reset,
    Grant: _grant,
}
