"""What is tried again, when, and for how long: driven by hand, without a clock that runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bloomgate import Backoff, transport
from bloomgate.errors import (
    BloomgateError,
    DeadlineExceeded,
    FilterFull,
    FilterNotFound,
    InvalidRequest,
    LimitExceeded,
    NotServing,
    Overloaded,
    Unavailable,
)
from bloomgate.steps import Deadline, Pause, Retry, Rpc, run
from bloomgate.v1 import filters_pb2 as pb

REQUEST = pb.AddRequest(filter="fruit")
BACKOFF = Backoff(initial=0.1, most=1.0, multiplier=2.0, jitter=0.0)


class Script:
    """A transport that raises or answers what it is told, moving the clock by what each attempt takes."""

    def __init__(self, clock: list[float], *answers: Exception | pb.AddResponse, takes: float = 0.0) -> None:
        self._clock = clock
        self._answers: Iterator[Exception | pb.AddResponse] = iter(answers)
        self._takes = takes
        self.timeouts: list[float] = []

    def unary(self, _method: object, _request: object, timeout: float) -> pb.AddResponse:
        self.timeouts.append(round(timeout, 6))
        self._clock[0] += min(self._takes, timeout)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _drive(retry: Retry, script: Script, clock: list[float], seconds: float) -> tuple[object, list[float]]:
    """Run a call to its end, pauses moving the clock. Returns the reply or error, and the pauses."""
    pauses: list[float] = []
    steps = retry.call(transport.ADD, REQUEST, Deadline(lambda: clock[0], seconds))
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                pauses.append(round(step.seconds, 6))
                clock[0] += step.seconds
                step = steps.send(None)
                continue
            assert isinstance(step, Rpc)
            try:
                reply = script.unary(step.method, step.request, step.timeout)
            except BloomgateError as error:
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        return end.value, pauses
    except BloomgateError as error:
        return error, pauses


def test_an_attempt_is_tried_again_after_growing_pauses() -> None:
    """Two failures worth it, then the answer: two pauses, each twice the last."""
    clock = [0.0]
    script = Script(clock, Unavailable(), Unavailable(), pb.AddResponse(seq=3))
    reply, pauses = _drive(Retry((Unavailable,), BACKOFF), script, clock, 10.0)
    assert reply == pb.AddResponse(seq=3)
    assert pauses == [0.1, 0.2]


def test_the_budget_covers_attempts_and_pauses() -> None:
    """No attempt gets more time than is left, and no pause begins that would end after the deadline."""
    clock = [0.0]
    script = Script(clock, *[Unavailable()] * 99, takes=0.2)
    error, pauses = _drive(Retry((Unavailable,), BACKOFF), script, clock, 1.0)
    assert isinstance(error, Unavailable)
    assert script.timeouts == [1.0, 0.7, 0.3]
    assert pauses == [0.1, 0.2]
    assert clock[0] <= 1.0


def test_the_last_error_is_the_one_that_is_raised() -> None:
    """Not a bare "deadline exceeded" that hides why."""
    clock = [0.0]
    script = Script(clock, Unavailable("connection refused"), takes=0.95)
    error, _ = _drive(Retry((Unavailable,), BACKOFF), script, clock, 1.0)
    assert str(error) == "connection refused"


def test_a_pause_that_oversleeps_raises_what_came_before_it() -> None:
    """Nothing is sent after the deadline, and the reason is still the daemon's."""
    clock = [0.0]
    steps = Retry((Unavailable,), BACKOFF).call(transport.ADD, REQUEST, Deadline(lambda: clock[0], 1.0))
    next(steps)
    steps.throw(Unavailable("connection refused"))
    clock[0] = 2.0
    with pytest.raises(Unavailable, match="connection refused"):
        steps.send(None)


