"""What the verbs promise, through raw stubs to a real daemon; what needs a held journal, in this process."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bloomgate import errors
from bloomgate.filters import BloomFilter, FilterSpec
from bloomgate.filters.bloom import BloomBody
from bloomgate.filters.hashing import Hasher, HashScheme
from bloomgate.v1 import admin_pb2, filters_pb2
from bloomgate.v1 import filters_pb2 as pb
from bloomgated.access import ANYONE
from bloomgated.api.convert import answers_bytes, stats_message
from bloomgated.config import LimitsConfig
from bloomgated.requests import Asked, Keys
from conftest import StartDaemon
from storage.making import Clock
from support.daemon import DaemonProcess

from . import inside
from .calls import (
    DEFINITELY_NOT,
    MAYBE,
    Admin,
    Filters,
    a_name,
    add,
    check,
    create,
    eventually,
    failure,
    spec,
    stats,
)

AWKWARD_KEYS = [
    b"\x00", b"\x00\x00", b"a\x00", b"a", b"\n", b"a\nb", b"\r\n", b"\xff\xfe", b"\x80", b"\xed\xa0\x80",
    "é".encode(), "e\u0301".encode(), b" ", b" a", b"k" * (64 << 10), bytes(range(256)) * 256,
]  # fmt: skip


def drop(admin: Admin, name: str) -> None:
    admin.DropFilter(admin_pb2.DropFilterRequest(name=name))


def hasher_of(filters: Filters, name: str) -> Hasher:
    """The filter's hasher as a caller makes it."""
    reply = filters.HashSpec(filters_pb2.HashSpecRequest(filter=name))
    which = reply.WhichOneof("key")
    hasher = Hasher(HashScheme(reply.hash_scheme), getattr(reply, which))
    assert hasher.hash_id == reply.hash_id
    return hasher


# -- answers


@pytest.mark.parametrize("count", [1, 12, 13, 1000])
def test_answers_come_in_the_order_asked(admin: Admin, filters: Filters, count: int) -> None:
    """One per key, never UNSPECIFIED, for few keys and for many."""
    name = create(admin, capacity=5000, error_rate=1e-9)
    order = random.Random(count)
    present = [b"in-%d" % i for i in range(count)]
    add(filters, name, *present)
    asked = [*present, *(b"out-%d" % i for i in range(count)), *present[:3]]
    order.shuffle(asked)
    assert check(filters, name, *asked) == [MAYBE if key in set(present) else DEFINITELY_NOT for key in asked]


@pytest.mark.parametrize("scheme", [1, 2])
def test_keys_and_digests_mean_the_same(admin: Admin, filters: Filters, scheme: int) -> None:
    """What was added as either is found as either, under both hash schemes."""
    name = create(admin, capacity=5000, error_rate=1e-9, hash_scheme=scheme)
    hasher = hasher_of(filters, name)
    keys, absent = [b"k%d" % i for i in range(200)], [b"n%d" % i for i in range(200)]
    add(filters, name, *keys[:100])
    filters.Add(
        filters_pb2.AddRequest(filter=name, digests=hasher.digests(keys[100:]), hash_id=hasher.hash_id)
    )
    for some in (keys[:3] + absent[:3], keys + absent):
        expected = [MAYBE if key in keys else DEFINITELY_NOT for key in some]
        assert check(filters, name, *some) == expected
        digests = filters_pb2.MightContainRequest(
            filter=name, digests=hasher.digests(some), hash_id=hasher.hash_id
        )
        assert list(filters.MightContain(digests).answers) == expected


def test_keys_are_bytes_and_nothing_is_normalised(admin: Admin, filters: Filters) -> None:
    """Zeros, newlines, invalid UTF-8, 64 KiB: each is itself and no other."""
    name = create(admin, error_rate=1e-9)
    for i, key in enumerate(AWKWARD_KEYS):
        expected = [MAYBE] * i + [DEFINITELY_NOT] * (len(AWKWARD_KEYS) - i)
        assert check(filters, name, *AWKWARD_KEYS) == expected
        assert add(filters, name, key).was_new == [True]
        assert check(filters, name, key) == [MAYBE]


def test_was_new_is_false_for_repeats(admin: Admin, filters: Filters) -> None:
    """Within a batch and after it; the counts tell new keys from added ones."""
    name = create(admin, error_rate=1e-9)
    assert add(filters, name, b"a", b"b", b"a", b"c", b"b").was_new == [True, True, False, True, False]
    assert add(filters, name, b"d", b"a").was_new == [True, False]
    shown = stats(filters, name)
    assert (shown.approximate_count, shown.added_count) == (4, 7)


