"""The memory of filters: counted before it is had, and never had twice for one need."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomgate.errors import FilterFull
from bloomgate.filters import FilterSpec
from bloomgated import room
from bloomgated.config import LimitsConfig
from bloomgated.requests import Asked, Keys

from .inside import open_gate

SPEC = FilterSpec.plan(1000, 0.01)
FIRST = SPEC.first_body.nbytes


class Held:
    """Allocation as it is, that waits to be let go; how often it was asked for, and on which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.released, self.times = threading.Event(), threading.Event(), 0
        self._real: Callable[..., Any] = room._allocated
        monkeypatch.setattr(room, "_allocated", self)
        monkeypatch.setattr(room, "ASIDE_BYTES", 1)

    def __call__(self, *arguments: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        self.times += 1
        self.begun.set()
        assert self.released.wait(60)
        return self._real(*arguments)

    async def until_begun(self) -> None:
        await asyncio.to_thread(self.begun.wait, 60)


def keys(start: int, stop: int) -> Keys:
    return Keys(tuple(b"key-%d" % number for number in range(start, stop)))


def test_a_caller_that_goes_away_leaves_no_second_allocation_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its thread still allocates is counted, and serves the next Add that needs it."""
    held = Held(monkeypatch)

    async def work() -> None:
        async with open_gate(tmp_path) as (gate, _):
            await gate.create("fruit", Asked(SPEC, None))
            gone = asyncio.ensure_future(gate.add("fruit", keys(0, 1500)))
            await held.until_begun()
            gone.cancel()
            await asyncio.wait((gone,))
            assert gate.room.memory_bytes > FIRST
            after = asyncio.ensure_future(gate.add("fruit", keys(5000, 6500)))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not after.done()
            held.released.set()
            was_new, _ = await after
            assert sum(was_new) > 1450
            assert held.times == 1
            answers, _ = await gate.might_contain("fruit", keys(5000, 6500))
            assert all(answers)
            (stats,) = await gate.list()
            assert stats.fill.memory_bytes == gate.room.memory_bytes

    asyncio.run(asyncio.wait_for(work(), 60))


def test_filters_that_grow_at_once_stay_within_what_all_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two need more room, there is room for one: the other is refused whole, whatever is still allocated."""
    held = Held(monkeypatch)

    async def work() -> None:
        async with open_gate(tmp_path, LimitsConfig(total_bytes=6 * FIRST)) as (gate, _):
            for name in ("one", "two"):
                await gate.create(name, Asked(SPEC, None))
            adding = [asyncio.ensure_future(gate.add(name, keys(0, 1500))) for name in ("one", "two")]
            await held.until_begun()
            refused = adding[1]
            await asyncio.wait((refused,))
            assert isinstance(refused.exception(), FilterFull)
            held.released.set()
            await adding[0]
            assert FIRST * 3 < gate.room.memory_bytes <= 6 * FIRST
            answers, _ = await gate.might_contain("two", keys(0, 1500))
            assert not any(answers)

    asyncio.run(asyncio.wait_for(work(), 60))
