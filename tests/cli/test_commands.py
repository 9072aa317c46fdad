"""The ``bloomgate`` command against a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bloomgate import Client
from support.daemon import DaemonProcess

COMMAND = [sys.executable, "-c", "from bloomgate.cli import main; main()"]
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


def bloomgate(
    *arguments: str | bytes, stdin: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command, with nothing of the caller's environment that could change it."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("BLOOMGATE_TARGET", "NO_COLOR")}
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
        env={**inherited, **environment},
    )


@pytest.fixture(scope="module")
def one_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests of the module: starting it is what takes time."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("cli") / "data")
    yield daemon
    daemon.kill()


@pytest.fixture
def daemon(one_daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """The daemon, without filters before and after."""
    yield one_daemon
    with Client(one_daemon.grpc) as client:
        for each in client.list_filters():
            client.drop_filter(each.name)


@pytest.fixture
def run(daemon: DaemonProcess) -> Run:
    """Run a subcommand against the daemon of the test."""

    def call(*arguments: str | bytes, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return bloomgate(*arguments, stdin=stdin, BLOOMGATE_TARGET=daemon.grpc)

    return call


def test_a_filter_is_created_filled_asked_and_dropped(run: Run) -> None:
    """The whole day of a filter: data on stdout, text for people on stderr."""
    made = run("create", "coupons", "--capacity", "1000", "--key-format", "coupon code")
    assert (made.returncode, made.stdout) == (0, b"")
    assert b"coupons created" in made.stderr
    again = run("create", "coupons", "--capacity", "1000", "--key-format", "coupon code")
    assert again.returncode == 0
    assert b"exists already" in again.stderr

    added = run("add", "coupons", "one", "two", "one")
    assert added.stdout == b"new\tone\nnew\ttwo\nmaybe already there\tone\n"
    asked = run("check", "coupons", "one", "three")
    assert (asked.returncode, asked.stdout) == (0, b"maybe\tone\nno\tthree\n")

    listed = run("list", "--json")
    assert [each["name"] for each in json.loads(listed.stdout)] == ["coupons"]
    assert b"coupons" in run("list").stdout
    shown = json.loads(run("stats", "coupons", "--json").stdout)
    assert shown["approximate_count"] == 2
    assert shown["added_count"] == 3
    assert shown["state"] == "ready"
    assert shown["on_full"] == "grow"
    assert "seed" not in shown
    assert b"2 of 1,000" in run("stats", "coupons").stdout

    written = run("snapshot", "coupons")
    assert written.returncode == 0
    assert b"written up to seq" in written.stderr
    assert json.loads(run("stats", "coupons", "--json").stdout)["snapshot_time"]

    kept = run("drop", "coupons", stdin=b"n\n")
    assert kept.returncode != 0
    assert run("drop", "coupons", "--yes").returncode == 0
    gone = run("stats", "coupons")
    assert gone.returncode == 1
    assert gone.stderr == b"bloomgate: filter 'coupons' does not exist\n"


def test_check_exits_0_for_any_maybe_1_for_all_absent_2_without_an_answer(run: Run) -> None:
    """A script can skip the lookup on exit code 1, and on nothing else."""
    run("create", "f", "--capacity", "100")
    run("add", "f", "there")
    assert run("check", "f", "there", "absent").returncode == 0
    assert run("check", "f", "absent", "absent too").returncode == 1
    quiet = run("check", "-q", "f", "there")
    assert (quiet.returncode, quiet.stdout) == (0, b"")
    assert run("check", "unknown-filter", "absent").returncode == 2
    assert run("check", "f", "").returncode == 2
    assert run("check", "../f", "absent").returncode == 2
    nobody = bloomgate("check", "f", "absent", "--target", "127.0.0.1:1")
    assert nobody.returncode == 2
    assert nobody.stderr.count(b"\n") == 1
    assert run("check", "f").returncode == 2  # neither keys nor a file
    assert run("check", "f", "--from", "no/such/file").returncode == 2


def test_lines_keep_every_byte_but_the_line_end(run: Run, tmp_path: Path) -> None:
    """``\\n`` ends a line, one ``\\r`` before it is dropped, empty lines are skipped and counted."""
    run("create", "f", "--capacity", "1000")
    keys = [b"plain", b"carriage", b"two\r", b" spaces ", b"\x00zero", b"\xff\xfe", b"tab\there", b"last"]
    file = tmp_path / "keys"
    file.write_bytes(b"plain\ncarriage\r\ntwo\r\r\n\n\r\n spaces \n\x00zero\n\xff\xfe\ntab\there\nlast")
    loaded = run("load", "f", str(file))
    assert loaded.returncode == 0
    assert b"8 keys added" in loaded.stderr
    assert b"8 of them new" in loaded.stderr
    assert b"2 empty lines skipped" in loaded.stderr
    assert loaded.stdout == b""
    asked = run("check", "f", "--from", "-", stdin=b"\r\n".join([*keys, b"", b"two", b"absent"]) + b"\n")
    assert asked.stdout == b"".join(b"maybe\t" + key + b"\n" for key in keys) + b"no\ttwo\nno\tabsent\n"
    assert b"1 empty lines skipped" in asked.stderr
    argument = run("check", "f", b"\xff\xfe")
    assert argument.stdout == b"maybe\t\xff\xfe\n"


def test_load_says_what_is_in_when_it_fails_half_way(run: Run) -> None:
    """It resumes nothing silently: how many were added and how many were new, also on failure."""
    run("create", "f", "--capacity", "1000")
    stdin = b"".join(b"key-%d\n" % i for i in range(20)) + b"x" * 70_000 + b"\n"
    failed = run("load", "f", "--batch", "10", stdin=stdin)
    assert failed.returncode == 1
    assert b"20 keys added" in failed.stderr
    assert b"bytes_per_key" in failed.stderr or b"limited to" in failed.stderr
    assert b"Traceback" not in failed.stderr
    again = run("load", "f", "--batch", "10", stdin=b"".join(b"key-%d\n" % i for i in range(30)))
    assert b"30 keys added" in again.stderr
    assert b"10 of them new" in again.stderr


def test_the_target_may_stand_before_or_after_the_subcommand(daemon: DaemonProcess) -> None:
    """The nearest one counts, and any of them before the environment's."""
    nobody = "127.0.0.1:1"
    assert bloomgate("--target", daemon.grpc, "list").returncode == 0
    assert bloomgate("list", "--target", daemon.grpc).returncode == 0
    assert bloomgate("--target", nobody, "list", "--target", daemon.grpc).returncode == 0
    assert bloomgate("--target", daemon.grpc, "list", "--target", nobody).returncode == 1
    assert bloomgate("--target", daemon.grpc, "list", BLOOMGATE_TARGET=nobody).returncode == 0
    assert bloomgate("list", BLOOMGATE_TARGET=daemon.grpc).returncode == 0
    bad = bloomgate("list", "--target", "nonsense")
    assert bad.returncode == 1
    assert bad.stderr.startswith(b"bloomgate: target")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "f", "--capacity", "0"], b"capacity"),
        (["create", "f", "--capacity", "10", "--error-rate", "1.5"], b"error_rate"),
        (["create", "f", "--capacity", "10", "--error-rate", "nan"], b"error_rate"),
        (["create", "../f", "--capacity", "10"], b"name"),
        (["add", "nothing", "key"], b"filter 'nothing' does not exist"),
        (["load", "nothing", "no/such/file"], b"no/such/file: No such file or directory"),
        (["snapshot", "nothing"], b"does not exist"),
        (["drop", "nothing", "--yes"], b"does not exist"),
        (["size", "--capacity", "0"], b"capacity must be a whole number"),
        (["size", "--capacity", "10", "--error-rate", "1e-20"], b"error_rate must be"),
    ],
)
def test_a_users_error_is_one_sentence(run: Run, arguments: list[str], message: bytes) -> None:
    """Never a traceback, and never exit code 0."""
    failed = run(*arguments)
    assert failed.returncode == 1
    assert message in failed.stderr
    assert failed.stderr.count(b"\n") == 1
    assert failed.stdout == b""


