"""The kernel beside its peers: time per key, and memory.

Run as ``python benchmarks/kernel.py``; under a minute. Contenders are measured in turns (one after the other,
then all of them again). Shown are the median time, and the median of each turn's ratio to the kernel: a busy
machine slows neighbours in a turn alike, so read the ratios rather than the nanoseconds.

What favours whom: keys are the same objects in every turn, so the peers that use Python's own ``hash`` find
it remembered in the key after the first turn, while the kernel hashes each key anew. That hash cannot be
saved or sent: it differs in every process. "savable hash" is what a filter on disk needs.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mmh3
import numpy as np

from bloomgate.filters import BloomFilter

CAPACITY = 1_000_000
ERROR_RATE = 0.01
BATCHES = (1_000, 100_000)
REPEATS = 11
ADD_REPEATS = 5
# How many keys a turn of the one-by-one measurements takes.
SINGLES = 20_000

Turn = Callable[[], object]
Times = dict[str, list[float]]


@dataclass
class Table:
    """A title, column heads, and rows of a name with its cells."""

    title: str
    columns: Sequence[str]
    note: str
    rows: list[tuple[str, list[str]]] = field(default_factory=list)

    def __str__(self) -> str:
        heads = ["", *self.columns]
        lines = [[name, *cells] for name, cells in self.rows]
        widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
        text = [
            "  ".join(
                [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
            )
            for line in [heads, *lines]
        ]
        return "\n".join([self.title, *text, self.note])


def keys(prefix: str, count: int) -> list[bytes]:
    """``count`` keys of the length of a short e-mail address."""
    return [b"%s-%08d@example.org" % (prefix.encode(), n) for n in range(count)]


def timed(turns: dict[str, Turn], per_turn: int, repeats: int = REPEATS) -> Times:
    """Nanoseconds per key of every repeat of each turn, all taken in turns."""
    taken: Times = {name: [] for name in turns}
    for _ in range(repeats):
        for name, turn in turns.items():
            start = time.perf_counter_ns()
            turn()
            taken[name].append((time.perf_counter_ns() - start) / per_turn)
    return taken


def median(turn: Turn, per_turn: int, repeats: int = REPEATS) -> float:
    """Median nanoseconds per key of one turn."""
    return statistics.median(timed({"": turn}, per_turn, repeats)[""])


def savable_hash(key: bytes) -> int:
    """What rbloom's documentation asks of a hash that outlives its process: a signed 128-bit number."""
    return int.from_bytes(mmh3.mmh3_x64_128_digest(key, 7), "little", signed=True)


@dataclass(frozen=True)
class Contender:
    """A way to make a filter, and what one add, one check and a batch of each are called there."""

    make: Callable[[], Any]
    add: Callable[[Any], Callable[[bytes], object]]
    check: Callable[[Any], Callable[[bytes], object]]
    add_batch: Callable[[Any, Sequence[Any]], object]
    check_batch: Callable[[Any, Sequence[Any]], object]
    text: bool = False
    """Whether its keys are ``str``."""


def each_in(bloom: Any, batch: Sequence[Any]) -> list[bool]:
    """The peers' batch: ``in`` for each key."""
    return [key in bloom for key in batch]


def add_each(bloom: Any, batch: Sequence[Any]) -> None:
    """A batch of adds where the peer has none."""
    for key in batch:
        bloom.add(key)


def kernel() -> BloomFilter:
    """The kernel's filter of the comparison. Not growing, so that its one body is the peers' size."""
    return BloomFilter(CAPACITY, ERROR_RATE, on_full="reject", seed=7)


def contenders() -> dict[str, Contender]:
    """Whoever is installed."""
    found = {
        "kernel": Contender(
            kernel,
            lambda bloom: bloom.add,
            lambda bloom: bloom.might_contain,
            BloomFilter.add_many,
            BloomFilter.might_contain_many,
        )
    }
    found["kernel, str keys"] = Contender(**{**vars(found["kernel"]), "text": True})
    rbloom = importable("rbloom")
    if rbloom:
        peer = Contender(
            lambda: rbloom.Bloom(CAPACITY, ERROR_RATE),
            lambda bloom: bloom.add,
            lambda bloom: bloom.__contains__,
            lambda bloom, batch: bloom.update(batch),
            each_in,
        )
        found["rbloom"] = peer
        found["rbloom, str keys"] = Contender(**{**vars(peer), "text": True})
        savable = {**vars(peer), "make": lambda: rbloom.Bloom(CAPACITY, ERROR_RATE, savable_hash)}
        found["rbloom, savable hash"] = Contender(**savable)
    pybloom = importable("pybloom_live")
    if pybloom:
        found["pybloom_live"] = Contender(
            lambda: pybloom.BloomFilter(CAPACITY, ERROR_RATE),
            lambda bloom: bloom.add,
            lambda bloom: bloom.__contains__,
            add_each,
            each_in,
        )
    return found


def importable(name: str) -> Any:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def one_by_one(call: Callable[[Any], object], batch: Sequence[Any]) -> None:
    """Call for each key. ``in`` would spare the peers a lookup; a bound method is what the kernel has too."""
    for key in batch:
        call(key)


def in_batches(
    call: Callable[[Any, Sequence[Any]], object], bloom: Any, batch: Sequence[Any], size: int
) -> None:
    """Call for each batch of ``size`` keys."""
    for start in range(0, len(batch), size):
        call(bloom, batch[start : start + size])


