"""Load chunks of the local tiers through a GPU's memory, where their blocks are verified.

Host threads only copy a chunk into page-locked memory. The GPU receives it in memory of its own, hashes it there, and
copies its parts to their tensors.

`roll_back` loads a save that is still in the device tier from there, device to device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from tierfs.dcp.columns import SavedItem
from tierfs.dcp.load.shards import FileRange, ShardFiles
from tierfs.dcp.tensorbytes import has_shared_elements, narrowed
from tierfs.device.accelerator import GPU_FAILURES, Accelerator
from tierfs.device.kernel_launch import cut_blocks
from tierfs.device.tier import DeviceTier, Generation, device_tiers
from tierfs.digest import CHUNK_BYTES
from tierfs.threads import processors, transfers

_logger = logging.getLogger("tierfs.dcp")


class Uploads:
    """Two sets of buffers of one chunk each: one is filled while the other is copied. Not thread-safe.

    For few bytes in all (``length``) it takes few buffers.
    """

    def __init__(self, accelerator: Accelerator, length: int) -> None:
        self.accelerator = accelerator
        self.count = max(1, min(processors().count, -(-length // (2 * CHUNK_BYTES))))
        memory = accelerator.host_memory(2 * self.count * CHUNK_BYTES)
        self._sets = [memory[: self.count * CHUNK_BYTES], memory[self.count * CHUNK_BYTES :]]
        self._events: list[Any] = [None, None]
        self._used = 0

    def lend(self) -> memoryview | None:
        """Return a buffer of the set that is being filled. ``None`` if all its buffers are in use."""
        if self._used == self.count:
            return None
        event = self._events[0]
        if event is not None:  # copies from this set may still be in flight
            event.synchronize()
            self._events[0] = None
        begin = self._used * CHUNK_BYTES
        self._used += 1
        return memoryview(self._sets[0][begin : begin + CHUNK_BYTES].numpy())

    def swap(self) -> None:
        """Switch to the other set. Call it once the copies from all lent buffers are queued on the current stream."""
        if self._used:
            self._events[0] = self.accelerator.record(self.accelerator.current())
            self._sets.reverse()
            self._events.reverse()
            self._used = 0

    def finish(self) -> None:
        for event in self._events:
            if event is not None:
                event.synchronize()

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from a tensor in a lent buffer to the device. The dtype is converted."""
        with torch.no_grad():
            self.accelerator.send(target, source)


SHARE_MIN = 0.5
"""The wanted fraction of a chunk for which it is copied whole. Of other chunks the host reads the wanted blocks."""


@dataclass(slots=True)
class _WantedChunk:
    file: str
    number: int
    length: int
    owners: list[int] = field(default_factory=list)  # of each piece, the index of its part
    starts: list[int] = field(default_factory=list)  # of each piece, its offset in the chunk
    targets: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        """Whether enough of the chunk is wanted to copy all of it."""
        return sum(map(len, self.targets)) >= SHARE_MIN * self.length


_Sent: TypeAlias = tuple[Sequence[tuple[_WantedChunk, bytes, torch.Tensor]], Callable[[], bytes]]
"""Chunks that are queued for the GPU, and a function that waits for the digests of their blocks there.

Each chunk comes with the digests that its blocks should have, and its memory on the GPU.
"""


