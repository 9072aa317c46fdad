"""The clients against a real gRPC server: deadlines, outages, garbage, details, tokens, restarts."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from bloomgate import AsyncClient, Backoff, Client, ClientOptions
from bloomgate.errors import (
    BloomgateError,
    ClientClosed,
    DeadlineExceeded,
    FilterFull,
    FilterNotFound,
    LimitExceeded,
    NotAuthenticated,
    NotSupported,
    Overloaded,
    Unavailable,
)
from bloomgate.testing import FakeGate

from .twins import Server, Twin

# Long enough that no busy machine spends it on a call that is answered.
PATIENT: dict[str, Any] = {"check_timeout": 10.0, "backoff": Backoff(initial=0.001, most=0.01)}


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens, and nobody else will meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def hang(server: Server) -> Iterator[threading.Event]:
    """Makes checks and adds wait until the test is over."""
    over = threading.Event()

    def wait(name: str, _request: Any, _context: Any) -> None:
        if name in ("MightContain", "Add"):
            over.wait(30)

    server.hook = wait
    yield over
    over.set()


def test_every_verb_works_over_the_wire(twin: Twin, server: Server) -> None:
    """The same answers as in process."""
    client = twin.connect(server.target, **PATIENT)
    assert client.ping() is True
    assert client.create_filter("veg", 1000).created
    veg = client.filter("veg")
    assert veg.add("leek") is True
    assert veg.add_many(["leek", "kale"]) == [False, True]
    assert veg.might_contain("leek") is True
    assert veg.might_contain_many(["leek", "bread", "kale"]) == [True, False, True]
    veg.report_outcomes(found=1)
    assert veg.stats().outcomes_found == 1
    assert client.snapshot_filter("veg").name == "veg"
    assert [stats.name for stats in client.list_filters()] == ["fruit", "veg"]
    client.drop_filter("veg")
    assert twin.results("veg") == (1, 3, 0)
    client.close()


@pytest.mark.usefixtures("hang")
def test_a_daemon_that_does_not_answer_costs_the_budget_and_no_more(twin: Twin, server: Server) -> None:
    """A check of 50 ms is maybe after 50 ms, not after the server's pleasure."""
    client = twin.connect(server.target, check_timeout=0.05)
    fruit = client.filter("fruit")
    started = time.monotonic()
    assert fruit.might_contain("papaya") is True
    took = time.monotonic() - started
    assert 0.04 < took < 2.0
    assert twin.fallbacks("fruit", "deadline_exceeded") == 1
    client.close()


@pytest.mark.usefixtures("hang")
def test_an_add_that_is_not_answered_raises_at_its_deadline(twin: Twin, server: Server) -> None:
    """After several attempts, each cut off for the next one."""
    client = twin.connect(
        server.target, add_timeout=0.5, add_attempt_timeout=0.1, backoff=Backoff(initial=0.01, most=0.01)
    )
    with pytest.raises(DeadlineExceeded):
        client.filter("fruit").add("mango")
    assert server.seen.count("Add") >= 2
    client.close()


def test_nobody_there_is_maybe_at_once(twin: Twin, nobody: str) -> None:
    """A refused connection is not waited for until the budget ends."""
    client = twin.connect(nobody, check_timeout=60.0)
    fruit = client.filter("fruit")
    started = time.monotonic()
    assert fruit.might_contain("papaya") is True
    assert fruit.might_contain_many(["papaya", "peach"]) == [True, True]
    assert time.monotonic() - started < 20.0
    assert twin.fallbacks("fruit", "unavailable") == 3
    assert client.ping() is False
    client.close()


def test_nobody_there_fails_an_add(twin: Twin, nobody: str) -> None:
    """And says so in the end."""
    client = twin.connect(nobody, add_timeout=0.2)
    with pytest.raises(Unavailable):
        client.filter("fruit").add("mango")
    client.close()


def test_attempts_are_counted_by_the_server(twin: Twin, server: Server) -> None:
    """UNAVAILABLE, then an answer: two calls arrive for a check; twice UNAVAILABLE, and three for an add."""
    left = {"MightContain": 1, "Add": 2}

    def fail(name: str, _request: Any, context: Any) -> None:
        if left.get(name):
            left[name] -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "try again")

    server.hook = fail
    client = twin.connect(server.target, **PATIENT)
    assert client.filter("fruit").might_contain("papaya") is False
    assert client.filter("fruit").add("mango") is True
    assert (server.seen.count("MightContain"), server.seen.count("Add")) == (2, 3)
    client.close()


@pytest.mark.parametrize(
    "reply",
    [b"", b"\xff\xff\xff\xff", b"\x0a\x01\x00", b"\x0a\x02\x01\x01", b"\x08\x01\x08\x00", b"\x12\x03abc"],
    ids=["empty", "garbage", "unspecified", "one too many", "unpacked", "another message"],
)
def test_bytes_that_are_no_answer_skip_nothing(twin: Twin, server: Server, reply: bytes) -> None:
    """An empty reply, a cut one, one of another message: maybe."""
    server.hook = lambda name, *_: reply if name == "MightContain" else None
    client = twin.connect(server.target, **PATIENT)
    assert client.filter("fruit").might_contain("papaya") is True
    assert twin.results("fruit") == (0, 0, 1)
    client.close()


