"""Decode each request of the kernel, call its operation, and encode the answer."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from typing import TypeAlias

from tierfs.format.keys import inside
from tierfs.mount import wire
from tierfs.mount.errnos import refusal
from tierfs.mount.extended import Extended
from tierfs.mount.files import Files
from tierfs.mount.nodes import Handle, Node
from tierfs.mount.reading import Views
from tierfs.mount.state import MountState
from tierfs.mount.tree import NAME_MAX, NameTree
from tierfs.mount.wire import DirectoryEntry, Opcode, RequestHeader, SetAttr

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
    """Serves requests, independent of their transport. Thread-safe.

    Args:
        publish_all: Publishes all dirty files within a number of seconds. Returns a line for each file that is left.
    """

    def __init__(self, state: MountState, publish_all: Callable[[float], list[str]]) -> None:
        self.state = state
        self.files = Files(state)
        self.tree = NameTree(state, self.files)
        self._extended = Extended(state, self.files, publish_all)
        self._listings: dict[int, tuple[Node, list[tuple[str, Node]]]] = {}
        self._serve: dict[int, Callable[[RequestHeader, memoryview], Answer]] = {
            opcode: method
            for opcode in Opcode
            if (method := getattr(self, f"_{opcode.name.lower()}", None)) is not None
        }

    def __call__(self, header: RequestHeader, body: memoryview) -> Answer:
        """Serve one request. The caller translates exceptions by `errno_of`."""
        method = self._serve.get(header.opcode)
        if method is None:
            raise refusal(errno.ENOSYS)
        return method(header, body)

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

    def _init(self, header: RequestHeader, body: memoryview) -> Answer:
        return wire.init_out(body)

    def _destroy(self, header: RequestHeader, body: memoryview) -> Answer:
        return b""

    def _lookup(self, header: RequestHeader, body: memoryview) -> Answer:
        # A missing name is an error, so the kernel does not remember it: another process may make the file at once.
        return self._entry(self.tree.look_up(self._node(header.node), _text(body)[0]))

    def _forget(self, header: RequestHeader, body: memoryview) -> Answer:
        self.state.nodes.forget(header.node, wire.U64.unpack_from(body)[0])
        return None

    def _batch_forget(self, header: RequestHeader, body: memoryview) -> Answer:
        count, _ = wire.U32X2.unpack_from(body)
        for number in range(count):
            self.state.nodes.forget(*wire.FORGET_ONE.unpack_from(body, 8 + 16 * number))
        return None

    def _getattr(self, header: RequestHeader, body: memoryview) -> Answer:
        node = self._node(header.node)
        return wire.attr_out(node.attributes, self.state.valid_s(node))

    def _setattr(self, header: RequestHeader, body: memoryview) -> Answer:
        node, wanted = self._node(header.node), SetAttr.parse(body)
        if wanted.changes_owner(node.attributes):
            raise refusal(errno.EPERM, "all files of a mount belong to the user who mounted it")
        if node.is_directory:
            self.tree.set_attributes(node, wanted)
        else:
            self.files.set_attributes(node, wanted)
        return wire.attr_out(node.attributes, self.state.valid_s(node))

    def _symlink(self, header: RequestHeader, body: memoryview) -> Answer:
        raise refusal(errno.EPERM, "a store has no links")

    def _link(self, header: RequestHeader, body: memoryview) -> Answer:
        raise refusal(errno.EPERM, "a store has no links")

    def _mknod(self, header: RequestHeader, body: memoryview) -> Answer:
        mode = wire.U32X2.unpack_from(body)[0]
        if mode >> 12 not in (0, 0o10):
            raise refusal(errno.EPERM, "a store has only files and directories")
        name, _ = _text(body, 16)
        node, handle = self.tree.make_file(self._node(header.node), name, mode & 0o777, flags=0o300)
        self.files.release(handle)
        return self._entry(node)

    def _mkdir(self, header: RequestHeader, body: memoryview) -> Answer:
        mode, umask = wire.U32X2.unpack_from(body)
        name, _ = _text(body, 8)
        return self._entry(self.tree.make_directory(self._node(header.node), name, mode & ~umask & 0o777))

    def _unlink(self, header: RequestHeader, body: memoryview) -> Answer:
        self.tree.remove_file(self._node(header.node), _text(body)[0])
        return b""

    def _rmdir(self, header: RequestHeader, body: memoryview) -> Answer:
        self.tree.remove_directory(self._node(header.node), _text(body)[0])
        return b""

    def _rename(self, header: RequestHeader, body: memoryview) -> Answer:
        return self._rename_names(header, wire.U64.unpack_from(body)[0], 0, body[8:])

    def _rename2(self, header: RequestHeader, body: memoryview) -> Answer:
        parent, flags, _ = wire.RENAME2_IN.unpack_from(body)
        return self._rename_names(header, parent, flags, body[16:])

    def _rename_names(self, header: RequestHeader, parent: int, flags: int, names: memoryview) -> Answer:
        name, at = _text(names)
        new_name, _ = _text(names, at)
        self.tree.rename(self._node(header.node), name, self._node(parent), new_name, flags)
        return b""

    def _open(self, header: RequestHeader, body: memoryview) -> Answer:
        return self._opened(self.files.open(self._node(header.node), wire.OPEN_IN.unpack_from(body)[0], header.pid))

    def _create(self, header: RequestHeader, body: memoryview) -> Answer:
        flags, mode, umask, _ = wire.CREATE_IN.unpack_from(body)
        name, _ = _text(body, 16)
        node, handle = self.tree.make_file(self._node(header.node), name, mode & ~umask & 0o777, flags)
        return self._entry(node) + self._opened(handle)

    def _read(self, header: RequestHeader, body: memoryview) -> Answer:
        number, offset, size = wire.READ_IN.unpack_from(body)
        return self.files.read(self.files.handle(number), offset, size)

    def _write(self, header: RequestHeader, body: memoryview) -> Answer:
        number, offset, size = wire.READ_IN.unpack_from(body)
        data = body[wire.WRITE_BYTES : wire.WRITE_BYTES + size]
        return wire.U32X2.pack(self.files.write(self.files.handle(number), offset, data), 0)

    def _flush(self, header: RequestHeader, body: memoryview) -> Answer:
        self.files.flush(self._handle(body))
        return b""

    def _fsync(self, header: RequestHeader, body: memoryview) -> Answer:
        self.files.sync(self._handle(body))
        return b""

    def _release(self, header: RequestHeader, body: memoryview) -> Answer:
        self.files.release(self._handle(body))
        return b""

    def _fallocate(self, header: RequestHeader, body: memoryview) -> Answer:
        number, offset, length, mode = wire.FALLOCATE_IN.unpack_from(body)
        self.files.allocate(self.files.handle(number), offset, length, mode)
        return b""

    def _opendir(self, header: RequestHeader, body: memoryview) -> Answer:
        node, number = self._node(header.node), self.state.next_handle()
        self._listings[number] = (node, [])
        return wire.OPEN_OUT.pack(number, 0, 0)

    def _readdir(self, header: RequestHeader, body: memoryview) -> Answer:
        return self._page(body, plus=False)

    def _readdirplus(self, header: RequestHeader, body: memoryview) -> Answer:
        return self._page(body, plus=True)

    def _releasedir(self, header: RequestHeader, body: memoryview) -> Answer:
        listed = self._listings.pop(wire.U64.unpack_from(body)[0], None)
        for _, node in listed[1] if listed is not None else ():
            self.state.nodes.drop(node)
        return b""

    def _fsyncdir(self, header: RequestHeader, body: memoryview) -> Answer:
        return b""

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

    def _statfs(self, header: RequestHeader, body: memoryview) -> Answer:
        return wire.statfs_out(*self._extended.room(), NAME_MAX)

    def _getxattr(self, header: RequestHeader, body: memoryview) -> Answer:
        size, _ = wire.U32X2.unpack_from(body)
        return _sized(self._extended.get(self._node(header.node), _text(body, 8)[0]), size)

    def _listxattr(self, header: RequestHeader, body: memoryview) -> Answer:
        size, _ = wire.U32X2.unpack_from(body)
        names = self._extended.names(self._node(header.node))
        return _sized("".join(f"{name}\0" for name in names).encode(), size)

    def _setxattr(self, header: RequestHeader, body: memoryview) -> Answer:
        size, _ = wire.U32X2.unpack_from(body)
        name, at = _text(body, 8)
        self._extended.set(self._node(header.node), name, bytes(body[at : at + size]))
        return b""

    def _removexattr(self, header: RequestHeader, body: memoryview) -> Answer:
        raise refusal(errno.EOPNOTSUPP)


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
