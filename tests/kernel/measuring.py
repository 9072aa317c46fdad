"""Random digests, and how many of them a body may take for its own before that is no accident."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Halves = tuple[NDArray[np.uint64], NDArray[np.uint64]]
# The chance that an honest filter fails an assertion below. All draws are seeded, so it is thrown once.
TAIL = 1e-6


def poisson_most(mean: float) -> int:
    """The least count that a Poisson variable of ``mean`` passes with a chance of at most TAIL."""
    count, below = 0, math.exp(-mean)
    while 1.0 - below > TAIL:
        count += 1
        below += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
    return count


def random_halves(rng: np.random.Generator, keys: int) -> Halves:
    """The halves of ``keys`` digests that no key was hashed for."""
    h1, h2 = rng.integers(0, 2**64, (2, keys), dtype=np.uint64)
    return h1, h2


def count_hits(has_many: Callable[[Halves], NDArray[np.bool_]], rng: np.random.Generator, probes: int) -> int:
    """How many of ``probes`` random digests ``has_many`` takes for its own, asked in slices."""
    hits = 0
    for start in range(0, probes, 250_000):
        hits += int(np.count_nonzero(has_many(random_halves(rng, min(250_000, probes - start)))))
    return hits
