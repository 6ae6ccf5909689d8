"""What the operating system lets the flusher's process have: raised as it begins, told when it is met, and when to give up.

Who starts a flusher leaves it the limits of its own, those of a job perhaps, while it is to serve the whole host. The soft
ones are raised. The hard ones stay, so a flusher that can serve nobody ends, and the next client starts one with its own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import time

from tierfs.errors import TierfsError
from tierfs.units import format_bytes

__all__ = ["Refusals", "is_short_of_memory", "raise_limits", "shortage"]

REFUSING_S_MAX = 5.0
SAID_EVERY_S = 60.0
# Who may have more than a million of them pays for it wherever all are gone through, and 256 clients need no more than this.
DESCRIPTORS_ENOUGH = 65_536
_SIZES = {resource.RLIMIT_AS: "of address space (ulimit -v)", resource.RLIMIT_DATA: "of data (ulimit -d)"}
_RAISED = (*_SIZES, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
_NO_MEMORY = frozenset({errno.ENOMEM, errno.ENOBUFS})
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_logger = logging.getLogger("tierfs.flush")


def raise_limits() -> None:
    """Raise the soft limits of this process to the hard ones; that of descriptors to what is enough."""
    for which in _RAISED:
        soft, hard = resource.getrlimit(which)
        wanted = hard
        if which == resource.RLIMIT_NOFILE and not 0 <= hard <= DESCRIPTORS_ENOUGH:
            wanted = DESCRIPTORS_ENOUGH
        if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > soft):
            with contextlib.suppress(OSError, ValueError):  # some sandboxes let nobody: it goes on with what it has
                resource.setrlimit(which, (wanted, hard))


def is_short_of_memory() -> bool:
    """Whether this process may run out of memory that the host has."""
    return any(resource.getrlimit(which)[0] != resource.RLIM_INFINITY for which in _SIZES)


def shortage(error: BaseException) -> str | None:
    """What to tell of an error which says that the process may not have more memory, threads or descriptors; None of others."""
    known = error
    while isinstance(known, TierfsError) and known.__cause__ is not None:
        known = known.__cause__
    number = known.errno if isinstance(known, OSError) else None
    if isinstance(known, MemoryError) or number in _NO_MEMORY:
        lacking = "memory"
    elif number in _NO_DESCRIPTORS:
        lacking = "open files"
    elif isinstance(known, RuntimeError) and "can't start new thread" in str(known):
        lacking = "threads"
    else:
        return None
    return (
        f"the flusher can have no more {lacking} ({_limits()}): what is pending stays; `tierfs flusher stop URL` ends it, and the "
        "next client starts one with limits of its own"
    )


def _limits() -> str:
    softs = {which: resource.getrlimit(which)[0] for which in _RAISED}
    sizes = [f"{format_bytes(softs[which])} {words}" for which, words in _SIZES.items() if softs[which] >= 0]
    return ", ".join([*sizes, f"{softs[resource.RLIMIT_NOFILE]} open files"]) + " are its limits"


class Refusals:
    """For how long a flusher could serve no client. Used by many threads; a count that is off by one does no harm.

    Attributes:
        are_hopeless: Whether clients were refused for `REFUSING_S_MAX`, the last one now, with none served meanwhile and no
            pause of `SAID_EVERY_S`.
    """

    def __init__(self) -> None:
        self.are_hopeless = False
        self._since: float | None = None
        self._last = float("-inf")
        self._count = 0
        self._said_at = float("-inf")

    def __repr__(self) -> str:
        return f"Refusals({self._count}, are_hopeless={self.are_hopeless})"

    def note(self, error: BaseException) -> None:
        """A client could not be served. Said in the log, though not each time."""
        now = time.monotonic()
        since = self._since = now if self._since is None or now - self._last > SAID_EVERY_S else self._since
        self._last = now
        self._count += 1
        self.are_hopeless = now - since >= REFUSING_S_MAX
        if now - self._said_at >= SAID_EVERY_S:
            self._said_at = now
            words = shortage(error) or error
            _logger.warning("a client could not be served (%d so far): %s", self._count, words)

    def end(self) -> None:
        """A client was served."""
        self._since, self.are_hopeless = None, False
