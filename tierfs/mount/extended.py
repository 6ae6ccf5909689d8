"""The extended attributes of a mount, and its free space.

Attributes of a file: ``user.tierfs.digest`` is the digest of its content, ``.level`` the level it has reached,
``.tier`` the nearest tier that has all of it, and ``.stored`` the bytes of its chunks in the object tier. Attributes of
the mounted directory: ``user.tierfs.url`` is the mounted URL, ``.pid`` the serving process, and ``.pending`` the files
that are not published. Setting ``user.tierfs.flush`` to a number of seconds publishes them within that time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from tierfs import store as verbs
from tierfs.errors import TierfsError
from tierfs.host.pending.record import local_name
from tierfs.mount.files import Files
from tierfs.mount.nodes import Node
from tierfs.mount.state import MountState
from tierfs.mount.wire import refusal
from tierfs.store.read.reader import expand_rows

PREFIX = "user.tierfs."
FILE_NAMES = ("digest", "level", "tier", "stored")
ROOT_NAMES = ("url", "pid", "pending")
FLUSH = f"{PREFIX}flush"
# The bytes to report where nothing bounds them, as in a bucket.
UNBOUNDED = 1 << 50


class Extended:
    """The extended attributes and free space of a mount. `errno_of` translates the exceptions of its methods.

    Args:
        publish_all: Publishes all dirty files within a number of seconds. Returns a line for each file that is left.
    """

    def __init__(self, state: MountState, files: Files, publish_all: Callable[[float], list[str]]) -> None:
        self._state = state
        self._files = files
        self._publish_all = publish_all

    def names(self, node: Node) -> list[str]:
        """Return the names of an inode's attributes."""
        if node is self._state.nodes.root:
            return [PREFIX + name for name in ROOT_NAMES]
        return [] if node.is_directory or node.entry is None else [PREFIX + name for name in FILE_NAMES]

    def get(self, node: Node, name: str) -> bytes:
        """Return the value of an attribute.

        Raises:
            OSError: The inode has no such attribute (ENODATA), or the name is outside ``user.`` (EOPNOTSUPP). The
                latter says that the filesystem has no access lists. ``ls -l`` then stops after one request, instead of
                sending two for each file.
        """
        if not name.startswith("user."):
            raise refusal(errno.EOPNOTSUPP)
        if not name.startswith(PREFIX) or name not in self.names(node):
            raise refusal(errno.ENODATA)
        return str(getattr(self, f"_{name[len(PREFIX) :]}")(node)).encode()

    def set(self, node: Node, name: str, value: bytes) -> None:
        """Publish all pending changes if ``name`` is `FLUSH`. No other attribute can be set.

        Raises:
            OSError: Files are left, and ``user.tierfs.pending`` names those that are not published (EBUSY).
                ``value`` is not a number (EINVAL). The attribute cannot be set (EOPNOTSUPP).
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
        """Return the total and the free bytes, for ``df``.

        They are those of the nvme tier, or of the ram tier if there is no nvme tier. Clean copies can be evicted, so
        they count as free. If the object tier is local to this host, or there are no local tiers, they are those of the
        object tier's disk. If nothing bounds them, both are `UNBOUNDED`.
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
                # The file was opened before it was flushed, so its manifest lacks the stored lengths.
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
