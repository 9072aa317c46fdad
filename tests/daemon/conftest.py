"""Fixtures of the daemon's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.daemon import DaemonProcess

from .calls import Admin, Filters


@pytest.fixture(scope="module")
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    """One daemon for a module's tests, each of which uses filters of its own; FLAGS of the module are its."""
    directory = tmp_path_factory.mktemp("shared") / "data"
    daemon = DaemonProcess(directory, *getattr(request.module, "FLAGS", ()))
    yield daemon
    daemon.kill()


@pytest.fixture(scope="module")
def stubs(shared: DaemonProcess) -> Iterator[tuple[Filters, Admin]]:
    """Raw stubs to the shared daemon."""
    with shared.stubs() as both:
        yield both


@pytest.fixture
def filters(stubs: tuple[Filters, Admin]) -> Filters:
    """FilterService of the shared daemon."""
    return stubs[0]


@pytest.fixture
def admin(stubs: tuple[Filters, Admin]) -> Admin:
    """AdminService of the shared daemon."""
    return stubs[1]
