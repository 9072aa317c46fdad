"""What gRPC's port shows, asked anew at each handshake."""

from __future__ import annotations

import grpc

from bloomgated.tls import TlsFiles


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow ``files``. Callers need a certificate where there are roots to judge it by."""

    def newest() -> grpc.ServerCertificateConfiguration:
        material = files.material
        return grpc.ssl_server_certificate_configuration(
            [(material.key, material.cert)], root_certificates=material.client_ca
        )

    return grpc.dynamic_ssl_server_credentials(newest(), newest, files.material.client_ca is not None)
