"""Certificates: read, judged, and read again when they change.

The files are judged by loading them into a fresh context of the standard library, which notices a key that is
not the certificate's. Only then do both ports get them: gRPC asks for ``material`` at each handshake, HTTP is
given the newest context at each. Connections that are open stay as they are.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomgated.config import TlsConfig
from bloomgated.errors import ConfigError
from bloomgated.watched import Watched


@dataclass(frozen=True, slots=True)
class Material:
    """PEM bytes that fit together. ``client_ca`` None: callers need no certificate."""

    cert: bytes
    key: bytes
    client_ca: bytes | None


class TlsFiles(Watched):
    """The files of the settings ``tls.cert``, ``tls.key`` and ``tls.client_ca``."""

    what = "tls"
    material: Material
    """The newest that fit together. Replaced whole, in whatever thread reads the files again."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Raises ConfigError, one sentence with the path and what is wrong."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        super().__init__([file for file in (cert, key, client_ca) if file is not None])

    @classmethod
    def of(cls, config: TlsConfig) -> TlsFiles | None:
        """Those of the settings; None without TLS. Raises ConfigError."""
        if not config.cert and not config.key and not config.client_ca:
            return None
        for name, value in (("cert", config.cert), ("key", config.key)):
            if not value:
                raise ConfigError(f"tls.{name}: is missing; TLS needs tls.cert and tls.key")
        return cls(Path(config.cert), Path(config.key), Path(config.client_ca) if config.client_ca else None)

    def read(self) -> None:
        """Read and judge the files. Raises ConfigError, and changes nothing then."""
        material = self._material()
        context = self._judged()
        # The context is loaded by path: what it judged must be what was read.
        if self._material() != material:
            raise ConfigError(f"{self._cert}: changed while it was read")
        self.material, self._newest = material, context

    def ssl_context(self) -> ssl.SSLContext:
        """For the HTTP port: a context that hands each connection to the newest one.

        A caller's certificate is judged if it shows one; none is demanded.
        """

        def newest(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._newest

        outer = self._judged()
        outer.sni_callback = newest
        # A session that is resumed brings its certificate along unjudged, perhaps by roots of long ago.
        outer.num_tickets = 0
        outer.options |= ssl.OP_NO_TICKET
        return outer

    def _material(self) -> Material:
        client_ca = _bytes(self._client_ca) if self._client_ca is not None else None
        return Material(_bytes(self._cert), _bytes(self._key), client_ca)

    def _judged(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An empty password: an encrypted key is refused instead of asked about on the terminal.
            context.load_cert_chain(self._cert, self._key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._cert}: is no certificate with the key {self._key}{_why(error)}"
            ) from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self._client_ca}: holds no PEM certificates{_why(error)}") from None
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{str(file)!r}: is no path ({error})") from None


def _why(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None)
    return f" ({reason})" if reason else ""
