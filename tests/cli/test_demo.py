"""The demo, as ``make demo`` runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request

from bloomgate import Client

COMMAND = [sys.executable, "-c", "from bloomgate.cli import main; main()", "demo"]


def test_the_demo_does_the_main_job_and_leaves_the_daemon_up_when_asked() -> None:
    """No false negative before or after the SIGKILL, most lookups skipped, and the kept daemon answers."""
    ended = subprocess.run([*COMMAND, "--keep"], capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    out = ended.stdout
    pid = int(re.search(r"kill (\d+)", out)[1])  # type: ignore[index]
    try:
        assert "false negatives: 0 (as it must be)" in out
        assert re.search(r"checks +5,000 +100,000", out)
        shares = [float(share) for share in re.findall(r"\((\d+\.\d)%\)", out)]
        assert len(shares) == 2
        # 95 % are clean, 1 % of those at most go through: 94 %, give or take five standard deviations.
        assert all(abs(share - 94.2) < 1.7 for share in shares)
        grpc, http = re.search(r"grpc=(\S+) (http://\S+/metrics)", out).groups()  # type: ignore[union-attr]
        metrics = urllib.request.urlopen(http, timeout=10).read().decode()
        assert 'bloomgate_checks_total{filter="fraud-blocklist"' in metrics
        with Client(grpc) as client:
            assert client.filter("fraud-blocklist").stats().approximate_count > 50_000
    finally:
        os.kill(pid, signal.SIGTERM)
