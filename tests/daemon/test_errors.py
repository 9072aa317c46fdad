"""Every refusal, by code, message and details."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode

from bloomgate import errors
from bloomgate.v1 import admin_pb2, admin_pb2_grpc, filters_pb2, filters_pb2_grpc
from bloomgated.config import LimitsConfig
from bloomgated.errors import JournalFailed
from conftest import StartDaemon
from support.daemon import DaemonProcess

from . import inside
from .calls import (
    VERBS,
    Admin,
    Failure,
    Filters,
    a_name,
    add,
    check,
    create,
    failure,
    failure_of,
    spec,
    stats,
)

FLAGS = (
    "--set", "limits.keys_per_call=1000", "--set", "limits.bytes_per_key=65536",
    "--set", "limits.bytes_per_call=200000",
)  # fmt: skip
NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
BAD_NAMES = ["", "../x", "/", ".hidden", "-x", "a b", "a\n", "é", "a" * 129, "a\x00", "a/b"]


def assert_invalid(failed: Failure, field: str, message: str) -> None:
    """INVALID_ARGUMENT that names ``field``, in all the ways in which it can be read."""
    assert (failed.code, failed.message) == (StatusCode.INVALID_ARGUMENT, message)
    assert (failed.reason, failed.fields) == ("INVALID_ARGUMENT", {"field": field})
    [violation] = failed.standard.field_violations
    assert (violation.field, violation.description) == (field, message)
    assert failed.retry is None


def assert_limit(failed: Failure, limit: str, value: int, allowed: int) -> None:
    """RESOURCE_EXHAUSTED that names limit and value, and is never to be retried."""
    message = f"{limit} is limited to {allowed}, got {value}"
    assert (failed.code, failed.message) == (StatusCode.RESOURCE_EXHAUSTED, message)
    assert failed.reason == "LIMIT_EXCEEDED"
    assert failed.fields == {"limit": limit, "value": str(value), "allowed": str(allowed)}
    [violation] = failed.standard.violations
    assert (violation.subject, violation.description) == (limit, message)
    assert failed.retry is None


def assert_full(failed: Failure, name: str, limit: str, allowed: int, needed: int) -> None:
    """RESOURCE_EXHAUSTED of a filter that takes no more, never to be retried."""
    message = f"filter {name!r} is full: {limit} is {allowed}, this batch needs {needed}"
    assert (failed.code, failed.message, failed.reason) == (
        StatusCode.RESOURCE_EXHAUSTED,
        message,
        "FILTER_FULL",
    )
    assert failed.fields == {
        "filter": name, "limit": limit, "allowed": str(allowed), "needed": str(needed),
    }  # fmt: skip
    assert failed.retry is None


def memory_of(daemon: DaemonProcess, field: str) -> int:
    """A memory figure of the process in bytes: VmRSS what is resident, VmHWM the most that ever was, VmPeak
    the most that was ever mapped. Memory that is allocated and never touched shows in VmPeak alone."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


