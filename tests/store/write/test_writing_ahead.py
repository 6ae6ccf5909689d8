"""Chunks of large files go to the nvme tier while the rest of the file is still being written."""

import threading

import pytest
from support.tiered import MIB, content
from support.waiting import HANG_S, until, within

from tierfs.errors import CapacityError, StoreError
from tierfs.host.nvme.chunk_file import ChunkFiles
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.write import ahead
from tierfs.store import Writer, evict, find, load, save, status, wait
from tierfs.store.write.in_place import StagedFile

CHUNK = 16 * MIB


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(ahead, "AHEAD_BYTES_MIN", CHUNK)


@pytest.fixture
def written(monkeypatch):
    """Names of the chunks that were written to the nvme tier."""
    names, write = [], ChunkFiles.write

    def note_and_write(files, path, page, data, **options):
        fd = write(files, path, page, data, **options)
        names.append(page.name)
        return fd

    monkeypatch.setattr(ChunkFiles, "write", note_and_write)
    return names


def chunks_in(written):
    return [name for name in written if len(name) == 17]


def begin(host, data, piece=len):
    writer = Writer(host.store, "a", level=Level.LOCAL)
    step = piece(data)
    for at in range(0, len(data), step):
        writer.write(data[at : at + step])
    return writer


@pytest.mark.parametrize("piece", [len, lambda _: 3 * MIB], ids=["whole", "pieces"])
def test_chunks_are_there_before_the_file_is_complete_and_are_written_once(host, written, piece):
    data = content(4 * CHUNK)
    writer = begin(host, data, piece)
    until(lambda: len(chunks_in(written)) >= 3)
    assert find(host.store, "") == []
    writer.commit()
    assert len(set(chunks_in(written))) == len(chunks_in(written)) == 4
    evict(host.store, "a", "ram")
    assert load(host.store, "a") == data


def test_staged_chunks_are_written_while_others_are_hashed(host, written, monkeypatch):
    staged = StagedFile(host.store)
    runs = staged.add_runs([[CHUNK] * 3])
    data = content(3 * CHUNK)
    runs[0].view[:] = data
    go_on, seal, sealed = threading.Event(), host.tiers.writer.seal_chunk, []

    def seal_two_and_wait(chunk, **options):
        assert len(sealed) < 2 or go_on.wait(HANG_S)
        sealed.append(chunk)
        return seal(chunk, **options)

    monkeypatch.setattr(host.tiers.writer, "seal_chunk", seal_two_and_wait)
    sealing = threading.Thread(target=staged.seal, args=(runs,))
    sealing.start()
    try:
        until(lambda: chunks_in(written))
    finally:
        go_on.set()
        sealing.join()
    staged.commit("a", runs, level=Level.LOCAL)
    assert len(set(chunks_in(written))) == len(chunks_in(written)) == 3
    assert load(host.store, "a") == data


def test_chunks_of_an_abandoned_file_become_clean(host, written):
    writer = begin(host, content(3 * CHUNK))
    until(lambda: len(chunks_in(written)) >= 2)
    writer.abort()
    save(host.store, "b", content(100))
    wait(host.store, "b", Level.OBJECT)
    until(lambda: host.flusher.nvme.usage().dirty_bytes == 0)  # the third chunk may be on its way
    assert host.flusher.nvme.evict() >= 2 * CHUNK
    assert [entry.path for entry in find(host.store, "")] == ["b"]


def test_a_chunk_that_is_given_back_while_it_is_written_is_not_there(host, monkeypatch):
    begun, go_on, write = threading.Event(), threading.Event(), ChunkFiles.write

    def wait_and_write(*arguments, **options):
        begun.set()
        assert go_on.wait(HANG_S)
        return write(*arguments, **options)

    monkeypatch.setattr(ChunkFiles, "write", wait_and_write)
    writer = begin(host, content(2 * CHUNK))
    names = [slot.name for segment in host.tiers.ram.segments() for slot in segment.slots()]
    assert begun.wait(HANG_S)
    writer.abort()
    go_on.set()
    save(host.store, "b", content(100))
    wait(host.store, "b", Level.OBJECT)
    assert not any(map(host.flusher.nvme.holds, names))
    until(lambda: not host.flusher.nvme.usage().dirty_bytes)  # a second write may be in flight


def test_a_file_that_cannot_fit_is_not_begun(make_host, written):
    host = make_host(ram=128 * MIB, nvme=48 * MIB)
    data = content(4 * CHUNK)
    save(host.store, "a", data)
    wait(host.store, "a", Level.OBJECT)
    # At the first chunks it is not known that the file will exceed half of the tier's size.
    assert len(chunks_in(written)) <= 1
    assert load(host.plain(), "a") == data


def test_an_nvme_tier_without_room_is_counted_and_delays_nothing(host, monkeypatch):
    def refuse(*_arguments, **_options):
        raise CapacityError("no room", tier="nvme")

    data = content(3 * CHUNK)
    with monkeypatch.context() as full:
        full.setattr(NvmeTier, "write", refuse)
        writer = begin(host, data)
        until(lambda: status(host.store)["counters"].get("flusher_ahead_write_stops"))
    writer.commit()
    assert load(host.store, "a") == data


def test_a_flusher_that_cannot_be_told_is_counted_and_delays_nothing(host, written, monkeypatch):
    ask = FlusherClient.request

    def refuse(client, do, arguments=None, **options):
        if do == "ahead":
            raise StoreError("not now", transient=True)
        return ask(client, do, arguments, **options)

    monkeypatch.setattr(FlusherClient, "request", refuse)
    data = content(3 * CHUNK)
    writer = begin(host, data)
    until(lambda: status(host.store)["counters"].get("process_not_ahead"))
    assert not chunks_in(written)
    writer.commit()
    assert status(host.store)["counters"]["process_not_ahead"] == 1
    assert load(host.store, "a") == data


def test_small_files_do_not_go_ahead(host, written, monkeypatch):
    monkeypatch.setattr(ahead, "AHEAD_BYTES_MIN", 3 * CHUNK)
    writer = begin(host, content(2 * CHUNK))
    assert not within(0.3, lambda: chunks_in(written))
    writer.commit()
    assert len(chunks_in(written)) == 2
