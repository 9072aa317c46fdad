"""Raw calls, and what a failed one says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from bloomgate.errors import ERRORS
from bloomgate.v1 import admin_pb2, admin_pb2_grpc, filters_pb2, filters_pb2_grpc

Filters = filters_pb2_grpc.FilterServiceStub
Admin = admin_pb2_grpc.AdminServiceStub

DEFINITELY_NOT, MAYBE = filters_pb2.ANSWER_DEFINITELY_NOT, filters_pb2.ANSWER_MAYBE
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Failure:
    """A failed call: its status, and the details that came with it."""

    code: grpc.StatusCode
    message: str
    reason: str
    fields: Mapping[str, str] = field(default_factory=dict)
    standard: Any = None
    """The one google.rpc detail beside ErrorInfo, if there is one."""
    retry: float | None = None
    """Seconds of RetryInfo."""


def failure(call: Callable[..., Any], request: Any) -> Failure:
    """Make a call that must fail."""
    try:
        reply = call(request, timeout=30)
    except grpc.RpcError as error:
        return failure_of(error)
    raise AssertionError(f"answered {reply!r}")


def failure_of(error: grpc.RpcError) -> Failure:
    """What a status and its details say."""
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    status = status_pb2.Status.FromString(details)
    if details:
        assert (status.code, status.message) == (error.code().value[0], error.details())
    info, retry, standard = error_details_pb2.ErrorInfo(), None, None
    for detail in status.details:
        kind = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])()
        assert detail.Unpack(kind)
        if isinstance(kind, error_details_pb2.ErrorInfo):
            info = kind
            assert info.domain == "bloomgate"
        elif isinstance(kind, error_details_pb2.RetryInfo):
            retry = kind.retry_delay.ToNanoseconds() / 1e9
        else:
            standard = kind
    return Failure(error.code(), error.details() or "", info.reason, dict(info.metadata), standard, retry)


def lease(filters: Filters, name: str, metadata: Any = ()) -> Failure | filters_pb2.LeaseOpened:
    """Ask for a copy of a filter on a stream of its own; the answer, or the failure of either."""
    requests = (
        filters_pb2.LeaseRequest(hello=filters_pb2.LeaseHello(replica=bytes(16))),
        filters_pb2.LeaseRequest(open=filters_pb2.LeaseOpen(open=1, filter=name)),
    )
    stream = filters.Lease(iter(requests), metadata=metadata, timeout=30)
    try:
        response = next(stream)
    except grpc.RpcError as error:
        return failure_of(error)
    finally:
        stream.cancel()
    if response.WhichOneof("message") == "opened":
        return response.opened
    refused = response.refused
    return Failure(grpc.StatusCode[ERRORS[refused.reason].code], refused.message, refused.reason)


def a_name() -> str:
    """A filter name that no other test uses."""
    return f"filter-{next(_numbers)}"


def spec(capacity: int = 1000, error_rate: float = 0.01, **others: Any) -> filters_pb2.FilterSpec:
    """A spec message."""
    return filters_pb2.FilterSpec(capacity=capacity, error_rate=error_rate, **others)


def create(admin: Admin, name: str = "", **fields: Any) -> str:
    """Create a filter and return its name."""
    name = name or a_name()
    reply = admin.CreateFilter(admin_pb2.CreateFilterRequest(name=name, spec=spec(**fields)))
    assert reply.created
    return name


def add(filters: Filters, name: str, *keys: bytes) -> filters_pb2.AddResponse:
    """Add keys."""
    return filters.Add(filters_pb2.AddRequest(filter=name, keys=keys), timeout=30)


def check(filters: Filters, name: str, *keys: bytes) -> list[int]:
    """Ask for keys."""
    request = filters_pb2.MightContainRequest(filter=name, keys=keys)
    return list(filters.MightContain(request, timeout=30).answers)


def stats(filters: Filters, name: str) -> filters_pb2.FilterStats:
    """What a filter is."""
    return filters.Stats(filters_pb2.StatsRequest(filter=name), timeout=30).filter


def eventually(holds: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Ask until it holds, and return what it said then."""
    end = time.monotonic() + seconds
    while not (said := holds()):
        assert time.monotonic() < end, f"not within {seconds} s: {said!r}"
        time.sleep(0.01)
    return said


VERBS: Mapping[str, Callable[[Filters, Admin], tuple[Callable[..., Any], Callable[[str], Any]]]] = {
    "Add": lambda f, _: (f.Add, lambda name: filters_pb2.AddRequest(filter=name, keys=[b"k"])),
    "MightContain": lambda f, _: (
        f.MightContain,
        lambda name: filters_pb2.MightContainRequest(filter=name, keys=[b"k"]),
    ),
    "Stats": lambda f, _: (f.Stats, lambda name: filters_pb2.StatsRequest(filter=name)),
    "ReportOutcomes": lambda f, _: (
        f.ReportOutcomes,
        lambda name: filters_pb2.ReportOutcomesRequest(filter=name, found=1),
    ),
    "HashSpec": lambda f, _: (f.HashSpec, lambda name: filters_pb2.HashSpecRequest(filter=name)),
    "DropFilter": lambda _, a: (a.DropFilter, lambda name: admin_pb2.DropFilterRequest(name=name)),
    "SnapshotFilter": lambda _, a: (
        a.SnapshotFilter,
        lambda name: admin_pb2.SnapshotFilterRequest(name=name),
    ),
}
"""Every verb on a filter that exists: its method, and a request for a filter of some name."""
