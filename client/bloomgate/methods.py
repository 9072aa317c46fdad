"""The unary methods of the wire, by name."""

from __future__ import annotations

from google.protobuf.wrappers_pb2 import StringValue, UInt32Value

from bloomgate.transport import Method
from bloomgate.v1 import admin_pb2 as admin
from bloomgate.v1 import filters_pb2 as pb

_FILTERS = "/bloomgate.v1.FilterService/"
_ADMIN = "/bloomgate.v1.AdminService/"

ADD = Method(_FILTERS + "Add", pb.AddRequest, pb.AddResponse)
MIGHT_CONTAIN = Method(_FILTERS + "MightContain", pb.MightContainRequest, pb.MightContainResponse)
STATS = Method(_FILTERS + "Stats", pb.StatsRequest, pb.StatsResponse)
REPORT_OUTCOMES = Method(_FILTERS + "ReportOutcomes", pb.ReportOutcomesRequest, pb.ReportOutcomesResponse)
HASH_SPEC = Method(_FILTERS + "HashSpec", pb.HashSpecRequest, pb.HashSpecResponse)

CREATE_FILTER = Method(_ADMIN + "CreateFilter", admin.CreateFilterRequest, admin.CreateFilterResponse)
LIST_FILTERS = Method(_ADMIN + "ListFilters", admin.ListFiltersRequest, admin.ListFiltersResponse)
DROP_FILTER = Method(_ADMIN + "DropFilter", admin.DropFilterRequest, admin.DropFilterResponse)
SNAPSHOT_FILTER = Method(_ADMIN + "SnapshotFilter", admin.SnapshotFilterRequest, admin.SnapshotFilterResponse)

# HealthCheckRequest is one string and HealthCheckResponse one enum, both field 1, which on the wire is what
# these two are: so the client needs no health package.
HEALTH = Method("/grpc.health.v1.Health/Check", StringValue, UInt32Value)
