"""Files that can be made again, in a folder that does not grow past a limit, shared by all processes."""

import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from mpp.errors import UserError

_LOCKS = 64
_DRAFT = ".writing"
_ABANDONED_SECONDS = 3600.0


def default_folder() -> Path:
    """Where this package keeps what it can make again: `mpp` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mpp"


class DiskCache:
    """A folder of files by name; the least recently opened ones go when it grows past its limit.

    Args:
        limit_bytes: None for no limit.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.folder, self.limit = folder, limit_bytes

    def open(
        self,
        name: str,
        make: Callable[[BinaryIO], None],
        sound: Callable[[BinaryIO], bool] = lambda file: True,
    ) -> BinaryIO:
        """The file of that name, which one process makes by writing to it and all others wait for.

        Args:
            sound: whether an opened file is what was written; one that a crash of the machine spoiled is made
                again.

        Raises UserError where the disk is full or the folder can't be written.
        """
        path = self.folder / name
        while True:
            try:
                file = path.open("rb")
            except FileNotFoundError:  # not made yet, or just dropped by another process
                self._make(path, make)
            except OSError as error:
                raise self._unusable(error) from None
            else:
                if not sound(file):
                    file.close()
                    path.unlink(missing_ok=True)
                    continue
                file.seek(0)
                with suppress(OSError):  # a folder that others own can still be read
                    os.utime(path)
                return file

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.folder} can't be used ({error.strerror or error}); make room, lower runtime.cache_gb, or name "
            "another folder in the environment's XDG_CACHE_HOME"
        )

    def _make(self, path: Path, make: Callable[[BinaryIO], None]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / f".lock_{zlib.crc32(path.name.encode()) % _LOCKS:02d}"):
                if path.is_file():
                    return
                draft = path.with_name(f".{path.name}{_DRAFT}")
                with draft.open("wb") as file:
                    make(file)
                if self.limit is not None:
                    self._drop(self.limit)  # the draft counts already
                draft.replace(path)
        except OSError as error:
            raise self._unusable(error) from None

    def _drop(self, limit: int) -> None:
        """Removes the least recently opened files until the rest is no larger than the limit."""
        files, total = [], 0
        for entry in os.scandir(self.folder):
            try:
                status = entry.stat()
            except FileNotFoundError:  # dropped by another process
                continue
            total += status.st_size
            abandoned = time.time() - status.st_mtime > _ABANDONED_SECONDS  # by a writer that was killed
            if not entry.name.startswith(".") or (entry.name.endswith(_DRAFT) and abandoned):
                files.append((status.st_mtime, status.st_size, entry.path))
        for _, size, path in sorted(files):
            if total <= limit:
                return
            Path(path).unlink(missing_ok=True)
            total -= size
