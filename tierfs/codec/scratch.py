"""View a block's elements as arrays, and keep scratch memory for the next block.

Fresh memory takes ten times as long as the work that is done in it: the kernel zeroes each page when a thread first
touches it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
