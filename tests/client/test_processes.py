"""What needs a process of its own: forks, and what an import costs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bloomgate import Client, ClientOptions, transport

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
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert fruit.might_contain("papaya") is False
    assert len(peers) == 2
    client.close()
    kept, _ = transport._LEFT_TO_PARENT.pop()
    assert kept.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
    kept.close()


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
