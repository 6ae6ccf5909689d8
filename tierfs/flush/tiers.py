"""The local tiers of one store as a process that uses them sees them: pending drafts, chunks, and the flusher.

Everything that is pending is found in the tiers themselves, the ram tier before the nvme tier, because a draft moves
down and never up. So looking needs no flusher; it is asked only to take something down or to say when it has.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from tierfs import digest
from tierfs.clock import Clock
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, DigestKind
from tierfs.errors import CorruptionError, FormatError, NotFoundError, StoreError, TierfsError
from tierfs.flush.draft import Draft
from tierfs.flush.keeper import Keeper
from tierfs.flush.levels import Level
from tierfs.flush.singleflight import SingleFlight
from tierfs.format.envelope import STORE, Block, Envelope
from tierfs.format.ranges import BlockTargets
from tierfs.local.arena import no_faults
from tierfs.local.nvme import NvmeReader
from tierfs.local.ram import RamTier
from tierfs.local.segmentfile import boot_id
from tierfs.local.slab import Segment, Slot, SlotKind, SlotState
from tierfs.local.stored import StoredDraft

__all__ = ["Caller", "ChunkBuffer", "Pending", "Tiers"]

DECODED_MAX = 4096
ASK_AGAIN_S = 0.05  # a flusher that does not know of what is waited for
# Reading less than a quarter of a chunk is no reason to fetch all of it.
WHOLE_FRACTION = 4
HOUSEKEEPING_S = 1.0
# What an answer may take that needs no work. Starting a flusher may be part of it.
ANNOUNCE_S = 10.0
# In one message, which has to fit into a packet.
NAMES_MAX = 500
# What a draft grows by when it is closed.
STAMP_BYTES = 64
REBUILDS_MAX = 2
Answer = TypeVar("Answer")
DESCRIPTORS_MAX = 8
_logger = logging.getLogger("tierfs.flush")


class Caller(Protocol):
    """How the flusher is reached; `FlusherClient` is one."""

    def request(
        self, do: str, arguments: dict[str, Any], *, fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Send a message and return the answer; starts a flusher where none runs.

        Raises:
            TimeoutError: No answer in time.
            StoreError: No flusher can be reached or started.
            TierfsError: What the flusher answers.
        """

    def is_running(self) -> bool:
        """Whether a flusher runs now."""

    def close(self) -> None:
        """Ask nothing any more."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A draft that this host has and the object tier does not, and the level it has reached."""

    draft: Draft
    level: Level


class ChunkBuffer:
    """A chunk in a slab that is being filled. For one thread at a time."""

    def __init__(
        self, slot: Slot, view: memoryview, kind: DigestKind, faults: Callable[[str], None] = no_faults
    ) -> None:
        self.slot = slot
        self._fault = faults
        self.filled = 0
        self._target = np.frombuffer(view, dtype=np.uint8)
        self._view = view
        self._kind = kind

    @property
    def room(self) -> int:
        """Bytes that still fit in."""
        return len(self._view) - self.filled

    def append(self, data: memoryview) -> int:
        """Copy what fits of ``data``, without the GIL, and return how much that was."""
        count = min(self.room, len(data))
        source = np.frombuffer(data[:count], dtype=np.uint8)
        self._fault("before chunk.copy")
        np.copyto(self._target[self.filled : self.filled + count], source)
        self._fault("after chunk.copy")
        self.filled += count
        return count

    def envelope(self) -> Envelope:
        """The chunk's digests, once it holds all it will."""
        pieces = [self._view[at : min(at + BLOCK_BYTES, self.filled)] for at in range(0, self.filled, BLOCK_BYTES)]
        digests = [digest.hash_bytes(self._kind, piece) for piece in pieces]
        blocks = tuple(Block(block, STORE, len(piece)) for block, piece in zip(digests, pieces, strict=True))
        return Envelope(self._kind, digest.combine(self._kind, self.filled, digests), self.filled, blocks)


