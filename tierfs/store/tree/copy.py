"""Copy and rename: manifests move, data never does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tierfs.buffers import buffers
from tierfs.errors import AlreadyExistsError, NotFoundError
from tierfs.format.manifest import Manifest
from tierfs.host.pending.levels import Level
from tierfs.store.read.reader import expand_rows, open_entry
from tierfs.store.store import Store
from tierfs.store.tree.delete import bury
from tierfs.store.tree.listing import Entry, stat_to_read
from tierfs.store.tree.records import Observed, observe, observe_to_stage
from tierfs.store.write.preconditions import ensure_chunks_durable, listed_rows, refuse_foreign
from tierfs.store.write.staging import is_staged
from tierfs.store.write.staging import replace as replace_record
from tierfs.store.write.writer import Writer

__all__ = ["copy", "place", "rename", "transfer"]

COPY_BYTES = 8 << 20


def copy(store: Store, source: str, target: str) -> None:
    """Make ``target`` hold what ``source`` holds, replacing what it held. One manifest is written.

    A file that tierfs did not write is read and stored, since its bytes are not in the store yet.

    Raises:
        NotFoundError: There is no file at ``source``.
        ReadOnlyError: tierfs did not write what lies at ``target``.
        ConflictError: Somebody else changed ``target`` since this call looked at it; theirs stands.
        StoreError: It failed; if it is transient, ``target`` may be written or not.
    """
    # One look: a draft's rows are no published record's, which it may be by the next one.
    observed = observe(store, source) if source else None
    if observed is None or observed.manifest is None:
        entry = stat_to_read(store, source)
        if entry.is_directory:
            raise NotFoundError(f"{store.where(source)} is a directory", path=source)
        if source != target:
            _copy_bytes(store, entry, store, target)
        return
    if source == target:
        return
    now_ns = store.clock.now_ns()
    place(store, observed, observe(store, target), created_ns=now_ns, modified_ns=now_ns)


def rename(store: Store, source: str, target: str, *, overwrite: bool = True) -> None:
    """Move a file: its manifest is written at ``target``, then a tombstone at ``source``.

    A crash in between leaves both, each whole.

    Args:
        store: The store.
        source: From where.
        target: To where; what is there is replaced.
        overwrite: Whether it may be.

    Raises:
        NotFoundError: There is no file at ``source``.
        AlreadyExistsError: There is one at ``target``, and ``overwrite`` is not set.
        ReadOnlyError: tierfs did not write one of the two.
        ConflictError: Somebody else changed one of the two since this call looked at it; theirs stands. If it was
            the source, the target is written all the same.
        StoreError: It failed; if it is transient, either record may be written or not.
    """
    observed = observe(store, source)
    if observed.manifest is None:
        refuse_foreign(store, source)
        raise NotFoundError(f"{store.where(source)} is not there", path=source)
    if source == target:
        return
    there = observe(store, target) if observed.draft is None else observe_to_stage(store, target)
    if there.manifest is not None and not overwrite:
        raise AlreadyExistsError(f"{store.where(target)} exists", path=target)
    moved, staged = place(store, observed, there)
    bury(store, observed, after=moved.write_id if staged else None)


def place(store: Store, source: Observed, target: Observed, **changes: Any) -> tuple[Manifest, bool]:
    """Write a file's manifest, with some fields changed, at another path or in its own place.

    Args:
        store: The store.
        source: The file.
        target: The path to write it at, as it was observed.
        changes: Fields of the manifest, beside those that say which write it is and where its chunks are.

    Returns:
        The manifest, and whether it is staged: then the flusher publishes it.

    Raises:
        ReadOnlyError: tierfs did not write what lies at ``target``.
        ConflictError, StoreError: It failed.
    """
    manifest = source.manifest
    assert manifest is not None
    staged = source.draft is not None or target.draft is not None or is_staged(store, target.path, Level.OBJECT)
    if target.manifest is None:
        refuse_foreign(store, target.path, staged=staged)
    if staged:
        # The flusher makes sure of the chunks when it comes to publishing this, after what it is a copy of.
        rows, indirect, term = expand_rows(store, manifest, source.path), False, None
    else:
        rows, indirect, term = ensure_chunks_durable(store, source.path, listed_rows(store, source))
    placed = replace(
        manifest,
        write_id=store.random_bytes(16),
        previous=target.previous,
        rows=rows,
        indirect=indirect,
        **changes,
    )
    replace_record(store, target, placed, staged=staged, slots=source.slots, term=term)
    return placed, staged


def transfer(source: Store, source_path: str, target: Store, target_path: str, *, move: bool = False) -> None:
    """Copy or move a file from one store to another: its bytes are read, verified and stored.

    Raises:
        NotFoundError: There is no file at ``source_path``.
        ConflictError: Somebody else changed the target, or, moving, the source since this call looked at it; theirs
            stands. If it was the source, the target is written all the same.
        ReadOnlyError: tierfs did not write what lies at the target, or, moving, at the source.
        StoreError, CapacityError, CorruptionError: It failed; the source is untouched.
    """
    observed = observe(source, source_path)
    if observed.manifest is None and move:
        refuse_foreign(source, source_path)
    _copy_bytes(source, stat_to_read(source, source_path), target, target_path)
    if move:
        bury(source, observed)


def _copy_bytes(source: Store, entry: Entry, target: Store, target_path: str) -> None:
    reader = open_entry(source, entry)
    metadata = None if entry.manifest is None else entry.manifest.metadata
    writer = Writer(target, target_path, metadata=metadata)
    try:
        with buffers().lend(min(COPY_BYTES, reader.length)) as buffer:
            for offset in range(0, reader.length, COPY_BYTES):
                piece = buffer[: min(COPY_BYTES, reader.length - offset)]
                reader.read_into(offset, piece)
                writer.write(piece)
    except BaseException:
        writer.abort()
        raise
    writer.commit()
