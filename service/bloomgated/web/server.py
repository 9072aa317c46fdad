"""/metrics for Prometheus, /livez and /readyz for whoever starts and stops containers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from bloomgated.config import join_address
from bloomgated.errors import AddressTaken


class WebServer:
    """Serves the registry's metrics and the daemon's health over HTTP."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], str]) -> None:
        """``ready`` says why the daemon is not ready, or nothing if it is."""
        self._registry, self._ready = registry, ready
        app = web.Application()
        app.add_routes(
            (
                web.get("/metrics", self._metrics),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
            )
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> int:
        """Bind and begin to answer; returns the port. Raises AddressTaken."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
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

    async def _metrics(self, _: web.Request) -> web.Response:
        # In a thread: counting the bits of large filters would hold up the checks.
        body = await asyncio.to_thread(generate_latest, self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)
