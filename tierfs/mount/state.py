"""What all parts of a mount share: the store, the inodes, where files are staged, and how long the kernel may trust an answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from tierfs import store as verbs
from tierfs.errors import NotFoundError
from tierfs.host.pending.levels import Level
from tierfs.mount.nodes import Node, Nodes
from tierfs.store import Store

__all__ = ["VALID_S", "VALID_SETTLED_S", "MountState", "look_up"]

VALID_S = 1.0
VALID_SETTLED_S = 60.0
ATTEMPTS_MAX = 20
# The kernel looks a name up and makes the file at once, unless it remembers from before that there is none.
MISSING_S = 0.02
MISSING_MAX = 256


@dataclass(slots=True)
class MountState:
    """See the module.

    Attributes:
        store: The store.
        root: The mounted directory's path in it.
        staging: A private directory on this host.
        level: At which level a file is published when it is closed.
        read_only: Whether nothing may be changed.
    """

    store: Store
    root: str
    staging: Path
    level: Level | None = None
    read_only: bool = False
    nodes: Nodes = field(init=False)
    _handle_ids: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _missing: OrderedDict[str, float] = field(init=False, default_factory=OrderedDict)
    _missing_lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.root, time.time_ns())

    def next_handle(self) -> int:
        """A number for a handle, never used before."""
        return next(self._handle_ids)

    def note_missing(self, path: str) -> None:
        """Note that the store was asked for a path just now and has nothing there."""
        with self._missing_lock:
            self._missing[path] = time.monotonic()
            self._missing.move_to_end(path)
            while len(self._missing) > MISSING_MAX:
                self._missing.popitem(last=False)

    def was_just_missing(self, path: str) -> bool:
        """Whether that was so recently that the store need not be asked again. Says so once."""
        with self._missing_lock:
            return time.monotonic() - self._missing.pop(path, -MISSING_S) < MISSING_S

    def valid_s(self, node: Node) -> float:
        """How long the kernel may show what it was told of an inode without asking again."""
        return VALID_SETTLED_S if node.is_settled and not node.is_ahead else VALID_S


def look_up(state: MountState, path: str) -> Node:
    """The inode at a path of the store, as the store has it now, or as this mount is about to have it.

    Raises:
        NotFoundError: Nothing is there.
        TierfsError: It could not be looked at.
    """
    nodes = state.nodes
    for _ in range(ATTEMPTS_MAX):
        node = nodes.at(path)
        if node is not None and (node.is_ahead or node is nodes.root):
            return node
        seen = nodes.serial
        try:
            entry = verbs.stat_to_read(state.store, path)
        except NotFoundError:
            node = nodes.at(path)
            if node is not None and node.is_ahead:
                return node
            if node is not None:
                nodes.remove(node)
            raise
        found = nodes.show(entry, seen)
        if found is not None:
            return found
    raise BlockingIOError(f"{path} changes all the time")
