"""The seam for a satellite that holds changes on other hosts, as the flusher sees it.

The `tierfs.flusher.engine.Replication` of the settings makes the flusher's `DraftExchange`, and the tier that readers ask:
`tierfs.host.tiers.RemoteDrafts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tierfs.flusher.queue import FlushItem
    from tierfs.host.nvme.tier import NvmeTier


class LentRoom(Protocol):
    """The drafts of other hosts, and tiers of files with their chunks. Thread-safe. Unknown write ids are ignored."""

    @property
    def tiers(self) -> Sequence[NvmeTier]: ...

    def finish(self, write_ids: Sequence[bytes]) -> None:
        """Note that this host has published drafts, and remove them. Their owner may send them again."""

    def forget(self, write_ids: Sequence[bytes]) -> None:
        """Remove drafts whose owner knows that they are published, or that are discarded."""

    def keep_as_conflict(self, write_id: bytes, note: str) -> None:
        """Mark a draft as a conflict: this host could not publish it, because another writer had changed the path."""


class DraftExchange(Protocol):
    """A host's part in an exchange of drafts with others. Thread-safe."""

    @property
    def room(self) -> LentRoom: ...

    def start(self) -> None:
        """Start the threads. Call it after the queue has the drafts that an earlier flusher left."""

    def stop(self) -> None:
        """End the threads and the connections. The caller has set ``stopping``."""

    def hosts(self) -> dict[str, Any]:
        """Wait until this host's processes can find the other hosts, or that has failed. Count these hosts."""

    def is_busy(self) -> bool:
        """Return whether this host holds drafts for others, or has to tell a host that drafts are published."""

    def report(self) -> dict[str, Any]:
        """Return what is held here and elsewhere, as plain values. The caller holds the lock."""

    def may_publish(self, entry: FlushItem) -> bool:
        """Return whether another host's draft is still held here, and its owner is gone or does not have it."""

    def tell_gone(self, entries: Sequence[FlushItem]) -> None:
        """Tell the holders of drafts that these are published, or discarded. Those that do not answer hear it later."""
