"""bloomgate: ask a Bloom filter before you ask the database.

Each name is imported when it is first used, so that who wants the kernel alone does not pay for gRPC, and
the command starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bloomgate.aio import AsyncClient, AsyncFilter
    from bloomgate.client import Client, Filter
    from bloomgate.endpoint import Tls
    from bloomgate.errors import (
        BloomgateError,
        ClientClosed,
        DeadlineExceeded,
        FilterExists,
        FilterNotFound,
        ForkNotSupported,
        InternalError,
        InvalidRequest,
        JournalFailed,
        LimitExceeded,
        MalformedReply,
        NotAllowed,
        NotAuthenticated,
        NotForThisState,
        NotServing,
        NotSupported,
        Overloaded,
        StaleHashId,
        Unavailable,
    )
    from bloomgate.filters import (
        BloomFilter,
        DataDamaged,
        FilterFull,
        HashScheme,
        InvalidKey,
        Kind,
        OnFull,
        ParameterError,
    )
    from bloomgate.guard import AsyncGuard, Guard
    from bloomgate.leased import AsyncReplicaFilter, ReplicaFilter
    from bloomgate.metrics import ClientMetrics
    from bloomgate.options import Backoff, ClientOptions
    from bloomgate.stats import BodyStats, CreateResult, FilterState, FilterStats

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncFilter",
    "AsyncGuard",
    "AsyncReplicaFilter",
    "Backoff",
    "BloomFilter",
    "BloomgateError",
    "BodyStats",
    "Client",
    "ClientClosed",
    "ClientMetrics",
    "ClientOptions",
    "CreateResult",
    "DataDamaged",
    "DeadlineExceeded",
    "Filter",
    "FilterExists",
    "FilterFull",
    "FilterNotFound",
    "FilterState",
    "FilterStats",
    "ForkNotSupported",
    "Guard",
    "HashScheme",
    "InternalError",
    "InvalidKey",
    "InvalidRequest",
    "JournalFailed",
    "Kind",
    "LimitExceeded",
    "MalformedReply",
    "NotAllowed",
    "NotAuthenticated",
    "NotForThisState",
    "NotServing",
    "NotSupported",
    "OnFull",
    "Overloaded",
    "ParameterError",
    "ReplicaFilter",
    "StaleHashId",
    "Tls",
    "Unavailable",
    "__version__",
]

_MODULES = {
    "aio": ("AsyncClient", "AsyncFilter"),
    "client": ("Client", "Filter"),
    "endpoint": ("Tls",),
    "errors": (
        "BloomgateError",
        "ClientClosed",
        "DeadlineExceeded",
        "FilterExists",
        "FilterNotFound",
        "ForkNotSupported",
        "InternalError",
        "InvalidRequest",
        "JournalFailed",
        "LimitExceeded",
        "MalformedReply",
        "NotAllowed",
        "NotAuthenticated",
        "NotForThisState",
        "NotServing",
        "NotSupported",
        "Overloaded",
        "StaleHashId",
        "Unavailable",
    ),
    "filters": (
        "BloomFilter",
        "DataDamaged",
        "FilterFull",
        "HashScheme",
        "InvalidKey",
        "Kind",
        "OnFull",
        "ParameterError",
    ),
    "guard": ("AsyncGuard", "Guard"),
    "leased": ("AsyncReplicaFilter", "ReplicaFilter"),
    "metrics": ("ClientMetrics",),
    "options": ("Backoff", "ClientOptions"),
    "stats": ("BodyStats", "CreateResult", "FilterState", "FilterStats"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