class Tiers:
    """One store's local tiers. Safe for use by many threads.

    Args:
        ram: The ram tier.
        nvme: The nvme tier; also where it is off, because something may be pending in it from before it was.
        flusher: How to reach the flusher.
        kind: The store's digests.
        has_nvme: Whether the nvme tier is on.
        gives_local: Whether a draft in the nvme tier has reached `Level.LOCAL`: its filesystem survives a crash.
        keeps_reads: Whether chunks that were read from the object tier are kept in the local ones: not where it is a
            directory of this host.
        passes_by: Whether a write that is to survive a crash of the host passes the local tiers by, because the object tier
            is the next one down and a directory of this host.
        capacity_timeout_s: How long a writer waits for room; ``None`` for as long as it takes.
        clock: Where time comes from.
        faults: Called before and after each ordered step of a writer, for tests to fail there.
    """

    def __init__(
        self,
        ram: RamTier,
        nvme: NvmeReader,
        flusher: Caller,
        *,
        kind: DigestKind,
        has_nvme: bool,
        gives_local: bool,
        keeps_reads: bool,
        passes_by: bool,
        capacity_timeout_s: float | None,
        clock: Clock,
        faults: Callable[[str], None] = no_faults,
    ) -> None:
        self.ram = ram
        self.nvme = nvme
        self.flusher = flusher
        self.has_nvme = has_nvme
        self.gives_local = gives_local
        self.keeps_reads = keeps_reads
        self.passes_by = passes_by
        self.counters: Counter[str] = Counter()
        self.away_until_s = 0.0  # on the clock: the object tier did not answer, and is not asked before
        self._flight = SingleFlight(ram.host.store_directory(ram.store) / "fetch.lock")
        self._keeper = Keeper(self.keep)
        self._kind = kind
        self._capacity_timeout_s = capacity_timeout_s
        self._clock = clock
        self._fault = faults
        self._keeping_house = 0  # the process in which a thread does
        self._lock = threading.Lock()
        self._decoded: dict[tuple[str, int, int], Draft] = {}
        self._said: set[str] = set()
        self._ended = threading.Event()
        self._boot = boot_id()
        self._starting = threading.Thread()  # has a flusher started
        self._unseen: frozenset[str] = frozenset()  # what could not be looked into the last time

    def __repr__(self) -> str:
        return f"Tiers(ram={self.ram!r}, nvme={self.nvme!r})"

    # -- what is pending -----------------------------------------------------------------------------------------------

    def pending(self, path: str) -> Pending | None:
        """The newest draft of ``path``, if any.

        Raises:
            CorruptionError: There is one, and it cannot be read; what was there before is no answer.
        """
        staged = [draft for draft in self._staged() if draft.path == path]
        item = self._ask_index(lambda: self.nvme.draft(path))
        stored = None if item is None else self._decode_stored(item)
        if stored is not None and (not staged or not self._is_newer(staged[-1], stored)):
            return Pending(stored, self._stored_level)
        return Pending(staged[-1], Level.STAGED) if staged else None

    def pending_below(self, path: str) -> dict[str, Pending]:
        """The newest draft of every path that is, or lies below, ``path``; all of them for ``""``.

        One that cannot be read is passed over, which is logged.
        """
        staged = [draft for draft in self._staged() if _is_below(draft.path, path)]
        stored = self._stored_below(path)
        readable = [(item.path, self._try_stored(item)) for item in stored]
        found = {name: Pending(draft, self._stored_level) for name, draft in readable if draft is not None}
        for draft in staged:
            other = found.get(draft.path)
            if other is None or self._is_newer(draft, other.draft):
                found[draft.path] = Pending(draft, Level.STAGED)
        return found

    def _is_newer(self, draft: Draft, other: Draft) -> bool:
        """Whether a draft in a slab was closed after one in the nvme tier; until its slot is marked clean it is in both."""
        return draft.turn(self._boot) > other.turn(self._boot)

    def is_settled(self, path: str) -> bool:
        """Whether nothing at or below ``path`` is pending, nor kept as a conflict."""
        if any(_is_below(draft.path, path) for draft in self._staged((SlotState.SEALED, SlotState.CONFLICT))):
            return False
        return not self._stored_below(path, conflicts=True)

    def conflicts(self) -> list[tuple[str, str]]:
        """Paths that somebody else changed before this host's change was published, and a word on each."""
        text = "changed by somebody else before it was flushed: theirs stands, this one is kept"
        found = [(draft.path, text) for draft in self._staged((SlotState.CONFLICT,))]
        stored = self._stored_below("", conflicts=True)
        return found + [(item.path, item.note) for item in stored if item.state == "conflict"]

    def kept(self, path: str) -> Draft | None:
        """The newest change of ``path`` that is kept because somebody else was faster."""
        found = [draft for draft in self._staged((SlotState.CONFLICT,)) if draft.path == path]
        stored = [item for item in self._stored_below(path, conflicts=True) if item.path == path]
        found += [
            draft for item in stored if item.state == "conflict" and (draft := self._try_stored(item)) is not None
        ]
        return found[-1] if found else None

    @property
    def owner(self) -> str:
        """This process, as the host knows it."""
        return self.ram.host.owner()

    @property
    def _stored_level(self) -> Level:
        return Level.LOCAL if self.gives_local else Level.STAGED

    def _look_around(self) -> None:
        """Have the flusher name the segments of other processes that have no file, where there are any."""
        unseen = self.ram.unseen()
        if not unseen or unseen == self._unseen or not self.flusher.is_running():
            return
        answer = self.flusher.request("segments", {})
        for number in answer["fds"]:
            self._look_into(int(answer["pid"]), int(number))
        self._unseen = self.ram.unseen()

    def _look_into(self, pid: int, number: int) -> None:
        name = f"/proc/{pid}/fd/{number}"
        try:
            # In another PID namespace this is somebody else's.
            if not os.readlink(name).startswith(f"/memfd:{self.ram.store[:8]}"):
                return
            with open(name, "rb+", buffering=0) as file:
                self.ram.add(Segment.attach_fd(file.fileno()))
        except (OSError, TierfsError) as error:
            self.fall_back("hidden_segments", "a slab of another process cannot be looked into: %s", error)

    def _staged(self, states: tuple[SlotState, ...] = (SlotState.SEALED,)) -> Iterator[Draft]:
        """Drafts in slabs, as they were closed."""
        self._look_around()
        for slot in self.ram.drafts(states):
            draft = self._decode_slot(slot)
            if draft is not None:
                yield draft

    def _decode_slot(self, slot: Slot) -> Draft | None:
        key = (slot.segment.id, slot.index, slot.serial)
        with self._lock:
            known = self._decoded.get(key)
        if known is not None:
            return known
        data = bytearray(slot.length)
        slot.segment.read(slot, 0, memoryview(data))
        if not slot.segment.is_still(slot):
            return None
        try:
            draft = Draft.decode(bytes(data), f"a draft in slab {slot.segment.id}")
        except TierfsError as error:
            self._say(f"draft:{key}", "a draft is passed over: %s", error)
            return None
        return self._remember(key, draft)

    def _stored_below(self, path: str, *, conflicts: bool = False) -> list[StoredDraft]:
        return self._ask_index(lambda: self.nvme.drafts_below(path, conflicts=conflicts))

    def _ask_index(self, look_up: Callable[[], Answer]) -> Answer:
        """Look up drafts; where the index is of no use, after a flusher, which is started for it, has made it anew."""
        for _ in range(REBUILDS_MAX):
            try:
                return look_up()
            except CorruptionError as error:
                self.fall_back(
                    "rebuilds_waited_for", "a flusher has to make the index of the nvme tier anew: %s", error
                )
            self.flusher.request("status", {})
        return look_up()

    def _decode_stored(self, stored: StoredDraft) -> Draft:
        key = ("nvme", stored.seq, 0)
        with self._lock:
            known = self._decoded.get(key)
        if known is not None:
            return known
        return self._remember(key, Draft.decode(stored.data, f"{stored.path}: draft {stored.seq} in the nvme tier"))

    def _try_stored(self, stored: StoredDraft) -> Draft | None:
        try:
            return self._decode_stored(stored)
        except (CorruptionError, FormatError) as error:
            self._say(f"stored:{stored.seq}", "a draft is passed over: %s", error)
            return None

    def _remember(self, key: tuple[str, int, int], draft: Draft) -> Draft:
        with self._lock:
            while len(self._decoded) >= DECODED_MAX:
                del self._decoded[next(iter(self._decoded))]
            self._decoded[key] = draft
        return draft

    # -- writing -------------------------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """See that a thread makes slabs ahead of need, and gives others their share while this process writes nothing."""
        with self._lock:
            if self._keeping_house == os.getpid():
                return
            self._keeping_house = os.getpid()
        ended = self._ended
        ram = weakref.ref(self.ram)

        def run() -> None:
            while not ended.wait(HOUSEKEEPING_S):
                tier = ram()
                if tier is None:
                    return
                tier.grow_ahead()
                tier.make_room_for_others()

        threading.Thread(target=run, name="tierfs-housekeeping", daemon=True).start()

    def begin_chunk(self, *, wait: bool = True) -> ChunkBuffer:
        """A chunk's room in a slab; seal it with `seal_chunk` or give it back with `drop`.

        Args:
            wait: Whether to wait for room.

        Raises:
            CapacityError: There is none, and none came in time.
        """
        self._keep_house()
        timeout_s = self._capacity_timeout_s if wait else 0
        self._fault("before chunk.take")
        slot = self.ram.take(SlotKind.CHUNK, CHUNK_BYTES, timeout_s=timeout_s, on_wait=self._nudge if wait else None)
        self._fault("after chunk.take")
        return ChunkBuffer(slot, slot.segment.view(slot), self._kind, self._fault)

    def seal_chunk(self, chunk: ChunkBuffer, *, state: SlotState = SlotState.SEALED, name: bytes = b"") -> Slot:
        """Hash a chunk and make it readable for the host, under ``name`` or its digest. May run on any thread."""
        envelope = chunk.envelope()
        name = name or bytes((self._kind,)) + envelope.digest
        self._fault("before chunk.seal")
        slot = chunk.slot.segment.seal(
            chunk.slot, name, envelope.encode(), length=chunk.filled, state=state, stamp_ns=self._stamp()
        )
        self._fault("after chunk.seal")
        return slot

    def drop(self, slot: Slot) -> None:
        """Give a chunk's room back."""
        slot.segment.give(slot)

    def seal_draft(self, draft: Draft) -> None:
        """Seal a draft: from now on it is pending, and the host sees it.

        Raises:
            CapacityError: There is no room for it, and none came in time.
        """
        room = len(draft.encode()) + STAMP_BYTES
        self._fault("before draft.take")
        slot = self.ram.take(SlotKind.DRAFT, room, timeout_s=self._capacity_timeout_s, on_wait=self._nudge)
        self._fault("after draft.take")
        stamp_ns = self._stamp()
        data = replace(draft, boot=self._boot, stamp_ns=stamp_ns).encode()
        slot.segment.view(slot)[: len(data)] = data
        self._fault("before draft.seal")
        slot.segment.seal(slot, draft.write_id, b"", length=len(data), state=SlotState.SEALED, stamp_ns=stamp_ns)
        self._fault("after draft.seal")

    def announce(self, *, wait: bool = True) -> None:
        """Tell the flusher that something was sealed; one is started where none runs.

        What is sealed is safe by itself, so a flusher that cannot be reached is no error, but logged and counted.

        Args:
            wait: Whether to wait until it is there, where it has to be started.
        """
        # Slabs without a file are safe from this process's end only once the flusher has them.
        if not wait and not self._descriptors() and not self.flusher.is_running():
            with self._lock:
                # One that is starting up looks at everything that is sealed by then.
                if not self._starting.is_alive():
                    self._starting = threading.Thread(target=self.announce, name="tierfs-announce", daemon=True)
                    self._starting.start()
            return
        self._fault("before announce")
        try:
            self._ask("draft", {}, timeout_s=ANNOUNCE_S)
        except (StoreError, TimeoutError) as error:
            if not self._ended.is_set():
                self.fall_back("unreachable_flusher", "nothing flushes what is pending until a flusher runs: %s", error)
        self._fault("after announce")

    def _ask(self, do: str, arguments: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Ask the flusher for something that may concern slabs of this process that have no file."""
        fds = self._descriptors()
        while len(fds) > DESCRIPTORS_MAX:
            self.flusher.request("draft", {}, fds=fds[:DESCRIPTORS_MAX])
            fds = fds[DESCRIPTORS_MAX:]
        return self.flusher.request(do, arguments, fds=fds, timeout_s=timeout_s)

    def spill(self, holder: str, slots: Sequence[Slot]) -> None:
        """Have the flusher take chunks of an unfinished file down, so that their room can be used again.

        Raises:
            TierfsError: It could not.
        """
        self.counters["spilled_bytes"] += sum(slot.length for slot in slots)
        self._say("spill", "the ram tier has no room for a whole file: it goes through it in waves")
        self._fault("before spill")
        for at in range(0, len(slots), NAMES_MAX):
            references = [(slot.segment.id, slot.index, slot.serial) for slot in slots[at : at + NAMES_MAX]]
            self._ask("spill", {"holder": holder, "slots": references})
        self._fault("after spill")

    def unhold(self, holder: str) -> None:
        """Say that a file whose chunks were spilled is given up. If that fails, they go when this process does."""
        try:
            self.flusher.request("unhold", {"holder": holder})
        except TierfsError as error:
            self.fall_back("kept_holds", "chunks of a file that was given up stay until this process ends: %s", error)

    def _descriptors(self) -> list[int]:
        """Of this process's segments that have no name in the file system, so that the flusher can map them."""
        return [segment.fd for segment in self.ram.own_segments() if segment.path is None]

    def _nudge(self) -> None:
        self.fall_back("waits_for_room", "the ram tier is full of what is not flushed yet: writers wait")
        self.announce()

    def _stamp(self) -> int:
        return int(self._clock.monotonic() * 1e9)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, path: str, level: Level, timeout_s: float | None = None, *, write_id: bytes | None = None) -> None:
        """Wait until what is pending at or below ``path``, or the one draft named, has reached ``level``.

        Raises:
            TimeoutError: It has not, in time.
            ConflictError: Somebody else changed the path; theirs stands.
            TierfsError: What keeps it from getting there.
        """
        if level <= Level.STAGED or self.is_settled(path):
            return
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        arguments: dict[str, Any] = {"path": path, "level": level.label}
        if write_id is not None:
            arguments["write_id"] = write_id.hex()
        while True:
            left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
            self._fault("before wait")
            # The flusher says what it waits for when time is up; one that says nothing is not waited for either.
            patience_s = None if left is None else left + ANNOUNCE_S
            self._ask("wait", {**arguments, "timeout_s": left}, timeout_s=patience_s)
            self._fault("after wait")
            # A flusher that did not know of the draft, however that came, would not have waited for it.
            found = self.pending(path) if write_id is not None else None
            if found is None or found.draft.write_id != write_id or found.level >= level:
                return
            if left == 0:
                raise TimeoutError(f"{path} has not reached {level.label!r} yet, and the flusher does not know of it")
            self._clock.sleep(ASK_AGAIN_S)

    def level(self, path: str) -> Level:
        """What the newest write of ``path`` on this host has reached."""
        pending = self.pending(path)
        return Level.OBJECT if pending is None else pending.level

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, name: bytes, raw_length: int, start: int, out: memoryview) -> str | None:
        """Copy verified bytes of a chunk into ``out`` from the nearest local tier that has them.

        Args:
            name: The chunk's local name.
            raw_length: Bytes of the whole chunk.
            start: First byte wanted, counted in the chunk.
            out: Where to; its length says how many. Undefined if no tier has them.

        Returns:
            The tier: ``"ram"`` or ``"nvme"``; ``None`` if neither has a good copy.
        """
        for tier, attempt in (("ram", self._read_ram), ("nvme", self._read_nvme)):
            for last in (False, True):
                try:
                    if attempt(name, raw_length, start, out):
                        self.counters[f"{tier}_read_bytes"] += len(out)
                        return tier
                    break
                except NotFoundError:
                    continue  # its segment went away while it was being read
                except (CorruptionError, FormatError) as error:
                    # The first time it may have been reused while it was read.
                    if last:
                        self._quarantine(tier, name, error)
        return None

    def read_through(
        self, name: bytes, raw_length: int, start: int, out: memoryview, fetch: Callable[[int, memoryview], None]
    ) -> None:
        """The same, from the object tier where no local one has a good copy; what is fetched then is kept here.

        A chunk of which a quarter or more is wanted is fetched whole, and once for all threads and processes of the
        host that want it meanwhile.

        Args:
            name: As for `read`; so are ``raw_length``, ``start`` and ``out``.
            raw_length: See there.
            start: See there.
            out: See there.
            fetch: Fills a buffer with the chunk's bytes from an offset on, verified, from the object tier. What it
                raises is passed on.
        """
        if self.read(name, raw_length, start, out) is not None:
            return
        if not self.keeps_reads or len(out) * WHOLE_FRACTION < raw_length:
            fetch(start, out)
            return
        with self._flight.holding(name) as waited:
            if waited and self.read(name, raw_length, start, out) is not None:
                return
            whole = out if len(out) == raw_length else memoryview(bytearray(raw_length))
            fetch(0, whole)
            if whole is not out:
                out[:] = whole[start : start + len(out)]
            self.insert(name, whole)

    def holds(self, name: bytes, tier: str) -> bool:
        """Whether ``"ram"`` or ``"nvme"`` seems to have a chunk."""
        if tier == "ram":
            return self.ram.find(name) is not None
        return self.nvme.find(name) is not None

    def _read_ram(self, name: bytes, raw_length: int, start: int, out: memoryview) -> bool:
        slot = self.ram.find(name)
        if slot is None:
            return False
        meta = slot.segment.meta(slot)
        if not slot.segment.is_still(slot):
            return self._read_ram(name, raw_length, start, out)
        envelope = self._envelope(name, raw_length, meta, "ram")
        targets = BlockTargets(raw_length, start, out)
        source = np.frombuffer(slot.segment.view(slot), dtype=np.uint8)
        for index in targets.blocks:
            block = targets.view(index)
            # Through the mapping: at the speed of a copy, where the system call takes twice as long.
            np.copyto(np.frombuffer(block, dtype=np.uint8), source[index * BLOCK_BYTES :][: len(block)])
            self._check(envelope, index, block, "ram")
        targets.finish()
        slot.segment.touch(slot)
        return True

    def _read_nvme(self, name: bytes, raw_length: int, start: int, out: memoryview) -> bool:
        targets = BlockTargets(raw_length, start, out)
        first, end = targets.blocks.start * BLOCK_BYTES, min(targets.blocks.stop * BLOCK_BYTES, raw_length)
        whole = first == start and end == start + len(out)
        buffer = out if whole else memoryview(bytearray(end - first))
        meta = self.nvme.read(name, first, buffer)
        if meta is None:
            return False
        envelope = self._envelope(name, raw_length, meta, "nvme")
        for index in targets.blocks:
            begin = index * BLOCK_BYTES - first
            self._check(envelope, index, buffer[begin : begin + BLOCK_BYTES], "nvme")
        if not whole:
            out[:] = buffer[start - first : start - first + len(out)]
        return True

    def _envelope(self, name: bytes, raw_length: int, meta: bytes, tier: str) -> Envelope:
        where = f"chunk {name.hex()} in the {tier} tier"
        header = len(meta)
        envelope = Envelope.decode(meta, where, stored_length=header + raw_length)
        if name[0] == self._kind and envelope.digest != name[1:]:
            raise CorruptionError(f"{where} is another chunk", tier=tier)
        return envelope

    def _check(self, envelope: Envelope, index: int, block: memoryview, tier: str) -> None:
        if digest.hash_bytes(self._kind, block) != envelope.blocks[index].digest:
            raise CorruptionError(
                f"chunk {envelope.digest.hex()} in the {tier} tier: block {index} is damaged", tier=tier
            )

    def _quarantine(self, tier: str, name: bytes, error: Exception) -> None:
        self.counters[f"{tier}_quarantined"] += 1
        _logger.error("a damaged copy is not used any more, the next tier is asked: %s", error)
        if tier == "ram":
            slot = self.ram.find(name)
            if slot is not None:
                slot.segment.hide(slot)
        elif self.flusher.is_running():
            self.flusher.request("quarantine", {"name": name.hex()})

    # -- caching -------------------------------------------------------------------------------------------------------

    def insert(self, name: bytes, data: memoryview) -> Slot | None:
        """Keep a clean copy of a chunk in the ram tier, if there is room without waiting.

        Where a flusher runs, it is had to copy it to the nvme tier as well; none is started for that.
        """
        try:
            slot = self.ram.take(SlotKind.CHUNK, len(data), timeout_s=0)
        except TierfsError:
            self.counters["ram_insert_refused"] += 1
            return None
        chunk = ChunkBuffer(slot, slot.segment.view(slot), self._kind)
        try:
            chunk.append(data)
            slot = self.seal_chunk(chunk, state=SlotState.CLEAN, name=name)
        except BaseException:
            self.drop(slot)
            raise
        if self.has_nvme and self.flusher.is_running():
            self._keeper.add(slot)
        return slot

    def keep(self, slots: Sequence[Slot]) -> int:
        """Have the flusher copy clean chunks to the nvme tier. Returns the bytes that lie there now."""
        if not self.has_nvme:
            return 0
        kept = 0
        for at in range(0, len(slots), NAMES_MAX):
            references = [(slot.segment.id, slot.index, slot.serial) for slot in slots[at : at + NAMES_MAX]]
            answer = self._ask("keep", {"slots": references})
            kept += int(answer["bytes"])
        return kept

    def evict(self, names: Sequence[bytes] | None, tier: str) -> int:
        """Drop clean copies of these chunks, or of all, from ``"ram"`` or ``"nvme"``. Returns the bytes dropped."""
        if tier == "nvme":
            if not self.has_nvme:
                return 0
            if names is None:
                return int(self.flusher.request("evict", {"names": None})["bytes"])
            batches = [names[at : at + NAMES_MAX] for at in range(0, len(names), NAMES_MAX)]
            answers = [self.flusher.request("evict", {"names": [name.hex() for name in batch]}) for batch in batches]
            return sum(int(answer["bytes"]) for answer in answers)
        wanted = None if names is None else set(names)
        dropped = self.ram.reap() if names is None else 0
        for segment in self.ram.segments():
            for slot in segment.slots(kind=SlotKind.CHUNK, states=(SlotState.CLEAN,)):
                if not slot.hidden and (wanted is None or slot.name in wanted):
                    segment.hide(slot)
                    dropped += slot.length
        return dropped

    # -- at the end ----------------------------------------------------------------------------------------------------

    def own_drafts(self) -> list[Draft]:
        """What this process closed and has not left its slabs yet, or the nvme tier's commit where there is none."""
        own = {segment.id for segment in self.ram.own_segments()}
        slots = [slot for slot in self.ram.drafts((SlotState.SEALED,)) if slot.segment.id in own]
        return [draft for draft in map(self._decode_slot, slots) if draft is not None]

    def close(self) -> None:
        """Let go of everything; what is pending stays for the next flusher."""
        self._ended.set()
        self.flusher.close()
        self.ram.close()
        self._flight.close()
        self.nvme.close()

    def fall_back(self, what: str, text: str, *arguments: object) -> None:
        """Count something that was done in a lesser way than it is meant to be, and log it the first time."""
        self.counters[what] += 1
        self._say(what, text, *arguments)

    def _say(self, what: str, text: str, *arguments: object) -> None:
        with self._lock:
            if what in self._said:
                return
            self._said.add(what)
        _logger.warning(text, *arguments)


def _is_below(path: str, directory: str) -> bool:
    return not directory or path == directory or path.startswith(f"{directory}/")