def test_seqs_rise_and_are_durable(admin: Admin, filters: Filters) -> None:
    """Every Add has a seq of its own, also one that changes no bit."""
    name = create(admin)
    seqs = [add(filters, name, b"same").seq for _ in range(5)]
    assert seqs == sorted(set(seqs))
    assert stats(filters, name).journal_seq >= seqs[-1]


def test_a_hundred_thousand_keys_fit_one_call(admin: Admin, filters: Filters) -> None:
    """Answers included; a filter for a thousand grows along, and stays within its error rate."""
    name = create(admin, capacity=1000)
    keys = [b"key-%d" % i for i in range(100_000)]
    assert sum(add(filters, name, *keys).was_new) > 97_000
    assert check(filters, name, *keys) == [MAYBE] * 100_000
    absent = check(filters, name, *(b"absent-%d" % i for i in range(100_000)))
    assert absent.count(MAYBE) < 1150
    assert len(stats(filters, name).bodies) == 7


def test_large_calls_and_small_ones_get_along(admin: Admin, filters: Filters) -> None:
    """While big batches are under way, single checks are answered, all of them rightly."""
    name = create(admin, capacity=400_000, error_rate=1e-9)
    add(filters, name, b"small")
    batches = [[b"%d-%d" % (n, i) for i in range(50_000)] for n in range(4)]
    with ThreadPoolExecutor(5) as threads:
        under_way = [threads.submit(add, filters, name, *batch) for batch in batches]
        while not all(call.done() for call in under_way):
            assert check(filters, name, b"small", b"absent") == [MAYBE, DEFINITELY_NOT]
        for batch, call in zip(batches, under_way, strict=True):
            assert call.result().was_new == [True] * 50_000
            assert check(filters, name, *batch) == [MAYBE] * 50_000


def test_the_loop_breathes_during_a_large_call(tmp_path: Path) -> None:
    """A small check that comes behind a large Add or check is answered before it."""

    async def run() -> None:
        async with inside.open_gate(tmp_path) as (gate, _):
            await gate.create("name", inside.asked(100_000))
            large = Keys(tuple(b"%d" % i for i in range(100_000)))
            for verb in (gate.add, gate.might_contain):
                under_way = asyncio.ensure_future(verb("name", large))  # type: ignore[operator]
                await asyncio.sleep(0)
                await asyncio.ensure_future(gate.might_contain("name", Keys((b"small",))))
                assert not under_way.done()
                assert len((await under_way)[0]) == 100_000

    asyncio.run(run())


def test_concurrent_adds_and_checks_lose_nothing(admin: Admin, filters: Filters) -> None:
    """Eight callers add to one growing filter; each finds its own at once, and all is there in the end."""
    name = create(admin, capacity=100, error_rate=0.01)
    hasher = hasher_of(filters, name)

    def caller(number: int) -> list[bytes]:
        choose, added = random.Random(number), []
        for step in range(60):
            keys = [b"%d-%d-%d" % (number, step, i) for i in range(choose.choice([1, 1, 5, 40]))]
            if choose.random() < 0.5:
                add(filters, name, *keys)
            else:
                digests = hasher.digests(keys)
                filters.Add(filters_pb2.AddRequest(filter=name, digests=digests, hash_id=hasher.hash_id))
            added += keys
            assert set(check(filters, name, *added[-50:])) == {MAYBE}
        return added

    with ThreadPoolExecutor(8) as threads:
        every = [key for added in threads.map(caller, range(8)) for key in added]
    assert check(filters, name, *every) == [MAYBE] * len(every)
    assert stats(filters, name).added_count == len(every)


# -- what a filter tells of itself


def test_hash_spec_gives_what_digests_are_made_of(admin: Admin, filters: Filters) -> None:
    """An asked seed as asked, a drawn one differing from filter to filter, a secret of 16 bytes."""
    seeded = filters.HashSpec(filters_pb2.HashSpecRequest(filter=create(admin, seed=7)))
    assert (seeded.hash_scheme, seeded.WhichOneof("key"), seeded.seed) == (1, "seed", 7)
    again = filters.HashSpec(filters_pb2.HashSpecRequest(filter=create(admin, seed=7, capacity=5)))
    assert again.hash_id == seeded.hash_id
    drawn = {hasher_of(filters, create(admin)).seed for _ in range(4)}
    assert len(drawn) == 4
    secret = filters.HashSpec(filters_pb2.HashSpecRequest(filter=create(admin, hash_scheme=2)))
    assert (secret.hash_scheme, secret.WhichOneof("key"), len(secret.secret)) == (2, "secret", 16)


