"""Too much at once: what is refused, with when to come again, and what goes on answering."""

from __future__ import annotations

import asyncio
import http.client
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bloomgate.v1 import admin_pb2, filters_pb2
from bloomgated.config import LimitsConfig
from daemon import inside
from daemon.calls import Failure, eventually, failure, failure_of
from daemon.preludes import HOLD_CALLS
from support.daemon import DaemonProcess
from support.tally import record, rounds

OVERLOADED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", 0.05)
BATCH = 100_000
# Bytes of the filter that is written meanwhile.
LARGE = rounds(128 << 20, 1 << 30)
SECONDS = rounds(4, 30)


def what(said: Failure) -> tuple[grpc.StatusCode, str, float | None]:
    return said.code, said.reason, said.retry


# -- calls and bytes


def test_more_calls_than_allowed(start_daemon: Any, tmp_path: Path) -> None:
    """Those beyond the bound are told when to come again, at once; health and /readyz answer; once there is
    room again, everything is taken."""
    release = tmp_path / "release"
    daemon: DaemonProcess = start_daemon(
        "--set", "limits.concurrent_calls=8", prelude=HOLD_CALLS.format(path=str(release), verb="add")
    )
    with daemon.stubs() as (filters, admin), grpc.insecure_channel(daemon.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = admin_pb2.CreateFilterRequest(
            name="fruit", spec=filters_pb2.FilterSpec(capacity=100, error_rate=0.01)
        )
        admin.CreateFilter(request)
        add = filters_pb2.AddRequest(filter="fruit", keys=[b"mango"])
        check = filters_pb2.MightContainRequest(filter="fruit", keys=[b"mango"])
        with ThreadPoolExecutor(8) as threads:
            held = [threads.submit(filters.Add, add, timeout=60) for _ in range(8)]
            eventually(lambda: isinstance(tried(filters.MightContain, check), Failure))
            for _ in range(rounds(50, 2000)):
                assert what(failure(filters.Add, add)) == OVERLOADED
                assert what(failure(filters.MightContain, check)) == OVERLOADED
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=1).status == 1
            assert daemon.get("/readyz") == (200, "ok\n")
            release.touch()
            assert all(len(each.result().was_new) == 1 for each in held)
        for _ in range(20):
            assert filters.MightContain(check, timeout=30).answers == [filters_pb2.ANSWER_MAYBE]
    record("overload: more calls than allowed", rounds(50, 2000) * 2, "refuses each with a retry delay")


def tried(call: Callable[..., Any], request: Any) -> Any:
    try:
        return call(request, timeout=30)
    except grpc.RpcError as error:
        return failure_of(error)


