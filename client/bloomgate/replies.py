"""What a reply means. One that does not answer what was asked is malformed, and nothing of it is used."""

from __future__ import annotations

import enum

from bloomgate.errors import MalformedReply
from bloomgate.filters import Hasher, HashScheme
from bloomgate.v1 import filters_pb2 as pb


class Result(enum.Enum):
    """What a check counted as."""

    SKIP = "skip"
    """A definite no."""
    HIT = "hit"
    """The filter may hold the key."""
    FALLBACK = "fallback"
    """No answer that proves anything: treated as maybe."""


_RESULTS = {pb.ANSWER_DEFINITELY_NOT: Result.SKIP, pb.ANSWER_MAYBE: Result.HIT}


def read_answers(reply: pb.MightContainResponse, keys: int) -> list[Result]:
    """The results of a check of ``keys`` keys. Raises MalformedReply unless the reply answers each."""
    answers = reply.answers
    if len(answers) != keys:
        raise MalformedReply(f"{len(answers)} answers to {keys} keys")
    try:
        results = list(map(_RESULTS.__getitem__, answers))
    except KeyError:
        raise MalformedReply("an answer is neither ANSWER_DEFINITELY_NOT nor ANSWER_MAYBE") from None
    if not reply.degraded:
        return results
    if Result.SKIP in results:
        raise MalformedReply("a degraded reply answers ANSWER_DEFINITELY_NOT")
    return [Result.FALLBACK] * keys


def read_was_new(reply: pb.AddResponse, keys: int) -> list[bool]:
    """Which keys were certainly new. Raises MalformedReply unless the reply answers each."""
    if len(reply.was_new) != keys:
        raise MalformedReply(f"{len(reply.was_new)} answers to {keys} keys")
    return list(reply.was_new)


def read_hash_spec(reply: pb.HashSpecResponse) -> Hasher:
    """The hasher that a reply describes. Raises MalformedReply unless it is the daemon's own, by its hash id.

    Digests of another hasher would be answered "no" for keys that were added.
    """
    try:
        scheme = HashScheme(reply.hash_scheme)
        has_seed = reply.WhichOneof("key") == "seed"
        hasher = Hasher(scheme, reply.seed if has_seed else reply.secret)
    except ValueError:
        raise MalformedReply("the hash spec is not one that this version knows") from None
    if hasher.hash_id != reply.hash_id:
        raise MalformedReply("the hash spec does not have the hash_id that comes with it")
    return hasher
