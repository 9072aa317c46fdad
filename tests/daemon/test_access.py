"""Who may come in: every method, every role, the allowed and the refused side, on a real daemon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bloomgate import Client, ClientOptions, LimitExceeded, NotAllowed, NotAuthenticated
from bloomgate.v1 import admin_pb2, filters_pb2
from bloomgated import access
from bloomgated.access import Access, Role
from bloomgated.api.auth import RULES
from bloomgated.config import ConfigError
from support.daemon import DaemonProcess, peak, refused
from support.tally import record

from . import calls
from .calls import Failure, eventually

READ, REPLICA, WRITE, ADMIN = Role.READ, Role.REPLICA, Role.WRITE, Role.ADMIN
MINE, OTHERS = "mine-fruit", "others-fruit"
NEEDS_NO_FILTER = "ListFilters"

# Who may do what, written out by hand: the code's own table is judged by it.
MAY: dict[str, set[Role]] = {
    "Add": {WRITE},
    "MightContain": {READ, REPLICA},
    "Stats": {READ, REPLICA, ADMIN},
    "ReportOutcomes": {READ, REPLICA},
    "HashSpec": {REPLICA},
    "Lease": {REPLICA},
    "CreateFilter": {ADMIN},
    "ListFilters": {READ, REPLICA, WRITE, ADMIN},
    "DropFilter": {ADMIN},
    "SnapshotFilter": {ADMIN},
}


def make_tokens(file: Path, **entries: tuple[list[Role], list[str]]) -> dict[str, str]:
    """Write an auth file, and return the tokens by their names."""
    tokens, text = {}, ""
    for name, (roles, globs) in entries.items():
        tokens[name], entry = access.new_token(name, roles, globs)
        text += entry
    file.write_text(text)
    return tokens


def create_request(name: str) -> admin_pb2.CreateFilterRequest:
    return admin_pb2.CreateFilterRequest(name=name, spec=calls.spec())


class Guarded:
    """A daemon that asks who calls, with two filters in it, and a token of each role for one of them."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "auth.toml"
        self.tokens = make_tokens(
            self.file,
            root=(list(Role), ["*"]),
            **{role.value: ([role], ["mine-*"]) for role in Role},
            both=([READ, WRITE], ["mine-*"]),
        )
        self.daemon = DaemonProcess(directory / "data", "--set", f"auth.file={self.file}")
        with self.client("root") as root:
            for name in (MINE, OTHERS):
                root.create_filter(name, 1000)

    def client(self, name: str, **options: Any) -> Client:
        """A client with the token of that name."""
        return Client(
            self.daemon.grpc, token=self.tokens[name], options=ClientOptions(on_error="raise", **options)
        )

    def call(self, method: str, name: str, token: str | None, **fields: Any) -> Failure | Any:
        """One raw call about the filter ``name``; the reply, or the failure."""
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        with self.daemon.stubs() as (filters, admin):
            if method == "Lease":
                return calls.lease(filters, name, metadata)
            if method == "ListFilters":
                call, request = admin.ListFilters, lambda _: admin_pb2.ListFiltersRequest()
            elif method == "CreateFilter":
                call, request = admin.CreateFilter, create_request
            else:
                call, request = calls.VERBS[method](filters, admin)
            message = request(name)
            for field, value in fields.items():
                if field == "keys":
                    del message.keys[:]
                    message.keys.extend(value)
                else:
                    setattr(message, field, value)
            try:
                return call(message, metadata=metadata, timeout=30)
            except grpc.RpcError as error:
                return calls.failure_of(error)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    yield made
    made.daemon.kill()