class GpuChunks:
    """Loads parts of files into one GPU, on its current stream. Not thread-safe.

    The first chunk that is sent allocates as much memory on the GPU as the buffers have.
    """

    def __init__(self, files: ShardFiles, uploads: Uploads) -> None:
        self._files = files
        self._uploads = uploads
        self._accelerator = uploads.accelerator
        self._memory: list[torch.Tensor] = []  # two sets, like the buffers: see `load`

    def load(self, parts: Sequence[FileRange]) -> set[int]:
        """Load parts whose chunks are in a local tier and intact. Returns when they are in place.

        Args:
            parts: Each into uint8 of one dimension in the GPU's memory.

        Returns:
            The indexes of the parts that were not loaded, or not wholly. The caller reads them, which reports damage.

        Raises:
            CapacityError: The GPU has no memory for chunks.
            TierfsError: A file could not be opened.
        """
        chunks = self._chunks_of(parts)
        missed = {owner for chunk in chunks if not chunk.is_wanted for owner in chunk.owners}
        sent: _Sent | None = None
        for at in range(0, len(chunks), self._uploads.count):
            # The caller reads a missed part anyway, so a chunk of missed parts alone is not copied.
            batch = [chunk for chunk in chunks[at : at + self._uploads.count] if not missed.issuperset(chunk.owners)]
            copied = self._copy(batch)  # while the batch before travels
            # This batch begins to travel before the host looks at the batch before, so the link is never idle.
            before, sent = sent, self._send(batch, copied, missed)
            self._finish(before, missed)
        self._finish(sent, missed)
        self._accelerator.record(self._accelerator.current()).synchronize()
        return missed

    def _chunks_of(self, parts: Sequence[FileRange]) -> list[_WantedChunk]:
        found: dict[tuple[str, int], _WantedChunk] = {}
        for owner, part in enumerate(parts):
            for number, length, pieces in self._files.cut(part.file, part.at, part.out):
                chunk = found.setdefault((part.file, number), _WantedChunk(part.file, number, length))
                for start, target in pieces:
                    chunk.owners.append(owner)
                    chunk.starts.append(start)
                    chunk.targets.append(target)
        return list(found.values())

    def _copy(self, batch: Sequence[_WantedChunk]) -> list[tuple[memoryview, bytes | None]]:
        """Copy chunks to page-locked memory. Returns the memory, and the digests that the blocks should have."""
        memory = []
        for chunk in batch:
            buffer = self._uploads.lend()
            assert buffer is not None
            memory.append(buffer[: chunk.length])

        def copy(number: int) -> bytes | None:
            digests = self._files.copy_chunk(batch[number].file, batch[number].number, memory[number])
            return None if digests is None else b"".join(digests)

        return list(zip(memory, transfers().map(copy, range(len(batch))), strict=True))

    def _send(
        self, batch: Sequence[_WantedChunk], copied: Sequence[tuple[memoryview, bytes | None]], missed: set[int]
    ) -> _Sent | None:
        sent = []
        for place, (chunk, (source, digests)) in enumerate(zip(batch, copied, strict=True)):
            if digests is None:
                missed.update(chunk.owners)
                continue
            if not self._memory:
                room = self._accelerator.allocate(2 * self._uploads.count * CHUNK_BYTES)
                self._memory = list(room.split(self._uploads.count * CHUNK_BYTES))
            memory = self._memory[0][place * CHUNK_BYTES :][: chunk.length]
            self._uploads.put(memory, torch.frombuffer(source, dtype=torch.uint8))
            sent.append((chunk, digests, memory))
        wait = None
        if sent:
            blocks = [cut_blocks(memory.data_ptr(), chunk.length) for chunk, _, memory in sent]
            addresses, lengths = (np.concatenate(column) for column in zip(*blocks, strict=True))
            wait = self._accelerator.hash(self._accelerator.current(), addresses, lengths)
            self._memory.reverse()
        self._uploads.swap()
        return None if wait is None else (sent, wait)

    def _finish(self, sent: _Sent | None, missed: set[int]) -> None:
        """Verify chunks that were sent, and queue the copies to their tensors."""
        if sent is None:
            return
        found = sent[1]()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        at = 0
        for chunk, digests, memory in sent[0]:
            if found[at : at + len(digests)] == digests:
                targets += chunk.targets
                sources += [
                    memory[start : start + len(target)]
                    for start, target in zip(chunk.starts, chunk.targets, strict=True)
                ]
            else:
                missed.update(chunk.owners)
                self._files.fall_back(
                    "gpu_mismatch", "a chunk has wrong digests in the GPU's memory: the host reads it again"
                )
            at += len(digests)
        with torch.no_grad():
            self._accelerator.copy(targets, sources)


def roll_back(
    save_id: str, wanted: Sequence[tuple[Any, SavedItem]], planner: Any
) -> tuple[list[tuple[Any, SavedItem]], int]:
    """Load the items that lie in a device tier of this process.

    All bytes of the snapshot are verified before any is copied.

    Returns:
        The items that have to be read elsewhere, and the number of bytes copied.
    """
    rest, copied = list(wanted), 0
    for tier in device_tiers():
        generation = tier.hold(save_id)
        if generation is None:
            continue
        is_intact = True
        try:
            is_intact = tier.is_intact(generation)
            if is_intact:
                rest, count = _copy(tier, generation, rest, planner)
                copied += count
            else:
                _logger.warning(
                    "save %s is in GPU memory but cannot be verified there (CuPy is missing, or the memory was "
                    "overwritten): loading it from the next tier",
                    save_id,
                )
        except GPU_FAILURES as error:
            _logger.warning(
                "save %s is in GPU memory but cannot be copied there: loading it from the next tier: %s", save_id, error
            )
        finally:
            tier.give(generation, drained=is_intact)
    return rest, copied


def _copy(
    tier: DeviceTier, generation: Generation, wanted: Sequence[tuple[Any, SavedItem]], planner: Any
) -> tuple[list[tuple[Any, SavedItem]], int]:
    rest: list[tuple[Any, SavedItem]] = []
    done: list[tuple[Any, torch.Tensor]] = []
    sources: list[torch.Tensor] = []
    accelerator = tier.accelerator
    for item, saved in wanted:
        spot = generation.items.get(item.storage_index) if saved.dtype is not None else None
        source = None if spot is None else generation.tensor(spot)
        if source is None or source.dtype != saved.dtype or tuple(source.shape) != tuple(saved.sizes):
            rest.append((item, saved))
            continue
        target = planner.resolve_tensor(item).detach()
        part = narrowed(source, item.storage_offsets, item.lengths)
        is_alike = target.dtype == part.dtype and target.shape == part.shape and target.layout is torch.strided
        if not (accelerator.owns(target) and is_alike) or has_shared_elements(target):
            rest.append((item, saved))
            continue
        done.append((item, target))
        sources.append(part)
    with torch.no_grad():
        accelerator.copy([target for _, target in done], sources)
    # Wait, before a snapshot on another stream may overwrite the generation.
    accelerator.record(accelerator.current()).synchronize()
    for item, target in done:
        if not target.is_inference():
            torch.autograd.graph.increment_version(target)  # torch did not see the write to its memory
        planner.commit_tensor(item, target)
    return rest, sum(source.nbytes for source in sources)
