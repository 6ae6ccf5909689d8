"""Files of a store as streams, for ``torch.save``, ``torch.load`` and other functions that need streams.

Also the checksums in archives of ``torch.save``, which torch ignores when it loads an archive.
"""

from __future__ import annotations

import errno
import io
import zipfile
import zlib
from functools import partial
from types import TracebackType
from typing import IO, Any

from tierfs.codec.layout import torch_zip
from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.load.shards import ShardFiles
from tierfs.errors import CorruptionError, TierfsError
from tierfs.store import Reader, Writer


class SaveStream(io.RawIOBase):
    """A file that is published when it is closed.

    It is discarded if an exception leaves its ``with``, or if it is never closed. torch hides the reason why a write
    failed behind an error about the end of its own file; leaving the ``with`` raises the reason.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer
        self._error: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Append bytes. They are copied."""
        try:
            return self._writer.write(data)
        except Exception as error:
            self._error = self._error or error
            raise

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
        if self._error is not None and self._error is not error:
            raise self._error from None

    def __del__(self) -> None:
        if not self.closed:
            self.discard()


class ReadStream(io.RawIOBase):
    """A range of a file in bytes, by default up to its end. Bytes of a file that tierfs wrote are verified."""

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


PIECE_BYTES = 1 << 20


def check_checksums(
    files: ShardFiles, place: BytesPlace, fqn: str, stream: IO[bytes], known: memoryview | None = None
) -> None:
    """Check an archive that tierfs has no digests of against the checksums in it: see `problem_of`.

    Raises:
        CorruptionError: A record does not match its checksum.
        TierfsError: The archive cannot be read.
    """
    if not files.has_digests(place.file) and (problem := problem_of(stream, known)) is not None:
        where = files.where(place.file)
        raise CorruptionError(f"{fqn!r} in shard file {where}: damaged: {problem}", path=place.file)


def problem_of(file: IO[bytes], known: memoryview | None = None) -> str | None:
    """Return a description of the first record of an archive that does not match its checksum.

    Args:
        file: The archive, at its start.
        known: The loaded bytes of a record. If they match the length and checksum of a record, it is not read again.
            Borrowed.

    Returns:
        ``None`` if all records match, and for a file that is not an archive, that is compressed (torch never
        compresses), or that was written without checksums (``torch.serialization.set_crc32_options``).
    """
    if file.read(len(torch_zip.LOCAL)) != torch_zip.LOCAL:
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            records = [record for record in archive.infolist() if record.file_size]
            # An uncompressed record is at most as long as the file, so reading it is bounded.
            is_torchs = all(record.compress_type == zipfile.ZIP_STORED for record in records)
            for record in records if is_torchs and any(record.CRC for record in records) else ():
                if known is None or record.file_size != len(known) or zlib.crc32(known) != record.CRC:
                    with archive.open(record) as content:
                        for _ in iter(partial(content.read, PIECE_BYTES), b""):
                            pass  # zipfile compares the checksum at the end of the record
    except TierfsError:
        raise
    except (zipfile.BadZipFile, EOFError, ValueError, OverflowError, NotImplementedError, RuntimeError) as error:
        return repr(error)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the archive's own offsets can make zipfile seek before the file's start
            raise
        return repr(error)
    return None


def has_raw_records(file: IO[bytes]) -> bool:
    """Return whether a sound archive stores all records as they are, so that tensors can lie in a mapping of it.

    A zip program may have compressed the records of an archive. torch loads such an archive, except from a mapping.
    """
    with zipfile.ZipFile(file) as archive:
        return all(record.compress_type == zipfile.ZIP_STORED for record in archive.infolist())
