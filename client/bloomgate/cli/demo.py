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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from bloomgate import BloomFilter, Client, ClientOptions
from bloomgate.cli import show
from bloomgate.cli.world import (
    BATCH,
    START_TIMEOUT,
    Authority,
    DaemonProcess,
    Signups,
    blocked_domains,
    check_in_bulk,
    check_one_by_one,
    signups,
    wrong_noes,
)

FILTER = "fraud-blocklist"
ERROR_RATE = 0.01
SINGLE, BULK = 5_000, 100_000


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
            click.echo(f"\nthe daemon is up: grpc={daemon.grpc} http://{daemon.http}/metrics")
            click.echo(f"try: bloomgate stats {FILTER} --target {daemon.grpc}")
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
    client = Client(daemon.grpc, options=ClientOptions(check_timeout=1.0))
    try:
        client.create_filter(FILTER, len(domains), ERROR_RATE, key_format="e-mail domain, lower case")
        blocklist = client.filter(FILTER)
        # First the filter, then the authority's commit: in the other order a crash leaves a wrong "no".
        loading = _timed(lambda: blocklist.add_many(domains))
        authority.insert(domains)
        blocked = set(domains)
        single = check_one_by_one(blocklist, authority, signups(rng, domains, SINGLE), blocked)
        bulk = check_in_bulk(blocklist, authority, signups(rng, domains, BULK), blocked)
        lookup = _timed(lambda: [authority.lookup(each) for each in signups(rng, domains, SINGLE)]) / SINGLE
        before = wrong_noes(blocklist, authority, domains)
        daemon.end(signal.SIGKILL)
        restart = _timed(daemon.start)
        _wait_until_serving(client)
        after = wrong_noes(blocklist, authority, domains)
        stats = blocklist.stats()
        kernel_single, kernel_bulk = kernel_times(domains, signups(rng, domains, BULK))
    finally:
        client.close()
        authority.close()
    key_bytes = sum(len(each.encode()) for each in domains)
    total = single.false_negatives + bulk.false_negatives + before + after

    _print_checks((single, bulk), lookup, (kernel_single, kernel_bulk))
    facts = show.table("the list")
    facts.add_column("")
    facts.add_column("", justify="right")
    facts.add_row(
        "keys", f"{show.count(len(domains))}, loaded at {show.count(len(domains) / loading)} keys/s"
    )
    facts.add_row("filter bytes", show.count(stats.memory_bytes))
    facts.add_row("bytes of the keys themselves", show.count(key_bytes))
    facts.add_row("false negatives, whole list, before SIGKILL", show.count(before))
    facts.add_row("false negatives, whole list, after it", show.count(after))
    facts.add_row("from SIGKILL to ready again", show.seconds(restart))
    show.console().print(facts)
    if single.seconds_per_check > lookup:
        click.echo(
            "One check over the network costs more than one lookup in a SQLite file of the same process.\n"
            "Checks in bulk, the kernel in the caller, an authority across a network: there a filter pays."
        )
    click.echo(f"false negatives: {total} ({'as it must be' if total == 0 else 'THIS MUST NEVER HAPPEN'})")
    return total


def _print_checks(kinds: tuple[Signups, Signups], lookup: float, kernel: tuple[float, float]) -> None:
    shown = show.table("sign-ups checked against a list of disposable e-mail domains")
    for heading in ("", "one by one", f"in calls of {BATCH:,}"):
        shown.add_column(heading, justify="right" if heading else "left")

    def row(name: str, cell: Callable[[Signups], str]) -> None:
        shown.add_row(name, *map(cell, kinds))

    row("checks", lambda each: show.count(each.checks))
    row("lookups skipped", lambda each: f"{show.count(each.skipped)} ({each.skipped / each.checks:.1%})")
    row("hits", lambda each: show.count(each.hits))
    row("false positives", lambda each: show.count(each.false_positives))
    row("  of absent keys", lambda each: f"{each.false_positives / each.absent:.2%}")
    row("  asked for", lambda _: f"{ERROR_RATE:.2%}")
    row("false negatives", lambda each: show.count(each.false_negatives))
    shown.add_section()
    row("time per lookup, SQLite", lambda _: show.seconds(lookup))
    row("time per check, guard", lambda each: show.seconds(each.seconds_per_check))
    shown.add_row("time per check, kernel", *map(show.seconds, kernel))
    show.console().print(shown)


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
