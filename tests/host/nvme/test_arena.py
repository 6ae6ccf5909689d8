"""The arena writes and reads extents with direct I/O, and accepts a page only at its own place."""

import errno
import mmap
import os
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierfs.errors import CapacityError, FormatError, StoreError
from tierfs.host.nvme.arena.arena import Arena
from tierfs.host.nvme.arena.extent_page import (
    GRANULE,
    ArenaPage,
    DraftRecord,
    ExtentKind,
    ExtentPage,
    IntentPage,
    extent_bytes,
)

EPOCH = b"e" * 16
SIZE = 4 << 20


def aligned(content):
    buffer = memoryview(mmap.mmap(-1, max(4096, len(content))))
    buffer[: len(content)] = content
    return buffer[: len(content)]


def page_for(offset, length, serial=1, name=b"n" * 17, **more):
    return ExtentPage(ExtentKind.CHUNK, EPOCH, serial, offset, length, name, **more)


@pytest.fixture
def arena(tmp_path):
    arena = Arena.create(tmp_path / "arena", SIZE, epoch=EPOCH)
    yield arena
    arena.close()


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 4 MiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(0, 300_000), shift=st.sampled_from([0, 1, 4095]), start=st.floats(0, 1), share=st.floats(0, 1),
    target=st.sampled_from([0, 1]), seed=st.integers(0, 255),
)  # fmt: skip
def test_any_part_of_what_was_written_is_read_back(arena, length, shift, start, share, target, seed):
    content = bytes(range(seed, 256)) * (length // max(1, 256 - seed) + 1)
    data = aligned(bytes(shift) + content[:length])[shift:]
    arena.write(page_for(GRANULE, length, meta=b"meta"), data)
    begin = int(start * length)
    count = int(share * (length - begin))
    out = aligned(bytes(target + count))[target:]
    assert arena.read_into(GRANULE, begin, out) == page_for(GRANULE, length, meta=b"meta")
    assert out == data[begin : begin + count]


def test_an_extent_larger_than_the_buffers_is_written_and_read_in_parts(tmp_path):
    arena = Arena.create(tmp_path / "arena", 64 << 20, epoch=EPOCH)
    content = os.urandom(1 << 20) * 35 + b"end"
    for shift in (0, 3):
        data = aligned(bytes(shift) + content)[shift:]
        arena.write(page_for(GRANULE, len(content)), data)
        out = bytearray(len(content) - 5)
        assert arena.read_into(GRANULE, 5, memoryview(out))
        assert out == content[5:]
    arena.close()


def test_bytes_behind_the_data_are_zeros(arena):
    arena.write(page_for(GRANULE, 8000), aligned(b"x" * 8192)[:8000])
    assert arena.path.read_bytes()[GRANULE + 4096 + 8000 : GRANULE + 4096 + 8192] == bytes(192)


def test_a_part_behind_the_end_of_the_data_is_not_there(arena):
    arena.write(page_for(GRANULE, 1000), memoryview(b"x" * 1000))
    assert arena.read_into(GRANULE, 999, memoryview(bytearray(2))) is None
    assert arena.read_into(SIZE - GRANULE, 0, memoryview(bytearray(GRANULE))) is None
    assert arena.read_into(0, 0, memoryview(bytearray(1))) is None


@pytest.mark.parametrize("at", [0, 9, 11, 40, 70, 130, 4090])
def test_a_flipped_bit_anywhere_in_a_page_makes_the_extent_absent(arena, at):
    arena.write(page_for(GRANULE, 10), memoryview(b"0123456789"))
    with open(arena.path, "r+b") as file:
        file.seek(GRANULE + at)
        byte = file.read(1)[0]
        file.seek(GRANULE + at)
        file.write(bytes([byte ^ 4]))
    assert arena.page_at(GRANULE) is None
    assert arena.read_into(GRANULE, 0, memoryview(bytearray(10))) is None
    assert list(arena.scan()) == []


def test_flipped_bits_in_data_are_left_to_whoever_reads(arena):
    arena.write(page_for(GRANULE, 10), memoryview(b"0123456789"))
    with open(arena.path, "r+b") as file:
        file.seek(GRANULE + 4096)
        file.write(b"X")
    out = bytearray(10)
    assert arena.read_into(GRANULE, 0, memoryview(out))
    assert out == b"X123456789"


def test_a_page_is_believed_only_where_it_was_written(arena):
    arena.write(page_for(GRANULE, 10), memoryview(b"0123456789"))
    with open(arena.path, "r+b") as file:
        file.seek(GRANULE)
        page = file.read(4096)
        file.seek(3 * GRANULE)
        file.write(page)
    assert arena.page_at(3 * GRANULE) is None
    assert [page.offset for page in arena.scan()] == [GRANULE]


@pytest.mark.parametrize("shift", [0, 1])
def test_the_disk_is_asked_for_a_mib_at_a_time(tmp_path, monkeypatch, shift):
    asked = []

    def watched(real):
        def call(fd, pieces, offset):
            asked.append((offset, sum(map(len, pieces))))
            return real(fd, pieces, offset)

        return call

    content = os.urandom((3 << 20) + 4097)
    data = aligned(bytes(shift) + content)[shift:]
    out = aligned(bytes(shift) + bytes(len(content) - 4096))[shift:]
    arena = Arena.create(tmp_path / "arena", 8 << 20, epoch=EPOCH)
    monkeypatch.setattr(os, "pwritev", watched(os.pwritev))
    monkeypatch.setattr(os, "preadv", watched(os.preadv))
    arena.write(page_for(GRANULE, len(content)), data)
    assert [at - GRANULE for at, _ in asked] == [number << 20 for number in range(4)]
    assert [length for _, length in asked] == [1 << 20] * 3 + [3 * 4096]
    asked.clear()
    assert arena.read_into(GRANULE, 4096, out)
    assert bytes(out) == content[4096:]
    assert max(length for _, length in asked) == 1 << 20
    assert all(number % 4096 == 0 for call in asked for number in call)
    arena.close()


def test_everything_that_was_written_is_found_in_the_order_of_the_file(arena):
    pages = [page_for(number * GRANULE, 100, serial=99 - number) for number in (1, 2, 7, 63)]
    for page in reversed(pages):
        arena.write(page, memoryview(b"y" * 100))
    arena.release(pages[1])
    found = list(arena.scan())
    assert [page.offset for page in found] == [page.offset for page in pages]
    assert [page.kind for page in found] == [1, 0, 1, 1]
    assert found[1].serial == pages[1].serial


def test_a_bad_spot_does_not_hide_what_lies_around_it(arena, monkeypatch):
    for number in (1, 2, 3):
        arena.write(page_for(number * GRANULE, 100), memoryview(b"y" * 100))
    real = os.preadv

    def failing(fd, pieces, offset):
        if offset < 2 * GRANULE + 4096 and offset + sum(map(len, pieces)) > 2 * GRANULE:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, pieces, offset)

    monkeypatch.setattr(os, "preadv", failing)
    assert [page.offset for page in arena.scan()] == [GRANULE, 3 * GRANULE]
    assert arena.fallbacks["unreadable"] == 1


