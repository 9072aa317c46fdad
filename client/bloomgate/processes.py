"""Which process this is, and what belongs to one process alone.

Locks, channels and counts that stand in a process when it is forked are its own: the child must not use
them, nor wait for a lock that a thread of its parent holds. So such state is one object, and a child swaps it
whole for a fresh one, before anything of it is seen.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

S = TypeVar("S")


class Process:
    """One process, from its fork to its end."""

    __slots__ = ("inherited_grpc", "lock", "used_grpc")

    def __init__(self, inherited_grpc: bool) -> None:
        self.lock = threading.Lock()
        self.used_grpc = False
        """Whether a client of this process opened a channel."""
        self.inherited_grpc = inherited_grpc
        """Whether one had been opened before this process was forked."""


_current = Process(inherited_grpc=False)


def this_process() -> Process:
    """The process that asks."""
    return _current


def _after_fork() -> None:
    # In the child, while it has one thread. Not the pid: a grandchild may get that of an ancestor.
    global _current
    _current = Process(_current.used_grpc or _current.inherited_grpc)


os.register_at_fork(after_in_child=_after_fork)

# Kept for good: the end of a channel would speak on the parent's connection.
_LEFT_TO_PARENTS: list[object] = []


class OfProcess(Generic[S]):
    """State made anew in each process that asks for it. Any thread may ask."""

    __slots__ = ("_held", "_make")

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._held = (_current, make())

    def get(self) -> S:
        """This process's state: every thread gets the same one."""
        owner, state = self._held
        if owner is _current:
            return state
        with _current.lock:
            owner, state = self._held
            if owner is not _current:
                _LEFT_TO_PARENTS.append(state)
                state = self._make()
                self._held = (_current, state)
            return state
