"""The check of one key for whoever asks often."""

from __future__ import annotations

import pytest

from bloomgate import BloomFilter, HashScheme, InvalidKey


@pytest.mark.parametrize("scheme", list(HashScheme))
@pytest.mark.parametrize("keys", [0, 50, 650])
def test_it_answers_as_might_contain_does(scheme: HashScheme, keys: int) -> None:
    """Of one body and of a chain, and of what is added after it was made."""
    bloom = BloomFilter(
        100, 0.05, hash_scheme=scheme, seed=7 if scheme is HashScheme.MURMUR3_X64_128 else None
    )
    bloom.add_many([f"in {number}" for number in range(keys)])
    check = bloom.checker()
    asked = [f"{where} {number}" for where in ("in", "out") for number in range(1000)]
    assert [check(key) for key in asked] == bloom.might_contain_many(asked)
    bodies = len(bloom.bodies)
    bloom.add("later")
    assert len(bloom.bodies) == bodies
    assert check("later")
    assert check(b"later")


def test_it_refuses_what_is_no_key() -> None:
    """As might_contain does."""
    check = BloomFilter(10).checker()
    for wrong in ("", b""):
        with pytest.raises(InvalidKey):
            check(wrong)
    with pytest.raises(TypeError):
        check(7)  # type: ignore[arg-type]
