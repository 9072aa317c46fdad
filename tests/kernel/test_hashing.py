"""Digests and positions: frozen for ever, because files and callers depend on them."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import mmh3
import numpy as np
import pytest

from bloomgate.filters import (
    BloomFilter,
    Hasher,
    HashScheme,
    InvalidKey,
    ParameterError,
    encode_key,
    hashing,
)

SECRET = bytes(range(16))
HASHERS = [Hasher(HashScheme.MURMUR3_X64_128, 2**32 - 1), Hasher(HashScheme.BLAKE2B_128, SECRET)]


def fruit_positions(fruit: str) -> list[int]:
    h1, h2 = (mmh3.hash(fruit.encode(), seed, signed=False) for seed in (0, 1))
    return list(hashing.positions(h1, h2, 32, 3))


def test_fruit_golden_vector() -> None:
    """Five fruits in 32 bits with 3 hashes set the 13 known bits; papaya is a false positive."""
    ones = {
        bit for fruit in ("mango", "banana", "apple", "cherry", "orange") for bit in fruit_positions(fruit)
    }
    assert sorted(ones) == [1, 4, 7, 8, 9, 14, 15, 16, 19, 24, 26, 30, 31]
    assert [bit in ones for bit in fruit_positions("cherry")] == [True, True, True]
    assert [bit in ones for bit in fruit_positions("papaya")] == [True, True, True]
    assert [bit in ones for bit in fruit_positions("peach")] == [True, True, False]


def test_positions_are_the_formula_of_the_docstring() -> None:
    """Position i is ((h1 + i*h2 + (i^3 - i)/6) mod 2^64) mod m, also where the sums wrap."""
    rng = random.Random(1)
    for _ in range(200):
        h1, h2, m = rng.getrandbits(64), rng.getrandbits(64), rng.randrange(1, 2**43)
        formula = [(h1 + i * h2 + (i**3 - i) // 6) % 2**64 % m for i in range(64)]
        assert list(hashing.positions(h1, h2, m, 64)) == formula


@pytest.mark.parametrize("bits", [1, 3, 1024, 9_585_059, 2**43])
def test_position_array_is_the_remainder(bits: int) -> None:
    """The vectorised remainder is the remainder, at both ends of 64 bits too."""
    h1 = np.random.default_rng(2).integers(0, 2**64, 1000, dtype=np.uint64)
    h1[:4] = [0, bits - 1, 2**64 - 1, 2**63]
    assert hashing.position_array(h1, bits).tolist() == [h % bits for h in h1.tolist()]


def test_murmur_digest_is_the_published_one() -> None:
    """Scheme 1 is MurmurHash3 x64 128: its digest of "foo" is the one in mmh3's own tests."""
    digest = Hasher(HashScheme.MURMUR3_X64_128, 0).digest(b"foo")
    assert digest == b"aE\xf5\x01W\x86q\xe2\x87}\xba+\xe4\x87\xaf~"


def test_blake2b_digest_is_the_keyed_one() -> None:
    """Scheme 2 is BLAKE2b with 16 bytes of output and the secret as its key."""
    expected = hashlib.blake2b(b"foo", digest_size=16, key=SECRET).digest()
    assert Hasher(HashScheme.BLAKE2B_128, SECRET).digest(b"foo") == expected


@pytest.mark.parametrize("hasher", HASHERS, ids=repr)
def test_halves_are_little_endian_on_every_machine(hasher: Hasher) -> None:
    """pair, pairs and halves read the same two numbers from a digest, low byte first."""
    keys = [b"a", b"b" * 1000, b"\x00"]
    digests = hasher.digests(keys)
    expected = [
        (int.from_bytes(digests[at : at + 8], "little"), int.from_bytes(digests[at + 8 : at + 16], "little"))
        for at in (0, 16, 32)
    ]
    h1, h2 = hashing.halves(digests)
    assert list(zip(h1.tolist(), h2.tolist(), strict=True)) == expected
    assert list(hashing.pairs(digests)) == expected
    assert [hasher.pair(key) for key in keys] == expected


def test_hash_ids_are_frozen() -> None:
    """The fingerprint of a scheme and seed never changes: callers compare it across releases."""
    assert Hasher(HashScheme.MURMUR3_X64_128, 0).hash_id == 0x4CD984A42F71CB75
    assert Hasher(HashScheme.BLAKE2B_128, SECRET).hash_id == 0xDFA192675F49EFC