class Unchanged:
    """Memory, from here to ``check``: nothing more is resident or mapped, threads' stacks apart."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._before = memory_of(daemon, "VmRSS"), memory_of(daemon, "VmPeak")

    def check(self) -> None:
        resident, mapped = self._before
        assert memory_of(self._daemon, "VmRSS") - resident < 4 << 20
        assert memory_of(self._daemon, "VmPeak") - mapped < 256 << 20


# -- names


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_filter_is_not_found(filters: Filters, admin: Admin, verb: str) -> None:
    """Every verb refuses it: no answer, and nothing comes to be."""
    call, request = VERBS[verb](filters, admin)
    name = a_name()
    failed = failure(call, request(name))
    message = f"filter '{name}' does not exist"
    assert (failed.code, failed.message) == (StatusCode.NOT_FOUND, message)
    assert (failed.reason, failed.fields) == ("FILTER_NOT_FOUND", {"filter": name})
    assert isinstance(failed.standard, error_details_pb2.ResourceInfo)
    assert (failed.standard.resource_type, failed.standard.resource_name) == ("filter", name)
    listed = admin.ListFilters(admin_pb2.ListFiltersRequest()).filters
    assert name not in [each.name for each in listed]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_name_that_no_filter_can_have_is_refused(
    filters: Filters, admin: Admin, verb: str, name: str
) -> None:
    """Every verb says which field of its request it is in."""
    call, request = VERBS[verb](filters, admin)
    field = "name" if verb in ("DropFilter", "SnapshotFilter") else "filter"
    assert_invalid(failure(call, request(name)), field, f"{field} must match {NAME_PATTERN}")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_filter_is_created_under_a_bad_name(admin: Admin, shared: DaemonProcess, name: str) -> None:
    """Nor does anything appear on disk."""
    before = sorted(shared.directory.parent.rglob("*"))
    failed = failure(admin.CreateFilter, admin_pb2.CreateFilterRequest(name=name, spec=spec()))
    assert_invalid(failed, "name", f"name must match {NAME_PATTERN}")
    assert sorted(shared.directory.parent.rglob("*")) == before


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "0", "a" * 128])
def test_a_good_name_is_taken(admin: Admin, filters: Filters, name: str) -> None:
    """From one character to 128."""
    create(admin, name)
    assert stats(filters, name).name == name


# -- specs


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.0, 1.5, math.nan, math.inf, -math.inf, 1e-20, 0.9e-9, 0.51])
def test_an_error_rate_outside_its_range_is_refused(admin: Admin, rate: float) -> None:
    """The message names field, range and value."""
    request = admin_pb2.CreateFilterRequest(name=a_name(), spec=spec(error_rate=rate))
    message = f"spec.error_rate must be a number from 1e-09 to 0.5, got {rate!r}"
    assert_invalid(failure(admin.CreateFilter, request), "spec.error_rate", message)


@pytest.mark.parametrize("capacity", [0, 10**11 + 1, 10**18, 2**64 - 1])
def test_a_capacity_outside_its_range_is_refused_before_allocation(
    admin: Admin, shared: DaemonProcess, capacity: int
) -> None:
    """Many times over, the daemon's memory stays what it was."""
    request = admin_pb2.CreateFilterRequest(name=a_name(), spec=spec(capacity))
    message = f"spec.capacity must be a whole number from 1 to 100000000000, got {capacity}"
    assert_invalid(failure(admin.CreateFilter, request), "spec.capacity", message)
    memory = Unchanged(shared)
    for _ in range(100):
        assert failure(admin.CreateFilter, request).code is StatusCode.INVALID_ARGUMENT
    memory.check()


def test_a_filter_above_the_memory_limit_is_refused_before_allocation(
    admin: Admin, shared: DaemonProcess
) -> None:
    """The largest capacity is in range and asks for 539 GB: the limit names what it would take."""
    memory = Unchanged(shared)
    request = admin_pb2.CreateFilterRequest(name=a_name(), spec=spec(10**11, 1e-9, on_full=2))
    needed = math.ceil(-(10**11) * math.log(1e-9) / math.log(2) ** 2 / 8)
    assert_limit(failure(admin.CreateFilter, request), "filter_bytes", needed, 1 << 30)
    memory.check()


def test_a_create_without_a_spec_is_refused(admin: Admin) -> None:
    """An unset capacity is 0, which is none."""
    failed = failure(admin.CreateFilter, admin_pb2.CreateFilterRequest(name=a_name()))
    message = "spec.capacity must be a whole number from 1 to 100000000000, got 0"
    assert_invalid(failed, "spec.capacity", message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", 2, "spec.kind must be BLOOM, got 2"),
        ("kind", 77, "spec.kind must be BLOOM, got 77"),
        ("on_full", 9, "spec.on_full 9 is unknown"),
        ("on_full", -1, "spec.on_full -1 is unknown"),
        ("hash_scheme", 3, "spec.hash_scheme 3 is unknown"),
    ],
)
def test_an_enum_value_that_is_not_known_is_refused(
    admin: Admin, field: str, value: int, message: str
) -> None:
    """Rather than read as the default: it means something to whoever sent it."""
    request = admin_pb2.CreateFilterRequest(name=a_name(), spec=spec(**{field: value}))
    assert_invalid(failure(admin.CreateFilter, request), f"spec.{field}", message)


