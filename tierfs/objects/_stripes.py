"""Locks on paths, shared by all objects of this process that change the same kind of filesystem."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Iterable, Iterator

_STRIPES = 1024  # a few dozen concurrent writes rarely share a lock by chance

_locks: dict[type, tuple[threading.RLock, ...]] = {}
os.register_at_fork(after_in_child=_locks.clear)  # a thread that the child lacks may hold one


@contextlib.contextmanager
def locked(kind: type, paths: Iterable[str]) -> Iterator[None]:
    """Hold ``paths`` exclusively within this process.

    Args:
        kind: The filesystem's class. Not the instance, since fsspec makes several for the same filesystem.
        paths: Whole paths there.
    """
    stripes = _locks.get(kind) or _locks.setdefault(kind, tuple(threading.RLock() for _ in range(_STRIPES)))
    # Sorted, so that two callers with several paths cannot deadlock.
    chosen = sorted({zlib.crc32(os.fsencode(path)) % _STRIPES for path in paths})
    with contextlib.ExitStack() as stack:
        for index in chosen:
            stack.enter_context(stripes[index])
        yield
