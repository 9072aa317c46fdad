"""TLS and mutual TLS on both ports, and certificates that change while calls go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from bloomgate import Client, ClientOptions, NotAllowed, Tls, Unavailable
from bloomgate.errors import NotAuthenticated
from bloomgated import access
from bloomgated.access import Role
from bloomgated.api import credentials
from bloomgated.tls import TlsFiles
from support.certificates import Authority, Pair
from support.daemon import DaemonProcess, refused
from support.tally import record, rounds

from .calls import eventually

OPTIONS = ClientOptions(on_error="raise", check_timeout=10)
# Of those who are not let in: reads are tried again as long as there is time.
REFUSED = ClientOptions(on_error="raise", admin_timeout=1)
# What the standard library says where the other side ends a connection, by TLS version and moment.
ENDED = r"(?i)unknown ca|reset|without response|eof|alert|broken pipe"


class Secrets:
    """A folder with a daemon's files, and the authority that signed its certificate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.authority = Authority(folder / "authority")
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.client_ca = folder / "client-ca.pem"
        self.put(self.authority.server())

    def put(self, pair: Pair) -> None:
        """Each file aside, then renamed over the old one: there is a moment when they do not fit."""
        for new, old in ((pair.cert, self.cert), (pair.key, self.key)):
            aside = old.with_suffix(".new")
            shutil.copyfile(new, aside)
            aside.rename(old)

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--set", f"tls.cert={self.cert}", "--set", f"tls.key={self.key}")

    @property
    def mutual(self) -> tuple[str, ...]:
        return (*self.flags, "--set", f"tls.client_ca={self.client_ca}")


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path / "secrets")


def client(
    daemon: DaemonProcess,
    secrets: Secrets,
    pair: Pair | None = None,
    token: str | None = None,
    options: ClientOptions = OPTIONS,
) -> Client:
    tls = Tls(ca=str(secrets.authority.cert))
    if pair is not None:
        tls = Tls(ca=str(secrets.authority.cert), cert=str(pair.cert), key=str(pair.key))
    return Client(daemon.grpc, tls=tls, token=token, options=options)


def served(address: str) -> bytes:
    """The certificate that a new connection gets to see."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain) as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def der(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.cert.read_text())


# -- TLS


def test_both_ports_speak_tls_and_nothing_else(secrets: Secrets, start_daemon: Any) -> None:
    """Who trusts the authority is answered; who trusts another one, or speaks plainly, is not."""
    daemon = start_daemon(*secrets.flags)
    with client(daemon, secrets) as known:
        known.create_filter("fruit", 100)
        assert known.filter("fruit").add("mango")
    assert daemon.get("/readyz", context=secrets.authority.context()) == (200, "ok\n")
    with Client(daemon.grpc, options=REFUSED) as plain, pytest.raises(Unavailable):
        plain.list_filters()
    with pytest.raises(OSError, match=ENDED):
        daemon.get("/readyz")
    stranger = Authority(secrets.cert.parent / "stranger")
    tls = Tls(ca=str(stranger.cert))
    with Client(daemon.grpc, tls=tls, options=REFUSED) as other, pytest.raises(Unavailable):
        other.list_filters()
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        daemon.get("/readyz", context=stranger.context())


@pytest.mark.parametrize("version", ["TLSv1", "TLSv1_1"])
def test_old_versions_are_refused(secrets: Secrets, start_daemon: Any, version: str) -> None:
    """Nothing below TLS 1.2, on either port."""
    daemon = start_daemon(*secrets.flags)
    for address in (daemon.grpc, daemon.http):
        host, _, port = address.rpartition(":")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="deprecated"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        with socket.create_connection((host, int(port)), timeout=10) as plain, pytest.raises(ssl.SSLError):
            context.wrap_socket(plain)


def test_healthcheck_needs_no_secret(secrets: Secrets, start_daemon: Any) -> None:
    """With TLS, mutual TLS and an auth file: it trusts the daemon's own certificate, by whatever name."""
    shutil.copyfile(secrets.authority.cert, secrets.client_ca)
    file = secrets.cert.parent / "auth.toml"
    file.write_text(access.new_token("a", [Role.READ], ["*"])[1])
    flags = (*secrets.mutual, "--set", f"auth.file={file}")
    daemon = start_daemon(*flags)
    ended = refused("healthcheck", "--http", daemon.http, *flags)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", f"{daemon.http}: ok\n")
    # Somebody else in its place is not it.
    secrets.put(secrets.authority.server("other"))
    ended = refused("healthcheck", "--http", daemon.http, *flags, "--timeout", "0.5")
    if ended.returncode == 0:
        # The daemon has read the new files already.
        assert served(daemon.http) == ssl.PEM_cert_to_DER_cert(secrets.cert.read_text())
    else:
        assert ended.stderr.startswith(f"{daemon.http}: no answer (")


