"""Asking a daemon for its health, as a container does: over HTTP, where nobody needs to be known."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path

SERVING = "ok"


def ask(host: str, port: int, cert: Path | None, timeout: float) -> str:
    """What the daemon says within ``timeout`` seconds: SERVING, or why not, or why it is silent.

    ``cert`` is the daemon's own certificate file where it speaks TLS: that one is trusted, by whatever name.
    """
    try:
        if cert is None:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=_trusting(cert))
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().read(200).decode(errors="replace").strip()
        finally:
            connection.close()
    except TimeoutError:
        return "no answer in time"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"no answer ({getattr(error, 'strerror', None) or type(error).__name__})"


def _trusting(cert: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The certificate itself is the root here, whoever signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert)
    return context
