"""One piece of scrubbing: read, verify and heal some chunk objects of one prefix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierfs.clock import Pace
from tierfs.errors import CapacityError, FormatError, ReadOnlyError, StoreError
from tierfs.format import keys
from tierfs.objects.protocol import ObjectInfo, objects_below
from tierfs.store.maintenance.examine import examine, lacks_base
from tierfs.store.maintenance.repair_chunks import Healer
from tierfs.store.store import Store
from tierfs.threads import Pool

PIECE_BYTES = 4 << 30
PIECE_S = 20.0
_logger = logging.getLogger("tierfs.scrub")


@dataclass(frozen=True, slots=True)
class ScrubPiece:
    """Some chunk objects of one prefix, those with keys after ``after``: as many as can be read in ``seconds``."""

    prefix: str
    after: str = ""
    seconds: float = PIECE_S
    bandwidth: float | None = None
    concurrency: int = 8
    heal: bool = True


@dataclass(frozen=True, slots=True)
class ScrubDamage:
    """A damaged chunk object.

    Attributes:
        key: Key of the object.
        kind: Category of the error.
        problem: The problem, in words.
        healed: The source of the right bytes; empty if the object is still damaged.
    """

    key: str
    kind: str
    problem: str
    healed: str = ""


@dataclass(frozen=True, slots=True)
class ScrubPart:
    """The result of a piece.

    Attributes:
        prefix: The piece's prefix.
        after: Key of the last object that was verified; empty if the prefix is done.
        chunks: Objects that were verified.
        bytes: Bytes of these objects.
        keys: The keys between which all objects were checked: after the first, up to the last. Damage noted there
            before is obsolete.
        damage: The damage that was found.
    """

    prefix: str
    after: str
    chunks: int
    bytes: int
    keys: tuple[str, str]
    damage: tuple[ScrubDamage, ...] = ()


def scrub_piece(
    store: Store,
    piece: ScrubPiece,
    *,
    replicas: Sequence[Store] = (),
    progress: Callable[[int], object] = lambda _: None,
) -> ScrubPart:
    """Verify one piece. Changes only damaged objects that it can heal.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    bare = store.without_local_tiers()
    healer = Healer(store, replicas)
    ends = bare.clock.monotonic() + piece.seconds
    pace = Pace(bare.clock, piece.bandwidth)
    listed = objects_below(bare.objects, f"{keys.CHUNKS}{piece.prefix}/")
    left = sorted((item for item in listed if item.key > piece.after), key=lambda item: item.key)
    chunks = total = 0
    last = piece.after
    damage: list[ScrubDamage] = []

    def check(item: ObjectInfo) -> ScrubDamage | None:
        pace.take(item.size)
        found = _check(bare, item, healer if piece.heal else None)
        progress(item.size)
        return found

    with Pool(piece.concurrency) as pool:
        for start in range(0, len(left), 2 * piece.concurrency):
            if chunks and (bare.clock.monotonic() >= ends or total >= PIECE_BYTES):
                return ScrubPart(piece.prefix, last, chunks, total, (piece.after, last), tuple(damage))
            batch = left[start : start + 2 * piece.concurrency]
            damage += [found for found in pool.map(check, batch) if found is not None]
            chunks, total, last = chunks + len(batch), total + sum(item.size for item in batch), batch[-1].key
    return ScrubPart(piece.prefix, "", chunks, total, (piece.after, f"{keys.CHUNKS}{piece.prefix}0"), tuple(damage))


def _check(store: Store, item: ObjectInfo, healer: Healer | None) -> ScrubDamage | None:
    try:
        name = keys.parse_chunk_key(item.key, store.descriptor.digest_kind)
    except FormatError:
        return None  # not a chunk's key: repair moves the object aside
    found = examine(store, name, item.size)
    if found is None or found.is_sound or lacks_base(store, name, item.size):
        return None  # a missing base that a record needs is counted among the missing chunks
    _logger.error("%s", found.problem)  # it begins with the name of the object
    healed = ""
    if healer is not None:
        try:
            healed = healer.heal(name, item.size, found.raw_length)
        except (StoreError, ReadOnlyError, CapacityError) as error:
            _logger.warning("%s cannot be healed now: %s", store.where(item.key), error)
    return ScrubDamage(item.key, found.kind, found.problem, healed)
