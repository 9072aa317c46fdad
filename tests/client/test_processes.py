"""What needs a process of its own: forks, and what an import costs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from bloomgate import Client, ClientOptions, processes, transport

from .twins import Server

# The parent speaks to the server, forks, and both speak again. pytest itself is not forked: it has gRPC's
# threads, and those of the server under test.
_FORK = """
import os, sys
from bloomgate import Client, ClientOptions

client = Client(sys.argv[1], options=ClientOptions(check_timeout=float(sys.argv[2]), report_interval=3600.0))
fruit = client.filter("fruit")
guard = fruit.guard(lambda key: 1)
fruit.add("mango")
assert guard("mango") == 1

def say(who):
    print(who, fruit.might_contain_many(["mango", "papaya"]), fruit.might_contain("peach"), flush=True)

say("parent")
pid = os.fork()
if pid == 0:
    say("child")
    client.close()
    os._exit(0)
_, status = os.waitpid(pid, 0)
say("parent")
client.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""

_ASYNC_FORK = """
import asyncio, os, sys
from bloomgate import AsyncClient, ClientOptions

client = AsyncClient(sys.argv[1], options=ClientOptions(check_timeout=float(sys.argv[2])))

async def say(who):
    fruit = client.filter("fruit")
    # One write, so that the two do not mix their lines.
    os.write(1, f"{who} {await fruit.might_contain('papaya')}\\n".encode())

pid = os.fork()
asyncio.run(say("child" if pid == 0 else "parent"))
if pid == 0:
    os._exit(0)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


_FRESH_CLIENT = """
import asyncio, os, sys
import bloomgate
from bloomgate import BloomgateError, Client, ClientOptions

def say(who, answer):
    os.write(1, f"{who} {answer}\\n".encode())

def ask(kind, on_error):
    made = getattr(bloomgate, kind)(sys.argv[1], options=ClientOptions(check_timeout=5.0, on_error=on_error))
    if kind == "Client":
        return made.filter("fruit").might_contain("papaya")
    async def main():
        return await made.filter("fruit").might_contain("papaya")
    return asyncio.run(main())

say("parent", ask("Client", "raise"))
pid = os.fork()
if pid == 0:
    if sys.argv[3] == "grandchild" and (pid := os.fork()):
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    say("child", ask(sys.argv[2], "maybe"))
    try:
        ask(sys.argv[2], "raise")
    except BloomgateError as error:
        say("child", type(error).__name__)
    os._exit(0)
_, status = os.waitpid(pid, 0)
os._exit(os.waitstatus_to_exitcode(status))
"""

# Nobody listens: what is asked is whether the child comes to an answer at all.
_HELD_LOCKS = """
import os, sys, threading
from bloomgate import Client, ClientOptions

client = Client("127.0.0.1:1")
fruit = client.filter("fruit")
fruit.guard(lambda key: 1)
locks = [
    fruit._calls._fallbacks._lock.get(),
    fruit._outcomes._of_process.get().changed,
    client._transport._bound.get().lock,
]
held, over = threading.Event(), threading.Event()

def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    over.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    answer = fruit.might_contain("papaya")
    fruit._outcomes.add((1, 0, 0))
    client.close()
    os.write(1, f"child {answer}\\n".encode())
    os._exit(0)
_, status = os.waitpid(pid, 0)
os._exit(os.waitstatus_to_exitcode(status))
"""


def _run(script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


def test_a_forked_child_speaks_on_a_connection_of_its_own(server: Server) -> None:
    """Parent and child both get proven answers, over two connections, and outcomes are reported once."""
    peers: dict[str, list[str]] = {}
    server.hook = lambda name, _request, context: peers.setdefault(context.peer(), []).append(name)
    done = _run(_FORK, server.target, "10", GRPC_ENABLE_FORK_SUPPORT="1")
    assert done.stdout.splitlines() == [f"{who} [True, False] False" for who in ("parent", "child", "parent")]
    assert done.returncode == 0, done.stderr
    assert len(peers) >= 2
    assert server.gate.outcomes("fruit") == (1, 0, 0)


def test_a_child_without_fork_support_answers_maybe_instead_of_hanging(server: Server) -> None:
    """gRPC's calls would never return there, not even at their deadline."""
    done = _run(_FORK, server.target, "0.5", GRPC_ENABLE_FORK_SUPPORT="0")
    parent, child, again = done.stdout.splitlines()
    assert child == "child [True, True] True"
    assert parent.startswith("parent [True")
    assert again.startswith("parent [True")


