"""The checksums in archives of ``torch.save``, which torch ignores when it loads an archive."""

from __future__ import annotations

import errno
import zipfile
import zlib
from functools import partial
from typing import IO

from tierfs.codec.layout import torch_zip
from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.load.shards import ShardFiles
from tierfs.errors import CorruptionError, TierfsError

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
