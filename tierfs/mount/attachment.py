"""Attach a mount to a directory and detach it, by the system call if permitted, else by ``fusermount3``."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import logging
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierfs.errors import InvalidInputError, ReadOnlyError, StoreError

DEVICE = "/dev/fuse"
DEVICE_NUMBER = 10, 229
"""The major and minor number that Linux gives the device."""
HELPER = "fusermount3"
HELPER_S = 20.0
"""Seconds that ``fusermount3`` may take."""
KIND = "fuse.tierfs"
READAHEAD_KIB = 4096
MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MNT_DETACH = 2
MOUNTS = "/proc/self/mountinfo"
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")
"""The kernel's escape of a space, a tab, a newline or a backslash in a path."""
_logger = logging.getLogger("tierfs.mount")


def attach(url: str, directory: Path, *, read_only: bool, allow_other: bool) -> int:
    """Mount on a directory.

    Returns:
        The descriptor of ``/dev/fuse`` from which requests are read. The caller owns it.

    Raises:
        InvalidInputError: The directory does not exist, or a store is mounted on it already.
        StoreError: FUSE is missing on this host, or the kernel refused the mount.
        ReadOnlyError: ``fusermount3`` refused the mount.
    """
    _check(directory)
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            return _by_system_call(url, directory, read_only=read_only, allow_other=allow_other)
    return _by_helper(url, directory, read_only=read_only, allow_other=allow_other)


def detach(directory: Path, *, lazy: bool = False) -> None:
    """Unmount a directory.

    Args:
        directory: The directory on which the store is mounted.
        lazy: Detach even while files are open. The kernel ends the mount when the last of them is closed.

    Raises:
        OSError: Files are open (EBUSY), or the unmount is not permitted (EPERM).
    """
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(directory), MNT_DETACH if lazy else 0) == 0:
            return
        number = ctypes.get_errno()
        if number != errno.EPERM:
            raise OSError(number, os.strerror(number), str(directory))
    done = _run_helper(["-u", *(["-z"] if lazy else []), "--", str(directory)])
    if done.returncode:
        number = errno.EBUSY if "busy" in done.stderr else errno.EPERM
        raise OSError(number, done.stderr.strip() or os.strerror(number), str(directory))


def try_mount() -> str:
    """Mount on a temporary directory and unmount it at once, to see whether this process can.

    Returns:
        How it mounts: ``as root``, or the path of ``fusermount3``.

    Raises:
        StoreError, ReadOnlyError, OSError: It cannot. See `attach` and `detach`.
    """
    with tempfile.TemporaryDirectory(prefix="tierfs-doctor-", ignore_cleanup_errors=True) as directory:
        # Nobody serves this mount. A program that looks at it meanwhile waits until the device is closed.
        os.close(attach("tierfs-doctor", Path(directory), read_only=True, allow_other=False))
        detach(Path(directory), lazy=True)
    return "as root" if os.geteuid() == 0 else str(shutil.which(HELPER))


def mounted_at(directory: Path) -> str | None:
    """Return the type of the filesystem that is mounted on a directory, or ``None``."""
    wanted, found = os.fsencode(os.path.realpath(directory)), None
    with open(MOUNTS, "rb") as mounts:
        for line in mounts:
            fields = line.split(b" ")
            if _OCTAL.sub(lambda code: bytes([int(code[1], 8)]), fields[4]) == wanted:
                found = os.fsdecode(fields[fields.index(b"-") + 1])
    return found


def set_readahead(directory: Path) -> None:
    """Raise the kernel's read-ahead above 128 KiB. Needs root; without it, reads are slower and still correct."""
    device = os.stat(directory).st_dev
    path = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    with contextlib.suppress(OSError):
        Path(path).write_text(str(READAHEAD_KIB))


