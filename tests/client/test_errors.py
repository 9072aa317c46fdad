"""Errors survive the wire."""

from __future__ import annotations

import pickle

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

import bloomgate
from bloomgate import errors
from bloomgate.errors import ERRORS, BloomgateError, InternalError, Overloaded, Unavailable
from bloomgate.wire import decode, encode

EXAMPLES: list[BloomgateError] = [
    BloomgateError("UNKNOWN: something"),
    errors.FilterNotFound("fruit"),
    errors.FilterExists("fruit", "capacity"),
    errors.InvalidRequest("hash_id", "hash_id must come with digests"),
    errors.StaleHashId("fruit"),
    errors.NotForThisState("fruit", "DAMAGED"),
    errors.LimitExceeded("keys_per_call", 10_001, 10_000),
    errors.FilterFull("fruit", "capacity", 1000, 1001),
    errors.Overloaded(0.25),
    errors.Unavailable("connection refused"),
    errors.NotServing(),
    errors.JournalFailed(),
    errors.DeadlineExceeded(),
    errors.NotAllowed(),
    errors.NotAuthenticated(),
    errors.NotSupported(),
    errors.InternalError("a1b2c3"),
    errors.ForkNotSupported(),
    errors.MalformedReply("2 answers to 3 keys"),
    errors.ClientClosed(),
]


def _subclasses(error: type[BloomgateError]) -> set[type[BloomgateError]]:
    return {error}.union(*(_subclasses(each) for each in error.__subclasses__()))


def _details(error: BloomgateError) -> dict[str, object]:
    status = status_pb2.Status.FromString(encode(error)[2])
    found = {}
    for any_ in status.details:
        detail = getattr(error_details_pb2, any_.TypeName().rpartition(".")[2])()
        assert any_.Unpack(detail)
        found[type(detail).__name__] = detail
    return found


def test_every_error_is_in_the_table_and_has_an_example() -> None:
    """A new error class cannot be forgotten in the table or in the round trip below."""
    assert set(ERRORS.values()) == _subclasses(BloomgateError) == {type(error) for error in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.reason)
def test_an_error_survives_the_wire(error: BloomgateError) -> None:
    """Class, message and every field come back; a plain error comes back with its code named."""
    code, message, details = encode(error)
    back = decode(code, message, details)
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error) == message


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.reason)
def test_an_error_survives_a_pickle(error: BloomgateError) -> None:
    """Worker processes hand errors on."""
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), vars(back), str(back)) == (type(error), vars(error), str(error))


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.reason)
def test_the_status_inside_the_details_is_the_status_outside(error: BloomgateError) -> None:
    """Tools that read only the details see the same code and message."""
    code, message, details = encode(error)
    status = status_pb2.Status.FromString(details)
    assert code_pb2.Code.Name(status.code) == code.name
    assert status.message == message


def test_standard_details_say_what_tools_know() -> None:
    """Bad field, missing resource, passed limit: each in the detail that google.rpc has for it."""
    bad = _details(errors.InvalidRequest("capacity", "capacity must be above 0"))["BadRequest"]
    assert bad.field_violations[0].field == "capacity"  # type: ignore[attr-defined]
    missing = _details(errors.FilterNotFound("fruit"))["ResourceInfo"]
    assert missing.resource_name == "fruit"  # type: ignore[attr-defined]
    quota = _details(errors.LimitExceeded("keys_per_call", 3, 2))["QuotaFailure"]
    assert quota.violations[0].subject == "keys_per_call"  # type: ignore[attr-defined]


def test_only_an_overload_says_to_come_back() -> None:
    """RetryInfo is an invitation: a passed limit or a full filter must not carry it."""
    assert [type(error) for error in EXAMPLES if "RetryInfo" in _details(error)] == [Overloaded]


def test_a_status_without_details_is_what_its_code_says() -> None:
    """gRPC and proxies make statuses of their own. Only codes with one meaning become a class."""
    assert type(decode(grpc.StatusCode.UNAVAILABLE, "refused")) is Unavailable
    assert type(decode(grpc.StatusCode.DEADLINE_EXCEEDED, "")) is errors.DeadlineExceeded
    assert type(decode(grpc.StatusCode.UNAUTHENTICATED, "who?")) is errors.NotAuthenticated
    assert type(decode(grpc.StatusCode.UNIMPLEMENTED, "")) is errors.NotSupported
    assert type(decode(grpc.StatusCode.INTERNAL, "boom")) is InternalError
    plain = decode(grpc.StatusCode.NOT_FOUND, "no such host")
    assert type(plain) is BloomgateError
    assert str(plain) == "NOT_FOUND: no such host"
    # gRPC's own message limit: trying again cannot help, so it must not read as an overload.
    assert type(decode(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max")) is BloomgateError


def _status(reason: str, domain: str = "bloomgate", **metadata: str) -> bytes:
    status = status_pb2.Status()
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata))
    return status.SerializeToString()


@pytest.mark.parametrize(
    "details",
    [
        b"\xff\xff not a status",
        _status("NOT_A_REASON"),
        _status("NOT_SERVING", domain="elsewhere"),
        _status("FILTER_NOT_FOUND", filter="fruit"),
        _status("LIMIT_EXCEEDED", limit="keys", value="many", allowed="few"),
    ],
    ids=["garbage", "unknown reason", "another domain", "another code", "fields of another type"],
)
def test_details_that_make_no_sense_are_as_if_absent(details: bytes) -> None:
    """Whatever stands in the details, decoding answers with an error of the status code."""
    assert type(decode(grpc.StatusCode.UNAVAILABLE, "refused", details)) is Unavailable


def test_a_field_of_another_type_is_not_taken() -> None:
    """The right reason under the right code, with a number that is none."""
    details = _status("LIMIT_EXCEEDED", limit="keys", value="many", allowed="few")
    assert type(decode(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many", details)) is BloomgateError


def test_one_except_serves_kernel_and_client() -> None:
    """A full filter is bloomgate.FilterFull, and a bad request a ValueError, wherever they come from."""
    assert issubclass(errors.FilterFull, bloomgate.FilterFull)
    assert issubclass(errors.InvalidRequest, ValueError)


def test_long_texts_do_not_burst_the_trailing_metadata() -> None:
    """A request can carry a name of any length; an answer of 8 KiB of metadata would not arrive."""
    for error in (errors.FilterNotFound("x" * 100_000), errors.InvalidRequest("y" * 100_000)):
        _, message, details = encode(error)
        assert len(message) + len(details) < 2000


def test_a_call_that_a_stopping_server_ends_is_tried_again() -> None:
    """What it has received and not begun it ends as CANCELLED, not by the caller's doing: Unavailable, so an
    add survives a rolling restart."""
    assert type(decode(grpc.StatusCode.CANCELLED, "CANCELLED")) is Unavailable
