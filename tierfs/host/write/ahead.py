"""Threads of a process that writes, which work ahead of need.

One writes chunks of a large file to the nvme tier while the rest of the file is being sealed (docs/decisions/0039). The
other adds memory to the ram tier, gives some back to processes that wait, and warns if nothing reaches the object tier.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence

from tierfs.errors import TierfsError
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Slot
from tierfs.threads import start_daemon

AHEAD_BYTES_MIN = 64 << 20
"""Minimum bytes for one request. Fewer are not worth one: they arrive with the draft about as soon."""
HOUSEKEEPING_S = 1.0
# Rounds between two questions to the flusher whether anything reaches the object tier, and how long to wait for the
# answer. The warning is repeated when the time has doubled, but at least once an hour.
STALL_ROUNDS = 30
ASK_S = 2.0
WARN_S_MAX = 3600.0
_logger = logging.getLogger("tierfs.flush")


class Ahead:
    """Asks for a file's chunks to be written before its draft names them. Thread-safe.

    While the flusher writes the chunks of one request, more are sealed, which the next request names. Nothing relies on
    this: chunks that are missing when the draft is sealed are written then.

    Args:
        tell: Asks for chunks to be written, given their slots and the bytes of the file sealed so far. Returns whether
            to ask again for further chunks. May take long.
    """

    def __init__(self, tell: Callable[[Sequence[Slot], int], bool]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._sealed: list[Slot] = []  # and not named in a request yet
        self._waiting_bytes = self._all_bytes = 0
        self._is_telling = self._is_over = False

    def add(self, slot: Slot) -> None:
        """Add a chunk that was sealed."""
        with self._lock:
            self._sealed.append(slot)
            self._waiting_bytes += slot.length
            self._all_bytes += slot.length
            if self._is_telling or self._is_over or self._waiting_bytes < AHEAD_BYTES_MIN:
                return
            self._is_telling = True
        if start_daemon(self._tell_all, name="ahead") is None:
            self.end()

    def end(self) -> None:
        """Make no further requests: the draft is being sealed, or the file is discarded."""
        with self._lock:
            self._is_over = True
            self._sealed = []

    def _tell_all(self) -> None:
        while True:
            with self._lock:
                if self._is_over or self._waiting_bytes < AHEAD_BYTES_MIN:
                    self._is_telling = False
                    return
                slots, self._sealed, self._waiting_bytes = self._sealed, [], 0
                length = self._all_bytes
            if not self._tell(slots, length):
                self.end()


def start_housekeeping(ram: RamTier, flusher: FlusherClient, ended: threading.Event) -> bool:
    """Start a thread that maintains the ram tier until ``ended`` is set or the tier is garbage-collected."""
    # A client may drop the tier and the flusher's client without closing them.
    return start_daemon(_run, weakref.ref(ram), weakref.ref(flusher), ended, name="housekeeping") is not None


def _run(ram: weakref.ref[RamTier], flusher: weakref.ref[FlusherClient], ended: threading.Event) -> None:
    warn_at_s = 0.0
    for number in itertools.count(1):
        if ended.wait(HOUSEKEEPING_S):
            return
        tier, client = ram(), flusher()
        if tier is None or client is None:
            return
        if number % STALL_ROUNDS == 0:
            warn_at_s = _warn_of_stall(client, warn_at_s)
        tier.grow_ahead()
        tier.give_back()
        del tier, client


def _warn_of_stall(flusher: FlusherClient, warn_at_s: float) -> float:
    """Warn if nothing has reached the object tier for ``warn_at_s``. Return after how many seconds to warn next."""
    if not flusher.is_running():
        return 0.0
    try:
        report = flusher.request("status", {}, timeout_s=ASK_S)
    except (TierfsError, TimeoutError) as error:
        _logger.debug("the flusher does not say whether files reach the object tier: %s", error)
        return warn_at_s
    seconds = float(report.get("stalled_s", 0.0))
    if not seconds or seconds < warn_at_s:
        return warn_at_s if seconds else 0.0
    first = report["errors"][0]
    why = f": {first['message']}" if first["attempts"] else ""
    words = "nothing has reached the object tier for %.0f s, and %d files wait on this host, the first is %s%s"
    _logger.warning(words, seconds, report["queue_files"], first["path"], why)
    return seconds + min(seconds, WARN_S_MAX)
