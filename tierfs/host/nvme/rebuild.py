"""The index made anew from what the arena says of itself, and how both are opened together.

The arena is the truth: its pages name every chunk and every draft, and a draft's record names the chunks it needs. Of two
extents that overlap the later one counts. It reports what the arena cannot give back: such a draft comes back as
``damaged``, with its path, and never silently disappears.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tierfs.clock import Clock
from tierfs.digest import CHUNK_BYTES, checksum
from tierfs.errors import CapacityError, CorruptionError, StoreError
from tierfs.host.filesystems import flush_directory
from tierfs.host.ground import Faults
from tierfs.host.nvme.arena import Arena
from tierfs.host.nvme.disk_errors import disk_errors
from tierfs.host.nvme.extent_page import GRANULE, DraftRecord, ExtentKind, ExtentPage, extent_bytes
from tierfs.host.nvme.index import INSERT_CHUNK, INSERT_DRAFT, INSERT_REF, Index
from tierfs.host.nvme.stored import ARENA_FILE, INDEX_FILE
from tierfs.host.private import entries_of

__all__ = ["open_tier"]

DRAFT_BYTES_MAX = 4 * CHUNK_BYTES
SESSION_BITS = 32
ASIDE_MAX = 4
_ASIDE = re.compile(rf"{re.escape(INDEX_FILE)}\.damaged-([0-9]+)(-journal)?")
_logger = logging.getLogger("tierfs.local")


class Lost(NamedTuple):
    """A draft that only a database knows, whose arena is gone."""

    row: tuple[Any, ...]
    names: Sequence[bytes]


def open_tier(
    directory: Path, size: int, *, faults: Faults, clock: Clock, trust_index: bool = True
) -> tuple[Arena, Index, Counter[str]]:
    """Open the arena and its index, or make them; repair what does not belong together.

    Args:
        directory: Where they are.
        size: For an arena that has to be made.
        faults: For the arena, and for the steps of a rebuild.
        clock: Says when chunks were used that nobody knows more about.
        trust_index: Whether to use an index that is sound in itself.

    Returns:
        Both, and how often what was not hoped for.

    Raises:
        FormatError: Another version of tierfs made them.
        CapacityError: There is no room for a new arena.
        StoreError: They cannot be read or written.
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
                # The journal of a database that is gone may be left. The index is first, so that an arena without
                # one has lost it.
                _move_aside(directory / INDEX_FILE, faults)
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
            _logger.error("%s: no index that belongs to the arena: making it anew from the arena", directory)
            index = _rebuild(directory / INDEX_FILE, arena, pages, lost, faults=faults, clock=clock, counts=counts)
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
    """Whether an arena without an index has no room for a single extent, so that it cannot be told from none."""
    size = path.stat().st_size
    if size >= GRANULE:
        return False
    counts["arena_cut"] += 1
    _logger.error(
        "%s: was cut short to %d bytes, and no index says what was in it: the tier begins anew, and what was pending in it alone "
        "is lost",
        path,
        size,
    )
    return True


def _is_empty(index: Index) -> bool:
    """Whether an index names nothing: its arena was not made yet."""
    try:
        return not index.select("SELECT 1 FROM chunks UNION ALL SELECT 1 FROM drafts LIMIT 1")
    except (CorruptionError, StoreError):
        return False


def _restore_epoch(arena: Arena, index: Index | None, pages: list[ExtentPage], counts: Counter[str]) -> None:
    """Give an arena whose first page is damaged its epoch back: the index knows it, or else most of its extents."""
    epochs = Counter(page.epoch for page in pages)
    if index is not None and (index.epoch in epochs or not epochs):
        epoch = index.epoch
    elif epochs:
        epoch = epochs.most_common(1)[0][0]
    else:
        epoch = secrets.token_bytes(16)
    counts["arena_page_damaged"] += 1
    _logger.error("%s: the first page is damaged; %d extents say what it must be", arena.path, epochs[epoch])
    arena.stamp(epoch)


