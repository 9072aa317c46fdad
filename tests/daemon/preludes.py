"""What a daemon's process runs first where a test wants to hold or break it.

What holds does so until the file ``{path}`` is there.
"""

HOLD_RECOVERY = """
import os, time
from bloomgated import composition
recover = composition.open_storage
def held(*arguments):
    while not os.path.exists({path!r}):
        time.sleep(0.005)
    return recover(*arguments)
composition.open_storage = held
"""
HOLD_CALLS = """
import asyncio, os
from bloomgated.api import convert
from bloomgated.gate import Gate
# A check of one key goes by the same verb as those of many.
convert.one_key_of = lambda *_: None
verb = Gate.{verb}
async def held(*arguments):
    while not os.path.exists({path!r}):
        await asyncio.sleep(0.005)
    return await verb(*arguments)
Gate.{verb} = held
"""
HOLD_SNAPSHOTS = """
import os, time
from bloomgated.storage.snapshots import SnapshotStore
write = SnapshotStore.write
def held(*arguments):
    open({path!r} + ".begun", "w").close()
    while not os.path.exists({path!r}):
        time.sleep(0.005)
    return write(*arguments)
SnapshotStore.write = held
"""
SMALL_FILES = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
"""
NO_SNAPSHOT_RECORDS = """
from bloomgated.storage.sqlite import SqliteJournal
commit = SqliteJournal._commit
def failing(self, connection, mark_file, group):
    if any(row.kind == 5 for _, row in group):
        raise OSError(5, "Input/output error")
    return commit(self, connection, mark_file, group)
SqliteJournal._commit = failing
"""
