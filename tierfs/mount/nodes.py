"""The inode table of a mount. One inode stands for one path of the store at one version.

If another writer replaces a file, the file gets a new inode. A program that has the old inode open or mapped keeps its
bytes, because a version never changes. A file that this mount writes keeps its inode, as programs expect.
"""

from __future__ import annotations

import enum
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import xxhash

from tierfs.mount.attributes import Attributes, attributes_of
from tierfs.mount.overlay import Change, OverlaidInode
from tierfs.mount.reading import ReadAhead
from tierfs.store import Entry, Reader

ROOT_ID = 1
CHANGES_MAX = 4096


class NodeState(enum.Enum):
    """The states of an inode. `_REACHED_FROM` has the transitions."""

    NEW = "the store lacks the file, or the directory, of which it could not make a marker yet"
    STORED = "the store has it; a directory in this state exists only through its files"
    SETTLED = "a stored file of a complete checkpoint, whose files do not change"
    RELABELLED = "a stored file with a new mode or time that is not published yet"
    EMPTIED = "a stored file that was emptied for an open that the kernel repeats on this inode"
    MARKED = "a directory with a marker, so that it stays when it is empty"
    REMOVED = "it has no path: this mount or another writer removed the file"
    REPLACED = "it has no path: another writer replaced the file, so changes to this inode cannot be published"


_REACHED_FROM = {
    NodeState.STORED: {NodeState.NEW, NodeState.SETTLED, NodeState.RELABELLED, NodeState.EMPTIED},
    NodeState.SETTLED: {NodeState.STORED},
    NodeState.RELABELLED: {NodeState.STORED, NodeState.SETTLED},
    NodeState.EMPTIED: {NodeState.STORED},
    NodeState.MARKED: {NodeState.NEW, NodeState.STORED},
    NodeState.REMOVED: set(NodeState),
    NodeState.REPLACED: set(NodeState),
}
"""The states from which `Node.enter` goes to a state. From any other one, the inode stays as it is.

For example, a new mode of a file in the state `NEW` or `EMPTIED` is published with its content."""


@dataclass(slots=True, eq=False)
class Node:
    """An inode.

    Attributes:
        id: The node id that the kernel uses.
        path: Path in the store. ``None`` once the file is removed or replaced.
        attributes: The attributes that ``stat`` shows.
        version: Version of the content in the store: a write id, or the object tier's version of a file that tierfs did
            not write. ``None`` for a directory and for a file that is not published yet.
        entry: The file as the store has it.
        reader: Reads this version. ``None`` until the file is opened.
        staged: The content being written.
        handles: The open handles.
        lookups: The kernel's lookup count: answers that named this inode, minus the kernel's forgets.
        state: Changed by `enter`.
        is_wanted: Whether a thread waits for ``lock`` to move or remove the file. A thread that stores it gives way.
        lock: Held while the content, path or version is being changed.
        freed: Notified when such a thread is done.
    """

    id: int
    path: str | None
    attributes: Attributes
    version: str | None = None
    entry: Entry | None = None
    reader: Reader | None = None
    staged: OverlaidInode | None = None
    handles: set[Handle] = field(default_factory=set)
    lookups: int = 0
    state: NodeState = NodeState.NEW
    is_wanted: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    freed: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self.freed = threading.Condition(self.lock)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.attributes.mode)

    @property
    def has_changes(self) -> bool:
        """Whether this mount has changes that are not in the store yet.

        Refused changes do not count. They are dropped with their handle, which the kernel releases some time after
        ``close``.
        """
        is_staged = self.staged is not None and self.staged.change is not Change.REFUSED
        return is_staged or self.state in {NodeState.NEW, NodeState.RELABELLED}

    @property
    def is_unpublished(self) -> bool:
        """Whether the store does not have this file or directory."""
        return self.state is NodeState.NEW

    def enter(self, state: NodeState) -> None:
        """Go to a state, if `_REACHED_FROM` allows it from the present one."""
        if self.state in _REACHED_FROM[state]:
            self.state = state


@dataclass(slots=True, eq=False)
class Handle:
    """An open file. See `tierfs.mount.files`."""

    id: int
    node: Node
    writes: bool
    ahead: ReadAhead | None = None


