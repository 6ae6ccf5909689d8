"""The kind of filesystem that a path lies on, and which guarantees that kind gives."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["filesystem_of", "flush_directory", "is_durable", "is_network"]

UNKNOWN = "unknown"
_MOUNTINFO = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")  # how the kernel writes a space, tab, line feed or backslash in a mount point

# Shared by hosts, so that a lock or a mapping on one host may mean nothing on the next.
_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs", "wekafs",
})  # fmt: skip
# FUSE puts anything behind a path, mostly something remote; these lie over a local directory.
_LOCAL_FUSE = frozenset({
    "fuse.bindfs", "fuse.cryfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs", "fuse.ntfs-3g",
})  # fmt: skip
# On a disk, with a journal or copy on write: what fdatasync returned for is there after a crash of the host.
_DURABLE = frozenset({"bcachefs", "btrfs", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "xfs", "zfs"})


def filesystem_of(path: str | os.PathLike[str], *, mountinfo: str | None = None) -> str:
    """The type of the filesystem that holds ``path``, or would hold it: ``"ext4"``, ``"tmpfs"``, ``"fuse.sshfs"``.

    Args:
        path: Links in it are followed. Where it does not exist, its nearest existing parent counts.
        mountinfo: The mounts, as in proc(5); those of this process where it is not given.

    Returns:
        The kernel's name, or ``"unknown"`` where the mounts cannot be read or none of them holds the path.
    """
    if mountinfo is None:
        try:
            mountinfo = os.fsdecode(_MOUNTINFO.read_bytes())
        except OSError:
            return UNKNOWN
    mounts: dict[str, str] = {}
    for line in mountinfo.splitlines():
        place, _, filesystem = line.partition(" - ")
        fields = place.split(" ")
        if len(fields) > 4 and filesystem:  # noqa: PLR2004 - id, parent, device, root, mount point
            # A later mount hides an earlier one at the same point.
            mounts[_unescaped(fields[4])] = filesystem.split(" ")[0]
    # Resolving a path that does not exist resolves the part of it that does.
    real = Path(path).resolve()
    return next((mounts[str(at)] for at in (real, *real.parents) if str(at) in mounts), UNKNOWN)


def is_network(filesystem: str) -> bool:
    """Whether other hosts may change what lies there, so that neither ``flock`` nor ``mmap`` can be trusted."""
    return filesystem in _NETWORK or (filesystem.startswith("fuse.") and filesystem not in _LOCAL_FUSE)


def is_durable(filesystem: str) -> bool:
    """Whether what was flushed there outlives a crash of the host. False for a kind that is not known."""
    return filesystem in _DURABLE


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
