"""What gRPC's port shows, asked anew at each handshake."""

from __future__ import annotations

import time
from typing import Any

import grpc

from bloomgated.tls import TlsFiles

# Seconds in which a handshake gets from asking here to holding on to what it was told. gRPC asks for one
# handshake at a time, and lets go of the certificate before as soon as it is told of a new one: a handshake
# that was told "unchanged" the moment before would use it after it is freed (grpc/grpc#36693). Measured: 100
# rotations, each handshake being told of one anew, ended the process more often than not.
SETTLE = 0.25


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow ``files``. Callers need a certificate where there are roots to judge it by."""
    given = files.material

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(given.key, given.cert)], root_certificates=given.client_ca
        )

    def newest() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        if files.material is given:
            # Unchanged. Each configuration that is given is kept for as long as the port.
            return None
        # Not under the interpreter's lock: calls go on, only new handshakes wait.
        time.sleep(SETTLE)
        given = files.material
        return configuration()

    # None for "unchanged" is gRPC's own word; the stubs do not know it.
    fetch: Any = newest
    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, given.client_ca is not None)
