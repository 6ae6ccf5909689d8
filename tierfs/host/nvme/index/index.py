"""nvme.db: what the arena holds, committed. The writing connection, and the reading ones of all other processes.

SQLite with a rollback journal, never a write-ahead log, since SQLite 3.7.0 to 3.51.2 can damage a database with one when a
checkpoint meets a reset of the log. A commit is durable when it returns (``synchronous=FULL``). The journal is kept and its
header zeroed, which FULL flushes, too.

Nobody may open or close this file but through SQLite: closing any descriptor of it would drop the process's locks.
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

__all__ = ["Index", "IndexReader"]

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
    """One that a forked child neither uses nor closes: closing would undo what the parent is writing."""

    def _renew(self) -> None:
        leave_to_parent(self)


def _connect(path: Path, *, busy_s: float, create: bool = False) -> _IndexConnection:
    # Readers, too, need the right to write: after a crash the first to come rolls the journal back.
    uri = f"file:{quote(os.fsencode(path))}?mode={'rwc' if create else 'rw'}"
    connection = sqlite3.connect(
        uri, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False, factory=_IndexConnection
    )
    renew_in_children(connection)
    return connection


class Index:
    """The writing connection. One per store and host; not safe for use by many threads at once.

    Args:
        path: The database, which must be there; see `create`.

    Attributes:
        epoch: Its arena's.

    Raises:
        CorruptionError: It is damaged, or no database.
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
        """Make a database with these rows in it and put it in its place, whole or not at all.

        Args:
            path: Where.
            epoch: The arena's.
            rows: Statements with their values.
            make_way: Called when it is ready, to move what is there out of the way; not needed where nothing is.

        Raises:
            CapacityError: The disk is full; nothing was changed.
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
        """Read the whole database and see that it is sound in itself.

        Raises:
            CorruptionError: It is not.
        """
        rows = self.select("PRAGMA quick_check(1)")
        if rows != [("ok",)]:
            raise CorruptionError(f"{self.path}: {rows[0][0] if rows else 'nothing to read'}", tier="nvme")

    def select(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows that a query finds."""
        with disk_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    def meta(self, key: str, default: int) -> int:
        """A number kept under ``key``."""
        rows = self.select("SELECT value FROM meta WHERE key = ?", [key])
        return int(rows[0][0]) if rows else default

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Statements that are committed, durably, when the block ends, or have no effect if it raises.

        Raises:
            CapacityError: The disk is full. Nothing was changed.
            StoreError, CorruptionError: It failed for another reason; look whether it took effect.
        """
        with disk_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # some failures have rolled it back already
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the connection."""
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
        raise FormatError(f"{path}: of format {version}, this tierfs knows {FORMAT}: use a newer tierfs", tier="nvme")
    return epoch


class IndexReader:
    """A reading connection, opened when it is needed, and anew when the database was replaced.

    Safe for use by many threads.

    Args:
        path: The database; it need not be there.
        busy_s: How long a query waits at most while the writer commits.
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
        """All rows that a query finds, and the epoch of the arena that they are about; None if there is no index.

        Raises:
            StoreError: Transient where the writer kept it busy for too long.
            CorruptionError: It is damaged, or no database.
            FormatError: A newer version of tierfs made it.
        """
        with self._lock, disk_errors(self.path):
            while (identity := self._found()) is not None:
                try:
                    connection = self._opened(identity)
                    return self._epoch, self._rows(connection, query, values)
                except BaseException as error:  # noqa: PERF203 - nothing waits for it
                    # One that is being made anew goes away under the query: what failed then is not the one that is there.
                    replaced = isinstance(error, sqlite3.OperationalError) and self._found() != identity
                    self._close()
                    if not replaced:
                        raise
            self._close()
            return None

    def _rows(self, connection: sqlite3.Connection, query: str, values: Sequence[Any]) -> list[Any]:
        """The rows of a query. A commit takes a millisecond, and SQLite itself would look again after one, two, five and ten."""
        ends = time.monotonic() + self._busy_s
        while True:
            try:
                return connection.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() >= ends:
                    raise
            time.sleep(BUSY_PAUSE_S)

    def close(self) -> None:
        """Close the connection; the next query opens one."""
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
