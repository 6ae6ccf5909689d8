"""Publish a checkpoint when every rank has stored its part, and report the level that it has reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.document import CheckpointNote
from tierfs.dcp.metadata import encode
from tierfs.dcp.save.checks import check_owners
from tierfs.dcp.save.saves import Save
from tierfs.format.checkpoint import ROOT, SaveMark, turn_of
from tierfs.host.pending.levels import Level
from tierfs.store import Store, level_of, wait
from tierfs.store.commit import Commits
from tierfs.store.tree.records import observe
from tierfs.store.tree.references import is_root, write_references
from tierfs.store.write.staging import is_staged


def publish_checkpoint(
    store: Store,
    path: str,
    save: Save,
    metadata: Metadata,
    results: Sequence[WriteResult],
    facts: Mapping[str, str],
) -> SaveMark:
    """Publish a checkpoint, on the coordinator.

    If the ranks run on several hosts, announce it, to be published when all parts have arrived.

    Args:
        store: The store to publish in.
        path: The checkpoint's directory, relative to the store.
        save: The save.
        metadata: As DCP planned it.
        results: Of all ranks.
        facts: ``kind`` and ``run`` for the `CheckpointNote`, if a training manager saves.

    Returns:
        The mark of the save.

    Raises:
        StoreError, CapacityError, TimeoutError: The checkpoint could not be published.
        ConflictError: A save to the same directory is published that this one may not replace.
        InvalidInputError: No rank saved a tensor that ranks left to each other.
    """
    assert save.planned is not None, "prepare_global_plan comes first"
    mark, url, commits = save.planned, save.target.url, Commits(store)
    places: dict[MetadataIndex, BytesPlace] = {}
    files: dict[str, int] = {}
    hosts: set[str] = set()
    for result in results:
        if result.storage_data is not None:
            places[result.index], length, host = result.storage_data
            files[places[result.index].file] = length
            hosts.add(host)
    check_owners(url, places, (result.index for result in results))
    complete = replace(metadata, storage_data=places, storage_meta=StorageMeta(checkpoint_id=url, save_id=mark.save_id))
    kind, run = facts.get("kind"), facts.get("run")
    note = CheckpointNote(mark.save_id, mark.sequence, store.clock.now_ns(), files=files, kind=kind, run=run)
    document = encode(complete, note)
    # Parts of other hosts may not be in the object tier yet, and only those hosts can flush them.
    if store.ack < Level.OBJECT and not hosts <= {host_of(store)}:
        commits.announce(path, document, mark)
        return mark
    leaves_to_flusher = is_staged(store, save.metadata_path, store.ack)
    commits.publish(save.metadata_path, document, mark, is_new=save.is_new)
    if is_root(save.metadata_path) and not leaves_to_flusher:
        write_references(store, path, [*files, ROOT] if save.is_new and files else None)
    return mark


def wait_for(
    store: Store, path: str, metadata_path: str, mark: SaveMark | None, level: Level, timeout_s: float | None
) -> None:
    """Wait until a checkpoint has reached a level: see `TierWriter.wait`. With ``mark``, wait for that save of it."""
    begun = store.clock.monotonic()
    wait(store, path, level, timeout_s)
    if level is not Level.OBJECT:
        return
    left = None if timeout_s is None else max(0.0, timeout_s - (store.clock.monotonic() - begun))
    commits = Commits(store)
    commits.wait(path, left, mark)
    if mark is not None:
        commits.check_stands(metadata_path, mark)


def level_reached(store: Store, path: str, metadata_path: str, mark: SaveMark | None) -> Level:
    """Return the level that a checkpoint has reached: see `TierWriter.ack`.

    With ``mark``, return `Level.NONE` if another save is published instead.
    """
    # A pending change is known on this host alone, so the object tier need not be asked.
    pending = store.tiers.drafts.pending(metadata_path) if store.tiers is not None else None
    if pending is None and any(mark in {None, save.mark} for save in Commits(store).advance(path)):
        # Each part had reached the level of its save when the save was announced. Only the publication makes it object.
        return Level.STAGED if mark is None or store.ack is Level.OBJECT else store.ack
    level = level_of(store, metadata_path)
    is_ours = mark is None or level is not Level.OBJECT or turn_of(observe(store, metadata_path).manifest) == mark
    return level if is_ours else Level.NONE


def host_of(store: Store) -> str:
    """Return an id that is the same for processes with the same local tiers and flushing order; empty without tiers."""
    return store.tiers.ram.host.name() if store.tiers is not None else ""
