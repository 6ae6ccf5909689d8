"""The values that the nvme tier returns: drafts, usage, and chunks that are gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.errors import ConflictError

__all__ = ["ChunksGoneError", "NvmeUsage", "StoredDraft"]

ARENA_FILE = "nvme.arena"
BUDGET_BYTES_MIN = 256 << 10
"""The smallest budget of an nvme tier: four extents."""
INDEX_FILE = "nvme.db"
USED_FILE = "nvme.used"
PATHS_FILE = "nvme.paths"


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """A file that was closed on this host and is not in the object tier yet.

    Attributes:
        seq: Its place in the order of closing.
        write_id: Names the change.
        path: In the store.
        data: The draft, encoded; empty where it is lost, see ``state``.
        state: ``pending``; ``conflict``: somebody else changed the file first; ``damaged``: a chunk that only this tier had
            is missing or wrong, or the draft is. A damaged draft is pending again once its chunks were written anew.
        note: Why, for a person.
        at_ns: When it was stored, wall clock.
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
        budget_bytes: Its budget.
        used_bytes: Dirty, clean, and being written.
        dirty_bytes: Needed by a draft or by an open file, or not committed yet; drafts themselves, too.
        clean_bytes: May be evicted.
        chunks: How many are committed.
        drafts: How many are pending or damaged.
        conflicts: How many drafts are kept because of a conflict.
        damaged: How many drafts lack a chunk.
        evicted_bytes: Since the tier was opened.
        fallbacks: How often what was not hoped for, by what it was.
        gives_local: Whether what is committed outlives a crash of the host.
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
    """Chunks that a draft needs are not in this tier, or not any more: write them again, then commit again.

    Attributes:
        names: These chunks'.
    """

    def __init__(self, directory: Path, names: Iterable[bytes]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"{directory}: {len(self.names)} chunks are not there (any more), {self.names[0].hex()} the first: write them "
            "again, then commit again",
            tier="nvme",
        )
