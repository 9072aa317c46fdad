"""An hour of mixed traffic in little time: nothing is lost, nothing grows, nothing is logged."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bloomgate.filters import Hasher, HashScheme
from bloomgate.v1 import admin_pb2, filters_pb2
from support.daemon import DaemonProcess
from support.tally import record, rounds

SECONDS = rounds(8, 240)
# What a caller may be told; UNAVAILABLE and INTERNAL are not among it.
EXPECTED = {
    grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT,
}  # fmt: skip
# kB by which the process may have grown after its warm-up: bodies and journal are the same size all along, so
# what is left is the allocator's. A leak of 1 kB a call would be ten times that.
GROWTH = 40_000


class Traffic:
    """Callers on their own connections, and what was acknowledged to them."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self.acknowledged: list[bytes] = []
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.calls = 0
        self.ended = threading.Event()
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self.warm = 0
        with daemon.stubs() as (filters, admin):
            spec = filters_pb2.FilterSpec(
                capacity=3_000_000, error_rate=1e-4, on_full=filters_pb2.ON_FULL_DEGRADE
            )
            admin.CreateFilter(admin_pb2.CreateFilterRequest(name="steady", spec=spec))
            said = filters.HashSpec(filters_pb2.HashSpecRequest(filter="steady"))
            self._hasher = Hasher(HashScheme(said.hash_scheme), said.seed)

    def caller(self, number: int) -> None:
        """Mixed calls until it is over."""
        choose = random.Random(number)
        with grpc.insecure_channel(self._daemon.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            from bloomgate.v1 import admin_pb2_grpc, filters_pb2_grpc

            filters = filters_pb2_grpc.FilterServiceStub(channel)
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            count = 0
            while not self.ended.is_set():
                count += 1
                work = choose.choices(
                    (
                        self._single,
                        self._bulk,
                        self._hurried,
                        self._cancelled,
                        self._bad,
                        self._passing,
                        self._asked,
                    ),
                    (30, 8, 10, 10, 5, 2, 3),
                )[0]
                work(choose, filters, admin, channel, b"%d-%d" % (number, count))

    def _count(self, call: Callable[..., Any], request: Any, timeout: float = 60) -> Any:
        reply, code = None, grpc.StatusCode.OK
        try:
            reply = call(request, timeout=timeout)
        except grpc.RpcError as error:
            code = error.code()
        with self._lock:
            self.codes[code] += 1
            self.calls += 1
        return reply

    def _single(self, _: random.Random, filters: Any, _admin: Any, _channel: Any, key: bytes) -> None:
        if self._count(filters.Add, filters_pb2.AddRequest(filter="steady", keys=[key])):
            self.acknowledged.append(key)
        self._count(
            filters.MightContain, filters_pb2.MightContainRequest(filter="steady", keys=[key, key + b"?"])
        )

    def _bulk(self, choose: random.Random, filters: Any, _admin: Any, _channel: Any, key: bytes) -> None:
        keys = [b"%s/%d" % (key, each) for each in range(choose.choice((10, 300, 3000)))]
        if choose.random() < 0.5:
            request = filters_pb2.AddRequest(filter="steady", keys=keys)
        else:
            digests = self._hasher.digests(keys)
            request = filters_pb2.AddRequest(filter="steady", digests=digests, hash_id=self._hasher.hash_id)
        if self._count(filters.Add, request):
            self.acknowledged += keys[::100]
        self._count(filters.MightContain, filters_pb2.MightContainRequest(filter="steady", keys=keys))

    def _hurried(self, choose: random.Random, filters: Any, _admin: Any, _channel: Any, key: bytes) -> None:
        request = filters_pb2.AddRequest(filter="steady", keys=[key] * 500)
        self._count(filters.Add, request, choose.uniform(0.0002, 0.005))

    def _cancelled(self, choose: random.Random, filters: Any, _admin: Any, _channel: Any, key: bytes) -> None:
        call = filters.MightContain.future(
            filters_pb2.MightContainRequest(filter="steady", keys=[key] * 2000)
        )
        threading.Event().wait(choose.uniform(0, 0.003))
        call.cancel()

    def _bad(self, choose: random.Random, filters: Any, admin: Any, channel: Any, _key: bytes) -> None:
        call, request = choose.choice(
            (
                (filters.Add, filters_pb2.AddRequest(filter="nobody", keys=[b"k"])),
                (filters.Add, filters_pb2.AddRequest(filter="steady", keys=[b""])),
                (filters.MightContain, filters_pb2.MightContainRequest(filter="a/b", keys=[b"k"])),
                (admin.CreateFilter, admin_pb2.CreateFilterRequest(name="x")),
                (channel.unary_unary("/bloomgate.v1.FilterService/Add"), b"\xff\xff\xff"),
            )
        )
        self._count(call, request)

    def _passing(self, _: random.Random, filters: Any, admin: Any, _channel: Any, key: bytes) -> None:
        name = f"passing-{key.decode()}"
        spec = filters_pb2.FilterSpec(capacity=5000, error_rate=0.01)
        self._count(admin.CreateFilter, admin_pb2.CreateFilterRequest(name=name, spec=spec))
        self._count(filters.Add, filters_pb2.AddRequest(filter=name, keys=[key] * 100))
        self._count(admin.SnapshotFilter, admin_pb2.SnapshotFilterRequest(name=name))
        self._count(admin.DropFilter, admin_pb2.DropFilterRequest(name=name))

    def _asked(self, _: random.Random, filters: Any, admin: Any, channel: Any, _key: bytes) -> None:
        self._count(filters.Stats, filters_pb2.StatsRequest(filter="steady"))
        self._count(admin.ListFilters, admin_pb2.ListFiltersRequest())
        self._daemon.get("/metrics")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        next(watch)
        watch.cancel()
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        with contextlib.suppress(grpc.RpcError):
            list(
                reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                    iter([ask]), timeout=60
                )
            )