class Nodes:
    """The inode table. Thread-safe.

    Args:
        root: Path of the mounted directory in the store.
        started_ns: The time shown for directories without a marker, in nanoseconds since the epoch.
    """

    def __init__(self, root: str, started_ns: int) -> None:
        self._lock = threading.RLock()
        self._started_ns = started_ns
        self._last_id = ROOT_ID
        self._by_id: dict[int, Node] = {}
        self._by_path: dict[str, Node] = {}
        self._numbers: set[int] = {0}
        self._changes: OrderedDict[str, int] = OrderedDict()  # by path, the number of this mount's last change
        self._change = self._forgotten_change = 0
        self.root = self._add(ROOT_ID, Entry(root, is_directory=True))
        self.root.lookups = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, node_id: int) -> Node | None:
        """Return the inode of a node id."""
        return self._by_id.get(node_id)

    def at(self, path: str) -> Node | None:
        """Return the inode at a path, or ``None`` if this table has none."""
        return self._by_path.get(path)

    def below(self, path: str, *, deep: bool = False) -> list[Node]:
        """Return the known inodes in a directory. With ``deep``, return those at any depth."""
        prefix = f"{path}/" if path else ""
        with self._lock:
            found = [(name, node) for name, node in self._by_path.items() if name.startswith(prefix) and name != path]
        return [node for name, node in found if deep or "/" not in name[len(prefix) :]]

    def all(self) -> list[Node]:
        """Return all inodes, including those without a path."""
        with self._lock:
            return list(self._by_id.values())

    def show(self, entry: Entry, seen: int) -> Node | None:
        """Return the inode of an entry that was read from the store. ``seen`` is the value of `serial` before that.

        Returns:
            The inode. ``None`` if this mount changed the path in the meantime; the caller then reads the entry again.
        """
        with self._lock:
            node = self._by_path.get(entry.path)
            if node is not None and node.has_changes:
                return node
            if self._changes.get(entry.path, self._forgotten_change) > seen:
                return None
            if node is not None and entry.manifest is not None and _has_record(node, entry):
                return node
            version = version_of(entry)
            if node is not None and node.is_directory == entry.is_directory and node.version == version:
                self._describe(node, entry)
                return node
            if node is not None:
                self._detach(node, NodeState.REPLACED)
            self._last_id += 1
            return self._add(self._last_id, entry)

    def show_marker(self, node: Node, entry: Entry, seen: int) -> None:
        """Update a directory from its marker, unless this mount changed the path in the meantime. ``seen`` as in `show`."""
        with self._lock:
            if node.path == entry.path and self._changes.get(entry.path, self._forgotten_change) <= seen:
                self._describe(node, entry)

    def make(self, path: str, attributes: Attributes) -> Node:
        """Make an inode for a new file or directory. An existing inode at the path loses the path."""
        with self._lock:
            old = self._by_path.get(path)
            if old is not None:
                self._detach(old, NodeState.REPLACED)
            self._last_id += 1
            node = Node(self._last_id, path, replace(attributes, ino=self._number(path)))
            self._by_id[node.id] = self._by_path[path] = node
            self.changed(path)
            return node

    def split(self, node: Node) -> Node:
        """Give the path to a new inode of the same version, and return it. Open handles keep the old inode."""
        with self._lock:
            path, entry = node.path, node.entry
            assert path is not None
            assert entry is not None
            self._detach(node, NodeState.REPLACED)
            self._last_id += 1
            return self._add(self._last_id, entry)

    def remove(self, node: Node) -> None:
        """Take the path from an inode whose file was removed."""
        with self._lock:
            if node.path is not None:
                self.changed(node.path)
            self._detach(node, NodeState.REMOVED)

    def replaced(self, node: Node) -> None:
        """Take the path from an inode that another writer replaced."""
        with self._lock:
            self._detach(node, NodeState.REPLACED)

    def move(self, node: Node, source: str, path: str) -> None:
        """Give an inode, and all inodes below it, another path.

        If a lookup has found nothing at ``source`` since the store renamed it, the inode has lost that path already.
        """
        with self._lock:
            node.attributes = replace(node.attributes, is_gone=False)
            if node.path is None:
                node.state = NodeState.STORED
            self._by_id[node.id] = node
            self._numbers.add(node.attributes.ino)
            moved = [(node, path)]
            if node.is_directory:
                moved += [(one, path + (one.path or "")[len(source) :]) for one in self.below(source, deep=True)]
            for one, _ in moved:
                if one.path is not None:
                    self._by_path.pop(one.path, None)
                    self.changed(one.path)
            for one, target in moved:
                there = self._by_path.get(target)
                if there is not None:
                    self._detach(there, NodeState.REMOVED)
                one.path = target
                if one.entry is not None:
                    one.entry = replace(one.entry, path=target)
                self._by_path[target] = one
                self.changed(target)

    def published(self, node: Node, entry: Entry) -> None:
        """Set the version of an inode to the one that this mount published.

        The inode gets its time of publication as ctime, as a later lookup would show it. GNU tar takes another ctime
        to mean that the file was changed while it was read.
        """
        assert entry.manifest is not None
        with self._lock:
            self.changed(entry.path)
            node.entry, node.version = entry, version_of(entry)
            node.attributes = replace(node.attributes, ctime_ns=entry.manifest.modified_ns)
            node.enter(NodeState.STORED)

    def changed(self, path: str) -> None:
        """Note that this mount changed a path. Entries of it that were read before are outdated."""
        with self._lock:
            self._change += 1
            self._changes[path] = self._change
            self._changes.move_to_end(path)
            while len(self._changes) > CHANGES_MAX:
                self._forgotten_change = self._changes.popitem(last=False)[1]

    @property
    def serial(self) -> int:
        """The number of changes that this mount has made."""
        return self._change

    def told(self, node: Node) -> None:
        """Count an answer that names an inode. Put the inode back if it was dropped after the lookup."""
        with self._lock:
            node.lookups += 1
            if self._by_id.setdefault(node.id, node) is node and node.path is not None:
                self._numbers.add(node.attributes.ino)
                self._by_path.setdefault(node.path, node)

    def forget(self, node_id: int, count: int) -> None:
        """Subtract ``count`` from the kernel's lookup count, and drop the inode if it is unused."""
        with self._lock:
            node = self._by_id.get(node_id)
            if node is not None and node_id != ROOT_ID:
                node.lookups -= count
                self.drop(node)

    def drop(self, node: Node) -> None:
        """Drop an inode, unless the kernel knows it, a handle is open or it has changes."""
        with self._lock:
            if node.lookups > 0 or node.handles or node.has_changes or node.id == ROOT_ID:
                return
            if node.path is not None and self._by_path.get(node.path) is node:
                del self._by_path[node.path]
            if self._by_id.pop(node.id, None) is not None:
                self._numbers.discard(node.attributes.ino)

    def _add(self, node_id: int, entry: Entry) -> Node:
        attributes = attributes_of(entry, self._number(entry.path), started_ns=self._started_ns)
        is_marked = entry.is_directory and entry.manifest is not None
        state = NodeState.MARKED if is_marked else NodeState.STORED
        node = Node(node_id, entry.path, attributes, version_of(entry), entry, state=state)
        self._by_id[node_id] = self._by_path[entry.path] = node
        return node

    def _describe(self, node: Node, entry: Entry) -> None:
        found, known = attributes_of(entry, node.attributes.ino, started_ns=self._started_ns), node.attributes
        if node.is_directory and known.mtime_ns > found.mtime_ns:
            found = replace(found, mtime_ns=known.mtime_ns, ctime_ns=known.ctime_ns)
        node.attributes, node.entry = found, entry
        if node.is_directory and entry.manifest is not None:
            node.enter(NodeState.MARKED)

    def _detach(self, node: Node, state: NodeState) -> None:
        if node.path is not None and self._by_path.get(node.path) is node:
            del self._by_path[node.path]
        node.path = None
        node.attributes = replace(node.attributes, is_gone=True)
        node.enter(state)
        self.drop(node)

    def _number(self, path: str) -> int:
        """Reserve the inode number that programs see. It is a hash of the path, so the next mount uses the same."""
        number, attempt = xxhash.xxh3_64_intdigest(path.encode()), 0
        while number in self._numbers:
            attempt += 1
            number = xxhash.xxh3_64_intdigest(f"{attempt}\n{path}".encode())
        self._numbers.add(number)
        return number


def _has_record(node: Node, entry: Entry) -> bool:
    """Whether an inode was made from this same manifest object. The store caches manifests; this speeds up listings."""
    return not entry.is_directory and node.entry is not None and node.entry.manifest is entry.manifest


def version_of(entry: Entry) -> str | None:
    """Return the version of a file's content. ``None`` for a directory."""
    if entry.is_directory:
        return None
    if entry.foreign is not None:
        return f"foreign {entry.foreign.version}"
    return entry.manifest.write_id.hex() if entry.manifest is not None else None