def test_a_child_neither_uses_nor_closes_its_parents_channel(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from inside, since current gRPC mends some of what a child does to its parent's channel."""
    client = Client(server.target, options=ClientOptions(check_timeout=10.0))
    fruit = client.filter("fruit")
    peers = set()
    server.hook = lambda _name, _request, context: peers.add(context.peer())
    assert fruit.might_contain("papaya") is False
    monkeypatch.setattr(processes, "_current", processes.Process(inherited_grpc=True))
    assert fruit.might_contain("papaya") is False
    assert len(peers) == 2
    client.close()
    (kept,) = [left.channel for left in processes._LEFT_TO_PARENTS if isinstance(left, transport._Bound)]
    processes._LEFT_TO_PARENTS.clear()
    assert kept.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
    kept.close()


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
@pytest.mark.parametrize("generation", ["child", "grandchild"])
def test_a_fresh_client_of_a_child_does_not_hang_either(server: Server, kind: str, generation: str) -> None:
    """Without fork support gRPC is lost to the child whichever client its parent used: it is refused."""
    done = _run(_FRESH_CLIENT, server.target, kind, generation, GRPC_ENABLE_FORK_SUPPORT="0")
    assert done.stdout == "parent False\nchild True\nchild ForkNotSupported\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_a_child_of_a_process_that_did_not_use_grpc_may_use_it(server: Server) -> None:
    """Without fork support too: workers that are forked first and connect then."""
    done = _run(_ASYNC_FORK, server.target, "10", GRPC_ENABLE_FORK_SUPPORT="0")
    assert sorted(done.stdout.splitlines()) == ["child False", "parent False"]


def test_the_threads_of_a_child_get_one_fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """None sees any part of its parent's, however many ask at once, and none a state of its own."""
    made: list[object] = []
    at_once = threading.Barrier(8)

    def make() -> object:
        state = object()
        # Others come while it is made.
        time.sleep(0)
        made.append(state)
        return state

    held = processes.OfProcess(make)
    of_parent = held.get()
    for generation in range(2, 30):
        monkeypatch.setattr(processes, "_current", processes.Process(inherited_grpc=False))
        seen: list[object] = []

        def ask(seen: list[object] = seen) -> None:
            at_once.wait(10)
            seen.append(held.get())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [made[-1]] * 8
        assert of_parent not in seen
        assert len(made) == generation
    processes._LEFT_TO_PARENTS.clear()


def test_a_lock_that_is_held_at_the_fork_does_not_stop_the_child() -> None:
    """Whatever another thread of the parent was doing: outcomes, the log of fallbacks, a first call."""
    done = _run(_HELD_LOCKS, "0")
    assert done.stdout == "child True\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_an_asyncio_client_made_before_a_fork_serves_both(server: Server) -> None:
    """Workers that inherit a client which has not spoken yet each connect by themselves."""
    done = _run(_ASYNC_FORK, server.target, "10", GRPC_ENABLE_FORK_SUPPORT="1")
    assert sorted(done.stdout.splitlines()) == ["child False", "parent False"]
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "statement",
    ["import bloomgate", "from bloomgate import BloomFilter, FilterFull", "import bloomgate.options"],
)
def test_the_kernel_alone_does_not_load_grpc(statement: str) -> None:
    """Who uses a filter in process pays for no network."""
    heavy = ("grpc", "google.protobuf", "prometheus_client", "bloomgate.client")
    done = _run(f"import sys\n{statement}\nprint([name for name in {heavy!r} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


def test_every_public_name_is_there() -> None:
    """Each name of __all__ can be imported and is listed by dir(), and a wrong one is an AttributeError."""
    script = (
        "import bloomgate\n"
        "assert set(bloomgate.__all__) <= set(dir(bloomgate))\n"
        "from bloomgate import *\n"
        "print(all(name in globals() for name in bloomgate.__all__), hasattr(bloomgate, 'Nothing'))"
    )
    assert _run(script).stdout == "True False\n"


def test_every_error_a_caller_can_meet_is_public() -> None:
    """Under its own name in the package; a full filter under the kernel's, which it is as well."""
    import bloomgate
    from bloomgate.errors import ERRORS

    for error in ERRORS.values():
        assert issubclass(error, getattr(bloomgate, error.__name__))