def test_only_what_was_ever_written_is_searched(tmp_path, monkeypatch):
    arena = Arena.create(tmp_path / "arena", 1 << 30, epoch=EPOCH)
    arena.write(page_for(GRANULE, 10), memoryview(b"0123456789"))
    arena.write(page_for(900 << 20, 10), memoryview(b"0123456789"))
    arena.sync()
    read = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, pieces, at: read.append(sum(map(len, pieces))) or real(fd, pieces, at))
    assert len(list(arena.scan())) == 2
    if sum(read) > 1 << 29:
        pytest.skip("this filesystem does not say what was never written")
    arena.close()


def test_a_filesystem_that_refuses_direct_access_is_used_through_the_page_cache(tmp_path, monkeypatch, caplog):
    real = os.open

    def refusing(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    arena = Arena.create(tmp_path / "arena", SIZE, epoch=EPOCH)
    assert not arena.direct
    assert arena.fallbacks["buffered"] == 1
    assert [record.message for record in caplog.records if "O_DIRECT" in record.message]
    arena.write(page_for(GRANULE, 10), memoryview(b"0123456789"))
    arena.sync()
    out = bytearray(5)
    assert arena.read_into(GRANULE, 5, memoryview(out))
    assert out == b"56789"
    arena.close()


def test_a_filesystem_that_refuses_direct_access_only_when_reading_is_noticed(tmp_path, monkeypatch):
    real = os.preadv
    refused = []

    def refusing(fd, pieces, offset):
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, pieces, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    arena = Arena.create(tmp_path / "arena", SIZE, epoch=EPOCH)
    assert not arena.direct
    assert arena.epoch == EPOCH
    arena.close()


def test_an_arena_that_finds_no_room_leaves_nothing(small_disk):
    with pytest.raises(CapacityError, match="free some room"):
        Arena.create(small_disk / "arena", 64 << 20, epoch=EPOCH)
    assert os.listdir(small_disk) == []


def test_an_arena_that_finds_no_room_to_grow_stays_as_it_is(small_disk):
    arena = Arena.create(small_disk / "arena", 1 << 20, epoch=EPOCH)
    arena.write(page_for(GRANULE, 10), memoryview(b"0123456789"))
    with pytest.raises(CapacityError):
        arena.grow(64 << 20)
    assert arena.size == os.path.getsize(arena.path) == 1 << 20
    arena.grow(2 << 20)
    assert arena.size == os.path.getsize(arena.path) == 2 << 20
    assert arena.page_at(GRANULE) is not None
    arena.close()


def test_a_refused_growth_is_undone(arena, monkeypatch):
    def partly(fd, offset, length):
        os.ftruncate(fd, offset + length // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", partly)
    with pytest.raises(CapacityError):
        arena.grow(2 * SIZE)
    assert os.path.getsize(arena.path) == arena.size == SIZE


def test_a_reader_sees_that_the_arena_has_grown(arena):
    reader = Arena.open_to_read(arena.path)
    arena.grow(2 * SIZE)
    arena.write(page_for(SIZE + GRANULE, 10), memoryview(b"0123456789"))
    out = bytearray(10)
    assert reader.read_into(SIZE + GRANULE, 0, memoryview(out))
    assert out == b"0123456789"
    reader.close()


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_not_a_crash(arena):
    arena.write(page_for(SIZE - 2 * GRANULE, 70000), memoryview(b"y" * 70000))
    os.truncate(arena.path, SIZE - GRANULE)
    with pytest.raises(StoreError, match="cut short"):
        arena.read_into(SIZE - 2 * GRANULE, 0, memoryview(bytearray(70000)))


def test_an_arena_says_which_it_is_unless_its_first_page_is_damaged(arena):
    assert Arena.open(arena.path).epoch == EPOCH
    with open(arena.path, "r+b") as file:
        file.write(b"garbage")
    damaged = Arena.open(arena.path)
    assert damaged.epoch == b""
    damaged.stamp(EPOCH)
    assert Arena.open(arena.path).epoch == EPOCH


def test_an_arena_of_another_version_is_refused(arena, monkeypatch):
    monkeypatch.setattr("tierfs.host.nvme.arena.extent_page.VERSION", 2)
    page = ArenaPage(EPOCH).encode()
    monkeypatch.undo()
    with open(arena.path, "r+b") as file:
        file.write(page)
    with pytest.raises(FormatError, match="version 2"):
        Arena.open(arena.path)


def test_intents_are_read_back_and_garbage_is_none(arena):
    assert arena.read_intents() is None
    intents = IntentPage(EPOCH, tuple((number * GRANULE, number << 32) for number in range(200)))
    arena.write_intents(intents)
    assert arena.read_intents() == intents


def test_extents_take_whole_granules_with_their_page():
    assert extent_bytes(0) == extent_bytes(GRANULE - 4096) == GRANULE
    assert extent_bytes(GRANULE - 4095) == 2 * GRANULE


def test_a_drafts_record_is_read_back_and_a_shortened_one_refused():
    record = DraftRecord(7, 123, b"w" * 16, "a/\u00e9", (b"n" * 17, b"m" * 33), b"manifest")
    data = record.encode()
    assert DraftRecord.decode(data) == record
    for length in range(len(data) - len(record.data)):
        with pytest.raises(Exception, match=r"damaged|cut short"):
            DraftRecord.decode(data[:length])
