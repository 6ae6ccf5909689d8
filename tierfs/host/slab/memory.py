"""The memory that this process may use: that of the machine, or less if its control groups limit it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MEMINFO = "proc/meminfo"
_TOTAL = re.compile(r"^MemTotal:\s*([0-9]+) kB$", re.MULTILINE)
_AVAILABLE = re.compile(r"^MemAvailable:\s*([0-9]+) kB$", re.MULTILINE)
_INACTIVE = re.compile(r"^(?:total_)?inactive_file ([0-9]+)$", re.MULTILINE)
# The file of current usage for each file of a limit, in version 2 and in version 1 of control groups.
_USAGE_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def memory_limit(root: Path = Path("/")) -> int:
    """Return the memory that this process may use, in bytes: the smallest of all limits on it.

    The limits of all parent control groups apply as well. In a container, the path that the kernel names may not exist,
    because only the container's own groups are mounted. Then the groups that exist count.

    ``root`` is where ``proc`` and ``sys`` are; see proc(5) and cgroups(7). Control groups may be of version 2 or 1, or
    both.
    """
    limits = [_total(root)]
    for file in _limit_files(root):
        text = _read(file).strip()
        if text.isdecimal():  # "max" means no limit
            limits.append(int(text))
    return min(limits)


def memory_available(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated before the kernel kills a process: the least that any limit leaves."""
    match = _AVAILABLE.search(_read(root / _MEMINFO))
    left = [int(match[1]) * 1024 if match else _total(root)]
    for file in _limit_files(root):
        limit = _read(file).strip()
        used = _read(file.with_name(_USAGE_FILES[file.name])).strip()
        if limit.isdecimal() and used.isdecimal():
            # The kernel drops inactive file pages before it kills a process.
            cached = _INACTIVE.search(_read(file.with_name("memory.stat")))
            left.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return max(0, min(left))


def _total(root: Path) -> int:
    match = _TOTAL.search(_read(root / _MEMINFO))
    return int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limit_files(root: Path) -> Iterator[Path]:
    cgroups = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if hierarchy == "0" and not controllers:
            mounts, file = [cgroups, cgroups / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            mounts, file = [cgroups / "memory"], "memory.limit_in_bytes"
        else:
            continue
        # Seen from another namespace, a path may begin with "..": those parent groups are not visible.
        path = PurePosixPath(*(part for part in name.split("/") if part not in {"", ".."}))
        for mount in mounts:
            yield from (mount / at / file for at in (path, *path.parents))


def _read(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read. No kernel or container has all of these files."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
