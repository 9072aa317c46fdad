"""Leases under all that can go wrong: many replicas and writers, frozen, cut off, killed; and a checker.

The checker knows when each Add was acknowledged, and when each "no" began. None may have begun after the
acknowledgement of its key, while the key's filter was there.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.daemon import DaemonProcess
from support.proxy import Proxy
from support.tally import LONG, record, rounds

from .replicas import ADDED, ENDED, SAID_NO, WRITERS, Shared

MAIN = "from faults.replicas import main; main()"
REPLICAS = 3
DURATION, MARGIN = 0.4, 0.02
# As short as the margin may be where all clocks are one, so that nothing is covered by it.
FLAGS = (
    "--set", f"lease.margin={MARGIN}",
    "--set", "snapshot.interval=0.5", "--set", "snapshot.check_every=0.2", "--set", "journal.retention=1",
)  # fmt: skip


class Harness:
    """A daemon, writers that reach it directly, replicas that reach it over a proxy each; what all note."""

    def __init__(
        self, folder: Path, *, prelude: str = "", epoch_keys: int = 300, duration: float = DURATION
    ) -> None:
        self.folder, self._prelude = folder, prelude
        self._flags = ("--set", f"lease.duration={duration}", *FLAGS)
        (folder / "shared").write_bytes(bytes(Shared.SIZE))
        self.shared = Shared(folder / "shared")
        self.daemon = DaemonProcess(folder / "data", *self._flags, prelude=prelude)
        self.proxies = [Proxy(self.daemon.grpc) for _ in range(REPLICAS)]
        self._run("write", self.daemon.grpc, [(number, epoch_keys) for number in range(WRITERS)])
        self.replicas = [
            self._start("replicate", proxy.address, number) for number, proxy in enumerate(self.proxies)
        ]

    def _run(self, verb: str, target: str, each: list[tuple[int, ...]]) -> None:
        self.writers = [self._start(verb, target, *arguments) for arguments in each]

    def _start(self, verb: str, target: str, *arguments: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", MAIN, verb, target, str(self.folder), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
        log = (self.folder / f"{verb}-{arguments[0]}.log").open("wb")
        with log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def restart_daemon(self) -> None:
        """kill -9, and start again on the same port."""
        self.daemon.kill()
        self.daemon = DaemonProcess(
            self.folder / "data", *self._flags, listen=self.daemon.grpc, prelude=self._prelude
        )

    def end(self) -> None:
        """Stop all, by what they were told or by force."""
        self.shared.stop()
        for process in (*self.writers, *self.replicas):
            process.send_signal(signal.SIGCONT)
        for process in (*self.writers, *self.replicas):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for proxy in self.proxies:
            proxy.__exit__()
        self.daemon.process.send_signal(signal.SIGCONT)
        self.daemon.kill()

    def violations(self) -> list[str]:
        """Each "no" that began after its key was acknowledged, and ended before its filter's drop began."""
        added: dict[tuple[int, int, int], float] = {}
        ended: dict[tuple[int, int], float] = {}
        for writer in range(WRITERS):
            for epoch, number, at in ADDED.iter_unpack(_whole(self.folder / f"added-{writer}", ADDED.size)):
                added[writer, epoch, number] = at
            for epoch, at in ENDED.iter_unpack(_whole(self.folder / f"ended-{writer}", ENDED.size)):
                ended[writer, epoch] = at
        self.added, self.noes, found = len(added), 0, []
        for file in self.folder.glob("no-*"):
            for writer, epoch, number, start, end in SAID_NO.iter_unpack(_whole(file, SAID_NO.size)):
                self.noes += 1
                acknowledged = added.get((writer, epoch, number), end)
                if acknowledged < start and end < ended.get((writer, epoch), end + 1):
                    found.append(
                        f"{file.name}: no to {writer}/{epoch}/{number} {start - acknowledged:.6f} s after its"
                        " acknowledgement"
                    )
        return found


