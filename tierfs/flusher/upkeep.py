"""Background garbage collection and scrubbing by a flusher that runs by itself. Both are off by default.

Several flushers of one store share a schedule: the store records when each of the two jobs last ended on any host.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierfs.errors import ConflictError, TierfsError
from tierfs.threads import start_daemon

if TYPE_CHECKING:
    from tierfs.store.store import Store  # a flusher answers its clients before it loads the store

# Interval between checks for due work, and the longest run of scrubbing before the next check.
TURN_S = 60.0
SCRUB_AGE_S = 7 * 86400.0
"""Chunks that were verified within this time are not read again, because reads of a bucket cost money."""
LOOK_AGE_S = 86400.0
"""The records are compared with the listing of chunks once in this time, because that lists the whole store."""
STOP_S = 30.0
_logger = logging.getLogger("tierfs.flush")


class Upkeep:
    """One thread that collects garbage and scrubs in the background.

    Args:
        open_store: Opens the store, without local tiers, when it is first needed.
        gc_every_s: Collect garbage this many seconds after the last collection ended; ``None`` for never.
        scrub_bandwidth: Bytes to verify per second; 0 for no scrubbing.
        turn_s: Interval between checks for due work, in seconds.

    Attributes:
        counters: Counts of the work by name. May be replaced before `start`.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        gc_every_s: float | None = None,
        scrub_bandwidth: int = 0,
        turn_s: float = TURN_S,
    ) -> None:
        self._open_store = open_store
        self._gc_every_s = gc_every_s
        self._scrub_bandwidth = scrub_bandwidth
        self.counters: Counter[str] = Counter()
        self._turn_s = turn_s
        self._ended = threading.Event()
        self._store: Store | None = None
        self._gc_ended_ns: int | None = None  # by the object tier's clock
        self._gc_ended_s = self._looked_s = float("-inf")  # by this host's monotonic clock
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_daemon(self._run, name="upkeep")

    def stop(self) -> None:
        """End the thread, and wait up to `STOP_S` for it. A running gc is aborted; the next one continues its work."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def turn(self) -> None:
        if self._store is None:
            self._store = self._open_store()
        if self._gc_every_s is not None:
            self._collect(self._store, self._gc_every_s)
        if self._scrub_bandwidth:
            self._scrub(self._store)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.turn()
            except TierfsError as error:
                self.counters["upkeep_failures"] += 1
                _logger.warning("upkeep failed and is retried later: %s", error)
            except Exception:  # the thread must go on after any error: no other thread collects and scrubs
                self.counters["unforeseen_errors"] += 1
                _logger.exception("unexpected error in upkeep, which is retried later")
            self._ended.wait(self._turn_s)

    def _collect(self, store: Store, every_s: float) -> None:
        from tierfs.store.maintenance.gc import GcOptions, collect  # noqa: PLC0415 - only where it is asked for
        from tierfs.store.maintenance.gc_turn import read_collector  # noqa: PLC0415

        self._note_end(store, int(read_collector(store)[0].last.get("ended_ns", 0)))
        if store.clock.monotonic() - self._gc_ended_s < every_s:
            return
        try:
            report = collect(store, GcOptions(reencode=True), lambda *_: self._check())
        except ConflictError as error:
            _logger.info("gc skipped: %s", error)  # another gc is running
            return
        self.counters["gc_runs"] += 1
        self.counters["gc_deleted_bytes"] += report.deleted.bytes
        self.counters["gc_reencoded_chunks"] += report.reencoded.count
        if report.missing:
            _logger.error("%d chunks that files need are missing: run `tierfs repair`", report.missing)
        if report.is_blocked:
            self.counters["gc_blocked"] += 1
            first = report.unreadable[0]
            _logger.error(
                "gc deletes nothing, because %d records cannot be read or have vanished: %s",
                len(report.unreadable),
                first.problem,
            )

    def _note_end(self, store: Store, ended_ns: int) -> None:
        """Note when the last gc ended, which the object tier's clock says, by this host's monotonic clock.

        The clock of this host may differ from the object tier's by hours, or jump. So it counts only at the first look.
        A gc that ended later did so between two looks.
        """
        now_s = store.clock.monotonic()
        if ended_ns != self._gc_ended_ns:
            age_s = max(0.0, (store.clock.now_ns() - ended_ns) / 1e9)
            self._gc_ended_ns, self._gc_ended_s = ended_ns, now_s - min(age_s, now_s - self._looked_s)
        self._looked_s = now_s

    def _scrub(self, store: Store) -> None:
        from tierfs.store.maintenance.scrub import ScrubOptions, scrub  # noqa: PLC0415 - only where it is asked for

        options = ScrubOptions(
            max_seconds=self._turn_s,
            bandwidth=self._scrub_bandwidth,
            concurrency=2,
            min_age_s=SCRUB_AGE_S,
            look_age_s=LOOK_AGE_S,
        )
        report = scrub(store, options, stop=self._ended)
        healed = sum(1 for each in report.damage if each.healed)
        self.counters["scrubbed_chunks"] += report.chunks
        self.counters["scrubbed_bytes"] += report.bytes
        self.counters["scrub_healed"] += healed
        self.counters["scrub_damaged"] += len(report.damage) - healed

    def _check(self) -> None:
        """Abort a running gc if the flusher ends."""
        if self._ended.is_set():
            raise ConflictError("the flusher is ending")
