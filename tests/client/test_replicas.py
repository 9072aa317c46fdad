"""Copies under leases, with a fake gate and with a real daemon: one contract for both clients."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bloomgate import Client, ClientClosed, ClientOptions, Unavailable, leasing
from bloomgate.replica import BOOTTIME, VOID, Copy, Counts, now
from bloomgate.testing import FakeGate
from support.daemon import DaemonProcess

from .twins import Twin

WAIT = 20.0
SHORT = ("--set", "lease.duration=0.6", "--set", "lease.margin=0.1", "--set", "snapshot.check_every=0.1")


def eventually(holds: Callable[[], Any]) -> Any:
    until = time.monotonic() + WAIT
    while not (said := holds()):
        assert time.monotonic() < until, "it never held"
        time.sleep(0.01)
    return said


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    started = DaemonProcess(tmp_path_factory.mktemp("replicas") / "data", *SHORT)
    yield started
    started.kill()


class Served:
    """A gate of either kind, and clients of it."""

    def __init__(self, twin: Twin, daemon: DaemonProcess | None) -> None:
        self._twin, self._daemon = twin, daemon
        self.gate = FakeGate()
        self._clients: list[Any] = []

    def client(self, **options: Any) -> Any:
        options = {"on_error": "raise", "check_timeout": 10.0, **options}
        made = (
            self._twin.client(self.gate, **options)
            if self._daemon is None
            else self._twin.connect(self._daemon.grpc, **options)
        )
        self._clients.append(made)
        return made

    def close(self) -> None:
        for each in self._clients:
            each.close()


@pytest.fixture(params=["fake", "daemon"])
def served(request: pytest.FixtureRequest, twin: Twin, daemon: DaemonProcess) -> Iterator[Served]:
    served = Served(twin, daemon if request.param == "daemon" else None)
    yield served
    served.close()


_names = iter(f"fruit-{number}" for number in range(10_000))


def leased(client: Any, name: str) -> Any:
    """A handle whose copy answers."""
    handle = client.filter(name, replica=True)
    assert handle.wait(WAIT)
    return handle


def test_a_copy_has_every_add_when_it_is_acknowledged(served: Served) -> None:
    """Whoever made it, growth included; and its checks reach nobody."""
    client, name = served.client(), next(_names)
    client.create_filter(name, 100, 0.001)
    client.filter(name).add("mango")
    handle = leased(client, name)
    writer = served.client().filter(name)
    assert handle.is_local
    assert handle.might_contain("mango")
    assert not handle.might_contain("papaya")
    for number in range(50):
        writer.add(f"key {number}")
        assert handle.might_contain(f"key {number}")
    more = [f"more {number}" for number in range(400)]
    writer.add_many(more)
    assert all(handle.might_contain_many(more))
    assert handle.stats().leases == 1
    assert len(handle.stats().bodies) > 1
    assert len(handle._replica.copy.bloom.bodies) == len(handle.stats().bodies)


def test_a_handle_is_remote_before_and_after(served: Served) -> None:
    """Its answers are the same; closing it tells the daemon, which then waits for nothing."""
    client, name = served.client(), next(_names)
    client.create_filter(name, 100)
    handle = client.filter(name, replica=True)
    assert not handle.might_contain("mango")
    assert handle.wait(WAIT)
    handle.close()
    assert not handle.is_local
    handle.add("mango")
    assert handle.might_contain("mango")
    eventually(lambda: client.filter(name).stats().leases == 0)
    assert not handle.wait(0.05)


def test_guards_and_bulk_checks_use_the_copy(served: Served, twin: Twin) -> None:
    """A definite no skips the lookup, a hit does not, and outcomes are reported."""
    client, name = served.client(), next(_names)
    client.create_filter(name, 100)
    handle = leased(client, name)
    handle.add_many(["mango", "kiwi"])
    asked: list[str] = []
    guard = handle.guard(twin.lookup(lambda key: asked.append(key) or (1 if key == "mango" else None)))
    assert (guard("mango"), guard("papaya"), guard("kiwi")) == (1, None, None)
    assert guard.many(["peach", "mango"]) == [None, 1]
    assert asked == ["mango", "kiwi", "mango"]
    assert handle.might_contain_many(["mango", "papaya"]) == [True, False]
    handle.flush_outcomes()
    eventually(lambda: handle.stats().checks_hit == 4)
    stats = handle.stats()
    assert (stats.checks_skip, stats.outcomes_found, stats.outcomes_not_found) == (3, 2, 1)


def test_checks_of_a_copy_are_counted_once(served: Served, twin: Twin) -> None:
    """In the client's metrics and, with its renewals or its end, in the daemon's."""
    client, name = served.client(), next(_names)
    client.create_filter(name, 100)
    handle = leased(client, name)
    handle.add("mango")
    for _ in range(100):
        handle.might_contain("papaya")
    handle.might_contain_many(["mango"] * 30)
    eventually(lambda: handle.stats().checks_skip == 100)
    for _ in range(7):
        handle.might_contain("mango")
    client.close()
    stats = served.client().filter(name).stats()
    assert (stats.checks_skip, stats.checks_hit) == (100, 37)
    for result, count in (("skip", 100), ("hit", 37)):
        labels = {"filter": name, "result": result, "via": "replica"}
        assert twin.count("bloomgate_client_checks_total", **labels) == count


@pytest.mark.parametrize("on_error", ["maybe", "raise"])
def test_what_is_no_key_falls_back_as_it_does_remotely(served: Served, twin: Twin, on_error: str) -> None:
    """One key, or one of many."""
    client, name = served.client(on_error=on_error), next(_names)
    client.create_filter(name, 100)
    handle = leased(client, name)
    wrong: Any = 7
    if on_error == "raise":
        for check in (lambda: handle.might_contain(wrong), lambda: handle.might_contain_many(["a", wrong])):
            with pytest.raises(TypeError):
                check()
    else:
        assert handle.might_contain(wrong)
        assert handle.might_contain_many(["a", wrong, "b"]) == [False, True, False]
        assert twin.fallbacks(name, "invalid_key") == 2


def test_a_drop_voids_copies_and_a_new_filter_has_none_of_it(served: Served) -> None:
    """When the drop returns, nobody answers from the old filter; the new one is leased by itself."""
    client, name = served.client(), next(_names)
    client.create_filter(name, 100)
    handle = leased(client, name)
    handle.add("mango")
    other = served.client()
    other.drop_filter(name)
    assert not handle.is_local
    other.create_filter(name, 100)
    other.filter(name).add("papaya")
    assert handle.might_contain("papaya")
    eventually(lambda: handle.is_local)
    assert not handle.might_contain("mango")


def test_a_copy_that_would_be_too_large_is_not_taken(served: Served) -> None:
    """Nor is one kept that outgrows the limit: checks go to the daemon."""
    client, name = served.client(replica_max_bytes=2000), next(_names)
    client.create_filter(name, 100_000)
    large = client.filter(name, replica=True)
    assert not large.wait(0.3)
    large.add("mango")
    assert large.might_contain("mango")
    client.create_filter(f"{name}-growing", 1000)
    growing = leased(client, f"{name}-growing")
    growing.add_many([f"key {number}" for number in range(1500)])
    assert not growing.is_local
    assert growing.might_contain("key 1400")


def test_threads_share_a_copy(served: Served) -> None:
    """And each of their checks is counted."""
    client, name = served.client(), next(_names)
    client.create_filter(name, 100)
    handle = leased(client, name)
    replica = handle._replica

    def check() -> None:
        for _ in range(2000):
            replica.check("papaya")

    threads = [threading.Thread(target=check) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    client.close()
    assert served.client().filter(name).stats().checks_skip == 16_000


def test_a_closed_client_leases_nothing(served: Served) -> None:
    """Its thread has ended, its copies are void, and no more are opened."""
    client, name = served.client(on_error="maybe"), next(_names)
    client.create_filter(name, 100)
    handle = leased(client, name)
    thread = handle._lease._leasing._mine.thread
    assert thread.is_alive()
    client.close()
    assert not thread.is_alive()
    assert not handle.is_local
    assert handle.might_contain("papaya")
    with pytest.raises(ClientClosed):
        client.filter("another", replica=True)


def test_with_opens_and_gives_up(daemon: DaemonProcess) -> None:
    """Nested, the outermost gives up; after that it can be opened again."""
    with Client(daemon.grpc) as client:
        name = next(_names)
        client.create_filter(name, 100)
        for _ in range(2):
            with client.filter(name, replica=True) as handle:
                assert handle.wait(WAIT)
                with client.filter(name, replica=True) as inner:
                    assert inner is handle
                assert handle.is_local
            assert not handle.is_local


def test_no_thread_before_it_is_used(daemon: DaemonProcess) -> None:
    """Neither a client nor a handle starts one; so a parent that forks workers first has none."""
    with Client(daemon.grpc) as client:
        before = threading.active_count()
        handle = client.filter("fruit", replica=True)
        assert threading.active_count() == before
        assert not handle.is_local


def test_a_copy_is_not_trusted_longer_than_its_lease(tmp_path: Path) -> None:
    """The daemon is gone without a word: at the deadline checks go there, and fail; with on_error they say
    maybe."""
    own = DaemonProcess(tmp_path / "data", *SHORT)
    try:
        with Client(own.grpc, options=ClientOptions(check_timeout=0.2)) as client:
            client.create_filter("fruit", 100)
            handle = leased(client, "fruit")
            own.process.send_signal(19)
            stopped = now(BOOTTIME)
            while handle.is_local:
                assert now(BOOTTIME) - stopped < 0.6
            assert handle.might_contain("papaya")
            own.process.send_signal(18)
            assert handle.wait(WAIT)
            assert not handle.might_contain("papaya")
    finally:
        own.kill()


def test_a_restarted_daemon_takes_copies_up_again(tmp_path: Path) -> None:
    """With what was added meanwhile, and without a new image."""
    own = DaemonProcess(tmp_path / "data", *SHORT)
    with Client(own.grpc) as client:
        client.create_filter("fruit", 100)
        handle = leased(client, "fruit")
        bloom = handle._replica.copy.bloom
        own.kill()
        own = DaemonProcess(tmp_path / "data", *SHORT, listen=own.grpc)
        try:
            with Client(own.grpc) as writer:
                writer.filter("fruit").add("mango")
            assert handle.might_contain("mango")
            eventually(lambda: handle.is_local)
            assert handle._replica.copy.bloom is bloom
            assert handle.might_contain("mango")
            assert not handle.might_contain("papaya")
        finally:
            own.stop()


_FORK = """
import os, sys, threading
from bloomgate import Client, ClientOptions
from bloomgate.replica import VOID

