"""Parameters outside their range are refused by name, before anything is allocated."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from bloomgate.filters import BloomFilter, FilterSpec, HashScheme, OnFull, ParameterError, sizing

Make = Callable[[], object]


def refused(make: Make, field: str, value: object, allowed: str) -> None:
    """``make`` must raise a ParameterError with these contents and allocate next to nothing."""
    tracemalloc.start()
    try:
        with pytest.raises(ParameterError) as caught:
            make()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.field == field
    assert error.value == value or (error.value != error.value and value != value)
    assert field in str(error)
    assert repr(value) in str(error)
    assert allowed in str(error)
    # The smallest of these filters would take gigabytes, an error and its message a few kilobytes.
    assert peak < 100_000


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, 10**18, 10**11 + 1, "1000", None, math.nan])
@pytest.mark.parametrize("on_full", ["grow", "reject"])
def test_capacity_is_a_whole_number_from_1_to_10_to_the_11(capacity: object, on_full: str) -> None:
    """Any other capacity is refused before its filter is allocated."""
    refused(
        lambda: BloomFilter(capacity, on_full=on_full, seed=1),  # type: ignore[arg-type]
        "capacity",
        capacity,
        "a whole number from 1 to 100000000000",
    )


@pytest.mark.parametrize(
    "rate", [0, 1, 1.5, math.nan, math.inf, -math.inf, 1e-20, 0.51, 9e-10, -1, "x", True, None]
)
def test_error_rate_is_a_number_from_1e_9_to_one_half(rate: object) -> None:
    """Any other error rate is refused, also for a filter that would be huge."""
    refused(
        lambda: BloomFilter(10**11, rate, seed=1),  # type: ignore[arg-type]
        "error_rate",
        rate,
        "a number from 1e-09 to 0.5",
    )


@pytest.mark.parametrize("seed", [-1, 2**32, True, 1.5, "1"])
def test_murmur_seed_is_a_32_bit_number(seed: object) -> None:
    """Any other seed is refused for scheme 1."""
    refused(
        lambda: BloomFilter(10**11, seed=seed),  # type: ignore[arg-type]
        "seed",
        seed,
        "a whole number from 0 to 4294967295",
    )


@pytest.mark.parametrize("seed", [b"", b"short", b"x" * 17, 7, "sixteen letters!"])
def test_blake2b_secret_is_16_bytes(seed: object) -> None:
    """Any other secret is refused for scheme 2, and not shown."""
    refused(
        lambda: BloomFilter(10**11, hash_scheme=HashScheme.BLAKE2B_128, seed=seed),  # type: ignore[arg-type]
        "seed",
        "a value of another shape",
        "16 secret bytes",
    )


@pytest.mark.parametrize("on_full", ["", "grows", "GROW ", 1, None, b"grow"])
def test_on_full_is_one_of_three_words(on_full: object) -> None:
    """Any other policy is refused, naming the three."""
    refused(
        lambda: BloomFilter(10**11, on_full=on_full, seed=1),  # type: ignore[arg-type]
        "on_full",
        on_full,
        "one of grow, reject, degrade",
    )


@pytest.mark.parametrize("scheme", [0, 3, "murmur3", None])
def test_hash_scheme_is_a_numbered_one(scheme: object) -> None:
    """Any other scheme is refused, naming those there are."""
    refused(
        lambda: BloomFilter(10**11, hash_scheme=scheme),  # type: ignore[arg-type]
        "hash_scheme",
        scheme,
        "one of MURMUR3_X64_128, BLAKE2B_128",
    )


@pytest.mark.parametrize("key_format", ["x" * 257, "ä" * 129, "\ud800", b"bytes", None])
def test_key_format_is_at_most_256_bytes_of_utf_8(key_format: object) -> None:
    """A longer note, or none that UTF-8 can encode, is refused."""
    refused(
        lambda: FilterSpec.plan(10**11, key_format=key_format),  # type: ignore[arg-type]
        "key_format",
        key_format,
        "at most 256 bytes of UTF-8",
    )


@pytest.mark.parametrize("value", [0, -1, True, 1.5, 2**43 + 1, "8"])
def test_sized_filters_take_whole_numbers_of_bits_and_hashes(value: object) -> None:
    """Bits outside 1 .. 2^43 and hashes outside 1 .. 64 are refused."""
    bits = "a whole number from 1 to 8796093022208"
    refused(lambda: BloomFilter.sized(value, 7, seed=1), "bits", value, bits)  # type: ignore[arg-type]
    hashes = "a whole number from 1 to 64"
    refused(lambda: BloomFilter.sized(2**43, value, seed=1), "hashes", value, hashes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capacity", "rate"), [(1, 0.5), (1, 1e-9), (10**11, 0.5), (10**11, 1e-9), (1000, 0.01)]
)
def test_the_ends_of_the_ranges_are_accepted(capacity: int, rate: float) -> None:
    """A spec for the least and the most of everything is planned, within the limits an image accepts."""
    for on_full in OnFull:
        spec = FilterSpec.plan(capacity, rate, on_full=on_full, key_format="ä" * 128)
        assert 1024 <= spec.first_body.bits <= sizing.MAX_BITS
        assert 1 <= spec.first_body.hashes <= sizing.MAX_HASHES


@pytest.mark.parametrize("word", ["grow", "Grow", "GROW", OnFull.GROW])
def test_on_full_is_read_in_either_case(word: OnFull | str) -> None:
    """The words and the enum mean the same."""
    assert BloomFilter(10, on_full=word).spec.on_full is OnFull.GROW


def test_sizing_is_the_textbooks() -> None:
    """bits = ceil(-n ln p / (ln 2)^2) and hashes = round(-log2 p), with a floor of 1024 bits and 1 hash."""
    assert sizing.plan(1000, 0.01) == sizing.BodySpec(9586, 7, 1000)
    assert sizing.plan(100_000, 1e-3) == sizing.BodySpec(1_437_759, 10, 100_000)
    assert sizing.plan(10**9, 1e-9).hashes == 30
    assert sizing.plan(1, 0.5).hashes == 1
    assert sizing.plan(1, 1e-30).hashes == sizing.MAX_HASHES


def test_sized_filters_name_the_keys_they_are_best_for() -> None:
    """A sized filter's capacity is m ln 2 / k, at least 1, and its rate the formula's there."""
    spec = FilterSpec.sized(2000, 7, seed=1)
    assert (spec.capacity, spec.on_full) == (198, OnFull.DEGRADE)
    assert spec.error_rate == pytest.approx(0.0078, rel=0.02)
    assert FilterSpec.sized(1, 64, seed=1).capacity == 1


@pytest.mark.parametrize(
    ("changes", "seed", "field"),
    [
        ({}, 7, ""),
        ({"seed": 8}, None, ""),
        ({"seed": 8}, 7, "seed"),
        ({"capacity": 101}, 7, "capacity"),
        ({"error_rate": 0.02}, 7, "error_rate"),
        ({"on_full": "reject"}, 7, "on_full"),
        ({"hash_scheme": HashScheme.BLAKE2B_128, "seed": b"s" * 16}, None, "hash_scheme"),
        ({"key_format": "upper case"}, 7, "key_format"),
        ({"capacity": 101, "key_format": "upper case", "seed": 8}, 7, "capacity"),
        ({"key_format": "upper case", "seed": 8}, 7, "key_format"),
    ],
)
def test_specs_differ_in_the_first_field_that_is_not_as_asked(
    changes: dict[str, Any], seed: int | None, field: str
) -> None:
    """And in no field where they are equal; a seed counts only where one is asked for."""
    given: dict[str, Any] = {"capacity": 100, "error_rate": 0.01, "seed": 7}
    assert FilterSpec.plan(**given).differs_from(FilterSpec.plan(**{**given, **changes}), seed) == field
