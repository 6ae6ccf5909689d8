"""Levels of written files, and moving files between tiers."""

from __future__ import annotations

from typing import Any

from tierfs import store as verbs
from tierfs.fs.changing import Changing
from tierfs.host.pending.levels import Level


class Tiering(Changing):
    """The part of `TierFileSystem` that has no counterpart in fsspec."""

    def wait(self, path: str, level: str = "object", timeout: float | None = None) -> None:
        """Wait until everything that this host has written at or below ``path`` so far has reached a level.

        Args:
            path: A file or directory.
            level: ``"staged"``, ``"local"`` or ``"object"``.
            timeout: Seconds. ``None`` waits without limit.

        Raises:
            TimeoutError: The level was not reached in time. The message names the pending files.
            ConflictError: Another writer changed a path before this host's change was flushed. The other writer's
                version stands; this host's is kept as a conflict.
            TierfsError: The level cannot be reached, for the reason given.
        """
        store, relative = self._locate(path)
        verbs.wait(store, relative, Level.parse(level), timeout)

    def ack(self, path: str) -> str:
        """Return the level that the file at ``path`` has reached: ``"staged"``, ``"local"`` or ``"object"``.

        Raises:
            NotFoundError: The file does not exist.
        """
        return verbs.level_of(*self._locate(path)).label

    def prefetch(self, path: str, tier: str = "ram") -> int:
        """Copy a file, or all files below a directory, into a local tier. Return the number of bytes.

        In the nvme tier the copy stays until it is evicted. In the ram tier it lasts no longer than the process that
        holds it.

        Raises:
            InvalidInputError: The tier does not exist or is switched off.
            CapacityError: The files do not fit.
        """
        return verbs.prefetch(*self._locate(path), tier)

    def evict(self, path: str, tier: str = "nvme") -> int:
        """Drop clean copies of a file, or of all files below a directory, from a local tier. Return the bytes dropped.

        Raises:
            InvalidInputError: The tier does not exist or is switched off.
        """
        return verbs.evict(*self._locate(path), tier)

    def status(self, path: str = "") -> dict[str, Any]:
        """Return the tiers, queue, conflicts and errors of a store, as ``tierfs status --json`` prints them.

        Args:
            path: A path in the store. By default, the only store that this instance has used.
        """
        return verbs.status(self._locate(path)[0] if path else self._only_store())
