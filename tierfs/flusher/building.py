"""A store's flusher put together from its parts.

Nothing here, nor what it imports, knows the object tier: a flusher answers before that is loaded.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tierfs.clock import Clock, SystemClock
from tierfs.errors import CapacityError, StoreError
from tierfs.flusher.access import Connect, Way
from tierfs.flusher.engine import FlushEngine
from tierfs.flusher.flusher import Flusher
from tierfs.host.ground import Faults, no_faults
from tierfs.host.host import Host
from tierfs.host.nvme.stored import ARENA_FILE
from tierfs.host.nvme.tier import NvmeTier, is_needed
from tierfs.host.slab.growth import TRANSIT_BYTES
from tierfs.host.slab.ram import RamTier

if TYPE_CHECKING:
    from tierfs.flusher.publish import StorePublisher

__all__ = ["build_engine"]

_logger = logging.getLogger("tierfs.flush")


def build_engine(
    host: Host,
    uuid: str,
    connect: Connect | None,
    *,
    ram_bytes: int,
    nvme_bytes: int,
    bandwidth: int,
    own: Way | None = None,
    publisher: StorePublisher | None = None,
    clock: Clock | None = None,
    faults: Faults = no_faults,
    fallbacks: Sequence[str] = (),
) -> FlushEngine:
    """Put a flusher together, to be run as a `Service`.

    Args:
        host: The host.
        uuid: The store's.
        connect: Makes what publishes to the store from what a client hands over, which is waited for.
        ram_bytes: The budget of the ram tier; 0 where that is off.
        nvme_bytes: The budget of the nvme tier; 0 where that is off.
        bandwidth: Bytes per second to the object tier; 0 for no bound.
        own: A way to the object tier to begin with, before a client hands one over.
        publisher: Publishes to the store where there is no ``connect``.
        clock: Where time comes from.
        faults: Called before and after each ordered step.
        fallbacks: Those of this process, to be counted.
    """
    clock = clock or SystemClock()

    def build() -> Flusher:
        nvme, problem = _nvme_tier(host.store_directory(uuid), nvme_bytes, clock, faults)
        ram = RamTier(host, uuid, budget_bytes=ram_bytes or TRANSIT_BYTES, clock=clock)
        flusher = Flusher(
            ram,
            nvme,
            clock=clock,
            random=random.random,
            bandwidth=bandwidth,
            faults=faults,
            connect=connect,
            nvme_problem=problem,
        )
        if problem:
            flusher.note("nvme_unavailable")
        for what in fallbacks:
            flusher.note(what)
        if publisher is not None:
            flusher.use(publisher)
        if own is not None:
            flusher.hand_over(own)
        return flusher

    return FlushEngine(build)


def _nvme_tier(directory: Path, budget_bytes: int, clock: Clock, faults: Faults) -> tuple[NvmeTier | None, str]:
    """The nvme tier, if it is on; and one that was switched off, while something in it is not in the object tier yet.

    Where there is none: why, if somebody asked for one.
    """
    arena = directory / ARENA_FILE
    if not budget_bytes and not arena.exists():
        return None, ""
    try:
        tier = NvmeTier(directory, budget_bytes=budget_bytes or arena.stat().st_size, clock=clock, faults=faults)
    except (CapacityError, StoreError) as error:
        if is_needed(directory):
            raise
        _logger.warning("there is no nvme tier, what is pending goes from memory to the object tier: %s", error)
        return None, str(error) if budget_bytes else ""
    if budget_bytes or tier.drafts():
        return tier, ""
    tier.close()
    return None, ""
