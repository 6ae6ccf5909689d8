"""Readers in other processes see no exception and no wrong bytes, whatever the writer does at the same time."""

import errno
import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from support.nvme_tools import content_of, draft, drop_index, meta_of, open_tier, read, save, write
from support.opened import no_descriptors_left

from tierfs.errors import CorruptionError, InvalidInputError, StoreError
from tierfs.host.nvme.index import index
from tierfs.host.nvme.reader import NvmeReader


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "nvme"


@pytest.fixture
def tier(directory):
    tier = open_tier(directory)
    yield tier
    tier.close()


def test_a_missing_tier_holds_nothing(directory):
    reader = NvmeReader(directory)
    assert reader.find(b"n") is None
    assert reader.read(b"n", 0, memoryview(bytearray(1))) is None
    assert reader.draft("a") is None
    assert reader.drafts_below("") == []
    assert reader.usage().used_bytes == 0
    assert not directory.exists()
    assert not reader.fallbacks


def test_a_reader_finds_what_is_committed_after_it_was_made(directory):
    reader = NvmeReader(directory)
    assert read(reader, 1) is None
    tier = open_tier(directory)
    save(tier, "a", 1)
    assert read(reader, 1)
    found = reader.find(content_of(1)[0])
    assert (found.meta, found.length) == (meta_of(content_of(1)[1]), len(content_of(1)[1]))
    assert reader.draft("a").data == b"manifest of a"
    tier.close()
    reader.close()
    assert read(reader, 1)


def test_any_part_of_a_chunk_is_read(tier, directory):
    save(tier, "a", 1)
    reader = NvmeReader(directory)
    (name, data) = content_of(1)
    dice = random.Random(1)
    for _ in range(100):
        start = dice.randrange(len(data))
        out = bytearray(dice.randrange(len(data) - start + 1))
        assert reader.read(name, start, memoryview(out))
        assert out == data[start : start + len(out)]
    with pytest.raises(InvalidInputError):
        reader.read(name, 1, memoryview(bytearray(len(data))))


def test_a_reader_follows_the_tier_through_a_rebuild_and_a_new_arena(directory):
    reader = NvmeReader(directory)
    tier = open_tier(directory)
    save(tier, "a", 1)
    assert read(reader, 1)
    tier.close()
    drop_index(directory)
    assert read(reader, 1) is None
    tier = open_tier(directory)
    assert read(reader, 1)
    tier.close()
    drop_index(directory)
    os.remove(directory / "nvme.arena")
    tier = open_tier(directory)
    save(tier, "b", 2)
    assert read(reader, 1) is None
    assert read(reader, 2)
    tier.close()


def test_a_chunk_that_is_evicted_and_overwritten_while_it_is_read_is_absent(directory, monkeypatch):
    tier = open_tier(directory)
    write(tier, 1, keep=False)
    tier.commit()
    reader = NvmeReader(directory)
    assert read(reader, 1)
    real = reader._arena.read_into
    moved = []

    def read_late(*arguments):
        if not moved:
            moved.append(1)
            tier.evict()
            write(tier, 2, keep=False)
            tier.commit()
        return real(*arguments)

    monkeypatch.setattr(reader._arena, "read_into", read_late)
    assert reader.read(content_of(1)[0], 0, memoryview(bytearray(150_000))) is None
    assert reader.fallbacks["moved"] == 1
    assert read(reader, 2)
    tier.close()


def test_a_chunk_is_absent_while_the_index_is_kept_busy_and_drafts_are_an_error(tier, directory, caplog):
    save(tier, "a", 1)
    reader = NvmeReader(directory, busy_s=0.1, draft_busy_s=0.2)
    assert read(reader, 1)
    other = sqlite3.connect(directory / "nvme.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    start = time.monotonic()
    assert read(reader, 1) is None
    assert read(reader, 1) is None
    assert time.monotonic() - start < 20
    assert reader.fallbacks["busy"] == 2
    assert len([record for record in caplog.records if "the nvme tier is not read" in record.message]) == 1
    # An older file must not be shown instead.
    with pytest.raises(StoreError) as caught:
        reader.draft("a")
    assert caught.value.transient
    other.execute("ROLLBACK")
    other.close()
    assert read(reader, 1)
    assert reader.draft("a")


@pytest.mark.parametrize("is_open", [False, True])
def test_without_descriptors_a_chunk_is_absent_and_drafts_are_an_error_that_says_what_to_do(tier, directory, is_open):
    save(tier, "a", 1)
    reader = NvmeReader(directory)
    for ask in (lambda: reader.draft("a"), lambda: reader.drafts_below("", conflicts=True)):
        if is_open:
            assert ask()
        with no_descriptors_left(), pytest.raises(StoreError, match="ulimit -n") as caught:
            ask()
        assert not caught.value.transient
        assert ask()
    if is_open:
        assert read(reader, 1)
    with no_descriptors_left():
        assert reader.find(content_of(1)[0]) is None
    assert read(reader, 1)


def test_an_index_that_cannot_be_read_is_no_answer_about_drafts(tier, directory, monkeypatch):
    save(tier, "a", 1)
    reader = NvmeReader(directory)

    def failing(*_arguments, **_options):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite3, "connect", failing)
    assert read(reader, 1) is None
    assert reader.fallbacks["unreadable"] == 1
    with pytest.raises(StoreError, match="disk I/O error") as caught:
        reader.draft("a")
    assert not caught.value.transient


