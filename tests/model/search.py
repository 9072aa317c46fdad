"""A breadth-first search through all states of a model, up to its bounds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Found(Generic[S]):
    """What a search came to: how many states there are, and the steps to the nearest wrong one."""

    states: int
    trace: list[str] | None


def search(
    start: S,
    steps: Callable[[S], Iterable[tuple[str, S]]],
    wrong: Callable[[S], bool],
    most: int = 2_000_000,
) -> Found[S]:
    """Visit every state that ``steps`` lead to. Ends at the first that is ``wrong``: none is nearer.

    Raises RuntimeError beyond ``most`` states: then nothing is proven.
    """
    came_by: dict[S, tuple[S, str] | None] = {start: None}
    frontier = [start]
    while frontier:
        reached = []
        for state in frontier:
            if wrong(state):
                return Found(len(came_by), list(_trace(came_by, state)))
            for name, after in steps(state):
                if after not in came_by:
                    came_by[after] = (state, name)
                    reached.append(after)
        if len(came_by) > most:
            raise RuntimeError(f"more than {most} states")
        frontier = reached
    return Found(len(came_by), None)


def _trace(came_by: dict[S, tuple[S, str] | None], state: S) -> Iterator[str]:
    names = []
    while (before := came_by[state]) is not None:
        state, name = before
        names.append(name)
    return reversed(names)
