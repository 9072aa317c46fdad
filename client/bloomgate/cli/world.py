"""The world of ``bloomgate demo``: a daemon, an authority, sign-ups, and checks through the guard."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from bloomgate.client import Filter
from bloomgate.filters import Key
from bloomgate.guard import Guard

BATCH = 1_000
CLEAN_SHARE = 0.95
START_TIMEOUT = 30.0


class Authority:
    """The table that would be asked without a filter, with its primary key as index, in a real file."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("CREATE TABLE blocked (domain TEXT PRIMARY KEY) WITHOUT ROWID")

    def insert(self, domains: Iterable[str]) -> None:
        """Commit ``domains``."""
        with self._database:
            self._database.executemany("INSERT INTO blocked VALUES (?)", ((each,) for each in domains))

    def lookup(self, domain: Key) -> bool:
        """Whether ``domain`` is blocked."""
        found = self._database.execute("SELECT 1 FROM blocked WHERE domain = ?", (domain,)).fetchone()
        return found is not None

    def all(self) -> set[str]:
        """Every blocked domain."""
        return {domain for (domain,) in self._database.execute("SELECT domain FROM blocked")}

    def close(self) -> None:
        """Close the file."""
        self._database.close()


class DaemonProcess:
    """A bloomgated of its own on free loopback ports."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.grpc = self.http = ""
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        with (self._directory / "bloomgated.log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-c", "from bloomgated.main import main; main()", "serve",
                    "--data-dir", str(self._directory / "data"),
                    "--listen", self.grpc or "127.0.0.1:0", "--http", self.http or "127.0.0.1:0",
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C is for the demo; it stops the daemon itself.
                start_new_session=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        # One that never gets ready says nothing, and ends with this.
        impatience = threading.Timer(START_TIMEOUT, self.process.kill)
        impatience.start()
        line = self.process.stdout.readline()
        impatience.cancel()
        if not line.startswith("bloomgated ready"):
            self.process.wait(START_TIMEOUT)
            log_text = (self._directory / "bloomgated.log").read_text()
            raise click.ClickException(f"the daemon did not start:\n{log_text}")
        addresses = dict(word.split("=", 1) for word in line.split()[2:])
        self.grpc, self.http = addresses["grpc"], addresses["http"]

    def end(self, number: int) -> None:
        """Send a signal and wait for the end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(START_TIMEOUT)
            assert self.process.stdout is not None
            self.process.stdout.close()


@dataclass
class Checked:
    """Checks through the guard, as measured and as judged by the authority."""

    checks: int = 0
    hits: int = 0
    false_positives: int = 0
    false_negatives: int = 0
    seconds: float = 0.0
    seconds_in_lookups: float = 0.0

    @property
    def skipped(self) -> int:
        """Lookups that were not made."""
        return self.checks - self.hits

    @property
    def absent(self) -> int:
        """Checks of keys that the authority does not have."""
        return self.checks - (self.hits - self.false_positives)

    @property
    def seconds_per_check(self) -> float:
        """What the filter cost: the lookups that were made all the same are not counted."""
        return (self.seconds - self.seconds_in_lookups) / self.checks


def blocked_domains() -> list[str]:
    """A real public list: the disposable e-mail domains that the package mailchecker carries."""
    import MailChecker  # type: ignore[import-untyped]

    return sorted(MailChecker.MailChecker.blacklist)


def signups(rng: random.Random, domains: list[str], number: int) -> list[str]:
    """Domains of ``number`` sign-ups: CLEAN_SHARE of them made up and not listed, the rest from the list."""
    listed = set(domains)
    made: list[str] = []
    while len(made) < number:
        if rng.random() < CLEAN_SHARE:
            domain = f"{rng.choice(('mail', 'post', 'corp', 'team'))}-{rng.getrandbits(48):x}.example"
            if domain in listed:
                continue
        else:
            domain = rng.choice(domains)
        made.append(domain)
    return made


def check_one_by_one(blocklist: Filter, authority: Authority, asked: list[str]) -> Checked:
    """Check through the guard, a call each."""
    return _checked(blocklist, authority, asked, lambda guard: [guard(domain) for domain in asked])


def check_in_bulk(blocklist: Filter, authority: Authority, asked: list[str]) -> Checked:
    """Check through the guard in calls of BATCH."""
    starts = range(0, len(asked), BATCH)
    return _checked(
        blocklist,
        authority,
        asked,
        lambda guard: [found for start in starts for found in guard.many(asked[start : start + BATCH])],
    )


def _checked(
    blocklist: Filter,
    authority: Authority,
    asked: list[str],
    check: Callable[[Guard[bool]], list[bool | None]],
) -> Checked:
    result = Checked(checks=len(asked))
    guard = blocklist.guard(_TimedLookup(authority, result).lookup, absent=False)
    started = time.perf_counter()
    answers = check(guard)
    result.seconds = time.perf_counter() - started
    # What the guard let through although the authority has it.
    blocked = authority.all()
    result.false_negatives = sum(
        domain in blocked and not found for domain, found in zip(asked, answers, strict=True)
    )
    return result


class _TimedLookup:
    """The authority's lookup, with the time it takes, its calls and its misses noted in ``result``."""

    def __init__(self, authority: Authority, result: Checked) -> None:
        self._authority, self._result = authority, result

    def lookup(self, domain: Key) -> bool:
        started = time.perf_counter()
        found = self._authority.lookup(domain)
        self._result.seconds_in_lookups += time.perf_counter() - started
        self._result.hits += 1
        self._result.false_positives += not found
        return found
