"""What a test may leave behind: threads of tierfs, child processes, mounts."""

from __future__ import annotations

import threading
from pathlib import Path

ENDS_S = 10.0
"""Seconds for which a test's end waits for what it has told to end."""
_SHARED = ("transfer", "call", "share", "loop", "ahead_", "dropped", "uncollected")
"""The beginnings of the names of threads that a process keeps for all its stores, or that end by a clock."""
_SERVERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that Python keeps for a whole process."""


def found(folder: Path) -> set[threading.Thread | int | str]:
    """Return what is here now: threads, numbers of child processes, places of mounts below a folder."""
    threads = {each for each in threading.enumerate() if each.name.startswith("tierfs-")}
    threads = {each for each in threads if not each.name.removeprefix("tierfs-").startswith(_SHARED)}
    commands = {each: _command_of(each) for each in _children()}  # that of a process that has ended is empty
    processes = {each for each, text in commands.items() if text and not any(name in text for name in _SERVERS)}
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    places = {words[1] for words in mounts if words[2].startswith("fuse.tierfs") and words[1].startswith(f"{folder}/")}
    return {*threads, *processes, *places}


def named(each: threading.Thread | int | str) -> str:
    """Return a name for a person."""
    if isinstance(each, threading.Thread):
        return f"the thread {each.name}"
    return f"process {each}: {_command_of(each)[-200:]}" if isinstance(each, int) else f"the mount {each}"


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(each) for each in (task / "children").read_text().split()}
        except FileNotFoundError:  # the thread has ended
            continue
    return found


def _command_of(child: int) -> str:
    try:
        return Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
