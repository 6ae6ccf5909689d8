"""Blocks that repeat one element. FORMAT.md, "Codecs"."""

from __future__ import annotations

from tierfs.codec.damage import DamageError
from tierfs.codec.planes.planes import WIDTHS
from tierfs.codec.scratch import elements_of

_PROBE_BYTES = 64


def constant_element(raw: memoryview) -> bytes | None:
    """Return the shortest element that the block repeats, or None if there is none that is shorter than the block."""
    head = bytes(raw[:_PROBE_BYTES])
    for width in WIDTHS:
        element = head[:width]
        if width < len(raw) and (element * _PROBE_BYTES)[: len(head)] == head:
            whole, tail = elements_of(raw, 8), len(raw) % 8
            same = not whole.size or whole.min() == whole.max()
            return element if same and raw[len(raw) - tail :] == (element * 8)[:tail] else None
    return None


def decode_constant(encoded: memoryview, out: memoryview) -> None:
    """Fill ``out`` with the element.

    Raises:
        DamageError: ``encoded`` is not as long as an element.
    """
    if len(encoded) not in WIDTHS:
        raise DamageError(f"a constant of {len(encoded)} bytes")
    element = bytes(encoded) * (8 // len(encoded))
    elements_of(out, 8).fill(int.from_bytes(element, "little"))
    tail = len(out) % 8
    out[len(out) - tail :] = element[:tail]
