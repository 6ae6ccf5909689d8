"""Starts the flusher's process so that it outlives the process that starts it.

The flusher gets its own session, because torchrun kills process groups. Its working directory is ``/``, so that it
keeps no filesystem mounted. Its output goes to a log file. It inherits the umask, which determines the mode of files in
a store on a directory. Clients send its task, and credentials above all, over its socket and never here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from tierfs._fork import PerProcess
from tierfs.errors import StoreError

LOG_NAME = "flusher.log"
LOG_BYTES_MAX = 1 << 20
HEAPS = "2"
_TAIL_BYTES = 4096
_TAIL_LINES = 12


class Launched:
    """A started process.

    Attributes:
        pid: Its process id.
        log: File of its stdout and stderr, behind the output of earlier flushers.
    """

    def __init__(self, pid: int, log: Path, log_start: int) -> None:
        self.pid = pid
        self.log = log
        self._log_start = log_start
        self._status: int | None = None

    def status(self) -> int | None:
        """Return None while it runs, then its exit status; -N if signal N ended it, 0 if the status is unknown."""
        with _lock():
            if self._status is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # the program ignores SIGCHLD, or another thread waits for any child
                    self._status = 0
                else:
                    self._status = os.waitstatus_to_exitcode(status) if pid else None
            return self._status

    def last_words(self) -> str:
        return tail(self.log, self._log_start)


def spawn(argv: Sequence[str], log: Path) -> Launched:
    """Start ``argv`` as a process of its own.

    Args:
        argv: The program and its arguments. Every user of the host can read them: no credentials.
        log: Receives stdout and stderr, appended. Created with mode 0600. If it is over `LOG_BYTES_MAX`, it is first
            renamed to ``<log>.1``. The caller holds a lock: two concurrent calls would rename it twice.

    Raises:
        StoreError: The program or the log cannot be opened.
    """
    try:
        descriptor = _open_log(log)
        try:
            log_start = os.fstat(descriptor).st_size
            process = subprocess.Popen(  # noqa: S603 - the caller decides what to run
                argv,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                cwd="/",
                start_new_session=True,
                # By default, glibc keeps one heap for each thread, as large as that thread ever needed. NumPy starts a
                # thread for each processor, for linear algebra that a flusher does not do.
                env={"MALLOC_ARENA_MAX": HEAPS, "OPENBLAS_NUM_THREADS": "1", **os.environ},
            )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"the flusher cannot be started: {error}", path=str(log)) from error
    process.returncode = 0  # otherwise, Popen warns about a process that outlives it
    launched = Launched(process.pid, log, log_start)
    # Those that ended before would stay zombies.
    _started[:] = [launched, *(one for one in _started if one.status() is None)]
    return launched


_lock = PerProcess(threading.Lock)
_started: list[Launched] = []


def _open_log(log: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        if os.stat(log).st_size > LOG_BYTES_MAX:
            os.replace(log, f"{log}.1")
    return os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def tail(log: Path, start: int = 0) -> str:
    """Return the last lines of ``log`` behind byte ``start``; "" if there are none. Reports a full disk."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
            if not os.fstatvfs(file.fileno()).f_bavail:
                lines.append("(the disk of this log is full, so later lines are missing: free some room)")
    except OSError:
        return ""
    return "\n".join(lines)