def test_every_method_has_a_rule() -> None:
    """The table by which calls are judged says what this one says, and names every method there is."""
    methods = {
        method.name
        for module, service in ((filters_pb2, "FilterService"), (admin_pb2, "AdminService"))
        for method in module.DESCRIPTOR.services_by_name[service].methods
    }
    assert set(RULES) == set(MAY) == methods
    assert {name: set(rule.roles) for name, rule in RULES.items()} == MAY


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("method", sorted(MAY))
def test_a_role_may_what_it_is_for_and_nothing_else(guarded: Guarded, method: str, role: Role) -> None:
    """With the token of one role for one set of filters: that method on these, never on others, whether they
    exist or not."""
    if method == "DropFilter":
        with guarded.client("root") as root:
            root.create_filter("mine-to-drop", 10)
    mine = "mine-to-drop" if method == "DropFilter" else MINE
    said = guarded.call(method, mine, guarded.tokens[role.value])
    if role in MAY[method]:
        assert not isinstance(said, Failure), said
    else:
        assert (said.code, said.reason) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED")
        assert mine not in said.message
    if method != NEEDS_NO_FILTER:
        there = guarded.call(method, OTHERS, guarded.tokens[role.value])
        absent = guarded.call(method, "others-that-never-were", guarded.tokens[role.value])
        assert there.code is grpc.StatusCode.PERMISSION_DENIED
        assert there == absent, "a refusal tells whether the filter exists"


