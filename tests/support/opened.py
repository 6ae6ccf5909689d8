"""What this process has open: descriptors, and stores. To compare: ``descriptors() <= before`` fails over what came.

What other tests left, and what went meanwhile, does not matter.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import Counter
from collections.abc import Iterator

import pytest


def descriptors() -> Counter[tuple[str, str]]:
    """(number, target) of each descriptor, but for those of /proc: this very look is one of them."""
    found = Counter[tuple[str, str]]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith("/proc/"):
                found[number, target.removesuffix(" (deleted)")] = 1
    return found


def mappings(of: str) -> Counter[str]:
    """How often each file is mapped whose path has ``of`` in it."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return Counter(line.split(maxsplit=5)[5].strip().removesuffix(" (deleted)") for line in lines if of in line)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Nothing can be opened, whatever is closed meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def know_no_store(patch: pytest.MonkeyPatch) -> None:
    """Have no store open, and no local tiers, as another process has."""
    patch.setattr("tierfs.session.open._stores", {})
    patch.setattr("tierfs.session.compose.open_tiers", {})
