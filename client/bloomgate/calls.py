"""The verbs of one filter: what is sent, what a reply means, and what a failure answers.

Both clients run this code (see ``steps``). Two rules stand above everything else here:

- A check that failed, whatever the failure, is a fallback: maybe. Only a reply with exactly one answer per
  key, each of them a known one, is believed at all, so that an empty or mis-decoded reply skips no lookup.
- An add returns only when the daemon has acknowledged every key; otherwise it raises. A lost add would be a
  wrong "no" later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from bloomgate import transport
from bloomgate.errors import BloomgateError, LimitExceeded, StaleHashId
from bloomgate.filters import DIGEST_BYTES, Hasher, InvalidKey, Key, ParameterError, encode_key
from bloomgate.options import ClientOptions
from bloomgate.processes import OfProcess
from bloomgate.replies import Result, read_answers, read_hash_spec, read_was_new
from bloomgate.session import Session
from bloomgate.stats import FilterStats, read_stats
from bloomgate.steps import Deadline, Retry, Steps, T
from bloomgate.transport import Method, R
from bloomgate.v1 import filters_pb2 as pb

D = TypeVar("D", pb.AddRequest, pb.MightContainRequest)

_log = logging.getLogger("bloomgate")

# What a request of digests holds besides them: the filter's name, the hash id, and tags.
_REQUEST_BYTES = 256
_KEY_ERRORS = (InvalidKey, TypeError)


class FilterCalls:
    """The verbs of one filter as steps."""

    def __init__(self, session: Session, name: str) -> None:
        self.name = name
        self._session = session
        self._options = session.options
        self._clock = session.options.clock
        self._metrics = session.metrics.of_filter(name)
        self._hasher: Hasher | None = None
        self._fallbacks = _FallbackLog(name, session.options)
        self.count_lost_outcomes = self._metrics.count_lost_outcomes

    # -- checks

    def check(self, key: Key) -> Steps[Result]:
        """Ask for one key. Raises only where ``on_error`` says so."""
        started = self._clock()
        try:
            request = pb.MightContainRequest(filter=self.name, keys=(encode_key(key),))
            deadline = Deadline(self._clock, self._options.check_timeout)
            reply = yield from self._session.checks.call(transport.MIGHT_CONTAIN, request, deadline)
            results = read_answers(reply, 1)
        except Exception as error:
            results = self._fall_back(error, 1)
        else:
            self._count(results, reply.degraded)
        self._metrics.observe_seconds(self._clock() - started)
        return results[0]

    def check_many(self, keys: Iterable[Key]) -> Steps[list[Result]]:
        """Ask for many keys. A chunk that fails, and a key that cannot be one, falls back alone."""
        keys = listed(keys)
        if not keys:
            return []
        started = self._clock()
        deadline = Deadline(self._clock, self._check_budget(len(keys)))
        results: list[Result] = []
        try:
            chunks = _Chunks(keys, (yield from self._keys_per_call(self._session.checks, deadline)))
        except Exception as error:
            results = self._fall_back(error, len(keys))
        else:
            for chunk in chunks:
                encoded, invalid = _encode_valid(chunk)
                # A share of the budget: a chunk that hangs leaves the others theirs.
                share = deadline.within(self._check_budget(len(chunk)))
                try:
                    try:
                        answers = yield from self._check_chunk(encoded, share)
                    except LimitExceeded as error:
                        yield from self._split_again(chunks, error, self._session.checks, share)
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
        reply = yield from self._send_digests(
            transport.MIGHT_CONTAIN, encoded, self._session.checks, deadline
        )
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
            reason = "invalid_key" if isinstance(error, _KEY_ERRORS) else "unexpected"
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
        chunks = _Chunks(encoded, (yield from self._keys_per_call(adds, deadline)))
        was_new: list[bool] = []
        for chunk in chunks:
            try:
                reply = yield from self._send_digests(transport.ADD, chunk, adds, deadline)
            except LimitExceeded as error:
                yield from self._split_again(chunks, error, adds, deadline)
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
            known = (yield from self._read_stats(retry, deadline)).limits
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

    def _keys_per_call(self, retry: Retry, deadline: Deadline) -> Steps[int]:
        """How many digests fit one call. A limit of 0 is one that the daemon did not name."""
        limits = self._session.limits
        if limits is None:
            limits = (yield from self._read_stats(retry, deadline)).limits
        size = self._options.keys_per_call
        if limits.keys_per_call:
            size = min(size, limits.keys_per_call)
        if limits.bytes_per_call:
            size = min(size, (limits.bytes_per_call - _REQUEST_BYTES) // DIGEST_BYTES)
        return max(1, size)

    def _split_again(
        self, chunks: _Chunks[Any], error: LimitExceeded, retry: Retry, deadline: Deadline
    ) -> Steps[None]:
        """Take a refused chunk back and go on in smaller ones; raises ``error`` if there are no such.

        The daemon may allow less than it did when its limits were read: it was restarted since.
        """
        self._session.limits = None
        if chunks.taken_back or not chunks.take_back((yield from self._keys_per_call(retry, deadline))):
            raise error

    def _read_hasher(self, retry: Retry, deadline: Deadline) -> Steps[Hasher]:
        if self._hasher is None:
            request = pb.HashSpecRequest(filter=self.name)
            reply = yield from retry.call(transport.HASH_SPEC, request, deadline)
            self._hasher = read_hash_spec(reply)
        return self._hasher

    def _send_digests(
        self, method: Method[D, R], encoded: Sequence[bytes], retry: Retry, deadline: Deadline
    ) -> Steps[R]:
        """Hash keys and send their digests; if the filter hashes otherwise by now, read how and send anew."""
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


def listed(keys: Iterable[Key]) -> list[Key]:
    if isinstance(keys, str | bytes):
        raise TypeError("keys is an iterable of keys, not one key")
    return list(keys)


class _Chunks(Generic[T]):
    """Keys in parts of ``size``, the last of which can be taken back once, to be cut smaller."""

    def __init__(self, keys: list[T], size: int) -> None:
        self._keys = keys
        self._size = size
        self._start = self._next = 0
        self.taken_back = False

    def __iter__(self) -> Iterator[list[T]]:
        while self._next < len(self._keys):
            self._start, self._next = self._next, self._next + self._size
            yield self._keys[self._start : self._next]

    def take_back(self, size: int) -> bool:
        """Go on before the last part, in parts of ``size``. False: that is no smaller than it was."""
        if size >= min(self._next, len(self._keys)) - self._start:
            return False
        self.taken_back = True
        self._next, self._size = self._start, size
        return True


def _encode_valid(chunk: Sequence[Key]) -> tuple[list[bytes], list[tuple[int, Exception]]]:
    """The chunk's keys encoded, and the place and error of each that cannot be a key."""
    encoded: list[bytes] = []
    invalid: list[tuple[int, Exception]] = []
    for place, key in enumerate(chunk):
        try:
            encoded.append(encode_key(key))
        except _KEY_ERRORS as error:
            invalid.append((place, error))
    return encoded, invalid


class _FallbackLog:
    """Says that a filter's checks fall back: at most once in a while, and never with a key."""

    def __init__(self, name: str, options: ClientOptions) -> None:
        self._name = name
        self._clock = options.clock
        self._interval = options.warn_interval
        self._next = float("-inf")
        self._keys = 0
        # A process's own: a child would wait for ever for one that its parent held at the fork.
        self._lock = OfProcess(threading.Lock)

    def note(self, reason: str, error: Exception, keys: int) -> None:
        """Note ``keys`` checks that fell back."""
        now = self._clock()
        with self._lock.get():
            self._keys += keys
            if now < self._next:
                return
            self._next = now + self._interval
            keys, self._keys = self._keys, 0
        # The text of an error that is not ours may hold a key.
        detail = str(error) if isinstance(error, BloomgateError) else type(error).__name__
        _log.warning(
            "checks of filter %s answered maybe without an answer from the daemon: %d keys, last %s (%s)",
            self._name,
            keys,
            reason,
            detail,
        )