@pytest.mark.parametrize("wrong", ["key", "gone", "empty", "encrypted", "ca", "half"])
def test_files_that_do_not_fit_refuse_the_start(secrets: Secrets, tmp_path: Path, wrong: str) -> None:
    """One sentence with the path and what is wrong, exit 1; nobody is asked for a password."""
    flags, named = secrets.flags, secrets.cert
    if wrong == "key":
        shutil.copyfile(secrets.authority.sign("other").key, secrets.key)
    elif wrong == "gone":
        secrets.key.unlink()
        named = secrets.key
    elif wrong == "empty":
        secrets.cert.write_text("")
    elif wrong == "encrypted":
        command = [
            "openssl",
            "pkey",
            "-aes128",
            "-passout",
            "pass:x",
            "-in",
            secrets.key,
            "-out",
            tmp_path / "e",
        ]
        subprocess.run(command, check=True)
        shutil.copyfile(tmp_path / "e", secrets.key)
    elif wrong == "ca":
        secrets.client_ca.write_text("no PEM\n")
        flags, named = secrets.mutual, secrets.client_ca
    ended = refused("serve", "--data-dir", str(tmp_path / "data"), *(flags[:2] if wrong == "half" else flags))
    assert (ended.returncode, ended.stdout) == (1, "")
    start = "bloomgated: tls.key: is missing" if wrong == "half" else f"bloomgated: {named}: "
    assert ended.stderr.startswith(start)
    assert ended.stderr.count("\n") == 1


# -- mutual TLS


def test_mutual_tls_lets_in_who_has_a_certificate(secrets: Secrets, start_daemon: Any) -> None:
    """Of the roots that were named; without an auth file such a caller may do everything."""
    shutil.copyfile(secrets.authority.cert, secrets.client_ca)
    daemon = start_daemon(*secrets.mutual)
    mine = secrets.authority.sign("shop.internal")
    with client(daemon, secrets, mine) as known:
        known.create_filter("fruit", 100)
    other = Authority(secrets.cert.parent / "stranger")
    for pair in (None, other.sign("shop.internal")):
        with client(daemon, secrets, pair, options=REFUSED) as stranger, pytest.raises(Unavailable):
            stranger.list_filters()
    # HTTP demands none for health, and one for metrics.
    bare = secrets.authority.context()
    assert daemon.get("/livez", context=bare)[0] == 200
    assert daemon.get("/metrics", context=bare)[0] == 401
    assert daemon.get("/metrics", context=mine.context(secrets.authority.cert))[0] == 200
    with pytest.raises(OSError, match=ENDED):
        daemon.get("/metrics", context=other.sign("shop").context(secrets.authority.cert))


def test_certificate_names_carry_roles(secrets: Secrets, start_daemon: Any) -> None:
    """The common name and the alternative names; a token counts alone where one is sent."""
    shutil.copyfile(secrets.authority.cert, secrets.client_ca)
    token, entry = access.new_token("writer", [Role.WRITE], ["*"])
    file = secrets.cert.parent / "auth.toml"
    file.write_text(
        f"{entry}\n"
        '[[certificate]]\nname = "shop.internal"\nroles = ["read"]\nfilters = ["*"]\n\n'
        '[[certificate]]\nname = "operator"\nroles = ["admin"]\nfilters = ["fr*"]\n'
    )
    daemon = start_daemon(*secrets.mutual, "--set", f"auth.file={file}")
    operator = secrets.authority.sign("operator")
    with client(daemon, secrets, operator) as known:
        known.create_filter("fruit", 100)
        with pytest.raises(NotAllowed):
            known.create_filter("coupons", 100)
    shop = secrets.authority.sign("x", "DNS:shop.internal")
    with client(daemon, secrets, shop) as known:
        assert not known.filter("fruit").might_contain("mango")
        with pytest.raises(NotAllowed):
            known.filter("fruit").add("mango")
    with client(daemon, secrets, shop, token=token) as known:
        assert known.filter("fruit").add("mango")
        with pytest.raises(NotAllowed):
            known.filter("fruit").might_contain("mango")
    with client(daemon, secrets, shop, token=token[:-1] + "!") as known, pytest.raises(NotAuthenticated):
        known.list_filters()
    nobody = secrets.authority.sign("nobody")
    with client(daemon, secrets, nobody) as known, pytest.raises(NotAllowed, match="no entry names"):
        known.list_filters()
    assert daemon.get("/metrics", context=shop.context(secrets.authority.cert))[0] == 200
    for pair in (operator, nobody):
        assert daemon.get("/metrics", context=pair.context(secrets.authority.cert))[0] == 401


