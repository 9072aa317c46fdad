"""The gRPC server: services, health and reflection on one port."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from bloomgate.v1 import admin_pb2, filters_pb2
from bloomgated.access import Access
from bloomgated.api import wakeups
from bloomgated.api.admin import AdminService
from bloomgated.api.auth import RULES, Doorkeeper, Doorway, authorized
from bloomgated.api.filters import FilterService
from bloomgated.api.interceptors import Bound, Handler, observed, parsed, translated
from bloomgated.api.leases import LeaseService
from bloomgated.api.streams import Health, Reflection
from bloomgated.config import LimitsConfig, join_address
from bloomgated.errors import AddressTaken
from bloomgated.gate import Gate
from bloomgated.metrics import CallMetrics

_FILTERS: ServiceDescriptor = filters_pb2.DESCRIPTOR.services_by_name["FilterService"]
_ADMIN: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
# What health answers for: the server as a whole, and each service.
_NAMES = ("", _FILTERS.full_name, _ADMIN.full_name)


class ApiServer:
    """Serves the gate over gRPC. Health says NOT_SERVING until ``set_serving(True)``."""

    def __init__(
        self,
        gate: Gate,
        limits: LimitsConfig,
        metrics: CallMetrics,
        *,
        access: Access | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """``access`` None: whoever can connect may do everything. ``credentials`` None: no TLS."""
        # Above ours, which answers with a message that names it, but not far: gRPC's is what bounds a call's
        # memory before anybody has looked at it. A key takes up to five bytes beside its own.
        largest = min(limits.bytes_per_call + 5 * limits.keys_per_call + (1 << 20), 2**31 - 1)
        options = (
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_send_message_length", -1),
            # Clients may keep an idle connection alive with a ping every ten seconds.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 9000),
            # A caller whose machine is gone without a word holds its streams no longer than this.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.ping_timeout_ms", 20_000),
            # Of calls that wait for a handler gRPC ends some with a bare CANCELLED, from 1,000 on more and
            # more of them. Our refusal says when to come again, so it comes first, for ten times as many.
            ("grpc.server.max_pending_requests", 10_000),
            ("grpc.server.max_pending_requests_hard_limit", 20_000),
        )
        with wakeups.that_never_block():
            self._server = grpc.aio.server(options=options)
        self._credentials = credentials
        self._door = Doorkeeper(access)
        self._bound = Bound("calls", limits.concurrent_calls, limits.bytes_under_way)
        self._metrics = metrics
        self._turn = gate.turn
        self._health = Health(_NAMES, Bound("health watchers", limits.streams))
        self._reflection = Reflection(
            (*_NAMES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME),
            Bound("reflection streams", limits.streams),
            self._door,
        )
        self._gate = gate
        self._leases = LeaseService(gate.holders, gate.leases.config, self._door)
        for descriptor, service in ((_FILTERS, FilterService(gate)), (_ADMIN, AdminService(gate))):
            self._register(descriptor, service)
        self._server.add_generic_rpc_handlers((self._health.handlers(), self._reflection.handlers()))

    def _register(self, descriptor: ServiceDescriptor, service: object) -> None:
        handlers, refusals = {}, {}
        for method in descriptor.methods:
            if method.client_streaming:
                # It asks who calls before it reads, so one handler does for known and unknown alike.
                started, handled = self._metrics.of("bidi_stream", descriptor.full_name, method.name)
                handlers[method.name] = refusals[method.name] = grpc.stream_stream_rpc_method_handler(
                    observed(translated(self._leases.Lease), started, handled)
                )
                continue
            handler: Handler = getattr(service, method.name)
            rule = RULES[method.name]
            started, handled = self._metrics.of("unary", descriptor.full_name, method.name)
            request: Any = GetMessageClass(method.input_type)
            handler = self._bound.wrap(parsed(authorized(handler, rule), request.FromString, self._turn))
            handler = observed(translated(self._door.authenticated(handler, rule)), started, handled)
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                handler,
                response_serializer=_serialized,
            )
            refusals[method.name] = grpc.stream_stream_rpc_method_handler(
                observed(translated(self._door.turn_away), started, handled)
            )
        known, unknown = (
            grpc.method_handlers_generic_handler(descriptor.full_name, each) for each in (handlers, refusals)
        )
        self._server.add_generic_rpc_handlers((Doorway(self._door, known, unknown),))

    def bind(self, host: str, port: int) -> int:
        """Bind exclusively and return the port. Raises AddressTaken."""
        address = join_address(host, port)
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError:
            bound = 0
        if not bound:
            or_key = "" if self._credentials is None else ", or gRPC cannot use this kind of key"
            raise AddressTaken(
                f"gRPC cannot listen on {address}: the port is taken, or the address is not here{or_key}"
            )
        self._address = ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), bound)
        return bound

    async def is_listening(self) -> bool:
        """Whether its own port takes connections: a server of gRPC's can end without a word."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*self._address), 5)
        except ConnectionRefusedError:
            return False
        except (OSError, TimeoutError):
            # No proof: this process may have no file or memory left to ask with, or no time.
            return True
        writer.close()
        return True

    async def start(self) -> None:
        """Begin to answer; health says NOT_SERVING."""
        await self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Change what health says, of the server and of each service."""
        self._health.set_serving(serving)

    async def stop(self, grace: float) -> None:
        """Accept no call more, give those under way ``grace`` seconds, then end them.

        Copies under leases are ended first: Adds may be waiting for them. Streams of health and reflection
        are ended once no other call is under way.
        """
        stopping = asyncio.ensure_future(self._server.stop(grace))
        idle = asyncio.ensure_future(self._idle())
        await asyncio.wait((stopping, idle), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        self._health.end()
        self._reflection.end()
        # The handlers are done, but what they answered may still be on its way: the server knows.
        await stopping

    async def _idle(self) -> None:
        await asyncio.gather(self._gate.leases.stop(), self._bound.idle())
        self._gate.holders.end()


def _serialized(response: Any) -> bytes:
    """A response as bytes, which the hot methods make by themselves."""
    data: bytes = response if isinstance(response, bytes) else response.SerializeToString()
    return data
