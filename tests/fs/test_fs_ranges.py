"""Reading parts of files."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from support.waiting import HANG_S

from tierfs.errors import CorruptionError, NotFoundError, StoreError
from tierfs.objects import WrappedObjects
from tierfs.testing import flip_bit

MIB = 1 << 20
CHUNK = 16 * MIB
SMALL = bytes(range(100))
RANGES = [
    (None, None),
    (0, 10),
    (10, None),
    (None, 10),
    (90, 100),
    (90, 1000),
    (100, 200),
    (200, 300),
    (-10, None),
    (-10, -5),
    (None, -90),
    (-1000, 5),
    (50, 50),
    (60, 50),
    (0, 0),
]


@pytest.fixture(scope="module")
def large() -> bytes:
    return Random(40).randbytes(40 * MIB)


@pytest.fixture
def large_path(place, large) -> str:
    place.fs.pipe(place / "large", large)
    return place / "large"


@pytest.mark.parametrize("data", [SMALL, b""], ids=["some", "empty"])
def test_cat_file_takes_the_same_ranges_as_a_slice(place, data):
    place.fs.pipe(place / "a", data)
    assert [place.fs.cat_file(place / "a", start, end) for start, end in RANGES] == [
        data[start:end] for start, end in RANGES
    ]


def test_cat_file_reads_across_the_borders_of_blocks_and_chunks(place, large, large_path):
    borders = [MIB, CHUNK - MIB, CHUNK, 2 * CHUNK, 40 * MIB]
    edges = [(border - 3, border + 3) for border in borders] + [(border, border + 1) for border in borders]
    for start, end in [*edges, (CHUNK - 1, 2 * CHUNK + 1), (-5, None), (-CHUNK - 5, -CHUNK + 5)]:
        assert place.fs.cat_file(large_path, start, end) == large[start:end]


def test_cat_ranges_answers_in_the_order_of_the_request(place, large, large_path):
    contents = {place / f"dir/{number}": Random(number).randbytes(1000 * number) for number in range(1, 20)}
    place.fs.pipe(contents)
    contents[large_path] = large
    print("seed 8")
    random = Random(8)
    paths = [random.choice(list(contents)) for _ in range(200)]
    starts = [random.randrange(len(contents[path])) for path in paths]
    ends = [start + random.randrange(5000) for start in starts]
    expected = [contents[path][start:end] for path, start, end in zip(paths, starts, ends, strict=True)]
    assert place.fs.cat_ranges(paths, starts, ends) == expected


def test_cat_ranges_takes_one_start_and_end_for_all(place):
    place.fs.pipe({place / "a": b"0123456789", place / "b": b"abcdefghij"})
    paths = [place / "a", place / "b"]
    assert place.fs.cat_ranges(paths, 2, 5) == [b"234", b"cde"]
    assert place.fs.cat_ranges(paths, -3, None) == [b"789", b"hij"]
    assert place.fs.cat_ranges(paths, [0, 5], 7) == [b"0123456", b"fg"]


def test_cat_ranges_returns_errors_or_raises_the_first(place):
    place.fs.pipe(place / "a", b"0123456789")
    paths = [place / "a", place / "missing", place / "a"]
    first, missing, last = place.fs.cat_ranges(paths, [0, 0, 5], [5, 5, 10], on_error="return")
    assert (first, last) == (b"01234", b"56789")
    assert isinstance(missing, NotFoundError)
    with pytest.raises(NotFoundError, match="missing"):
        place.fs.cat_ranges(paths, 0, 5, on_error="raise")


def fetch_as_torch_does(fs, paths, starts, ends) -> list[bytes]:
    """Make the request of `FsspecReader` in torch's main branch, with its checks of the answer."""
    chunks = fs.cat_ranges(paths, starts, ends, on_error="raise")
    assert isinstance(chunks, list)
    assert [type(chunk) for chunk in chunks] == [bytes] * len(paths)
    assert [len(chunk) for chunk in chunks] == [end - start for start, end in zip(starts, ends, strict=True)]
    return list(chunks)


