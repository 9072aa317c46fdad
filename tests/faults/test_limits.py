"""Every limit: what is allowed at it, what is refused one beyond, with its name and the value."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from bloomgate.filters import FilterSpec
from bloomgate.v1 import admin_pb2, filters_pb2
from bloomgated import config as settings
from daemon.calls import Failure, failure
from support.daemon import DaemonProcess, peak, refused
from support.tally import record

# The filters that these tests make, and the bytes of each.
SMALL = {"capacity": 1000, "error_rate": 0.01}
FILTER = FilterSpec.plan(1000, 0.01).first_body.nbytes
KEYS = tuple(settings.keys())
Stubs = tuple[Any, Any]


def create(stubs: Stubs, name: str, **spec: Any) -> Any:
    message = filters_pb2.FilterSpec(**{**SMALL, **spec})
    return stubs[1].CreateFilter, admin_pb2.CreateFilterRequest(name=name, spec=message)


def add(*keys: bytes) -> Callable[[Stubs], Any]:
    return lambda stubs: (stubs[0].Add, filters_pb2.AddRequest(filter="fruit", keys=keys))


def check(*keys: bytes) -> Callable[[Stubs], Any]:
    return lambda stubs: (stubs[0].MightContain, filters_pb2.MightContainRequest(filter="fruit", keys=keys))


def digests(count: int) -> Callable[[Stubs], Any]:
    def ask(stubs: Stubs) -> Any:
        hash_id = stubs[0].HashSpec(filters_pb2.HashSpecRequest(filter="fruit")).hash_id
        request = filters_pb2.MightContainRequest(filter="fruit", digests=bytes(16 * count), hash_id=hash_id)
        return stubs[0].MightContain, request

    return ask


TOO_MANY = [b"%d" % number for number in range(4000)]
LARGER = FilterSpec.plan(2000, 0.01).first_body.nbytes
AT, OVER = TOO_MANY[:10], TOO_MANY[:11]
FITS = add(*TOO_MANY[:900])


def second(stubs: Stubs) -> Any:
    return create(stubs, "second")


def third(stubs: Stubs) -> Any:
    return create(stubs, "third")


def larger(stubs: Stubs) -> Any:
    return create(stubs, "third", capacity=2000)


# Limit, its value, what it allows, what it refuses, and what the refusal says of it.
ROWS = (
    ("keys_per_call", 10, add(*AT), add(*OVER), "limited to 10, got 11"),
    ("keys_per_call", 10, check(*AT), check(*OVER), "limited to 10, got 11"),
    ("keys_per_call", 10, digests(10), digests(11), "limited to 10, got 11"),
    ("bytes_per_key", 10, add(b"k" * 10), add(b"k" * 11), "limited to 10, got 11"),
    ("bytes_per_key", 10, check(b"k" * 10), check(b"k" * 11), "limited to 10, got 11"),
    ("bytes_per_call", 100, add(b"k" * 50, b"l" * 50), add(b"k" * 50, b"l" * 51), "limited to 100, got 101"),
    ("bytes_per_call", 160, digests(10), digests(11), "limited to 160, got 176"),
    ("filters", 2, second, third, "limited to 2, got 3"),
    ("filter_bytes", FILTER, second, larger, f"limited to {FILTER}, got {LARGER}"),
    ("filter_bytes", FILTER, FITS, add(*TOO_MANY), f"filter_bytes is {FILTER}, this batch needs"),
    ("total_bytes", 2 * FILTER, second, third, f"limited to {2 * FILTER}, got {3 * FILTER}"),
    ("total_bytes", 2 * FILTER, FITS, add(*TOO_MANY), f"total_bytes is {2 * FILTER}, this batch needs"),
)
# Those that are about several calls at once have tests of their own.
ELSEWHERE = {
    "concurrent_calls": "test_overload.py::test_more_calls_than_allowed",
    "bytes_under_way": "test_overload.py::test_more_bytes_than_allowed",
    "streams": "test_overload.py::test_idle_streams_have_caps_of_their_own",
}


def test_every_limit_has_its_test() -> None:
    """A limit that is new must be added here; the queue's is the journal's own."""
    limits = {key.removeprefix("limits.") for key in KEYS if key.startswith("limits.")}
    assert limits == {row[0] for row in ROWS} | set(ELSEWHERE)
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in Path(__file__).with_name(file).read_text()


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{number}" for number, row in enumerate(ROWS)])
def test_a_limit_allows_what_is_at_it_and_refuses_what_is_beyond(row: Any, start_daemon: Any) -> None:
    """The refusal names limit and value, is never worth another attempt, and has changed nothing."""
    limit, value, allowed, beyond, says = row
    daemon: DaemonProcess = start_daemon("--set", f"limits.{limit}={value}")
    with daemon.stubs() as stubs:
        call, request = create(stubs, "fruit")
        call(request, timeout=30)
        call, request = allowed(stubs)
        call(request, timeout=30)
        before = stubs[1].ListFilters(admin_pb2.ListFiltersRequest(), timeout=30).SerializeToString()
        said: Failure = failure(*beyond(stubs))
        assert said.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert limit in said.message
        assert says in said.message
        assert said.reason in ("LIMIT_EXCEEDED", "FILTER_FULL")
        assert said.fields["limit"] == limit
        assert said.fields["allowed"] == str(value)
        assert said.retry is None
        assert stubs[1].ListFilters(admin_pb2.ListFiltersRequest(), timeout=30).SerializeToString() == before
    record("a call one beyond a limit", 1, "is refused with the limit and the value, nothing is changed")


def test_limits_are_enforced_before_memory_is_taken(start_daemon: Any) -> None:
    """A hundred asks for a terabyte leave the daemon as large as it was: within 50 MB."""
    daemon: DaemonProcess = start_daemon()
    with daemon.stubs() as stubs:
        call, request = create(stubs, "fruit")
        call(request, timeout=30)
        before = peak(daemon)
        for number in range(100):
            call, request = create(stubs, f"huge-{number}", capacity=10**11, error_rate=1e-9)
            assert failure(call, request).reason == "LIMIT_EXCEEDED"
        assert peak(daemon) - before < 50_000


def test_every_limit_is_reported() -> None:
    """By `bloomgated config`, with its value and where that is from."""
    ended = refused("config", "--set", "limits.keys_per_call=7")
    for key in KEYS:
        if key.startswith("limits."):
            assert re.search(rf"^{key.removeprefix('limits.')} = \d+ +# ", ended.stdout, re.MULTILINE), key
    assert re.search(r"^keys_per_call = 7 +# flag$", ended.stdout, re.MULTILINE)
    assert re.search(r"^max_queued_bytes = \d+ +# default$", ended.stdout, re.MULTILINE)
