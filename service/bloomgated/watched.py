"""Files that are read again when they change, so that secrets are rotated without a restart."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from bloomgated.errors import ConfigError

# Seconds that files must have stood still before they are read again.
SETTLE = 0.1

log = logging.getLogger(__name__)


class Watched(ABC):
    """What stands in some files. A change that cannot be read leaves what was read before in force."""

    what: ClassVar[str]
    """One word for these files: in the log and in metrics."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Reads them. Raises ConfigError."""
        self._files = files
        self.failed = False
        """Whether the files as they are now cannot be used, and older ones are in force."""
        # Before reading: what changes meanwhile is noticed the next time.
        self._seen = self._stamp()
        self._told = ""
        self.read()

    @abstractmethod
    def read(self) -> None:
        """Read the files and put what they say in force. Raises ConfigError, and changes nothing then."""

    def reload_if_changed(self) -> bool:
        """Read them again if they changed since; blocks, does not raise. Returns whether it read them."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        # Whoever writes in place cuts first: what is half there is left for the next look.
        time.sleep(SETTLE)
        if self._stamp() != stamp:
            return False
        try:
            self.read()
        except ConfigError as error:
            # Tried again each time, told once: the other file of a pair may be on its way.
            self.failed = True
            if self._told != str(error):
                self._told = str(error)
                log.error("%s: what was read before stays in force, the files cannot be used: %s",
                          self.what, error)  # fmt: skip
            return False
        self._seen, self._told, self.failed = stamp, "", False
        log.info("%s: read again", self.what)
        return True

    def _stamp(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_stat, self._files))


def _stat(file: Path) -> tuple[int, ...] | None:
    try:
        # Follows links: a change of what they lead to counts.
        found = file.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
