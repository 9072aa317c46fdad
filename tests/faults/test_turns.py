"""Many large calls at once: they take turns, and small calls and health checks find the loop free."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bloomgate.v1 import admin_pb2, filters_pb2
from bloomgated.gate import Gate
from bloomgated.turn import LARGE_BYTES, Turn
from daemon import inside
from daemon.calls import spec
from daemon.inside import HeldJournal
from support.daemon import DaemonProcess
from support.tally import record, rounds

BATCH = 100_000
CALLERS = 32
SECONDS = rounds(4, 30)
LARGE = [b"%d" % number for number in range(LARGE_BYTES)]


def test_turns_come_in_the_order_asked_one_at_a_time() -> None:
    """Also where one that waits goes away, and where one fails in the middle of its turn."""
    within, order = 0, []

    async def take(turn: Turn, number: int) -> None:
        nonlocal within
        async with turn.taken():
            assert within == 0
            within += 1
            await asyncio.sleep(0)
            order.append(number)
            within -= 1
            if number == 2:
                raise ValueError

    async def run() -> None:
        turn = Turn()
        tasks = [asyncio.ensure_future(take(turn, number)) for number in range(6)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in ended if each] == [ValueError, asyncio.CancelledError]
        async with asyncio.timeout(5), turn.taken():
            pass

    asyncio.run(run())
    assert order == [0, 1, 2, 3, 5]


def test_a_turn_is_given_up_by_its_holder_alone() -> None:
    """Whoever has none gives none up, and one that was given up is not given up twice."""

    async def run() -> None:
        turn = Turn()
        async with turn.taken():
            other = asyncio.ensure_future(_gives_up(turn))
            waiting = asyncio.ensure_future(_takes(turn))
            await other
            await asyncio.sleep(0)
            assert not waiting.done()
            turn.give_up()
            await waiting
            async with turn.taken():
                turn.give_up()
        async with asyncio.timeout(5), turn.taken():
            pass

    async def _gives_up(turn: Turn) -> None:
        turn.give_up()

    async def _takes(turn: Turn) -> None:
        async with turn.taken():
            pass

    asyncio.run(run())


def served(directory: Path, run: Callable[[Gate, HeldJournal, Any], Any]) -> None:
    """Run over a gate with the filter "fruit", its journal, and the stub of a server over it."""

    async def within() -> None:
        async with inside.open_gate(directory) as (gate, journal):
            await gate.create("fruit", inside.asked(1_000_000, 1e-9))
            async with inside.serve(gate) as channel:
                await run(gate, journal, inside.stubs(channel)[0])

    asyncio.run(asyncio.wait_for(within(), 60))


def add_of(keys: list[bytes]) -> filters_pb2.AddRequest:
    return filters_pb2.AddRequest(filter="fruit", keys=keys)


def check_of(keys: list[bytes]) -> filters_pb2.MightContainRequest:
    return filters_pb2.MightContainRequest(filter="fruit", keys=keys)


def test_small_calls_wait_for_no_turn(tmp_path: Path) -> None:
    """While a large one has its turn: checks, adds and stats are answered, and the next large one is not."""

    async def run(gate: Gate, _: HeldJournal, filters: Any) -> None:
        async with gate.turn.taken():
            large = asyncio.ensure_future(filters.MightContain(check_of(LARGE), timeout=30).code())
            for _ in range(20):
                await filters.Add(add_of([b"mango"]), timeout=30)
                assert (await filters.MightContain(check_of([b"mango"]), timeout=30)).answers == [
                    filters_pb2.ANSWER_MAYBE
                ]
                await filters.Stats(filters_pb2.StatsRequest(filter="fruit"), timeout=30)
            assert not large.done()
        assert await large is grpc.StatusCode.OK

    served(tmp_path, run)


def test_an_add_that_waits_for_the_disk_has_had_its_turn(tmp_path: Path) -> None:
    """Large checks are answered while large adds wait for a journal that is held."""

    async def run(_: Gate, journal: HeldJournal, filters: Any) -> None:
        before = journal.durable_seq
        journal.released.clear()
        adds = [asyncio.ensure_future(filters.Add(add_of(LARGE), timeout=30).code()) for _ in range(3)]
        await inside.until(lambda: journal.last_seq >= before + 3)
        reply = await filters.MightContain(check_of(LARGE), timeout=30)
        assert set(reply.answers) == {filters_pb2.ANSWER_MAYBE}
        assert journal.durable_seq == before
        journal.released.set()
        assert await asyncio.gather(*adds) == [grpc.StatusCode.OK] * 3

    served(tmp_path, run)


@pytest.mark.parametrize("gone", ["cancelled", "deadline"])
def test_a_caller_that_goes_before_its_turn_is_dropped(tmp_path: Path, gone: str) -> None:
    """Nothing of its add is done: no record, no key, and the next large call has its turn."""

    async def run(gate: Gate, journal: HeldJournal, filters: Any) -> None:
        before = journal.last_seq
        await filters.Stats(filters_pb2.StatsRequest(filter="fruit"), timeout=30)
        tasks = len(asyncio.all_tasks())
        async with gate.turn.taken():
            calls = [filters.Add(add_of(LARGE), timeout=0.3 if gone == "deadline" else 30) for _ in range(10)]
            # Those that went before these arrived, so they have come and wait.
            await filters.Stats(filters_pb2.StatsRequest(filter="fruit"), timeout=30)
            if gone == "cancelled":
                for call in calls:
                    call.cancel()
            codes = set()
            for call in calls:
                try:
                    codes.add(await call.code())
                except asyncio.CancelledError:
                    codes.add(grpc.StatusCode.CANCELLED)
            # The server hears of it a moment later than the caller.
            await inside.until(lambda: len(asyncio.all_tasks()) <= tasks)
        wanted = grpc.StatusCode.CANCELLED if gone == "cancelled" else grpc.StatusCode.DEADLINE_EXCEEDED
        assert codes == {wanted}
        reply = await filters.MightContain(check_of(LARGE), timeout=30)
        assert set(reply.answers) == {filters_pb2.ANSWER_DEFINITELY_NOT}
        assert journal.last_seq == before

    served(tmp_path, run)
    record("a caller that goes before its large add has its turn", 10, "its add is dropped")


def test_waking_the_loop_never_blocks(daemon: DaemonProcess) -> None:
    """No local socket of the process blocks: one of gRPC's, full, held up all calls for 1.6 s."""
    process = Path(f"/proc/{daemon.process.pid}")
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    found = 0
    for link in (process / "fd").iterdir():
        target = os.readlink(link)
        if target.startswith("socket:[") and target[8:-1] in unix:
            info = (process / "fdinfo" / link.name).read_text()
            (flags,) = (line.split()[1] for line in info.splitlines() if line.startswith("flags:"))
            assert int(flags, 8) & os.O_NONBLOCK, link.name
            found += 1
    # The loop's own pair, and gRPC's.
    assert found >= 4


