"""An add returns when it is acknowledged, and raises otherwise: a lost add is a wrong "no" later."""

from __future__ import annotations

from typing import Any

import pytest

import bloomgate
from bloomgate import Backoff, InvalidKey
from bloomgate.errors import (
    BloomgateError,
    DeadlineExceeded,
    FilterFull,
    FilterNotFound,
    InternalError,
    InvalidRequest,
    JournalFailed,
    LimitExceeded,
    MalformedReply,
    NotServing,
    Overloaded,
    Unavailable,
)
from bloomgate.testing import FakeGate
from bloomgate.v1 import filters_pb2 as pb

from .twins import Twin

QUICK = {"backoff": Backoff(initial=0.0001, most=0.001)}


def test_an_add_says_what_was_certainly_new(twin: Twin, gate: FakeGate) -> None:
    """One by one and in bulk, equal keys of a batch included."""
    fruit = twin.client(gate).filter("fruit")
    assert fruit.add("mango") is True
    assert fruit.add("mango") is False
    assert fruit.add_many(["mango", "peach", b"plum", "peach"]) == [False, True, True, False]


@pytest.mark.parametrize(
    "error", [Unavailable(), NotServing(), JournalFailed(), DeadlineExceeded(), Overloaded(0.0005)]
)
def test_an_add_is_tried_until_it_is_acknowledged(twin: Twin, gate: FakeGate, error: Exception) -> None:
    """Two failures that may pass, then the answer: the caller sees the answer only."""
    gate.fail_with(error, times=2, method="Add")
    fruit = twin.client(gate, **QUICK).filter("fruit")
    assert fruit.add("mango") is True
    gate.fail_with(error, times=2)
    assert fruit.add_many(["peach", "plum"]) == [True, True]
    assert [call.method for call in gate.calls].count("Add") == 4
    assert fruit.might_contain_many(["mango", "peach", "plum"]) == [True] * 3


@pytest.mark.parametrize(
    "error",
    [
        FilterNotFound("fruit"),
        FilterFull("fruit", "capacity", 1, 2),
        InvalidRequest("keys"),
        LimitExceeded("bytes_per_key", 3, 2),
        InternalError("a1"),
        BloomgateError("ABORTED: something"),
    ],
)
def test_what_another_attempt_cannot_mend_is_raised_at_once(
    twin: Twin, gate: FakeGate, error: BloomgateError
) -> None:
    """One call, one error."""
    gate.fail_with(error)
    with pytest.raises(type(error)):
        twin.client(gate, **QUICK).filter("fruit").add("mango")
    assert len(gate.calls) == 1


def test_an_add_that_is_never_acknowledged_raises(twin: Twin, gate: FakeGate) -> None:
    """At the deadline the last error is the caller's, whatever on_error says about checks."""
    gate.fail_with(Unavailable("connection refused"))
    fruit = twin.client(gate, add_timeout=0.02, on_error="maybe", **QUICK).filter("fruit")
    with pytest.raises(Unavailable, match="connection refused"):
        fruit.add("mango")
    with pytest.raises(Unavailable):
        fruit.add_many(["mango", "peach"])
    assert len(gate.calls) > 4


@pytest.mark.parametrize("key", ["", b"", "\ud800"])
def test_an_invalid_key_is_refused_before_anything_is_sent(twin: Twin, gate: FakeGate, key: Any) -> None:
    """A batch with one bad key adds nothing."""
    fruit = twin.client(gate).filter("fruit")
    with pytest.raises(InvalidKey):
        fruit.add(key)
    with pytest.raises(InvalidKey):
        fruit.add_many(["mango", key])
    assert gate.calls == []


def test_a_key_of_another_type_is_refused(twin: Twin, gate: FakeGate) -> None:
    """A number is not quietly made a key: its caller would ask for another one."""
    fruit = twin.client(gate).filter("fruit")
    with pytest.raises(TypeError):
        fruit.add(7)
    with pytest.raises(TypeError):
        fruit.add_many(["mango", 7])
    assert gate.calls == []


