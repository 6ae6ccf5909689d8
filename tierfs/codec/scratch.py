"""Elements of a block as arrays, and memory for them that the next block uses again.

Fresh memory is an order of magnitude slower than the work that is done in it: the kernel zeroes it page by page
when it is first touched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierfs.digest import BLOCK_BYTES

__all__ = ["Elements", "elements_of", "lent", "scratch"]

Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Elements of 1, 2, 4 or 8 bytes, taken for unsigned integers."""

_Memory: TypeAlias = dict[str, NDArray[np.uint8]]

# How many of those that were lent at once are kept, of up to 8 MiB each.
KEPT_MAX = 16
_local = threading.local()
_free: list[_Memory] = []


def elements_of(data: memoryview, width: int) -> Elements:
    """The whole elements in ``data``: a view, that may be unaligned, and is writable if ``data`` is."""
    return np.frombuffer(data, f"<u{width}", len(data) // width)


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Have this thread work, in a ``with`` block, in memory that another one has worked in: where many encode or decode, few do so at once."""
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
    """``count`` elements of unknown content, this thread's until it asks for the same ``name`` again, or what was `lent` ends.

    At most 1 MiB for each of a dozen names. What is begun under one must be done with before anything else uses it, in whichever module.
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
