"""The verbs of one filter: what is sent, what a reply means, and what a failure answers.

Both clients run this code (see ``steps``). Two rules stand above everything else here:

- A check that failed, whatever the failure, is a fallback: maybe. Only a reply with exactly one answer per
  key, each of them a known one, is believed at all, so that an empty or mis-decoded reply skips no lookup.
- An add returns only when the daemon has acknowledged every key; otherwise it raises. A lost add would be a
  wrong "no" later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from bloomgate import transport
from bloomgate.batching import Batches, Check, Outcome
from bloomgate.chunks import KEY_ERRORS, Chunks, encode_valid, listed
from bloomgate.errors import (
    BloomgateError,
    InvalidRequest,
    LimitExceeded,
    NotAllowed,
    NotAuthenticated,
    StaleHashId,
)
from bloomgate.fallbacks import FallbackLog
from bloomgate.filters import DIGEST_BYTES, Hasher, Key, ParameterError, encode_key
from bloomgate.replica import Replica
from bloomgate.replies import Result, read_answers, read_hash_spec, read_was_new
from bloomgate.session import Session
from bloomgate.stats import FilterStats, read_stats
from bloomgate.steps import Deadline, Retry, Steps
from bloomgate.transport import Method, R
from bloomgate.v1 import filters_pb2 as pb

D = TypeVar("D", pb.AddRequest, pb.MightContainRequest)

# What a request of digests holds besides them: the filter's name, the hash id, and tags.
_REQUEST_BYTES = 256
# Of the keys of checks that travel together, where the daemon's own limit is not known.
_BYTES_PER_CALL = 1 << 20


class FilterCalls:
    """The verbs of one filter as steps."""

    def __init__(self, session: Session, name: str, local: Replica | None = None) -> None:
        """``local``: a copy that is asked first."""
        self.name = name
        self._local = local
        self._session = session
        self._options = session.options
        self._clock = session.options.clock
        self._metrics = session.metrics.of_filter(name)
        self._hasher: Hasher | None = None
        self._by_key = False
        """Whether keys are sent as they are: the daemon refused this caller the hash spec."""
        self._fallbacks = FallbackLog(name, session.options)
        self._batches = Batches(self._ask_together, self._limits_of_a_call)
        self.count_lost_outcomes = self._metrics.count_lost_outcomes

    # -- checks

    def check_here(self, key: Key) -> Result | None:
        """What a copy in this process says of one key; None where there is none that is trusted."""
        if self._local is None:
            return None
        try:
            return self._local.check(key)
        except Exception as error:
            return self._fall_back(error, 1)[0]

    def check(self, key: Key) -> Steps[Result]:
        """Ask for one key. Raises only where ``on_error`` says so."""
        here = self.check_here(key)
        if here is not None:
            return here
        started = self._clock()
        try:
            deadline = Deadline(self._clock, self._options.check_timeout)
            outcome: Outcome = yield Check(self._batches, encode_key(key), deadline)
            if isinstance(outcome, Exception):
                raise outcome
            result, degraded = outcome
        except Exception as error:
            result = self._fall_back(error, 1)[0]
        else:
            self._count([result], degraded)
        self._metrics.observe_seconds(self._clock() - started)
        return result

    def _ask_together(self, encoded: Sequence[bytes], deadline: Deadline) -> Steps[list[Outcome]]:
        """Ask for the keys of several callers. What fails fails for each; what one key alone is refused for,
        or too many of them, is found by halving."""
        try:
            request = pb.MightContainRequest(filter=self.name, keys=encoded)
            reply = yield from self._session.checks.call(transport.MIGHT_CONTAIN, request, deadline)
            return [(result, reply.degraded) for result in read_answers(reply, len(encoded))]
        except (LimitExceeded, InvalidRequest) as error:
            if len(encoded) == 1:
                return [error]
        except Exception as error:
            return [error] * len(encoded)
        half = len(encoded) // 2
        first = yield from self._ask_together(encoded[:half], deadline)
        return first + (yield from self._ask_together(encoded[half:], deadline))

    def _limits_of_a_call(self) -> tuple[int, int]:
        limits = self._session.limits or pb.Limits()
        most = self._options.keys_per_call
        return min(most, limits.keys_per_call or most), limits.bytes_per_call or _BYTES_PER_CALL

    def check_many(self, keys: Iterable[Key]) -> Steps[list[Result]]:
        """Ask for many keys. A chunk that fails, and a key that cannot be one, falls back alone."""
        keys = listed(keys)
        if not keys:
            return []
        if self._local is not None:
            try:
                answers = self._local.check_many(keys)
            except KEY_ERRORS:
                # The one that is no key falls back alone, in the remote way.
                answers = None
            if answers is not None:
                return answers
        started = self._clock()
        deadline = Deadline(self._clock, self._check_budget(len(keys)))
        results: list[Result] = []
        try:
            chunks = Chunks(keys, (yield from self._keys_per_call(keys, self._session.checks, deadline)))
        except Exception as error:
            results = self._fall_back(error, len(keys))
        else:
            for chunk in chunks:
                encoded, invalid = encode_valid(chunk)
                # A share of the budget: a chunk that hangs leaves the others theirs.
                share = deadline.within(self._check_budget(len(chunk)))
                try:
                    try:
                        answers = yield from self._check_chunk(encoded, share)
                    except LimitExceeded as error:
                        yield from self._split_again(chunks, keys, error, self._session.checks, share)
                        continue
                except Exception as error:
                    answers = self._fall_back(error, len(encoded))
                for place, wrong in invalid:
                    answers[place:place] = self._fall_back(wrong, 1)
                results += answers
        self._metrics.observe_seconds(self._clock() - started)
        return results

    def _check_budget(self, keys: int) -> float:
        return self._options.check_timeout + self._options.check_timeout_per_key * keys

    def _check_chunk(self, encoded: Sequence[bytes], deadline: Deadline) -> Steps[list[Result]]:
        if not encoded:
            return []
        reply = yield from self._send(transport.MIGHT_CONTAIN, encoded, self._session.checks, deadline)
        results = read_answers(reply, len(encoded))
        self._count(results, reply.degraded)
        return results

    def _count(self, results: list[Result], degraded: bool) -> None:
        if degraded:
            self._metrics.count_fallback("degraded", len(results))
            return
        skips = results.count(Result.SKIP)
        if skips:
            self._metrics.count(Result.SKIP, skips)
        if skips < len(results):
            self._metrics.count(Result.HIT, len(results) - skips)

    def _fall_back(self, error: Exception, keys: int) -> list[Result]:
        """What ``keys`` checks answer that failed with ``error``."""
        if isinstance(error, BloomgateError):
            reason = error.reason.lower()
        else:
            reason = "invalid_key" if isinstance(error, KEY_ERRORS) else "unexpected"
        self._metrics.count_fallback(reason, keys)
        if self._options.on_error == "raise":
            raise error
        self._fallbacks.note(reason, error, keys)
        return [Result.FALLBACK] * keys

    # -- adds

    def add(self, key: Key) -> Steps[bool]:
        """Add one key. Returns whether it was certainly new; raises unless it is acknowledged."""
        request = pb.AddRequest(filter=self.name, keys=(encode_key(key),))
        deadline = Deadline(self._clock, self._add_budget(1))
        reply = yield from self._session.adds.call(transport.ADD, request, deadline)
        return read_was_new(reply, 1)[0]

    def add_many(self, keys: Iterable[Key]) -> Steps[list[bool]]:
        """Add many keys, in as many calls as they take; every key is judged before the first one.

        Where a later call fails, the keys of the earlier ones are in. Adding them again does no harm.
        """
        encoded = [encode_key(key) for key in listed(keys)]
        if not encoded:
            return []
        deadline = Deadline(self._clock, self._add_budget(len(encoded)))
        adds = self._session.adds
        yield from self._check_key_bytes(max(map(len, encoded)), adds, deadline)
        chunks = Chunks(encoded, (yield from self._keys_per_call(encoded, adds, deadline)))
        was_new: list[bool] = []
        for chunk in chunks:
            try:
                reply = yield from self._send(transport.ADD, chunk, adds, deadline)
            except LimitExceeded as error:
                yield from self._split_again(chunks, encoded, error, adds, deadline)
            else:
                was_new += read_was_new(reply, len(chunk))
        return was_new

    def _add_budget(self, keys: int) -> float:
        return self._options.add_timeout + self._options.add_timeout_per_key * keys

    def _check_key_bytes(self, longest: int, retry: Retry, deadline: Deadline) -> Steps[None]:
        """Refuse what the daemon would refuse if it saw more of a key than its digest."""
        known = self._session.limits
        if known is None or 0 < known.bytes_per_key < longest:
            # Known limits may be those of a daemon that was restarted with others since.
            known = yield from self._read_limits(retry, deadline)
        if 0 < known.bytes_per_key < longest:
            raise LimitExceeded("bytes_per_key", longest, known.bytes_per_key)

    # -- the rest

    def stats(self) -> Steps[FilterStats]:
        """What the filter is, how full it is and what it saved."""
        reply = yield from self._read_stats(self._session.reads, self._session.admin_deadline())
        return read_stats(reply.filter)

    def outcomes_request(self, found: int, not_found: int, false_no: int) -> pb.ReportOutcomesRequest:
        """A report of what the authority said. Raises ParameterError for a negative count."""
        for field, count in (("found", found), ("not_found", not_found), ("false_no", false_no)):
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**64:
                raise ParameterError(field, count, "a whole number from 0")
        return pb.ReportOutcomesRequest(filter=self.name, found=found, not_found=not_found, false_no=false_no)

    def report_outcomes(self, found: int, not_found: int, false_no: int) -> Steps[None]:
        """Tell the daemon what the authority said. Not tried again: counts could be counted twice."""
        request = self.outcomes_request(found, not_found, false_no)
        deadline = Deadline(self._clock, self._options.report_timeout)
        yield from self._session.once.call(transport.REPORT_OUTCOMES, request, deadline)

    # -- what bulk calls need to know first

    def _read_stats(self, retry: Retry, deadline: Deadline) -> Steps[pb.StatsResponse]:
        reply = yield from retry.call(transport.STATS, pb.StatsRequest(filter=self.name), deadline)
        self._session.limits = reply.limits
        return reply

    def _read_limits(
        self, retry: Retry, deadline: Deadline, refused: LimitExceeded | None = None
    ) -> Steps[pb.Limits]:
        """The daemon's limits; where this caller may not read them, what the last refusal told of them."""
        try:
            return (yield from self._read_stats(retry, deadline)).limits
        except NotAuthenticated:
            raise
        except NotAllowed:
            limits = pb.Limits()
            if refused is not None and refused.limit in limits.DESCRIPTOR.fields_by_name:
                setattr(limits, refused.limit, refused.allowed)
            self._session.limits = limits
            return limits

    def _keys_per_call(self, keys: Sequence[Key], retry: Retry, deadline: Deadline) -> Steps[int]:
        """How many of these keys fit one call. A limit of 0 is one that the daemon did not name."""
        limits = self._session.limits
        if limits is None:
            limits = yield from self._read_limits(retry, deadline)
        yield from self._learn_hasher(retry, deadline)
        size = self._options.keys_per_call
        if limits.keys_per_call:
            size = min(size, limits.keys_per_call)
        if limits.bytes_per_call:
            each = max(map(_most_bytes, keys)) if self._by_key else DIGEST_BYTES
            size = min(size, (limits.bytes_per_call - _REQUEST_BYTES) // max(1, each))
        return max(1, size)

    def _split_again(
        self,
        chunks: Chunks[Any],
        keys: Sequence[Key],
        error: LimitExceeded,
        retry: Retry,
        deadline: Deadline,
    ) -> Steps[None]:
        """Take a refused chunk back and go on in smaller ones; raises ``error`` if there are no such.

        The daemon may allow less than it did when its limits were read: it was restarted since.
        """
        self._session.limits = None
        if chunks.taken_back:
            raise error
        yield from self._read_limits(retry, deadline, error)
        if not chunks.take_back((yield from self._keys_per_call(keys, retry, deadline))):
            raise error

    def _learn_hasher(self, retry: Retry, deadline: Deadline) -> Steps[None]:
        """Read how the filter hashes, or find that this caller must not know and sends keys."""
        if self._hasher is None and not self._by_key:
            try:
                yield from self._read_hasher(retry, deadline)
            except NotAuthenticated:
                raise
            except NotAllowed:
                self._by_key = True

    def _read_hasher(self, retry: Retry, deadline: Deadline) -> Steps[Hasher]:
        if self._hasher is None:
            request = pb.HashSpecRequest(filter=self.name)
            reply = yield from retry.call(transport.HASH_SPEC, request, deadline)
            self._hasher = read_hash_spec(reply)
        return self._hasher

    def _send(
        self, method: Method[D, R], encoded: Sequence[bytes], retry: Retry, deadline: Deadline
    ) -> Steps[R]:
        """Hash keys and send their digests; if the filter hashes otherwise by now, read how and send anew."""
        if self._by_key:
            return (yield from retry.call(method, method.request(filter=self.name, keys=encoded), deadline))
        stale_before = False
        while True:
            hasher = yield from self._read_hasher(retry, deadline)
            digests = hasher.digests(encoded)
            request = method.request(filter=self.name, digests=digests, hash_id=hasher.hash_id)
            try:
                reply: R = yield from retry.call(method, request, deadline)
            except StaleHashId:
                # Another call may have read it anew meanwhile: what it read stays.
                if self._hasher is hasher:
                    self._hasher = None
                if stale_before:
                    raise
                stale_before = True
            else:
                return reply


def _most_bytes(key: Key) -> int:
    """What a key takes in a request at most: a character is four bytes of UTF-8 at most, a tag and length
    six. A value that is no key takes nothing."""
    return len(key) * (4 if isinstance(key, str) else 1) + 6 if isinstance(key, str | bytes) else 0
