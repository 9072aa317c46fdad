"""Error rates, measured against the formula and against the rate asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bloomgate.filters import BloomFilter, FilterSpec, sizing
from bloomgate.filters.bloom import BloomBody
from bloomgate.filters.sizing import BodySpec

from .measuring import Halves, count_hits, poisson_most, random_halves


def formula(bits: int, hashes: int, keys: int) -> float:
    """The textbook's rate, written out apart from the code under test."""
    return (1 - math.exp(-hashes * keys / bits)) ** hashes


def numbered(prefix: str, count: int) -> list[bytes]:
    return [b"%s-%d" % (prefix.encode(), i) for i in range(count)]


@pytest.mark.parametrize("on_full", ["reject", "degrade"])
@pytest.mark.parametrize(
    ("capacity", "error_rate", "probes"),
    [(1000, 0.01, 40_000), (1000, 1e-4, 2_000_000), (100_000, 1e-3, 400_000), (1_000_000, 0.01, 200_000)],
)
def test_full_filter_keeps_the_rate_of_the_formula(
    capacity: int, error_rate: float, probes: int, on_full: str
) -> None:
    """A filter filled to its capacity answers as many absent keys "maybe" as the formula says."""
    bloom = BloomFilter(capacity, error_rate, on_full=on_full, seed=1)
    for start in range(0, capacity, 250_000):
        keys = numbered(f"present-{start}", min(250_000, capacity - start))
        bloom.add_many(keys)
        assert all(bloom.might_contain_many(keys))
    hits = 0
    for start in range(0, probes, 250_000):
        hits += sum(bloom.might_contain_many(numbered(f"absent-{start}", min(250_000, probes - start))))
    expected = formula(bloom.bits, bloom.hashes, capacity)
    # At least 200 hits are expected, a standard deviation of at most 7 %: 30 % is more than four of them.
    assert 0.7 * expected <= hits / probes <= 1.3 * expected
    assert bloom.expected_error_rate == pytest.approx(expected, rel=0.2)


def test_a_million_keys_at_one_percent_take_1_2_megabytes() -> None:
    """The size in the README is the size of the buffer, and of the image but for its header."""
    bloom = BloomFilter(1_000_000, 0.01, on_full="reject", seed=1)
    assert (bloom.bits, bloom.hashes) == (9_585_059, 7)
    assert bloom.memory_bytes == 1_198_133
    assert 0 < len(bloom.to_bytes()) - bloom.memory_bytes < 200


def test_small_sized_filters_keep_the_rate_of_the_formula_on_average() -> None:
    """A hundred lists of 200 items in 2,000 bits with 7 hashes come within 6 % of the formula together."""
    rng = np.random.default_rng(2)
    probes, hits = 20_000, 0
    for seed in range(100):
        bloom = BloomFilter.sized(2000, 7, seed=seed)
        bloom.add_many(numbered(f"list-{seed}", 200))
        hits += count_hits(bloom.bodies[0].has_many, rng, probes)
    # 16,000 hits are expected: 0.8 % of noise from the probes, and 1.5 % from how full each list became.
    assert hits / (100 * probes) == pytest.approx(formula(2000, 7, 200), rel=0.06)


def test_plain_double_hashing_would_have_clearly_more_false_positives() -> None:
    """In 2,400 bits with 11 hashes h1 + i*h2 mod m has more than twice the hits of the kernel."""
    bits, hashes, keys, probes = 2400, 11, 150, 100_000
    rng = np.random.default_rng(3)
    enhanced = plain = 0
    m = np.uint64(bits)
    rounds = np.arange(hashes, dtype=np.uint64)[:, None]
    for _ in range(40):
        halves = random_halves(rng, keys)
        body = BloomBody(BodySpec(bits, hashes, keys))
        body.set_many(halves)
        table = np.zeros(bits, np.bool_)
        table[(halves[0] % m + rounds * (halves[1] % m)) % m] = True
        h1, h2 = random_halves(rng, probes)
        enhanced += int(np.count_nonzero(body.has_many((h1, h2))))
        plain += int(np.count_nonzero(table[(h1 % m + rounds * (h2 % m)) % m].all(axis=0)))
    # About 1,840 hits by the formula, a noise of some 3 %, and 4,800 of the plain form.
    assert enhanced == pytest.approx(40 * probes * formula(bits, hashes, keys), rel=0.1)
    assert plain > 2 * enhanced