def _whole(path: Path, size: int) -> bytes:
    """The records of a file; one that was being written when its process ended is left out."""
    data = path.read_bytes() if path.exists() else b""
    return data[: len(data) // size * size]


Fault = Callable[[Harness, random.Random], None]


def freeze_a_replica(harness: Harness, draw: random.Random) -> None:
    replica = draw.choice(harness.replicas)
    replica.send_signal(signal.SIGSTOP)
    time.sleep(draw.uniform(0, 1.5 * (DURATION + MARGIN)))
    replica.send_signal(signal.SIGCONT)


def freeze_the_daemon(harness: Harness, draw: random.Random) -> None:
    harness.daemon.process.send_signal(signal.SIGSTOP)
    time.sleep(draw.uniform(0, 1.5 * (DURATION + MARGIN)))
    harness.daemon.process.send_signal(signal.SIGCONT)


def kill_the_daemon(harness: Harness, draw: random.Random) -> None:
    harness.restart_daemon()
    time.sleep(draw.uniform(0, DURATION))


def cut_streams(harness: Harness, draw: random.Random) -> None:
    draw.choice(harness.proxies).cut()
    time.sleep(draw.uniform(0, 0.2))


def delay_a_replica(harness: Harness, draw: random.Random) -> None:
    proxy = draw.choice(harness.proxies)
    proxy.delay = draw.uniform(0, DURATION)
    time.sleep(draw.uniform(0, 2 * DURATION))
    proxy.delay = 0.0


def swallow_and_cut(harness: Harness, draw: random.Random) -> None:
    proxy = draw.choice(harness.proxies)
    proxy.swallows = True
    time.sleep(draw.uniform(0, 1.5 * DURATION))
    # What was swallowed is lost: the connections must not go on as if it had not been.
    proxy.cut()
    proxy.swallows = False


def freeze_both(harness: Harness, draw: random.Random) -> None:
    """A replica, and the daemon a while after it; whichever wakes first."""
    replica = draw.choice(harness.replicas)
    replica.send_signal(signal.SIGSTOP)
    time.sleep(draw.uniform(0, DURATION))
    freeze_the_daemon(harness, draw)
    replica.send_signal(signal.SIGCONT)


FAULTS: tuple[tuple[Fault, int], ...] = (
    (freeze_a_replica, 4), (freeze_the_daemon, 3), (kill_the_daemon, 2), (cut_streams, 4),
    (delay_a_replica, 3), (swallow_and_cut, 2), (freeze_both, 2),
)  # fmt: skip


def wreak(harness: Harness, times: int, draw: random.Random) -> Counter[str]:
    """Do so many faults, one after the other."""
    faults, weights = zip(*FAULTS, strict=True)
    done: Counter[str] = Counter()
    for _ in range(times):
        fault = draw.choices(faults, weights)[0]
        fault(harness, draw)
        done[fault.__name__] += 1
        time.sleep(draw.uniform(0, 0.1))
    return done


def wait_for_leases(harness: Harness) -> None:
    until = time.monotonic() + 30
    while not harness.shared.any_local:
        assert time.monotonic() < until, "no replica answered from a copy"
        time.sleep(0.01)


def test_no_replica_says_no_after_the_acknowledgement(tmp_path: Path) -> None:
    """Whatever is frozen, cut off, delayed or killed: see the faults above."""
    times = rounds(25, 2500)
    harness = Harness(tmp_path)
    try:
        wait_for_leases(harness)
        done = wreak(harness, times, random.Random(20261201))
    finally:
        harness.end()
    assert harness.violations() == []
    assert harness.added > times
    assert harness.noes > 100 * times
    assert sum(done.values()) == times
    record(
        "replicas frozen, cut off or delayed, the daemon frozen or killed, beside writers",
        times,
        "no wrong no",
    )


# Each rule that a lease stands on, taken away, and what then has to go wrong for a wrong "no".
WITHOUT = {
    "the wait for acknowledgements": (
        "from bloomgated.leases import Leases\n"
        "async def settled(self, name, seq): pass\n"
        "Leases.settled = settled\n",
        (freeze_a_replica, delay_a_replica),
    ),
    "the start-up wait": (
        "from bloomgated.leases import Leases\n"
        "begin = Leases.begin\n"
        "def without(self, journal, since):\n"
        "    begin(self, journal, since)\n"
        "    self._earlier_until = 0.0\n"
        "Leases.begin = without\n",
        (kill_the_daemon,),
    ),
    "the expiry of leases, which are given up when a stream breaks": (
        "from bloomgated.holders import Holders\n"
        "leave = Holders.disconnect\n"
        "def disconnect(self, holder):\n"
        "    for each in list(holder.subscriptions.values()):\n"
        "        each.close()\n"
        "    leave(self, holder)\n"
        "Holders.disconnect = disconnect\n",
        (cut_streams, swallow_and_cut),
    ),
}


@pytest.mark.parametrize("rule", list(WITHOUT) if LONG else list(WITHOUT)[:1])
def test_the_harness_finds_what_a_missing_rule_allows(tmp_path: Path, rule: str) -> None:
    """So that its silence above means something."""
    prelude, faults = WITHOUT[rule]
    draw = random.Random(7)
    # Long enough to outlast a restart.
    harness = Harness(tmp_path, prelude=prelude, duration=3.0 if kill_the_daemon in faults else DURATION)
    try:
        wait_for_leases(harness)
        until = time.monotonic() + 60
        while not harness.violations() and time.monotonic() < until:
            draw.choice(faults)(harness, draw)
    finally:
        harness.end()
    assert harness.violations(), f"without {rule} nothing went wrong"