def test_a_seed_is_not_for_the_keyed_scheme(admin: Admin) -> None:
    """Its secret is drawn: one that was sent over the wire would be none."""
    request = admin_pb2.CreateFilterRequest(name=a_name(), spec=spec(hash_scheme=2, seed=7))
    message = "spec.seed is not for BLAKE2B_128, whose secret is drawn"
    assert_invalid(failure(admin.CreateFilter, request), "spec.seed", message)


def test_a_key_format_has_a_longest_length(admin: Admin) -> None:
    """The message is cut to what trailing metadata can carry."""
    request = admin_pb2.CreateFilterRequest(name=a_name(), spec=spec(key_format="x" * 100_000))
    failed = failure(admin.CreateFilter, request)
    assert (failed.code, failed.fields) == (StatusCode.INVALID_ARGUMENT, {"field": "spec.key_format"})
    assert failed.message.startswith("spec.key_format must be at most 256 bytes of UTF-8, got 'xxx")
    assert len(failed.message) <= 1024


def test_an_equal_filter_is_created_once(admin: Admin, filters: Filters) -> None:
    """Again it succeeds, says that it created nothing, and keeps what is in it; unset fields are defaults."""
    name = a_name()
    plain = admin_pb2.CreateFilterRequest(name=name, spec=spec(key_format="user id"))
    full = admin_pb2.CreateFilterRequest(
        name=name, spec=spec(kind=1, on_full=1, hash_scheme=1, key_format="user id")
    )
    assert admin.CreateFilter(plain).created
    add(filters, name, b"key")
    for request in (plain, full):
        again = admin.CreateFilter(request)
        assert not again.created
        assert again.filter.approximate_count == 1
    assert check(filters, name, b"key") == [filters_pb2.ANSWER_MAYBE]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity", 1001),
        ("error_rate", 0.02),
        ("on_full", filters_pb2.ON_FULL_REJECT),
        ("hash_scheme", filters_pb2.HASH_SCHEME_BLAKE2B_128),
        ("seed", 8),
        ("key_format", "other"),
    ],
)
def test_a_differing_filter_exists_and_the_field_is_named(admin: Admin, field: str, value: Any) -> None:
    """An asked seed must be met, so a seed is such a field."""
    name = a_name()
    fields: dict[str, Any] = {"capacity": 1000, "error_rate": 0.01, "seed": 7, "key_format": "one"}
    create(admin, name, **fields)
    if field == "hash_scheme":
        del fields["seed"]
    request = admin_pb2.CreateFilterRequest(name=name, spec=spec(**{**fields, field: value}))
    failed = failure(admin.CreateFilter, request)
    assert failed.code is StatusCode.ALREADY_EXISTS
    assert failed.message == f"filter '{name}' exists and differs in {field}"
    assert (failed.reason, failed.fields) == ("FILTER_EXISTS", {"filter": name, "field": field})


def test_without_a_seed_any_seed_is_equal(admin: Admin) -> None:
    """And a seed that is met is equal, too."""
    name = create(admin, seed=7)
    for fields in ({}, {"seed": 7}):
        assert not admin.CreateFilter(admin_pb2.CreateFilterRequest(name=name, spec=spec(**fields))).created


# -- keys and digests

ASKING = {"Add": filters_pb2.AddRequest, "MightContain": filters_pb2.MightContainRequest}


@pytest.fixture(params=ASKING)
def ask(request: pytest.FixtureRequest, filters: Filters) -> Any:
    """Send keys or digests, as an Add and as a check, and fail."""
    verb = request.param

    def asking(**fields: Any) -> Failure:
        return failure(getattr(filters, verb), ASKING[verb](**fields))

    return asking


@pytest.fixture
def name(admin: Admin) -> str:
    """A filter of the test's own."""
    return create(admin)


def test_an_empty_key_is_refused(ask: Any, name: str, filters: Filters) -> None:
    """The message says which; nothing of the call is done."""
    message = "keys[1] must not be empty"
    assert_invalid(ask(filter=name, keys=[b"a", b"", b"c"]), "keys", message)
    assert stats(filters, name).added_count == stats(filters, name).checks_skip == 0


