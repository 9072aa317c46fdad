"""A check answers False only on a proof. Everything else is True, counted with its reason."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

import pytest

from bloomgate import Backoff, BloomFilter, ClientOptions, HashScheme, InvalidKey
from bloomgate.errors import (
    ERRORS,
    BloomgateError,
    ClientClosed,
    FilterNotFound,
    InternalError,
    LimitExceeded,
    MalformedReply,
    NotServing,
    Overloaded,
    StaleHashId,
    Unavailable,
)
from bloomgate.fallbacks import FallbackLog
from bloomgate.testing import FakeGate
from bloomgate.v1 import filters_pb2 as pb

from .twins import Clock, Twin


def _sleeps() -> float:
    raise AssertionError("a check draws a pause")


# A pause of it would be an error, not a wait.
NEVER = Backoff(initial=3000.0, most=3000.0, random=_sleeps)
NO, MAYBE, UNSAID = pb.ANSWER_DEFINITELY_NOT, pb.ANSWER_MAYBE, pb.ANSWER_UNSPECIFIED


class Replies:
    """A gate that answers checks with a reply of the test's choice, and all else as it should."""

    def __init__(self, gate: FakeGate, reply: Any) -> None:
        self._gate = gate
        self.reply = reply

    def unary(self, method: Any, request: Any, timeout: float) -> Any:
        assert timeout > 0
        if not method.path.endswith("/MightContain"):
            return self._gate.answer(method, request)
        reply = self.reply(request) if callable(self.reply) else self.reply
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def close(self) -> None:
        pass


def test_added_keys_may_be_there_and_others_are_not(twin: Twin, gate: FakeGate) -> None:
    """One by one and in bulk, in the order asked, counted as hits and skips."""
    fruit = twin.client(gate).filter("fruit")
    assert fruit.add_many(["mango", b"banana"]) == [True, True]
    assert fruit.might_contain("mango") is True
    assert fruit.might_contain("papaya") is False
    assert fruit.might_contain_many(["papaya", "banana", "mango", "peach"]) == [False, True, True, False]
    assert twin.results("fruit") == (3, 3, 0)


def test_a_filter_is_counted_from_zero(twin: Twin, gate: FakeGate) -> None:
    """All three results are exported before the first check, so that a rate sees the first one."""
    twin.client(gate).filter("fruit")
    for result in ("skip", "hit", "fallback"):
        labels = {"filter": "fruit", "result": result, "via": "rpc"}
        assert twin.registry.get_sample_value("bloomgate_client_checks_total", labels) == 0.0
    names = {sample.name for family in twin.registry.collect() for sample in family.samples}
    assert not any(name.endswith("_created") for name in names)


def test_check_seconds_are_observed_once_a_call(twin: Twin, gate: FakeGate) -> None:
    """A bulk check is one call, however many keys."""
    fruit = twin.client(gate).filter("fruit")
    fruit.might_contain("mango")
    fruit.might_contain_many(["mango"] * 500)
    assert twin.count("bloomgate_client_check_seconds_count") == 2


@pytest.mark.parametrize("reason", sorted(ERRORS))
def test_every_error_answers_maybe(twin: Twin, gate: FakeGate, reason: str) -> None:
    """Whatever the daemon or the network says instead of an answer: maybe, under its own reason."""
    error = ERRORS[reason].__new__(ERRORS[reason])
    Exception.__init__(error, "made up")
    error.retry_after = 9.0  # type: ignore[attr-defined]
    gate.fail_with(error)
    # Pauses longer than the budget: the first error is the last.
    options = {"check_timeout": 5.0, "backoff": Backoff(initial=60.0, most=60.0)}
    fruit = twin.client(gate, **options).filter("fruit")
    assert fruit.might_contain("papaya") is True
    assert fruit.might_contain_many(["papaya", "peach"]) == [True, True]
    assert twin.results("fruit") == (0, 0, 3)
    assert twin.fallbacks("fruit", reason.lower()) == 3


