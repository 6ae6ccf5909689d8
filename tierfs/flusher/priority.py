"""Lower the priority of the flusher's process in favour of training.

See docs/decisions/0037-the-flusher-gives-way.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

NICER = 10
# If this file exists, the kernel divides the processors among sessions. Nice values then count only within a session:
# see sched(7).
_SESSION = Path("/proc/self/autogroup")
_ATTEMPTS_MAX = 5
_ATTEMPT_S = 0.1  # the kernel accepts one change per this time from a user other than root
_logger = logging.getLogger("tierfs.flush")


def give_way() -> bool:
    """Raise the nice value of this thread, and of all threads that it starts later, by 10.

    It then gets about a tenth of the processor time of a competing process with its former nice value. If this process
    leads its session, the session gets the lower priority, too.

    Returns:
        False if the kernel refused to change the session, which makes the nice value ineffective. That is logged.
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
    _logger.warning("the flusher cannot lower its priority and competes with training for the processors: %s", reason)
    return False