def _check(directory: Path) -> None:
    if not os.path.exists(DEVICE):
        raise StoreError(
            f"{DEVICE} is missing, so nothing can be mounted: load the kernel's module (modprobe fuse), or give the container the "
            "device; `tierfs cp -r` needs neither"
        )
    status = os.stat(DEVICE)
    if not stat.S_ISCHR(status.st_mode) or (os.major(status.st_rdev), os.minor(status.st_rdev)) != DEVICE_NUMBER:
        raise StoreError(
            f"{DEVICE} is something else than the device of FUSE, so nothing can be mounted: give the container the host's"
        )
    try:
        is_directory = stat.S_ISDIR(directory.stat().st_mode)
    except FileNotFoundError:
        raise InvalidInputError(
            f"{directory} does not exist: create the directory first", path=str(directory)
        ) from None
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise InvalidInputError(
                f"{directory} has a mount whose process has ended: `tierfs umount {shlex.quote(str(directory))}` removes it",
                path=str(directory),
            ) from None
        raise
    if not is_directory:
        raise InvalidInputError(f"{directory} is not a directory", path=str(directory))
    if mounted_at(directory) == KIND:
        raise InvalidInputError(
            f"a store is already mounted on {directory}: run `tierfs umount {shlex.quote(str(directory))}` first",
            path=str(directory),
        )


def _by_system_call(url: str, directory: Path, *, read_only: bool, allow_other: bool) -> int:
    device = _open_device()
    options = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions,max_read={1 << 20}"
    if allow_other:
        options += ",allow_other"
    flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (url.encode(), os.fsencode(directory), KIND.encode(), ctypes.c_ulong(flags), options.encode())
    if libc.mount(*arguments) == 0:
        return device
    number = ctypes.get_errno()
    os.close(device)
    if number in (errno.EPERM, errno.EACCES):
        raise PermissionError(number, "mount")
    raise StoreError(f"cannot mount on {directory}: {os.strerror(number)}", path=str(directory))


def _open_device() -> int:
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        raise
    except OSError as error:
        raise StoreError(f"{DEVICE} cannot be opened, so nothing can be mounted: {error.strerror}") from error


def _run_helper(words: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run ``fusermount3``. Raise `StoreError` if it is missing, or takes longer than `HELPER_S`."""
    helper = shutil.which(HELPER)
    if helper is None and os.geteuid() == 0:
        raise StoreError(
            f"this process may not mount, although it is root: give the container {DEVICE} and the right (docker: --device "
            f"{DEVICE} --cap-add SYS_ADMIN), or install the package fuse3"
        )
    if helper is None:
        raise StoreError(
            f"{HELPER} is missing, and only root can mount without it: install the package fuse3, or mount as root"
        )
    try:
        return subprocess.run([helper, *words], capture_output=True, text=True, check=False, timeout=HELPER_S, **how)
    except subprocess.TimeoutExpired:
        raise StoreError(f"{helper} did not end within {HELPER_S:g} s: mount as root, or look why it waits") from None


def _by_helper(url: str, directory: Path, *, read_only: bool, allow_other: bool) -> int:
    """Mount by ``fusermount3``, which passes the descriptor back over a socket."""
    options = [
        f"fsname={url.replace(',', '_')}",
        "subtype=tierfs",
        "default_permissions",
        f"max_read={1 << 20}",
        "nosuid",
        "nodev",
    ]
    options += ["ro"] if read_only else []
    options += ["allow_other"] if allow_other else []
    ours, its = socket.socketpair()
    with ours, its:
        done = _run_helper(
            ["-o", ",".join(options), "--", str(directory)],
            env={**os.environ, "_FUSE_COMMFD": str(its.fileno())},
            pass_fds=[its.fileno()],
        )
        if done.returncode:
            raise ReadOnlyError(f"cannot mount on {directory}: {done.stderr.strip()}", path=str(directory))
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_LEN(array.array("i", [0]).itemsize))
        descriptors = array.array("i")
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: descriptors.itemsize])
        os.set_inheritable(descriptors[0], False)  # noqa: FBT003 - takes no keywords
        return descriptors[0]
