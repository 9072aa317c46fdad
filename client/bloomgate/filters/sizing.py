"""Capacity and error rate in, bits and hash count out; and the formulas that say what a filter is worth.

Symbols: n keys, m bits, k hash functions, p error rate (false positives among absent keys).

    m = ceil(-n ln p / (ln 2)^2)          bits for n keys at rate p             Bloom 1970
    k = round(-log2 p)                    the hash count that uses them best    (m/n * ln 2)
    p = (1 - e^(-kn/m))^k                 rate to expect once n keys are in
    p = (ones/m)^k                        the same from the bits really set
    n = -m/k ln(1 - ones/m)               keys that set that many bits          Swamidass & Baldi 2007

Planned bodies are never smaller than ``MIN_BITS``, and where keys are few and the rate is tiny they are
larger than the formula asks: the k positions of a key come from two numbers, so now and then two keys agree
in all of them, at a rate of n/m^2 / w on top of the formula, where w is what the wrap of hashing.positions
at 2^64 is worth. Measured, w is 50 to 150, and 1 where m is a power of two, for then the wrap changes nothing
(n=20, p=1e-9: 1.9e-5 in 1024 bits, 6e-8 in 1025; n=71, p=1e-6: 1.8e-5 in 2048 bits, 1.2e-6 in 2047).
``plan`` keeps that excess below a third of p:

    m >= sqrt(n/p) / 4                    at least, and no power of two below sqrt(3 n/p)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bloomgate.filters.errors import ParameterError

MIN_BITS = 1024
# The most bits that a body takes beyond the formula; no first body at an accepted rate is held back by it.
_MOST_SPREAD_BITS = 2**21
MAX_BITS = 2**43
MAX_HASHES = 64
MAX_CAPACITY = 10**11
MIN_ERROR_RATE = 1e-9
MAX_ERROR_RATE = 0.5

_LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class BodySpec:
    """One bit buffer: how many bits, how many hashes, and how many keys it is planned for."""

    bits: int
    hashes: int
    capacity: int

    @property
    def nbytes(self) -> int:
        """Bytes of the bit buffer."""
        return (self.bits + 7) // 8


def check_capacity(capacity: object, field: str = "capacity") -> int:
    """Return ``capacity`` if a filter can be planned for it, else raise ParameterError."""
    if isinstance(capacity, bool) or not isinstance(capacity, int) or not 1 <= capacity <= MAX_CAPACITY:
        raise ParameterError(field, capacity, f"a whole number from 1 to {MAX_CAPACITY}")
    return capacity


def check_error_rate(error_rate: object, field: str = "error_rate") -> float:
    """Return ``error_rate`` as a float if a filter can be planned for it, else raise ParameterError."""
    is_number = isinstance(error_rate, (int, float)) and not isinstance(error_rate, bool)
    # NaN compares false with everything, so the range test refuses it as well.
    if not is_number or not MIN_ERROR_RATE <= error_rate <= MAX_ERROR_RATE:  # type: ignore[operator]
        raise ParameterError(field, error_rate, f"a number from {MIN_ERROR_RATE:g} to {MAX_ERROR_RATE:g}")
    return float(error_rate)  # type: ignore[arg-type]


def plan(capacity: int, error_rate: float) -> BodySpec:
    """Size one body for ``capacity`` keys at ``error_rate``.

    The arguments are trusted: growth asks for rates below MIN_ERROR_RATE, which callers may not.
    """
    spread = math.sqrt(capacity / error_rate)
    # Growth of a tiny filter asks for rates that no memory is worth; there the formula has to do.
    least = max(MIN_BITS, min(_MOST_SPREAD_BITS, math.ceil(spread / 4)))
    bits = max(least, math.ceil(-capacity * math.log(error_rate) / _LN2**2))
    if bits.bit_count() == 1 and bits < math.sqrt(3) * spread:
        bits += 1
    hashes = min(MAX_HASHES, max(1, round(-math.log2(error_rate))))
    return BodySpec(bits=bits, hashes=hashes, capacity=capacity)


def expected_error_rate(bits: int, hashes: int, keys: int) -> float:
    """Rate to expect of ``bits`` and ``hashes`` once ``keys`` distinct keys are in: (1 - e^(-kn/m))^k."""
    return float((-math.expm1(-hashes * keys / bits)) ** hashes)


def error_rate_at_fill(bits: int, hashes: int, bits_set: int) -> float:
    """Rate that ``bits_set`` of ``bits`` really give: the chance that all hashes meet a set bit."""
    return float((bits_set / bits) ** hashes)


def error_rate_of_chain(bodies: Iterable[tuple[BodySpec, int]]) -> float:
    """Rate of a chain of bodies, each given with its set bits: the chance that one of them says True."""
    rate = 0.0
    for spec, bits_set in bodies:
        # Not 1 - (1-a)(1-b): that form cannot tell 1e-17 from 0.
        rate += (1.0 - rate) * error_rate_at_fill(spec.bits, spec.hashes, bits_set)
    return rate


def optimal_capacity(bits: int, hashes: int) -> int:
    """Keys for which ``hashes`` is the best hash count of ``bits``: m ln 2 / k, at least 1."""
    return max(1, int(bits * _LN2 / hashes))
