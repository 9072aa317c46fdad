"""Creating, listing, dropping, snapshotting filters, and asking about them."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest

from bloomgate import FilterState, HashScheme, Kind, OnFull, ParameterError
from bloomgate.errors import (
    FilterExists,
    FilterNotFound,
    InvalidRequest,
    MalformedReply,
    NotServing,
    Unavailable,
)
from bloomgate.stats import FilterStats, read_stats
from bloomgate.testing import FakeGate
from bloomgate.v1 import filters_pb2 as pb

from .twins import Twin


def test_a_filter_is_created_once(twin: Twin, gate: FakeGate) -> None:
    """Asking again for an equal one succeeds and says that it was there."""
    client = twin.client(gate)
    stats, created = client.create_filter(
        "veg", 5000, 0.001, on_full="reject", hash_scheme=HashScheme.BLAKE2B_128, key_format="lower case"
    )
    assert created
    assert (stats.name, stats.capacity, stats.error_rate) == ("veg", 5000, 0.001)
    assert (stats.on_full, stats.hash_scheme, stats.kind) == (
        OnFull.REJECT,
        HashScheme.BLAKE2B_128,
        Kind.BLOOM,
    )
    assert (stats.key_format, stats.state) == ("lower case", FilterState.READY)
    again = client.create_filter(
        "veg", 5000, 0.001, on_full="reject", hash_scheme=HashScheme.BLAKE2B_128, key_format="lower case"
    )
    assert not again.created
    assert again.stats == stats


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("capacity", {"capacity": 1001}),
        ("error_rate", {"error_rate": 0.1}),
        ("on_full", {"on_full": "degrade"}),
        ("hash_scheme", {"hash_scheme": HashScheme.BLAKE2B_128}),
        ("seed", {"seed": 8}),
        ("key_format", {"key_format": "other"}),
    ],
)
def test_a_different_filter_of_the_name_is_not_created(
    twin: Twin, gate: FakeGate, field: str, values: dict[str, Any]
) -> None:
    """The error names the field that differs."""
    with pytest.raises(FilterExists) as caught:
        twin.client(gate).create_filter("fruit", **{"capacity": 1000, "error_rate": 1e-6, **values})
    assert (caught.value.filter, caught.value.field) == ("fruit", field)


def test_a_seed_that_is_not_asked_for_is_not_compared(twin: Twin, gate: FakeGate) -> None:
    """Any seed is equal then; one that is asked for must be met."""
    client = twin.client(gate)
    assert not client.create_filter("fruit", 1000, 1e-6).created
    assert not client.create_filter("fruit", 1000, 1e-6, seed=7).created


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("capacity", {"capacity": 0}),
        ("capacity", {"capacity": -1}),
        ("capacity", {"capacity": 1.5}),
        ("error_rate", {"error_rate": 1.0}),
        ("error_rate", {"error_rate": float("nan")}),
        ("on_full", {"on_full": "explode"}),
        ("hash_scheme", {"hash_scheme": 9}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 1, "hash_scheme": HashScheme.BLAKE2B_128}),
        ("key_format", {"key_format": "x" * 257}),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(
    twin: Twin, gate: FakeGate, field: str, values: dict[str, Any]
) -> None:
    """Before anything is sent: protobuf's own words would not say which field."""
    with pytest.raises(ParameterError) as caught:
        twin.client(gate).create_filter("veg", **{"capacity": 10, **values})
    assert caught.value.field == field
    assert gate.calls == []


def test_filters_are_listed_by_name(twin: Twin, gate: FakeGate) -> None:
    """All of them."""
    client = twin.client(gate)
    client.create_filter("veg", 10)
    client.create_filter("bread", 10)
    assert [stats.name for stats in client.list_filters()] == ["bread", "fruit", "veg"]


def test_a_dropped_filter_is_gone(twin: Twin, gate: FakeGate) -> None:
    """Unknown to every verb; its name is free."""
    client = twin.client(gate)
    client.drop_filter("fruit")
    for call in (
        lambda: client.drop_filter("fruit"),
        lambda: client.snapshot_filter("fruit"),
        client.filter("fruit").stats,
        lambda: client.filter("fruit").add("mango"),
    ):
        with pytest.raises(FilterNotFound, match="fruit"):
            call()
    assert client.create_filter("fruit", 5).created


