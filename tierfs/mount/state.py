"""What all parts of a mount share: the store, the inodes, where files are staged, and how long the kernel may trust an answer."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.host.pending.levels import Level
from tierfs.mount.nodes import Node, Nodes
from tierfs.store import Store

__all__ = ["VALID_S", "VALID_SETTLED_S", "MountState"]

VALID_S = 1.0
VALID_SETTLED_S = 60.0
# The kernel looks a name up and makes the file at once, unless it remembers from before that there is none.
MISSING_S = 0.02
# It looks up a name again whose inode was old, once: whatever the same thread opens then is opened, also if it is replaced meanwhile.
STALE_S = 0.2
RECENT_MAX = 256


class Recent:
    """Paths, or paths and threads, that something was found out of a moment ago. Safe for use by many threads.

    Args:
        seconds: How long that is.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._noted: OrderedDict[Hashable, float] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, what: Hashable) -> None:
        """Note it."""
        with self._lock:
            self._noted[what] = time.monotonic()
            self._noted.move_to_end(what)
            while len(self._noted) > RECENT_MAX:
                self._noted.popitem(last=False)

    def take(self, what: Hashable) -> bool:
        """Whether it was noted a moment ago. Says so once."""
        with self._lock:
            return time.monotonic() - self._noted.pop(what, -math.inf) < self._seconds


@dataclass(slots=True)
class MountState:
    """See the module.

    Attributes:
        store: The store.
        root: The mounted directory's path in it.
        staging: A private directory on this host.
        level: At which level a file is published when it is closed.
        read_only: Whether nothing may be changed.
        missing: Paths where a look-up found nothing.
        stale: Paths, and the threads whose `open` was told that the kernel has an old version.
    """

    store: Store
    root: str
    staging: Path
    level: Level | None = None
    read_only: bool = False
    nodes: Nodes = field(init=False)
    _handle_ids: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    missing: Recent = field(init=False, default_factory=lambda: Recent(MISSING_S))
    stale: Recent = field(init=False, default_factory=lambda: Recent(STALE_S))

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.root, time.time_ns())

    def next_handle(self) -> int:
        """A number for a handle, never used before."""
        return next(self._handle_ids)

    def valid_s(self, node: Node) -> float:
        """How long the kernel may show what it was told of an inode without asking again."""
        return VALID_SETTLED_S if node.is_settled and not node.has_changes else VALID_S
