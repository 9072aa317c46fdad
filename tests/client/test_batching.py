"""Checks that travel together: one call of a filter in flight, who comes meanwhile goes by the next."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bloomgate import AsyncClient, Client, ClientOptions, Unavailable
from bloomgate.batching import Batches, _Thread
from bloomgate.errors import BloomgateError, DeadlineExceeded, LimitExceeded
from bloomgate.steps import Deadline
from bloomgate.testing import FakeGate
from bloomgate.transport import MIGHT_CONTAIN
from support.daemon import DaemonProcess

PATIENT = ClientOptions(check_timeout=60.0, on_error="raise")


class Held:
    """A fake gate's transport whose checks wait until they are let go, one at a time; for both clients."""

    def __init__(self, gate: FakeGate) -> None:
        self._gate = gate
        self.calls: list[list[str]] = []
        self._let_go = threading.Semaphore(0)
        self.timeouts: list[float] = []
        self.open = False

    def let_go(self, calls: int = 1) -> None:
        self._let_go.release(calls)

    def _seen(self, method: Any, request: Any, timeout: float) -> bool:
        if method is not MIGHT_CONTAIN:
            return False
        self.calls.append([key.decode() for key in request.keys])
        self.timeouts.append(timeout)
        return not self.open

    def unary(self, method: Any, request: Any, timeout: float) -> Any:
        if self._seen(method, request, timeout) and not self._let_go.acquire(timeout=min(timeout, 60)):
            raise DeadlineExceeded("held for too long")
        return self._gate.answer(method, request)

    def lease(self, _: Any) -> Any:
        raise Unavailable

    def close(self) -> None:
        self.open = True


class AsyncHeld(Held):
    """The same for the asyncio client."""

    async def unary(self, method: Any, request: Any, timeout: float) -> Any:  # type: ignore[override]  # noqa: ASYNC109
        if self._seen(method, request, timeout):
            async with asyncio.timeout(timeout):
                while not self._let_go.acquire(blocking=False):  # noqa: ASYNC110
                    await asyncio.sleep(0)
        return self._gate.answer(method, request)

    async def close(self) -> None:  # type: ignore[override]
        self.open = True


@pytest.fixture
def held(gate: FakeGate) -> AsyncHeld:
    gate.client().filter("fruit").add_many(["mango", "k3", "k7"])
    return AsyncHeld(gate)


@pytest.fixture
def held_threads(gate: FakeGate) -> Held:
    gate.client().filter("fruit").add_many(["mango", "k3", "k7"])
    return Held(gate)


