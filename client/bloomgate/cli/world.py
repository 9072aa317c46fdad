"""The world of ``bloomgate demo``: a daemon, an authority, sign-ups, and checks through the guard."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from bloomgate.client import Filter
from bloomgate.filters import Key

BATCH = 1_000
CLEAN_SHARE = 0.95
START_TIMEOUT = 30.0


class Authority:
    """The table that would be asked without a filter, with its primary key as index, in a real file."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("CREATE TABLE blocked (domain TEXT PRIMARY KEY) WITHOUT ROWID")
        self.lookups = 0

    def insert(self, domains: Iterable[str]) -> None:
        """Commit ``domains``."""
        with self._database:
            self._database.executemany("INSERT INTO blocked VALUES (?)", ((each,) for each in domains))

    def lookup(self, domain: Key) -> bool:
        """Whether ``domain`` is blocked."""
        self.lookups += 1
        found = self._database.execute("SELECT 1 FROM blocked WHERE domain = ?", (domain,)).fetchone()
        return found is not None

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
        line = self.process.stdout.readline()
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


@dataclass
class Signups:
    """Checks of one kind, as measured through the guard."""

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


def check_one_by_one(blocklist: Filter, authority: Authority, asked: list[str], blocked: set[str]) -> Signups:
    """Check through the guard, a call each."""
    result = Signups(checks=len(asked))
    timed = _TimedLookup(authority, result)
    guard = blocklist.guard(timed.lookup, absent=False)
    started = time.perf_counter()
    answers = [guard(domain) for domain in asked]
    result.seconds = time.perf_counter() - started
    return _judged(result, asked, answers, blocked)


def check_in_bulk(blocklist: Filter, authority: Authority, asked: list[str], blocked: set[str]) -> Signups:
    """Check through the guard in calls of BATCH."""
    result = Signups(checks=len(asked))
    timed = _TimedLookup(authority, result)
    guard = blocklist.guard(timed.lookup, absent=False)
    answers: list[bool | None] = []
    started = time.perf_counter()
    for start in range(0, len(asked), BATCH):
        answers += guard.many(asked[start : start + BATCH])
    result.seconds = time.perf_counter() - started
    return _judged(result, asked, answers, blocked)


class _TimedLookup:
    """The authority's lookup, with the time it takes, its calls and its misses noted in ``result``."""

    def __init__(self, authority: Authority, result: Signups) -> None:
        self._authority, self._result = authority, result

    def lookup(self, domain: Key) -> bool:
        started = time.perf_counter()
        found = self._authority.lookup(domain)
        self._result.seconds_in_lookups += time.perf_counter() - started
        self._result.hits += 1
        self._result.false_positives += not found
        return found


def _judged(result: Signups, asked: list[str], answers: list[bool | None], blocked: set[str]) -> Signups:
    """Count what the guard let through although the authority has it."""
    pairs = zip(asked, answers, strict=True)
    result.false_negatives = sum(domain in blocked and not answer for domain, answer in pairs)
    return result


def wrong_noes(blocklist: Filter, authority: Authority, domains: list[str]) -> int:
    """How many of the authority's keys the filter denies, asked for each one of them."""
    answers = blocklist.might_contain_many(domains)
    return sum(not maybe and authority.lookup(each) for each, maybe in zip(domains, answers, strict=True))
