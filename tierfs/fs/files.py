"""File handles: what ``open`` returns."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import sys
import threading
import warnings
from types import TracebackType
from typing import Any

from tierfs.digest import BLOCK_BYTES
from tierfs.errors import StoreError
from tierfs.store import Reader, Writer

__all__ = ["CompressedFile", "ReadFile", "TextFile", "WriteFile"]

READ_AHEAD_BLOCKS = 4
SMALL_READ_BYTES_MAX = READ_AHEAD_BLOCKS * BLOCK_BYTES
CACHED_BLOCKS_MAX = 8
_logger = logging.getLogger("tierfs.fs")


class ReadFile(io.BufferedReader):
    """A file at one version, opened for reading. Large reads go straight into the caller's buffer.

    Args:
        fs: The filesystem it was opened with.
        path: The path, as that filesystem writes it.
        reader: The opened version.
        details: What ``fs.info`` says of it.

    Attributes:
        size: Bytes of the file.
        details: What ``fs.info`` said of it when it was opened.
    """

    def __init__(self, fs: Any, path: str, reader: Reader, details: dict[str, Any]) -> None:
        super().__init__(_RawReader(path, reader), max(1, min(BLOCK_BYTES, reader.length)))
        self.fs = fs
        self.path = path
        self.size = reader.length
        self.details = details

    @property
    def full_name(self) -> str:
        """The path with its protocol."""
        return str(self.fs.unstrip_protocol(self.path))

    def info(self) -> dict[str, Any]:
        """What ``fs.info`` said of it when it was opened."""
        return self.details


class _RawReader(io.RawIOBase):
    """Positioned reads; small ones through a few blocks that are kept, with read-ahead where they follow each other.

    The kept blocks lie in one buffer that is used round and round, because first touch of fresh memory is slow.
    """

    mode = "rb"

    def __init__(self, path: str, reader: Reader) -> None:
        self.name = path
        self._reader = reader
        self._at = 0
        self._next = 0
        self._kept = memoryview(b"")
        self._slots: dict[int, int] = {}  # which block lies in which slot of `_kept`
        self._free_slot = 0
        self._lock = threading.Lock()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._reader.length}
        if whence not in base:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
        target = base[whence] + offset
        if target < 0:
            raise ValueError(f"cannot seek to {target}, before the start of the file")
        self._at = target
        return target

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(0, min(len(out), self._reader.length - self._at))
        if count > SMALL_READ_BYTES_MAX:
            self._reader.read_into(self._at, out[:count])
        elif count:
            with self._lock:
                self._read_small(out[:count])
        self._at += count
        return count

    def readall(self) -> bytes:
        out = bytearray(max(0, self._reader.length - self._at))
        self._reader.read_into(self._at, memoryview(out))
        self._at += len(out)
        return bytes(out)

    def _read_small(self, out: memoryview) -> None:
        last = (self._at + len(out) - 1) // BLOCK_BYTES
        done = 0
        while done < len(out):
            index, start = divmod(self._at + done, BLOCK_BYTES)
            if index not in self._slots:
                self._keep(index, last)
            begin = self._slots[index] * BLOCK_BYTES
            count = min(BLOCK_BYTES - start, len(out) - done)
            out[done : done + count] = self._kept[begin + start : begin + start + count]
            done += count

    def _keep(self, index: int, last: int) -> None:
        """Fetch blocks from ``index`` on: as far as ``last`` is wanted now, and further where reads follow each other."""
        blocks = -(-self._reader.length // BLOCK_BYTES)
        if not self._kept:
            self._kept = memoryview(bytearray(min(CACHED_BLOCKS_MAX, blocks) * BLOCK_BYTES))
        ahead = READ_AHEAD_BLOCKS if index == self._next and index else 1
        count = min(max(ahead, last - index + 1), READ_AHEAD_BLOCKS, blocks - index)
        if (self._free_slot + count) * BLOCK_BYTES > len(self._kept):
            self._free_slot = 0
        taken = range(self._free_slot, self._free_slot + count)
        self._slots = {block: slot for block, slot in self._slots.items() if slot not in taken}
        begin = index * BLOCK_BYTES
        length = min(count * BLOCK_BYTES, self._reader.length - begin)
        self._reader.read_into(begin, self._kept[taken.start * BLOCK_BYTES :][:length])
        self._slots |= {index + number: slot for number, slot in enumerate(taken)}
        self._next, self._free_slot = index + count, taken.stop


class WriteFile(io.BufferedIOBase):
    """A file being written. It is published whole by ``close``, or not at all.

    An exception inside ``with``, or one that is on its way while ``close`` is called, publishes nothing; nor does a
    handle that is dropped without being closed. Both are logged. A write that failed leaves a hole, so from then on every
    write raises its error again, and so does ``close``, which publishes nothing.

    Args:
        fs: The filesystem it was opened with.
        path: The path, as that filesystem writes it.
        writer: Where the bytes go.
        mode: As given to ``open``.
        autocommit: Whether ``close`` publishes; without, ``commit`` does (transactions).
    """

    def __init__(self, fs: Any, path: str, writer: Writer, mode: str, *, autocommit: bool = True) -> None:
        self.fs = fs
        self.path = path
        self.mode = mode
        self.autocommit = autocommit
        self._writer: Writer | None = writer  # None once it is clear what is published
        self._failure: BaseException | None = None
        self._memory_file: int | None = None
        self._process = os.getpid()
        self._error_at_open = sys.exc_info()[1]
        self._settled = False  # whether it is published, or whoever writes it knows that it is not

    @property
    def name(self) -> str:
        """The path."""
        return self.path

    @property
    def full_name(self) -> str:
        """The path with its protocol."""
        return str(self.fs.unstrip_protocol(self.path))

    @property
    def pending(self) -> bool:
        """Whether `commit` would publish something."""
        return self._writer is not None

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Add bytes at the end. They are copied, so ``data`` may change afterwards."""
        view = memoryview(data)
        self._check_open()
        if self._writer is None or not view.nbytes:
            return view.nbytes
        if not self._is_ours():
            raise ValueError(f"{self.path} is being written by the process that this one was forked from")
        self._raise_failure()
        view = view.cast("B")
        try:
            return self._writer.write(view)
        except BaseException as error:
            self._failure = error
            raise

    def tell(self) -> int:
        """Bytes of the file so far; for an appending handle, with what was there."""
        self._check_open()
        return self._writer.length if self._writer is not None else 0

    def flush(self) -> None:
        """Nothing: bytes become visible, and durable, when the file is closed."""
        self._check_open()

    def fileno(self) -> int:
        """A descriptor on which ``os.fsync`` succeeds and does nothing, because ``close`` is what makes bytes durable.

        Code that flushes what it wrote, as DCP does, would otherwise flush every filesystem of the machine. The file
        behind it is sealed: writing to the descriptor directly fails rather than losing bytes.
        """
        self._check_open()
        if self._memory_file is None:
            self._memory_file = os.memfd_create("tierfs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fcntl.fcntl(
                self._memory_file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
            )
        return self._memory_file

    def close(self) -> None:
        """Publish the file, or in a transaction leave it to `commit`. A second call does nothing.

        Raises:
            ConflictError: Somebody else changed the path since it was opened; theirs stands.
            TierfsError: It could not be stored; the path holds what it held before.
        """
        if self.closed:
            return
        error = sys.exc_info()[1]
        if error is not None and error is not self._error_at_open:
            self._settled = True
            self.give_up(error)
        if self._writer is not None and self._failure is not None:
            self.discard()
            self._raise_failure()
        self._close_handle()
        if self.autocommit:
            self.commit()

    def commit(self) -> None:
        """Publish what was written. Raises as `close` does."""
        self._close_handle()
        writer, self._writer = self._writer, None
        if writer is not None and self._is_ours():
            writer.commit()
            self._settled = True

    def discard(self) -> None:
        """Publish nothing."""
        self._abort()
        self._close_handle()

    def give_up(self, error: BaseException) -> None:
        """Publish nothing, because of this error. What a wrapper still writes before it closes the handle is ignored."""
        if self._abort():
            _logger.warning("%s was given up because of %r and is not published", self.path, error)

    def absorb_removal(self) -> bool:
        """Whether deleting its path, as the thread that opened it asks for now, is meant for what it could not write.

        It is, and that is given up, if the thread is handling an exception that came up before the file was published or
        ``with`` was left. DCP, for one, deletes a data file that it fails to write before it lets go of the handle; what
        lies there is the version before.
        """
        error = sys.exc_info()[1]
        if self._settled or error is None or error is self._error_at_open:
            return False
        self._settled = True
        self.give_up(error)
        return True

    def drop(self) -> None:
        """The same for a handle that nobody refers to any more and nobody closed.

        Waits for nothing: garbage is collected in any thread, in one that sends a chunk of this file too.
        """
        writer, self._writer = self._writer, None
        if writer is not None and self._is_ours():
            _logger.warning("%s was dropped without being closed and is not published", self.path)
            warnings.warn(f"unclosed file {self.path!r} is not published", ResourceWarning, stacklevel=3, source=self)

    def _dealloc_warn(self, source: Any) -> None:
        """What a text wrapper of ``io`` calls when it is dropped unclosed, before it flushes and closes this handle."""
        self.drop()

    def __enter__(self) -> WriteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settled = True
        if error is not None and not self.closed:
            self.give_up(error)
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_error_at_open"):
            # It stays open: a compressor that is collected with it may yet write to it, and what it writes is ignored.
            self._close_descriptor()
            self.drop()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.path}: I/O operation on closed file")

    def _raise_failure(self) -> None:
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            raise StoreError(f"{self.path}: a write was interrupted: write the file again") from self._failure

    def _abort(self) -> bool:
        writer, self._writer = self._writer, None
        if writer is None or not self._is_ours():
            return False
        writer.abort()
        return True

    def _is_ours(self) -> bool:
        """False in a child forked since: the file is its parent's, and so are the threads that send its chunks."""
        return self._process == os.getpid()

    def _close_handle(self) -> None:
        self._close_descriptor()
        super().close()

    def _close_descriptor(self) -> None:
        if self._memory_file is not None:
            os.close(self._memory_file)
            self._memory_file = None


