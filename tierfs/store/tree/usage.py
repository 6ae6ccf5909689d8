"""The sizes of files: their own bytes, the bytes of the objects they need, and how many of those are shared.

Only the object tier is counted, not the changes that this host has not published yet. A chunk object counts once,
whether manifests name it as a chunk or as a base.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import posixpath
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from tierfs.errors import CorruptionError, FormatError, NotFoundError, TierfsError
from tierfs.format import keys
from tierfs.format.checkpoint import ROOT, is_part
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest
from tierfs.objects.protocol import ObjectInfo, objects_below
from tierfs.store.announced_saves import AnnouncedSaves
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.tree.listing import stat
from tierfs.store.tree.records import observe_published
from tierfs.store.tree.references import is_root
from tierfs.store.tree.walk import foreign_objects, live_records, read_manifests
from tierfs.threads import transfers

BATCH = 500
# Up to this many sizes take one request each. For more, all chunks are listed, a thousand in each request.
HEADS_MAX = 1000
_logger = logging.getLogger("tierfs.store")


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts over a set of files.

    Attributes:
        files: Number of files that tierfs wrote.
        logical_bytes: Sum of the lengths of these files.
        stored_bytes: Bytes of the objects that these files need: each chunk object once, bases included, the manifests,
            and the reference lists of checkpoints.
        shared_bytes: The part of ``stored_bytes`` in chunk objects that other files of the store need too.
            None if not asked for.
        new_bytes: The part of ``stored_bytes`` that no directory asked for before this one needs. None if not asked for.
        freed_bytes: The bytes that deleting the files frees: ``stored_bytes`` without ``shared_bytes``, plus
            ``foreign_bytes``. None if not asked for.
        deduplicated_bytes: Raw bytes that were not stored because an identical chunk was.
        chunks: Number of chunk objects that these files need.
        unnamed_files: Number of shard files that neither a checkpoint nor an announced save names. A save that another one
            replaced, that was killed, or that is under way wrote them. 0 if not asked for.
        unnamed_bytes: Sum of the lengths of these files.
        foreign_files: Number of files that tierfs did not write.
        foreign_bytes: Sum of the lengths of the foreign files.
    """

    files: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0
    shared_bytes: int | None = None
    new_bytes: int | None = field(default=None, compare=False)
    freed_bytes: int | None = None
    deduplicated_bytes: int = 0
    chunks: int = 0
    unnamed_files: int = 0
    unnamed_bytes: int = 0
    foreign_files: int = 0
    foreign_bytes: int = 0


@dataclass(slots=True)
class _FileGroup:
    """Files that are counted together.

    Attributes:
        paths: Paths of the files that tierfs wrote.
        logical_bytes: Sum of the lengths of these files.
        raw_bytes: Sum of the raw lengths of their chunks.
        record_bytes: Bytes of their manifests and reference lists.
        parts: Lengths of the shard files among them, by directory and name.
        chunks: The chunk objects that they need, with raw lengths. The length is 0 for an object that is only a base.
        foreign: Sizes of the files that tierfs did not write.
        damage: Errors of the records that could not be read.
    """

    paths: set[str] = field(default_factory=set)
    logical_bytes: int = 0
    raw_bytes: int = 0
    record_bytes: int = 0
    parts: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    chunks: dict[ChunkName, int] = field(default_factory=dict)
    foreign: list[int] = field(default_factory=list)
    damage: list[TierfsError] = field(default_factory=list)


