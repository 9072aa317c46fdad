"""Checks beside those of peers: in the process, one over the network, many at once, in bulk."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from peers import PeerMissing, Redis, cpu_seconds, postgres
from report import Report, Row, compare, per_second, seconds

from bloomgate import AsyncClient, Client, ClientOptions
from daemon import Server, keys

OPTIONS = ClientOptions(check_timeout=10.0, on_error="raise")
NAME, CAPACITY, ERROR_RATE = "bench", 1_000_000, 0.01
CALLS = 2_000
# Samples of what is too short for the clock are the mean of so many calls.
BLOCK = 100


def p50_of_blocks(call: Callable[[bytes], object], asked: Sequence[bytes], block: int) -> float:
    """The median time of a call in seconds."""
    samples = []
    for start in range(0, len(asked) - block + 1, block):
        part = asked[start : start + block]
        began = time.perf_counter()
        for key in part:
            call(key)
        samples.append((time.perf_counter() - began) / block)
    return statistics.median(samples)


def leased(report: Report, target: str, redis: Any) -> None:
    """One check, one caller."""
    asked = keys("absent", 20_000)
    with Client(target, options=OPTIONS) as client, client.filter(NAME, replica=True) as copy:
        assert copy.wait(60)
        ours = lambda: p50_of_blocks(copy.might_contain, asked, BLOCK)  # noqa: E731
        if redis is not None:
            seen = compare(
                ours,
                lambda: p50_of_blocks(
                    lambda key: redis.execute_command("BF.EXISTS", NAME, key), asked[:CALLS], 1
                ),
                less_is_better=True,
            )
            report.add(
                seen.row(
                    "one check, leased, p50", "redis-py BF.EXISTS", "at least 50x", seen.ratio >= 50, seconds
                )
            )
        for name, peer, most in _in_process():
            for key in keys("there", 100_000):
                peer.add(key)
            seen = compare(
                ours, lambda peer=peer: p50_of_blocks(peer.__contains__, asked, BLOCK), less_is_better=True
            )
            aim = f"at most {most}x its time"
            met = seen.ratio >= 1 / most
            report.add(seen.row("one check, leased", name, aim, met, seconds))


def _in_process() -> list[tuple[str, Any, float]]:
    """Filters of this process, and how many times their time a leased check may take."""
    try:
        import rbloom
        import xxhash
    except ImportError:
        return []
    found = [
        ("rbloom, hash(), cannot be saved", rbloom.Bloom(CAPACITY, ERROR_RATE), 15.0),
        (
            "rbloom, xxh3, can be saved",
            rbloom.Bloom(CAPACITY, ERROR_RATE, lambda key: xxhash.xxh3_128_intdigest(key) - 2**127),
            2.0,
        ),
    ]
    try:
        import pybloom_live
    except ImportError:
        return found
    return [*found, ("pybloom-live", pybloom_live.BloomFilter(CAPACITY, ERROR_RATE), 1.0)]


async def _rate(call: Callable[[bytes], Awaitable[object]], asked: list[bytes], tasks: int) -> float:
    left = iter(asked)

    async def caller() -> None:
        for key in left:
            await call(key)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(tasks)))
    return len(asked) / (time.perf_counter() - began)


def concurrent(report: Report, target: str, port: int) -> None:
    """Many single checks at once, of one event loop."""
    import redis.asyncio

    asked = keys("absent", 20_000)
    with asyncio.Runner() as runner:
        ours = AsyncClient(target, options=OPTIONS)
        # More connections are slower, with 1,024 callers too.
        pool = redis.asyncio.BlockingConnectionPool(port=port, max_connections=64, timeout=60)
        peer = redis.asyncio.Redis(connection_pool=pool)
        handle = ours.filter(NAME)
        for tasks in (64, 1024):
            seen = compare(
                lambda tasks=tasks: runner.run(_rate(handle.might_contain, asked, tasks)),
                lambda tasks=tasks: runner.run(
                    _rate(lambda key: peer.execute_command("BF.EXISTS", NAME, key), asked, tasks)
                ),
                less_is_better=False,
                rounds=5,
            )
            aim = "at least 5x"
            report.add(
                seen.row(
                    f"{tasks:,} concurrent single checks, asyncio", "redis.asyncio BF.EXISTS", aim,
                    seen.ratio >= 5, per_second("checks"),
                )
            )  # fmt: skip
        runner.run(ours.close())
        runner.run(peer.aclose())


def bulk(report: Report, target: str, server: Server, redis: Any, redis_pid: int) -> None:
    """Calls of many keys, end to end, and what they cost the servers."""
    asked = keys("absent", 200_000)
    with Client(target, options=OPTIONS) as client:
        handle = client.filter(NAME)

        def rate(call: Callable[[list[bytes]], object], size: int) -> float:
            began = time.perf_counter()
            for start in range(0, len(asked), size):
                call(asked[start : start + size])
            return len(asked) / (time.perf_counter() - began)

        def theirs(part: list[bytes]) -> object:
            return redis.execute_command("BF.MEXISTS", NAME, *part)

        for size, least in ((10_000, 2.0), (1_000, 1.0)):
            seen = compare(
                lambda size=size: rate(handle.might_contain_many, size),
                lambda size=size: rate(theirs, size),
                less_is_better=False,
            )
            report.add(
                seen.row(
                    f"bulk check, {size:,} keys a call, end to end", "redis-py BF.MEXISTS",
                    f"at least {least:g}x", seen.ratio >= least, per_second("keys"),
                )
            )  # fmt: skip

        def cost(pid: int, call: Callable[[list[bytes]], object]) -> float:
            before = cpu_seconds(pid)
            for _ in range(3):
                rate(call, 10_000)
            return (cpu_seconds(pid) - before) / (3 * len(asked))

        seen = compare(
            lambda: cost(server.process.pid, handle.might_contain_many),
            lambda: cost(redis_pid, theirs),
            less_is_better=True,
            rounds=5,
        )
        report.add(
            seen.row(
                "daemon CPU per key, digests, 10,000 a call", "RedisBloom, BF.MEXISTS", "at most 1x",
                seen.ratio >= 1, seconds,
            )
        )  # fmt: skip


def guarded(report: Report, target: str, folder: Path) -> None:
    """Lookups of absent keys behind a guard, beside the same lookups alone."""
    import psycopg

    with postgres(folder) as address, psycopg.connect(address, autocommit=True) as connection:
        connection.execute("CREATE TABLE blocked (account text PRIMARY KEY)")
        with connection.cursor().copy("COPY blocked FROM STDIN") as copy:
            for key in keys("there", CAPACITY):
                copy.write_row((key.decode(),))
        connection.execute("ANALYZE blocked")
        find = connection.cursor()

        def look_up(key: str) -> object:
            return find.execute("SELECT 1 FROM blocked WHERE account = %s", (key,), prepare=True).fetchone()

        asked = [key.decode() for key in keys("absent", 5_000)]
        with Client(target, options=OPTIONS) as client, client.filter(NAME, replica=True) as handle:
            assert handle.wait(60)
            guard = handle.guard(look_up)

            def each(call: Callable[[str], object]) -> float:
                began = time.perf_counter()
                for key in asked:
                    call(key)
                return (time.perf_counter() - began) / len(asked)

            seen = compare(lambda: each(guard), lambda: each(look_up), less_is_better=True)
    report.add(
        seen.row(
            "guarded lookup of an absent key, leased, end to end", "the lookup in PostgreSQL, psycopg",
            "at least 20x", seen.ratio >= 20, seconds,
        )
    )  # fmt: skip


def measure(report: Report, server: Server, folder: Path) -> None:
    """All of them, against a daemon that has the filter."""
    target = server.address
    try:
        with Redis(folder / "redis") as redis_server:
            redis = redis_server.client()
            redis.execute_command("BF.RESERVE", NAME, ERROR_RATE, CAPACITY)
            there = keys("there", CAPACITY)
            for start in range(0, len(there), 10_000):
                redis.execute_command("BF.MADD", NAME, *there[start : start + 10_000])
            leased(report, target, redis)
            concurrent(report, target, redis_server.port)
            bulk(report, target, server, redis, redis_server.process.pid)
    except PeerMissing as missing:
        report.missing.append(str(missing))
        leased(report, target, None)
    try:
        guarded(report, target, folder)
    except PeerMissing as missing:
        report.missing.append(str(missing))


def unary(report: Report, rates: dict[str, dict[int, list[float]]]) -> None:
    """What ``daemon.unary`` has measured, as rows."""
    for in_flight, ours in rates["check"].items():
        empty = rates["empty"][in_flight]
        ratios = [a / b for a, b in zip(ours, empty, strict=True)]
        ratio = statistics.median(ratios)
        report.add(
            Row(
                f"unary check, {in_flight} in flight", per_second("calls")(statistics.median(ours)),
                "an empty grpcio handler", per_second("calls")(statistics.median(empty)),
                f"{ratio:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})", "at least 0.9x", ratio >= 0.9,
            )
        )  # fmt: skip
