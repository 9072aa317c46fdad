"""How much the fault tests tried, for the table of docs/RELIABILITY.md.

A test says ``record("kill -9 at random moments", 54, "recovers")``; `make reliability` runs longer, adds up
what was recorded under the same fault, and prints the table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("BLOOMGATE_RELIABILITY") == "1"
"""Whether this is the long run of `make reliability`."""


def rounds(short: int, long: int) -> int:
    """How many rounds to go: ``short`` in the suite, ``long`` in the long run."""
    return long if LONG else short


def sample(rows: Sequence[T], short: int) -> list[T]:
    """Rows of a table of faults: ``short`` of them in the suite, evenly, and all in the long run."""
    return list(rows) if LONG else [rows[place * len(rows) // short] for place in range(short)]


def record(fault: str, tried: int, ending: str) -> None:
    """Note that ``fault`` was tried so many times, each of which ended in ``ending``.

    Call it with constants for ``fault`` and ``ending``, once all of it has been asserted. ``ending`` begins
    with "recovers" or "refuses" where it is about a start. ``tried`` must not be 0.
    """
    assert tried > 0, f"{fault}: nothing was tried"
    if path := os.environ.get("BLOOMGATE_TALLY"):
        # Appended in one write: several workers share the file.
        with Path(path).open("a") as file:
            file.write(json.dumps({"fault": fault, "tried": tried, "ending": ending}) + "\n")
