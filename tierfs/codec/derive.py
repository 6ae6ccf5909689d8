"""Elements that follow from those of a base: nothing of them is stored. FORMAT.md, "Codecs"."""

from __future__ import annotations

import numpy as np

from tierfs.codec.damage import DamageError
from tierfs.codec.scratch import Elements, elements_of, scratch

__all__ = ["decode_derived", "encode_derived"]

_BFLOAT16 = 1
_WIDTH = 2
_NAN = 0x7FFF
_PIECE = 1 << 18


def encode_derived(raw: memoryview, base: memoryview, out: memoryview) -> int | None:
    """Encode bfloat16 numbers that are the rounded float32 ones of ``base``, twice as long, as DERIVE.

    Returns:
        The encoded length; ``None`` where any of them is not.
    """
    elements, sources = elements_of(raw, _WIDTH), elements_of(base, 2 * _WIDTH)
    tail = len(raw) % _WIDTH
    if 1 + tail >= len(raw):
        return None
    for at in range(0, elements.size, _PIECE):
        piece = elements[at : at + _PIECE]
        rounded = scratch("elements", _WIDTH, piece.size)
        _round(sources[at : at + _PIECE], rounded)
        if np.not_equal(piece, rounded, out=scratch("plane", 1, piece.size).view(np.bool_)).any():
            return None
    out[0] = _BFLOAT16
    out[1 : 1 + tail] = raw[len(raw) - tail :]
    return 1 + tail


def decode_derived(encoded: memoryview, out: memoryview, base: memoryview) -> None:
    """Decode a DERIVE block into ``out``.

    Raises:
        DamageError: It is none, or not of this size.
    """
    tail = len(out) % _WIDTH
    if len(encoded) != 1 + tail or encoded[0] != _BFLOAT16:
        raise DamageError("not derived by a function that is known")
    elements, sources = elements_of(out, _WIDTH), elements_of(base, 2 * _WIDTH)
    for at in range(0, elements.size, _PIECE):
        _round(sources[at : at + _PIECE], elements[at : at + _PIECE])
    out[len(out) - tail :] = encoded[1:]


def _round(sources: Elements, target: Elements) -> None:
    """Bfloat16 of float32, rounded to the nearest, ties to even: overflow becomes infinity, as it should."""
    sources = sources[: target.size]
    sums = scratch("other", 2 * _WIDTH, sources.size)
    np.right_shift(sources, 16, out=sums)
    np.bitwise_and(sums, 1, out=sums)
    np.add(sums, 0x7FFF, out=sums)
    np.add(sums, sources, out=sums)
    np.right_shift(sums, 16, out=target, casting="unsafe")
    is_nan = np.isnan(sources.view("<f4"), out=scratch("plane", 1, sources.size).view(np.bool_))
    if is_nan.any():
        target[is_nan] = _NAN
