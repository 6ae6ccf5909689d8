"""This host's notes on the files of a mirrored directory, and the counts of a run.

The notes tell which content each file had, and how it looked then. A file that looks the same has the same content, so
it is not read again. The notes lie in the state directory; without them files are compared by their bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import xxhash

from tierfs.host.host import state_directory
from tierfs.host.private import make_private
from tierfs.store import Entry, Store

__all__ = ["MirrorRecord", "Synced", "content_of"]


@dataclass(slots=True)
class Synced:
    """The counts of a run.

    Attributes:
        files: How many files were written.
        unchanged: How many were as they should be.
        deleted: How many were deleted.
        read_bytes: Bytes that were read: of the files that were stored, or through the tiers.
    """

    files: int = 0
    unchanged: int = 0
    deleted: int = 0
    read_bytes: int = 0

    _lock: ClassVar[threading.Lock] = threading.Lock()

    def add(self, **counts: int) -> None:
        """Count more. Safe for use by many threads."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


def content_of(store: Store, entry: Entry) -> str:
    """Name the content of a file in a store."""
    if entry.manifest is not None:
        return f"{entry.manifest.digest_kind.label}:{entry.manifest.digest.hex()}:{entry.length}"
    assert entry.foreign is not None
    return f"{store.descriptor.uuid}:{entry.path}:{entry.foreign.version}"


class MirrorRecord:
    """See the module. Safe for use by many threads.

    One process at a time works on a directory: the next one waits here, and then finds it as it should be.

    Args:
        root: The directory on this host.
    """

    def __init__(self, root: str) -> None:
        folder = state_directory(None) / "mirrors"
        make_private(folder.parent)
        make_private(folder)
        self._path = (
            folder / f"{xxhash.xxh3_128_hexdigest(os.path.realpath(root).encode(errors='surrogateescape'))}.json"
        )
        self._held = open(self._path.with_suffix(".lock"), "wb")  # noqa: SIM115 - held until `close`
        fcntl.flock(self._held, fcntl.LOCK_EX)
        self._lock = threading.Lock()
        self._known: dict[str, list[object]] = _read(self._path)

    def knows(self, relative: str, content: str, status: os.stat_result) -> bool:
        """Check whether a file that looks like this is known to have this content."""
        return self._known.get(relative) == [content, *_look(status)]

    def note(self, relative: str, content: str, status: os.stat_result) -> None:
        """Note that a file that looks like this has this content."""
        with self._lock:
            self._known[relative] = [content, *_look(status)]

    def forget(self, relative: str) -> None:
        """Note that a file is gone."""
        with self._lock:
            self._known.pop(relative, None)

    def close(self) -> None:
        """Write the notes for the next run, and let the next process in."""
        try:
            self._save()
        finally:
            self._held.close()

    def _save(self) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}")
        with self._lock:
            text = json.dumps(self._known)
        try:
            temporary.write_text(text)
            os.replace(temporary, self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()


def _look(status: os.stat_result) -> list[object]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read(path: Path) -> dict[str, list[object]]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
