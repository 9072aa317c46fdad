"""``bloomgate demo``: the main job on real input, from the first add to the restart after a SIGKILL.

A public list of disposable e-mail domains goes into a filter of a real daemon and into a real SQLite table
that plays the authority. Sign-ups are checked through the client's guard, one by one and in bulk, the daemon
is killed and started again, and the whole list is asked for once more. All that is printed was measured in
this run.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomgate import BloomFilter, Client, ClientOptions, FilterState
from bloomgate.cli import show
from bloomgate.cli.world import (
    BATCH,
    START_TIMEOUT,
    Authority,
    Checked,
    DaemonProcess,
    blocked_domains,
    check_in_bulk,
    check_one_by_one,
    signups,
)

if TYPE_CHECKING:
    from rich.table import Table

FILTER = "fraud-blocklist"
ERROR_RATE = 0.01
SINGLE, BULK = 5_000, 100_000
# Seconds that a check may take here: a busy machine must not end the demo.
PATIENCE = 10.0


def run(*, keep: bool) -> int:
    """Run the demo; the exit code is 0 only if there was no false negative."""
    directory = Path(tempfile.mkdtemp(prefix="bloomgate-demo-"))
    daemon = DaemonProcess(directory)
    kept = False
    try:
        daemon.start()
        false_negatives = _main_job(directory, daemon)
        if keep:
            kept = True
            click.echo(f"\nthe daemon is up: gRPC {daemon.grpc}, metrics http://{daemon.http}/metrics")
            click.echo(f"try: {sys.argv[0]} stats {FILTER} --target {daemon.grpc}")
            assert daemon.process is not None
            click.echo(f"stop it with: kill {daemon.process.pid}; its files are in {directory}")
        return 0 if false_negatives == 0 else 1
    finally:
        if not kept:
            daemon.end(signal.SIGTERM)
            shutil.rmtree(directory, ignore_errors=True)


def _main_job(directory: Path, daemon: DaemonProcess) -> int:
    rng = random.Random(20)
    domains = blocked_domains()
    authority = Authority(directory / "authority.db")
    # An answer that did not come must end the demo: as a maybe it would pass for a key that is found.
    client = Client(daemon.grpc, options=ClientOptions(on_error="raise", check_timeout=PATIENCE))
    try:
        client.create_filter(FILTER, len(domains), ERROR_RATE, key_format="e-mail domain, lower case")
        blocklist = client.filter(FILTER)
        # First the filter, then the authority's commit: in the other order a crash leaves a wrong "no".
        loading = _timed(lambda: blocklist.add_many(domains))
        authority.insert(domains)
        asked, asked_in_bulk = signups(rng, domains, SINGLE), signups(rng, domains, BULK)
        runs = [
            check_one_by_one(blocklist, authority, asked),
            check_in_bulk(blocklist, authority, asked_in_bulk),
            check_in_bulk(blocklist, authority, domains),
        ]
        lookup = _timed(lambda: [authority.lookup(each) for each in asked]) / SINGLE
        # Reported now: a daemon that starts again counts what is said of its own checks.
        blocklist.flush_outcomes()
        before = blocklist.stats()
        daemon.end(signal.SIGKILL)
        restart = _timed(daemon.start)
        _wait_until_serving(client)
        after = blocklist.stats()
        if after.state is not FilterState.READY or after.approximate_count != before.approximate_count:
            raise click.ClickException(f"after the restart the filter is {after.state.value}: {after.damage}")
        runs.append(check_in_bulk(blocklist, authority, domains))
        kernel = kernel_times(domains, asked_in_bulk)
    finally:
        client.close()
        authority.close()
    shown = _table(runs, lookup, kernel)
    shown.add_section()
    shown.add_row("filter bytes", "", "", show.count(after.memory_bytes), "")
    shown.add_row("bytes of its keys", "", "", show.count(sum(len(each.encode()) for each in domains)), "")
    shown.add_row("loaded, keys/s", "", "", show.count(len(domains) / loading), "")
    shown.add_row("ready again after", "", "", "", show.seconds(restart))
    show.console().print(shown)
    if runs[0].seconds_per_check > lookup:
        click.echo(
            "One check over the network costs more than one lookup in a SQLite file of the same process.\n"
            "Checks in bulk, the kernel in the caller, an authority across a network: there a filter pays."
        )
    total = sum(each.false_negatives for each in runs)
    click.echo(f"false negatives: {total} ({'as it must be' if total == 0 else 'THIS MUST NEVER HAPPEN'})")
    return total


def _table(runs: list[Checked], lookup: float, kernel: tuple[float, float]) -> Table:
    """A column per run: sign-ups one by one and in bulk, the whole list before and after the SIGKILL."""
    shown = show.table("sign-ups checked against a public list of disposable e-mail domains")
    shown.add_column("")
    for heading in ("one by one", f"calls of {BATCH:,}", "whole list", "after kill"):
        shown.add_column(heading, justify="right")

    def row(name: str, cell: Callable[[Checked], str]) -> None:
        shown.add_row(name, *map(cell, runs))

    def false_positives(run: Checked) -> str:
        return f"{run.false_positives:,} ({run.false_positives / run.absent:.2%})" if run.absent else "-"

    row("checks", lambda run: show.count(run.checks))
    row("lookups skipped", lambda run: f"{run.skipped:,} ({run.skipped / run.checks:.1%})")
    row("hits", lambda run: show.count(run.hits))
    row("false positives", false_positives)
    row("  asked for", lambda run: f"{ERROR_RATE:.2%}" if run.absent else "-")
    row("false negatives", lambda run: show.count(run.false_negatives))
    shown.add_section()
    shown.add_row("time per lookup", show.seconds(lookup), *"---")
    row("  check, guard", lambda run: show.seconds(run.seconds_per_check))
    shown.add_row("  check, kernel", *map(show.seconds, kernel), *"--")
    return shown


def kernel_times(domains: list[str], asked: list[str]) -> tuple[float, float]:
    """Seconds per check with the kernel in this process, one by one and in calls of BATCH."""
    bloom = BloomFilter(len(domains), ERROR_RATE)
    bloom.add_many(domains)
    single = _timed(lambda: [bloom.might_contain(each) for each in asked])
    bulk = _timed(
        lambda: [bloom.might_contain_many(asked[i : i + BATCH]) for i in range(0, len(asked), BATCH)]
    )
    return single / len(asked), bulk / len(asked)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _wait_until_serving(client: Client) -> None:
    """The channel may still be counting down to its next attempt to connect."""
    give_up = time.monotonic() + START_TIMEOUT
    while not client.ping():
        if time.monotonic() > give_up:
            raise click.ClickException("the daemon does not answer after its restart")
