"""The flusher: moves sealed drafts from the ram tier to the nvme tier, and from there to the object tier.

There is one flusher per host and store, and it is the only writer of the nvme tier. It takes a draft through these
steps. After a crash at any point, the next flusher finds in slabs, the nvme tier and the object tier how far the draft
got:

1. Write the chunks to files, then the draft to another one, each flushed before the next: level ``local``.
2. Mark the slots as clean, the chunks first and the draft last.
3. Put the chunks into the object tier.
4. Publish the record, in closing order and on condition of its base.
5. Remove the draft from the nvme tier, or mark the slots as clean if the draft is not in the nvme tier: level ``object``.

Consecutive drafts share the flushes of steps 1 and 5. Chunks of a large file are written to disk before its draft
is sealed (`tierfs.host.write.ahead`). Step 3 of a large draft runs beside step 1 while no request waits for
``local``. The next draft of a path is not published before step 5. The write id therefore suffices to recognize a
record that is already published.

`tierfs.flusher.scan` finds drafts, `tierfs.flusher.nvme` does steps 1 and 2, and `tierfs.flusher.upload` does steps 3
to 5. This module runs these parts on a few threads, waits for drafts, and reports.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tierfs.clock import Clock
from tierfs.errors import CapacityError, ConflictError, CorruptionError, StoreError, TierfsError
from tierfs.flusher.access import Connect, Way
from tierfs.flusher.nvme import NvmePersister
from tierfs.flusher.priority import Priority
from tierfs.flusher.queue import FlushItem
from tierfs.flusher.scan import PendingScan
from tierfs.flusher.state import BURST_S, SMALL_BYTES_MAX, FlushState
from tierfs.flusher.upload import Uploader
from tierfs.format.keys import is_at_or_below
from tierfs.host.events import Faults, no_faults
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.host.slab.ram import RamTier
from tierfs.threads import start_daemon

if TYPE_CHECKING:
    from tierfs.flusher.exchange import DraftExchange
    from tierfs.flusher.publish import StorePublisher

SWEEP_S = 1.0
# A request that waits for many drafts checks them for at most about a tenth of its time.
LOOK_SHARE = 10
# While a request waits: interval between attempts to open a segment, and how long to try.
SEE_S = 0.05
SEE_S_MAX = 10.0
# How long a discard waits for threads that are busy with the drafts.
DISCARD_S = 10.0
# Drafts named in each list of a report, which has to fit into a message.
NAMED_MAX = 20
_logger = logging.getLogger("tierfs.flush")


class Flusher:
    """Moves one store's drafts to lower tiers. Thread-safe.

    Args:
        nvme: The nvme tier, or ``None`` if there is none.
        random: Uniform in [0, 1). Adds jitter to retries.
        bandwidth: Most bytes of encoded chunks per second to the object tier; 0 for no bound.
        faults: Called before and after each ordered step with its name, so that tests can fail there.
        connect: Makes the publisher from the `Way` that a client hands over.
        nvme_problem: Why a configured nvme tier could not be opened; empty if none is configured or it is open.
        priority: How its threads share the processors. By default, they have the priority of this process.

    Attributes:
        counters: Counts of events, by name.
        scan: Finds drafts.
        persister: Moves drafts, and chunks for later reads, to the nvme tier.
        uploader: Moves drafts to the object tier.
        exchange: Exchanges drafts with other hosts; ``None`` unless `join` was called.
    """

    def __init__(
        self,
        ram: RamTier,
        nvme: NvmeTier | None,
        *,
        clock: Clock,
        random: Callable[[], float],
        bandwidth: int = 0,
        faults: Faults = no_faults,
        connect: Connect | None = None,
        nvme_problem: str = "",
        priority: Priority | None = None,
    ) -> None:
        self.ram = ram
        self.nvme = nvme
        self.nvme_problem = nvme_problem
        self._state = FlushState(
            ram, nvme, clock=clock, random=random, fault=faults, connect=connect, priority=priority or Priority()
        )
        self.counters = self._state.counters
        self.scan = PendingScan(self._state)
        self.uploader = Uploader(self._state, bandwidth=bandwidth)
        self.persister = NvmePersister(self._state)
        self._threads: list[threading.Thread] = []
        self._opens_ahead = False
        self.exchange: DraftExchange | None = None
        self._no_exchange = ""

    # -- life ----------------------------------------------------------------------------------------------------------

    def join(self, make: Callable[[FlushState], DraftExchange]) -> None:
        """Exchange drafts with other hosts from `start` on. ``make`` raises `TierfsError` if that cannot be done.

        If so, that is logged, counted and reported. Drafts go to the object tier without it.
        """
        try:
            self._state.exchange = self.exchange = make(self._state)
        except TierfsError as error:
            self.counters["peers_unavailable"] += 1
            self._no_exchange = str(error)
            _logger.warning("no change is held on other hosts: %s", error)

    def start(self) -> None:
        """Find the drafts in the tiers, and start the threads."""
        self.scan.resume()
        if self.exchange is not None:
            with ThreadPoolExecutor(1, initializer=self._state.priority.lower_thread) as lowered:
                lowered.submit(self.exchange.start).result()
        for target in (self._persist, self._upload):
            thread = threading.Thread(
                target=self._keep_on, args=(target,), name=f"tierfs{target.__name__}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Finish the running steps and end the threads. Running requests end soon. The next flusher does the rest."""
        state = self._state
        with state.changed:
            state.stopping = True
            state.changed.notify_all()
        self.uploader.pace.stop()
        if self.exchange is not None:
            self.exchange.stop()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Release the tiers. Call this after `stop`, when no request is running."""
        self.uploader.stop()
        self.persister.stop()
        self._state.access.close()
        self.ram.close()

    def use(self, publisher: StorePublisher) -> None:
        self._state.access.use(publisher)
        self._try_again()

    def hand_over(self, way: Way | None, codecs: str | None = None) -> None:
        """Note how a client reaches the object tier, and the codecs that a writer asks for: see `Access`."""
        if codecs is not None:
            self._state.access.use_codecs(codecs)
        if way is None:
            return
        if self._state.access.hand_over(way):
            self._try_again()
        if way.writes and not self._opens_ahead:
            self._opens_ahead = True
            thread = start_daemon(self._open_ahead, name="open-ahead")
            if thread is not None:
                self._threads.append(thread)

    def _open_ahead(self) -> None:
        """Open the store while a client still stages its first file, so that the upload need not wait for it."""
        self._state.priority.lower_thread()
        with contextlib.suppress(TierfsError):  # the upload meets the same error, and reports it
            self._state.access.call(lambda publisher: publisher.open())

    def _try_again(self) -> None:
        """Forget earlier failures, because they may not recur with another way to the object tier."""
        state = self._state
        with state.changed:
            for entry in state.entries:
                state.entries.clear(entry)
            state.nudged = True
            state.changed.notify_all()

    def is_idle(self) -> bool:
        """Return whether no drafts are in flight except conflicts, and all segments can be opened."""
        if self._state.ram.unread() or (self.exchange is not None and self.exchange.is_busy()):
            return False
        self.scan.discover()
        with self._state.changed:
            return all(entry.conflict for entry in self._state.entries)

    def nudge(self) -> None:
        """Tell the flusher that a slab may have a new draft. Wake all waiting requests."""
        with self._state.changed:
            self._state.nudged = True
            self._state.changed.notify_all()

    def _keep_on(self, step: Callable[[], None]) -> None:
        """Repeat a step until the flusher stops."""
        while not self._state.stopping:
            self._try(step)

    def _try(self, step: Callable[[], None]) -> None:
        state = self._state
        try:
            step()
        except Exception:  # the thread must go on after any error: no other thread flushes
            self.counters["unforeseen_errors"] += 1
            with state.changed:
                state.changed.wait(SWEEP_S)
            _logger.exception("unexpected error in the flusher, which continues")

    def _persist(self) -> None:
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: state.nudged or state.stopping, SWEEP_S)
            state.nudged = False
        if not state.stopping:
            self.scan.discover()
            self.persister.persist_all()
            self.scan.sweep()  # last, because no request waits for it

    def _upload(self) -> None:
        state = self._state
        with state.changed:
            entry = None
            state.stalled_s()  # notes that nothing is pending
            while not state.stopping and (entry := self.uploader.next()) is None:
                state.follow_priority()
                state.changed.wait(BURST_S if state.is_burst() else SWEEP_S)
                state.stalled_s()
            state.follow_priority()
            if entry is not None and not state.stopping:
                self.uploader.begin(entry)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(
        self,
        path: str,
        level: Level,
        timeout_s: float | None = None,
        *,
        write_id: bytes | None = None,
        gone: threading.Event | None = None,
    ) -> bool:
        """Wait until all drafts at or below a path that are pending now, or one of them, have reached ``level``.

        Args:
            path: The path. No draft at or below it may be lost.
            timeout_s: How long to wait; ``None`` for no limit.
            write_id: The write id of the one draft to wait for. If ``None``, wait for all.
            gone: Set when the client has hung up, which ends the wait.

        Returns:
            Whether such a draft was pending.

        Raises:
            TimeoutError: The drafts did not reach the level in time. The message has their number and size, one path,
                and the last error.
            TierfsError: A selected draft cannot reach the level without intervention.
        """
        state = self._state
        deadline = None if timeout_s is None else state.clock.monotonic() + timeout_s
        gone = gone or threading.Event()
        self._discover_all(deadline, gone)
        self.scan.check_lost(path)
        with state.changed:
            if write_id is None:
                own = (entry for entry in state.entries if not entry.is_foreign)
                waiting = [entry for entry in own if is_at_or_below(entry.path, path)]
            else:
                waiting = list(filter(None, [state.entries.get(write_id)]))
            is_known = bool(waiting)
            is_small = sum(entry.draft.length for entry in waiting) <= SMALL_BYTES_MAX
            is_local = level <= state.local_level
            for entry in waiting:
                entry.is_awaited |= is_small
                if not entry.conflict:
                    state.entries.hasten(entry)  # a client waits for the draft now
            is_awaited = level is Level.OBJECT and write_id is not None
            state.local_waits += is_local
            state.far_waits += not is_local
            state.object_waits += is_awaited
            if is_small:
                state.note_wait(1, is_local=is_local)
        try:
            if not (is_local and is_small and self.persister.persist_all(if_small=True)):
                self.nudge()
            with state.changed:
                self._wait_for(waiting, level, deadline, gone)
        finally:
            with state.changed:
                state.local_waits -= is_local
                state.far_waits -= not is_local
                state.object_waits -= is_awaited
                if is_small:
                    state.note_wait(-1, is_local=is_local)
                state.changed.notify_all()
        return is_known

    def _discover_all(self, deadline: float | None, gone: threading.Event) -> None:
        """Find the drafts in all segments. While a segment cannot be opened, retry for up to `SEE_S_MAX` seconds.

        Then raise a transient error, so that the client asks again.
        """
        state = self._state
        give_up_at = state.clock.monotonic() + SEE_S_MAX
        while True:
            unread = state.ram.unread()
            self.scan.discover()
            unread |= state.ram.unread()
            if not unread or gone.is_set():
                return
            text = f"{min(unread)} cannot be opened, and may hold the awaited change"
            now = state.clock.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"{text}: the flusher's log says why")
            if now >= give_up_at:
                why = state.ram.why_unread
                raise StoreError(f"{text}: {str(why) or 'out of memory'}", transient=True, tier="ram") from why
            if state.stopping:
                raise StoreError("the flusher is ending", transient=True)
            state.clock.sleep(SEE_S)

    def _wait_for(self, waiting: list[FlushItem], level: Level, deadline: float | None, gone: threading.Event) -> None:
        """Wait for these drafts as `wait` does. The caller holds the lock."""
        state, look_at = self._state, float("-inf")
        while True:
            now = state.clock.monotonic()
            left = None if deadline is None else deadline - now
            if is_look := now >= look_at or (left is not None and left <= 0):
                waiting = [entry for entry in waiting if entry.level < level and entry.draft.write_id in state.entries]
                for entry in waiting:
                    self._raise_hopeless(entry, level)
                # Every change wakes the waiting requests. Walking over all drafts each time would take too long.
                look_at = now + LOOK_SHARE * (state.clock.monotonic() - now)
            if not waiting or gone.is_set():
                return
            if left is not None and left <= 0:
                raise TimeoutError(self._describe(waiting, level))
            if state.stopping:
                raise StoreError("the flusher is ending", transient=True)
            pause_s = SWEEP_S if is_look else look_at - now
            state.changed.wait(pause_s if left is None else min(left, pause_s))

    def _raise_hopeless(self, entry: FlushItem, level: Level) -> None:
        if entry.conflict and entry.error is not None:
            raise entry.error
        state = self._state
        if level is Level.PEER and self.exchange is not None and entry.past_nvme:
            return  # other hosts may still take the draft, whatever the object tier says
        # Conflicts only block publication, so they matter only if the draft still has to be published for this level.
        is_blocked = state.entries.has_conflicts and (entry.past_nvme or level > state.local_level)
        blocker = state.entries.blocker(entry) if is_blocked else None
        if blocker is not None:
            raise ConflictError(
                f"{entry.path} is blocked by {blocker.path}, which was closed earlier and is kept as a conflict: "
                "another writer changed it first, and `tierfs flusher discard` deletes this host's change",
                path=entry.path,
            )
        # The wait made the next attempt due, so `retry_at` is 0 until that has failed, too.
        is_tried = entry.failures and entry.retry_at
        if entry.error is not None and not getattr(entry.error, "transient", False) and is_tried:
            if isinstance(entry.error, CapacityError) and not entry.past_nvme:
                return
            raise entry.error

    def _describe(self, waiting: list[FlushItem], level: Level) -> str:
        size = sum(entry.draft.length for entry in waiting)
        text = f"{len(waiting)} files ({size} bytes) have not reached {level.label!r} yet, {waiting[0].path} among them"
        errors = [entry.error for entry in waiting if entry.error is not None]
        return (
            f"{text}; the last error: {errors[0]}" if errors else f"{text}; {self._stall() or 'they are still pending'}"
        )

    def _stall(self) -> str:
        """Return the error of pending drafts without one, if nothing has reached the object tier for a while."""
        seconds = self._state.stalled_s()
        return f"nothing has reached the object tier for {seconds:.0f} s" if seconds else ""

    def report_damage(self, key: str) -> None:
        self._state.access.call(lambda publisher: publisher.report_damage(key))

    def discard(self, path: str) -> int:
        """Discard the drafts of a path that are conflicts or damaged, and all drafts that build on them.

        Returns:
            How many drafts were discarded.
        """
        state = self._state
        lost = self.scan.discard_lost(path)
        with state.changed:
            # The thread that has just kept a draft as a conflict is still busy with it for a moment.
            is_busy = state.entries.is_busy
            state.changed.wait_for(lambda: not any(map(is_busy, self._discardable(path))), DISCARD_S)
            kept = [entry for entry in self._discardable(path) if not is_busy(entry)]
        if self.exchange is not None:
            self.exchange.tell_gone(kept)
        for entry in reversed(kept):
            if entry.is_foreign:
                assert self.exchange is not None
                self.exchange.room.forget([entry.draft.write_id])
            elif entry.number is not None:
                assert self.nvme is not None
                self.nvme.forget_drafts(entry.number)
            elif entry.slot is not None:
                state.release(entry.draft, entry.slot, discarded=True)
            with state.changed:
                state.entries.remove(entry)
                state.changed.notify_all()
        return len(kept) + lost

    def _discardable(self, path: str) -> list[FlushItem]:
        """Return the drafts that `discard` discards, in order. The caller holds the lock."""
        entries = self._state.entries
        chosen = [
            entry
            for entry in entries
            if entry.path == path and (entry.conflict or isinstance(entry.error, CorruptionError))
        ]
        # A dict removes duplicates: a chosen draft may also be a dependent of another one.
        found = {entry: None for first in chosen for entry in (first, *entries.dependents(first))}
        return sorted(found, key=lambda entry: entry.turn)

    # -- seen by a person ----------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the queue, the conflicts, the errors and the counters, as plain values."""
        usage = self.nvme.usage() if self.nvme is not None else None
        state = self._state
        unread = len(state.ram.unread()) + len(state.ram.damaged())
        with state.changed:
            moving = [entry for entry in state.entries if not entry.conflict]
            kept = [entry for entry in state.entries if entry.conflict]
            stall = self._stall()
            failing = [entry for entry in moving if stall or entry.error is not None]
            return {
                "queue_files": len(moving),
                "backlog_bytes": state.entries.backlog_bytes,
                "queue_bytes": sum(entry.draft.length for entry in moving),
                "conflict_files": len(kept),
                "conflicts": [{"path": entry.path, "message": str(entry.error)} for entry in kept[:NAMED_MAX]],
                "failing_files": len(failing),
                "errors": [
                    {"path": entry.path, "message": str(entry.error or stall), "attempts": entry.failures}
                    for entry in failing[:NAMED_MAX]
                ],
                "stalled_s": state.stalled_s(),
                "rate_bytes_per_s": self.uploader.rate(),
                "unreadable_drafts": self.scan.unreadable,
                "unread_segments": unread,
                "has_nvme": usage is not None,
                "nvme_problem": self.nvme_problem,
                "nvme_fallbacks": dict(usage.fallbacks) if usage is not None else {},
                "nvme_evicted_bytes": usage.evicted_bytes if usage is not None else 0,
                "counters": dict(state.counters),
                **({} if self.exchange is None else {"peers": self.exchange.report()}),
                **({"peer_problem": self._no_exchange} if self._no_exchange else {}),
                **state.access.asked(),
            }