@pytest.mark.parametrize("error", [RuntimeError("bug"), ValueError(), OSError(), StopIteration()])
def test_an_unforeseen_exception_answers_maybe(twin: Twin, gate: FakeGate, error: Exception) -> None:
    """Not only what the library knows."""
    fruit = twin.over(Replies(gate, error)).filter("fruit")
    assert fruit.might_contain("papaya") is True
    assert fruit.might_contain_many(["papaya"]) == [True]
    assert twin.fallbacks("fruit", "unexpected") == 2


@pytest.mark.parametrize(
    "reply",
    [
        pb.MightContainResponse(),
        pb.MightContainResponse(answers=[UNSAID, UNSAID]),
        pb.MightContainResponse(answers=[NO]),
        pb.MightContainResponse(answers=[NO, NO, NO]),
        pb.MightContainResponse(answers=[NO, UNSAID]),
        pb.MightContainResponse(answers=[NO, 3]),  # type: ignore[list-item]
        pb.MightContainResponse(answers=[NO, NO], degraded=True),
    ],
    ids=["empty", "unspecified", "short", "long", "half", "unknown", "degraded with a no"],
)
def test_a_malformed_reply_skips_nothing(twin: Twin, gate: FakeGate, reply: Any) -> None:
    """Unless every key has one known answer, nothing of the reply is believed, its noes least of all."""
    fruit = twin.over(Replies(gate, reply)).filter("fruit")
    assert fruit.might_contain_many(["papaya", "peach"]) == [True, True]
    assert twin.fallbacks("fruit", "malformed_reply") == 2
    if len(reply.answers) != 1:
        assert fruit.might_contain("papaya") is True


def test_a_degraded_answer_is_a_fallback(twin: Twin, gate: FakeGate) -> None:
    """The daemon answered maybe because it could prove nothing: that is no hit."""
    reply = pb.MightContainResponse(answers=[MAYBE], degraded=True)
    fruit = twin.over(Replies(gate, reply), on_error="raise").filter("fruit")
    assert fruit.might_contain("papaya") is True
    assert twin.results("fruit") == (0, 0, 1)
    assert twin.fallbacks("fruit", "degraded") == 1


@pytest.mark.parametrize("key", ["", b"", "\ud800", 7, None, bytearray(b"mango")])
def test_what_cannot_be_a_key_answers_maybe(twin: Twin, gate: FakeGate, key: Any) -> None:
    """A bad key is the caller's bug, but not a reason to skip its lookup, nor to spoil the keys beside it."""
    fruit = twin.client(gate).filter("fruit")
    fruit.add("mango")
    assert fruit.might_contain(key) is True
    assert fruit.might_contain_many([key, "papaya", key, "mango", "peach", key]) == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    assert fruit.might_contain_many([key]) == [True]
    assert twin.results("fruit") == (2, 1, 5)
    assert twin.fallbacks("fruit", "invalid_key") == 5


def test_on_error_raise_raises(twin: Twin, gate: FakeGate) -> None:
    """The other choice: the error itself, counted once per key."""
    fruit = twin.client(gate, on_error="raise").filter("fruit")
    with pytest.raises(InvalidKey):
        fruit.might_contain("")
    with pytest.raises(InvalidKey):
        fruit.might_contain_many(["mango", ""])
    gate.fail_with(FilterNotFound("fruit"))
    with pytest.raises(FilterNotFound):
        fruit.might_contain("mango")
    with pytest.raises(FilterNotFound):
        fruit.might_contain_many(["mango", "peach"])
    assert twin.fallbacks("fruit", "invalid_key") == 2
    assert twin.fallbacks("fruit", "filter_not_found") == 3


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit()], ids=["interrupt", "exit"])
def test_an_interrupt_is_no_answer(twin: Twin, gate: FakeGate, stop: BaseException) -> None:
    """KeyboardInterrupt and SystemExit pass: the process is to end, not to look something up."""
    fruit = twin.over(Replies(gate, stop)).filter("fruit")

    def ask(verb: str, asked: Any) -> None:
        if twin.is_async:

            async def by_hand() -> None:
                getattr(fruit._inner, verb)(asked).send(None)

            # By hand: raised out of a task they end the loop, which is asyncio's affair.
            raise twin.raised(by_hand())
        getattr(fruit, verb)(asked)

    with pytest.raises(type(stop)):
        ask("might_contain", "papaya")
    with pytest.raises(type(stop)):
        ask("might_contain_many", ["papaya"])
    assert twin.results("fruit") == (0, 0, 0)
    fruit_again = twin.client(gate).filter("fruit")
    assert fruit_again.might_contain("papaya") is False
    assert twin.results("fruit") == (1, 0, 0)


