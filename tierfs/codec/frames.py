"""Zstandard frames of a known size, and the error by which all decoders report wrong bytes."""

from __future__ import annotations

import threading

import zstandard

from tierfs.digest import Buffer

_local = threading.local()


class DamageError(Exception):
    """Encoded bytes break a rule of FORMAT.md. `decode_block` adds their place and raises `CorruptionError`."""


def compress(data: Buffer) -> bytes:
    """Compress bytes that are not numbers, such as text, code or indices, to a frame."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=1)
    return compressor.compress(data)


def pack_plane(data: Buffer) -> bytes:
    """Compress one byte plane to a frame, with zstd as a Huffman coder that hardly looks for matches.

    Measured on exponents of training states: smaller than at levels 1 to 3, and three times as fast as level 1.
    """
    packer: zstandard.ZstdCompressor | None = getattr(_local, "packer", None)
    if packer is None:
        parameters = zstandard.ZstdCompressionParameters(
            # Blocks of 32 KiB, each with its own code: small adjacent tensors have different exponents.
            window_log=15,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,  # above 0, this strategy switches its Huffman coder off
            strategy=zstandard.STRATEGY_FAST,
        )
        packer = _local.packer = zstandard.ZstdCompressor(compression_params=parameters)
    return packer.compress(data)


def decompress(frame: memoryview, size: int) -> bytes:
    """Return the content of a frame, of ``size`` bytes.

    Raises:
        DamageError: ``frame`` is not exactly one frame that states this size and holds it.
    """
    try:
        # Check the stated size first, so that no memory is allocated for a decompression bomb.
        if zstandard.frame_content_size(frame) != size:
            raise DamageError(f"a frame does not state {size} bytes")
        decoded: bytes = _decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamageError(str(error)) from None
    if len(decoded) != size:
        raise DamageError(f"a frame does not decode to {size} bytes")
    return decoded


def _decompressor() -> zstandard.ZstdDecompressor:
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    return decompressor
