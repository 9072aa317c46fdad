"""Hostile bytes on the ports of a real daemon process, and hostile messages over real gRPC.

It stays up and healthy, keeps what it acknowledged, and ends cleanly; its log has no traceback.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from bloomgate import wire
from bloomgate.v1 import admin_pb2, admin_pb2_grpc, filters_pb2, filters_pb2_grpc
from support.daemon import DaemonProcess

from .calls import KEYS, KNOWN, LIMIT_FLAGS, METHODS, judge_refusal, request_seeds, spares_known
from .targets import Run, Target, folder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GRPC, HTTP, MESSAGE = 0, 1, 2
"""What an input is for, by its first byte modulo 3."""
# Inputs between two looks at the daemon's health and all known keys.
LOOK_EVERY = 200
# Seconds that an answer on a socket is waited for, now and then: most of these inputs get none.
WAIT = 0.02


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _headers(path: str) -> bytes:
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers",
        "content-type": "application/grpc", "grpc-timeout": "5S", "authorization": "Bearer x",
    }  # fmt: skip
    return b"".join(
        # Literal fields, not indexed, no Huffman code.
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def call_frames(path: str, message: bytes) -> bytes:
    """A whole unary call as its first bytes on a connection."""
    return b"".join(
        (
            PREFACE,
            frame(4, 0, 0, b"\0\3\0\0\0\x64\0\4\0\0\xff\xff"),
            frame(4, 1, 0, b""),
            frame(1, 4, 1, _headers(path)),
            frame(0, 1, 1, b"\0" + len(message).to_bytes(4, "big") + message),
        )
    )


def opened_and_reset(stream: int) -> bytes:
    """A call that is taken back at once."""
    return frame(1, 5, stream, _headers("/grpc.health.v1.Health/Check")) + frame(3, 0, stream, bytes(4))


def port_seeds() -> list[bytes]:
    """Whole calls as frames, other frames, HTTP requests, and messages."""
    seeds = []
    for request in request_seeds():
        path, message = METHODS[request[0]][0], request[1:]
        # A frame that is altered could drop the known filter, which would be no finding.
        if not path.endswith("/DropFilter"):
            seeds.append(bytes([GRPC]) + call_frames(path, message))
    check = "/grpc.health.v1.Health/Check"
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    begun = PREFACE + frame(4, 0, 0, b"")
    seeds += [
        bytes([GRPC]) + data
        for data in (
            call_frames(check, b""),
            call_frames("/grpc.health.v1.Health/Watch", b""),
            call_frames(reflection, b"\x3a\0"),
            begun + frame(6, 0, 0, bytes(8)) + frame(7, 0, 0, bytes(8)) + frame(8, 0, 0, b"\0\0\0\1"),
            begun + frame(1, 0, 1, _headers(check)) + frame(9, 4, 1, b"\0\1a\1b") + frame(3, 0, 1, bytes(4)),
            begun + b"".join(map(opened_and_reset, range(1, 101, 2))),
            PREFACE,
            b"",
            b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(200),
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        )
    ]
    seeds += [
        bytes([HTTP]) + data
        for data in (
            b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
            b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n",
            b"POST /livez HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
            b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer bgt_00000000_x\r\nUpgrade: websocket\r\n\r\n",
        )
    ]
    # As many as of the others.
    return seeds + [bytes([MESSAGE]) + request for request in request_seeds()] * 2


PORT_TOKENS = [
    PREFACE, b"\r\n", b"\r\n\r\n", b"\0\0\0\0\0", b"\xff\xff\xff\xff", frame(4, 0, 0, b""),
    frame(0, 0, 1, b""), frame(1, 4, 3, b"\x82\x86\x84"), frame(9, 0, 1, b""), frame(2, 0, 1, bytes(5)),
    frame(5, 4, 1, bytes(4)), frame(0xFF, 0xFF, 2**32 - 1, b"x"), b"\x3f\xff\xff\xff\xff\x0f",
    b"Content-Length: 99999999999\r\n", b"Transfer-Encoding: chunked\r\n", b"A: " + b"b" * 9000 + b"\r\n",
    b"%00", b"/../", b"HTTP/1.1",
]  # fmt: skip


class _Daemon:
    """A daemon with a known filter, a channel to it, and sockets at will."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self._channel = grpc.insecure_channel(daemon.grpc)
        self._filters = filters_pb2_grpc.FilterServiceStub(self._channel)
        admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        spec = filters_pb2.FilterSpec(capacity=1000, error_rate=0.01, hash_scheme=1, seed=1)
        admin.CreateFilter(admin_pb2.CreateFilterRequest(name=KNOWN, spec=spec))
        self._admin = admin
        self._filters.Add(filters_pb2.AddRequest(filter=KNOWN, keys=KEYS))
        # Without serializers: bytes as they are.
        self._methods: list[Any] = [self._channel.unary_unary(path) for path, _ in METHODS]
        self._addresses = {GRPC: _address(daemon.grpc), HTTP: _address(daemon.http)}
        self._tried = 0

    def run(self, data: bytes) -> None:
        """Send it where its first byte says."""
        place, rest = (data[0] % 3, data[1:]) if data else (GRPC, b"")
        if place == MESSAGE:
            self._message(rest)
        else:
            self._connect(place, rest, wait=len(rest) % 8 == 0)
        self._tried += 1
        if self._tried % LOOK_EVERY == 0:
            self.look()

    def _message(self, data: bytes) -> None:
        method = data[0] % len(METHODS) if data else 0
        if not spares_known(method, data[1:]):
            return
        try:
            reply = self._methods[method](data[1:], timeout=30)
        except grpc.RpcError as error:
            details = dict(error.trailing_metadata() or ()).get(wire.DETAILS_KEY, b"")
            judge_refusal(error.code(), error.details() or "", details)
        else:
            assert isinstance(reply, bytes)

    def _connect(self, place: int, data: bytes, *, wait: bool) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError), socket.socket() as connection:
            connection.settimeout(5)
            connection.connect(self._addresses[place])
            connection.sendall(data)
            if wait:
                connection.settimeout(WAIT)
                connection.recv(1 << 16)
            # Reset, not closed in order: the next one begins with no port used up.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def look(self) -> None:
        """It is up, ready, and knows the keys; and there is room for more filters."""
        assert self.daemon.process.poll() is None, self.daemon.log()[-5000:]
        assert self.daemon.get("/readyz") == (200, "ok\n")
        request = filters_pb2.MightContainRequest(filter=KNOWN, keys=KEYS)
        reply = self._filters.MightContain(request, timeout=30)
        assert list(reply.answers) == [filters_pb2.ANSWER_MAYBE] * len(KEYS)
        assert not reply.degraded
        for each in self._admin.ListFilters(admin_pb2.ListFiltersRequest()).filters[9:]:
            if each.name != KNOWN:
                self._admin.DropFilter(admin_pb2.DropFilterRequest(name=each.name))

    def end(self) -> None:
        """It stops as asked, and its log tells of nothing unexpected."""
        self._channel.close()
        assert self.daemon.stop() == 0, self.daemon.log()[-5000:]
        found = [line for line in self.daemon.log().splitlines() if not _expected(line)]
        assert not found, found[:5]


