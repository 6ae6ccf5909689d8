"""The type of the filesystem of a path, and the guarantees of that type."""

from __future__ import annotations

import os
import re
from pathlib import Path

UNKNOWN = "unknown"
_MOUNTINFO = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")  # the kernel's escape for a space, tab, line feed or backslash in a mount point

# Shared between hosts: a lock or a mapping on one host may have no effect on another.
_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs", "wekafs",
})  # fmt: skip
# A FUSE filesystem is usually remote; these lie over a local directory.
_LOCAL_FUSE = frozenset({
    "fuse.bindfs", "fuse.cryfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs", "fuse.ntfs-3g",
})  # fmt: skip
# On a disk, with a journal or copy on write: data survives a crash of the host once fdatasync has returned.
_DURABLE = frozenset({"bcachefs", "btrfs", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "xfs", "zfs"})


def filesystem_of(path: str | os.PathLike[str], *, mountinfo: str | None = None) -> str:
    """Return the type of the filesystem that holds ``path``, or would: ``"ext4"``, ``"tmpfs"``, ``"fuse.sshfs"``.

    Args:
        path: Symbolic links in it are followed. If it does not exist, its nearest existing parent counts.
        mountinfo: The mounts, as in proc(5); by default those of this process.

    Returns:
        The kernel's name, or ``"unknown"`` if the mounts cannot be read or none of them holds the path.
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
    # resolve() also resolves the existing part of a path that does not exist.
    real = Path(path).resolve()
    return next((mounts[str(at)] for at in (real, *real.parents) if str(at) in mounts), UNKNOWN)


def is_network(filesystem: str) -> bool:
    """Return whether other hosts may change its files, so that neither ``flock`` nor ``mmap`` can be trusted."""
    return filesystem in _NETWORK or (filesystem.startswith("fuse.") and filesystem not in _LOCAL_FUSE)


def is_durable(filesystem: str) -> bool:
    """Return whether flushed data survives a crash of the host. False for an unknown type."""
    return filesystem in _DURABLE


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable with fsync."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
