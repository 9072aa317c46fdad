"""What the commands show people. rich is imported when something is shown, not before."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from bloomgate.stats import FilterStats


def console(*, stderr: bool = False) -> Console:
    """A console; rich itself honours NO_COLOR and shows no colour where no terminal reads.

    Text is shown as it is: a name or a key format may look like markup. Where no terminal reads, lines are as
    long as they need to be, so that no name is cut.
    """
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = 1000
    return made


def table(title: str = "") -> Table:
    """A plain table that fits any terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)


def count(number: float) -> str:
    """1234567 as 1,234,567."""
    return f"{number:,.0f}"


def size(nbytes: float) -> str:
    """Bytes, in the unit that reads best."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def share(part: float | None) -> str:
    """A share of 1 as a percentage with three significant digits; a dash if it is not known."""
    if part is None:
        return "-"
    return "<0.001 %" if 0 < part < 1e-5 else f"{part * 100:.3g} %"


def seconds(duration: float) -> str:
    """A duration in the unit that reads best."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if duration * factor >= 1:
            return f"{duration * factor:.3g} {unit}"
    return f"{duration * 1e9:.3g} ns"


def as_json(value: Any) -> str:
    """A dataclass, or a list of them, as JSON."""
    return json.dumps(value, default=_plain, indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, datetime):
        return value.isoformat()
    return {field.name: _enum_name(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _enum_name(value: Any) -> Any:
    # An IntEnum would pass for its number.
    return value.name.lower() if isinstance(value, enum.Enum) else value


def filters_table(filters: Iterable[FilterStats]) -> Table:
    """A line per filter."""
    shown = table()
    for heading in ("filter", "state", "keys", "capacity", "memory", "skipped", "error rate"):
        left = heading in ("filter", "state")
        shown.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for each in filters:
        shown.add_row(
            each.name,
            each.state.value,
            count(each.approximate_count),
            count(each.capacity),
            size(each.memory_bytes),
            count(each.checks_skip),
            share(each.expected_error_rate),
        )
    return shown


def stats_table(stats: FilterStats) -> Table:
    """Everything about one filter."""
    shown = table()
    shown.add_column(stats.name, overflow="fold")
    shown.add_column(overflow="fold")
    checks = stats.checks_skip + stats.checks_hit + stats.checks_unsure
    skipped = f" ({stats.checks_skip / checks:.1%})" if checks else ""
    written = stats.snapshot_time.isoformat(timespec="seconds") if stats.snapshot_time else "none yet"
    rows = [
        ("state", stats.state.value + (f": {stats.damage}" if stats.damage else "")),
        ("keys, certainly new", f"{count(stats.approximate_count)} of {count(stats.capacity)}"),
        ("keys added in all", count(stats.added_count)),
        ("when full", stats.on_full.name.lower()),
        ("error rate", f"{share(stats.expected_error_rate)} expected, {share(stats.error_rate)} asked for"),
        ("error rate, observed", share(stats.observed_error_rate)),
        ("bits", f"{count(stats.bits_set)} of {count(stats.bits)} set ({share(stats.fill_ratio)})"),
        ("hashes", f"{stats.hashes}, {stats.hash_scheme.name.lower()}"),
        ("memory", f"{size(stats.memory_bytes)} in {len(stats.bodies)} bodies"),
        ("checks skipped", f"{count(stats.checks_skip)}{skipped}"),
        ("checks hit", count(stats.checks_hit)),
        ("checks unsure", count(stats.checks_unsure)),
        ("outcomes", f"{count(stats.outcomes_found)} found, {count(stats.outcomes_not_found)} not found"),
        ("wrong noes reported", count(stats.outcomes_false_no)),
        ("copies under a lease", count(stats.leases)),
        ("snapshot", f"{written}, up to seq {stats.snapshot_seq} of {stats.journal_seq}"),
    ]
    if stats.key_format:
        rows.append(("key format", stats.key_format))
    for name, value in rows:
        shown.add_row(name, value)
    return shown
