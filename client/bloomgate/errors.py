"""What the gate answers instead of a result.

``ERRORS`` is the one table of them, by reason word. How they travel is in ``bloomgate.wire``; nothing here
needs gRPC. An error names fields, limits and values. It never contains a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from bloomgate import filters


class BloomgateError(Exception):
    """Everything that a call to the gate can end in, except what is wrong with a key itself."""

    code: ClassVar[str] = "UNKNOWN"
    """The name of the gRPC status code that it travels under."""
    reason: ClassVar[str] = "UNKNOWN"
    """One word for this error: on the wire, in logs and, in lower case, in metrics."""
    fields: ClassVar[Mapping[str, type[str] | type[int]]] = {}
    """The attributes that travel, in the order in which the class takes them."""
    default: ClassVar[str] = "the call failed"
    """The message where none is given."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.default)

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (type(self), {name: getattr(self, name) for name in self.fields}, str(self))


class FilterNotFound(BloomgateError):
    """There is no filter of that name. Nothing is created implicitly."""

    code = "NOT_FOUND"
    reason = "FILTER_NOT_FOUND"
    fields: ClassVar = {"filter": str}

    def __init__(self, name: str, message: str = "") -> None:
        super().__init__(message or f"filter {name!r} does not exist")
        self.filter = name


class FilterExists(BloomgateError):
    """A filter of that name exists and differs in ``field``."""

    code = "ALREADY_EXISTS"
    reason = "FILTER_EXISTS"
    fields: ClassVar = {"filter": str, "field": str}

    def __init__(self, name: str, field: str, message: str = "") -> None:
        super().__init__(message or f"filter {name!r} exists and differs in {field}")
        self.filter = name
        self.field = field


class InvalidRequest(BloomgateError, ValueError):
    """``field`` of a request is outside what is accepted."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_ARGUMENT"
    fields: ClassVar = {"field": str}

    def __init__(self, field: str, message: str = "") -> None:
        super().__init__(message or f"{field} is not valid")
        self.field = field


class StaleHashId(BloomgateError):
    """The digests were made under another hash spec than the filter's. The client reads it anew by itself."""

    code = "FAILED_PRECONDITION"
    reason = "STALE_HASH_ID"
    fields: ClassVar = {"filter": str}

    def __init__(self, name: str, message: str = "") -> None:
        super().__init__(message or f"hash_id is not that of filter {name!r}: read its hash spec again")
        self.filter = name


class NotForThisState(BloomgateError):
    """The filter cannot do this in its present ``state``."""

    code = "FAILED_PRECONDITION"
    reason = "NOT_FOR_THIS_STATE"
    fields: ClassVar = {"filter": str, "state": str}

    def __init__(self, name: str, state: str, message: str = "") -> None:
        super().__init__(message or f"filter {name!r} cannot do this while it is {state}")
        self.filter = name
        self.state = state


class LimitExceeded(BloomgateError):
    """The request passes a limit of the daemon: ``value`` where ``allowed`` is the most. Never retried."""

    code = "RESOURCE_EXHAUSTED"
    reason = "LIMIT_EXCEEDED"
    fields: ClassVar = {"limit": str, "value": int, "allowed": int}

    def __init__(self, limit: str, value: int, allowed: int, message: str = "") -> None:
        super().__init__(message or f"{limit} is limited to {allowed}, got {value}")
        self.limit = limit
        self.value = value
        self.allowed = allowed


class FilterFull(BloomgateError, filters.FilterFull):
    """The filter refused a batch as a whole; nothing was added. Never retried.

    It is a ``bloomgate.FilterFull`` as well, so that one ``except`` serves the kernel and the client.
    """

    code = "RESOURCE_EXHAUSTED"
    reason = "FILTER_FULL"
    fields: ClassVar = {"filter": str, "limit": str, "allowed": int, "needed": int}

    def __init__(self, name: str, limit: str, allowed: int, needed: int, message: str = "") -> None:
        text = message or f"filter {name!r} is full: {limit} is {allowed}, this batch needs {needed}"
        Exception.__init__(self, text)
        self.filter = name
        self.limit = limit
        self.allowed = allowed
        self.needed = needed


class Overloaded(BloomgateError):
    """The daemon has too much to do. ``retry_after`` is in seconds; 0 leaves it to the client's backoff."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"

    def __init__(self, retry_after: float = 0.0, message: str = "") -> None:
        super().__init__(message or "the daemon is overloaded")
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return Overloaded, (self.retry_after, str(self))


class Unavailable(BloomgateError):
    """The daemon cannot be reached."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"
    default = "the daemon cannot be reached"


class NotServing(Unavailable):
    """The daemon is up and does not serve: it starts, drains or recovers."""

    reason = "NOT_SERVING"
    default = "the daemon is not serving"


class JournalFailed(Unavailable):
    """The daemon could not make the mutation durable; it may be durable all the same. It will restart."""

    reason = "JOURNAL_FAILED"
    default = "the journal failed"


class DeadlineExceeded(BloomgateError):
    """No answer in time. Whether the daemon did what was asked is not known."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"
    default = "no answer within the deadline"


class NotAllowed(BloomgateError):
    """The caller may not do this."""

    code = "PERMISSION_DENIED"
    reason = "NOT_ALLOWED"
    default = "not allowed"


class NotAuthenticated(NotAllowed):
    """The token is missing or not known."""

    code = "UNAUTHENTICATED"
    reason = "NOT_AUTHENTICATED"
    default = "the token is missing or not known"


class NotSupported(BloomgateError):
    """The server does not know this call: another version, or not bloomgate."""

    code = "UNIMPLEMENTED"
    reason = "NOT_SUPPORTED"
    default = "the server does not know this call"


class InternalError(BloomgateError):
    """Something unexpected in the daemon; its log has more under ``id``."""

    code = "INTERNAL"
    reason = "INTERNAL"
    fields: ClassVar = {"id": str}

    def __init__(self, error_id: str = "", message: str = "") -> None:
        super().__init__(message or f"internal error {error_id}".rstrip())
        self.id = error_id


class ForkNotSupported(BloomgateError):
    """gRPC was used before this process was forked, and its fork support is off. Raised by the client."""

    code = "FAILED_PRECONDITION"
    reason = "FORK_NOT_SUPPORTED"
    default = "this process was forked after gRPC was used, and GRPC_ENABLE_FORK_SUPPORT is off"


class MalformedReply(BloomgateError):
    """The reply is not an answer to the request. Raised by the client; nothing of such a reply is used."""

    code = "DATA_LOSS"
    reason = "MALFORMED_REPLY"
    default = "the reply is malformed"


class ClientClosed(BloomgateError):
    """The client was closed before or during the call."""

    code = "CANCELLED"
    reason = "CLIENT_CLOSED"
    default = "the client is closed"


_ALL: tuple[type[BloomgateError], ...] = (
    BloomgateError, FilterNotFound, FilterExists, InvalidRequest, StaleHashId, NotForThisState,
    LimitExceeded, FilterFull, Overloaded, Unavailable, NotServing, JournalFailed,
    DeadlineExceeded, NotAllowed, NotAuthenticated, NotSupported, InternalError, ForkNotSupported,
    MalformedReply, ClientClosed,
)  # fmt: skip
ERRORS: Mapping[str, type[BloomgateError]] = {error.reason: error for error in _ALL}
"""Every error by its reason word."""


def make(error: type[BloomgateError], values: Mapping[str, str | int], message: str) -> BloomgateError:
    """An error from its fields, given in any order, and its message."""
    build: Callable[..., BloomgateError] = error
    return build(*(values[name] for name in error.fields), message)
