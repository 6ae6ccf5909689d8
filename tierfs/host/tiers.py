"""The local tiers of one store, as seen by a process that uses them: pending drafts, chunks, and the flusher.

This module combines four parts. `PendingDrafts` knows the pending changes. `SlabWriter` writes chunks and drafts into
slabs. `ChunkSources` reads chunks. `ChunkCache` keeps copies of remote chunks. Waiting for a level is implemented
here, because it needs the drafts, the ram tier and the flusher.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tierfs.clock import Clock
from tierfs.digest import DigestKind
from tierfs.errors import ConflictError, StoreError, TierfsError
from tierfs.host.chunk_cache import ChunkCache
from tierfs.host.chunk_sources import ChunkSources, ChunkTier, FileChunks, RamChunks
from tierfs.host.events import Counters, no_faults
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.pending.levels import Level
from tierfs.host.pending.scan import PendingDrafts
from tierfs.host.rpc.client import ANSWER_S, FlusherClient, NoAnswerError
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.table import SlotKind, SlotState
from tierfs.host.write.writer import ANNOUNCE_S, SlabWriter
from tierfs.units import format_bytes

if TYPE_CHECKING:
    from tierfs.host.pending.record import Draft

ASK_AGAIN_S = 0.05  # pause before the next request to a flusher that did not know the draft


class RemoteDrafts(ChunkTier, Protocol):
    """A tier that holds other hosts' changes until they are published, and their chunks. Thread-safe."""

    def drafts(self, path: str) -> Sequence[Draft]:
        """Return the changes of a path that may not be published yet, in no order."""

    def paths_below(self, path: str) -> Sequence[str]:
        """Return the paths at or below ``path`` that `drafts` has changes of."""

    def silent(self, name: bytes) -> str:
        """Return the holders of a chunk that did not answer just now, in words; empty if all have answered."""

    def problems(self) -> Mapping[str, str]:
        """Connect to each holder. Return what failed by the holder's name; empty text if nothing did."""

    def close(self) -> None: ...