def test_an_attempt_that_hangs_is_cut_off_and_tried_again() -> None:
    """One lost packet must not eat the whole budget of an add."""
    clock = [0.0]
    retry = Retry((DeadlineExceeded,), BACKOFF, attempt_timeout=4.0)
    script = Script(clock, DeadlineExceeded(), pb.AddResponse(seq=1), takes=4.0)
    reply, _ = _drive(retry, script, clock, 10.0)
    assert reply == pb.AddResponse(seq=1)
    assert script.timeouts == [4.0, 4.0]
    script = Script(clock, *[DeadlineExceeded()] * 3, takes=4.0)
    error, _ = _drive(retry, script, clock, 10.0)
    assert isinstance(error, DeadlineExceeded)
    assert script.timeouts == [4.0, 4.0, 1.7]


def test_an_overload_is_given_the_time_it_asks_for() -> None:
    """retry_after stands over a shorter pause, not under a longer one."""
    clock = [0.0]
    script = Script(clock, Overloaded(2.5), Overloaded(0.01), pb.AddResponse())
    _, pauses = _drive(Retry((Overloaded,), BACKOFF), script, clock, 10.0)
    assert pauses == [2.5, 0.2]


def test_an_overload_that_lasts_longer_than_the_budget_is_raised_at_once() -> None:
    """Waiting for the same error helps nobody."""
    clock = [0.0]
    error, pauses = _drive(Retry((Overloaded,), BACKOFF), Script(clock, Overloaded(60.0)), clock, 10.0)
    assert (type(error), pauses, clock) == (Overloaded, [], [0.0])


@pytest.mark.parametrize(
    "error",
    [
        FilterNotFound("fruit"),
        InvalidRequest("keys"),
        LimitExceeded("keys_per_call", 3, 2),
        FilterFull("fruit", "capacity", 1, 2),
    ],
    ids=lambda error: error.reason,
)
def test_what_no_second_attempt_can_mend_is_raised_at_once(error: BloomgateError) -> None:
    """One attempt, no pause."""
    clock = [0.0]
    script = Script(clock, error)
    raised, pauses = _drive(Retry((Unavailable, DeadlineExceeded, Overloaded), BACKOFF), script, clock, 10.0)
    assert (raised, pauses, len(script.timeouts)) == (error, [], 1)


def test_attempts_may_be_few_and_without_a_pause() -> None:
    """As for checks: one more at once, and none for what another attempt at once cannot mend."""
    clock = [0.0]
    retry = Retry((Unavailable,), None, but_not=(NotServing,), attempts=2)
    script = Script(clock, Unavailable(), pb.AddResponse(seq=3))
    assert _drive(retry, script, clock, 10.0) == (pb.AddResponse(seq=3), [])
    script = Script(clock, Unavailable("one"), Unavailable("two"))
    error, pauses = _drive(retry, script, clock, 10.0)
    assert (str(error), pauses, len(script.timeouts)) == ("two", [], 2)
    script = Script(clock, NotServing())
    error, pauses = _drive(retry, script, clock, 10.0)
    assert (type(error), pauses, len(script.timeouts)) == (NotServing, [], 1)


def test_nothing_is_sent_after_the_deadline() -> None:
    """A budget spent on hashing is spent."""
    clock = [0.0]
    deadline = Deadline(lambda: clock[0], 1.0)
    clock[0] = 1.0
    script = Script(clock)
    with pytest.raises(DeadlineExceeded):
        run(Retry((), BACKOFF).call(transport.ADD, REQUEST, deadline), script)  # type: ignore[arg-type]
    assert script.timeouts == []


def test_an_interrupt_leaves_at_once() -> None:
    """KeyboardInterrupt passes every judgement of failures."""

    class Interrupted:
        def unary(self, *_: object) -> None:
            raise KeyboardInterrupt

    steps = Retry((BloomgateError,), BACKOFF).call(transport.ADD, REQUEST, Deadline(lambda: 0.0, 1.0))
    with pytest.raises(KeyboardInterrupt):
        run(steps, Interrupted())  # type: ignore[arg-type]
