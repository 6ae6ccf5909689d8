"""What was staged in one process, as another one has it that makes the file: the same memory, read-only, and a loan of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Protocol

from tierfs.errors import CorruptionError, NotFoundError, StoreError
from tierfs.format.manifest import Row
from tierfs.host.pending.record import SlotRef
from tierfs.host.slab.allocate import map_shared
from tierfs.host.slab.loans import BorrowedLoan
from tierfs.host.slab.segment import Segment
from tierfs.store.store import Store

__all__ = ["BorrowedFile", "LentChunk", "LentFile", "LentSegment"]


class _Descriptor(Protocol):
    """A descriptor on its way to a process that `multiprocessing` started."""

    def detach(self) -> int:
        """Have it, over there; the caller's to close."""


@dataclass(frozen=True, slots=True)
class LentSegment:
    """A segment that another process is to map.

    Attributes:
        id: Of the segment.
        file: Its path, or where it has none a descriptor.
    """

    id: str
    file: Path | _Descriptor = field(repr=False)

    @classmethod
    def of(cls, segment: Segment) -> LentSegment:
        """To be pickled for a process that `multiprocessing` started."""
        return cls(segment.id, DupFd(segment.fd) if segment.path is None else segment.path)


@dataclass(frozen=True, slots=True)
class LentChunk:
    """A chunk in a segment of another process, sealed.

    Attributes:
        slot: Where it is.
        row: What a manifest says of it.
        offset: Of its bytes in the segment.
    """

    slot: SlotRef
    row: Row
    offset: int


@dataclass(frozen=True, slots=True)
class LentFile:
    """Runs that one process staged, for one other process to save.

    Attributes:
        store: The store's uuid, as its ram tier has it.
        loan: The loan's file.
        segments: Where the chunks lie.
        runs: The chunks, side by side.
    """

    store: str
    loan: Path
    segments: tuple[LentSegment, ...]
    runs: tuple[tuple[LentChunk, ...], ...]


class BorrowedFile:
    """A file that another process staged. Its memory is mapped for as long as somebody refers to a view of it.

    Args:
        lent: As it came.

    Attributes:
        runs: The chunks of each run.
        views: The memory of each run. Who writes to it is killed: the chunks are hashed already.

    Raises:
        StoreError: It is not there any more.
    """

    def __init__(self, lent: LentFile) -> None:
        self._store, self._folder = lent.store, lent.loan.parent
        self.runs = lent.runs
        try:
            self._loan = BorrowedLoan(lent.loan)
            chunks = [chunk for run in lent.runs for chunk in run]
            maps = {segment.id: _mapped(segment, chunks) for segment in lent.segments}
        except (NotFoundError, CorruptionError) as error:
            raise StoreError(
                f"what another process staged is gone, as that gave it up or ended: stage it again ({error})",
                tier="ram",
            ) from error
        self.views = [_view(maps[run[0].slot.segment], run) for run in lent.runs]

    def __repr__(self) -> str:
        return f"BorrowedFile({len(self.runs)} runs)"

    def is_of(self, store: Store) -> bool:
        """Whether a file of this store can be made of it, in this process."""
        tiers = store.tiers
        return tiers is not None and tiers.ram.store == self._store and tiers.ram.loans.directory == self._folder

    def release(self) -> None:
        """Let go of the loan: what of it no draft names may be used again. The memory is not to be read from then on."""
        self._loan.release()


def _mapped(segment: LentSegment, chunks: Iterable[LentChunk]) -> memoryview:
    """A segment's memory, read-only.

    Raises:
        NotFoundError: One of the chunks is not there.
        StoreError, CorruptionError, FormatError: The segment cannot be opened.
    """
    if isinstance(segment.file, Path):
        attached = Segment.attach(segment.file)
    else:
        fd = segment.file.detach()
        try:
            attached = Segment.attach_fd(fd)
        finally:
            os.close(fd)
    try:
        if attached.id != segment.id:
            raise NotFoundError(f"{attached} is another segment than what was lent", tier="ram")
        for chunk in chunks:
            slot = attached.slot(chunk.slot.index)
            if chunk.slot.segment == segment.id and (slot is None or slot.serial != chunk.slot.serial):
                raise NotFoundError(f"a chunk was taken from {attached}", tier="ram")
        return map_shared(attached.fd, attached.size, writable=False)
    finally:
        attached.close()


def _view(whole: memoryview, run: tuple[LentChunk, ...]) -> memoryview:
    return whole[run[0].offset : run[-1].offset + run[-1].row.raw_length]
