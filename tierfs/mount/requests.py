"""Decode each request of the kernel, call its operation, and encode the answer."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from typing import TypeAlias

from tierfs import store as verbs
from tierfs.errors import TierfsError
from tierfs.format.keys import inside
from tierfs.mount import wire
from tierfs.mount.files import Files
from tierfs.mount.nodes import Handle, Node
from tierfs.mount.reading import Views
from tierfs.mount.state import MountState
from tierfs.mount.tree import NAME_MAX, NameTree
from tierfs.mount.wire import DirectoryEntry, Opcode, RequestHeader, SetAttr, refusal
from tierfs.store.read.reader import expand_rows, open_manifest

PREFIX = "user.tierfs."
FILE_NAMES = ("digest", "level", "tier", "stored")
ROOT_NAMES = ("url", "pid", "pending")
FLUSH = f"{PREFIX}flush"
# The bytes to report where nothing bounds them, as in a bucket.
UNBOUNDED = 1 << 50


class Extended:
    """The extended attributes and free space of a mount. `errno_of` translates the exceptions of its methods.

    Attributes of a file: ``user.tierfs.digest`` is the digest of its content, ``.level`` the level it has reached,
    ``.tier`` the nearest tier that has all of it, and ``.stored`` the bytes of its chunks in the object tier. Attributes
    of the mounted directory: ``user.tierfs.url`` is the mounted URL, ``.pid`` the serving process, and ``.pending`` the
    files that are not published. Setting ``user.tierfs.flush`` to a number of seconds publishes them within that time.

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
        names = [chunk.name for chunk in open_manifest(store, node.path, manifest).requests()]
        if not names:
            return "object" if verbs.level_of(store, node.path).label == "object" else "ram"
        return next(iter(store.tiers.sources.holding(names)), "object")

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


Answer: TypeAlias = "bytes | Views | None"
NO_ANSWER = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})
SLOW = frozenset(
    {
        Opcode.WRITE,
        Opcode.SETATTR,
        Opcode.FLUSH,
        Opcode.FSYNC,
        Opcode.RELEASE,
        Opcode.SETXATTR,
        Opcode.RENAME,
        Opcode.RENAME2,
    }
)
"""Requests that may store a whole file or move all files of a directory. They have a longer time limit."""
_NAME_AT = {
    Opcode.LOOKUP: 0,
    Opcode.UNLINK: 0,
    Opcode.RMDIR: 0,
    Opcode.MKDIR: 8,
    Opcode.RENAME: 8,
    Opcode.MKNOD: 16,
    Opcode.CREATE: 16,
    Opcode.RENAME2: 16,
}
"""Offset of the name in the body of a request that names an entry of a directory."""


