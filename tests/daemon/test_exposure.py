"""Strangers are let in on purpose, or not at all."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from bloomgated import config as settings
from bloomgated.errors import ConfigError
from bloomgated.exposure import LISTENERS, judge_exposure
from support.daemon import refused

LOOPBACK = ("127.0.0.1:1", "127.8.9.10:1", "[::1]:1", "localhost:1")
EVERYWHERE = (
    "0.0.0.0:1",
    "[::]:1",
    "192.0.2.1:1",
    "[2001:db8::1]:1",
    "[::ffff:192.0.2.1]:1",
    "no.such.invalid:1",
)
KNOWN = {"tls.cert": "/c", "tls.key": "/k"}


def judged(**flags: Any) -> tuple[str, ...]:
    given = {key.replace("__", "."): value for key, value in flags.items()}
    return judge_exposure(settings.load(None, {}, given)[0])


@pytest.mark.parametrize("key", LISTENERS.values())
@pytest.mark.parametrize("address", LOOPBACK)
def test_the_loopback_needs_nothing(key: str, address: str) -> None:
    """Whoever is on the machine is no stranger."""
    assert judged(**{key: address}) == ()
    assert judged(**{key: address}, insecure="true") == ()


@pytest.mark.parametrize("key", LISTENERS.values())
@pytest.mark.parametrize("address", EVERYWHERE)
def test_another_address_needs_tls_and_names(key: str, address: str) -> None:
    """TLS alone or tokens alone are not enough; both, or mutual TLS, or a word that it is meant, are."""
    for half in ({}, {"tls.cert": "/c", "tls.key": "/k"}, {"auth.file": "/a"}):
        with pytest.raises(ConfigError) as caught:
            judged(**{key: address}, **half)
        said = str(caught.value)
        assert said.startswith(f"{key}: {address} is reachable from elsewhere: set tls.cert")
        assert "--insecure" in said
    assert judged(**{key: address}, **KNOWN, **{"auth.file": "/a"}) == ()
    assert judged(**{key: address}, **KNOWN, **{"tls.client_ca": "/a"}) == ()
    listener = next(name for name, each in LISTENERS.items() if each == key)
    assert judged(**{key: address}, insecure="true") == (listener,)
    assert judged(**{key: address}, insecure="true", **{"auth.file": "/a"}) == (listener,)


def test_a_name_counts_by_all_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One address beyond the loopback is enough."""
    found = {"here": ["127.0.0.1", "::1"], "there": ["127.0.0.1", "192.0.2.1"]}

    def lookup(host: str, *_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, 0)) for address in found[host]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert judged(listen="here:1") == ()
    with pytest.raises(ConfigError):
        judged(listen="there:1")


@pytest.mark.parametrize("flag", ["--listen", "--http"])
def test_a_start_that_would_let_strangers_in_is_refused(tmp_path: Path, flag: str) -> None:
    """One sentence, exit 1, and nothing was made on disk."""
    directory = tmp_path / "data"
    arguments = ["serve", "--data-dir", str(directory), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    ended = refused(*arguments, flag, "0.0.0.0:0")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"bloomgated: {flag[2:]}: 0.0.0.0:0 is reachable from elsewhere")
    assert ended.stderr.count("\n") == 1
    assert not directory.exists()


def test_an_insecure_daemon_says_so(start_daemon: Any) -> None:
    """In the log at its start, and in a metric all the time; one on the loopback does neither."""
    daemon = start_daemon("--insecure", listen="0.0.0.0:0")
    daemon.grpc = daemon.grpc.replace("0.0.0.0", "127.0.0.1")
    _, metrics = daemon.get("/metrics")
    assert 'bloomgate_insecure{listener="grpc"} 1.0' in metrics
    assert 'bloomgate_insecure{listener="http"} 0.0' in metrics
    assert "insecure: grpc can be reached without TLS" in daemon.log()
    assert daemon.stop() == 0
    daemon = start_daemon(directory=daemon.directory.parent / "other")
    _, metrics = daemon.get("/metrics")
    assert 'bloomgate_insecure{listener="grpc"} 0.0' in metrics
    assert "insecure" not in daemon.log()