@pytest.mark.parametrize(
    "error",
    [
        FilterNotFound("fruit"),
        LimitExceeded("keys_per_call", 3, 2),
        FilterFull("fruit", "capacity", 10, 11),
        NotAuthenticated(),
    ],
    ids=lambda error: error.reason,
)
def test_details_arrive_in_the_trailing_metadata(
    twin: Twin, server: Server, gate: FakeGate, error: BloomgateError
) -> None:
    """Class, fields and message are those that the server encoded."""
    gate.fail_with(error)
    client = twin.connect(server.target)
    with pytest.raises(type(error)) as caught:
        client.filter("fruit").add("mango")
    assert (vars(caught.value), str(caught.value)) == (vars(error), str(error))
    client.close()


def test_retry_info_is_honoured(twin: Twin, server: Server, gate: FakeGate) -> None:
    """The second attempt comes no earlier than the daemon asked for."""
    times = []

    def stamp(name: str, *_: Any) -> None:
        if name == "Add":
            times.append(time.monotonic())

    server.hook = stamp
    gate.fail_with(Overloaded(0.15), times=1)
    client = twin.connect(server.target, **PATIENT)
    client.filter("fruit").add("mango")
    assert times[1] - times[0] >= 0.15
    client.close()


def test_the_token_goes_with_every_call(twin: Twin, server: Server) -> None:
    """As a bearer token; it is in no repr."""
    client = twin.connect(server.target, token="s3cret")
    client.list_filters()
    assert server.metadata["authorization"] == "Bearer s3cret"
    server.metadata = {}
    client.filter("fruit").stats()
    assert server.metadata["authorization"] == "Bearer s3cret"
    client.close()