@pytest.mark.parametrize("method", sorted(MAY))
def test_without_a_token_nothing_is_answered(guarded: Guarded, method: str) -> None:
    """No token, an unknown one, a wrong secret, another scheme, two at once: all the same refusal."""
    right = guarded.tokens["root"]
    stranger, _ = access.new_token("stranger", [READ], ["*"])
    wrong = right[:-1] + ("A" if right[-1] != "A" else "B")
    bare = guarded.call(method, MINE, None)
    assert (bare.code, bare.reason) == (grpc.StatusCode.UNAUTHENTICATED, "NOT_AUTHENTICATED")
    for token in (stranger, wrong, right.upper(), right[:-1], "x", "", f"{right} {right}"):
        assert guarded.call(method, MINE, token) == bare
    with guarded.daemon.stubs() as (filters, _):
        request = filters_pb2.StatsRequest(filter=MINE)
        for metadata in (
            (("authorization", right),),
            (("authorization", f"Basic {right}"),),
            (("authorization", f"Bearer {right}"), ("authorization", f"Bearer {right}")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                filters.Stats(request, metadata=metadata, timeout=30)
            assert calls.failure_of(caught.value) == bare


def test_a_strangers_message_is_not_taken_in(guarded: Guarded) -> None:
    """Forty calls of 15 MiB at once, without a token or with a wrong one: all are refused, and the daemon
    never held more than a tenth of it."""
    stranger, _ = access.new_token("stranger", [WRITE], ["*"])
    request = filters_pb2.AddRequest(filter=MINE, keys=[b"k" * 1000] * 15_000)
    before = peak(guarded.daemon)
    for metadata in ((), (("authorization", f"Bearer {stranger}"),)):
        with guarded.daemon.stubs() as (filters, _):
            asked = [filters.Add.future(request, metadata=metadata, timeout=60) for _ in range(40)]
            assert {each.code() for each in asked} == {grpc.StatusCode.UNAUTHENTICATED}
    assert peak(guarded.daemon) - before < 60_000
    record("calls of strangers with the largest messages", 80, "are refused, no message is taken in")


def test_the_scheme_word_is_read_in_any_case(guarded: Guarded) -> None:
    """As HTTP has it."""
    with guarded.daemon.stubs() as (filters, _):
        metadata = (("authorization", f"bearer {guarded.tokens['root']}"),)
        assert filters.Stats(filters_pb2.StatsRequest(filter=MINE), metadata=metadata, timeout=30).filter.name


@pytest.mark.parametrize("method", ["Add", "MightContain"])
def test_digests_need_the_role_for_hash_specs(guarded: Guarded, method: str) -> None:
    """Digests come from the seed, so whoever may not have it sends keys; who may both may send digests."""
    with guarded.client("root") as root:
        hash_id = root.filter(MINE).stats().hash_id
    fields = {"keys": (), "digests": bytes(16), "hash_id": hash_id}
    for name in ("read", "write", "both"):
        said = guarded.call(method, MINE, guarded.tokens[name], **fields)
        assert (said.code, said.reason) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED"), name
    assert not isinstance(guarded.call(method, MINE, guarded.tokens["root"], **fields), Failure)
    allowed = guarded.call(method, MINE, guarded.tokens["replica"], **fields)
    assert isinstance(allowed, Failure) == (method == "Add")


def test_the_hash_id_is_shown_to_those_who_may_have_the_seed(guarded: Guarded) -> None:
    """A seed of 32 bits can be found by trying them all against it."""
    for name in ("read", "admin", "both", "replica", "root"):
        with guarded.client(name) as client:
            shown = {each.hash_id for each in client.list_filters() if each.name == MINE}
        assert (shown != {0}) == (name in ("replica", "root")), name


def test_lists_show_what_the_caller_may_see(guarded: Guarded) -> None:
    """A list is filtered by the globs, and by the roles that see stats."""

    def names(name: str) -> set[str]:
        with guarded.client(name) as client:
            return {each.name for each in client.list_filters()}

    assert {MINE, OTHERS} <= names("root")
    for name in ("read", "replica", "admin", "both"):
        assert OTHERS not in names(name)
        assert MINE in names(name)
    assert names("write") == set()


def test_only_health_needs_no_token(guarded: Guarded) -> None:
    """Check and Watch answer anyone; reflection answers those who are known."""
    with grpc.insecure_channel(guarded.daemon.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status == serving
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert next(watch).status == serving
        watch.cancel()
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            list(reflect(iter([ask]), timeout=30))
        assert calls.failure_of(caught.value).reason == "NOT_AUTHENTICATED"
        metadata = (("authorization", f"Bearer {guarded.tokens['read']}"),)
        (said,) = reflect(iter([ask]), metadata=metadata, timeout=30)
        assert "bloomgate.v1.FilterService" in {each.name for each in said.list_services_response.service}


def test_a_client_without_the_role_for_digests_sends_keys(guarded: Guarded) -> None:
    """Bulk calls of a token that may not have the seed work all the same, and split to the limits that it may
    not read either."""
    keys = [f"papaya-{number}" for number in range(3000)]
    with guarded.client("both") as client:
        fruit = client.filter(MINE)
        assert fruit.add_many(keys[:500]) == [True] * 500
        assert all(fruit.might_contain_many(keys[:500]))
    with guarded.client("write") as client:
        client.filter(MINE).add_many(keys[500:1000])
    with guarded.client("read") as client:
        fruit = client.filter(MINE)
        answers = fruit.might_contain_many(keys)
        assert all(answers[:1000])
        assert answers.count(True) < 1000 + 2000 * 0.05, "a filter at 1 % asked"


def test_a_writer_that_may_not_read_limits_splits_to_them(tmp_path: Path, start_daemon: Any) -> None:
    """A refusal tells the limit that the next attempt keeps to."""
    file = tmp_path / "auth.toml"
    tokens = make_tokens(file, root=(list(Role), ["*"]), write=([WRITE], ["*"]))
    flags = ("--set", f"auth.file={file}", "--set", "limits.keys_per_call=100")
    daemon = start_daemon(*flags, "--set", "limits.bytes_per_key=100")
    options = ClientOptions(on_error="raise")
    with Client(daemon.grpc, token=tokens["root"], options=options) as root:
        root.create_filter(MINE, 10_000)
        with Client(daemon.grpc, token=tokens["write"], options=options) as writer:
            keys = [f"key-{number}" for number in range(1050)]
            assert len(writer.filter(MINE).add_many(keys)) == 1050
            with pytest.raises(LimitExceeded, match="bytes_per_key is limited to 100, got 101"):
                writer.filter(MINE).add_many(["k" * 101])
        assert all(root.filter(MINE).might_contain_many(keys))


def test_the_auth_file_is_read_again_when_it_changes(tmp_path: Path, start_daemon: Any) -> None:
    """A token is taken and revoked without a restart; a file that is wrong, or gone, changes nothing, and the
    log and a metric say so."""
    file = tmp_path / "auth.toml"
    old = make_tokens(file, old=([READ, ADMIN], ["*"]))["old"]
    daemon = start_daemon("--set", f"auth.file={file}")
    options = ClientOptions(on_error="raise")

    def known(token: str) -> bool:
        with Client(daemon.grpc, token=token, options=options) as client:
            try:
                client.list_filters()
            except NotAuthenticated:
                return False
            return True

    assert known(old)
    for wrong in ("token = 7\n", "[[token]]\nid = 'x'\n", "\x00", "", None):
        before = daemon.log().count("stays in force")
        if wrong is None:
            file.unlink()
        else:
            file.write_text(wrong)
        eventually(lambda before=before: daemon.log().count("stays in force") > before)
        assert known(old)
    new = make_tokens(file, new=([READ], ["*"]))["new"]
    eventually(lambda: known(new))
    assert not known(old)
    for token in (old, new):
        assert token not in daemon.log()
        assert token.rpartition("_")[2] not in daemon.log()


def test_sighup_reads_at_once_and_ends_nothing(tmp_path: Path, start_daemon: Any) -> None:
    """The signal that operators send for a reload."""
    import signal

    file = tmp_path / "auth.toml"
    make_tokens(file, old=([READ], ["*"]))
    daemon = start_daemon("--set", f"auth.file={file}")
    new = make_tokens(file, new=([READ], ["*"]))["new"]
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: "auth: read again" in daemon.log())
    with Client(daemon.grpc, token=new) as client:
        client.list_filters()
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[token]]\n", "token[0]: Object missing required field `id`"),
        ("tokens = []\n", "the file: Object contains unknown field `tokens`"),
        ("x = [\n", "not TOML"),
        ("", "names nobody"),
        (
            '[[certificate]]\nname = "a"\nroles = ["root"]\nfilters = ["*"]\n',
            "certificate[0].roles[0]: Invalid",
        ),
        ('[[certificate]]\nname = "a"\nroles = []\nfilters = ["*"]\n', "certificate[0].roles: Expected"),
        ('[[certificate]]\nname = "a"\nroles = ["read"]\nfilters = []\n', "certificate[0].filters: Expected"),
    ],
)
def test_a_wrong_auth_file_refuses_the_start(tmp_path: Path, text: str, reason: str) -> None:
    """One sentence with the path and what is wrong, exit 1."""
    file = tmp_path / "auth.toml"
    file.write_text(text)
    ended = refused("serve", "--data-dir", str(tmp_path / "data"), "--set", f"auth.file={file}")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"bloomgated: {file}: {reason}")
    assert ended.stderr.count("\n") == 1


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """Which of the two counts would be a guess."""
    file = tmp_path / "auth.toml"
    _, entry = access.new_token("a", [READ], ["*"])
    file.write_text(entry * 2)
    with pytest.raises(ConfigError, match=r"token id [0-9a-f]{8} stands there twice"):
        Access(file)


