"""Where the gate is and how to speak to it, judged before anything is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bloomgate.filters import ParameterError
from bloomgate.options import ClientOptions


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates by path. ``ca`` None: the roots gRPC brings; ``cert`` and ``key``: to prove who calls."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises OSError, or ParameterError where only one of cert and key is given."""
        if (self.cert is None) != (self.key is None):
            raise ParameterError("tls", "cert or key alone", "a cert with its key, or neither")
        ca, key, cert = (None if path is None else Path(path).read_bytes() for path in self._paths)
        return grpc.ssl_channel_credentials(ca, key, cert)

    @property
    def _paths(self) -> tuple[str | None, str | None, str | None]:
        return self.ca, self.key, self.cert


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A target, what to show there, and the channel's options."""

    target: str
    options: list[tuple[str, Any]]
    credentials: grpc.ChannelCredentials | None = None
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def judge(
        cls,
        target: str,
        token: str | None,
        tls: Tls | grpc.ChannelCredentials | None,
        options: ClientOptions,
    ) -> Endpoint:
        """Raises ParameterError, a ValueError naming the field; never shows the token."""
        return cls(
            check_target(target),
            _channel_options(options),
            tls.credentials() if isinstance(tls, Tls) else tls,
            () if token is None else (("authorization", f"Bearer {_check_token(token)}"),),
        )


_HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(\d{1,5})")
_SCHEME = re.compile(r"(?:unix|unix-abstract|dns|ipv4|ipv6|xds|passthrough):\S+")


def check_target(target: object) -> str:
    """Return ``target`` if gRPC can be given it, else raise ParameterError."""
    if isinstance(target, str):
        host_port = _HOST_PORT.fullmatch(target)
        if (host_port and 1 <= int(host_port[1]) <= 65535) or (not host_port and _SCHEME.fullmatch(target)):
            return target
    raise ParameterError("target", target, "HOST:PORT, [IPV6]:PORT, unix:PATH or another gRPC name")


def _check_token(token: object) -> str:
    # As files and environments hand it over, with the end of its line.
    token = token.strip() if isinstance(token, str) else token
    if isinstance(token, str) and re.fullmatch(r"[\x21-\x7e]+", token):
        return token
    # The value is a secret: say what it should be, not what it was.
    raise ParameterError("token", "a value of another shape", "visible ASCII characters, at least one")


def _channel_options(options: ClientOptions) -> list[tuple[str, Any]]:
    return [
        ("grpc.keepalive_time_ms", int(options.keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", int(options.keepalive_timeout * 1000)),
        # A ping that gRPC sends for its own purposes holds the keepalive's back until it is answered: for a
        # minute, unless told otherwise.
        ("grpc.http2.ping_timeout_ms", int(options.keepalive_timeout * 1000)),
        ("grpc.initial_reconnect_backoff_ms", min(100, int(options.reconnect_most * 1000))),
        ("grpc.min_reconnect_backoff_ms", int(options.reconnect_most * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(options.reconnect_most * 1000)),
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        # The daemon is a neighbour: not by way of a proxy that the environment names for the outside world.
        ("grpc.enable_http_proxy", 0),
        # A connection of its own: gRPC would share one between equal channels of a process.
        ("grpc.use_local_subchannel_pool", 1),
    ]
