"""The daemon on its own and beside an empty grpcio server: calls and keys per second, and its memory.

Client and server share the cores, as processes of their own. Contenders are measured in turns; shown are
medians. The empty handler does nothing but parse and answer the same messages.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc

from bloomgate.client import Client
from bloomgate.filters import Hasher, HashScheme
from bloomgate.options import ClientOptions
from bloomgate.v1 import filters_pb2 as pb
from kernel import Table

SERVE = "from bloomgated.main import main; main()"
EMPTY = """
import asyncio, grpc
from bloomgate.v1 import filters_pb2 as pb
async def check(request, context):
    return pb.MightContainResponse(answers=(pb.ANSWER_DEFINITELY_NOT,))
async def main():
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    handler = grpc.unary_unary_rpc_method_handler(
        check, pb.MightContainRequest.FromString, pb.MightContainResponse.SerializeToString)
    server.add_generic_rpc_handlers((
        grpc.method_handlers_generic_handler("bloomgate.v1.FilterService", {"MightContain": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()
asyncio.run(main())
"""
METHOD = "/bloomgate.v1.FilterService/"
TURNS = 7
CALLS = 1_500
IN_FLIGHT = 16
BATCH = 10_000
BULK_CALLS = 20
MB = 10**6


class Server:
    """A process that prints its address when it is ready, and ends with the block."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.address = next(word[5:] for word in line.split() if word.startswith("grpc="))

    def rss(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def daemon(directory: str, *settings: str) -> Server:
    """A bloomgated on free ports."""
    flags = [part for setting in settings for part in ("--set", setting)]
    return Server(
        SERVE, "serve", "--data-dir", directory, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *flags
    )


def keys(prefix: str, count: int) -> list[bytes]:
    """``count`` keys of about twenty bytes."""
    return [b"%s-%d@example.com" % (prefix.encode(), i) for i in range(count)]


Call = Callable[[int], Awaitable[object]]


async def rate(call: Call, calls: int, in_flight: int) -> float:
    """Calls per second with ``in_flight`` of them under way."""
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            await call(number)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return calls / (time.perf_counter() - started)


def stub(
    channel: grpc.aio.Channel, method: str, request: type, response: type
) -> Callable[..., Awaitable[object]]:
    """A raw call, so that both servers see the same client."""
    multi: Callable[..., Awaitable[object]] = channel.unary_unary(
        METHOD + method, request.SerializeToString, response.FromString
    )
    return multi


async def unary(target: str, empty: str) -> dict[str, dict[int, list[float]]]:
    """Single checks and the empty handler, calls/s of each turn, one at a time and several."""
    asked = [pb.MightContainRequest(filter="bench", keys=[key]) for key in keys("absent", CALLS)]
    rates: dict[str, dict[int, list[float]]] = {name: {1: [], IN_FLIGHT: []} for name in ("empty", "check")}
    async with grpc.aio.insecure_channel(target) as one, grpc.aio.insecure_channel(empty) as other:
        stubs = {
            name: stub(channel, "MightContain", pb.MightContainRequest, pb.MightContainResponse)
            for name, channel in (("empty", other), ("check", one))
        }
        for turn in range(TURNS + 1):
            for in_flight in (1, IN_FLIGHT):
                # Turn by turn the other way round: who comes second meets a warmer machine.
                for name in sorted(stubs, reverse=bool(turn % 2)):
                    call = stubs[name]
                    seen = await rate(lambda i, call=call: call(asked[i]), CALLS, in_flight)
                    if turn:  # the first warms up
                        rates[name][in_flight].append(seen)
    return rates


async def bulk(target: str, hasher: Hasher) -> Table:
    """Bulk checks with keys and with digests, the client's hashing apart and included."""
    table = Table(
        f"bulk checks, absent keys in calls of {BATCH:,}, keys/s",
        ("one at a time", "4 in flight"),
        "digests are 16 bytes a key, made by the client; the last row makes them while it is measured",
    )
    batches = [keys(f"absent{i}", BATCH) for i in range(BULK_CALLS)]
    by_keys = [pb.MightContainRequest(filter="bench", keys=batch) for batch in batches]

    def digested(i: int) -> pb.MightContainRequest:
        digests = hasher.digests(batches[i])
        return pb.MightContainRequest(filter="bench", digests=digests, hash_id=hasher.hash_id)

    by_digests = [digested(i) for i in range(BULK_CALLS)]
    async with grpc.aio.insecure_channel(target) as channel:
        check = stub(channel, "MightContain", pb.MightContainRequest, pb.MightContainResponse)
        contenders: dict[str, Call] = {
            "keys": lambda i: check(by_keys[i]),
            "digests": lambda i: check(by_digests[i]),
            "digests, hashing included": lambda i: check(digested(i)),
        }
        for name, call in contenders.items():
            cells = []
            for in_flight in (1, 4):
                seen = [BATCH * await rate(call, BULK_CALLS, in_flight) for _ in range(TURNS)]
                cells.append(f"{statistics.median(seen):,.0f}")
            table.rows.append((name, cells))
    return table


def through_the_client(target: str) -> Table:
    """What a caller of the library sees."""
    table = Table("through bloomgate.Client, keys/s", ("checks/s",), "its metrics and deadlines included")
    with Client(target, options=ClientOptions(check_timeout=5.0)) as client:
        bench = client.filter("bench")
        single, many = keys("single", CALLS), keys("many", 100_000)
        bench.might_contain_many(many)
        seen = [CALLS / _timed(lambda: [bench.might_contain(key) for key in single]) for _ in range(TURNS)]
        table.rows.append(("might_contain, one thread", [f"{statistics.median(seen):,.0f}"]))
        for size in (1_000, 100_000):
            parts = [many[i : i + size] for i in range(0, len(many), size)]
            seen = [
                len(many) / _timed(lambda parts=parts: [bench.might_contain_many(p) for p in parts])
                for _ in range(TURNS)
            ]
            table.rows.append((f"might_contain_many of {size:,}", [f"{statistics.median(seen):,.0f}"]))
    return table


def memory(directory: str) -> Table:
    """Resident memory beside the bodies, all of them touched."""
    table = Table(
        "memory of the daemon",
        ("bodies", "resident", "aim"),
        "aim: 1.1 times the bodies and 90 MB; every page of the bodies is in use",
    )
    with daemon(directory) as server, Client(server.address) as client:
        bodies = 0
        for number in range(4):
            made = client.create_filter(f"m{number}", 100_000_000, 0.01, on_full="reject")
            bodies += made.stats.memory_bytes
            # A page holds 32,768 bits: about a million keys with 7 hashes leave none untouched.
            for part in range(10):
                client.filter(f"m{number}").add_many(keys(f"m{part}", 100_000))
            table.rows.append(
                (
                    f"{number + 1} filters for 10^8 keys",
                    [
                        f"{bodies / MB:,.0f} MB",
                        f"{server.rss() / MB:,.0f} MB",
                        f"{(1.1 * bodies + 90 * MB) / MB:,.0f} MB",
                    ],
                )
            )
        for number in range(4):
            client.drop_filter(f"m{number}")
    return table


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure() -> Iterator[Table]:
    """What is not beside a peer."""
    hasher = Hasher(HashScheme.MURMUR3_X64_128, 7)
    with tempfile.TemporaryDirectory() as directory:
        with bench_daemon(f"{directory}/data") as server:
            yield asyncio.run(bulk(server.address, hasher))
            yield through_the_client(server.address)
        yield memory(f"{directory}/memory")


def bench_daemon(directory: str) -> Server:
    """A daemon with a million keys in the filter "bench"."""
    server = daemon(directory)
    with Client(server.address) as client:
        client.create_filter("bench", 1_000_000, 0.01, seed=7, on_full="reject")
        client.filter("bench").add_many(keys("there", 1_000_000))
    return server
