"""Which checkpoint an argument of ``tierfs checkpoint`` names: in a store, or in a directory that belongs to none."""

from __future__ import annotations

from dataclasses import dataclass

from tierfs.cli._places import find_store, store_place
from tierfs.dcp.checkpoint import Checkpoint, open_checkpoint
from tierfs.dcp.plainstore import plain_store
from tierfs.store import Store, parse_url

__all__ = ["Source", "source_of"]


@dataclass(frozen=True, slots=True)
class Source:
    """A path to read from.

    Attributes:
        url: How to name it.
        store: That holds it, or what stands for one.
        path: There.
    """

    url: str
    store: Store
    path: str

    def open(self, rank: int | None) -> Checkpoint:
        """The checkpoint there. Raises as `open_checkpoint` does."""
        return open_checkpoint(self.store, self.path, rank=rank)


def source_of(text: str) -> Source:
    """What an argument names, also outside of any store where it does not begin with ``tierfs``.

    Raises:
        InvalidInputError: The argument is no good.
        StoreNotFoundError: It begins with ``tierfs``, and no store holds it.
        TierfsError: The store could not be opened.
    """
    place = store_place(text) if text.startswith("tierfs:") else find_store(text)
    if place is not None:
        return Source(place.url, place.store, place.path)
    location = parse_url(text)
    return Source(location.url, *plain_store(location))
