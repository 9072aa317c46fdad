"""Messages to the gate's words and back. What comes in is untrusted: every shape and limit is judged here."""

from __future__ import annotations

from bloomgate import errors
from bloomgate.filters import DIGEST_BYTES, FilterSpec, HashScheme, Kind, OnFull, ParameterError
from bloomgate.v1 import filters_pb2 as pb
from bloomgated.access import REPLICAS, Principal
from bloomgated.config import LimitsConfig
from bloomgated.requests import Asked, Keys, Stats


def one_key_of(request: pb.MightContainRequest, limits: LimitsConfig) -> bytes | None:
    """The key of a request of one, within the limits; None for any other, which ``keys_of`` judges."""
    if len(request.keys) != 1 or request.digests:
        return None
    key: bytes = request.keys[0]
    return key if 0 < len(key) <= limits.bytes_per_key and len(key) <= limits.bytes_per_call else None


def keys_of(request: pb.AddRequest | pb.MightContainRequest, limits: LimitsConfig) -> Keys:
    """The keys or digests of a request. Raises InvalidRequest or LimitExceeded, naming field or limit."""
    if request.digests:
        if request.keys:
            raise errors.InvalidRequest("keys", "set keys or digests, not both")
        if len(request.digests) % DIGEST_BYTES:
            raise errors.InvalidRequest(
                "digests", f"digests must be {DIGEST_BYTES} bytes each, got {len(request.digests)} bytes"
            )
        if not request.hash_id:
            raise errors.InvalidRequest("hash_id", "digests need the hash_id they were made under")
        _check_limit("keys_per_call", len(request.digests) // DIGEST_BYTES, limits.keys_per_call)
        _check_limit("bytes_per_call", len(request.digests), limits.bytes_per_call)
        return Keys(digests=request.digests, hash_id=request.hash_id)
    # Counted before they are taken out: a message of tiny keys may hold millions.
    _check_limit("keys_per_call", len(request.keys), limits.keys_per_call)
    keys = tuple(request.keys)
    if keys:
        sizes = list(map(len, keys))
        _check_limit("bytes_per_key", max(sizes), limits.bytes_per_key)
        _check_limit("bytes_per_call", sum(sizes), limits.bytes_per_call)
        if not all(sizes):
            raise errors.InvalidRequest("keys", f"keys[{sizes.index(0)}] must not be empty")
    return Keys(keys)


# A byte per key, 1 for found, to the number of its answer.
_ANSWERS = bytes.maketrans(b"\0\1", bytes((pb.ANSWER_DEFINITELY_NOT, pb.ANSWER_MAYBE)))
_ANSWERS_TAG, _DEGRADED = b"\x0a", b"\x10\x01"


def answers_bytes(found: bytes, degraded: bool) -> bytes:
    """A MightContainResponse on the wire, without an object per key: numbers below 128 are bytes there."""
    if not found:
        return _DEGRADED if degraded else b""
    size, length = len(found), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return b"".join((_ANSWERS_TAG, length, found.translate(_ANSWERS), _DEGRADED if degraded else b""))


def _check_limit(limit: str, value: int, allowed: int) -> None:
    if value > allowed:
        raise errors.LimitExceeded(limit, value, allowed)


def asked_of(message: pb.FilterSpec) -> Asked:
    """The spec that a message asks for, sized. Raises InvalidRequest naming the field."""
    if message.kind not in (pb.KIND_UNSPECIFIED, pb.KIND_BLOOM):
        raise errors.InvalidRequest("spec.kind", f"spec.kind must be BLOOM, got {message.kind}")
    if message.on_full not in pb.OnFull.values():
        raise errors.InvalidRequest("spec.on_full", f"spec.on_full {message.on_full} is unknown")
    if message.hash_scheme not in pb.HashScheme.values():
        raise errors.InvalidRequest("spec.hash_scheme", f"spec.hash_scheme {message.hash_scheme} is unknown")
    scheme = HashScheme(message.hash_scheme or pb.HASH_SCHEME_MURMUR3_X64_128)
    seed = message.seed if message.HasField("seed") else None
    if seed is not None and scheme is not HashScheme.MURMUR3_X64_128:
        raise errors.InvalidRequest("spec.seed", f"spec.seed is not for {scheme.name}, whose secret is drawn")
    try:
        spec = FilterSpec.plan(
            message.capacity,
            message.error_rate,
            on_full=OnFull(message.on_full or pb.ON_FULL_GROW),
            hash_scheme=scheme,
            seed=seed,
            key_format=message.key_format,
        )
    except ParameterError as error:
        raise errors.InvalidRequest(f"spec.{error.field}", f"spec.{error}") from None
    return Asked(spec, seed)


def spec_message(spec: FilterSpec) -> pb.FilterSpec:
    """A spec as shown: without its seed or secret."""
    return pb.FilterSpec(
        kind=pb.Kind.Value(f"KIND_{Kind(spec.kind).name}"),
        capacity=spec.capacity,
        error_rate=spec.error_rate,
        on_full=pb.OnFull.Value(f"ON_FULL_{spec.on_full.name}"),
        hash_scheme=pb.HashScheme.Value(f"HASH_SCHEME_{spec.hasher.scheme.name}"),
        key_format=spec.key_format,
    )


def hash_spec_message(spec: FilterSpec) -> pb.HashSpecResponse:
    """How to make a filter's digests: this one does carry the seed or secret."""
    hasher = spec.hasher
    message = pb.HashSpecResponse(
        hash_scheme=pb.HashScheme.Value(f"HASH_SCHEME_{hasher.scheme.name}"), hash_id=hasher.hash_id
    )
    if isinstance(hasher.seed, int):
        message.seed = hasher.seed
    else:
        message.secret = hasher.seed
    return message


def stats_message(stats: Stats, caller: Principal) -> pb.FilterStats:
    """What a filter is, how full it is and what it saved.

    Its hash id is for those who may have the seed: whoever has that of a seed of 32 bits can try them all.
    """
    entry, fill = stats.entry, stats.fill
    message = pb.FilterStats(
        name=entry.name,
        spec=spec_message(entry.spec),
        state=pb.FilterState.Value(f"FILTER_STATE_{entry.state}"),
        damage=entry.damage,
        generation=entry.generation,
        hash_id=entry.spec.hasher.hash_id if caller.may(REPLICAS, entry.name) else 0,
        bits=fill.bits,
        bits_set=fill.bits_set,
        memory_bytes=fill.memory_bytes,
        approximate_count=fill.approximate_count,
        added_count=fill.added_count,
        expected_error_rate=fill.expected_error_rate,
        observed_error_rate=entry.observed_error_rate,
        checks_skip=entry.checks.skip + entry.replica_checks.skip,
        checks_hit=entry.checks.hit + entry.replica_checks.hit,
        checks_unsure=entry.checks.unsure,
        outcomes_found=entry.outcomes.found,
        outcomes_not_found=entry.outcomes.not_found,
        outcomes_false_no=entry.outcomes.false_no,
        journal_seq=stats.journal_seq,
        leases=stats.leases,
    )
    for body in fill.bodies:
        message.hashes = body.spec.hashes  # that of the newest one stays
        message.bodies.add(
            bits=body.spec.bits,
            hashes=body.spec.hashes,
            capacity=body.spec.capacity,
            count=body.count,
            bits_set=body.bits_set,
        )
    if fill.bits:
        message.fill_ratio = fill.bits_set / fill.bits
    if entry.files:
        newest = entry.files[-1]
        message.snapshot_seq = newest.stamp
        message.snapshot_time.FromNanoseconds(int(newest.time * 1e9))
    return message


def limits_message(limits: LimitsConfig) -> pb.Limits:
    """What one call may carry."""
    return pb.Limits(
        keys_per_call=limits.keys_per_call,
        bytes_per_key=limits.bytes_per_key,
        bytes_per_call=limits.bytes_per_call,
    )
