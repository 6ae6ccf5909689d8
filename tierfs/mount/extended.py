"""What a program can ask of a mount beside files: extended attributes, and the room that is left.

``user.tierfs.digest``, ``.level``, ``.tier`` and ``.stored`` say of a file how its content is called, how safe it is, what the nearest
tier is that has all of it, and what its chunks take in the object tier. On the mounted directory itself, ``user.tierfs.url``, ``.pid``
and ``.pending`` say what is mounted and not published; setting ``user.tierfs.flush`` to a number of seconds publishes it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from tierfs import store as verbs
from tierfs.errors import TierfsError
from tierfs.host.pending.record import local_name
from tierfs.mount.errnos import refusal
from tierfs.mount.files import Files
from tierfs.mount.nodes import Node
from tierfs.mount.state import MountState
from tierfs.store.read.reader import expand_rows

__all__ = ["PREFIX", "Extended"]

PREFIX = "user.tierfs."
FILE_NAMES = ("digest", "level", "tier", "stored")
ROOT_NAMES = ("url", "pid", "pending")
FLUSH = f"{PREFIX}flush"
# Where nothing bounds it: a bucket takes what it is given.
UNBOUNDED = 1 << 50


class Extended:
    """See the module. Raises what `errnos` translates.

    Args:
        state: The mount.
        files: What has the contents.
        publish_all: Publishes what is not published, within so many seconds, and says what is left.
    """

    def __init__(self, state: MountState, files: Files, publish_all: Callable[[float], list[str]]) -> None:
        self._state = state
        self._files = files
        self._publish_all = publish_all

    def names(self, node: Node) -> list[str]:
        """The names of an inode's attributes."""
        if node is self._state.nodes.root:
            return [PREFIX + name for name in ROOT_NAMES]
        return [] if node.is_directory or node.entry is None else [PREFIX + name for name in FILE_NAMES]

    def get(self, node: Node, name: str) -> bytes:
        """The value of one of them.

        Raises:
            OSError: ENODATA for a name that nobody set; EOPNOTSUPP for one outside ``user.``, as of a filesystem without access lists:
                ``ls -l`` then stops asking, after one file instead of twice for each.
        """
        if not name.startswith("user."):
            raise refusal(errno.EOPNOTSUPP)
        if not name.startswith(PREFIX) or name not in self.names(node):
            raise refusal(errno.ENODATA)
        return str(getattr(self, f"_{name[len(PREFIX) :]}")(node)).encode()

    def set(self, node: Node, name: str, value: bytes) -> None:
        """Flush; nothing else can be set.

        Raises:
            OSError: EBUSY where something is left; ``user.tierfs.pending`` says what.
        """
        if node is not self._state.nodes.root or name != FLUSH:
            raise refusal(errno.EOPNOTSUPP)
        try:
            timeout_s = float(value)
        except ValueError:
            raise refusal(errno.EINVAL) from None
        if self._publish_all(timeout_s):
            raise refusal(errno.EBUSY)

    def room(self) -> tuple[int, int]:
        """Bytes that the tiers of this host hold, and those that are free for what is written.

        Clean copies make room, so they count as free. Where there are no local tiers it is the disk of a local object tier.
        """
        tiers = self._state.store.tiers
        if tiers is not None:
            usages = [tiers.nvme.usage() if tiers.has_nvme else tiers.ram.usage()]
            total = sum(usage.budget_bytes for usage in usages)
            dirty = sum(usage.dirty_bytes for usage in usages)
            if not self._state.store.descriptor.endpoint.host_local:
                return total, max(0, total - dirty)
        root = self._state.store.url.partition("://")[2]
        if self._state.store.url.startswith("file://") and os.path.isdir(root):
            disk = os.statvfs(root)
            return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        return UNBOUNDED, UNBOUNDED

    def _digest(self, node: Node) -> str:
        manifest = node.entry.manifest if node.entry is not None else None
        return manifest.digest.hex() if manifest is not None else ""

    def _level(self, node: Node) -> str:
        if node.path is None or node.has_changes:
            return "none"
        return verbs.level_of(self._state.store, node.path).label

    def _tier(self, node: Node) -> str:
        store, manifest = self._state.store, node.entry.manifest if node.entry is not None else None
        if manifest is None or store.tiers is None or node.path is None:
            return "object"
        rows = expand_rows(store, manifest, node.path)
        names = [local_name(store.descriptor.digest_kind, row.name.digest) for row in rows]
        if not names:
            return "object" if verbs.level_of(store, node.path).label == "object" else "ram"
        return next(
            (tier for tier in ("ram", "nvme") if all(store.tiers.reader.holds(one, tier) for one in names)), "object"
        )

    def _stored(self, node: Node) -> int:
        entry, store = node.entry, self._state.store
        if entry is None or entry.manifest is None or node.path is None:
            return 0 if entry is None else entry.length
        try:
            rows = expand_rows(store, entry.manifest, node.path)
            if any(not row.stored_length for row in rows):
                # It was opened before it was flushed.
                found = verbs.stat_to_read(store, node.path)
                if found.manifest is not None and found.manifest.write_id == entry.manifest.write_id:
                    rows = expand_rows(store, found.manifest, node.path)
            return sum(row.stored_length for row in rows)
        except TierfsError:
            return 0

    def _url(self, node: Node) -> str:
        return self._state.store.url + (f"/{self._state.root}" if self._state.root else "")

    def _pid(self, node: Node) -> int:
        return os.getpid()

    def _pending(self, node: Node) -> str:
        return "\n".join(sorted(one.path or "" for one in self._files.dirty()))