def _salvage(index: Index | None) -> list[Lost]:
    """The drafts of an index whose arena is gone: nobody must believe they are safe, nor that they never were."""
    if index is None:
        return []
    columns = "seq, write_id, path, 0, 0, 0, 'damaged', 'the arena was gone', at_ns, data"
    try:
        rows = index.select(f"SELECT {columns} FROM drafts ORDER BY seq")  # noqa: S608 - columns only
        return [
            Lost(
                tuple(row), [name for (name,) in index.select("SELECT name FROM refs WHERE holder = ?", [f"d{row[0]}"])]
            )
            for row in rows
        ]
    except (CorruptionError, StoreError):
        _logger.exception("nothing can be read from the index of an arena that is gone")
        return []


def _report_unknown(index: Index, other: list[Lost]) -> None:
    """Say which drafts only the index of another arena names. They may have been published, so they do not come back."""
    for draft in other:
        if not index.select("SELECT 1 FROM drafts WHERE write_id = ?", [draft.row[1]]):
            _logger.error(
                "%s: pending in an index that belongs to another arena, and was put aside with it", draft.row[2]
            )


def _rebuild(
    path: Path,
    arena: Arena,
    pages: list[ExtentPage] | None,
    lost: list[Lost],
    *,
    faults: Faults,
    clock: Clock,
    counts: Counter[str],
) -> Index:
    faults("before index.rebuild")
    sound = [page for page in (arena.scan() if pages is None else pages) if page.epoch == arena.epoch]
    current = _without_overlaps(sound)
    chunks: dict[bytes, ExtentPage] = {}
    drafts: dict[bytes, ExtentPage] = {}
    for page in current:  # the newest first
        if page.kind is ExtentKind.CHUNK:
            chunks.setdefault(page.name, page)
        elif page.kind is ExtentKind.DRAFT:
            drafts.setdefault(page.name, page)
    rows = list(_draft_rows(arena, chunks, sorted(drafts.values(), key=lambda page: page.serial), lost, counts))
    now_s = clock.now_ns() // 1_000_000_000

    def statements() -> Iterator[tuple[str, Sequence[Any]]]:
        for page in sorted(chunks.values(), key=lambda page: page.offset):
            size = extent_bytes(page.length)
            yield INSERT_CHUNK, (page.name, page.offset, size, page.length, page.meta, page.serial, now_s)
        yield from rows
        # Never a number that a process still knows another draft by.
        last = max([row[1][0] for row in rows if row[0] == INSERT_DRAFT] + [clock.now_ns() // 1_000_000])
        yield "DELETE FROM sqlite_sequence", ()
        yield "INSERT INTO sqlite_sequence VALUES ('drafts', ?)", [last]
        session = max((page.serial >> SESSION_BITS for page in sound), default=0)
        yield "INSERT INTO meta VALUES ('session', ?)", [session]
        yield "INSERT INTO meta VALUES ('arena_bytes', ?)", [arena.size]

    faults("before index.create")
    # The old one goes when the new one is ready, so that readers are without one for a moment only.
    Index.create(path, epoch=arena.epoch, rows=statements(), make_way=lambda: _move_aside(path, faults))
    faults("after index.create")
    # A later rebuild must not find these either.
    kept = {page.serial for page in drafts.values()}
    for page in sound:
        if page.kind is ExtentKind.DRAFT and page.serial not in kept:
            _release_if_unchanged(arena, page.offset, page.serial)
    faults("after index.rebuild")
    return Index(path)


def _draft_rows(
    arena: Arena, chunks: dict[bytes, ExtentPage], drafts: list[ExtentPage], lost: list[Lost], counts: Counter[str]
) -> Iterator[tuple[str, Sequence[Any]]]:
    seq = 0
    for row, names in lost:
        seq = row[0]
        _report(counts, row[2], "its arena is gone")
        yield INSERT_DRAFT, row
        for name in names:
            yield INSERT_REF, (f"d{seq}", name)
    for page in drafts:
        record = _read_draft(arena, page)
        path, state, note = page.meta.decode("utf-8", "replace"), "pending", ""
        if record is None:
            seq, note = seq + 1, "its record in the arena is damaged"
            record = DraftRecord(seq, 0, page.name, path, (), b"")
        else:
            seq = max(seq + 1, record.seq)
            missing = [name for name in record.names if name not in chunks]
            if missing:
                note = f"{len(missing)} of {len(record.names)} chunks are not in the arena"
        if note:
            state = "damaged"
            _report(counts, record.path, note)
        where = (page.offset, extent_bytes(page.length), page.serial)
        yield INSERT_DRAFT, (seq, record.write_id, record.path, *where, state, note, record.at_ns, record.data)
        for name in record.names:
            yield INSERT_REF, (f"d{seq}", name)


def _report(counts: Counter[str], path: str, why: str) -> None:
    counts["drafts_damaged"] += 1
    _logger.error("%s was saved on this host and is not whole any more: %s", path, why)


def _read_draft(arena: Arena, page: ExtentPage) -> DraftRecord | None:
    if page.length > DRAFT_BYTES_MAX:
        return None
    data = bytearray(page.length)
    try:
        if arena.read_into(page.offset, 0, memoryview(data)) != page or checksum(data) != page.digest:
            return None
        return DraftRecord.decode(bytes(data))
    except (CorruptionError, StoreError):
        return None


def _without_overlaps(pages: list[ExtentPage]) -> list[ExtentPage]:
    """Pages that no later extent lies over, the newest first."""
    starts: list[int] = []
    ends: list[int] = []
    kept = []
    for page in sorted(pages, key=lambda page: page.serial, reverse=True):
        end = page.offset + extent_bytes(page.length)
        at = bisect_right(starts, page.offset)
        if (at and ends[at - 1] > page.offset) or (at < len(starts) and starts[at] < end):
            continue
        starts.insert(at, page.offset)
        ends.insert(at, end)
        kept.append(page)
    return kept


def _release_unacknowledged(arena: Arena, index: Index) -> None:
    """Give up drafts that a crash kept from being committed, as nobody was told that they are safe, or from being released."""
    for offset, serial in index.select("SELECT offset, serial FROM releases"):
        _release_if_unchanged(arena, offset, serial)
    intents = arena.read_intents()
    if intents is None or intents.epoch != arena.epoch:
        return
    # The last one first: whoever dies on the way leaves what came before, and nothing without what it followed.
    for offset, serial in reversed(intents.extents):
        if not index.select("SELECT 1 FROM drafts WHERE serial = ?", [serial]):
            _release_if_unchanged(arena, offset, serial)


def _release_if_unchanged(arena: Arena, offset: int, serial: int) -> None:
    page = arena.page_at(offset)
    if page is not None and page.epoch == arena.epoch and page.serial == serial and page.kind is ExtentKind.DRAFT:
        arena.release(page)


def _move_aside(path: Path, faults: Faults) -> None:
    """Get a database out of the way, and its journal, which SQLite would otherwise play back into the next one."""
    journal = path.with_name(f"{path.name}-journal")
    earlier = sorted(int(match[1]) for file in entries_of(path.parent) if (match := _ASIDE.fullmatch(file.name)))
    for number in earlier[: -ASIDE_MAX + 1]:
        for old in (f"{path}.damaged-{number}", f"{path}.damaged-{number}-journal"):
            Path(old).unlink(missing_ok=True)
    number = max(earlier, default=0) + 1
    with disk_errors(path):
        # The database first: without its journal it would look sound.
        for file, aside in ((path, f"{path}.damaged-{number}"), (journal, f"{path}.damaged-{number}-journal")):
            if file.exists():
                faults("before index.aside")
                os.rename(file, aside)
                flush_directory(path.parent)
                faults("after index.aside")


def fit(arena: Arena, tail: int, size: int, counts: Counter[str]) -> None:
    """Make the arena as large as it shall be, as far as the disk has room and nothing lies behind the new end.

    Args:
        arena: The arena.
        tail: Where its last extent ends.
        size: Wanted.
        counts: Where a refusal is counted.
    """
    if size > arena.size:
        try:
            arena.grow(size)
        except CapacityError as error:
            counts["not_grown"] += 1
            _logger.warning("%s: stays at %d bytes instead of %d: %s", arena.path, arena.size, size, error)
    elif size < arena.size:
        if tail > size:
            _logger.warning("%s: is shrunk to %d bytes, not %d, as there is data", arena.path, tail, size)
        if max(size, tail) < arena.size:
            arena.shrink(max(size, tail))
