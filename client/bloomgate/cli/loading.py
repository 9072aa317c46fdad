"""``bloomgate load``: lines into a filter, with a progress bar."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING, BinaryIO

from bloomgate.cli import show
from bloomgate.cli.lines import Lines

if TYPE_CHECKING:
    from bloomgate.client import Filter


def load_lines(filter_: Filter, stream: BinaryIO, name: str, batch: int) -> None:
    """Add the keys of ``stream`` in calls of ``batch`` and say how many were added and how many were new.

    Says so too where it fails half-way: the keys of the calls before are in.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn

    lines = Lines(stream)
    console = show.console(stderr=True)
    added = new = 0
    started = time.perf_counter()
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[rate]} keys/s", markup=False),
        console=console,
        disable=not console.is_terminal,
    )
    try:
        with progress:
            task = progress.add_task(name, total=_total(stream), rate="-")
            for keys in lines.batches(batch):
                new += sum(filter_.add_many(keys))
                added += len(keys)
                rate = show.count(added / (time.perf_counter() - started))
                progress.update(task, completed=lines.bytes_read, rate=rate)
    finally:
        took = time.perf_counter() - started
        console.print(
            f"{show.count(added)} keys added in {show.seconds(took)} ({show.count(added / took)} keys/s),"
            f" {show.count(new)} of them new, {show.count(lines.skipped)} empty lines skipped",
            soft_wrap=True,
        )


def _total(stream: BinaryIO) -> int | None:
    """Bytes of a regular file; None for what has no size."""
    info = os.fstat(stream.fileno())
    return info.st_size if stat.S_ISREG(info.st_mode) else None
