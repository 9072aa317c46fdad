"""Writes the golden images of format version 1 beside this file.

They were written once and are never rewritten: every later release loads these very bytes. The script is
kept to say what is in them, and it refuses to replace one. A later format version adds files of its own.
"""

from __future__ import annotations

from pathlib import Path

from bloomgate.filters import BloomFilter, FilterSpec, HashScheme
from bloomgate.filters.image import to_bytes

HERE = Path(__file__).parent
KEYS = [f"key-{n}" for n in range(200)]


def images() -> dict[str, bytes]:
    """The name and bytes of every image. Each holds all of KEYS."""
    filters = {
        "v1-fixed.bloom": BloomFilter.of(
            FilterSpec.plan(
                200, 0.01, on_full="reject", seed=20_010_911, key_format="key-<number>, ä in UTF-8"
            )
        ),
        "v1-grown.bloom": BloomFilter(50, 0.001, on_full="grow", seed=1),
        "v1-keyed.bloom": BloomFilter(
            200, 0.01, on_full="degrade", hash_scheme=HashScheme.BLAKE2B_128, seed=bytes(range(16))
        ),
        "v1-sized.bloom": BloomFilter.sized(2001, 7, seed=2**32 - 1),
    }
    made = {}
    for number, (name, bloom) in enumerate(filters.items(), start=1):
        bloom.add_many(KEYS)
        bloom.add_many(KEYS[:10])
        made[name] = to_bytes(bloom, generation=number, seq=1000 * number)
    return made


def main() -> None:
    """Write the images that do not exist yet."""
    for name, data in images().items():
        with open(HERE / name, "xb") as file:
            file.write(data)


if __name__ == "__main__":
    main()
