"""Fixtures of the client's tests: both clients, a gate, and a real server over it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from bloomgate.testing import FakeGate

from .twins import Clock, Server, Twin


@pytest.fixture(params=["blocking", "asyncio"])
def twin(request: pytest.FixtureRequest) -> Iterator[Twin]:
    """Each client in turn: what one promises, both do."""
    with asyncio.Runner() as runner:
        yield Twin(request.param == "asyncio", runner)


@pytest.fixture
def gate() -> FakeGate:
    """A gate with the filter "fruit" of 1000 keys, one false positive in a million."""
    gate = FakeGate()
    gate.create("fruit", 1000, 1e-6, seed=7)
    return gate


@pytest.fixture
def clock() -> Clock:
    """A clock that moves when told."""
    return Clock()


@pytest.fixture
def server(gate: FakeGate) -> Iterator[Server]:
    """A real server over the gate."""
    # Its log of a handler's abort is not ours to show.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    server = Server(gate)
    yield server
    server.stop()
