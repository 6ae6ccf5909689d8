"""A block's elements as arrays, scratch memory for the next block, and small encodings. FORMAT.md, "Codecs".

Fresh memory takes ten times as long as the work that is done in it: the kernel zeroes each page when a thread first
touches it. The encodings: gaps between positions; the zigzag, which maps small differences of either sign to small
numbers; blocks that repeat one element.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierfs.codec.frames import DamageError
from tierfs.digest import BLOCK_BYTES

WIDTHS = (1, 2, 4, 8)
"""Bytes of an element."""
Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Elements of one of the `WIDTHS`, as unsigned integers."""

_Memory: TypeAlias = dict[str, NDArray[np.uint8]]

# How many free sets of scratch memory are kept, of up to 8 MiB each.
KEPT_MAX = 16
_local = threading.local()
_free: list[_Memory] = []


def elements_of(data: memoryview, width: int) -> Elements:
    """Return a view of the whole elements in ``data``. It may be unaligned, and is writable if ``data`` is."""
    return np.frombuffer(data, f"<u{width}", len(data) // width)


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Lend this thread a set of scratch memory for a ``with`` block.

    Threads use each other's sets again: of many threads that encode or decode, few do so at once.
    """
    memory: _Memory
    try:
        memory = _free.pop()
    except IndexError:
        memory = {}
    before, _local.memory = getattr(_local, "memory", None), memory
    try:
        yield
    finally:
        _local.memory = before
        if len(_free) < KEPT_MAX:
            _free.append(memory)


def scratch(name: str, width: int, count: int) -> Elements:
    """Return ``count`` elements of undefined content, which lie in this thread's memory for ``name``.

    They are valid until the thread asks for the same ``name`` again, or its `lent` block ends. Each of a dozen names
    has at most 1 MiB. All modules share the names: finish with the memory of a name before calling code that uses the
    name, too.
    """
    assert count * width <= BLOCK_BYTES
    memory = _memory()
    buffer = memory.get(name)
    if buffer is None:
        buffer = memory[name] = np.empty(BLOCK_BYTES, np.uint8)
    return buffer[: count * width].view(f"<u{width}")


def _memory() -> _Memory:
    memory: _Memory | None = getattr(_local, "memory", None)
    if memory is None:
        memory = _local.memory = {}
    return memory


_SKIP = 255
_PROBE_BYTES = 64


def gaps_of(positions: NDArray[np.intp]) -> Elements:
    """Return how many elements lie between each position and the one before: a byte 255 for each 255, then the rest."""
    gaps = positions.astype(np.uint32)
    gaps[1:] -= gaps[:-1] + 1
    skips = gaps // _SKIP
    gaps -= skips * _SKIP
    skips += 1
    ends = np.cumsum(skips)
    encoded = np.full(int(ends[-1]) if ends.size else 0, _SKIP, np.uint8)
    ends -= 1
    encoded[ends] = gaps
    return encoded


def check_gaps(count: int, gap_bytes: int, size: int) -> None:
    """Check that ``count`` positions in ``size`` elements may take ``gap_bytes`` bytes, before memory is allocated.

    Raises:
        DamageError: They cannot.
    """
    if count > size or gap_bytes > count + (size - count) // _SKIP:
        raise DamageError(f"{count} positions in {gap_bytes} gap bytes do not fit {size} elements")


def positions_of(gaps: Elements, count: int, size: int) -> NDArray[np.intp]:
    """Return the positions, in order.

    Raises:
        DamageError: There are not ``count`` of them, or one is not among ``size`` elements.
    """
    ends = gaps != _SKIP
    after = np.cumsum(gaps + ends, dtype=np.intp)
    if int(np.count_nonzero(ends)) != count or (gaps.size and (not ends[-1] or after[-1] > size)):
        raise DamageError("gaps do not match the stated positions")
    positions: NDArray[np.intp] = after[ends]
    positions -= 1
    return positions


def rare_positions(flags: Elements) -> NDArray[np.intp]:
    """Return the positions of the ones in ``flags``: bytes that are 0 or 1, a multiple of eight in number.

    Fastest if ones are rare: words of eight bytes are tested first.
    """
    words = flags.view("<u8")
    found = np.flatnonzero(words != 0)
    within = np.flatnonzero(words.take(found).view(np.bool_))
    positions = found.take(within >> 3)
    positions *= 8
    within &= 7
    positions += within
    return positions


def zigzag(numbers: Elements) -> Elements:
    """Map 0, -1, 1, -2, 2 ... (two's complement) to 0, 1, 2, 3, 4 ..., in place."""
    signs = scratch("signs", numbers.itemsize, numbers.size).reshape(numbers.shape)
    signed = f"<i{numbers.itemsize}"
    np.right_shift(numbers.view(signed), 8 * numbers.itemsize - 1, out=signs.view(signed))
    np.add(numbers, numbers, out=numbers)
    return np.bitwise_xor(numbers, signs, out=numbers)


def unzigzag(numbers: Elements) -> Elements:
    """Invert `zigzag`, in place."""
    signs = scratch("signs", numbers.itemsize, numbers.size)
    np.bitwise_and(numbers, 1, out=signs)
    np.negative(signs, out=signs)
    np.right_shift(numbers, 1, out=numbers)
    return np.bitwise_xor(numbers, signs, out=numbers)


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
