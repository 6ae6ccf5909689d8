"""The kernel's list of mounts says which filesystem holds a path."""

import pytest

from tierfs.host.filesystems import filesystem_of, is_durable, is_network

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw
40 27 0:40 / /data rw,relatime shared:1 master:2 - nfs4 server:/export rw
41 40 0:41 / /data/local rw,relatime - xfs /dev/nvme0n1 rw
42 27 0:42 / /with\040space rw - fuse.sshfs me@there: rw
43 27 0:43 / /twice rw - ext4 /dev/vdb rw
44 43 0:44 / /twice rw - tmpfs tmpfs rw
cut short
"""


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/", "ext4"),
        ("/proc/nosuch", "proc"),
        ("/nosuch/deep/path", "ext4"),
        ("/data", "nfs4"),
        ("/data/run/1", "nfs4"),
        ("/data/local/x", "xfs"),
        ("/data/localx", "nfs4"),
        ("/data/local/../x", "nfs4"),
        ("/with space/x", "fuse.sshfs"),
        ("/twice/x", "tmpfs"),
    ],
)
def test_the_longest_mount_point_above_a_path_decides(path, filesystem):
    assert filesystem_of(path, mountinfo=MOUNTS) == filesystem


def test_a_link_is_followed_also_where_what_it_leads_to_is_missing(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("/data/nosuch")
    assert filesystem_of(link / "x", mountinfo=MOUNTS) == "nfs4"


def test_a_relative_path_starts_at_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mounts = f"{MOUNTS}50 27 0:50 / {tmp_path} rw - zfs pool rw\n"
    assert filesystem_of("x", mountinfo=mounts) == "zfs"


def test_without_a_mount_it_is_unknown():
    assert filesystem_of("/x", mountinfo="") == "unknown"


def test_without_a_list_of_mounts_it_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr("tierfs.host.filesystems._MOUNTINFO", tmp_path / "missing")
    assert filesystem_of("/x") == "unknown"


def test_this_machine_s_own_mounts_are_read():
    assert filesystem_of("/proc/self") == "proc"


@pytest.mark.parametrize("name", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "ceph", "fuse.gcsfuse"])
def test_network_filesystems_give_no_level(name):
    assert is_network(name)
    assert not is_durable(name)


@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs", "zfs", "f2fs"])
def test_a_disk_is_durable(name):
    assert is_durable(name)
    assert not is_network(name)


@pytest.mark.parametrize("name", ["tmpfs", "ramfs", "overlay", "fuse.fuse-overlayfs", "unknown", ""])
def test_memory_and_layers_are_of_this_host_but_not_durable(name):
    assert not is_durable(name)
    assert not is_network(name)