class ReducedEarly:
    """A body as it must not be: h1 and h2 taken modulo m before they are stepped, modulo m."""

    def __init__(self, spec: BodySpec) -> None:
        self.m = np.uint64(spec.bits)
        self.hashes = spec.hashes
        self.table = np.zeros(spec.bits, np.bool_)

    def set_many(self, halves: Halves) -> None:
        h1, h2 = halves[0] % self.m, halves[1] % self.m
        for i in range(1, self.hashes + 1):
            self.table[h1] = True
            h1, h2 = (h1 + h2) % self.m, (h2 + np.uint64(i)) % self.m

    def has_many(self, halves: Halves) -> np.ndarray:
        h1, h2 = halves[0] % self.m, halves[1] % self.m
        found = np.zeros(h1.size, np.bool_)
        alive = np.arange(h1.size)
        for i in range(1, self.hashes + 1):
            kept = np.flatnonzero(self.table[h1])
            alive, h1, h2 = alive[kept], h1[kept], h2[kept]
            h1, h2 = (h1 + h2) % self.m, (h2 + np.uint64(i)) % self.m
        found[alive] = True
        return found


def planned(capacity: int, error_rate: float) -> BodySpec:
    return FilterSpec.plan(capacity, error_rate, on_full="reject", seed=0).first_body


