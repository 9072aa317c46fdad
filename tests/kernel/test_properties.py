"""What holds for every input: no lost key, one result on every path, order-free unions."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomgate.filters import BloomFilter, FilterSpec, HashScheme, growing, hashing
from bloomgate.filters.bloom import SLICE_KEYS, BloomBody
from bloomgate.filters.sizing import BodySpec

from .measuring import random_halves

# The same examples in every run, and no deadline: a busy machine is no bug.
seeded = settings(derandomize=True, deadline=None)

EVERY_SIZE_SCALAR = 10**9
EVERY_SIZE_VECTORISED = -1

# Few distinct keys and many, short ones and long: repeats and collisions come by themselves.
raw_keys = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from([b"\x00", b"\n", b"\r\n", b"\xff\xfe", b"a\x00b", b"x" * 65_536]),
)
keys = st.one_of(raw_keys, st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
batches = st.lists(st.lists(keys, max_size=40), max_size=4)
halves_of_64_bits = st.integers(0, 2**64 - 1)

filters: st.SearchStrategy[Callable[[], BloomFilter]] = st.one_of(
    st.builds(
        lambda capacity, rate, policy, scheme: (
            lambda: BloomFilter(
                capacity,
                rate,
                on_full=policy,
                hash_scheme=scheme,
                seed=7 if scheme is HashScheme.MURMUR3_X64_128 else b"secret of 16 byt",
            )
        ),
        st.integers(1, 60),
        st.sampled_from([0.5, 0.1, 0.01, 1e-6]),
        st.sampled_from(["grow", "degrade"]),
        st.sampled_from(HashScheme),
    ),
    # A few bits only, so that false positives are common.
    st.builds(
        lambda bits, hashes: lambda: BloomFilter.sized(bits, hashes, seed=7),
        st.integers(1, 200),
        st.integers(1, 8),
    ),
)


@seeded
@given(filters, batches)
def test_added_keys_are_always_maybe(make: Callable[[], BloomFilter], added: list[list[str | bytes]]) -> None:
    """No key that was added is ever answered "definitely not", however the filter grew or filled up."""
    bloom = make()
    for batch in added:
        bloom.add_many(batch)
    for batch in added:
        assert all(bloom.might_contain_many(batch))
        assert all(key in bloom for key in batch)


@seeded
@given(filters, batches, st.lists(keys, max_size=40))
def test_scalar_and_vectorised_paths_agree(
    make: Callable[[], BloomFilter], added: list[list[str | bytes]], asked: list[str | bytes]
) -> None:
    """Both paths plan the same steps, set the same bits and give the same answers, for chains too."""
    scalar, vectorised = make(), make()
    for batch in added:
        with patch.object(growing, "SCALAR_KEYS", EVERY_SIZE_SCALAR):
            digests = b"".join(scalar._digest_slices(batch))
            scalar_plan = scalar.plan_add(digests)
            scalar.apply(scalar_plan)
        with patch.object(growing, "SCALAR_KEYS", EVERY_SIZE_VECTORISED):
            vectorised_plan = vectorised.plan_add(digests)
            vectorised.apply(vectorised_plan)
        assert scalar_plan == vectorised_plan
        assert scalar.to_bytes() == vectorised.to_bytes()
    with patch.object(growing, "SCALAR_KEYS", EVERY_SIZE_SCALAR):
        answers = scalar.might_contain_many(asked)
    with patch.object(growing, "SCALAR_KEYS", EVERY_SIZE_VECTORISED):
        assert vectorised.might_contain_many(asked) == answers
    assert [key in scalar for key in asked] == answers


@seeded
@given(filters, st.lists(keys, max_size=60))
def test_add_is_add_many_of_one_key(make: Callable[[], BloomFilter], added: list[str | bytes]) -> None:
    """add(key) says and does what add_many([key]) says and does, growing included."""
    single, many = make(), make()
    for key in added:
        assert single.add(key) == many.add_many([key])[0]
    assert single.to_bytes() == many.to_bytes()


@seeded
@given(
    st.integers(1, 2**20),
    st.integers(1, 64),
    st.lists(st.tuples(halves_of_64_bits, halves_of_64_bits), min_size=1, max_size=30),
)
def test_every_path_sets_and_reads_the_defined_positions(
    bits: int, hashes: int, digests: list[tuple[int, int]]
) -> None:
    """set, set_many, has and has_many agree with hashing.positions, at the edges of 64 bits too."""
    spec = BodySpec(bits, hashes, 1)
    scalar, vectorised = BloomBody(spec), BloomBody(spec)
    defined = np.zeros(spec.nbytes, np.uint8)
    for h1, h2 in digests:
        scalar.set(h1, h2)
        for position in hashing.positions(h1, h2, bits, hashes):
            defined[position >> 3] |= 1 << (position & 7)
    h1s, h2s = (np.array(half, np.uint64) for half in zip(*digests, strict=True))
    vectorised.set_many((h1s, h2s))
    assert scalar.array.tobytes() == vectorised.array.tobytes() == defined.tobytes()
    probes = [(h2, h1) for h1, h2 in digests] + digests
    expected = [
        all(defined[p >> 3] >> (p & 7) & 1 for p in hashing.positions(h1, h2, bits, hashes))
        for h1, h2 in probes
    ]
    assert [scalar.has(h1, h2) for h1, h2 in probes] == expected
    swapped = (np.concatenate([h2s, h1s]), np.concatenate([h1s, h2s]))
    assert vectorised.has_many(swapped).tolist() == expected


@seeded
@given(filters, batches)
def test_image_round_trip_gives_equal_bytes(
    make: Callable[[], BloomFilter], added: list[list[str | bytes]]
) -> None:
    """Reading an image and writing it again changes nothing, and every key is still there."""
    bloom = make()
    for batch in added:
        bloom.add_many(batch)
    data = bloom.to_bytes()
    copy = BloomFilter.from_bytes(data)
    assert copy.to_bytes() == data
    assert copy.spec == bloom.spec
    assert all(all(copy.might_contain_many(batch)) for batch in added)


@seeded
@given(st.lists(raw_keys, max_size=40), st.randoms(use_true_random=False), st.integers(1, 40))
def test_union_of_adds_is_free_of_order(added: list[bytes], rng: object, size: int) -> None:
    """In one body any order of the same adds, in batches of any size, gives equal bits."""
    shuffled = list(added)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = (BloomFilter(20, 0.01, on_full="degrade", seed=3) for _ in range(2))
    one.add_many(added)
    for start in range(0, len(shuffled), size):
        other.add_many(shuffled[start : start + size])
    assert one.bodies[0].array.tobytes() == other.bodies[0].array.tobytes()
    assert one.added_count == other.added_count


@seeded
@given(st.lists(st.integers(0, 30), min_size=20, max_size=200))
def test_halves_that_meet_are_not_taken_for_repeats(numbers: list[int]) -> None:
    """Digests that share their first half only are different keys: none is struck from was_new."""
    # h1 from a handful of values, h2 from another: equal halves abound, equal digests are the repeats.
    digests = [(n % 4).to_bytes(8, "little") + (n % 5 + 1).to_bytes(8, "little") for n in numbers]
    bloom = BloomFilter(1000, 1e-6, on_full="degrade", seed=1)
    was_new = bloom.plan_add(b"".join(digests)).was_new
    assert was_new == [digest not in digests[:i] for i, digest in enumerate(digests)]


@pytest.mark.parametrize(
    "halves", [[0, 1, 2**63 - 1, 2**63, 2**64 - 1], [2**64 - 2, 2**64 - 1], [2**63 + 1], [0, 1, 2]]
)
def test_repeats_are_found_wherever_their_halves_lie(halves: list[int]) -> None:
    """From 0 to 2^64 - 1, also where all of them need their 64th bit: numpy 2.0.0 has an isin that fails."""
    digests = [h1.to_bytes(8, "little") + h2.to_bytes(8, "little") for h1 in halves for h2 in range(1, 41)]
    bloom = BloomFilter(1000, 1e-6, on_full="degrade", seed=1)
    was_new = bloom.plan_add(b"".join(digests * 2)).was_new
    assert was_new == [True] * len(digests) + [False] * len(digests)


def test_batches_of_many_slices_agree_with_small_ones() -> None:
    """A batch larger than a slice gives the bits, answers and news of the same keys in small batches."""
    numbers = [b"%d" % (i % 40_000) for i in range(3 * SLICE_KEYS)]
    large = BloomFilter(50_000, 0.001, on_full="degrade", seed=1)
    was_new = large.add_many(iter(numbers))
    assert sum(was_new) == large.approximate_count
    assert not any(was_new[40_000:])
    small = BloomFilter(50_000, 0.001, on_full="degrade", seed=1)
    for start in range(0, len(numbers), 1000):
        small.add_many(numbers[start : start + 1000])
    assert small.bodies[0].array.tobytes() == large.bodies[0].array.tobytes()
    asked = [b"absent-%d" % i for i in range(2 * SLICE_KEYS + 1)] + numbers
    answers = large.might_contain_many(asked)
    assert answers == [key in large for key in asked]
    assert all(answers[-len(numbers) :])


def test_asking_changes_neither_filter_nor_arguments() -> None:
    """has_many and set_many leave the caller's arrays as they were, also when every key survives."""
    h1, h2 = random_halves(np.random.default_rng(5), 100)
    kept = h1.copy(), h2.copy()
    body = BloomBody(FilterSpec.plan(100, 0.01, seed=1).first_body)
    body.set_many((h1, h2))
    before = body.array.tobytes()
    assert body.has_many((h1, h2)).all()
    assert body.array.tobytes() == before
    assert (h1 == kept[0]).all()
    assert (h2 == kept[1]).all()
