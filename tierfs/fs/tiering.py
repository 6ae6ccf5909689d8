"""How safe what was written is, where it lies, and moving it between tiers."""

from __future__ import annotations

from typing import Any

from tierfs import store as verbs
from tierfs.fs.changing import Changing
from tierfs.host.pending.levels import Level

__all__ = ["Tiering"]


class Tiering(Changing):
    """The part of `TierFileSystem` that only a filesystem with tiers has."""

    def wait(self, path: str, level: str = "object", timeout: float | None = None) -> None:
        """Wait until what this host wrote at or below ``path`` so far has reached a level.

        Args:
            path: A file or directory.
            level: ``"staged"``, ``"local"`` or ``"object"``.
            timeout: Seconds; ``None`` for as long as it takes.

        Raises:
            TimeoutError: It has not, in time; names what is pending.
            ConflictError: Somebody else changed a path before it was flushed; theirs stands, this host's is kept.
            TierfsError: The reason why it cannot get there.
        """
        store, relative = self._locate(path)
        verbs.wait(store, relative, Level.parse(level), timeout)

    def ack(self, path: str) -> str:
        """The level that the file at ``path`` has reached: ``"staged"``, ``"local"`` or ``"object"``.

        Raises:
            NotFoundError: There is no such file.
        """
        return verbs.level_of(*self._locate(path)).label

    def prefetch(self, path: str, tier: str = "ram") -> int:
        """Copy a file, or what lies below a directory, into a local tier. Returns its bytes.

        In the nvme tier it stays until it is evicted or its room is needed; in the ram tier it goes, at the latest, with the process
        that has it there.

        Raises:
            InvalidInputError: No such tier, or it is switched off.
            CapacityError: It does not fit.
        """
        return verbs.prefetch(*self._locate(path), tier)

    def evict(self, path: str, tier: str = "nvme") -> int:
        """Drop clean copies of a file, or of what lies below a directory, from a local tier. Returns the bytes dropped.

        Raises:
            InvalidInputError: No such tier, or it is switched off.
        """
        return verbs.evict(*self._locate(path), tier)

    def status(self, path: str = "") -> dict[str, Any]:
        """Tiers, queue, conflicts and errors of the store that holds ``path``: what ``tierfs status --json`` prints.

        Args:
            path: Where; by default the only store that this instance has used.
        """
        return verbs.status(self._locate(path)[0] if path else self._only_store())
