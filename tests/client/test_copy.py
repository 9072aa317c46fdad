"""A copy's own check of one key: what BloomFilter.might_contain says, until the deadline."""

from __future__ import annotations

import pytest

from bloomgate import BloomFilter, HashScheme, InvalidKey
from bloomgate.replica import BOOTTIME, VOID, Copy, Counts, now


def _copy(bloom: BloomFilter, seconds: float = 60.0) -> tuple[Copy, Counts]:
    counts = Counts()
    return Copy(bloom, now(BOOTTIME) + seconds, counts), counts


@pytest.mark.parametrize("scheme", list(HashScheme))
@pytest.mark.parametrize("keys", [0, 50, 650])
def test_it_answers_as_might_contain_does(scheme: HashScheme, keys: int) -> None:
    """Of one body and of a chain, and of what is added after it was made; and counts it."""
    seed = 7 if scheme is HashScheme.MURMUR3_X64_128 else None
    bloom = BloomFilter(100, 0.05, hash_scheme=scheme, seed=seed)
    bloom.add_many([f"in {number}" for number in range(keys)])
    copy, counts = _copy(bloom)
    asked = [f"{where} {number}" for where in ("in", "out") for number in range(1000)]
    expected = bloom.might_contain_many(asked)
    assert [copy.answer(key) for key in asked] == expected
    assert counts.take() == (expected.count(False), expected.count(True))
    bodies = len(bloom.bodies)
    bloom.add("later")
    assert len(bloom.bodies) == bodies
    assert copy.answer("later")
    assert copy.answer(b"later")


def test_from_its_deadline_on_it_says_nothing() -> None:
    """Nor counts anything."""
    for copy, counts in (_copy(BloomFilter(10), -1e-6), (VOID, Counts())):
        assert copy.answer("mango") is None
        assert counts.take() == (0, 0)


def test_it_refuses_what_is_no_key() -> None:
    """As might_contain does."""
    copy, counts = _copy(BloomFilter(10))
    for wrong in ("", b""):
        with pytest.raises(InvalidKey):
            copy.answer(wrong)
    with pytest.raises(TypeError):
        copy.answer(7)  # type: ignore[arg-type]
    assert counts.take() == (0, 0)
