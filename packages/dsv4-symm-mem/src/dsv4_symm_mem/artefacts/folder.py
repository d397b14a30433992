# SPDX-License-Identifier: Apache-2.0
"""The folder that keeps artefacts: whose it is, who writes, and how it stays small.

Contract: what is read here is loaded as code, so the folder and each file must belong to this user or to
root, and be writable for nobody else; anything else is left alone, with a reason. A file appears by a rename,
whole. Any number of processes may read, write and clean up at once. Nothing in here raises for a folder that
cannot be used: a cache that is missing makes a start slow, not impossible.

One process compiles while others wait for it. The lock is `flock`, which the kernel of the operating system
takes back from a process that dies, however it dies; from one that is stopped nobody does, so a wait ends
after `LOCK_SECONDS` and whoever waited compiles as well. There is a lock for each kernel and architecture,
whatever the digest, so locks need no cleaning up.

Rejected: lock files that exist or not (they outlive their process); `lockf` (POSIX locks are lost when the
process closes any descriptor of the file, and do not exclude threads).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dsv4_symm_mem.artefacts.container import Artefact, DamagedError, pack, unpack

CACHE_VARIABLE = "DSV4_CACHE_DIR"
OFF = "off"
LIMIT_BYTES = 256 << 20
"""Artefacts beyond this are removed, least recently used first: room for some hundred complete sets."""
UNFINISHED = ".unfinished-"
STALE_SECONDS = 3600.0
"""Age at which an unfinished file's writer is taken for dead."""
LOCK_SECONDS = 120.0
POLL_SECONDS = 0.02


def default_folder() -> Path | None:
    """`DSV4_CACHE_DIR`, else `dsv4` in `XDG_CACHE_HOME` or `~/.cache`; None for "off", or without a home."""
    if chosen := os.environ.get(CACHE_VARIABLE, "").strip():
        return None if chosen.lower() == OFF else Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "dsv4"
    try:
        return Path.home() / ".cache" / "dsv4"
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Entry:
    """A file that looks like an artefact.

    Attributes:
        path: The file.
        nbytes: Its size.
        used: When it was last written or loaded, seconds since the epoch.
    """

    path: Path
    nbytes: int
    used: float


class CacheFolder:
    """A folder of artefacts.

    Attributes:
        path: Where; None when caching is off.
        obstacle: Why nothing can be read here; empty if it can.
        read_only: Why nothing can be written; empty if it can.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.obstacle = self.read_only = ""
        if path is None:
            self.obstacle = f"{CACHE_VARIABLE} is {OFF}, or there is no home directory"
        else:
            self.obstacle = _open_obstacle(path)
            if not self.obstacle and not os.access(path, os.W_OK | os.X_OK):
                self.read_only = f"{path} cannot be written"
        self.read_only = self.read_only or self.obstacle

    def file(self, name: str) -> Path:
        """Path of the file `name`."""
        assert self.path is not None, "a caller has checked the obstacle"
        return self.path / name

    def read(self, name: str, *, touch: bool = True) -> Artefact:
        """The artefact in the file `name`, which counts as used now if `touch`.

        Raises:
            FileNotFoundError: There is none.
            DamagedError: It is not trusted, or damaged.
        """
        try:
            # Without O_NONBLOCK a pipe of this name would be waited for.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self.file(name), flags)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise
            raise DamagedError(f"it cannot be opened: {error.strerror}") from None
        try:
            described = os.fstat(descriptor)
            if distrust := _distrust(described):
                raise DamagedError(distrust)
            if not stat.S_ISREG(described.st_mode):
                raise DamagedError("it is no regular file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                artefact = unpack(file.read())
            if touch:
                with suppress(OSError):
                    os.utime(descriptor)
        finally:
            os.close(descriptor)
        return artefact

    def write(self, name: str, artefact: Artefact) -> Path:
        """Put an artefact where `read` finds it, replacing what is there, and keep the folder small.

        Raises:
            OSError: It cannot be written.
        """
        target = self.file(name)
        descriptor, unfinished = tempfile.mkstemp(prefix=UNFINISHED, dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pack(artefact))
                file.flush()
                os.fsync(descriptor)  # a rename may survive a crash that the content did not
            os.replace(unfinished, target)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
        self.trim()
        return target

    def entries(self) -> list[Entry]:
        """The artefacts, damaged ones too, most recently used first."""
        found = []
        if self.path is not None and not self.obstacle:
            for path in self.path.glob("*.o"):
                with suppress(OSError):  # another process may remove it
                    described = path.lstat()
                    if stat.S_ISREG(described.st_mode):
                        found.append(Entry(path, described.st_size, described.st_mtime))
        return sorted(found, key=lambda entry: (-entry.used, entry.path))

    def trim(self, limit: int = LIMIT_BYTES) -> list[Path]:
        """Remove the least recently used artefacts beyond `limit` bytes, and what dead writers left.

        Returns:
            The artefacts removed.
        """
        removed, kept = [], 0
        for entry in self.entries():
            kept += entry.nbytes
            if kept > limit:
                with suppress(OSError):
                    entry.path.unlink()
                    removed.append(entry.path)
        if self.path is not None:
            for path in self.path.glob(f"{UNFINISHED}*"):
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > STALE_SECONDS:
                        path.unlink()
        return removed

    @contextmanager
    def lock(self, name: str, seconds: float = LOCK_SECONDS) -> Iterator[bool]:
        """Hold the lock `name`; yields False when another process still had it after `seconds`.

        Yields True as well where locks do not work: two processes may then compile the same, which costs
        time and nothing else.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.file(f"{name}.lock"), flags, 0o600)
        except OSError:
            yield True
            return
        try:
            yield _acquire(descriptor, seconds)
        finally:
            os.close(descriptor)


def _acquire(descriptor: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        except OSError:
            return True


def _open_obstacle(path: Path) -> str:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{path} cannot be made: {error.strerror}"
    try:
        described = path.stat()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if distrust := _distrust(described):
        return f"{path} is not trusted: {distrust}"
    return "" if os.access(path, os.R_OK | os.X_OK) else f"{path} cannot be read"


def _distrust(described: os.stat_result) -> str:
    if described.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    if described.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return ""
