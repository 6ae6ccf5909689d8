"""The commit of the nvme tier: write drafts to the arena, call ``fdatasync``, commit the index, then return."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tierfs.digest import checksum
from tierfs.errors import InvalidInputError
from tierfs.host.nvme.arena.extent_page import (
    INTENTS_MAX,
    META_BYTES_MAX,
    DraftRecord,
    ExtentKind,
    ExtentPage,
    IntentPage,
)
from tierfs.host.nvme.index.index import INSERT_CHUNK, INSERT_DRAFT, INSERT_REF
from tierfs.host.nvme.ledger import DraftExtent, Extent, Written
from tierfs.host.nvme.state import NvmeState
from tierfs.host.nvme.stored import ChunksGoneError

Holds = Mapping[str, Sequence[bytes]]
_HEAL = """
UPDATE drafts SET state = 'pending', note = '' WHERE state = 'damaged' AND length(data) > 0
    AND seq IN (SELECT CAST(substr(holder, 2) AS INTEGER) FROM refs WHERE name = ? AND holder GLOB 'd[0-9]*')
    AND NOT EXISTS (
        SELECT 1 FROM refs LEFT JOIN chunks ON chunks.name = refs.name
        WHERE refs.holder = 'd' || drafts.seq AND (chunks.name IS NULL OR chunks.bad))
