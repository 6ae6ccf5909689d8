"""Names: look up, list, make, remove, rename.

Each is done in the store before it is answered, but for a new file, which the store has once it is published.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time

from tierfs import store as verbs
from tierfs.errors import ConflictError, CorruptionError, FormatError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT
from tierfs.format.manifest import Manifest
from tierfs.mount.attributes import DIRECTORY_MODE, MODE_BITS, new_attributes, with_posix
from tierfs.mount.errnos import refusal
from tierfs.mount.files import Files
from tierfs.mount.nodes import Handle, Node, child_path, version_of
from tierfs.mount.state import MountState
from tierfs.mount.wire import SetAttr, Valid
from tierfs.store import Entry

__all__ = ["NAME_MAX", "NO_REPLACE", "NameTree"]

NAME_MAX = keys.COMPONENT_BYTES_MAX
NO_REPLACE = 1
ATTEMPTS_MAX = 5
LOOKS_MAX = 20
_logger = logging.getLogger("tierfs.mount")


class NameTree:
    """The operations on names. Safe for use by many threads; all raise what `errnos` translates.

    Args:
        state: The mount.
        files: What has the contents.
    """

    def __init__(self, state: MountState, files: Files) -> None:
        self._state = state
        self._files = files
        self._renaming = threading.Lock()

    def look_up(self, parent: Node, name: str) -> Node:
        """The inode of a name."""
        path = self._path(parent, name)
        try:
            return self._node_at(path)
        except NotFoundError:
            self._state.missing.note(path)
            raise

    def _node_at(self, path: str) -> Node:
        """The inode at a path of the store, as the store has it now, or as this mount is about to have it.

        Raises:
            NotFoundError: Nothing is there.
            TierfsError: It could not be looked at.
        """
        nodes = self._state.nodes
        for _ in range(LOOKS_MAX):
            node = nodes.at(path)
            if node is not None and (node.has_changes or node is nodes.root):
                return node
            seen = nodes.serial
            try:
                entry = verbs.stat_to_read(self._state.store, path)
            except NotFoundError:
                node = nodes.at(path)
                if node is not None and node.has_changes:
                    return node
                if node is not None:
                    nodes.remove(node)
                raise
            found = nodes.show(entry, seen)
            if found is not None:
                return found
        raise BlockingIOError(f"{path} changes all the time")

    def list_directory(self, node: Node) -> list[tuple[str, Node]]:
        """What lies in a directory, by name, without ``.`` and ``..``."""
        if not node.is_directory:
            raise refusal(errno.ENOTDIR)
        nodes, path = self._state.nodes, self._alive(node)
        # Before the store is asked: they may be published meanwhile, and be in neither place.
        new = [child for child in nodes.below(path) if child.is_unpublished]
        seen = nodes.serial
        try:
            entries = verbs.list_directory(self._state.store, path)
        except NotFoundError:
            # It is only implied by what lies in it, which may be nothing but new files.
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
            child = nodes.show(entry, seen) or nodes.at(entry.path)
            if child is not None:
                child.is_settled = is_settled and not child.is_directory
                found[name] = child
        for child in new:
            if child.path is not None and child.path.rpartition("/")[0] == path:
                found[_name(child.path)] = child
        return sorted(found.items())

    def _undamaged(self, path: str) -> list[Entry]:
        """The entries of a directory whose records can be read. A look-up of another one is an error that says what is damaged."""
        entries = []
        for found in verbs.list_directory(self._state.store, path, detail=False):
            with contextlib.suppress(CorruptionError, FormatError, NotFoundError):
                entries.append(found if found.is_directory else verbs.stat_to_read(self._state.store, found.path))
        return entries

    def make_file(self, parent: Node, name: str, mode: int, flags: int) -> tuple[Node, Handle]:
        """Make a file and open it; without ``O_EXCL`` open one that is there.

        The store has it once it is published.
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
        node = self._state.nodes.make(path, new_attributes(0, stat.S_IFREG | mode, time.time_ns()))
        handle = self._files.opened_new(node)
        self._touch(parent)
        return node, handle

    def make_directory(self, parent: Node, name: str, mode: int) -> Node:
        """Make a directory."""
        path = self._path(parent, name, is_new=True)
        there = self._state.nodes.at(path)
        if there is not None and there.is_unpublished:
            raise refusal(errno.EEXIST)
        verbs.make_directory(self._state.store, path)
        node = self._state.nodes.make(path, new_attributes(0, stat.S_IFDIR | mode, time.time_ns()))
        node.has_marker = True
        if mode & MODE_BITS != DIRECTORY_MODE:
            verbs.annotate_directory(self._state.store, path, with_posix({}, node.attributes))
        self._touch(parent)
        return node

    def remove_file(self, parent: Node, name: str) -> None:
        """Remove a file. Whoever has it open goes on with what is in it."""
        node = self.look_up(parent, name)
        if node.is_directory:
            raise refusal(errno.EISDIR)
        with node.lock:
            path = self._alive(node)
            self._keep_directory(parent)
            self._files.keep_bytes(node)
            if node.entry is not None:
                self._delete(path)
            self._state.nodes.remove(node)
        self._touch(parent)

    def remove_directory(self, parent: Node, name: str) -> None:
        """Remove an empty directory."""
        node = self.look_up(parent, name)
        if not node.is_directory:
            raise refusal(errno.ENOTDIR)
        path = self._alive(node)
        if any(child.is_unpublished for child in self._state.nodes.below(path)):
            raise refusal(errno.ENOTEMPTY)
        self._keep_directory(parent)
        verbs.remove_directory(self._state.store, path)
        self._state.nodes.remove(node)
        self._touch(parent)

    def rename(self, parent: Node, name: str, new_parent: Node, new_name: str, flags: int) -> None:
        """Give a file or directory another name, in place of what has it.

        A directory is moved file by file: after a crash some are here and some are there, each whole.

        Raises:
            OSError: EEXIST with `NO_REPLACE` where the new name is taken; EINVAL for any other flag.
        """
        if flags & ~NO_REPLACE:
            raise refusal(errno.EINVAL)
        node = self.look_up(parent, name)
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
        # Nothing else holds several inodes at once, so nobody waits for each other.
        with self._renaming:
            if node.is_directory:
                self._rename_directory(node, there, target)
            else:
                self._rename_file(node, there, target, overwrite=not flags & NO_REPLACE)
        self._touch(parent)
        self._touch(new_parent)

    def set_attributes(self, node: Node, wanted: SetAttr) -> None:
        """Change mode or time of a directory."""
        if wanted.valid & Valid.SIZE:
            raise refusal(errno.EISDIR)
        before = node.attributes
        node.attributes = wanted.applied_to(before, time.time_ns())
        if node.path and node.attributes.posix != before.posix:
            verbs.annotate_directory(self._state.store, node.path, with_posix({}, node.attributes))
            node.has_marker = True

    def _rename_file(self, node: Node, there: Node | None, target: str, *, overwrite: bool) -> None:
        nodes, store = self._state.nodes, self._state.store
        with node.lock:
            source = self._alive(node)
            if there is not None:
                self._files.keep_bytes(there)
            if not node.is_unpublished:
                verbs.rename(store, source, target, overwrite=overwrite)
                moved = self._entry_at(target)
            else:
                # What is published next replaces what is there; what it was to replace before is gone.
                moved = there.entry if there is not None else None
                if node.entry is not None:
                    self._delete(source)
            if there is not None:
                nodes.remove(there)
            nodes.move(node, target)
            if node.is_unpublished:
                node.entry = moved
            else:
                self._take_version(node, moved)

    def _rename_directory(self, node: Node, there: Node | None, target: str) -> None:
        source = self._alive(node)
        if target.startswith(f"{source}/"):
            raise refusal(errno.EINVAL)
        if there is not None:
            if self.list_directory(there):
                raise refusal(errno.ENOTEMPTY)
            self._state.nodes.remove(there)
        with contextlib.ExitStack() as held:
            # What is about to be published in there is published under its new name.
            for child in self._state.nodes.below(source, deep=True):
                held.enter_context(child.lock)
            for attempt in range(ATTEMPTS_MAX):
                self._move_files(source, target)
                try:
                    self._remove_tree(source)
                    break
                except StoreError as error:  # somebody put something there meanwhile
                    if error.errno != errno.ENOTEMPTY or attempt + 1 == ATTEMPTS_MAX:
                        raise
            self._take_moved(node, target)

    def _move_files(self, source: str, target: str) -> None:
        store = self._state.store
        verbs.make_directory(store, target, exist_ok=True)
        for entry in verbs.find(store, source, detail=False):
            moved = target + entry.path[len(source) :]
            if entry.is_directory:
                verbs.make_directory(store, moved, exist_ok=True)
            else:
                verbs.rename(store, entry.path, moved)

    def _remove_tree(self, path: str) -> None:
        store = self._state.store
        found = [entry.path for entry in verbs.find(store, path, detail=False) if entry.is_directory]
        for directory in [*sorted(found, key=len, reverse=True), path]:
            with contextlib.suppress(NotFoundError):  # it was only implied
                verbs.remove_directory(store, directory)

    def _take_moved(self, node: Node, target: str) -> None:
        self._state.nodes.move(node, target)
        # Their versions are new ones.
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
        """Have an inode be what was moved, if that has its content: another host may have replaced it just before or since.

        The kernel keeps pages of the inode, so other content needs another one. What is being written to it is a conflict then.
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
            except ConflictError:  # the flusher published it meanwhile, or somebody changed it: it goes all the same
                verbs.delete(self._state.store, path)

    def _keep_directory(self, node: Node) -> None:
        """See that a directory stays when the last file leaves it, as programs expect."""
        if node.path and not node.has_marker:
            verbs.make_directory(self._state.store, node.path, exist_ok=True)
            node.has_marker = True

    def _touch(self, node: Node) -> None:
        now_ns = time.time_ns()
        node.attributes = node.attributes.at(mtime_ns=now_ns, now_ns=now_ns)

    def _path(self, parent: Node, name: str, *, is_new: bool = False) -> str:
        if len(name.encode()) > NAME_MAX:
            raise refusal(errno.ENAMETOOLONG)
        if name == keys.PRIVATE:
            raise refusal(errno.EPERM if is_new else errno.ENOENT, f"{name} is what the store keeps for itself")
        self._alive(parent)
        path = child_path(parent, name)
        if len(path.encode()) > keys.PATH_BYTES_MAX:
            raise refusal(errno.ENAMETOOLONG)
        return path

    @staticmethod
    def _alive(node: Node) -> str:
        if node.path is None:
            raise refusal(errno.ESTALE if node.is_replaced else errno.ENOENT)
        return node.path


def _content(manifest: Manifest) -> tuple[bytes, int]:
    return manifest.digest, manifest.length


def _name(path: str) -> str:
    return path.rpartition("/")[2]
