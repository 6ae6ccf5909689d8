"""A chunk file is written and read with direct I/O, and believed only if its page is sound and its own."""

import errno
import mmap
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierfs.errors import CorruptionError
from tierfs.host.nvme.chunk_file import ChunkFiles, ChunkPage

NAME = b"n" * 17


def aligned(content):
    buffer = memoryview(mmap.mmap(-1, max(4096, len(content))))
    buffer[: len(content)] = content
    return buffer[: len(content)]


def write(files, data, name=NAME, meta=b"meta"):
    page = ChunkPage(name, meta, len(data))
    os.close(files.write(files.path(name), page, memoryview(data), now_ns=1))
    return page


def read(files, start, length, name=NAME):
    out = bytearray(length)
    assert files.read(name, start, memoryview(out)) is not None
    return bytes(out)


@pytest.fixture
def files(tmp_path):
    return ChunkFiles(tmp_path)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(0, 300_000), shift=st.sampled_from([0, 1, 4095]), start=st.floats(0, 1), share=st.floats(0, 1),
    target=st.sampled_from([0, 1]), seed=st.integers(0, 255),
)  # fmt: skip
def test_any_part_of_a_chunk_is_read_back(files, length, shift, start, share, target, seed):
    files.path(NAME).unlink(missing_ok=True)
    content = bytes(range(seed, 256)) * (length // max(1, 256 - seed) + 1)
    data = aligned(bytes(shift) + content[:length])[shift:]
    page = write(files, data)
    begin = int(start * length)
    count = int(share * (length - begin))
    out = aligned(bytes(target + count))[target:]
    assert files.read(NAME, begin, out) == page
    assert out == data[begin : begin + count]


@pytest.mark.parametrize("shift", [0, 3])
def test_a_chunk_of_the_largest_size_is_read_back(files, shift):
    content = os.urandom(1 << 20) * 16
    write(files, aligned(bytes(shift) + content)[shift:])
    assert read(files, 5, len(content) - 5) == content[5:]


def test_bytes_behind_the_data_are_zeros(files):
    write(files, aligned(b"x" * 8192)[:8000])
    assert files.path(NAME).read_bytes()[4096 + 8000 :] == bytes(192)


def test_a_missing_chunk_is_absent(files):
    assert files.read(NAME, 0, memoryview(b"")) is None
    assert not files.holds(NAME)


def test_a_part_behind_the_end_is_an_error(files):
    write(files, b"x" * 1000)
    for start, length in ((999, 2), (0, 4097)):
        with pytest.raises(CorruptionError, match="less than"):
            files.read(NAME, start, memoryview(bytearray(length)))


@pytest.mark.parametrize("at", [0, 9, 11, 20, 30, 130, 4090])
def test_a_flipped_bit_in_the_page_is_found(files, at):
    write(files, b"0123456789")
    content = bytearray(files.path(NAME).read_bytes())
    content[at] ^= 4
    files.path(NAME).write_bytes(content)
    with pytest.raises(CorruptionError, match="first page"):
        read(files, 0, 10)
    assert files.fallbacks["page_damaged"] == 1


@pytest.mark.parametrize("size", [0, 5, 4096, 4096 + 69_999])
def test_a_file_that_was_cut_short_is_found(files, size):
    write(files, b"y" * 70_000)
    os.truncate(files.path(NAME), size)
    with pytest.raises(CorruptionError):
        read(files, 0, 70_000)


def test_a_file_of_another_chunk_is_not_believed(files):
    write(files, b"0123456789")
    os.rename(files.path(NAME), files.path(b"m" * 17))
    with pytest.raises(CorruptionError, match="another chunk"):
        read(files, 0, 10, b"m" * 17)


def test_flipped_bits_in_data_are_left_to_the_caller(files):
    write(files, b"0123456789")
    with open(files.path(NAME), "r+b") as file:
        file.seek(4096)
        file.write(b"X")
    assert read(files, 0, 10) == b"X123456789"


@pytest.mark.parametrize("shift", [0, 1])
def test_each_call_to_the_disk_has_a_mib(files, monkeypatch, shift):
    asked = []

    def watched(real):
        def call(fd, pieces, offset):
            asked.append((offset, sum(map(len, pieces))))
            return real(fd, pieces, offset)

        return call

    content = os.urandom((3 << 20) + 4097)
    out = aligned(bytes(shift) + bytes(len(content) - 4096))[shift:]
    monkeypatch.setattr(os, "pwritev", watched(os.pwritev))
    monkeypatch.setattr(os, "preadv", watched(os.preadv))
    write(files, aligned(bytes(shift) + content)[shift:])
    assert asked == [(number << 20, 1 << 20) for number in range(3)] + [(3 << 20, 3 * 4096)]
    asked.clear()
    assert files.read(NAME, 4096, out)
    assert bytes(out) == content[4096:]
    assert max(length for _, length in asked) == 1 << 20
    assert all(number % 4096 == 0 for call in asked for number in call)


@pytest.mark.parametrize("call", ["open", "preadv", "pwritev"])
def test_a_filesystem_without_direct_access_works(files, monkeypatch, caplog, call):
    real, refused = getattr(os, call), []

    def refusing(*arguments):
        if arguments[1] & os.O_DIRECT if call == "open" else not refused:
            refused.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*arguments)

    monkeypatch.setattr(os, call, refusing)
    write(files, b"0123456789")
    assert read(files, 5, 5) == b"56789"
    assert files.fallbacks["buffered"] == 1
    assert [record.message for record in caplog.records if "O_DIRECT" in record.message]


def test_a_read_renews_a_time_that_is_older_than_a_minute(files):
    write(files, b"0123456789")
    for now_s, seen_s in ((59, 0), (61, 61), (100, 61)):
        files.read(NAME, 0, memoryview(b""), now_ns=now_s * 1_000_000_000)
        assert int(files.path(NAME).stat().st_mtime) == seen_s
