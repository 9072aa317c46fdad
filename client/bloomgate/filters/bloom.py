"""One Bloom filter body over one bit buffer.

Bit i is bit ``i & 7`` of byte ``i >> 3``. The buffer is seen twice, without a copy: as a bitarray for the
scalar path (few keys, where numpy's fixed cost per call dominates) and as a numpy array for the vectorised
path. Both give the same bits and the same answers for every input.

Setting a bit reads, changes and writes a byte, so there is one writer, always. Bits only ever go from 0 to 1,
so readers in other threads see a body as it was or as it becomes, never one that lost a key.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from bitarray import bitarray
from numpy.typing import NDArray

from bloomgate.filters import hashing
from bloomgate.filters.hashing import Halves
from bloomgate.filters.sizing import BodySpec

# The vectorised path takes this many keys at a time, so that its temporaries (128 KiB each) stay in the
# second-level cache. Measured on 100,000 keys at once: checks 5 % slower, adds 20 %.
SLICE_KEYS = 16_384
# Popcounts go through the buffer in slices of this many bytes, so that no temporary is as large as the body.
_COUNT_SLICE = 1 << 22


class BloomBody:
    """A bit buffer with its spec and ``count``, the number of certainly new keys that went into it."""

    __slots__ = ("_bits", "_ones", "_steps", "_version", "array", "count", "spec")

    def __init__(self, spec: BodySpec, array: NDArray[np.uint8] | None = None, count: int = 0) -> None:
        """Allocate ``spec.nbytes`` zero bytes, or take ``array`` of that length as it is."""
        self.spec = spec
        self.array = np.zeros(spec.nbytes, np.uint8) if array is None else array
        self.count = count
        self._bits = bitarray(buffer=self.array.data, endian="little")
        self._steps = range(1, spec.hashes + 1)
        self._version = 0
        self._ones = (-1, 0)

    @classmethod
    def resident(cls, spec: BodySpec) -> BloomBody:
        """An empty body whose memory is there now, and not page by page as bits are first set.

        Takes up to a second a GiB, without the interpreter's lock; a batch of adds that first touched the
        pages of so large a body would take longer, with it.
        """
        array = np.empty(spec.nbytes, np.uint8)
        array.fill(0)
        return cls(spec, array)

    def has(self, h1: int, h2: int) -> bool:
        """Whether all bits of one digest are set. Stops at the first that is not."""
        bits, m = self._bits, self.spec.bits
        # hashing.positions, unrolled, here and in set: at half the cost of the generator, this loop is the
        # product's hottest. h2 need not wrap: only its low 64 bits reach h1.
        for i in self._steps:
            if not bits[h1 % m]:
                return False
            h1 = (h1 + h2) & 0xFFFFFFFFFFFFFFFF
            h2 += i
        return True

    def probes(self) -> tuple[bitarray, int, range]:
        """What ``has`` works with: the bits, how many, and the steps from one position to the next."""
        return self._bits, self.spec.bits, self._steps

    def set(self, h1: int, h2: int) -> None:
        """Set all bits of one digest."""
        bits, m = self._bits, self.spec.bits
        for i in self._steps:
            bits[h1 % m] = 1
            h1 = (h1 + h2) & 0xFFFFFFFFFFFFFFFF
            h2 += i
        self._version += 1

    def has_many(self, halves: Halves) -> NDArray[np.bool_]:
        """Whether all bits of each digest are set, as bools of shape (keys,).

        Each round probes only the keys that survived the one before.
        """
        found = np.zeros(halves[0].size, np.bool_)
        for start, h1, h2 in _slices(halves):
            alive = np.arange(start, start + h1.size)
            for i in self._steps:
                position = hashing.position_array(h1, self.spec.bits)
                bit = self.array[position >> 3] >> (position.astype(np.uint8) & 7) & 1
                # As bools, because flatnonzero looks at those five times as fast as at bytes.
                kept = np.flatnonzero(bit.view(np.bool_))
                if not kept.size:
                    break
                # Taking the survivors copies, so that the step below never writes to the caller's arrays.
                h1, h2 = h1[kept], h2[kept]
                alive = alive[kept]
                hashing.step(h1, h2, i)
            else:
                found[alive] = True
        return found

    def set_many(self, halves: Halves) -> None:
        """Set all bits of each digest."""
        for _, h1, h2 in _slices(halves):
            h1, h2 = h1.copy(), h2.copy()
            for i in self._steps:
                position = hashing.position_array(h1, self.spec.bits)
                # .at, because two keys of the batch may meet in one byte.
                np.bitwise_or.at(self.array, position >> 3, np.uint8(1) << (position.astype(np.uint8) & 7))
                hashing.step(h1, h2, i)
        self._version += 1

    @property
    def bits_set(self) -> int:
        """How many bits are set. Counted on demand and remembered until the next add.

        Any thread may ask; while a writer adds, the count is some moment's between two adds.
        """
        version, ones = self._ones
        if version != self._version:
            version = self._version
            slices = range(0, self.array.size, _COUNT_SLICE)
            ones = sum(int(np.bitwise_count(self.array[i : i + _COUNT_SLICE]).sum()) for i in slices)
            self._ones = (version, ones)
        return ones


def _slices(halves: Halves) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.uint64]]]:
    """Yield (start, h1, h2) of at most SLICE_KEYS keys each."""
    h1, h2 = halves
    for start in range(0, h1.size, SLICE_KEYS):
        yield start, h1[start : start + SLICE_KEYS], h2[start : start + SLICE_KEYS]
