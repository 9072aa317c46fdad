"""A guard skips lookups that are certainly in vain, and reports what the others found."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from bloomgate import Client, ClientOptions, ParameterError
from bloomgate.errors import FilterNotFound, Unavailable
from bloomgate.testing import FakeGate
from bloomgate.v1 import filters_pb2 as pb

from .twins import Clock, Twin


class Authority:
    """What really holds keys. Remembers what it was asked."""

    def __init__(self, **held: Any) -> None:
        self.held = held
        self.asked: list[Any] = []

    def look_up(self, key: str) -> Any:
        self.asked.append(key)
        return self.held.get(key)

    def look_up_many(self, keys: list[Any]) -> list[Any]:
        self.asked.append(list(keys))
        return [self.held.get(key) for key in keys]


@pytest.fixture
def authority(gate: FakeGate) -> Authority:
    """Holds mango, which the filter knows; the filter also says maybe for ghost, which it does not hold."""
    gate.client().filter("fruit").add_many(["mango", "ghost"])
    del gate.calls[:]
    return Authority(mango=1)


def test_a_definite_no_is_absent_without_a_lookup(twin: Twin, gate: FakeGate, authority: Authority) -> None:
    """And a maybe is what the lookup says."""
    guard = twin.client(gate).filter("fruit").guard(twin.lookup(authority.look_up))
    assert guard("mango") == 1
    assert guard("ghost") is None
    assert guard("papaya") is None
    assert authority.asked == ["mango", "ghost"]


def test_outcomes_are_what_the_authority_said_after_hits(
    twin: Twin, gate: FakeGate, authority: Authority
) -> None:
    """Found and not found; a skip is no outcome."""
    guard = twin.client(gate).filter("fruit").guard(twin.lookup(authority.look_up))
    for key in ("mango", "mango", "ghost", "papaya"):
        guard(key)
    assert gate.outcomes("fruit") == (0, 0, 0)
    guard.flush()
    assert gate.outcomes("fruit") == (2, 1, 0)
    guard.flush()
    assert gate.outcomes("fruit") == (2, 1, 0)


def test_absent_is_the_callers_word(twin: Twin, gate: FakeGate, authority: Authority) -> None:
    """What equals ``absent`` counts as not found, and None does not if it is not it."""
    authority.held.update(ghost=[])
    guard = twin.client(gate).filter("fruit").guard(twin.lookup(authority.look_up), absent=[])
    assert guard("papaya") == []
    assert guard("ghost") == []
    assert guard("mango") == 1
    guard.flush()
    assert gate.outcomes("fruit") == (1, 1, 0)


def test_a_result_that_cannot_be_compared_is_returned(
    twin: Twin, gate: FakeGate, authority: Authority
) -> None:
    """Arrays and the like: no outcome, but the caller's result all the same."""

    class Odd:
        def __ne__(self, other: object) -> bool:
            raise ValueError("ambiguous")

        __hash__ = None  # type: ignore[assignment]

    odd = authority.held["mango"] = Odd()
    guard = twin.client(gate).filter("fruit").guard(twin.lookup(authority.look_up))
    assert guard("mango") is odd
    guard.flush()
    assert gate.outcomes("fruit") == (0, 0, 0)


def test_a_lookup_after_a_fallback_is_no_outcome(twin: Twin, gate: FakeGate, authority: Authority) -> None:
    """The filter did not say maybe, nobody did: counting it would make the error rate one of outages."""
    guard = twin.client(gate, check_timeout=0.001).filter("fruit").guard(twin.lookup(authority.look_up))
    gate.fail_with(Unavailable(), method="MightContain")
    assert guard("mango") == 1
    assert guard("papaya") is None
    assert guard.many(["mango", "papaya"]) == [1, None]
    gate.recover()
    guard.flush()
    assert gate.outcomes("fruit") == (0, 0, 0)


def test_a_lookup_after_a_degraded_answer_is_no_outcome(
    twin: Twin, gate: FakeGate, authority: Authority
) -> None:
    """The daemon said maybe for want of a proof: that is no false positive of the filter."""

    class Degraded:
        def unary(self, method: Any, request: Any, _timeout: float) -> Any:
            reply = gate.answer(method, request)
            if isinstance(reply, pb.MightContainResponse):
                return pb.MightContainResponse(answers=[pb.ANSWER_MAYBE] * len(reply.answers), degraded=True)
            return reply

    guard = twin.over(Degraded()).filter("fruit").guard(twin.lookup(authority.look_up))
    assert guard("papaya") is None
    assert guard.many(["mango", "papaya"]) == [1, None]
    guard.flush()
    assert "ReportOutcomes" not in [call.method for call in gate.calls]


