"""A little of `make fuzz`, the same for every run; and what it found, each as a test of its own."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bloomgate.v1 import admin_pb2
from bloomgated import config
from bloomgated.access import Access
from bloomgated.errors import ConfigError, JournalDamaged
from bloomgated.storage.mark import IN_USE, MarkFile, read_mark
from support.daemon import DaemonProcess
from support.tally import record, rounds

from .mutating import mutated
from .port import PREFACE, call_frames
from .run import TARGETS, shards


def fuzz(name: str, short: int, long: int) -> int:
    """Try the seeds, and inputs made from them; returns how many."""
    target, rng = TARGETS[name], random.Random(f"smoke:{name}")
    seeds, inputs = target.seeds(), rounds(short, long)
    with target.open() as run:
        for seed in seeds:
            run(seed)
        for number in range(inputs):
            data = mutated(rng, seeds, target.tokens, target.mend)
            try:
                run(data)
            except Exception as error:
                error.add_note(f"input {number}: {data[:2000]!r}")
                raise
    return len(seeds) + inputs


def test_an_image_loads_or_is_damaged() -> None:
    """Whatever its bytes: no other exception, no large allocation; one that loads is written the same."""
    tried = fuzz("image loader", 10_000, 100_000)
    record("fuzz: image loader", tried, "zero crashes")


def test_a_journal_payload_is_a_record_or_damaged() -> None:
    """Of every kind; a record is written again as the same bytes."""
    tried = fuzz("journal payloads", 15_000, 100_000)
    record("fuzz: journal payload decoder", tried, "zero crashes")


def test_a_mark_is_read_or_damaged() -> None:
    """With its checksum right or wrong; a mark is written again as the same bytes."""
    tried = fuzz("mark file", 5_000, 50_000)
    record("fuzz: mark file", tried, "zero crashes")


def test_settings_load_or_are_one_sentence() -> None:
    """From a file, the environment and flags; what loads is printed, and read again the same."""
    tried = fuzz("settings", 2_000, 30_000)
    record("fuzz: settings", tried, "a value or one sentence")


def test_an_auth_file_loads_or_is_one_sentence() -> None:
    """And whoever comes then is known or refused."""
    tried = fuzz("auth file", 2_000, 30_000)
    record("fuzz: auth file", tried, "a value or one sentence")


def test_request_bytes_end_in_an_answer_or_a_refusal() -> None:
    """Of every method, through the real handlers: never INTERNAL, and the known keys stay maybe."""
    tried = fuzz("request bytes", 4_000, 60_000)
    record("fuzz: raw request bytes of every method", tried, "zero crashes, no changed answer")


def test_a_daemon_outlives_hostile_bytes_on_its_ports() -> None:
    """Frames, HTTP and messages: it stays ready, keeps its keys and stops with 0."""
    tried = fuzz("the daemon's ports", 1_500, 20_000)
    record("fuzz: bytes on the daemon's ports", tried, "it stays up, ready and unchanged")


def test_all_inputs_come_from_the_seed() -> None:
    """So that a finding can be had again; and they are a million at least."""
    target = TARGETS["image loader"]
    made = [
        [mutated(rng, target.seeds(), target.tokens, target.mend) for _ in range(200)]
        for rng in (random.Random("1"), random.Random("1"), random.Random("2"))
    ]
    assert made[0] == made[1] != made[2]
    assert sum(inputs for _, _, inputs in shards(list(TARGETS), "1", 1.0)) >= 1_000_000


# -- what it found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One that outlives all of these."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("hostile") / "data")
    yield daemon
    daemon.kill()


def send(address: str, data: bytes) -> bytes:
    """Send bytes, and read until the other side has had enough or says no more."""
    host, _, port = address.rpartition(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=0.4) as connection:
        connection.sendall(data)
        try:
            while part := connection.recv(1 << 16):
                said += part
        except TimeoutError:
            pass
    return said


@pytest.mark.parametrize("path", [b"/bloomgate.v1.FilterService/\xd7", b"\xff", b"/\xc3\x28/a"])
def test_a_path_that_is_no_utf8_ends_one_call_and_not_the_server(daemon: DaemonProcess, path: bytes) -> None:
    """grpcio from 1.84.0 on shuts the server down for it, while the process lives and calls itself ready."""
    stand_in = "/" + "x" * (len(path) - 1)
    frames = call_frames(stand_in, b"").replace(stand_in.encode(), path)
    assert path in frames
    send(daemon.grpc, frames)
    with daemon.stubs() as (_, admin):
        admin.ListFilters(admin_pb2.ListFiltersRequest(), timeout=10)


def test_a_request_that_is_no_http_is_not_logged(daemon: DaemonProcess) -> None:
    """aiohttp would log what it could not read, with its headers: perhaps a token with a typing error."""
    before = len(daemon.log())
    for request in (
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer bgt_secret\xff\x00\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer bgt_secret\nX\r\n\r\n",
        b"GET /bgt_secret HTTP/1.\x00\r\n\r\n",
        b"bgt_secret\r\n\r\n",
    ):
        assert b" 400 " in send(daemon.http, request)
    assert daemon.log()[before:] == ""


def test_metadata_that_is_no_utf8_is_not_logged(daemon: DaemonProcess) -> None:
    """gRPC would log its bytes: perhaps a token with a typing error."""
    frames = call_frames("/bloomgate.v1.AdminService/ListFilters", b"")
    told = b"Bearer x"
    assert told in frames
    send(daemon.grpc, frames.replace(told, b"bgt_\xff\xfe\xfdx"))
    assert "bgt_" not in daemon.log()


def test_half_a_call_holds_up_nothing(daemon: DaemonProcess) -> None:
    """Connections that stop in the middle of a frame, beside one that is served."""
    whole = call_frames("/bloomgate.v1.AdminService/ListFilters", b"")
    host, _, port = daemon.grpc.rpartition(":")
    held = []
    try:
        for cut in (0, 10, len(PREFACE), len(PREFACE) + 5, len(whole) // 2, len(whole) - 1):
            held.append(socket.create_connection((host, int(port)), timeout=5))
            held[-1].sendall(whole[:cut])
        assert b"grpc-status" in send(daemon.grpc, whole)
    finally:
        for connection in held:
            connection.close()


def test_a_mark_of_a_state_that_there_is_not_is_damaged(tmp_path: Path) -> None:
    """Though its checksum is right: nobody who knows what it means wrote it."""
    path = tmp_path / "mark"
    for state in (0, 3, 255):
        file = MarkFile(path, bytes(16))
        file.write(state, 5, 6)
        file.close()
        with pytest.raises(JournalDamaged, match="not one that bloomgated writes"):
            read_mark(path)
    file = MarkFile(path, bytes(16))
    file.write(IN_USE, 5, 6)
    file.close()
    assert read_mark(path).seq == 5


@pytest.mark.parametrize(
    "text",
    ["a\nb", "x" * 5000, "\x1b[2J"],
    ids=["lines", "length", "escapes"],
)
def test_what_stands_in_an_auth_file_is_not_repeated_at_length(tmp_path: Path, text: str) -> None:
    """An unknown key or role is named on one line, without what a terminal would obey."""
    file = tmp_path / "auth.toml"
    quoted = text.encode("unicode_escape").decode().replace("\\x", "\\u00")
    for content in (f'"{quoted}" = 1', f'[[certificate]]\nname = "a"\nroles = ["{quoted}"]\nfilters = ["*"]'):
        file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            Access(file)
        said = str(caught.value).removeprefix(str(file))
        assert said.isprintable()
        assert len(said) < 300


def test_a_number_that_no_utf8_spells_is_one_sentence() -> None:
    """The environment holds any bytes; msgspec raises another error than its own for these."""
    with pytest.raises(ConfigError, match="environment: drain: must be UTF-8"):
        config.load(None, {"BLOOMGATED__DRAIN": "1\udc80"}, {})
