"""Operations on names: look up, list, make, remove, rename.

Each operation is complete in the store before the kernel gets the answer, except for a new file. The store has a new
file once it is published.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable

from tierfs import store as verbs
from tierfs.errors import (
    ConflictError,
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StoreError,
    TierfsError,
)
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT
from tierfs.format.manifest import Manifest
from tierfs.mount.attributes import DIRECTORY_MODE, new_attributes, with_posix
from tierfs.mount.files import Files
from tierfs.mount.nodes import Handle, Node, NodeState, version_of
from tierfs.mount.state import MountState
from tierfs.mount.wire import SetAttr, Valid, refusal
from tierfs.store import Entry, WriteMode
from tierfs.store.offline import ask
from tierfs.store.tree.records import observe_marker
from tierfs.threads import transfers

NAME_MAX = keys.COMPONENT_BYTES_MAX
NO_REPLACE = 1
ATTEMPTS_MAX = 5
LOOKS_MAX = 20
_logger = logging.getLogger("tierfs.mount")


class NameTree:
    """The operations on names. Thread-safe. `errno_of` translates the exceptions that they raise."""

    def __init__(self, state: MountState, files: Files) -> None:
        self._state = state
        self._files = files
        self._renaming = threading.Lock()

    def look_up(self, parent: Node, name: str) -> Node:
        """Return the inode of a name in a directory."""
        path = self._path(parent, name)
        try:
            return self._node_at(path)
        except NotFoundError:
            self._state.missing.note(path)
            raise

    def _node_at(self, path: str, *, is_blind: bool = True) -> Node:
        """Return the inode at a path, as the store has it now or as this mount has changed it.

        With ``is_blind``, and if saves go on while the object tier does not answer, return what this mount or this host
        saw last. The kernel looks up each name before it makes or replaces it.

        Raises:
            NotFoundError: Nothing exists at the path.
            TierfsError: The path could not be read.
        """
        nodes = self._state.nodes
        for _ in range(LOOKS_MAX):
            node = nodes.at(path)
            if node is not None and node.is_directory and node.is_unpublished:
                self._mark(node, path)
            if node is not None and (node.has_changes or node is nodes.root):
                return node
            seen = nodes.serial
            try:
                entry = verbs.look(self._state.store, path, to_read=True)
            except NotFoundError:
                node = nodes.at(path)
                if node is not None and node.has_changes:
                    return node
                if node is not None:
                    nodes.remove(node)
                raise
            except StoreError as error:
                if not is_blind:
                    raise
                known = verbs.last_known(self._state.store, path, error)
                if node is not None:
                    return node
                if known is None:
                    raise NotFoundError(f"{self._state.store.where(path)} is not known here", path=path) from None
                entry = known
            found = nodes.show(entry, seen)
            if found is not None:
                return found
        raise BlockingIOError(f"{path} keeps changing while it is looked up")

    def list_directory(self, node: Node) -> list[tuple[str, Node]]:
        """Return names and inodes of a directory, sorted by name, without ``.`` and ``..``."""
        if not node.is_directory:
            raise refusal(errno.ENOTDIR)
        nodes, path = self._state.nodes, self._alive(node)
        # Collect new files before listing the store. Otherwise a file that is published in between would be in neither.
        new = [child for child in nodes.below(path) if child.is_unpublished]
        seen = nodes.serial
        try:
            verbs.check_reachable(self._state.store)
            entries = verbs.list_directory(self._state.store, path)
        except StoreError as error:
            if not error.transient or not node.is_unpublished:
                raise
            entries = verbs.list_pending(self._state.store, path)  # this mount made it while the object tier was away
        except NotFoundError:
            # A directory without a marker exists only through the files in it. All of these may be new.
            entries = []
        except (CorruptionError, FormatError) as error:
            _logger.error("%s: %s; the other files are shown", self._state.store.where(path), error)  # noqa: TRY400
            entries = self._undamaged(path)
        found: dict[str, Node] = {}
        is_settled = any(_name(entry.path) == ROOT for entry in entries)
        for entry in entries:
            name = _name(entry.path)
            if name in found or entry.path == path:
                continue
            child = nodes.at(entry.path)
            if child is None or not child.is_directory or not entry.is_directory:
                # The listing has no markers of directories, so it says nothing new about a known one.
                child = nodes.show(entry, seen) or nodes.at(entry.path)
            if child is not None:
                if is_settled and not child.is_directory:
                    child.enter(NodeState.SETTLED)
                elif child.state is NodeState.SETTLED:
                    child.enter(NodeState.STORED)
                found[name] = child
        for child in new:
            if child.path is not None and child.path.rpartition("/")[0] == path:
                found[_name(child.path)] = child
        return sorted(found.items())

    def read_markers(self, listed: Iterable[Node]) -> set[Node]:
        """Update the attributes of directories that were listed. Their mode and time lie in their markers.

        Returns:
            The directories whose markers cannot be read.
        """
        store, nodes = self._state.store, self._state.nodes
        seen = nodes.serial

        def read(wanted: tuple[Node, str]) -> Node | None:
            node, path = wanted
            try:
                marker = ask(store, lambda: observe_marker(store, path)).manifest
            except TierfsError as error:
                _logger.debug("the marker of %s cannot be read: %s", store.where(path), error)
                return node
            nodes.show_marker(node, Entry(path, is_directory=True, manifest=marker), seen)
            return None

        wanted = [(node, node.path) for node in listed if node.is_directory and node.path and not node.is_unpublished]
        unread = transfers().map(read, wanted)
        return {node for node in unread if node is not None}

    def _undamaged(self, path: str) -> list[Entry]:
        """Return the entries of a directory whose records can be read. A lookup of any other raises the error."""
        entries = []
        for found in verbs.list_directory(self._state.store, path, detail=False):
            with contextlib.suppress(CorruptionError, FormatError, NotFoundError):
                entries.append(found if found.is_directory else verbs.stat_to_read(self._state.store, found.path))
        return entries

    def make_file(self, parent: Node, name: str, mode: int, flags: int) -> tuple[Node, Handle]:
        """Make a file and open it. Without ``O_EXCL``, open an existing file.

        The store has a new file once it is published. With ``O_EXCL``, an empty file is published at once.
        """
        path = self._path(parent, name, is_new=True)
        is_missing = self._state.missing.take(path)
        for _ in range(ATTEMPTS_MAX):
            if is_missing and self._state.nodes.at(path) is None:
                break
            is_missing = False
            try:
                node = self._node_at(path)
            except NotFoundError:
                break
            if flags & os.O_EXCL:
                raise refusal(errno.EEXIST)
            try:
                return node, self._files.open(node, flags)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
        path = self._path(parent, name, is_new=True)  # the parent may have been renamed in the meantime
        attributes, reserved = new_attributes(0, stat.S_IFREG | mode, time.time_ns()), None
        if flags & os.O_EXCL:  # programs lock by such a file, so no other process may make it too
            metadata = with_posix({}, attributes)
            reserved = verbs.save(self._state.store, path, b"", mode=WriteMode.CREATE, metadata=metadata)
        node = self._state.nodes.make(path, attributes)
        if reserved is not None:
            self._state.nodes.published(node, Entry(path, is_directory=False, manifest=reserved))
        handle = self._files.opened_new(node)
        self._touch(parent)
        return node, handle

    def make_directory(self, parent: Node, name: str, mode: int) -> Node:
        path = self._path(parent, name, is_new=True)
        there = self._state.nodes.at(path)
        if there is not None and there.is_unpublished:
            raise refusal(errno.EEXIST)
        is_marked = False
        try:
            is_marked = verbs.make_directory(self._state.store, path)
        except StoreError as error:
            if verbs.last_known(self._state.store, path, error) is not None:
                raise refusal(errno.EEXIST) from None
        node = self._state.nodes.make(path, new_attributes(0, stat.S_IFDIR | mode, time.time_ns()))
        if is_marked:
            node.enter(NodeState.MARKED)
        self._mark(node, path)
        self._touch(parent)
        return node

    def remove_file(self, parent: Node, name: str) -> None:
        """Remove a file. Open handles can still read its bytes."""
        node = self._node_at(self._path(parent, name), is_blind=False)
        if node.is_directory:
            raise refusal(errno.EISDIR)
        with self._files.taking(node):
            path = self._alive(node)
            self._keep_directory(parent)
            self._files.keep_bytes(node)
            if node.entry is not None:
                self._delete(path)
            self._state.nodes.remove(node)
        self._touch(parent)

    def remove_directory(self, parent: Node, name: str) -> None:
        """Remove an empty directory."""
        node = self._node_at(self._path(parent, name), is_blind=False)
        if not node.is_directory:
            raise refusal(errno.ENOTDIR)
        path = self._alive(node)
        if any(child.is_unpublished for child in self._state.nodes.below(path)):
            raise refusal(errno.ENOTEMPTY)
        self._keep_directory(parent)
        if not node.is_unpublished:
            verbs.remove_directory(self._state.store, path)
        elif verbs.list_pending(self._state.store, path):
            raise refusal(errno.ENOTEMPTY)
        self._state.nodes.remove(node)
        self._touch(parent)

    def rename(self, parent: Node, name: str, new_parent: Node, new_name: str, flags: int) -> None:
        """Rename a file or directory, and replace an existing target.

        A directory is moved file by file. After a crash, some files are at the source and some at the target, each
        whole.

        Raises:
            OSError: The target exists and `flags` has `NO_REPLACE` (EEXIST), or `flags` has another flag (EINVAL).
        """
        if flags & ~NO_REPLACE:
            raise refusal(errno.EINVAL)
        node = self._node_at(self._path(parent, name), is_blind=False)
        target = self._path(new_parent, new_name, is_new=True)
        if target == node.path:
            return
        try:
            there: Node | None = self.look_up(new_parent, new_name)
        except NotFoundError:
            there = None
        if there is not None and flags & NO_REPLACE:
            raise refusal(errno.EEXIST)
        if there is not None and there.is_directory != node.is_directory:
            raise refusal(errno.EISDIR if there.is_directory else errno.ENOTDIR)
        self._keep_directory(parent)
        # Only a rename holds the locks of several inodes, and one rename runs at a time. An open that empties a file
        # also locks the inode that it makes, which no rename holds together with the old one. So there is no deadlock.
        with self._renaming:
            if node.is_directory:
                self._rename_directory(node, there, target)
            else:
                self._rename_file(node, there, target, overwrite=not flags & NO_REPLACE)
        self._touch(parent)
        self._touch(new_parent)

    def set_attributes(self, node: Node, wanted: SetAttr) -> None:
        """Change the mode or time of a directory."""
        if wanted.valid & Valid.SIZE:
            raise refusal(errno.EISDIR)
        changed = wanted.applied_to(node.attributes, time.time_ns())
        if node.path and changed.posix != node.attributes.posix and not node.is_unpublished:
            verbs.check_reachable(self._state.store)
            verbs.annotate_directory(self._state.store, node.path, with_posix({}, changed))
            node.enter(NodeState.MARKED)
            self._state.nodes.changed(node.path)
        node.attributes = changed

    def _rename_file(self, node: Node, there: Node | None, target: str, *, overwrite: bool) -> None:
        nodes, store = self._state.nodes, self._state.store
        # If the replaced file is being published, that ends before the rename. Later it would be a conflict.
        with self._files.taking(node), self._files.taking(there) if there is not None else contextlib.nullcontext():
            source = self._alive(node)
            if there is not None:
                self._files.keep_bytes(there)
            if not node.is_unpublished:
                verbs.rename(store, source, target, overwrite=overwrite)
                moved = self._entry_at(target)
            else:
                # Publishing this file will replace the target. The file that it was to replace is deleted.
                moved = there.entry if there is not None else None
                if node.entry is not None:
                    self._delete(source)
            if there is not None:
                nodes.remove(there)
            nodes.move(node, source, target)
            if node.is_unpublished:
                node.entry = moved
            else:
                self._take_version(node, moved)

    def _rename_directory(self, node: Node, there: Node | None, target: str) -> None:
        source = self._alive(node)
        if target.startswith(f"{source}/"):
            raise refusal(errno.EINVAL)
        verbs.check_reachable(self._state.store)
        if len(keys.record_key(target)) > len(keys.record_key(source)):
            found = {entry.path for entry in verbs.find(self._state.store, source, detail=False)}
            for path in found.union(child.path or source for child in self._state.nodes.below(source, deep=True)):
                _check_length(target + path[len(source) :])
        if there is not None:
            if self.list_directory(there):
                raise refusal(errno.ENOTEMPTY)
            with contextlib.suppress(NotFoundError):
                verbs.remove_directory(self._state.store, target)  # its mode must not stay
            self._state.nodes.remove(there)
        known: set[Node] = set()

        def hold_new() -> bool:
            """Lock the files that programs have made since the last call. Return whether one was published meanwhile."""
            new = set(self._state.nodes.below(source, deep=True)) - known
            for child in new:
                held.enter_context(self._files.taking(child))
            known.update(new)
            return not all(child.is_unpublished for child in new)

        with contextlib.ExitStack() as held:
            for attempt in range(ATTEMPTS_MAX):
                # Files in the directory that are about to be published wait for these locks, and then use their new
                # path.
                hold_new()
                try:
                    self._move_files(source, target)
                    self._remove_tree(source)
                    if not hold_new():
                        break
                except (ConflictError, NotFoundError):  # another program changed or removed a file in the meantime
                    if attempt + 1 == ATTEMPTS_MAX:
                        raise
                except StoreError as error:  # another writer added a file in the meantime
                    if error.errno != errno.ENOTEMPTY or attempt + 1 == ATTEMPTS_MAX:
                        raise
            self._take_moved(node, source, target)

    def _move_files(self, source: str, target: str) -> None:
        store = self._state.store
        self._copy_marker(source, target)
        for entry in verbs.find(store, source, detail=False):
            moved = target + entry.path[len(source) :]
            if entry.is_directory:
                self._copy_marker(entry.path, moved)
            else:
                verbs.rename(store, entry.path, moved)

    def _copy_marker(self, source: str, target: str) -> None:
        store = self._state.store
        marker = observe_marker(store, source).manifest
        verbs.make_directory(store, target, exist_ok=True)
        if marker is not None and marker.metadata:
            verbs.annotate_directory(store, target, marker.metadata)

    def _remove_tree(self, path: str) -> None:
        store = self._state.store
        found = [entry.path for entry in verbs.find(store, path, detail=False) if entry.is_directory]
        for directory in [*sorted(found, key=len, reverse=True), path]:
            with contextlib.suppress(NotFoundError):  # it had no marker
                verbs.remove_directory(store, directory)

    def _take_moved(self, node: Node, source: str, target: str) -> None:
        self._state.nodes.move(node, source, target)
        # The move gave each file a new version.
        for child in self._state.nodes.below(target, deep=True):
            if child.is_directory or child.entry is None or child.path is None:
                continue
            moved = self._entry_at(child.path)
            if child.is_unpublished:
                child.entry = moved
            else:
                self._take_version(child, moved)

    def _entry_at(self, path: str) -> Entry | None:
        try:
            return verbs.stat_to_read(self._state.store, path)
        except NotFoundError:
            return None

    def _take_version(self, node: Node, moved: Entry | None) -> None:
        """Set an inode to the version that was moved, if the content is the same.

        Another host may have replaced the file just before or after the move. The kernel caches pages of the inode, so
        other content needs another inode. If this inode has changes, publishing them raises `ConflictError` then.
        """
        before = node.entry.manifest if node.entry is not None else None
        now = moved.manifest if moved is not None else None
        if moved is not None and now is not None and before is not None and _content(now) == _content(before):
            node.entry, node.version = moved, version_of(moved)
        elif not node.has_changes:
            self._state.nodes.replaced(node)

    def _delete(self, path: str) -> None:
        with contextlib.suppress(NotFoundError):
            try:
                verbs.delete(self._state.store, path)
            except ConflictError:  # the flusher published it, or another writer changed it: delete it anyway
                verbs.delete(self._state.store, path)

    def _keep_directory(self, node: Node) -> None:
        """Give a directory a marker, so that it stays when its last file is removed, as programs expect."""
        if node.path and node.state is not NodeState.MARKED:
            self._mark(node, node.path)

    def _mark(self, node: Node, path: str) -> None:
        """Make the marker of a directory, unless the object tier is unreachable."""
        if node.state is not NodeState.MARKED and verbs.make_directory(self._state.store, path, exist_ok=True):
            node.enter(NodeState.MARKED)
        if node.state is NodeState.MARKED and stat.S_IMODE(node.attributes.mode) != DIRECTORY_MODE:
            verbs.annotate_directory(self._state.store, path, with_posix({}, node.attributes))

    def _touch(self, node: Node) -> None:
        now_ns = time.time_ns()
        node.attributes = node.attributes.at(mtime_ns=now_ns, now_ns=now_ns)

    def _path(self, parent: Node, name: str, *, is_new: bool = False) -> str:
        if name == keys.PRIVATE:
            raise refusal(errno.EPERM if is_new else errno.ENOENT, f"{name} is reserved for the store")
        self._alive(parent)
        path = keys.inside(parent.path or "", name)
        _check_length(path)
        return path

    @staticmethod
    def _alive(node: Node) -> str:
        if node.path is None:
            raise refusal(errno.ESTALE if node.state is NodeState.REPLACED else errno.ENOENT)
        return node.path


def _check_length(path: str) -> None:
    """Refuse a path that is too long. The kernel passes no name that breaks another rule for paths."""
    try:
        keys.validate_path(path)
    except InvalidInputError as error:
        raise refusal(errno.ENAMETOOLONG, str(error)) from None


def _content(manifest: Manifest) -> tuple[bytes, int]:
    return manifest.digest, manifest.length


def _name(path: str) -> str:
    return path.rpartition("/")[2]
