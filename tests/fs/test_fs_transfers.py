"""put and get: the files that they copy, their progress reports, and the files left after a failure."""

from __future__ import annotations

import io
import os
import stat
from random import Random

import pytest
from fsspec.callbacks import Callback

from tierfs.errors import CorruptionError

MIB = 1 << 20


class Recorder(Callback):
    """Records its own calls and those of its branches."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.sizes: list[int] = []
        self.steps: list[int] = []
        self.branches: dict[tuple[str, str], Recorder] = {}

    def set_size(self, size):
        self.sizes.append(size)
        super().set_size(size)

    def relative_update(self, inc=1):
        self.steps.append(inc)
        super().relative_update(inc)

    def branched(self, path_1, path_2, **kwargs):
        branch = self.branches[path_1, path_2] = Recorder()
        return branch


@pytest.fixture
def tree(tmp_path) -> dict[str, bytes]:
    """Files under ``tmp_path/tree``, by relative name."""
    random = Random(1)
    contents = {
        "one": b"1",
        "empty": b"",
        "sub/two": random.randbytes(100_000),
        "sub/deep/three": random.randbytes(3 * MIB),
    }
    for name, data in contents.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return contents


def read_tree(directory) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", [0, 10, 100_000, 17 * MIB])
def test_put_of_a_file_reports_its_size_and_steps(place, tmp_path, random_bytes, size):
    (tmp_path / "local").write_bytes(random_bytes(size, 1))
    callback = Recorder()
    place.fs.put_file(str(tmp_path / "local"), place / "a", callback=callback)
    assert callback.sizes == [size]
    assert sum(callback.steps) == callback.value == size
    assert len(callback.steps) == -(-size // MIB)
    assert place.fs.cat(place / "a") == random_bytes(size, 1)


@pytest.mark.parametrize("size", [0, 10, 100_000, 17 * MIB])
def test_get_of_a_file_reports_its_size_and_steps(place, tmp_path, random_bytes, size):
    place.fs.pipe(place / "a", random_bytes(size, 2))
    callback = Recorder()
    place.fs.get_file(place / "a", str(tmp_path / "local"), callback=callback)
    assert callback.sizes == [size]
    assert sum(callback.steps) == callback.value == size
    assert len(callback.steps) == -(-size // (16 * MIB))
    assert (tmp_path / "local").read_bytes() == random_bytes(size, 2)


def test_put_of_many_files_counts_them_and_gives_each_a_branch(place, tmp_path, tree):
    callback = Recorder()
    place.fs.put(str(tmp_path / "tree") + "/", place / "copy", recursive=True, callback=callback)
    assert sum(callback.steps) == callback.size == len(callback.branches)
    found = {target: branch.value for (_, target), branch in callback.branches.items()}
    assert {target: value for target, value in found.items() if place.fs.isfile(target)} == {
        place / f"copy/{name}": len(data) for name, data in tree.items()
    }
    assert {name: place.fs.cat(place / f"copy/{name}") for name in tree} == tree


def test_get_of_many_files_counts_them_and_gives_each_a_branch(place, tmp_path, tree):
    place.fs.pipe({place / f"tree/{name}": data for name, data in tree.items()})
    callback = Recorder()
    place.fs.get(place / "tree", str(tmp_path / "got"), recursive=True, callback=callback)
    assert sum(callback.steps) == callback.size == len(callback.branches)
    found = {target: branch.value for (_, target), branch in callback.branches.items()}
    assert {
        os.path.relpath(target, tmp_path / "got"): value for target, value in found.items() if os.path.isfile(target)
    } == {name: len(data) for name, data in tree.items()}
    assert read_tree(tmp_path / "got") == tree


def test_get_makes_directories_also_empty_ones(place, tmp_path):
    place.fs.pipe(place / "dir/sub/a", b"x")
    place.fs.mkdir(place / "dir/empty")
    place.fs.get(place / "dir", str(tmp_path / "got"), recursive=True)
    assert (tmp_path / "got/sub/a").read_bytes() == b"x"
    assert (tmp_path / "got/empty").is_dir()


def test_put_of_an_empty_directory_makes_one(place, tmp_path):
    (tmp_path / "dir/empty").mkdir(parents=True)
    place.fs.put(str(tmp_path / "dir"), place / "copy", recursive=True)
    assert place.fs.isdir(place / "copy/empty")


def test_a_failed_get_leaves_the_local_file_unchanged(place, tmp_path, random_bytes):
    place.fs.pipe(place / "a", random_bytes(20 * MIB, 3))
    place.store.objects.delete(place.chunks())
    (tmp_path / "local").write_bytes(b"old")
    with pytest.raises(CorruptionError):
        place.fs.get_file(place / "a", str(tmp_path / "local"))
    assert read_tree(tmp_path) == {"local": b"old"}


def test_a_get_that_the_callback_breaks_off_leaves_nothing(place, tmp_path):
    class Failing(Callback):
        def relative_update(self, inc=1):
            raise KeyError("boom")

    place.fs.pipe(place / "a", b"content")
    with pytest.raises(KeyError):
        place.fs.get_file(place / "a", str(tmp_path / "local"), callback=Failing())
    assert list(tmp_path.iterdir()) == []


def test_a_transfer_of_nothing_is_an_error_and_leaves_nothing(place, tmp_path):
    with pytest.raises(FileNotFoundError):
        place.fs.put_file(str(tmp_path / "missing"), place / "a")
    assert place.names() == []
    with pytest.raises(FileNotFoundError):
        place.fs.get_file(place / "missing", str(tmp_path / "local"))
    with pytest.raises(FileNotFoundError):
        place.fs.get(place / "missing", str(tmp_path / "local"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_that_get_makes_have_the_mode_of_any_new_file(place, tmp_path, umask, mode):
    place.fs.pipe(place / "a", b"x")
    before = os.umask(umask)
    try:
        place.fs.get_file(place / "a", str(tmp_path / "local"))
    finally:
        os.umask(before)
    assert (tmp_path / "local").stat().st_mode & 0o777 == mode


def test_get_follows_a_link_and_leaves_a_file_its_rights(place, tmp_path):
    place.fs.pipe(place / "a", b"new")
    (tmp_path / "real").touch(mode=0o600)
    (tmp_path / "link").symlink_to("real")
    place.fs.get_file(place / "a", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600


def test_get_writes_into_a_pipe(place, tmp_path):
    place.fs.pipe(place / "a", b"content")
    os.mkfifo(tmp_path / "pipe")
    # Open for reading and writing, so that neither side waits for the other.
    pipe = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    try:
        for name in (str(tmp_path / "pipe"), f"/proc/self/fd/{pipe}"):
            place.fs.get_file(place / "a", name)
            assert os.read(pipe, 100) == b"content"
    finally:
        os.close(pipe)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_file_does_not_replace_a_directory(place, tmp_path):
    place.fs.pipe(place / "a", b"content")
    with pytest.raises(IsADirectoryError):
        place.fs.get_file(place / "a", str(tmp_path))


class Partial(io.RawIOBase):
    """An unbuffered file that takes three bytes at a time, and nothing after ``limit`` bytes."""

    def __init__(self, limit):
        self.taken = bytearray()
        self.limit = limit

    def writable(self):
        return True

    def write(self, data):
        if len(self.taken) >= self.limit:
            return None
        self.taken += bytes(data[:3])
        return len(data[:3])


def test_get_continues_after_a_partial_write(place):
    place.fs.pipe(place / "a", b"0123456789")
    out = Partial(100)
    place.fs.get_file(place / "a", out)
    assert out.taken == b"0123456789"
    with pytest.raises(BlockingIOError):
        place.fs.get_file(place / "a", Partial(6))


def test_get_takes_a_file_that_does_not_count(place):
    class Silent:
        taken = b""

        def write(self, data):
            self.taken += bytes(data)

        read = close = tell = None

    place.fs.pipe(place / "a", b"0123456789")
    out = Silent()
    place.fs.get_file(place / "a", out)
    assert out.taken == b"0123456789"


def test_get_never_touches_the_umask_that_all_threads_share(place, tmp_path, monkeypatch):
    place.fs.pipe({place / f"dir/{number}": b"x" for number in range(50)})
    monkeypatch.setattr(os, "umask", None)
    place.fs.get(place / "dir", str(tmp_path / "got"), recursive=True)
    assert len(list((tmp_path / "got").iterdir())) == 50
