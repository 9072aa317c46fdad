"""What copies under leases cost the daemon, an Add, and their own start.

Run with arguments it is a process of many replicas: ``python replicas.py TARGET CLIENTS``.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
from peers import PeerMissing, Redis, cpu_seconds
from report import Report, Row, compare, per_second, seconds

from bloomgate import AsyncClient, Client, ClientOptions
from bloomgate.filters.image import from_bytes
from bloomgate.v1 import filters_pb2 as pb
from daemon import Server, daemon, keys

NAME = "leased"
METHOD = "/bloomgate.v1.FilterService/Lease"
PER_PROCESS = 500
# Seconds of a lease: the daemon's default.
LEASE = 2.0
WATCHED = 10.0


class Replicas:
    """Processes of many replicas each, all of them leased when this returns."""

    def __init__(self, target: str, count: int) -> None:
        each = [min(PER_PROCESS, count - start) for start in range(0, count, PER_PROCESS)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, target, str(replicas)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for replicas in each
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "leased\n"

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.communicate("")


class Held:
    """A copy held by hand, on a connection of its own: what a Client sends and when, without its threads.

    A thousand clients in two cores' processes would measure their threads; the daemon sees the same.
    """

    def __init__(self, target: str) -> None:
        channel = grpc.aio.insecure_channel(target, (("grpc.use_local_subchannel_pool", 1),))
        lease = channel.stream_stream(METHOD, pb.LeaseRequest.SerializeToString, pb.LeaseResponse.FromString)
        self._call = lease()
        self._channel = channel
        self._subscription = 0
        self.leased = asyncio.Event()
        # gRPC takes one message at a time.
        self._sending = asyncio.Lock()
        self._tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._renew())]

    async def _send(self, **message: object) -> None:
        async with self._sending:
            await self._call.write(pb.LeaseRequest(**message))  # type: ignore[arg-type]

    async def _renew(self) -> None:
        await self._send(hello=pb.LeaseHello(replica=os.urandom(16)))
        await self._send(open=pb.LeaseOpen(open=1, filter=NAME))
        nonce = 0
        while True:
            nonce += 1
            await self._send(renew=pb.LeaseRenew(nonce=nonce))
            await asyncio.sleep(LEASE / 3)

    async def _listen(self) -> None:
        image, size = b"", 0
        async for response in self._call:
            which = response.WhichOneof("message")
            if which == "opened":
                self._subscription, size = response.opened.subscription, response.opened.image_bytes
            elif which == "chunk":
                image += response.chunk.data
                if len(image) == size:
                    await self._ack(from_bytes(image).seq)
            elif which == "delta":
                await self._ack(response.delta.last_seq)
            elif which == "grant" and response.grant.subscriptions:
                self.leased.set()

    async def _ack(self, seq: int) -> None:
        await self._send(ack=pb.LeaseAck(subscription=self._subscription, seq=seq))

    async def close(self) -> None:
        """Give it up."""
        await self._send(close=pb.LeaseClose(subscription=self._subscription))
        for task in self._tasks:
            task.cancel()
        await self._channel.close()


async def hold(target: str, count: int) -> None:
    """Hold copies until stdin ends."""
    held = []
    for _ in range(count):
        held.append(Held(target))
        # Not all in one moment, and so spread over the time between renewals.
        await asyncio.sleep(LEASE / 3 / count)
    for each in held:
        await each.leased.wait()
    print("leased", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for each in held:
        await each.close()


def _share(server: Server) -> float:
    before = cpu_seconds(server.process.pid)
    time.sleep(WATCHED)
    return (cpu_seconds(server.process.pid) - before) / WATCHED


def renewing(report: Report, server: Server) -> None:
    """The daemon's CPU while copies are renewed and nothing else happens."""
    idle = _share(server)
    for count in (100, 1000):
        with Replicas(server.address, count):
            busy = _share(server)
        met = busy < 0.5 if count == 1000 else None
        report.add(
            Row(
                f"{count:,} replicas renewing on one daemon", f"{busy:.1%} of a core", "idle", f"{idle:.1%}",
                "", "under 50 % at 1,000" if count == 1000 else "", met,
            )
        )  # fmt: skip