class TextFile(io.TextIOWrapper):
    """A handle in text mode, which passes on that an exception, or being dropped, is to publish nothing."""

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
            return  # its arguments were refused, so it never became a handle
        try:
            if isinstance(self.buffer, WriteFile | CompressedFile):
                self.buffer.drop()
        finally:
            self.close()


class CompressedFile(io.BufferedIOBase):
    """A handle behind a compressor, whose ``close`` also closes what lies below it, as compressors leave undone."""

    def __init__(self, outer: Any, inner: ReadFile | WriteFile) -> None:
        self._outer = outer
        self._inner = inner
        self.path = inner.path

    def readable(self) -> bool:
        """Whether the handle below is."""
        return self._inner.readable()

    def writable(self) -> bool:
        """Whether the handle below is."""
        return self._inner.writable()

    def seekable(self) -> bool:
        """Whether the compressor can seek."""
        return bool(self._outer.seekable())

    def read(self, size: int | None = -1) -> bytes:
        """Read and decompress."""
        return bytes(self._outer.read(-1 if size is None else size))

    def read1(self, size: int = -1) -> bytes:
        """Read and decompress, at most one block."""
        return self.read(size if size >= 0 else BLOCK_BYTES)

    def readinto(self, buffer: Any) -> int:
        """Read and decompress into ``buffer``."""
        out = memoryview(buffer).cast("B")
        piece = self.read(len(out))
        out[: len(piece)] = piece
        return len(piece)

    def write(self, data: Any) -> int:
        """Compress and write."""
        self._outer.write(data)
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek in the decompressed bytes."""
        return int(self._outer.seek(offset, whence))

    def tell(self) -> int:
        """Position in the decompressed bytes."""
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
        """See `WriteFile.give_up`."""
        if isinstance(self._inner, WriteFile):
            self._inner.give_up(error)

    def drop(self) -> None:
        """See `WriteFile.drop`."""
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