def test_keys_and_digests_exclude_each_other(ask: Any, name: str) -> None:
    """Whatever their shapes."""
    failed = ask(filter=name, keys=[b"a"], digests=b"x")
    assert_invalid(failed, "keys", "set keys or digests, not both")


@pytest.mark.parametrize("size", [1, 15, 17, 31])
def test_digests_are_sixteen_bytes_each(ask: Any, name: str, size: int) -> None:
    """Shapes are judged before hash_id: neither a missing nor a stale one is spoken of."""
    for hash_id in (0, 12345):
        failed = ask(filter=name, digests=b"x" * size, hash_id=hash_id)
        assert_invalid(failed, "digests", f"digests must be 16 bytes each, got {size} bytes")


def test_digests_need_a_hash_id(ask: Any, name: str) -> None:
    """Else digests of another filter would be taken for this one's."""
    failed = ask(filter=name, digests=b"x" * 16)
    assert_invalid(failed, "hash_id", "digests need the hash_id they were made under")


def test_a_stale_hash_id_is_a_failed_precondition(ask: Any, name: str, filters: Filters) -> None:
    """The caller is told to read the hash spec again; the true one is taken."""
    hash_id = filters.HashSpec(filters_pb2.HashSpecRequest(filter=name)).hash_id
    failed = ask(filter=name, digests=b"x" * 16, hash_id=hash_id ^ 1)
    assert failed.code is StatusCode.FAILED_PRECONDITION
    assert failed.message == f"hash_id is not that of filter '{name}': read its hash spec again"
    assert (failed.reason, failed.fields) == ("STALE_HASH_ID", {"filter": name})
    assert stats(filters, name).added_count == 0
    filters.Add(filters_pb2.AddRequest(filter=name, digests=b"x" * 16, hash_id=hash_id))


def test_too_many_keys_are_refused(ask: Any, name: str, filters: Filters) -> None:
    """As keys and as digests; just as many as may be are taken."""
    assert_limit(ask(filter=name, keys=[b"k"] * 1001), "keys_per_call", 1001, 1000)
    assert_limit(ask(filter=name, digests=bytes(1001 * 16), hash_id=1), "keys_per_call", 1001, 1000)
    assert len(add(filters, name, *[b"k"] * 1000).was_new) == 1000


def test_too_large_a_key_is_refused(ask: Any, name: str, filters: Filters) -> None:
    """One of exactly the limit is taken."""
    assert_limit(ask(filter=name, keys=[b"k", b"k" * 65537]), "bytes_per_key", 65537, 65536)
    assert add(filters, name, b"k" * 65536).was_new == [True]


def test_too_many_bytes_are_refused(ask: Any, name: str) -> None:
    """Each key may be small enough and all together too much."""
    assert_limit(ask(filter=name, keys=[b"k" * 50001] * 4), "bytes_per_call", 200004, 200000)


def test_a_call_of_millions_of_keys_costs_little_to_refuse(start_daemon: StartDaemon) -> None:
    """They are counted before they are taken out; above gRPC's limit they are not even parsed."""
    daemon = start_daemon()
    with grpc.insecure_channel(daemon.grpc, options=(("grpc.max_send_message_length", -1),)) as channel:
        stub = filters_pb2_grpc.FilterServiceStub(channel)
        create(admin_pb2_grpc.AdminServiceStub(channel), "name")
        million = filters_pb2.MightContainRequest(filter="name", keys=[b"k"] * 4_000_000)
        assert_limit(failure(stub.MightContain, million), "keys_per_call", 4_000_000, 100_000)
        # 12 MB on the wire; a Python object for each key would have taken 130 MB more than this allows.
        assert memory_of(daemon, "VmHWM") < 300 << 20
        many = filters_pb2.MightContainRequest(filter="name", keys=[b"k"] * 8_000_000)
        refused = failure(stub.MightContain, many)
        assert refused.code is StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in refused.message


def test_too_many_bytes_of_digests_are_refused(start_daemon: StartDaemon) -> None:
    """Digests count as bytes, too."""
    daemon = start_daemon("--set", "limits.bytes_per_call=1600")
    with daemon.stubs() as (filters, admin):
        name = create(admin)
        request = filters_pb2.AddRequest(filter=name, digests=bytes(101 * 16), hash_id=1)
        assert_limit(failure(filters.Add, request), "bytes_per_call", 1616, 1600)


