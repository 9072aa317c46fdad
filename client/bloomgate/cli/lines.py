"""Keys from lines: they end at ``\\n``, one trailing ``\\r`` is dropped, other bytes are kept as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO


class Lines:
    """Iterates over the keys of a stream. Empty lines are skipped and counted in ``skipped``."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.skipped = 0
        self.bytes_read = 0

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            self.bytes_read += len(line)
            key = line.removesuffix(b"\n").removesuffix(b"\r")
            if key:
                yield key
            else:
                self.skipped += 1

    def batches(self, size: int) -> Iterator[list[bytes]]:
        """The keys in lists of ``size``; the last may be shorter."""
        batch: list[bytes] = []
        for key in self:
            batch.append(key)
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch
