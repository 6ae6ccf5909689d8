"""Copy, rename and annotate files by writing manifests. Data is copied only between stores, or from a foreign file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tierfs.buffers import buffers
from tierfs.errors import AlreadyExistsError, ConflictError, NotFoundError
from tierfs.format.checkpoint import SaveMark
from tierfs.format.manifest import Manifest
from tierfs.host.pending.levels import Level
from tierfs.store.read.reader import expand_rows, open_entry
from tierfs.store.store import Store
from tierfs.store.tree.listing import Entry, stat_to_read
from tierfs.store.tree.records import Observed, observe, observe_to_stage
from tierfs.store.write.staging import (
    after_pending,
    bury,
    ensure_chunks_durable,
    is_staged,
    listed_rows,
    refuse_foreign,
)
from tierfs.store.write.staging import replace as replace_record
from tierfs.store.write.writer import Writer

COPY_BYTES = 8 << 20


def copy(store: Store, source: str, target: str, *, write_id: bytes | None = None) -> None:
    """Copy the file ``source`` to ``target``, and replace the file there. One manifest is written.

    If tierfs did not write the source, its bytes are read and stored. ``write_id`` is that of the only version to copy;
    ``None`` for any.

    Raises:
        NotFoundError: There is no file at ``source``.
        ReadOnlyError: ``target`` holds a file that tierfs did not write.
        ConflictError: Another writer changed ``target`` after this call observed it. That version stands. Or ``source``
            holds another version.
        StoreError: The object tier failed. If the error is transient, ``target`` may or may not be written.
    """
    # Observe once: a draft's rows differ from those of its published record, which a second look may find.
    observed = observe(store, source) if source else None
    if observed is None or observed.manifest is None:
        entry = stat_to_read(store, source)
        if entry.is_directory:
            raise NotFoundError(f"{store.where(source)} is a directory", path=source)
        if source != target:
            _copy_bytes(store, entry, store, target)
        return
    if write_id not in (None, observed.manifest.write_id):
        raise ConflictError(f"{store.where(source)} was saved again while it was copied: copy it again", path=source)
    if source == target:
        return
    now_ns = store.clock.now_ns()
    place(store, observed, observe(store, target), created_ns=now_ns, modified_ns=now_ns)


def rename(store: Store, source: str, target: str, *, overwrite: bool = True) -> None:
    """Move a file: write its manifest at ``target``, then a tombstone at ``source``.

    A crash in between leaves the file at both paths, each whole.

    Raises:
        NotFoundError: There is no file at ``source``.
        AlreadyExistsError: There is a file at ``target``, and ``overwrite`` is not set.
        ReadOnlyError: tierfs did not write one of the two files.
        ConflictError: Another writer changed one of the paths after this call observed it. That version stands. If the
            source was changed, the target is written all the same.
        StoreError: The object tier failed. If the error is transient, either record may or may not be written.
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
    """Write a file's manifest, with some fields changed, at another path or at its own.

    ``changes`` must not include the write id and the place of the chunks.

    Returns:
        The manifest, and whether it is staged, so that the flusher publishes it.

    Raises:
        ReadOnlyError: The target holds a file that tierfs did not write.
        ConflictError, StoreError: The manifest could not be written.
    """
    manifest = source.manifest
    assert manifest is not None
    staged = source.draft is not None or target.draft is not None or is_staged(store, target.path, Level.OBJECT)
    if staged and source.draft is None and source.path != target.path:
        # Only the object tier has the chunks, and gc may delete those that a pending change names.
        target = after_pending(store, target)
        staged = target.draft is not None
    if target.manifest is None:
        refuse_foreign(store, target.path, staged=staged)
    if staged:
        # The flusher checks the chunks when it publishes this draft, which it does after the draft of the source.
        rows, indirect, term = expand_rows(store, manifest, source.path), False, None
    else:
        rows, indirect, term = ensure_chunks_durable(store, source.path, listed_rows(store, source))
    changes.setdefault(
        "metadata", manifest.metadata if source.path == target.path else SaveMark.without(manifest.metadata)
    )
    placed = replace(manifest, write_id=store.new_write_id(), rows=rows, indirect=indirect, **changes)
    replace_record(store, target, placed, staged=staged, slots=source.slots, term=term)
    return placed, staged


def annotate(store: Store, path: str, metadata: Mapping[str, object], *, write_id: bytes) -> Manifest:
    """Replace all of a file's metadata by writing one manifest.

    ``metadata`` holds JSON values. ``write_id`` is that of the version that the caller saw.

    Raises:
        NotFoundError: There is no file.
        ReadOnlyError: tierfs did not write the file.
        ConflictError: The path holds another version now. That version stands.
        StoreError: The object tier failed. If the error is transient, the metadata may or may not be changed.
    """
    observed = observe(store, path)
    manifest = observed.manifest
    if manifest is None:
        refuse_foreign(store, path)
        raise NotFoundError(f"{store.where(path)} is not there", path=path)
    if manifest.write_id != write_id:
        raise ConflictError(
            f"{store.where(path)} was changed by another writer since it was opened: their version is kept", path=path
        )
    changed, _ = place(store, observed, observed, metadata=dict(metadata))
    return changed


def transfer(source: Store, source_path: str, target: Store, target_path: str, *, move: bool = False) -> None:
    """Copy or move a file from one store to another: read, verify and store its bytes.

    Raises:
        NotFoundError: There is no file at ``source_path``.
        ConflictError: Another writer changed the target, or the source of a move, after this call observed it. That
            version stands. If the source was changed, the target is written all the same.
        ReadOnlyError: tierfs did not write the file at the target, or the source of a move.
        StoreError, CapacityError, CorruptionError: The copy failed. The source is untouched.
    """
    observed = observe(source, source_path)
    if observed.manifest is None and move:
        refuse_foreign(source, source_path)
    _copy_bytes(source, stat_to_read(source, source_path), target, target_path)
    if move:
        bury(source, observed)


def _copy_bytes(source: Store, entry: Entry, target: Store, target_path: str) -> None:
    reader = open_entry(source, entry)
    metadata = None if entry.manifest is None else SaveMark.without(entry.manifest.metadata)
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
