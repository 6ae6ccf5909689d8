"""Chunks in this process's part of the ram tier that a save need not move over the link from the GPU again."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from tierfs.dcp.save.copy import copy_ranges
from tierfs.device.transfer import FillChunks
from tierfs.digest import DigestKind, digests_of
from tierfs.errors import NotFoundError
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment, Slot
from tierfs.host.slab.table import DATA_STATES, SlotKind
from tierfs.host.tiers import Tiers
from tierfs.store import Store


def filler(store: Store) -> FillChunks | None:
    """Return a function that fills memory with chunks of this process's part of the ram tier.

    The bytes are checked when they are sealed.
    """
    tiers = store.tiers
    if tiers is None or store.descriptor.digest_kind is not DigestKind.XXH3_128:
        return None
    ram = tiers.ram

    def fill(chunks: Sequence[tuple[bytes, torch.Tensor]]) -> list[bool]:
        wanted = {digest for digest, _ in chunks}
        found: dict[bytes, tuple[Slot, int]] = {}
        memories = []  # stay mapped during the copy
        for segment, slots in _chunks_in(ram, wanted):
            memories.append(np.frombuffer(segment.whole(), np.uint8))
            found.update((slot.name[1:], (slot, memories[-1].ctypes.data + slot.offset)) for slot in slots)
        copies = [
            (there[0], (target.data_ptr(), there[1], there[0].length))
            if (there := found.get(digest)) is not None and there[0].length == len(target)
            else None
            for digest, target in chunks
        ]
        copy_ranges(np.array([copy for _, copy in filter(None, copies)], np.uint64).reshape(-1, 3))
        return [copy is not None and copy[0].segment.is_still(copy[0]) for copy in copies]

    return fill


def _chunks_in(ram: RamTier, wanted: Collection[bytes]) -> Iterator[tuple[Segment, list[Slot]]]:
    """Yield each segment of this process, with its slots of chunks that have these digests."""
    for segment in ram.own_segments():
        with contextlib.suppress(NotFoundError):  # another thread closed it
            slots = segment.slots(kind=SlotKind.CHUNK, states=DATA_STATES)
            yield segment, [slot for slot in slots if not slot.hidden and slot.name[1:] in wanted]


def hide_damaged(tiers: Tiers, digest: bytes) -> None:
    """Let no later save copy a chunk from a damaged slot of this process."""
    for segment, slots in _chunks_in(tiers.ram, {digest}):
        for slot in slots:
            if digests_of(DigestKind.XXH3_128, segment.view(slot))[1] != digest and segment.hide(slot):
                tiers.counters["ram_quarantined"] += 1