def usage(store: Store, path: str = "", *, shared: bool = True) -> Usage:
    """Count the bytes of a file, a directory or the whole store, as `usages` does. A damaged record is an error.

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
    unnamed = _unnamed(store, counts.groups[path].parts)
    return replace(counts.usage(path), unnamed_files=len(unnamed), unnamed_bytes=sum(unnamed))


def _unnamed(store: Store, parts: Mapping[str, Mapping[str, int]]) -> list[int]:
    """Return the lengths of the shard files that neither a checkpoint nor an announced save names."""
    saves = AnnouncedSaves(store)

    def lengths(directory: str) -> list[int]:
        try:
            named: AbstractSet[str] = saves.waited_for(directory)
            root = observe_published(store, keys.inside(directory, ROOT))
            named = named | saves.files(root) if root.manifest is not None else named
        except FormatError:
            return []  # torch's own metadata
        except CorruptionError as error:
            _logger.warning("unnamed shard files are not counted: %s", error)
            return []
        return [length for name, length in parts[directory].items() if name not in named]

    return list(itertools.chain.from_iterable(transfers().map(lengths, list(parts))))


def usages(store: Store, paths: Sequence[str], *, shared: bool = True) -> dict[str, Usage]:
    """Count the bytes of each of several directories. A file in nested directories counts for the innermost.

    This takes a listing of the directories' common parent, and a request for each record in them that this host does
    not know. With ``shared``, all records of the store are listed and read instead. The size of a base that no counted
    record names as a chunk takes one more request. For many such bases, all chunks are listed.

    Args:
        paths: Relative to the store's root. A path where nothing is has zero counts.
        shared: Whether to count the bytes shared with all other files of the store, and the bytes that deleting each
            would free.

    Raises:
        StoreError, ReadOnlyError: The object tier failed. A damaged record is skipped with a warning.
    """
    counts = _Counts(store, paths, shared=shared)
    counts.warn()
    return {path: replace(counts.usage(path), new_bytes=counts.new_bytes(path)) for path in paths}


class _Counts:
    """The objects that each of several paths needs, and the rest of the store. The constructor sends all requests."""

    def __init__(self, store: Store, paths: Sequence[str], *, shared: bool) -> None:
        self._store = store
        self.groups = {path: _FileGroup() for path in paths}
        self.others = _FileGroup()
        self._sizes: dict[ChunkName, int] = {}
        self._needs: Counter[ChunkName] | None = None
        self._counted: set[ChunkName] = set()
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

    def new_bytes(self, path: str) -> int:
        """Count the bytes that the paths of earlier calls do not need."""
        group = self.groups[path]
        new, self._counted = group.chunks.keys() - self._counted, self._counted | group.chunks.keys()
        return group.record_bytes + sum(map(self._sizes.__getitem__, new))

    def warn(self) -> None:
        """Log the damaged records, whose files are not counted."""
        for group in (*self.groups.values(), self.others):
            for error in group.damage:
                _logger.warning("a file is not counted: %s", error)

    def _add_lists(self) -> None:
        """Count the reference lists of checkpoints as records: they are deleted with the checkpoints."""
        owners = {
            keys.references_key(path.rpartition("/")[0]): group
            for group in self.groups.values()
            for path in group.paths
            if is_root(path)
        }
        for item in objects_below(self._store.objects, keys.REFERENCES) if owners else ():
            if item.key in owners:
                owners[item.key].record_bytes += item.size

    def _group(self, path: str) -> _FileGroup:
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
        if is_part(manifest.metadata):
            directory, _, name = path.rpartition("/")
            group.parts[directory][name] = manifest.length
        group.record_bytes += info.size
        for row in rows:
            group.raw_bytes += row.raw_length
            group.chunks[row.name] = row.raw_length
            self._sizes[row.name] = row.stored_length
            for base in row.bases:
                group.chunks.setdefault(base, 0)


def _listed(store: Store, path: str) -> Iterator[tuple[str, ObjectInfo]]:
    """Yield path and object of the record at a path, if it exists, and of every live record below."""
    if path:
        with contextlib.suppress(NotFoundError):
            yield path, store.objects.head(keys.record_key(path))
    yield from live_records(store, path)


def _ask_sizes(store: Store, names: Collection[ChunkName]) -> dict[ChunkName, int]:
    """Return the stored sizes of chunk objects, 0 for a missing one."""

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
            "%d chunks that files need are missing, for example %s: `tierfs verify` names the files", len(absent), where
        )
    return sizes
