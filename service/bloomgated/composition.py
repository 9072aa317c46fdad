"""The composition root: every part of the daemon is built here and passed in.

Apart from ``main`` so that ``healthcheck`` and ``config`` start without the server.
"""

from __future__ import annotations

from pathlib import Path

from bloomgated.access import Access
from bloomgated.api.server import ApiServer
from bloomgated.config import Config
from bloomgated.gate import Gate
from bloomgated.lifecycle import Daemon, Readiness, Storage
from bloomgated.metrics import DaemonMetrics
from bloomgated.storage.recovery import recover
from bloomgated.storage.snapshots import SnapshotStore
from bloomgated.storage.sqlite import SqliteJournal
from bloomgated.web.server import WebServer


def build(config: Config) -> Daemon:
    """A daemon of these settings, not started. Call it on the event loop that it will run on.

    Raises ConfigError where what the settings name cannot be used, or where strangers could come in.
    """
    access = Access(Path(config.auth.file)) if config.auth.file else None
    watched = [access] if access is not None else []
    gate = Gate(config.limits)
    metrics = DaemonMetrics(gate, watched=watched)
    readiness = Readiness()
    return Daemon(
        config,
        gate,
        api=ApiServer(
            gate,
            config.limits,
            metrics.calls,
            access=access,
        ),
        web=WebServer(
            metrics.registry,
            lambda: readiness.reason,
        ),
        readiness=readiness,
        watched=watched,
        exposed=(),
        open_storage=lambda: open_storage(config),
        on_commit=metrics.journal.committed,
    )


def open_storage(config: Config) -> Storage:
    """Open the data directory and recover what is in it; blocks. Raises StartError."""
    directory = Path(config.data_dir)
    journal = SqliteJournal(
        directory, retention=config.journal.retention, max_queued_bytes=config.journal.max_queued_bytes
    )
    store = SnapshotStore(directory)
    recovered = recover(journal, store)
    journal.prepare()
    return Storage(journal, store, recovered)