def test_an_exception_of_the_lookup_passes_and_is_no_outcome(
    twin: Twin, gate: FakeGate, authority: Authority
) -> None:
    """The authority said nothing."""

    def look_up(_key: str) -> None:
        raise LookupError("the database is down")

    guard = twin.client(gate).filter("fruit").guard(twin.lookup(look_up))
    with pytest.raises(LookupError):
        guard("mango")
    with pytest.raises(LookupError):
        guard.many(["mango"])
    guard.flush()
    assert gate.outcomes("fruit") == (0, 0, 0)
    assert authority.asked == []


# -- reports


def _reports(gate: FakeGate) -> int:
    return [call.method for call in gate.calls].count("ReportOutcomes")


def test_outcomes_are_reported_once_a_second_at_most(
    twin: Twin, gate: FakeGate, clock: Clock, authority: Authority
) -> None:
    """By the next guarded call after the interval, all in one."""
    guard = twin.client(gate, clock=clock).filter("fruit").guard(twin.lookup(authority.look_up))
    for _ in range(5):
        guard("mango")
    assert _reports(gate) == 0
    clock.now += 1.0
    guard("ghost")
    assert gate.outcomes("fruit") == (5, 1, 0)
    guard("mango")
    clock.now += 0.9
    guard("mango")
    assert _reports(gate) == 1
    clock.now += 0.1
    guard("papaya")
    assert gate.outcomes("fruit") == (7, 1, 0)
    assert _reports(gate) == 2


def test_a_report_that_fails_is_made_good(
    twin: Twin, gate: FakeGate, clock: Clock, authority: Authority
) -> None:
    """The guarded call does not hear of it, and the counts are in the next report, once."""
    guard = twin.client(gate, clock=clock).filter("fruit").guard(twin.lookup(authority.look_up))
    gate.fail_with(Unavailable(), method="ReportOutcomes")
    for _ in range(3):
        clock.now += 1.0
        assert guard("mango") == 1
    assert _reports(gate) == 3
    guard.flush()
    gate.recover()
    clock.now += 1.0
    guard("ghost")
    assert gate.outcomes("fruit") == (3, 1, 0)


def test_a_transport_that_breaks_does_not_break_the_guarded_call(
    twin: Twin, gate: FakeGate, clock: Clock, authority: Authority
) -> None:
    """Not even by an exception of its own."""
    guard = twin.client(gate, clock=clock).filter("fruit").guard(twin.lookup(authority.look_up))
    gate.fail_with(RuntimeError("cannot start new thread"), method="ReportOutcomes")
    clock.now += 1.0
    assert guard("mango") == 1
    guard.flush()
    gate.recover()
    guard.flush()
    assert gate.outcomes("fruit") == (1, 0, 0)


def test_closing_the_client_reports_the_rest(twin: Twin, gate: FakeGate, authority: Authority) -> None:
    """Of every guard, those that nobody holds any more included."""
    client = twin.client(gate)
    client.filter("fruit").guard(twin.lookup(authority.look_up))("mango")
    client.filter("fruit").guard(twin.lookup(authority.look_up))("ghost")
    client.close()
    assert gate.outcomes("fruit") == (1, 1, 0)


def test_outcomes_can_be_reported_by_hand(twin: Twin, gate: FakeGate) -> None:
    """For callers with a lookup of their own; an impossible count is refused by name."""
    fruit = twin.client(gate).filter("fruit")
    fruit.report_outcomes(found=3, not_found=2, false_no=1)
    assert gate.outcomes("fruit") == (3, 2, 1)
    with pytest.raises(ParameterError, match="not_found"):
        fruit.report_outcomes(not_found=-1)
    gate.fail_with(FilterNotFound("fruit"))
    with pytest.raises(FilterNotFound):
        fruit.report_outcomes(found=1)


# -- audits