@pytest.mark.parametrize("limit", [1, 100, 200_000])
def test_our_limit_answers_before_that_of_grpc(start_daemon: StartDaemon, limit: int) -> None:
    """A call somewhat too large is refused by name, however small the limit is."""
    daemon = start_daemon("--set", f"limits.bytes_per_call={limit}")
    with daemon.stubs() as (filters, admin):
        name = create(admin)
        keys = [b"k" * 50_000] * (limit // 50_000) + [b"k" * (limit % 50_000 + 1)]
        request = filters_pb2.AddRequest(filter=name, keys=keys)
        assert_limit(failure(filters.Add, request), "bytes_per_call", limit + 1, limit)


def test_empty_in_is_empty_out(filters: Filters, name: str) -> None:
    """A call without keys succeeds, of a filter that exists."""
    assert check(filters, name) == []
    reply = add(filters, name)
    assert reply.was_new == []
    assert reply.seq == stats(filters, name).journal_seq
    assert stats(filters, name).added_count == 0


# -- full


def test_a_full_rejecting_filter_refuses_the_whole_batch(admin: Admin, filters: Filters) -> None:
    """Nothing of it is added; keys that are there already still pass."""
    name = create(admin, capacity=100, error_rate=1e-6, on_full=filters_pb2.ON_FULL_REJECT)
    keys = [b"%d" % i for i in range(100)]
    assert sum(add(filters, name, *keys).was_new) == 100
    request = filters_pb2.AddRequest(filter=name, keys=[*keys, b"one", b"more"])
    assert_full(failure(filters.Add, request), name, "capacity", 100, 102)
    assert check(filters, name, b"one", b"more") == [filters_pb2.ANSWER_DEFINITELY_NOT] * 2
    assert add(filters, name, *keys).was_new == [False] * 100
    assert stats(filters, name).approximate_count == 100


TIGHT = ("--set", "limits.filter_bytes=2000", "--set", "limits.total_bytes=3000", "--set", "limits.filters=3")


def test_memory_and_number_of_filters_are_limited(start_daemon: StartDaemon) -> None:
    """Per filter, in total, and by number; dropping one makes room."""
    daemon = start_daemon(*TIGHT)
    with daemon.stubs() as (filters, admin):

        def refused(capacity: int) -> Failure:
            reject = spec(capacity, on_full=filters_pb2.ON_FULL_REJECT)
            return failure(admin.CreateFilter, admin_pb2.CreateFilterRequest(name="more", spec=reject))

        assert_limit(refused(2000), "filter_bytes", 2397, 2000)
        create(admin, "one", capacity=1500, on_full=filters_pb2.ON_FULL_REJECT)
        assert stats(filters, "one").memory_bytes == 1798
        assert_limit(refused(1500), "total_bytes", 2 * 1798, 3000)
        create(admin, "two", capacity=10)
        create(admin, "three", capacity=10)
        assert_limit(refused(10), "filters", 4, 3)
        admin.DropFilter(admin_pb2.DropFilterRequest(name="one"))
        create(admin, "more", capacity=1500, on_full=filters_pb2.ON_FULL_REJECT)


def test_a_filter_that_may_not_grow_adds_nothing_of_the_batch(start_daemon: StartDaemon) -> None:
    """The limit that stands in the way is named, the filter's own or that of all, with what it would take."""
    daemon = start_daemon(*TIGHT)
    with daemon.stubs() as (filters, admin):
        name = create(admin, capacity=300)
        own = stats(filters, name).memory_bytes
        keys = [b"%d" % i for i in range(2000)]

        def grown() -> Failure:
            return failure(filters.Add, filters_pb2.AddRequest(filter=name, keys=keys))

        failed = grown()
        assert_full(failed, name, "filter_bytes", 2000, int(failed.fields["needed"]))
        assert int(failed.fields["needed"]) > 2000
        assert stats(filters, name).added_count == 0
        assert set(check(filters, name, *keys)) == {filters_pb2.ANSWER_DEFINITELY_NOT}

        other = create(admin, capacity=1400, on_full=filters_pb2.ON_FULL_REJECT)
        others = stats(filters, other).memory_bytes
        keys = keys[:320]  # one more than fits: a body of twice the capacity
        failed = grown()
        assert_full(failed, name, "total_bytes", 3000, int(failed.fields["needed"]))
        assert int(failed.fields["needed"]) > 3000 >= own + others
        assert stats(filters, name).added_count == 0
        assert len(stats(filters, name).bodies) == 1
        # What needs no growth is still taken, and once there is room, so is this.
        assert sum(add(filters, name, *keys[:250]).was_new) > 240
        admin.DropFilter(admin_pb2.DropFilterRequest(name=other))
        add(filters, name, *keys)
        assert len(stats(filters, name).bodies) == 2


def test_nonsense_outcomes_break_nothing(filters: Filters, admin: Admin) -> None:
    """Reports add up to more than Stats can show: it shows the most it can, and so does the list."""
    name = create(admin)
    most = 2**64 - 1
    request = filters_pb2.ReportOutcomesRequest(filter=name, found=most, not_found=most, false_no=most)
    for _ in range(2):
        filters.ReportOutcomes(request)
    shown = stats(filters, name)
    assert (shown.outcomes_found, shown.outcomes_not_found, shown.outcomes_false_no) == (most, most, most)
    assert name in [each.name for each in admin.ListFilters(admin_pb2.ListFiltersRequest()).filters]


# -- what the daemon itself cannot do


class BrokenGate:
    """A gate whose every verb raises the same."""

    limits = LimitsConfig()

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.leases, self.holders = inside.no_leases()

    def __getattr__(self, _: str) -> Any:
        def verb(*_arguments: Any) -> Any:
            raise self._error

        return verb


async def _failures(error: Exception) -> dict[str, Failure]:
    found = {}
    async with inside.serve(BrokenGate(error)) as channel:
        for verb, of in VERBS.items():
            call, request = of(*inside.stubs(channel))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request("name"))
            found[verb] = failure_of(caught.value)
    return found


