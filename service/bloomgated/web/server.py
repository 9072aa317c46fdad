"""/metrics for Prometheus, /livez and /readyz for whoever runs containers. Nothing here writes."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from aiohttp import http_exceptions, web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from bloomgated.config import join_address
from bloomgated.errors import AddressTaken

Allowed = Callable[[str | None, Sequence[str]], bool]
"""Whether a caller may read metrics, by its Authorization header and its certificate's verified names."""

# Requests that may wait for the scrape that is under way.
MOST_WAITING = 8
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'",
    "X-Content-Type-Options": "nosniff",
}
_PATHS = "bloomgated\n\n/metrics   for Prometheus\n/livez     the process answers\n/readyz    it serves\n"


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line is about us: bytes that are no HTTP are their sender's affair, and may hold a token."""
    return not (record.exc_info and isinstance(record.exc_info[1], http_exceptions.HttpProcessingError))


_log = logging.getLogger(__name__)
_log.addFilter(_is_ours)


class WebServer:
    """Serves the registry's metrics and the daemon's health over HTTP."""

    def __init__(
        self,
        registry: CollectorRegistry,
        ready: Callable[[], str],
        *,
        ssl_context: ssl.SSLContext | None = None,
        allowed: Allowed | None = None,
    ) -> None:
        """``ready`` says why the daemon is not ready, or nothing if it is.

        ``ssl_context`` None: no TLS. ``allowed`` None: anyone may read the metrics.
        """
        self._registry, self._ready = registry, ready
        self._ssl_context, self._allowed = ssl_context, allowed
        self._scrape: asyncio.Future[bytes] | None = None
        self._waiting = 0
        # Its own thread: the loop's are shared with whatever counts the bits of large filters.
        self._measuring = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        app = web.Application(client_max_size=1024)
        app.on_response_prepare.append(_add_headers)
        app.add_routes(
            (
                web.get("/", self._index),
                web.get("/metrics", self._metrics),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
            )
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            # Whoever goes away does not wait any longer.
            handler_cancellation=True,
            logger=_log,
        )

    async def start(self, host: str, port: int) -> int:
        """Bind and begin to answer; returns the port. Raises AddressTaken."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=self._ssl_context).start()
        except OSError as error:
            await self._runner.cleanup()
            # The system's own words: asyncio's repeat the address.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise AddressTaken(f"HTTP cannot listen on {join_address(host, port)}: {reason}") from None
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Stop answering."""
        await self._runner.cleanup()
        self._measuring.shutdown(wait=False)

    async def _metrics(self, request: web.Request) -> web.Response:
        if self._allowed is not None and not self._allowed(
            request.headers.get("Authorization"), list(_certificate_names(request))
        ):
            return web.Response(
                status=401, text="this needs the role read on *\n", headers={"WWW-Authenticate": "Bearer"}
            )
        if self._scrape is None:
            # One at a time, in a thread: counting the bits of large filters would hold up the checks.
            loop = asyncio.get_running_loop()
            self._scrape = loop.run_in_executor(self._measuring, generate_latest, self._registry)
            self._scrape.add_done_callback(self._scraped)
        elif self._waiting >= MOST_WAITING:
            return web.Response(status=429, text="busy\n", headers={"Retry-After": "1"})
        self._waiting += 1
        try:
            # Shielded: a caller that goes away must not end it for the others.
            body = await asyncio.shield(self._scrape)
        finally:
            self._waiting -= 1
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    def _scraped(self, done: asyncio.Future[bytes]) -> None:
        self._scrape = None
        # Whoever waited hears of it; perhaps nobody is left.
        if not done.cancelled():
            done.exception()

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text=_PATHS)

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    # The version of the server is nobody's business.
    response.headers.pop("Server", None)


def _certificate_names(request: web.Request) -> Iterator[str]:
    """The common name and the alternative names of the certificate that the caller proved to have."""
    connection = request.transport.get_extra_info("ssl_object") if request.transport else None
    shown = connection.getpeercert() if connection is not None else None
    # Of a session that was resumed, it was judged then and not now.
    if connection is not None and shown and not connection.session_reused:
        yield from (value for part in shown.get("subject", ()) for key, value in part if key == "commonName")
        yield from (value for _, value in shown.get("subjectAltName", ()))
