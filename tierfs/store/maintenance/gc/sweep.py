"""Compare a store's chunk objects with the reached and the condemned ones, one prefix of digests after another.

The first byte of digests divides the work into 256 prefixes. Memory is bounded by the prefixes in progress.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format import keys
from tierfs.format.lease import Condemned, NameTable
from tierfs.objects.checksums import read_decoded
from tierfs.objects.protocol import objects_below
from tierfs.store.leases import LIST_BYTES_MAX
from tierfs.store.maintenance.gc.name_set import NameSet
from tierfs.store.maintenance.gc.report import GcReport
from tierfs.store.store import Store
from tierfs.threads import Pool

PREFIXES = tuple(f"{number:02x}" for number in range(256))


@dataclass(slots=True)
class PrefixChunks:
    """The chunk objects of one prefix: their encoded names, sizes and times.

    Attributes:
        number: The first byte of their digests.
        names: Encoded names, laid end to end.
        sizes: Bytes of the objects, in the same order.
        times_ns: When each was put, by the object tier's clock.
    """

    number: int
    names: bytearray = field(default_factory=bytearray)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    times_ns: array[int] = field(default_factory=lambda: array("q"))


class CondemnedLists:
    """The published condemned lists. The chunks of a ripe list may be deleted if they are still unreached.

    Args:
        width: Bytes of an encoded name.

    Attributes:
        damaged: Epochs of unreadable lists. Nothing is deleted for them.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._ripe: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self._waiting: dict[int, list[bytes]] = defaultdict(list)
        self.damaged: list[int] = []

    def add(self, epoch: int, data: bytes, *, ripe: bool) -> None:
        """Add a list: its names sorted by digest, laid end to end."""
        start, width = 0, self._width
        while start < len(data):
            first, end = data[start], start
            while end < len(data) and data[end] == first:
                end += width
            piece = data[start:end]
            if ripe:
                self._ripe[first].append((epoch, piece))
            else:
                self._waiting[first].append(piece)
            start = end

    def ripe(self, prefix: int) -> dict[bytes, int]:
        """Return the chunks that may be deleted if unreached, each with the epoch of a list that names it."""
        return {name: epoch for epoch, piece in self._ripe.get(prefix, ()) for name in self._split(piece)}

    def waiting(self, prefix: int) -> set[bytes]:
        """Return the chunks that were condemned too recently to be deleted."""
        return {name for piece in self._waiting.get(prefix, ()) for name in self._split(piece)}

    def _split(self, piece: bytes) -> Iterator[bytes]:
        return (piece[at : at + self._width] for at in range(0, len(piece), self._width))


def read_lists(store: Store, ripe: Mapping[int, bool]) -> CondemnedLists:
    """Read condemned lists.

    Args:
        store: The store.
        ripe: By epoch, whether the list was published long enough ago.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    width = keys.name_bytes(store.descriptor.digest_kind)
    lists = CondemnedLists(width)
    for epoch, is_ripe in sorted(ripe.items()):
        key = keys.condemned_key(epoch)
        try:
            listed, _, _ = read_decoded(store.objects, key, LIST_BYTES_MAX, Condemned.decode, store.where(key))
            if listed.epoch != epoch or listed.digest_kind is not store.descriptor.digest_kind:
                raise FormatError(
                    f"{store.where(key)}: a condemned list of another epoch or with another kind of digest", path=key
                )
        except NotFoundError:
            continue
        except (CorruptionError, FormatError):
            lists.damaged.append(epoch)
            continue
        assert isinstance(listed.names, NameTable)
        lists.add(epoch, listed.names.data, ripe=is_ripe)
    return lists


def list_prefixes(store: Store, pool: Pool) -> Iterator[PrefixChunks]:
    """Yield the chunk objects of a store, prefix by prefix.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    kind = store.descriptor.digest_kind

    def listed(prefix: str) -> PrefixChunks:
        found = PrefixChunks(int(prefix, 16))
        for item in objects_below(store.objects, f"{keys.CHUNKS}{prefix}/"):
            try:
                name = keys.parse_chunk_key(item.key, kind)
            except FormatError:
                continue  # not a chunk's key
            found.names += name.encode()
            found.sizes.append(item.size)
            found.times_ns.append(item.modified_ns)
        return found

    return pool.map(listed, PREFIXES)


def sort_prefix(
    prefix: PrefixChunks,
    reached: NameSet,
    lists: CondemnedLists,
    report: GcReport,
    *,
    width: int,
    is_old: Callable[[int], bool],
) -> tuple[list[tuple[bytes, int, int]], list[tuple[bytes, int]]]:
    """Sort the chunk objects of a prefix by the action that gc takes.

    Args:
        prefix: The objects.
        reached: The needed chunks.
        lists: The condemned chunks.
        report: Counts the objects that stay: those that a record needs, those that were condemned too recently, and
            unreached ones that are too young, because a manifest in flight may name them.
        width: Bytes of an encoded name.
        is_old: Returns whether an object that was put at this time may be condemned.

    Returns:
        The unreached objects that may be deleted: encoded name, size, and epoch of the list that names it. Then those
        that are in no list and old enough for one: encoded name and size.
    """
    dead, doomed = [], []
    needed = reached.contains(prefix.names)
    ripe, waiting = lists.ripe(prefix.number), lists.waiting(prefix.number)
    for index, (size, time_ns) in enumerate(zip(prefix.sizes, prefix.times_ns, strict=True)):
        name = bytes(prefix.names[index * width : (index + 1) * width])
        if needed[index]:
            report.reached.add(1, size)
        elif (epoch := ripe.get(name)) is not None:
            dead.append((name, size, epoch))
        elif name in waiting:
            report.waiting.add(1, size)
        elif is_old(time_ns):
            doomed.append((name, size))
        else:
            report.young.add(1, size)
    return dead, doomed