client = Client(sys.argv[1], options=ClientOptions(on_error="raise", check_timeout=20))
fruit = client.filter("forked", replica=True)
assert fruit.wait(20)
for _ in range(10):
    fruit.might_contain("papaya")
pid = os.fork()
if pid == 0:
    assert fruit._replica.copy is VOID, "a child has its parent's copy"
    assert not fruit.is_local
    assert fruit.might_contain("mango")
    assert fruit.wait(20), "the child has no lease of its own"
    for _ in range(5):
        assert not fruit.might_contain("peach")
    client.close()
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert fruit.wait(20)
assert fruit.might_contain("mango")
client.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_has_a_lease_of_its_own(daemon: DaemonProcess) -> None:
    """It never answers by its parent's, and counts only what it was asked itself."""
    with Client(daemon.grpc) as client:
        client.create_filter("forked", 100)
        client.filter("forked").add("mango")
        command = [sys.executable, "-c", _FORK, daemon.grpc]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
        assert client.filter("forked").stats().checks_skip == 15


def test_a_process_may_end_without_closing(daemon: DaemonProcess) -> None:
    """Its thread does not keep it."""
    code = (
        "import sys; from bloomgate import Client; client = Client(sys.argv[1])\n"
        "client.create_filter('left', 10)\nassert client.filter('left', replica=True).wait(20)"
    )
    command = [sys.executable, "-c", code, daemon.grpc]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_fake_gate_that_fails_renews_nothing(gate: FakeGate, twin: Twin) -> None:
    """As a daemon that is away: new copies are not had, until it recovers."""
    gate.fail_with(Unavailable())
    client = twin.client(gate)
    handle = client.filter("fruit", replica=True)
    assert not handle.wait(0.2)
    assert handle.might_contain("papaya")
    gate.recover()
    assert handle.wait(WAIT)
    assert not handle.might_contain("papaya")
    gate.reseed("fruit")
    assert not handle.is_local
    client.close()