class Tiers:
    """One store's local tiers. Thread-safe.

    Args:
        nvme: The nvme tier; also if it is off, because it may hold pending drafts from before.
        flusher: Client of the flusher.
        kind: The store's kind of digest.
        has_nvme: Whether the nvme tier is on.
        gives_local: Whether a draft in the nvme tier has reached `Level.LOCAL`: its filesystem survives a crash.
        keeps_reads: Whether to keep chunks read from the object tier. Off if that is a directory of this host.
        shares_reads: See `ChunkCache`.
        passes_by: Whether a write for `Level.LOCAL` goes straight to the object tier, because that is the next tier
            down and a directory of this host.
        clock: Source of time.
        problems: Why this host cannot provide a requested tier, by the tier's name.

    Attributes:
        remote: What other hosts hold; None if that is off.
        away_until_s: Time on ``clock`` until which the object tier is not asked, because it did not answer.
    """

    def __init__(
        self,
        ram: RamTier,
        nvme: NvmeReader,
        flusher: FlusherClient,
        *,
        kind: DigestKind,
        has_nvme: bool,
        gives_local: bool,
        keeps_reads: bool,
        shares_reads: bool = False,
        passes_by: bool,
        clock: Clock,
        problems: Mapping[str, str] | None = None,
    ) -> None:
        self.problems = dict(problems or {})
        self.ram = ram
        self.nvme = nvme
        self.flusher = flusher
        self.has_nvme = has_nvme
        self.passes_by = passes_by
        self.remote: RemoteDrafts | None = None
        self.counters = counters = Counters()
        self.away_until_s = 0.0
        self.is_closed = False
        self._clock = clock
        self._fault = no_faults  # tests fail there
        self._ended = threading.Event()
        stored_level = Level.LOCAL if gives_local else Level.STAGED
        self.drafts = PendingDrafts(ram, nvme, counters, stored_level=stored_level)
        near = RamChunks(ram, counters), FileChunks(nvme, self._quarantine, counters)
        self.sources = ChunkSources(kind, near, counters)
        self.writer = SlabWriter(ram, flusher, counters, kind=kind, clock=clock, ended=self._ended)
        self.cache = ChunkCache(
            ram,
            self.sources,
            self.writer,
            flusher,
            counters,
            kind=kind,
            has_nvme=has_nvme,
            keeps_reads=keeps_reads,
            shares_reads=shares_reads,
        )

    def join(self, remote: RemoteDrafts) -> None:
        """Also read what other hosts hold."""
        self.remote = remote
        self.sources.tiers.append(remote)

    def wait(self, path: str, level: Level, timeout_s: float | None = None, *, write_id: bytes | None = None) -> None:
        """Wait until the pending changes at or below ``path``, or the one of ``write_id``, have reached ``level``.

        Raises:
            TimeoutError: They did not in time. The message names what is pending, and says so if the flusher does not
                answer.
            ConflictError: Another writer changed the path; that change stands.
            TierfsError: The reason why a change cannot reach the level.
        """
        if level <= Level.STAGED:
            return
        # About one draft, a running flusher knows more than a look at all that is pending. If all is safe already, none
        # is started.
        if (write_id is None or not self.flusher.is_running()) and self.drafts.is_settled(path):
            return
        awaited = self._below(level, path, write_id) if write_id is None else None
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        arguments: dict[str, Any] = {"path": path, "level": level.label}
        if write_id is not None:
            arguments["write_id"] = write_id.hex()
        while True:
            left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
            self._fault("before wait")
            # The flusher reports at the timeout. If it stays silent, stop waiting for its answer, too.
            patience_s = None if left is None else left + ANSWER_S
            try:
                answer = self.flusher.request("wait", {**arguments, "timeout_s": left}, timeout_s=patience_s)
            except NoAnswerError as error:
                still = self._below(level, path, write_id) if awaited is None else awaited
                raise TimeoutError(f"{_described(still, path, level)}: {error}") from error
            self._fault("after wait")
            # Only the flusher knows what other hosts hold.
            if (write_id is not None or level is Level.PEER) and answer.get("known") is True:
                return
            # A flusher that did not know a draft, for whatever reason, has not waited for it: check.
            still = self._below(level, path, write_id)
            awaited = still if awaited is None else {key: length for key, length in awaited.items() if key in still}
            if not awaited:
                return
            self._check_removed(awaited)
            if left == 0:
                raise TimeoutError(f"{_described(awaited, path, level)}, and the flusher does not know of it")
            self._clock.sleep(ASK_AGAIN_S)

    def level(self, path: str) -> Level:
        """Return the level of the newest change of ``path``; `Level.OBJECT` if none is pending.

        Raises:
            StoreError, CorruptionError: As `PendingDrafts.level`.
        """
        level = self.drafts.level(path)
        pending = self.drafts.pending(path) if self.remote is not None and Level.NONE < level < Level.PEER else None
        if pending is not None and self.flusher.is_running():
            with contextlib.suppress(
                TimeoutError, ConflictError
            ):  # it is not held elsewhere yet, or kept as a conflict
                self.wait(path, Level.PEER, 0)
                return max(Level.PEER, self.drafts.level(path))
        return level

    def _check_removed(self, awaited: Collection[tuple[str, bytes]]) -> None:
        """Check that none of these drafts, which the flusher does not know, lies in a segment whose file was removed.

        Raises:
            StoreError: One does, and no flusher will ever find it.
        """
        removed = [
            slot.name
            for segment in self.ram.removed_segments()
            for slot in segment.slots(kind=SlotKind.DRAFT, states=(SlotState.SEALED,))
        ]
        for path, write_id in awaited:
            if write_id in removed:
                raise StoreError(
                    f"{path}: the shared memory that it was staged in was removed before the flusher saw it: write it again",
                    path=path,
                    tier="ram",
                )

    def _below(self, level: Level, path: str, write_id: bytes | None) -> dict[tuple[str, bytes], int]:
        """Return the lengths of drafts at or below ``path`` that have not reached ``level``, by path and write id.

        With ``write_id``, consider only that draft.
        """
        if write_id is None:
            found = self.drafts.pending_below(path)
        else:
            one = self.drafts.pending(path)
            found = {path: one} if one is not None and one.draft.write_id == write_id else {}
        return {(name, one.draft.write_id): one.draft.length for name, one in found.items() if one.level < level}

    def report_damage(self, key: str) -> None:
        """Tell the flusher, if one runs, that a chunk object is damaged or missing: it may rely on it."""
        self._tell("report_damage", {"key": key}, "the flusher was not told of a damaged chunk: %s")

    def _quarantine(self, name: bytes, length: int) -> None:
        """Tell the flusher, if one runs, that a copy in the nvme tier is damaged: only the flusher may remove it."""
        arguments = {"name": name.hex(), "length": length}
        self._tell("quarantine", arguments, "the flusher was not told of a damaged copy: %s")

    def _tell(self, do: str, arguments: dict[str, Any], text: str) -> None:
        if self.flusher.is_running():
            try:
                self.flusher.request(do, arguments, timeout_s=ANNOUNCE_S)
            except (TierfsError, TimeoutError) as error:
                self.counters.fall_back("kept_damage", text, error)

    def close(self) -> None:
        """Release everything. Pending changes stay for the next flusher."""
        self.is_closed = True
        self._ended.set()
        if self.remote is not None:
            self.remote.close()
        self.flusher.close()
        self.ram.close()
        self.writer.close()
        self.cache.close()


def _described(awaited: Mapping[tuple[str, bytes], int], path: str, level: Level) -> str:
    """Describe files that have not reached a level, as seen without the flusher; if none is seen, describe ``path``."""
    if not awaited:
        return f"changes pending below {path!r} have not reached {level.label!r} yet"
    first = min(name for name, _ in awaited)
    if len(awaited) == 1:
        return f"{first} has not reached {level.label!r} yet"
    size = format_bytes(sum(awaited.values()))
    return f"{len(awaited)} files ({size}) have not reached {level.label!r} yet, {first} among them"
