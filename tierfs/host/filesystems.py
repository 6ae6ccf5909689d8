"""The state directory's files: the filesystem that holds them, its guarantees, and its errors; private directories."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from tierfs.errors import CapacityError, ReadOnlyError, StoreError, TierfsError
from tierfs.gc_pause import untied

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
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_RIGHTS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


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
            point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
            mounts[point] = filesystem.split(" ")[0]
    # resolve() also resolves the existing part of a path that does not exist.
    real = Path(path).resolve()
    return next((mounts[str(at)] for at in (real, *real.parents) if str(at) in mounts), UNKNOWN)


def is_network(filesystem: str) -> bool:
    """Return whether other hosts may change its files, so that neither ``flock`` nor ``mmap`` can be trusted."""
    return filesystem in _NETWORK or (filesystem.startswith("fuse.") and filesystem not in _LOCAL_FUSE)


def is_durable(filesystem: str) -> bool:
    """Return whether flushed data survives a crash of the host. False for an unknown type."""
    return filesystem in _DURABLE


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable with fsync."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(directory: Path, *, follow_links: bool = True) -> None:
    """Create a directory and its parents with mode 0700 if missing, and check its owner and mode.

    With ``follow_links``, a symbolic link to such a directory is accepted.

    Raises:
        ReadOnlyError: It belongs to another user, is open to others, or must not be created.
        CapacityError: There is no room for it.
        StoreError: It cannot be created for another reason.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = os.stat(directory, follow_symlinks=follow_links)
    except OSError as error:
        raise refused(error, directory, "cannot be made") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ReadOnlyError(
            f"{directory} must belong to you and be closed to others: chmod 700 {directory}, or set TIERFS_STATE_DIR to "
            "another directory",
            path=str(directory),
        )


def entries_of(directory: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a directory; an empty list if it does not exist.

    Raises:
        ReadOnlyError: This user may not list it.
        StoreError: It cannot be listed for another reason.
    """
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise refused(error, directory, "cannot be listed") from error


def open_lock_file(path: Path) -> int:
    """Return a descriptor of a file to lock, made with mode 0600 if missing. Read-only where its disk has become so."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
    # The kernel makes a failed disk read-only. flock works without write access.
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def refused(error: OSError, path: str | os.PathLike[str], what: str, *, tier: str | None = None) -> TierfsError:
    """Translate an OSError into an error of tierfs. ``what`` is the failed action, as ``cannot be made``."""
    problem = f"{path} {what}: {explain(error)}"
    if error.errno in NO_ROOM:
        return CapacityError(
            f"{problem}: free some room, or delete files if their number is at its limit, and try again",
            path=str(path),
            tier=tier,
        )
    if error.errno in NO_RIGHTS:
        other = "" if tier == "ram" else ", or set TIERFS_STATE_DIR to a directory of yours on a local disk"
        return ReadOnlyError(f"{problem}: check the rights of its directory{other}", path=str(path), tier=tier)
    return StoreError(problem, path=str(path), tier=tier)


def explain(error: OSError) -> str:
    """Return the operating system's message, with the next step if it is known."""
    problem = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"{problem}: this process has reached its limit, which `ulimit -n` raises"
    return problem


@contextlib.contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Translate errors of the operating system in the nvme tier, as `refused` does."""
    try:
        yield
    except TierfsError:
        raise
    except OSError as error:
        raise refused(error, path, "cannot be used", tier="nvme") from untied(error)