def test_a_connection_that_broke_is_not_noticed(twin: Twin, gate: FakeGate) -> None:
    """UNAVAILABLE is tried again once, at once, and a success leaves no fallback behind."""
    fruit = twin.client(gate, backoff=NEVER).filter("fruit")
    gate.fail_with(Unavailable(), times=1)
    assert fruit.might_contain("papaya") is False
    assert [call.method for call in gate.calls] == ["MightContain"] * 2
    fruit.might_contain_many(["papaya"])
    gate.fail_with(Unavailable(), times=1, method="MightContain")
    assert fruit.might_contain_many(["papaya", "peach"]) == [False, False]
    assert twin.results("fruit") == (4, 0, 0)


@pytest.mark.parametrize(
    ("error", "calls"),
    [(Unavailable(), 2), (NotServing(), 1), (InternalError("a1"), 1), (Overloaded(0.01), 1)],
    ids=lambda value: getattr(value, "reason", ""),
)
def test_a_daemon_that_is_away_is_not_waited_for(
    twin: Twin, gate: FakeGate, error: BloomgateError, calls: int
) -> None:
    """Every check of an outage would sleep: it is maybe as soon as it is refused, whatever the budget."""
    fruit = twin.client(gate, check_timeout=3600.0, backoff=NEVER).filter("fruit")
    fruit.might_contain_many(["papaya"])
    del gate.calls[:]
    gate.fail_with(error)
    assert fruit.might_contain("papaya") is True
    assert len(gate.calls) == calls
    assert fruit.might_contain_many(["papaya", "peach"]) == [True, True]
    assert len(gate.calls) == 2 * calls
    assert twin.fallbacks("fruit", error.reason.lower()) == 3


def test_other_errors_of_a_check_are_not_tried_again(twin: Twin, gate: FakeGate) -> None:
    """A lookup is cheaper than a second attempt."""
    gate.fail_with(LimitExceeded("bytes_per_key", 3, 2))
    twin.client(gate).filter("fruit").might_contain("papaya")
    assert len(gate.calls) == 1


# -- bulk


def test_a_bulk_check_sends_digests_and_asks_for_spec_and_limits_once(twin: Twin, gate: FakeGate) -> None:
    """Raw keys stay here; what is needed first is asked once per client and filter."""
    gate.create("veg", 1000)
    client = twin.client(gate)
    fruit = client.filter("fruit")
    fruit.might_contain_many(["mango", "peach"])
    fruit.might_contain_many(["mango"])
    client.filter("veg").might_contain_many(["leek"])
    assert [call.method for call in gate.calls] == [
        "Stats",
        "HashSpec",
        "MightContain",
        "MightContain",
        "HashSpec",
        "MightContain",
    ]
    request = gate.calls[2].request
    assert (len(request.keys), len(request.digests)) == (0, 32)


def test_a_single_check_is_one_call(twin: Twin, gate: FakeGate) -> None:
    """No spec and no limits are needed to ask for one key."""
    twin.client(gate).filter("fruit").might_contain("mango")
    assert [call.method for call in gate.calls] == ["MightContain"]


def test_no_keys_are_no_call(twin: Twin, gate: FakeGate) -> None:
    """Empty in, empty out."""
    fruit = twin.client(gate).filter("fruit")
    assert fruit.might_contain_many([]) == []
    assert fruit.might_contain_many(iter(())) == []
    assert gate.calls == []


