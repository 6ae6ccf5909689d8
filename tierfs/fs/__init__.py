"""fsspec: the filesystem, its files, its URL forms."""

from tierfs.fs.filesystem import TierFileSystem

__all__ = ["TierFileSystem"]
