"""How gRPC wakes the event loop, without getting stuck.

grpc.aio has one thread that takes events off gRPC's queue. For each it writes a byte to a socket, to wake the
loop, which takes all events that are there but one byte only. While the loop is busy bytes pile up; after 278
of them the thread is stuck in the write until the loop has read most of them, and no call is taken in or
answered meanwhile: measured, for 1.6 seconds, health checks included. A socket that is full of bytes wakes
the loop as well as one more byte would, so the write need not wait.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def that_never_block() -> Iterator[None]:
    """Pairs of sockets made within are not waited for when written to. Used where gRPC makes its own."""
    made = socket.socketpair

    def pair(*arguments: Any, **options: Any) -> tuple[socket.socket, socket.socket]:
        reads, writes = made(*arguments, **options)
        writes.setblocking(False)
        return reads, writes

    socket.socketpair = pair
    try:
        yield
    finally:
        socket.socketpair = made
