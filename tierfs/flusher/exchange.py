"""The seam for a satellite that holds changes on other hosts: its use by the flusher and the processes of a host.

A `Replication` comes from the settings. The flusher runs its `DraftExchange`, which sends this host's drafts and lends a
`LentRoom` to those of other hosts. Readers ask its `tierfs.host.tiers.RemoteDrafts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tierfs.clock import Clock
    from tierfs.flusher.queue import FlushItem
    from tierfs.flusher.state import FlushState
    from tierfs.host.events import Counters
    from tierfs.host.host import Host
    from tierfs.host.nvme.tier import NvmeTier
    from tierfs.host.rpc.client import FlusherClient
    from tierfs.host.tiers import RemoteDrafts


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


class Replication(Protocol):
    """The settings of such an exchange."""

    def arguments(self) -> list[str]:
        """Return these settings as arguments of ``tierfs flusher run``."""

    def remote(
        self, directory: Path, store: str, flusher: FlusherClient, counters: Counters, clock: Clock, *, is_near: bool
    ) -> RemoteDrafts:
        """Return the tier of what other hosts hold. ``is_near`` says whether the object tier is on this host."""

    def exchange(self, state: FlushState, host: Host, store: str) -> DraftExchange:
        """Return this host's part. Raises a `TierfsError` if it cannot take part."""
