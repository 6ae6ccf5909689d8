"""Records that any process of this host has seen, so that a listing costs no GET for them.

One SQLite file in the state directory, shared by all stores whose object tier lies elsewhere. It is a cache: a version
never means two contents and every record carries its own checksum, so nothing in it is trusted further than that, and
losing it costs requests only. It is kept without a write-ahead log, and a connection lives for one batch, so processes and forks
share nothing but the file.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tierfs.host.private import make_private
from tierfs.objects.protocol import ObjectInfo, Version

__all__ = ["HostRecords"]

FILE_BYTES_MAX = 1 << 30
DROPPED_ROWS = 10_000  # at once, of those that came first
RECORD_BYTES_MAX = 64 * 1024
PENDING_MAX = 200
QUERY_KEYS_MAX = 500
BUSY_S_MAX = 2.0
_logger = logging.getLogger("tierfs.store")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    store TEXT NOT NULL, key TEXT NOT NULL, version TEXT NOT NULL, seen INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (store, key)
)
"""

# A record that somebody else saw later stays, unless the clock was set back since.
_NOTE = """
INSERT INTO records VALUES (?1, ?2, ?3, ?4, ?5)
ON CONFLICT (store, key) DO UPDATE SET version = excluded.version, seen = excluded.seen, data = excluded.data
WHERE excluded.seen >= seen OR seen > ?6
"""


class HostRecords:
    """The host's records of one store. Safe for use by many threads.

    If the file cannot be used, that is logged once, and records are fetched as if there were none.

    Args:
        uuid: The store's.
        directory: The state directory; made, for its owner alone, where it is missing.

    Attributes:
        failures: How often the file could not be used.
    """

    def __init__(self, uuid: str, directory: Path) -> None:
        self._uuid = uuid
        self._path = directory / "records.sqlite"
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[int, Version, bytes]] = {}  # with the time at which it was seen
        self._process = os.getpid()
        self.failures = 0
        atexit.register(self.flush)

    def __repr__(self) -> str:
        return f"HostRecords({str(self._path)!r}, failures={self.failures})"

    def add(self, key: str, version: Version, data: bytes) -> None:
        """Note what this version of a record is. Written to disk in batches, and when the process ends."""
        if len(data) > RECORD_BYTES_MAX:
            return
        with self._lock:
            self._pending[key] = (time.time_ns(), version, data)
            full = len(self._pending) >= PENDING_MAX
        if full:
            self.flush()

    def find(self, infos: Iterable[ObjectInfo]) -> dict[str, bytes]:
        """The records among these objects that the host has seen in just this version, by key."""
        versions = {info.key: info.version for info in infos}
        found: dict[str, bytes] = {}
        if not versions or self.failures or not self._path.exists():
            return found

        def look_up(connection: sqlite3.Connection) -> None:
            names = list(versions)
            for at in range(0, len(names), QUERY_KEYS_MAX):
                some = names[at : at + QUERY_KEYS_MAX]
                marks = ",".join("?" * len(some))
                query = f"SELECT key, version, data FROM records WHERE store = ? AND key IN ({marks})"  # noqa: S608 - only marks
                rows = connection.execute(query, [self._uuid, *some])
                found.update({key: data for key, version, data in rows if versions[key] == version})

        self._use(look_up)
        return found

    def newest(self, key: str) -> tuple[Version, bytes] | None:
        """The version of a record that the host saw last, and the record."""
        with self._lock:
            noted = self._pending.get(key)
        found: list[tuple[int, Version, bytes]] = [] if noted is None else [noted]

        def look_up(connection: sqlite3.Connection) -> None:
            query = "SELECT seen, version, data FROM records WHERE store = ? AND key = ?"
            found.extend(connection.execute(query, [self._uuid, key]))

        if not self.failures and self._path.exists():
            self._use(look_up)
        return max(found)[1:] if found else None

    def flush(self) -> None:
        """Write what was noted to disk. In a forked child nothing: what the parent noted is the parent's to write."""
        if os.getpid() != self._process:
            return
        with self._lock:
            pending, self._pending = self._pending, {}
        if not pending or self.failures:
            return
        rows = [
            (self._uuid, key, version, seen, data, time.time_ns()) for key, (seen, version, data) in pending.items()
        ]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(_NOTE, rows)
            oldest = "DELETE FROM records WHERE rowid IN (SELECT rowid FROM records ORDER BY rowid LIMIT ?)"
            while self._used_bytes(connection) > FILE_BYTES_MAX:
                if not connection.execute(oldest, [DROPPED_ROWS]).rowcount:
                    break

        self._use(write)

    def status(self) -> dict[str, int]:
        """The bytes of the file of all stores, and the room for them."""
        used: list[int] = []
        if not self.failures and self._path.exists():
            self._use(lambda connection: used.append(self._used_bytes(connection)))
        return {"bytes": sum(used), "bytes_max": FILE_BYTES_MAX}

    @staticmethod
    def _used_bytes(connection: sqlite3.Connection) -> int:
        """What is known without going through the rows."""
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return (int(pages) - int(free)) * int(size)

    def _use(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """One transaction. An error with the file is logged, and ends its use by this process."""
        try:
            make_private(self._path.parent)
            # SQLite would make it by the umask. Its journal is as open as it is itself.
            with contextlib.suppress(FileExistsError):
                self._path.touch(0o600, exist_ok=False)
            with contextlib.closing(sqlite3.connect(self._path, timeout=BUSY_S_MAX)) as connection, connection:
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute(_SCHEMA)
                work(connection)
        except (sqlite3.Error, OSError) as error:
            self.failures += 1
            _logger.warning("%s cannot be used, so records are fetched anew: %s", self._path, error)
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                with contextlib.suppress(OSError):
                    self._path.unlink()  # damaged: the next process begins a new one