def test_an_audit_looks_up_its_share_of_the_noes(twin: Twin, gate: FakeGate, authority: Authority) -> None:
    """random() below ``audit`` looks up; a no that is none is found out, and is not an outcome else."""
    draws = iter([0.5, 0.0009, 0.001, 0.9])
    client = twin.client(gate, random=lambda: next(draws))
    guard = client.filter("fruit").guard(twin.lookup(authority.look_up), audit=0.001)
    assert [guard(key) for key in ("a", "b", "c", "d")] == [None] * 4
    assert authority.asked == ["b"]
    guard.flush()
    assert _reports(gate) == 0


def test_a_false_no_is_returned_and_shouted(
    twin: Twin, gate: FakeGate, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """The found result goes to the caller, an error with the filter's name to the log, and not the key."""
    authority.held["secret-key"] = 9
    guard = twin.client(gate).filter("fruit").guard(twin.lookup(authority.look_up), audit=1.0)
    with caplog.at_level(logging.ERROR, "bloomgate"):
        assert guard("secret-key") == 9
        assert guard.many(["papaya", "secret-key"]) == [None, 9]
    guard.flush()
    assert gate.outcomes("fruit") == (0, 0, 2)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all("fruit" in record.getMessage() for record in errors)
    assert "secret-key" not in caplog.text


def test_without_an_audit_nothing_is_drawn(twin: Twin, gate: FakeGate, authority: Authority) -> None:
    """The default costs nothing and looks nothing up."""

    def random() -> float:
        raise AssertionError("drawn")

    guard = twin.client(gate, random=random).filter("fruit").guard(twin.lookup(authority.look_up))
    assert guard("papaya") is None


@pytest.mark.parametrize("audit", [-0.1, 1.1, float("nan"), "0.1", True])
def test_an_audit_is_a_share(twin: Twin, gate: FakeGate, audit: Any) -> None:
    """From 0 to 1, and refused when the guard is made."""
    with pytest.raises(ParameterError, match="audit"):
        twin.client(gate).filter("fruit").guard(twin.lookup(len), audit=audit)


# -- in bulk


def test_many_keys_are_one_check_and_lookups_for_maybes(
    twin: Twin, gate: FakeGate, authority: Authority
) -> None:
    """Results in the order asked."""
    guard = twin.client(gate).filter("fruit").guard(twin.lookup(authority.look_up))
    assert guard.many(iter(["papaya", "mango", "ghost", "peach", "mango"])) == [None, 1, None, None, 1]
    assert authority.asked == ["mango", "ghost", "mango"]
    assert [call.method for call in gate.calls].count("MightContain") == 1
    guard.flush()
    assert gate.outcomes("fruit") == (2, 1, 0)


@pytest.mark.parametrize("given_at", ["creation", "call"])
def test_many_keys_can_be_one_lookup(twin: Twin, gate: FakeGate, authority: Authority, given_at: str) -> None:
    """``lookup_many`` gets the maybes in order, in one call; none, and it is not called."""
    many = twin.lookup(authority.look_up_many)
    fruit = twin.client(gate).filter("fruit")
    guard = fruit.guard(twin.lookup(authority.look_up), lookup_many=many if given_at == "creation" else None)
    more: tuple[Callable[..., Any], ...] = (many,) if given_at == "call" else ()
    assert guard.many(["papaya", "mango", "peach", "ghost"], *more) == [None, 1, None, None]
    assert guard.many(["papaya"], *more) == [None]
    assert authority.asked == [["mango", "ghost"]]
    guard.flush()
    assert gate.outcomes("fruit") == (1, 1, 0)


def test_a_lookup_many_that_leaves_keys_out_is_refused(
    twin: Twin, gate: FakeGate, authority: Authority
) -> None:
    """Results that cannot be told apart are not handed out, nor counted."""
    guard = twin.client(gate).filter("fruit").guard(twin.lookup(authority.look_up))
    with pytest.raises(ValueError, match="1 of 2"):
        guard.many(["mango", "ghost"], twin.lookup(lambda keys: keys[:1]))
    guard.flush()
    assert gate.outcomes("fruit") == (0, 0, 0)


def test_no_keys_are_no_call(twin: Twin, gate: FakeGate, authority: Authority) -> None:
    """Empty in, empty out."""
    guard = twin.client(gate).filter("fruit").guard(twin.lookup(authority.look_up))
    assert guard.many([]) == []
    assert (gate.calls, authority.asked) == ([], [])


# -- as a decorator


def test_a_guarded_function_is_called_for_maybes_alone(gate: FakeGate, authority: Authority) -> None:
    """Its first argument is the key, by place or by name; it keeps its name and its other arguments."""
    with gate.client() as client:

        @client.filter("fruit").guarded(absent=0)
        def price(name: str, *, times: int = 1) -> int:
            """What it costs."""
            authority.asked.append(name)
            return 3 * times

        assert price("mango", times=2) == 6
        assert price(name="mango") == 3
        assert price("papaya") == 0
        assert (price.__name__, price.__doc__) == ("price", "What it costs.")
        assert authority.asked == ["mango", "mango"]
    assert gate.outcomes("fruit") == (2, 0, 0)


def test_the_key_of_a_guarded_function_can_be_made(gate: FakeGate, authority: Authority) -> None:
    """From all arguments, as a method needs it."""
    fruit = gate.client().filter("fruit")

    class Shop:
        @fruit.guarded(key=lambda _self, _kind, name: name.lower())
        def price(self, _kind: str, name: str) -> int:
            authority.asked.append(name)
            return 3

    assert Shop().price("fruit", "MANGO") == 3
    assert Shop().price("fruit", "PAPAYA") is None
    assert authority.asked == ["MANGO"]


def test_a_guarded_coroutine_function_is_one(gate: FakeGate, authority: Authority) -> None:
    """The asyncio twin of the decorator."""

    async def main() -> None:
        async with gate.async_client() as client:

            @client.filter("fruit").guarded(absent=0)
            async def price(name: str, *, times: int = 1) -> int:
                await asyncio.sleep(0)
                authority.asked.append(name)
                return 3 * times

            assert await price("mango", times=2) == 6
            assert await price(name="papaya") == 0

    asyncio.run(main())
    assert authority.asked == ["mango"]
    assert gate.outcomes("fruit") == (1, 0, 0)


# -- what only one of the twins can show


def test_a_report_is_not_waited_for(gate: FakeGate, clock: Clock, authority: Authority) -> None:
    """A guarded call starts it and returns; flushing waits for the answer, but not for ever."""
    begun = []

    class Hanging:
        def unary(self, method: Any, request: Any, _timeout: float) -> Any:
            return gate.answer(method, request)

        def begin(self, _method: Any, request: Any, _timeout: float, done: Any) -> None:
            begun.append((request.found, done))

        def close(self) -> None:
            pass

    client = Client.over(Hanging(), options=ClientOptions(clock=clock, report_timeout=0.01))
    guard = client.filter("fruit").guard(authority.look_up)
    clock.now += 1.0
    assert guard("mango") == 1
    assert [found for found, _ in begun] == [1]
    guard.flush()
    # The answer comes late and is a failure: its count is in the next report.
    begun[0][1](Unavailable())
    guard("mango")
    guard.flush()
    assert [found for found, _ in begun] == [1, 2]


def test_flushing_waits_for_the_answer(gate: FakeGate, authority: Authority) -> None:
    """So that closing the client right after it does not cut the report off."""
    answered = []

    class Late:
        def unary(self, method: Any, request: Any, _timeout: float) -> Any:
            return gate.answer(method, request)

        def begin(self, _method: Any, _request: Any, _timeout: float, done: Any) -> None:
            def answer() -> None:
                answered.append(True)
                done(None)

            threading.Timer(0.05, answer).start()

        def close(self) -> None:
            pass

    client = Client.over(Late(), options=ClientOptions(report_timeout=30.0))
    guard = client.filter("fruit").guard(authority.look_up)
    guard("mango")
    guard.flush()
    assert answered == [True]


def test_a_cancelled_lookup_is_cancelled(gate: FakeGate, authority: Authority) -> None:
    """CancelledError passes through a guard and a check, and counts nothing."""

    async def main() -> None:
        async with gate.async_client() as client:
            waiting = asyncio.Event()

            async def look_up(_key: Any) -> int:
                waiting.set()
                await asyncio.Event().wait()
                return 1

            task = asyncio.create_task(client.filter("fruit").guard(look_up)("mango"))
            await waiting.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert gate.outcomes("fruit") == (0, 0, 0)
    assert authority.asked == []
