"""The journal port: what every implementation promises, whatever it stores on.

Order. ``append`` gives records consecutive seqs in the order of the calls, and they become durable in that
order: when seq s is durable, so is every seq before it. One event loop calls all methods but ``replay``.

Durable. ``await durable(s)`` returns once seq s would survive the loss of power at any later moment. Only
then may s leave the daemon, in an answer, an image or a snapshot's stamp: a seq lost in a crash may be given
again, so nobody outside may have seen it. A durable seq is never given again, even when all its records
have been trimmed.

Failure. If a commit fails, whatever the reason, the journal is failed for good: waiting callers get
JournalFailed, further appends raise it, ``on_failure`` is called once. Nothing is tried again, since a sync
that failed once may report success the next time without having written anything. What was acknowledged
before is durable, and the next start recovers it.

Trim. ``trim(up_to)`` lets go of records up to and including ``up_to``, in slices between the groups, but of
none younger than the retention. The trim mark, stored with every slice, is the highest seq that may be
missing. Creates and the newest Snapshots of filters that still exist are kept whatever their seq, so the
catalog can always be rebuilt; a dropped filter's go with its Drop. The newest LeaseFlag stays unless it is 0.

Restored. A journal that was copied by a backup and put back says so in ``restored``, over all restarts, until
its operator asserts that nothing was added after the backup. While filters of before the backup exist it is
not trimmed, unless it has grown large since: what it held may be needed then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from bloomgated.storage.records import Record


@dataclass(frozen=True, slots=True)
class Placed:
    """A record with its place in the journal. ``running_time`` is when, on the journal's own clock: seconds
    that a daemon has been running on this journal, over all restarts."""

    seq: int
    running_time: float
    record: Record


class Journal(Protocol):
    """The durable, ordered record of every mutation. See the module's promises."""

    on_commit: Callable[[float, int], None]
    """Called after each group commit with its duration in seconds and its number of records."""
    on_failure: Callable[[Exception], None]
    """Called once, when a commit has failed."""

    @property
    def journal_id(self) -> bytes:
        """16 random bytes, drawn when the journal was created."""

    @property
    def last_seq(self) -> int:
        """The seq given last, durable or not."""

    @property
    def durable_seq(self) -> int:
        """The highest durable seq."""

    @property
    def trim_mark(self) -> int:
        """The highest seq that may be missing; 0 before the first trim."""

    @property
    def restored(self) -> int:
        """The last seq of the backup that this journal was put back from; 0 where it was not."""

    def append(self, records: Sequence[Record]) -> int:
        """Queue records for the next group commit and return the seq of the last.

        All or none: raises JournalQueueFull, JournalFailed (also once closed), or struct.error for a record
        that has no bytes, before anything is queued.
        """

    async def durable(self, seq: int) -> None:
        """Return once ``seq`` is durable. Raises JournalFailed if it never will be.

        Whoever stops waiting takes nothing back: what is queued is committed all the same.
        """

    @property
    def lease_seconds(self) -> float:
        """What the newest durable LeaseFlag said when the journal was opened; 0 where there was none."""

    def replay(self, after: int, *, gapless: bool = False) -> Iterator[Placed]:
        """Yield the durable records after ``after``, and the kept ones at or before it, by seq.

        With ``gapless`` it raises TrimmedAway, at once, where not all after ``after`` are there. Raises
        JournalDamaged where one is missing or altered. Blocks; any thread may call it.
        """

    def trim(self, up_to: int) -> None:
        """Let go of records up to ``up_to``, as far as the retention allows. Returns at once."""

    async def close(self) -> None:
        """Commit what is queued and stop. Idempotent; does not raise if the journal has failed."""
