"""A guard skips lookups that are certainly in vain, and reports what the others found."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from bloomgate import AsyncClient, Client, ClientMetrics, ClientOptions, ParameterError, outcomes, transport
from bloomgate.errors import (
    BloomgateError,
    ClientClosed,
    DeadlineExceeded,
    FilterNotFound,
    JournalFailed,
    NotServing,
    Overloaded,
    Unavailable,
)
from bloomgate.testing import FakeGate
from bloomgate.v1 import filters_pb2 as pb

from .twins import Awaited, Clock, Twin


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


NOT_TAKEN = [Overloaded(), NotServing()]
PERHAPS_TAKEN = [Unavailable(), DeadlineExceeded(), JournalFailed(), ClientClosed(), FilterNotFound("fruit")]


def _lost(twin: Twin) -> float:
    return twin.count("bloomgate_client_outcomes_lost_total", filter="fruit")


@pytest.mark.parametrize("error", NOT_TAKEN, ids=lambda error: error.reason)
def test_a_report_that_was_not_taken_is_made_good(
    twin: Twin, gate: FakeGate, clock: Clock, authority: Authority, error: BloomgateError
) -> None:
    """The guarded call does not hear of it, and the counts are in the next report, once."""
    guard = twin.client(gate, clock=clock).filter("fruit").guard(twin.lookup(authority.look_up))
    gate.fail_with(error, method="ReportOutcomes")
    for _ in range(3):
        clock.now += 1.0
        assert guard("mango") == 1
    assert _reports(gate) == 3
    guard.flush()
    gate.recover()
    clock.now += 1.0
    guard("ghost")
    assert gate.outcomes("fruit") == (3, 1, 0)
    assert _lost(twin) == 0


@pytest.mark.parametrize("error", PERHAPS_TAKEN, ids=lambda error: error.reason)
def test_a_report_that_may_have_been_taken_is_not_repeated(
    twin: Twin, gate: FakeGate, clock: Clock, authority: Authority, error: BloomgateError
) -> None:
    """Outcomes are lost rather than doubled, and the loss is counted; nor is one kept that nobody wants."""

    class TakenAndFailed:
        failing = True

        def unary(self, method: Any, request: Any, _timeout: float) -> Any:
            reply = gate.answer(method, request)
            if self.failing and method is transport.REPORT_OUTCOMES:
                raise error
            return reply

        def begin(self, method: Any, request: Any, timeout: float, done: Any) -> None:
            try:
                self.unary(method, request, timeout)
            except BloomgateError as failure:
                done(failure)
            else:
                done(None)

    over = TakenAndFailed()
    guard = twin.over(over, clock=clock).filter("fruit").guard(twin.lookup(authority.look_up))
    clock.now += 1.0
    assert guard("mango") == 1
    guard("ghost")
    guard.flush()
    assert gate.outcomes("fruit") == (1, 1, 0)
    over.failing = False
    guard("mango")
    guard.flush()
    assert gate.outcomes("fruit") == (2, 1, 0)
    assert _lost(twin) == 2


def test_a_report_that_is_cancelled_is_lost_once(gate: FakeGate, authority: Authority) -> None:
    """Before it begins or while it waits: the end of a loop doubles nothing."""
    registry = CollectorRegistry()
    begun = []

    class Hanging:
        async def unary(self, method: Any, request: Any, _timeout: float) -> Any:
            if method is transport.REPORT_OUTCOMES:
                begun.append(request.found)
                await asyncio.Event().wait()
            return gate.answer(method, request)

        async def close(self) -> None: ...

    client = AsyncClient.over(
        Hanging(),
        options=ClientOptions(report_interval=0.0),
        metrics=ClientMetrics.in_registry(registry),
    )

    async def look_up(key: Any) -> Any:
        return authority.look_up(key)

    async def main() -> None:
        guard = client.filter("fruit").guard(look_up)
        await guard("mango")
        await asyncio.sleep(0)
        assert begun == [1]
        await guard("mango")
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(main())
    assert registry.get_sample_value("bloomgate_client_outcomes_lost_total", {"filter": "fruit"}) == 2
    assert begun == [1]


def test_a_transport_that_breaks_does_not_break_the_guarded_call(
    twin: Twin, gate: FakeGate, clock: Clock, authority: Authority
) -> None:
    """Not even by an exception of its own."""
    guard = twin.client(gate, clock=clock).filter("fruit").guard(twin.lookup(authority.look_up))
    gate.fail_with(RuntimeError("cannot start new thread"), method="ReportOutcomes")
    clock.now += 1.0
    assert guard("mango") == 1
    guard.flush()
    assert _lost(twin) == 1


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


class Asked:
    """Functions to guard that remember what they were called with."""

    def __init__(self, twin: Twin, gate: FakeGate) -> None:
        self._twin = twin
        self._gate = gate
        self.calls: list[Any] = []

    def guarded(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """``function`` behind the filter, as both clients decorate it, called to its end."""
        twin = self._twin
        make = self._gate.async_client if twin.is_async else self._gate.client
        fruit: Any = make().filter("fruit")

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((args, kwargs))
            return function(*args, **kwargs)

        async def recorded_async(*args: Any, **kwargs: Any) -> Any:
            return recorded(*args, **kwargs)

        wrapped = functools.wraps(function)(recorded_async if twin.is_async else recorded)
        made = fruit.guarded(**options)(wrapped)
        return (lambda *args, **kwargs: asyncio.run(made(*args, **kwargs))) if twin.is_async else made


@pytest.fixture
def asked(twin: Twin, gate: FakeGate, authority: Authority) -> Asked:
    """The authority's keys are in the filter."""
    assert authority.asked == []
    return Asked(twin, gate)


def test_the_key_is_the_first_parameter_in_whatever_order_it_is_passed(asked: Asked) -> None:
    """Not the first keyword of the call: that one is another argument, and its "no" would be a wrong one."""

    def look(name: str, reason: str = "papaya", *, times: int = 1) -> int:
        return len(name) * len(reason) * times

    guarded = asked.guarded(look)
    assert guarded(reason="why", name="mango") == 15
    assert guarded(times=2, reason="why", name="mango") == 30
    assert guarded("mango", times=2) == 60
    assert guarded(reason="mango", name="papaya") is None
    assert guarded(times=2, name="papaya") is None
    assert len(asked.calls) == 3


def test_the_key_may_be_a_default(asked: Asked) -> None:
    """A first parameter that is left out is still the key."""

    def look(name: str = "mango", reason: str = "") -> str:
        return name + reason

    def no(name: str = "papaya", reason: str = "") -> str:
        return name + reason

    assert asked.guarded(look)(reason="!") == "mango!"
    assert asked.guarded(no)(reason="mango") is None


def test_a_first_parameter_by_place_alone_and_one_by_name_alone(asked: Asked) -> None:
    """Whatever kind it is, it is found; a keyword of the same name is another argument."""

    def by_place(name: str, /, **more: str) -> str:
        return name + "".join(more)

    def by_name(*, name: str, more: str) -> str:
        return name + more

    assert asked.guarded(by_place)("mango", name="papaya") == "mangoname"
    assert asked.guarded(by_place)("papaya", name="mango") is None
    assert asked.guarded(by_name)(more="!", name="mango") == "mango!"
    assert asked.guarded(by_name)(more="mango", name="papaya") is None


def test_arguments_that_the_function_does_not_take_are_refused(asked: Asked) -> None:
    """Also where the answer would be no: a call that cannot be made is not skipped in silence."""

    def look(name: str) -> str:
        return name

    guarded = asked.guarded(look)
    for args, kwargs in ((), {}), (("papaya", 1), {}), ((), {"nam": "papaya"}):
        with pytest.raises(TypeError):
            guarded(*args, **kwargs)
    assert asked.calls == []


def _no_parameter() -> None: ...
def _any_place(*names: str) -> None: ...
def _any_name(**names: str) -> None: ...
def _method(self: Any, name: str) -> None: ...
def _class_method(cls: Any, name: str) -> None: ...


@pytest.mark.parametrize("function", [_no_parameter, _any_place, _any_name, _method, _class_method])
def test_a_function_without_a_key_is_refused_when_decorated(asked: Asked, function: Any) -> None:
    """Not at its first call, and not if it is told which argument is the key."""
    with pytest.raises(TypeError, match="key="):
        asked.guarded(function)
    asked.guarded(function, key=lambda *_args, **_kwargs: "mango")


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
    # The answer comes late and is a refusal: its count is in the next report.
    begun[0][1](Overloaded())
    guard("mango")
    guard.flush()
    assert [found for found, _ in begun] == [1, 2]


def test_flushing_waits_for_the_answer(
    gate: FakeGate, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that closing the client right after it does not cut the report off."""
    unanswered: list[Any] = []

    class AnswersWhoWaits(threading.Condition):
        """Gives the answer once somebody waits for it, and not before."""

        def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            assert not predicate()
            unanswered.pop()(None)
            return super().wait_for(predicate, timeout)

    class Late:
        def unary(self, method: Any, request: Any, _timeout: float) -> Any:
            return gate.answer(method, request)

        def begin(self, _method: Any, _request: Any, _timeout: float, done: Any) -> None:
            unanswered.append(done)

        def close(self) -> None:
            pass

    monkeypatch.setattr(outcomes.threading, "Condition", AnswersWhoWaits)
    client = Client.over(Late(), options=ClientOptions(report_timeout=30.0))
    guard = client.filter("fruit").guard(authority.look_up)
    guard("mango")
    guard.flush()
    assert unanswered == []


def test_closing_sends_every_report_before_it_waits_for_one(twin: Twin, gate: FakeGate) -> None:
    """A hundred filters and a daemon that hangs cost one ``report_timeout``, not a hundred."""
    names = ["fruit", "veg", "nuts"]
    order: list[str] = []
    waiting: list[Any] = []

    def answer_all() -> None:
        if len(waiting) == len(names):
            order.append("answered")
            for answer in waiting:
                answer()

    class Together:
        """Answers no report until all have arrived."""

        def unary(self, method: Any, request: Any, _timeout: float) -> Any:
            return gate.answer(method, request)

        def begin(self, _method: Any, request: Any, _timeout: float, done: Any) -> None:
            order.append(request.filter)
            waiting.append(lambda: done(None))
            answer_all()

        def close(self) -> None:
            order.append("closed")

    class TogetherAsync(Awaited):
        async def unary(self, method: Any, request: Any, timeout: float) -> Any:  # noqa: ASYNC109
            if method is not transport.REPORT_OUTCOMES:
                return await super().unary(method, request, timeout)
            order.append(request.filter)
            arrived = asyncio.Event()
            waiting.append(arrived.set)
            answer_all()
            await arrived.wait()
            return None

    for name in names:
        gate.create(name).add("mango")
    options = ClientOptions(report_timeout=20.0)
    client: Any
    if twin.is_async:
        client = twin._faced(AsyncClient.over(TogetherAsync(Together()), options=options))
    else:
        client = Client.over(Together(), options=options)
    for name in names:
        assert client.filter(name).guard(twin.lookup(lambda _key: 1))("mango") == 1
    started = time.monotonic()
    client.close()
    assert order == [*names, "answered", "closed"]
    # One wait that ends in vain would take longer.
    assert time.monotonic() - started < 15.0


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