def test_torchs_reader_takes_the_filesystem_for_one_of_batches(place):
    assert isinstance(place.fs, AsyncFileSystem)
    assert place.fs.async_impl
    assert not isinstance(getattr(place.fs, "fs", None), AbstractFileSystem)


def test_cat_ranges_with_urls_from_two_threads_at_once(place, random_bytes):
    print("seed 9")
    random = Random(9)
    contents = {f"__{rank}_0.distcp": random_bytes(3 * MIB + rank, rank) for rank in range(4)}
    contents["__4_0.distcp"] = random_bytes(CHUNK + MIB, 4)
    place.fs.pipe({place / f"ck/{name}": data for name, data in contents.items()})
    fs, _ = fsspec.url_to_fs(f"{place.url}/ck")

    def batch() -> tuple[list[str], list[int], list[int]]:
        names = sorted(random.choice(list(contents)) for _ in range(50))
        starts = [random.randrange(len(contents[name])) for name in names]
        pairs = zip(names, starts, strict=True)
        return names, starts, [min(len(contents[name]), at + random.choice([0, 1, 700, MIB])) for name, at in pairs]

    batches = [batch() for _ in range(8)]
    together = threading.Barrier(2)

    def fetch(wanted: tuple[list[str], list[int], list[int]]) -> list[bytes]:
        together.wait(HANG_S)
        names, starts, ends = wanted
        return fetch_as_torch_does(fs, [os.path.join(f"{place.url}/ck", name) for name in names], starts, ends)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(fetch, batches))
    for chunks, (names, starts, ends) in zip(found, batches, strict=True):
        assert chunks == [contents[name][start:end] for name, start, end in zip(names, starts, ends, strict=True)]


