"""Mount from a process with many descriptors, such as a training process, and find mounts."""

import errno
import fcntl
import math
import os
import resource
from pathlib import Path

import pytest
from support.opened import needs_fuse

from tierfs.errors import InvalidInputError, NotFoundError, StoreError
from tierfs.mount import attachment, mounting
from tierfs.mount.mounting import _is_ready
from tierfs.mount.requests import FLUSH
from tierfs.session import init
from tierfs.store import save


def test_a_descriptor_above_1023_is_waited_for():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 1500)  # a free number
    try:
        assert not _is_ready(high, 0.01)
        os.write(write, b"x")
        assert _is_ready(high, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in (read, write, high):
            os.close(descriptor)


@pytest.mark.parametrize("name", ["plain", "Läufe 2", "back\\slash", "tab\t", "\udcff \udcfe"])
def test_a_mount_is_found_by_any_name(monkeypatch, tmp_path, name):
    others = ["/boot", "/odd/\udcff\\x \t", "/odd/ü \\N{x}"]
    lines = tmp_path / "mountinfo"
    with open(lines, "wb") as out:
        for place, kind in [*((other, "ext4") for other in others), (f"/mnt/{name}", attachment.KIND)]:
            escaped = os.fsencode(place).replace(b"\\", b"\\134")
            for odd in b" \t\n":
                escaped = escaped.replace(bytes([odd]), b"\\%03o" % odd)
            out.write(b"36 35 98:0 / %s rw,noatime master:1 - %s /dev/root rw\n" % (escaped, kind.encode()))
    monkeypatch.setattr(attachment, "MOUNTS", lines)
    assert attachment.mounted_at(Path("/mnt") / name) == attachment.KIND
    assert attachment.mounted_at(Path("/mnt") / f"{name}.no") is None


class _Mounted:
    """Stands in for the mount that `unmount` sees. ``calls`` has the names of the calls that change it."""

    def __init__(self, monkeypatch, pid=None, error=None):
        self.calls = []
        self.pid, self.error = pid, error
        monkeypatch.setattr(mounting, "mounted_at", lambda _: attachment.KIND)
        monkeypatch.setattr(
            mounting, "detach", lambda _, lazy: self.calls.append("detach lazily" if lazy else "detach")
        )
        monkeypatch.setattr(mounting.os, "getxattr", self.getxattr)
        monkeypatch.setattr(mounting.os, "setxattr", self.setxattr)

    def getxattr(self, *_):
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return str(self.pid).encode()

    def setxattr(self, _, name, value):
        assert (name, math.isfinite(float(value))) == (FLUSH, True)
        self.calls.append("flush")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_mount_that_cannot_publish_stays_mounted(monkeypatch, tmp_path, number):
    mounted = _Mounted(monkeypatch, error=number)
    with pytest.raises(StoreError, match="still mounted") as caught:
        mounting.unmount(tmp_path)
    assert ("the user who mounted it" in str(caught.value)) == (number == errno.EACCES)
    assert mounted.calls == []
    mounting.unmount(tmp_path, force=True)
    assert mounted.calls == ["detach lazily"]


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ENODATA])
def test_a_mount_with_nothing_to_publish_is_detached(monkeypatch, tmp_path, number):
    mounted = _Mounted(monkeypatch, error=number)
    mounting.unmount(tmp_path)
    assert mounted.calls == ["detach lazily"]


@pytest.mark.parametrize("pid", [(1 << 22) + 1, os.getpid()], ids=["above every number of Linux", "a running one"])
def test_an_unmount_that_may_wait_for_ever_does_not_wait_for_another_process(monkeypatch, tmp_path, pid):
    mounted = _Mounted(monkeypatch, pid=pid)
    monkeypatch.setattr(mounting, "FLUSH_S", 0.1)
    mounting.unmount(tmp_path, timeout=math.inf)
    assert mounted.calls == ["flush", "detach"]


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "x"])
def test_a_timeout_that_is_no_time_is_refused(tmp_path, timeout):
    with pytest.raises(InvalidInputError, match="seconds over 0"):
        mounting.mount(f"file://{tmp_path}", tmp_path, timeout=timeout)
    with pytest.raises(InvalidInputError, match="seconds over 0"):
        mounting.unmount(tmp_path, timeout=timeout)


@pytest.mark.parametrize(("path", "there"), [("typo", ""), ("run/typo/more", "run"), ("run/a/more", None)])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_directory_that_is_not_in_the_store_is_refused(tmp_path, path, there, read_only):
    store = init(f"file://{tmp_path}/store")
    save(store, "run/a", b"content")
    (tmp_path / "mnt").mkdir()
    error, words = NotFoundError, f"tierfs ls file://{tmp_path}/store/{there}`"
    if there is None:
        error, words = InvalidInputError, "run/a is a file"
    with pytest.raises(error, match=words):
        mounting.mount(f"{tmp_path}/store/{path}", tmp_path / "mnt", read_only=read_only)
    assert mounting.mounted_at(tmp_path / "mnt") is None


@needs_fuse
def test_a_mount_makes_a_store_at_its_url(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_CREATE", "1")
    with pytest.raises(InvalidInputError, match="create the directory first"):  # after the store was opened
        mounting.mount(f"{tmp_path}/team/run", tmp_path / "none")
    assert sorted(tmp_path.glob("**/store.json")) == [tmp_path / "team/run/.tierfs/store.json"]


def test_a_mount_without_a_store_proposes_its_url(tmp_path):
    (tmp_path / "mnt").mkdir()
    with pytest.raises(NotFoundError, match=f"tierfs init file://{tmp_path}/team/run$"):
        mounting.mount(f"{tmp_path}/team/run", tmp_path / "mnt")


def test_an_option_that_is_no_json_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="option"):
        mounting.mount(f"file://{tmp_path}", tmp_path, options={"session": object()})
