"""The index: commits persist, readers wait only briefly, and both survive damage and replacement of the file."""

import gc
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from tierfs.errors import CorruptionError, FormatError, StoreError
from tierfs.host.nvme.index.index import INSERT_CHUNK, Index, IndexReader

EPOCH = b"e" * 16
COUNT = "SELECT COUNT(*) FROM chunks"


def chunk_row(number, size=65536):
    return (b"%017d" % number, (number + 1) * size, size, 100, b"m" * 600, number, 0)


@pytest.fixture
def path(tmp_path):
    Index.create(tmp_path / "nvme.db", epoch=EPOCH)
    return tmp_path / "nvme.db"


def test_a_commit_is_flushed_and_no_write_ahead_log_is_used(path):
    index = Index(path)
    assert index.select("PRAGMA journal_mode") == [("persist",)]
    assert index.select("PRAGMA synchronous") == [(2,)]
    with index.transaction() as database:
        database.execute(INSERT_CHUNK, chunk_row(1))
    assert not os.path.exists(f"{path}-wal")
    index.close()


def test_a_change_that_fails_has_no_effect(path):
    index = Index(path)
    with pytest.raises(RuntimeError), index.transaction() as database:
        database.execute(INSERT_CHUNK, chunk_row(1))
        raise RuntimeError
    assert index.select(COUNT) == [(0,)]
    with index.transaction() as database:
        database.execute(INSERT_CHUNK, chunk_row(1))
    assert index.select(COUNT) == [(1,)]
    index.close()


def test_a_reader_finds_nothing_before_there_is_an_index_and_then_what_is_in_it(tmp_path):
    reader = IndexReader(tmp_path / "nvme.db", busy_s=1)
    assert reader.select(COUNT) is None
    Index.create(tmp_path / "nvme.db", epoch=EPOCH, rows=[(INSERT_CHUNK, chunk_row(1))])
    assert reader.select(COUNT) == (EPOCH, [(1,)])
    reader.close()


def test_a_reader_turns_to_the_index_that_took_the_place_of_another(path):
    reader = IndexReader(path, busy_s=1)
    assert reader.select(COUNT) == (EPOCH, [(0,)])
    os.rename(path, f"{path}.damaged-1")
    assert reader.select(COUNT) is None
    Index.create(path, epoch=b"f" * 16, rows=[(INSERT_CHUNK, chunk_row(1))])
    assert reader.select(COUNT) == (b"f" * 16, [(1,)])
    reader.close()


def test_a_reader_waits_no_longer_than_it_was_told(path):
    other = sqlite3.connect(path, isolation_level=None)
    reader = IndexReader(path, busy_s=0.2)
    assert reader.select(COUNT)
    other.execute("BEGIN EXCLUSIVE")
    start = time.monotonic()
    with pytest.raises(StoreError) as caught:
        reader.select(COUNT)
    assert caught.value.transient
    assert 0.1 < time.monotonic() - start < 20
    other.execute("ROLLBACK")
    other.close()
    assert reader.select(COUNT)
    reader.close()


def test_a_reader_cannot_write(path):
    reader = IndexReader(path, busy_s=1)
    with pytest.raises(Exception, match="readonly"):
        reader.select("DELETE FROM chunks")
    reader.close()


@pytest.mark.parametrize("made_anew", [True, False])
def test_an_index_that_goes_away_under_a_query_is_no_error_of_the_one_that_is_there(path, made_anew, monkeypatch):
    index = Index(path)
    with index.transaction() as database:  # leaves a journal; SQLite looks for it at the expected path
        database.execute(INSERT_CHUNK, chunk_row(1))
    index.close()
    reader = IndexReader(path, busy_s=1)
    opened, away = reader._opened, []

    def goes_away(identity):
        connection = opened(identity)
        if not away:
            away.append(os.rename(path, f"{path}.damaged-1"))
            if made_anew:
                Index.create(path, epoch=EPOCH[::-1])
        return connection

    monkeypatch.setattr(reader, "_opened", goes_away)
    found = reader.select(COUNT)
    assert away
    # If SQLite does not notice the replacement, the old index may answer: the query could have run before it.
    assert found in ((EPOCH, [(1,)]), (EPOCH[::-1], [(0,)]) if made_anew else None)
    assert reader.select(COUNT) == ((EPOCH[::-1], [(0,)]) if made_anew else None)
    reader.close()


