"""Who calls, off what gRPC knows of a call, and what each method asks of them.

Who it is, and whether it has the role on any filter at all, is judged before the request is counted or
parsed; whether on this filter, before the gate hears of it, so that a refusal is the same whether the filter
exists or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from bloomgate.errors import NotAllowed, NotAuthenticated
from bloomgated.access import ANYONE, READERS, REPLICAS, Access, Principal, Role
from bloomgated.api.interceptors import Context, Handler

Metadata = Iterable[tuple[str, str | bytes]] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """One of ``roles`` on the filter that the request names in ``field``; "" names none, and any will do."""

    roles: frozenset[Role]
    field: str = "filter"


_WRITE = frozenset((Role.WRITE,))
_ADMIN = frozenset((Role.ADMIN,))
SEES = READERS | _ADMIN
"""Roles that see that a filter exists, and its stats."""

RULES: Mapping[str, Rule] = {
    "Add": Rule(_WRITE),
    "MightContain": Rule(READERS),
    "Stats": Rule(SEES),
    "ReportOutcomes": Rule(READERS),
    "HashSpec": Rule(REPLICAS),
    # Judged per copy: the stream serves several filters.
    "Lease": Rule(REPLICAS),
    "CreateFilter": Rule(_ADMIN, "name"),
    "ListFilters": Rule(frozenset(Role), ""),
    "DropFilter": Rule(_ADMIN, "name"),
    "SnapshotFilter": Rule(_ADMIN, "name"),
}
"""By the method's name. A method that stands not here cannot be served."""


class Doorkeeper:
    """Finds out who calls. ``access`` None: nobody is asked, and whoever is there may do everything."""

    def __init__(self, access: Access | None) -> None:
        self._access = access

    def caller(self, context: Context) -> Principal:
        """Who calls. Raises NotAuthenticated, NotAllowed."""
        if self._access is None:
            return ANYONE
        given = _authorization(context.invocation_metadata())
        names: list[str] = []
        if not given:
            proven: Mapping[str, Iterable[bytes]] = context.auth_context()
            for key in ("x509_common_name", "x509_subject_alternative_name"):
                names += [name.decode(errors="replace") for name in proven.get(key, ())]
        return self._access.authenticate(given, names)

    def may_be_known(self, metadata: Metadata) -> bool:
        """Whether a call with these metadata may be somebody's. What its connection proves is not asked."""
        if self._access is None:
            return True
        given = _authorization(metadata)
        try:
            return self._access.authenticate(given, ()) is not None
        except NotAllowed:
            # Without a token, its certificate may yet tell.
            return not given and self._access.knows_certificates

    async def turn_away(self, _: Any, context: Context) -> None:
        """A handler for those who are not known. Raises NotAuthenticated, and reads nothing."""
        self.caller(context)
        # Known since: the file was read again between two looks at it.
        raise NotAuthenticated

    def authenticated(self, handler: Handler, rule: Rule) -> Handler:
        """``handler``, given who calls; refused for whoever has none of the roles on any filter."""

        async def authenticating(data: Any, context: Context) -> Any:
            caller = self.caller(context)
            if not caller.has(rule.roles):
                raise needs(rule.roles)
            return await handler(data, caller)

        return authenticating


class Doorway(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Handlers behind the door: whoever cannot be known is led to others, which read nothing.

    gRPC takes in the message of a unary call before its handler runs. Measured, 40 calls of a stranger with
    16 MiB each on one connection held 1 GB; a handler of streams is asked first, and need not read.
    """

    def __init__(
        self,
        door: Doorkeeper,
        known: grpc.GenericRpcHandler[Any, Any],
        unknown: grpc.GenericRpcHandler[Any, Any],
    ) -> None:
        self._door, self._known, self._unknown = door, known, unknown

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call, None for a method that is not here."""
        behind = self._known if self._door.may_be_known(details.invocation_metadata) else self._unknown
        return behind.service(details)


def _authorization(metadata: Metadata) -> list[str]:
    return [str(value) for key, value in metadata or () if key == "authorization"]


def authorized(handler: Handler, rule: Rule) -> Handler:
    """``handler`` of parsed requests, refused for whoever may not do this to the filter that they name."""
    if not rule.field:
        return handler

    async def authorizing(request: Any, caller: Principal) -> Any:
        if caller is not ANYONE:
            name = getattr(request, rule.field)
            if not caller.may(rule.roles, name):
                raise needs(rule.roles)
            # Digests are made with the seed, and tell of keys to whoever has it.
            if getattr(request, "digests", b"") and not caller.may(REPLICAS, name):
                raise needs(REPLICAS)
        return await handler(request, caller)

    return authorizing


def needs(roles: frozenset[Role]) -> NotAllowed:
    """The refusal of whoever has none of these roles."""
    return NotAllowed(f"this needs the role {' or '.join(sorted(roles))} on this filter")
