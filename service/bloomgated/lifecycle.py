"""The life of the daemon: start, serve, drain, stop.

Start: lock the directory, bind both ports, answer health with NOT_SERVING, recover, serve, ready. A clean
stop says NOT_SERVING first, accepts nothing more, lets the calls under way finish within a bound, writes what
changed, closes the journal. A failed journal ends the process the same way, but with an error and without
snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bloomgated.api.server import ApiServer
from bloomgated.config import Config, join_address, split_address
from bloomgated.errors import JournalFailed
from bloomgated.gate import Gate
from bloomgated.leases import boottime
from bloomgated.snapshotter import Snapshotter
from bloomgated.storage.directory import DirectoryLock
from bloomgated.storage.recovery import Recovered
from bloomgated.storage.snapshots import SnapshotStore
from bloomgated.storage.sqlite import SqliteJournal
from bloomgated.watched import Watched
from bloomgated.web.server import WebServer

log = logging.getLogger(__name__)

EXIT_JOURNAL_FAILED = 3
EXIT_FORCED = 4
EXIT_NOT_LISTENING = 5
# Seconds between looks at certificates and tokens; SIGHUP looks at once.
RELOAD_EVERY = 1.0


@dataclass(slots=True)
class Readiness:
    """Why the daemon is not ready; empty when it is."""

    reason: str = "recovering"


@dataclass(frozen=True, slots=True)
class Storage:
    """An open data directory, and the filters that were in it."""

    journal: SqliteJournal
    snapshots: SnapshotStore
    recovered: list[Recovered]


class Daemon:
    """The daemon from start to stop, over the parts that it is given."""

    def __init__(
        self,
        config: Config,
        gate: Gate,
        *,
        api: ApiServer,
        web: WebServer,
        readiness: Readiness,
        watched: Sequence[Watched],
        exposed: Sequence[str],
        open_storage: Callable[[], Storage],
        on_commit: Callable[[float, int], None],
    ) -> None:
        """``watched`` is read again when it changes; ``exposed`` are listeners that strangers can reach.

        ``open_storage`` blocks; ``on_commit`` gets seconds and records of each group commit.
        """
        self._config, self._gate, self._api, self._web = config, gate, api, web
        self._readiness, self._open_storage, self._on_commit = readiness, open_storage, on_commit
        self._journal: SqliteJournal | None = None
        self._watched, self._exposed = watched, exposed
        self._stop = asyncio.Event()
        self._look = threading.Event()
        self._signals = 0
        self._tending: asyncio.Future[None] | None = None
        self._owner_since = 0.0
        self._exit_code = 0

    async def run(self) -> int:
        """Live a whole life; returns the exit code. Raises StartError where it cannot begin."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._look.set)
        directory = Path(self._config.data_dir)
        lock = DirectoryLock(directory)
        self._owner_since = boottime()
        try:
            grpc_address, http_address = await self._listen()
            # Of its own, not waited for at the end: a file may hang, and the loop's threads all be busy.
            threading.Thread(target=self._watch, name="files", daemon=True).start()
            try:
                opening = asyncio.ensure_future(self._open())
                stopping = asyncio.ensure_future(self._stop.wait())
                await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
                await opening
                if not self._stop.is_set():
                    self._readiness.reason = ""
                    self._api.set_serving(True)
                    # Nobody may be reading: the log says it too.
                    with contextlib.suppress(OSError):
                        print(f"bloomgated ready grpc={grpc_address} http={http_address}", flush=True)
                    log.info(
                        "ready: grpc=%s http=%s filters=%d",
                        grpc_address,
                        http_address,
                        len(self._gate.catalog),
                    )
                    await self._serve(stopping)
            finally:
                await self._drain()
        finally:
            lock.release()
        return self._exit_code

    async def _listen(self) -> tuple[str, str]:
        host, port = split_address("listen", self._config.listen)
        http_host, http_port = split_address("http", self._config.http)
        port = self._api.bind(host, port)
        http_port = await self._web.start(http_host, http_port)
        await self._api.start()
        for listener in self._exposed:
            log.warning("insecure: %s can be reached without TLS and a way to know who calls", listener)
        return join_address(host, port), join_address(http_host, http_port)

    def _watch(self) -> None:
        """Read certificates and tokens again when they change, for as long as the process lives."""
        while self._watched:
            self._look.wait(RELOAD_EVERY)
            self._look.clear()
            for each in self._watched:
                try:
                    each.reload_if_changed()
                except Exception:
                    # Looked at again the next time: a token that was revoked must not stay for good.
                    each.failed = True
                    log.exception("%s: looking at the files failed", each.what)

    async def _open(self) -> None:
        """Recover, off the loop: health must answer NOT_SERVING meanwhile."""
        config = self._config
        storage = await asyncio.to_thread(self._open_storage)
        journal = self._journal = storage.journal
        journal.on_commit = self._committed
        journal.on_failure = self._on_journal_failure
        journal.start()
        snapshotter = Snapshotter(
            journal,
            storage.snapshots,
            interval=config.snapshot.interval,
            journal_bytes=config.snapshot.journal_bytes,
        )
        self._gate.open(journal, snapshotter, storage.recovered, self._owner_since)
        for each in storage.recovered:
            if each.bloom is None:
                log.error("filter %s is DAMAGED, its checks are answered maybe: %s", each.name, each.damage)

    def _committed(self, seconds: float, records: int) -> None:
        assert self._journal is not None
        # Before whoever waited for it goes on: an Add waits for the copies that it is sent to.
        self._gate.leases.durable(self._journal.durable_seq)
        self._on_commit(seconds, records)

    async def _serve(self, stopping: asyncio.Task[bool]) -> None:
        """Tend the filters until told to stop."""
        while not stopping.done():
            await asyncio.wait((stopping,), timeout=self._config.snapshot.check_every)
            if not stopping.done() and not await self._api.is_listening():
                log.critical("the gRPC port does not take connections any more, stopping")
                self._exit_code = EXIT_NOT_LISTENING
                self._stop.set()
                await stopping
            if not stopping.done():
                # Writing large filters takes long: a stop must not wait for it before it says so.
                self._tending = asyncio.ensure_future(self._tend())
                await asyncio.wait((stopping, self._tending), return_when=asyncio.FIRST_COMPLETED)

    async def _tend(self) -> None:
        try:
            await self._gate.tend()
        except JournalFailed:
            pass  # It stops the daemon by itself.
        except Exception:
            log.exception("tending the filters failed")

    async def _drain(self) -> None:
        self._readiness.reason = self._readiness.reason or "draining"
        self._api.set_serving(False)
        # A refused start says one sentence on stderr and nothing else.
        if self._gate.opened:
            log.info("draining")
            self._gate.snapshotter.stop()
        try:
            await self._api.stop(self._config.drain)
            if self._tending is not None:
                await self._tending
            if self._journal is not None and self._gate.opened and not self._journal.failed:
                await self._gate.finish()
                await self._gate.snapshotter.write_changed(self._gate.catalog)
        finally:
            # Whatever went wrong before: the directory's lock goes next, and nothing may write after that.
            if self._gate.opened:
                await self._gate.snapshotter.close()
            if self._journal is not None:
                await self._journal.close()
            await self._web.stop()
        if self._gate.opened:
            log.info("stopped")

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        # Counted apart from the stop: a failed journal stops too, and the first signal then forces nothing.
        self._signals += 1
        if self._signals > 1:
            log.warning("%s again: not waiting any longer; the journal has all that was acknowledged", name)
            sys.stderr.flush()
            os._exit(EXIT_FORCED)
        log.info("%s: stopping", name)
        self._stop.set()

    def _on_journal_failure(self, error: Exception) -> None:
        log.critical("the journal failed, stopping: %s", error)
        self._readiness.reason = "journal failed"
        self._exit_code = EXIT_JOURNAL_FAILED
        self._stop.set()
