"""A lookup behind a filter: skipped on a definite no, and its outcome told to the daemon.

An outcome is what the authority said after a hit. A check that fell back was no hit, so what its lookup finds
is not counted: it would make the observed error rate one of outages.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, ParamSpec, TypeVar

from bloomgate.calls import FilterCalls
from bloomgate.chunks import listed
from bloomgate.filters import Key, ParameterError
from bloomgate.options import ClientOptions
from bloomgate.outcomes import AsyncOutcomes, Outcomes
from bloomgate.replies import Result
from bloomgate.steps import run, run_async
from bloomgate.transport import AsyncTransport, Transport

P = ParamSpec("P")
V = TypeVar("V")

_log = logging.getLogger("bloomgate")

# Members of an enum take a while to look up on it.
_SKIP = Result.SKIP


class _Judgement(Generic[V]):
    """What both guards decide: whether to look up, and what an outcome is."""

    def __init__(
        self,
        calls: FilterCalls,
        outcomes: Outcomes | AsyncOutcomes,
        options: ClientOptions,
        absent: V | None,
        audit: float,
    ) -> None:
        if isinstance(audit, bool) or not isinstance(audit, int | float) or not 0.0 <= audit <= 1.0:
            raise ParameterError("audit", audit, "a number from 0 to 1")
        self._name = calls.name
        self._outcomes = outcomes
        self._random = options.random
        self._absent = absent
        self._audit = audit

    def wants_lookup(self, result: Result) -> bool:
        """Whether to ask the authority: unless it is a definite no that is not audited."""
        return result is not _SKIP or (self._audit > 0.0 and self._random() < self._audit)

    def note(self, result: Result, value: V | None) -> None:
        """Count what the authority said after ``result``."""
        if result is Result.FALLBACK:
            return
        try:
            found = value is not self._absent and bool(value != self._absent)
        except Exception:
            # A value that cannot be compared is nobody's outcome, and the caller's all the same.
            return
        if result is Result.HIT:
            self._outcomes.add((1, 0, 0) if found else (0, 1, 0))
        elif found:
            self._outcomes.add((0, 0, 1))
            _log.error("filter %s answered a definite no for a key that the authority holds", self._name)


class Guard(Generic[V]):
    """``guard(key)`` is ``lookup(key)``, or ``absent`` without asking where the filter says no."""

    def __init__(
        self,
        calls: FilterCalls,
        transport: Transport,
        outcomes: Outcomes,
        options: ClientOptions,
        lookup: Callable[..., V],
        absent: V | None = None,
        audit: float = 0.0,
        lookup_many: Callable[[list[Key]], Sequence[V | None]] | None = None,
    ) -> None:
        self._calls = calls
        self._transport = transport
        self._outcomes = outcomes
        self._lookup = lookup
        self._lookup_many = lookup_many
        self._absent = absent
        self._judgement = _Judgement(calls, outcomes, options, absent, audit)

    def __call__(self, key: Key) -> V | None:
        """Look ``key`` up unless it is certainly not there. Raises what ``lookup`` raises."""
        result = self._check(key)
        if self._judgement.wants_lookup(result):
            return self._looked_up(result, self._lookup(key))
        self._outcomes.report_due()
        return self._absent

    def around(self, key: Key, lookup: Callable[[], V]) -> V | None:
        """The same with a lookup that knows its key."""
        result = self._check(key)
        if self._judgement.wants_lookup(result):
            return self._looked_up(result, lookup())
        self._outcomes.report_due()
        return self._absent

    def _check(self, key: Key) -> Result:
        # Without a generator where a copy answers, which takes a fraction of its time.
        return self._calls.check_here(key) or run(self._calls.check(key), self._transport)

    def _looked_up(self, result: Result, value: V) -> V:
        self._judgement.note(result, value)
        self._outcomes.report_due()
        return value

    def many(
        self,
        keys: Iterable[Key],
        lookup_many: Callable[[list[Key]], Sequence[V | None]] | None = None,
    ) -> list[V | None]:
        """Look many keys up, in order: one bulk check, and lookups for those that may be there alone.

        ``lookup_many``, here or when the guard was made, gets those keys in one call and answers each.
        """
        keys = listed(keys)
        results = run(self._calls.check_many(keys), self._transport)
        places = [place for place, result in enumerate(results) if self._judgement.wants_lookup(result)]
        values: list[V | None] = [self._absent] * len(keys)
        fetch = lookup_many or self._lookup_many
        fetched = None
        if fetch is not None and places:
            fetched = _each_answered(fetch([keys[place] for place in places]), len(places))
        for i, place in enumerate(places):
            values[place] = self._lookup(keys[place]) if fetched is None else fetched[i]
            self._judgement.note(results[place], values[place])
        self._outcomes.report_due()
        return values

    def flush(self) -> None:
        """Report the filter's outcomes, waiting ``report_timeout`` at most. Never raises."""
        self._outcomes.flush()

    close = flush

    def __enter__(self) -> Guard[V]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGuard(Generic[V]):
    """``await guard(key)`` is that of ``lookup(key)``, or ``absent`` unasked where the filter says no."""

    def __init__(
        self,
        calls: FilterCalls,
        transport: AsyncTransport,
        outcomes: AsyncOutcomes,
        options: ClientOptions,
        lookup: Callable[..., Awaitable[V]],
        absent: V | None = None,
        audit: float = 0.0,
        lookup_many: Callable[[list[Key]], Awaitable[Sequence[V | None]]] | None = None,
    ) -> None:
        self._calls = calls
        self._transport = transport
        self._outcomes = outcomes
        self._lookup = lookup
        self._lookup_many = lookup_many
        self._absent = absent
        self._judgement = _Judgement(calls, outcomes, options, absent, audit)

    async def __call__(self, key: Key) -> V | None:
        """Look ``key`` up unless it is certainly not there. Raises what ``lookup`` raises."""
        return await self.around(key, lambda: self._lookup(key))

    async def around(self, key: Key, lookup: Callable[[], Awaitable[V]]) -> V | None:
        """The same with a lookup that knows its key."""
        result = self._calls.check_here(key)
        if result is None:
            result = await run_async(self._calls.check(key), self._transport)
        value = self._absent
        if self._judgement.wants_lookup(result):
            value = await lookup()
            self._judgement.note(result, value)
        self._outcomes.report_due()
        return value

    async def many(
        self,
        keys: Iterable[Key],
        lookup_many: Callable[[list[Key]], Awaitable[Sequence[V | None]]] | None = None,
    ) -> list[V | None]:
        """Look many keys up, in order: one bulk check, and lookups for those that may be there alone.

        ``lookup_many``, here or when the guard was made, gets those keys in one call and answers each. The
        lookups of single keys follow one another: run them together in a ``lookup_many``.
        """
        keys = listed(keys)
        results = await run_async(self._calls.check_many(keys), self._transport)
        places = [place for place, result in enumerate(results) if self._judgement.wants_lookup(result)]
        values: list[V | None] = [self._absent] * len(keys)
        fetch = lookup_many or self._lookup_many
        fetched = None
        if fetch is not None and places:
            fetched = _each_answered(await fetch([keys[place] for place in places]), len(places))
        for i, place in enumerate(places):
            values[place] = await self._lookup(keys[place]) if fetched is None else fetched[i]
            self._judgement.note(results[place], values[place])
        self._outcomes.report_due()
        return values

    async def flush(self) -> None:
        """Report the filter's outcomes, waiting ``report_timeout`` at most. Never raises."""
        await self._outcomes.flush()

    close = flush

    async def __aenter__(self) -> AsyncGuard[V]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def guarded(
    make_guard: Callable[[Callable[P, V]], Guard[V]], key_of: Callable[P, Key] | None
) -> Callable[[Callable[P, V]], Callable[P, V | None]]:
    """The decorator that puts a guard around a function."""

    def decorate(function: Callable[P, V]) -> Callable[P, V | None]:
        key: Callable[..., Key] = key_of or first_argument_of(function)
        guard = make_guard(function)

        @functools.wraps(function)
        def guarded_function(*args: P.args, **kwargs: P.kwargs) -> V | None:
            return guard.around(key(*args, **kwargs), lambda: function(*args, **kwargs))

        guarded_function.guard = guard  # type: ignore[attr-defined]
        return guarded_function

    return decorate


