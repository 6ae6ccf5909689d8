"""Descriptors, mappings and stores that this process has open.

``descriptors() <= before`` fails if a new descriptor is open. Descriptors that earlier tests left open, and those
closed in between, do not matter.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections import Counter
from collections.abc import Container, Iterator
from typing import Any

import pytest

from tierfs.mount.attachment import DEVICE
from tierfs.session.compose import open_tiers
from tierfs.session.open import open_stores
from tierfs.store import Store

SHARED = "/dev/shm" if shutil.disk_usage("/dev/shm").total >= 2 << 30 else None
"""Where tests put what is to lie in memory; ``None`` is a disk, where a container has little shared memory.

Docker gives 64 MB. The tests of small shared memory make their own.
"""
needs_fuse = pytest.mark.skipif(
    not os.path.exists(DEVICE) or not os.stat(DEVICE).st_rdev or os.path.samestat(os.stat(DEVICE), os.stat(os.devnull)),
    reason="there is no FUSE device here",
)


def descriptors() -> Counter[tuple[str, str]]:
    """Count each (number, target) of a descriptor. Those of /proc are left out, since listing them opens one."""
    found = Counter[tuple[str, str]]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith("/proc/"):
                found[number, target.removesuffix(" (deleted)")] = 1
    return found


def mappings(of: str) -> Counter[str]:
    """Count the mappings of each file whose path contains ``of``."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return Counter(line.split(maxsplit=5)[5].strip().removesuffix(" (deleted)") for line in lines if of in line)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Let the process open no descriptor, even if it closes others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_forgotten: list[dict[Any, Store]] = []
"""The tables of open stores that tests put in the place of the process's."""


def know_no_store(patch: pytest.MonkeyPatch) -> None:
    """Make this process know no open store and no local tiers, like a new process."""
    _forgotten.append({})
    patch.setattr("tierfs.session.open.open_stores", _forgotten[-1])
    patch.setattr("tierfs.session.compose.open_tiers", {})


def close_stores(kept: Container[int] = ()) -> None:
    """Close the open stores but those with the ``kept`` ids, and wait for the threads of their local tiers."""
    for table in (open_stores, *_forgotten):
        for key, store in list(table.items()):
            if id(store) in kept:
                continue
            del table[key]
            if store.tiers is not None:
                store.tiers.close()
                for each in [each for each, of in open_tiers.items() if of is store.tiers]:
                    del open_tiers[each]
    _forgotten.clear()
