"""What the log says of checks that fall back."""

from __future__ import annotations

import logging
import threading

from bloomgate.errors import BloomgateError
from bloomgate.options import ClientOptions
from bloomgate.processes import OfProcess

_log = logging.getLogger("bloomgate")


class FallbackLog:
    """Says that a filter's checks fall back: at most once in a while, and never with a key."""

    def __init__(self, name: str, options: ClientOptions) -> None:
        self._name = name
        self._clock = options.clock
        self._interval = options.warn_interval
        self._next = float("-inf")
        self._keys = 0
        # A process's own: a child would wait for ever for one that its parent held at the fork.
        self._lock = OfProcess(threading.Lock)

    def note(self, reason: str, error: Exception, keys: int) -> None:
        """Note ``keys`` checks that fell back."""
        now = self._clock()
        with self._lock.get():
            self._keys += keys
            if now < self._next:
                return
            self._next = now + self._interval
            keys, self._keys = self._keys, 0
        # The text of an error that is not ours may hold a key.
        detail = str(error) if isinstance(error, BloomgateError) else type(error).__name__
        _log.warning(
            "checks of filter %s answered maybe without an answer from the daemon: %d keys, last %s (%s)",
            self._name,
            keys,
            reason,
            detail,
        )
