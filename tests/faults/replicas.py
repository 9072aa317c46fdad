"""Processes of the lease harness: writers and replicas that take down all that a checker needs.

A writer adds one key after the other and takes down when each was acknowledged; now and then it drops its
filter and creates it again, which begins an epoch. A replica checks keys around what is acknowledged, and
takes down each "no" with its start and end. All times are of CLOCK_BOOTTIME, which they share.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bloomgate import BloomgateError, Client, ClientOptions, FilterNotFound

WRITERS = 2
ADDED = struct.Struct("<QQd")
"""Epoch, number, when it was acknowledged."""
SAID_NO = struct.Struct("<QQQdd")
"""Writer, epoch, number, start, end."""
ENDED = struct.Struct("<Qd")
"""Epoch, and a moment before its drop was asked for."""
_WORD = struct.Struct("<Q")
_STOP = WRITERS * 8
_LOCAL = _STOP + 8


def clock() -> float:
    """Seconds on the clock that all share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Shared:
    """What writers tell replicas: how far each has got, and that all is over."""

    SIZE = _LOCAL + 8

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self.SIZE)

    def publish(self, writer: int, epoch: int, added: int) -> None:
        """``added`` keys of that epoch are acknowledged."""
        _WORD.pack_into(self._map, writer * 8, epoch << 32 | added)

    def read(self, writer: int) -> tuple[int, int]:
        """Epoch, and how many keys of it are acknowledged."""
        (word,) = _WORD.unpack_from(self._map, writer * 8)
        return word >> 32, word & 0xFFFFFFFF

    def stop(self) -> None:
        """All is over."""
        self._map[_STOP] = 1

    @property
    def stopped(self) -> bool:
        """Whether it is."""
        return self._map[_STOP] == 1

    def was_local(self) -> None:
        """A replica answered from its copy."""
        self._map[_LOCAL] = 1

    @property
    def any_local(self) -> bool:
        """Whether one did."""
        return self._map[_LOCAL] == 1


def name_of(writer: int) -> str:
    """Each writer's filter is its own."""
    return f"written-by-{writer}"


def key_of(epoch: int, number: int) -> str:
    """No two are alike."""
    return f"{epoch}-{number}"


@contextlib.contextmanager
def records(folder: Path, kind: str) -> Iterator[BinaryIO]:
    """A file of records, that is whole however the process ends."""
    with (folder / f"{kind}-{os.getpid()}-{random.getrandbits(32):x}").open("ab", buffering=0) as file:
        yield file


def until_done(shared: Shared, call: object, *accepted: type[BaseException]) -> None:
    """Try until it succeeds, or fails as accepted, or all is over."""
    while not shared.stopped:
        try:
            call()  # type: ignore[operator]
        except accepted:
            return
        except BloomgateError:
            time.sleep(0.01)
        else:
            return


def write(target: str, folder: Path, writer: int, epoch_keys: int) -> None:
    """Add keys until all is over."""
    shared, name, draw = Shared(folder / "shared"), name_of(writer), random.Random(writer)
    client = Client(target, options=ClientOptions(add_timeout=5.0, admin_timeout=5.0))
    adds, ends = folder / f"added-{writer}", folder / f"ended-{writer}"
    with adds.open("ab", buffering=0) as added, ends.open("ab", buffering=0) as ended:
        for epoch in range(1, 1 << 30):
            shared.publish(writer, epoch, 0)
            # Small, so that it grows.
            until_done(shared, lambda: client.create_filter(name, 100, 0.001))
            for number in range(draw.randint(epoch_keys // 2, epoch_keys)):
                key = key_of(epoch, number)
                until_done(shared, lambda key=key: client.filter(name).add(key))
                if shared.stopped:
                    return
                added.write(ADDED.pack(epoch, number, clock()))
                shared.publish(writer, epoch, number + 1)
            ended.write(ENDED.pack(epoch, clock()))
            until_done(shared, lambda: client.drop_filter(name), FilterNotFound)


def replicate(target: str, folder: Path, seed: int) -> None:
    """Check keys until all is over; now and then in a forked child too."""
    shared, draw = Shared(folder / "shared"), random.Random(seed)
    client = Client(target, options=ClientOptions(check_timeout=0.05, reconnect_most=0.1))
    handles = [client.filter(name_of(writer), replica=True) for writer in range(WRITERS)]

    def check(said_no: BinaryIO) -> None:
        for writer, handle in enumerate(handles):
            epoch, added = shared.read(writer)
            near = [added - 1, added - 2, draw.randrange(added)] if added > 1 else []
            for number in (*near, added, added + 1):
                start = clock()
                answer = handle.might_contain(key_of(epoch, number))
                end = clock()
                if not answer:
                    said_no.write(SAID_NO.pack(writer, epoch, number, start, end))
            if handle.is_local:
                shared.was_local()

    with records(folder, "no") as said_no:
        while not shared.stopped:
            check(said_no)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            if draw.random() < 0.0003 and os.fork() == 0:
                # gRPC's own state after a fork is not what is tried here: the child must end by itself.
                signal.alarm(3)
                with records(folder, "no") as by_child:
                    for _ in range(50):
                        check(by_child)
                os._exit(0)


def main() -> None:
    """``write`` or ``replicate``, with their arguments."""
    verb, target, folder, number, *more = sys.argv[1:]
    if verb == "write":
        write(target, Path(folder), int(number), int(more[0]))
    else:
        replicate(target, Path(folder), int(number))
