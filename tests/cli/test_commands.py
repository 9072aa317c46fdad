"""The ``bloomgate`` command against a real daemon."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bloomgate import BloomFilter, Client
from bloomgate.cli.commands import BATCH
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
    planned = bloomgate("size", "--capacity", "1000000", "--on-full", "reject")
    assert planned.returncode == 0
    assert planned.stdout == b"9,585,059 bits, 7 hashes, 1.2 MB\n"
    assert b"1 %" in planned.stderr
    as_json = json.loads(bloomgate("size", "--capacity", "1000000", "--json").stdout)
    first = BloomFilter(1_000_000, 0.01)
    assert as_json == {
        "capacity": 1_000_000, "error_rate": 0.01, "on_full": "grow",
        "bits": first.bits, "hashes": 7, "bytes": first.memory_bytes,
    }  # fmt: skip


def test_check_exits_2_whatever_keeps_it_from_an_answer(run: Run, daemon: DaemonProcess) -> None:
    """A signal, a bug of ours, no keys at all: none of them may read as "all absent"."""
    run("create", "f", "--capacity", "100")
    empty = run("check", "f", "--from", "-", stdin=b"")
    assert (empty.returncode, empty.stdout) == (2, b"")
    assert empty.stderr == b"bloomgate: no keys were asked\n"
    assert run("check", "f", "--from", "-", stdin=b"\n\r\n").returncode == 2
    bug = "import bloomgate.client as c; c.Client.filter = lambda *_: 1 / 0; " + COMMAND[2]
    broken = subprocess.run(
        [sys.executable, "-c", bug, "check", "f", "key", "--target", daemon.grpc],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert broken.returncode == 2
    assert b"ZeroDivisionError" in broken.stderr
    with subprocess.Popen(
        [*COMMAND, "check", "f", "--from", "-", "--target", daemon.grpc],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as waiting:
        assert waiting.stdin is not None
        assert waiting.stdout is not None
        # A whole batch, so that an answer shows that it has begun; then it waits for more.
        waiting.stdin.write(b"absent\n" * BATCH)
        waiting.stdin.flush()
        assert waiting.stdout.readline() == b"no\tabsent\n"
        waiting.send_signal(signal.SIGINT)
        out, said = waiting.communicate(timeout=30)
        assert said.endswith(b"bloomgate: interrupted\n"), (waiting.returncode, out[-50:], said)
        assert waiting.returncode == 2


def test_text_is_shown_as_it_is(run: Run) -> None:
    """What looks like markup is none, and no name is cut where no terminal reads."""
    name = "a-name-that-is-much-longer-than-any-column-of-a-table-could-be-" + "x" * 60
    assert (
        run("create", name, "--capacity", "100", "--key-format", "[/red] odd [bold]x :smile:").returncode == 0
    )
    shown = run("stats", name)
    assert shown.returncode == 0
    assert b"[/red] odd [bold]x :smile:" in shown.stdout
    assert name.encode() in shown.stdout
    assert name.encode() in run("list").stdout


def test_no_colour_where_none_is_wanted(run: Run) -> None:
    """A pipe gets no escape code."""
    run("create", "f", "--capacity", "100")
    assert b"\x1b" not in run("stats", "f").stdout
    assert b"\x1b" not in run("list").stdout


def test_a_terminal_gets_a_progress_bar_and_no_color_is_honoured(run: Run, daemon: DaemonProcess) -> None:
    """``load`` shows keys/s as it goes; with NO_COLOR there is a bar and no colour."""
    run("create", "f", "--capacity", "1000")
    for no_color in ("", "1"):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [*COMMAND, "load", "f", "-", "--target", daemon.grpc],
            stdin=subprocess.PIPE,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "NO_COLOR": no_color},
        ) as loading:
            assert loading.stdin is not None
            loading.stdin.write(b"one\ntwo\n")
            loading.stdin.close()
            os.close(theirs)
            seen = b""
            with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
                while part := os.read(ours, 65536):
                    seen += part
            os.close(ours)
        assert loading.returncode == 0
        assert b"keys/s" in seen
        assert b"2 keys added" in seen
        assert bool(re.search(rb"\x1b\[(1;)?3[0-9]", seen)) is not bool(no_color)


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
