"""The handle of a file that is written: published whole by ``close``, or not at all."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tierfs.errors import StoreError
from tierfs.fs.write_descriptor import WriteDescriptor
from tierfs.store import Writer

__all__ = ["WriteFile"]

# How many calls lie at most between a `with` and the handle it closes: a text wrapper, a compressor, a list of both.
FRAMES_MAX = 6
_logger = logging.getLogger("tierfs.fs")


class WriteFile(io.BufferedIOBase):
    """A file being written. It is published whole by ``close``, or not at all.

    An exception inside ``with``, or one that is being handled while ``close`` is called, publishes nothing; nor does a
    handle that is dropped without being closed. All are logged, and ``close`` raises where no ``with`` does. A write that failed
    leaves a hole, so from then on every write raises its error again, and so does ``close``, which publishes nothing.

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
        self._descriptor: WriteDescriptor | None = None
        self._process = os.getpid()
        self._error_at_open = sys.exc_info()[1]
        self._outcome_known = False  # whether it is published, or whoever writes it knows that it is not

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

    def seekable(self) -> bool:
        """True, as ``tell`` works: `io.TextIOWrapper` writes a byte order mark only where it can ask for the position."""
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
        with self._keeping_failure():
            if self._descriptor is None:
                return self._writer.write(view)
            self._descriptor.write(view, self._writer.write)
        return view.nbytes

    def tell(self) -> int:
        """Bytes of the file so far; for an appending handle, with what was there."""
        self._check_open()
        if self._writer is None:
            return 0
        return self._writer.length if self._descriptor is None else self._descriptor.length

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Stay at the end, where every write goes. Nothing else can be asked for.

        An offset from the start is taken only from code that has the descriptor. NumPy says where the file ends after it
        wrote to that. `zipfile` takes it for leave to go back to what was written.

        Raises:
            io.UnsupportedOperation: It is another place.
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
        """Nothing: bytes become visible, and durable, when the file is closed."""
        self._check_open()

    def fileno(self) -> int:
        """A descriptor for C code and child processes. The bytes they write become the file's.

        It can be written from start to end, not read. Its bytes lie in memory until the next call of ``write``,
        ``fileno`` or ``close``. A child that still writes to it after ``close`` gets an error. ``os.fsync`` succeeds
        and does nothing, because ``close`` makes bytes durable.
        """
        self._check_open()
        if self._descriptor is None:
            self._descriptor = WriteDescriptor(self.path, self.tell())
        else:
            self._collect()
        return self._descriptor.number

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
            self._outcome_known = True
            was_pending = self.pending
            self.give_up(error)
            self._close_handle()
            if was_pending and not _is_leaving_a_with():
                raise StoreError(
                    f"{self.path} is not published, because it was closed while {error!r} was being handled: if it is "
                    "whole, call commit() instead",
                    path=self.path,
                ) from error
            return
        self._collect_rest()
        if self._writer is not None and self._failure is not None:
            self.discard()
            self._raise_failure()
        self._close_handle()
        if self.autocommit:
            self.commit()

    def commit(self) -> None:
        """Publish what was written. Raises as `close` does."""
        self._collect_rest()
        self._close_handle()
        writer, self._writer = self._writer, None
        if writer is not None and self._is_ours():
            try:
                writer.commit()
            finally:
                # Even where it failed, to reach its level for one: what is pending has to be deleted to be gone.
                self._outcome_known = writer.is_done

    def discard(self) -> None:
        """Publish nothing."""
        self._abort()
        self._close_handle()

    def give_up(self, error: BaseException) -> None:
        """Publish nothing, because of this error. Later writes of a wrapper are ignored."""
        if self._abort():
            _logger.warning("%s was discarded because of %r and is not published", self.path, error)

    def absorb_removal(self) -> bool:
        """Whether deleting its path, as the thread that opened it asks for now, is meant for what it could not write.

        It is, and that is discarded, if the thread is handling an exception that came up before the file was published or
        ``with`` was left. DCP, for one, deletes a data file that it fails to write before it releases the handle; what
        lies there is the version before.
        """
        error = sys.exc_info()[1]
        if self._outcome_known or error is None or error is self._error_at_open:
            return False
        self._outcome_known = True
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.path}: a file that is being written cannot be pickled: close it first, then open it anew"
        )

    def _dealloc_warn(self, source: Any) -> None:
        """A text wrapper of ``io`` calls this when it is dropped unclosed, before it flushes and closes this handle."""
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

    @contextlib.contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        """Remember an error: a write that failed leaves a hole."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def _collect(self) -> None:
        """Take over the bytes that were written to the descriptor."""
        if self._descriptor is not None and self._writer is not None and self._is_ours():
            self._raise_failure()
            with self._keeping_failure():
                self._descriptor.collect(self._writer.write)

    def _collect_rest(self) -> None:
        """Take over the last of them, and let a child that still has the descriptor write no more."""
        if self._descriptor is not None and self._writer is not None and self._is_ours() and self._failure is None:
            try:
                self._descriptor.collect(self._writer.write)
                self._descriptor.seal()
                self._descriptor.collect(self._writer.write)
            except BaseException:
                self.discard()
                raise

    def _abort(self) -> bool:
        writer, self._writer = self._writer, None
        if writer is None or not self._is_ours():
            return False
        if self._descriptor is not None:
            self._descriptor.seal()
        writer.abort()
        return True

    def _is_ours(self) -> bool:
        """False in a child forked since: the file is its parent's, and so are the threads that send its chunks."""
        return self._process == os.getpid()

    def _close_handle(self) -> None:
        self._close_descriptor()
        super().close()

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            self._descriptor.close()
            self._descriptor = None


def _is_leaving_a_with() -> bool:
    """Whether a ``with`` that knows of the exception, but does not say so, is what closes the handle.

    ``fsspec.open`` hands out an `OpenFile`, whose ``__exit__`` closes what it opened as if nothing had happened, as
    ``contextlib.closing`` does. There the exception goes on by itself; anywhere else the caller has to be told.
    """
    frame = sys._getframe(2)
    for _ in range(FRAMES_MAX):
        if frame.f_code.co_name == "__exit__":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