def test_a_damaged_index_is_passed_by_for_chunks_and_an_error_for_drafts(tier, directory):
    save(tier, "a", 1)
    tier.close()
    (directory / "nvme.db").write_bytes(b"garbage" * 1000)
    reader = NvmeReader(directory)
    assert read(reader, 1) is None
    with pytest.raises(CorruptionError):
        reader.draft("a")
    assert reader.fallbacks["index_damaged"] == 2


def test_a_missing_index_beside_an_arena_is_no_answer_about_drafts(tier, directory):
    save(tier, "a", 1)
    tier.close()
    (directory / "nvme.db").unlink()
    reader = NvmeReader(directory)
    assert read(reader, 1) is None
    with pytest.raises(CorruptionError, match="missing"):
        reader.drafts_below("")


def test_an_arena_that_is_gone_or_cannot_be_read_is_passed_by_and_counted(tier, directory, monkeypatch):
    save(tier, "a", 1)
    reader = NvmeReader(directory)
    os.rename(directory / "nvme.arena", directory / "away")
    assert read(reader, 1) is None
    os.rename(directory / "away", directory / "nvme.arena")
    assert read(reader, 1)

    def failing(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    assert read(reader, 1) is None
    assert reader.fallbacks["unreadable"] == 1


def test_rows_of_an_index_from_a_backup_give_no_bytes_of_other_chunks(tier, directory):
    write(tier, 1, keep=False)
    tier.commit()
    tier.close()
    old = (directory / "nvme.db").read_bytes()
    tier = open_tier(directory)
    tier.evict()
    write(tier, 2, keep=False)
    tier.commit()
    tier.close()
    (directory / "nvme.db").write_bytes(old)
    reader = NvmeReader(directory)
    assert reader.find(content_of(1)[0])
    assert read(reader, 1) is None
    assert reader.fallbacks["page_damaged"] == 1


def test_a_forked_child_reads_on(tier, directory):
    save(tier, "a", 1)
    reader = NvmeReader(directory)
    assert read(reader, 1)
    child = os.fork()
    if not child:
        os._exit(0 if read(reader, 1) and reader.draft("a") else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert read(reader, 1)
    save(tier, "b", 2)
    assert read(reader, 2)


def test_many_threads_share_a_reader(tier, directory, monkeypatch):
    save(tier, "a", 1, 2, 3)
    reader = NvmeReader(directory)
    found, opened, connect = [], [], index._connect
    monkeypatch.setattr(index, "_connect", lambda *about, **more: opened.append(1) or connect(*about, **more))
    threads = [
        threading.Thread(target=lambda n=n: found.extend(read(reader, 1 + (n + i) % 3) for i in range(20)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    assert all(found)
    assert opened == [1]


CHILD = """
import json, random, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from support.nvme_tools import content_of, meta_of
from tierfs.errors import CorruptionError
from tierfs.host.nvme.reader import NvmeReader
directory, seed = Path({directory!r}), {seed}
reader, dice = NvmeReader(directory), random.Random(seed)
expected = {{number: content_of(number) for number in range(40)}}
counts = dict(hits=0, absent=0, wrong=0, drafts=0)
print("ready", flush=True)
end = time.monotonic() + 1
while time.monotonic() < end or counts["hits"] < 20 or not counts["absent"]:
    number = dice.randrange(40)
    name, data = expected[number]
    start = dice.choice([0, 0, dice.randrange(len(data))])
    out = bytearray(len(data) - start)
    meta = reader.read(name, start, memoryview(out))
    if meta is None:
        counts["absent"] += 1
    elif meta != meta_of(data) or out != data[start:]:
        counts["wrong"] += 1
    else:
        counts["hits"] += 1
    try:
        counts["drafts"] += len(reader.drafts_below("run"))
    except CorruptionError:
        pass  # it is being made anew
print(json.dumps([counts, reader.fallbacks]))
"""


def test_readers_of_other_processes_never_see_an_exception_or_wrong_bytes(directory):
    tier = open_tier(directory)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD.format(path=sys.path, directory=str(directory), seed=seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in range(2)
    ]
    assert all(process.stdout.readline() == b"ready\n" for process in readers)
    dice = random.Random(7)
    turn = 0
    while any(process.poll() is None for process in readers):
        turn += 1
        names = write(tier, *(dice.randrange(40) for _ in range(3)), keep=True)
        (seq,) = tier.commit(drafts=[draft(f"run/{turn}", names)])
        tier.forget_drafts(seq)
        if turn % 7 == 0:
            tier.evict()
        if turn % 50 == 0:
            tier.close()
            if turn % 100 == 0:
                drop_index(directory)
            tier = open_tier(directory)
    total = {}
    for process in readers:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
        counts, _ = json.loads(out)
        for what, count in counts.items():
            total[what] = total.get(what, 0) + count
    assert total["wrong"] == 0
    assert total["hits"] >= 40
    tier.close()
