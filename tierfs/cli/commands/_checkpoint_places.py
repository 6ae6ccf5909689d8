"""Find the checkpoint that an argument of ``tierfs checkpoint`` names, in a store or in a plain directory."""

from __future__ import annotations

from tierfs.cli.files.places import StorePlace, find_store, store_place
from tierfs.digest import DigestKind
from tierfs.format.descriptor import Capabilities, Descriptor
from tierfs.objects.registry import connect
from tierfs.session import parse_url
from tierfs.session.url import Location, target_url
from tierfs.store import Store

_NOTHING_PROMISED = Capabilities(
    conditional_create=False,
    conditional_update=False,
    list_after_write=False,
    atomic_put=False,
    # No local tier keeps copies of its bytes.
    host_local=True,
)


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


def plain_store(location: Location) -> tuple[Store, str]:
    """Present the directory around a location as a store whose files tierfs did not write. Use it for reading only.

    Nothing is looked up yet.

    Args:
        location: A file or directory.

    Returns:
        The store and the path of the location in it. The store's root is the parent directory, if there is one.

    Raises:
        InvalidInputError: The filesystem is unknown, or it refuses its options.
    """
    above, _, name = location.path.rpartition("/")
    root, path = (above, name) if above else (location.path, "")
    descriptor = Descriptor("0" * 32, 0, DigestKind.XXH3_128, _NOTHING_PROMISED)
    store = Store(
        connect(location.protocol, root, location.options), descriptor, url=target_url(location.protocol, root)
    )
    return store, path
