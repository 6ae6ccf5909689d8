"""Call the operations of a mount as the kernel would, without FUSE."""

import os

from tierfs.mount.requests import Requests
from tierfs.mount.state import MountState


class Hand:
    """The kernel's part of a mount: look up paths and call operations."""

    def __init__(self, store, staging, root=""):
        self.state = MountState(store, root, staging)
        self.requests = Requests(self.state, lambda seconds: [])
        self.files, self.tree = self.requests.files, self.requests.tree

    def parent(self, path):
        node = self.state.nodes.root
        *folders, name = path.split("/")
        for folder in folders:
            node = self.tree.look_up(node, folder)
        return node, name

    def node(self, path):
        return self.tree.look_up(*self.parent(path))

    def create(self, path, mode=0o644, flags=os.O_WRONLY | os.O_CREAT):
        node, handle = self.tree.make_file(*self.parent(path), mode, flags)
        self.state.nodes.told(node)
        return handle

    def open(self, path, flags=os.O_RDONLY):
        """Open a file as the kernel does: look the path up again if the inode is stale."""
        for _ in range(3):
            node = self.node(path)
            self.state.nodes.told(node)
            try:
                return self.files.open(node, flags)
            except OSError as error:
                if error.errno != 116:
                    raise
        raise AssertionError("stale for ever")

    def close(self, handle):
        self.files.flush(handle)
        self.files.release(handle)

    def write_file(self, path, data):
        handle = self.create(path) if not self.exists(path) else self.open(path, os.O_WRONLY | os.O_TRUNC)
        self.files.write(handle, 0, memoryview(data))
        self.close(handle)

    def read(self, handle, offset=0, size=1 << 30):
        found = self.files.read(handle, offset, size)
        if isinstance(found, bytes):
            return found
        data = b"".join(bytes(view) for view in found)
        found.release()
        return data

    def read_file(self, path):
        handle = self.open(path)
        try:
            return self.read(handle)
        finally:
            self.close(handle)

    def exists(self, path):
        try:
            self.node(path)
        except FileNotFoundError:
            return False
        return True

    def names(self, path=""):
        return [name for name, _ in self.tree.list_directory(self.node(path) if path else self.state.nodes.root)]
