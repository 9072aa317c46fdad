"""The life of a real process: how it starts, serves, drains, stops, and when it refuses to."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from bloomgate.v1 import admin_pb2, filters_pb2, filters_pb2_grpc
from bloomgated.api.server import ApiServer
from bloomgated.config import LimitsConfig
from bloomgated.metrics import CallMetrics
from bloomgated.turn import Turn
from conftest import StartDaemon
from support.daemon import DaemonProcess, refused

from . import inside
from .calls import DEFINITELY_NOT, MAYBE, add, check, create, eventually, failure_of, stats
from .preludes import HOLD_CALLS, HOLD_RECOVERY, HOLD_SNAPSHOTS, NO_SNAPSHOT_RECORDS, SMALL_FILES

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "bloomgate.v1.FilterService", "bloomgate.v1.AdminService")

LARGE = (("grpc.max_receive_message_length", -1),)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """What holds a process until it is touched."""
    return tmp_path / "release"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health_of(address: str, service: str = "") -> int | grpc.StatusCode:
    """What health says, or the code of its refusal."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=5
            )
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return int(reply.status)


def calls_started(daemon: DaemonProcess, method: str) -> float:
    """How often a method was called, as its metrics say."""
    pattern = rf'^grpc_server_started_total{{.*grpc_method="{method}".*}} (.*)$'
    found = re.search(pattern, daemon.get("/metrics")[1], re.M)
    assert found
    return float(found[1])


def one_sentence(*arguments: str) -> str:
    """Run ``bloomgated``, which must refuse with one line on stderr, and return that."""
    ended = refused(*arguments)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("bloomgated: ")
    assert ended.stderr.endswith("\n")
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    return ended.stderr.removeprefix("bloomgated: ").rstrip()


# -- start


def test_one_line_on_stdout_says_where_it_serves(start_daemon: StartDaemon) -> None:
    """Once it serves, at addresses that are taken and answer; the log is JSON on stderr, an object a line."""
    daemon = start_daemon()
    for address in (daemon.grpc, daemon.http):
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", address)
    assert [health_of(daemon.grpc, service) for service in SERVICES] == [SERVING] * 3
    assert daemon.get("/readyz") == daemon.get("/livez") == (200, "ok\n")
    assert daemon.process.stdout is not None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.stdout.read() == ""
    assert daemon.process.wait(30) == 0
    for line in daemon.log().splitlines():
        assert {"level", "logger", "timestamp", "message"} <= set(json.loads(line))


def test_health_says_not_serving_until_all_is_recovered(start_daemon: StartDaemon, release: Path) -> None:
    """Of the server and of each service; calls are refused as unavailable, and /readyz says why."""
    listen, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    daemon = start_daemon(
        listen=listen, http=http, prelude=HOLD_RECOVERY.format(path=str(release)), ready=False
    )
    eventually(lambda: health_of(listen) is not grpc.StatusCode.UNAVAILABLE)
    assert [health_of(listen, service) for service in SERVICES] == [NOT_SERVING] * 3
    assert daemon.get("/readyz") == (503, "recovering\n")
    assert daemon.get("/livez") == (200, "ok\n")
    assert "bloomgate_journal_seq" in daemon.get("/metrics")[1]
    assert refused("healthcheck", "--http", http).returncode == 1
    with daemon.stubs() as (filters, admin):
        for call, request in (
            (filters.Add, filters_pb2.AddRequest(filter="name", keys=[b"k"])),
            (filters.MightContain, filters_pb2.MightContainRequest(filter="name", keys=[b"k"])),
            (admin.ListFilters, admin_pb2.ListFiltersRequest()),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request)
            failed = failure_of(caught.value)
            assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_SERVING")
            assert failed.message == "bloomgated is recovering"
    release.touch()
    daemon.wait_ready()
    assert (daemon.grpc, daemon.http) == (listen, http)
    assert [health_of(listen, service) for service in SERVICES] == [SERVING] * 3
    assert daemon.get("/readyz")[0] == 200


def test_a_stop_during_recovery_is_clean(start_daemon: StartDaemon, release: Path) -> None:
    """It never says ready, and exits 0."""
    listen = f"127.0.0.1:{free_port()}"
    daemon = start_daemon(listen=listen, prelude=HOLD_RECOVERY.format(path=str(release)), ready=False)
    eventually(lambda: health_of(listen) is not grpc.StatusCode.UNAVAILABLE)
    daemon.process.send_signal(signal.SIGTERM)
    eventually(lambda: "SIGTERM: stopping" in daemon.log())
    release.touch()
    assert daemon.process.stdout is not None
    assert daemon.process.stdout.read() == ""
    assert daemon.process.wait(30) == 0