def test_another_service_at_the_address_is_not_a_gate(twin: Twin) -> None:
    """A gRPC server that knows none of the calls: maybe, and NotSupported for the rest."""
    other = grpc.server(futures.ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    client = twin.connect(f"127.0.0.1:{port}", **PATIENT)
    assert client.filter("fruit").might_contain("papaya") is True
    assert twin.fallbacks("fruit", "not_supported") == 1
    with pytest.raises(NotSupported):
        client.list_filters()
    client.close()
    other.stop(None).wait()


def test_a_restarted_daemon_is_found_again(twin: Twin, gate: FakeGate) -> None:
    """An add that spans the restart succeeds, and so do the checks after it."""
    first = Server(gate)
    back: list[Server] = []

    def restart() -> float:
        """Called where the first pause is drawn: after the first refusal, before the next attempt."""
        if not back:
            back.append(Server(gate, first.target))
        return 0.0

    backoff = Backoff(initial=0.001, most=0.01, random=restart)
    client = twin.connect(first.target, reconnect_most=0.1, check_timeout=10.0, backoff=backoff)
    fruit = client.filter("fruit")
    fruit.add("mango")
    first.stop()
    assert back == []
    assert fruit.add("peach") is True
    assert len(back) == 1
    assert fruit.might_contain("papaya") is False
    assert fruit.might_contain("peach") is True
    client.close()
    back[0].stop()


def test_guards_report_without_waiting_for_the_answer(server: Server, gate: FakeGate) -> None:
    """A daemon that hangs on reports does not slow guarded calls down."""
    over = threading.Event()
    arrived = threading.Event()

    def hang_on_reports(name: str, *_: Any) -> None:
        if name == "ReportOutcomes":
            arrived.set()
            over.wait(30)

    server.hook = hang_on_reports
    options = ClientOptions(report_interval=0.0, report_timeout=5.0, **PATIENT)
    with Client(server.target, options=options) as client:
        guard = client.filter("fruit").guard(lambda _key: 1)
        client.filter("fruit").add("mango")
        assert guard("mango") == 1
        assert arrived.wait(10)
        assert gate.outcomes("fruit") == (0, 0, 0)
        over.set()
    assert gate.outcomes("fruit") == (1, 0, 0)


def _until_two_wait(server: Server) -> None:
    deadline = time.monotonic() + 10
    while len(server.seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(server.seen) == 2


UNTIL_CLOSED = ClientOptions(check_timeout=60.0, add_timeout=60.0, add_attempt_timeout=60.0)


@pytest.mark.usefixtures("hang")
def test_closing_ends_what_is_under_way(server: Server) -> None:
    """A check that waits is maybe at once, an add raises ClientClosed; neither waits for its deadline."""
    client = Client(server.target, options=UNTIL_CLOSED)
    fruit = client.filter("fruit")
    ends: list[object] = []

    def check() -> None:
        ends.append(fruit.might_contain("papaya"))

    def add() -> None:
        try:
            fruit.add("papaya")
        except BloomgateError as error:
            ends.append(type(error))

    threads = [threading.Thread(target=check), threading.Thread(target=add)]
    for thread in threads:
        thread.start()
    _until_two_wait(server)
    client.close()
    for thread in threads:
        thread.join(10)
    assert sorted(map(str, ends)) == sorted(map(str, [True, ClientClosed]))


@pytest.mark.usefixtures("hang")
def test_closing_an_asyncio_client_ends_what_is_under_way(server: Server) -> None:
    """The same: who closes a client does not cancel the tasks that wait for it."""

    async def main() -> list[object]:
        client = AsyncClient(server.target, options=UNTIL_CLOSED)
        fruit = client.filter("fruit")
        tasks = [asyncio.create_task(fruit.might_contain("papaya")), asyncio.create_task(fruit.add("papaya"))]
        await asyncio.to_thread(_until_two_wait, server)
        await client.close()
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks, return_exceptions=True)

    check, add = asyncio.run(main())
    assert check is True
    assert type(add) is ClientClosed


@pytest.mark.usefixtures("hang")
def test_a_task_that_is_cancelled_while_its_client_closes_is_cancelled(server: Server) -> None:
    """Its own cancellation is not taken for the client's end."""

    async def main() -> None:
        client = AsyncClient(server.target, options=UNTIL_CLOSED)
        fruit = client.filter("fruit")
        # Of one filter two would go one behind the other.
        tasks = [asyncio.create_task(fruit.might_contain("papaya"))]
        tasks.append(asyncio.create_task(client.filter("other").might_contain("peach")))
        await asyncio.to_thread(_until_two_wait, server)
        tasks[0].cancel()
        await client.close()
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        assert ends[1] is True

    asyncio.run(main())


@pytest.mark.usefixtures("hang")
def test_closing_reaches_the_loops_of_other_threads(server: Server) -> None:
    """A check that waits on another loop is maybe at once, whichever loop closes the client."""
    client = AsyncClient(server.target, options=UNTIL_CLOSED)
    ends: list[object] = []

    def other() -> None:
        async def ask() -> None:
            both = (client.filter(name).might_contain("papaya") for name in ("fruit", "other"))
            ends.extend(await asyncio.gather(*both))

        asyncio.run(ask())

    thread = threading.Thread(target=other)
    thread.start()
    _until_two_wait(server)
    asyncio.run(client.close())
    thread.join(20)
    assert ends == [True, True]


def test_loops_that_come_and_go_in_other_threads_break_nothing(server: Server) -> None:
    """Many loops at once, each with its own connection, are no concern of one another."""
    client = AsyncClient(server.target, options=ClientOptions(report_interval=0.0, **PATIENT))
    server.gate.client().filter("fruit").add("mango")
    ends: list[object] = []

    async def look_up(_key: Any) -> int:
        return 1

    async def ask() -> int | None:
        guard = client.filter("fruit").guard(look_up)
        value = await guard("mango")
        await guard.flush()
        return value

    def run() -> None:
        for _ in range(10):
            try:
                ends.append(asyncio.run(ask()))
            except BaseException as error:
                ends.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(client.close())
    assert ends == [1] * 40
    assert server.gate.outcomes("fruit") == (40, 0, 0)


def test_threads_share_one_channel(server: Server) -> None:
    """Concurrent first calls make one connection, and every answer is its caller's."""
    peers = set()
    server.hook = lambda _name, _request, context: peers.add(context.peer())
    with Client(server.target, options=ClientOptions(**PATIENT)) as client:
        fruit = client.filter("fruit")
        fruit.add_many([f"in-{i}" for i in range(8)])
        peers.clear()
        answers: dict[int, list[bool]] = {}

        def ask(i: int) -> None:
            answers[i] = [fruit.might_contain(f"{'in' if i % 2 else 'out'}-{i}") for _ in range(20)]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {i: [bool(i % 2)] * 20 for i in range(8)}
    assert len(peers) == 1


@pytest.mark.usefixtures("hang")
def test_a_cancelled_check_is_cancelled(server: Server) -> None:
    """asyncio's cancellation and timeouts are no answer: they pass."""

    async def main() -> None:
        async with AsyncClient(server.target, options=ClientOptions(check_timeout=60.0)) as client:
            fruit = client.filter("fruit")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await fruit.might_contain("papaya")

    asyncio.run(main())


def test_an_asyncio_client_serves_one_loop_after_another(server: Server) -> None:
    """Each asyncio.run has a loop of its own, and a client made before any of them serves all."""
    client = AsyncClient(server.target, options=ClientOptions(**PATIENT))

    async def ask() -> list[bool]:
        return await client.filter("fruit").might_contain_many(["mango", "peach"])

    assert [asyncio.run(ask()) for _ in range(3)] == [[False, False]] * 3
    asyncio.run(client.close())


def test_concurrent_checks_of_one_loop_each_get_their_answer(server: Server) -> None:
    """In whatever order the replies come."""

    async def main() -> list[bool]:
        async with AsyncClient(server.target, options=ClientOptions(**PATIENT)) as client:
            fruit = client.filter("fruit")
            await fruit.add_many([f"key-{i}" for i in range(0, 100, 2)])
            return await asyncio.gather(*(fruit.might_contain(f"key-{i}") for i in range(100)))

    assert asyncio.run(main()) == [True, False] * 50
