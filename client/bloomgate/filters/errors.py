"""What the kernel raises. Each error names what was wrong, so that an edge can pass it on unchanged."""

from __future__ import annotations


class ParameterError(ValueError):
    """A parameter of a filter is outside its range. Raised before anything is allocated."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} must be {allowed}, got {value!r}")
        self.field = field
        self.value = value
        self.allowed = allowed


class InvalidKey(ValueError):
    """A key that no filter can hold: empty, or a ``str`` that UTF-8 cannot encode."""


class FilterFull(Exception):
    """A batch was refused as a whole because its certainly new keys would pass a limit; nothing was added."""

    def __init__(self, limit: str, allowed: int, needed: int) -> None:
        super().__init__(f"the filter is full: {limit} is {allowed}, this batch needs {needed}")
        self.limit = limit
        self.allowed = allowed
        self.needed = needed


class DataDamaged(Exception):
    """Bytes that should be one of our formats are not. ``path`` says where they came from."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
