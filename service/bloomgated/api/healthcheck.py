"""Asking a daemon for its health, as a container does."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def ask(target: str, timeout: float) -> str:
    """What the daemon at ``target`` says within ``timeout`` seconds: its status, or why it is silent."""
    try:
        # Not by way of a proxy that the environment names for other purposes.
        with grpc.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout).status
    except grpc.RpcError as error:
        silence: str = error.code().name
        return silence
    said: str = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    return said
