"""What an add answers, counts, splits, refuses and leaves behind; and what replaying it gives."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from bloomgate.filters import (
    BloomFilter,
    BodySpec,
    DataDamaged,
    FilterFull,
    FilterSpec,
    Growth,
    Segment,
    allocate,
    sizing,
)
from bloomgate.filters.image import from_bytes, to_bytes

# Small batches take the scalar path, large ones the vectorised: every test of adding runs on both.
SMALL, LARGE = 5, 100


def digests_of(*numbers: int) -> bytes:
    """Digests that differ in every position, one for each number."""
    return b"".join(random.Random(n).randbytes(16) for n in numbers)


def filter_of(capacity: int, on_full: str, error_rate: float = 1e-6) -> BloomFilter:
    """An error rate so low that false positives do not blur exact counts."""
    return BloomFilter(capacity, error_rate, on_full=on_full, seed=1)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_was_new_is_true_once_for_each_key(size: int) -> None:
    """A key repeated in its batch, or added before, is not new; the count rises by the new ones only."""
    bloom = filter_of(10_000, "reject")
    keys = [b"%d" % n for n in range(size)]
    assert bloom.add_many([*keys, *keys[:2], keys[0]]) == [True] * size + [False] * 3
    assert bloom.approximate_count == size
    assert bloom.added_count == size + 3
    assert bloom.add_many([*keys, b"another", b"another"]) == [False] * size + [True, False]
    assert bloom.approximate_count == size + 1
    assert bloom.added_count == 2 * size + 5
    assert not bloom.add(keys[0])
    assert bloom.add(b"one more")
    assert bloom.approximate_count == size + 2
    assert bloom.added_count == 2 * size + 7


def test_was_new_is_judged_against_the_filter_before_the_batch() -> None:
    """A key whose bits were all set by earlier keys of its own batch is certainly new all the same."""
    bloom = BloomFilter.sized(8, 1, seed=1)
    plan = bloom.plan_add(digests_of(*range(LARGE)))
    assert all(plan.was_new)
    bloom.apply(plan)
    assert bloom.bits_set == 8
    assert bloom.plan_add(digests_of(*range(1000, 1100))).was_new == [False] * LARGE


def test_planning_changes_nothing() -> None:
    """plan_add leaves the filter as it was, whatever it decides."""
    bloom = filter_of(10, "grow")
    before = bloom.to_bytes()
    bloom.plan_add(digests_of(*range(LARGE)))
    bloom.plan_add(digests_of(1))
    assert bloom.to_bytes() == before


def test_nothing_in_nothing_out() -> None:
    """An empty batch has no answers and no steps."""
    bloom = filter_of(10, "grow")
    assert bloom.add_many([]) == []
    assert bloom.might_contain_many([]) == []
    assert bloom.plan_add(b"").steps == ()


def test_growth_splits_a_batch_at_the_exact_key() -> None:
    """A body takes keys up to its capacity; the next key goes to the next body, of twice the capacity."""
    bloom = filter_of(10, "grow")
    plan = bloom.plan_add(digests_of(*range(25)))
    assert plan.steps == (
        Segment(0, digests_of(*range(10)), 10),
        Growth(1, bloom.spec.body(1)),
        Segment(1, digests_of(*range(10, 25)), 15),
    )
    bloom.apply(plan)
    assert [(body.spec.capacity, body.count) for body in bloom.bodies] == [(10, 10), (20, 15)]
    # Five more fit exactly; the one after them grows first, without an empty segment before.
    assert bloom.plan_add(digests_of(*range(100, 105))).steps == (
        Segment(1, digests_of(*range(100, 105)), 5),
    )
    bloom.apply(bloom.plan_add(digests_of(*range(100, 105))))
    assert bloom.plan_add(digests_of(200)).steps == (
        Growth(2, bloom.spec.body(2)),
        Segment(2, digests_of(200), 1),
    )


def test_known_and_repeated_keys_take_no_room_in_a_split() -> None:
    """Only certainly new keys fill a body: the split falls before the first new key that has no room."""
    bloom = filter_of(10, "grow")
    bloom.apply(bloom.plan_add(digests_of(*range(8))))
    batch = [0, 1, 50, 50, 51, 2, 52, 50, 3]
    plan = bloom.plan_add(digests_of(*batch))
    assert plan.was_new == [False, False, True, False, True, False, True, False, False]
    assert plan.steps == (
        Segment(0, digests_of(0, 1, 50, 50, 51, 2), 2),
        Growth(1, bloom.spec.body(1)),
        Segment(1, digests_of(52, 50, 3), 1),
    )
    bloom.apply(plan)
    assert [body.count for body in bloom.bodies] == [10, 1]
    # 50 and 3 are in the first body, so the second holds the bits of 52 alone.
    assert bloom.bodies[1].bits_set <= bloom.bodies[1].spec.hashes


def test_one_batch_may_grow_several_times() -> None:
    """A large batch fills body after body: 10, 20, 40, and what is left."""
    bloom = filter_of(10, "grow")
    assert all(bloom.add_many([b"%d" % n for n in range(100)]))
    assert [body.count for body in bloom.bodies] == [10, 20, 40, 30]
    assert bloom.approximate_count == 100
    assert bloom.hashes == bloom.bodies[-1].spec.hashes
    assert bloom.bits == sum(body.spec.bits for body in bloom.bodies)
    assert bloom.memory_bytes == sum(body.array.nbytes for body in bloom.bodies)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_known_keys_never_grow_a_filter(size: int) -> None:
    """A batch without a new key leaves the chain alone, at capacity too, in one call or key by key."""
    bloom = filter_of(size, "grow")
    keys = [b"%d" % n for n in range(size)]
    bloom.add_many(keys)
    assert bloom.add_many(keys) == [False] * size
    assert [bloom.add(key) for key in keys] == [False] * size
    assert len(bloom.bodies) == 1


def test_adding_one_by_one_grows_at_the_same_key() -> None:
    """Single adds fill bodies as exactly as batches do."""
    bloom = filter_of(10, "grow")
    for n in range(35):
        assert bloom.add(b"%d" % n)
    assert [body.count for body in bloom.bodies] == [10, 20, 5]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_reject_refuses_a_batch_as_a_whole(size: int) -> None:
    """One new key too many and nothing of the batch is added; known keys are always accepted."""
    bloom = filter_of(size, "reject")
    keys = [b"%d" % n for n in range(size)]
    bloom.add_many(keys[:-1])
    before = bloom.to_bytes()
    with pytest.raises(FilterFull) as caught:
        bloom.add_many([b"new", *keys])
    assert (caught.value.limit, caught.value.allowed, caught.value.needed) == ("capacity", size, size + 1)
    assert bloom.to_bytes() == before
    assert bloom.add(keys[-1])
    full = bloom.to_bytes()
    with pytest.raises(FilterFull):
        bloom.add(b"new")
    assert bloom.to_bytes() == full
    assert bloom.add_many(keys * 2) == [False] * (2 * size)
    assert not bloom.add(keys[0])


def test_degrade_accepts_beyond_its_capacity() -> None:
    """A degrading filter takes every key in its one body, and says what its rate has become."""
    bloom = filter_of(10, "degrade")
    bloom.add_many([b"%d" % n for n in range(500)])
    assert bloom.approximate_count == 500
    assert b"499" in bloom
    bloom.add(b"one more")
    assert b"one more" in bloom
    assert len(bloom.bodies) == 1
    assert bloom.expected_error_rate > 1e-3


def test_growth_beyond_the_memory_limit_changes_nothing() -> None:
    """Where growing would take more bytes than are left, the whole batch is refused."""
    bloom = filter_of(10, "grow")
    first, second = bloom.spec.body(1).nbytes, bloom.spec.body(2).nbytes
    batch = digests_of(*range(40))
    before = bloom.to_bytes()
    with pytest.raises(FilterFull) as caught:
        bloom.plan_add(batch, max_growth_bytes=first + second - 1)
    held = bloom.memory_bytes
    assert (caught.value.limit, caught.value.needed) == ("memory_bytes", held + first + second)
    assert caught.value.allowed == held + first + second - 1
    assert bloom.to_bytes() == before
    bloom.apply(bloom.plan_add(batch, max_growth_bytes=first + second))
    assert len(bloom.bodies) == 3
    # Without growing no limit matters.
    bloom.plan_add(digests_of(99), max_growth_bytes=0)


def test_no_body_grows_larger_than_an_image_may_hold() -> None:
    """A growth past the largest body is refused, not planned and lost at the next restart."""
    spec = dataclasses.replace(FilterSpec.plan(10**11, 1e-9, seed=1), first_body=BodySpec(1024, 7, 1))
    bloom = BloomFilter.of(spec)
    with pytest.raises(FilterFull, match="bits of a body"):
        bloom.plan_add(digests_of(1, 2))


def recorded(batches: int, size: int) -> tuple[BloomFilter, list[Segment | Growth], list[bytes]]:
    """A grown filter, the steps of all its adds, and all its digests."""
    rng = random.Random(size)
    bloom, steps, added = filter_of(20, "grow", 0.01), [], []
    for _ in range(batches):
        digests = digests_of(*(rng.randrange(400) for _ in range(size)))
        plan = bloom.plan_add(digests)
        bloom.apply(plan)
        steps += plan.steps
        added.append(digests)
    assert len(bloom.bodies) > 2
    return bloom, steps, added


def replay(bloom: BloomFilter, steps: list[Segment | Growth]) -> None:
    for step in steps:
        bloom.insert(step) if isinstance(step, Segment) else bloom.grow(step)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_replay_onto_an_empty_filter_gives_equal_bytes(size: int) -> None:
    """The steps of a filter's adds, in order, make that filter again to the byte."""
    bloom, steps, _ = recorded(600 // size, size)
    again = BloomFilter.of(bloom.spec)
    replay(again, steps)
    assert again.to_bytes() == bloom.to_bytes()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_replay_onto_its_own_result_loses_and_grows_nothing(size: int) -> None:
    """Steps applied again leave every bit as it was and begin no body again; adding goes on afterwards."""
    bloom, steps, added = recorded(600 // size, size)
    bits = [body.array.tobytes() for body in bloom.bodies]
    while bloom.bodies[-1].count <= bloom.bodies[-1].spec.capacity:
        replay(bloom, steps)
    assert [body.array.tobytes() for body in bloom.bodies] == bits
    assert all(all(bloom.might_contain_digests(digests)) for digests in added)
    # The counts now pass the capacities: known keys still do not grow it, new ones still find their place.
    assert bloom.plan_add(added[0]).steps == (Segment(len(bits) - 1, added[0], 0),)
    plan = bloom.plan_add(digests_of(5000, 5001))
    assert [type(step) for step in plan.steps] == [Growth, Segment]
    bloom.apply(plan)
    assert bloom.bodies[-1].count == 2


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("seed", range(5))
def test_replay_onto_a_later_fuzzy_copy_loses_nothing(size: int, seed: int) -> None:
    """A copy that holds more than its stamp, as a live snapshot may, has every key after a replay."""
    rng = random.Random(seed)
    bloom, steps, added = recorded(600 // size, size)
    stamp = rng.randrange(len(steps))
    copy = BloomFilter.of(bloom.spec)
    replay(copy, steps[:stamp])
    # Some bits of later adds, at random, in the bodies that the copy has: a write torn over time.
    for mine, final in zip(copy.bodies, bloom.bodies, strict=False):
        some = np.frombuffer(rng.randbytes(final.array.size), np.uint8)
        mine.array |= final.array & some
    replay(copy, steps[stamp:])
    assert len(copy.bodies) == len(bloom.bodies)
    assert all(all(copy.might_contain_digests(digests)) for digests in added)


def test_growing_past_a_missing_body_is_an_error() -> None:
    """A growth that names a body after the next one means that a record is missing: nothing changes."""
    bloom = filter_of(10, "grow")
    with pytest.raises(IndexError, match="body 2 cannot follow body 0"):
        bloom.grow(Growth(2, bloom.spec.body(2)))
    with pytest.raises(IndexError):
        bloom.insert(Segment(1, digests_of(1), 1))
    assert len(bloom.bodies) == 1


@pytest.mark.parametrize("hashes", [1, 7, 64])
@pytest.mark.parametrize("bits", [1, 8, 100])
def test_saturated_filters_still_tell_their_worth(bits: int, hashes: int) -> None:
    """With every bit set all numbers are finite, the rate is 1, and every key is maybe."""
    bloom = BloomFilter.sized(bits, hashes, seed=1)
    bloom.add_many([b"%d" % n for n in range(2000)])
    assert bloom.bits_set == bits
    assert bloom.expected_error_rate == 1.0
    assert 1 <= bloom.approximate_count <= 2000
    assert b"absent" in bloom
    assert not bloom.add(b"absent")
    assert math.isfinite(sizing.expected_error_rate(bits, hashes, 10**15))
    assert "2" in repr(bloom)


def test_an_empty_filter_is_worth_its_memory() -> None:
    """Nothing is in an empty filter, and its rate is 0."""
    bloom = filter_of(10, "grow")
    assert (bloom.bits_set, bloom.approximate_count, bloom.added_count) == (0, 0, 0)
    assert bloom.expected_error_rate == 0.0
    assert not bloom.might_contain("anything")
    assert repr(bloom) == f"<BloomFilter 0 of 10 keys at 1e-06, 1 bodies, {bloom.bits} bits>"


def test_bits_set_follows_every_add() -> None:
    """The remembered popcount is counted anew after scalar and vectorised adds, and is the true one."""
    bloom = filter_of(1000, "reject")
    seen = [bloom.bits_set]
    for call in (lambda: bloom.add(b"a"), lambda: bloom.add_many([b"%d" % n for n in range(LARGE)])):
        call()
        true_count = int(np.unpackbits(bloom.bodies[0].array).sum())
        assert bloom.bits_set == bloom.bits_set == true_count
        seen.append(true_count)
    assert seen == sorted(set(seen))


def test_bodies_allocated_beforehand_are_the_ones_that_grow() -> None:
    """A daemon allocates before it journals; the filter is the same as one that allocates as it goes."""
    ahead, as_it_goes = BloomFilter(10, seed=1), BloomFilter(10, seed=1)
    digests = ahead.spec.hasher.digests([b"%d" % i for i in range(50)])
    plan = ahead.plan_add(digests)
    grown = allocate(plan)
    assert len(grown) == 2
    ahead.apply(plan, grown)
    as_it_goes.apply(as_it_goes.plan_add(digests))
    assert list(ahead.bodies[1:]) == grown
    assert ahead.to_bytes() == as_it_goes.to_bytes()


@pytest.mark.parametrize("error_rate", [0.0, 5e-324, 0.9])
def test_a_growing_image_must_have_a_rate_that_growth_can_plan_for(error_rate: float) -> None:
    """Its next body takes a share of the rate: of nothing there is none."""
    spec = dataclasses.replace(FilterSpec.plan(10, seed=1), error_rate=error_rate)
    with pytest.raises(DataDamaged, match="error_rate"):
        from_bytes(to_bytes(BloomFilter.of(spec)))
