"""Mount a store from a program, and unmount it. A separate process serves the mount.

If the program served its own mount, it would deadlock: a thread in a page fault on a mapped file holds the GIL, and the
thread that serves the fault needs the GIL.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierfs import errors
from tierfs.errors import InvalidInputError, StoreError, TierfsError
from tierfs.host.filesystems import make_private
from tierfs.host.host import state_directory
from tierfs.mount.attachment import KIND, detach, mounted_at
from tierfs.mount.process import FLUSH_S, MountOptions
from tierfs.mount.requests import FLUSH, PREFIX
from tierfs.session import TierOptions

START_S = 60.0
END_S = 15.0
WAIT_S_MAX = 1_000_000.0
"""11 days. ``poll`` takes no more than 24 days, and a wait for a thread has a limit too."""
LOG_NAME = "mount.log"


class Mount:
    """A mounted store. As a context manager, it unmounts the store at the end.

    Attributes:
        directory: The directory on which the store is mounted.
        pid: Process id of the process that serves the mount.
    """

    def __init__(self, directory: Path, process: subprocess.Popen[str]) -> None:
        self.directory = directory
        self.pid = process.pid
        self._process = process

    def __repr__(self) -> str:
        return f"Mount({str(self.directory)!r}, pid={self.pid})"

    def close(self, timeout: float = FLUSH_S) -> None:
        """Publish all pending changes, and unmount. A second call does nothing.

        Raises:
            TimeoutError: A file did not reach its level within ``timeout`` seconds, or is open for writing.
                The store stays mounted.
            StoreError: Files are open, or a process works in the directory. The store stays mounted.
        """
        if self._process.poll() is None or mounted_at(self.directory) == KIND:
            unmount(self.directory, timeout=timeout)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def __enter__(self) -> Mount:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mount(
    url: str,
    directory: str | os.PathLike[str],
    *,
    read_only: bool = False,
    allow_other: bool = False,
    ack: str | None = None,
    timeout: float | None = None,
    options: Mapping[str, Any] | None = None,
    **tiers: Any,
) -> Mount:
    """Mount a store, or a directory in a store, so that tools that need a path can use it.

    Args:
        url: ``tierfs::s3://bucket/run``, ``tierfs://NAME/run``, or a local path.
        directory: An empty directory on this host.
        read_only: Refuse every change.
        allow_other: Let other users of the host use the mount, as far as the files' modes allow.
        ack: The level that ``close`` and ``fsync`` of a file wait for: ``"staged"``, ``"local"``,
            ``"peer"`` or ``"object"``.
        timeout: Seconds without an answer after which a program gets ``EIO``.
        options: Options of the object tier's filesystem.
        **tiers: ``ram``, ``nvme``, ``state_dir``, ``bandwidth``, ``codecs``, as for the filesystem.

    Returns:
        The mount, ready for use. The caller closes it, or uses it in a ``with``.

    Raises:
        InvalidInputError: The URL, the directory or an option is invalid.
        StoreError: FUSE is missing on this host, or the object tier failed.
        TierfsError: The store could not be opened.
    """
    TierOptions.from_mapping(tiers, "mount")
    given = {} if timeout is None else {"timeout_s": _seconds(timeout)}
    wanted = MountOptions(read_only, allow_other, ack, tiers=tiers, options=dict(options or {}), **given)
    place = Path(directory).absolute()
    return Mount(place, start(url, place, wanted))


def start(url: str, directory: Path, options: MountOptions) -> subprocess.Popen[str]:
    """Start the process that serves a mount, and wait until programs can use it.

    The process has its own session, so it outlives the terminal. Its log is ``mount/mount.log`` in the state directory.

    Raises:
        TierfsError: The store could not be mounted.
    """
    try:
        line = options.to_json()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"an option cannot be passed to the process of the mount: {error}") from error
    logs = state_directory(options.tiers.get("state_dir")) / "mount"
    make_private(logs.parent)
    make_private(logs)
    with open(os.open(logs / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tierfs.mount", url, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(f"{line}\n")
    if not _is_ready(process.stdout.fileno(), START_S):
        process.kill()
        raise StoreError(f"{directory} was not mounted within {START_S:g} s: see {logs / LOG_NAME}")
    with process.stdout:
        said = process.stdout.readline()
    answer = json.loads(said) if said else {}
    if "ready" in answer:
        return process
    process.wait()
    if not answer:
        raise StoreError(
            f"{directory} was not mounted, its process ended with status {process.returncode}: see {logs / LOG_NAME}"
        )
    raise _error(answer)


def unmount(directory: str | os.PathLike[str], *, timeout: float = FLUSH_S, force: bool = False) -> None:
    """Publish all pending changes, and unmount.

    Args:
        directory: The directory on which the store is mounted.
        timeout: Seconds that publishing may take.
        force: Unmount even if changes are not published or files are open. Unpublished changes are lost then.

    Raises:
        InvalidInputError: No store is mounted on the directory, or ``timeout`` is invalid.
        TimeoutError: Changes are not published, or have not reached their level. The message names the files.
        StoreError: Files are open, or a process works in the directory. Or the mount belongs to another user or does not
            answer, so that its changes cannot be published.
    """
    timeout = min(_seconds(timeout), WAIT_S_MAX)
    place = Path(directory).absolute()
    if mounted_at(place) != KIND:
        raise InvalidInputError(f"no store is mounted on {place}", path=str(place))
    try:
        pid = int(os.getxattr(place, f"{PREFIX}pid"))
    except OSError as error:
        # If the process that served the mount is gone, its unpublished changes are lost already. A bind mount of a
        # directory in the mount has no such attribute (ENODATA), and nothing to publish.
        if not force and error.errno not in (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODATA):
            raise _refused(place, error) from error
        detach(place, lazy=True)
        return
    watched = None
    with contextlib.suppress(OSError):  # the process is in another PID namespace
        watched = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    try:
        _flush(place, timeout, force=force)
        try:
            detach(place, lazy=force)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise StoreError(f"{place} is in use: close its files, and leave the directory", path=str(place)) from error
        if watched is not None:
            # The process ends within this time. In another PID namespace, its number may name a process that does not end.
            _is_ready(watched, min(timeout, FLUSH_S))
    finally:
        if watched is not None:
            os.close(watched)


def _seconds(timeout: float) -> float:
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise InvalidInputError(f"timeout={timeout!r} is not a number of seconds over 0")
    return seconds


def _is_ready(descriptor: int, timeout_s: float) -> bool:
    """Wait until a descriptor is readable. Training processes have descriptors above 1023, which select(2) refuses."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _flush(place: Path, timeout: float, *, force: bool) -> None:
    try:
        os.setxattr(place, FLUSH, str(timeout).encode())
    except OSError as error:
        if force:
            return
        if error.errno == errno.EROFS:
            return
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _refused(place, error) from error
        names = os.getxattr(place, f"{PREFIX}pending").decode().split("\n")
        what = ", ".join(name for name in names[:5] if name) or "written files have not reached their level"
        raise TimeoutError(
            f"{place} is still mounted, because some changes are not safe after {timeout:g} s: {what}"
        ) from error


def _refused(place: Path, error: OSError) -> StoreError:
    by = "run this as the user who mounted it; " if error.errno in (errno.EACCES, errno.EPERM) else ""
    return StoreError(
        f"{place} is still mounted, because its changes cannot be published: {error.strerror}; {by}--force unmounts it "
        "without publishing",
        path=str(place),
    )


def _error(answer: Mapping[str, Any]) -> TierfsError:
    """Return the error that the serving process reported."""
    kinds: dict[str, type[TierfsError]] = {getattr(errors, name).kind: getattr(errors, name) for name in errors.__all__}
    return kinds.get(answer["kind"], StoreError)(answer["message"], path=answer["path"])
