"""What is not told: a handler that breaks says nothing of why, and the log nothing of whom it served."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bloomgate import Client
from bloomgate.filters import Hasher, HashScheme
from bloomgate.v1 import admin_pb2, admin_pb2_grpc, filters_pb2, filters_pb2_grpc
from bloomgated.access import Role, new_token
from conftest import StartDaemon
from support.daemon import DaemonProcess

from .calls import VERBS, spec

PATH, KEY, TOKEN = "/var/lib/a-place/journal.db", "a-key-of-somebody", "bgt_0badc0de_x"
SEED = "seed=3735928559"
TEXT = f"{PATH} {KEY} {SEED} {TOKEN}"
# What a caller must not see, whatever breaks: what the exception says, and what its traceback would.
UNTOLD = (
    PATH, "a-place", KEY, "3735928559", TOKEN, "0badc0de", "RuntimeError", "DecodeError", "Traceback",
    "bloomgated", "grpc_reflection", "aiohttp", "prometheus", ".py", "line ", "site-packages", "0x",
)  # fmt: skip
BROKEN = f"""
from bloomgated import gate, holders, metrics
from bloomgated.api import streams
from bloomgated.web import server
from grpc_reflection.v1alpha.reflection import aio
async def breaks(*_, **__):
    raise RuntimeError({TEXT!r})
def breaks_at_once(*_, **__):
    raise RuntimeError({TEXT!r})
async def breaks_later(*_, **__):
    if False:
        yield
    raise RuntimeError({TEXT!r})
for verb in ("add", "might_contain", "stats", "create", "list", "drop", "snapshot"):
    assert hasattr(gate.Gate, verb)
    setattr(gate.Gate, verb, breaks)
for verb in ("report_outcomes", "hash_spec", "might_contain_one"):
    assert hasattr(gate.Gate, verb)
    setattr(gate.Gate, verb, breaks_at_once)
assert hasattr(holders.Holders, "connect")
holders.Holders.connect = breaks_at_once
assert hasattr(streams.Health, "_watch") and hasattr(aio.ReflectionServicer, "ServerReflectionInfo")
streams.Health._watch = breaks
aio.ReflectionServicer.ServerReflectionInfo = breaks_later
server.generate_latest = breaks_at_once
server.WebServer._index = breaks
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon of which everything breaks, with an exception that tells all there is."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("broken") / "data", prelude=BROKEN)
    yield daemon
    daemon.kill()


def assert_untold(seen: str) -> None:
    assert [word for word in UNTOLD if word in seen] == [], seen


def seen_of(error: Any) -> str:
    """All that a caller can see of a failed call, bytes included."""
    metadata = [*(error.initial_metadata() or ()), *(error.trailing_metadata() or ())]
    values = [
        value.decode("latin-1") if isinstance(value, bytes) else value for pair in metadata for value in pair
    ]
    # gRPC's own word for where the call was, which the client adds by itself.
    told = re.sub(r"ipv[46]:\S+|0x[0-9a-f]+", "", str(getattr(error, "debug_error_string", str)()))
    return "\n".join((error.code().name, error.details() or "", told, *values))


def assert_internal(error: Any, daemon: DaemonProcess) -> None:
    """INTERNAL with an id and nothing else; the log has the exception under that id."""
    assert_untold(seen_of(error))
    assert error.code() is grpc.StatusCode.INTERNAL
    found = re.fullmatch(r"internal error ([0-9a-f]{16})", error.details())
    assert found
    [line] = [json.loads(line) for line in daemon.log().splitlines() if found[1] in line]
    assert line["message"] == f"internal error {found[1]}"
    assert TEXT in line["exception"]


METHODS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    verb: lambda f, a, of=of: (of(f, a)[0], of(f, a)[1]("name")) for verb, of in VERBS.items()
} | {
    "CreateFilter": lambda _, a: (a.CreateFilter, admin_pb2.CreateFilterRequest(name="name", spec=spec())),
    "ListFilters": lambda _, a: (a.ListFilters, admin_pb2.ListFiltersRequest()),
}


def test_every_method_is_broken_here() -> None:
    """One that is added to a service is added above."""
    services = [
        *filters_pb2.DESCRIPTOR.services_by_name.values(),
        *admin_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    unary = {method.name for service in services for method in service.methods if not method.client_streaming}
    assert unary == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_handler_that_breaks_tells_an_id_and_nothing_else(broken: DaemonProcess, method: str) -> None:
    """Nothing of the exception is in code, message, details or any metadata; the log has it under the id."""
    with broken.stubs() as stubs:
        call, request = METHODS[method](*stubs)
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=10)
    assert_internal(caught.value, broken)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_request_tell_nothing_of_the_parser(broken: DaemonProcess, method: str) -> None:
    """Of every method: not a word of it, and nothing of the bytes."""
    with broken.stubs() as (filters, _):
        service = "FilterService" if hasattr(filters, method) else "AdminService"
    with grpc.insecure_channel(broken.grpc) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/bloomgate.v1.{service}/{method}")(b"\xff" + KEY.encode(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "the request is not a message of this call"
        assert_untold(seen_of(caught.value))


def test_a_stream_that_breaks_tells_an_id_and_nothing_else(broken: DaemonProcess) -> None:
    """Health's watch, reflection, and leases."""
    hello = filters_pb2.LeaseRequest(hello=filters_pb2.LeaseHello(replica=bytes(16)))
    with grpc.insecure_channel(broken.grpc) as channel:
        for replies in (
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10),
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
            ),
            filters_pb2_grpc.FilterServiceStub(channel).Lease(iter([hello]), timeout=10),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(replies)
            assert_internal(caught.value, broken)


