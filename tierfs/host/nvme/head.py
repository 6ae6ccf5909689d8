"""The file ``head`` of the nvme tier. It tells readers that drafts have changed, and how full the tier is.

With little-endian numbers::

    magic "TFSNVME1" | version u16, four times | the numbers of `TierHead`, u64 each

A flipped bit in the magic or the versions makes the head damaged: the next change writes it anew.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tierfs.errors import FormatError, ReadOnlyError
from tierfs.gc_pause import untied
from tierfs.host.filesystems import disk_errors, refused

TIER, CHUNKS, DRAFTS = "nvme", "chunks", "drafts"
"""The tier's directory in the store's directory, and the directories in it."""
BUDGET_BYTES_MIN = 256 << 10
"""The smallest budget of an nvme tier."""
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


@dataclass(frozen=True, slots=True)
class NvmeUsage:
    """The usage of the nvme tier, in bytes of its files.

    Attributes:
        budget_bytes: The budget.
        used_bytes: Dirty and clean chunks, and drafts.
        dirty_bytes: Drafts, chunks that a draft or an open file needs, and chunks that are being written.
        clean_bytes: Chunks that may be evicted.
        chunks: Number of chunks.
        drafts: Number of pending and damaged drafts.
        conflicts: Number of drafts that are kept because of a conflict.
        damaged: Number of damaged drafts.
        evicted_bytes: Bytes evicted since the tier was opened.
        fallbacks: Counts of fallbacks and unexpected conditions, by kind.
        gives_local: Whether stored data survives a crash of the host.
    """

    budget_bytes: int
    used_bytes: int
    dirty_bytes: int
    clean_bytes: int
    chunks: int
    drafts: int
    conflicts: int
    damaged: int
    evicted_bytes: int
    gives_local: bool
    fallbacks: Mapping[str, int] = field(default_factory=dict)


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
        FormatError: Another version of tierfs made the tier, or an earlier one that lies beside it.
        StoreError: The file cannot be read.
    """
    path = tier / HEAD_FILE
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read(_TIER.size)
    except (FileNotFoundError, NotADirectoryError):
        check_old_arena(tier.parent)
        return None
    except OSError as error:
        raise refused(error, path, "cannot be used", tier="nvme") from untied(error)
    if len(data) < _TIER.size or not data.startswith(_TIER_MAGIC):
        return None
    _, *versions, budget, changes, used, dirty, chunks, damaged = _TIER.unpack(data)
    if len(set(versions)) > 1:
        return None
    check_version(path, versions[0])
    return TierHead(budget, changes, used, dirty, chunks, damaged)


def read_budget(store: Path) -> int | None:
    """Return the budget of the nvme tier in a store's directory; None if none can be found. Raises as `read_head`."""
    try:
        head = read_head(store / TIER)
    except ReadOnlyError:  # another user's place: who opens the tiers there says so
        return None
    return None if head is None else head.budget_bytes


def check_old_arena(store: Path) -> None:
    """Check that the directory of a store has no nvme tier of an earlier version, which may hold pending changes.

    Raises:
        FormatError: It has.
    """
    if (store / "nvme.arena").exists():
        raise FormatError(
            f"{store / 'nvme.arena'} is of an earlier version of tierfs: run `tierfs wait URL` with that version, then "
            f"remove {store}/nvme.*",
            path=str(store / "nvme.arena"),
            tier="nvme",
        )


def check_version(path: Path, version: int) -> None:
    """Check the version of a file.

    Raises:
        FormatError: It is not the present one.
    """
    if version != VERSION:
        raise FormatError(
            f"{path}: has version {version}; this tierfs reads version {VERSION}: with the tierfs that wrote it, run "
            "`tierfs wait URL` and `tierfs forget URL --yes`",
            tier="nvme",
        )
