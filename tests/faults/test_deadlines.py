"""Work for callers that have gone: dropped before it is applied, or applied whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from bloomgate import errors
from bloomgate.v1 import filters_pb2
from bloomgated.gate import Gate
from bloomgated.requests import SLICE_KEYS, Keys
from daemon import inside
from daemon.inside import HeldJournal
from support.tally import record, rounds

RATE = 1e-9
MANY = tuple(b"key-%d" % number for number in range(3 * SLICE_KEYS))


def scenario(directory: Path, run: Callable[[Gate, HeldJournal], Awaitable[None]]) -> None:
    async def within() -> None:
        async with inside.open_gate(directory) as (gate, journal):
            await gate.create("fruit", inside.asked(100_000, RATE))
            await run(gate, journal)

    asyncio.run(within())


async def found(gate: Gate, keys: tuple[bytes, ...]) -> set[bool]:
    return set((await gate.might_contain("fruit", Keys(keys)))[0])


async def slices(count: int) -> None:
    """Let a big batch get so many slices on."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("slice_", range(4))
def test_an_add_given_up_while_it_is_hashed_is_dropped(tmp_path: Path, slice_: int) -> None:
    """In whatever slice: nothing is journalled, no key is there, nothing is counted."""

    async def run(gate: Gate, journal: HeldJournal) -> None:
        before = journal.last_seq
        adding = asyncio.ensure_future(gate.add("fruit", Keys(MANY)))
        await slices(slice_)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert journal.last_seq == before
        assert await found(gate, MANY) == {False}
        stats = await gate.stats("fruit")
        assert (stats.fill.added_count, stats.entry.adds) == (0, 0)

    scenario(tmp_path, run)
    record("a caller that gives up while its batch is hashed", 1, "its add is dropped")


def test_an_add_given_up_behind_the_journal_is_applied_whole(tmp_path: Path) -> None:
    """It is queued by then: all of its keys are there at once and after a restart."""

    async def run(gate: Gate, journal: HeldJournal) -> None:
        journal.released.clear()
        adding = asyncio.ensure_future(gate.add("fruit", Keys(MANY)))
        await inside.until(lambda: journal.last_seq > journal.durable_seq)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        journal.released.set()
        await journal.durable(journal.last_seq)
        assert await found(gate, MANY) == {True}

    scenario(tmp_path, run)

    async def again() -> None:
        async with inside.open_gate(tmp_path) as (gate, _):
            assert await found(gate, MANY) == {True}
            assert (await gate.stats("fruit")).fill.added_count == len(MANY)

    asyncio.run(again())
    record("a caller that gives up behind the journal", 1, "its add is applied whole")


def test_a_check_given_up_counts_nothing(tmp_path: Path) -> None:
    """Skips and hits are of answers, and it had none."""

    async def run(gate: Gate, _: HeldJournal) -> None:
        asking = asyncio.ensure_future(gate.might_contain("fruit", Keys(MANY)))
        await slices(2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        checks = (await gate.stats("fruit")).entry.checks
        assert (checks.skip, checks.hit, checks.unsure) == (0, 0, 0)

    scenario(tmp_path, run)


@pytest.mark.parametrize("verb", ["create", "drop"])
def test_a_create_or_drop_given_up_goes_to_its_end(tmp_path: Path, verb: str) -> None:
    """Half of one would be neither: what it began shows once it is durable."""

    async def run(gate: Gate, journal: HeldJournal) -> None:
        journal.released.clear()
        work = gate.create("other", inside.asked()) if verb == "create" else gate.drop("fruit")
        task = asyncio.ensure_future(work)
        await inside.until(lambda: journal.last_seq > journal.durable_seq)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.catalog.get("fruit") is not None
        assert gate.catalog.get("other") is None
        journal.released.set()
        await inside.until(lambda: (gate.catalog.get("fruit") is None) == (verb == "drop"))
        await inside.until(lambda: (gate.catalog.get("other") is not None) == (verb == "create"))

    scenario(tmp_path, run)


def test_deadlines_and_cancels_over_the_wire_leave_no_half(tmp_path: Path) -> None:
    """Adds of two slices with deadlines that pass at every stage, and others that are cancelled: each batch
    is there whole or not at all, and what was acknowledged is there."""
    times = rounds(60, 3000)

    async def run() -> None:
        async with inside.open_gate(tmp_path) as (gate, _):
            await gate.create("fruit", inside.asked(50_000_000, 1e-6))
            async with inside.serve(gate) as channel:
                filters, _ = inside.stubs(channel)
                kept = dropped = acknowledged = 0
                for number in range(times):
                    keys = tuple(b"%d-%d" % (number, each) for each in range(SLICE_KEYS + 100))
                    call = filters.Add(
                        filters_pb2.AddRequest(filter="fruit", keys=keys),
                        timeout=0.002 * (1 + number % 20) if number % 2 else 30,
                    )
                    if number % 2 == 0:
                        await asyncio.sleep(0.0005 * (number % 40))
                        call.cancel()
                    try:
                        code = await call.code()
                    except asyncio.CancelledError:
                        code = grpc.StatusCode.CANCELLED
                    # What it left under way ends first.
                    probe = filters_pb2.MightContainRequest(filter="fruit", keys=keys[:1] + keys[-1:])
                    await filters.Add(filters_pb2.AddRequest(filter="fruit", keys=[b"last"]), timeout=30)
                    first, last = (await filters.MightContain(probe, timeout=30)).answers
                    assert first == last, "half a batch is there"
                    there = first == filters_pb2.ANSWER_MAYBE
                    assert there or code is not grpc.StatusCode.OK
                    kept, dropped = kept + there, dropped + (not there)
                    acknowledged += code is grpc.StatusCode.OK
                assert kept
                assert dropped

    asyncio.run(run())
    record(
        "deadlines that pass and calls that are cancelled at every stage of an add",
        times,
        "whole or not at all",
    )


def test_a_caller_that_gave_up_waiting_for_a_name_creates_nothing_twice(tmp_path: Path) -> None:
    """Creates of one name that wait behind each other, some given up: one filter, and the rest hear of it."""

    async def run(gate: Gate, journal: HeldJournal) -> None:
        journal.released.clear()
        tasks = [asyncio.ensure_future(gate.create("other", inside.asked())) for _ in range(10)]
        await inside.until(lambda: journal.last_seq > journal.durable_seq)
        for task in tasks[::2]:
            task.cancel()
        journal.released.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each[1] for each in ended[1::2]] == [False] * 5
        assert all(isinstance(each, asyncio.CancelledError) for each in ended[::2])
        await gate.drop("other")
        with pytest.raises(errors.FilterNotFound):
            await gate.drop("other")

    scenario(tmp_path, run)
