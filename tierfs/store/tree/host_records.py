"""Records that any process of this host has seen, so that a listing sends no GET for them.

All stores whose object tier is elsewhere share one SQLite file in the state directory. It is a cache: losing it costs
requests only, except while the object tier does not answer. A change is then based on the version that the host saw
last, and without this file on what its own process saw. A version never has two contents, and every record carries its
own checksum, so a stale or damaged entry is detected. The file has no write-ahead log, and a connection lives for one
batch, so processes and forks share only the file.
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

from tierfs.host.filesystems import make_private
from tierfs.objects.protocol import ObjectInfo, Version

FILE_BYTES_MAX = 1 << 30
DROPPED_ROWS = 10_000  # the oldest rows, deleted together
RECORD_BYTES_MAX = 64 * 1024
PENDING_MAX = 200
QUERY_KEYS_MAX = 500
BELOW_MAX = 1000  # one is enough, unless most were deleted
BUSY_S_MAX = 2.0
NOT_THERE = Version("")
_logger = logging.getLogger("tierfs.store")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    store TEXT NOT NULL, key TEXT NOT NULL, version TEXT NOT NULL, seen INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (store, key)
)
"""

# A record that another process saw later stays, unless the clock was set back since.
_NOTE = """
INSERT INTO records VALUES (?1, ?2, ?3, ?4, ?5)
ON CONFLICT (store, key) DO UPDATE SET version = excluded.version, seen = excluded.seen, data = excluded.data
WHERE excluded.seen >= seen OR seen > ?6
"""


class HostRecords:
    """The host's records of one store. Safe for use by many threads.

    If the file cannot be used, this is logged once, and this process fetches records as if there were no file.

    Args:
        directory: The state directory. Created with mode 0700 if missing.

    Attributes:
        failures: How often the file could not be used.
    """

    def __init__(self, uuid: str, directory: Path) -> None:
        self._uuid = uuid
        self._path = directory / "records.sqlite"
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[int, Version, bytes]] = {}  # with the time it was seen, in ns
        self._process = os.getpid()
        self.failures = 0
        atexit.register(self.flush)

    def add(self, key: str, version: Version, data: bytes, seen_ns: int | None = None) -> None:
        """Keep the record of this version of a key. Of one longer than RECORD_BYTES_MAX, keep the version only.

        Records are written to disk in batches, and at process exit. ``seen_ns`` is the time before the request that
        found it, by default now. A version that was seen later stays: a lookup may be answered after a publication.
        """
        seen_ns = time.time_ns() if seen_ns is None else seen_ns
        with self._lock:
            if key in self._pending and self._pending[key][0] > seen_ns:
                return
            self._pending[key] = (seen_ns, version, data if len(data) <= RECORD_BYTES_MAX else b"")
            full = len(self._pending) >= PENDING_MAX
        if full:
            self.flush()

    def forget(self, key: str, seen_ns: int) -> None:
        """Note that nothing is at a key, and `share` that. For ``seen_ns`` see `add`."""
        kept = self.newest(key)
        if kept is not None and kept[0] != NOT_THERE:
            self.add(key, NOT_THERE, kept[1], seen_ns)
            self.share(key)

    def share(self, key: str) -> None:
        """Write what was added at a key to disk at once if the disk has another version.

        The next save may be based on it, also in another process, and this one may be killed before.
        """
        with self._lock:
            noted = self._pending.get(key)
        stored = None if noted is None else self._stored(key)
        if noted is not None and stored is not None and stored[1] != noted[1]:
            self.flush()

    def find(self, infos: Iterable[ObjectInfo]) -> dict[str, bytes]:
        """Return, by key, the records of the objects that the host has seen in exactly this version."""
        versions = {info.key: info.version for info in infos}
        found: dict[str, bytes] = {}
        if not versions or self.failures or not self._path.exists():
            return found

        def look_up(connection: sqlite3.Connection) -> None:
            names = list(versions)
            for at in range(0, len(names), QUERY_KEYS_MAX):
                some = names[at : at + QUERY_KEYS_MAX]
                marks = ",".join("?" * len(some))
                query = f"SELECT key, version, data FROM records WHERE store = ? AND key IN ({marks})"  # noqa: S608 - only placeholders
                rows = connection.execute(query, [self._uuid, *some])
                found.update({key: data for key, version, data in rows if data and versions[key] == version})

        self._use(look_up)
        return found

    def newest(self, key: str) -> tuple[Version, bytes] | None:
        """Return the version of a record that the host saw last, and the record.

        The version is NOT_THERE if nothing was at the key when the host looked last. The record is then the last one
        that was there. It is empty if it was too long to keep.
        """
        with self._lock:
            noted = self._pending.get(key)
        found = [each for each in (noted, self._stored(key)) if each is not None]
        return max(found)[1:] if found else None

    def _stored(self, key: str) -> tuple[int, Version, bytes] | None:
        found: list[tuple[int, Version, bytes]] = []

        def look_up(connection: sqlite3.Connection) -> None:
            query = "SELECT seen, version, data FROM records WHERE store = ? AND key = ?"
            found.extend(connection.execute(query, [self._uuid, key]))

        if not self.failures and self._path.exists():
            self._use(look_up)
        return found[0] if found else None

    def below(self, prefix: str) -> dict[str, bytes]:
        """Return, by key, records that the host saw last below a prefix, which ends with a slash. At most BELOW_MAX.

        A record that was too long to keep is empty.
        """
        found: dict[str, tuple[Version, bytes]] = {}

        def look_up(connection: sqlite3.Connection) -> None:
            query = "SELECT key, version, data FROM records WHERE store = ? AND key >= ? AND key < ? LIMIT ?"
            rows = connection.execute(query, [self._uuid, prefix, f"{prefix[:-1]}0", BELOW_MAX])
            found.update({key: (version, data) for key, version, data in rows})

        if not self.failures and self._path.exists():
            self._use(look_up)
        with self._lock:
            found |= {key: noted[1:] for key, noted in self._pending.items() if key.startswith(prefix)}
        return {key: data for key, (version, data) in found.items() if version != NOT_THERE}

    def flush(self) -> None:
        """Write the added records to disk. A forked child writes none, because the parent writes its own."""
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
        """Return the bytes in use in the file, which all stores share, and the budget."""
        used: list[int] = []
        if not self.failures and self._path.exists():
            self._use(lambda connection: used.append(self._used_bytes(connection)))
        return {"bytes": sum(used), "bytes_max": FILE_BYTES_MAX}

    @staticmethod
    def _used_bytes(connection: sqlite3.Connection) -> int:
        """Return the bytes in use, without a scan of the rows."""
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return (int(pages) - int(free)) * int(size)

    def _use(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Run ``work`` in one transaction. An error is logged, and this process no longer uses the file."""
        try:
            make_private(self._path.parent)
            # SQLite would create the file with the umask's mode. Its journal gets the mode of the file.
            with contextlib.suppress(FileExistsError):
                self._path.touch(0o600, exist_ok=False)
            with contextlib.closing(sqlite3.connect(self._path, timeout=BUSY_S_MAX)) as connection, connection:
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute(_SCHEMA)
                work(connection)
        except (sqlite3.Error, OSError) as error:
            self.failures += 1
            _logger.warning("%s cannot be used, so records are fetched again: %s", self._path, error)
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                with contextlib.suppress(OSError):
                    self._path.unlink()  # damaged: the next process creates a new file