def test_an_unknown_service_has_no_health(shared: DaemonProcess) -> None:
    """NOT_FOUND, as the health protocol says."""
    assert health_of(shared.grpc, "bloomgate.v1.Other") is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services(shared: DaemonProcess) -> None:
    """And describes them, so that tools can call without our proto files."""
    with grpc.insecure_channel(shared.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="bloomgate.v1.AdminService"),
        ]
        listed, described = stub.ServerReflectionInfo(iter(asked))
    assert [each.name for each in listed.list_services_response.service] == [
        "bloomgate.v1.AdminService",
        "bloomgate.v1.FilterService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    ]
    assert described.file_descriptor_response.file_descriptor_proto


# -- stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_stop_writes_what_changed(start_daemon: StartDaemon, number: signal.Signals) -> None:
    """And exits 0; the next start has it from a recorded snapshot, and its stop writes nothing anew."""
    daemon = start_daemon()
    with daemon.stubs() as (filters, admin):
        create(admin, "changed", error_rate=1e-9)
        create(admin, "empty")
        seq = add(filters, "changed", b"a").seq
    assert daemon.stop(number) == 0
    files = {path.name: path.stat().st_mtime_ns for path in daemon.directory.glob("snapshots/*")}
    assert len(files) == 1

    daemon = start_daemon()
    with daemon.stubs() as (filters, _):
        shown = stats(filters, "changed")
        assert shown.snapshot_seq >= seq
        assert check(filters, "changed", b"a", b"b") == [MAYBE, DEFINITELY_NOT]
    assert daemon.stop(number) == 0
    assert {path.name: path.stat().st_mtime_ns for path in daemon.directory.glob("snapshots/*")} == files


class Held:
    """A daemon with a call under way that ends when it is let go."""

    def __init__(
        self, start: StartDaemon, release: Path, *flags: str, verb: str = "add", prelude: str = ""
    ) -> None:
        self.release = release
        self.daemon = start(*flags, prelude=prelude + HOLD_CALLS.format(verb=verb, path=str(release)))
        self.channel = grpc.insecure_channel(self.daemon.grpc)
        self.watching = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest())
        assert next(self.watching).status == SERVING
        with self.daemon.stubs() as (_, admin):
            create(admin, "name", error_rate=1e-9)
        filters = filters_pb2_grpc.FilterServiceStub(self.channel)
        if verb == "add":
            self.call = filters.Add.future(filters_pb2.AddRequest(filter="name", keys=[b"held"]))
        else:
            request = filters_pb2.MightContainRequest(filter="name", keys=[b"held"])
            self.call = filters.MightContain.future(request)
        method = "Add" if verb == "add" else "MightContain"
        eventually(lambda: calls_started(self.daemon, method) == 1)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.daemon.process.send_signal(number)


@pytest.fixture
def held(start_daemon: StartDaemon, release: Path) -> Iterator[Any]:
    """Begin a ``Held``; its channel is closed with the test."""
    begun: list[Held] = []

    def begin(*flags: str, **options: str) -> Held:
        begun.append(Held(start_daemon, release, *flags, **options))
        return begun[-1]

    yield begin
    for each in begun:
        each.channel.close()


def test_a_drain_says_not_serving_first_and_lets_calls_finish(held: Any, start_daemon: StartDaemon) -> None:
    """The call under way is answered; new ones are refused meanwhile; then it exits 0, and it was durable."""
    it = held("--set", "drain=60")
    it.signal()
    assert next(it.watching).status == NOT_SERVING
    assert it.daemon.get("/readyz") == (503, "draining\n")
    assert it.daemon.get("/livez")[0] == 200
    assert not it.call.done()
    with it.daemon.stubs() as (filters, _), pytest.raises(grpc.RpcError) as caught:
        stats(filters, "name")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    it.release.touch()
    assert it.call.result(timeout=30).was_new == [True]
    with pytest.raises(grpc.RpcError) as caught:
        next(it.watching)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert it.daemon.process.wait(30) == 0
    with start_daemon().stubs() as (filters, _):
        assert check(filters, "name", b"held", b"other") == [MAYBE, DEFINITELY_NOT]


