"""A bare mfusepy passthrough, the baseline of `mount.py`: ``python mount_passthrough.py SOURCE DIRECTORY``."""

from __future__ import annotations

import os
import sys

import mfusepy


class Passthrough(mfusepy.Operations):
    """Call the same function on the underlying file."""

    use_ns = True

    def __init__(self, root):
        self.root = root

    def _path(self, path):
        return self.root + path

    def getattr(self, path, fh=None):
        status = os.lstat(self._path(path))
        keys = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
        found = {key: getattr(status, key) for key in keys}
        return {**found, **{f"st_{one}time": getattr(status, f"st_{one}time_ns") for one in "amc"}}

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self._path(path))]

    def create(self, path, mode, fi=None):
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path, flags):
        return os.open(self._path(path), flags & ~os.O_APPEND)

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._path(path), length)

    def fsync(self, path, datasync, fh):
        os.fsync(fh)

    def release(self, path, fh):
        os.close(fh)

    def unlink(self, path):
        os.unlink(self._path(path))


if __name__ == "__main__":
    mfusepy.FUSE(Passthrough(sys.argv[1]), sys.argv[2], foreground=True, fsname="passthrough")