def test_metrics_need_a_token_that_reads_all(secrets: Secrets, start_daemon: Any) -> None:
    """A token for some filters, or for other things, is not enough."""
    file = secrets.cert.parent / "auth.toml"
    tokens = {}
    for name, role, glob in (("all", Role.READ, "*"), ("some", Role.READ, "f*"), ("write", Role.WRITE, "*")):
        tokens[name], entry = access.new_token(name, [role], [glob])
        with file.open("a") as out:
            out.write(entry)
    daemon = start_daemon(*secrets.flags, "--set", f"auth.file={file}")
    context = secrets.authority.context()
    for name, status in (("all", 200), ("some", 401), ("write", 401)):
        assert daemon.get("/metrics", context=context, token=tokens[name])[0] == status
    assert daemon.get("/metrics", context=context)[0] == 401
    assert daemon.get("/readyz", context=context)[0] == 200


def test_the_command_shows_a_certificate_and_a_token(secrets: Secrets, start_daemon: Any) -> None:
    """By options before the subcommand, or by the environment; without them it is not let in."""
    shutil.copyfile(secrets.authority.cert, secrets.client_ca)
    token, entry = access.new_token("loader", [Role.ADMIN], ["*"])
    file = secrets.cert.parent / "auth.toml"
    file.write_text(entry)
    token_file = secrets.cert.parent / "loader.token"
    token_file.write_text(f"{token}\n")
    daemon = start_daemon(*secrets.mutual, "--set", f"auth.file={file}")
    mine = secrets.authority.sign("loader")
    shown = {"CA": secrets.authority.cert, "CERT": mine.cert, "KEY": mine.key, "TOKEN_FILE": token_file}
    options = [
        word for name, path in shown.items() for word in (f"--{name.lower().replace('_', '-')}", str(path))
    ]
    environment = {**os.environ, **{f"BLOOMGATE_{name}": str(path) for name, path in shown.items()}}

    def bloomgate(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from bloomgate.cli import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)

    target = ("--target", daemon.grpc)
    made = bloomgate(*options, "create", "fruit", "--capacity", "10", *target)
    assert made.returncode == 0, made.stderr
    listed = bloomgate("list", "--json", *target, env=environment)
    assert [each["name"] for each in json.loads(listed.stdout)] == ["fruit"]
    for missing, says in (("TOKEN_FILE", "no entry names"), ("CERT", "tls must be"), ("CA", "no answer")):
        env = {name: value for name, value in environment.items() if name != f"BLOOMGATE_{missing}"}
        refusal = bloomgate("list", *target, env=env)
        assert refusal.returncode == 1
        assert says in refusal.stderr, refusal.stderr
        assert token not in refusal.stderr


# -- rotation


