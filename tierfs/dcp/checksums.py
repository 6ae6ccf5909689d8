"""The checksums in archives of ``torch.save``, which torch passes over when it loads one."""

from __future__ import annotations

import errno
import zipfile
from typing import IO

__all__ = ["problem_of"]

_ZIP = b"PK\x03\x04"


def problem_of(file: IO[bytes]) -> str | None:
    """What is in an archive that does not have its checksum, in words.

    Args:
        file: The archive, at its start.

    Returns:
        ``None`` for nothing, and for what is no archive, is compressed, as torch's never are, or was written without checksums
        (``torch.serialization.set_crc32_options``).
    """
    if file.read(len(_ZIP)) != _ZIP:
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            records = [record for record in archive.infolist() if record.file_size]
            # What is not compressed is not longer than the file, so reading it is bounded.
            is_torchs = all(record.compress_type == zipfile.ZIP_STORED for record in records)
            return archive.testzip() if is_torchs and any(record.CRC for record in records) else None
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        return repr(error)
    except OSError as error:
        if error.errno != errno.EINVAL:  # to seek to before the file's start is what its own offsets ask for
            raise
        return repr(error)
