"""How much a store or a part of it holds, and how much of that is held only once."""

from __future__ import annotations

from dataclasses import dataclass

from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.store.listing import foreign_objects, live_records, stat
from tierfs.store.load import expand_rows
from tierfs.store.records import observe_listed
from tierfs.store.store import Store
from tierfs.store.transfers import transfers

__all__ = ["Usage", "usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts over a set of files.

    Attributes:
        files: Files that tierfs wrote.
        logical_bytes: Sum of their lengths.
        stored_bytes: Bytes of the objects they need: each chunk object once, and the manifests.
        deduplicated_bytes: Raw bytes that did not have to be stored because an identical chunk was there.
        chunks: Chunk objects they need.
        foreign_files: Files that tierfs did not write.
        foreign_bytes: Sum of their lengths.
    """

    files: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0
    deduplicated_bytes: int = 0
    chunks: int = 0
    foreign_files: int = 0
    foreign_bytes: int = 0


def usage(store: Store, path: str = "") -> Usage:
    """Count what a file, a directory or the whole store holds.

    Raises:
        NotFoundError: Nothing is at ``path``.
        CorruptionError, FormatError, StoreError, ReadOnlyError: A manifest could not be read.
    """
    top = stat(store, path)
    if top.is_directory:
        records = [(name, info) for name, info in live_records(store, path) if not name.endswith("/")]
        observed = transfers().map(lambda item: observe_listed(store, *item), records)
        sizes = {item.key: info.size for item, (_, info) in zip(observed, records, strict=True)}
        manifests = [(item.path, item.manifest, sizes[item.key]) for item in observed if item.manifest is not None]
    elif top.manifest is not None:
        manifests = [(path, top.manifest, len(top.manifest.encode(path)))]
    else:
        manifests = []
    chunks: dict[ChunkName, Row] = {}
    raw_bytes = 0
    for where, manifest, _ in manifests:
        for row in (*(manifest.rows if manifest.indirect else ()), *expand_rows(store, manifest, where)):
            chunks[row.name] = row
            raw_bytes += row.raw_length
    if top.is_directory:
        ours = {where for where, _, _ in manifests}
        foreign = [info for info in foreign_objects(store, path) if info.key not in ours]
    else:
        foreign = [top.foreign] if top.foreign is not None else []
    return Usage(
        files=len(manifests),
        logical_bytes=sum(manifest.length for _, manifest, _ in manifests),
        stored_bytes=sum(row.stored_length for row in chunks.values()) + sum(size for _, _, size in manifests),
        deduplicated_bytes=raw_bytes - sum(row.raw_length for row in chunks.values()),
        chunks=len(chunks),
        foreign_files=len(foreign),
        foreign_bytes=sum(info.size for info in foreign),
    )