def process(daemon: DaemonProcess) -> tuple[int, int, int]:
    """Its memory in kB, open files and threads."""
    proc = Path(f"/proc/{daemon.process.pid}")
    fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]), len(os.listdir(proc / "fd")), int(fields["Threads"])


@pytest.mark.timeout(600)
def test_a_daemon_does_not_grow_and_loses_nothing(start_daemon: Any) -> None:
    """Single and bulk calls, tiny deadlines, cancelled and bad calls, passing filters, streams, scrapes; with
    snapshots and trims all the while. Memory, files and threads are as they were after the warm-up, within a
    bound; every acknowledged key is there; the log has no error; it stops cleanly."""
    daemon = start_daemon(
        "--set", "journal.retention=0", "--set", "snapshot.interval=0.5", "--set", "snapshot.check_every=0.1"
    )
    traffic = Traffic(daemon)
    before = process(daemon)
    with ThreadPoolExecutor(8) as threads:
        callers = [threads.submit(traffic.caller, number) for number in range(8)]
        # Not to order anything: this is how long it goes on.
        traffic.ended.wait(SECONDS / 3)
        warm = process(daemon)
        traffic.ended.wait(SECONDS * 2 / 3)
        after = process(daemon)
        traffic.ended.set()
        for each in callers:
            each.result()
    print(f"{traffic.calls} calls: {dict(traffic.codes)}")
    print(f"kB, files, threads: {before} before, {warm} warm, {after} after")
    assert set(traffic.codes) <= EXPECTED
    assert traffic.codes[grpc.StatusCode.OK] > traffic.calls // 2
    assert after[0] - warm[0] < GROWTH
    keys = traffic.acknowledged
    with daemon.stubs() as (filters, admin):
        for start in range(0, len(keys), 50_000):
            request = filters_pb2.MightContainRequest(filter="steady", keys=keys[start : start + 50_000])
            answers = filters.MightContain(request, timeout=60).answers
            assert set(answers) == {filters_pb2.ANSWER_MAYBE}
        listed = [each.name for each in admin.ListFilters(admin_pb2.ListFiltersRequest()).filters]
    assert len(listed) <= 1 + 8, "passing filters were left over"
    _, files, alive = process(daemon)
    assert files <= before[1] + 10
    assert alive <= before[2] + 30, "threads of the loop's pool are kept; others are not"
    assert daemon.stop() == 0
    assert [line for line in daemon.log().splitlines() if '"level": "info"' not in line] == []
    record(
        "soak: calls of mixed traffic, many of them cancelled", traffic.calls, "loses nothing, does not grow"
    )