def test_a_crowd_is_answered_or_told_to_come_again(start_daemon: Any) -> None:
    """2,000 callers at once over many connections, against a bound of 50: nothing else happens to any, and
    every acknowledged key is there."""
    daemon = start_daemon("--set", "limits.concurrent_calls=50")
    with daemon.stubs() as (_, admin):
        spec = filters_pb2.FilterSpec(capacity=10_000, error_rate=1e-6)
        admin.CreateFilter(admin_pb2.CreateFilterRequest(name="fruit", spec=spec))

    async def crowd() -> tuple[list[bytes], int]:
        channels = [
            grpc.aio.insecure_channel(daemon.grpc, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(20)
        ]
        taken, refused = [], 0

        async def caller(number: int) -> None:
            nonlocal refused
            filters, _ = inside.stubs(channels[number % len(channels)])
            key = b"key-%d" % number
            call = filters.Add(filters_pb2.AddRequest(filter="fruit", keys=[key]), timeout=60)
            if await call.code() is grpc.StatusCode.OK:
                taken.append(key)
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert what(failure_of(caught.value)) == OVERLOADED
                refused += 1

        await asyncio.gather(*map(caller, range(2000)))
        for channel in channels:
            await channel.close()
        return taken, refused

    taken, refused = asyncio.run(crowd())
    assert taken
    assert len(taken) + refused == 2000
    with daemon.stubs() as (filters, _):
        reply = filters.MightContain(filters_pb2.MightContainRequest(filter="fruit", keys=taken), timeout=30)
        assert set(reply.answers) == {filters_pb2.ANSWER_MAYBE}
    record("overload: 2,000 callers at once", 2000, "answers each, or refuses it with a retry delay")


def test_more_bytes_than_allowed(tmp_path: Path) -> None:
    """The requests under way are bounded by their bytes too; one alone is always taken; nothing leaks."""

    async def run() -> None:
        limits = LimitsConfig(bytes_under_way=1000)
        async with inside.open_gate(tmp_path, limits) as (gate, journal):
            await gate.create("fruit", inside.asked())
            async with inside.serve(gate, limits) as channel:
                filters, _ = inside.stubs(channel)
                small = filters_pb2.AddRequest(filter="fruit", keys=[b"m" * 300])
                large = filters_pb2.AddRequest(filter="fruit", keys=[b"p" * 5000])
                for _ in range(3):
                    await filters.Add(large, timeout=30)
                for _ in range(5):
                    before = journal.durable_seq
                    journal.released.clear()
                    waiting = [asyncio.ensure_future(filters.Add(small, timeout=30).code()) for _ in range(3)]
                    await inside.until(lambda before=before: journal.last_seq == before + 3)
                    for request in (small, large):
                        with pytest.raises(grpc.aio.AioRpcError) as caught:
                            await filters.Add(request, timeout=30)
                        said = failure_of(caught.value)
                        assert what(said) == OVERLOADED
                        assert "1000 may be" in said.message
                    journal.released.set()
                    assert await asyncio.gather(*waiting) == [grpc.StatusCode.OK] * 3

    asyncio.run(run())
    record("overload: more bytes under way than allowed", 10, "refuses each with a retry delay")


def test_idle_streams_have_caps_of_their_own(start_daemon: Any) -> None:
    """Up to the cap of their kind they are held; beyond it they are refused; calls and health checks never
    are for their sake; when one ends there is room again."""
    daemon = start_daemon("--set", "limits.streams=3", "--set", "limits.concurrent_calls=2")
    with grpc.insecure_channel(daemon.grpc) as channel, daemon.stubs() as (_, admin):
        health = health_pb2_grpc.HealthStub(channel)
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
        asking, ended = [reflection_pb2.ServerReflectionRequest(list_services="")], threading.Event()

        def idle() -> Any:
            yield asking[0]
            ended.wait(60)

        def watch() -> Any:
            return health.Watch(health_pb2.HealthCheckRequest(), timeout=60)

        def reflection() -> Any:
            return reflect.ServerReflectionInfo(idle(), timeout=60)

        def answers(opened: Callable[[], Any]) -> bool:
            streams.append(opened())
            if isinstance(tried(lambda *_, **__: next(streams[-1]), None), Failure):
                return False
            # One that is refused is ended by the time this is answered.
            health.Check(health_pb2.HealthCheckRequest(), timeout=30)
            return bool(streams[-1].is_active())

        streams: list[Any] = []
        for opened in (watch, reflection):
            streams[:] = [opened() for _ in range(3)]
            for each in streams:
                next(each)
            for _ in range(10):
                beyond = opened()
                if opened is watch:
                    # Whoever takes all the places hides nothing: it is said once, at least.
                    assert next(beyond).status == 1
                with pytest.raises(grpc.RpcError) as caught:
                    next(beyond)
                assert what(failure_of(caught.value)) == OVERLOADED
                assert health.Check(health_pb2.HealthCheckRequest(), timeout=1).status == 1
                admin.ListFilters(admin_pb2.ListFiltersRequest(), timeout=30)
            streams[0].cancel()
            eventually(lambda opened=opened: answers(opened))
        ended.set()
    record("overload: more idle streams than allowed", 20, "refuses each, calls and health go on")


# -- health while the daemon is busy


def test_health_answers_within_a_second_while_the_daemon_is_busy(start_daemon: Any) -> None:
    """Health over gRPC and HTTP, with a deadline of a second each, while batches of 100,000 keys and digests
    are added and checked, and a large filter is created and written. Prints how long they took."""
    daemon = start_daemon("--set", f"limits.filter_bytes={4 << 30}", "--set", f"limits.total_bytes={8 << 30}")
    took: dict[str, list[float]] = {"gRPC health": [], "/readyz": []}
    ended = threading.Event()

    def grpc_health() -> None:
        health.Check(health_pb2.HealthCheckRequest(), timeout=1)

    def readyz() -> None:
        with closing(http.client.HTTPConnection(daemon.http, timeout=1)) as connection:
            connection.request("GET", "/readyz")
            assert connection.getresponse().read() == b"ok\n"

    def probe(name: str, ask: Callable[[], None]) -> None:
        while not ended.is_set():
            began = time.perf_counter()
            ask()
            took[name].append(time.perf_counter() - began)
            # Not to order anything: the probes themselves should not be the load.
            ended.wait(0.01)

    def busy(ask: Callable[[], Any]) -> int:
        times, until = 0, time.monotonic() + SECONDS
        while time.monotonic() < until:
            ask()
            times += 1
        return times

    with grpc.insecure_channel(daemon.grpc) as channel, daemon.stubs() as (filters, admin):
        health = health_pb2_grpc.HealthStub(channel)
        with ThreadPoolExecutor(8) as threads:
            probes = [
                threads.submit(probe, "gRPC health", grpc_health),
                threads.submit(probe, "/readyz", readyz),
            ]
            try:
                spec = filters_pb2.FilterSpec(
                    capacity=int(LARGE * 8 / 9.6), error_rate=0.01, on_full=filters_pb2.ON_FULL_DEGRADE
                )
                admin.CreateFilter(admin_pb2.CreateFilterRequest(name="large", spec=spec), timeout=60)
                hash_id = filters.Stats(filters_pb2.StatsRequest(filter="large"), timeout=30).filter.hash_id
                keys = [b"%x" % number for number in range(BATCH)]

                def digests(message: Any) -> Any:
                    return message(filter="large", digests=os.urandom(16 * BATCH), hash_id=hash_id)

                snapshots = admin_pb2.SnapshotFilterRequest(name="large")
                work = (
                    lambda: filters.Add(filters_pb2.AddRequest(filter="large", keys=keys), timeout=60),
                    lambda: filters.Add(digests(filters_pb2.AddRequest), timeout=60),
                    lambda: filters.MightContain(
                        filters_pb2.MightContainRequest(filter="large", keys=keys), timeout=60
                    ),
                    lambda: filters.MightContain(digests(filters_pb2.MightContainRequest), timeout=60),
                    lambda: admin.SnapshotFilter(snapshots, timeout=60),
                )
                batches = sum(threads.map(busy, work))
            finally:
                ended.set()
            for each in probes:
                each.result()
    asked = sum(map(len, took.values()))
    for name, each in took.items():
        print(f"{name}: {len(each)} asked, median {statistics.median(each):.3f} s, most {max(each):.3f} s")
    assert batches >= len(work)
    assert daemon.stop() == 0
    record(
        "health asked within a second under 100,000-key batches and a large snapshot", asked, "is answered"
    )
