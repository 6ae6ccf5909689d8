"""Readers in other processes see no exception and no wrong bytes, whatever the writer does at the same time."""

import errno
import json
import os
import random
import subprocess
import sys
import threading

import pytest
from support.forked import answer_of
from support.nvme_tools import batches, chunk_file, content_of, draft, open_tier, read, save, write
from support.opened import no_descriptors_left
from support.waiting import HANG_S

from tierfs.buffers import PAGE_BYTES
from tierfs.errors import CorruptionError, FormatError, StoreError
from tierfs.host.nvme.reader import NvmeReader


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "nvme"


@pytest.fixture
def tier(directory):
    return open_tier(directory)


def test_a_missing_tier_holds_nothing(directory):
    reader = NvmeReader(directory)
    assert not reader.holds(b"n")
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
    assert reader.holds(content_of(1)[0])
    assert chunk_file(reader.directory, 1).read_bytes()[PAGE_BYTES:].startswith(content_of(1)[1])
    assert list(reader.chunks()) == [(content_of(1)[0], len(content_of(1)[1]))]
    assert reader.draft("a").data == b"manifest of a"
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
    with pytest.raises(CorruptionError):
        reader.read(name, 1, memoryview(bytearray(len(data))))


def test_a_chunk_that_is_overwritten_while_it_is_read_is_absent(directory, monkeypatch):
    tier = open_tier(directory, budget=300_000)  # one chunk
    write(tier, 1, keep=False)
    reader, moved, real = NvmeReader(directory), [], os.preadv

    def read_late(*arguments):
        if not moved:
            moved.append(1)
            write(tier, 2, keep=False)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", read_late)
    assert read(reader, 1) is None
    assert reader.fallbacks["moved"] == 1
    assert read(reader, 2)


def test_a_chunk_that_cannot_be_read_is_absent_and_counted(tier, directory, monkeypatch):
    save(tier, "a", 1)
    reader = NvmeReader(directory)

    def failing(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        assert read(reader, 1) is None
    assert reader.fallbacks["unreadable"] == 1
    assert read(reader, 1)


def test_a_damaged_chunk_is_an_error_that_the_caller_reports(tier, directory):
    save(tier, "a", 1)
    chunk_file(directory, 1).write_bytes(b"garbage" * 1000)
    reader = NvmeReader(directory)
    with pytest.raises(CorruptionError):
        read(reader, 1)
    assert list(reader.chunks()) == [(content_of(1)[0], 7000 - 4096)]


def test_a_damaged_batch_may_hold_the_last_change_of_any_file(tier, directory):
    save(tier, "a", 1)
    reader = NvmeReader(directory)
    assert reader.draft("b") is None
    batches(directory)[0].write_bytes(b"garbage" * 100)
    save(tier, "c", 2)
    assert reader.draft("b") is None  # the batch was read before
    again = NvmeReader(directory)
    for path in ("a", "b"):
        assert (again.draft(path).state, again.draft(path).data) == ("damaged", b"")
    assert again.draft("c").data == b"manifest of c"
    assert [item.state for item in again.drafts_below("d")] == ["damaged"]


def test_drafts_that_cannot_be_read_are_an_error(tier, directory, monkeypatch):
    save(tier, "a", 1)
    reader = NvmeReader(directory)

    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing)
        with pytest.raises(StoreError, match="Input/output error"):
            reader.draft("a")
    assert reader.draft("a")


def test_without_descriptors_a_chunk_is_absent_and_drafts_are_an_error(tier, directory):
    save(tier, "a", 1)
    reader = NvmeReader(directory)
    for ask in (lambda: reader.draft("a"), lambda: reader.drafts_below("", conflicts=True)):
        with no_descriptors_left(), pytest.raises(StoreError, match="ulimit -n") as caught:
            ask()
        assert not caught.value.transient
        assert ask()
    with no_descriptors_left():
        assert read(reader, 1) is None
    assert read(reader, 1)


def test_another_version_is_refused(tier, directory, monkeypatch):
    save(tier, "a", 1)
    monkeypatch.setattr("tierfs.host.nvme.head.VERSION", 2)
    with pytest.raises(FormatError, match="version 1; this tierfs reads version 2"):
        NvmeReader(directory).draft("a")
    with pytest.raises(FormatError, match="version 1"):
        open_tier(directory)


def test_many_threads_share_a_reader(tier, directory):
    save(tier, "a", 1, 2, 3)
    reader, found = NvmeReader(directory), []
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


def test_a_draft_of_many_is_gone_at_once_when_it_is_done(tier, directory):
    reader = NvmeReader(directory)
    seqs = tier.commit([draft(f"run/{number}", []) for number in range(5)])
    for number, seq in enumerate(seqs):
        assert reader.draft(f"run/{number}")
        tier.forget_drafts(seq)
        assert reader.draft(f"run/{number}") is None
        assert len(reader.drafts_below("run")) == 4 - number


def test_a_forked_child_reads_on(tier, directory):
    save(tier, "a", 1)
    reader = NvmeReader(directory)
    assert read(reader, 1)
    assert answer_of(lambda: bool(read(reader, 1) and reader.draft("a"))) == "True"
    assert read(reader, 1)
    save(tier, "b", 2)
    assert read(reader, 2)


CHILD = """
import json, random, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from support.nvme_tools import content_of, meta_of
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
    counts["drafts"] += len(reader.drafts_below("run"))
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
        (seq,) = tier.commit([draft(f"run/{turn}", names)])
        tier.forget_drafts(seq)
        if turn % 7 == 0:
            tier.evict()
        if turn % 50 == 0:
            tier = open_tier(directory)
    total = {}
    for process in readers:
        out, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, errors.decode()
        counts, _ = json.loads(out)
        for what, count in counts.items():
            total[what] = total.get(what, 0) + count
    assert total["wrong"] == 0
    assert total["hits"] >= 40
