"""Files of a store as streams, for ``torch.save``, ``torch.load`` and other functions that need streams."""

from __future__ import annotations

import errno
import io
from types import TracebackType
from typing import Any

from tierfs.store import Reader, Writer


class SaveSink(io.RawIOBase):
    """Passes written bytes to a writer, which its owner has to commit.

    ``error`` tells why a write failed. torch hides that behind an error about the end of its own file.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer
        self.error: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Append bytes. They are copied."""
        try:
            return self._writer.write(data)
        except Exception as error:
            self.error = self.error or error
            raise


class SaveStream(SaveSink):
    """A file that is published when it is closed.

    It is discarded if an exception leaves its ``with``, or if it is never closed.
    """

    def close(self) -> None:
        """Publish the written bytes, at the first call.

        Raises:
            StoreError, CapacityError, ReadOnlyError, ConflictError, TimeoutError: As `Writer.commit` does.
        """
        if self.closed:
            return
        super().close()
        self._writer.commit()

    def discard(self) -> None:
        """Close the file and publish nothing."""
        super().close()
        self._writer.abort()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.discard()
        if self.error is not None and self.error is not error:
            raise self.error from None

    def __del__(self) -> None:
        if not self.closed:
            self.discard()


class ReadStream(io.RawIOBase):
    """A range of a file. Bytes of a file that tierfs wrote are verified.

    Args:
        reader: The file's reader.
        at: Where the range begins, in bytes.
        length: Of the range; by default it goes to the file's end.
    """

    def __init__(self, reader: Reader, at: int = 0, length: int | None = None) -> None:
        super().__init__()
        self._reader = reader
        self._begin = at
        self._length = reader.length - at if length is None else length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset in the range.

        Raises:
            OSError: The offset lies before the start of the range (EINVAL).
        """
        at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence] + offset
        if at < 0:
            raise OSError(errno.EINVAL, f"cannot seek to {at}, before the start of the file")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the bytes that are left, at most its length.

        Raises:
            CorruptionError, StoreError: See `Reader.read_into`.
        """
        out = memoryview(buffer).cast("B")
        count = max(0, min(len(out), self._length - self._at))
        self._reader.read_into(self._begin + self._at, out[:count])
        self._at += count
        return count

    def readall(self) -> bytes:
        """Return the rest of the range, read at once."""
        content = bytearray(max(0, self._length - self._at))
        self.readinto(content)
        return bytes(content)
