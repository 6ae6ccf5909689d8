"""Rebuild the index from the pages of the arena.

The pages name every chunk and every draft, and a draft's record names the chunks that it needs. If two extents
overlap, the later one counts. A draft that the arena cannot give back completely is logged, and gets the state
``damaged``. It never disappears silently.
"""

from __future__ import annotations

import logging
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tierfs.clock import Clock
from tierfs.digest import CHUNK_BYTES, checksum
from tierfs.errors import CorruptionError, StoreError
from tierfs.host.filesystems import flush_directory
from tierfs.host.ground import Faults
from tierfs.host.nvme.arena.arena import Arena
from tierfs.host.nvme.arena.extent_page import SESSION_BITS, DraftRecord, ExtentKind, ExtentPage, extent_bytes
from tierfs.host.nvme.disk_errors import disk_errors
from tierfs.host.nvme.index.index import INSERT_CHUNK, INSERT_DRAFT, INSERT_REF, Index
from tierfs.host.nvme.stored import INDEX_FILE
from tierfs.host.private import entries_of

DRAFT_BYTES_MAX = 4 * CHUNK_BYTES
ASIDE_MAX = 4
_ASIDE = re.compile(rf"{re.escape(INDEX_FILE)}\.damaged-([0-9]+)(-journal)?")
_logger = logging.getLogger("tierfs.local")


class Lost(NamedTuple):
    """A draft that is in an index whose arena is gone: its row, and the names of the chunks it needs."""

    row: tuple[Any, ...]
    names: Sequence[bytes]


def rebuild(
    path: Path,
    arena: Arena,
    pages: list[ExtentPage] | None,
    lost: list[Lost],
    *,
    faults: Faults,
    clock: Clock,
    counts: Counter[str],
) -> Index:
    """Rebuild the index, and open it.

    Args:
        path: The index. An existing file is moved aside.
        arena: The arena.
        pages: The arena's extent pages, or None to scan the arena.
        lost: Drafts whose arena is gone. They get the state ``damaged``.
        faults: Called before and after every ordered step.
        clock: Gives the time of use of all chunks, and a lower bound for new seqs.
        counts: Receives the number of damaged drafts.
    """
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
        # New seqs start above all earlier ones: a process may still know an older draft by its seq.
        last = max([row[1][0] for row in rows if row[0] == INSERT_DRAFT] + [clock.now_ns() // 1_000_000])
        yield "DELETE FROM sqlite_sequence", ()
        yield "INSERT INTO sqlite_sequence VALUES ('drafts', ?)", [last]
        session = max((page.serial >> SESSION_BITS for page in sound), default=0)
        yield "INSERT INTO meta VALUES ('session', ?)", [session]
        yield "INSERT INTO meta VALUES ('arena_bytes', ?)", [arena.size]

    faults("before index.create")
    # Replace the old index only when the new one is complete, so that readers lack an index for a moment only.
    Index.create(path, epoch=arena.epoch, rows=statements(), make_way=lambda: move_aside(path, faults))
    faults("after index.create")
    # A later rebuild must not find the overwritten drafts either.
    kept = {page.serial for page in drafts.values()}
    for page in sound:
        if page.kind is ExtentKind.DRAFT and page.serial not in kept:
            release_if_unchanged(arena, page.offset, page.serial)
    faults("after index.rebuild")
    return Index(path)


def _draft_rows(
    arena: Arena, chunks: dict[bytes, ExtentPage], drafts: list[ExtentPage], lost: list[Lost], counts: Counter[str]
) -> Iterator[tuple[str, Sequence[Any]]]:
    seq = 0
    for row, names in lost:
        seq = row[0]
        _report(counts, row[2], "its arena is missing")
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
    _logger.error("%s was saved on this host and is no longer complete: %s", path, why)


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
    """Return the pages of extents that no later extent overlaps, newest first."""
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


def release_if_unchanged(arena: Arena, offset: int, serial: int) -> None:
    """Mark the extent of a draft as released, unless another extent has replaced it."""
    page = arena.page_at(offset)
    if page is not None and page.epoch == arena.epoch and page.serial == serial and page.kind is ExtentKind.DRAFT:
        arena.release(page)


def move_aside(path: Path, faults: Faults) -> None:
    """Rename a database and its journal, and delete all but the latest of those renamed earlier.

    SQLite would otherwise roll the old journal back into the next database.
    """
    journal = path.with_name(f"{path.name}-journal")
    earlier = sorted(int(match[1]) for file in entries_of(path.parent) if (match := _ASIDE.fullmatch(file.name)))
    for number in earlier[: -ASIDE_MAX + 1]:
        for old in (f"{path}.damaged-{number}", f"{path}.damaged-{number}-journal"):
            Path(old).unlink(missing_ok=True)
    number = max(earlier, default=0) + 1
    with disk_errors(path):
        # The database first: after a crash in between, a database without its journal would look sound.
        for file, aside in ((path, f"{path}.damaged-{number}"), (journal, f"{path}.damaged-{number}-journal")):
            if file.exists():
                faults("before index.aside")
                os.rename(file, aside)
                flush_directory(path.parent)
                faults("after index.aside")