def test_stats_say_what_a_filter_is(admin: Admin, filters: Filters) -> None:
    """Spec, sizes, fill and rates; bodies add up to the whole."""
    name = create(
        admin, capacity=1000, error_rate=0.01, on_full=filters_pb2.ON_FULL_REJECT, key_format="user id"
    )
    empty = stats(filters, name)
    assert empty.spec == spec(
        1000, 0.01, kind=1, on_full=filters_pb2.ON_FULL_REJECT, hash_scheme=1, key_format="user id"
    )
    assert (empty.state, empty.damage, empty.generation) == (filters_pb2.FILTER_STATE_READY, "", 1)
    assert (empty.bits, empty.hashes, empty.memory_bytes) == (9586, 7, 1199)
    assert (empty.bits_set, empty.fill_ratio, empty.expected_error_rate) == (0, 0.0, 0.0)
    assert (empty.approximate_count, empty.added_count) == (0, 0)
    assert not empty.HasField("observed_error_rate")
    assert (empty.snapshot_seq, empty.HasField("snapshot_time")) == (0, False)
    assert (empty.leases, empty.rebuilding) == (0, False)
    assert empty.hash_id == hasher_of(filters, name).hash_id

    twin = BloomFilter(1000, 0.01, on_full="reject", seed=hasher_of(filters, name).seed)
    twin.add_many([b"%d" % i for i in range(800)])
    add(filters, name, *(b"%d" % i for i in range(800)))
    full = stats(filters, name)
    assert full.bits_set == twin.bits_set == full.bodies[0].bits_set
    assert full.fill_ratio == pytest.approx(twin.bits_set / 9586)
    assert full.expected_error_rate == twin.expected_error_rate
    assert full.approximate_count == twin.approximate_count
    [body] = full.bodies
    assert (body.bits, body.hashes, body.capacity, body.count) == (9586, 7, 1000, full.approximate_count)


