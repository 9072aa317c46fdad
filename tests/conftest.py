"""Fixtures that every folder may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import DaemonProcess

StartDaemon = Callable[..., DaemonProcess]


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Start daemons, by default on one directory of the test's own; they end with the test."""
    started: list[DaemonProcess] = []

    def start(*flags: str, directory: Path | None = None, **options: Any) -> DaemonProcess:
        daemon = DaemonProcess(directory or tmp_path / "data", *flags, **options)
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.kill()


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    """One running daemon."""
    return start_daemon()
