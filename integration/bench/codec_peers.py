"""Other compressors on the same bytes, tensor by tensor, for `codec.py`."""

from __future__ import annotations

import torch
import zstandard

from tierfs.digest import BLOCK_BYTES

ZSTD_LEVEL = 3
# zipnn kills the process on inputs of a few bytes.
ZIPNN_BYTES_MIN = 512


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def zstd(tensors: dict[str, torch.Tensor]) -> int:
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    return sum(len(compressor.compress(tensor_bytes(tensor))) for tensor in tensors.values())


def zstd_from(tensors: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> int:
    """Return the bytes after ``zstd --patch-from``; a block's dictionary is the same block of the base tensor."""
    window = (2 * BLOCK_BYTES).bit_length()
    parameters = zstandard.ZstdCompressionParameters.from_level(ZSTD_LEVEL, window_log=window, enable_ldm=True)
    total = 0
    for name, tensor in tensors.items():
        raw, before = tensor_bytes(tensor), tensor_bytes(base[name])
        for at in range(0, len(raw), BLOCK_BYTES):
            content = bytes(before[at : at + BLOCK_BYTES])
            dictionary = zstandard.ZstdCompressionDict(content, zstandard.DICT_TYPE_RAWCONTENT)
            compressor = zstandard.ZstdCompressor(dict_data=dictionary, compression_params=parameters)
            total += len(compressor.compress(raw[at : at + BLOCK_BYTES]))
    return total


def zipnn(tensors: dict[str, torch.Tensor]) -> int:
    try:
        from zipnn import ZipNN
    except ImportError:
        raise ModuleNotFoundError("codec.py compares with zipnn: pip install zipnn") from None
    total = 0
    for tensor in tensors.values():
        kind = "bfloat16" if tensor.dtype == torch.bfloat16 else "float32"
        raw = bytearray(tensor_bytes(tensor))  # a copy, because zipnn changes its input
        if len(raw) < ZIPNN_BYTES_MIN:
            total += len(raw)
            continue
        coder = ZipNN(bytearray_dtype=kind, input_format="byte", threads=1)
        encoded = coder.compress(raw)
        assert bytes(coder.decompress(encoded)) == bytes(tensor_bytes(tensor)), "zipnn lost something"
        total += min(len(encoded), tensor.nbytes)
    return total
