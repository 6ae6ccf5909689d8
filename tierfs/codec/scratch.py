"""Elements of a block as arrays, and memory for them that a thread's next block uses again.

Fresh memory is an order of magnitude slower than the work that is done in it: the kernel zeroes it page by page
when it is first touched.
"""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierfs.digest import BLOCK_BYTES

__all__ = ["Elements", "elements_of", "scratch"]

Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Elements of 1, 2, 4 or 8 bytes, taken for unsigned integers."""

_local = threading.local()


def elements_of(data: memoryview, width: int) -> Elements:
    """The whole elements in ``data``: a view, that may be unaligned, and is writable if ``data`` is."""
    return np.frombuffer(data, f"<u{width}", len(data) // width)


def scratch(name: str, width: int, count: int) -> Elements:
    """``count`` elements of unknown content, this thread's until it asks for the same ``name`` again.

    At most 1 MiB for each of a dozen names. What is begun under one must be done with before anything else uses it, in whichever module.
    """
    assert count * width <= BLOCK_BYTES
    buffer: NDArray[np.uint8] | None = _local.__dict__.get(name)
    if buffer is None:
        buffer = _local.__dict__[name] = np.empty(BLOCK_BYTES, np.uint8)
    return buffer[: count * width].view(f"<u{width}")
