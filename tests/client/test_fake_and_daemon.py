"""The fake gate and the real daemon under one contract: what the fake teaches holds in production."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bloomgate import Client, transport
from bloomgate.errors import (
    BloomgateError,
    FilterExists,
    FilterFull,
    FilterNotFound,
    InvalidRequest,
    LimitExceeded,
    StaleHashId,
)
from bloomgate.names import NAME
from bloomgate.testing import FakeGate
from bloomgate.transport import Method, Transport
from bloomgate.v1 import admin_pb2 as admin
from bloomgate.v1 import filters_pb2 as pb
from support.daemon import DaemonProcess

LIMITS = {"keys_per_call": 5, "bytes_per_key": 8, "bytes_per_call": 64}
TIMEOUT = 30.0
FRUIT = pb.FilterSpec(capacity=1000, error_rate=1e-6, seed=7, key_format="lower case")


@pytest.fixture(scope="module", params=["fake", "daemon"])
def over(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transport]:
    """The transport to each gate in turn, which has "fruit", and "small" of two keys that rejects more."""
    if request.param == "fake":
        client, daemon = FakeGate(**LIMITS).client(), None
    else:
        flags = [flag for name, value in LIMITS.items() for flag in ("--set", f"limits.{name}={value}")]
        daemon = DaemonProcess(tmp_path_factory.mktemp("contract") / "data", *flags)
        client = Client(daemon.grpc)
    small = pb.FilterSpec(capacity=2, error_rate=0.01, on_full=pb.ON_FULL_REJECT)
    secret = pb.FilterSpec(capacity=9, error_rate=0.01, hash_scheme=pb.HASH_SCHEME_BLAKE2B_128)
    for name, spec in (("fruit", FRUIT), ("small", small), ("secret", secret)):
        made = admin.CreateFilterRequest(name=name, spec=spec)
        client._transport.unary(transport.CREATE_FILTER, made, TIMEOUT)
    yield client._transport
    client.close()
    if daemon is not None:
        daemon.kill()


def _create(name: str = "fruit", **fields: Any) -> tuple[Method[Any, Any], Any]:
    given = {"capacity": 1000, "error_rate": 1e-6, "key_format": "lower case", **fields}
    return transport.CREATE_FILTER, admin.CreateFilterRequest(name=name, spec=pb.FilterSpec(**given))


def _both(error: BloomgateError, **fields: Any) -> list[Any]:
    """A bad request of keys, to each verb that takes keys."""
    given = {"filter": "fruit", **fields}
    return [
        ((transport.ADD, pb.AddRequest(**given)), error),
        ((transport.MIGHT_CONTAIN, pb.MightContainRequest(**given)), error),
    ]


def _bad_name(field: str) -> InvalidRequest:
    return InvalidRequest(field, f"{field} must match {NAME.pattern}")


def _of_filter(error: Any, name: str) -> list[Any]:
    return [
        ((transport.STATS, pb.StatsRequest(filter=name)), error("filter")),
        ((transport.HASH_SPEC, pb.HashSpecRequest(filter=name)), error("filter")),
        ((transport.REPORT_OUTCOMES, pb.ReportOutcomesRequest(filter=name, found=1)), error("filter")),
        *_both(error("filter"), filter=name, keys=[b"a"]),
        *_both(error("filter"), filter=name),
    ]


BAD = [
    *_both(InvalidRequest("keys", "set keys or digests, not both"), keys=[b"a"], digests=b"x" * 16),
    *_both(InvalidRequest("digests", "digests must be 16 bytes each, got 17 bytes"), digests=b"x" * 17),
    *_both(InvalidRequest("hash_id", "digests need the hash_id they were made under"), digests=b"x" * 16),
    *_both(InvalidRequest("keys", "keys[1] must not be empty"), keys=[b"a", b""]),
    *_both(LimitExceeded("keys_per_call", 6, 5), keys=[b"a"] * 6),
    *_both(LimitExceeded("keys_per_call", 6, 5), digests=b"x" * 96, hash_id=1),
    *_both(LimitExceeded("bytes_per_call", 80, 64), digests=b"x" * 80, hash_id=1),
    *_both(LimitExceeded("bytes_per_key", 9, 8), keys=[b"a", b"pineapple"]),
    *_both(StaleHashId("fruit"), digests=b"x" * 16, hash_id=1),
    *_of_filter(lambda _: FilterNotFound("veg"), "veg"),
    *_of_filter(_bad_name, "-veg"),
    *_of_filter(_bad_name, ""),
    ((transport.ADD, pb.AddRequest(filter="small", keys=[b"a", b"b", b"c"])),
     FilterFull("small", "capacity", 2, 3)),
    ((transport.DROP_FILTER, admin.DropFilterRequest(name="veg")), FilterNotFound("veg")),
    ((transport.DROP_FILTER, admin.DropFilterRequest(name="a b")), _bad_name("name")),
    ((transport.SNAPSHOT_FILTER, admin.SnapshotFilterRequest(name="veg")), FilterNotFound("veg")),
    (_create("a/b"), _bad_name("name")),
    (_create("x" * 129), _bad_name("name")),
    (_create(capacity=1001), FilterExists("fruit", "capacity")),
    (_create(error_rate=0.01), FilterExists("fruit", "error_rate")),
    (_create(on_full=pb.ON_FULL_REJECT), FilterExists("fruit", "on_full")),
    (_create(hash_scheme=pb.HASH_SCHEME_BLAKE2B_128), FilterExists("fruit", "hash_scheme")),
    (_create(key_format="as it comes"), FilterExists("fruit", "key_format")),
    (_create(seed=8), FilterExists("fruit", "seed")),
    (_create(seed=8, key_format=""), FilterExists("fruit", "key_format")),
    (_create("new", on_full=9), InvalidRequest("spec.on_full", "spec.on_full 9 is unknown")),
    (_create("new", hash_scheme=9), InvalidRequest("spec.hash_scheme", "spec.hash_scheme 9 is unknown")),
    (_create("new", kind=9), InvalidRequest("spec.kind", "spec.kind must be BLOOM, got 9")),
    (_create("a b", on_full=9), InvalidRequest("spec.on_full", "spec.on_full 9 is unknown")),
    (_create("new", hash_scheme=pb.HASH_SCHEME_BLAKE2B_128, seed=7),
     InvalidRequest("spec.seed", "spec.seed is not for BLAKE2B_128, whose secret is drawn")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error"), BAD)
def test_a_bad_request_is_refused_in_the_same_words(
    over: Transport, call: Any, error: BloomgateError
) -> None:
    """Class, fields and message."""
    method, request = call
    with pytest.raises(BloomgateError) as caught:
        over.unary(method, request, TIMEOUT)
    assert (type(caught.value), vars(caught.value), str(caught.value)) == (
        type(error),
        vars(error),
        str(error),
    )


@pytest.mark.parametrize("fields", [{"capacity": 0}, {"error_rate": 0.7}, {"key_format": "x" * 257}])
def test_a_number_out_of_its_range_is_refused_by_the_kernels_words(
    over: Transport, fields: dict[str, Any]
) -> None:
    """Under its name on the wire."""
    ((field, value),) = fields.items()
    method, request = _create("new", **fields)
    with pytest.raises(InvalidRequest) as caught:
        over.unary(method, request, TIMEOUT)
    assert caught.value.field == f"spec.{field}"
    assert str(caught.value).startswith(f"spec.{field} must be ")
    assert repr(value)[:100] in str(caught.value)


def test_a_filter_lives_the_same_life(over: Transport) -> None:
    """Created once, added to, asked by key and by digest, described and dropped: the same answers."""

    def call(method: Method[Any, Any], **fields: Any) -> Any:
        return over.unary(method, method.request(**fields), TIMEOUT)

    spec = pb.FilterSpec(capacity=2, error_rate=0.01, seed=3)
    assert call(transport.CREATE_FILTER, name="veg", spec=spec).created is True
    assert call(transport.CREATE_FILTER, name="veg", spec=spec).created is False
    spec.ClearField("seed")
    assert call(transport.CREATE_FILTER, name="veg", spec=spec).created is False

    assert list(call(transport.ADD, filter="veg").was_new) == []
    first = call(transport.ADD, filter="veg", keys=[b"leek", b"kale", b"leek"])
    assert list(first.was_new) == [True, True, False]
    # The capacity is passed at the second of these: the filter grows.
    second = call(transport.ADD, filter="veg", keys=[b"kale", b"peas", b"beet"])
    assert list(second.was_new) == [False, True, True]
    assert second.seq > first.seq > 0

    asked = [b"leek", b"bread", b"beet", b"soap", b"kale"]
    answers = call(transport.MIGHT_CONTAIN, filter="veg", keys=asked)
    expected = [pb.ANSWER_MAYBE, pb.ANSWER_DEFINITELY_NOT] * 2 + [pb.ANSWER_MAYBE]
    assert (list(answers.answers), answers.degraded) == (expected, False)
    assert list(call(transport.MIGHT_CONTAIN, filter="veg").answers) == []

    hashing = call(transport.HASH_SPEC, filter="veg")
    assert (hashing.hash_scheme, hashing.seed) == (pb.HASH_SCHEME_MURMUR3_X64_128, 3)
    assert len(call(transport.HASH_SPEC, filter="secret").secret) == 16
    client = Client.over(over)
    veg = client.filter("veg")
    assert veg.might_contain_many([*asked, *asked]) == [True, False, True, False, True] * 2
    assert veg.add_many(["leek", "corn"]) == [False, True]

    call(transport.REPORT_OUTCOMES, filter="veg", found=2, not_found=1, false_no=1)
    call(transport.REPORT_OUTCOMES, filter="veg", found=1)
    reply = call(transport.STATS, filter="veg")
    assert reply.limits == pb.Limits(**LIMITS)
    stats = reply.filter
    seen = (
        stats.name, stats.state, stats.generation, stats.hash_id == hashing.hash_id,
        stats.approximate_count, stats.added_count, len(stats.bodies),
        stats.checks_skip, stats.checks_hit, stats.checks_unsure,
        stats.outcomes_found, stats.outcomes_not_found, stats.outcomes_false_no,
    )  # fmt: skip
    assert seen == ("veg", pb.FILTER_STATE_READY, 1, True, 5, 8, 2, 6, 9, 0, 3, 1, 1)
    assert [(body.capacity, body.count) for body in stats.bodies] == [(2, 2), (4, 3)]
    assert (stats.spec.on_full, stats.spec.HasField("seed")) == (pb.ON_FULL_GROW, False)
    assert 0 < stats.expected_error_rate < 0.02
    kept = call(transport.SNAPSHOT_FILTER, name="veg").filter
    assert kept.snapshot_seq == stats.journal_seq > 0

    assert [each.name for each in call(transport.LIST_FILTERS).filters] == ["fruit", "secret", "small", "veg"]
    call(transport.DROP_FILTER, name="veg")
    with pytest.raises(FilterNotFound):
        call(transport.STATS, filter="veg")
    assert call(transport.HEALTH).value == 1
