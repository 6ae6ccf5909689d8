"""Every chunk object of a store beside what is reached and what is condemned, one prefix of digests after another.

Work is cut by the first byte of digests, 256 prefixes: memory is that of the prefixes which are looked at at once.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format import keys
from tierfs.format.lease import Condemned, NameTable
from tierfs.objects.protocol import objects_below
from tierfs.store.leases import LIST_BYTES_MAX
from tierfs.store.maintenance.gc.name_set import NameSet
from tierfs.store.maintenance.pool import Pool
from tierfs.store.store import Store

__all__ = [
    "PREFIXES",
    "CondemnedLists",
    "PrefixChunks",
    "Sorted",
    "list_prefixes",
    "read_lists",
    "sort_prefix",
]

PREFIXES = tuple(f"{number:02x}" for number in range(256))

Found: TypeAlias = tuple[bytes, int]
"""An encoded name, and the size of its object."""


@dataclass(slots=True)
class PrefixChunks:
    """The chunk objects of one prefix: their encoded names, sizes and times.

    Attributes:
        number: The first byte of their digests.
        names: Laid end to end.
        sizes: In the same order.
        times_ns: When each was put, by the object tier's clock.
    """

    number: int
    names: bytearray = field(default_factory=bytearray)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    times_ns: array[int] = field(default_factory=lambda: array("q"))


class CondemnedLists:
    """The lists that are published, each with whether what it names may be deleted if it is unreached still.

    Args:
        width: Bytes of an encoded name.

    Attributes:
        damaged: Lists that cannot be read. Nothing is deleted for what they may name.
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
        """What may be deleted if nothing reaches it, with the epoch of the list that says so."""
        return {name: epoch for epoch, piece in self._ripe.get(prefix, ()) for name in self._split(piece)}

    def waiting(self, prefix: int) -> set[bytes]:
        """What was condemned too short a while ago."""
        return {name for piece in self._waiting.get(prefix, ()) for name in self._split(piece)}

    def _split(self, piece: bytes) -> Iterator[bytes]:
        return (piece[at : at + self._width] for at in range(0, len(piece), self._width))


@dataclass(slots=True)
class Sorted:
    """The chunk objects of one prefix by what is to become of them.

    Attributes:
        reached: How many objects and bytes something needs.
        dead: Unreached, and condemned long enough ago, each with its list's epoch.
        doomed: Unreached, in no list, and old enough for one.
        waiting: How many objects and bytes are condemned, and wait.
        young: How many are unreached and too young to be condemned: they may be on their way into a manifest.
    """

    reached: tuple[int, int] = (0, 0)
    dead: list[tuple[bytes, int, int]] = field(default_factory=list)
    doomed: list[Found] = field(default_factory=list)
    waiting: tuple[int, int] = (0, 0)
    young: tuple[int, int] = (0, 0)


def read_lists(store: Store, ripe: Mapping[int, bool]) -> CondemnedLists:
    """Read condemned lists.

    Args:
        store: The store.
        ripe: Their epochs, each with whether it was published long enough ago.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    width = keys.name_bytes(store.descriptor.digest_kind)
    lists = CondemnedLists(width)
    for epoch, is_ripe in sorted(ripe.items()):
        key = keys.condemned_key(epoch)
        try:
            data, _ = store.objects.read(key, LIST_BYTES_MAX)
            listed = Condemned.decode(data, store.where(key))
            if listed.epoch != epoch or listed.digest_kind is not store.descriptor.digest_kind:
                raise FormatError(f"{store.where(key)}: a list of another epoch or with other digests", path=key)
        except NotFoundError:
            continue
        except (CorruptionError, FormatError):
            lists.damaged.append(epoch)
            continue
        assert isinstance(listed.names, NameTable)
        lists.add(epoch, listed.names.data, ripe=is_ripe)
    return lists


def list_prefixes(store: Store, pool: Pool) -> Iterator[PrefixChunks]:
    """The chunk objects of a store, prefix by prefix.

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
                continue  # it belongs to nothing
            found.names += name.encode()
            found.sizes.append(item.size)
            found.times_ns.append(item.modified_ns)
        return found

    return pool.map(listed, PREFIXES)


def sort_prefix(
    prefix: PrefixChunks,
    reached: NameSet,
    lists: CondemnedLists,
    *,
    width: int,
    is_old: Callable[[int], bool],
) -> Sorted:
    """Say of each chunk object of a prefix what is to become of it.

    Args:
        prefix: The objects.
        reached: What is needed.
        lists: What is condemned.
        width: Bytes of an encoded name.
        is_old: Whether an object that was put at this time may be condemned.
    """
    found = Sorted()
    needed = reached.contains(prefix.names)
    ripe, waiting = lists.ripe(prefix.number), lists.waiting(prefix.number)
    counts = {"reached": [0, 0], "waiting": [0, 0], "young": [0, 0]}
    for index, (size, time_ns) in enumerate(zip(prefix.sizes, prefix.times_ns, strict=True)):
        name = bytes(prefix.names[index * width : (index + 1) * width])
        if needed[index]:
            place = "reached"
        elif (epoch := ripe.get(name)) is not None:
            found.dead.append((name, size, epoch))
            continue
        elif name in waiting:
            place = "waiting"
        elif is_old(time_ns):
            found.doomed.append((name, size))
            continue
        else:
            place = "young"
        counts[place][0] += 1
        counts[place][1] += size
    found.reached, found.waiting, found.young = (
        (counts[place][0], counts[place][1]) for place in ("reached", "waiting", "young")
    )
    return found
