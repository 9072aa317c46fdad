"""What an add will do, decided before it is done.

A plan is a list of steps in order, ``Segment`` (set these digests in that body) and ``Growth`` (that body
begins to exist), and applying the same steps to the same filter, or to one that already holds more, gives a
filter that holds every key: that makes them fit for a journal.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomgate.filters.bloom import BloomBody
from bloomgate.filters.sizing import BodySpec


@dataclass(frozen=True, slots=True)
class Segment:
    """Set ``digests`` in body ``body``; ``new_keys`` of them are certainly new."""

    body: int
    digests: bytes
    new_keys: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Body ``body`` of ``spec`` begins to exist."""

    body: int
    spec: BodySpec


@dataclass(frozen=True, slots=True)
class AddPlan:
    """What an add will do: ``was_new`` per key in order, ``steps`` in the order to apply them."""

    was_new: list[bool]
    steps: tuple[Segment | Growth, ...]

    @property
    def growths(self) -> list[Growth]:
        """The steps that add a body."""
        return [step for step in self.steps if isinstance(step, Growth)]


def allocate(plan: AddPlan) -> list[BloomBody]:
    """The bodies that a plan adds, resident. Raises MemoryError, best before a journal has the plan."""
    return [BloomBody.resident(step.spec) for step in plan.growths]
