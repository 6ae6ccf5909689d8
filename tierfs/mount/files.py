"""Open files: read, write, publish.

``fsync``, and ``close`` after a write, publish a file. The store's `Writer` publishes the whole file, on
condition that the store still has the version that was opened. A crash of the mount publishes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator
from functools import partial

from tierfs import store as verbs
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import ConflictError, NotFoundError, StoreError
from tierfs.mount.attributes import attributes_of, with_posix
from tierfs.mount.nodes import Handle, Node, NodeState, version_of
from tierfs.mount.overlay import AHEAD_MAX, Change, OverlaidInode, replaces
from tierfs.mount.reading import ReadAhead, Views
from tierfs.mount.state import MountState
from tierfs.mount.wire import SetAttr, Valid, refusal
from tierfs.store import Entry, WriteMode, Writer
from tierfs.store.write.staging import is_staged
from tierfs.units import format_bytes

AHEAD_RAM_BYTES = 2 * AHEAD_MAX * CHUNK_BYTES
"""Room for two chunks of each of `AHEAD_MAX` files: one that is being filled, and one more."""
_logger = logging.getLogger("tierfs.mount")


class _GiveWay(Exception):  # noqa: N818 - not an error
    """Storing a file is interrupted, because another thread moves or removes it."""


class Files:
    """The operations on contents. Thread-safe. `errno_of` translates the exceptions that they raise."""

    def __init__(self, state: MountState) -> None:
        self._state = state
        self._handles: dict[int, Handle] = {}

    def open(self, node: Node, flags: int, thread: int = 0) -> Handle:
        """Open a file at the version that the store has now, as close-to-open consistency requires.

        Args:
            node: The file.
            flags: The flags of ``open``.
            thread: Id of the calling thread. After ESTALE, its next call opens the version that the kernel has found in
                the meantime without a check, because the kernel does not try a third time.

        Raises:
            OSError: The kernel has to look the name up again (ESTALE).
        """
        if node.is_directory:
            raise refusal(errno.EISDIR)
        writes = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        if flags & os.O_TRUNC and node.path is None and node.entry is not None:
            self._end_awaiting(node.entry.path)
        with node.lock:
            self._check_is_newest(node, thread, writes=writes)
            if writes and node.entry is not None and node.entry.foreign is not None:
                raise refusal(errno.EACCES, f"{node.path} was not written by tierfs and can only be read")
            if flags & os.O_TRUNC and node.attributes.size:
                is_read = node.handles and not node.has_changes and not any(handle.writes for handle in node.handles)
                if is_read and node.path is not None:
                    # Programs that have the file open or mapped keep its bytes. The new content gets another inode. It
                    # is emptied here, because other programs may open it before the kernel repeats this request.
                    emptied = self._state.nodes.split(node)
                    with emptied.lock:
                        self._resize(emptied, 0)
                        emptied.enter(NodeState.EMPTIED)
                    raise refusal(errno.ESTALE)
                self._resize(node, 0)
            handle = self._handle(node, writes=writes)
            if not writes and node.staged is None:
                self._reader(node)
            return handle

    def opened_new(self, node: Node) -> Handle:
        """Open a new file, which the store has already if it was created exclusively."""
        with node.lock:
            change = Change.LENGTH if node.is_unpublished else Change.NONE
            node.staged = OverlaidInode(self._state.staging, None, change)
            return self._handle(node, writes=True)

    def handle(self, number: int) -> Handle:
        """Return the handle with a number that the kernel got from `open`."""
        try:
            return self._handles[number]
        except KeyError:
            raise refusal(errno.EBADF) from None

    def read(self, handle: Handle, offset: int, size: int) -> Views | bytes:
        """Return up to ``size`` bytes from ``offset``, fewer at the end of the file."""
        node = handle.node
        if node.staged is not None:
            with node.lock:
                if node.staged is not None:
                    return node.staged.read(offset, size)
        reader = node.reader or self._reader(node)
        ahead = handle.ahead
        if ahead is None or ahead.reader is not reader:
            with node.lock:
                ahead = handle.ahead
                if ahead is None or ahead.reader is not reader:
                    if ahead is not None:
                        ahead.close()
                    ahead = handle.ahead = ReadAhead(reader)
        return ahead.read(offset, size)

    def write(self, handle: Handle, offset: int, data: memoryview) -> int:
        node = handle.node
        with node.lock:
            staged = self._staged(node)
            written = staged.write(offset, data)
            self._touched(node)
            if node.path is not None:
                staged.write_ahead(partial(self._writer_ahead, node.path))
        return written

    def allocate(self, handle: Handle, offset: int, length: int, mode: int) -> None:
        """Reserve space on the local disk, and extend the file unless ``mode`` is 1 (``FALLOC_FL_KEEP_SIZE``).

        Raises:
            OSError: ``mode`` has another flag, such as punching a hole (EOPNOTSUPP).
        """
        if mode & ~1:
            raise refusal(errno.EOPNOTSUPP)
        node = handle.node
        with node.lock:
            staged = self._staged(node)
            staged.allocate(offset, length)
            if not mode and offset + length > staged.length:
                staged.resize(offset + length)
                self._touched(node)

    def set_attributes(self, node: Node, wanted: SetAttr) -> None:
        """Change the size, mode or time of a file."""
        attributes = node.attributes
        with node.lock:
            if wanted.valid & Valid.SIZE:
                self._resize(node, wanted.size)
            if wanted.valid & (Valid.MODE | Valid.MTIME):
                node.attributes = wanted.applied_to(node.attributes, time.time_ns())
                if node.attributes.posix != attributes.posix:
                    node.enter(NodeState.RELABELLED)
            if not any(handle.writes for handle in node.handles):
                try:
                    self.publish(node)
                finally:
                    self._end_staging(node)

    def flush(self, handle: Handle) -> None:
        """Publish the written bytes. ``close`` waits for this. If no bytes were written yet, leave it to `release`."""
        node = handle.node
        with node.lock:
            if handle.writes and node.staged is not None and node.staged.change in {Change.BYTES, Change.REFUSED}:
                self.publish(node)

    def sync(self, handle: Handle) -> None:
        """Publish the file, and wait until it reaches the level of the mount."""
        self.publish(handle.node)

    def release(self, handle: Handle) -> None:
        """End a handle and publish the changes. No program sees an error any more; the caller logs it."""
        self._handles.pop(handle.id, None)
        node = handle.node
        with node.lock:
            node.handles.discard(handle)
            if handle.ahead is not None:
                handle.ahead.close()
            try:
                if handle.writes:
                    self.publish(node)
            finally:
                self._end_staging(node)
                self._state.nodes.drop(node)

    def publish(self, node: Node) -> None:
        """Publish the changes of this mount, if any, as the next version of the file.

        Raises:
            ConflictError: Another writer published the file after it was opened. The other version stands.
            TierfsError, TimeoutError: The file could not be stored, or did not reach its level in time.
        """
        with node.lock:
            while True:
                staged = node.staged
                is_dirty = staged is not None and staged.change is not Change.NONE
                if node.path is None:
                    if node.state is NodeState.REPLACED and is_dirty:
                        raise ConflictError(
                            "another writer replaced the file after it was opened: their version is kept"
                        )
                    return
                if staged is None or not is_dirty:
                    break
                try:
                    self._publish_content(node, staged)
                except _GiveWay:
                    node.freed.wait_for(lambda: not node.is_wanted)
                except ConflictError:
                    staged.enter(Change.REFUSED)
                    raise
                else:
                    return
            if node.state is NodeState.RELABELLED:
                self._publish_attributes(node)

    @contextlib.contextmanager
    def taking(self, node: Node) -> Iterator[None]:
        """Hold the lock of a node that is being moved or removed, without waiting until a large file is stored.

        The thread that stores it begins again afterwards, at the new path, or stops if the file is removed.
        """
        node.is_wanted = True
        with node.lock:
            try:
                self._state.store.before_change()
                yield
            finally:
                node.is_wanted = False
                node.freed.notify_all()

    def keep_bytes(self, node: Node) -> None:
        """Copy an open file whose draft is pending to a staged file, before its name is removed.

        The chunks of a pending draft are released with its name. The copy keeps the bytes readable for open handles.
        """
        with node.lock:
            tiers, path = self._state.store.tiers, node.path
            if not node.handles or node.staged is not None or tiers is None or path is None:
                return
            if tiers.drafts.pending(path) is None:
                return
            reader = self._reader(node)
            staged = OverlaidInode(self._state.staging, None)
            try:
                staged.fill_from(reader)
            except BaseException:
                staged.close()
                raise
            node.staged = staged

    def dirty(self) -> list[Node]:
        """Return the files that have unpublished changes."""
        return [
            node for node in self._state.nodes.all() if node.path is not None and node.has_changes and _is_dirty(node)
        ]

    def _end_staging(self, node: Node) -> None:
        """Close the staged file once no handle can write to it.

        Bytes that could not be published are lost. ``close`` or ``fsync`` has reported the error.
        """
        staged = node.staged
        if staged is None or any(one.writes for one in node.handles):
            return
        if node.handles if node.path is None else node.state is NodeState.EMPTIED:
            return
        is_lost = staged.change is not Change.NONE and node.path is not None
        staged.close()
        node.staged = None
        if node.state is NodeState.RELABELLED:
            node.enter(NodeState.STORED)
        if is_lost and node.entry is not None:
            # The kernel's cached pages of this inode have the lost bytes, so the published version needs another inode.
            node.attributes = attributes_of(node.entry, node.attributes.ino, started_ns=0)
            self._state.nodes.replaced(node)
        elif is_lost:
            self._state.nodes.remove(node)

    def _publish_content(self, node: Node, staged: OverlaidInode) -> None:
        store, path = self._state.store, node.path
        assert path is not None
        base = node.entry.manifest if node.entry is not None else None
        # Keep the chunks of the unchanged start of the file.
        keep = staged.kept if base is not None and base.inline is None else 0
        metadata = with_posix(base.metadata if base is not None else {}, node.attributes)
        ahead = staged.take_writer(path, base)
        mode = WriteMode.APPEND if keep else WriteMode.OVERWRITE
        writer = ahead or Writer(store, path, mode=mode, level=self._state.level, keep=keep)
        writer.metadata = metadata
        try:
            if not replaces(writer, base):
                raise ConflictError(
                    f"another writer changed {store.where(path)} after it was opened: their version is kept", path=path
                )
            if ahead is None:
                staged.feed(writer, keep, lambda: _give_way(node))
            writer.commit()
        except BaseException as error:
            writer.abort()
            if ahead is not None and not writer.is_done:
                staged.error = error
            raise
        finally:
            if writer.is_done:
                self._take_published(node, staged, writer)

    def _writer_ahead(self, path: str) -> Writer | None:
        """Return a writer for a file that is stored while it is written.

        Return ``None`` if the ram tier has less than `AHEAD_RAM_BYTES` free or clean, because such files may stay open
        for a while and hold chunks there. Raises the errors of `Writer`.
        """
        store, level = self._state.store, self._state.level
        tiers, wanted = store.tiers, store.ack if level is None else level
        if tiers is not None and is_staged(store, path, wanted):
            usage = tiers.ram.usage()
            if usage.budget_bytes - usage.used_bytes + usage.clean_bytes < AHEAD_RAM_BYTES:
                tiers.counters.fall_back(
                    "mount_written_twice",
                    "the ram tier has less than %s free: files written through the mount go to a local file first, and are stored when "
                    "they are closed; raise ram= (TIERFS_RAM) if that lasts",
                    format_bytes(AHEAD_RAM_BYTES),
                )
                return None
        return Writer(store, path, level=level)

    def _take_published(self, node: Node, staged: OverlaidInode, writer: Writer) -> None:
        path, store = node.path, self._state.store
        assert path is not None
        # The writer knows the manifest that is pending or published, so no request to the store is needed.
        entry = Entry(path, is_directory=False, manifest=writer.published)
        self._state.nodes.published(node, entry)
        node.reader = verbs.open_entry(store, entry)
        staged.published(node.reader)

    def _publish_attributes(self, node: Node) -> None:
        path, entry = node.path, node.entry
        assert path is not None
        assert entry is not None
        try:
            if entry.manifest is None:
                raise refusal(errno.EPERM, f"{path} was not written by tierfs")
            verbs.look(self._state.store, path)
            metadata = with_posix(entry.manifest.metadata, node.attributes)
            manifest = verbs.annotate(self._state.store, path, metadata, write_id=entry.manifest.write_id)
        except BaseException:
            node.attributes = attributes_of(entry, node.attributes.ino, started_ns=0)  # as the store has them
            node.enter(NodeState.STORED)
            raise
        self._state.nodes.published(node, Entry(path, is_directory=False, manifest=manifest))

    def _end_awaiting(self, path: str) -> None:
        """Show the stored bytes of an emptied file again.

        The open that emptied it was made by a descriptor, as of ``/proc/self/fd``. The kernel repeats that on the old
        inode, where it fails.
        """
        emptied = self._state.nodes.at(path)
        if emptied is not None and emptied.state is NodeState.EMPTIED:
            with emptied.lock:
                emptied.enter(NodeState.STORED)
                self._end_staging(emptied)

    def _check_is_newest(self, node: Node, thread: int, *, writes: bool) -> None:
        """Check that the store still has the version that the kernel is opening.

        Raises:
            OSError: The store has another version, and the kernel has to look the name up again (ESTALE).
            StoreError: The object tier does not answer. A file that is opened to be written may be opened without, if
                saves go on: it is published on the condition that the version is still the newest.
        """
        path = node.path if node.path is not None or node.entry is None else node.entry.path
        if self._state.stale.take((path, thread)) and (node.path is not None or self._has_bytes(node)):
            return
        if node.path is None:
            self._state.stale.note((path, thread))
            raise refusal(errno.ESTALE)
        if node.has_changes:
            return
        try:
            entry = verbs.look(self._state.store, node.path, to_read=True)
        except NotFoundError:
            self._state.nodes.remove(node)
            raise refusal(errno.ESTALE) from None
        except StoreError as error:
            if writes and verbs.last_known(self._state.store, node.path, error) is not None:
                return
            raise
        if version_of(entry) != node.version or entry.is_directory:
            self._state.stale.note((path, thread))
            self._state.nodes.replaced(node)
            raise refusal(errno.ESTALE)

    def _has_bytes(self, node: Node) -> bool:
        """Return whether the bytes of an inode without a path can still be read.

        The chunks of a pending draft are released with its name, if no handle was open. See `keep_bytes`.
        """
        if node.state is NodeState.REPLACED or node.handles or node.staged is not None:
            return True
        manifest = node.entry.manifest if node.entry is not None else None
        return manifest is not None and (manifest.inline is not None or self._state.store.tiers is None)

    def _handle(self, node: Node, *, writes: bool) -> Handle:
        self._state.store.before_change()
        handle = Handle(self._state.next_handle(), node, writes)
        if writes and node.state is NodeState.EMPTIED:
            node.enter(NodeState.STORED)
        node.handles.add(handle)
        self._handles[handle.id] = handle
        return handle

    def _reader(self, node: Node) -> verbs.Reader:
        with node.lock:
            if node.reader is None:
                if node.entry is None:
                    raise refusal(errno.EIO, "the bytes of the file could not be stored, and are lost")
                node.reader = verbs.open_entry(self._state.store, node.entry)
            return node.reader

    def _staged(self, node: Node) -> OverlaidInode:
        if node.staged is None:
            node.staged = OverlaidInode(self._state.staging, self._reader(node))
        return node.staged

    def _resize(self, node: Node, length: int) -> None:
        if node.staged is None and not length:
            change = Change.LENGTH if node.attributes.size or node.is_unpublished else Change.NONE
            node.staged = OverlaidInode(self._state.staging, None, change)
        staged = self._staged(node)
        if staged.length != length or node.attributes.size != length:
            staged.resize(length)
            self._touched(node)

    def _touched(self, node: Node) -> None:
        assert node.staged is not None
        now_ns = time.time_ns()
        node.attributes = node.attributes.at(size=node.staged.length, mtime_ns=now_ns, now_ns=now_ns)


def _give_way(node: Node) -> None:
    if node.is_wanted:
        raise _GiveWay


def _is_dirty(node: Node) -> bool:
    return node.state is NodeState.RELABELLED or (node.staged is not None and node.staged.change is not Change.NONE)
