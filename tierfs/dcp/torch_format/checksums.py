"""The checksums in archives of ``torch.save``, which torch passes over when it loads one."""

from __future__ import annotations

import errno
import zipfile
import zlib
from functools import partial
from typing import IO

from tierfs.codec.layout import torch_zip
from tierfs.dcp.load.shards import ShardFiles
from tierfs.dcp.metadata import BytesPlace
from tierfs.errors import CorruptionError, TierfsError

__all__ = ["check_checksums", "problem_of"]

PIECE_BYTES = 1 << 20


def check_checksums(
    files: ShardFiles, place: BytesPlace, fqn: str, stream: IO[bytes], known: memoryview | None = None
) -> None:
    """Hold what others wrote to the checksums in it, as there are no digests: see `problem_of`.

    Args:
        files: The checkpoint's.
        place: Where it is.
        fqn: Its name.
        stream: Its bytes, at their start.
        known: As for `problem_of`.

    Raises:
        CorruptionError: Something does not have its checksum.
        TierfsError: It cannot be read.
    """
    if not files.has_digests(place.file) and (problem := problem_of(stream, known)) is not None:
        where = files.where(place.file)
        raise CorruptionError(f"{fqn!r} in shard file {where}: damaged: {problem}", path=place.file)


def problem_of(file: IO[bytes], known: memoryview | None = None) -> str | None:
    """The records of an archive that do not have their checksum, in words.

    Args:
        file: The archive, at its start.
        known: The loaded bytes of the record that has this length, which then need not be read again. Borrowed.

    Returns:
        ``None`` for nothing, and for what is no archive, is compressed, as torch's never are, or was written without checksums
        (``torch.serialization.set_crc32_options``).
    """
    if file.read(len(torch_zip.LOCAL)) != torch_zip.LOCAL:
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            records = [record for record in archive.infolist() if record.file_size]
            # An uncompressed record is not longer than the file, so reading it is bounded.
            is_torchs = all(record.compress_type == zipfile.ZIP_STORED for record in records)
            for record in records if is_torchs and any(record.CRC for record in records) else ():
                if known is None or record.file_size != len(known) or zlib.crc32(known) != record.CRC:
                    with archive.open(record) as content:
                        for _ in iter(partial(content.read, PIECE_BYTES), b""):
                            pass  # its checksum is looked at when it ends
    except TierfsError:
        raise
    except (zipfile.BadZipFile, EOFError, ValueError, OverflowError, NotImplementedError, RuntimeError) as error:
        return repr(error)
    except OSError as error:
        if error.errno != errno.EINVAL:  # to seek to before the file's start is what its own offsets ask for
            raise
        return repr(error)
    return None
