"""The share of the processors that a flusher takes: less than the programs that it serves, unless one waits for it.

See docs/decisions/0037-the-flusher-gives-way.md.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

NICER = 10
# If this file exists, the kernel may divide the processors among sessions. Nice values then count only within a
# session: see sched(7).
SESSION = Path("/proc/self/autogroup")
_logger = logging.getLogger("tierfs.flush")


class Priority:
    """The nice values of a flusher's threads and of its session. Thread-safe.

    A thread cannot lower its nice value again without a privilege, so work that nobody waits for has threads of its
    own. A session can, ten times a second. The nice value of a session that another process leads is not changed.

    Args:
        nicer: How much nicer work is that nobody waits for; 0 in a flusher that keeps its priority.
        session: The session's file; by default `SESSION`.

    Attributes:
        is_refused: Whether the kernel refused to change the session, which makes the threads' nice values ineffective.
            That is logged.
    """

    def __init__(self, nicer: int = 0, session: Path | None = None) -> None:
        self._nicer = nicer
        self._low = os.getpriority(os.PRIO_PROCESS, 0) + nicer
        self._lock = threading.Lock()
        self._is_low = self.is_refused = False
        session = session or SESSION
        self._session = session if nicer and os.getsid(0) == os.getpid() and session.exists() else None
        self._set(0)

    def lower_thread(self) -> None:
        """Make the calling thread nicer, and all threads that it starts later."""
        if self._nicer:
            os.setpriority(os.PRIO_PROCESS, 0, self._low)  # 0 is the thread

    def lower_session(self, is_low: bool) -> None:
        """Give the session the priority of work that nobody waits for, or that of its clients."""
        with self._lock:
            if is_low != self._is_low and self._set(self._nicer if is_low else 0):
                self._is_low = is_low

    def _set(self, nice: int) -> bool:
        if self._session is None:
            return False
        try:
            self._session.write_text(str(nice))
        except BlockingIOError:
            return False  # too soon after another change: the next call tries again
        except OSError as error:
            self._session, self.is_refused = None, True
            _logger.warning(
                "the flusher cannot lower its priority and competes with training for the processors: %s", error
            )
            return False
        return True
