"""The composition root: every part of the daemon is built here and passed in.

Apart from ``main`` so that ``healthcheck`` and ``config`` start without the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bloomgated.access import Access
from bloomgated.api.credentials import server_credentials
from bloomgated.api.server import ApiServer
from bloomgated.config import Config
from bloomgated.exposure import judge_exposure
from bloomgated.gate import Gate
from bloomgated.lifecycle import Daemon, Readiness, Storage
from bloomgated.metrics import DaemonMetrics
from bloomgated.storage.recovery import recover
from bloomgated.storage.snapshots import SnapshotStore
from bloomgated.storage.sqlite import SqliteJournal
from bloomgated.tls import TlsFiles
from bloomgated.web.server import WebServer


def build(config: Config, *, assert_no_later_adds: bool = False) -> Daemon:
    """A daemon of these settings, not started. Call it on the event loop that it will run on.

    Raises ConfigError where what the settings name cannot be used, or where strangers could come in.
    """
    exposed = judge_exposure(config)
    tls = TlsFiles.of(config.tls)
    access = Access(Path(config.auth.file)) if config.auth.file else None
    watched = [each for each in (tls, access) if each is not None]
    gate = Gate(config.limits, config.lease)
    metrics = DaemonMetrics(gate, exposed=exposed, watched=watched)
    readiness = Readiness()
    return Daemon(
        config,
        gate,
        api=ApiServer(
            gate,
            config.limits,
            metrics.calls,
            access=access,
            credentials=server_credentials(tls) if tls is not None else None,
        ),
        web=WebServer(
            metrics.registry,
            lambda: readiness.reason,
            ssl_context=tls.ssl_context() if tls is not None else None,
            allowed=_may_read_metrics(tls, access),
        ),
        readiness=readiness,
        watched=watched,
        exposed=exposed,
        open_storage=lambda: open_storage(config, assert_no_later_adds),
        on_commit=metrics.journal.committed,
    )


def _may_read_metrics(
    tls: TlsFiles | None, access: Access | None
) -> Callable[[str | None, Sequence[str]], bool] | None:
    """They speak of all filters: those who may read all may read them; None where nobody is asked."""
    if access is not None:
        return access.sees_all
    if tls is not None and tls.material.client_ca is not None:
        # Whoever has a certificate may do everything.
        return lambda _, names: bool(names)
    return None


def open_storage(config: Config, assert_no_later_adds: bool) -> Storage:
    """Open the data directory and recover what is in it; blocks. Raises StartError.

    ``assert_no_later_adds``: whether one that is restored is said to lack nothing.
    """
    directory = Path(config.data_dir)
    journal = SqliteJournal(
        directory, retention=config.journal.retention, max_queued_bytes=config.journal.max_queued_bytes
    )
    store = SnapshotStore(directory)
    recovered = recover(journal, store, assert_no_later_adds=assert_no_later_adds)
    journal.prepare(assert_no_later_adds=assert_no_later_adds)
    return Storage(journal, store, recovered)
