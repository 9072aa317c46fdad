"""The demo, as ``make demo`` runs it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from bloomgate import Client
from bloomgate.cli import demo

COMMAND = [sys.executable, "-c", "from bloomgate.cli import main; main()", "demo"]


def test_the_demo_does_the_main_job_and_leaves_the_daemon_up_when_asked() -> None:
    """No false negative before or after the SIGKILL, most lookups skipped, and the kept daemon answers."""
    ended = subprocess.run([*COMMAND, "--keep"], capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    out = ended.stdout
    pid = int(re.search(r"kill (\d+)", out)[1])  # type: ignore[index]
    try:
        assert "false negatives: 0 (as it must be)" in out
        assert re.search(r"checks +5,000 +100,000 +(5\d,\d{3}) +\1", out)
        assert re.search(r"false negatives +0 +0 +0 +0 *\n", out)
        shares = [float(share) for share in re.findall(r"\((\d+\.\d)%\)", out)]
        assert len(shares) == 4
        # 95 % are clean, 1 % of those at most go through: 94 %, give or take five standard deviations.
        assert all(abs(share - 94.2) < 1.7 for share in shares[:2])
        assert shares[2:] == [0.0, 0.0]
        grpc, http = re.search(r"gRPC (\S+), metrics (http://\S+/metrics)", out).groups()  # type: ignore[union-attr]
        metrics = urllib.request.urlopen(http, timeout=10).read().decode()
        assert 'bloomgate_checks_total{filter="fraud-blocklist"' in metrics
        with Client(grpc) as client:
            assert client.filter("fraud-blocklist").stats().approximate_count > 50_000
    finally:
        files = Path(re.search(r"its files are in (\S+)", out)[1])  # type: ignore[index]
        os.kill(pid, signal.SIGTERM)
        # It is nobody's child any more: its lock tells when it has ended.
        with (files / "data" / "bloomgate.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(files)


def test_a_daemon_that_cannot_answer_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maybes for want of an answer would count as no false negatives: the demo asks for errors instead."""
    seen = []
    monkeypatch.setattr(demo, "Client", lambda *_, options: seen.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        demo.run(keep=False)
    assert [options.on_error for options in seen] == ["raise"]
