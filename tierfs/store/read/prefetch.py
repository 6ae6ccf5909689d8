"""Copy chunks into a local tier before they are read, or drop clean copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from tierfs.buffers import buffers
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError, InvalidInputError
from tierfs.store.read.reader import open_entry
from tierfs.store.store import Store
from tierfs.store.tree.listing import Entry, find, stat
from tierfs.threads import transfers
from tierfs.units import format_bytes

if TYPE_CHECKING:
    from tierfs.host.slab.segment import Slot
    from tierfs.host.tiers import Tiers

TIERS = ("ram", "nvme")
BATCH_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class _Copy:
    """A chunk, or a piece of a file that tierfs did not write."""

    name: bytes
    length: int
    read: Callable[[memoryview], None]


def prefetch(store: Store, path: str, tier: str = "ram", *, progress: Callable[[int], None] | None = None) -> int:
    """Copy the chunks of a file, or of everything below a directory, into a local tier.

    Copies in the ram tier last as long as the process that has them. After the call, copies of this process's reads
    replace other copies only when the budget is used up.

    Args:
        tier: ``"ram"`` or ``"nvme"``.
        progress: Called after each batch with the bytes of its chunks, which are in the tier.

    Returns:
        The bytes of all chunks, which are all in the tier.

    Raises:
        InvalidInputError: The tier does not exist, or is switched off.
        NotFoundError: Nothing is at ``path``.
        CapacityError: The chunks do not fit. A part of them is in the tier.
        CorruptionError, StoreError: A chunk could not be read.
    """
    tiers = _tiers(store, tier)
    pieces = iter(_pieces(store, path))
    # A batch is in the ram tier all at once, beside the chunks that other threads and processes fill in.
    batch_chunks = max(1, min(BATCH_CHUNKS, tiers.ram.budget_bytes // (4 * CHUNK_BYTES)))
    brought: list[_Copy] = []
    while batch := list(islice(pieces, batch_chunks)):
        tiers.cache.shares_reads = True
        _bring_all(tiers, batch, tier)
        brought += batch
        if progress is not None:
            progress(sum(piece.length for piece in batch))
        if _missing(tiers, brought[:1], tier):
            break  # later chunks evicted the first one: the tier is full
    total = sum(piece.length for piece in brought)
    lost = set(_missing(tiers, brought, tier))
    if lost:
        lies = sum(piece.length for piece in brought if piece.name not in lost)
        raise _full(tier, f"now holds {format_bytes(lies)} of {format_bytes(total)}")
    return total


def evict(store: Store, path: str, tier: str = "nvme") -> int:
    """Drop clean copies of a file, or of everything below a directory, from a local tier. Dirty chunks stay.

    Returns:
        The number of bytes dropped. Chunks that were not in the tier do not count.

    Raises:
        InvalidInputError: The tier does not exist, or is switched off.
        NotFoundError: Nothing is at ``path``.
    """
    return _tiers(store, tier).cache.evict([piece.name for piece in _pieces(store, path)] if path else None, tier)


def is_held(store: Store, path: str) -> bool:
    """Return whether the local tiers of this host seem to hold every chunk at or below ``path``. Raises as `find`."""
    tiers = store.tiers
    return tiers is not None and all(tiers.sources.holding([piece.name]) for piece in _pieces(store, path))


def _bring_all(tiers: Tiers, batch: Sequence[_Copy], tier: str) -> None:
    """Copy pieces into a tier. If the ram tier has no room for all at once, copy as many at a time as fit."""
    missing = _missing(tiers, batch, tier)
    while missing:
        slots = transfers().map(lambda piece: _bring(tiers, piece), missing.values())
        if tier == "nvme":
            tiers.cache.backfill([slot for slot in slots if slot is not None])
        left = _missing(tiers, batch, tier)
        if len(left) >= len(missing):
            if tier == "nvme" and any(slots):
                text = "no chunk reached the nvme tier: `tierfs status` says whether the flusher has one"
                raise CapacityError(text, tier=tier)
            raise _full("ram", f"has no room for {len(left)} more chunks")
        missing = left


def _bring(tiers: Tiers, piece: _Copy) -> Slot | None:
    """Copy one piece into the ram tier. Return its slot, or None without room."""
    with buffers().lend(piece.length) as data:
        piece.read(data)
        return tiers.ram.find(piece.name) or tiers.cache.insert(piece.name, data)


def _missing(tiers: Tiers, pieces: Sequence[_Copy], tier: str) -> dict[bytes, _Copy]:
    return {piece.name: piece for piece in pieces if not tiers.sources.holds(piece.name, tier)}


def _full(tier: str, what: str) -> CapacityError:
    return CapacityError(f"the {tier} tier {what}: raise {tier}=, or prefetch less", tier=tier)


def _tiers(store: Store, tier: str) -> Tiers:
    if tier not in TIERS:
        raise InvalidInputError(f"{tier!r} is not a local tier: choose 'ram' or 'nvme'")
    if store.tiers is None or (tier == "nvme" and not store.tiers.has_nvme):
        why = store.unused or f"it is switched off, give it room with {tier}="
        raise InvalidInputError(f"{store.url} has no {tier} tier here: {why}")
    return store.tiers


def _pieces(store: Store, path: str) -> Iterator[_Copy]:
    top = stat(store, path)
    entries = find(store, path) if top.is_directory else [top]
    for entry in entries:
        if not entry.is_directory:
            yield from _pieces_of(store, entry)


def _pieces_of(store: Store, entry: Entry) -> Iterator[_Copy]:
    reader = open_entry(store, entry)
    for number, chunk in enumerate(reader.requests()):
        read = partial(reader.read_chunk, number)
        yield _Copy(chunk.name, chunk.length, lambda data, read=read: read([(0, data)]))  # type: ignore[misc]
