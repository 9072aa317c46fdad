"""Which listeners strangers can reach.

A listener is protected by TLS together with a way to know who calls, or by being bound to the loopback alone.
"""

from __future__ import annotations

import ipaddress
import socket

from bloomgated.config import Config, split_address
from bloomgated.errors import ConfigError

LISTENERS = {"grpc": "listen", "http": "http"}
"""Each listener, with the setting that is its address."""


def judge_exposure(config: Config) -> tuple[str, ...]:
    """The listeners that are open to strangers; empty unless ``insecure``. Raises ConfigError."""
    if config.tls.cert and (config.auth.file or config.tls.client_ca):
        return ()
    exposed = []
    for listener, key in LISTENERS.items():
        address = getattr(config, key)
        if _is_loopback(split_address(key, address)[0]):
            continue
        if not config.insecure:
            raise ConfigError(
                f"{key}: {address} is reachable from elsewhere: set tls.cert and tls.key, and auth.file or"
                " tls.client_ca (docs/SECURITY.md), or pass --insecure to let everyone in"
            )
        exposed.append(listener)
    return tuple(exposed)


def _is_loopback(host: str) -> bool:
    """Whether ``host`` is reached from this machine alone. A name counts by all that it stands for."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError):
        return False
    return all(ipaddress.ip_address(each[4][0]).is_loopback for each in found)
