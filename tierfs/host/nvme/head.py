"""The file ``head`` of the nvme tier. It tells readers that drafts have changed, and how full the tier is.

With little-endian numbers::

    magic "TFSNVME1" | version u16, four times | the numbers of `TierHead`, u64 each

A flipped bit in the magic or the versions makes the head damaged: the next change writes it anew.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from tierfs.errors import FormatError
from tierfs.host.nvme.disk_errors import disk_errors
from tierfs.host.nvme.stored import TIER

VERSION = 1
HEAD_FILE = "head"
_TIER_MAGIC = b"TFSNVME1"
_TIER = struct.Struct("<8s4H6Q")


class TierHead(NamedTuple):
    """The content of ``head``: what readers need to know without a look at all files.

    Attributes:
        budget_bytes: The budget.
        changes: The number of changes of drafts so far.
        used_bytes: Size of all files.
        dirty_bytes: Size of the files that cannot be evicted.
        chunks: Number of chunks.
        damaged: Number of damaged drafts.
    """

    budget_bytes: int
    changes: int
    used_bytes: int
    dirty_bytes: int
    chunks: int
    damaged: int


def write_head(tier: Path, head: TierHead) -> None:
    """Write the head of a tier.

    Raises:
        StoreError: The file cannot be written.
    """
    path = tier / HEAD_FILE
    with disk_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, _TIER.pack(_TIER_MAGIC, *[VERSION] * 4, *head), 0)
        finally:
            os.close(fd)


def read_head(tier: Path) -> TierHead | None:
    """Return the head of a tier, or None if it is missing or damaged.

    Raises:
        FormatError: Another version of tierfs made the tier.
        StoreError: The file cannot be read.
    """
    path = tier / HEAD_FILE
    with disk_errors(path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            data = os.pread(fd, _TIER.size, 0)
        finally:
            os.close(fd)
    if len(data) < _TIER.size or not data.startswith(_TIER_MAGIC):
        return None
    _, *versions, budget, changes, used, dirty, chunks, damaged = _TIER.unpack(data)
    if len(set(versions)) > 1:
        return None
    check_version(path, versions[0])
    return TierHead(budget, changes, used, dirty, chunks, damaged)


def read_budget(store: Path) -> int | None:
    """Return the budget of the nvme tier in a store's directory, or None if there is no tier. Raises as `read_head`."""
    head = read_head(store / TIER)
    return None if head is None else head.budget_bytes


def check_version(path: Path, version: int) -> None:
    """Check the version of a file.

    Raises:
        FormatError: It is not the present one.
    """
    if version != VERSION:
        raise FormatError(
            f"{path}: has version {version}; this tierfs reads version {VERSION}: use the tierfs that wrote it, or wait "
            "until nothing is pending and remove the nvme tier's files",
            tier="nvme",
        )
