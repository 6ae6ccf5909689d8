"""Bytes of files: their own, those of the objects they need, and how many of those something else needs too.

It is what the object tier holds: what this host has not published yet is not counted. A chunk object is counted once,
whether a manifest names it as a chunk or as a base of one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import posixpath
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tierfs.errors import CorruptionError, FormatError, NotFoundError, TierfsError
from tierfs.format import keys
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest
from tierfs.objects.protocol import ObjectInfo, objects_below
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.transfers import transfers
from tierfs.store.tree.listing import stat
from tierfs.store.tree.references import is_root
from tierfs.store.tree.walk import foreign_objects, live_records, read_manifests

__all__ = ["Usage", "usage", "usages"]

BATCH = 500
# So many sizes are asked for one by one; for more, all chunks are listed, a thousand in each request.
HEADS_MAX = 1000
_logger = logging.getLogger("tierfs.store")


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts over a set of files.

    Attributes:
        files: Files that tierfs wrote.
        logical_bytes: Sum of their lengths.
        stored_bytes: Bytes of the objects they need: each chunk object once, bases included, the manifests and
            the reference lists of checkpoints.
        shared_bytes: Of those, the bytes of chunk objects that something else in the store needs too; ``None`` where that was
            not asked for.
        freed_bytes: The bytes that deleting the files frees: all other stored bytes, and ``foreign_bytes``; ``None`` likewise.
        deduplicated_bytes: Raw bytes that did not have to be stored because an identical chunk was there.
        chunks: Chunk objects they need.
        foreign_files: Files that tierfs did not write.
        foreign_bytes: Sum of their lengths.
    """

    files: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0
    shared_bytes: int | None = None
    freed_bytes: int | None = None
    deduplicated_bytes: int = 0
    chunks: int = 0
    foreign_files: int = 0
    foreign_bytes: int = 0


@dataclass(slots=True)
class _Group:
    """Files that are counted together.

    Attributes:
        paths: Those that tierfs wrote.
        logical_bytes: Sum of their lengths.
        raw_bytes: Sum of their chunks' raw lengths.
        record_bytes: The manifests' and reference lists'.
        chunks: The chunk objects they need, each with its raw length; 0 for one that is needed as a base alone.
        foreign: Sizes of files that tierfs did not write.
        damage: Records that could not be read.
    """

    paths: set[str] = field(default_factory=set)
    logical_bytes: int = 0
    raw_bytes: int = 0
    record_bytes: int = 0
    chunks: dict[ChunkName, int] = field(default_factory=dict)
    foreign: list[int] = field(default_factory=list)
    damage: list[TierfsError] = field(default_factory=list)


def usage(store: Store, path: str = "", *, shared: bool = True) -> Usage:
    """Count what a file, a directory or the whole store holds. As `usages`, but what is damaged there is an error.

    Raises:
        NotFoundError: Nothing is at ``path``.
        CorruptionError, FormatError, StoreError, ReadOnlyError: A manifest could not be read.
    """
    top = stat(store, path)
    counts = _Counts(store, [path], shared=shared)
    damage = counts.groups[path].damage
    if damage:
        raise damage[0]
    counts.warn()
    if top.foreign is not None:
        counts.groups[path].foreign.append(top.foreign.size)
    return counts.usage(path)


def usages(store: Store, paths: Sequence[str], *, shared: bool = True) -> dict[str, Usage]:
    """Count what each of several directories holds. Files of a directory inside another count for the inner.

    That takes a listing of what holds them all, and a request for each record in them that this host does not know. With
    ``shared`` all records of the store are listed and looked at instead. A base that none of these records names as a
    chunk of its own costs a request for its size; where such are many, all chunks are listed.

    Args:
        store: The store.
        paths: Relative to its root; one where nothing is holds nothing.
        shared: Whether to find out what they share with everything else in the store, and what deleting each would free.

    Raises:
        StoreError, ReadOnlyError: The object tier failed. A damaged record is passed over with a warning.
    """
    counts = _Counts(store, paths, shared=shared)
    counts.warn()
    return {path: counts.usage(path) for path in paths}


