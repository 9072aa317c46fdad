"""A disk that fails at any call of a daemon's life, once or from then on.

`test_disk_errors.py` names calls and files; here whatever the daemon asks of its directory may be the one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from bloomgate.v1 import admin_pb2, filters_pb2
from support.daemon import DaemonProcess
from support.tally import rounds
from support.tools import program

from .test_disk_errors import DATABASE, ENDING, LOG, MARK, Lived
from .tracing import failing

# System calls that change a directory, and how often a thread makes each in a life below, about.
CHANGES = {
    "pwrite64": 116, "fdatasync": 58, "write": 18, "fsync": 12, "openat": 12,
    "ftruncate": 10, "rename": 6, "unlink": 6,
}  # fmt: skip
# So that the database itself is written and synced too, within a few Adds.
CHECKPOINTS = "import bloomgated.storage.sqlite as journal; journal.CHECKPOINT_BYTES = 30_000"


def files(lived: Lived) -> list[Path]:
    """Everything in the directory that a life below may touch."""
    folder = lived.directory / "snapshots"
    names = [f"{number:016x}-1-{ordinal}.bgf" for number in range(1, 30) for ordinal in range(1, 7)]
    images = [folder / f"{name}{suffix}" for name in names for suffix in ("", ".tmp")]
    return [lived.directory, folder, *(lived.directory / name for name in (LOG, DATABASE, MARK)), *images]


class Life:
    """Calls that may each fail, and what was acknowledged of them beside the Adds of ``lived``."""

    def __init__(self, lived: Lived) -> None:
        self.lived = lived
        self.created: set[str] = set()
        self.dropped: set[str] = set()
        self.asked = 0

    def attempt(self, call: Callable[..., Any], request: Any) -> bool:
        """Whether it was acknowledged; it can only fail as unavailable."""
        code = None
        try:
            call(request, timeout=30)
        except grpc.RpcError as error:
            code = error.code()
        assert code in (None, *ENDING)
        return code is None

    def live(self, filters: Any, admin: Any) -> None:
        """Adds, snapshots, filters that come and go; until an Add fails."""
        for _ in range(4):
            self.asked += 1
            name = f"other-{self.asked}"
            spec = filters_pb2.FilterSpec(capacity=1000, error_rate=1e-9)
            if self.attempt(admin.CreateFilter, admin_pb2.CreateFilterRequest(name=name, spec=spec)):
                self.created.add(name)
                request = filters_pb2.AddRequest(filter=name, keys=[name.encode()])
                if not self.attempt(filters.Add, request):
                    self.created.discard(name)
            for _ in range(3):
                request = self.lived.request()
                if self.attempt(filters.Add, request):
                    self.lived.acknowledged += request.keys
                else:
                    # Its keys may be there or not: they are not asked for again.
                    return
            self.attempt(admin.SnapshotFilter, self.lived.snapshot)
            if self.asked % 2:
                self.created.discard(name)
                if self.attempt(admin.DropFilter, admin_pb2.DropFilterRequest(name=name)):
                    self.dropped.add(name)

    def verify(self, filters: Any, admin: Any) -> None:
        """All of it is there, whole."""
        listed = {each.name: each for each in admin.ListFilters(admin_pb2.ListFiltersRequest()).filters}
        assert {"fruit"} | self.created <= set(listed)
        assert not self.dropped & set(listed)
        assert {each.state for each in listed.values()} == {filters_pb2.FILTER_STATE_READY}
        self.lived.verify(filters)
        for name in self.created:
            request = filters_pb2.MightContainRequest(filter=name, keys=[name.encode()])
            assert list(filters.MightContain(request).answers) == [filters_pb2.ANSWER_MAYBE]


def test_any_call_of_a_life_fails(tmp_path: Path) -> None:
    """Adds, snapshots, creations, drops and the stop: each call is acknowledged or fails as unavailable, the
    process ends with 0, or with 3 where the journal failed, and no traceback; the next start has all that was
    acknowledged."""
    program("strace", "strace")
    choose, failed = random.Random(31), 0
    for number in range(rounds(2, 100)):
        folder = tmp_path / str(number)
        folder.mkdir()
        lived = Lived(DaemonProcess(folder / "data", prelude=CHECKPOINTS))
        life = Life(lived)
        call = choose.choice(list(CHANGES))
        # Once, or from then on.
        fault = (
            f"error={choose.choice(('EIO', 'ENOSPC'))}:when={choose.randint(1, CHANGES[call])}"
            f"{choose.choice(('', '+'))}"
        )
        with (
            lived.daemon.stubs() as (filters, admin),
            failing(lived.daemon, call, fault, files(lived), folder / "strace") as trace,
        ):
            life.live(filters, admin)
            code = lived.daemon.stop()
        failed += trace.injected > 0
        assert code == (3 if "the journal failed" in lived.daemon.log() else 0), (call, fault)
        assert "Traceback" not in lived.daemon.log()
        again = DaemonProcess(lived.directory)
        with again.stubs() as (filters, admin):
            life.verify(filters, admin)
        lived.daemon = again
        lived.restarts()
    assert failed
