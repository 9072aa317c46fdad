"""A real bloomgated process on free loopback ports."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc

from bloomgate.v1 import admin_pb2_grpc, filters_pb2_grpc

MAIN = "from bloomgated.main import main; main()"
COMMAND = [sys.executable, "-c", MAIN]


class DaemonProcess:
    """``bloomgated serve`` on ``directory``, started and ready when the constructor returns.

    ``prelude`` is Python that the process runs before anything else: where a test breaks it on purpose. With
    ``ready=False`` the constructor does not wait; ``wait_ready`` does.
    """

    def __init__(
        self,
        directory: Path,
        *flags: str,
        listen: str = "127.0.0.1:0",
        http: str = "127.0.0.1:0",
        prelude: str = "",
        ready: bool = True,
    ) -> None:
        self.directory = directory
        self.grpc, self.http = listen, http
        self.log_path = directory.parent / f"{directory.name}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"{prelude}\n{MAIN}",
                    "serve",
                    "--data-dir",
                    str(directory),
                    "--listen",
                    listen,
                    "--http",
                    http,
                    *flags,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={k: v for k, v in os.environ.items() if not k.startswith("BLOOMGATED__")},
            )
        # A test that fails may not come to its end.
        atexit.register(self.kill)
        if ready:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Return once it says that it serves; its addresses are known then."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("bloomgated ready "):
            if line:
                self.process.kill()
            self.process.wait(10)
            self.process.stdout.close()
            raise AssertionError(f"bloomgated did not start: {line!r}\n{self.log()}")
        addresses = dict(word.split("=", 1) for word in line.split()[2:])
        self.grpc, self.http = addresses["grpc"], addresses["http"]

    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text()

    def get(
        self, path: str, *, context: ssl.SSLContext | None = None, token: str | None = None
    ) -> tuple[int, str]:
        """Status and body of an HTTP GET, over TLS with a ``context``."""
        scheme = "http" if context is None else "https"
        request = urllib.request.Request(f"{scheme}://{self.http}{path}")
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._end(signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """SIGTERM, and return the exit code."""
        return self._end(number)

    def _end(self, number: int) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        if self.process.stdout:
            self.process.stdout.close()
        return code

    @contextlib.contextmanager
    def stubs(self) -> Iterator[tuple[filters_pb2_grpc.FilterServiceStub, admin_pb2_grpc.AdminServiceStub]]:
        """Raw stubs of both services."""
        with grpc.insecure_channel(self.grpc) as channel:
            yield filters_pb2_grpc.FilterServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel)


def peak(daemon: DaemonProcess) -> int:
    """The most memory that the process ever had, in kB."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1])


def refused(*arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run ``bloomgated`` with arguments that make it end by itself."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
