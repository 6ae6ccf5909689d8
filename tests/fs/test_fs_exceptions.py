"""A write that ends with an error publishes nothing: the path keeps its content, and a warning says so."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import sys
import threading

import fsspec
import pytest
from support.waiting import HANG_S

from tierfs.buffers import Buffers
from tierfs.errors import CapacityError, ReadOnlyError, StoreError
from tierfs.objects import WrappedObjects
from tierfs.store import Writer
from tierfs.testing import Fault

CHUNK = 16 << 20
DOORS = [
    ("fs", "wb", None),
    ("fs", "ab", None),
    ("fs", "w", None),
    ("fs", "wb", "gzip"),
    ("fs", "w", "gzip"),
    ("fs", "wb", "bz2"),
    ("fsspec", "wb", None),
    ("fsspec", "w", None),
    ("fsspec", "wb", "gzip"),
    ("fsspec", "wb", "xz"),
    ("fsspec", "w", "gzip"),
]
# Bytes that wrappers still buffer; bytes that do not fit into a manifest; for two ways to open, bytes partly sent.
CASES = [(door, size) for door in DOORS for size in (10, 100_000)]
CASES += [(door, CHUNK + 10) for door in (("fs", "wb", None), ("fsspec", "w", None))]


def name_of(parameter) -> str:
    return "-".join(map(str, parameter)) if isinstance(parameter, tuple) else str(parameter)


pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def place(memory_place):
    """Handles are the same over any object tier."""
    return memory_place


@pytest.fixture(params=DOORS, ids=name_of)
def door(request, place):
    """``(open, convert)``: one opens ``a`` for writing, the other converts bytes to the type that it takes."""
    api, mode, compression = request.param

    def open_file():
        if api == "fs":
            return place.fs.open(place / "a", mode, compression=compression)
        return fsspec.open(f"{place.url}/a", mode, compression=compression)

    return open_file, (lambda data: data) if "b" in mode else (lambda data: data.decode("latin-1"))


def drop(handles: list) -> None:
    """Drop handles without closing them."""
    handles.clear()
    if sys.version_info >= (3, 12):  # its gzip files refer to themselves
        gc.collect()


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("door", "size"), CASES, indirect=["door"], ids=name_of)
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_inside_with_publishes_nothing(place, door, size, error, random_bytes, caplog):
    open_file, convert = door
    if error is KeyError:
        place.fs.pipe(place / "a", b"old content")
    with pytest.raises(error, match="boom"), open_file() as file:
        file.write(convert(random_bytes(size, 1)))
        raise error("boom")
    assert place.fs.cat(place / "a") == b"old content" if error is KeyError else place.names() == []
    assert [message for message in warnings_in(caplog) if "not published" in message and "boom" in message]


def test_a_handled_exception_inside_with_discards_nothing(place, door):
    open_file, convert = door
    with open_file() as file:
        with contextlib.suppress(KeyError):
            raise KeyError("handled")
        file.write(convert(b"whole"))
    assert place.names() == ["a"]


def test_a_file_written_in_an_exception_handler_is_published(place, door):
    open_file, convert = door
    try:
        {}["the reason to write"]
    except KeyError:
        with open_file() as file:
            file.write(convert(b"whole"))
    assert place.names() == ["a"]


def test_an_exception_that_passes_finally_publishes_nothing(place, door):
    open_file, convert = door
    opened = open_file()
    file = opened.open() if isinstance(opened, fsspec.core.OpenFile) else opened
    # The caller may swallow the exception after closing, so `close` itself says that nothing is published.
    with pytest.raises(StoreError, match=r"is not published.*call commit\(\)") as raised:
        try:
            file.write(convert(b"half"))
            raise KeyError("boom")
        finally:
            opened.close()
    assert isinstance(raised.value.__cause__, KeyError)
    assert place.names() == []


def test_closing_in_an_exception_handler_raises(place):
    handle = place.fs.open(place / "a", "wb")
    pieces = iter([b"whole"])
    with pytest.raises(StoreError, match=r"call commit\(\)"):
        while True:
            try:
                handle.write(next(pieces))
            except StopIteration:
                handle.close()
                break
    again = place.fs.open(place / "b", "wb")
    try:
        raise KeyError
    except KeyError:
        again.write(b"whole")
        again.commit()
    assert place.names() == ["b"]


def test_contextlib_closing_lets_the_exception_through(place):
    with pytest.raises(KeyError), contextlib.closing(place.fs.open(place / "a", "wb")) as handle:
        handle.write(b"half")
        raise KeyError
    assert place.names() == []


@pytest.mark.parametrize(("door", "size"), CASES, indirect=["door"], ids=name_of)
def test_a_handle_dropped_without_close_publishes_nothing(place, door, size, random_bytes, caplog):
    open_file, convert = door
    place.fs.pipe(place / "a", b"old content")
    handles = [open_file()]
    if isinstance(handles[0], fsspec.core.OpenFile):
        handles.append(handles[0].open())
    handles[-1].write(convert(random_bytes(size, 2)))
    with pytest.warns(ResourceWarning, match="unclosed"):
        drop(handles)
    assert place.fs.cat(place / "a") == b"old content"
    assert [message for message in warnings_in(caplog) if "dropped without being closed" in message]


def test_dropping_a_handle_waits_for_no_request(place, put_between, random_bytes):
    release = threading.Event()

    class Blocked(WrappedObjects):
        def put(self, key, *arguments, **options):
            assert release.wait(HANG_S)
            return super().put(key, *arguments, **options)

    put_between(Blocked)
    handles = [place.fs.open(place / "a", "wb")]
    handles[0].write(random_bytes(2 * CHUNK, 3))
    dropping = threading.Thread(target=drop, args=(handles,))

    def wait_a_while():
        dropping.start()
        dropping.join(HANG_S)

    with pytest.warns(ResourceWarning, match="unclosed"):
        wait_a_while()
    waited = dropping.is_alive()
    release.set()
    dropping.join()
    assert not waited


def test_a_dropped_text_wrapper_of_io_publishes_nothing(place):
    file = io.TextIOWrapper(place.fs.open(place / "a.gz", "wb", compression="gzip"))
    file.write("half")
    with pytest.warns(ResourceWarning, match="unclosed"):
        del file
    assert place.names() == []


def test_a_dropped_read_handle_says_nothing(place, caplog):
    place.fs.pipe(place / "a", b"x")
    for mode in ("rb", "r"):
        file = place.fs.open(place / "a", mode)
        file.read()
        del file
        gc.collect()
    assert not warnings_in(caplog)


def test_a_discarded_handle_publishes_nothing_and_is_closed(place):
    file = place.fs.open(place / "a", "wb")
    file.write(b"half")
    file.discard()
    assert file.closed
    file.close()
    assert place.names() == []


# -- an object tier that fails -----------------------------------------------------------------------------------


def write_until_it_fails(file, convert, random_bytes) -> int:
    """Write chunks until a write fails, some writes after the cause. Return the number of successful writes."""
    for count in range(20):
        try:
            file.write(convert(random_bytes(CHUNK, count)))
        except (CapacityError, ReadOnlyError, StoreError):
            return count
    raise AssertionError("it never failed")


@pytest.mark.parametrize(("fault", "error"), [(Fault.DENIED, ReadOnlyError), (Fault.FULL, CapacityError)])
def test_a_failed_write_fails_the_next_write_and_close(place, faulty, random_bytes, fault, error):
    place.fs.pipe(place / "a", b"old content")
    faulty.inject(fault, method="put", key_part="chunks")
    file = place.fs.open(place / "a", "wb")
    write_until_it_fails(file, lambda data: data, random_bytes)
    with pytest.raises(error):
        file.write(b"more")
    with pytest.raises(error):
        file.close()
    assert file.closed
    faulty.inject(fault, method="put", key_part="chunks")
    with pytest.raises(error), place.fs.open(place / "a", "wb") as file:
        write_until_it_fails(file, lambda data: data, random_bytes)
    assert place.fs.cat(place / "a") == b"old content"


@pytest.mark.parametrize(("mode", "compression"), [("w", None), ("wb", "gzip"), ("w", "gzip")])
def test_a_write_that_fails_below_a_wrapper_fails_its_close(
    place, monkeypatch, mode, compression, recwarn, random_bytes
):
    convert = (lambda data: data) if "b" in mode else (lambda data: data.decode("latin-1"))
    file = place.fs.open(place / "a", mode, compression=compression)
    file.write(convert(b"held back or not"))

    def fail(*_):
        raise CapacityError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", fail)
        with contextlib.suppress(CapacityError):
            file.flush()
        with contextlib.suppress(CapacityError):
            file.write(convert(random_bytes(1 << 20, 6)))
        with contextlib.suppress(CapacityError):
            file.flush()
    with pytest.raises(CapacityError):
        file.close()
    assert file.closed
    del file
    gc.collect()
    assert not recwarn.list
    assert place.names() == []


@pytest.mark.parametrize("size", [10, CHUNK + 10])
def test_a_file_that_cannot_be_published_leaves_the_old_one(place, faulty, random_bytes, size):
    place.fs.pipe(place / "a", b"old content")
    file = place.fs.open(place / "a", "wb")
    file.write(random_bytes(size, 3))
    faulty.inject(Fault.FULL, method="put", key_part="tree")
    with pytest.raises(CapacityError):
        file.close()
    assert place.fs.cat(place / "a") == b"old content"


def test_an_interrupted_write_cannot_be_published(place, monkeypatch, random_bytes):
    place.fs.pipe(place / "a", b"old content")
    file = place.fs.open(place / "a", "wb")
    file.write(b"some")

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            file.write(random_bytes(CHUNK, 4))
    with pytest.raises(StoreError, match="interrupted"):
        file.close()
    assert place.fs.cat(place / "a") == b"old content"


def test_a_damaged_file_is_an_error_for_every_way_to_read_it(place, faulty, random_bytes, tmp_path):
    place.fs.pipe(place / "a", random_bytes(1 << 20, 5))
    faulty.delete(place.chunks())
    ways = {
        "cat": lambda: place.fs.cat(place / "a"),
        "cat_ranges": lambda: place.fs.cat_ranges([place / "a"], 0, 10, on_error="raise"),
        "open": lambda: place.fs.open(place / "a").read(),
        "get": lambda: place.fs.get(place / "a", str(tmp_path / "got")),
    }
    for way in ways.values():
        with pytest.raises(Exception, match="missing") as caught:
            way()
        assert getattr(caught.value, "kind", None) == "corruption"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["ls", "find", "walk", "glob", "du", "exists", "isdir", "isfile", "info"])
def test_a_failing_object_tier_is_never_taken_for_an_empty_one(place, faulty, call):
    place.fs.pipe(place / "dir/a", b"x")
    place.store.records.clear()
    for method in ("list", "read", "head"):
        faulty.inject(Fault.DENIED, method=method)
    argument = place / "dir/*" if call == "glob" else place / "dir/a" if call == "isfile" else place / "dir"
    with pytest.raises(ReadOnlyError):
        list(place.fs.walk(argument)) if call == "walk" else getattr(place.fs, call)(argument)
