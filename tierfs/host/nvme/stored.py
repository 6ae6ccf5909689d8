"""The values that the nvme tier returns: drafts and usage, and the error for missing chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.errors import ConflictError

ARENA_FILE = "nvme.arena"
BUDGET_BYTES_MIN = 256 << 10
"""The smallest budget of an nvme tier: four extents."""
INDEX_FILE = "nvme.db"
USED_FILE = "nvme.used"
PATHS_FILE = "nvme.paths"


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """A draft in the nvme tier.

    Attributes:
        seq: The position in closing order.
        write_id: Identifies the change.
        path: Relative to the store.
        data: The encoded draft; empty if the draft is lost, see ``state``.
        state: ``pending``. ``conflict``: another writer changed the path first. ``damaged``: the draft, or a chunk that
            only this tier had, is missing or damaged. If only chunks are damaged, the draft becomes pending again when
            they are written again.
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


DRAFT_COLUMNS = "seq, write_id, path, data, state, note, at_ns"


@dataclass(frozen=True, slots=True)
class NvmeUsage:
    """The usage of the nvme tier, in bytes of the arena.

    Attributes:
        budget_bytes: The budget.
        used_bytes: Dirty and clean chunks, drafts, and chunks that are being written.
        dirty_bytes: Drafts, chunks that a draft or an open file needs, and uncommitted chunks.
        clean_bytes: Chunks that may be evicted.
        chunks: Number of committed chunks.
        drafts: Number of pending and damaged drafts.
        conflicts: Number of drafts that are kept because of a conflict.
        damaged: Number of damaged drafts.
        evicted_bytes: Bytes evicted since the tier was opened.
        fallbacks: Counts of fallbacks and unexpected conditions, by kind.
        gives_local: Whether committed data survives a crash of the host.
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
