"""Writes into the host's ram tier: seals chunks and drafts in slabs, and notifies the flusher.

Sealed data is safe without a message, because any later flusher finds it. The message makes the flusher start.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from tierfs import digest
from tierfs.clock import Clock, boot_id
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, DigestKind
from tierfs.errors import CapacityError, StoreError, TierfsError
from tierfs.format.envelope import STORE, Block, Envelope
from tierfs.host.events import Counters, Faults, no_faults
from tierfs.host.filesystems import refused
from tierfs.host.name_locks import NameLocks
from tierfs.host.pending.record import Draft, SlotRef
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.slab.memory import memory_available
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Slot
from tierfs.host.slab.table import SlotKind, SlotState
from tierfs.host.write.ahead import Ahead, start_housekeeping
from tierfs.threads import start_daemon
from tierfs.units import format_bytes

# Timeout of a request without work. It may include the start of a flusher.
ANNOUNCE_S = 10.0
# For this long after a notification failed, no change waits for a flusher that runs.
SILENT_S = 30.0
# The flusher is notified at once of the first draft. Notifications of drafts within this time are combined: for small
# files, the messages took as long as the files. A process that waits for a draft notifies the flusher itself.
NEWS_S = 0.02
# Maximum in one message, which must fit into a packet.
NAMES_MAX = 500
# Maximum growth of an encoded draft when its boot id and stamp are filled in.
STAMP_BYTES = 64
# How long to wait for another process that seals a change of the same path. Sealing takes moments, unless that process
# was stopped during it.
SEAL_S = 30.0


class ChunkBuffer:
    """A chunk in a slab that is being filled, with the slot's writable memory. Not thread-safe."""

    def __init__(self, slot: Slot, view: memoryview, kind: DigestKind, faults: Faults = no_faults) -> None:
        self.slot = slot
        self._fault = faults
        self.filled = 0
        self._target = np.frombuffer(view, dtype=np.uint8)
        self.view = view
        self._kind = kind
        self._digests: list[bytes] = []

    @property
    def room(self) -> int:
        """Bytes that still fit."""
        return len(self.view) - self.filled

    def append(self, data: memoryview) -> int:
        """Copy as much of ``data`` as fits, without the GIL, and return the bytes copied."""
        count = min(self.room, len(data))
        source = np.frombuffer(data[:count], dtype=np.uint8)
        self._fault("before chunk.copy")
        np.copyto(self._target[self.filled : self.filled + count], source)
        self._fault("after chunk.copy")
        self.filled += count
        return count

    def fill(self, data: memoryview, digests: Sequence[bytes] = ()) -> None:
        """Copy all the content of the chunk.

        Unless the digests are given, each block is hashed right after its copy, while it is in the processor's cache.

        Args:
            data: All bytes of the chunk.
            digests: Digests of its blocks. If they are wrong, the chunk is damaged, and a read detects that.
        """
        source = np.frombuffer(data, dtype=np.uint8)
        self._fault("before chunk.copy")
        if digests:
            np.copyto(self._target[: len(data)], source)
            self._digests = list(digests)
        else:
            for at in range(0, len(data), BLOCK_BYTES):
                block = source[at : at + BLOCK_BYTES]
                np.copyto(self._target[at : at + len(block)], block)
                self._digests.append(digest.hash_bytes(self._kind, self.view[at : at + len(block)]))
        self._fault("after chunk.copy")
        self.filled = len(data)

    def accept(self) -> None:
        """Accept bytes that the caller wrote into all of the slot's memory, and hash them."""
        self.filled = len(self.view)
        self._digests, _ = digest.digests_of(self._kind, self.view)

    def envelope(self) -> Envelope:
        """Return the envelope with the chunk's digests. Call it once the chunk is complete."""
        pieces = [self.view[at : min(at + BLOCK_BYTES, self.filled)] for at in range(0, self.filled, BLOCK_BYTES)]
        digests = self._digests or [digest.hash_bytes(self._kind, piece) for piece in pieces]
        blocks = tuple(Block(block, STORE, len(piece)) for block, piece in zip(digests, pieces, strict=True))
        return Envelope(self._kind, digest.combine(self._kind, self.filled, digests), self.filled, blocks)