class _Counts:
    """The chunks that each of several paths needs, and all else. Everything is asked for when it is made."""

    def __init__(self, store: Store, paths: Sequence[str], *, shared: bool) -> None:
        self._store = store
        self.groups = {path: _Group() for path in paths}
        self.others = _Group()
        self._sizes: dict[ChunkName, int] = {}
        self._needs: Counter[ChunkName] | None = None
        if not paths:
            return
        top = posixpath.commonpath(paths)
        listed = (
            item
            for item in _listed(store, "" if shared else top)
            if not item[0].endswith("/") and (shared or self._group(item[0]) is not self.others)
        )
        while batch := list(itertools.islice(listed, BATCH)):
            for path, info, manifest in read_manifests(store, batch, damaged=self._note_damage):
                self._add(path, info, manifest)
        self._add_lists()
        for info in foreign_objects(store, top):
            group = self._group(info.key)
            if info.key not in group.paths:
                group.foreign.append(info.size)
        if shared:
            self._needs = Counter(itertools.chain(self.others.chunks, *(one.chunks for one in self.groups.values())))
        needed = {name for group in self.groups.values() for name in group.chunks}
        self._sizes |= _ask_sizes(store, needed - self._sizes.keys())

    def usage(self, path: str) -> Usage:
        """The usage of one of the paths."""
        group, needs = self.groups[path], self._needs
        stored = group.record_bytes + sum(map(self._sizes.__getitem__, group.chunks))
        foreign = sum(group.foreign)
        shared = None if needs is None else sum(self._sizes[name] for name in group.chunks if needs[name] > 1)
        return Usage(
            files=len(group.paths),
            logical_bytes=group.logical_bytes,
            stored_bytes=stored,
            shared_bytes=shared,
            freed_bytes=None if shared is None else stored - shared + foreign,
            deduplicated_bytes=group.raw_bytes - sum(group.chunks.values()),
            chunks=len(group.chunks),
            foreign_files=len(group.foreign),
            foreign_bytes=foreign,
        )

    def warn(self) -> None:
        """Say which records are damaged, so that what they need is not known."""
        for group in (*self.groups.values(), self.others):
            for error in group.damage:
                _logger.warning("a file is not counted: %s", error)

    def _add_lists(self) -> None:
        """Count the reference lists of checkpoints as records: they go when these do."""
        owners = {
            keys.references_key(path.rpartition("/")[0]): group
            for group in self.groups.values()
            for path in group.paths
            if is_root(path)
        }
        for item in objects_below(self._store.objects, keys.REFERENCES) if owners else ():
            if item.key in owners:
                owners[item.key].record_bytes += item.size

    def _group(self, path: str) -> _Group:
        """The innermost of the groups that a file is in."""
        while path and path not in self.groups:
            path = path.rpartition("/")[0]
        return self.groups.get(path, self.others)

    def _note_damage(self, path: str, error: TierfsError) -> None:
        self._group(path).damage.append(error)

    def _add(self, path: str, info: ObjectInfo, manifest: Manifest) -> None:
        try:
            rows = (*(manifest.rows if manifest.indirect else ()), *expand_rows(self._store, manifest, path))
        except (CorruptionError, FormatError) as error:
            self._note_damage(path, error)
            return
        group = self._group(path)
        group.paths.add(path)
        group.logical_bytes += manifest.length
        group.record_bytes += info.size
        for row in rows:
            group.raw_bytes += row.raw_length
            group.chunks[row.name] = row.raw_length
            self._sizes[row.name] = row.stored_length
            for base in row.bases:
                group.chunks.setdefault(base, 0)


def _listed(store: Store, path: str) -> Iterator[tuple[str, ObjectInfo]]:
    """Path and object of every live record below a path, and of the path's own."""
    if path:
        with contextlib.suppress(NotFoundError):
            yield path, store.objects.head(keys.record_key(path))
    yield from live_records(store, path)


def _ask_sizes(store: Store, names: Collection[ChunkName]) -> dict[ChunkName, int]:
    """Stored sizes of chunk objects; 0 for one that is not there."""

    def head(name: ChunkName) -> tuple[ChunkName, int]:
        try:
            return name, store.objects.head(keys.chunk_key(name)).size
        except NotFoundError:
            return name, 0

    def listed(prefix: str) -> list[tuple[ChunkName, int]]:
        items = objects_below(store.objects, prefix)
        return [(wanted[item.key], item.size) for item in items if item.key in wanted]

    if len(names) <= HEADS_MAX:
        sizes = dict(transfers().map(head, names))
    else:
        wanted = {keys.chunk_key(name): name for name in names}
        found = transfers().map(listed, sorted({key[: len(keys.CHUNKS) + 3] for key in wanted}))
        sizes = dict.fromkeys(names, 0) | dict(itertools.chain.from_iterable(found))
    absent = [name for name, size in sizes.items() if not size]
    if absent:
        where = store.where(keys.chunk_key(absent[0]))
        _logger.warning(
            "%d chunks that files need are not there, like %s: `tierfs verify` names the files", len(absent), where
        )
    return sizes