def against_peers() -> list[Table]:
    """Adds to an empty filter, and checks of absent keys against a full one, beside every peer installed."""
    peers = contenders()
    absent, fresh, present = keys("absent", BATCHES[-1]), keys("fresh", BATCHES[-1]), keys("in", CAPACITY)
    texts = [key.decode() for key in absent], [key.decode() for key in fresh]
    full = {}
    for name, peer in peers.items():
        full[name] = peer.make()
        peer.add_batch(full[name], [key.decode() for key in present] if peer.text else present)
    columns = ["one by one", *(f"batches of {size:,}" for size in BATCHES)]
    adds: list[Times] = []
    checks: list[Times] = []
    fresh_of = {name: (texts[1] if peer.text else fresh) for name, peer in peers.items()}
    absent_of = {name: (texts[0] if peer.text else absent) for name, peer in peers.items()}

    def check_turn(name: str, size: int) -> Turn:
        peer, bloom = peers[name], full[name]
        if size == 1:
            return lambda: one_by_one(peer.check(bloom), absent_of[name][:SINGLES])
        return lambda: in_batches(peer.check_batch, bloom, absent_of[name], size)

    for size in (1, *BATCHES):
        turns = {name: check_turn(name, size) for name in peers}
        checks.append(timed(turns, SINGLES if size == 1 else BATCHES[-1]))

    # Adds go to empty filters, made before the clock starts: each repeat has its own.
    def add_turn(name: str, blooms: Iterator[Any], size: int) -> Turn:
        peer = peers[name]
        if size == 1:
            return lambda: one_by_one(peer.add(next(blooms)), fresh_of[name][:SINGLES])
        return lambda: in_batches(peer.add_batch, next(blooms), fresh_of[name], size)

    for size in (1, *BATCHES):
        made = {name: iter([peer.make() for _ in range(ADD_REPEATS)]) for name, peer in peers.items()}
        turns = {name: add_turn(name, made[name], size) for name in peers}
        adds.append(timed(turns, SINGLES if size == 1 else BATCHES[-1], ADD_REPEATS))
    note = "ns per key, and how many times the kernel's (bytes with bytes, str with str)"
    return [
        with_ratios(f"check, absent keys, {CAPACITY:,} at {ERROR_RATE:.0%}, full", columns, checks, note),
        with_ratios(f"add, new keys, {CAPACITY:,} at {ERROR_RATE:.0%}, nearly empty", columns, adds, note),
    ]


def with_ratios(title: str, columns: Sequence[str], measured: Sequence[Times], note: str) -> Table:
    """A table of ns per key, each with its ratio to the kernel's."""
    table = Table(title, columns, note)
    for name in measured[0]:
        base = "kernel, str keys" if "str keys" in name else "kernel"
        cells = []
        for times in measured:
            ratio = statistics.median(
                own / kernels for own, kernels in zip(times[name], times[base], strict=True)
            )
            cells.append(f"{statistics.median(times[name]):,.0f} ({ratio:.2f}x)")
        table.rows.append((name, cells))
    return table


def by_capacity() -> Table:
    """Check time as the filter outgrows the caches: 10^4, 10^6 and 10^8 keys at 1 %."""
    table = Table(
        "check, absent keys, by capacity at 1 %",
        ["bytes", "one by one", "batches of 100,000"],
        "ns per key; the buffer is filled with random bits, half of them set, as those of a full filter are",
    )
    absent = keys("absent", 100_000)
    for capacity in (10**4, 10**6, 10**8):
        bloom = BloomFilter(capacity, ERROR_RATE, on_full="reject", seed=7)
        body = bloom.bodies[0]
        body.array[:] = np.frombuffer(np.random.default_rng(1).bytes(body.array.size), np.uint8)
        single = median(lambda b=bloom: one_by_one(b.might_contain, absent[:SINGLES]), SINGLES)
        batch = median(lambda b=bloom: b.might_contain_many(absent), len(absent))
        row = [f"{bloom.memory_bytes:,}", f"{single:,.0f}", f"{batch:,.0f}"]
        table.rows.append((f"{capacity:,}", row))
    return table


def against_containers() -> Table:
    """Checks and bytes beside a scanned list and a set, at 100, 10^4 and 10^5 ids."""
    table = Table(
        "check, absent keys, and bytes, beside a list scan and a set",
        ["list", "set", "kernel", "kernel batch", "list bytes", "set bytes", "kernel bytes"],
        "ns per key; bytes of list and set are sys.getsizeof of the container and of each key in it,\n"
        "those of the kernel are its bit buffers: it keeps no key. 0.1 % error rate",
    )
    for count in (100, 10_000, 100_000):
        ids, absent = keys("id", count), keys("absent", 10_000)
        listed, hashed = list(ids), set(ids)
        bloom = BloomFilter(count, 0.001, on_full="reject", seed=7)
        bloom.add_many(ids)
        # A scan of 10^5 takes a millisecond: a few probes are enough, and all that there is time for.
        scans = absent[: max(20, 100_000 // count)]
        times = [
            median(lambda ks=scans, c=listed: each_in(c, ks), len(scans), 5),
            median(lambda ks=absent, c=hashed: each_in(c, ks), len(absent)),
            median(lambda ks=absent, b=bloom: each_in(b, ks), len(absent)),
            median(lambda ks=absent, b=bloom: b.might_contain_many(ks), len(absent)),
        ]
        key_bytes = sum(map(sys.getsizeof, ids))
        sizes = [sys.getsizeof(listed) + key_bytes, sys.getsizeof(hashed) + key_bytes, bloom.memory_bytes]
        table.rows.append((f"{count:,} ids", [f"{n:,.0f}" for n in (*times, *sizes)]))
    return table


def tables() -> Iterator[Table]:
    """Every table, as it is measured."""
    yield from against_peers()
    yield by_capacity()
    yield against_containers()


def main() -> None:
    """Measure and print."""
    for table in tables():
        print(table, end="\n\n", flush=True)


if __name__ == "__main__":
    main()
