"""Scrub a local tier: verify every copy of a chunk that this host has, continuing where the last run ended.

A damaged copy is quarantined, and the next reader takes the bytes from the next tier. The report says whether the
object tier has the bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tierfs.buffers import buffers
from tierfs.checked_json import parse_object
from tierfs.clock import Pace
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, StoreError
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.host.chunk_sources import ChunkRequest, check_copies
from tierfs.store.read.fetch import fetch
from tierfs.store.read.lookup import find_chunk
from tierfs.store.store import Store

_logger = logging.getLogger("tierfs.scrub")


@dataclass(frozen=True, slots=True)
class LocalDamage:
    """A damaged copy.

    Attributes:
        digest: Digest of the chunk, as hexadecimal digits.
        problem: The problem, in words.
        elsewhere: Whether the object tier has the bytes, verified. If not, a draft that needs them is lost.
    """

    digest: str
    problem: str
    elsewhere: bool


@dataclass(slots=True)
class LocalReport:
    """The result of a run."""

    tier: str
    chunks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    is_whole_round: bool = False
    damage: list[LocalDamage] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether no bytes were lost."""
        return all(each.elsewhere for each in self.damage)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.is_sound}


def scrub_local(
    store: Store,
    tier: str,
    *,
    max_seconds: float | None = None,
    bandwidth: float | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> LocalReport:
    """Verify a local tier's copies of chunks, from where the last run ended.

    Args:
        tier: ``"ram"`` or ``"nvme"``.
        max_seconds: End after this time; ``None`` for one round.
        bandwidth: Bytes per second at most; ``None`` for no limit.
        progress: Called with the number of bytes verified.

    Raises:
        InvalidInputError: This host has no such tier.
    """
    tiers = store.tiers
    if tiers is None or (tier == "nvme" and not tiers.has_nvme):
        raise InvalidInputError(f"{store.url} has no {tier} tier on this host: give it a budget", path=store.url)
    place = tiers.nvme.directory / f"scrub-{tier}.json"
    report, clock = LocalReport(tier), store.clock
    begun, pace = clock.monotonic(), Pace(clock, bandwidth)
    after = b""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        after = bytes.fromhex(parse_object(place.read_bytes(), str(place))["after"])
    for name, length in _from(after, tiers.sources.tier(tier).chunks()):
        if max_seconds is not None and clock.monotonic() - begun >= max_seconds:
            break
        pace.take(length)
        problem = check_copies(tiers.sources.tier(tier), ChunkRequest(name, length))
        if problem is not None:
            report.chunks += 1
            report.bytes += length
            progress(length)
        if problem:
            report.damage.append(LocalDamage(name[1:].hex(), problem, _is_elsewhere(store, name, length)))
        after = name
    else:
        report.is_whole_round, after = True, b""
    with contextlib.suppress(OSError):  # without the file, the next run begins where this one did
        place.write_text(json.dumps({"after": after.hex()}))
    report.seconds = clock.monotonic() - begun
    return report


def _from(place: bytes, copies: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """Yield the names and lengths after ``place``, then the others."""
    before = []
    for each in copies:
        if each[0] > place:
            yield each
        else:
            before.append(each)
    yield from before


def _is_elsewhere(store: Store, name: bytes, length: int) -> bool:
    """Return whether the object tier has a chunk, verified."""
    bare = store.without_local_tiers()
    try:
        row = find_chunk(bare, Row(ChunkName(name[1:]), length, 0), store.url)
        with buffers().lend(length) as out:
            fetch(bare, row, [(0, out)], store.url)
    except (CorruptionError, FormatError, StoreError):
        return False
    return True
