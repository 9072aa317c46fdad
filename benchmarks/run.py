"""``make bench``: every benchmark, one after the other, in one run. ``--save`` keeps the output in docs/."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import checks
import grpc
import peers
import replicas
from report import Report

import daemon
import kernel

KEPT = Path(__file__).parent.parent / "docs" / "BENCHMARKS.md"
WHY = Path(__file__).parent / "why.md"


def machine() -> str:
    """What it was measured on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({model}), {platform.system()}"
        f" {platform.release().partition('-')[0]}, Python {platform.python_version()},"
        f" grpcio {grpc.__version__}; {peers.versions()}."
    )


def main() -> None:
    """Run, print, and keep if asked to."""
    report, tables = Report(), io.StringIO()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # For a server that does not run as root.
        folder.chmod(0o755)
        with daemon.bench_daemon(f"{folder}/data") as server:
            checks.measure(report, server, folder)
            with daemon.Server(daemon.EMPTY) as empty:
                checks.unary(report, asyncio.run(daemon.unary(server.address, empty.address)))
        replicas.measure(report, folder)
    with contextlib.redirect_stdout(tables):
        kernel.main()
        for table in daemon.measure():
            print(f"\n{table}")
    print(f"\n{machine()}\n\n{report.markdown()}\n{tables.getvalue()}")
    if "--save" in sys.argv[1:]:
        KEPT.write_text(
            "# Benchmarks\n\nWhat `make bench ARGS=--save` measured, in one run: "
            f"{machine()}\n\nBoth sides of a row are measured in turns, on one machine whose cores client and"
            " server share. Shown are medians;\nthe ratio says how much better bloomgate is, as the median of"
            " the turns, with the least and the most of them. Keys are\nabout twenty bytes, filters hold a"
            " million of them at 1 %. Redis and bloomgate are reached over TCP on the"
            f" loopback,\nPostgreSQL over a unix socket.\n\n{report.markdown()}\n{WHY.read_text()}\n"
            f"## More\n\n```text\n{tables.getvalue().strip()}\n```\n"
        )


if __name__ == "__main__":
    main()
