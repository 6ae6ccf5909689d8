"""Handles in text mode and behind a compressor. They tell the `WriteFile` below whether to publish."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tierfs.digest import BLOCK_BYTES
from tierfs.fs.readfile import ReadFile
from tierfs.fs.writefile import WriteFile


class TextFile(io.TextIOWrapper):
    """A handle in text mode. After an exception in ``with``, or if dropped unclosed, it publishes nothing."""

    def __init__(self, buffer: Any, **text: Any) -> None:
        super().__init__(buffer, **text)  # `WriteFile.seekable` looks for this frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.closed and isinstance(self.buffer, WriteFile | CompressedFile):
            self.buffer.give_up(error)
        self.close()

    def __del__(self) -> None:
        try:
            if self.closed:
                return
        except ValueError:
            return  # the arguments were invalid, so __init__ did not finish
        try:
            if isinstance(self.buffer, WriteFile | CompressedFile):
                self.buffer.drop()
        finally:
            self.close()


class CompressedFile(io.BufferedIOBase):
    """A handle behind a compressor. ``close`` also closes the handle below, which compressors leave open."""

    def __init__(self, compressor: Callable[..., Any], inner: ReadFile | WriteFile, mode: str) -> None:
        self._outer = compressor(inner, mode=mode)
        self._inner = inner
        self.path = inner.path

    @property
    def name(self) -> str:
        return self.path

    def readable(self) -> bool:
        return self._inner.readable()

    def writable(self) -> bool:
        return self._inner.writable()

    def seekable(self) -> bool:
        return bool(self._outer.seekable())

    def read(self, size: int | None = -1) -> bytes:
        return bytes(self._outer.read(-1 if size is None else size))

    def read1(self, size: int = -1) -> bytes:
        """Read and decompress ``size`` bytes, or up to one block if ``size`` is negative."""
        return self.read(size if size >= 0 else BLOCK_BYTES)

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        piece = self.read(len(out))
        out[: len(piece)] = piece
        return len(piece)

    def write(self, data: Any) -> int:
        self._outer.write(data)
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek in the decompressed bytes."""
        return int(self._outer.seek(offset, whence))

    def tell(self) -> int:
        """Return the position in the decompressed bytes."""
        return int(self._outer.tell())

    def close(self) -> None:
        """Close the compressor, then the handle below, which publishes unless the compressor failed."""
        if self.closed:
            return
        try:
            self._outer.close()
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            try:
                self._inner.close()
            finally:
                super().close()

    def give_up(self, error: BaseException) -> None:
        if isinstance(self._inner, WriteFile):
            self._inner.give_up(error)

    def drop(self) -> None:
        if isinstance(self._inner, WriteFile):
            self._inner.drop()

    def _dealloc_warn(self, source: Any) -> None:
        self.drop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.closed:
            self.give_up(error)
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "path") and not self.closed:
            try:
                self.drop()
            finally:
                self.close()
