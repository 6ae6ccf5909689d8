"""Ways to write a file: exclusive, appending, in text, compressed, by descriptor."""

from __future__ import annotations

import array
import io
import os
import re
import subprocess

import fsspec
import numpy as np
import pytest
from support.waiting import HANG_S

from tierfs.errors import AlreadyExistsError, ConflictError, InvalidInputError, StoreError

MIB = 1 << 20
CHUNK = 16 * MIB
INLINE = 64 << 10
TEXT = "first\nzweite Zeile: äöü €\nthird\n" * 1000


@pytest.fixture
def place(memory_place):
    """Handles are the same over any object tier."""
    return memory_place


@pytest.mark.parametrize("mode", ["", "b", "t", "r+b", "w+", "w+b", "rw", "rwb", "rbb", "rbt", "ww", "rU", "zb"])
def test_a_mode_that_is_none_is_refused_as_it_was_given(place, mode):
    place.fs.pipe(place / "a", b"old")
    with pytest.raises(InvalidInputError, match=re.escape(f"mode {mode!r} is not supported")):
        place.fs.open(place / "a", mode)
    assert place.fs.cat(place / "a") == b"old"


def test_the_letters_of_a_mode_come_in_any_order(place):
    with place.fs.open(place / "a", "bw") as file:
        file.write(b"new")
    with place.fs.open(place / "a", "tr") as file:
        assert file.read() == "new"


# -- exclusive ---------------------------------------------------------------------------------------------------


def test_an_exclusive_create_may_follow_a_delete(place):
    place.fs.pipe(place / "a", b"old")
    place.fs.rm(place / "a")
    with place.fs.open(place / "a", "xb") as file:
        file.write(b"new")
    assert place.fs.cat(place / "a") == b"new"


def test_the_first_exclusive_creator_to_close_wins(place):
    first, second = place.fs.open(place / "a", "xb"), place.fs.open(place / "a", "xb")
    first.write(b"first")
    second.write(b"second")
    second.close()
    with pytest.raises(AlreadyExistsError):
        first.close()
    assert place.fs.cat(place / "a") == b"second"


# -- appending ---------------------------------------------------------------------------------------------------


def test_put_and_pipe_create_or_overwrite(place, tmp_path):
    (tmp_path / "local").write_bytes(b"new")
    place.fs.pipe(place / "a", b"old")
    with pytest.raises(FileExistsError):
        place.fs.put_file(str(tmp_path / "local"), place / "a", mode="create")
    with pytest.raises(InvalidInputError, match="overwrite"):
        place.fs.pipe_file(place / "a", b"", mode="append")
    assert place.fs.cat(place / "a") == b"old"


@pytest.mark.parametrize(
    "sizes",
    [
        (10, 10),
        (INLINE - 1, 1, 1),
        (100, MIB),
        (MIB, MIB, 10),
        (CHUNK, 10),
        (CHUNK - 10, 10, 10),
        (CHUNK - 10, 20),
        (CHUNK, 0, CHUNK),
        (0, 5),
    ],
    ids=str,
)
def test_appending_adds_at_the_end(place, random_bytes, sizes):
    content = b""
    for seed, size in enumerate(sizes):
        piece = random_bytes(size, seed)
        with place.fs.open(place / "a", "ab") as file:
            assert file.tell() == len(content)
            file.write(piece)
            assert file.tell() == len(content) + len(piece)
        content += piece
        assert place.fs.cat(place / "a") == content
        assert place.fs.size(place / "a") == len(content)


def test_appending_to_full_chunks_keeps_them(place, random_bytes):
    place.fs.pipe(place / "a", random_bytes(2 * CHUNK, 1))
    chunks = place.chunks()
    with place.fs.open(place / "a", "ab") as file:
        file.write(b"more")
    assert chunks < place.chunks()
    assert len(place.chunks()) == len(chunks) + 1