def test_hashers_are_equal_when_scheme_and_seed_are() -> None:
    """Equal hashers have one hash_id and one hash; another seed or another type is not equal."""
    one, same, other = (Hasher(HashScheme.MURMUR3_X64_128, seed) for seed in (1, 1, 2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one.hash_id != other.hash_id
    assert one != "murmur3"


def test_seeds_and_secrets_are_never_shown() -> None:
    """Neither repr nor an error about a seed shows what could be a secret."""
    assert repr(SECRET) not in repr(Hasher(HashScheme.BLAKE2B_128, SECRET))
    assert "4711" not in repr(Hasher(HashScheme.MURMUR3_X64_128, 4711))
    for scheme, secret in ((HashScheme.MURMUR3_X64_128, SECRET), (HashScheme.BLAKE2B_128, SECRET * 2)):
        with pytest.raises(ParameterError) as caught:
            Hasher(scheme, secret)
        assert repr(secret) not in str(caught.value)


def test_seeds_are_drawn_at_random_unless_given() -> None:
    """Two filters without a seed hash differently, so that keys picked against one do not hit the other."""
    for scheme, size in ((HashScheme.MURMUR3_X64_128, 4), (HashScheme.BLAKE2B_128, 16)):
        seeds = {BloomFilter(10, hash_scheme=scheme).spec.hasher.seed_bytes for _ in range(8)}
        # Eight 32-bit numbers are all equal with a chance of 2^-224.
        assert len(seeds) > 1
        assert {len(seed) for seed in seeds} == {size}


class Text(str):
    """A str that is not exactly one."""


class Blob(bytes):
    """Bytes that are not exactly bytes."""


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [b"a", b"b"],
        ["a", "ä", "\U0001f600"],
        [b"a", "b"],
        [Text("a"), "b"],
        [Blob(b"a"), b"b"],
        (b"a", b"b"),
    ],
)
def test_keys_are_encoded_alike_one_by_one_and_in_lists(keys: list[str | bytes]) -> None:
    """A list of keys becomes the bytes that each of them becomes alone: UTF-8, nothing normalised."""
    assert list(hashing.encode_keys(keys)) == [encode_key(key) for key in keys]
    assert [encode_key(key) for key in keys] == [k if isinstance(k, bytes) else k.encode() for k in keys]


@pytest.mark.parametrize("key", ["", b"", "\ud800", "a\udfffb"])
@pytest.mark.parametrize("beside", [[], ["good"], [b"good"], ["good", b"good"]])
def test_keys_that_no_filter_holds_are_invalid(key: str | bytes, beside: list[str | bytes]) -> None:
    """Empty keys and lone surrogates are InvalidKey alone and in every list, and nothing is added."""
    bloom = BloomFilter(10, seed=1)
    before = bloom.to_bytes()
    for call in (bloom.add, bloom.might_contain, bloom.__contains__):
        with pytest.raises(InvalidKey):
            call(key)
    for call_many in (bloom.add_many, bloom.might_contain_many):
        with pytest.raises(InvalidKey):
            call_many([*beside, key])
    assert bloom.to_bytes() == before


@pytest.mark.parametrize("key", [1, None, bytearray(b"a"), memoryview(b"a"), ("a",)])
def test_other_types_are_no_keys(key: object) -> None:
    """What is neither str nor bytes is a TypeError, never hashed by its buffer or its repr."""
    bloom = BloomFilter(10, seed=1)
    for call in (bloom.add, bloom.might_contain):
        with pytest.raises(TypeError, match="a key is str or bytes"):
            call(key)  # type: ignore[arg-type]
    for call_many in (bloom.add_many, bloom.might_contain_many):
        with pytest.raises(TypeError, match="a key is str or bytes"):
            call_many([key])  # type: ignore[list-item]


@pytest.mark.parametrize("key", ["abc", b"abc"])
def test_one_key_is_not_taken_for_a_list(key: str | bytes) -> None:
    """add_many("abc") is a mistake, not three keys."""
    bloom = BloomFilter(10, seed=1)
    for call_many in (bloom.add_many, bloom.might_contain_many):
        with pytest.raises(TypeError, match="one key"):
            call_many(key)  # type: ignore[arg-type]


def test_lone_surrogates_do_not_kill_the_interpreter() -> None:
    """A process that meets a lone surrogate goes on: some functions of mmh3 would end it."""
    script = (
        "from bloomgate import BloomFilter, InvalidKey\n"
        "bloom = BloomFilter(10)\n"
        "for call in (bloom.add, bloom.might_contain, lambda k: bloom.add_many([k] * 50),\n"
        "             lambda k: bloom.might_contain_many(['a', k])):\n"
        "    try:\n"
        "        call('\\ud800')\n"
        "    except InvalidKey:\n"
        "        print('invalid')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["invalid"] * 4), done.stderr
