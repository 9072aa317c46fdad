"""The fake gate judges requests as the daemon does, and fails when it is told to."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bloomgate import transport
from bloomgate.errors import (
    BloomgateError,
    FilterNotFound,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    StaleHashId,
    Unavailable,
)
from bloomgate.testing import FakeGate
from bloomgate.v1 import admin_pb2
from bloomgate.v1 import filters_pb2 as pb


def _spec(gate: FakeGate) -> pb.HashSpecResponse:
    return gate.answer(transport.HASH_SPEC, pb.HashSpecRequest(filter="fruit"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"filter": "-bad", "keys": [b"a"]}, "filter"),
        ({"keys": [b"a", b""]}, "keys"),
        ({"keys": [b"a"], "digests": b"x" * 16, "hash_id": 1}, "keys"),
        ({"digests": b"x" * 17, "hash_id": 1}, "digests"),
        ({"digests": b"x" * 16}, "hash_id"),
    ],
)
@pytest.mark.parametrize("method", [transport.ADD, transport.MIGHT_CONTAIN], ids=["Add", "MightContain"])
def test_bad_input_is_refused_by_field(
    gate: FakeGate, method: Any, fields: dict[str, Any], field: str
) -> None:
    """INVALID_ARGUMENT names what was wrong."""
    with pytest.raises(InvalidRequest) as caught:
        gate.answer(method, method.request(**{"filter": "fruit", **fields}))
    assert caught.value.field == field


def test_shapes_are_judged_before_the_hash_id(gate: FakeGate) -> None:
    """Ragged digests are ragged under whichever id; sound ones under a stale id are stale."""
    hash_id = _spec(gate).hash_id + 1
    request = pb.MightContainRequest(filter="fruit", digests=b"x" * 15, hash_id=hash_id)
    with pytest.raises(InvalidRequest):
        gate.answer(transport.MIGHT_CONTAIN, request)
    request.digests = b"x" * 16
    with pytest.raises(StaleHashId):
        gate.answer(transport.MIGHT_CONTAIN, request)


@pytest.mark.parametrize(
    ("limits", "fields", "limit"),
    [
        ({"keys_per_call": 1}, {"keys": [b"a", b"b"]}, ("keys_per_call", 2, 1)),
        ({"keys_per_call": 1}, {"digests": b"x" * 32, "hash_id": 1}, ("keys_per_call", 2, 1)),
        ({"bytes_per_key": 3}, {"keys": [b"a", b"abcd"]}, ("bytes_per_key", 4, 3)),
        ({"bytes_per_call": 5}, {"keys": [b"abc", b"def"]}, ("bytes_per_call", 6, 5)),
    ],
)
def test_limits_are_enforced(
    limits: dict[str, int], fields: dict[str, Any], limit: tuple[str, int, int]
) -> None:
    """With the limit's name, the value and what is allowed."""
    gate = FakeGate(**limits)
    gate.create("fruit")
    with pytest.raises(LimitExceeded) as caught:
        gate.answer(transport.MIGHT_CONTAIN, pb.MightContainRequest(filter="fruit", **fields))
    assert (caught.value.limit, caught.value.value, caught.value.allowed) == limit


def test_nothing_is_created_implicitly(gate: FakeGate) -> None:
    """An add to an unknown filter is an error, and so is every other verb."""
    for method in (
        transport.ADD,
        transport.MIGHT_CONTAIN,
        transport.STATS,
        transport.HASH_SPEC,
        transport.REPORT_OUTCOMES,
    ):
        with pytest.raises(FilterNotFound):
            gate.answer(method, method.request(filter="veg"))  # type: ignore[attr-defined]
    assert len(gate.answer(transport.LIST_FILTERS, admin_pb2.ListFiltersRequest()).filters) == 1


def test_a_bad_spec_is_refused_by_field(gate: FakeGate) -> None:
    """For callers of the wire that judge nothing themselves."""
    request = admin_pb2.CreateFilterRequest(name="veg", spec=pb.FilterSpec(capacity=5, error_rate=0.7))
    with pytest.raises(InvalidRequest) as caught:
        gate.answer(transport.CREATE_FILTER, request)
    assert caught.value.field == "spec.error_rate"


def test_empty_in_empty_out(gate: FakeGate) -> None:
    """No keys, no answers, no error."""
    request = pb.MightContainRequest(filter="fruit")
    assert list(gate.answer(transport.MIGHT_CONTAIN, request).answers) == []


def test_failures_come_as_often_as_asked(gate: FakeGate) -> None:
    """So many times, of one method or of any, in the order in which they were asked for."""
    fruit = gate.client().filter("fruit")
    gate.fail_with(InternalError("a1"), times=2, method="Stats")
    gate.fail_with(Unavailable(), method="ReportOutcomes")
    fruit.add("mango")
    for _ in range(2):
        with pytest.raises(InternalError):
            fruit.stats()
    fruit.stats()
    for _ in range(3):
        with pytest.raises(Unavailable):
            fruit.report_outcomes(found=1)
    gate.recover()
    fruit.report_outcomes(found=1)
    assert gate.outcomes("fruit") == (1, 0, 0)


def test_calls_are_recorded_as_they_were(gate: FakeGate) -> None:
    """Failed ones too, and a request that changes later does not change its record."""
    request = pb.AddRequest(filter="fruit", keys=[b"mango"])
    gate.answer(transport.ADD, request)
    request.keys[0] = b"peach"
    gate.fail_with(Unavailable())
    with pytest.raises(Unavailable):
        gate.answer(transport.ADD, request)
    assert [(call.method, list(call.request.keys)) for call in gate.calls] == [
        ("Add", [b"mango"]),
        ("Add", [b"peach"]),
    ]


def test_what_is_added_to_the_filter_itself_is_in(gate: FakeGate) -> None:
    """``create`` returns the filter, for tests that want it filled."""
    gate.create("veg").add_many(["leek", "kale"])
    assert gate.client().filter("veg").might_contain_many(["leek", "kale"]) == [True, True]


def test_threads_may_share_a_gate(gate: FakeGate) -> None:
    """No add is lost between them."""
    fruit = gate.client().filter("fruit")
    failures: list[BloomgateError] = []

    def add(start: int) -> None:
        try:
            for i in range(start, start + 50):
                fruit.add(f"key-{i}")
        except BloomgateError as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(start,)) for start in range(0, 400, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert fruit.stats().added_count == 400