@pytest.mark.parametrize("keys", ["mango", b"mango"])
def test_one_key_is_not_many(twin: Twin, gate: FakeGate, keys: Any) -> None:
    """A str in place of a list would be asked letter by letter."""
    fruit = twin.client(gate).filter("fruit")
    with pytest.raises(TypeError):
        fruit.might_contain_many(keys)
    with pytest.raises(TypeError):
        fruit.add_many(keys)


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"keys_per_call": 4}, [4, 4, 2]),
        ({"bytes_per_call": 256 + 3 * 16}, [3, 3, 3, 1]),
        ({"bytes_per_call": 512, "keys_per_call": 7}, [7, 3]),
        ({"keys_per_call": 1}, [1] * 10),
    ],
)
def test_bulk_calls_are_split_to_the_daemons_limits(
    twin: Twin, limits: dict[str, int], sizes: list[int]
) -> None:
    """Each call fits both limits, and answers come in the order asked."""
    gate = FakeGate(**limits)
    gate.create("fruit", 1000, 1e-6, seed=7)
    fruit = twin.client(gate).filter("fruit")
    keys = [f"key-{i}" for i in range(10)]
    assert fruit.add_many(keys[::2]) == [True] * 5
    assert fruit.might_contain_many(keys) == [True, False] * 5
    sent = [len(call.request.digests) // 16 for call in gate.calls if call.method == "MightContain"]
    assert sent == sizes


def test_the_clients_own_limit_counts_too(twin: Twin, gate: FakeGate) -> None:
    """keys_per_call keeps one call, and one stretch of hashing, short."""
    twin.client(gate, keys_per_call=3).filter("fruit").might_contain_many(list("abcdefg"))
    sent = [len(call.request.digests) // 16 for call in gate.calls if call.method == "MightContain"]
    assert sent == [3, 3, 1]


def test_a_failed_chunk_is_maybe_alone(twin: Twin, gate: FakeGate) -> None:
    """The chunks before and after it keep their noes."""
    calls = []

    def reply(request: Any) -> Any:
        calls.append(request)
        keys = len(request.digests) // 16
        return MalformedReply() if len(calls) == 2 else pb.MightContainResponse(answers=[NO] * keys)

    fruit = twin.over(Replies(gate, reply), keys_per_call=2).filter("fruit")
    assert fruit.might_contain_many(list("abcde")) == [False, False, True, True, False]
    assert twin.results("fruit") == (3, 0, 2)


def test_a_chunk_that_hangs_leaves_the_others_their_time(twin: Twin, gate: FakeGate, clock: Clock) -> None:
    """The budget grows with the keys, and a chunk can use up its own share only."""
    timeouts = []

    class Slow(Replies):
        def unary(self, method: Any, request: Any, timeout: float) -> Any:
            if method.path.endswith("/MightContain"):
                timeouts.append(round(timeout, 6))
                if len(timeouts) == 1:
                    clock.now += timeout
                    raise Unavailable
            return super().unary(method, request, timeout)

    reply = pb.MightContainResponse(answers=[NO] * 10)
    options = {"check_timeout": 0.05, "check_timeout_per_key": 0.01, "keys_per_call": 10, "clock": clock}
    fruit = twin.over(Slow(gate, reply), **options).filter("fruit")
    answers = fruit.might_contain_many([str(i) for i in range(30)])
    assert answers == [True] * 10 + [False] * 20
    assert timeouts == [0.15, 0.15, 0.15]


def test_a_daemon_that_tells_no_limits_makes_a_bulk_check_maybe(twin: Twin, gate: FakeGate) -> None:
    """What is needed first can fail as well."""
    gate.fail_with(Unavailable(), method="Stats")
    fruit = twin.client(gate).filter("fruit")
    assert fruit.might_contain_many(["papaya", "peach"]) == [True, True]
    gate.recover()
    assert fruit.might_contain_many(["papaya", "peach"]) == [False, False]


def test_limits_that_shrank_split_the_call_again(twin: Twin, gate: FakeGate) -> None:
    """A daemon restarted with lower limits refuses once; the call goes on within the new ones."""
    fruit = twin.client(gate).filter("fruit")
    fruit.might_contain_many(["papaya"])
    gate._verbs.limits.keys_per_call = 2
    del gate.calls[:]
    assert fruit.might_contain_many(["papaya", "", "plum", "peach"]) == [False, True, False, False]
    assert [call.method for call in gate.calls] == ["MightContain", "Stats", "MightContain", "MightContain"]
    assert fruit.might_contain_many(["papaya", "peach", "plum"]) == [False] * 3
    assert twin.results("fruit") == (7, 0, 1)


def test_a_call_is_split_again_once(twin: Twin, gate: FakeGate) -> None:
    """Limits that cannot be kept to, or shrink at each call, are a fallback and no endless loop."""
    gate.fail_with(LimitExceeded("bytes_per_call", 3, 2), method="MightContain")
    fruit = twin.client(gate).filter("fruit")
    assert fruit.might_contain_many(["papaya", "plum"]) == [True, True]
    assert [call.method for call in gate.calls].count("MightContain") == 1
    gate._verbs.limits.keys_per_call = 1
    del gate.calls[:]
    assert fruit.might_contain_many(["papaya", "plum"]) == [True, True]
    assert [call.method for call in gate.calls].count("MightContain") == 3
    assert [call.method for call in gate.calls].count("Stats") == 1
    assert twin.fallbacks("fruit", "limit_exceeded") == 4


# -- hash specs


@pytest.mark.parametrize("scheme", list(HashScheme))
def test_digests_are_the_filters_own(twin: Twin, scheme: HashScheme) -> None:
    """What was added by the kernel under seed or secret is found by digest, whichever the scheme."""
    gate = FakeGate()
    gate.create("fruit", 1000, 1e-6, hash_scheme=scheme).add_many(["mango", "peach"])
    fruit = twin.client(gate).filter("fruit")
    assert fruit.might_contain_many(["mango", "papaya", "peach"]) == [True, False, True]


def test_a_stale_hash_id_reaches_nobody(twin: Twin, gate: FakeGate) -> None:
    """A filter dropped and created anew hashes otherwise: the client reads how, and asks again."""
    fruit = twin.client(gate, on_error="raise").filter("fruit")
    fruit.might_contain_many(["mango"])
    gate.reseed("fruit")
    del gate.calls[:]
    assert fruit.might_contain_many(["mango", "peach"]) == [False, False]
    assert [call.method for call in gate.calls] == ["MightContain", "HashSpec", "MightContain"]
    gate.reseed("fruit")
    assert fruit.add_many(["mango", "peach"]) == [True, True]
    assert fruit.might_contain_many(["mango", "peach"]) == [True, True]
    assert twin.results("fruit")[2] == 0


def test_a_hash_id_that_stays_stale_is_given_up(twin: Twin, gate: FakeGate) -> None:
    """Once more, not for ever."""
    gate.fail_with(StaleHashId("fruit"), method="MightContain")
    fruit = twin.client(gate).filter("fruit")
    assert fruit.might_contain_many(["papaya"]) == [True]
    assert [call.method for call in gate.calls].count("MightContain") == 2
    assert twin.fallbacks("fruit", "stale_hash_id") == 1


@pytest.mark.parametrize(
    "spec",
    [
        pb.HashSpecResponse(),
        pb.HashSpecResponse(hash_scheme=pb.HASH_SCHEME_MURMUR3_X64_128, seed=7, hash_id=1),
        pb.HashSpecResponse(hash_scheme=pb.HASH_SCHEME_BLAKE2B_128, secret=b"short", hash_id=1),
        pb.HashSpecResponse(hash_scheme=9, seed=7, hash_id=1),  # type: ignore[arg-type]
    ],
    ids=["empty", "another id", "short secret", "unknown scheme"],
)
def test_a_hash_spec_that_is_not_the_daemons_is_not_used(twin: Twin, gate: FakeGate, spec: Any) -> None:
    """Digests made the wrong way would all be answered "no": so the id must be that of the spec."""

    class OtherSpec(Replies):
        def unary(self, method: Any, request: Any, timeout: float) -> Any:
            if method.path.endswith("/HashSpec"):
                return spec
            return super().unary(method, request, timeout)

    reply = pb.MightContainResponse(answers=[NO])
    fruit = twin.over(OtherSpec(gate, reply)).filter("fruit")
    assert fruit.might_contain_many(["mango"]) == [True]
    assert twin.fallbacks("fruit", "malformed_reply") == 1


# -- logging and closing


def test_fallbacks_are_logged_now_and_then_and_without_keys(
    twin: Twin, gate: FakeGate, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in warn_interval, saying how many keys since the last; the next one comes after it."""
    gate.fail_with(Unavailable("connection refused"))
    fruit = twin.client(gate, clock=clock, warn_interval=10.0, check_timeout=0.001).filter("fruit")
    with caplog.at_level(logging.WARNING, "bloomgate"):
        for _ in range(5):
            fruit.might_contain("secret-key")
        clock.now += 10.0
        fruit.might_contain("secret-key")
    lines = [record.getMessage() for record in caplog.records if record.name == "bloomgate"]
    assert len(lines) == 2
    assert "1 keys" in lines[0]
    assert "fruit" in lines[0]
    assert "connection refused" in lines[0]
    assert "5 keys" in lines[1]
    assert "secret-key" not in "".join(lines)


def test_threads_that_fall_back_together_lose_no_count(caplog: pytest.LogCaptureFixture) -> None:
    """Each key is in one line, however many threads note at once."""

    class Racing(Clock):
        """Lets another thread in where the count is about to be read."""

        def __call__(self) -> float:
            time.sleep(0)
            self.now += 0.25
            return self.now

    log = FallbackLog("fruit", ClientOptions(clock=Racing(), warn_interval=1.0))

    def note() -> None:
        for _ in range(500):
            log.note("unavailable", Unavailable(), 1)

    with caplog.at_level(logging.WARNING, "bloomgate"):
        threads = [threading.Thread(target=note) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    said = sum(int(re.findall(r"(\d+) keys", record.getMessage())[0]) for record in caplog.records)
    assert said + log._keys == 4000


def test_the_text_of_a_foreign_exception_is_not_logged(
    twin: Twin, gate: FakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    """It may hold a key."""
    fruit = twin.over(Replies(gate, RuntimeError("bad value secret-key"))).filter("fruit")
    with caplog.at_level(logging.WARNING, "bloomgate"):
        fruit.might_contain("secret-key")
    assert "RuntimeError" in caplog.text
    assert "secret-key" not in caplog.text


def test_a_closed_client_answers_maybe_and_adds_nothing(twin: Twin, gate: FakeGate) -> None:
    """Checks go on being safe; everything else says that the client is closed."""
    client = twin.client(gate)
    fruit = client.filter("fruit")
    client.close()
    assert fruit.might_contain("papaya") is True
    with pytest.raises(ClientClosed):
        fruit.add("papaya")
    assert twin.fallbacks("fruit", "client_closed") == 1


def test_a_filter_has_one_handle(twin: Twin, gate: FakeGate) -> None:
    """So that what was read about it once is not read again by the next caller."""
    client = twin.client(gate)
    for _ in range(3):
        client.filter("fruit").might_contain_many(["mango"])
    assert [call.method for call in gate.calls].count("HashSpec") == 1


@pytest.mark.parametrize("name", ["", "-fruit", "a b", "a/b", "x" * 129, "früh", None, "fruit\n"])
def test_a_name_that_no_filter_can_have_is_refused(twin: Twin, gate: FakeGate, name: Any) -> None:
    """Where the handle is made, not as a filter that is never found."""
    with pytest.raises(BloomgateError, match="filter"):
        twin.client(gate).filter(name)


def test_answers_are_the_kernels(twin: Twin, gate: FakeGate) -> None:
    """Through the client a filter answers exactly what the same filter answers in process."""
    kernel = BloomFilter(50, 0.3, seed=3, on_full="degrade")
    gate.create("small", 50, 0.3, seed=3, on_full="degrade")
    small = twin.client(gate).filter("small")
    keys = [f"key-{i}" for i in range(50)]
    asked = [f"key-{i}" for i in range(0, 400, 3)]
    assert small.add_many(keys) == kernel.add_many(keys)
    assert small.might_contain_many(asked) == kernel.might_contain_many(asked)
    assert [small.might_contain(key) for key in asked] == kernel.might_contain_many(asked)
