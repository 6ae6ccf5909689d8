"""Encode and decode one block: stored as it is, or as one zstd frame where that pays.

FORMAT.md, "Codecs". Pure functions; every size is bounded before anything is allocated.
"""

from __future__ import annotations

import enum
import threading

import zstandard

from tierfs.digest import Buffer
from tierfs.errors import CorruptionError, FormatError

__all__ = ["Codec", "decode_block", "encode_block"]

PROBE_BYTES = 16 * 1024
# A block must shrink to this share, or the time it takes is not worth it. Measured on training states: plain
# zstd wins 8 % on dense floats, at a tenth of the speed of a disk, and far more on text, indices and zeros.
WORTH = 0.75
_LEVEL = 1
_local = threading.local()


class Codec(enum.IntEnum):
    """How one block is encoded. The number is stored in the envelope."""

    STORE = 0
    ZSTD = 1


def encode_block(raw: memoryview) -> tuple[Codec, Buffer]:
    """Encode one block.

    Args:
        raw: The block, 1 byte to 1 MiB. Borrowed; the result may be ``raw`` itself.

    Returns:
        The codec, and the encoded bytes, never more than the raw ones.
    """
    compressor = _compressor()
    middle = max(0, (len(raw) - PROBE_BYTES) // 2)
    probe = raw[middle : middle + PROBE_BYTES]
    if len(compressor.compress(probe)) > len(probe) * WORTH:
        return Codec.STORE, raw
    encoded = compressor.compress(raw)
    if len(encoded) > len(raw) * WORTH:
        return Codec.STORE, raw
    return Codec.ZSTD, encoded


def decode_block(codec: int, encoded: memoryview, out: memoryview, where: str) -> None:
    """Decode one block into ``out``, which has exactly the block's raw size. Does not verify its digest.

    Raises:
        CorruptionError: The bytes do not decode to that size.
        FormatError: The codec is unknown.
    """
    if codec == Codec.STORE:
        if len(encoded) != len(out):
            raise CorruptionError(f"{where}: {len(encoded)} bytes where {len(out)} belong", path=where)
        out[:] = encoded
    elif codec == Codec.ZSTD:
        out[:] = _decompress(encoded, len(out), where)
    else:
        raise FormatError(f"{where}: unknown codec {codec}: use a newer tierfs", path=where)


def _decompress(encoded: memoryview, size: int, where: str) -> bytes:
    try:
        # The frame's own claim is checked first: a bomb never gets memory on its header's word.
        if zstandard.frame_content_size(encoded) != size:
            raise CorruptionError(f"{where}: a block that does not decode to {size} bytes", path=where)
        decoded: bytes = _decompressor().decompress(encoded, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"{where}: a block that does not decode: {error}", path=where) from None
    if len(decoded) != size:
        raise CorruptionError(f"{where}: a block that does not decode to {size} bytes", path=where)
    return decoded


def _compressor() -> zstandard.ZstdCompressor:
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    return decompressor
