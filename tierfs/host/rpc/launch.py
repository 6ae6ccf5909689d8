"""Starting the flusher's process, so that it outlives who started it.

It gets its own session (torchrun kills process groups), ``/`` as its directory (so that nothing stays mounted for it)
and a log file for what it says. It keeps its starter's umask, by which files in a store on a directory are made. Its task,
credentials above all, travels over its socket, never here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from tierfs.errors import StoreError
from tierfs.threads import start_daemon

__all__ = ["LOG_NAME", "Launched", "spawn", "tail"]

LOG_NAME = "flusher.log"
LOG_BYTES_MAX = 1 << 20
HEAPS = "2"
_TAIL_BYTES = 4096
_TAIL_LINES = 12


class Launched:
    """A process that was started, until it ends.

    Attributes:
        pid: Its id.
        log: Its stdout and stderr, after those of earlier ones.
    """

    def __init__(self, pid: int, log: Path, log_start: int) -> None:
        self.pid = pid
        self.log = log
        self._log_start = log_start
        self._ended = threading.Event()
        self._status = 0
        self._is_waited_for = False

    def __repr__(self) -> str:
        return f"Launched(pid={self.pid}, log={str(self.log)!r})"

    def status(self) -> int | None:
        """None while it runs, then what it exited with; -N where signal N ended it."""
        if not self._is_waited_for:
            self._reap(os.WNOHANG)
        return self._status if self._ended.is_set() else None

    def last_words(self) -> str:
        """The last lines that it logged."""
        return tail(self.log, self._log_start)

    def _begin_waiting(self) -> None:
        # If there can be none, because Python is about to end, a zombie is not ours for long.
        self._is_waited_for = start_daemon(self._reap, name="reaper") is not None

    def _reap(self, flags: int = 0) -> None:
        try:
            pid, status = os.waitpid(self.pid, flags)
        except ChildProcessError:
            # The program ignores SIGCHLD, or waits for whatever child it has: nobody tells us the status.
            self._ended.set()
            return
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
            self._ended.set()


def spawn(argv: Sequence[str], log: Path) -> Launched:
    """Start ``argv`` as a process of its own.

    Args:
        argv: The program and its arguments. Anybody on the host can read them: no credentials.
        log: Appended to, with what both its streams say. Readable by this user only; over `LOG_BYTES_MAX` it is moved
            to ``<log>.1`` first. Hold a lock: two at once would move it twice.

    Raises:
        StoreError: The program or the log cannot be opened.
    """
    try:
        descriptor = _open_log(log)
        try:
            log_start = os.fstat(descriptor).st_size
            process = subprocess.Popen(  # noqa: S603 - what to run is the caller's to say
                argv,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                cwd="/",
                start_new_session=True,
                # glibc keeps a heap a thread otherwise, each as large as that thread ever needed. NumPy starts a thread for each
                # processor, for linear algebra, of which a flusher does none.
                env={"MALLOC_ARENA_MAX": HEAPS, "OPENBLAS_NUM_THREADS": "1", **os.environ},
            )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"the flusher cannot be started: {error}", path=str(log)) from error
    # It may outlive us, which Popen takes for an oversight: from here on it is a process id, reaped by our own thread.
    process.returncode = 0
    launched = Launched(process.pid, log, log_start)
    launched._begin_waiting()
    return launched


def _open_log(log: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        if os.stat(log).st_size > LOG_BYTES_MAX:
            os.replace(log, f"{log}.1")
    return os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def tail(log: Path, start: int = 0) -> str:
    """The last lines of ``log`` that lie after byte ``start``; "" where there are none, though room for them."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
            if not os.fstatvfs(file.fileno()).f_bavail:
                lines.append("(no room is left on the disk of this log for what else there was to say: free some)")
    except OSError:
        return ""
    return "\n".join(lines)
