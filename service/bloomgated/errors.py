"""Why the daemon does not start, or stops. What a caller can be told is in ``bloomgate.errors``."""

from __future__ import annotations


class StartError(Exception):
    """The daemon refuses to start. Its text is one sentence for the operator."""


class ConfigError(StartError):
    """A setting is unknown or has a value that cannot be used."""


class DirectoryUnusable(StartError):
    """The data directory cannot be written, or another process owns it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"data directory {path}: {reason}")
        self.path = path
        self.reason = reason


class DirectoryInUse(DirectoryUnusable):
    """Another process owns the data directory; ``pid`` where that is known."""

    def __init__(self, path: str, pid: int | None) -> None:
        named = f" (pid {pid})" if pid else ""
        super().__init__(path, f"another bloomgated{named} is running on it; stop that one first")
        self.pid = pid


class BackupRefused(StartError):
    """No backup was made, and nothing is left of it."""


class AddressTaken(StartError):
    """A port cannot be bound."""


class JournalDamaged(StartError):
    """The journal, or what must stand beside it, is not what was acknowledged. Nothing was changed."""

    def __init__(self, path: str, reason: str, hint: str = "") -> None:
        hint = hint or (
            "start on an empty directory and load the filters again, or restore a backup and add again what"
            " came after it (docs/OPERATIONS.md)"
        )
        super().__init__(f"{path}: {reason}; {hint}")
        self.path = path
        self.reason = reason
        self.hint = hint


class TrimmedAway(Exception):
    """Not all of the records that were asked for are there any more."""


class JournalFailed(Exception):
    """A commit failed. The journal takes nothing more; a restart recovers all that was acknowledged."""


class JournalQueueFull(Exception):
    """More bytes wait for the group commit than may. Trying again a little later helps."""

    def __init__(self, queued_bytes: int, allowed: int) -> None:
        super().__init__(f"{queued_bytes} bytes wait to be journalled, {allowed} may")
        self.queued_bytes = queued_bytes
        self.allowed = allowed
