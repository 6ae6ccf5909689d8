"""Build a store's flusher from its parts.

This module and its imports do not load the object tier, because a flusher answers its clients before that is loaded.
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
    """Build the engine of a flusher, to be run by a `Service`.

    Args:
        host: The host.
        uuid: The store's uuid.
        connect: Makes the publisher from the `Way` that a client hands over. The flusher waits for a client's way
            unless ``own`` is given.
        ram_bytes: The budget of the ram tier; 0 if that is off.
        nvme_bytes: The budget of the nvme tier; 0 if that is off.
        bandwidth: Most bytes of encoded chunks per second to the object tier; 0 for no bound.
        own: A way to the object tier that is used until a client hands over a better one.
        publisher: Publishes to the store if there is no ``connect``.
        clock: The source of time.
        faults: Called before and after each ordered step.
        fallbacks: Counters to increment at the start: the fallbacks of this process so far.
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
    """Open the nvme tier if it is on, or if it was switched off and still has drafts.

    Returns:
        The tier or None, and the reason why a tier that is on could not be opened, else an empty string.
    """
    arena = directory / ARENA_FILE
    if not budget_bytes and not arena.exists():
        return None, ""
    try:
        tier = NvmeTier(directory, budget_bytes=budget_bytes or arena.stat().st_size, clock=clock, faults=faults)
    except (CapacityError, StoreError) as error:
        if is_needed(directory):
            raise
        _logger.warning("the nvme tier cannot be used; pending changes go from memory to the object tier: %s", error)
        return None, str(error) if budget_bytes else ""
    if budget_bytes or tier.drafts():
        return tier, ""
    tier.close()
    return None, ""
