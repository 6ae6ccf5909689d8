"""Find the checkpoint that an argument of ``tierfs checkpoint`` names, in a store or in a plain directory."""

from __future__ import annotations

from tierfs.checkpoint.plain_store import plain_store
from tierfs.cli.files.places import StorePlace, find_store, store_place
from tierfs.session import parse_url


def source_of(text: str) -> StorePlace:
    """Return the place that an argument names. It may be outside any store unless it begins with ``tierfs:``.

    Raises:
        InvalidInputError: The argument is invalid.
        StoreNotFoundError: It begins with ``tierfs:``, and no store contains it.
        TierfsError: The store could not be opened.
    """
    place = store_place(text) if text.startswith("tierfs:") else find_store(text)
    if place is not None:
        return place
    location = parse_url(text)
    return StorePlace(location.url, *plain_store(location))