def test_small_calls_are_answered_within_a_second_in_a_crowd_of_large_ones(start_daemon: Any) -> None:
    """Health over gRPC and HTTP and a check of one key, with a deadline of a second each, while 32 callers
    add and check 100,000 keys or digests a call. Prints how long they took, and how many large ones did."""
    daemon: DaemonProcess = start_daemon()
    with daemon.stubs() as (filters, admin), grpc.insecure_channel(daemon.grpc) as channel:
        large = spec(10_000_000, on_full=filters_pb2.ON_FULL_DEGRADE)
        created = admin.CreateFilter(admin_pb2.CreateFilterRequest(name="fruit", spec=large))
        digests = {"digests": os.urandom(16 * BATCH), "hash_id": created.filter.hash_id}
        keys = {"keys": [b"%x" % number for number in range(BATCH)]}
        # Made once: what costs time here is the daemon's share.
        work = [
            (f"/bloomgate.v1.FilterService/{method}", message(filter="fruit", **asked).SerializeToString())
            for method, message in (
                ("Add", filters_pb2.AddRequest),
                ("MightContain", filters_pb2.MightContainRequest),
            )
            for asked in (keys, digests)
        ]
        ended = threading.Event()
        health = health_pb2_grpc.HealthStub(channel)
        probes: dict[str, Callable[[], Any]] = {
            "gRPC health": lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=1),
            "/readyz": lambda: daemon.get("/readyz"),
            "check": lambda: filters.MightContain(check_of([b"mango"]), timeout=1),
        }
        took: dict[str, list[float]] = {name: [] for name in probes}

        def crowd(number: int) -> int:
            path, request = work[number % len(work)]
            answered = 0
            with grpc.insecure_channel(daemon.grpc, [("grpc.use_local_subchannel_pool", 1)]) as own:
                call = own.unary_unary(path)
                while not ended.is_set():
                    call(request, timeout=60)
                    answered += 1
            return answered

        def probe(name: str) -> None:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                began = time.perf_counter()
                probes[name]()
                took[name].append(time.perf_counter() - began)
                # Not to order anything: the probes themselves should not be the load.
                ended.wait(0.01)

        for ask in probes.values():
            ask()
        with ThreadPoolExecutor(CALLERS + len(probes)) as threads:
            callers = [threads.submit(crowd, number) for number in range(CALLERS)]
            try:
                list(threads.map(probe, probes))
            finally:
                ended.set()
            answered = sum(each.result() for each in callers)
    for name, each in took.items():
        print(f"{name}: {len(each)} asked, median {statistics.median(each):.3f} s, most {max(each):.3f} s")
        assert max(each) < 1, name
    print(f"{answered} calls of {BATCH} keys")
    assert answered >= CALLERS
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log()
    record(
        "small calls asked within a second in a crowd of 100,000-key calls",
        sum(map(len, took.values())),
        "is answered",
    )
