"""The values that the nvme tier returns: drafts and usage, and the error for missing chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.errors import ConflictError

TIER, CHUNKS, DRAFTS, HOLDS = "nvme", "chunks", "drafts", "holds"
"""The tier's directory in the store's directory, and the directories in it."""
BUDGET_BYTES_MIN = 256 << 10
"""The smallest budget of an nvme tier."""


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """A draft in the nvme tier.

    Attributes:
        seq: The position in closing order.
        write_id: Identifies the change.
        path: Relative to the store.
        data: The encoded draft; empty if its batch is damaged, see ``state``. Then the path is empty, too.
        state: ``pending``. ``conflict``: another writer changed the path first. ``damaged``: its batch is damaged, or
            the tier lacks a chunk that only it had. In the latter case the draft becomes pending again when the chunk
            is written again.
        note: The reason for the state, for the user.
        at_ns: When the draft was stored, wall clock.
    """

    seq: int
    write_id: bytes
    path: str
    data: bytes
    state: str
    note: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class NvmeUsage:
    """The usage of the nvme tier, in bytes of its files.

    Attributes:
        budget_bytes: The budget.
        used_bytes: Dirty and clean chunks, and drafts.
        dirty_bytes: Drafts, chunks that a draft or an open file needs, and chunks that are being written.
        clean_bytes: Chunks that may be evicted.
        chunks: Number of chunks.
        drafts: Number of pending and damaged drafts.
        conflicts: Number of drafts that are kept because of a conflict.
        damaged: Number of damaged drafts.
        evicted_bytes: Bytes evicted since the tier was opened.
        fallbacks: Counts of fallbacks and unexpected conditions, by kind.
        gives_local: Whether stored data survives a crash of the host.
    """

    budget_bytes: int
    used_bytes: int
    dirty_bytes: int
    clean_bytes: int
    chunks: int
    drafts: int
    conflicts: int
    damaged: int
    evicted_bytes: int
    gives_local: bool
    fallbacks: Mapping[str, int] = field(default_factory=dict)


class ChunksGoneError(ConflictError):
    """The tier lacks chunks that a draft needs. The caller writes them again, then commits again.

    Attributes:
        names: The names of the missing chunks.
    """

    def __init__(self, directory: Path, names: Iterable[bytes]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"{directory}: {len(self.names)} chunks are missing, {self.names[0].hex()} the first: write them again, "
            "then commit again",
            tier="nvme",
        )
