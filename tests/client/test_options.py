"""Options are judged where they are made."""

from __future__ import annotations

from itertools import islice

import pytest

from bloomgate import Backoff, Client, ClientOptions, ParameterError, Tls


@pytest.mark.parametrize("choice", ["no", "false", "skip", "", None, False])
def test_a_failed_check_cannot_be_made_a_no(choice: object) -> None:
    """on_error is "maybe" or "raise"; treating a failure as "no" is not offered in any spelling."""
    with pytest.raises(ParameterError, match="on_error") as caught:
        ClientOptions(on_error=choice)  # type: ignore[arg-type]
    assert caught.value.field == "on_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("check_timeout", 0),
        ("check_timeout", -1.0),
        ("check_timeout", float("nan")),
        ("add_timeout", float("inf")),
        ("add_attempt_timeout", "1"),
        ("check_timeout_per_key", -1e-6),
        ("keys_per_call", 0),
        ("keys_per_call", 1.5),
        ("max_message_bytes", True),
        ("keepalive_time", 9.9),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    """The error names the field and the value."""
    with pytest.raises(ParameterError) as caught:
        ClientOptions(**{field: value})  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == (field, value) or value != value


@pytest.mark.parametrize(
    "values",
    [{"initial": 0.0}, {"initial": 1.0, "most": 0.5}, {"multiplier": 0.9}, {"jitter": 1.5}, {"jitter": -0.1}],
)
def test_a_backoff_that_would_spin_or_shrink_is_refused(values: dict[str, float]) -> None:
    """Pauses are above zero and never get shorter but by jitter."""
    with pytest.raises(ParameterError):
        Backoff(**values)


def test_pauses_grow_to_the_most_and_jitter_shortens_them() -> None:
    """initial, times multiplier, up to most; jitter takes up to its share away."""
    assert list(islice(Backoff(initial=0.1, most=0.5, random=lambda: 0.0).pauses(), 5)) == [
        0.1,
        0.2,
        0.4,
        0.5,
        0.5,
    ]
    halved = Backoff(initial=0.1, most=0.5, jitter=0.5, random=lambda: 1.0).pauses()
    assert next(halved) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:50051",
        "gate:1",
        "[::1]:50051",
        "unix:/run/gate.sock",
        "dns:///gate:50051",
        "ipv4:10.0.0.1:1",
    ],
)
def test_targets_that_grpc_knows_are_taken(target: str) -> None:
    """Nothing is connected yet, so nothing need be there."""
    Client(target).close()


@pytest.mark.parametrize(
    "target",
    ["", "gate", "gate:", "gate:0", "gate:65536", "gate:port", "http://gate:1", "a b:1", None, 1],
)
def test_other_targets_are_refused(target: object) -> None:
    """A typo fails where it stands, not as a name that never resolves."""
    with pytest.raises(ParameterError, match="target"):
        Client(target)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["", "two words", "line\nfeed", "gehéim"])
def test_a_bad_token_is_refused_and_not_shown(token: str) -> None:
    """The error says what a token should be; it never repeats a secret."""
    with pytest.raises(ParameterError) as caught:
        Client(token=token)
    assert not token or token not in str(caught.value)


def test_a_cert_needs_its_key() -> None:
    """One without the other proves nothing."""
    with pytest.raises(ParameterError, match="tls"):
        Client(tls=Tls(cert="cert.pem"))