def test_a_grown_filter_tells_of_all_its_bodies(admin: Admin, filters: Filters) -> None:
    """Bits, memory and counts are sums; the hash count is the newest body's."""
    name = create(admin, capacity=100)
    add(filters, name, *(b"%d" % i for i in range(650)))
    shown = stats(filters, name)
    assert [body.capacity for body in shown.bodies] == [100, 200, 400]
    assert shown.bits == sum(body.bits for body in shown.bodies)
    assert shown.bits_set == sum(body.bits_set for body in shown.bodies)
    assert shown.approximate_count == sum(body.count for body in shown.bodies)
    assert shown.memory_bytes == sum((body.bits + 7) // 8 for body in shown.bodies)
    assert shown.hashes == shown.bodies[-1].hashes
    assert 0 < shown.expected_error_rate <= 0.0115


def test_a_saturated_filter_still_has_stats(admin: Admin, filters: Filters) -> None:
    """All bits set: the rate is 1, and no number is infinite or none."""
    name = create(admin, capacity=1, on_full=filters_pb2.ON_FULL_DEGRADE)
    add(filters, name, *(b"%d" % i for i in range(5000)))
    shown = stats(filters, name)
    assert (shown.fill_ratio, shown.expected_error_rate) == (1.0, 1.0)
    assert shown.added_count == 5000
    assert check(filters, name, b"absent") == [MAYBE]


def test_checks_are_counted_by_what_they_came_to(admin: Admin, filters: Filters) -> None:
    """Keys, not calls; a refused call counts nothing."""
    name = create(admin, error_rate=1e-9)
    add(filters, name, b"a", b"b")
    check(filters, name, b"a", b"x", b"y", b"b", b"z")
    check(filters, name, b"a")
    failure(filters.MightContain, filters_pb2.MightContainRequest(filter=name, keys=[b"a", b""]))
    shown = stats(filters, name)
    assert (shown.checks_hit, shown.checks_skip, shown.checks_unsure) == (3, 3, 0)


def test_the_observed_error_rate_is_that_of_absent_keys(admin: Admin, filters: Filters) -> None:
    """Outcomes of a part of the hits stand for all of them: q * hit / (q * hit + skip), none without."""
    name = create(admin, error_rate=1e-9)
    keys = [b"%d" % i for i in range(100)]
    add(filters, name, *keys)
    check(filters, name, *keys)
    check(filters, name, *(b"absent-%d" % i for i in range(300)))
    assert not stats(filters, name).HasField("observed_error_rate")
    filters.ReportOutcomes(filters_pb2.ReportOutcomesRequest(filter=name, found=30, not_found=10))
    shown = stats(filters, name)
    assert (shown.outcomes_found, shown.outcomes_not_found, shown.outcomes_false_no) == (30, 10, 0)
    assert shown.observed_error_rate == pytest.approx(0.25 * 100 / (0.25 * 100 + 300))


def test_a_false_no_is_counted_and_logged(shared: DaemonProcess, admin: Admin, filters: Filters) -> None:
    """It must never happen, so an error is in the log when it does."""
    name = create(admin)
    filters.ReportOutcomes(filters_pb2.ReportOutcomesRequest(filter=name, false_no=2))
    assert stats(filters, name).outcomes_false_no == 2
    assert f"the authority has 2 keys that {name} answered a definite no for" in shared.log()


def test_false_noes_do_not_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line per filter and ten seconds at most, with all that were reported since the one before; what the
    last reports held back is told while the filters are tended."""
    clock = Clock()

    def told() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        caplog.clear()
        return lines

    async def run() -> None:
        async with inside.open_gate(tmp_path, clock=clock) as (gate, _):
            for name in ("one", "two"):
                await gate.create(name, inside.asked())
            for _ in range(1000):
                gate.report_outcomes("one", 1, 1, 2)
                gate.report_outcomes("two", 1, 1, 0)
            assert told() == ["the authority has 2 keys that one answered a definite no for"]
            gate.report_outcomes("two", 0, 0, 1)
            assert told() == ["the authority has 1 keys that two answered a definite no for"]
            clock.now += 9.9
            gate.report_outcomes("one", 0, 0, 1)
            await gate.tend()
            assert told() == []
            clock.now += 0.1
            gate.report_outcomes("one", 0, 0, 1)
            assert told() == ["the authority has 2000 keys that one answered a definite no for"]
            gate.report_outcomes("one", 0, 0, 7)
            clock.now += 10
            await gate.tend()
            await gate.tend()
            assert told() == ["the authority has 7 keys that one answered a definite no for"]
            assert gate.catalog.get("one").outcomes.false_no == 2009  # type: ignore[union-attr]

    asyncio.run(run())


def test_stats_of_a_filter_that_grows_meanwhile_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits, set bits, fill, bodies and rate of one reply are of the same bodies, each counted once."""
    counted: list[BloomBody] = []
    count = BloomBody.bits_set.fget
    assert count is not None

    async def run() -> pb.FilterStats:
        async with inside.open_gate(tmp_path) as (gate, _):
            await gate.create("name", inside.asked(100))
            await gate.add("name", Keys(tuple(b"%d" % i for i in range(250))))
            bloom = gate.catalog.get("name").bloom  # type: ignore[union-attr]
            assert bloom is not None
            assert len(bloom.bodies) == 2

            def busy(body: BloomBody) -> int:
                # As if Adds came in between, always.
                counted.append(body)
                for i in range(100):
                    bloom.add(b"%d-%d" % (len(counted), i))
                return count(body)  # type: ignore[no-any-return]

            monkeypatch.setattr(BloomBody, "bits_set", property(busy))
            shown = stats_message(await gate.stats("name"), ANYONE)
            assert len(bloom.bodies) > len(shown.bodies)
            return shown

    shown = asyncio.run(run())
    assert len(counted) == len(shown.bodies) == 2
    assert shown.bits == sum(body.bits for body in shown.bodies)
    assert shown.bits_set == sum(body.bits_set for body in shown.bodies)
    assert shown.fill_ratio == shown.bits_set / shown.bits
    assert shown.memory_bytes == sum((body.bits + 7) // 8 for body in shown.bodies)
    assert shown.approximate_count == sum(body.count for body in shown.bodies) <= shown.added_count
    assert shown.hashes == shown.bodies[-1].hashes
    absent = 1.0
    for body in shown.bodies:
        absent *= 1 - (body.bits_set / body.bits) ** body.hashes
    assert shown.expected_error_rate == pytest.approx(1 - absent)


def test_stats_carry_the_limits(filters: Filters, admin: Admin) -> None:
    """So that clients split to them."""
    limits = filters.Stats(filters_pb2.StatsRequest(filter=create(admin))).limits
    assert (limits.keys_per_call, limits.bytes_per_key, limits.bytes_per_call) == (100_000, 65536, 16 << 20)


def test_a_snapshot_is_taken_on_demand(shared: DaemonProcess, admin: Admin, filters: Filters) -> None:
    """It holds what was acknowledged; its file is there, and two at most are kept."""
    name = create(admin)
    seqs, sizes = [], []
    for i in range(3):
        seq = add(filters, name, b"%d" % i).seq
        before = time.time()
        shown = admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name=name)).filter
        assert shown.snapshot_seq >= seq
        assert before - 1 < shown.snapshot_time.ToNanoseconds() / 1e9 < time.time() + 1
        seqs.append(shown.snapshot_seq)
        sizes.append(len(list(shared.directory.glob("snapshots/*.bgf"))))
    assert seqs == sorted(set(seqs))
    assert sizes[2] == sizes[1] == sizes[0] + 1
    assert stats(filters, name).snapshot_seq == seqs[-1]