def test_cat_ranges_with_urls_raises_what_is_missing_or_damaged(place, random_bytes):
    place.fs.pipe({place / "good": b"small", place / "bad": random_bytes(MIB, 2)})
    (chunk,) = place.chunks()
    flip_bit(place.store.objects, chunk, 8 * (MIB // 2))
    fresh, _ = fsspec.url_to_fs(place.url, ram="0", skip_instance_cache=True)
    with pytest.raises(CorruptionError, match="bad"):
        fresh.cat_ranges([f"{place.url}/bad"], [5], [50], on_error="raise")
    with pytest.raises(FileNotFoundError, match="missing"):
        fresh.cat_ranges([f"{place.url}/good", f"{place.url}/missing"], [0, 0], [5, 5], on_error="raise")


def test_cat_ranges_refuses_unequal_lists_and_a_single_path(place):
    with pytest.raises(ValueError, match="2 paths with 1 starts"):
        place.fs.cat_ranges([place / "a", place / "b"], [0], [1, 2])
    with pytest.raises(TypeError):
        place.fs.cat_ranges(place / "a", 0, 1)


def test_cat_ranges_looks_a_file_up_once_for_all_its_ranges(place):
    place.fs.pipe(place / "a", SMALL)
    before = place.requests()
    place.fs.cat_ranges([place / "a"] * 50, list(range(50)), list(range(10, 60)))
    after = place.requests()
    assert after["head"] + after["read"] - before["head"] - before["read"] == 1


def test_cat_ranges_fetches_each_chunk_once_for_all_its_ranges(place, large, large_path):
    starts = range(0, len(large) - MIB, 3 * MIB // 2)
    before = place.requests()["get"]
    found = place.fs.cat_ranges([large_path] * len(starts), list(starts), [start + MIB for start in starts])
    assert found == [large[start : start + MIB] for start in starts]
    assert place.requests()["get"] - before == 3


def test_cat_ranges_tells_which_ranges_failed(place, large, large_path, put_between):
    class Failing(WrappedObjects):
        def get(self, key, ranges, **options):
            info = super().get(key, ranges, **options)
            for _, out in ranges:
                if bytes(out[:16]) == large[CHUNK : CHUNK + 16]:
                    raise StoreError("gone", transient=False)
            return info

    put_between(Failing)
    starts, ends = [0, CHUNK, 2 * CHUNK], [10, CHUNK + 10, 2 * CHUNK + 10]
    first, second, third = place.fs.cat_ranges([large_path] * 3, starts, ends, on_error="return")
    assert (first, third) == (large[:10], large[2 * CHUNK : 2 * CHUNK + 10])
    assert isinstance(second, StoreError)


def test_cat_ranges_reads_several_files_at_once(place, random_bytes, put_between):
    contents = {place / str(number): random_bytes(MIB, number) for number in range(4)}
    place.fs.pipe(contents)
    together = threading.Barrier(4, timeout=HANG_S)

    class Meeting(WrappedObjects):
        def get(self, *arguments, **options):
            together.wait()
            return super().get(*arguments, **options)

    put_between(Meeting)
    assert place.fs.cat_ranges(list(contents), 0, None) == list(contents.values())


def test_a_read_handle_does_what_a_file_in_memory_does(place, large, large_path):
    print("seed 9")
    random = Random(9)
    model = io.BytesIO(large)
    with place.fs.open(large_path, "rb") as file:
        for _ in range(400):
            match random.randrange(7):
                case 0:
                    offset = random.randrange(len(large) + 10)
                    assert file.seek(offset) == model.seek(offset)
                case 1:
                    offset = random.randrange(-model.tell(), 100_000)
                    assert file.seek(offset, os.SEEK_CUR) == model.seek(offset, os.SEEK_CUR)
                case 2:
                    offset = -random.randrange(2 * MIB)
                    assert file.seek(offset, os.SEEK_END) == model.seek(offset, os.SEEK_END)
                case 3:
                    count = random.choice([0, 1, 17, 5000, MIB, 3 * MIB])
                    assert file.read(count) == model.read(count)
                case 4:
                    ours, theirs = bytearray(random.choice([1, 100, 70_000, 2 * MIB])), bytearray()
                    theirs = bytearray(len(ours))
                    assert file.readinto(ours) == model.readinto(theirs)
                    assert ours == theirs
                case 5:
                    limit = random.choice([-1, 10, 10_000])
                    assert file.readline(limit) == model.readline(limit)
                case 6:
                    assert file.tell() == model.tell()
        assert file.seek(-1000, os.SEEK_END) == model.seek(-1000, os.SEEK_END)
        assert file.read() == model.read()
        assert file.read() == b""


def test_a_read_handle_knows_its_size_name_and_description(place):
    place.fs.pipe(place / "a", SMALL)
    with place.fs.open(place / "a") as file:
        assert file.size == 100
        assert file.name == file.path == place / "a"
        assert file.full_name == f"{place.url}/a"
        assert file.info() == place.fs.info(place / "a")
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        with pytest.raises((ValueError, OSError)):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read()


@pytest.mark.parametrize("size", [1000, 17 * MIB])
def test_a_read_handle_keeps_its_version_after_an_overwrite(place, random_bytes: Callable[[int, int], bytes], size):
    old, new = random_bytes(size, 1), random_bytes(size // 2, 2)
    place.fs.pipe(place / "a", old)
    with place.fs.open(place / "a") as file:
        assert file.read(10) == old[:10]
        place.fs.pipe(place / "a", new)
        assert file.read() == old[10:]
    assert place.fs.cat(place / "a") == new


def test_a_read_handle_outlives_a_delete_or_move_of_its_file(place, random_bytes):
    content = random_bytes(3 * MIB, 3)
    place.fs.pipe({place / "a": content, place / "b": content})
    with place.fs.open(place / "a") as deleted, place.fs.open(place / "b") as moved:
        place.fs.rm(place / "a")
        place.fs.mv(place / "b", place / "c")
        assert deleted.read() == content
        assert moved.read() == content
