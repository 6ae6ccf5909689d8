"""Mount from a process with many descriptors, such as a training process, and find mounts."""

import fcntl
import os
import resource
from pathlib import Path

import pytest

from tierfs.mount import attachment
from tierfs.mount.mounting import _is_ready


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


@pytest.mark.parametrize(
    "name", ["plain", "a run", "Läufe", "Läufe 2", "back\\slash", "tab\t", "\udcff \udcfe", "\r x"]
)
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