def test_a_drain_is_bounded(held: Any) -> None:
    """A call that is stuck is ended once the bound is over, and the stop is a clean one all the same."""
    it = held("--set", "drain=0.3")
    began = time.monotonic()
    it.signal()
    assert it.daemon.process.wait(30) == 0
    assert 0.3 <= time.monotonic() - began < 5
    assert it.call.exception(timeout=30).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert len(list(it.daemon.directory.glob("snapshots/*"))) == 0  # nothing changed


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(held: Any, second: signal.Signals) -> None:
    """Whatever is under way; the exit code tells that it was not a clean stop."""
    it = held("--set", "drain=60")
    it.signal()
    assert next(it.watching).status == NOT_SERVING
    began = time.monotonic()
    it.signal(second)
    assert it.daemon.process.wait(30) == 4
    assert time.monotonic() - began < 5
    assert f"{second.name} again: not waiting any longer" in it.daemon.log()


def test_open_streams_do_not_delay_a_stop(start_daemon: StartDaemon) -> None:
    """Health watchers hear of it before they are ended; reflection streams are ended."""
    daemon = start_daemon("--set", "drain=60")
    ended = threading.Event()
    with grpc.insecure_channel(daemon.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watching = [health.Watch(health_pb2.HealthCheckRequest(service=service)) for service in SERVICES * 10]
        assert [next(each).status for each in watching] == [SERVING] * 30

        def asking() -> Iterator[Any]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            ended.wait(60)  # it never half-closes by itself

        reflecting = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asking())
        assert next(reflecting).list_services_response.service
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        assert [next(each).status for each in watching] == [NOT_SERVING] * 30
        assert daemon.process.wait(30) == 0
        assert time.monotonic() - began < 5
        for stream in (*watching, reflecting):
            with pytest.raises(grpc.RpcError) as caught:
                next(stream)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        ended.set()


def test_snapshots_under_way_do_not_delay_saying_so(start_daemon: StartDaemon, release: Path) -> None:
    """A stop in the middle of a routine snapshot: NOT_SERVING at once, exit when it is written."""
    flags = ("--set", "snapshot.check_every=0.02", "--set", "snapshot.interval=0.02")
    daemon = start_daemon(*flags, prelude=HOLD_SNAPSHOTS.format(path=str(release)))
    with daemon.stubs() as (filters, admin):
        create(admin, "name")
        add(filters, "name", b"a")
    eventually(release.with_name("release.begun").exists)
    daemon.process.send_signal(signal.SIGTERM)
    eventually(lambda: daemon.get("/readyz") == (503, "draining\n"))
    assert daemon.process.poll() is None
    release.touch()
    assert daemon.process.wait(30) == 0
    assert len(list(daemon.directory.glob("snapshots/*.bgf"))) == 1


def test_a_stop_waits_for_answers_on_their_way() -> None:
    """Until a caller that is slow to take its answer has been sent all of it, not for the handler alone."""
    answers = 8_000_000  # more than may be sent before the caller asks for more

    class Held:
        limits, turn = LimitsConfig(), Turn()
        leases, holders = inside.no_leases()
        asked, go = asyncio.Event(), asyncio.Event()

        async def might_contain(self, *_: Any) -> tuple[bytes, bool]:
            self.asked.set()
            await self.go.wait()
            return bytes([True]) * answers, False

    async def run() -> None:
        gate, network, registry = Held(), asyncio.Event(), CollectorRegistry()
        handled = {
            "grpc_type": "unary", "grpc_service": "bloomgate.v1.FilterService",
            "grpc_method": "MightContain", "grpc_code": "OK",
        }  # fmt: skip
        api = ApiServer(gate, gate.limits, CallMetrics(registry))  # type: ignore[arg-type]
        port = api.bind("127.0.0.1", 0)
        await api.start()
        api.set_serving(True)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
            try:
                while data := await reader.read(1 << 16):
                    if slow and gate.go.is_set():
                        await network.wait()
                    writer.write(data)
                    await writer.drain()
            finally:
                writer.close()
                await writer.wait_closed()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
            both = (carry(reader, to_server, slow=True), carry(from_server, writer, slow=False))
            await asyncio.gather(*both, return_exceptions=True)
            ended.set()

        ended = asyncio.Event()
        proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
        address = "{}:{}".format(*proxy.sockets[0].getsockname())
        async with grpc.aio.insecure_channel(address, options=LARGE) as channel:
            filters, _ = inside.stubs(channel)
            call = filters.MightContain(filters_pb2.MightContainRequest(filter="name", keys=[b"k", b"l"]))
            replying = asyncio.ensure_future(call.code())
            await gate.asked.wait()
            stopping = asyncio.ensure_future(api.stop(30))
            # It stops: others are refused. But it does not end.
            await asyncio.to_thread(
                eventually, lambda: health_of(f"127.0.0.1:{port}") is grpc.StatusCode.UNAVAILABLE
            )
            gate.go.set()
            await inside.until(lambda: registry.get_sample_value("grpc_server_handled_total", handled) == 1)
            # The handler is done; the caller's leave to send more is held up.
            done, _ = await asyncio.wait((stopping, replying), timeout=0.3)
            network.set()
            assert await replying is grpc.StatusCode.OK
            assert not done
            assert len((await call).answers) == answers
            await stopping
        proxy.close()
        await ended.wait()

    asyncio.run(run())


