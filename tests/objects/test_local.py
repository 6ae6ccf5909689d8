"""Promises of the local directory beyond the conformance suite: crashes, full disks, permissions, several processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import until

from tierfs.errors import AlreadyExistsError, CapacityError, ConflictError, NotFoundError, ReadOnlyError, StoreError
from tierfs.objects import CREATE, LocalObjects, Update
from tierfs.objects.backends import local as local_module
from tierfs.objects.backends.local import STALE_TEMPORARY_S

PROCESSES = 2
KEYS = 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def objects(root: Path) -> LocalObjects:
    return LocalObjects(root)


def _temporaries(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".tierfs/tmp").glob("put-*"))


def _failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


# Crashes

_CRASH = """
import os, sys
from tierfs.objects import CREATE, OVERWRITE, LocalObjects
root, call, mode = sys.argv[1:]
setattr(os, call, lambda *_, **__: os._exit(9))
LocalObjects(root).put("run/a", [b"half written"], mode=CREATE if mode == "create" else OVERWRITE)
"""


@pytest.mark.parametrize(("call", "mode"), [("fsync", "create"), ("link", "create"), ("rename", "overwrite")])
def test_a_crash_before_the_object_has_its_name_leaves_nothing_to_see(
    objects: LocalObjects, root: Path, call: str, mode: str
) -> None:
    objects.put("run/b", [b"whole"])
    crashed = subprocess.run([sys.executable, "-c", _CRASH, str(root), call, mode], check=False)
    assert crashed.returncode == 9
    assert len(_temporaries(root)) <= 1
    assert [listed.key for listed in objects.list("")] == ["run/b"]
    assert list(objects.list(".tierfs/", delimiter=True)) == []
    assert list(objects.list(".tierfs/tmp/")) == []
    with pytest.raises(NotFoundError):
        objects.head("run/a")
    objects.put("run/a", [b"again"], mode=CREATE)


def test_a_crash_before_an_overwrite_leaves_the_old_object(objects: LocalObjects, root: Path) -> None:
    objects.put("run/a", [b"old"])
    subprocess.run([sys.executable, "-c", _CRASH, str(root), "rename", "overwrite"], check=False)
    assert objects.read("run/a", 100)[0] == b"old"


def test_an_object_gets_its_name_when_its_bytes_are_flushed(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.put("run/first", [b"so that every directory is there"])
    calls: list[str] = []

    def record(name: str) -> None:
        original = getattr(os, name)

        def recorded(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return original(*arguments, **named)

        monkeypatch.setattr(os, name, recorded)

    for name in ("writev", "fsync", "link", "rename"):
        record(name)
    objects.put("run/a", [b"content"], mode=CREATE)
    assert calls == ["writev", "fsync", "link", "fsync"]
    calls.clear()
    objects.put("run/a", [b"content"])
    assert calls == ["writev", "fsync", "rename", "fsync"]


def test_leftovers_of_crashed_puts_are_swept(
    objects: LocalObjects, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.put("run/a", [b"so that every directory is there"])
    directory = root / ".tierfs/tmp"
    for name, age_s in (("put-old", STALE_TEMPORARY_S + 60), ("put-young", 60), ("lock-00", STALE_TEMPORARY_S * 2)):
        (directory / name).write_bytes(b"something")
        modified_s = time.time() - age_s
        os.utime(directory / name, (modified_s, modified_s))
    monkeypatch.setattr(secrets, "randbelow", lambda _: 0)
    objects.put("run/b", [b"something"])
    assert _temporaries(root) == ["put-young"]
    assert (directory / "lock-00").exists()


# Failures


@pytest.mark.parametrize(
    ("call", "number", "expected"),
    [
        ("writev", errno.ENOSPC, CapacityError),
        ("writev", errno.EDQUOT, CapacityError),
        ("fsync", errno.ENOSPC, CapacityError),
        ("fsync", errno.EIO, StoreError),
        ("link", errno.EIO, StoreError),
        ("open", errno.EACCES, ReadOnlyError),
        ("open", errno.EROFS, ReadOnlyError),
    ],
)
def test_a_put_that_fails_leaves_nothing(
    objects: LocalObjects,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    expected: type[Exception],
) -> None:
    objects.put("run/b", [b"so that every directory is there"])
    with monkeypatch.context() as patched:
        patched.setattr(os, call, _failing(number))
        with pytest.raises(expected) as caught:
            objects.put("run/a", [b"something"], mode=CREATE)
    assert getattr(caught.value, "path", None) == f"{root}/run/a"
    assert _temporaries(root) == []
    with pytest.raises(NotFoundError):
        objects.head("run/a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_read_only(objects: LocalObjects, root: Path) -> None:
    objects.put("run/a", [b"something"])
    (root / ".tierfs/tmp").chmod(0o500)
    try:
        with pytest.raises(ReadOnlyError):
            objects.put("run/b", [b"something"])
        assert objects.read("run/a", 100)[0] == b"something"
    finally:
        (root / ".tierfs/tmp").chmod(0o700)


def test_an_object_cannot_lie_below_another(objects: LocalObjects) -> None:
    objects.put("run/a", [b"something"])
    with pytest.raises(StoreError, match="in the place of a directory"):
        objects.put("run/a/b", [b"something"])
    with pytest.raises(StoreError, match="in the place of a directory"):
        objects.put("run", [b"something"])


def test_short_writes_are_continued(objects: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "writev", lambda descriptor, pieces: os.write(descriptor, bytes(pieces[0][:3])))
    objects.put("a", [b"0123456789", b"", b"abcdefg"])
    assert objects.read("a", 100)[0] == b"0123456789abcdefg"


def test_a_put_answers_its_own_version_when_it_is_overwritten_at_once(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.put("run/a", [b"before"])
    other = LocalObjects(objects.root)
    flush = local_module._flush_directory
    with monkeypatch.context() as patched:

        def overtake(directory: Path) -> None:
            patched.setattr(local_module, "_flush_directory", flush)
            other.put("run/a", [b"theirs"])
            flush(directory)

        patched.setattr(local_module, "_flush_directory", overtake)
        mine = objects.put("run/a", [b"mine"])
    assert mine.size == 4
    with pytest.raises(ConflictError):
        objects.put("run/a", [b"mine again"], mode=Update(mine.version))


def test_a_file_that_somebody_writes_to_while_it_is_read_is_a_conflict(objects: LocalObjects, root: Path) -> None:
    objects.put("a", [bytes(2000)])

    def use(_: object, take: Callable[[int], memoryview]) -> None:
        take(1000)
        with open(root / "a", "r+b") as file:
            file.write(b"other")

    with pytest.raises(ConflictError, match="was changed while it was being read"):
        objects.stream("a", 2000, use)


def test_versions_differ_where_times_are_whole_seconds_and_inodes_are_used_again(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = local_module._info

    def coarse(key: str, status: os.stat_result) -> Any:
        whole_ns = status.st_mtime_ns // 10**9 * 10**9
        seen: Any = SimpleNamespace(st_mtime_ns=whole_ns, st_ino=1, st_size=status.st_size)
        return describe(key, seen)

    monkeypatch.setattr(local_module, "_info", coarse)
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_500_000_000)
    versions = [objects.put("run/a", [b"0"], mode=CREATE).version]
    for number in range(1, 4):
        versions.append(objects.put("run/a", [b"%d" % number], mode=Update(versions[-1])).version)
        assert objects.head("run/a").version == versions[-1]
    versions.append(objects.put("run/a", [b"4"]).version)
    assert len(set(versions)) == 5
    for version in versions[:-1]:
        with pytest.raises(ConflictError):
            objects.put("run/a", [b"late"], mode=Update(version))


def test_opening_a_directory_writes_nothing(objects: LocalObjects, root: Path) -> None:
    assert list(objects.list("")) == []
    with pytest.raises(NotFoundError):
        objects.head("a")
    assert not root.exists()


# Several processes


def _meet(root: str, number: int) -> LocalObjects:
    """Wait until every process has arrived."""
    objects = LocalObjects(root)
    objects.put(f"here/{number}", [b""])
    until(lambda: len(list(objects.list("here/"))) == PROCESSES, every_s=0.001)
    return objects


def _create_all(root: str, number: int) -> list[int]:
    objects = _meet(root, number)
    won = []
    for key in range(KEYS):
        try:
            objects.put(f"run/{key}", [b"%d" % number], mode=CREATE)
        except AlreadyExistsError:
            continue
        won.append(key)
    return won


def _count_up(root: str, number: int) -> list[int]:
    objects = _meet(root, number)
    done: list[int] = []
    while len(done) < KEYS:
        content, info = objects.read("counter", 100)
        try:
            objects.put("counter", [b"%d" % (int(content) + 1)], mode=Update(info.version))
        except ConflictError:
            continue
        done.append(int(content))
    return done


def _in_processes(work: Callable[[str, int], list[int]], root: Path) -> list[list[int]]:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        return pool.starmap(work, [(str(root), number) for number in range(PROCESSES)], chunksize=1)


def test_one_of_two_processes_creates_each_key(objects: LocalObjects, root: Path) -> None:
    won = _in_processes(_create_all, root)
    assert sorted(key for keys in won for key in keys) == list(range(KEYS))
    for number, keys in enumerate(won):
        assert all(objects.read(f"run/{key}", 100)[0] == b"%d" % number for key in keys)


def test_updates_in_two_processes_are_not_lost(objects: LocalObjects, root: Path) -> None:
    objects.put("counter", [b"0"])
    seen = _in_processes(_count_up, root)
    assert sorted(value for values in seen for value in values) == list(range(PROCESSES * KEYS))
    assert objects.read("counter", 100)[0] == b"%d" % (PROCESSES * KEYS)


def test_a_link_that_leads_nowhere_is_passed_over_unless_it_is_the_store_s(
    root: Path, objects: LocalObjects, caplog: pytest.LogCaptureFixture
) -> None:
    objects.put("a", [b"x"])
    (root / "loop").symlink_to("loop")
    (root / "gone").symlink_to("nowhere")
    assert [listed.key for listed in objects.list("")] == ["a"]
    assert "loop is skipped" in caplog.text
    objects.put(".tierfs/tree/a", [b"x"])
    (root / ".tierfs/tree/loop").symlink_to("loop")
    with pytest.raises(StoreError, match="symbolic links"):
        list(objects.list(""))


def test_a_link_to_where_this_user_may_not_look_is_passed_over(
    root: Path, objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed:
        name = "link"
        stat = is_file = staticmethod(_failing(errno.EACCES))

        def is_dir(self, *, follow_symlinks: bool) -> bool:
            return False

    objects.put("a", [b"x"])
    entries = [*os.scandir(root), Closed()]
    monkeypatch.setattr(os, "scandir", lambda path: entries if Path(path) == root else [])
    assert [listed.key for listed in objects.list("")] == ["a"]


def test_a_batch_of_deletions_flushes_each_directory_once(
    objects: LocalObjects, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"d{number % 2}/{number}" for number in range(10)]
    for name in names:
        objects.put(name, [b"x"])
    flushed: list[Path] = []
    monkeypatch.setattr(local_module, "_flush_directory", flushed.append)
    objects.delete([*names, "d0/none", "none/none"])
    assert sorted(flushed) == [root / "d0", root / "d1"]
    assert list(objects.list("")) == []


@pytest.mark.parametrize("how", ["refused", "ignored"])
def test_a_directory_without_file_locks_is_refused_at_init(tmp_path, monkeypatch, how):
    def flock(*_):
        if how == "refused":
            raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as patched:
        patched.setattr(local_module.fcntl, "flock", flock)  # as on a mount of Lustre without locks
        with pytest.raises(StoreError, match="no working file locks"):
            LocalObjects(tmp_path).put("store.json", [b"x"], mode=CREATE)
    assert not (tmp_path / "store.json").exists()
    LocalObjects(tmp_path).put("store.json", [b"x"], mode=CREATE)