class SlabWriter:
    """Writes into the slabs of this process. Thread-safe. ``ended`` is set when the tiers are released."""

    def __init__(
        self,
        ram: RamTier,
        flusher: FlusherClient,
        counters: Counters,
        *,
        kind: DigestKind,
        clock: Clock,
        ended: threading.Event,
    ) -> None:
        self._ram = ram
        self._flusher = flusher
        self._counters = counters
        self._kind = kind
        self._clock = clock
        self._ended = ended
        self._fault = no_faults  # tests fail there
        self._boot = boot_id()
        self._sealing = NameLocks(ram.host.store_directory(ram.store) / "seal.lock")
        self._lock = threading.Lock()
        self._keeps_house = False
        self._is_news = False
        self._is_telling = False
        self._has_told = False
        self._silent_until = float("-inf")

    def prepare(self, wanted: int, longest: int, share: int) -> None:
        """Begin to add memory for two files that will be written: see `RamTier.prepare`."""
        self._keep_house()
        self._ram.prepare(wanted, longest, share)

    # -- chunks --------------------------------------------------------------------------------------------------------

    def begin_chunk(
        self, length: int | None = None, *, timeout_s: float | None, overflows: bool = False
    ) -> ChunkBuffer:
        """Allocate room for a chunk in a slab. The caller passes it to `seal_chunk`, or its slot to `drop`.

        Args:
            length: Maximum bytes of the chunk; by default `CHUNK_BYTES`.
            timeout_s, overflows: See `begin_runs`.

        Raises:
            CapacityError: There was no room before the timeout.
        """
        ((chunk,),) = self.begin_runs([[length or CHUNK_BYTES]], timeout_s=timeout_s, overflows=overflows)
        return chunk

    def begin_runs(
        self,
        runs: Sequence[Sequence[int]],
        *,
        timeout_s: float | None,
        overflows: bool = False,
        share_bytes: int | None = None,
    ) -> list[list[ChunkBuffer]]:
        """Allocate room for runs of chunks that are adjacent in memory; see `begin_chunk`.

        Args:
            runs: For each run the lengths of its chunks in bytes, each at most `CHUNK_BYTES`. A run has no gaps if all
                its chunks but the last have whole pages.
            timeout_s: How long to wait for room in the ram tier, in seconds; None for no limit.
            overflows: Whether runs for which that has no room go to the disk of the state directory. Runs that it can
                never hold go there in any case.
            share_bytes: The most that these runs may take of the ram tier. Longer ones go to the disk at once.

        Raises:
            CapacityError: There was no room.
        """
        if share_bytes is not None and sum(map(sum, runs)) > share_bytes:
            return self._buffers(self._overflow(runs, f"{format_bytes(share_bytes)} of it are left for this process"))
        self._keep_house()
        self._fault("before chunk.take")
        try:
            on_wait = None if timeout_s == 0 else self._nudge
            found = self._ram.take_runs(SlotKind.CHUNK, runs, timeout_s=timeout_s, on_wait=on_wait)
        except CapacityError as error:
            if not overflows and self._ram.may_hold(runs):
                raise
            found = self._overflow(runs, str(error))
        self._fault("after chunk.take")
        return self._buffers(found)

    def _buffers(self, runs: Sequence[Sequence[Slot]]) -> list[list[ChunkBuffer]]:
        return [
            [ChunkBuffer(slot, slot.segment.view(slot), self._kind, self._fault) for slot in slots] for slots in runs
        ]

    def _overflow(self, runs: Sequence[Sequence[int]], why: str) -> list[list[Slot]]:
        found = self._ram.take_on_disk(SlotKind.CHUNK, runs)
        self._counters["overflow_bytes"] += sum(map(sum, runs))
        self._counters.fall_back(
            "overflow",
            "a file that does not fit into the ram tier is staged on the disk of the state directory: %s",
            why,
        )
        return found

    def seal_chunk(self, chunk: ChunkBuffer, *, state: SlotState = SlotState.SEALED, name: bytes = b"") -> Slot:
        """Hash a chunk and make it readable for the host, under ``name`` or its digest. May run on any thread."""
        self._keep_house()
        envelope = chunk.envelope()
        name = name or bytes((self._kind,)) + envelope.digest
        self._fault("before chunk.seal")
        slot = chunk.slot.segment.seal(
            chunk.slot, name, envelope.encode(), length=chunk.filled, state=state, stamp_ns=self._stamp()
        )
        self._fault("after chunk.seal")
        return slot

    def ahead(self) -> Ahead:
        """Return an `Ahead` for the chunks of one file."""
        return Ahead(self._write_ahead)

    def _write_ahead(self, slots: Sequence[Slot], length: int) -> bool:
        try:
            self.ask_about("ahead", slots, length=length)
        except (TierfsError, TimeoutError) as error:
            if not self._ended.is_set():
                self._counters.fall_back(
                    "not_ahead",
                    "chunks are not written to the nvme tier early, but when their files are complete: %s",
                    error,
                )
            return False
        return True

    def ask_about(
        self, do: str, slots: Sequence[Slot], *, patience_s: float | None = None, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Ask the flusher to do something with chunks in slots, in as many messages as necessary. Return the answers.

        ``patience_s`` limits the wait for each answer, in seconds.

        Raises:
            TierfsError, TimeoutError: See `FlusherClient.request`.
        """
        references = [astuple(SlotRef.of(slot)) for slot in slots]
        return [
            self._flusher.request(do, {**arguments, "slots": references[at : at + NAMES_MAX]}, timeout_s=patience_s)
            for at in range(0, len(references), NAMES_MAX)
        ]

    def drop(self, slot: Slot) -> None:
        """Free the slot of a chunk. Closing the tiers has freed it already."""
        if not self._ended.is_set():
            slot.segment.give(slot)

    # -- drafts --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def sealing(self, draft: Draft, *, timeout_s: float | None) -> Iterator[None]:
        """Seal a draft when the context ends without an error. Then it is pending, and all processes of the host see it.

        In the context, no other thread or process of the host seals a draft of this path. So the caller checks there
        that the path has not changed since the version that the draft replaces.

        Args:
            timeout_s: How long to wait for room, in seconds; None for no limit. A file on the disk does not wait.

        Raises:
            CapacityError: There was no room for it before the timeout.
            StoreError: The path cannot be locked; or a stopped process keeps it locked, or shared memory that the file
                was staged in was removed, both transient.
        """
        self._keep_house()
        room = len(draft.encode()) + STAMP_BYTES
        self._fault("before draft.take")
        slot = self._take_for(draft, room, timeout_s)
        self._fault("after draft.take")
        with contextlib.ExitStack() as until_checked:
            until_checked.callback(self.drop, slot)
            self._check_removed(draft, slot)
            with self._alone_at(draft.path):
                yield
                until_checked.pop_all()
                stamp_ns = self._stamp()
                data = replace(draft, boot=self._boot, stamp_ns=stamp_ns).encode()
                slot.segment.view(slot)[: len(data)] = data
                self._fault("before draft.seal")
                # The path also goes into the metadata, to identify a draft whose data is damaged.
                where = draft.path.encode()
                slot.segment.seal(
                    slot, draft.write_id, where, length=len(data), state=SlotState.SEALED, stamp_ns=stamp_ns
                )
                self._fault("after draft.seal")

    def _take_for(self, draft: Draft, room: int, timeout_s: float | None) -> Slot:
        """Allocate room for a draft: on the disk without a wait if its chunks are there for lack of room."""
        overflows = self._ram.lies_on_disk(slot.segment for slot in draft.slots if slot is not None)
        try:
            return self._ram.take(
                SlotKind.DRAFT,
                room,
                timeout_s=0 if overflows else timeout_s,
                on_wait=None if overflows else self._nudge,
            )
        except CapacityError:
            if not overflows:
                raise
            ((slot,),) = self._ram.take_on_disk(SlotKind.DRAFT, [[room]])
            return slot

    def _check_removed(self, draft: Draft, slot: Slot) -> None:
        """Check that other processes can find a draft and its chunks.

        Raises:
            StoreError: A segment that holds one of them was removed.
        """
        removed = {segment.id for segment in self._ram.removed_segments()}
        for name in {slot.segment.id, *(reference.segment for reference in draft.slots if reference is not None)}:
            if name in removed:
                raise StoreError(
                    f"{draft.path}: the shared memory that it was staged in was removed meanwhile: write it again",
                    transient=True,
                    path=draft.path,
                    tier="ram",
                )

    @contextlib.contextmanager
    def _alone_at(self, path: str) -> Iterator[None]:
        """Keep other threads and processes of the host from sealing a change of this path."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._sealing.alone(path.encode(), timeout_s=SEAL_S))
            except StoreError as error:
                raise StoreError(
                    f"{path}: another thread or process has been sealing a change of it for {SEAL_S:g} s, perhaps "
                    "because it is stopped: this change was not made; let that process continue, or end it, and try "
                    "again",
                    transient=True,
                    path=path,
                    tier="ram",
                ) from error
            except OSError as error:
                raise refused(error, Path(path), "cannot be sealed", tier="ram") from error
            yield

    def expect(self) -> None:
        """Start a flusher in the background if none runs, because something will be sealed soon."""
        if not self._flusher.is_running():
            self._tell_soon()

    def announce(self, *, wait: bool = True) -> None:
        """Notify the flusher that something was sealed; start one if none runs.

        Sealed data is safe by itself. So an unreachable flusher is no error, but is logged and counted.

        Args:
            wait: Whether to wait until the flusher knows. The call waits in any case if no running flusher knows the
                object tier from this process, so that one goes on even if this process ends. It does not wait for a
                running flusher within `SILENT_S` after a notification failed.
        """
        is_running = self._flusher.is_running()
        is_silent = is_running and self._clock.monotonic() < self._silent_until
        if (wait or not self._has_told or not is_running) and not is_silent:
            self._tell()
        else:
            self._tell_soon()

    def close(self) -> None:
        """Close the file that sealing locks."""
        self._sealing.close()

    def _tell_soon(self) -> None:
        with self._lock:
            self._is_news = True
            if self._is_telling:
                return
            self._is_telling = True
        if start_daemon(self._tell_news, name="announce") is None:
            self._tell_news()

    def _tell_news(self) -> None:
        while True:
            with self._lock:
                if not self._is_news or self._ended.is_set():
                    self._is_telling = False
                    return
                self._is_news = False
            try:
                self._tell()
            except TierfsError as error:  # no caller is here to raise it to
                self._note_unreachable(error)
            self._ended.wait(NEWS_S)

    def _tell(self) -> None:
        self._fault("before announce")
        try:
            self._flusher.request("draft", {}, timeout_s=ANNOUNCE_S)
            self._has_told = True
            self._silent_until = float("-inf")
        except (StoreError, TimeoutError) as error:
            self._silent_until = self._clock.monotonic() + SILENT_S
            self._note_unreachable(error)
        self._fault("after announce")

    def _note_unreachable(self, error: Exception) -> None:
        if not self._ended.is_set():
            self._counters.fall_back(
                "unreachable_flusher", "the flusher cannot be reached; pending changes wait until one runs: %s", error
            )

    def _keep_house(self) -> None:
        """Start the thread that maintains the ram tier, unless it runs."""
        with self._lock:
            if not self._keeps_house:
                self._keeps_house = start_housekeeping(self._ram, self._flusher, self._ended)

    def _nudge(self) -> None:
        self._counters.fall_back(
            "waits_for_room",
            "the ram tier is full, and writers wait: %s, of this store %s are not flushed yet, and the machine has "
            "%s of memory left",
            self._ram.holders(),
            format_bytes(self._ram.usage().dirty_bytes),
            format_bytes(memory_available()),
        )
        self.announce()

    def _stamp(self) -> int:
        return int(self._clock.monotonic() * 1e9)
