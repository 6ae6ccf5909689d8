"""nvme.db, the index of committed chunks and drafts: the flusher's connection for writing, and those of readers.

It uses SQLite with a rollback journal, never a write-ahead log. SQLite 3.7.0 to 3.51.2 can damage a database with a
write-ahead log when a checkpoint coincides with a reset of the log. A commit is durable when it returns
(``synchronous=FULL``). SQLite keeps the journal and zeroes its header, which FULL flushes, too.

Only SQLite may open or close this file: closing any other descriptor of it would drop the process's locks.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tierfs._fork import leave_to_parent, renew_in_children
from tierfs.errors import CorruptionError, FormatError
from tierfs.host.filesystems import flush_directory
from tierfs.host.nvme.disk_errors import disk_errors

FORMAT = 1
WRITER_BUSY_S = 60.0
BUSY_PAUSE_S = 0.0002
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE chunks (
    name BLOB PRIMARY KEY, offset INTEGER NOT NULL, extent_bytes INTEGER NOT NULL, length INTEGER NOT NULL,
    meta BLOB NOT NULL, serial INTEGER NOT NULL, used_s INTEGER NOT NULL, bad INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE drafts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, write_id BLOB NOT NULL UNIQUE, path TEXT NOT NULL, offset INTEGER NOT NULL,
    extent_bytes INTEGER NOT NULL, serial INTEGER NOT NULL, state TEXT NOT NULL, note TEXT NOT NULL,
    at_ns INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE INDEX drafts_path ON drafts (path);
CREATE TABLE refs (holder TEXT NOT NULL, name BLOB NOT NULL, PRIMARY KEY (holder, name)) WITHOUT ROWID;
CREATE INDEX refs_name ON refs (name);
CREATE TABLE releases (serial INTEGER PRIMARY KEY, offset INTEGER NOT NULL);
"""

INSERT_CHUNK = "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, 0)"
INSERT_DRAFT = "INSERT INTO drafts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
INSERT_RELEASE = "INSERT INTO releases VALUES (?, ?)"
INSERT_REF = "INSERT OR IGNORE INTO refs VALUES (?, ?)"


class _IndexConnection(sqlite3.Connection):
    """A connection that a forked child neither uses nor closes. Closing it would undo the parent's transaction."""

    def _renew(self) -> None:
        leave_to_parent(self)


def _connect(path: Path, *, busy_s: float, create: bool = False) -> _IndexConnection:
    # Readers need write access, too: after a crash the first process that opens the database rolls the journal back.
    uri = f"file:{quote(os.fsencode(path))}?mode={'rwc' if create else 'rw'}"
    connection = sqlite3.connect(
        uri, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False, factory=_IndexConnection
    )
    renew_in_children(connection)
    return connection


class Index:
    """The connection for writing. One per store and host. Not thread-safe.

    Args:
        path: The database, which must exist; see `create`.

    Attributes:
        epoch: The epoch of the arena that the index belongs to.

    Raises:
        CorruptionError: The file is damaged, or is not an index.
        FormatError: A newer version of tierfs made it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path):
            self._connection = _connect(path, busy_s=WRITER_BUSY_S)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r}, epoch={self.epoch.hex()})"

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        epoch: bytes,
        rows: Iterable[tuple[str, Sequence[Any]]] = (),
        make_way: Callable[[], None] | None = None,
    ) -> None:
        """Create a database with these rows, and put it at ``path`` atomically.

        Args:
            path: The database.
            epoch: The arena's epoch.
            rows: SQL statements with their values.
            make_way: Called when the new database is complete, to move an existing one aside.

        Raises:
            CapacityError: The disk is full. Nothing was changed.
        """
        temporary = path.with_name(f"{path.name}.new")
        leftovers = (temporary, temporary.with_name(f"{temporary.name}-journal"))
        with disk_errors(path):
            for file in leftovers:
                file.unlink(missing_ok=True)
            try:
                _fill(temporary, epoch, rows)
                if make_way is not None:
                    make_way()
                os.rename(temporary, path)
            finally:
                for file in leftovers:
                    file.unlink(missing_ok=True)
            flush_directory(path.parent)

    def check(self) -> None:
        """Read the whole database and check its consistency.

        Raises:
            CorruptionError: The database is damaged.
        """
        # Only integrity_check compares a table with its indexes. It takes three times as long, and a wrong row about
        # a clean chunk loses nothing.
        for check in ("quick_check(1)", "integrity_check(drafts)", "integrity_check(refs)"):
            rows = self.select(f"PRAGMA {check}")
            if rows != [("ok",)]:
                raise CorruptionError(f"{self.path}: {rows[0][0] if rows else 'nothing to read'}", tier="nvme")

    def select(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with disk_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    def meta(self, key: str, default: int) -> int:
        """Return the number that the table ``meta`` has for ``key``, or ``default``."""
        rows = self.select("SELECT value FROM meta WHERE key = ?", [key])
        return int(rows[0][0]) if rows else default

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit the statements of the block durably when it ends. If the block raises, they have no effect.

        Raises:
            CapacityError: The disk is full. Nothing was changed.
            StoreError, CorruptionError: The commit failed for another reason, and may have taken effect.
        """
        with disk_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # some errors have rolled the transaction back already
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        self._connection.close()

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA journal_mode=PERSIST")
        self._connection.execute("PRAGMA journal_size_limit=67108864")
        self._connection.execute("PRAGMA synchronous=FULL")
        self.epoch = _epoch_of(self._connection, self.path)