# -- refusing to start


def test_a_port_that_is_taken(shared: DaemonProcess, tmp_path: Path) -> None:
    """By another program or by another bloomgated, gRPC's or HTTP's: one sentence, non-zero."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = f"127.0.0.1:{taken.getsockname()[1]}"
        for address in (other, shared.grpc, shared.http):
            said = one_sentence(
                "serve", "--data-dir", str(tmp_path / "data"), "--listen", address, "--http", "127.0.0.1:0"
            )
            assert said == (f"gRPC cannot listen on {address}: the port is taken, or the address is not here")
            said = one_sentence(
                "serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--http", address
            )
            assert said == f"HTTP cannot listen on {address}: Address already in use"
    assert health_of(shared.grpc) == SERVING


def test_an_address_that_is_not_here(tmp_path: Path) -> None:
    """One sentence, and nothing of gRPC's own beside it."""
    arguments = ("serve", "--insecure", "--data-dir", str(tmp_path / "data"))
    said = one_sentence(*arguments, "--listen", "192.0.2.1:5", "--http", "127.0.0.1:0")
    assert said == "gRPC cannot listen on 192.0.2.1:5: the port is taken, or the address is not here"
    said = one_sentence(*arguments, "--listen", "127.0.0.1:0", "--http", "192.0.2.1:5")
    assert said == "HTTP cannot listen on 192.0.2.1:5: Cannot assign requested address"
    said = one_sentence(*arguments, "--listen", "127.0.0.1:0", "--http", "no.such.host.invalid:5")
    assert said.startswith("HTTP cannot listen on no.such.host.invalid:5: ")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """Such as one that would be inside a file."""
    file = tmp_path / "file"
    file.write_text("")
    for directory in (file / "data", file):
        said = one_sentence("serve", "--data-dir", str(directory), "--listen", "127.0.0.1:0")
        assert said == f"data directory {directory}: cannot be written (Not a directory)"


def test_a_second_daemon_on_a_directory(shared: DaemonProcess) -> None:
    """It says who is there, and leaves that one alone."""
    said = one_sentence(
        "serve", "--data-dir", str(shared.directory), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"
    )
    assert said == (
        f"data directory {shared.directory}: another bloomgated (pid {shared.process.pid}) is running on it;"
        " stop that one first"
    )
    assert health_of(shared.grpc) == SERVING
    with shared.stubs() as (filters, admin):
        name = create(admin)
        add(filters, name, b"a")


@pytest.fixture
def stopped(start_daemon: StartDaemon) -> Path:
    """A data directory with a filter in it, of a daemon that was killed."""
    daemon = start_daemon()
    with daemon.stubs() as (filters, admin):
        create(admin, "name", error_rate=1e-9)
        admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name="name"))
        add(filters, "name", b"a")
    daemon.kill()
    return daemon.directory


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.endswith((".lock", "-shm"))
    }