@pytest.mark.parametrize("path", ["/metrics", "/"])
def test_a_page_that_breaks_tells_nothing(broken: DaemonProcess, path: str) -> None:
    """500, and neither the exception nor a traceback; health still answers, and the log has it."""
    status, body = broken.get(path)
    assert status == 500
    assert_untold(body)
    assert TEXT in broken.log()
    assert broken.get("/livez") == (200, "ok\n")


def test_a_page_that_is_not_there_tells_nothing(broken: DaemonProcess) -> None:
    """Nor does it repeat what was asked for."""
    for path in (f"/{KEY}", f"/metrics/../..{PATH}", f"/readyz?{TOKEN}"):
        status, body = broken.get(path)
        assert status in (200, 404)
        assert_untold(body)


# -- the log

SEED_ASKED = 3_405_691_582


def forms(data: bytes) -> set[str]:
    """The ways in which bytes could stand in a log."""
    return {
        data.hex(), data.hex(" "), base64.b64encode(data).decode().rstrip("="), repr(data)[2:-1],
        json.dumps(data.decode("latin-1"))[1:-1], str(list(data)),
        str(int.from_bytes(data[:8], "little")), str(int.from_bytes(data[8:], "little")),
    }  # fmt: skip


def traffic(daemon: DaemonProcess, token: str, keys: list[bytes]) -> tuple[bytes, int, bytes]:
    """All that callers do, as it should be done and not; returns the digests, the seed and the secret."""
    with Client(daemon.grpc, token=token) as client:
        for name, scheme in (("plain", HashScheme.MURMUR3_X64_128), ("keyed", HashScheme.BLAKE2B_128)):
            client.create_filter(name, 1000, hash_scheme=scheme)
            filter_ = client.filter(name)
            filter_.add(keys[0])
            filter_.add_many(keys)
            assert all(filter_.might_contain_many(keys))
            assert filter_.might_contain(keys[1])
            filter_.stats()
            client.snapshot_filter(name)
        client.list_filters()
    metadata = (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(daemon.grpc) as channel:
        filters = filters_pb2_grpc.FilterServiceStub(channel)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        found = {
            name: filters.HashSpec(filters_pb2.HashSpecRequest(filter=name), metadata=metadata)
            for name in ("plain", "keyed")
        }
        digests = Hasher(HashScheme.MURMUR3_X64_128, found["plain"].seed).digests(keys)
        bad: list[tuple[Any, Any]] = [
            (filters.Add, filters_pb2.AddRequest(filter="plain", keys=[keys[0], b""])),
            (filters.Add, filters_pb2.AddRequest(filter="plain", keys=keys, digests=digests)),
            (filters.Add, filters_pb2.AddRequest(filter="plain", digests=digests, hash_id=5)),
            (filters.MightContain, filters_pb2.MightContainRequest(filter="nowhere", keys=keys)),
            (filters.MightContain, filters_pb2.MightContainRequest(filter="plain", keys=[keys[0] * 9000])),
            (admin.CreateFilter, admin_pb2.CreateFilterRequest(name="plain", spec=spec(seed=SEED_ASKED))),
            (admin.DropFilter, admin_pb2.DropFilterRequest(name="nowhere")),
        ]
        for call, request in bad:
            with pytest.raises(grpc.RpcError):
                call(request, metadata=metadata, timeout=10)
        for shown in (f"Bearer {token[:-1]}!", token, f"Basic {token}", f"Bearer {token} {token}"):
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                filters.Stats(
                    filters_pb2.StatsRequest(filter="plain"), metadata=(("authorization", shown),), timeout=10
                )
    assert daemon.get("/metrics", token=token)[0] == 200
    assert daemon.get("/metrics", token=f"{token}x")[0] == 401
    return digests, found["plain"].seed, found["keyed"].secret


@pytest.mark.parametrize("level", ["debug", "info"])
def test_the_log_tells_nothing_of_whom_it_served(
    start_daemon: StartDaemon, tmp_path: Path, level: str
) -> None:
    """No key, digest, seed, secret or token, at the most talkative level either, whether calls succeed or
    fail; nor does a daemon that starts again on what they left."""
    token, entry = new_token("everybody", list(Role), ["*"])
    auth = tmp_path / "auth.toml"
    auth.write_text(entry)
    flags = ("--set", f"log_level={level}", "--set", f"auth.file={auth}")
    keys = [b"needle-%d-of-somebody" % n for n in range(20)]
    daemon = start_daemon(*flags)
    digests, seed, secret = traffic(daemon, token, keys)
    auth.write_text(f"{entry}\n")
    assert daemon.stop() == 0
    again = start_daemon(*flags)
    with Client(again.grpc, token=token) as client:
        assert all(client.filter("plain").might_contain_many(keys))
    assert again.stop() == 0
    log = again.log()
    assert log.count('"message": "ready: ') == 2
    hidden = {"needle", token, token.split("_", 2)[2], entry.split('"')[3], str(seed), str(SEED_ASKED)}
    hidden |= {seed.to_bytes(4, "little").hex(), f"{seed:08x}", *forms(secret)}
    for start in range(0, len(digests), 16):
        hidden |= forms(digests[start : start + 16])
    assert sorted(word for word in hidden if word in log) == []