def test_token_new_prints_a_token_that_works(tmp_path: Path, start_daemon: Any) -> None:
    """Once, on stdout; the file gets its hash, keeps what was there and who may read it."""
    file = tmp_path / "auth.toml"
    for name, role in (("shop", "read"), ("loader", "write")):
        ended = refused(
            "token", "new", name, "--role", role, "--filter", "a*", "--filter", "b*", "--file", str(file)
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert re.fullmatch(r"bgt_[0-9a-f]{8}_[A-Za-z0-9_-]{43}\n", ended.stdout)
        if name == "shop":
            assert file.stat().st_mode & 0o777 == 0o600
            file.chmod(0o640)
            token = ended.stdout.strip()
    assert file.stat().st_mode & 0o777 == 0o640
    assert token not in file.read_text()
    assert list(tmp_path.iterdir()) == [file]
    daemon = start_daemon("--set", f"auth.file={file}")
    with Client(daemon.grpc, token=token, options=ClientOptions(on_error="raise")) as client:
        assert client.list_filters() == []
        with pytest.raises(NotAllowed, match="needs the role admin"):
            client.create_filter("apple", 10)


def test_tokens_made_at_once_are_all_there(tmp_path: Path) -> None:
    """Each reads what the one before wrote; a wrong entry leaves nothing lying about."""
    file = tmp_path / "auth.toml"
    entries = [access.new_token(f"caller-{number}", [READ], ["*"])[1] for number in range(16)]
    with ThreadPoolExecutor(len(entries)) as threads:
        list(threads.map(lambda entry: access.append(file, entry), entries))
    assert file.read_text().count("[[token]]") == len(entries)
    with pytest.raises(ConfigError):
        access.append(file, entries[0])
    assert [each.name for each in tmp_path.iterdir()] == ["auth.toml"]


def test_token_new_without_a_file_shows_the_entry(tmp_path: Path) -> None:
    """On stderr, to be put where it belongs."""
    ended = refused("token", "new", "shop", "--role", "read", "--filter", "*")
    file = tmp_path / "auth.toml"
    file.write_text(ended.stderr)
    found = Access(file).authenticate([f"Bearer {ended.stdout.strip()}"], ())
    assert found.name == "shop"
    assert found.may(frozenset((READ,)), "whatever")
    assert not found.may(frozenset((WRITE,)), "whatever")


def test_token_new_never_makes_a_wrong_file_worse(tmp_path: Path) -> None:
    """A file that a daemon would refuse is left as it is."""
    file = tmp_path / "auth.toml"
    file.write_text("token = 1\n")
    ended = refused("token", "new", "shop", "--role", "read", "--filter", "*", "--file", str(file))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"bloomgated: {file}: token: ")
    assert file.read_text() == "token = 1\n"
    assert list(tmp_path.iterdir()) == [file]


