"""The state that all parts of a mount share: the store, the inodes, and how long the kernel may cache an answer."""

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
from tierfs.mount.nodes import Node, Nodes, NodeState
from tierfs.store import Store

VALID_S = 1.0
VALID_SETTLED_S = 60.0
# The kernel creates a file right after a lookup that found nothing.
MISSING_S = 0.02
# After ESTALE the kernel looks the name up again and opens it once more, not twice. That second open by the same thread
# succeeds even if the file was replaced again in between.
STALE_S = 1.0
RECENT_MAX = 256


class Recent:
    """Keys noted in the last ``seconds``: paths, or pairs of a path and a thread.

    Thread-safe; holds at most `RECENT_MAX` keys.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._noted: OrderedDict[Hashable, float] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, what: Hashable) -> None:
        with self._lock:
            self._noted[what] = time.monotonic()
            self._noted.move_to_end(what)
            while len(self._noted) > RECENT_MAX:
                self._noted.popitem(last=False)

    def take(self, what: Hashable) -> bool:
        """Remove a key. Return whether it was noted recently."""
        with self._lock:
            return time.monotonic() - self._noted.pop(what, -math.inf) < self._seconds


@dataclass(slots=True)
class MountState:
    """The state that all parts of a mount share.

    Attributes:
        root: Path of the mounted directory in the store.
        staging: A private directory on this host, for files that are being written.
        level: The level that closing a file waits for. ``None`` for the level of the store.
        read_only: Whether every change is refused.
        missing: Paths where a lookup found nothing.
        stale: Pairs of a path and a thread whose `open` failed because the kernel has an old version.
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
        """Return a number for a handle that was never used before."""
        return next(self._handle_ids)

    def valid_s(self, node: Node) -> float:
        """Return for how many seconds the kernel may cache the attributes of an inode."""
        return VALID_SETTLED_S if node.state is NodeState.SETTLED and not node.has_changes else VALID_S
