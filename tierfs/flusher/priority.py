"""How the flusher's process shares the processors with whoever trains on them: see docs/decisions/0037-the-flusher-gives-way.md."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

__all__ = ["NICER", "give_way"]

NICER = 10
# Where it is there, sessions share the processors, whatever is nice within them: see sched(7).
_SESSION = Path("/proc/self/autogroup")
_ATTEMPTS_MAX = 5
_ATTEMPT_S = 0.1  # the kernel takes one such change in so long from those who are not root
_logger = logging.getLogger("tierfs.flush")


def give_way() -> bool:
    """Be nicer by 10 from now on, with all threads that begin later: a tenth of what somebody else has who wants the processor as well.

    Its session does so as a whole, where that is its own.

    Returns:
        False where the kernel kept the session from it, so that nothing came of it; that is logged.
    """
    os.nice(NICER)
    if os.getsid(0) != os.getpid():
        return True
    try:
        for _ in range(_ATTEMPTS_MAX):
            with contextlib.suppress(BlockingIOError):
                _SESSION.write_text(str(NICER))
                return True
            time.sleep(_ATTEMPT_S)
    except FileNotFoundError:
        return True
    except OSError as error:
        reason = str(error)
    else:
        reason = f"{_SESSION} is changed too often"
    _logger.warning("this flusher takes as much of the processors as whoever trains: %s", reason)
    return False