def adds_beside(report: Report, server: Server) -> None:
    """An Add while copies of its filter are held."""
    with Client(server.address) as client:
        handle = client.filter(NAME)

        def p50(tag: str) -> float:
            samples = []
            for key in keys(tag, 300):
                began = time.perf_counter()
                handle.add(key)
                samples.append(time.perf_counter() - began)
            return statistics.median(samples)

        p50("warm")
        alone = p50("alone")
        for count in (1, 10, 100):
            with Replicas(server.address, count):
                beside = p50(f"beside-{count}")
            report.add(
                Row(f"an Add while {count} hold leases, p50", seconds(beside), "without", seconds(alone),
                    f"{beside / alone:.1f} times as long")
            )  # fmt: skip


def start(report: Report, server: Server) -> None:
    """From asking for a copy until it answers."""
    with Client(server.address, options=ClientOptions(admin_timeout=120.0)) as client:
        for capacity in (1_000_000, 100_000_000):
            name = f"start-{capacity}"
            nbytes = client.create_filter(name, capacity, 0.01).stats.memory_bytes
            samples = []
            for _ in range(5):
                with client.filter(name, replica=True) as handle:
                    began = time.perf_counter()
                    assert handle.wait(120)
                    samples.append(time.perf_counter() - began)
            report.add(
                Row(f"replica start, filter for {capacity:,} keys", f"{seconds(statistics.median(samples))}",
                    "", f"{nbytes:,} bytes")
            )  # fmt: skip
            client.drop_filter(name)


async def _adds(add: object, tag: str, callers: int, calls: int) -> float:
    left = iter(keys(tag, calls))

    async def caller() -> None:
        for key in left:
            await add(key)  # type: ignore[operator]

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return calls / (time.perf_counter() - began)


def durable_adds(report: Report, server: Server, folder: Path) -> None:
    """Adds that are on disk when they are acknowledged."""
    import redis.asyncio

    with Redis(folder / "durable", durable=True) as redis_server, asyncio.Runner() as runner:
        redis_server.client().execute_command("BF.RESERVE", NAME, 0.01, 1_000_000)
        pool = redis.asyncio.BlockingConnectionPool(port=redis_server.port, max_connections=256, timeout=60)
        peer = redis.asyncio.Redis(connection_pool=pool)
        ours = AsyncClient(server.address)
        handle = ours.filter(NAME)
        turns = iter(range(10_000))
        for callers, calls in ((1, 300), (16, 2_000), (256, 5_000)):
            seen = compare(
                lambda callers=callers, calls=calls: runner.run(
                    _adds(handle.add, f"d-{next(turns)}", callers, calls)
                ),
                lambda callers=callers, calls=calls: runner.run(
                    _adds(
                        lambda key: peer.execute_command("BF.ADD", NAME, key),
                        f"d-{next(turns)}",
                        callers,
                        calls,
                    )
                ),
                less_is_better=False,
                rounds=5,
            )
            aim, met = ("at least 1x", seen.ratio >= 1) if callers == 256 else ("", None)
            report.add(
                seen.row(f"durable Adds, {callers} callers", "Redis, appendfsync always, BF.ADD", aim, met,
                         per_second("adds"))
            )  # fmt: skip
        runner.run(ours.close())
        runner.run(peer.aclose())


def measure(report: Report, folder: Path) -> None:
    """All of them, against a daemon of their own."""
    with daemon(f"{folder}/leases", "limits.concurrent_calls=2000") as server:
        with Client(server.address) as client:
            client.create_filter(NAME, 100_000)
        renewing(report, server)
        adds_beside(report, server)
        start(report, server)
        try:
            durable_adds(report, server, folder)
        except PeerMissing as missing:
            report.missing.append(str(missing))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        asyncio.run(hold(sys.argv[1], int(sys.argv[2])))
    else:
        with tempfile.TemporaryDirectory() as directory:
            measure(Report(), Path(directory))
