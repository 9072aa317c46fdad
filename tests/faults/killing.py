"""A daemon that kills itself with SIGKILL at a named point of its own code, as soon as it is armed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PRELUDE = """
import importlib, os, pathlib, signal, sqlite3

ARMED, REACHED = {armed!r}, {reached!r}
WHAT, WHEN, LEFT = {what!r}, {when!r}, {nth}

def at(what, when):
    global LEFT
    if (what, when) != (WHAT, WHEN) or not os.path.exists(ARMED):
        return
    LEFT -= 1
    if not LEFT:
        open(REACHED, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

def wrap(owner, name, what, concerns=lambda *_: True):
    real = getattr(owner, name)
    def watched(*arguments, **options):
        if not concerns(*arguments):
            return real(*arguments, **options)
        at(what, "before")
        result = real(*arguments, **options)
        at(what, "after")
        return result
    setattr(owner, name, watched)

storage = "bloomgated.storage."
records = importlib.import_module(storage + "records")
KINDS = {{records.KIND_CREATE: "create", records.KIND_DROP: "drop", records.KIND_ADD: "add",
          records.KIND_SNAPSHOTS: "snapshots"}}

class Watched(sqlite3.Connection):
    doing = ()

    def execute(self, sql, *arguments):
        if sql.startswith("BEGIN"):
            self.doing = ()
        elif sql.startswith("DELETE FROM journal"):
            self.doing = ("trim",)
        # A commit goes by all that is in it.
        whats = ["COMMIT of " + each for each in self.doing] if sql == "COMMIT" else [sql]
        for what in whats:
            at(what, "before")
        result = super().execute(sql, *arguments)
        for what in whats:
            at(what, "after")
        return result

    def executemany(self, sql, rows):
        if sql.startswith("INSERT INTO journal"):
            self.doing = {{KINDS[row[1]] for row in rows if row[1] in KINDS}}
        return super().executemany(sql, rows)

    def executescript(self, sql):
        what = "PRAGMA incremental_vacuum" if "vacuum" in sql else "schema"
        at(what, "before")
        result = super().executescript(sql)
        at(what, "after")
        return result

connect = sqlite3.connect
sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Watched, **options)

def path_of(fd):
    return os.readlink("/proc/self/fd/%d" % fd)

wrap(os, "fsync", "fsync of a snapshot", lambda fd: path_of(fd).endswith(".bgf.tmp"))
wrap(pathlib.Path, "rename", "rename of a snapshot", lambda path, _: path.name.endswith(".bgf.tmp"))
wrap(pathlib.Path, "rename", "rename of the mark", lambda path, _: path.name.endswith("mark.new"))

snapshots = importlib.import_module(storage + "snapshots")
recovery = importlib.import_module(storage + "recovery")
mark = importlib.import_module(storage + "mark")
snapshotter = importlib.import_module("bloomgated.snapshotter")
catalog = importlib.import_module("bloomgated.catalog")
for name in ("load", "move_aside", "remove"):
    wrap(snapshots.SnapshotStore, name, "SnapshotStore." + name)
wrap(mark.MarkFile, "write", "MarkFile.write")
wrap(recovery, "read_catalog", "read_catalog")
wrap(recovery, "_apply", "_apply")
wrap(snapshotter.Snapshotter, "_record", "Snapshotter._record")
wrap(snapshotter.Snapshotter, "forget", "Snapshotter.forget")
for name in ("with_entry", "without"):
    wrap(catalog.Catalog, name, "Catalog." + name)

chunks = snapshots.image_chunks
def watched_chunks(header):
    for chunk in chunks(header):
        yield chunk
        at("a chunk of a snapshot", "after")
snapshots.image_chunks = watched_chunks
"""


@dataclass(frozen=True)
class Point:
    """Where it dies: ``when`` ("before" or "after") the ``nth`` time that ``what`` is done while armed."""

    what: str
    when: str
    nth: int = 1

    def prelude(self, armed: Path, reached: Path) -> str:
        """For a DaemonProcess: armed while the file ``armed`` exists, it makes ``reached`` as it dies."""
        return _PRELUDE.format(
            armed=str(armed), reached=str(reached), what=self.what, when=self.when, nth=self.nth
        )

    def __str__(self) -> str:
        return f"{self.when} {self.what}" + (f" {self.nth}" if self.nth > 1 else "")
