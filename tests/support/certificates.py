"""Certificates for tests, made with the openssl command (Debian package openssl)."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.tools import program


def _openssl(*arguments: str | Path) -> None:
    subprocess.run([program("openssl", "openssl"), *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    cert: Path
    key: Path

    def context(self, ca: Path) -> ssl.SSLContext:
        """For a caller that shows this certificate and trusts ``ca``."""
        context = ssl.create_default_context(cafile=str(ca))
        context.load_cert_chain(self.cert, self.key)
        return context


class Authority:
    """A root that signs. Keys are on P-256, which are made in no time."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._root = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        self.cert = self._root.cert
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2",
            "-keyout", self._root.key, "-out", self._root.cert, "-subj", f"/CN={name}",
        )  # fmt: skip

    def sign(self, name: str, *names: str) -> Pair:
        """A certificate of the common name ``name``; ``names`` are alternative ones, as DNS:... or IP:..."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        alternative = ("-addext", f"subjectAltName={','.join(names)}") if names else ()
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2",
            "-CA", self._root.cert, "-CAkey", self._root.key, "-keyout", pair.key, "-out", pair.cert,
            "-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:FALSE", *alternative,
        )  # fmt: skip
        return pair

    def server(self, name: str = "bloomgated") -> Pair:
        """A certificate for a daemon on this machine."""
        return self.sign(name, f"DNS:{name}", "DNS:localhost", "IP:127.0.0.1")

    def context(self) -> ssl.SSLContext:
        """For a caller that trusts this root and shows nothing."""
        return ssl.create_default_context(cafile=str(self.cert))
