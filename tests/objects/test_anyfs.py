"""How a tier handles the failures, missing features and false answers of an fsspec filesystem."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from support.private_memory import PrivateMemory

from tierfs.clock import ManualClock
from tierfs.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
)
from tierfs.objects import CREATE, FsspecObjects, Update


@pytest.fixture
def fs() -> PrivateMemory:
    return PrivateMemory()


@pytest.fixture
def objects(fs: PrivateMemory) -> FsspecObjects:
    return FsspecObjects(fs, "bucket/run")


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


# Capabilities


def test_it_is_for_a_single_writer(objects: FsspecObjects) -> None:
    assert objects.capabilities.single_writer
    assert objects.capabilities.atomic_put
    assert not FsspecObjects(LocalFileSystem(), "/tmp").capabilities.atomic_put


def test_an_asynchronous_filesystem_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="asynchronous"):
        FsspecObjects(AsyncFileSystemWrapper(MemoryFileSystem(), asynchronous=True), "bucket")


@pytest.mark.parametrize("root", ["bucket/run", "/bucket/run/", "memory://bucket/run"])
def test_a_root_may_be_written_in_several_ways(fs: PrivateMemory, root: str) -> None:
    FsspecObjects(fs, root).put("a/b", [b"something"])
    assert fs.find("/") == ["/bucket/run/a/b"]


@pytest.mark.parametrize("root", ["", "/"])
def test_the_root_may_be_the_whole_filesystem(fs: PrivateMemory, root: str) -> None:
    objects = FsspecObjects(fs, root)
    objects.put("run/a", [b"something"])
    assert [listed.key for listed in objects.list("")] == ["run/a"]
    assert [listed.key for listed in objects.list("", delimiter=True)] == ["run/"]


def test_instances_share_their_locks(fs: PrivateMemory, objects: FsspecObjects) -> None:
    other = FsspecObjects(fs, "/bucket")
    info = objects.put("a", [b"something"])
    with pytest.raises(AlreadyExistsError):
        other.put("run/a", [b"other"], mode=CREATE)
    with pytest.raises(ConflictError):
        other.put("run/b", [b"other"], mode=Update(info.version))


# Versions


def _describe_with(fs: PrivateMemory, extra: Callable[[str], dict[str, Any]]) -> None:
    """Make the filesystem describe its files with ``extra`` instead of the time."""
    for name in ("info", "ls", "find"):
        original = getattr(type(fs), name)

        def changed(path: str, *arguments: Any, original: Any = original, **options: Any) -> Any:
            answer = original(fs, path, *arguments, **options)
            entries = answer if isinstance(answer, list) else answer.values() if "name" not in answer else [answer]
            for entry in entries:
                entry.pop("created", None)
                entry.update(extra(entry["name"]))
            return answer

        setattr(fs, name, changed)


@pytest.mark.parametrize("name", ["ETag", "etag", "generation"])
def test_the_server_s_own_version_is_taken(fs: PrivateMemory, objects: FsspecObjects, name: str) -> None:
    _describe_with(fs, lambda path: {name: f'"{fs.cat_file(path).hex()}"'} if path in fs.store else {})
    assert objects.put("a", [b"one"]).version == b"one".hex()
    assert objects.put("a", [b"two"]).version == b"two".hex()
    assert [listed.version for listed in objects.list("")] == [b"two".hex()]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "moment",
    [
        1_700_000_000.25,
        datetime.fromtimestamp(1_700_000_000.25, tz=timezone.utc),
        datetime.fromtimestamp(1_700_000_000.25, tz=timezone.utc).replace(tzinfo=None),
        "2023-11-14T22:13:20.250000+00:00",
        1_700_000_000_250,
    ],
    ids=["seconds", "aware", "naive", "text", "milliseconds"],
)
def test_a_time_is_understood_in_every_form(fs: PrivateMemory, objects: FsspecObjects, moment: object) -> None:
    fs.pipe_file("/bucket/run/a", b"something")
    _describe_with(fs, lambda _: {"mtime": moment})
    assert objects.head("a").modified_ns == 1_700_000_000_250_000_000


class CoarseClock(ManualClock):
    """The times of the filesystem are whole seconds."""

    def moment(self) -> int:
        return int(self.monotonic())


def test_a_put_in_the_same_tick_gets_a_time_of_its_own(fs: PrivateMemory) -> None:
    clock = CoarseClock()
    written: dict[str, int] = {}
    pipe = fs.pipe_file

    def pipe_at(path: str, value: bytes) -> None:
        pipe(path, value)
        written[path] = clock.moment()

    fs.pipe_file = pipe_at
    _describe_with(fs, lambda path: {"mtime": written.get(path)})
    objects = FsspecObjects(fs, "bucket/run", clock=clock)
    first = objects.put("a", [b"one"], mode=CREATE)
    second = objects.put("a", [b"two"], mode=Update(first.version))
    third = objects.put("a", [b"one"], mode=Update(second.version))
    assert len({first.version, second.version, third.version}) == 3
    assert objects.read("a", 100) == (b"one", third)


class FilesAndTags(PrivateMemory):
    """Describes its files as a WebDAV server does."""

    protocol = "webdav"


def test_a_tag_that_is_time_and_size_gets_a_time_of_its_own() -> None:
    fs, clock = FilesAndTags(), CoarseClock()
    written: dict[str, int] = {}
    pipe = fs.pipe_file

    def pipe_at(path: str, value: bytes) -> None:
        pipe(path, value)
        written[path] = clock.moment()

    fs.pipe_file = pipe_at
    _describe_with(fs, lambda path: {"etag": f"{written[path]}-3"} if path in written else {})
    objects = FsspecObjects(fs, "/bucket/run", clock=clock)
    first = objects.put("a", [b"one"])
    second = objects.put("a", [b"two"])
    assert first.version != second.version
    with pytest.raises(ConflictError):
        objects.put("a", [b"six"], mode=Update(first.version))


def test_a_filesystem_whose_time_stands_still_is_refused(fs: PrivateMemory) -> None:
    _describe_with(fs, lambda _: {"mtime": 1_700_000_000})
    objects = FsspecObjects(fs, "bucket/run", clock=ManualClock())
    first = objects.put("a", [b"one"])
    with pytest.raises(StoreError, match="cannot tell new content from old"):
        objects.put("a", [b"two"], mode=Update(first.version))


def test_a_filesystem_without_times_never_replaces_anything(fs: PrivateMemory, objects: FsspecObjects) -> None:
    _describe_with(fs, lambda _: {})
    first = objects.put("a", [b"one"], mode=CREATE)
    with pytest.raises(StoreError, match="cannot tell new content from old"):
        objects.put("a", [b"two"], mode=Update(first.version))
    assert objects.read("a", 100)[0] == b"one"


# Writing


def test_a_put_that_stored_less_is_noticed(fs: PrivateMemory, objects: FsspecObjects) -> None:
    pipe = fs.pipe_file
    fs.pipe_file = lambda path, value: pipe(path, value[:-1])
    with pytest.raises(StoreError, match="9 bytes were written, but 8 bytes stored") as caught:
        objects.put("a", [b"something"])
    assert caught.value.transient


def test_a_bucket_that_is_missing_is_a_failure_of_the_put(fs: PrivateMemory, objects: FsspecObjects) -> None:
    fs.pipe_file = _raising(FileNotFoundError("bucket"))
    with pytest.raises(StoreError, match="bucket or directory") as caught:
        objects.put("a", [b"something"])
    assert not caught.value.transient


def test_a_filesystem_that_cannot_write_is_read_only(fs: PrivateMemory, objects: FsspecObjects) -> None:
    fs.pipe_file = _raising(NotImplementedError())
    with pytest.raises(ReadOnlyError):
        objects.put("a", [b"something"])


def test_a_directory_removed_by_others_is_made_again(tmp_path: Path) -> None:
    objects = FsspecObjects(LocalFileSystem(), str(tmp_path / "store"))
    objects.put("run/a", [b"something"])
    fsspec.filesystem("file").rm(str(tmp_path / "store"), recursive=True)
    with pytest.raises(StoreError):
        objects.put("run/a", [b"something"])
    objects.put("run/a", [b"something"])
    assert objects.head("run/a").size == 9


# Threads


class OneByOne(PrivateMemory):
    """A filesystem whose client mixes up the answers of concurrent requests."""

    protocol = "sftp"

    def __init__(self) -> None:
        super().__init__()
        self.under_way = 0
        self.mixed_up = False

    def _alone(self, action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.under_way += 1
        self.mixed_up |= self.under_way > 1
        time.sleep(0.001)
        try:
            return action(*arguments, **options)
        finally:
            self.under_way -= 1

    def info(self, path: str, **options: Any) -> Any:
        return self._alone(super().info, path, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        return self._alone(super().pipe_file, path, value, **options)

    def rm_file(self, path: str) -> Any:
        return self._alone(super().rm_file, path)


def test_a_client_that_is_not_for_threads_gets_one_request_at_a_time() -> None:
    fs = OneByOne()
    tiers = [FsspecObjects(fs, "/bucket/run"), FsspecObjects(fs, "/bucket/other")]

    def work(number: int) -> None:
        objects = tiers[number % 2]
        objects.put(f"{number}", [b"something"])
        assert objects.read(f"{number}", 100)[0] == b"something"
        objects.delete([f"{number}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert not fs.mixed_up


class Connected(PrivateMemory):
    """A filesystem that connects when it is created. Its files outlive the connection."""

    protocol = "sftp"
    files: ClassVar[dict[str, Any]] = {}

    def __init__(self, host: str) -> None:
        super().__init__()
        assert host == "here"
        self.store = self.files
        self.closed = False

    def info(self, path: str, **options: Any) -> Any:
        if self.closed:
            raise OSError("Socket is closed")
        return super().info(path, **options)

    def rm_file(self, path: str) -> Any:
        if self.closed:
            raise OSError("Socket is closed")
        return super().rm_file(path)


@pytest.mark.parametrize("request_", ["head", "delete"])
def test_a_connection_that_was_lost_is_made_anew(request_: str) -> None:
    fs = Connected(host="here")
    objects = FsspecObjects(fs, "/bucket/run")
    objects.put("a", [b"something"])
    fs.closed = True
    ask = {"head": lambda: objects.head("a"), "delete": lambda: objects.delete(["a"])}[request_]
    with pytest.raises(StoreError) as caught:
        ask()
    assert caught.value.transient
    ask()


# Reading


def test_listings_remembered_are_dropped_before_every_look(fs: PrivateMemory, objects: FsspecObjects) -> None:
    dropped: list[object] = []
    fs.invalidate_cache = lambda path=None: dropped.append(path)
    with pytest.raises(NotFoundError):
        objects.head("a")
    list(objects.list(""))
    list(objects.list("", delimiter=True))
    assert dropped == [None, None, None]


def test_a_range_that_comes_short_is_corruption(fs: PrivateMemory, objects: FsspecObjects) -> None:
    objects.put("a", [b"something"])
    fs.cat_file = lambda path, start=None, end=None: b"some"
    with pytest.raises(CorruptionError, match="cut short"):
        objects.get("a", [(0, memoryview(bytearray(9)))])
    with pytest.raises(CorruptionError, match="cut short"):
        objects.read("a", 100)


def test_an_object_that_changes_while_it_is_read_is_read_again(fs: PrivateMemory, objects: FsspecObjects) -> None:
    objects.put("a", [b"something"])
    cat = fs.cat_file

    def overtaken(path: str, start: int | None = None, end: int | None = None) -> bytes:
        fs.pipe_file(path, b"new")
        content: bytes = cat(path, start, end)
        return content

    fs.cat_file = overtaken
    with pytest.raises(StoreError, match="changed while it was read") as caught:
        objects.get("a", [(0, memoryview(bytearray(9)))])
    assert caught.value.transient


def test_one_range_that_fails_fails_the_get(fs: PrivateMemory, objects: FsspecObjects) -> None:
    objects.put("a", [b"something"])
    fs.cat_file = _raising(ConnectionResetError("gone"))
    with pytest.raises(StoreError) as caught:
        objects.get("a", [(0, memoryview(bytearray(9))), (3, memoryview(bytearray(2)))])
    assert caught.value.transient


def test_a_range_of_no_bytes_is_not_asked_for(fs: PrivateMemory, objects: FsspecObjects) -> None:
    info = objects.put("a", [])
    fs.cat_file = _raising(OSError("416"))
    assert objects.get("a", [(0, memoryview(bytearray(0)))]) == info


# Listing and deleting


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    fs = LocalFileSystem(skip_instance_cache=True)
    objects = FsspecObjects(fs, str(tmp_path))
    objects.put("run/deep/a", [b"something"])
    ls = fs.ls

    def refuse(path: str, **options: Any) -> Any:
        if path.endswith("deep"):
            raise PermissionError(13, "Permission denied")
        return ls(path, **options)

    fs.ls = refuse
    with pytest.raises(ReadOnlyError):
        list(objects.list(""))


def test_placeholders_of_directories_are_not_objects(fs: PrivateMemory, objects: FsspecObjects) -> None:
    objects.put("run/a", [b"something"])
    find = fs.find

    def with_placeholder(path: str, **options: Any) -> Any:
        return {"/bucket/run/run/": {"name": "/bucket/run/run/", "size": 0, "type": "file"}, **find(path, **options)}

    fs.find = with_placeholder
    assert [listed.key for listed in objects.list("")] == ["run/a"]


def test_a_place_names_the_host_and_no_secret() -> None:
    class Remote(PrivateMemory):
        protocol = "remote"

    one = FsspecObjects(Remote(host="one", password="secret", base_url="https://user:secret@one/dav?key=secret"), "run")
    other = FsspecObjects(Remote(host="other", password="secret"), "run")
    assert one.places() == ("remote:one:https://one/dav:/run",)
    assert other.places() == ("remote:other:/run",)


def test_a_deletion_that_fails_is_an_error(fs: PrivateMemory, objects: FsspecObjects) -> None:
    objects.put("b", [b"something"])
    fs.rm_file = _raising(OSError("no"))
    with pytest.raises(StoreError) as caught:
        objects.delete(["b"])
    assert caught.value.path == "b"
