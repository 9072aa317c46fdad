"""The daemon's parts in this process, so that a test can hold or break one of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from bloomgate.filters import FilterSpec
from bloomgate.v1 import admin_pb2_grpc, filters_pb2_grpc
from bloomgated.api.server import ApiServer
from bloomgated.catalog import Catalog
from bloomgated.config import LeaseConfig, LimitsConfig
from bloomgated.gate import Gate
from bloomgated.holders import Holders
from bloomgated.leases import Leases, boottime
from bloomgated.metrics import CallMetrics
from bloomgated.requests import Asked
from bloomgated.snapshotter import Snapshotter
from bloomgated.storage.records import KIND_SNAPSHOTS, Record, SnapshotFile, Snapshots
from bloomgated.storage.recovery import recover
from bloomgated.storage.snapshots import SnapshotStore
from bloomgated.storage.sqlite import SqliteJournal


class HeldJournal(SqliteJournal):
    """A real journal whose commits can be held, and that can refuse or lose the records of snapshots."""

    refuses: Exception | None = None
    loses: Exception | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.released = threading.Event()
        self.released.set()

    def append(self, records: Sequence[Record]) -> int:
        if self.refuses is not None and any(isinstance(record, Snapshots) for record in records):
            raise self.refuses
        return super().append(records)

    def _commit(self, *arguments: Any) -> int:
        assert self.released.wait(60)
        if self.loses is not None and any(row.kind == KIND_SNAPSHOTS for _, row in arguments[2]):
            raise self.loses
        return super()._commit(*arguments)


class HeldStore(SnapshotStore):
    """Real snapshot files, whose writing can be held, or fail."""

    fails: Exception | None = None

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.released = threading.Event()
        self.released.set()
        self.begun: list[int] = []
        """Ids of the filters whose writing has begun, in order."""

    def write(self, filter_id: int, *arguments: Any) -> SnapshotFile:
        self.begun.append(filter_id)
        assert self.released.wait(60)
        if self.fails is not None:
            raise self.fails
        return super().write(filter_id, *arguments)


@asynccontextmanager
async def open_gate(
    directory: Path,
    limits: LimitsConfig | None = None,
    *,
    store: SnapshotStore | None = None,
    clock: Callable[[], float] = time.monotonic,
    lease: LeaseConfig | None = None,
    lease_clock: Callable[[], float] | None = None,
    **journal_options: Any,
) -> AsyncIterator[tuple[Gate, HeldJournal]]:
    """A gate over a data directory; closing it is a crash as far as snapshots go: it writes none.

    Filters are due after 320 seconds of ``clock``.
    """
    journal = HeldJournal(directory, **journal_options)
    store = store or SnapshotStore(directory)
    recovered = recover(journal, store)
    journal.prepare()
    journal.start()
    gate = Gate(limits or LimitsConfig(), lease or LeaseConfig(), clock=clock)
    gate.leases.clock = lease_clock or boottime
    snapshotter = Snapshotter(journal, store, interval=320, journal_bytes=1 << 26, clock=clock)
    journal.on_commit = lambda _seconds, _records: gate.leases.durable(journal.durable_seq)
    gate.open(journal, snapshotter, recovered, gate.leases.clock())
    try:
        yield gate, journal
    finally:
        journal.released.set()
        if isinstance(store, HeldStore):
            store.released.set()
        await gate.finish()
        await gate.snapshotter.close()
        await journal.close()


@asynccontextmanager
async def serve(gate: Any, limits: LimitsConfig | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """A gRPC server over ``gate``, which may be anything with its methods, and a channel to it."""
    api = ApiServer(gate, limits or LimitsConfig(), CallMetrics(CollectorRegistry()))
    port = api.bind("127.0.0.1", 0)
    await api.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await api.stop(5)


def no_leases() -> tuple[Leases, Holders]:
    """Of a gate that holds nothing."""
    leases = Leases(LeaseConfig())
    return leases, Holders(leases, Catalog)


def stubs(channel: grpc.aio.Channel) -> tuple[Any, Any]:
    """Both services' stubs."""
    return filters_pb2_grpc.FilterServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel)


def asked(capacity: int = 1000, error_rate: float = 0.01, **options: Any) -> Asked:
    """A spec as the gate takes it."""
    return Asked(FilterSpec.plan(capacity, error_rate, **options), options.get("seed"))


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop run until it holds."""
    for _ in range(1_000_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never held")
