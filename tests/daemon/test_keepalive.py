"""Connections that are idle stay, those that are dead are noticed, and nobody probes too often."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bloomgate import Client, ClientOptions, Unavailable
from bloomgate.endpoint import Endpoint
from support.proxy import Proxy
from support.tally import record, rounds

from .calls import eventually
from .preludes import HOLD_CALLS

SMALLEST = ClientOptions(on_error="raise", keepalive_time=10, keepalive_timeout=1, admin_timeout=600)
# Seconds that pass: two probes of the smallest interval in the suite, several of the published one at length.
SPAN = rounds(21, 200)


@pytest.mark.timeout(400)
def test_idle_and_waiting_connections_stay_and_dead_ones_are_noticed(
    start_daemon: Any, tmp_path: Path
) -> None:
    """Side by side for a while: a client that asks nothing, with the published options; one with a call under
    way and the smallest probe interval; a channel that probes while idle, as often as a client may. Each has
    one connection in the end, and no daemon said too_many_pings. A client whose daemon is gone without a word
    learns of it at a probe, long before its call's deadline."""
    release = tmp_path / "release"
    daemon = start_daemon(prelude=HOLD_CALLS.format(path=str(release), verb="snapshot"))
    with Client(daemon.grpc) as client:
        client.create_filter("fruit", 100)

    def idle() -> int:
        with (
            Proxy(daemon.grpc) as proxy,
            Client(proxy.address, options=ClientOptions(on_error="raise")) as client,
        ):
            client.list_filters()
            threading.Event().wait(SPAN)
            client.list_filters()
            return proxy.connections

    def waiting() -> int:
        with Proxy(daemon.grpc) as proxy, Client(proxy.address, options=SMALLEST) as client:
            client.snapshot_filter("fruit")
            client.list_filters()
            return proxy.connections

    def probing() -> int:
        options = [
            *Endpoint.judge(daemon.grpc, None, None, SMALLEST).options,
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        with Proxy(daemon.grpc) as proxy, grpc.insecure_channel(proxy.address, options) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            threading.Event().wait(SPAN)
            health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            return proxy.connections

    def dead() -> float:
        with Proxy(daemon.grpc) as proxy, Client(proxy.address, options=SMALLEST) as client:
            client.list_filters()
            proxy.swallows = True
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.snapshot_filter("fruit")
            return time.monotonic() - began

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(each) for each in (idle, waiting, probing)]
        noticed = threads.submit(dead)
        running[0].result()
        release.touch()
        assert [each.result() for each in running] == [1, 1, 1]
        # Within the interval and its timeout, and as much again for a busy machine; the call has ten minutes.
        assert noticed.result() < 22
    assert daemon.stop() == 0
    record("idle, waiting and probing connections", 3, "stays one connection each")
    record("a daemon that is gone without a word", 1, "is noticed at a probe")


def test_a_frozen_daemon_costs_a_check_its_deadline_and_no_more(start_daemon: Any) -> None:
    """It answers maybe within its time, and the right answer again once the daemon goes on."""

    daemon = start_daemon()
    with Client(daemon.grpc) as client:
        client.create_filter("fruit", 100)
        fruit = client.filter("fruit")
        eventually(lambda: not fruit.might_contain("papaya"))
        daemon.process.send_signal(signal.SIGSTOP)
        assert fruit.might_contain("papaya")
        daemon.process.send_signal(signal.SIGCONT)
        eventually(lambda: not fruit.might_contain("papaya"))