def test_stats_say_what_was_done(twin: Twin, gate: FakeGate) -> None:
    """Counts of keys, checks and outcomes, bodies as they grew, and the snapshot's reach."""
    client = twin.client(gate)
    client.create_filter("small", 10, 0.01)
    small = client.filter("small")
    small.add_many([str(i) for i in range(15)])
    small.add("0")
    small.might_contain_many(["0", "x", "y"])
    small.report_outcomes(found=2, not_found=1)
    snapshot = client.snapshot_filter("small")
    stats = small.stats()
    assert (stats.approximate_count, stats.added_count) == (15, 16)
    assert (stats.checks_hit, stats.checks_skip, stats.checks_unsure) == (1, 2, 0)
    assert (stats.outcomes_found, stats.outcomes_not_found, stats.outcomes_false_no) == (2, 1, 0)
    assert [(body.capacity, body.count) for body in stats.bodies] == [(10, 10), (20, 5)]
    assert stats.bits == sum(body.bits for body in stats.bodies)
    assert 0 < stats.fill_ratio < 1
    assert snapshot.snapshot_seq == stats.snapshot_seq == stats.journal_seq == 2
    assert stats.snapshot_time is None
    assert stats.observed_error_rate is None


def test_stats_mirror_the_wire() -> None:
    """Every field of the message is in FilterStats, under the same name; the spec's stand beside them."""
    here = {field.name for field in dataclasses.fields(FilterStats)}
    wire = {field.name for field in pb.FilterStats.DESCRIPTOR.fields} - {"spec"}
    spec = {field.name for field in pb.FilterSpec.DESCRIPTOR.fields} - {"seed"}
    assert here == wire | spec


def test_stats_of_another_version_are_refused() -> None:
    """An unknown state is not taken for a known one, and an empty message is no filter."""
    good = pb.FilterStats(name="fruit", state=pb.FILTER_STATE_DAMAGED, damage="snapshot", fill_ratio=0.5)
    good.snapshot_time.FromDatetime(datetime(2024, 1, 2, 3, 4, 5))
    stats = read_stats(good)
    assert (stats.state, stats.damage) == (FilterState.DAMAGED, "snapshot")
    assert stats.snapshot_time == datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    for bad in (
        pb.FilterStats(),
        pb.FilterStats(name="fruit"),
        pb.FilterStats(name="fruit", state=9),  # type: ignore[arg-type]
        pb.FilterStats(
            name="fruit",
            state=pb.FILTER_STATE_READY,
            spec=pb.FilterSpec(kind=9),  # type: ignore[arg-type]
        ),
    ):
        with pytest.raises(MalformedReply):
            read_stats(bad)


@pytest.mark.parametrize("name", ["", "-a", "a/b", "x" * 129])
def test_bad_names_are_refused(twin: Twin, gate: FakeGate, name: str) -> None:
    """By every administrative verb, naming the field."""
    client = twin.client(gate)
    for call in (
        lambda: client.create_filter(name, 10),
        lambda: client.drop_filter(name),
        lambda: client.snapshot_filter(name),
    ):
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.field == "name"


def test_only_reads_are_tried_again(twin: Twin, gate: FakeGate) -> None:
    """A second drop of a filter that the first one dropped would say that there is none."""
    client = twin.client(gate)
    gate.fail_with(Unavailable(), times=1)
    assert len(client.list_filters()) == 1
    gate.fail_with(Unavailable(), times=1)
    with pytest.raises(Unavailable):
        client.drop_filter("fruit")
    assert len(client.list_filters()) == 1


def test_health_is_what_the_daemon_says(twin: Twin, gate: FakeGate) -> None:
    """ping is the same as yes or no, and does not raise."""
    client = twin.client(gate)
    assert client.health() == "SERVING"
    assert client.ping() is True
    gate.fail_with(NotServing())
    assert client.ping() is False
    with pytest.raises(NotServing):
        client.health()
