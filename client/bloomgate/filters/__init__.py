"""The kernel: Bloom filters, pure and synchronous. No I/O, no clock, no network; usable on its own."""

from bloomgate.filters.bloom import BloomBody
from bloomgate.filters.errors import DataDamaged, FilterFull, InvalidKey, ParameterError
from bloomgate.filters.growing import BloomFilter
from bloomgate.filters.hashing import DIGEST_BYTES, Hasher, HashScheme, Key, encode_key
from bloomgate.filters.plan import AddPlan, Growth, Segment, allocate
from bloomgate.filters.sizing import BodySpec
from bloomgate.filters.spec import FilterSpec, Kind, OnFull

__all__ = [
    "DIGEST_BYTES",
    "AddPlan",
    "BloomBody",
    "BloomFilter",
    "BodySpec",
    "DataDamaged",
    "FilterFull",
    "FilterSpec",
    "Growth",
    "HashScheme",
    "Hasher",
    "InvalidKey",
    "Key",
    "Kind",
    "OnFull",
    "ParameterError",
    "Segment",
    "allocate",
    "encode_key",
]
