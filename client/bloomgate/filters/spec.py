"""The frozen parameters of a filter, and the bodies they call for."""

from __future__ import annotations

import enum
import secrets
from contextlib import suppress
from dataclasses import dataclass

from bloomgate.filters import sizing
from bloomgate.filters.errors import ParameterError
from bloomgate.filters.hashing import MAX_SEED, SECRET_BYTES, Hasher, HashScheme
from bloomgate.filters.sizing import BodySpec

MAX_KEY_FORMAT_BYTES = 256
# The first body of a growing filter takes this share of the asked error rate; each next body takes half of
# what is left, so that all of them together never pass it.
FIRST_BODY_SHARE = 0.8


class Kind(enum.IntEnum):
    """Which structure a filter is. Numbers are stored: append, never change."""

    BLOOM = 1


class OnFull(enum.IntEnum):
    """What an add does once the capacity is reached. Numbers are stored: append, never change."""

    GROW = 1
    """Add a body of twice the capacity; the error rate asked for holds over all bodies."""
    REJECT = 2
    """Refuse a batch whose certainly new keys would pass the capacity, as a whole."""
    DEGRADE = 3
    """Accept; the error rate rises above the one asked for."""

    @classmethod
    def parse(cls, value: OnFull | str) -> OnFull:
        """Return the policy named by ``value``, in either case, or raise ParameterError."""
        if isinstance(value, OnFull):
            return value
        try:
            return cls[str(value).upper()]
        except KeyError:
            raise ParameterError("on_full", value, "one of grow, reject, degrade") from None


@dataclass(frozen=True, slots=True)
class FilterSpec:
    """The frozen parameters of a filter.

    ``capacity`` keys at ``error_rate``, ``first_body`` what they were sized to, ``key_format`` free text that
    says how callers make keys (at most 256 bytes of UTF-8).
    """

    capacity: int
    error_rate: float
    on_full: OnFull
    hasher: Hasher
    first_body: BodySpec
    key_format: str = ""
    kind: Kind = Kind.BLOOM

    @classmethod
    def plan(
        cls,
        capacity: int,
        error_rate: float = 0.01,
        *,
        on_full: OnFull | str = OnFull.GROW,
        hash_scheme: HashScheme = HashScheme.MURMUR3_X64_128,
        seed: int | bytes | None = None,
        key_format: str = "",
    ) -> FilterSpec:
        """Judge every parameter, size the first body, draw a random seed where none is given.

        Raises ParameterError before anything is allocated.
        """
        capacity = sizing.check_capacity(capacity)
        error_rate = sizing.check_error_rate(error_rate)
        policy = OnFull.parse(on_full)
        share = FIRST_BODY_SHARE if policy is OnFull.GROW else 1.0
        return cls(
            capacity=capacity,
            error_rate=error_rate,
            on_full=policy,
            hasher=make_hasher(hash_scheme, seed),
            first_body=sizing.plan(capacity, error_rate * share),
            key_format=check_key_format(key_format),
        )

    @classmethod
    def sized(
        cls,
        bits: int,
        hashes: int,
        *,
        hash_scheme: HashScheme = HashScheme.MURMUR3_X64_128,
        seed: int | bytes | None = None,
    ) -> FilterSpec:
        """A spec of exactly ``bits`` and ``hashes`` that degrades past the keys they are best for.

        ``error_rate`` is what the formula gives at that many keys. The bits are taken as asked: a power of
        two gives a somewhat higher rate than the formula, see sizing.py.
        """
        check_whole("bits", bits, sizing.MAX_BITS)
        check_whole("hashes", hashes, sizing.MAX_HASHES)
        capacity = sizing.optimal_capacity(bits, hashes)
        return cls(
            capacity=capacity,
            error_rate=sizing.expected_error_rate(bits, hashes, capacity),
            on_full=OnFull.DEGRADE,
            hasher=make_hasher(hash_scheme, seed),
            first_body=BodySpec(bits, hashes, capacity),
        )

    def differs_from(self, other: FilterSpec, seed: int | bytes | None = None) -> str:
        """The first field in which ``other`` is not what this spec asks for, or "".

        ``seed`` is the one that was asked for; None: any is equal.
        """
        pairs: dict[str, tuple[object, object]] = {
            "kind": (self.kind, other.kind),
            "capacity": (self.capacity, other.capacity),
            "error_rate": (self.error_rate, other.error_rate),
            "on_full": (self.on_full, other.on_full),
            "hash_scheme": (self.hasher.scheme, other.hasher.scheme),
            "key_format": (self.key_format, other.key_format),
        }
        if seed is not None:
            pairs["seed"] = (seed, other.hasher.seed)
        return next((field for field, (asked, there) in pairs.items() if asked != there), "")

    def body(self, index: int) -> BodySpec:
        """The body at ``index`` of the chain: each next one twice the keys at half the rate."""
        if index == 0:
            return self.first_body
        share = (1.0 - FIRST_BODY_SHARE) / 2**index
        return sizing.plan(self.capacity * 2**index, self.error_rate * share)


def make_hasher(scheme: HashScheme | int, seed: int | bytes | None) -> Hasher:
    """A hasher of ``scheme``; without a seed, one drawn from the system's randomness."""
    try:
        scheme = HashScheme(scheme)
    except ValueError:
        names = ", ".join(s.name for s in HashScheme)
        raise ParameterError("hash_scheme", scheme, f"one of {names}") from None
    if seed is None:
        if scheme is HashScheme.MURMUR3_X64_128:
            seed = secrets.randbelow(MAX_SEED + 1)
        else:
            seed = secrets.token_bytes(SECRET_BYTES)
    return Hasher(scheme, seed)


def check_whole(field: str, value: object, most: int) -> None:
    """Raise ParameterError unless ``value`` is a whole number from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ParameterError(field, value, f"a whole number from 1 to {most}")


def check_key_format(text: object) -> str:
    """Return ``text`` if a spec can carry it, else raise ParameterError."""
    with suppress(UnicodeEncodeError):
        if isinstance(text, str) and len(text.encode()) <= MAX_KEY_FORMAT_BYTES:
            return text
    raise ParameterError("key_format", text, f"at most {MAX_KEY_FORMAT_BYTES} bytes of UTF-8")