class Requests:
    """Serves requests, independent of their transport. Thread-safe. ``publish_all`` as for `Extended`."""

    def __init__(self, state: MountState, publish_all: Callable[[float], list[str]]) -> None:
        self.state = state
        self.files = Files(state)
        self.tree = NameTree(state, self.files)
        self._extended = Extended(state, self.files, publish_all)
        self._listings: dict[int, tuple[Node, list[tuple[str, Node]]]] = {}

    def __call__(self, header: RequestHeader, body: memoryview) -> Answer:
        """Serve one request. The caller translates exceptions by `errno_of`."""
        files, tree, number = self.files, self.tree, header.node
        match header.opcode:
            case Opcode.READ:
                handle, offset, size = wire.READ_IN.unpack_from(body)
                return files.read(files.handle(handle), offset, size)
            case Opcode.WRITE:
                handle, offset, size = wire.READ_IN.unpack_from(body)
                data = body[wire.WRITE_BYTES : wire.WRITE_BYTES + size]
                return wire.U32X2.pack(files.write(files.handle(handle), offset, data), 0)
            case Opcode.LOOKUP:
                # A missing name is an error, so the kernel does not remember it: another process may make the file at
                # once.
                return self._entry(tree.look_up(self._node(number), _text(body)[0]))
            case Opcode.FORGET:
                self.state.nodes.forget(number, wire.U64.unpack_from(body)[0])
                return None
            case Opcode.BATCH_FORGET:
                for index in range(wire.U32X2.unpack_from(body)[0]):
                    self.state.nodes.forget(*wire.FORGET_ONE.unpack_from(body, 8 + 16 * index))
                return None
            case Opcode.GETATTR:
                return self._attributes(self._node(number))
            case Opcode.SETATTR:
                return self._set_attributes(self._node(number), SetAttr.parse(body))
            case Opcode.OPEN:
                return self._opened(files.open(self._node(number), wire.OPEN_IN.unpack_from(body)[0], header.pid))
            case Opcode.CREATE:
                flags, mode, umask, _ = wire.CREATE_IN.unpack_from(body)
                node, opened = tree.make_file(self._node(number), _text(body, 16)[0], mode & ~umask & 0o777, flags)
                return self._entry(node) + self._opened(opened)
            case Opcode.FLUSH:
                files.flush(self._handle(body))
            case Opcode.FSYNC:
                files.sync(self._handle(body))
            case Opcode.RELEASE:
                files.release(self._handle(body))
            case Opcode.FALLOCATE:
                handle, offset, length, mode = wire.FALLOCATE_IN.unpack_from(body)
                files.allocate(files.handle(handle), offset, length, mode)
            case Opcode.MKNOD:
                mode = wire.U32X2.unpack_from(body)[0]
                if mode >> 12 not in (0, 0o10):
                    raise refusal(errno.EPERM, "a store has only files and directories")
                node, opened = tree.make_file(self._node(number), _text(body, 16)[0], mode & 0o777, flags=0o300)
                files.release(opened)
                return self._entry(node)
            case Opcode.MKDIR:
                mode, umask = wire.U32X2.unpack_from(body)
                return self._entry(tree.make_directory(self._node(number), _text(body, 8)[0], mode & ~umask & 0o777))
            case Opcode.UNLINK:
                tree.remove_file(self._node(number), _text(body)[0])
            case Opcode.RMDIR:
                tree.remove_directory(self._node(number), _text(body)[0])
            case Opcode.RENAME:
                self._rename(number, wire.U64.unpack_from(body)[0], 0, body[8:])
            case Opcode.RENAME2:
                parent, flags, _ = wire.RENAME2_IN.unpack_from(body)
                self._rename(number, parent, flags, body[16:])
            case Opcode.SYMLINK | Opcode.LINK:
                raise refusal(errno.EPERM, "a store has no links")
            case Opcode.OPENDIR:
                handle = self.state.next_handle()
                self._listings[handle] = (self._node(number), [])
                return wire.OPEN_OUT.pack(handle, 0, 0)
            case Opcode.READDIR | Opcode.READDIRPLUS:
                return self._page(body, plus=header.opcode == Opcode.READDIRPLUS)
            case Opcode.RELEASEDIR:
                listed = self._listings.pop(wire.U64.unpack_from(body)[0], None)
                for _, node in listed[1] if listed is not None else ():
                    self.state.nodes.drop(node)
            case Opcode.STATFS:
                return wire.statfs_out(*self._extended.room(), NAME_MAX)
            case Opcode.GETXATTR:
                value = self._extended.get(self._node(number), _text(body, 8)[0])
                return _sized(value, wire.U32X2.unpack_from(body)[0])
            case Opcode.LISTXATTR:
                names = self._extended.names(self._node(number))
                return _sized("".join(f"{name}\0" for name in names).encode(), wire.U32X2.unpack_from(body)[0])
            case Opcode.SETXATTR:
                name, at = _text(body, 8)
                value = bytes(body[at : at + wire.U32X2.unpack_from(body)[0]])
                self._extended.set(self._node(number), name, value)
            case Opcode.REMOVEXATTR:
                raise refusal(errno.EOPNOTSUPP)
            case Opcode.INIT:
                return wire.init_out(body)
            case Opcode.DESTROY | Opcode.FSYNCDIR:
                pass
            case _:
                raise refusal(errno.ENOSYS)
        return b""

    def describe(self, header: RequestHeader, body: memoryview) -> str:
        """Return the operation and the path of a request, for the log."""
        node = self.state.nodes.get(header.node)
        path = None if node is None else node.path
        if path is None:
            path = node.entry.path if node is not None and node.entry is not None else f"node {header.node}"
        if header.opcode in _NAME_AT:
            name, _ = wire.name_and_rest(body, _NAME_AT[Opcode(header.opcode)])
            path = inside(path, name.decode(errors="replace"))
        return f"{name_of(header.opcode)} of {self.state.store.where(path)}"

    def _node(self, number: int) -> Node:
        node = self.state.nodes.get(number)
        if node is None:
            raise refusal(errno.ESTALE)
        return node

    def _entry(self, node: Node) -> bytes:
        self.state.nodes.told(node)
        return wire.entry_out(node.id, node.attributes, self.state.valid_s(node))

    def _handle(self, body: memoryview) -> Handle:
        return self.files.handle(wire.U64.unpack_from(body)[0])

    @staticmethod
    def _opened(handle: Handle) -> bytes:
        # The kernel may keep its cached pages, because only writes through this mount change the bytes of an inode.
        return wire.OPEN_OUT.pack(handle.id, wire.KEEP_CACHE | (0 if handle.writes else wire.NO_FLUSH), 0)

    def _attributes(self, node: Node) -> bytes:
        return wire.attr_out(node.attributes, self.state.valid_s(node))

    def _set_attributes(self, node: Node, wanted: SetAttr) -> bytes:
        if wanted.changes_owner(node.attributes):
            raise refusal(errno.EPERM, "all files of a mount belong to the user who mounted it")
        if node.is_directory:
            self.tree.set_attributes(node, wanted)
        else:
            self.files.set_attributes(node, wanted)
        return self._attributes(node)

    def _rename(self, source: int, target: int, flags: int, names: memoryview) -> None:
        name, at = _text(names)
        new_name, _ = _text(names, at)
        self.tree.rename(self._node(source), name, self._node(target), new_name, flags)

    def _page(self, body: memoryview, *, plus: bool) -> bytes:
        number, offset, size = wire.READ_IN.unpack_from(body)
        if number not in self._listings:
            raise refusal(errno.EBADF)
        node, listing = self._listings[number]
        if not offset:
            listing = self.tree.list_directory(node)
            self._listings[number] = (node, listing)
        listed = listing[max(0, offset - 2) :]
        unread = self.tree.read_markers(one for _, one in listed[: size // wire.ENTRY_BYTES_MIN]) if plus else set()
        dots = [(b".", node), (b"..", node)][offset:]
        # With node id 0, the kernel makes no cache entry: `.` and `..` are not names in this directory, and the mode of
        # an unread directory is unknown.
        entries = [DirectoryEntry(name, one.attributes, 0, 0.0) for name, one in dots]
        pages = (
            DirectoryEntry(name.encode(), one.attributes, 0 if one in unread else one.id, self.state.valid_s(one))
            for name, one in listed
        )
        data, count = wire.directory_page(itertools.chain(entries, pages), offset, size, plus=plus)
        if plus:
            for _, one in listed[: max(0, count - len(entries))]:
                if one not in unread:
                    self.state.nodes.told(one)
        return data


def name_of(opcode: int) -> str:
    """Return the name of an operation."""
    try:
        return Opcode(opcode).name.lower()
    except ValueError:
        return f"request {opcode}"


def _text(body: memoryview, at: int = 0) -> tuple[str, int]:
    """Return the name at ``at``, and the offset behind it.

    Raises:
        OSError: The name is not UTF-8, which a store requires (EILSEQ).
    """
    name, end = wire.name_and_rest(body, at)
    try:
        return name.decode(), end
    except UnicodeDecodeError:
        raise refusal(errno.EILSEQ) from None


def _sized(value: bytes, size: int) -> bytes:
    """Return the value of an attribute, or its length if the kernel gave no room (size 0)."""
    if not size:
        return wire.U32X2.pack(len(value), 0)
    if len(value) > size:
        raise refusal(errno.ERANGE)
    return value