def test_a_key_that_is_too_long_is_refused_in_bulk_too(twin: Twin) -> None:
    """Its digest would pass, but the same key alone would not: one rule for both."""
    gate = FakeGate(bytes_per_key=8)
    gate.create("fruit")
    fruit = twin.client(gate).filter("fruit")
    with pytest.raises(LimitExceeded) as alone:
        fruit.add("pineapple")
    with pytest.raises(LimitExceeded) as in_bulk:
        fruit.add_many(["mango", "pineapple"])
    assert vars(alone.value) == vars(in_bulk.value)
    assert fruit.might_contain("mango") is False


def test_limits_that_rose_are_not_held_against_a_key(twin: Twin) -> None:
    """What was read once is read again before a key is refused for it."""
    gate = FakeGate(bytes_per_key=8)
    gate.create("fruit")
    fruit = twin.client(gate).filter("fruit")
    fruit.add_many(["mango"])
    gate._verbs.limits.bytes_per_key = 16
    assert fruit.add_many(["pineapple", "peach"]) == [True, True]
    assert fruit.might_contain("pineapple") is True


def test_limits_that_shrank_split_the_add_again(twin: Twin, gate: FakeGate) -> None:
    """A daemon restarted with lower limits refuses once, and every key is in all the same."""
    fruit = twin.client(gate, keys_per_call=4).filter("fruit")
    keys = [f"key-{i}" for i in range(10)]
    assert fruit.add_many(keys[:1]) == [True]
    gate._verbs.limits.keys_per_call = 3
    assert fruit.add_many(keys) == [False] + [True] * 9
    sent = [len(call.request.digests) // 16 for call in gate.calls if call.method == "Add"]
    assert sent == [1, 4, 3, 3, 3, 1]
    gate.fail_with(LimitExceeded("bytes_per_call", 3, 2), method="Add")
    with pytest.raises(LimitExceeded):
        fruit.add_many(keys)


def test_a_full_filter_is_full_for_kernel_and_client(twin: Twin, gate: FakeGate) -> None:
    """The whole batch is refused, with the limit and what it would have taken."""
    gate.create("small", 3, on_full="reject")
    small = twin.client(gate).filter("small")
    with pytest.raises(bloomgate.FilterFull) as caught:
        small.add_many(["a", "b", "c", "d"])
    assert (caught.value.limit, caught.value.allowed, caught.value.needed) == ("capacity", 3, 4)
    assert small.might_contain_many(["a", "b"]) == [False, False]


@pytest.mark.parametrize("answers", [0, 1, 3])
def test_an_acknowledgement_of_other_keys_is_none(twin: Twin, gate: FakeGate, answers: int) -> None:
    """Two keys need two answers; anything else raises."""

    class Miscounting:
        def unary(self, method: Any, request: Any, _timeout: float) -> Any:
            reply = gate.answer(method, request)
            return pb.AddResponse(was_new=[True] * answers) if isinstance(reply, pb.AddResponse) else reply

    fruit = twin.over(Miscounting()).filter("fruit")
    with pytest.raises(MalformedReply):
        fruit.add_many(["mango", "peach"])


def test_a_bulk_add_that_breaks_off_can_be_repeated(twin: Twin, gate: FakeGate) -> None:
    """The keys before the failure are in; adding all of them again adds the rest."""
    adds = []

    class BreaksOff:
        def unary(self, method: Any, request: Any, _timeout: float) -> Any:
            if isinstance(request, pb.AddRequest):
                adds.append(request)
                if len(adds) == 2:
                    raise InternalError("a1")
            return gate.answer(method, request)

    fruit = twin.over(BreaksOff(), keys_per_call=2).filter("fruit")
    with pytest.raises(InternalError):
        fruit.add_many(list("abcd"))
    assert fruit.might_contain_many(list("abcd")) == [True, True, False, False]
    assert fruit.add_many(list("abcd")) == [False, False, True, True]


def test_no_keys_are_no_call(twin: Twin, gate: FakeGate) -> None:
    """Empty in, empty out."""
    assert twin.client(gate).filter("fruit").add_many([]) == []
    assert gate.calls == []


def test_raw_keys_of_a_bulk_add_stay_here(twin: Twin, gate: FakeGate) -> None:
    """Only digests are sent."""
    twin.client(gate).filter("fruit").add_many(["secret-key", "other-key"])
    request = gate.calls[-1].request
    assert (len(request.digests), len(request.keys)) == (32, 0)
    assert b"secret-key" not in b"".join(call.request.SerializeToString() for call in gate.calls)
