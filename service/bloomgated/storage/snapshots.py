"""Snapshot files: filter images written aside, synced, renamed, and then recorded in the journal.

Only recorded files are ever loaded. A file that fails validation is moved aside, never deleted; a file that
no record names is left over from a crash and removed at the next start.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from bloomgate.filters.errors import DataDamaged
from bloomgate.filters.image import Image, ImageHeader, ParsedHeader, image_chunks, read_header, read_image
from bloomgated.errors import StartError
from bloomgated.storage.directory import sync_directory
from bloomgated.storage.records import SnapshotFile

SUFFIX = ".bgf"
KEPT_PER_FILTER = 2


class SnapshotStore:
    """The ``snapshots`` folder of a data directory, made when it is first written to. All methods block."""

    def __init__(self, directory: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._folder = directory / "snapshots"
        self._wall_clock = wall_clock
        self._identity = _identity(directory)

    @property
    def folder(self) -> Path:
        """Where the files are; perhaps not made yet."""
        return self._folder

    def path(self, file: SnapshotFile) -> Path:
        """Where a file is."""
        return self._folder / file.name

    def write(self, filter_id: int, header: ImageHeader, ordinal: int) -> SnapshotFile:
        """Write the image of ``header`` and make it durable. ``ordinal`` tells a filter's files apart.

        Never writes over a file that is there: if that ordinal is taken, it takes the next one that is not.
        Raises OSError and leaves nothing behind if it cannot be written.
        """
        self._check_in_place()
        with suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
            sync_directory(self._folder.parent)
        while True:
            name = f"{filter_id:016x}-{header.generation}-{ordinal}{SUFFIX}"
            path, aside = self._folder / name, self._folder / f"{name}.tmp"
            if not (path.exists() or aside.exists()):
                break
            ordinal += 1
        size, crc = 0, b""
        try:
            with open(aside, "wb", buffering=0, opener=_private) as file:
                for chunk in image_chunks(header):
                    _write_all(file.fileno(), chunk)
                    size, crc = size + len(chunk), chunk
                os.fsync(file.fileno())
            aside.rename(path)
            sync_directory(self._folder)
        except BaseException:
            for leftover in (aside, path):
                with suppress(OSError):
                    leftover.unlink(missing_ok=True)
            raise
        # The last chunk of an image is the checksum of its bodies.
        return SnapshotFile(
            name,
            header.generation,
            header.seq,
            header.seq,
            size,
            int.from_bytes(crc, "little"),
            self._wall_clock(),
        )

    def load(self, file: SnapshotFile) -> Image:
        """Read the image that was recorded as ``file``.

        Raises DataDamaged(path, reason) for one that is gone or altered, StartError where nothing can be said
        of it.
        """
        path = self.path(file)
        try:
            with open(path, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != file.size:
                    raise DataDamaged(str(path), f"{size} bytes, {file.size} were recorded")
                image = read_image(stream, size, str(path))
        except MemoryError:
            raise StartError(f"{path}: needs more memory than there is") from None
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO):
                # Not the file's fault, so no verdict on it: trimming would make one final.
                raise StartError(f"{path}: cannot be read ({error.strerror})") from None
            raise DataDamaged(str(path), f"cannot be read ({error.strerror})") from None
        if (image.generation, image.seq, image.crc) != (file.generation, file.seq, file.crc):
            raise DataDamaged(str(path), "an image, but not the one that was recorded under this name")
        return image

    def move_aside(self, file: SnapshotFile) -> Path | None:
        """Rename a damaged file so that nothing loads it and nothing overwrites it. None if it is gone."""
        path = self.path(file)
        names = (f"{file.name}.damaged-{attempt}" for attempt in itertools.count())
        target = next(target for target in map(path.with_name, names) if not target.exists())
        try:
            path.rename(target)
        except FileNotFoundError:
            return None
        sync_directory(self._folder)
        return target

    def remove(self, name: str) -> None:
        """Delete a file that is no longer recorded."""
        with suppress(OSError):
            self._check_in_place()
            (self._folder / name).unlink(missing_ok=True)

    def _check_in_place(self) -> None:
        """Raise OSError where another directory stands at the path now: its files are another daemon's."""
        directory = self._folder.parent
        if _identity(directory) != self._identity:
            raise OSError(errno.ESTALE, "the data directory was moved away", str(directory))

    def headers(self) -> Iterator[tuple[Path, ParsedHeader]]:
        """Yield every snapshot file with a readable header, recorded or not."""
        for path in self._files():
            if path.suffix != SUFFIX:
                continue
            with suppress(DataDamaged, OSError), open(path, "rb") as stream:
                yield path, read_header(stream, str(path))

    def unrecorded(self, recorded: set[str]) -> list[str]:
        """Names of temporary files, and of snapshots that no record names."""
        return [
            path.name
            for path in self._files()
            if path.name.endswith(".tmp") or (path.name.endswith(SUFFIX) and path.name not in recorded)
        ]

    def moved_aside(self) -> list[str]:
        """Names of the files that were moved aside."""
        return [path.name for path in self._files() if f"{SUFFIX}.damaged-" in path.name]

    def _files(self) -> list[Path]:
        """What is in the folder, by name; none where there is none. Raises OSError."""
        try:
            return sorted(self._folder.iterdir())
        except FileNotFoundError:
            return []


def ordinal_of(file: SnapshotFile) -> int:
    """The number that tells a filter's files apart, off the file's name."""
    return int(file.name.removesuffix(SUFFIX).rpartition("-")[2])


def _identity(directory: Path) -> tuple[int, int]:
    found = os.stat(directory)
    return found.st_dev, found.st_ino


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
