"""Names of filters: one rule for the daemon, the client and the fake gate."""

from __future__ import annotations

import re

from bloomgate.errors import InvalidRequest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: object, field: str = "filter") -> str:
    """Return ``name`` if a filter can have it, else raise InvalidRequest naming ``field``."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise InvalidRequest(field, f"{field} must match {NAME.pattern}")