def async_guarded(
    make_guard: Callable[[Callable[P, Awaitable[V]]], AsyncGuard[V]], key_of: Callable[P, Key] | None
) -> Callable[[Callable[P, Awaitable[V]]], Callable[P, Awaitable[V | None]]]:
    """The decorator that puts a guard around a coroutine function."""

    def decorate(function: Callable[P, Awaitable[V]]) -> Callable[P, Awaitable[V | None]]:
        key: Callable[..., Key] = key_of or first_argument_of(function)
        guard = make_guard(function)

        @functools.wraps(function)
        async def guarded_function(*args: P.args, **kwargs: P.kwargs) -> V | None:
            return await guard.around(key(*args, **kwargs), lambda: function(*args, **kwargs))

        guarded_function.guard = guard  # type: ignore[attr-defined]
        return guarded_function

    return decorate


def first_argument_of(function: Callable[..., object]) -> Callable[..., Key]:
    """What finds the key of a guarded function that is not told otherwise: its first parameter's argument.

    However it is passed: by place, by name in any order, or as the default. Raises TypeError if there is no
    such parameter or it is ``self`` or ``cls``; what is found raises TypeError for arguments that the
    function does not take.
    """
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise TypeError(f"say which argument is the key, with key=...: {error}") from None
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD):
        raise TypeError("say which argument is the key, with key=...: the function has no first parameter")
    if first.name in ("self", "cls"):
        raise TypeError(f"say which argument is the key, with key=...: the first is {first.name}")
    name = first.name

    def first_argument(*args: object, **kwargs: object) -> Key:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key: Key = bound.arguments[name]
        return key

    return first_argument


def _each_answered(values: Sequence[V | None], keys: int) -> Sequence[V | None]:
    if len(values) != keys:
        raise ValueError(f"lookup_many answered {len(values)} of {keys} keys")
    return values
