"""Faults in the system calls of a real process, by way of strace (Debian package strace)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.daemon import DaemonProcess
from support.tools import program


@dataclass
class Trace:
    """What was seen of the calls that faults were injected into."""

    log: Path

    @property
    def injected(self) -> int:
        """How many calls failed for our sake."""
        return self.log.read_text().count("(INJECTED)")

    def after_the_first(self, call: str) -> int:
        """How often ``call`` was made after the first that failed."""
        _, _, rest = self.log.read_text().partition("(INJECTED)")
        return len(re.findall(rf"\b{call}\(", rest))


@contextmanager
def failing(
    daemon: DaemonProcess, calls: str, fault: str, paths: Sequence[Path], log: Path
) -> Iterator[Trace]:
    """While within: each of ``calls`` (comma-separated) on one of ``paths`` ends in ``fault``, such as
    ``error=EIO`` or ``error=ENOSPC:when=2``, in all threads of the daemon."""
    command = [program("strace", "strace"), "-f", "-qq", "-o", str(log), "-p", str(daemon.process.pid)]
    command += ["-e", f"trace={calls}", "-e", f"inject={calls}:{fault}"]
    for path in paths:
        command += ["-P", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            _attached(daemon, tracer)
            yield Trace(log)
        finally:
            # It lets go of the process, if that is still there.
            tracer.terminate()
            tracer.wait(30)


def _attached(daemon: DaemonProcess, tracer: subprocess.Popen[str]) -> None:
    """Return once every thread of the daemon is traced."""
    for _ in range(100_000):
        if tracer.poll() is not None:
            assert tracer.stderr is not None
            raise AssertionError(f"strace did not attach: {tracer.stderr.read()}")
        tasks = list(Path(f"/proc/{daemon.process.pid}/task").iterdir())
        states = [re.search(r"TracerPid:\s+(\d+)", (task / "status").read_text()) for task in tasks]
        if all(found and found[1] != "0" for found in states):
            return
    raise AssertionError("strace did not attach")