def test_the_list_is_sorted_and_shows_no_seed(admin: Admin, filters: Filters) -> None:
    """Nor a secret, in lists, stats or what a create answers."""
    prefix = a_name()
    for end in ("b", "A", "a", "10", "9"):
        create(admin, f"{prefix}.{end}", seed=0xBEEF)
    create(admin, f"{prefix}.secret", hash_scheme=2)
    listed = admin.ListFilters(admin_pb2.ListFiltersRequest()).filters
    assert [each.name for each in listed] == sorted(each.name for each in listed)
    mine = [each for each in listed if each.name.startswith(f"{prefix}.")]
    assert [each.name.rpartition(".")[2] for each in mine] == ["10", "9", "A", "a", "b", "secret"]
    secret = filters.HashSpec(filters_pb2.HashSpecRequest(filter=f"{prefix}.secret")).secret
    again = admin.CreateFilter(admin_pb2.CreateFilterRequest(name=f"{prefix}.a", spec=spec(seed=0xBEEF)))
    for shown in (*mine, stats(filters, f"{prefix}.a"), again.filter):
        assert not shown.spec.HasField("seed")
        assert secret not in shown.SerializeToString()


def test_the_log_shows_no_seed_secret_or_key(start_daemon: StartDaemon) -> None:
    """At the lowest level, over a life with errors in it."""
    daemon = start_daemon("--set", "log_level=debug")
    with daemon.stubs() as (filters, admin):
        seeded, keyed = create(admin, seed=3405691582), create(admin, hash_scheme=2)
        for name in (seeded, keyed):
            add(filters, name, b"visible-key")
            failure(filters.Add, filters_pb2.AddRequest(filter=name, keys=[b"visible-key", b""]))
            admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name=name))
        secret = hasher_of(filters, keyed).seed
        digest = hasher_of(filters, keyed).digest(b"visible-key")
    assert daemon.stop() == 0
    log = daemon.log()
    assert f"created filter {keyed}" in log
    assert isinstance(secret, bytes)
    for hidden in ("visible-key", "3405691582", "cafebabe", secret.hex(), repr(secret)[2:-1], digest.hex()):
        assert hidden not in log


# -- create and drop


def test_a_dropped_filter_is_gone_and_its_name_is_free(start_daemon: StartDaemon) -> None:
    """One of the same name created anew never shows the old keys, nor do two restarts bring them back."""
    daemon = start_daemon()
    keys = [b"%d" % i for i in range(500)]
    with daemon.stubs() as (filters, admin):
        for again in range(3):
            create(admin, "name", error_rate=1e-9)
            assert check(filters, "name", *keys) == [DEFINITELY_NOT] * 500
            add(filters, "name", *keys)
            if again != 1:
                admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name="name"))
            drop(admin, "name")
            gone = failure(filters.Stats, filters_pb2.StatsRequest(filter="name"))
            assert gone.reason == "FILTER_NOT_FOUND"
            assert not list(daemon.directory.glob("snapshots/*.bgf"))
        create(admin, "name", error_rate=1e-9)
        add(filters, "name", b"new")
        create(admin, "gone")
        drop(admin, "gone")
    for number in (signal.SIGKILL, signal.SIGTERM):
        daemon.stop(number)
        daemon = start_daemon()
        with daemon.stubs() as (filters, admin):
            assert [each.name for each in admin.ListFilters(admin_pb2.ListFiltersRequest()).filters] == [
                "name"
            ]
            assert check(filters, "name", b"new", *keys) == [MAYBE] + [DEFINITELY_NOT] * 500


def test_many_create_one_name_at_once(admin: Admin, filters: Filters) -> None:
    """One of them creates it; the others find it, equal, and none of the keys added at once is lost."""
    name, start = a_name(), threading.Barrier(12)

    def caller(number: int) -> bool:
        start.wait()
        reply = admin.CreateFilter(admin_pb2.CreateFilterRequest(name=name, spec=spec()))
        add(filters, name, b"%d" % number)
        return reply.created

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(caller, range(12))).count(True) == 1
    assert check(filters, name, *(b"%d" % i for i in range(12))) == [MAYBE] * 12


