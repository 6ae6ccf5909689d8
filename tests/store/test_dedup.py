"""Bytes that a store has are not stored again and, where possible, not sent again. Tests count puts and bytes."""

import os
import threading

import pytest
from support.tiered import Host
from support.waiting import HANG_S

from tierfs.digest import CHUNK_BYTES, DigestKind
from tierfs.format import keys
from tierfs.host.pending.levels import Level
from tierfs.objects import MemoryObjects, WrappedObjects
from tierfs.store import Store, Writer, delete, load, save, stat
from tierfs.store.create import create_store

MIB = 1 << 20


class Counted(WrappedObjects):
    """Record the key and size of every put, accepted or not."""

    def __init__(self, inner):
        super().__init__(inner)
        self.puts = []

    def _around(self, request, send):
        if request.method == "put" and request.key.startswith((keys.CHUNKS, keys.TREE)):
            self.puts.append((request.key, request.size))
        return send()

    def take(self):
        """Return the puts of chunks and those of records since the last call."""
        puts, self.puts = self.puts, []
        chunks = [put for put in puts if put[0].startswith(keys.CHUNKS)]
        return chunks, [put for put in puts if put not in chunks]


@pytest.fixture
def tier(root):
    return MemoryObjects(root)


@pytest.fixture
def opened(tier):
    """A function that opens the store as another process does, over an object tier that counts."""
    descriptor, _ = create_store(tier, "memory://s", digest=DigestKind.XXH3_128, random_bytes=os.urandom(16))
    return lambda: Store(Counted(tier), descriptor, url="memory://s")


@pytest.fixture
def store(opened):
    return opened()


def stored_bytes(tier):
    return sum(info.size for info in tier.list(keys.CHUNKS))


def rows_of(store, path):
    return stat(store, path).manifest.rows


def test_the_same_bytes_twice_in_a_file_are_stored_once(store, tier):
    again = os.urandom(CHUNK_BYTES)
    # Equal chunks in a row may be in flight at once. Then both are sent, and the tier refuses one.
    writer = Writer(store, "file")
    for piece in (again, os.urandom(CHUNK_BYTES), again, again, bytes(reversed(again)), again):
        writer.write(piece)
    writer.commit()
    assert len({row.name for row in rows_of(store, "file")}) == 3
    assert len(rows_of(store, "file")) == 6
    assert 3 * CHUNK_BYTES < stored_bytes(tier) < 3.01 * CHUNK_BYTES


def test_the_same_tensor_in_two_files_is_sent_once(store):
    tensor = os.urandom(CHUNK_BYTES)
    save(store, "model", tensor + os.urandom(MIB))
    store.objects.take()
    save(store, "export", tensor + os.urandom(2 * MIB))
    chunks, records = store.objects.take()
    assert len(records) == 1
    assert [put[0] for put in chunks] == [keys.chunk_key(rows_of(store, "export")[1].name)]
    assert sum(size for _, size in chunks) < 2.01 * MIB
    assert rows_of(store, "export")[0] == rows_of(store, "model")[0]


@pytest.mark.parametrize("reopened", [False, True], ids=["same process", "another process"])
def test_the_same_file_again_costs_no_chunk_and_one_manifest(store, opened, reopened):
    content = os.urandom(3 * CHUNK_BYTES + 5)
    save(store, "file", content)
    assert len(store.objects.take()[0]) == 4
    there = {info.key for info in store.objects.list(keys.CHUNKS)}
    later = opened() if reopened else store
    save(later, "file", content)
    chunks, records = later.objects.take()
    assert {info.key for info in later.objects.list(keys.CHUNKS)} == there
    assert all(size < 200 for _, size in chunks), "the last five bytes may be sent in vain, instead of being asked for"
    assert [put[0] for put in records] == [keys.record_key("file")]
    assert records[0][1] < 1000
    assert load(later, "file") == content
    save(later, "another run/file", content)
    chunks, records = later.objects.take()
    assert (chunks, len(records)) == ([], 1)
    delete(store, "file")
    assert load(later, "another run/file") == content


def test_ranks_that_write_equal_bytes_at_once_store_them_once(opened, tier):
    content = os.urandom(4 * CHUNK_BYTES)
    ranks = [opened() for _ in range(3)]
    ready = threading.Barrier(len(ranks))

    def write(number):
        ready.wait(HANG_S)
        save(ranks[number], f"run/rank-{number}", content)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(content) < stored_bytes(tier) < len(content) * 1.01
    assert len({rows_of(ranks[0], f"run/rank-{number}") for number in range(len(ranks))}) == 1
    # Each rank sent each chunk at most once.
    assert sum(len(rank.objects.take()[0]) for rank in ranks) <= 4 * len(ranks)


def test_the_flusher_sends_equal_chunks_once(tmp_path, tier, opened):
    content = os.urandom(2 * CHUNK_BYTES + 7)
    host = Host(tmp_path, Counted(tier), opened().descriptor)
    try:
        for path in ("run/step_1", "run/step_2", "run/step_1"):
            writer = Writer(host.store, path, level=Level.STAGED)
            writer.write(content)
            writer.commit()
            host.tiers.wait(path, Level.OBJECT)
    finally:
        host.close()
    chunks, records = host.objects.take()
    assert len(chunks) == 3
    assert len(records) == 3
    assert stored_bytes(tier) < len(content) * 1.01
