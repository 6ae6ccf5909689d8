"""Choose the codec of a tensor by encoding a sample of it. Pure functions."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np

from tierfs.codec.blocks import Codec, Coding, encode_block

SAMPLE_BYTES = 128 << 10
# A read of a delta also reads its base, so a delta may have at most this share of the standalone size.
# docs/decisions/0019.
DELTA_WORTH = 0.85
# In unrelated data 1 byte in 256 is equal by chance. Below this share, differences of plain bytes do not pay.
BYTES_EQUAL = 0.05
# SPARSE is slow to encode. Below this share of equal elements it is no smaller than DPLANE.
SPARSE_EQUAL = 0.6
_STORE = Coding(Codec.STORE)


class Choice(NamedTuple):
    """The results of the trials with a tensor.

    Attributes:
        static: How to encode it alone.
        static_ratio: Encoded over raw bytes, alone.
        delta: How to encode it against a base; None if that does not pay.
        delta_ratio: Encoded over raw bytes, against a base; None if no base was tried.
    """

    static: Coding
    static_ratio: float
    delta: Coding | None = None
    delta_ratio: float | None = None


def sample_of(length: int) -> tuple[int, int]:
    """Return offset and length of the sample in a chunk of this length. It begins at an element of any width."""
    count = min(length, SAMPLE_BYTES)
    return (length - count) // 2 // 8 * 8, count


def choose(
    sample: memoryview, *, kind: str, width: int, base: memoryview | None, allowed: Container[Codec], out: memoryview
) -> Choice:
    """Encode a sample with each codec that may pay, and return the best ones.

    Args:
        sample: Some of the tensor's bytes, at most 1 MiB, from the beginning of an element on.
        kind: Kind of its elements: ``"float"``, ``"integer"`` or ``"bytes"``.
        width: Bytes of an element.
        base: The same part of the possible base, or None.
        allowed: Codecs that may be chosen. STORE always may.
        out: Scratch memory, at least as long as the sample.
    """
    planes, frame = Coding(Codec.PLANE, width), Coding(Codec.ZSTD)
    # Bytes of an unknown format may be numbers: a model's weights in GGUF, or an array.
    unknown = [frame, Coding(Codec.PLANE, 2), Coding(Codec.PLANE, 4)]
    candidates = {"float": [planes], "integer": [frame, planes]}.get(kind, unknown)
    static, static_ratio = _STORE, 1.0
    for coding in candidates:
        if coding.codec in allowed:
            ratio = _ratio(sample, coding, None, allowed, out)
            if ratio < static_ratio:
                static, static_ratio = coding, ratio
    if base is None or (Codec.DPLANE not in allowed and Codec.SPARSE not in allowed):
        return Choice(static, static_ratio)
    delta, delta_ratio = _STORE, 1.0
    if kind == "bytes" and _equal(sample, base, width) < BYTES_EQUAL:
        return Choice(static, static_ratio, None, delta_ratio)
    for coding in (Coding(Codec.DPLANE, width), Coding(Codec.SPARSE, width)):
        if coding.codec not in allowed or (coding.codec is Codec.SPARSE and _equal(sample, base, width) < SPARSE_EQUAL):
            continue
        ratio = _ratio(sample, coding, base, allowed, out)
        if ratio < delta_ratio:
            delta, delta_ratio = coding, ratio
    return Choice(static, static_ratio, delta if delta_ratio <= DELTA_WORTH * static_ratio else None, delta_ratio)


def _ratio(
    sample: memoryview, coding: Coding, base: memoryview | None, allowed: Container[Codec], out: memoryview
) -> float:
    codec, length = encode_block(sample, coding, base, out)
    return length / len(sample) if codec in allowed else 1.0  # `encode_block` fell back to a codec that is not allowed


def _equal(sample: memoryview, base: memoryview, width: int) -> float:
    """Return the share of equal elements."""
    count = len(sample) // width
    if not count:
        return 0.0
    dtype = f"u{width}"
    pairs = (np.frombuffer(view[: count * width], dtype=dtype) for view in (sample, base))
    return 1 - int(np.count_nonzero(np.not_equal(*pairs))) / count
