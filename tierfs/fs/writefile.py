"""The handle of a file that is open for writing. ``close`` publishes the whole file, or nothing."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from tierfs._fork import PerProcess
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import StoreError
from tierfs.store import Writer

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
# Most frames between a `with` and the handle that it closes: a text wrapper, a compressor, a list of both.
FRAMES_MAX = 6
_logger = logging.getLogger("tierfs.fs")


class WriteDescriptor:
    """A file in memory (memfd) that user code writes to. `collect` takes its bytes and releases their memory.

    Offsets in it are offsets in the file being written. Collected bytes become a hole, so memory holds only the bytes
    written since. The user's descriptor is write-only, because a hole would read as zeros. ``length`` is the number of
    bytes that the file has already.
    """

    def __init__(self, path: str, length: int) -> None:
        self._path = path
        self._collected = length
        self._is_sealed = False
        self._memory = os.memfd_create("tierfs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._memory, length)
            self.number = os.open(f"/proc/self/fd/{self._memory}", os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self._memory)
            raise
        os.lseek(self.number, length, os.SEEK_SET)

    @property
    def length(self) -> int:
        """Length of the file in bytes, including bytes that are not collected yet."""
        return os.fstat(self._memory).st_size

    def go_to_end(self) -> None:
        """Set the offset to the end. Code that used a duplicate of the descriptor may have moved it."""
        os.lseek(self.number, 0, os.SEEK_END)

    def write(self, data: memoryview, store: Callable[[memoryview], object]) -> None:
        """Append bytes behind those that other code wrote to the descriptor, and collect all of them."""
        self.go_to_end()
        for start in range(0, len(data), BLOCK_BYTES):
            piece = data[start : start + BLOCK_BYTES]
            while piece:
                piece = piece[os.write(self.number, piece) :]
            self.collect(store)

    def collect(self, store: Callable[[memoryview], object]) -> None:
        """Pass the bytes written since the last call to ``store``, in order.

        Raises:
            StoreError: Bytes that were collected before have been changed or cut off. They cannot be recalled.
        """
        length = self.length
        if length < self._collected or self._is_changed():
            raise StoreError(
                f"{self._path}: bytes before offset {self._collected} were changed through the file's descriptor, which "
                "can only be written from start to end: write the file locally and copy it with fs.put",
                path=self._path,
            )
        while self._collected < length:
            piece = os.pread(self._memory, min(BLOCK_BYTES, length - self._collected), self._collected)
            store(memoryview(piece))
            if not self._is_sealed:
                from tierfs.host.slab.allocate import give_up  # noqa: PLC0415 - it loads NumPy

                give_up(self._memory, 0, self._collected + len(piece))
            self._collected += len(piece)

    def seal(self) -> None:
        """Forbid writes by any process. A child that still holds the descriptor gets an error from then on."""
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, _SEALS)
        self._is_sealed = True

    def close(self) -> None:
        """Close the descriptors in this process."""
        os.close(self.number)
        os.close(self._memory)

    def _is_changed(self) -> bool:
        """Whether the hole contains a nonzero byte."""
        try:
            at = os.lseek(self._memory, 0, os.SEEK_DATA)
        except OSError:
            return False  # ENXIO: the whole file is a hole
        while at < self._collected:
            piece = os.pread(self._memory, min(BLOCK_BYTES, self._collected - at), at)
            if piece.count(0) != len(piece):
                return True
            at += len(piece)
        return False


class WriteFile(io.BufferedIOBase):
    """A file being written. ``close`` publishes the whole file, or nothing.

    Nothing is published after an exception inside ``with``, if ``close`` is called while an exception is
    being handled, or if the handle is dropped without being closed. Each case is logged. In the second case
    ``close`` also raises, unless a ``with`` passes the exception on. A failed write leaves a hole. After it,
    every write and ``close`` raise the same error, and nothing is published.

    Several threads may write to a handle: each call of ``write`` appends its bytes as a whole. In a transaction
    (``autocommit=False``), ``commit`` publishes, and ``close`` does not.
    """

    def __init__(self, fs: Any, path: str, writer: Writer, mode: str, *, autocommit: bool = True) -> None:
        self.fs = fs
        self.path = path
        self.mode = mode
        self.autocommit = autocommit
        self._writer: Writer | None = writer  # None once the file is published, discarded or dropped
        self._failure: BaseException | None = None
        self._descriptor: WriteDescriptor | None = None
        self._process = os.getpid()
        self._lock = PerProcess(threading.RLock)  # held while the writer or the descriptor is used or closed
        self._error_at_open = sys.exc_info()[1]
        self._outcome_known = False  # published, or the caller knows that it is not

    @property
    def name(self) -> str:
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
        return True

    def seekable(self) -> bool:
        """Return False, except to the constructor of a text handle: it writes a byte order mark only if this is True."""
        return isinstance(sys._getframe(1).f_locals.get("self"), io.TextIOWrapper)

    def write(self, data: Any) -> int:
        """Append bytes. They are copied, so the caller may change ``data`` afterwards."""
        view = memoryview(data)
        with self._lock():
            self._check_open()
            if self._writer is None or not view.nbytes:
                return view.nbytes
            if not self._is_ours():
                raise ValueError(
                    f"{self.path} was opened before this process was forked: only the process that opened it can write it"
                )
            self._raise_failure()
            view = view.cast("B")
            with self._keeping_failure():
                if self._descriptor is None:
                    return self._writer.write(view)
                self._descriptor.write(view, self._writer.write)
        return view.nbytes

    def tell(self) -> int:
        """Return the length of the file so far. If the handle appends, this includes the earlier content."""
        self._check_open()
        if self._writer is None:
            return 0
        return self._writer.length if self._descriptor is None else self._descriptor.length

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek to the end of the file, where every write goes. No other position is supported.

        An offset from the start is accepted only after ``fileno``. NumPy writes to the descriptor and then seeks to the
        new end. `zipfile` would take success as permission to seek back and overwrite.

        Raises:
            io.UnsupportedOperation: The position is not the end.
        """
        end = self.tell()
        if whence not in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END):
            raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
        if offset != (end if whence == os.SEEK_SET else 0) or (whence == os.SEEK_SET and self._descriptor is None):
            raise io.UnsupportedOperation(f"{self.path} is written from start to end: it cannot seek")
        if self._descriptor is not None:
            self._descriptor.go_to_end()
        return end

    def flush(self) -> None:
        """Do nothing. Bytes become visible and durable when the file is closed."""
        self._check_open()

    def fileno(self) -> int:
        """Return a descriptor for C code and child processes. The bytes that they write become part of the file.

        The descriptor is write-only, and can be written only from start to end. Its bytes lie in memory until the next
        call of ``write``, ``fileno`` or ``close``. A child that writes to it after ``close`` gets an error.
        ``os.fsync`` succeeds and does nothing, because ``close`` makes bytes durable.
        """
        with self._lock():
            self._check_open()
            if self._descriptor is None:
                self._descriptor = WriteDescriptor(self.path, self.tell())
            else:
                self._collect()
            return self._descriptor.number

    def close(self) -> None:
        """Publish the file; in a transaction, leave that to `commit`. A second call does nothing.

        Raises:
            ConflictError: Another writer changed the path after it was opened. The other version stands.
            StoreError: An exception is being handled outside of any ``with``, so nothing is published.
            TierfsError: The file could not be stored. The path keeps its earlier content.
        """
        if self.closed:
            return
        error = sys.exc_info()[1]
        if error is not None and error is not self._error_at_open:
            self._outcome_known = True
            was_pending = self.pending
            self.give_up(error)
            self._close_handle()
            if was_pending and not _is_leaving_a_with():
                raise StoreError(
                    f"{self.path} is not published, because it was closed while {error!r} was being handled: if it is "
                    "complete, call commit() instead",
                    path=self.path,
                ) from error
            return
        with self._lock():
            self._collect_rest()
            if self._writer is not None and self._failure is not None:
                self.discard()
                self._raise_failure()
            self._close_handle()
            if self.autocommit:
                self.commit()

    def commit(self) -> None:
        """Publish the file. Raises the errors of `close`."""
        with self._lock():
            self._collect_rest()
            self._close_handle()
            writer, self._writer = self._writer, None
            if writer is not None and self._is_ours():
                try:
                    writer.commit()
                finally:
                    # Commit may raise after the file became pending, say because it missed its level. Only a delete
                    # undoes that.
                    self._outcome_known = writer.is_done

    def discard(self) -> None:
        """Close the handle and publish nothing."""
        with self._lock():
            self._abort()
            self._close_handle()

    def give_up(self, error: BaseException) -> None:
        """Discard the file because of this error. Later writes by a wrapper are ignored."""
        if self._abort():
            _logger.warning("%s was discarded because of %r and is not published", self.path, error)

    def absorb_removal(self) -> bool:
        """Discard the file if a request to delete its path means this failed write. Return whether it does.

        It does if this thread, which opened the file, is handling an exception that was raised before the file was
        published and before its ``with`` ended. DCP, for example, deletes a data file that it fails to write before it
        closes the handle. The path still holds the previous version then, which must stay.
        """
        error = sys.exc_info()[1]
        if self._outcome_known or error is None or error is self._error_at_open:
            return False
        self._outcome_known = True
        self.give_up(error)
        return True

    def drop(self) -> None:
        """Publish nothing, because the handle was garbage-collected without being closed.

        Never blocks: garbage collection runs in any thread, also in one that sends a chunk of this file.
        """
        writer, self._writer = self._writer, None
        if writer is not None and self._is_ours():
            _logger.warning("%s was dropped without being closed and is not published", self.path)
            warnings.warn(f"unclosed file {self.path!r} is not published", ResourceWarning, stacklevel=3, source=self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.path}: a file that is being written cannot be pickled: close it first, then open it again"
        )

    def _dealloc_warn(self, source: Any) -> None:
        """Drop this handle. A text wrapper of `io` that is dropped unclosed calls this before it closes the handle."""
        self.drop()

    def __enter__(self) -> WriteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._outcome_known = True
        if error is not None and not self.closed:
            self.give_up(error)
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_error_at_open"):
            # Stay open: a compressor that is collected together with this handle may still write to it. Such writes are
            # ignored.
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

    @contextlib.contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        """Remember an error of the body, because a failed write leaves a hole."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def _collect(self) -> None:
        """Pass the bytes that were written to the descriptor to the writer."""
        if self._descriptor is not None and self._writer is not None and self._is_ours():
            self._raise_failure()
            with self._keeping_failure():
                self._descriptor.collect(self._writer.write)

    def _collect_rest(self) -> None:
        """Collect the last bytes, and seal the descriptor, so that a child that still holds it cannot write."""
        if self._descriptor is not None and self._writer is not None and self._is_ours() and self._failure is None:
            try:
                self._descriptor.collect(self._writer.write)
                self._descriptor.seal()
                self._descriptor.collect(self._writer.write)
            except BaseException:
                self.discard()
                raise

    def _abort(self) -> bool:
        if self._writer is None:  # perhaps another thread is publishing the file: do not wait for it
            return False
        with self._lock():
            writer, self._writer = self._writer, None
            if writer is None or not self._is_ours():
                return False
            if self._descriptor is not None:
                self._descriptor.seal()
            writer.abort()
        return True

    def _is_ours(self) -> bool:
        """Whether this process opened the file. A forked child has none of the threads that send its chunks."""
        return self._process == os.getpid()

    def _close_handle(self) -> None:
        self._close_descriptor()
        super().close()

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            self._descriptor.close()
            self._descriptor = None


def _is_leaving_a_with() -> bool:
    """Whether the ``__exit__`` of another object called ``close``.

    ``fsspec.open`` returns an `OpenFile`. Its ``__exit__`` closes the handle without passing on the
    exception, and so does ``contextlib.closing``. In these cases the exception propagates by itself. In all
    others, ``close`` must raise.
    """
    frame = sys._getframe(2)
    for _ in range(FRAMES_MAX):
        if frame.f_code.co_name == "__exit__":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
