"""Every knob of a client, with a usable default."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from bloomgate.filters import ParameterError


def _check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> None:
    """``value`` must be a finite number in the range."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value <= above or not least <= value <= most:  # type: ignore[operator]
        bounds = [f"above {above:g}"] if above > -math.inf else []
        bounds += [f"at least {least:g}"] if least > -math.inf else []
        bounds += [f"at most {most:g}"] if most < math.inf else []
        raise ParameterError(name, value, f"a finite number {' and '.join(bounds)}".rstrip())


def _check_whole(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ParameterError(name, value, f"a whole number from 1 to {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses between attempts in seconds: ``initial``, each next ``multiplier`` times longer, up to ``most``.

    Each is shortened by a random share of up to ``jitter`` of it, so that callers which failed together do
    not come back together.
    """

    initial: float = 0.01
    most: float = 1.0
    multiplier: float = 2.0
    jitter: float = 0.5
    random: Callable[[], float] = field(default=random.random, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number("initial", self.initial, above=0.0)
        _check_number("most", self.most, least=self.initial)
        _check_number("multiplier", self.multiplier, least=1.0)
        _check_number("jitter", self.jitter, least=0.0, most=1.0)

    def pauses(self) -> Iterator[float]:
        """The pauses of one call, without end."""
        pause = self.initial
        while True:
            yield pause * (1.0 - self.jitter * self.random())
            pause = min(self.most, pause * self.multiplier)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client behaves. Times are in seconds. Raises ParameterError, a ValueError naming the field."""

    on_error: Literal["maybe", "raise"] = "maybe"
    """What a check that failed answers: True ("maybe"), or its error. There is no third choice: answering
    "no" for want of an answer is a wrong "no"."""

    check_timeout: float = 0.05
    """The whole budget of a check, retries included."""
    check_timeout_per_key: float = 0.00002
    """Added to ``check_timeout`` for each key of a bulk check."""
    add_timeout: float = 10.0
    """The whole budget of an add, retries included. Longer than a lease and its margin, which an add waits
    out where a replica is cut off."""
    add_timeout_per_key: float = 0.0001
    """Added to ``add_timeout`` for each key of a bulk add."""
    add_attempt_timeout: float = 4.0
    """After this long without an answer an add is tried again."""
    admin_timeout: float = 30.0
    """For stats and for creating, listing, dropping and snapshotting filters."""
    report_timeout: float = 1.0
    """For a guard's report of outcomes, and for how long closing waits for the last one."""

    backoff: Backoff = Backoff()
    keys_per_call: int = 10_000
    """The most keys that go into one call, and are hashed in one go; less where the daemon allows less."""
    report_interval: float = 1.0
    """A guard reports its outcomes at most this often."""
    warn_interval: float = 10.0
    """A filter's fallbacks are logged at most this often."""

    keepalive_time: float = 60.0
    """An idle connection is probed after this long, while a call waits on it; at least 10."""
    keepalive_timeout: float = 5.0
    """A connection on which nothing is acknowledged for this long is given up."""
    reconnect_most: float = 1.0
    """The longest pause between attempts to connect, so that a restarted daemon is found again soon."""
    max_message_bytes: int = 64 * 2**20
    replica_max_bytes: int = 256 * 2**20
    """The most that a local copy of one filter may take; a larger filter is asked remotely."""

    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    random: Callable[[], float] = field(default=random.random, repr=False, compare=False)
    """From 0 to 1: which noes a guard audits."""

    def __post_init__(self) -> None:
        if self.on_error not in ("maybe", "raise"):
            raise ParameterError("on_error", self.on_error, 'one of "maybe", "raise"')
        for name in (
            "check_timeout",
            "add_timeout",
            "add_attempt_timeout",
            "admin_timeout",
            "report_timeout",
            "keepalive_timeout",
            "reconnect_most",
        ):
            _check_number(name, getattr(self, name), above=0.0)
        # The daemon ends connections that are probed more often than every nine seconds.
        _check_number("keepalive_time", self.keepalive_time, least=10.0)
        for name in ("check_timeout_per_key", "add_timeout_per_key", "report_interval", "warn_interval"):
            _check_number(name, getattr(self, name), least=0.0)
        for name in ("keys_per_call", "max_message_bytes"):
            _check_whole(name, getattr(self, name), 2**31 - 1)
        _check_whole("replica_max_bytes", self.replica_max_bytes, 2**40)
