"""The daemon's parts in this process, so that a test can hold or break one of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from bloomgate.filters import FilterSpec
from bloomgate.v1 import admin_pb2_grpc, filters_pb2_grpc
from bloomgated.api.server import ApiServer
from bloomgated.config import LimitsConfig
from bloomgated.gate import Gate
from bloomgated.metrics import CallMetrics
from bloomgated.requests import Asked
from bloomgated.snapshotter import Snapshotter
from bloomgated.storage.recovery import recover
from bloomgated.storage.snapshots import SnapshotStore
from bloomgated.storage.sqlite import SqliteJournal


class HeldJournal(SqliteJournal):
    """A real journal whose commits can be held."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.released = threading.Event()
        self.released.set()

    def _commit(self, *arguments: Any) -> int:
        assert self.released.wait(60)
        return super()._commit(*arguments)


@asynccontextmanager
async def open_gate(
    directory: Path, limits: LimitsConfig | None = None, **journal_options: Any
) -> AsyncIterator[tuple[Gate, HeldJournal]]:
    """A gate over a data directory; closing it is a crash as far as snapshots go: it writes none."""
    journal = HeldJournal(directory, **journal_options)
    store = SnapshotStore(directory)
    recovered = recover(journal, store)
    journal.start()
    gate = Gate(limits or LimitsConfig())
    gate.open(journal, Snapshotter(journal, store, interval=300, journal_bytes=1 << 26), recovered)
    try:
        yield gate, journal
    finally:
        journal.released.set()
        await gate.finish()
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
