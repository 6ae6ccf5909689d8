"""Zstandard frames of a known size, and how hard they are worked for."""

from __future__ import annotations

import threading

import zstandard

from tierfs.codec.damage import DamageError
from tierfs.digest import Buffer

__all__ = ["compress", "decompress", "pack_plane"]

_local = threading.local()


def compress(data: Buffer) -> bytes:
    """A frame of bytes that are no numbers: text, code, indices."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=1)
    return compressor.compress(data)


def pack_plane(data: Buffer) -> bytes:
    """A frame of one byte plane: zstd as a Huffman coder, which hardly looks for matches.

    Measured on exponents of training states: smaller than at levels 1 to 3, and three times as fast as level 1.
    """
    packer: zstandard.ZstdCompressor | None = getattr(_local, "packer", None)
    if packer is None:
        parameters = zstandard.ZstdCompressionParameters(
            window_log=15,  # and so blocks of 32 KiB, each with a code of its own: small tensors in a row have other exponents
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,  # with more, this strategy switches its Huffman coder off
            strategy=zstandard.STRATEGY_FAST,
        )
        packer = _local.packer = zstandard.ZstdCompressor(compression_params=parameters)
    return packer.compress(data)


def decompress(frame: memoryview, size: int) -> bytes:
    """The content of a frame of ``size`` bytes.

    Raises:
        DamageError: It is not exactly one frame that states this size and holds it.
    """
    try:
        # The frame's own claim is checked first: a bomb never gets memory on its header's word.
        if zstandard.frame_content_size(frame) != size:
            raise DamageError(f"a frame that is not of {size} bytes")
        decoded: bytes = _decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamageError(str(error)) from None
    if len(decoded) != size:
        raise DamageError(f"a frame that does not decode to {size} bytes")
    return decoded


def _decompressor() -> zstandard.ZstdDecompressor:
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    return decompressor