"""


class EncodedDraft(NamedTuple):
    """A draft to store.

    Attributes:
        write_id: Identifies the change.
        path: Relative to the store.
        data: The encoded draft.
        names: Names of the chunks that the draft needs.
    """

    write_id: bytes
    path: str
    data: bytes
    names: Sequence[bytes]


class NewDraft(NamedTuple):
    """A draft with the extent reserved for its record."""

    record: DraftRecord
    data: bytes
    extent: Extent


def commit(state: NvmeState, drafts: Sequence[EncodedDraft], holds: Holds, elsewhere: Collection[bytes]) -> list[int]:
    """Implement `tierfs.host.nvme.tier.NvmeTier.commit`."""
    if len(drafts) > INTENTS_MAX:
        raise InvalidInputError(f"{len(drafts)} drafts in one commit: at most {INTENTS_MAX} are allowed")
    with state.commit_lock:
        seqs = _stored_already(state, drafts)
        new = {draft.write_id: draft for draft in drafts if draft.write_id not in seqs}
        with _guarded(state, [*(draft.names for draft in new.values()), *holds.values()], elsewhere) as here:
            needed = {holder: _those_in(names, here) for holder, names in holds.items()}
            # Only commits assign seqs, and `commit_lock` allows one commit at a time.
            records = [
                DraftRecord(seq, state.clock.now_ns(), write_id, path, _those_in(names, here), data)
                for seq, (write_id, path, data, names) in enumerate(new.values(), state.ledger.seq + 1)
            ]
            _commit(state, records, needed)
            seqs.update((record.write_id, record.seq) for record in records)
        return [seqs[draft.write_id] for draft in drafts]


def unref(database: sqlite3.Connection, holder: str) -> list[bytes]:
    """Delete all references of a holder in the open transaction. Return the names of the chunks."""
    names = [name for (name,) in database.execute("SELECT name FROM refs WHERE holder = ?", [holder])]
    database.execute("DELETE FROM refs WHERE holder = ?", [holder])
    return names


def _those_in(names: Sequence[bytes], here: set[bytes]) -> list[bytes]:
    return [name for name in dict.fromkeys(names) if name in here]


def _stored_already(state: NvmeState, drafts: Sequence[EncodedDraft]) -> dict[bytes, int]:
    with state.index_lock:
        state.refresh()
        query = "SELECT seq FROM drafts WHERE write_id = ?"
        rows = [(draft.write_id, state.index.select(query, [draft.write_id])) for draft in drafts]
    return {write_id: found[0][0] for write_id, found in rows if found}


@contextlib.contextmanager
def _guarded(state: NvmeState, names: Sequence[Sequence[bytes]], elsewhere: Collection[bytes]) -> Iterator[set[bytes]]:
    """Yield the names that the tier has, and prevent their eviction until the block ends."""
    wanted = {name for some in names for name in some}
    with state.tables:
        while wanted & state.ledger.busy:
            state.tables.wait()
        here = {name for name in wanted if state.ledger.has(name)}
        gone = wanted - here - set(elsewhere)
        if gone:
            raise ChunksGoneError(state.directory, sorted(gone))
        state.ledger.guard(here, 1)
    try:
        yield here
    finally:
        with state.tables:
            state.ledger.guard(here, -1)


def _commit(state: NvmeState, records: list[DraftRecord], holds: Holds) -> None:
    new: list[NewDraft] = []
    try:
        for record in records:
            data = record.encode()
            new.append(NewDraft(record, data, state.take(len(data))))
        _write_drafts(state, new)
        with state.tables:
            # Commit only these chunks: the flush may not cover later writes.
            written = dict(state.ledger.written)
        released = list(state.released)
        if written or new:
            _flush(state)
        with state.index_lock:
            state.refresh()
            with state.tables:
                written = {name: one for name, one in written.items() if state.ledger.written.get(name) is one}
                needed = {name for record in records for name in record.names}.union(*holds.values())
                # These chunks were quarantined meanwhile. The flush may not cover their replacements.
                gone = sorted(name for name in needed - set(written) if not state.ledger.is_committed(name))
                healed = [name for name in written if state.ledger.needs[name]]
            if gone:
                raise ChunksGoneError(state.directory, gone)
            now_s = state.now_s()
            state.paths.add((record.path for record in records), 1)
            with state.changing("index.commit") as database:
                added = _insert(database, written, new, holds, now_s)
                if written or new:
                    # The flush covered the released pages, too.
                    database.executemany("DELETE FROM releases WHERE serial = ?", [[serial] for serial in released])
                database.executemany(_HEAL, [[name] for name in healed])
            if written or new:
                del state.released[: len(released)]
            _update_ledger(state, written, new, added, now_s)
    except BaseException:
        _take_back(state, new)
        raise


def _write_drafts(state: NvmeState, new: list[NewDraft]) -> None:
    if not new:
        return
    extents = tuple((draft.extent.offset, draft.extent.serial) for draft in new)
    state.arena.write_intents(IntentPage(state.arena.epoch, extents))
    for draft in new:
        extent, record = draft.extent, draft.record
        path = record.path.encode("utf-8", "surrogateescape")[:META_BYTES_MAX]
        lengths = (extent.serial, extent.offset, len(draft.data))
        page = ExtentPage(ExtentKind.DRAFT, state.arena.epoch, *lengths, record.write_id, path, checksum(draft.data))
        state.arena.write(page, memoryview(draft.data))


def _flush(state: NvmeState) -> None:
    try:
        state.arena.sync()
    except Exception:
        # Any uncommitted bytes may be lost, and a retried fdatasync may report success although they are.
        with state.tables:
            state.flushes_failed += 1
            for written in state.ledger.written.values():
                state.ledger.give(written.extent)
            state.ledger.written.clear()
        raise


def _insert(
    database: sqlite3.Connection, written: Mapping[bytes, Written], new: list[NewDraft], holds: Holds, now_s: int
) -> list[bytes]:
    """Insert the rows. Return the chunk name of each new reference."""
    database.executemany(
        INSERT_CHUNK,
        [
            (name, extent.offset, extent.size, extent.length, meta, extent.serial, now_s)
            for name, (extent, meta) in written.items()
        ],
    )
    needs = [(holder, name) for holder, names in holds.items() for name in names]
    for record, _, extent in new:
        where = (extent.offset, extent.size, extent.serial)
        row = (record.seq, record.write_id, record.path, *where, "pending", "", record.at_ns, record.data)
        database.execute(INSERT_DRAFT, row)
        needs += [(f"d{record.seq}", name) for name in record.names]
    return [need[1] for need in needs if database.execute(INSERT_REF, need).rowcount]


def _update_ledger(
    state: NvmeState, written: Mapping[bytes, Written], new: list[NewDraft], added: list[bytes], now_s: int
) -> None:
    """Apply a durable commit to the tables in memory."""
    ledger = state.ledger
    with state.tables:
        replaced = [(name, ledger.chunks[name]) for name in written if name in ledger.chunks]
        for name, (extent, _) in written.items():
            ledger.note_committed(extent)
            ledger.chunks[name] = extent._replace(used_s=now_s)
            del ledger.written[name]
        for draft in new:
            ledger.note_committed(draft.extent)
            ledger.drafts[draft.record.seq] = DraftExtent(draft.extent, draft.record.write_id)
            ledger.seq = max(ledger.seq, draft.record.seq)
        ledger.need(added)
        for name in [name for name in ledger.fresh if ledger.needs[name]]:
            del ledger.fresh[name]  # a committed draft or hold protects the chunk now
    for name, extent in replaced:
        state.release(extent, name)
        with state.tables:
            ledger.give(extent)


def _take_back(state: NvmeState, new: list[NewDraft]) -> None:
    """Free the extents of drafts that were not committed. If the outcome is unknown, keep them until the next start."""
    with state.index_lock, contextlib.suppress(Exception):
        state.refresh()
    if state.is_stale:
        return
    for draft in new:
        if draft.record.seq not in state.ledger.drafts:
            state.release(draft.extent, draft.record.write_id)
            with state.tables:
                state.ledger.give(draft.extent)
