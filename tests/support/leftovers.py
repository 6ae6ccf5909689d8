"""What a test may leave behind: threads of tierfs, child processes, mounts, segments of shared memory, sockets."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

ENDS_S = 10.0
"""Seconds for which a test's end waits for what it has told to end."""
_SHARED = ("transfer", "call", "share", "loop", "ahead_", "dropped", "uncollected")
"""The beginnings of the names of threads that a process keeps for all its stores, or that end by a clock."""
_SERVERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that Python keeps for a whole process."""

_SHM = "/dev/shm"
"""Where tierfs keeps the segments of a state directory if nobody names another place, as the tests do."""


def found(folder: Path) -> set[threading.Thread | int | str]:
    """Return what is here now: threads, numbers of child processes, and names.

    The names are those of mounts below a folder, of sockets of this process, and of all entries of shared memory.
    """
    threads = {each for each in threading.enumerate() if each.name.startswith("tierfs-")}
    threads = {each for each in threads if not each.name.removeprefix("tierfs-").startswith(_SHARED)}
    commands = {each: _command_of(each) for each in _children()}  # that of a process that has ended is empty
    processes = {each for each, text in commands.items() if text and not any(name in text for name in _SERVERS)}
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    places = {words[1] for words in mounts if words[2].startswith("fuse.tierfs") and words[1].startswith(f"{folder}/")}
    segments = {f"{_SHM}/{name}" for name in os.listdir(_SHM)} if os.path.isdir(_SHM) else set()
    return {*threads, *processes, *places, *segments, *_sockets()}


def now_s() -> float:
    """Return the seconds since the machine started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def left(folder: Path, before: set[threading.Thread | int | str], since_s: float) -> set[threading.Thread | int | str]:
    """Return what is here now and was not ``before``, without what others have put into shared memory.

    A process that began before ``since_s`` does not count: while a child ends, the kernel's list of children may lack
    others (proc(5)), so ``before`` may lack them, too. Of sockets only those of TCP count, and those of Unix that have a path: loops of asyncio have pairs of others.
    """
    new = found(folder) - before
    sockets = {each for each in new if _is(each, "socket:")}
    segments = {each for each in new if _is(each, _SHM)}
    kept = set(_addresses()) if sockets else set()
    new -= {each for each in new if isinstance(each, int) and _began_s(each) <= since_s}
    return new - {each for each in sockets if each not in kept} - {each for each in segments if not _ours(each, folder)}


def named(each: threading.Thread | int | str) -> str:
    """Return a name for a person."""
    if isinstance(each, threading.Thread):
        return f"the thread {each.name}"
    if isinstance(each, int):
        return f"process {each}: {_command_of(each)[-200:]}"
    if _is(each, "socket:"):
        return f"the {each} {_addresses().get(each)}"
    return f"the segments {each}" if _is(each, _SHM) else f"the mount {each}"


def _is(each: threading.Thread | int | str, kind: str) -> bool:
    return isinstance(each, str) and each.startswith(kind)


def _sockets() -> set[str]:
    places = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            places.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # that of this listing
            continue
    return {each for each in places if each.startswith("socket:")}


def _addresses() -> dict[str, str]:
    """Return the addresses of the sockets of all processes, but not of those that multiprocessing keeps open."""
    places = {}
    for kind, inode, first in (("tcp", 9, 1), ("tcp6", 9, 1), ("unix", 6, 7)):
        try:
            lines = Path("/proc/self/net", kind).read_text().splitlines()[1:]
        except FileNotFoundError:  # a system without IPv6
            continue
        for words in map(str.split, lines):
            if len(words) > first and "/pymp-" not in words[first]:
                places[f"socket:[{words[inode]}]"] = f"{kind} {' '.join(words[first : first + 3])}"
    return places


def _ours(entry: str, folder: Path) -> bool:
    """Tell whether these are the segments of a state directory of this process's tests."""
    try:
        state = Path(entry, "state").read_text()
    except OSError:  # of another program, or another user's, or removed
        return False
    return state.startswith((f"{folder}/", os.environ.get("TIERFS_STATE_DIR", f"{folder}/")))


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(each) for each in (task / "children").read_text().split()}
        except FileNotFoundError:  # the thread has ended
            continue
    return found


def _began_s(child: int) -> float:
    """Return when a process began, in seconds since the machine started; infinity for one that has ended."""
    try:
        text = Path(f"/proc/{child}/stat").read_text()
    except FileNotFoundError:
        return float("inf")
    return int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def _command_of(child: int) -> str:
    try:
        return Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
