"""The fsspec filesystem of tierfs, its file handles and its URLs."""

from tierfs.fs.filesystem import TierFileSystem

__all__ = ["TierFileSystem"]