def test_adds_racing_a_drop_are_acknowledged_before_it_or_not_found(admin: Admin, filters: Filters) -> None:
    """Of three filters of one name in turn; a key acknowledged by one never shows in the next."""
    name = a_name()
    for turn in range(3):
        create(admin, name, capacity=10_000, error_rate=1e-9)
        started = threading.Semaphore(0)

        def caller(number: int, turn: int = turn, started: threading.Semaphore = started) -> list[bytes]:
            acknowledged = []
            for i in range(100_000):
                key = b"%d-%d-%d" % (turn, number, i)
                try:
                    add(filters, name, key)
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.NOT_FOUND:
                        raise
                    return acknowledged
                acknowledged.append(key)
                started.release()
            raise AssertionError("the drop never came")

        with ThreadPoolExecutor(4) as threads:
            adding = [threads.submit(caller, number) for number in range(4)]
            for _ in range(20):
                started.acquire()
            drop(admin, name)
            acknowledged = [key for each in adding for key in each.result()]
        create(admin, name, capacity=10_000, error_rate=1e-9)
        assert set(check(filters, name, *acknowledged)) == {DEFINITELY_NOT}
        drop(admin, name)


def test_an_add_queued_before_a_drop_is_acknowledged_and_one_behind_it_is_not(tmp_path: Path) -> None:
    """While the drop is not durable yet, checks go on, and neither Add nor create can slip behind it."""

    async def run() -> None:
        async with inside.open_gate(tmp_path) as (gate, journal):
            await gate.create("name", inside.asked())
            journal.released.clear()
            before = asyncio.ensure_future(gate.add("name", Keys((b"a",))))
            await inside.until(lambda: journal.last_seq > journal.durable_seq)
            dropping = asyncio.ensure_future(gate.drop("name"))
            await inside.until(lambda: journal.last_seq == journal.durable_seq + 2)
            with pytest.raises(errors.FilterNotFound):
                await gate.add("name", Keys((b"b",)))
            with pytest.raises(errors.FilterNotFound):
                await gate.snapshot("name")
            assert (await gate.might_contain("name", Keys((b"a", b"b"))))[0] == bytes([True, False])
            again = asyncio.ensure_future(gate.create("name", inside.asked()))
            twice = asyncio.ensure_future(gate.drop("name"))
            journal.released.set()
            assert (await before)[0] == [True]
            await dropping
            assert (await again)[1]
            await twice
            assert len(gate.catalog) == 0

    asyncio.run(run())


def test_a_create_or_drop_whose_caller_went_away_is_done_to_its_end(tmp_path: Path) -> None:
    """Half a creation would be none; and what its caller does not wait for is not counted twice."""

    async def run() -> None:
        async with inside.open_gate(tmp_path, LimitsConfig(filters=1)) as (gate, journal):
            journal.released.clear()
            creating = asyncio.ensure_future(gate.create("name", inside.asked()))
            await inside.until(lambda: journal.last_seq == 1)
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
            assert len(gate.catalog) == 0
            with pytest.raises(errors.LimitExceeded):
                await gate.create("other", inside.asked())
            journal.released.set()
            await gate.finish()
            assert [entry.name for entry in gate.catalog] == ["name"]
            assert not (await gate.create("name", inside.asked()))[1]

            journal.released.clear()
            dropping = asyncio.ensure_future(gate.drop("name"))
            await inside.until(lambda: journal.last_seq == 2)
            dropping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dropping
            journal.released.set()
            await gate.finish()
            assert len(gate.catalog) == 0
        async with inside.open_gate(tmp_path) as (gate, _):
            assert len(gate.catalog) == 0

    asyncio.run(run())


def test_a_cancelled_add_leaves_the_filter_whole(tmp_path: Path) -> None:
    """Its keys may be in or not, as for any Add whose answer was lost; the daemon goes on."""

    async def run() -> None:
        async with inside.open_gate(tmp_path) as (gate, journal):
            await gate.create("name", inside.asked())
            journal.released.clear()
            adding = asyncio.ensure_future(gate.add("name", Keys((b"a",))))
            await inside.until(lambda: journal.last_seq > journal.durable_seq)
            adding.cancel()
            journal.released.set()
            assert (await gate.add("name", Keys((b"b",))))[0] == [True]
            assert gate.catalog.get("name").adds == 1  # type: ignore[union-attr]

    asyncio.run(run())


