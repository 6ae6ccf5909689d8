"""This host's notes about the files of a mirrored directory, and the counts of a run.

The notes hold each file's content name and its size, times and inode at that time. A file whose size, times and inode
are unchanged has the same content and is not read again. The notes are in the state directory. Without them, a run
compares the files' bytes.
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


@dataclass(slots=True)
class Synced:
    """The counts of a run.

    Attributes:
        files: Files written.
        unchanged: Files that were up to date.
        deleted: Files deleted.
        read_bytes: Bytes read: by ``sync`` from the files that it stored, by ``materialize`` through the tiers.
    """

    files: int = 0
    unchanged: int = 0
    deleted: int = 0
    read_bytes: int = 0

    _lock: ClassVar[threading.Lock] = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to the counts. Thread-safe."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


def content_of(store: Store, entry: Entry) -> str:
    """Return a name for the content of a file in a store."""
    if entry.manifest is not None:
        return f"{entry.manifest.digest_kind.label}:{entry.manifest.digest.hex()}:{entry.length}"
    assert entry.foreign is not None
    return f"{store.descriptor.uuid}:{entry.path}:{entry.foreign.version}"


class MirrorRecord:
    """The notes about one directory. Thread-safe.

    One process at a time works on a directory: the constructor waits until another process releases the lock.

    Args:
        root: The local directory.
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
        """Whether a file with this status is known to have this content."""
        return self._known.get(relative) == [content, *_look(status)]

    def note(self, relative: str, content: str, status: os.stat_result) -> None:
        """Note that a file with this status has this content."""
        with self._lock:
            self._known[relative] = [content, *_look(status)]

    def forget(self, relative: str) -> None:
        """Note that a file was removed."""
        with self._lock:
            self._known.pop(relative, None)

    def close(self) -> None:
        """Write the notes for the next run, and release the lock for the next process."""
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
