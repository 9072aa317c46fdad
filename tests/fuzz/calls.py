"""Raw request bytes through the real handlers, in this process: no socket, but a real journal and files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from prometheus_client import CollectorRegistry

from bloomgate import wire
from bloomgate.errors import ERRORS, BloomgateError, InternalError
from bloomgate.v1 import admin_pb2, filters_pb2
from bloomgated.api.server import ApiServer
from bloomgated.config import LimitsConfig
from bloomgated.gate import Gate
from bloomgated.metrics import CallMetrics
from bloomgated.requests import Keys
from daemon.inside import asked, open_gate

from .targets import Run, Target, folder

KNOWN, KEYS = "known", [b"key-%d" % n for n in range(200)]
"""A filter, and its acknowledged keys."""
METHODS: list[tuple[str, Any]] = [
    ("/bloomgate.v1.FilterService/MightContain", filters_pb2.MightContainRequest),
    ("/bloomgate.v1.FilterService/Add", filters_pb2.AddRequest),
    ("/bloomgate.v1.FilterService/Stats", filters_pb2.StatsRequest),
    ("/bloomgate.v1.FilterService/ReportOutcomes", filters_pb2.ReportOutcomesRequest),
    ("/bloomgate.v1.FilterService/HashSpec", filters_pb2.HashSpecRequest),
    ("/bloomgate.v1.FilterService/Lease", filters_pb2.LeaseRequest),
    ("/bloomgate.v1.AdminService/CreateFilter", admin_pb2.CreateFilterRequest),
    ("/bloomgate.v1.AdminService/ListFilters", admin_pb2.ListFiltersRequest),
    ("/bloomgate.v1.AdminService/DropFilter", admin_pb2.DropFilterRequest),
    ("/bloomgate.v1.AdminService/SnapshotFilter", admin_pb2.SnapshotFilterRequest),
]
# Of limits that small much is refused, and what is not costs little.
LIMITS = LimitsConfig(
    keys_per_call=1000, bytes_per_call=32 << 10, filters=12, filter_bytes=1 << 20, total_bytes=4 << 20
)
LIMIT_FLAGS = [
    flag
    for key in ("keys_per_call", "bytes_per_call", "filters", "filter_bytes", "total_bytes")
    for flag in ("--set", f"limits.{key}={getattr(LIMITS, key)}")
]
# Inputs between two looks at all known keys.
LOOK_EVERY = 200


def spares_known(method: int, data: bytes) -> bool:
    """Whether this is not a request to drop the known filter."""
    if not METHODS[method][0].endswith("/DropFilter"):
        return True
    try:
        request: Any = admin_pb2.DropFilterRequest.FromString(data)
    except DecodeError:
        return True
    return bool(request.name != KNOWN)


def response_of(request: Any) -> Any:
    """The type of what answers a request."""
    name = request.DESCRIPTOR.name.replace("Request", "Response")
    return GetMessageClass(request.DESCRIPTOR.file.message_types_by_name[name])


def judge_refusal(code: grpc.StatusCode, message: str, details: bytes) -> BloomgateError:
    """A refusal is one of the table, and not the one that stands for what nobody expected."""
    error = wire.decode(code, message, details)
    assert not isinstance(error, InternalError), message
    assert type(error) in ERRORS.values(), f"{code}: {message}"
    assert type(error) is not BloomgateError, f"{code}: {message}"
    assert details, f"{code}: {message}"
    return error


def request_seeds() -> list[bytes]:
    """Valid requests of every method; the first byte says which."""
    spec = filters_pb2.FilterSpec(capacity=100, error_rate=0.01)
    other = filters_pb2.FilterSpec(
        kind=1, capacity=7, error_rate=0.5, on_full=2, hash_scheme=1, seed=5, key_format="e-mail"
    )
    hash_id = asked(seed=1).spec.hasher.hash_id
    digests = bytes(range(64))
    requests: list[Any] = [
        filters_pb2.MightContainRequest(filter=KNOWN, keys=KEYS[:3]),
        filters_pb2.MightContainRequest(filter=KNOWN, digests=digests, hash_id=hash_id),
        filters_pb2.MightContainRequest(filter="other", keys=[b"k"] * 30),
        filters_pb2.AddRequest(filter=KNOWN, keys=KEYS[:2]),
        filters_pb2.AddRequest(filter="other", keys=[b"a", b"b"]),
        filters_pb2.AddRequest(filter=KNOWN, digests=digests, hash_id=hash_id),
        filters_pb2.StatsRequest(filter=KNOWN),
        filters_pb2.ReportOutcomesRequest(filter="other", found=1, not_found=2**64 - 1, false_no=3),
        filters_pb2.HashSpecRequest(filter=KNOWN),
        filters_pb2.LeaseRequest(open=filters_pb2.LeaseOpen(open=1, filter=KNOWN, max_bytes=1 << 20)),
        filters_pb2.LeaseRequest(
            open=filters_pb2.LeaseOpen(filter="other", journal_id=bytes(16), filter_id=1, generation=1, seq=1)
        ),
        filters_pb2.LeaseRequest(ack=filters_pb2.LeaseAck(subscription=1, seq=3)),
        filters_pb2.LeaseRequest(close=filters_pb2.LeaseClose(subscription=1)),
        filters_pb2.LeaseRequest(
            renew=filters_pb2.LeaseRenew(
                nonce=1,
                counts_id=2,
                counts=[filters_pb2.ReplicaCounts(filter="other", skip=2**64 - 1, hit=1)],
            )
        ),
        admin_pb2.CreateFilterRequest(name="other", spec=spec),
        admin_pb2.CreateFilterRequest(name="a.b-c_9", spec=other),
        admin_pb2.CreateFilterRequest(name=KNOWN, spec=spec),
        admin_pb2.ListFiltersRequest(),
        admin_pb2.DropFilterRequest(name="other"),
        admin_pb2.SnapshotFilterRequest(name="other"),
        admin_pb2.SnapshotFilterRequest(name=KNOWN),
    ]
    number = {type_: index for index, (_, type_) in enumerate(METHODS)}
    return [bytes([number[type(request)]]) + request.SerializeToString() for request in requests]


class _Server:
    """Stands where grpc.aio's server would, and keeps the handlers."""

    def __init__(self) -> None:
        self.generic: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.generic += handlers

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


