"""Every exception that a verb can raise, as an error that travels.

``bloomgate.errors.ERRORS`` is the table of what travels; this one maps what the kernel and the journal raise
onto it. Whatever stands in neither is INTERNAL: the caller gets an id, the log has the rest under that id.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from bloomgate import errors
from bloomgate.filters import InvalidKey, ParameterError
from bloomgated.errors import JournalFailed, JournalQueueFull

log = logging.getLogger(__name__)

# About one group commit of a busy journal: by then the queue has moved.
RETRY_AFTER = 0.05

_TABLE: Mapping[type[Exception], Callable[[Any], errors.BloomgateError]] = {
    ParameterError: lambda error: errors.InvalidRequest(error.field, str(error)),
    InvalidKey: lambda error: errors.InvalidRequest("keys", str(error)),
    JournalQueueFull: lambda error: errors.Overloaded(RETRY_AFTER, str(error)),
    # What SQLite or the kernel said stays in the log: it may name paths.
    JournalFailed: lambda _error: errors.JournalFailed("the journal failed; bloomgated is restarting"),
}


def translate(error: Exception) -> errors.BloomgateError:
    """The error that the caller gets to see."""
    if isinstance(error, errors.BloomgateError):
        return error
    known = _TABLE.get(type(error))
    if known is not None:
        return known(error)
    error_id = secrets.token_hex(8)
    log.error("internal error %s", error_id, exc_info=error)
    return errors.InternalError(error_id)
