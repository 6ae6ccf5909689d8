"""What this process has open, as sets: `opened() <= before` fails over what came, not over what other tests left behind and went meanwhile."""

from __future__ import annotations

import os


def descriptors() -> set[tuple[str, str]]:
    """(number, target) of each descriptor, but for those of /proc: this very look is one of them."""
    with os.scandir("/proc/self/fd") as entries:
        found = {(entry.name, os.readlink(entry.path)) for entry in entries if os.path.lexists(entry.path)}
    return {(name, target) for name, target in found if not target.startswith("/proc/")}


def mappings(of: str) -> set[str]:
    """The mapped files whose path has `of` in it."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return {line.split(maxsplit=5)[5].strip() for line in lines if of in line}