def _expected(line: str) -> bool:
    """Whether a line of the log tells of nothing that went wrong in the daemon."""
    if not line.startswith("{"):
        # grpc.aio prints where a caller is gone before its refusal: the traceback is of its own code.
        return line.startswith(_PRINTED)
    told = json.loads(line)
    if told["level"] in ("info", "warning"):
        return True
    return (
        # False noes are reported by callers, and told to the operator as errors.
        "answered a definite no for" in told["message"]
        # A path that is no UTF-8 fails in gRPC's own code, before ours hears of it; so does telling that to
        # a caller that is gone.
        or (told["logger"] == "grpc._cython.cygrpc" and told["message"].startswith(_OF_GRPC))
        # And an Expect header that is no UTF-8 in aiohttp's.
        or "_default_expect_handler" in told.get("exception", "")
    )


_PRINTED = ("Traceback ", '  File "src/python/grpcio/', "grpc._cython.cygrpc.ExecuteBatchError")
_OF_GRPC = (
    "Unexpected [UnicodeDecodeError] raised by servicer method",
    "Failed sending error status from server",
)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


@contextmanager
def daemon_ports() -> Iterator[Run]:
    """A daemon that is as healthy after every input as before."""
    with folder() as directory:
        daemon = DaemonProcess(directory / "data", *LIMIT_FLAGS)
        try:
            hostile = _Daemon(daemon)
            yield hostile.run
            hostile.look()
            hostile.end()
        finally:
            daemon.kill()


PORTS = Target("the daemon's ports", daemon_ports, port_seeds, 60_000, tokens=PORT_TOKENS)
