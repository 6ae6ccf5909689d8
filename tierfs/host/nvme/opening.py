"""Open or create the arena and its index together, and repair them before use."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from pathlib import Path

from tierfs.clock import Clock
from tierfs.errors import CapacityError, CorruptionError, StoreError
from tierfs.host.ground import Faults
from tierfs.host.nvme.arena.arena import Arena
from tierfs.host.nvme.arena.extent_page import GRANULE, ExtentPage
from tierfs.host.nvme.index.index import Index
from tierfs.host.nvme.rebuild import Lost, move_aside, rebuild, release_if_unchanged
from tierfs.host.nvme.stored import ARENA_FILE, INDEX_FILE

_logger = logging.getLogger("tierfs.local")


def open_tier(
    directory: Path, size: int, *, faults: Faults, clock: Clock, trust_index: bool = True
) -> tuple[Arena, Index, Counter[str]]:
    """Open or create the arena and its index. Rebuild the index if it is damaged or belongs to another arena.

    Args:
        directory: Holds both files.
        size: Bytes of the arena if it has to be created.
        faults: Called before and after every ordered step of the arena and of a rebuild.
        clock: Used by a rebuild, see `rebuild`.
        trust_index: Whether to use an existing index that is consistent in itself. If false, rebuild the index.

    Returns:
        The arena, the index, and counts of fallbacks by kind.

    Raises:
        FormatError: Another version of tierfs made the files.
        CapacityError: The disk has no room for a new arena.
        StoreError: The files cannot be read or written.
    """
    counts: Counter[str] = Counter()
    index = _open_index(directory / INDEX_FILE, counts) if trust_index else None
    path = directory / ARENA_FILE
    lost: list[Lost] = []
    pages: list[ExtentPage] | None = None
    try:
        fresh = not path.exists()
        if index is None and not fresh and _is_too_short(path, counts):
            fresh = True
        if fresh:
            if index is None and not counts:
                # Moves aside the journal that a removed database may have left. The index is created before the arena,
                # so that an arena without an index is known to have lost it.
                move_aside(directory / INDEX_FILE, faults)
                faults("before index.create")
                Index.create(directory / INDEX_FILE, epoch=secrets.token_bytes(16))
                faults("after index.create")
                index = Index(directory / INDEX_FILE)
            lost = _salvage(index)
            epoch = index.epoch if index is not None and _is_empty(index) else secrets.token_bytes(16)
            arena = Arena.create(path, size, epoch=epoch, faults=faults)
        else:
            arena = Arena.open(path, faults=faults)
            if not arena.epoch:
                pages = list(arena.scan())
                _restore_epoch(arena, index, pages, counts)
        if index is None or index.epoch != arena.epoch:
            other = [] if fresh else _salvage(index)
            if index is not None:
                index.close()
            counts["rebuilt"] += 1
            _logger.error("%s: no index belongs to the arena: rebuilding it from the arena", directory)
            index = rebuild(directory / INDEX_FILE, arena, pages, lost, faults=faults, clock=clock, counts=counts)
            _report_unknown(index, other)
        else:
            _release_unacknowledged(arena, index)
    except BaseException:
        if index is not None:
            index.close()
        raise
    return arena, index, counts


def _open_index(path: Path, counts: Counter[str]) -> Index | None:
    if not path.exists():
        return None
    index: Index | None = None
    try:
        index = Index(path)
        index.check()
    except CorruptionError as error:
        if index is not None:
            index.close()
        counts["index_damaged"] += 1
        _logger.error("the index of the nvme tier is damaged: %s", error)  # noqa: TRY400 - the traceback says nothing more
        return None
    return index


def _is_too_short(path: Path, counts: Counter[str]) -> bool:
    """Return whether an arena without an index is too short for a single extent, and so as good as missing."""
    size = path.stat().st_size
    if size >= GRANULE:
        return False
    counts["arena_cut"] += 1
    _logger.error(
        "%s: was cut short to %d bytes, and no index says what was in it: the tier starts empty, and changes pending "
        "only in it are lost",
        path,
        size,
    )
    return True


def _is_empty(index: Index) -> bool:
    """Return whether an index has no rows, so that it may belong to an arena that was not created yet."""
    try:
        return not index.select("SELECT 1 FROM chunks UNION ALL SELECT 1 FROM drafts LIMIT 1")
    except (CorruptionError, StoreError):
        return False


def _restore_epoch(arena: Arena, index: Index | None, pages: list[ExtentPage], counts: Counter[str]) -> None:
    """Rewrite an arena's damaged first page with its epoch, taken from the index or else from most of its extents."""
    epochs = Counter(page.epoch for page in pages)
    if index is not None and (index.epoch in epochs or not epochs):
        epoch = index.epoch
    elif epochs:
        epoch = epochs.most_common(1)[0][0]
    else:
        epoch = secrets.token_bytes(16)
    counts["arena_page_damaged"] += 1
    _logger.error(
        "%s: the first page is damaged; restoring it with an epoch that %d extents have", arena.path, epochs[epoch]
    )
    arena.stamp(epoch)


def _salvage(index: Index | None) -> list[Lost]:
    """Return the drafts of an index whose arena is gone, to be reported as damaged instead of forgotten."""
    if index is None:
        return []
    columns = "seq, write_id, path, 0, 0, 0, 'damaged', 'the arena is missing', at_ns, data"
    try:
        rows = index.select(f"SELECT {columns} FROM drafts ORDER BY seq")  # noqa: S608 - columns only
        return [
            Lost(
                tuple(row), [name for (name,) in index.select("SELECT name FROM refs WHERE holder = ?", [f"d{row[0]}"])]
            )
            for row in rows
        ]
    except (CorruptionError, StoreError):
        _logger.exception("the index of a missing arena cannot be read")
        return []


def _report_unknown(index: Index, other: list[Lost]) -> None:
    """Log the drafts that only another arena's index has. They may have been published, so they are not restored."""
    for draft in other:
        if not index.select("SELECT 1 FROM drafts WHERE write_id = ?", [draft.row[1]]):
            _logger.error(
                "%s: pending in an index that belongs to another arena, and quarantined with that index", draft.row[2]
            )


def _release_unacknowledged(arena: Arena, index: Index) -> None:
    """Release the drafts whose commit or release a crash interrupted. Uncommitted drafts were never acknowledged."""
    for offset, serial in index.select("SELECT offset, serial FROM releases"):
        release_if_unchanged(arena, offset, serial)
    intents = arena.read_intents()
    if intents is None or intents.epoch != arena.epoch:
        return
    # The last draft first. A crash in between then leaves no draft without the drafts that it follows.
    for offset, serial in reversed(intents.extents):
        if not index.select("SELECT 1 FROM drafts WHERE serial = ?", [serial]):
            release_if_unchanged(arena, offset, serial)


def fit(arena: Arena, tail: int, size: int, counts: Counter[str]) -> None:
    """Resize the arena to ``size``, as far as the disk has room and no extent lies beyond the new end.

    Args:
        arena: The arena.
        tail: The offset at which its last extent ends.
        size: The wanted size in bytes.
        counts: Receives a count if the disk has no room.
    """
    if size > arena.size:
        try:
            arena.grow(size)
        except CapacityError as error:
            counts["not_grown"] += 1
            _logger.warning("%s: stays at %d bytes instead of %d: %s", arena.path, arena.size, size, error)
    elif size < arena.size:
        if tail > size:
            _logger.warning(
                "%s: shrinking to %d bytes, not %d, because it holds data up to there", arena.path, tail, size
            )
        if max(size, tail) < arena.size:
            arena.shrink(max(size, tail))
