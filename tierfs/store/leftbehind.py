"""What this host has pending for a store that is not where it was: it lies on something that is not mounted, perhaps."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from tierfs.clock import SystemClock
from tierfs.errors import StoreError, TierfsError
from tierfs.local.host import Host
from tierfs.local.nvmereader import NvmeReader
from tierfs.local.place import PLACE_FILE, places_in
from tierfs.local.ram import RamTier
from tierfs.local.slab import SlotState

__all__ = ["check_nothing_is_left"]


def check_nothing_is_left(state: Path, places: Collection[str]) -> None:
    """See that nothing is pending for a store at one of these places, where none is found.

    Args:
        state: The state directory.
        places: See `ObjectTier.places`.

    Raises:
        StoreError: Something is, or that cannot be told.
    """
    for kept in sorted((state / "stores").glob(f"*/{PLACE_FILE}")):
        here = sorted(set(places).intersection(places_in(kept)))
        if here and _is_pending(state, kept.parent):
            where = here[0].partition(":")[2]
            raise StoreError(
                f"this host has changes pending for the store that was at {where}, and none is there now: mount it, or bring it "
                f"back, and they get there; to give them up, remove {kept.parent} while no process uses it",
                transient=True,
                path=where,
            )


def _is_pending(state: Path, directory: Path) -> bool:
    """Whether something is, as far as it can be looked up."""
    try:
        nvme, ram = NvmeReader(directory), RamTier(Host(state), directory.name, budget_bytes=0, clock=SystemClock())
        with contextlib.closing(nvme), contextlib.closing(ram):
            return bool(ram.drafts((SlotState.SEALED, SlotState.CONFLICT)) or nvme.drafts_below("", conflicts=True))
    except TierfsError:
        return True  # what cannot be looked at may well be