# -- every acknowledged key is maybe, whatever happens

KEYS = [b"%d" % i for i in range(40)]
Operation = tuple[str, Any]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["add", "add", "digests", "big"]), st.lists(st.sampled_from(KEYS), max_size=30)
        ),
        st.tuples(st.sampled_from(["snapshot", "crash", "drop", "tend"]), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    operations=OPERATIONS, on_full=st.sampled_from(["grow", "degrade"]), scheme=st.sampled_from(HashScheme)
)
def test_every_acknowledged_key_is_maybe(
    operations: list[Operation], on_full: str, scheme: HashScheme
) -> None:
    """Over adds of all forms, growth, snapshots, trims, crashes and drops, in any order; and never one of a
    filter before it. Counts agree with the kernel's, and are exact after every crash."""
    added = 0

    async def life(directory: Path, todo: list[Operation], acknowledged: set[bytes]) -> list[Operation]:
        nonlocal added
        async with inside.open_gate(directory, retention=0) as (gate, journal):
            await gate.create("name", inside.asked(2, 1e-6, on_full=on_full, hash_scheme=scheme))
            while True:
                answers, degraded = await gate.might_contain("name", Keys(tuple(KEYS)))
                assert not degraded
                maybe = {key for key, answer in zip(KEYS, answers, strict=True) if answer}
                assert acknowledged <= maybe
                entry = gate.catalog.get("name")
                assert entry is not None
                assert entry.bloom is not None
                assert entry.bloom.added_count == added
                if on_full == "grow":
                    assert maybe == acknowledged
                    assert entry.bloom.approximate_count == len(acknowledged)
                if not todo:
                    return []
                what, keys = todo.pop(0)
                if what == "crash":
                    return todo
                if what in ("add", "digests", "big"):
                    given = tuple(keys)
                    hasher = gate.hash_spec("name").hasher
                    if what == "digests":
                        asked = Keys(digests=hasher.digests(given), hash_id=hasher.hash_id)
                    else:
                        asked = Keys(given * (300 if what == "big" else 1))
                    was_new, seq = await gate.add("name", asked)
                    assert len(was_new) == len(asked)
                    assert seq <= journal.durable_seq
                    acknowledged.update(given)
                    added += len(asked)
                elif what == "snapshot":
                    await gate.snapshot("name")
                elif what == "tend":
                    await gate.tend()
                else:
                    await gate.drop("name")
                    await gate.create("name", inside.asked(2, 1e-6, on_full=on_full, hash_scheme=scheme))
                    acknowledged.clear()
                    added = 0

    with tempfile.TemporaryDirectory() as folder:
        todo, acknowledged = list(operations), set[bytes]()
        while todo:
            todo = asyncio.run(life(Path(folder), todo, acknowledged))
        asyncio.run(life(Path(folder), [], acknowledged))


# -- damaged


@pytest.fixture
def damaged(start_daemon: StartDaemon) -> DaemonProcess:
    """A daemon whose filter "hurt" lost both snapshots, with the journal trimmed past its Adds; "well" did
    not."""
    flags = ("--set", "journal.retention=0", "--set", "snapshot.check_every=0.02")
    daemon = start_daemon(*flags)
    seqs = {}
    with daemon.stubs() as (filters, admin):
        for name in ("hurt", "well"):
            create(admin, name, error_rate=1e-9)
            seqs[name] = add(filters, name, b"old").seq
            for _ in range(2):
                admin.SnapshotFilter(admin_pb2.SnapshotFilterRequest(name=name))
        hurt = sorted(daemon.directory.glob("snapshots/*.bgf"))[:2]
        # As long as the journal has its Add, that alone could make it whole.
        eventually(lambda: _first_add(daemon.directory) > seqs["hurt"])
    daemon.kill()
    for path in hurt:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    return start_daemon(*flags)


def _first_add(directory: Path) -> int:
    """The first Add that the journal still has."""
    with closing(sqlite3.connect(f"file:{directory}/bloomgate.db?mode=ro", uri=True)) as connection:
        (seq,) = connection.execute("SELECT min(seq) FROM journal WHERE kind = 3").fetchone()
    return int(seq)