def test_what_is_added_to_a_fake_filter_itself_is_in_its_copies(twin: Twin) -> None:
    """One key or many, growth included."""
    gate = FakeGate()
    made = gate.create("small", 10)
    client = twin.client(gate)
    handle = leased(client, "small")
    made.add("mango")
    assert handle.might_contain("mango")
    made.add_many([f"key {number}" for number in range(50)])
    assert all(handle.might_contain_many([f"key {number}" for number in range(50)]))
    client.close()


def test_counts_lose_nothing_between_two_looks() -> None:
    """Each is taken once, however it was counted."""
    counts = Counts()
    for _ in range(5):
        counts.skip()
    counts.hit()
    counts.add(10, 20)
    assert counts.take() == (15, 21)
    assert counts.take() == (0, 0)
    counts.hit()
    assert counts.take() == (0, 1)
    counts.skip()
    counts.forget()
    assert counts.take() == (0, 0)


def test_nothing_is_void_but_the_deadline() -> None:
    """A copy holds body and deadline in one, and none is ever changed."""
    assert VOID.deadline < now(BOOTTIME)
    assert set(Copy.__slots__) == {"answer", "bloom", "deadline"}


def test_a_child_forgets_whatever_its_parent_held() -> None:
    """What the fork hook does, without a fork: all that a lease of the parent could answer by is gone."""
    gate = FakeGate()
    gate.create("fruit", 100)
    client = gate.client()
    handle = leased(client, "fruit")
    parent = handle._lease._leasing._mine
    leasing._after_fork()
    assert handle._replica.copy is VOID
    assert handle._replica.held is None
    mine = handle._lease._leasing._mine
    assert mine.replica_id != parent.replica_id
    assert mine.thread is None
    assert os.getpid()
    parent.stream.end()
    parent.thread.join(WAIT)
    client.close()
