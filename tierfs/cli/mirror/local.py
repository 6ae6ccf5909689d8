"""List a local directory that is mirrored, and remove files and directories in it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierfs.cli.files.transfer import walk

PART_PREFIX = ".tierfs-part-"
"""Name prefix of an incomplete file. The next run finds and completes the file."""
_GONE_OR_IN_USE = frozenset({errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST})  # another process changed it meanwhile


@dataclass(slots=True)
class LocalTree:
    """The entries of a directory, by relative path."""

    files: dict[str, os.stat_result] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)


def scan(root: str) -> LocalTree:
    """List a directory; an absent one is empty. Links are not followed: they are among ``others``."""
    tree = LocalTree()
    todo = [""]
    while todo:
        inside = todo.pop()
        try:
            entries = list(os.scandir(os.path.join(root, inside)))
        except FileNotFoundError:
            continue
        for entry in entries:
            relative = f"{inside}/{entry.name}" if inside else entry.name
            status = entry.stat(follow_symlinks=False)
            if entry.name.startswith(PART_PREFIX):
                tree.parts.add(relative)
            elif stat.S_ISDIR(status.st_mode):
                tree.directories.add(relative)
                todo.append(relative)
            elif stat.S_ISREG(status.st_mode):
                tree.files[relative] = status
            else:
                tree.others.add(relative)
    return tree


def scan_source(root: str) -> LocalTree:
    """List the files and directories to store. Links are followed. Raises as `walk` does."""
    tree = LocalTree()
    for relative, size in walk(root):
        if size is None:
            tree.directories.add(relative)
        elif not os.path.basename(relative).startswith(PART_PREFIX):
            tree.files[relative] = os.stat(os.path.join(root, relative))
    return tree


def remove_files(root: str, files: Iterable[str]) -> int:
    """Remove files, and return the number removed. A missing file is skipped.

    Raises:
        OSError: A file cannot be removed; the error names it.
    """
    count = 0
    for relative in files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(root, relative))
            count += 1
    return count


def remove_directories(root: str, directories: Iterable[str]) -> list[OSError]:
    """Remove directories, but skip missing and non-empty ones. Return all other errors; each names its directory."""
    problems = []
    for relative in sorted(directories, key=len, reverse=True):
        try:
            os.rmdir(os.path.join(root, relative))
        except OSError as error:  # noqa: PERF203 - one failure must not stop the others
            if error.errno not in _GONE_OR_IN_USE:
                problems.append(error)
    return problems