def test_grpc_is_given_a_certificate_once_and_only_after_a_pause(
    secrets: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC frees the one before at once, perhaps under a handshake; so it must not be given it each time."""
    fetchers: list[Callable[[], object]] = []
    pauses: list[float] = []

    def capture(_: object, fetcher: Callable[[], object], __: bool) -> None:
        fetchers.append(fetcher)

    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", capture)
    monkeypatch.setattr(credentials.time, "sleep", pauses.append)
    files = TlsFiles(secrets.cert, secrets.key, None)
    credentials.server_credentials(files)
    (newest,) = fetchers
    assert newest() is None
    secrets.put(secrets.authority.server("next"))
    files.read()
    assert newest() is not None
    assert pauses == [credentials.SETTLE]
    assert newest() is None


def rotated(daemon: DaemonProcess, secrets: Secrets, pair: Pair) -> None:
    """Put a new pair in place, and return once new connections of both ports see it."""
    secrets.put(pair)
    daemon.process.send_signal(signal.SIGHUP)
    for address in (daemon.grpc, daemon.http):
        eventually(lambda address=address: served(address) == der(pair))


def under_load(work: list[Callable[[], object]], meanwhile: Callable[[], None]) -> int:
    """Do each work over and over in a thread of its own while ``meanwhile`` runs; how often in all."""
    ended, times = threading.Event(), []

    def repeat(each: Callable[[], object]) -> None:
        while not ended.is_set():
            each()
            times.append(1)

    with ThreadPoolExecutor(len(work)) as threads:
        running = [threads.submit(repeat, each) for each in work]
        try:
            meanwhile()
        finally:
            ended.set()
        for each in running:
            each.result()
    return len(times)


def test_certificates_are_rotated_under_load_without_a_failed_call(
    secrets: Secrets, start_daemon: Any
) -> None:
    """Calls on open connections and on new ones, scrapes over HTTPS, all the while; each new certificate is
    seen, and so is one that a later authority signed once callers trust it."""
    turns = rounds(6, 100)
    daemon = start_daemon(*secrets.flags)
    steady = client(daemon, secrets)
    steady.create_filter("fruit", 1000)
    fruit = steady.filter("fruit")

    def on_new_connection() -> None:
        with client(daemon, secrets) as fresh:
            assert fresh.filter("fruit").might_contain_many(["papaya"]) == [False]

    def scrape() -> None:
        assert daemon.get("/metrics", context=secrets.authority.context())[0] == 200

    def rotate() -> None:
        for turn in range(turns):
            rotated(daemon, secrets, secrets.authority.server(f"turn-{turn}"))

    with steady:
        work = [lambda: fruit.add("mango"), lambda: fruit.might_contain("mango"), on_new_connection, scrape]
        calls = under_load(work, rotate)
    assert calls > 10 * turns
    assert "Traceback" not in daemon.log()
    assert daemon.stop() == 0
    record("certificates rotated under load", turns, "goes on, no call failed")


def test_half_a_rotation_changes_nothing(secrets: Secrets, start_daemon: Any) -> None:
    """A new certificate beside the old key: the old pair goes on, and log and metric say so."""
    daemon = start_daemon(*secrets.flags)
    before = served(daemon.grpc)
    pair = secrets.authority.server("new")
    shutil.copyfile(pair.cert, secrets.cert)
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: "tls: what was read before stays in force" in daemon.log())
    context = secrets.authority.context()
    assert served(daemon.grpc) == served(daemon.http) == before
    assert 'bloomgate_reload_failed{files="tls"} 1.0' in daemon.get("/metrics", context=context)[1]
    shutil.copyfile(pair.key, secrets.key)
    eventually(lambda: served(daemon.grpc) == served(daemon.http) == der(pair))
    assert 'bloomgate_reload_failed{files="tls"} 0.0' in daemon.get("/metrics", context=context)[1]
    assert daemon.log().count("stays in force") == 1


def test_roots_of_callers_are_rotated_too(secrets: Secrets, start_daemon: Any) -> None:
    """Whom the new roots do not know is refused on new connections of both ports, without a restart."""
    shutil.copyfile(secrets.authority.cert, secrets.client_ca)
    daemon = start_daemon(*secrets.mutual)
    old, newer = secrets.authority.sign("old"), Authority(secrets.cert.parent / "newer")
    fresh = newer.sign("fresh")

    def let_in(pair: Pair) -> bool:
        with client(daemon, secrets, pair, options=REFUSED) as caller:
            try:
                caller.list_filters()
            except Unavailable:
                return False
            return True

    assert let_in(old)
    assert not let_in(fresh)
    shutil.copyfile(newer.cert, secrets.client_ca)
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: let_in(fresh))
    assert not let_in(old)
    assert daemon.get("/metrics", context=fresh.context(secrets.authority.cert))[0] == 200
    with pytest.raises(OSError, match=ENDED):
        daemon.get("/metrics", context=old.context(secrets.authority.cert))


def test_plain_grpc_credentials_get_in_as_well(secrets: Secrets, start_daemon: Any) -> None:
    """Nothing of ours is needed to make them."""
    daemon = start_daemon(*secrets.flags)
    credentials = grpc.ssl_channel_credentials(secrets.authority.cert.read_bytes())
    with Client(daemon.grpc, tls=credentials, options=OPTIONS) as plain:
        assert plain.list_filters() == []
