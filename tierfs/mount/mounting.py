"""Mount from a program, and unmount: a process of its own serves the mount.

In the program's own process a page fault on a mapped file, which keeps Python's lock, would wait for itself.
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
from types import TracebackType
from typing import Any

from tierfs import errors
from tierfs.errors import InvalidInputError, StoreError, TierfsError
from tierfs.host.host import state_directory
from tierfs.host.private import make_private
from tierfs.mount.attachment import KIND, detach, mounted_at
from tierfs.mount.extended import FLUSH, PREFIX
from tierfs.mount.process import FLUSH_S, MountOptions
from tierfs.session import TierOptions

__all__ = ["Mount", "mount", "start", "unmount"]

START_S = 60.0
END_S = 15.0
LOG_NAME = "mount.log"


class Mount:
    """A mounted store. As a context manager it is unmounted at the end.

    Attributes:
        directory: Where it is mounted.
        pid: The process that serves it.
    """

    def __init__(self, directory: Path, process: subprocess.Popen[str]) -> None:
        self.directory = directory
        self.pid = process.pid
        self._process = process

    def __repr__(self) -> str:
        return f"Mount({str(self.directory)!r}, pid={self.pid})"

    def close(self, timeout: float = FLUSH_S) -> None:
        """Publish what is not published yet, and unmount. A second call does nothing.

        Raises:
            TimeoutError: Something did not reach its level within ``timeout`` seconds; it is still mounted.
            StoreError: Files are open; it is still mounted.
        """
        if self._process.poll() is None or mounted_at(self.directory) == KIND:
            unmount(self.directory, timeout=timeout)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def __enter__(self) -> Mount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """Mount a store, or a directory in one, so that tools that want a path can use it.

    Args:
        url: ``tierfs::s3://bucket/run``, ``tierfs://NAME/run``, or a local path.
        directory: An empty directory on this host.
        read_only: Refuse every change.
        allow_other: Let other users of the host in, as far as the files' modes allow.
        ack: The level that ``close`` and ``fsync`` of a file wait for: ``"staged"``, ``"local"`` or ``"object"``.
        timeout: After how many seconds without an answer a program gets ``EIO``.
        options: For the object tier's own filesystem.
        **tiers: ``ram``, ``nvme``, ``state_dir``, ``bandwidth``, ``codecs``, as for the filesystem.

    Returns:
        The mount, ready to be used; to be closed, or used in a ``with``.

    Raises:
        InvalidInputError: The URL, the directory or an option is no good.
        StoreError: FUSE is missing on this host, or the object tier failed.
        TierfsError: The store could not be opened.
    """
    TierOptions.from_mapping(tiers, "mount")
    given = {} if timeout is None else {"timeout_s": timeout}
    wanted = MountOptions(read_only, allow_other, ack, tiers=tiers, options=dict(options or {}), **given)
    place = Path(directory).absolute()
    return Mount(place, start(url, place, wanted))


def start(url: str, directory: Path, options: MountOptions) -> subprocess.Popen[str]:
    """Start the process that serves a mount, and wait until programs can use it.

    It has a session of its own, so it outlives the terminal. Its log is ``mount/mount.log`` in the state directory.

    Raises:
        TierfsError: It could not be mounted.
    """
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
        process.stdin.write(options.to_json() + "\n")
    if not _is_ready(process.stdout.fileno(), START_S):
        process.kill()
        raise StoreError(f"{directory} was not mounted within {START_S:g} s: {logs / LOG_NAME} says more")
    with process.stdout:
        line = process.stdout.readline()
    answer = json.loads(line) if line else {}
    if "ready" in answer:
        return process
    process.wait()
    if not answer:
        raise StoreError(
            f"{directory} was not mounted, the process ended with {process.returncode}: {logs / LOG_NAME} says why"
        )
    raise _error(answer)


def unmount(directory: str | os.PathLike[str], *, timeout: float = FLUSH_S, force: bool = False) -> None:
    """Publish what is not published yet, and unmount.

    Args:
        directory: Where it is mounted.
        timeout: Seconds that publishing may take.
        force: Unmount also where something is left or files are open. What is not published then is lost.

    Raises:
        InvalidInputError: Nothing of tierfs is mounted there.
        TimeoutError: Something is left; names it.
        StoreError: Files are open, or somebody works in the directory.
    """
    place = Path(directory).absolute()
    if mounted_at(place) != KIND:
        raise InvalidInputError(f"no store is mounted on {place}", path=str(place))
    try:
        pid = int(os.getxattr(place, f"{PREFIX}pid"))
        watched = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except (OSError, ValueError):
        # Its process is gone, and with it what was not published.
        detach(place, lazy=True)
        return
    try:
        _flush(place, timeout, force=force)
        try:
            detach(place, lazy=force)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise StoreError(f"{place} is in use: close its files, and leave the directory", path=str(place)) from error
        if watched is not None:
            _is_ready(watched, timeout)
    finally:
        if watched is not None:
            os.close(watched)


def _is_ready(descriptor: int, timeout_s: float) -> bool:
    """Wait until there is something to read. Training processes have descriptors above 1023, which select(2) refuses."""
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
        names = os.getxattr(place, f"{PREFIX}pending").decode().split("\n")
        what = ", ".join(name for name in names[:5] if name) or "what was written has not reached its level"
        raise TimeoutError(
            f"{place} is still mounted, because not all of it is safe after {timeout:g} s: {what}"
        ) from error


def _error(answer: Mapping[str, Any]) -> TierfsError:
    """The error that the process said."""
    kinds: dict[str, type[TierfsError]] = {getattr(errors, name).kind: getattr(errors, name) for name in errors.__all__}
    return kinds.get(answer["kind"], StoreError)(answer["message"], path=answer["path"])
