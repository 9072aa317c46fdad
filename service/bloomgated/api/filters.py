"""FilterService: the verbs of services."""

from __future__ import annotations

from bloomgate.v1 import filters_pb2 as pb
from bloomgated.access import Principal
from bloomgated.api import convert
from bloomgated.gate import Gate

# The responses to a check of one key, by found and degraded.
_ONE = {
    (found, degraded): convert.answers_bytes(bytes((found,)), degraded)
    for found in (False, True)
    for degraded in (False, True)
}


class FilterService:
    """One method per verb of bloomgate.v1.FilterService, over the gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def Add(self, request: pb.AddRequest, _: Principal) -> pb.AddResponse:  # noqa: N802
        """Add keys; answered once they are durable."""
        was_new, seq = await self._gate.add(request.filter, convert.keys_of(request, self._gate.limits))
        return pb.AddResponse(was_new=was_new, seq=seq)

    async def MightContain(self, request: pb.MightContainRequest, _: Principal) -> bytes:  # noqa: N802
        """Ask for keys; the response as bytes."""
        one = convert.one_key_of(request, self._gate.limits)
        if one is not None:
            return _ONE[self._gate.might_contain_one(request.filter, one)]
        keys = convert.keys_of(request, self._gate.limits)
        return convert.answers_bytes(*await self._gate.might_contain(request.filter, keys))

    async def Stats(self, request: pb.StatsRequest, caller: Principal) -> pb.StatsResponse:  # noqa: N802
        """What a filter is, how full it is and what it saved."""
        stats = convert.stats_message(await self._gate.stats(request.filter), caller)
        return pb.StatsResponse(filter=stats, limits=convert.limits_message(self._gate.limits))

    async def ReportOutcomes(  # noqa: N802
        self, request: pb.ReportOutcomesRequest, _: Principal
    ) -> pb.ReportOutcomesResponse:
        """Count what the authority said."""
        self._gate.report_outcomes(request.filter, request.found, request.not_found, request.false_no)
        return pb.ReportOutcomesResponse()

    async def HashSpec(self, request: pb.HashSpecRequest, _: Principal) -> pb.HashSpecResponse:  # noqa: N802
        """How to make the filter's digests."""
        return convert.hash_spec_message(self._gate.hash_spec(request.filter))
