"""The HTTP port: what it answers to whom, one scrape at a time, and never anything that writes."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bloomgated.web.server import MOST_WAITING, WebServer
from support.daemon import DaemonProcess

PATHS = ("/", "/metrics", "/livez", "/readyz")


class Held(Collector):
    """One metric, which is measured when the test lets it be."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        self.times = 0
        self.fails: Exception | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self.times += 1
        self.begun.set()
        assert self.released.wait(30)
        if self.fails is not None:
            raise self.fails
        yield GaugeMetricFamily("held", "How often.", self.times)


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Held, aiohttp.ClientSession]]:
    """A server over a held metric, and a session to it."""
    held, registry = Held(), CollectorRegistry()
    registry.register(held)
    web = WebServer(registry, lambda: "", **options)
    port = await web.start("127.0.0.1", 0)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as session:
            yield held, session
    finally:
        held.released.set()
        await web.stop()


def request(daemon: DaemonProcess, method: str, path: str) -> tuple[int, http.client.HTTPMessage, str]:
    """Status, headers and body."""
    with closing(http.client.HTTPConnection(daemon.http, timeout=10)) as connection:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read().decode()


def test_nothing_here_writes(daemon: DaemonProcess) -> None:
    """GET and HEAD alone are answered; other paths are not there; nothing is cached or sniffed at."""
    wanted = {"GET": 200, "HEAD": 200, "POST": 405, "PUT": 405, "DELETE": 405, "PATCH": 405}
    for path, (method, status) in itertools.product(PATHS, wanted.items()):
        said, headers, _ = request(daemon, method, path)
        assert said == status, (method, path)
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Server"] is None
    for path in ("/nothing", "/metrics/..", "/%2e%2e/etc/passwd", "//", "/livez/"):
        assert request(daemon, "GET", path)[0] == 404
    assert all(path in request(daemon, "GET", "/")[2] for path in PATHS)


def test_scrapes_are_made_one_at_a_time_and_shared() -> None:
    """A few that come while one is made get its answer, the rest are told to come again; health answers."""

    async def run() -> None:
        async with served() as (held, session):

            async def scrape() -> tuple[int, str | None, str]:
                async with session.get("/metrics") as reply:
                    return reply.status, reply.headers.get("Retry-After"), await reply.text()

            first = asyncio.ensure_future(scrape())
            await asyncio.to_thread(held.begun.wait, 30)
            others = [asyncio.ensure_future(scrape()) for _ in range(30)]
            refused = []
            while len(refused) < 30 - (MOST_WAITING - 1):
                done, _ = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
                refused += done
                others = [each for each in others if each not in done]
            assert {each.result()[:2] for each in refused} == {(429, "1")}
            for path in ("/livez", "/readyz"):
                async with session.get(path) as reply:
                    assert reply.status == 200
            held.released.set()
            answers = [await first, *[await each for each in others]]
            assert {answer[0] for answer in answers} == {200}
            assert len({answer[2] for answer in answers}) == 1
            assert held.times == 1
            status, _, text = await scrape()
            assert (status, "held 2.0" in text) == (200, True)

    asyncio.run(run())


def test_a_scraper_that_goes_away_ends_nobody_elses_scrape() -> None:
    """Nor does it stay counted as waiting."""

    async def run() -> None:
        async with served() as (held, session):
            first = asyncio.ensure_future(session.get("/metrics"))
            await asyncio.to_thread(held.begun.wait, 30)
            for _ in range(3 * MOST_WAITING):
                with pytest.raises(asyncio.TimeoutError):
                    await session.get("/metrics", timeout=aiohttp.ClientTimeout(total=0.02))
            first.cancel()
            staying = asyncio.ensure_future(session.get("/metrics"))
            await asyncio.sleep(0)
            held.released.set()
            reply = await staying
            assert reply.status == 200

    asyncio.run(run())


def test_a_scrape_that_fails_tells_nothing_and_is_over() -> None:
    """The caller learns that it failed; the next one is measured anew."""

    async def run() -> None:
        async with served() as (held, session):
            held.released.set()
            held.fails = RuntimeError("/secret/path and a key")
            async with session.get("/metrics") as reply:
                assert reply.status == 500
                said = await reply.text()
            assert "secret" not in said
            assert "Traceback" not in said
            held.fails = None
            async with session.get("/metrics") as reply:
                assert reply.status == 200

    asyncio.run(run())


def test_metrics_are_for_those_who_are_allowed() -> None:
    """The Authorization header and the certificate's names are judged; health is for anyone."""
    seen: list[tuple[str | None, Any]] = []

    def allowed(authorization: str | None, names: Any) -> bool:
        seen.append((authorization, names))
        return authorization == "Bearer right"

    async def run() -> None:
        async with served(allowed=allowed) as (held, session):
            held.released.set()
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer x"}, 401),
                ({"Authorization": "Bearer right"}, 200),
            ):
                async with session.get("/metrics", headers=headers) as reply:
                    assert reply.status == status
                    assert ("WWW-Authenticate" in reply.headers) == (status == 401)
            for path in ("/", "/livez", "/readyz"):
                async with session.get(path) as reply:
                    assert reply.status == 200

    asyncio.run(run())
    assert seen == [(None, []), ("Bearer x", []), ("Bearer right", [])]


def test_callers_that_never_finish_their_request_stop_nobody(daemon: DaemonProcess) -> None:
    """200 connections that send half a request, or nothing."""
    host, _, port = daemon.http.rpartition(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(200)]
    try:
        for each in slow[::2]:
            each.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        for _ in range(20):
            assert daemon.get("/livez")[0] == 200
        assert daemon.get("/metrics")[0] == 200
    finally:
        for each in slow:
            each.close()


def test_a_request_too_large_is_refused(daemon: DaemonProcess) -> None:
    """Of its line and of its headers."""
    host, _, port = daemon.http.rpartition(":")
    for head in (b"GET /" + b"a" * 100_000, b"GET /livez HTTP/1.1\r\nX: " + b"a" * 100_000):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + b" HTTP/1.1\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.0 400 ")
    assert daemon.get("/livez")[0] == 200
