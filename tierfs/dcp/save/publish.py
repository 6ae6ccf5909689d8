"""Publish a checkpoint when every rank has stored its part, and report the level that it has reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.document import CheckpointNote
from tierfs.dcp.metadata import encode
from tierfs.dcp.save.saves import Save
from tierfs.dcp.torch_format.metadata import encode_pickle
from tierfs.errors import InvalidInputError
from tierfs.format.checkpoint import ROOT, SaveMark, turn_of
from tierfs.host.pending.levels import Level
from tierfs.store import Store, level_of, wait
from tierfs.store.commit import Commits
from tierfs.store.tree.records import observe
from tierfs.store.tree.references import is_root
from tierfs.store.write.staging import is_staged


@dataclass(slots=True)
class Parts:
    """The results of all ranks."""

    places: dict[MetadataIndex, BytesPlace] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, results: Iterable[WriteResult]) -> Parts:
        """Collect the results of the ranks."""
        parts = cls()
        for result in results:
            if result.storage_data is not None:
                place, length, host = result.storage_data
                parts.places[result.index] = place
                parts.files[place.file] = length
                parts.hosts.add(host)
        return parts


def publish_shards(
    store: Store, path: str, save: Save, metadata: Metadata, parts: Parts, facts: Mapping[str, str]
) -> SaveMark:
    """Publish shard files.

    If the ranks run on several hosts, announce them, to be published when all parts have arrived. ``facts`` are
    ``kind`` and ``run`` for the `CheckpointNote`, if a training manager saves.

    Returns:
        The mark of the save.

    Raises:
        StoreError, CapacityError, TimeoutError: The checkpoint could not be published.
        ConflictError: A save to the same directory is published that this one may not replace.
    """
    mark = _mark_of(save)
    meta = StorageMeta(checkpoint_id=save.target.url, save_id=mark.save_id)
    complete = replace(metadata, storage_data=parts.places, storage_meta=meta)
    kind, run = facts.get("kind"), facts.get("run")
    note = CheckpointNote(mark.save_id, mark.sequence, store.clock.now_ns(), files=parts.files, kind=kind, run=run)
    document = encode(complete, note)
    if _spans_hosts(store, parts):
        Commits(store).announce(path, document, mark)
    else:
        _publish(store, path, save, document, parts)
    return mark


def publish_archives(store: Store, path: str, save: Save, metadata: Metadata, parts: Parts) -> SaveMark:
    """Publish archives that torch's own readers can read. As `publish_shards`.

    Raises:
        InvalidInputError: The ranks run on several hosts. This layout cannot wait for the other hosts' parts.
    """
    if _spans_hosts(store, parts):
        raise InvalidInputError(
            f"{save.target.url}: the ranks are on several hosts, and layout='dcp' cannot wait for parts of other "
            "hosts: save with ack='object'"
        )
    mark = _mark_of(save)
    meta = StorageMeta(checkpoint_id=save.target.url, save_id=mark.save_id)
    _publish(store, path, save, encode_pickle(metadata, parts.places, meta), parts)
    return mark


def _mark_of(save: Save) -> SaveMark:
    assert save.planned is not None, "prepare_global_plan comes first"
    return save.planned


def _spans_hosts(store: Store, parts: Parts) -> bool:
    """Return whether parts may not be in the object tier yet, and only other hosts can flush them."""
    return store.ack < Level.OBJECT and not parts.hosts <= {host_of(store)}


def _publish(store: Store, path: str, save: Save, document: bytes, parts: Parts) -> None:
    leaves_to_flusher = is_staged(store, save.metadata_path, store.ack)
    commits = Commits(store)
    commits.publish(save.metadata_path, document, _mark_of(save), is_new=save.is_new)
    if is_root(save.metadata_path) and not leaves_to_flusher:
        is_all = save.is_new and bool(parts.files)
        commits.note_published(path, [*parts.files, ROOT] if is_all else None)


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
        return Level.STAGED
    level = level_of(store, metadata_path)
    is_ours = mark is None or level is not Level.OBJECT or turn_of(observe(store, metadata_path).manifest) == mark
    return level if is_ours else Level.NONE


def host_of(store: Store) -> str:
    """Return an id that is the same for processes with the same local tiers and flushing order; empty without tiers."""
    return store.tiers.ram.host.name() if store.tiers is not None else ""