@pytest.mark.parametrize("what", ["flipped", "gone", "cut"])
def test_a_damaged_mark(stopped: Path, start_daemon: StartDaemon, what: str) -> None:
    """The sentence has path, reason and hint; nothing was changed, so that what is put back is good again."""
    mark = stopped / "bloomgate.db-mark"
    good = mark.read_bytes()
    if what == "gone":
        mark.unlink()
    else:
        mark.write_bytes(good[:-1] if what == "cut" else bytes([good[0] ^ 1]) + good[1:])
    before = contents(stopped)
    said = one_sentence(
        "serve", "--data-dir", str(stopped), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"
    )
    reason = "is missing beside bloomgate.db" if what == "gone" else "the mark is damaged"
    assert said == (
        f"{mark}: {reason}; start on an empty directory and load the filters again, or restore a backup and"
        " add again what came after it (docs/OPERATIONS.md)"
    )
    assert contents(stopped) == before
    mark.write_bytes(good)
    with start_daemon().stubs() as (filters, _):
        assert check(filters, "name", b"a", b"b") == [MAYBE, DEFINITELY_NOT]


def test_a_journal_whose_end_is_missing(stopped: Path) -> None:
    """A cut write-ahead log is an ordinary end to SQLite, and not to us."""
    (stopped / "bloomgate.db-wal").write_bytes(b"")
    said = one_sentence(
        "serve", "--data-dir", str(stopped), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"
    )
    assert said.startswith(f"{stopped}/")
    assert "start on an empty directory and load the filters again" in said


# -- a journal that fails


def test_a_disk_that_takes_no_more(held: Any, start_daemon: StartDaemon) -> None:
    """Waiting and further Adds fail as unavailable, it says NOT_SERVING, lets calls under way finish, exits
    non-zero by itself, and the next start has all that was acknowledged."""
    it = held("--set", "drain=60", verb="might_contain", prelude=SMALL_FILES)
    acknowledged: list[bytes] = []
    with it.daemon.stubs() as (filters, _):

        def add_on() -> None:
            for batch in range(1000):
                keys = [b"%d-%d" % (batch, i) for i in range(500)]
                add(filters, "name", *keys)
                acknowledged.extend(keys)

        with pytest.raises(grpc.RpcError) as caught:
            add_on()
        failed = failure_of(caught.value)
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "JOURNAL_FAILED")
        assert failed.message == "the journal failed; bloomgated is restarting"
        assert next(it.watching).status == NOT_SERVING
        assert it.daemon.get("/readyz")[0] == 503
        with pytest.raises(grpc.RpcError) as caught:
            add(filters, "name", b"late")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert it.daemon.process.poll() is None
    it.release.touch()
    assert list(it.call.result(timeout=30).answers) == [DEFINITELY_NOT]
    assert it.daemon.process.wait(30) == 3
    assert "the journal failed, stopping" in it.daemon.log()
    assert "Traceback" not in it.daemon.log()
    assert len(acknowledged) > 1000
    with start_daemon().stubs() as (filters, _):
        assert set(check(filters, "name", *acknowledged)) == {MAYBE}


def test_a_journal_that_fails_during_the_last_snapshot(start_daemon: StartDaemon) -> None:
    """The stop goes on to its end, and its exit code tells; nothing is lost."""
    daemon = start_daemon(prelude=NO_SNAPSHOT_RECORDS)
    with daemon.stubs() as (filters, admin):
        for name in ("one", "two"):
            create(admin, name, error_rate=1e-9)
            add(filters, name, b"a")
    assert daemon.stop() == 3
    assert "Traceback" not in daemon.log()
    assert '"message": "stopped"' in daemon.log()
    with start_daemon().stubs() as (filters, _):
        for name in ("one", "two"):
            assert check(filters, name, b"a", b"b") == [MAYBE, DEFINITELY_NOT]


