"""The host's ram tier for one store, as seen by one process.

Each process writes into its own segments and evicts only from these. Before it adds a segment, it checks under the
host's lock that the segments of all processes and stores stay within the budget. It reads the segments of other
processes.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierfs.clock import Clock
from tierfs.errors import CapacityError, TierfsError
from tierfs.host.host import Host
from tierfs.host.slab.budget import LOCK, RamBudget
from tierfs.host.slab.pool import SegmentPool
from tierfs.host.slab.segment import Segment, Slot
from tierfs.host.slab.segment_file import OldSegmentError
from tierfs.host.slab.table import DATA_STATES, Layout, SlotKind, SlotState, padded
from tierfs.units import format_bytes

# The kernel's clock for a folder's timestamp may stand still for some milliseconds: a second change within that time
# does not move the timestamp.
SETTLED_NS = 50_000_000
# Resources that the system lacks for now, for this process or for all, until a process releases some.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_logger = logging.getLogger("tierfs.local")


HOLDERS_NAMED = 3


@dataclass(frozen=True, slots=True)
class RamUsage:
    """Usage of the ram tier, in bytes.

    Attributes:
        budget_bytes: Maximum of all segments of the host.
        host_bytes: Bytes that the segments of all processes and stores take.
        store_bytes: Bytes that this store's segments take, as far as this process has them open.
        used_bytes: Bytes of allocated slots in these.
        dirty_bytes: Used bytes that are not known to be in another tier.
        clean_bytes: Used bytes that may be evicted.
        segments: Number of segments of this store.
        disk_segments: Number of these that are files in the state directory, because shared memory is too small.
        overflow_segments: Number of these that are files there, because a file does not fit into the budget.
        waits: Number of times that this process waited for room.
        waited_s: Total time of these waits, in seconds.
        evicted_bytes: Bytes that this process evicted.
    """

    budget_bytes: int
    host_bytes: int
    store_bytes: int
    used_bytes: int
    dirty_bytes: int
    clean_bytes: int
    segments: int
    disk_segments: int
    overflow_segments: int
    waits: int
    waited_s: float
    evicted_bytes: int


class RamTier:
    """The ram tier of one store: this process's segments and those of other processes. Thread-safe.

    Args:
        host: Holds the folders of segments.
        store: The uuid of the store.
        budget_bytes: Maximum of all segments of the host together.
        clock: For waiting.
        segment_bytes_max: The most data in one segment; see `next_layout`.

    Attributes:
        store: The uuid, 32 hex digits.
        why_unread: The error of the last segment that could not be opened.
    """

    def __init__(
        self, host: Host, store: str, *, budget_bytes: int, clock: Clock, segment_bytes_max: int = 1 << 30
    ) -> None:
        self.host = host
        self.store = store.replace("-", "")
        self.budget_bytes = budget_bytes
        self._clock = clock
        self._length_max = max(min(Layout.for_size(budget_bytes).data_bytes, segment_bytes_max), 0)
        self._ram_budget = RamBudget(host)
        self._pool = SegmentPool(
            host, self.store, self._ram_budget, budget_bytes=budget_bytes, data_bytes_max=segment_bytes_max, clock=clock
        )
        self._lock = threading.Lock()  # protects the segments of other processes, which follow
        self._files: dict[str, Segment] = {}
        self._removed: dict[str, Segment] = {}  # by id: their files were removed while they held dirty data
        self._passed_over: dict[tuple[str, int], Exception] = {}
        self._unread: frozenset[str] = frozenset()  # each look tries again to open them
        self._damaged: dict[str, Exception] = {}
        self._seen_ns: list[int] = []
        self.why_unread: BaseException | None = None

    def take(
        self,
        kind: SlotKind,
        length: int,
        *,
        timeout_s: float | None,
        on_wait: Callable[[], None] | None = None,
        spares_copies: bool = False,
    ) -> Slot:
        """Allocate a slot in a segment of this process. The caller fills it, then seals or frees it in its segment.

        Args:
            kind: Kind of content.
            length: Length of the content in bytes.
            timeout_s: How long to wait for room while everything is dirty, in seconds; None for no limit.
            on_wait: Called once if the call has to wait.
            spares_copies: Add a segment before evicting clean copies, as long as the budget allows it. For content that
                is itself a copy. Without it, new data replaces old copies, in memory that is mapped already.

        Raises:
            CapacityError: There was no room before the timeout, or waiting cannot bring any (raised at once).
            InvalidInputError: The tier was closed.
        """
        ((slot,),) = self.take_runs(kind, [[length]], timeout_s=timeout_s, on_wait=on_wait, spares_copies=spares_copies)
        return slot

    def take_runs(
        self,
        kind: SlotKind,
        runs: Sequence[Sequence[int]],
        *,
        timeout_s: float | None,
        on_wait: Callable[[], None] | None = None,
        spares_copies: bool = False,
    ) -> list[list[Slot]]:
        """Allocate all these runs or none; see `take`.

        The slots of a run are adjacent in one segment, each on a page boundary.
        """
        if not self.may_hold(runs):
            longest = max(sum(map(padded, lengths)) for lengths in runs)
            raise CapacityError(
                f"{format_bytes(longest)} are more than the ram tier can hold in one piece "
                f"({format_bytes(self._length_max)}): raise ram= (TIERFS_RAM) from {format_bytes(self.budget_bytes)} to "
                f"{format_bytes(Layout.for_data(longest).size)} at least",
                tier="ram",
            )
        started = self._clock.monotonic()
        found = self._pool.take(kind, runs, timeout_s=timeout_s, on_wait=on_wait, spares_copies=spares_copies)
        if found is None:
            raise self._full(sum(map(padded, itertools.chain(*runs))), timeout_s, self._clock.monotonic() - started)
        return found

    def may_hold(self, runs: Sequence[Sequence[int]]) -> bool:
        """Return whether the budget suffices for each of these runs."""
        return all(sum(map(padded, lengths)) <= self._length_max for lengths in runs)

    def take_on_disk(self, kind: SlotKind, runs: Sequence[Sequence[int]]) -> list[list[Slot]]:
        """Allocate all these runs or none, as `take_runs`, but on the disk of the state directory, beyond the budget.

        Raises:
            CapacityError: The disk has no room for them.
            InvalidInputError: The tier was closed.
        """
        found = self._pool.take_on_disk(kind, runs)
        if found is None:
            length = sum(map(padded, itertools.chain(*runs)))
            raise CapacityError(
                f"{format_bytes(length)} do not fit into the ram tier ({format_bytes(self.budget_bytes)}), and the disk of "
                f"the state directory has no room for them either: {self._pool.why_not}; raise ram= (TIERFS_RAM), or free "
                "space there",
                tier="ram",
            )
        return found

    def lies_on_disk(self, idents: Iterable[str]) -> bool:
        """Return whether any of these own segments is one of `take_on_disk`."""
        on_disk = {segment.id for segment in self._pool.own if segment.path.parent == self.host.overflow}
        return not on_disk.isdisjoint(idents)

    def prepare(self, wanted: int, longest: int, share: int) -> None:
        """Begin to add memory for two requests that will come, at the lowest priority. Return at once.

        The memory counts against the budget. It is released first when another process waits for room.

        Args:
            wanted: Bytes of a request in all.
            longest: Bytes of its longest run.
            share: The most that this process is to hold, in bytes. If a request takes more, nothing is added.
        """
        self._pool.prepare(wanted, longest, share)

    def grow_ahead(self) -> threading.Thread | None:
        """Start a thread that adds memory for the next save; see `SegmentPool.grow_ahead`."""
        return self._pool.grow_ahead()

    def own_segments(self) -> list[Segment]:
        return list(self._pool.own)

    def removed_segments(self) -> list[Segment]:
        """Return the own segments whose file was removed while something in them is needed.

        Only processes that have such a segment open can read it.
        """
        return self._pool.removed()

    def give_back(self) -> int:
        """Release a segment of this process if another process waits for room. Call it each second.

        Returns:
            Bytes released. A segment with dirty data stays: its other memory is released, nothing more is put
            into it, and a later call removes it.
        """
        return self._pool.give_back()

    def segments(self) -> list[Segment]:
        """Return all segments of this store on this host, those of this process first."""
        return [*self._pool.own, *self._others()]

    def unread(self) -> frozenset[str]:
        """Return names of segments of this store that cannot be opened now, for lack of descriptors or memory.

        Their content must not count as absent.
        """
        self._others()
        return self._unread

    def damaged(self) -> dict[str, Exception]:
        """Return the error for each file that is named like a segment of this store and is not one, by name.

        Its content is lost, except to a process that has it open.
        """
        self._others()
        return self._damaged

    def is_blind(self) -> bool:
        """Return whether segments are `unread` or `damaged`: these may hold drafts that need any chunk."""
        return bool(self.unread() or self.damaged())

    def segment(self, ident: str) -> Segment | None:
        return next((segment for segment in self.segments() if segment.id == ident), None)

    def find(self, name: bytes) -> Slot | None:
        """Return a chunk of this name, from this process's segments first."""
        for segment in self.segments():
            slot = segment.find(name)
            if slot is not None:
                return slot
        return None

    def chunks(self) -> list[tuple[bytes, int]]:
        """Return names and lengths of the chunks that `find` may return, sorted by name."""
        slots = [slot for each in self.segments() for slot in each.slots(kind=SlotKind.CHUNK, states=DATA_STATES)]
        return sorted({slot.name: slot.length for slot in slots if not slot.hidden}.items())

    def drafts(self, states: Collection[SlotState] = (SlotState.SEALED,)) -> list[Slot]:
        """Return the drafts in these states, in the order of sealing."""
        found = [slot for segment in self.segments() for slot in segment.slots(kind=SlotKind.DRAFT, states=states)]
        return sorted(found, key=lambda slot: slot.turn)

    def reclaim(self, needed: Callable[[Segment], Collection[int]]) -> int:
        """Free slots that dead processes left unsealed, or sealed without a draft that needs them. For the flusher.

        Args:
            needed: Returns the indices of the slots of needed chunks in a segment. Called when its owner is dead, so
                that no draft is added after that.

        Returns:
            Bytes freed.
        """
        freed = 0
        for segment in self.segments():
            if segment.owned or self.host.is_alive(segment.owner):
                continue
            kept = needed(segment)
            with self.host.locked(LOCK):
                if self.host.is_alive(segment.owner):  # a process has taken it over meanwhile
                    continue
                freed += segment.free_unneeded(kept)
                # Other processes cannot use clean data in a segment whose file was removed. An owner that released its
                # segment left only data to flush.
                left = segment.is_removed() or not int(segment.owner, 16) or segment.path.parent == self.host.overflow
                if left and not segment.is_dirty():
                    self._drop(segment)
        return freed

    def reap(self) -> int:
        """Remove segments of dead processes without dirty data. Return the bytes of the copies in them."""
        freed = 0
        for segment in self._others():
            with self.host.locked(LOCK):
                if not self.host.is_alive(segment.owner) and not segment.is_dirty():
                    copies = segment.slots(kind=SlotKind.CHUNK, states=(SlotState.CLEAN,))
                    freed += sum(slot.length for slot in copies if not slot.hidden)
                    self._drop(segment)
        return freed

    def usage(self) -> RamUsage:
        segments = self.segments()
        sums = [segment.sums() for segment in segments]
        dirty, clean = sum(item.dirty for item in sums), sum(item.clean for item in sums)
        return RamUsage(
            budget_bytes=self.budget_bytes,
            host_bytes=sum(file.size for file in self._ram_budget.files()),
            store_bytes=sum(segment.memory_bytes for segment in segments),
            used_bytes=dirty + clean + sum(item.filling for item in sums),
            dirty_bytes=dirty,
            clean_bytes=clean,
            segments=len(segments),
            disk_segments=sum(segment.path.parent == self.host.fallback for segment in segments),
            overflow_segments=sum(segment.path.parent == self.host.overflow for segment in segments),
            waits=self._pool.waits,
            waited_s=self._pool.waited_s,
            evicted_bytes=self._pool.evicted_bytes,
        )

    def close(self) -> None:
        """Release everything. Own segments with dirty data stay until that is flushed."""
        self._pool.close()
        with self._lock:
            segments = [*self._files.values(), *self._removed.values()]
            for known in (self._files, self._removed):
                known.clear()
            self._seen_ns = []
        for segment in segments:
            segment.close()

    def holders(self) -> str:
        """Describe, for people, how much of the budget is taken, and by which stores (their uuids) most of it."""
        files = self._ram_budget.files()
        sizes: Counter[str] = Counter()
        for file in files:
            sizes[file.name.store] += file.size
        stores = ", ".join(
            f"{format_bytes(size)} of store {store}..." for store, size in sizes.most_common(HOLDERS_NAMED)
        )
        taken = f"the segments of this host take {format_bytes(sizes.total())} of {format_bytes(self.budget_bytes)}"
        return f"{taken} ({stores})" if stores else taken

    def _full(self, length: int, timeout_s: float | None, waited_s: float) -> CapacityError:
        what = f"no room for {format_bytes(length)} in the ram tier"
        why = f"; {self._pool.why_not}" if self._pool.why_not else ""
        dirty = format_bytes(self.usage().dirty_bytes)
        if timeout_s is not None and waited_s >= timeout_s:
            text = (
                f"{what} within {timeout_s:g} s: {self.holders()}, and of this store {dirty} are dirty, waiting for the flusher; "
                f"raise ram= (TIERFS_RAM), or wait longer{why}"
            )
        else:
            text = f"{what}, and waiting will not free any: {self.holders()}; raise ram= (TIERFS_RAM){why}"
        return CapacityError(text, tier="ram")

    # -- segments of other processes ------------------------------------------------------------------------------------

    def _others(self) -> list[Segment]:
        """Return the segments that other processes write. Lists the folders if one changed.

        A segment whose file is gone is not closed, because a thread may be reading it. It closes with its last reference.
        """
        with self._lock:
            self._look()
            # A segment of this process may have been found before the process added it to its own.
            ids = {segment.id for segment in self._pool.own}
            return [segment for segment in (*self._files.values(), *self._removed.values()) if segment.id not in ids]

    def _drop(self, segment: Segment) -> None:
        """Remove a segment whose owner is dead. Its memory is released with the last slot or view of it."""
        segment.unlink()
        with self._lock:
            self._files.pop(segment.path.name, None)
            self._removed.pop(segment.id, None)

    def _look(self) -> None:
        stamps, now_ns = self._ram_budget.stamps(), time.time_ns()
        if stamps == self._seen_ns and not self._unread:
            return
        own = {segment.path.name for segment in self._pool.own}
        found = [(name, path) for name, path in self._ram_budget.paths() if name.store == self.store[:8]]
        names = {str(name): path for name, path in found if name.suffix == "slab" and str(name) not in own}
        self._removed = {ident: segment for ident, segment in self._removed.items() if segment.is_dirty()}
        for name in [name for name in self._files if name not in names]:
            segment = self._files.pop(name)
            # An orderly removal happens only when nothing is dirty. After any other, only open descriptors keep the
            # dirty data.
            if name not in own and segment.is_dirty():
                self._removed.setdefault(segment.id, segment)
        new = [path for name, path in sorted(names.items()) if name not in self._files]
        self._unread = frozenset(path.name for path in new if not self._attach(path))
        self._damaged = {
            name: error for (name, _), error in self._passed_over.items() if name in names and name not in self._files
        }
        self._seen_ns = stamps if now_ns - max(stamps) > SETTLED_NS else []

    def _attach(self, path: Path) -> bool:
        """Open a segment. Return False if that must be tried again."""
        key = path.name, 0
        try:
            key = path.name, path.stat().st_ino
            if key in self._passed_over:
                return True
            segment = Segment.attach(path)
        except FileNotFoundError:
            return True
        except OldSegmentError:
            path.unlink(missing_ok=True)  # no process uses it since that boot, and on a disk it would stay
            return True
        except (TierfsError, OSError, MemoryError) as error:
            if not _is_for_now(error):
                _logger.warning("a segment cannot be used and is ignored: %s", error)
                self._passed_over[key] = error
                return True
            if path.name not in self._unread:
                _logger.warning("%s cannot be opened now, and is retried: %s", path, str(error) or "out of memory")
            self.why_unread = error
            return False
        if segment.store == self.store:
            self._files[path.name] = segment
        return True


def _is_for_now(error: BaseException) -> bool:
    cause = error.__cause__ if isinstance(error, TierfsError) and error.__cause__ is not None else error
    return isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _SHORT)