def test_an_index_that_stays_and_cannot_be_read_is_an_error(path, monkeypatch):
    reader = IndexReader(path, busy_s=1)

    def fails(identity):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(reader, "_opened", fails)
    with pytest.raises(StoreError, match="disk I/O error"):
        reader.select(COUNT)


def test_a_forked_child_leaves_its_parents_connections_alone(path):
    reader, index = IndexReader(path, busy_s=1), Index(path)
    reader.select(COUNT)
    with index.transaction() as database:
        database.execute(INSERT_CHUNK, chunk_row(1))
        child = os.fork()
        if not child:
            # The child neither sees nor rolls back the parent's transaction, even when it destroys the objects.
            del index, database
            gc.collect()
            os._exit(0 if IndexReader(path, busy_s=1).select(COUNT)[1] == [(0,)] else 1)
        assert os.waitpid(child, 0)[1] == 0
        database.execute(INSERT_CHUNK, chunk_row(2))
    assert reader.select(COUNT)[1] == [(2,)]
    index.check()
    reader.close()
    index.close()


def test_a_forked_child_does_not_undo_what_its_parent_has_half_written(path):
    index = Index(path)
    with index.transaction() as database:
        database.execute("PRAGMA cache_size=2")
        for number in range(300):
            database.execute(INSERT_CHUNK, chunk_row(number))
        with open(f"{path}-journal", "rb") as journal:
            assert journal.read(1) != b"\0", "nothing is in the file yet, so this tests nothing"
        child = os.fork()
        if not child:
            del index, database
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for number in range(300, 400):
            database.execute(INSERT_CHUNK, chunk_row(number))
    assert index.select(COUNT) == [(400,)]
    index.check()
    index.close()


def test_a_crash_within_a_change_is_undone_by_the_first_reader(path):
    script = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tierfs.host.nvme.index.index import Index, INSERT_CHUNK
index = Index(Path({str(path)!r}))
row = lambda n: (b"%017d" % n, n, 65536, 100, b"m" * 600, n, 0)
with index.transaction() as database:
    database.execute(INSERT_CHUNK, row(1))
with index.transaction() as database:
    database.execute("PRAGMA cache_size=2")
    for number in range(2, 500):
        database.execute(INSERT_CHUNK, row(number))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with open(f"{path}-journal", "rb") as journal:
        assert journal.read(1) != b"\0", "the journal is not hot, so this tests nothing"
    reader = IndexReader(path, busy_s=1)
    assert reader.select(COUNT)[1] == [(1,)]
    reader.close()
    index = Index(path)
    index.check()
    index.close()


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 1000, b"SQLite format 3\0" + b"\xff" * 5000], ids=["empty", "garbage", "head"]
)
def test_a_file_that_is_no_index_is_damaged(path, content):
    path.write_bytes(content)
    reader = IndexReader(path, busy_s=1)
    for _ in range(2):
        with pytest.raises(CorruptionError):
            reader.select(COUNT)
    with pytest.raises(CorruptionError):
        Index(path)


def test_an_index_that_was_cut_short_is_found_to_be_damaged(path):
    os.remove(path)
    Index.create(path, epoch=EPOCH, rows=[(INSERT_CHUNK, chunk_row(number)) for number in range(1000)])
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(CorruptionError):
        index = Index(path)
        try:
            index.check()
        finally:
            index.close()


def test_an_index_of_a_newer_format_is_refused(path):
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = 2 WHERE key = 'format'")
    database.close()
    with pytest.raises(FormatError, match="newer"):
        Index(path)
    with pytest.raises(FormatError):
        IndexReader(path, busy_s=1).select(COUNT)


def test_an_index_of_100000_chunks_is_opened_and_answers_within_50_ms(path):
    os.remove(path)
    Index.create(path, epoch=EPOCH, rows=((INSERT_CHUNK, chunk_row(number)) for number in range(100_000)))
    took_s = []
    for _ in range(5):
        start = time.monotonic()
        reader = IndexReader(path, busy_s=1)
        found = reader.select("SELECT meta FROM chunks WHERE name = ?", [b"%017d" % 77_777])
        took_s.append(time.monotonic() - start)
        reader.close()
        assert found[1] == [(b"m" * 600,)]
    assert min(took_s) < 0.05  # a scan of all rows would take longer in every attempt