def test_a_damaged_filter_says_maybe_to_all(damaged: DaemonProcess, start_daemon: StartDaemon) -> None:
    """Counted as unsure, and marked; it is listed with the reason, takes Adds and is not snapshotted. The
    others serve. A restart makes it no better; a drop frees the name."""
    with damaged.stubs() as (filters, admin):
        listed = {each.name: each for each in admin.ListFilters(admin_pb2.ListFiltersRequest()).filters}
        hurt = listed["hurt"]
        assert hurt.state == filters_pb2.FILTER_STATE_DAMAGED
        assert "cannot be proven complete" in hurt.damage
        assert (hurt.bits, hurt.memory_bytes, hurt.expected_error_rate) == (0, 0, 1.0)
        assert listed["well"].state == filters_pb2.FILTER_STATE_READY

        reply = filters.MightContain(filters_pb2.MightContainRequest(filter="hurt", keys=[b"old", b"never"]))
        assert (list(reply.answers), reply.degraded) == ([MAYBE, MAYBE], True)
        hasher = hasher_of(filters, "hurt")
        reply = filters.MightContain(
            filters_pb2.MightContainRequest(filter="hurt", digests=bytes(16), hash_id=hasher.hash_id)
        )
        assert (list(reply.answers), reply.degraded) == ([MAYBE], True)
        shown = stats(filters, "hurt")
        assert (shown.checks_unsure, shown.checks_hit, shown.checks_skip) == (3, 0, 0)
        added = add(filters, "hurt", b"a", b"b")
        assert (list(added.was_new), added.seq > 0) == ([False, False], True)

        failed = failure(admin.SnapshotFilter, admin_pb2.SnapshotFilterRequest(name="hurt"))
        assert failed.code is grpc.StatusCode.FAILED_PRECONDITION
        assert failed.message == "filter 'hurt' cannot do this while it is DAMAGED"
        assert (failed.reason, failed.fields) == (
            "NOT_FOR_THIS_STATE",
            {"filter": "hurt", "state": "DAMAGED"},
        )
        assert check(filters, "well", b"old", b"never") == [MAYBE, DEFINITELY_NOT]
        assert not stats(filters, "well").damage
    assert "filter hurt is DAMAGED, its checks are answered maybe" in damaged.log()
    status, metrics = damaged.get("/metrics")
    assert status == 200
    for line in (
        'bloomgate_filter_state{filter="hurt",state="damaged"} 1.0',
        'bloomgate_filter_state{filter="hurt",state="ready"} 0.0',
        'bloomgate_filter_state{filter="well",state="ready"} 1.0',
        'bloomgate_checks_total{filter="hurt",result="unsure",via="rpc"} 3.0',
    ):
        assert line in metrics
    assert damaged.get("/readyz")[0] == 200
    # Moved aside for whoever wants to look at them, never deleted.
    assert len(list(damaged.directory.glob("snapshots/*.damaged-*"))) == 2

    assert damaged.stop() == 0
    again = start_daemon()
    with again.stubs() as (filters, admin):
        assert stats(filters, "hurt").state == filters_pb2.FILTER_STATE_DAMAGED
        assert check(filters, "hurt", b"never") == [MAYBE]
        drop(admin, "hurt")
        create(admin, "hurt", error_rate=1e-9)
        assert check(filters, "hurt", b"old", b"a") == [DEFINITELY_NOT] * 2


def test_growth_without_memory_adds_nothing_and_journals_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that cannot be allocated must not be in the journal: the next start could not recover it."""

    def no_memory(_: object) -> None:
        raise MemoryError

    async def scenario() -> None:
        async with inside.open_gate(tmp_path) as (gate, journal):
            await gate.create("name", Asked(FilterSpec.plan(10, seed=1), None))
            await gate.add("name", Keys((b"before",)))
            before = journal.last_seq
            monkeypatch.setattr("bloomgated.room.allocate", no_memory)
            with pytest.raises(errors.Overloaded, match="no memory"):
                await gate.add("name", Keys(tuple(b"%d" % i for i in range(20))))
            monkeypatch.undo()
            assert journal.last_seq == before
            assert (await gate.might_contain("name", Keys((b"3", b"before"))))[0] == bytes([False, True])

    asyncio.run(scenario())


@pytest.mark.parametrize("keys", [0, 1, 127, 128, 300, 20_000])
@pytest.mark.parametrize("degraded", [False, True])
def test_answers_are_written_as_protobuf_would(keys: int, degraded: bool) -> None:
    """The response is put together by hand, a byte per key."""
    found = bytes(number % 3 == 0 for number in range(keys))
    answers = [MAYBE if each else DEFINITELY_NOT for each in found]
    expected = filters_pb2.MightContainResponse(answers=answers, degraded=degraded)
    assert answers_bytes(found, degraded) == expected.SerializeToString(deterministic=True)