def test_a_file_grown_by_appending_has_the_chunks_of_a_whole_one(place, random_bytes):
    content = random_bytes(3 * CHUNK // 2, 2)
    place.fs.pipe(place / "whole", content)
    for at in range(0, len(content), 6 * MIB):
        with place.fs.open(place / "grown", "ab") as file:
            file.write(content[at : at + 6 * MIB])
    assert place.fs.ukey(place / "grown") == place.fs.ukey(place / "whole")


# -- data and handles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "left"), [("wb", b"first,"), ("ab", b"old,first,")])
def test_a_handle_conflicts_with_a_change_since_its_open(place, mode, left):
    place.fs.pipe(place / "a", b"old,")
    first, second = place.fs.open(place / "a", mode), place.fs.open(place / "a", mode)
    first.write(b"first,")
    second.write(b"second,")
    first.close()
    with pytest.raises(ConflictError):
        second.close()
    assert place.fs.cat(place / "a") == left
    third = place.fs.open(place / "a", mode)
    third.write(b"third,")
    place.fs.rm(place / "a")
    with pytest.raises(ConflictError):
        third.close()
    assert not place.fs.exists(place / "a")


@pytest.mark.parametrize("size", [10, MIB, CHUNK])
def test_a_buffer_may_change_once_write_has_returned(place, random_bytes, size):
    buffer = bytearray(random_bytes(size, 5))
    expected = bytes(buffer) + b"\0" * size
    with place.fs.open(place / "a", "wb") as file:
        file.write(memoryview(buffer))
        buffer[:] = b"\0" * size
        file.write(buffer)
        buffer[:] = b"\xff" * size
    assert place.fs.cat(place / "a") == expected


@pytest.mark.parametrize(
    "data",
    [array.array("d", [1.5, 2.5]), np.arange(12, dtype="<i4").reshape(3, 4), np.zeros((0, 3)), np.float64(2.5), b""],
    ids=["array", "matrix", "empty matrix", "scalar", "nothing"],
)
def test_write_takes_any_contiguous_buffer_and_counts_bytes(place, data):
    with place.fs.open(place / "a", "wb") as file:
        assert file.write(data) == memoryview(data).nbytes
    assert place.fs.cat(place / "a") == bytes(memoryview(data).tobytes())


def test_write_refuses_text_and_the_handle_goes_on(place):
    with place.fs.open(place / "a", "wb") as file:
        with pytest.raises(TypeError):
            file.write("text")
        file.write(b"bytes")
    assert place.fs.cat(place / "a") == b"bytes"


@pytest.mark.parametrize("mode", ["wb", "xb", "ab"])
def test_a_write_handle_neither_reads_nor_leaves_its_end(place, mode):
    with place.fs.open(place / "a", mode) as file:
        file.write(b"12345")
        assert file.writable()
        assert not file.readable()
        assert file.seek(0, os.SEEK_END) == file.seek(0, os.SEEK_CUR) == file.tell() == 5
        with pytest.raises(OSError):
            file.read()
        for place_ in [(0,), (5,), (1, os.SEEK_CUR), (-1, os.SEEK_END), (1, os.SEEK_END)]:
            with pytest.raises(io.UnsupportedOperation, match="from start to end"):
                file.seek(*place_)
        with pytest.raises(ValueError, match="whence"):
            file.seek(0, 7)
    assert place.fs.cat(place / "a") == b"12345"


@pytest.mark.parametrize("method", ["write", "flush", "tell", "fileno"])
def test_a_closed_write_handle_refuses(place, method):
    file = place.fs.open(place / "a", "wb")
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        getattr(file, method)(*([b"more"] if method == "write" else []))
    assert place.fs.cat(place / "a") == b""


def test_a_file_is_invisible_before_close(place, random_bytes):
    file = place.fs.open(place / "a", "wb")
    file.write(random_bytes(CHUNK + 5, 6))
    file.flush()
    assert not place.fs.exists(place / "a")
    assert place.names() == []
    file.close()
    assert place.names() == ["a"]


def test_metadata_given_at_open_is_shown_by_info(place):
    with place.fs.open(place / "a", "wb", metadata={"step": 100, "by": "trainer"}) as file:
        file.write(b"x")
    assert place.fs.info(place / "a")["metadata"] == {"step": 100, "by": "trainer"}
    with place.fs.open(place / "a", "ab") as file:
        file.write(b"x")
    assert place.fs.info(place / "a")["metadata"] == {"step": 100, "by": "trainer"}


# -- descriptors -------------------------------------------------------------------------------------------------


def test_the_descriptor_of_a_write_handle_is_gone_after_close(place):
    file = place.fs.open(place / "a", "wb")
    descriptor = file.fileno()
    assert file.fileno() == descriptor
    file.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_bytes_written_to_the_descriptor_arrive_in_order(place):
    for mode in ("wb", "ab"):
        with place.fs.open(place / "a", mode) as file:
            start = file.tell()
            file.write(b"one,")
            os.write(file.fileno(), b"two,")
            assert file.tell() == start + 8
            file.write(b"three,")
            os.write(file.fileno(), b"four;")
            file.flush()
            os.fsync(file.fileno())
    assert place.fs.cat(place / "a") == b"one,two,three,four;" * 2


def test_a_descriptor_writes_more_than_a_chunk(place, random_bytes):
    data = random_bytes(CHUNK + MIB + 5, 12)
    with place.fs.open(place / "a", "wb") as file:
        file.write(b"-")
        descriptor = file.fileno()
        for start in range(0, len(data), 5 * MIB):
            os.write(descriptor, data[start : start + 5 * MIB])
            assert file.fileno() == descriptor
        file.write(data)
    assert place.fs.cat(place / "a") == b"-" + data * 2


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_a_subprocess_writes_to_the_handle(place, mode):
    convert = (lambda data: data) if mode == "wb" else bytes.decode
    with place.fs.open(place / "a", mode) as file:
        file.write(convert(b"one,"))
        file.flush()
        for text in (b"two,", b"three,"):
            subprocess.run(["cat"], input=text, stdout=file, check=True)
        file.write(convert(b"four"))
    assert place.fs.cat(place / "a") == b"one,two,three,four"


def test_a_subprocess_that_outlives_the_handle_is_told(place):
    with place.fs.open(place / "a", "wb") as file:
        command = "echo early; read line; echo late"
        child = subprocess.Popen(
            ["sh", "-c", f"{command} || exit 3"], stdin=subprocess.PIPE, stdout=file, stderr=subprocess.DEVNULL
        )
        while file.tell() < len("early\n"):
            assert child.poll() is None
    child.communicate(b"go on\n", timeout=HANG_S)
    assert child.returncode == 3
    assert place.fs.cat(place / "a") == b"early\n"


@pytest.mark.parametrize("count", [10, 1_000_000])
def test_numpy_tofile_writes_to_the_handle(place, count):
    array_ = np.arange(count)
    with place.fs.open(place / "a", "wb") as file:
        file.write(b"head")
        array_.tofile(file)
        array_[:3].tofile(file)
        file.write(b"tail")
    assert place.fs.cat(place / "a") == b"head" + array_.tobytes() + array_[:3].tobytes() + b"tail"


def test_a_descriptor_may_change_what_was_written_to_it_since(place):
    with place.fs.open(place / "a", "wb") as file:
        descriptor = file.fileno()
        os.write(descriptor, b"0000data")
        os.pwrite(descriptor, b"4", 3)
    assert place.fs.cat(place / "a") == b"0004data"


@pytest.mark.parametrize("change", [lambda fd: os.pwrite(fd, b"X", 5000), lambda fd: os.ftruncate(fd, 5000)])
@pytest.mark.parametrize("end", [lambda file: None, lambda file: file.write(b"more"), lambda file: file.fileno()])
def test_a_descriptor_that_changes_collected_bytes_is_refused(place, change, end):
    with pytest.raises(StoreError, match="from start to end"), place.fs.open(place / "a", "wb") as file:
        file.write(b"x" * 10_000)
        change(file.fileno())
        end(file)
    assert not place.fs.exists(place / "a")


def test_an_exception_discards_bytes_of_the_descriptor(place):
    with pytest.raises(KeyError), place.fs.open(place / "a", "wb") as file:
        os.write(file.fileno(), b"lost")
        raise KeyError
    assert not place.fs.exists(place / "a")


def test_a_compressed_handle_has_no_descriptor(place):
    with place.fs.open(place / "a.gz", "wb", compression="gzip") as file, pytest.raises(io.UnsupportedOperation):
        file.fileno()


def test_a_read_handle_has_no_descriptor(place):
    place.fs.pipe(place / "a", b"x")
    with place.fs.open(place / "a") as file, pytest.raises(io.UnsupportedOperation, match=r"fs\.get"):
        file.fileno()


# -- text --------------------------------------------------------------------------------------------------------


MARKED = ["utf-8-sig", "utf-16", "utf-32"]


@pytest.mark.parametrize("encoding", ["utf-8", *MARKED, "utf-16-le", "latin-1"])
def test_text_is_encoded_and_decoded(place, encoding):
    text = TEXT if encoding != "latin-1" else TEXT.replace("€", "$")
    with place.fs.open(place / "a", "w", encoding=encoding) as file:
        file.write(text)
    assert place.fs.cat(place / "a") == text.encode(encoding)
    with place.fs.open(place / "a", "r", encoding=encoding) as file:
        assert file.read() == text


@pytest.fixture(params=["fs.open", "fsspec.open"])
def open_text(request, place):
    """``open_text(path, mode, **kwargs)``, once by `fs.open` and once by `fsspec.open`."""
    if request.param == "fs.open":
        return place.fs.open
    return lambda path, mode, **kwargs: fsspec.open(f"tierfs::{place.protocol}://{path}", mode, **kwargs)


@pytest.mark.parametrize("encoding", ["utf-8", *MARKED])
@pytest.mark.parametrize("first", ["w", "a", "xt"])
def test_a_byte_order_mark_begins_a_file_once(place, open_text, encoding, first):
    for mode, text in ((first, "one\n"), ("a", "zwö\n"), ("at", "€\n")):
        with open_text(place / "a", mode, encoding=encoding, newline="\r\n") as file:
            file.write(text[:1])
            file.write(text[1:])
    assert place.fs.cat(place / "a") == "one\r\nzwö\r\n€\r\n".encode(encoding)
    with open_text(place / "a", "r", encoding=encoding) as file:
        assert file.read() == "one\nzwö\n€\n"


@pytest.mark.parametrize("mode", ["wb", "xb", "ab", "w", "a"])
def test_a_written_handle_is_not_seekable(place, mode):
    with place.fs.open(place / "a", mode) as file:
        assert not file.seekable()


def test_a_text_handle_says_how_far_it_is(place):
    with place.fs.open(place / "a", "w", encoding="utf-16") as file:
        file.write("one")
        assert file.tell() == file.seek(0, os.SEEK_END) == 8
        file.write("two")
    assert place.fs.cat(place / "a") == "onetwo".encode("utf-16")


def test_text_that_the_encoding_lacks_is_refused_or_replaced(place):
    with pytest.raises(UnicodeEncodeError), place.fs.open(place / "a", "w", encoding="ascii") as file:
        file.write("ä")
    assert not place.fs.exists(place / "a")
    with place.fs.open(place / "a", "w", encoding="ascii", errors="replace") as file:
        file.write("ä")
    assert place.fs.cat(place / "a") == b"?"


def test_newlines_are_written_as_asked_for(place):
    with place.fs.open(place / "a", "w", newline="\r\n") as file:
        file.write("one\ntwo\n")
    assert place.fs.cat(place / "a") == b"one\r\ntwo\r\n"
    with place.fs.open(place / "a", "r") as file:
        assert list(file) == ["one\n", "two\n"]
    with place.fs.open(place / "a", "rt", newline="") as file:
        assert list(file) == ["one\r\n", "two\r\n"]


@pytest.mark.parametrize("bad", [{"encoding": "klingon"}, {"newline": "x"}])
def test_a_text_argument_that_is_no_good_leaves_no_handle_behind(place, bad, caplog, recwarn):
    with pytest.raises((LookupError, ValueError)):
        place.fs.open(place / "a", "w", **bad)
    assert not recwarn.list
    assert not caplog.records
    assert not place.fs.exists(place / "a")


# -- compression -------------------------------------------------------------------------------------------------

COMPRESSIONS = [("gzip", "gz"), ("bz2", "bz2"), ("xz", "xz"), ("zstd", "zst")]


@pytest.fixture(params=COMPRESSIONS, ids=[name for name, _ in COMPRESSIONS])
def compression(request):
    name, suffix = request.param
    if name not in fsspec.compression.compr:
        pytest.skip(f"fsspec does not offer {name} here")
    return name, suffix


def test_both_doors_read_what_the_other_compressed(place, compression):
    name, suffix = compression
    data = TEXT.encode() * 10
    with place.fs.open(place / f"c.{suffix}", "wb", compression=name) as file:
        assert file.write(data) == len(data)
    assert place.fs.size(place / f"c.{suffix}") < len(data) // 4
    with place.fs.open(place / f"a.{suffix}", "wt", compression="infer", encoding="utf-8") as file:
        file.write(TEXT)
    with fsspec.open(f"{place.url}/a.{suffix}", "rt", compression="infer", encoding="utf-8") as file:
        assert file.read() == TEXT
    with fsspec.open(f"{place.url}/b.{suffix}", "wb", compression=name) as file:
        file.write(b"bytes" * 1000)
    with place.fs.open(place / f"b.{suffix}", compression=name) as file:
        assert file.read() == b"bytes" * 1000


def test_compression_is_inferred_from_the_name_alone(place):
    with place.fs.open(place / "plain", "wb", compression="infer") as file:
        file.write(b"as it is")
    assert place.fs.cat(place / "plain") == b"as it is"


def test_a_compressed_handle_seeks_reads_lines_and_into_buffers(place):
    lines = TEXT.encode().splitlines(keepends=True)
    with place.fs.open(place / "a.gz", "wb", compression="gzip") as file:
        file.writelines(lines)
    with place.fs.open(place / "a.gz", "rb", compression="gzip") as file:
        assert list(file) == lines
        assert file.seek(len(lines[0])) == file.tell() == len(lines[0])
        buffer = bytearray(len(lines[1]))
        assert file.readinto(buffer) == len(buffer)
        assert buffer == lines[1]
        assert file.read1(10) == lines[2] + lines[3][: 10 - len(lines[2])] if len(lines[2]) < 10 else lines[2][:10]


def test_an_unknown_compression_opens_nothing(place, recwarn):
    with pytest.raises(ValueError, match="klingon"):
        place.fs.open(place / "a", "wb", compression="klingon")
    assert not recwarn.list
    assert not place.fs.exists(place / "a")


# -- archives ----------------------------------------------------------------------------------------------------


def test_numpy_writes_a_zip_without_going_back(place):
    # `zipfile` asks for the position in the file. If it got one, it would seek back to each header later.
    with place.fs.open(place / "a.npy", "wb") as file:
        np.save(file, np.arange(1_000_000))
    with place.fs.open(place / "a.npy", "rb") as file:
        assert np.array_equal(np.load(file), np.arange(1_000_000))
    with place.fs.open(place / "a.npz", "wb") as file:
        np.savez(file, first=np.arange(10), second=np.ones(3))
    with place.fs.open(place / "a.npz", "rb") as file:
        found = np.load(file)
        assert np.array_equal(found["first"], np.arange(10))
        assert np.array_equal(found["second"], np.ones(3))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_defaults_of_text_mode_may_be_given_in_binary_mode(place, compression):
    defaults = {"encoding": None, "errors": None, "newline": None, "compression": compression}
    with place.fs.open(place / "a", "wb", **defaults) as file:
        file.write(b"content")
    with place.fs.open(place / "a", "rb", **defaults) as file:
        assert file.read() == b"content"
    with place.fs.open(place / "a", "r", **defaults) as file:
        assert file.read() == "content"
    with pytest.raises(InvalidInputError, match="unknown argument 'encoding'"):
        place.fs.open(place / "a", "rb", encoding="utf-8")