def test_a_snapshot_that_cannot_be_written_leaves_those_before_it(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """The caller hears that it failed, a metric counts it, Adds go on, and it works again once it can."""
    daemon = start_daemon()
    folder, away = daemon.directory / "snapshots", tmp_path / "away"
    with daemon.stubs() as (filters, admin):
        create(admin, "name", error_rate=1e-9)
        request = admin_pb2.SnapshotFilterRequest(name="name")
        first = admin.SnapshotFilter(request).filter
        folder.rename(away)
        folder.write_text("in the way")
        with pytest.raises(grpc.RpcError) as caught:
            admin.SnapshotFilter(request)
        failed = failure_of(caught.value)
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
        assert failed.message == "the snapshot could not be written: Not a directory"
        add(filters, "name", b"a")
        assert stats(filters, "name").snapshot_seq == first.snapshot_seq
        assert 'bloomgate_snapshot_failures_total{filter="name"} 1.0' in daemon.get("/metrics")[1]
        folder.unlink()
        away.rename(folder)
        assert admin.SnapshotFilter(request).filter.snapshot_seq > first.snapshot_seq


def test_a_process_without_files_left_is_no_proof_that_the_port_is_gone(start_daemon: StartDaemon) -> None:
    """Whoever opens connections until no file is left must not end the daemon."""
    prelude = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    daemon = start_daemon("--set", "snapshot.check_every=0.02", prelude=prelude)
    host, _, port = daemon.http.rpartition(":")
    crowd = [socket.create_connection((host, int(port))) for _ in range(100)]
    try:
        for _ in range(20):
            with pytest.raises(subprocess.TimeoutExpired):
                daemon.process.wait(0.05)
    finally:
        for each in crowd:
            each.close()
    eventually(lambda: health_of(daemon.grpc) is SERVING or health_of(daemon.grpc) == SERVING)
    assert daemon.stop() == 0


def test_a_daemon_whose_grpc_port_is_gone_ends(start_daemon: StartDaemon, release: Path) -> None:
    """A process that answers nobody must not look alive: it drains and exits with a code of its own, and what
    was acknowledged is there after a restart."""
    prelude = (
        "import os\n"
        "from bloomgated.api.server import ApiServer\n"
        "real = ApiServer.is_listening\n"
        "async def gone(self):\n"
        f"    if os.path.exists({str(release)!r}):\n"
        "        await self._server.stop(0)\n"
        "    return await real(self)\n"
        "ApiServer.is_listening = gone\n"
    )
    daemon = start_daemon("--set", "snapshot.check_every=0.05", prelude=prelude)
    with daemon.stubs() as (filters, admin):
        create(admin, "name")
        add(filters, "name", b"mango")
    release.touch()
    assert daemon.process.wait(30) == 5
    assert "the gRPC port does not take connections any more" in daemon.log()
    with start_daemon().stubs() as (filters, _):
        assert check(filters, "name", b"mango") == [MAYBE]


# -- the other commands


def test_healthcheck_tells_by_its_exit_code(shared: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 while it serves, also where the environment names a proxy; 1 where nobody answers."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    ended = refused("healthcheck", "--http", shared.http)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", f"{shared.http}: ok\n")
    port = shared.http.rpartition(":")[2]
    assert refused("healthcheck", "--http", f"0.0.0.0:{port}").returncode == 0
    nobody = f"127.0.0.1:{free_port()}"
    ended = refused("healthcheck", "--http", nobody)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"{nobody}: no answer (Connection refused)\n"


def test_a_frozen_daemon_is_not_healthy(start_daemon: StartDaemon) -> None:
    """The check has a deadline of its own."""
    daemon = start_daemon()
    daemon.process.send_signal(signal.SIGSTOP)
    ended = refused("healthcheck", "--http", daemon.http, "--timeout", "0.3")
    assert (ended.returncode, ended.stderr) == (1, f"{daemon.http}: no answer in time\n")
    daemon.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["-h"], ["serve", "--help"], ["healthcheck", "--help"], ["config", "--help"], ["--version"]],
)
def test_help_is_help(arguments: list[str]) -> None:
    """On stdout, exit 0."""
    ended = refused(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["srve"],
        ["serve", "--nonsense"],
        ["serve", "extra"],
        ["serve", "--set", "journal.retention"],
        ["healthcheck", "--timeout", "soon"],
    ],
)
def test_a_misused_command_says_how_it_is_used(arguments: list[str]) -> None:
    """Exit 2, no traceback."""
    ended = refused(*arguments)
    assert ended.returncode == 2
    assert "Usage: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_two_lives_on_one_directory_number_on(start_daemon: StartDaemon) -> None:
    """A durable seq is never given again: the second life begins where the first ended."""
    daemon = start_daemon()
    with daemon.stubs() as (filters, admin):
        create(admin, "name")
        seq = add(filters, "name", b"a").seq
    daemon.kill()
    daemon = start_daemon()
    with daemon.stubs() as (filters, _):
        assert add(filters, "name", b"b").seq > seq
    assert daemon.stop() == 0
    with closing(sqlite3.connect(daemon.directory / "bloomgate.db")) as connection:
        seqs = [seq for (seq,) in connection.execute("SELECT seq FROM journal ORDER BY seq")]
    assert seqs == list(range(1, len(seqs) + 1))