HELLO = filters_pb2.LeaseRequest(hello=filters_pb2.LeaseHello(replica=bytes(16))).SerializeToString()


class _Context:
    """What the handlers ask of a call. On a stream it brings ``messages``, and keeps what is written."""

    refused: tuple[grpc.StatusCode, str, bytes] | None = None

    def __init__(self, *messages: bytes) -> None:
        self._messages = iter(messages)
        self.written: list[bytes] = []

    async def read(self) -> object:
        return next(self._messages, grpc.aio.EOF)

    async def write(self, data: bytes) -> None:
        self.written.append(data)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def code(self) -> grpc.StatusCode | None:
        return self.refused[0] if self.refused else None

    async def abort(self, code: grpc.StatusCode, message: str = "", trailing_metadata: Any = ()) -> None:
        self.refused = code, message, dict(trailing_metadata).get(wire.DETAILS_KEY, b"")
        raise grpc.aio.AbortError


class _Internal(logging.Handler):
    """Keeps the exception behind the last INTERNAL."""

    last: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.last = record.exc_info[1]


def handlers_of(gate: Gate) -> dict[str, Any]:
    """The methods' handlers as the daemon registers them, by path."""
    server = _Server()
    with mock.patch.object(grpc.aio, "server", return_value=server):
        ApiServer(gate, LIMITS, CallMetrics(CollectorRegistry()))
    found = {}
    for path, _ in METHODS:
        details = mock.Mock(method=path, invocation_metadata=())
        found[path] = next(handler for each in server.generic if (handler := each.service(details)))
    return found


@contextmanager
def request_bytes() -> Iterator[Run]:
    """An answer, or a refusal of the table; and after it all the known keys are answered maybe."""
    internal, log = _Internal(), logging.getLogger("bloomgated.api.errors")
    log.addHandler(internal)
    with folder() as directory, asyncio.Runner() as runner:
        opened = open_gate(directory, LIMITS)
        gate, _ = runner.run(opened.__aenter__())
        tried = 0

        async def begin() -> dict[str, Any]:
            await gate.create(KNOWN, asked(seed=1))
            await gate.add(KNOWN, Keys(tuple(KEYS)))
            return handlers_of(gate)

        handlers = runner.run(begin())

        async def look() -> None:
            answers, unsure = await gate.might_contain(KNOWN, Keys(tuple(KEYS)))
            assert all(answers), "a known key is answered no"
            assert not unsure
            for entry in list(gate.catalog)[LIMITS.filters - 2 :]:
                # Room for the next ones.
                if entry.name != KNOWN:
                    await gate.drop(entry.name)

        async def call(method: int, data: bytes) -> None:
            path, request = METHODS[method]
            handler, context = handlers[path], _Context(HELLO, data)
            try:
                if handler.request_streaming:
                    await handler.stream_stream(None, context)
                    for each in context.written:
                        assert filters_pb2.LeaseResponse.FromString(each).WhichOneof("message")
                    return
                reply = await handler.unary_unary(data, context)
            except grpc.aio.AbortError:
                assert context.refused is not None
                if context.refused[0] is grpc.StatusCode.INTERNAL:
                    raise AssertionError("INTERNAL") from internal.last
                judge_refusal(*context.refused)
                return
            reply = response_of(request).FromString(handler.response_serializer(reply))
            if path.endswith(("/MightContain", "/Add")):
                asked_for = request.FromString(data)
                given = reply.answers if path.endswith("/MightContain") else reply.was_new
                assert len(given) == (len(asked_for.keys) or len(asked_for.digests) // 16)

        def run(data: bytes) -> None:
            nonlocal tried
            method = data[0] % len(METHODS) if data else 0
            if spares_known(method, data[1:]):
                runner.run(call(method, data[1:]))
            tried += 1
            if tried % LOOK_EVERY == 0:
                runner.run(look())

        try:
            yield run
            runner.run(look())
        finally:
            log.removeHandler(internal)
            runner.run(opened.__aexit__(None, None, None))


CALLS = Target("request bytes", request_bytes, request_seeds, 120_000)