def test_size_plans_without_a_daemon() -> None:
    """The figures of the formula: a million keys at 1 % are 9,585,059 bits, 7 hashes, 1.2 MB."""
    planned = bloomgate("size", "--capacity", "1000000")
    assert planned.returncode == 0
    assert planned.stdout == b"9,585,059 bits, 7 hashes, 1.2 MB\n"
    assert b"1 %" in planned.stderr
    as_json = json.loads(bloomgate("size", "--capacity", "1000000", "--json").stdout)
    assert as_json == {
        "capacity": 1_000_000, "error_rate": 0.01, "bits": 9_585_059, "hashes": 7, "bytes": 1_198_133,
    }  # fmt: skip


def test_no_colour_where_none_is_wanted(run: Run, daemon: DaemonProcess) -> None:
    """NO_COLOR is honoured even where colour is forced; no pipe ever gets an escape code."""
    run("create", "f", "--capacity", "100")
    assert b"\x1b" not in run("stats", "f").stdout
    plain = bloomgate("stats", "f", BLOOMGATE_TARGET=daemon.grpc, NO_COLOR="1", FORCE_COLOR="1").stdout
    assert b"\x1b[3" not in plain


def test_a_command_starts_without_what_it_does_not_use() -> None:
    """Help needs neither numpy nor gRPC nor rich, and planning needs no gRPC: that is what start-up costs."""
    for arguments, unused in (
        (["--help"], {"numpy", "grpc", "rich", "prometheus_client"}),
        (["size", "--capacity", "5", "--json"], {"grpc", "prometheus_client"}),
    ):
        code = (
            "import sys, bloomgate.cli\n"
            f"sys.argv[1:] = {arguments!r}\n"
            "try: bloomgate.cli.main()\n"
            "except SystemExit: pass\n"
            f"print('LOADED', sorted({unused!r} & sys.modules.keys()))"
        )
        shown = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
        )
        assert shown.stdout.splitlines()[-1] == "LOADED []"


def test_a_closed_pipe_is_no_traceback(run: Run, daemon: DaemonProcess) -> None:
    """``bloomgate check | head -1`` ends quietly."""
    run("create", "f", "--capacity", "100")
    shell = f"yes key | head -200000 | {sys.executable} -c '{COMMAND[2]}' check f --from - | head -1"
    ended = subprocess.run(
        ["bash", "-c", shell],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "BLOOMGATE_TARGET": daemon.grpc},
    )
    assert ended.stdout == b"no\tkey\n"
    assert b"Traceback" not in ended.stderr