def hits_of(kind: type, spec: BodySpec, error_rate: float, probes: int, filters: int) -> int:
    """Hits of absent digests over several full bodies, so that no single lucky one is measured."""
    rng = np.random.default_rng([spec.capacity, round(1 / error_rate)])
    hits = 0
    for _ in range(filters):
        body = kind(spec)
        body.set_many(random_halves(rng, spec.capacity))
        hits += count_hits(body.has_many, rng, probes // filters)
    return hits


@pytest.mark.parametrize(
    ("error_rate", "probes"),
    [(0.5, 100_000), (0.01, 100_000), (1e-4, 2_000_000), (1e-6, 10_000_000), (1e-9, 10_000_000)],
)
@pytest.mark.parametrize("capacity", [1, 2, 5, 10, 23, 50, 71, 100])
def test_tiny_filters_keep_their_rate(capacity: int, error_rate: float, probes: int) -> None:
    """A filter for 1 to 100 keys has no more false positives than asked for, down to 1e-9."""
    # Hits of n probes at the asked rate are Poisson(n * p) distributed; beyond poisson_most(n * p) is
    # no accident. At 1e-9 that is 2 hits, and the test below shows what too small a body has.
    assert hits_of(BloomBody, planned(capacity, error_rate), error_rate, probes, 10) <= poisson_most(
        probes * error_rate
    )


def test_every_capacity_from_1_to_100_keeps_the_smallest_rate() -> None:
    """At 1e-9, 50 million absent digests over all hundred sizes meet hardly a hit together."""
    probes = 500_000
    # 0.05 hits are expected of all together, 3 are allowed: a rate of 2e-7 throughout would give 10.
    hits = sum(hits_of(BloomBody, planned(n, 1e-9), 1e-9, probes, 1) for n in range(1, 101))
    assert hits <= poisson_most(100 * probes * 1e-9)


@pytest.mark.parametrize(("bits", "capacity"), [(1024, 1), (1024, 20), (2048, 40)])
def test_tiny_filters_would_lose_their_rate_at_the_formulas_size(bits: int, capacity: int) -> None:
    """The same measurement catches bodies that the formula, or its floor of 1024 bits, would make."""
    spec = BodySpec(bits, 30, capacity)
    assert hits_of(BloomBody, spec, 1e-9, 60_000_000, 10) > poisson_most(60_000_000 * 1e-9)


PROBES_AT_1E_6 = 60_000_000


def test_a_thousand_keys_at_one_in_a_million_keep_their_rate() -> None:
    """60 million absent digests meet no more false positives than 1e-6 allows."""
    # 60 hits are expected, about 100 allowed; early reduction gives about 140.
    assert hits_of(BloomBody, planned(1000, 1e-6), 1e-6, PROBES_AT_1E_6, 6) <= poisson_most(
        PROBES_AT_1E_6 * 1e-6
    )


def test_a_thousand_keys_would_lose_their_rate_without_the_wrap() -> None:
    """The same 60 million digests catch early reduction."""
    assert hits_of(ReducedEarly, planned(1000, 1e-6), 1e-6, PROBES_AT_1E_6, 6) > poisson_most(
        PROBES_AT_1E_6 * 1e-6
    )


@pytest.mark.parametrize(
    ("capacity", "error_rate", "bits"),
    [
        (1, 0.01, 1024),  # the floor; two numbers are plenty for such a rate
        (1000, 0.01, 9586),
        (1_000_000, 0.01, 9_585_059),
        (1000, 1e-6, 28_756),
        (71.22, 1e-6, 2110),  # the formula's 2048 would fit, but for sqrt(n/p) / 4
        (1, 1e-9, 7906),
        (100, 1e-9, 79_057),
        (100_000, 1e-9, 4_313_277),
    ],
)
def test_sizes_are_the_formulas_but_where_two_hashes_are_too_few(
    capacity: float, error_rate: float, bits: int
) -> None:
    """Only filters of few keys at tiny rates are larger than -n ln p / (ln 2)^2 and 1024."""
    assert sizing.plan(capacity, error_rate).bits == bits  # type: ignore[arg-type]


def test_no_power_of_two_is_planned_where_it_would_show() -> None:
    """2^64 modulo a power of two is 0, so there the wrap changes nothing: plan steps over it."""
    # 16,384 bits by sqrt(n/p) / 4: n/m^2 is sixteen times the rate. At 1e-3 it is nothing, and 1024 stays.
    assert sizing.plan(4, 4 / 65_536**2).bits == 16_385
    assert sizing.plan(1, 1e-3).bits == 1024


@pytest.mark.parametrize("error_rate", [0.01, 1e-3, 1e-4])
def test_grown_chain_stays_within_1_15_of_the_asked_rate(error_rate: float) -> None:
    """After four growths, with every body full, all of them together pass the asked rate by at most 15 %."""
    rng = np.random.default_rng(4)
    bloom = BloomFilter(1000, error_rate, seed=4)
    bloom.add_many(numbered("key", 31_000))
    assert len(bloom.bodies) == 5
    probes = int(2_000 / error_rate)
    hits = 0
    for start in range(0, probes, 100_000):
        digests = rng.bytes(16 * min(100_000, probes - start))
        hits += sum(bloom.might_contain_digests(digests))
    # 2,000 hits at the asked rate have a standard deviation of 2.2 %.
    assert hits <= 1.15 * 2_000
    assert hits / probes == pytest.approx(bloom.expected_error_rate, rel=0.1)


def test_growing_bodies_take_shares_of_the_asked_rate() -> None:
    """The first body takes 0.8 of the rate, each next one twice the keys at half of what is left."""
    spec = FilterSpec.plan(1000, 0.01, seed=0)
    shares = [0.8, 0.1, 0.05, 0.025, 0.0125]
    for index, share in enumerate(shares):
        assert spec.body(index) == sizing.plan(1000 * 2**index, pytest.approx(0.01 * share).expected)
    assert FilterSpec.plan(1000, 0.01, on_full="reject", seed=0).first_body == sizing.plan(1000, 0.01)


def test_expected_error_rate_is_the_formula() -> None:
    """The rate to expect of given keys agrees with the textbook's, and is 0 for none."""
    assert sizing.expected_error_rate(9_585_059, 7, 1_000_000) == pytest.approx(formula(9_585_059, 7, 10**6))
    assert sizing.expected_error_rate(1024, 7, 0) == 0.0