def test_an_unexpected_error_tells_an_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """No path, no key, no text of the exception; the log has those under the same id, one for each call."""
    found = asyncio.run(_failures(RuntimeError("/secret/path and b'a key'")))
    assert set(found) == set(VERBS)
    ids = set()
    for failed in found.values():
        assert failed.code is StatusCode.INTERNAL
        assert re.fullmatch(r"internal error [0-9a-f]{16}", failed.message)
        assert (failed.reason, set(failed.fields)) == ("INTERNAL", {"id"})
        assert failed.message == f"internal error {failed.fields['id']}"
        assert failed.standard is None
        ids.add(failed.fields["id"])
    assert len(ids) == len(VERBS)
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert {record.getMessage() for record in logged} == {f"internal error {each}" for each in ids}
    assert all(record.exc_info for record in logged)


def test_a_failed_journal_is_unavailable_and_tells_no_more() -> None:
    """What the storage said may name paths."""
    for failed in asyncio.run(_failures(JournalFailed("disk I/O error in /secret/path"))).values():
        assert failed.code is StatusCode.UNAVAILABLE
        assert failed.message == "the journal failed; bloomgated is restarting"
        assert failed.reason == "JOURNAL_FAILED"


def test_a_full_journal_queue_says_when_to_try_again(tmp_path: Path) -> None:
    """It passes by itself, so it carries RetryInfo; the refused Add changed nothing."""

    async def run() -> None:
        async with inside.open_gate(tmp_path, max_queued_bytes=1000) as (gate, journal):
            await gate.create("name", inside.asked())
            async with inside.serve(gate) as channel:
                filters, admin = inside.stubs(channel)
                journal.released.clear()
                first = filters.Add(filters_pb2.AddRequest(filter="name", keys=[b"a"] * 100))
                waiting = asyncio.ensure_future(first.code())
                await inside.until(lambda: journal.last_seq > journal.durable_seq)
                for call, request in (
                    (filters.Add, filters_pb2.AddRequest(filter="name", keys=[b"b"])),
                    (admin.CreateFilter, admin_pb2.CreateFilterRequest(name="other", spec=spec())),
                    (admin.DropFilter, admin_pb2.DropFilterRequest(name="name")),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call(request)
                    failed = failure_of(caught.value)
                    assert failed.code is StatusCode.RESOURCE_EXHAUSTED
                    assert re.fullmatch(r"\d+ bytes wait to be journalled, 1000 may", failed.message)
                    assert (failed.reason, failed.retry) == ("OVERLOADED", 0.05)
                reply = await filters.MightContain(
                    filters_pb2.MightContainRequest(filter="name", keys=[b"a", b"b"])
                )
                # A check waits for no disk; what is queued may show already, what was refused may not.
                assert list(reply.answers) == [filters_pb2.ANSWER_MAYBE, filters_pb2.ANSWER_DEFINITELY_NOT]
                journal.released.set()
                assert await waiting is StatusCode.OK
                await filters.Add(filters_pb2.AddRequest(filter="name", keys=[b"b"]))

    asyncio.run(run())


def test_too_many_calls_at_once_say_when_to_try_again(tmp_path: Path) -> None:
    """The bound is on calls under way; once they are answered there is room again."""

    async def run() -> None:
        limits = LimitsConfig(concurrent_calls=2)
        async with inside.open_gate(tmp_path, limits) as (gate, journal):
            await gate.create("name", inside.asked())
            async with inside.serve(gate, limits) as channel:
                filters, _ = inside.stubs(channel)
                request = filters_pb2.AddRequest(filter="name", keys=[b"a"])
                journal.released.clear()
                waiting = [filters.Add(request) for _ in range(2)]
                codes = [asyncio.ensure_future(call.code()) for call in waiting]
                await inside.until(lambda: journal.last_seq == journal.durable_seq + 2)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await filters.Stats(filters_pb2.StatsRequest(filter="name"))
                failed = failure_of(caught.value)
                assert failed.code is StatusCode.RESOURCE_EXHAUSTED
                assert failed.message == "2 calls are under way, the most there may be"
                assert (failed.reason, failed.retry) == ("OVERLOADED", 0.05)
                journal.released.set()
                assert await asyncio.gather(*codes) == [StatusCode.OK] * 2
                await filters.Stats(filters_pb2.StatsRequest(filter="name"))

    asyncio.run(run())


def test_what_cannot_be_allocated_is_not_journalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the filter would exist after a restart, though its creation failed."""

    def no_memory(*_: Any) -> None:
        raise MemoryError

    async def run() -> None:
        async with inside.open_gate(tmp_path) as (gate, journal):
            with monkeypatch.context() as patched:
                patched.setattr("bloomgated.room.BloomBody.resident", no_memory)
                with pytest.raises(errors.Overloaded, match="no memory for this filter"):
                    await gate.create("name", inside.asked())
            assert journal.last_seq == 0
            assert (await gate.create("name", inside.asked()))[1]

    asyncio.run(run())


def test_an_error_for_one_caller_is_none_for_others(admin: Admin, filters: Filters) -> None:
    """Bad and good calls mixed on many threads: each gets its own answer."""
    name = create(admin, error_rate=1e-9)
    start = threading.Barrier(8)

    def caller(number: int) -> None:
        start.wait()
        for i in range(30):
            key = b"%d-%d" % (number, i)
            add(filters, name, key)
            assert check(filters, name, key) == [filters_pb2.ANSWER_MAYBE]
            assert failure(filters.Add, filters_pb2.AddRequest(filter=name, keys=[b""])).fields == {
                "field": "keys"
            }

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(caller, range(8)))
    assert stats(filters, name).added_count == 8 * 30


@pytest.mark.parametrize("data", [b"\xff" * 50, b"\x0a\x02\xff\xff", b"\x0a\x7f"])
def test_bytes_that_are_no_request_are_refused_as_bad_input(shared: DaemonProcess, data: bytes) -> None:
    """Not UNKNOWN with an exception's text, as gRPC itself would answer."""
    with grpc.insecure_channel(shared.grpc) as channel:
        for method in ("FilterService/MightContain", "FilterService/Add", "AdminService/CreateFilter"):
            call = channel.unary_unary(f"/bloomgate.v1.{method}")
            failed = failure(call, data)
            assert_invalid(failed, "request", "the request is not a message of this call")