def test_globs_match_whole_names() -> None:
    """A star takes any characters, none of a longer name; case counts."""
    principal = access.Principal("p", (access.Grant.of([READ], ["fraud-*", "a?c", "exact"]),))
    may = {
        name
        for name in ("fraud-", "fraud-x.y", "xfraud-", "abc", "abbc", "exact", "exactly", "Exact", "")
        if principal.may(frozenset((READ,)), name)
    }
    assert may == {"fraud-", "fraud-x.y", "abc", "exact"}
    assert not principal.may_all(frozenset((READ,)))
    for glob, everything in (("*", True), ("?", False), ("[*]", False), ("**", False)):
        assert (
            access.Principal("p", (access.Grant.of([READ], [glob]),)).may_all(frozenset((READ,)))
            == everything
        )


def test_entries_of_a_certificate_name_add_up(tmp_path: Path) -> None:
    """A name may read here and write there; a certificate with no known name is refused."""
    file = tmp_path / "auth.toml"
    entry = '[[certificate]]\nname = "{}"\nroles = ["{}"]\nfilters = ["{}"]\n'
    file.write_text(entry.format("shop.internal", "read", "*") + entry.format("shop.internal", "write", "a*"))
    known = Access(file)
    caller = known.authenticate([], ["", "x", "shop.internal"])
    assert caller.may(frozenset((READ,)), "b")
    assert caller.may(frozenset((WRITE,)), "a")
    assert not caller.may(frozenset((WRITE,)), "b")
    with pytest.raises(NotAllowed, match="no entry names this certificate") as caught:
        known.authenticate([], ["x"])
    assert not isinstance(caught.value, NotAuthenticated)
    with pytest.raises(NotAuthenticated):
        known.authenticate([], [])
    with pytest.raises(NotAuthenticated):
        known.authenticate(["Bearer x"], ["shop.internal"])
