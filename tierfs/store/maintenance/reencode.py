"""Store chunks again that were sent raw under pressure: a step of garbage collection, if it is asked for.

A chunk object never changes, so the encoded bytes get the next generation of the chunk's name. The records that name the
raw object are replaced by ones that name the new object. gc deletes the raw object when nothing reaches it any more.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from tierfs.buffers import buffers
from tierfs.codec import Codec, Reason
from tierfs.errors import ConflictError, CorruptionError, FormatError
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row
from tierfs.store.chunks import store_chunk
from tierfs.store.encode.parents import stored_layout
from tierfs.store.encode.tensors import ChunkContext, group_of, places, unknown_layout
from tierfs.store.maintenance.gc.report import Tally
from tierfs.store.read.lookup import read_envelope
from tierfs.store.read.reader import Reader, expand_rows, open_manifest
from tierfs.store.store import Store
from tierfs.store.tree.records import observe, publish
from tierfs.store.tree.walk import live_records, read_manifests
from tierfs.store.write.staging import ensure_chunks_durable, listed_rows

RECORDS_AT_ONCE = 1000
_logger = logging.getLogger("tierfs.gc")


def reencode(store: Store, *, exclusive: bool, dry_run: bool, progress: Callable[[str, int], object]) -> Tally:
    """Encode chunks that were sent raw under pressure, and let their files name the encoded ones.

    A file stays as it is if its record is younger than a grace or replaced another one, because a writer may have seen
    that record and be about to replace it. So does a chunk that others are encoded against.

    Args:
        store: The store. Chunks are read from its local tiers where these have them.
        exclusive: No other process writes: take all files.
        dry_run: Change nothing.
        progress: Called after each file with the number of chunks. What it raises ends the run.

    Returns:
        How many chunks were encoded, and how many bytes fewer they take; in a dry run, how many there are, and the bytes
        that they take now.

    Raises:
        StoreError, ReadOnlyError, CapacityError: The object tier failed.
    """
    done, bare = Tally(), store.without_local_tiers()
    if bare.encoder.codecs.allowed == {Codec.STORE}:
        return done
    bases: set[ChunkName] = set()
    paths = []
    for path, manifest in _manifests(bare):
        rows = expand_rows(bare, manifest, path)
        bases.update(name for row in rows for name in row.bases)
        age_ns = store.clock.now_ns() - manifest.modified_ns
        is_settled = not manifest.previous and age_ns >= store.descriptor.grace_s * 10**9
        if any(map(_may_be_raw, rows)) and not manifest.indirect and (exclusive or is_settled):
            paths.append(path)
    known: dict[ChunkName, Row] = {}
    try:
        for path in paths:
            before = done.count
            try:
                if store.tiers is None or store.tiers.drafts.pending(path) is None:
                    _reencode_file(store, path, bases, known, done, dry_run=dry_run)
            except ConflictError:
                _logger.info("%s was replaced while its chunks were encoded", bare.where(path))
            except (CorruptionError, FormatError) as error:
                _logger.warning("chunks of a file stay raw: %s", error)  # scrub and repair look after it
            progress("re-encoded", done.count - before)
    finally:
        bare.lease_cache.release()
    return done


def _manifests(store: Store) -> Iterator[tuple[str, Manifest]]:
    listed = live_records(store, "")
    while batch := list(itertools.islice(listed, RECORDS_AT_ONCE)):
        # gc reports records that cannot be read.
        for path, _, manifest in read_manifests(store, batch, damaged=lambda *_: None):
            yield path, manifest


def _may_be_raw(row: Row) -> bool:
    return row.stored_length > row.raw_length


def _reencode_file(
    store: Store, path: str, bases: set[ChunkName], known: dict[ChunkName, Row], done: Tally, *, dry_run: bool
) -> None:
    """Encode a file's chunks that need it. ``known`` has the new rows of all files so far, by the old names."""
    bare = store.without_local_tiers()
    observed = observe(bare, path)
    manifest = observed.manifest
    if manifest is None or manifest.indirect:
        return
    rows = listed_rows(bare, observed)
    wanted = {
        row.name
        for row in rows
        if row.name in known or (_may_be_raw(row) and row.name not in bases and _was_pressed(bare, row, path))
    }
    file = open_manifest(store, path, manifest)
    layout = (stored_layout(file) if wanted else None) or unknown_layout(0, manifest.length)
    start = 0
    for row, (_, tensors) in zip(rows, places(layout, [row.raw_length for row in rows], group_of(path)), strict=True):
        if row.name in wanted and row.name not in known:
            known[row.name] = row if dry_run else _stored_again(bare, file, row, start, ChunkContext(tensors))
            done.add(1, row.stored_length - (0 if dry_run else known[row.name].stored_length))
        start += row.raw_length
    if dry_run or not wanted:
        return
    table, indirect, term = ensure_chunks_durable(bare, path, [known.get(row.name, row) for row in rows])
    record = replace(manifest, rows=table, indirect=indirect)
    publish(bare, observed, record, term=term)


def _was_pressed(store: Store, row: Row, path: str) -> bool:
    """Return whether a chunk was sent raw under pressure, as its envelope says."""
    return any(block.reason == Reason.LINK_IS_FASTER for block in read_envelope(store, row, store.where(path)).blocks)


def _stored_again(store: Store, file: Reader, row: Row, start: int, context: ChunkContext) -> Row:
    with buffers().lend(row.raw_length) as raw:
        file.read_into(start, raw)
        store.lease_cache.mark_damaged(row.name)  # so that the bytes get another name
        return store_chunk(store, raw, context, into=raw)
