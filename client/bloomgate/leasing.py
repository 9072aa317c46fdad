"""The leases of one client: one background thread and one stream for all its copies.

The thread takes in what the daemon sends. A delta is applied whole before it is acknowledged, and a grant is
used after all that came before it. Where the stream breaks, copies are trusted until their deadlines, and a
new stream takes up from what they hold. The daemon is told with a Close once a copy is not trusted any more.

A forked child has no copies: it begins anew, with a thread of its own, when it first asks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable

from bloomgate.errors import BloomgateError, ClientClosed, NotAllowed, NotAuthenticated, NotSupported
from bloomgate.intake import Intake, LeaseState, say_close
from bloomgate.lease_stream import LeaseStream
from bloomgate.options import Backoff
from bloomgate.replica import BOOTTIME, Replica, now
from bloomgate.replies import Result
from bloomgate.session import Session
from bloomgate.transport import LeaseTransport
from bloomgate.v1 import filters_pb2 as pb

_log = logging.getLogger("bloomgate")

# Seconds without a word of the daemon, or this many ticks, after which the stream is given up.
_SILENCE, _SILENT_TICKS = 5.0, 9
# Pauses before a copy is asked for again that was refused.
_REFUSED = Backoff(initial=0.1, most=10.0)


# What does not pass by itself: no stream is begun for a while.
_LASTING = (NotAllowed, NotAuthenticated, NotSupported)

_all: weakref.WeakSet[Leasing] = weakref.WeakSet()


class Leasing:
    """All copies of one client. Any thread may call it."""

    def __init__(self, transport: Callable[[], LeaseTransport], session: Session) -> None:
        """``transport`` is asked for what streams go by when the first one begins."""
        self._transport, self._options, self._metrics = transport, session.options, session.metrics
        self._replicas: dict[str, Replica] = {}
        self._intake = Intake(self._replicas, session.options.replica_max_bytes)
        self._mine = LeaseState()
        self._closed = False
        _all.add(self)

    def after_fork(self) -> None:
        """In a child, before anything else of it runs."""
        self._mine = LeaseState()
        for replica in self._replicas.values():
            replica.begin_anew()

    # -- for handles

    def replica(self, name: str) -> Replica:
        """The copy of a filter, held or not."""
        with self._mine.lock:
            found = self._replicas.get(name)
            if found is None:
                found = Replica(name, self._options.replica_max_bytes, _REFUSED, self.keep)
                self._replicas[name] = found
            return found

    def want(self, replica: Replica) -> None:
        """Lease it, from when it is first used until ``unwant``. Raises ClientClosed."""
        with self._mine.lock:
            if self._closed:
                raise ClientClosed
            replica.wanted += 1
        stream = self._mine.stream
        if stream is not None:
            self._open_due(stream)

    def unwant(self, replica: Replica) -> None:
        """Not any more: the last one voids it, and tells the daemon."""
        mine = self._mine
        with mine.lock:
            replica.wanted = max(0, replica.wanted - 1)
            if not replica.wanted:
                self._release(mine, replica)

    def keep(self, replica: Replica) -> None:
        """See that there is a thread that leases it, in this process. Costs next to nothing if there is."""
        mine = self._mine
        if mine.thread is None and replica.wanted and not self._closed:
            with mine.lock:
                if mine.thread is None:
                    mine.thread = threading.Thread(
                        target=self._run, args=(mine,), name="bloomgate-leases", daemon=True
                    )
                    mine.thread.start()

    def wait(self, replica: Replica, timeout: float) -> bool:
        """Whether it is trusted, now or within ``timeout`` seconds."""
        self.keep(replica)
        mine = self._mine
        with mine.lock:
            return mine.changed.wait_for(lambda: replica.is_trusted or self._closed, timeout) and (
                replica.is_trusted
            )

    @property
    def is_running(self) -> bool:
        """Whether there is a thread, in this process."""
        return self._mine.thread is not None

    def close(self, timeout: float) -> None:
        """Trust nothing any more, tell the daemon and report the last counts, within ``timeout`` seconds."""
        mine = self._mine
        with mine.lock:
            self._closed = True
            for replica in self._replicas.values():
                self._release(mine, replica)
            stream, call, thread = mine.stream, mine.call, mine.thread
            if stream is not None:
                # What may be counted already, under its number, and behind it what is new.
                for _ in range(2):
                    stream.send(pb.LeaseRequest(renew=self._renewal(mine)))
                    mine.uncounted = []
                stream.end()
            mine.changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive() and call is not None:
                call.cancel()
                thread.join(timeout)
        self._count()

    def _release(self, mine: LeaseState, replica: Replica) -> None:
        # In this order: the daemon lets somebody go on.
        for held in replica.let_go():
            if mine.stream is not None:
                say_close(mine.stream, held.subscription)
        replica.asked = None

    # -- the thread

    def _run(self, mine: LeaseState) -> None:
        backoff = Backoff(initial=0.05, most=max(0.05, self._options.reconnect_most))
        pauses = backoff.pauses()
        while not self._closed:
            stream = LeaseStream(mine.replica_id, self._on_tick, lambda: self._renewal(mine))
            try:
                with mine.lock:
                    for replica in self._replicas.values():
                        replica.asked, replica.coming = None, None
                        replica.put_off(0.0)
                    mine.stream = stream
                mine.call = self._transport().lease(stream.requests())
                for response in mine.call:
                    stream.heard_at = now(BOOTTIME)
                    pauses = backoff.pauses()
                    self._intake.take(mine, stream, response)
            except _LASTING as error:
                _log.warning("no copies of filters: %s", error)
                pauses = iter((_REFUSED.most,))
            except BloomgateError as error:
                _log.info("the stream of leases broke: %s", error)
            except Exception:
                _log.exception("leases failed, and begin anew")
                with mine.lock:
                    for replica in self._replicas.values():
                        replica.let_go()
            finally:
                stream.end()
                with mine.lock:
                    mine.stream, mine.call = None, None
            with mine.lock:
                if not self._closed:
                    mine.changed.wait(next(pauses, 1.0))

    # -- what falls due, in the thread that sends

    def _on_tick(self, stream: LeaseStream) -> None:
        mine = self._mine
        silent_for = now(BOOTTIME) - stream.heard_at
        if silent_for > max(_SILENCE, _SILENT_TICKS * stream.tick) and mine.call is not None:
            mine.call.cancel()
        self._open_due(stream)

    def _open_due(self, stream: LeaseStream) -> None:
        mine = self._mine
        with mine.lock:
            if mine.stream is not stream or self._closed:
                return
            for replica in list(self._replicas.values()):
                idle = replica.asked is None and replica.coming is None
                on = replica.held is not None and replica.held.subscription in stream.subscriptions
                if replica.wanted and idle and not on and now(BOOTTIME) >= replica.open_at:
                    mine.opens += 1
                    replica.asked = mine.opens
                    stream.send(pb.LeaseRequest(open=self._open_of(mine.opens, replica)))

    def _open_of(self, number: int, replica: Replica) -> pb.LeaseOpen:
        request = pb.LeaseOpen(open=number, filter=replica.name, max_bytes=replica.max_bytes)
        held = replica.held
        if held is not None:
            request.journal_id, request.filter_id = held.journal_id, held.filter_id
            request.generation, request.seq = held.generation, held.seq
        return request

    def _renewal(self, mine: LeaseState) -> pb.LeaseRenew:
        """Counts go along until a grant says that they are counted; new ones wait for that."""
        with mine.lock:
            if not mine.uncounted:
                mine.uncounted = self._count()
                mine.counts_id += bool(mine.uncounted)
            return pb.LeaseRenew(
                counts_id=mine.counts_id if mine.uncounted else 0, counts=mine.uncounted or None
            )

    def _count(self) -> list[pb.ReplicaCounts]:
        """Put what copies answered into the client's metrics. Returns it for the daemon's."""
        counts = []
        for replica in self._replicas.values():
            skip, hit = replica.counts.take()
            if skip or hit:
                metrics = self._metrics.of_filter(replica.name, "replica")
                metrics.count(Result.SKIP, skip)
                metrics.count(Result.HIT, hit)
                counts.append(pb.ReplicaCounts(filter=replica.name, skip=skip, hit=hit))
        return counts


def _after_fork() -> None:
    for leasing in list(_all):
        with contextlib.suppress(Exception):
            leasing.after_fork()


os.register_at_fork(after_in_child=_after_fork)
