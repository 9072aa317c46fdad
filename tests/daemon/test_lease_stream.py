"""The Lease stream on a real daemon: what it takes in, whom it serves, and how it ends."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from bloomgate import Client
from bloomgate.filters.image import from_bytes
from bloomgate.v1 import filters_pb2 as pb
from bloomgated import access
from bloomgated.access import Role
from support.daemon import DaemonProcess

from .calls import failure_of

HELLO = pb.LeaseRequest(hello=pb.LeaseHello(replica=bytes(16)))
METHOD = "/bloomgate.v1.FilterService/Lease"


class Stream:
    """A raw stream: bytes or messages out, messages in."""

    def __init__(self, daemon: DaemonProcess, token: str | None = None) -> None:
        self._channel = grpc.insecure_channel(daemon.grpc)
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        method = self._channel.stream_stream(METHOD, None, pb.LeaseResponse.FromString)
        self.call = method(iter(self._out.get, None), metadata=metadata, timeout=60)

    def send(self, *messages: pb.LeaseRequest | bytes) -> None:
        for each in messages:
            self._out.put(each if isinstance(each, bytes) else each.SerializeToString())

    def end(self) -> None:
        self._out.put(None)

    def next(self, kind: str) -> Any:
        """The next message, which must be of that kind."""
        response = next(self.call)
        assert response.WhichOneof("message") == kind, response
        return getattr(response, kind)

    def failure(self) -> Any:
        """How it ends, whatever comes before."""
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self.call:
                pass
        return failure_of(caught.value)

    def lease(self, name: str) -> int:
        """Hold a copy; its subscription."""
        self.send(HELLO, pb.LeaseRequest(open=pb.LeaseOpen(open=1, filter=name)))
        opened = self.next("opened")
        image = b""
        while len(image) < opened.image_bytes:
            image += self.next("chunk").data
        ack = pb.LeaseAck(subscription=opened.subscription, seq=from_bytes(image).seq)
        self.send(pb.LeaseRequest(ack=ack))
        nonce = 0
        while True:
            nonce += 1
            self.send(pb.LeaseRequest(renew=pb.LeaseRenew(nonce=nonce)))
            if opened.subscription in self.next("grant").subscriptions:
                return int(opened.subscription)

    def close(self) -> None:
        self.call.cancel()
        self._channel.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    flags = ("--set", "lease.streams=3", "--set", "lease.duration=0.5", "--set", "lease.margin=0.1")
    started = DaemonProcess(tmp_path_factory.mktemp("stream") / "data", *flags)
    with Client(started.grpc) as client:
        client.create_filter("fruit", 100)
    yield started
    started.kill()


@pytest.fixture
def stream(daemon: DaemonProcess) -> Iterator[Stream]:
    stream = Stream(daemon)
    yield stream
    stream.close()


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ((pb.LeaseRequest(renew=pb.LeaseRenew(nonce=1)),), "hello"),
        ((pb.LeaseRequest(hello=pb.LeaseHello(replica=b"short")),), "hello"),
        ((HELLO, HELLO), "message"),
        ((HELLO, pb.LeaseRequest()), "message"),
        ((HELLO, b"\xff\xff"), "request"),
        ((HELLO, pb.LeaseRequest(open=pb.LeaseOpen(filter="x" * (2 << 20)))), "message"),
    ],
    ids=["no hello", "short replica", "hello twice", "empty", "no message", "too large"],
)
def test_what_it_does_not_take_ends_the_stream(stream: Stream, messages: Any, field: str) -> None:
    """INVALID_ARGUMENT, with the field."""
    stream.send(*messages)
    failed = stream.failure()
    assert (failed.code, failed.fields["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_an_acknowledgement_of_what_was_not_sent_ends_the_stream(stream: Stream) -> None:
    """It would let Adds go on that the copy does not hold."""
    stream.send(HELLO, pb.LeaseRequest(open=pb.LeaseOpen(open=1, filter="fruit")))
    opened = stream.next("opened")
    ack = pb.LeaseAck(subscription=opened.subscription, seq=1 << 60)
    stream.send(pb.LeaseRequest(ack=ack))
    assert stream.failure().code is grpc.StatusCode.INVALID_ARGUMENT


def test_acknowledging_or_closing_what_is_not_held_does_nothing(stream: Stream) -> None:
    """Perhaps it was, a moment ago."""
    stream.send(
        HELLO,
        pb.LeaseRequest(ack=pb.LeaseAck(subscription=7, seq=7)),
        pb.LeaseRequest(close=pb.LeaseClose(subscription=7)),
        pb.LeaseRequest(renew=pb.LeaseRenew(nonce=5)),
    )
    assert stream.next("grant").nonce == 5


def test_a_stream_ends_when_its_holder_has_no_more_to_say(stream: Stream) -> None:
    """With OK, and after what was asked before is answered."""
    stream.send(HELLO, pb.LeaseRequest(open=pb.LeaseOpen(open=1, filter="absent")))
    stream.end()
    assert stream.next("refused").reason == "FILTER_NOT_FOUND"
    assert list(stream.call) == []
    assert stream.call.code() is grpc.StatusCode.OK


def test_there_are_only_so_many_streams(daemon: DaemonProcess) -> None:
    """One more is refused with a retry delay; calls and health go on."""
    held = [Stream(daemon) for _ in range(3)]
    try:
        for each in held:
            each.send(HELLO, pb.LeaseRequest(renew=pb.LeaseRenew(nonce=1)))
            each.next("grant")
        another = Stream(daemon)
        another.send(HELLO)
        failed = another.failure()
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert failed.retry is not None
        another.close()
        with Client(daemon.grpc) as client:
            assert client.ping(10)
    finally:
        for each in held:
            each.close()


def test_a_holder_that_is_gone_holds_up_adds_until_its_lease_has_run_out(daemon: DaemonProcess) -> None:
    """And no longer; its stream was no proof that it had stopped answering."""
    gone = Stream(daemon)
    gone.lease("fruit")
    gone.close()
    with Client(daemon.grpc) as client:
        began = time.monotonic()
        client.filter("fruit").add("mango")
        assert time.monotonic() - began < 5
        began = time.monotonic()
        client.filter("fruit").add("papaya")
    assert "bloomgate_lease_wait_seconds_count" in daemon.get("/metrics")[1]


def test_whoever_may_not_have_a_copy_any_more_loses_it(tmp_path: Path) -> None:
    """At the next renewal: one filter by its globs, the stream by its token."""
    file = tmp_path / "auth.toml"
    token, entry = access.new_token("holder", [Role.REPLICA, Role.ADMIN], ["*"])
    file.write_text(entry)
    daemon = DaemonProcess(tmp_path / "data", "--set", f"auth.file={file}")
    try:
        with Client(daemon.grpc, token=token) as client:
            client.create_filter("fruit", 100)
        stream = Stream(daemon, token)
        subscription = stream.lease("fruit")
        file.write_text(entry.replace('"*"', '"other-*"'))
        daemon.process.send_signal(signal.SIGHUP)
        reset = _until(stream, "reset")
        assert (reset.subscription, reset.end) == (subscription, pb.LEASE_END_REVOKED)
        file.write_text(access.new_token("somebody else", [Role.READ], ["*"])[1])
        daemon.process.send_signal(signal.SIGHUP)
        with pytest.raises(grpc.RpcError) as caught:
            _until(stream, "never")
        assert failure_of(caught.value).code is grpc.StatusCode.UNAUTHENTICATED
        stream.close()
    finally:
        daemon.kill()


def _until(stream: Stream, kind: str) -> Any:
    """Renew until a message of that kind comes."""
    for nonce in range(1000, 100_000):
        stream.send(pb.LeaseRequest(renew=pb.LeaseRenew(nonce=nonce)))
        response = next(stream.call)
        if response.WhichOneof("message") == kind:
            return getattr(response, kind)
        time.sleep(0.005)
    raise AssertionError(kind)


def test_a_stop_does_not_wait_for_a_holder_that_does_not_answer(tmp_path: Path) -> None:
    """But until its lease has run out; the next start then need not wait."""
    flags = ("--set", "lease.duration=0.5", "--set", "lease.margin=0.1")
    daemon = DaemonProcess(tmp_path / "data", *flags)
    with Client(daemon.grpc) as client:
        client.create_filter("fruit", 100)
    stream = Stream(daemon)
    stream.lease("fruit")
    assert daemon.stop() == 0
    with contextlib.suppress(grpc.RpcError):
        for response in stream.call:
            assert response.WhichOneof("message") in ("reset", "grant")
    stream.close()
    daemon = DaemonProcess(tmp_path / "data", "--set", "lease.duration=60")
    with Client(daemon.grpc) as client:
        client.filter("fruit").add("mango")
    assert "leases of an earlier run" not in daemon.log()
    assert daemon.stop() == 0
