"""How an error travels.

As a gRPC status code, a message, and a ``google.rpc.Status`` in the trailing metadata whose ``ErrorInfo``
carries one reason word and the error's fields. The daemon encodes with ``bloomgate.errors.ERRORS``, the
client decodes with it, and a test takes every class there and back.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from bloomgate import errors
from bloomgate.errors import (
    ERRORS,
    BloomgateError,
    DeadlineExceeded,
    FilterExists,
    FilterFull,
    FilterNotFound,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    NotAllowed,
    NotAuthenticated,
    NotSupported,
    Overloaded,
    Unavailable,
)

DOMAIN = "bloomgate"
DETAILS_KEY = "grpc-status-details-bin"
"""Where gRPC carries the ``google.rpc.Status`` in the trailing metadata."""

# Characters of a text. It travels up to four times, at worst percent-encoded, in trailing metadata of 8 KiB
# that proxies add to as well.
_MAX_TEXT = 256

# What a status says that carries no reason of ours: from a proxy, from gRPC itself, from another server.
# Only codes that mean the same whoever sends them; the rest stays a plain BloomgateError.
_BY_CODE: Mapping[str, type[BloomgateError]] = {
    error.code: error for error in (Unavailable, DeadlineExceeded, NotAllowed, NotAuthenticated, NotSupported)
} | {
    # Not by us: a server that stops ends so what it has received and not begun.
    "CANCELLED": Unavailable
}


def encode(error: BloomgateError) -> tuple[grpc.StatusCode, str, bytes]:
    """An error as its status code, its message, and the value of ``DETAILS_KEY``."""
    message = str(error)[:_MAX_TEXT]
    status = status_pb2.Status(code=grpc.StatusCode[error.code].value[0], message=message)
    metadata = {name: str(getattr(error, name))[:_MAX_TEXT] for name in error.fields}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    for detail in (info, *_standard_details(error, message)):
        status.details.add().Pack(detail)
    return grpc.StatusCode[error.code], message, status.SerializeToString()


def _standard_details(error: BloomgateError, message: str) -> list[Message]:
    """The details that tools know which have never heard of bloomgate."""
    if isinstance(error, InvalidRequest):
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.field[:_MAX_TEXT], description=message)
        return [bad]
    if isinstance(error, FilterNotFound | FilterExists):
        resource = error_details_pb2.ResourceInfo(
            resource_type="filter", resource_name=error.filter[:_MAX_TEXT], description=message
        )
        return [resource]
    if isinstance(error, LimitExceeded | FilterFull):
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=error.limit[:_MAX_TEXT], description=message)
        return [quota]
    if isinstance(error, Overloaded):
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []


def decode(code: grpc.StatusCode, message: str, details: bytes | None = None) -> BloomgateError:
    """The error that a status means; of a status that is not the daemon's, what its code alone says.

    Never raises: details that cannot be read are as if they were not there.
    """
    info, retry = _read_details(details)
    if info is not None and info.domain == DOMAIN:
        error = ERRORS.get(info.reason)
        if error is not None and error.code == code.name:
            if issubclass(error, Overloaded):
                return Overloaded(_seconds(retry), message)
            try:
                values = {name: kind(info.metadata[name]) for name, kind in error.fields.items()}
                return errors.make(error, values, message)
            except ValueError:
                pass  # A field that should be a number is not: the code still says something.
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry is not None:
        return Overloaded(_seconds(retry), message)
    if code is grpc.StatusCode.INTERNAL:
        return InternalError("", message)
    generic = _BY_CODE.get(code.name)
    if generic is not None:
        return errors.make(generic, {}, message or code.name)
    return BloomgateError(f"{code.name}: {message}")


def _read_details(
    details: bytes | None,
) -> tuple[error_details_pb2.ErrorInfo | None, error_details_pb2.RetryInfo | None]:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    has_info = has_retry = False
    try:
        for detail in status_pb2.Status.FromString(details or b"").details:
            has_info = has_info or detail.Unpack(info)
            has_retry = has_retry or detail.Unpack(retry)
    except DecodeError:
        return None, None
    return info if has_info else None, retry if has_retry else None


def _seconds(retry: error_details_pb2.RetryInfo | None) -> float:
    return 0.0 if retry is None else max(0.0, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
