"""AdminService: the verbs of operators."""

from __future__ import annotations

from bloomgate.v1 import admin_pb2 as pb
from bloomgated.access import Principal
from bloomgated.api import convert
from bloomgated.api.auth import SEES
from bloomgated.gate import Gate


class AdminService:
    """One method per verb of bloomgate.v1.AdminService, over the gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def CreateFilter(  # noqa: N802
        self, request: pb.CreateFilterRequest, caller: Principal
    ) -> pb.CreateFilterResponse:
        """Create a filter, or find an equal one."""
        stats, created = await self._gate.create(request.name, convert.asked_of(request.spec))
        return pb.CreateFilterResponse(filter=convert.stats_message(stats, caller), created=created)

    async def ListFilters(self, _: pb.ListFiltersRequest, caller: Principal) -> pb.ListFiltersResponse:  # noqa: N802
        """Every filter that the caller may see, by name."""
        found = await self._gate.list(lambda name: caller.may(SEES, name))
        return pb.ListFiltersResponse(filters=[convert.stats_message(each, caller) for each in found])

    async def DropFilter(self, request: pb.DropFilterRequest, _: Principal) -> pb.DropFilterResponse:  # noqa: N802
        """Drop a filter for good."""
        await self._gate.drop(request.name)
        return pb.DropFilterResponse()

    async def SnapshotFilter(  # noqa: N802
        self, request: pb.SnapshotFilterRequest, caller: Principal
    ) -> pb.SnapshotFilterResponse:
        """Write a filter to disk now."""
        return pb.SnapshotFilterResponse(
            filter=convert.stats_message(await self._gate.snapshot(request.name), caller)
        )
