"""Rows of one table: what was measured beside what, the ratio, and whether an aim was met."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

ROUNDS = 7


@dataclass
class Row:
    """One line. ``met`` None: there is no aim, or nothing to compare with."""

    work: str
    ours: str
    against: str = ""
    theirs: str = ""
    ratio: str = ""
    aim: str = ""
    met: bool | None = None


@dataclass
class Seen:
    """What rounds came to: medians of both, and the median, least and most of each round's ratio."""

    ours: float
    theirs: float
    ratio: float
    spread: tuple[float, float]

    def row(self, work: str, against: str, aim: str, met: bool | None, unit: Callable[[float], str]) -> Row:
        """As a line of the table."""
        low, high = self.spread
        ratio = f"{self.ratio:,.2f}x ({low:,.2f} to {high:,.2f})"
        return Row(work, unit(self.ours), against, unit(self.theirs), ratio, aim, met)


def compare(
    ours: Callable[[], float], theirs: Callable[[], float], *, less_is_better: bool, rounds: int = ROUNDS
) -> Seen:
    """Measure both in turns, the other way round each time; the first turn warms up.

    The ratio is how much better ours is, whichever way better goes.
    """
    seen: list[tuple[float, float]] = []
    for turn in range(rounds + 1):
        if turn % 2:
            a, b = ours(), theirs()
        else:
            b, a = theirs(), ours()
        if turn:
            seen.append((a, b))
    ratios = [b / a if less_is_better else a / b for a, b in seen]
    return Seen(
        statistics.median(a for a, _ in seen),
        statistics.median(b for _, b in seen),
        statistics.median(ratios),
        (min(ratios), max(ratios)),
    )


def seconds(value: float) -> str:
    """A duration."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:,.2f} {unit}"
    return f"{value * 1e9:,.0f} ns"


def per_second(what: str) -> Callable[[float], str]:
    """A rate of ``what``."""
    return lambda value: f"{value:,.0f} {what}/s"


@dataclass
class Report:
    """The table, and what could not be measured here."""

    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """One more line, shown at once."""
        self.rows.append(row)
        print(" | ".join(part for part in (row.work, row.ours, row.against, row.theirs, row.ratio) if part))

    def markdown(self) -> str:
        """The table as a page shows it."""
        lines = [
            "| work | bloomgate | against | | ratio (least to most) | aim | met |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            met = "" if row.met is None else "yes" if row.met else "**no**"
            cells = (row.work, row.ours, row.against, row.theirs, row.ratio, row.aim, met)
            lines.append(f"| {' | '.join(cells)} |")
        lines += [f"\nNot measured: {each}" for each in self.missing]
        return "\n".join(lines) + "\n"