async def turns(holds: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never held")


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- asyncio


async def _behind_one(
    held: AsyncHeld, keys: list[str], options: ClientOptions = PATIENT
) -> tuple[Any, list[Any]]:
    """A check in flight, and tasks that came behind it, in order."""
    fruit = AsyncClient.over(held, options=options).filter("fruit")  # type: ignore[arg-type]
    first = asyncio.create_task(fruit.might_contain("papaya"))
    await turns(lambda: len(held.calls) == 1)
    rest = [asyncio.create_task(fruit.might_contain(key)) for key in keys]
    await asyncio.sleep(0)
    return first, rest


def test_a_lone_check_is_its_own_call(held: AsyncHeld) -> None:
    """One after the other: a call each, at once."""

    async def main() -> None:
        held.open = True
        fruit = AsyncClient.over(held, options=PATIENT).filter("fruit")  # type: ignore[arg-type]
        for key, there in (("mango", True), ("papaya", False)):
            assert await fruit.might_contain(key) is there
        assert held.calls == [["mango"], ["papaya"]]

    asyncio.run(main())


def test_who_comes_meanwhile_goes_by_the_next_call(held: AsyncHeld) -> None:
    """All of them by one, and each has the answer to its own key."""

    async def main() -> None:
        keys = [f"k{number}" for number in range(10)]
        first, rest = await _behind_one(held, keys)
        held.let_go()
        assert await first is False
        await turns(lambda: len(held.calls) == 2)
        assert held.calls[1] == keys
        held.let_go()
        assert await asyncio.gather(*rest) == [key in ("k3", "k7") for key in keys]
        assert len(held.calls) == 2

    asyncio.run(main())


def test_a_call_is_bounded_by_the_limits(held: AsyncHeld) -> None:
    """More than one call takes waits for the one after it."""

    async def main() -> None:
        keys = [f"k{number}" for number in range(10)]
        options = ClientOptions(check_timeout=60.0, keys_per_call=4)
        _, rest = await _behind_one(held, keys, options)
        held.let_go(4)
        await asyncio.gather(*rest)
        assert held.calls[1:] == [keys[:4], keys[4:8], keys[8:]]

    asyncio.run(main())


def test_a_limit_that_was_not_known_is_found(gate: FakeGate) -> None:
    """The daemon refuses what it takes for too much: halves are asked, and one key too long fails alone."""
    gate = FakeGate(keys_per_call=3, bytes_per_key=8)
    gate.create("fruit", 100, 1e-6)
    gate.client().filter("fruit").add("k3")
    held = AsyncHeld(gate)

    async def main() -> None:
        keys = [f"k{number}" for number in range(7)] + ["far too long"]
        _, rest = await _behind_one(held, keys)
        held.open = True
        held.let_go()
        ends = await asyncio.gather(*rest, return_exceptions=True)
        assert ends[:7] == [key == "k3" for key in keys[:7]]
        assert isinstance(ends[7], LimitExceeded)

    asyncio.run(main())


@pytest.mark.parametrize("who", ["first", "rest"])
def test_a_cancellation_harms_nobody(held: AsyncHeld, who: str) -> None:
    """Neither that of who made the call, nor that of one who waits; those are not asked for."""

    async def main() -> None:
        first, rest = await _behind_one(held, ["k1", "k2", "k3"])
        (first if who == "first" else rest[1]).cancel()
        held.let_go(3)
        assert await rest[0] is False
        assert await rest[2] is True
        if who == "rest":
            assert rest[1].cancelled()
            assert held.calls[1] == ["k1", "k3"]
        else:
            assert first.cancelled()
            assert held.calls[1] == ["k1", "k2", "k3"]

    asyncio.run(main())


def test_one_that_is_cancelled_while_its_call_is_under_way_harms_nobody(held: AsyncHeld) -> None:
    """The call goes on for the others."""

    async def main() -> None:
        _, rest = await _behind_one(held, ["k1", "k2", "k3"])
        held.let_go()
        await turns(lambda: len(held.calls) == 2)
        rest[2].cancel()
        held.let_go()
        assert await asyncio.gather(rest[0], rest[1]) == [False, False]

    asyncio.run(main())


def test_each_keeps_its_own_deadline(held: AsyncHeld) -> None:
    """Whose time is over while a call hangs has maybe then; the call behind it may last as long as the last
    of its callers."""

    async def main() -> None:
        options = ClientOptions(check_timeout=0.1)
        first, rest = await _behind_one(held, ["k1", "k2"], options)
        # Nobody lets the first call go: it fails at its deadline, and the others have theirs.
        started = time.monotonic()
        assert await asyncio.gather(*rest) == [True, True]
        assert await first is True
        assert time.monotonic() - started < 10
        assert all(timeout <= 0.1 for timeout in held.timeouts)

    asyncio.run(main())


def test_a_failure_is_each_callers_own(held: AsyncHeld, gate: FakeGate) -> None:
    """All of a call fail by it, each with the error; those of the next call do not."""

    async def main() -> None:
        _, rest = await _behind_one(held, ["k1", "k2"])
        held.let_go()
        await turns(lambda: len(held.calls) == 2)
        gate.fail_with(BloomgateError("broken"), times=1)
        held.let_go()
        ends = await asyncio.gather(*rest, return_exceptions=True)
        assert [str(end) for end in ends] == ["broken", "broken"]
        held.open = True
        fruit = AsyncClient.over(held, options=PATIENT).filter("fruit")  # type: ignore[arg-type]
        assert await fruit.might_contain("k3")

    asyncio.run(main())


def test_a_loop_that_ends_leaves_nothing_behind(held: AsyncHeld) -> None:
    """With checks in flight and behind: they are cancelled, and a later loop begins anew."""
    client = AsyncClient.over(held, options=PATIENT)  # type: ignore[arg-type]

    async def leave() -> None:
        fruit = client.filter("fruit")
        for key in ("k1", "k2", "k3"):
            asyncio.ensure_future(fruit.might_contain(key))  # noqa: RUF006
        await turns(lambda: len(held.calls) == 1)

    async def again() -> None:
        held.open = True
        assert await client.filter("fruit").might_contain("k3")

    asyncio.run(leave())
    asyncio.run(again())


def test_guards_travel_together_too(held: AsyncHeld) -> None:
    """A guard's check is one like the others."""

    async def main() -> None:
        fruit = AsyncClient.over(held, options=PATIENT).filter("fruit")  # type: ignore[arg-type]

        async def look_up(_: Any) -> int:
            return 1

        guard = fruit.guard(look_up)
        tasks = [asyncio.create_task(guard(key)) for key in ("k1", "k2", "k3")]
        await turns(lambda: len(held.calls) == 1)
        held.let_go(2)
        assert await asyncio.gather(*tasks) == [None, None, 1]
        assert held.calls == [["k1"], ["k2", "k3"]]

    asyncio.run(main())


# -- threads


def _threads_behind_one(
    held: Held, keys: list[str], options: ClientOptions = PATIENT
) -> tuple[ThreadPoolExecutor, Any, list[Any]]:
    fruit = Client.over(held, options=options).filter("fruit")
    pool = ThreadPoolExecutor(len(keys) + 1)
    first = pool.submit(fruit.might_contain, "papaya")
    until(lambda: len(held.calls) == 1)
    waiting = fruit._calls._batches._threads.get().waiting
    rest = []
    for number, key in enumerate(keys, 1):
        rest.append(pool.submit(fruit.might_contain, key))
        until(lambda number=number: len(waiting) == number)
    return pool, first, rest


def test_threads_travel_together(held_threads: Held) -> None:
    """As tasks do: by one call, each with the answer to its own key; more than it takes by the one after."""
    keys = [f"k{number}" for number in range(10)]
    options = ClientOptions(check_timeout=60.0, on_error="raise", keys_per_call=6)
    pool, first, rest = _threads_behind_one(held_threads, keys, options)
    with pool:
        held_threads.let_go(3)
        assert first.result() is False
        assert [each.result() for each in rest] == [key in ("k3", "k7") for key in keys]
    assert held_threads.calls[1:] == [keys[:6], keys[6:]]


def test_a_thread_keeps_its_own_deadline(held_threads: Held) -> None:
    """It has maybe at its end, whatever hangs; who comes later is served."""
    pool, first, rest = _threads_behind_one(held_threads, ["k1", "k2"], ClientOptions(check_timeout=0.2))
    with pool:
        assert [each.result(30) for each in (first, *rest)] == [True, True, True]
        held_threads.open = True
        fruit = Client.over(held_threads, options=PATIENT).filter("fruit")
        assert fruit.might_contain("k1") is False


def test_a_thread_that_is_interrupted_hands_over(held_threads: Held) -> None:
    """While it makes the call, while it waits, and while it carries others: nobody hangs."""
    fruit = Client.over(held_threads, options=PATIENT).filter("fruit")
    batches = fruit._calls._batches
    asked = batches._ask
    interrupt = [True]

    def ask(keys: Any, deadline: Any) -> Any:
        if interrupt and "k9" in [key.decode() for key in keys]:
            interrupt.clear()
            raise KeyboardInterrupt
        return (yield from asked(keys, deadline))

    batches._ask = ask
    pool = ThreadPoolExecutor(4)
    with pool:
        first = pool.submit(fruit.might_contain, "papaya")
        until(lambda: len(held_threads.calls) == 1)
        waiting = batches._threads.get().waiting
        rest = []
        for number, key in enumerate(["k1", "k2", "k9"], 1):
            rest.append(pool.submit(fruit.might_contain, key))
            until(lambda number=number: len(waiting) == number)
        held_threads.open = True
        held_threads.let_go()
        assert first.result(30) is False
        with pytest.raises(KeyboardInterrupt):
            rest[2].result(30)
        for each in rest[:2]:
            with pytest.raises(DeadlineExceeded):
                each.result(30)
        assert fruit.might_contain("k3")


def test_one_that_leaves_as_it_is_chosen_passes_it_on() -> None:
    """Interrupted between being told to carry a batch and doing so; the last one leaves nobody behind."""
    batches = Batches(lambda _keys, _deadline: iter(()), lambda: (10, 1000))  # type: ignore[arg-type,return-value]
    threads = batches._threads.get()
    threads.busy = True
    first, second = (_Thread(key, Deadline(time.monotonic, 60)) for key in (b"k1", b"k2"))
    threads.waiting.extend((first, second))
    batches._hand_over(threads)
    assert second.batch == [first, second]
    batches._leave(threads, second)
    assert first.batch == [first]
    batches._leave(threads, first)
    assert not threads.busy
    assert not threads.waiting


# -- a real daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Any:
    started = DaemonProcess(tmp_path_factory.mktemp("batching") / "data")
    with Client(started.grpc) as client:
        client.create_filter("fruit", 10_000, 1e-6)
        client.filter("fruit").add_many([f"in {number}" for number in range(1000)])
    yield started
    started.kill()


def calls_of(daemon: DaemonProcess) -> float:
    (line,) = (
        line
        for line in daemon.get("/metrics")[1].splitlines()
        if line.startswith("grpc_server_started_total{") and 'grpc_method="MightContain"' in line
    )
    return float(line.rpartition(" ")[2])


def test_a_thousand_checks_cost_a_handful_of_calls(daemon: DaemonProcess) -> None:
    """And are right."""

    async def main() -> None:
        async with AsyncClient(daemon.grpc, options=PATIENT) as client:
            fruit = client.filter("fruit")
            before = calls_of(daemon)
            answers = await asyncio.gather(
                *(fruit.might_contain(f"{'in' if number % 2 else 'out'} {number}") for number in range(1000))
            )
            assert answers == [number % 2 == 1 for number in range(1000)]
            assert calls_of(daemon) - before <= 5

    asyncio.run(main())


def test_threads_hammer_and_every_answer_is_its_callers(daemon: DaemonProcess) -> None:
    """Thirty-two threads, each with keys of its own."""
    with Client(daemon.grpc, options=PATIENT) as client, ThreadPoolExecutor(32) as threads:
        fruit = client.filter("fruit")

        def ask(thread: int) -> list[bool]:
            return [
                fruit.might_contain(f"{'in' if number % 3 else 'out'} {number}")
                for number in range(thread, thread + 40)
            ]

        for thread, answers in enumerate(threads.map(ask, range(32))):
            assert answers == [number % 3 > 0 for number in range(thread, thread + 40)]


def test_loops_in_several_threads_share_nothing(daemon: DaemonProcess) -> None:
    """One client, four loops at once."""
    client = AsyncClient(daemon.grpc, options=PATIENT)

    async def ask() -> list[bool]:
        fruit = client.filter("fruit")
        return await asyncio.gather(*(fruit.might_contain(f"in {number}") for number in range(200)))

    with ThreadPoolExecutor(4) as threads:
        ends = [threads.submit(asyncio.run, ask()) for _ in range(4)]
        assert all(all(each.result(60)) for each in ends)
    asyncio.run(client.close())