def _fill(path: Path, epoch: bytes, rows: Iterable[tuple[str, Sequence[Any]]]) -> None:
    connection = _connect(path, busy_s=WRITER_BUSY_S, create=True)
    try:
        os.chmod(path, 0o600)
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(f"BEGIN; {_SCHEMA}")
        for statement, values in rows:
            connection.execute(statement, values)
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [("format", FORMAT), ("epoch", epoch)])
        connection.execute("COMMIT")
    finally:
        connection.close()


def _epoch_of(connection: sqlite3.Connection, path: Path) -> bytes:
    try:
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    except sqlite3.OperationalError as error:
        if "no such" not in str(error):
            raise
        raise CorruptionError(f"{path}: a database, but not an index", tier="nvme") from error
    epoch, version = meta.get("epoch"), meta.get("format")
    if not isinstance(epoch, bytes) or not isinstance(version, int):
        raise CorruptionError(f"{path}: an index without an epoch", tier="nvme")
    if version > FORMAT:
        raise FormatError(
            f"{path}: has format {version}; this tierfs reads format {FORMAT}: use a newer tierfs", tier="nvme"
        )
    return epoch


class IndexReader:
    """A connection for reading, opened at the first query, and opened again when the database was replaced.

    Thread-safe.

    Args:
        path: The database. It need not exist.
        busy_s: Longest wait of a query for the writer's commit, in seconds.
    """

    def __init__(self, path: Path, *, busy_s: float) -> None:
        self.path = path
        self._busy_s = busy_s
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._identity = (0, 0)
        self._epoch = b""

    def __repr__(self) -> str:
        return f"IndexReader({str(self.path)!r}, busy_s={self._busy_s})"

    def select(self, query: str, values: Sequence[Any] = ()) -> tuple[bytes, list[Any]] | None:
        """Return the arena's epoch and all rows of a query, or None if there is no index.

        Raises:
            StoreError: The index cannot be read. Transient if the writer kept it busy for too long.
            CorruptionError: The file is damaged, or is not an index.
            FormatError: A newer version of tierfs made it.
        """
        with self._lock, disk_errors(self.path):
            while (identity := self._found()) is not None:
                try:
                    connection = self._opened(identity)
                    return self._epoch, self._rows(connection, query, values)
                except BaseException as error:  # noqa: PERF203 - nothing waits for it
                    # A rebuild may replace the database during the query. Then retry with the new one.
                    replaced = isinstance(error, sqlite3.OperationalError) and self._found() != identity
                    self._close()
                    if not replaced:
                        raise
            self._close()
            return None

    def _rows(self, connection: sqlite3.Connection, query: str, values: Sequence[Any]) -> list[Any]:
        """Run a query, and retry it every `BUSY_PAUSE_S` while the database is locked.

        A commit takes about a millisecond. SQLite's own busy handler would retry after 1, 2, 5 and 10 ms.
        """
        ends = time.monotonic() + self._busy_s
        while True:
            try:
                return connection.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() >= ends:
                    raise
            time.sleep(BUSY_PAUSE_S)

    def close(self) -> None:
        """Close the connection. The next query opens a new one."""
        with self._lock:
            self._close()

    def _found(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _opened(self, identity: tuple[int, int]) -> sqlite3.Connection:
        if self._connection is None or self._identity != identity:
            self._close()
            self._connection = _connect(self.path, busy_s=self._busy_s)
            self._connection.execute("PRAGMA query_only=ON")
            self._epoch = _epoch_of(self._connection, self.path)
            self._connection.execute("PRAGMA busy_timeout=0")  # see `_rows`
            self._identity = identity
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
