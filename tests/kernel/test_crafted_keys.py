"""Keys that an attacker makes: what they do to a murmur filter, and what they do not do to a keyed one.

What stands in docs/SECURITY.md about choosing a hash scheme is shown here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import mmh3
import numpy as np
import pytest

from bloomgate.filters import BloomFilter, Hasher, HashScheme
from bloomgate.v1 import admin_pb2, filters_pb2
from bloomgated.access import Role, new_token
from conftest import StartDaemon

from .crafting import BLOCK_BYTES, colliding, key_of
from .measuring import poisson_most

MURMUR, KEYED = HashScheme.MURMUR3_X64_128, HashScheme.BLAKE2B_128
SEED = 0xC0FFEE
SECRET = random.Random(1).randbytes(16)
CRAFTED = 10_000


def filled(scheme: HashScheme, capacity: int, error_rate: float) -> BloomFilter:
    """A filter with as many honest keys as it is for, one of which the attacker knows."""
    seed = SEED if scheme is MURMUR else SECRET
    bloom = BloomFilter(capacity, error_rate, on_full="reject", hash_scheme=scheme, seed=seed)
    bloom.add_many([b"honest-%d" % n for n in range(capacity)])
    return bloom


def hits(bloom: BloomFilter, keys: Sequence[bytes]) -> int:
    return sum(bloom.might_contain_many(keys))


def most_by_accident(bloom: BloomFilter, keys: int) -> int:
    """The most false positives that a right filter has among absent keys, with a chance of 1e-6 of more.

    Each is one with a chance of ``expected_error_rate``, on its own: their number is close to Poisson.
    """
    return poisson_most(keys * bloom.expected_error_rate)


def same_digest(count: int) -> list[bytes]:
    """Absent keys with the digest that ``honest-0`` has under SEED."""
    h1, h2 = Hasher(MURMUR, SEED).pair(b"honest-0")
    rng = random.Random(2)
    return [key_of(h1, h2, SEED, rng.randbytes(BLOCK_BYTES)) for _ in range(count)]


def test_a_key_is_computed_for_any_digest() -> None:
    """What the attack stands on: the digest of the key is the one that was asked for."""
    rng = random.Random(3)
    for blocks in range(4):
        h1, h2, seed = rng.getrandbits(64), rng.getrandbits(64), rng.getrandbits(32)
        key = key_of(h1, h2, seed, rng.randbytes(blocks * BLOCK_BYTES))
        assert mmh3.mmh3_x64_128_utupledigest(key, seed) == (h1, h2)


@pytest.mark.parametrize("error_rate", [0.01, 1e-9])
def test_with_the_seed_every_crafted_key_is_a_false_positive(error_rate: float) -> None:
    """All of 10,000 absent keys, made from the seed and one key that is in; a finer filter is no help."""
    keys = same_digest(CRAFTED)
    assert len(set(keys)) == CRAFTED
    bloom = filled(MURMUR, 1000, error_rate)
    assert hits(bloom, keys) == CRAFTED
    assert hits(bloom, [b"absent-%d" % n for n in range(CRAFTED)]) <= most_by_accident(bloom, CRAFTED)


@pytest.mark.parametrize("error_rate", [0.01, 1e-4])
def test_under_the_keyed_scheme_the_same_keys_are_ordinary(error_rate: float) -> None:
    """No more of them are false positives than of any absent keys: see ``most_by_accident`` for the bound."""
    bloom = filled(KEYED, 1000, error_rate)
    for keys in (same_digest(CRAFTED), list(colliding(13))):
        assert hits(bloom, keys) <= most_by_accident(bloom, len(keys)) < 0.02 * len(keys)


def test_an_unknown_seed_is_no_help_against_crafted_keys() -> None:
    """1,024 keys have one digest under every seed: with one of them in, all others are false positives."""
    keys = list(colliding(10))
    assert len(set(keys)) == 1024
    for number in range(20):
        seed = random.Random(number).getrandbits(32)
        assert len({mmh3.mmh3_x64_128_digest(key, seed) for key in keys}) == 1
    bloom = BloomFilter(1000, 1e-6)  # its seed is drawn
    bloom.add(keys[500])
    assert hits(bloom, keys) == 1024
    # And a batch of them is one key, of which none but the first is new.
    assert sum(BloomFilter(1000, 1e-6).add_many(keys)) == 1


def test_under_the_keyed_scheme_keys_that_collide_under_every_seed_do_not() -> None:
    """With one of them in, the others are absent: a key at a rate of 1e-6 is not one of 1,023."""
    keys = list(colliding(10))
    keyed = BloomFilter(2000, 1e-6, hash_scheme=KEYED, seed=SECRET)
    assert len(set(map(keyed.spec.hasher.digest, keys))) == 1024
    keyed.add(keys[500])
    # One key sets 20 of 50,000 bits: a chance of 1e-60 for each.
    assert [n for n, hit in enumerate(keyed.might_contain_many(keys)) if hit] == [500]


def chosen_to_spread(bloom: BloomFilter, count: int) -> list[bytes]:
    """Keys of which each sets as many bits as there are hashes, none set before: computed from the seed."""
    rng = np.random.default_rng(4)
    bits, hashes = bloom.bits, bloom.hashes
    taken, keys = np.zeros(bits, np.bool_), list[bytes]()
    steps = np.arange(hashes, dtype=np.uint64)[:, None]
    bend = (steps**3 - steps) // np.uint64(6)
    while len(keys) < count:
        h1, h2 = rng.integers(0, 2**64, (2, 50_000), dtype=np.uint64)
        positions = (h1 + steps * h2 + bend) % np.uint64(bits)
        for at in np.flatnonzero(~taken[positions].any(axis=0)):
            mine = positions[:, at]
            if len(set(mine.tolist())) == hashes and not taken[mine].any() and len(keys) < count:
                taken[mine] = True
                keys.append(key_of(int(h1[at]), int(h2[at]), SEED))
    return keys


def test_with_the_seed_chosen_keys_pollute_a_filter() -> None:
    """Filled with them it answers maybe ten times too often for everybody; a keyed one as it should."""
    absent = [b"absent-%d" % n for n in range(40_000)]
    murmur = BloomFilter(1000, 0.01, on_full="reject", seed=SEED)
    keyed = BloomFilter(1000, 0.01, on_full="reject", hash_scheme=KEYED, seed=SECRET)
    keys = chosen_to_spread(murmur, 1000)
    assert all(murmur.add_many(keys))
    assert murmur.bits_set == 1000 * murmur.hashes
    keyed.add_many(keys)
    # 73 % of the bits instead of half: 0.73^7 is 11 %.
    assert hits(murmur, absent) > 0.09 * len(absent)
    assert keyed.expected_error_rate < 0.0125
    assert hits(keyed, absent) <= most_by_accident(keyed, len(absent))


def test_a_daemons_seed_is_told_to_replicas_alone_and_is_what_the_attack_needs(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Over the wire: who has HashSpec computes keys that are all answered maybe; of a keyed filter nobody
    without its secret does, and readers are told neither."""
    reader, read_entry = new_token("reader", [Role.READ], ["*"])
    replica, replica_entry = new_token("replica", [Role.REPLICA, Role.WRITE, Role.ADMIN], ["*"])
    auth = tmp_path / "auth.toml"
    auth.write_text(read_entry + replica_entry)
    daemon = start_daemon("--set", f"auth.file={auth}")
    with daemon.stubs() as (filters, admin):

        def as_(token: str) -> dict[str, object]:
            return {"metadata": (("authorization", f"Bearer {token}"),), "timeout": 30}

        def maybes(name: str, keys: Sequence[bytes]) -> int:
            request = filters_pb2.MightContainRequest(filter=name, keys=keys)
            answers = filters.MightContain(request, **as_(reader)).answers
            assert len(answers) == len(keys)
            return sum(answer == filters_pb2.ANSWER_MAYBE for answer in answers)

        for name, scheme in (("murmur", 1), ("keyed", 2)):
            spec = filters_pb2.FilterSpec(capacity=1000, error_rate=1e-6, hash_scheme=scheme)
            admin.CreateFilter(admin_pb2.CreateFilterRequest(name=name, spec=spec), **as_(replica))
            filters.Add(filters_pb2.AddRequest(filter=name, keys=[b"known"]), **as_(replica))
            with pytest.raises(Exception, match="PERMISSION_DENIED"):
                filters.HashSpec(filters_pb2.HashSpecRequest(filter=name), **as_(reader))
            shown = filters.Stats(filters_pb2.StatsRequest(filter=name), **as_(reader)).filter.spec
            assert not shown.HasField("seed")
        seed = filters.HashSpec(filters_pb2.HashSpecRequest(filter="murmur"), **as_(replica)).seed
        h1, h2 = Hasher(MURMUR, seed).pair(b"known")
        rng = random.Random(5)
        keys = [key_of(h1, h2, seed, rng.randbytes(BLOCK_BYTES)) for _ in range(1000)]
        assert maybes("murmur", keys) == 1000
        # One key's 20 bits of 29,000: not one in 1e50 of them by accident.
        assert maybes("keyed", keys) == 0
